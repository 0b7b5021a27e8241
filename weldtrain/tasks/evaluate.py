"""task=evaluate: judges a checkpoint on a split, at thresholds that another split chose. Model, scale and precision are the
checkpoint's own."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from weldtrain.config import Config, EvaluateConfig
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.images import Window
from weldtrain.data.index import AnnotationIndex
from weldtrain.data.indexing import open_index
from weldtrain.data.loader import evaluation_loader
from weldtrain.data.tuned import tuned, tuned_file
from weldtrain.engine import checkpoint
from weldtrain.engine.device import choose_device, device_name
from weldtrain.engine.distributed import in_turn, world
from weldtrain.engine.evaluator import Judged, evaluate, operating_points, rule_of, seen_in, tagged
from weldtrain.engine.results import Results
from weldtrain.engine.trained import Trained
from weldtrain.errors import DataError
from weldtrain.formats.columns import Sheet
from weldtrain.formats.splits import group_key
from weldtrain.metrics import inspection
from weldtrain.metrics.bootstrap import ap_intervals, resamples
from weldtrain.metrics.calibration import calibration_error, error_interval, reliability
from weldtrain.metrics.calibration import judged as right_or_wrong
from weldtrain.metrics.confusion import confusion
from weldtrain.metrics.inspection import Inspected
from weldtrain.metrics.matching import Boxes, pr_curves
from weldtrain.metrics.operating_point import Rule, exactly, same_rule
from weldtrain.overrides import command_line
from weldtrain.telemetry import judgement, report
from weldtrain.telemetry.charts import short
from weldtrain.telemetry.console import ap_table, table
from weldtrain.telemetry.drawing import cropped
from weldtrain.telemetry.provenance import provenance, version
from weldtrain.telemetry.record import Follower, RunRecord

log = logging.getLogger(__name__)

JUDGED = "judged.pt"
_CROP_PX = 150
_FEW_GROUPS = 20


def run(cfg: Config, record: RunRecord | Follower) -> float | None:
    """Returns AP50, None where the split has no defects."""
    device = choose_device(cfg.device, cfg.trainer.cpu_threads)
    trained = Trained.load(cfg.checkpoint, device) if cfg.checkpoint else None  # first, since it is soon known to be none
    index = in_turn(lambda: open_index(cfg.dataset, cfg.cache_dir))
    index.report_findings()
    subject = trained or Results.read(cfg.evaluate.predictions, index)
    if strange := sorted(set(index.names) - set(subject.classes)):
        raise DataError(f"the data shows {', '.join(strange)}, and this knows {', '.join(subject.classes)} alone",
                        cfg.checkpoint or cfg.evaluate.predictions, "judge it on data of its own classes")
    if isinstance(subject, Results) and (cut := subject.cut_at()) > cfg.evaluate.score_thresh:
        log.warning("%s was cut at a score of %g: AP is too low, and no threshold below can be chosen; predict with "
                    "predict.threshold=%g", subject.path, cut, cfg.evaluate.score_thresh)
    split = cfg.evaluate.split
    log.info("%s: %s", split, index.describe(split))
    about = _about(cfg, index)  # before the pictures are looked at, since it may be refused
    judged = _judged(cfg, subject, index, split, device)
    thresholds = _thresholds(cfg, subject, index, judged, device)

    record.scalars(subject.step, tagged(split, judged.metrics), epoch=subject.epoch)
    record.summary |= {**judged.metrics, "split": split, "checkpoint": cfg.checkpoint, "predictions": cfg.evaluate.predictions,
                       "classes": subject.classes, "best_epoch": subject.epoch, "pictures": len(index.rows(split))}
    if world().first:
        _inspect(cfg, record, subject, index, judged, thresholds, about)
        if thresholds.chosen_on is not None and trained is not None:
            checkpoint.save(record.checkpoints / JUDGED, trained.with_points(thresholds.points, thresholds.chosen_on))
            log.info("checkpoint with these thresholds: %s", record.checkpoints / JUDGED)
    log.info("summary: %s", record.dir / "summary.json")
    return judged.metrics["map_50"]


class _Thresholds(NamedTuple):
    """`points` as `operating_points` gives them. Of the pictures that are judged and show defects, how many had a part in that
    (`choosing`), and how many the detector was `trained` on, None where that is not known. Of new thresholds, the `identities`
    that they are `chosen_on`."""

    points: Mapping[str, Any]
    choosing: int
    trained: int | None
    chosen_on: np.ndarray | None


def _thresholds(
    cfg: Config, subject: Trained | Results, index: AnnotationIndex, judged: Judged, device: torch.device
) -> _Thresholds | None:
    """The checkpoint's own where its rule is the one asked for and pictures were seen as they are here; else those that
    evaluate.choose_on chooses, or where that is not there the split that is judged. On the first rank."""
    choose_on, split = cfg.evaluate.choose_on, cfg.evaluate.split
    own = subject.points if subject.points and same_rule(rule_of(cfg.evaluate), subject.points["rule"]) else None
    if own and own.get("seen_in") != seen_in(judged.tile_px, cfg.evaluate):
        log.info("the checkpoint's thresholds were chosen with %s, and this is %s: %s chooses others", own.get("seen_in"),
                 seen_in(judged.tile_px, cfg.evaluate), choose_on)
        own = None
    choosing = judged
    if not own and choose_on != split:
        if lacking := index.lacking(choose_on):
            log.warning("evaluate.choose_on: no picture in split '%s': %s itself chooses the thresholds, and cannot verify them",
                        lacking[0], split)
            choose_on = split
        else:
            log.info("thresholds are chosen on %s: %s", choose_on, index.describe(choose_on))
            choosing = _judged(cfg, subject, index, choose_on, device)
    if not world().first:
        return None
    trained = subject.overlap("trained_on", judged.shown)
    if trained:
        log.warning("%s: %d of %d pictures with defects were trained on: what is found in them tells nothing of new ones", split,
                    trained, len(judged.shown))
    if own:
        return _Thresholds(own, subject.overlap("chosen_on", judged.shown), trained, None)
    points = operating_points(choosing, subject.classes, replace(cfg.evaluate, split=choose_on))
    return _Thresholds(points, int(np.isin(judged.shown, choosing.shown).sum()), trained, choosing.shown)


def _judged(cfg: Config, subject: Trained | Results, index: AnnotationIndex, split: str, device: torch.device) -> Judged:
    if isinstance(subject, Results):
        return subject.judged(index, split, cfg.evaluate)
    samples, model_cfg = subject.samples(index, cfg.evaluate.tiles)
    dataset = DetectionDataset(samples, split, subject.classes, model_cfg)
    if len(dataset) > len(dataset.pictures):
        log.info("%s: %d tiles of %d pictures", split, len(dataset), len(dataset.pictures))
    settings = tuned(cfg.loader, tuned_file(replace(cfg, model=model_cfg), index, device_name(device)))
    loader = evaluation_loader(dataset, settings, cfg.evaluate.batch_size, device, (world().rank, world().size))
    return evaluate(subject.model, loader, subject.classes, replace(cfg.evaluate, split=split), device, subject.dtype)


def _about(cfg: Config, index: AnnotationIndex) -> dict[str, Any]:
    """What is known of each picture of the split beside its boxes: `rows` of the index, `mm` per pixel or None, `groups` int, and
    the user's `columns` by name."""
    rows = index.rows(cfg.evaluate.split)
    paths = [index.path(row) for row in rows]
    groups = [group_key(path, cfg.dataset.split.group) for path in paths]
    sheet = Sheet(cfg.dataset, index.root, paths)
    return {
        "rows": rows, "mm": sheet.mm_per_pixel(),
        "groups": np.unique(groups, return_inverse=True)[1],
        "columns": ({"split": [index.splits[k] for k in index.split_ids[rows]]} if "+" in cfg.evaluate.split else {})
        | {name: sheet.column(name, "evaluate.slice_by") for name in cfg.evaluate.slice_by},
    }


