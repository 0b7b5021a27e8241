"""task=evaluate: judges a checkpoint on a split, at thresholds that another split chose. Model, scale and precision are the
checkpoint's own."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
from weldtrain.engine.evaluator import Judged, evaluate, operating_points, rule_of, tagged
from weldtrain.engine.results import Results
from weldtrain.engine.trained import Trained
from weldtrain.errors import DataError
from weldtrain.formats.columns import mm_per_pixel, picture_column
from weldtrain.formats.splits import group_key
from weldtrain.metrics import inspection
from weldtrain.metrics.bootstrap import ap_intervals, resamples
from weldtrain.metrics.calibration import calibration_error, reliability
from weldtrain.metrics.calibration import judged as right_or_wrong
from weldtrain.metrics.confusion import confusion
from weldtrain.metrics.inspection import Inspected
from weldtrain.metrics.matching import Boxes, pr_curves
from weldtrain.metrics.operating_point import Rule, same_rule
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
    if cfg.trainer.cpu_threads:
        torch.set_num_threads(cfg.trainer.cpu_threads)
    device = choose_device(cfg.device)
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
    points, chosen_here = _thresholds(cfg, subject, index, device)
    judged = _judged(cfg, subject, index, split, device)
    if points is None and world().first:
        points = operating_points(judged, subject.classes, cfg.evaluate)

    record.scalars(subject.step, tagged(split, judged.metrics), epoch=subject.epoch)
    record.summary |= {**judged.metrics, "split": split, "checkpoint": cfg.checkpoint, "predictions": cfg.evaluate.predictions,
                       "classes": subject.classes, "best_epoch": subject.epoch, "pictures": len(index.rows(split))}
    if world().first:
        _inspect(cfg, record, subject, index, judged, points, about)
        if chosen_here and trained is not None:
            checkpoint.save(record.checkpoints / JUDGED, trained.with_points(points))
            log.info("checkpoint with these thresholds: %s", record.checkpoints / JUDGED)
    log.info("summary: %s", record.dir / "summary.json")
    return judged.metrics["map_50"]


def _thresholds(
    cfg: Config, subject: Trained | Results, index: AnnotationIndex, device: torch.device
) -> tuple[dict[str, Any] | None, bool]:
    """The checkpoint's own thresholds where its rule is the one asked for, else those that evaluate.choose_on chooses; None where
    that is the split to judge, or is not there. And whether they are others than the checkpoint's."""
    if subject.points and same_rule(rule_of(cfg.evaluate), subject.points["rule"]):
        return subject.points, False
    choose_on = cfg.evaluate.choose_on
    if choose_on != cfg.evaluate.split and choose_on not in index.splits:
        log.warning("evaluate.choose_on: no picture in split '%s': %s itself chooses the thresholds, and cannot verify them",
                    choose_on, cfg.evaluate.split)
        choose_on = cfg.evaluate.split
    if choose_on == cfg.evaluate.split:
        return None, True
    log.info("thresholds are chosen on %s: %s", choose_on, index.describe(choose_on))
    judged = _judged(cfg, subject, index, choose_on, device)
    return operating_points(judged, subject.classes, replace(cfg.evaluate, split=choose_on)) if world().first else None, True


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
    return {
        "rows": rows, "mm": mm_per_pixel(cfg.dataset, index.root, paths),
        "groups": np.unique(groups, return_inverse=True)[1],
        "columns": ({"split": [index.splits[k] for k in index.split_ids[rows]]} if "+" in cfg.evaluate.split else {})
        | {name: picture_column(cfg.dataset, index.root, paths, name, "evaluate.slice_by") for name in cfg.evaluate.slice_by},
    }


