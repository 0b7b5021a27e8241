"""report.html of an evaluation: what is missed, at how many false calls, from which size on, and how sure that is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weldtrain.metrics.operating_point import Rule, exactly, verified
from weldtrain.metrics.pod import Pod
from weldtrain.telemetry import report
from weldtrain.telemetry.charts import short, xy_chart

_POINTS = 120  # of a drawn curve
_BEYOND = 1.3  # times the smallest and the largest defect are where it ends


def write(
    path: str | os.PathLike[str], told: Mapping[str, Any], metrics: Mapping[str, Any], pods: Mapping[str, Pod],
    curves: Mapping[str, Mapping[str, np.ndarray]], gallery: Mapping[str, Sequence[Mapping[str, Any]]],
    made_of: Mapping[str, str], *, split: str, pictures: int, confidence: float,
) -> None:
    """`told` is the summary's `inspection`, `metrics` those of `evaluate_detections`; `pods` and `curves`, of `pr_curves`, by
    class; `gallery` lists of `image class text path`."""
    report.render(
        "evaluate.html", path, title=f"What escapes: {split}", split=split, pictures=pictures, told=told, metrics=metrics,
        gallery=gallery, made_of=made_of, bound=exactly(confidence), rule=Rule(**told["rule"]).told(),
        verdict=_verdict(told, split, confidence), in_sample=in_sample(told), promises=promises(told, confidence),
        pod_charts={name: _pod_chart(pod, told["classes"][name], told["unit"]) for name, pod in pods.items()},
        pr_charts={name: _pr_chart(curve, told["classes"][name]) for name, curve in curves.items()},
        calibration=_calibration_chart(told["calibration"]), between=between, percent=percent, found_at=found_at,
        number=number,
        names=[*told["names"], "background"],
    )


def found_at(of_class: Mapping[str, Any], figure: str, with_interval: bool = False) -> str:
    """A size of the POD curve; where it lies outside of the sizes that were there only that, since the curve is a guess there."""
    size, ends = of_class[figure], of_class.get(f"{figure}_interval")
    if size is None:
        return "n/a"

    def shown(size: float | None) -> str:
        smallest, largest = of_class["smallest"], of_class["largest"]
        if size is None or size > largest:
            return f"> {short(largest)}"
        return f"< {short(smallest)}" if size < smallest else short(size)

    return shown(size) + (_in_brackets(map(shown, ends)) if with_interval and ends else "")


def percent(share: float | None) -> str:
    """One decimal, of less than a thousandth one digit, or n/a."""
    return "n/a" if share is None else f"{share:.1%}" if share == 0 or share >= 1e-3 else f"{100 * share:.1g}%"


def number(value: float | None, digits: int = 3) -> str:
    """With so many decimals, or n/a."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def between(bounds: Sequence[float] | None, as_percent: bool = False) -> str:
    """An interval in brackets after its figure; "" where there is none."""
    return "" if bounds is None else _in_brackets(percent(b) if as_percent else short(b) for b in bounds)


def _in_brackets(ends: Iterable[str]) -> str:
    return " (" + " to ".join(ends).replace(" ", "\N{NO-BREAK SPACE}") + ")"


def _verdict(told: Mapping[str, Any], split: str, confidence: float) -> str:
    of_all = told["all"]
    if not of_all["defects"]:
        return f"Split {split} shows no defect: nothing can be missed in it."
    return (f"{of_all['missed']} of {of_all['defects']} defects missed ({percent(of_all['missed_share'])}; with "
            f"{exactly(confidence)} confidence at most {percent(of_all['missed_at_most'])}), at "
            f"{of_all['false_calls_per_picture']:.2f} false calls per picture.")


def in_sample(told: Mapping[str, Any]) -> str:
    """That what is judged here had a part in choosing the thresholds; "" where it had none."""
    if not told["chose"]:
        return ""
    if told["chose"] == told["shown"]:
        return ", which is judged here: another one has to verify them"
    return f", in which {told['chose']} of the {told['shown']} pictures with defects had a part: others have to verify them"


def promises(told: Mapping[str, Any], confidence: float) -> dict[str, tuple[str, str]]:
    """By class whether what was promised holds here: a word to colour by, and the sentence."""
    rule = Rule(**told["rule"])
    unknown = ", unless these were trained on, which is not known" * (told["trained_on"] is None)
    said = {}
    for name, c in told["classes"].items():
        if c["why"]:
            said[name] = "dropped", c["why"]
        elif rule.by != "missed" or not c["defects"]:
            continue
        elif told["trained_on"]:
            said[name] = "dropped", "what was trained on verifies no promise"
        elif told["chose"] == told["shown"]:
            said[name] = "soft", "promised by this split"
        elif told["chose"]:
            said[name] = "soft", "pictures that had a part in the promise verify none: judge others"
        else:
            found = verified(c["missed"], c["defects"], rule.at_most_missed, confidence)
            said[name] = {
                "holds": ("usable", f"holds here as well: with {exactly(confidence)} confidence no more than "
                                    f"{exactly(rule.at_most_missed)} are missed" + unknown),
                "open": ("soft", f"not contradicted here, and too few defects to verify it: {c['missed']} of {c['defects']} "
                                 "missed"),
                "broken": ("error", f"broken here: {c['missed']} of {c['defects']} missed. Are these pictures from where the "
                                    "others came from?"),
            }[found]
    return said


def _pod_chart(pod: Pod, of_class: Mapping[str, Any], unit: str) -> dict[str, Any]:
    low, high = of_class["smallest"] / _BEYOND, of_class["largest"] * _BEYOND
    sizes = np.geomspace(low, high, _POINTS) if pod.scale == "log" else np.linspace(low, high, _POINTS)
    marks = [(size, share, name) for size, share, name in (
        (pod.a50, 0.5, "a50"), (pod.a90, 0.9, "a90"), (pod.a90_95, 0.9, "a90/95")) if low <= size <= high]
    return xy_chart([("curve", sizes, pod.curve(sizes)), ("bound", sizes, pod.lower(sizes))], marks, (low, high), (0, 1),
                    log=pod.scale == "log", x_name=f"size, {unit}", y_name="POD")


def _pr_chart(curve: Mapping[str, np.ndarray], of_class: Mapping[str, Any]) -> dict[str, Any]:
    sure = curve["tp"] + curve["fp"] > 0
    hits = of_class["defects"] - of_class["missed"]
    calls = hits + of_class["false_calls"]
    marks = [(hits / of_class["defects"], hits / calls, f"at {of_class['threshold']:.2f}")] if calls else []
    return xy_chart([("curve", curve["recall"][sure], curve["precision"][sure])], marks, (0, 1), (0, 1), x_name="recall",
                    y_name="precision")


def _calibration_chart(bins: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    scores = np.array([b["mean_score"] for b in bins])
    lines = [("bound", np.array([0.0, 1.0]), np.array([0.0, 1.0])), ("curve", scores, np.array([b["precision"] for b in bins]))]
    bars = [(b["mean_score"], b["precision_low"], b["precision_high"]) for b in bins]
    return xy_chart(lines, [], (0, 1), (0, 1), x_name="score", y_name="right", bars=bars)
