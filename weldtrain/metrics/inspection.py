"""What an inspector asks of a detector at its thresholds: what it misses, at how many false calls, which sizes it finds, what it
takes for what, and where it is weak. Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weldtrain.metrics.bootstrap import class_aps, interval, mean_of_classes, ratio_interval, totals
from weldtrain.metrics.matching import Boxes, take
from weldtrain.metrics.operating_point import missed_at_most, rate_at_most, rate_between, share_between
from weldtrain.metrics.pod import NoPod, Pod, fit_pod, resampled_sizes

SIZES = ("longer_side", "diagonal", "area_root")
_OF_POD = ("a50", "a90", "a90_95", "a90_95_wald")
_MOST_VALUES = 40  # of a column that have a row of their own
_PLACES = (("top", "middle", "bottom"), ("left", "centre", "right"))


def sizes_of(boxes: np.ndarray, size: str) -> np.ndarray:
    """float64 [n], in the unit of the boxes [n,4] x1,y1,x2,y2: one of SIZES."""
    sides = np.asarray(boxes, np.float64).reshape(-1, 4)
    sides = sides[:, 2:] - sides[:, :2]
    return {"longer_side": lambda: sides.max(1), "diagonal": lambda: np.hypot(*sides.T),
            "area_root": lambda: np.sqrt(sides.prod(1))}[size]()


@dataclass
class Inspected:
    """A split as it looks at the thresholds: a row for each defect that counts and each false call.

    `truth`, the defects, and `false`, the calls of nothing; `size` and `false_size` of each, in the unit asked for; of the
    defects `called` bool, those that were found, and `best` float, the score of what meets it, -inf where nothing does; `clean`
    bool [pictures], those without defects; `weights` int [n, pictures] of resamples, each of `drawn` pictures [n]; `each` where
    these draw every picture by itself, and not in groups.
    """

    classes: Sequence[str]
    pictures: int
    truth: Boxes
    size: np.ndarray
    best: np.ndarray
    called: np.ndarray
    false: Boxes
    false_size: np.ndarray
    clean: np.ndarray
    weights: np.ndarray
    drawn: np.ndarray
    each: bool
    confidence: float


def inspect(
    found: Boxes, truth: Boxes, met: np.ndarray, classes: Sequence[str], pictures: int, *, thresholds: Mapping[str, float],
    size: str, unit: np.ndarray | float, weights: np.ndarray, each: bool, confidence: float,
) -> Inspected:
    """`met` as of `match`; `unit` is what a pixel measures, of all or of each picture; `weights` as of `resamples`, of `each`
    picture by itself or not."""
    unit = np.broadcast_to(unit, pictures)
    real = ~truth.ignored
    best = np.full(len(truth.labels), -np.inf)
    best[met[met >= 0]] = found.scores[met >= 0]
    least = np.array([thresholds[name] for name in classes])
    called = best >= least[truth.labels - 1] if len(best) else np.zeros(0, bool)
    is_false = (met < 0) & (found.scores >= least[found.labels - 1])
    false = take(found, is_false)
    return Inspected(
        classes, pictures, take(truth, real), (sizes_of(truth.boxes, size) * unit[truth.image])[real], best[real], called[real],
        false, sizes_of(false.boxes, size) * unit[false.image], np.bincount(truth.image, minlength=pictures) == 0,
        weights, totals(weights, np.ones(pictures)), each, confidence)


def row(seen: Inspected, defects: np.ndarray, calls: np.ndarray, pictures: np.ndarray | None = None) -> dict[str, Any]:
    """Of these defects and false calls, masks, on these `pictures` (all if None): `defects missed missed_at_most`, the bound by
    Clopper and Pearson, `missed_interval` by resampling or else exact, `false_calls`, and `false_calls_per_picture` with its
    bound by Garwood and its interval. None where nothing can be said."""
    n, missed, false = (int(of.sum()) for of in (defects, defects & ~seen.called, calls))
    shown = seen.pictures if pictures is None else int(pictures.sum())
    of_defects, of_missed, of_calls = (totals(seen.weights, np.bincount(image, minlength=seen.pictures)) for image in (
        seen.truth.image[defects], seen.truth.image[defects & ~seen.called], seen.false.image[calls]))
    exact = seen.each and len(seen.weights) > 0  # where resampling tells nothing
    drawn = seen.drawn if pictures is None else totals(seen.weights, pictures)
    return {
        "defects": n, "missed": missed, "missed_share": missed / n if n else None,
        "missed_at_most": missed_at_most(missed, n, seen.confidence) if n else None,
        "missed_interval": ratio_interval(of_missed, of_defects) or (share_between(missed, n) if exact and n else None),
        "pictures": shown, "false_calls": false,
        "false_calls_per_picture": false / shown if shown else None,
        "false_calls_at_most": rate_at_most(false, shown, seen.confidence) if shown else None,
        "false_calls_interval": ratio_interval(of_calls, drawn) or (rate_between(false, shown) if exact and shown else None),
    }


def by_class(seen: Inspected, link: str, scale: str) -> tuple[dict[str, dict[str, Any]], dict[str, Pod]]:
    """By class its `row`, the `smallest` and `largest` size, and of its POD `a50 a90 a90_95 a90_95_wald a50_interval a90_interval
    pod_warnings`, None and `no_pod`, the reason, where there is none; and the curves that there are. An end of an interval is
    None where it is beyond all sizes."""
    rows, pods = {}, {}
    for label, name in enumerate(seen.classes, 1):
        own = seen.truth.labels == label
        sizes = seen.size[own]
        ends = (float(sizes.min()), float(sizes.max())) if len(sizes) else (None, None)
        rows[name] = {**row(seen, own, seen.false.labels == label), "smallest": ends[0], "largest": ends[1],
                      **dict.fromkeys((*_OF_POD, "a50_interval", "a90_interval")), "pod_warnings": [], "no_pod": ""}
        try:
            pod = pods[name] = fit_pod(sizes, seen.called[own], link, scale)
        except NoPod as e:
            rows[name]["no_pod"] = str(e)
        else:
            found_at = {figure: getattr(pod, figure) for figure in _OF_POD}
            rows[name] |= {figure: size for figure, size in found_at.items() if np.isfinite(size)}  # JSON knows no infinity
            rows[name]["pod_warnings"] = list(pod.warnings)
            for figure, values in resampled_sizes(pod, sizes, seen.called[own], seen.truth.image[own], seen.weights).items():
                ends = interval(values)
                rows[name][f"{figure}_interval"] = ends and [end if np.isfinite(end) else None for end in ends]
    return rows, pods


def clean_pictures(seen: Inspected) -> dict[str, Any]:
    """The `row` of the pictures without defects."""
    return row(seen, np.zeros(len(seen.called), bool), seen.clean[seen.false.image], seen.clean)


def by_size(
    seen: Inspected, found: Boxes, truth: Boxes, met: np.ndarray, unit: np.ndarray | float, size: str
) -> list[dict[str, Any]]:
    """For each octave of sizes that holds a defect, `low high` in the unit, its `row`, and `ap_50` with `ap_50_interval`: what
    meets a defect of another octave, or none and is itself of another octave, counts neither way."""
    unit = np.broadcast_to(unit, seen.pictures)
    there, called = (_octave(sizes_of(of.boxes, size) * unit[of.image]) for of in (truth, found))
    called = np.where(met >= 0, np.append(there, np.nan)[met], called)  # the last is for -1
    defects, calls = _octave(seen.size), _octave(seen.false_size)
    rows = []
    for power in np.unique(defects).astype(int).tolist():
        of_size, inside = called == power, replace(truth, ignore=truth.ignored | (there != power))
        ap, aps = (mean_of_classes(class_aps(take(found, of_size), inside, met[of_size], len(seen.classes), weights))
                   for weights in (np.ones((1, seen.pictures)), seen.weights))
        rows.append({"low": 2.0**power, "high": 2.0 ** (power + 1), **row(seen, defects == power, calls == power),
                     "ap_50": None if np.isnan(ap[0]) else float(ap[0]), "ap_50_interval": interval(aps)})
    return rows


def _octave(sizes: np.ndarray) -> np.ndarray:
    return np.floor(np.log2(np.maximum(sizes, 1e-9)))


def by_place(seen: Inspected, picture_sizes: np.ndarray) -> dict[str, dict[str, Any]]:
    """The `row` of each ninth of the picture, by a box's centre; picture_sizes int [pictures,2] width, height."""
    def ninth(boxes: Boxes) -> np.ndarray:
        share = (boxes.boxes[:, :2] + boxes.boxes[:, 2:]) / 2 / picture_sizes[boxes.image]
        column, line = np.clip((3 * share).astype(int), 0, 2).T
        return 3 * line + column
    defects, calls = ninth(seen.truth), ninth(seen.false)
    return {f"{vertical} {horizontal}": row(seen, defects == 3 * i + k, calls == 3 * i + k)
            for i, vertical in enumerate(_PLACES[0]) for k, horizontal in enumerate(_PLACES[1])}