def _inspect(
    cfg: Config, record: RunRecord, subject: Trained | Results, index: AnnotationIndex, judged: Judged, points: Mapping[str, Any],
    about: Mapping[str, Any],
) -> None:
    """All that follows from what was found at the thresholds: on the screen, in summary.json, in report.html."""
    ask, classes, (metrics, truth, found, met, pictures) = cfg.evaluate, subject.classes, judged
    unit, unit_name = (1.0, "px") if about["mm"] is None else (about["mm"], "mm")
    groups = about["groups"]
    weights = resamples(groups, ask.bootstrap if groups.max() > 0 else 0, cfg.seed)  # of one group nothing can be said
    thresholds = {name: point["threshold"] for name, point in points["points"].items()}
    seen = inspection.inspect(found, truth, met, classes, pictures, thresholds=thresholds, size=ask.size, unit=unit,
                              weights=weights, confidence=ask.confidence)
    of_class, pods = inspection.by_class(seen, ask.pod_link, ask.pod_scale)
    for name in of_class:
        of_class[name] |= points["points"][name]
    scores, right = right_or_wrong(found, truth, met)
    curves = pr_curves(found, truth, met, classes)
    told = {
        "split": ask.split, "names": classes, "unit": unit_name, "size": ask.size, "rule": points["rule"],
        "chosen_on": points["split"],
        "in_sample": bool({*points["split"].split("+")} & {*ask.split.split("+")}),
        "groups": int(groups.max()) + 1,
        "classes": of_class,
        "all": inspection.row(seen, np.ones(len(seen.called), bool), np.ones(len(seen.false.labels), bool)),
        "clean_pictures": inspection.clean_pictures(seen),
        "intervals": ap_intervals(found, truth, classes, weights),
        "by_size": inspection.by_size(seen, found, truth, met, unit, ask.size),
        "by_position": inspection.by_place(seen, index.sizes[about["rows"]]),
        "by_column": {name: inspection.by_picture(seen, values) for name, values in about["columns"].items()},
        "confusion": confusion(found, truth, np.array([thresholds[name] for name in classes]), len(classes)).tolist(),
        "calibration_error": calibration_error(scores, right),
        "calibration": [bin._asdict() for bin in reliability(scores, right)],
    }
    record.summary["inspection"] = told
    record.curves(subject.step, f"{ask.split}/pr", curves)
    what = f"epoch {subject.epoch + 1}" if isinstance(subject, Trained) else subject.path.name
    ap_table(f"{what} on {pictures} pictures of split '{ask.split}'", metrics)
    _tell(told, ask)
    gallery = _gallery(seen, index, about["rows"], subject.window, unit_name)
    judgement.write(record.dir / "report.html", told, metrics, pods, curves, gallery, _made_of(cfg, subject, index),
                    split=ask.split, pictures=pictures, confidence=ask.confidence)
    log.info("report:  %s", record.dir / "report.html")


def _tell(told: Mapping[str, Any], cfg: EvaluateConfig) -> None:
    """Prints what is missed at the thresholds, and which sizes are found; and why where it cannot be said."""
    bound, unit = f"{cfg.confidence:.0%}", told["unit"]
    here = ", the split that chose them: another one has to verify it" * told["in_sample"]
    table(
        f"{Rule(**told['rule']).told()}: thresholds chosen on {told['chosen_on']}{here}; sizes ({cfg.size}) in {unit}",
        ("class", "threshold", "missed", f"at most, {bound}", "false calls per picture", "a50", "a90", "a90/95"),
        [(name, f"{c['threshold']:.3f}" + " (not by the rule)" * bool(c["why"]), f"{c['missed']} of {c['defects']}",
          f"{c['missed_at_most']:.1%}", f"{c['false_calls_per_picture']:.2f}",
          *(judgement.found_at(c, a) for a in ("a50", "a90", "a90_95")))
         for name, c in told["classes"].items()])
    promises = judgement.promises(told, cfg.confidence)
    for name, c in told["classes"].items():
        _, promise = promises.get(name, ("", ""))
        for said in filter(None, (promise, c["no_pod"] and f"no POD: {c['no_pod']}", *c["pod_warnings"])):
            log.info("%s: %s", name, said)
    clean = told["clean_pictures"]
    if clean["pictures"]:
        log.info("%d pictures without defects: %.2f false calls per picture; with %s confidence at most %.2f", clean["pictures"],
                 clean["false_calls_per_picture"], bound, clean["false_calls_at_most"])
    if told["groups"] < _FEW_GROUPS:
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
        "command": shlex.join(made["command"]),
        "weldtrain": f"{version() or 'not installed'}, commit {made['git']['commit'] if made['git'] else 'unknown'}",
        "machine": f"{made['processor']}, torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