def _inspect(
    cfg: Config, record: RunRecord, subject: Trained | Results, index: AnnotationIndex, judged: Judged, chosen: _Thresholds,
    about: Mapping[str, Any],
) -> None:
    """All that follows from what was found at the thresholds: on the screen, in summary.json, in report.html."""
    ask, classes, (metrics, truth, found, met, pictures, *_) = cfg.evaluate, subject.classes, judged
    points = chosen.points
    unit, unit_name = (1.0, "px") if about["mm"] is None else (about["mm"], "mm")
    groups = about["groups"]
    weights = resamples(groups, ask.bootstrap if groups.max() > 0 else 0, cfg.seed)  # of one group nothing can be said
    thresholds = {name: point["threshold"] for name, point in points["points"].items()}
    seen = inspection.inspect(found, truth, met, classes, pictures, thresholds=thresholds, size=ask.size, unit=unit,
                              weights=weights, each=groups.max() + 1 == pictures, confidence=ask.confidence)
    of_class, pods = inspection.by_class(seen, ask.pod_link, ask.pod_scale)
    for name in of_class:
        of_class[name] |= points["points"][name]
    least = np.array([thresholds[name] for name in classes])
    everything, calls = (right_or_wrong(found, truth, met, of) for of in (0.0, least[found.labels - 1]))
    curves = pr_curves(found, truth, met, classes)
    told = {
        "split": ask.split, "names": classes, "unit": unit_name, "size": ask.size, "rule": points["rule"],
        "chosen_on": points["split"],
        "shown": len(judged.shown), "chose": chosen.choosing, "trained_on": chosen.trained,
        "groups": int(groups.max()) + 1, "resamples": len(weights),
        "classes": of_class,
        "all": inspection.row(seen, np.ones(len(seen.called), bool), np.ones(len(seen.false.labels), bool)),
        "clean_pictures": inspection.clean_pictures(seen),
        "intervals": ap_intervals(found, truth, classes, weights),
        "by_size": inspection.by_size(seen, found, truth, met, unit, ask.size),
        "by_position": inspection.by_place(seen, index.sizes[about["rows"]]),
        "by_column": {name: inspection.by_picture(seen, values) for name, values in about["columns"].items()},
        "confusion": confusion(found, truth, least, len(classes)).tolist(),
        "calibration": [bin._asdict() for bin in reliability(*everything[:2])],
        "calibration_error": calibration_error(*everything[:2]),
        "calibration_error_interval": error_interval(*everything, weights),
        "calibration_error_of_calls": calibration_error(*calls[:2]),
        "calibration_error_of_calls_interval": error_interval(*calls, weights),
    }
    record.summary["inspection"] = told
    record.curves(subject.step, f"{ask.split}/pr", curves)
    what = subject.path.name if subject.epoch is None else f"epoch {subject.epoch + 1}"
    ap_table(f"{what} on {pictures} pictures of split '{ask.split}'", metrics)
    _tell(told, ask)
    gallery = _gallery(seen, index, about["rows"], subject.window, unit_name)
    judgement.write(record.dir / "report.html", told, metrics, pods, curves, gallery, _made_of(cfg, subject, index),
                    split=ask.split, pictures=pictures, confidence=ask.confidence)
    log.info("report:  %s", record.dir / "report.html")


