"""task=evaluate: judges a checkpoint on a split. Model, scale and precision are the checkpoint's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from weldtrain.config import Config, EvaluateConfig, section
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.data.loader import evaluation_loader
from weldtrain.data.tuned import tuned, tuned_file
from weldtrain.engine import checkpoint
from weldtrain.engine.device import autocast_dtype, choose_device, device_name
from weldtrain.engine.distributed import in_turn, world
from weldtrain.engine.evaluator import evaluate, tagged
from weldtrain.metrics.inspection import inspected
from weldtrain.metrics.matching import pr_curves
from weldtrain.models.detector import build_detector
from weldtrain.telemetry.console import ap_table, table
from weldtrain.telemetry.record import Follower, RunRecord

log = logging.getLogger(__name__)


def run(cfg: Config, record: RunRecord | Follower) -> float | None:
    """Returns AP50, None where the split has no defects."""
    if cfg.trainer.cpu_threads:
        torch.set_num_threads(cfg.trainer.cpu_threads)
    device = choose_device(cfg.device)
    state = checkpoint.load(cfg.checkpoint)
    classes = state["classes"]
    model_cfg, trainer_cfg = section(state["config"], "model"), section(state["config"], "trainer")
    index = in_turn(lambda: open_index(cfg.dataset, cfg.cache_dir))
    index.report_findings()
    dataset = DetectionDataset(index, cfg.evaluate.split, classes, model_cfg)
    log.info("%s: %s", cfg.evaluate.split, index.describe(cfg.evaluate.split))

    model = build_detector(model_cfg, len(classes))
    model.load_state_dict(checkpoint.weights(state))
    model.to(device, memory_format=torch.channels_last)
    settings = tuned(cfg.loader, tuned_file(replace(cfg, model=model_cfg), index, device_name(device)))
    place = world()
    loader = evaluation_loader(dataset, settings, cfg.evaluate.batch_size, device, (place.rank, place.size))
    metrics, truth, found = evaluate(model, loader, classes, cfg.evaluate, device, autocast_dtype(trainer_cfg.precision, device))

    epoch = checkpoint.epochs_done(state) - 1
    record.scalars(state["step"], tagged(cfg.evaluate.split, metrics), epoch=epoch)
    record.summary |= {**metrics, "split": cfg.evaluate.split, "checkpoint": cfg.checkpoint, "classes": classes,
                       "best_epoch": epoch, "pictures": len(dataset)}
    if place.first:
        ap_table(f"epoch {epoch + 1} on {len(dataset)} pictures of split '{cfg.evaluate.split}'", metrics)
        of_class = inspected(
            truth, found, classes, len(dataset), at_most=cfg.evaluate.at_most_missed, confidence=cfg.evaluate.confidence,
            otherwise=cfg.evaluate.false_call_score, size=cfg.evaluate.size)
        record.summary["inspection"] = of_class
        record.curves(state["step"], f"{cfg.evaluate.split}/pr", pr_curves(found, truth, classes))
        _tell(of_class, cfg.evaluate)
    log.info("summary: %s", record.dir / "summary.json")
    return metrics["map_50"]


def _tell(of_class: Mapping[str, Mapping[str, Any]], cfg: EvaluateConfig) -> None:
    """Prints what is missed from which threshold on, and which sizes are found; and why where it cannot be said."""
    bound = f"{cfg.confidence:.0%}"
    table(
        f"no more than {cfg.at_most_missed:.1%} missed, with {bound} confidence; sizes ({cfg.size}) in px of the file's picture",
        ("class", "threshold", "missed", f"at most, {bound}", "false calls per picture", "a50", "a90", "a90/95"),
        [(name, f"{c['threshold']:.3f}" + " (no promise)" * bool(c["why"]), f"{c['missed']} of {c['defects']}",
          f"{c['missed_at_most']:.1%}", f"{c['false_calls_per_picture']:.2f}", *(_px(c[a]) for a in ("a50", "a90", "a90_95")))
         for name, c in of_class.items()])
    for name, c in of_class.items():
        for said in filter(None, (c["why"], c["no_pod"] and f"no POD: {c['no_pod']}", *c["pod_warnings"])):
            log.info("%s: %s", name, said)


def _px(size: float | None) -> str:
    return "n/a" if size is None else f"{size:.1f}"
