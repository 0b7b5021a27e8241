"""task=evaluate: judges a checkpoint on a split. Model, scale and precision are the checkpoint's own."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from weldtrain.config import Config, section
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.data.loader import evaluation_loader
from weldtrain.data.tuned import tuned, tuned_file
from weldtrain.engine import checkpoint
from weldtrain.engine.device import autocast_dtype, choose_device, device_name
from weldtrain.engine.distributed import in_turn, world
from weldtrain.engine.evaluator import evaluate, tagged
from weldtrain.models.detector import build_detector
from weldtrain.telemetry.console import ap_table
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
    metrics = evaluate(model, loader, classes, cfg.evaluate, device, autocast_dtype(trainer_cfg.precision, device)).metrics

    epoch = checkpoint.epochs_done(state) - 1
    record.scalars(state["step"], tagged(cfg.evaluate.split, metrics), epoch=epoch)
    record.summary |= {**metrics, "split": cfg.evaluate.split, "checkpoint": cfg.checkpoint, "classes": classes,
                       "best_epoch": epoch, "pictures": len(dataset)}
    if place.first:
        ap_table(f"epoch {epoch + 1} on {len(dataset)} pictures of split '{cfg.evaluate.split}'", metrics)
    log.info("summary: %s", record.dir / "summary.json")
    return metrics["map_50"]