def _tell(told: Mapping[str, Any], cfg: EvaluateConfig) -> None:
    """Prints what is missed at the thresholds, and which sizes are found; and why where it cannot be said."""
    bound, unit = exactly(cfg.confidence), told["unit"]
    table(
        f"{Rule(**told['rule']).told()}: thresholds chosen on {told['chosen_on']}{judgement.in_sample(told)}; "
        f"sizes ({cfg.size}) in {unit}",
        ("class", "threshold", "missed", f"at most, {bound}", "false calls per picture", "a50", "a90", "a90/95"),
        [(name, f"{c['threshold']:.3f}" + " (not by the rule)" * bool(c["why"]), f"{c['missed']} of {c['defects']}",
          judgement.percent(c["missed_at_most"]), f"{c['false_calls_per_picture']:.2f}",
          *(judgement.found_at(c, a) for a in ("a50", "a90", "a90_95")))
         for name, c in told["classes"].items()])
    promises = judgement.promises(told, cfg.confidence)
    for name, c in told["classes"].items():
        _, promise = promises.get(name, ("", ""))
        for said in filter(None, (promise, c["defects"] and c["no_pod"] and f"no POD: {c['no_pod']}", *c["pod_warnings"])):
            log.info("%s: %s", name, said)
    clean = told["clean_pictures"]
    if clean["pictures"]:
        log.info("%d pictures without defects: %.2f false calls per picture; with %s confidence at most %.2f", clean["pictures"],
                 clean["false_calls_per_picture"], bound, clean["false_calls_at_most"])
    if told["resamples"] and told["groups"] < _FEW_GROUPS:
        log.info("the pictures are of %d welds or parts (dataset.split.group): with so few intervals are too narrow",
                 told["groups"])


def _gallery(
    seen: Inspected, index: AnnotationIndex, rows: np.ndarray, window: Window, unit: str
) -> dict[str, list[dict[str, Any]]]:
    """The worst misses and false calls, each as a crop of its picture with what is there (dashed) and what was called."""
    def shown(boxes: Boxes, i: int, text: str) -> dict[str, Any]:
        at = int(boxes.image[i])
        row, name = int(rows[at]), seen.classes[boxes.labels[i] - 1]
        there, called = ((of.boxes[of.image == at], of.labels[of.image == at]) for of in (seen.truth, seen.false))
        crop = cropped(index.picture(row, window), boxes.boxes[i], there[0], *called)
        return {"image": report.picture(crop, _CROP_PX), "class": name, "text": text, "path": index.path(row)}

    def of_miss(i: int) -> str:
        best = f"score {seen.best[i]:.2f}" if np.isfinite(seen.best[i]) else "no detection"
        return f"{short(seen.size[i])} {unit}, {best}"

    return {
        "misses": [shown(seen.truth, i, of_miss(i)) for i in inspection.worst_misses(seen)],
        "false_calls": [shown(seen.false, i, f"score {seen.false.scores[i]:.2f}") for i in inspection.worst_false_calls(seen)],
    }


def _made_of(cfg: Config, subject: Trained | Results, index: AnnotationIndex) -> dict[str, str]:
    """What was judged, on what, by what."""
    made = provenance()
    return subject.made_of() | {
        "classes": ", ".join(subject.classes),
        "judged on": f"{index.root} (state {index.stamp})", "split": index.describe(cfg.evaluate.split),
        "command": command_line(made["command"][1:]),
        "weldtrain": f"{version() or 'not installed'}, commit {made['git']['commit'] if made['git'] else 'unknown'}",
        "machine": f"{made['processor']}, torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