def by_picture(seen: Inspected, values: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The `row` of the pictures of each value of a column; behind the most frequent forty all others together."""
    names, member, counts = np.unique(np.asarray(values, str), return_inverse=True, return_counts=True)
    rank = np.argsort(np.argsort(-counts, kind="stable"))[member]
    named = [str(names[k]) for k in np.argsort(-counts, kind="stable")[:_MOST_VALUES]]
    if len(names) > _MOST_VALUES:
        rank = np.minimum(rank, _MOST_VALUES)
        named.append(f"{len(names) - _MOST_VALUES} others")
    return {name: row(seen, rank[seen.truth.image] == k, rank[seen.false.image] == k, rank == k) for k, name in enumerate(named)}


def worst_misses(seen: Inspected, n: int = 20) -> np.ndarray:
    """int64: the largest defects that were missed, by how many times their class's typical size they are."""
    typical = {label: np.median(seen.size[seen.truth.labels == label]) for label in np.unique(seen.truth.labels)}
    relative = seen.size / np.array([typical[label] for label in seen.truth.labels.tolist()])
    missed = np.flatnonzero(~seen.called)
    return missed[np.argsort(-relative[missed], kind="stable")[:n]]


def worst_false_calls(seen: Inspected, n: int = 20) -> np.ndarray:
    """int64: rows of `false`, the surest first."""
    return np.argsort(-seen.false.scores, kind="stable")[:n]
