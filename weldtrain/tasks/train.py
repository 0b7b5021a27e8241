"""task=train: trains on the train split, judges on the validation split, keeps the best."""

from __future__ import annotations

import contextlib
import functools
import logging
import shlex
import time
from dataclasses import replace

import numpy as np
import torch

from weldtrain.config import Config
from weldtrain.data.audit import label_findings, survival, survival_findings
from weldtrain.data.cache import open_cache
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.data.loader import evaluation_loader, training_loader
from weldtrain.data.tuned import tuned, tuned_file
from weldtrain.engine.device import autocast_dtype, choose_device, device_name
from weldtrain.engine.evaluator import evaluate
from weldtrain.engine.trainer import Trainer
from weldtrain.formats.record import summary
from weldtrain.models.detector import build_detector
from weldtrain.models.weights import load_weights
from weldtrain.telemetry.console import ap_table
from weldtrain.telemetry.record import RunRecord

log = logging.getLogger(__name__)


def run(cfg: Config, record: RunRecord) -> float | None:
    """Returns the best epoch's AP50 on the validation split, None where it has no defects."""
    start = time.perf_counter()
    torch.manual_seed(cfg.seed)
    if cfg.trainer.cpu_threads:
        torch.set_num_threads(cfg.trainer.cpu_threads)
    device = choose_device(cfg.device)
    dtype = autocast_dtype(cfg.trainer.precision, device)
    index = open_index(cfg.dataset, cfg.cache_dir)
    index.report_findings()
    classes = index.class_names(cfg.dataset.classes)
    train_set = DetectionDataset(index, "train", classes, cfg.model, augment=cfg.augment, seed=cfg.seed)
    val_set = DetectionDataset(index, cfg.evaluate.split, classes, cfg.model)
    log.info("labels: %s", ", ".join(f"{label} {name}" for label, name in enumerate(classes, 1)))
    for split in ("train", cfg.evaluate.split):
        log.info("%s: %s", split, index.describe(split))
    for line in summary([*label_findings(index, cfg), *survival_findings(survival(index, cfg.model), cfg.model)]):
        log.warning(line)
    cfg = replace(cfg, loader=tuned(cfg.loader, tuned_file(cfg, index, device_name(device))))
    loader = training_loader(train_set, cfg.loader, device, cfg.seed, cfg.trainer.epochs)
    val_loader = evaluation_loader(val_set, cfg.loader, cfg.evaluate.batch_size, device)
    epochs = cfg.trainer.epochs
    if cfg.trainer.max_steps is not None:
        epochs = min(epochs, -(-cfg.trainer.max_steps // len(loader)))
    train_set.cache, why = open_cache(
        cfg.loader, index, train_set.sizes, train_set.window, cfg.cache_dir, rows=np.concatenate([train_set.rows, val_set.rows]),
        passes=epochs, workers=loader.plan.num_workers, decoded=train_set.decoded,
    )
    val_set.cache = train_set.cache
    for note in dict.fromkeys([*loader.plan.notes, *val_loader.plan.notes, why]):
        log.info(note)

    model = build_detector(cfg.model, len(classes))
    load_weights(model, cfg.model)
    model.to(device, memory_format=torch.channels_last)
    log.info("run directory: %s", record.dir)
    log.info("%s on %s in %s", cfg.model.backbone, device, str(dtype or torch.float32).removeprefix("torch."))
    judge = functools.partial(evaluate, model, val_loader, classes, cfg.evaluate, device, dtype)
    with contextlib.closing(loader):
        result = Trainer(model, loader, judge, classes, cfg, device, dtype, record).fit()
    record.summary |= {**result, "train_s": time.perf_counter() - start}

    ap_table(f"epoch {result['best_epoch'] + 1} on {len(val_set)} pictures of split '{cfg.evaluate.split}'", result)
    log.info("%.0f s, %.1f images/s, %.1f %% of it waiting for data", record.summary["train_s"], result["images_per_s"],
             result["data_wait_pct"])
    log.info("checkpoint: %s\nsummary:    %s\ncurves:     tensorboard --logdir %s",
             *(shlex.quote(str(p)) for p in (result["checkpoint"], record.dir / "summary.json", cfg.output_dir)))
    return result["map_50"]
