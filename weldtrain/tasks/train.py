"""task=train: trains on the train split, judges on the validation split, keeps the best."""

from __future__ import annotations

import contextlib
import logging
import shlex
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from weldtrain.config import AUTO, Config, flat
from weldtrain.data.audit import label_findings, survival, survival_findings
from weldtrain.data.cache import open_cache
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.data.loader import evaluation_loader, training_loader
from weldtrain.data.tuned import tuned, tuned_file
from weldtrain.engine import checkpoint
from weldtrain.engine.device import autocast_dtype, choose_device, device_name, make_deterministic
from weldtrain.engine.distributed import gathered, in_turn, world
from weldtrain.engine.evaluator import evaluate
from weldtrain.engine.examples import Examples
from weldtrain.engine.fitting import fitting_batch_size
from weldtrain.engine.trainer import Trainer
from weldtrain.errors import ConfigError, DataError
from weldtrain.formats.record import summary
from weldtrain.interruption import listen
from weldtrain.models.detector import Detector, build_detector
from weldtrain.models.weights import load_weights
from weldtrain.overrides import named
from weldtrain.resuming import own_overrides, sound
from weldtrain.telemetry.console import ap_table
from weldtrain.telemetry.provenance import provenance
from weldtrain.telemetry.record import PRUNED, Follower, RunRecord

log = logging.getLogger(__name__)

# The settings that runs are compared by, beside those that their commands name.
_COMPARED = ("model.backbone", "model.min_size", "loader.batch_size", "optimizer.name", "optimizer.lr", "trainer.epochs", "seed")


def run(cfg: Config, record: RunRecord | Follower) -> float | None:
    """Returns the best epoch's AP50 on the validation split, None where it has no defects."""
    start, asked = time.perf_counter(), cfg
    if cfg.trainer.stop_signal:
        listen(getattr(signal, f"SIG{cfg.trainer.stop_signal}"))
    torch.manual_seed(cfg.seed)
    if cfg.trainer.cpu_threads:
        torch.set_num_threads(cfg.trainer.cpu_threads)
    place = world()
    device = choose_device(cfg.device)
    dtype = autocast_dtype(cfg.trainer.precision, device)
    if cfg.trainer.deterministic:
        for note in make_deterministic(device):
            log.info("trainer.deterministic: %s", note)
    state = resumed_state(Path(cfg.resume)) if cfg.resume not in (None, AUTO) else None
    if cfg.resume == AUTO:
        log.info("resume=auto: no run to go on with in %s, this is a new one", cfg.output_dir)
    index = in_turn(lambda: open_index(cfg.dataset, cfg.cache_dir))
    index.report_findings()
    classes = list(index.class_names(cfg.dataset.classes))
    if state is not None:
        _compare(state, cfg, classes)
    train_set = DetectionDataset(index, "train", classes, cfg.model, augment=cfg.augment, seed=cfg.seed)
    val_set = DetectionDataset(index, cfg.evaluate.split, classes, cfg.model)
    log.info("labels: %s", ", ".join(f"{label} {name}" for label, name in enumerate(classes, 1)))
    for split in ("train", cfg.evaluate.split):
        log.info("%s: %s", split, index.describe(split))
    for line in summary([*label_findings(index, cfg), *survival_findings(survival(index, cfg.model), cfg.model)]):
        log.warning(line)
    cfg = replace(cfg, loader=tuned(cfg.loader, tuned_file(cfg, index, device_name(device))))
    model = build_detector(cfg.model, len(classes))
    if state is None:
        load_weights(model, cfg.model, classes)
    if cfg.model.norm == "sync" and place.size > 1 and device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(device, memory_format=torch.channels_last)
    notes = []
    if cfg.loader.batch_size == "auto":
        size, note = min(gathered(fitting_batch_size(model, train_set, cfg.optimizer, device, dtype)))
        cfg, asked = (replace(c, loader=replace(c.loader, batch_size=size)) for c in (cfg, asked))
        notes.append(note)
    share = (place.rank, place.size)
    loader = training_loader(train_set, cfg.loader, device, cfg.seed, cfg.trainer.epochs, share)
    val_loader = evaluation_loader(val_set, cfg.loader, cfg.evaluate.batch_size, device, share)
    epochs = cfg.trainer.epochs
    if cfg.trainer.max_steps is not None:
        epochs = min(epochs, -(-cfg.trainer.max_steps * cfg.trainer.accumulate // loader.order.rounds))
    train_set.cache, why = in_turn(lambda: open_cache(
        cfg.loader, index, train_set.sizes, train_set.window, cfg.cache_dir, rows=np.concatenate([train_set.rows, val_set.rows]),
        passes=epochs, workers=loader.plan.num_workers, decoded=train_set.decoded,
    ))
    val_set.cache = train_set.cache
    for note in dict.fromkeys([*notes, *loader.plan.notes, *val_loader.plan.notes, why]):
        log.info(note)

    if cfg.trainer.compile:
        model.backbone.compile()
    log.info("run directory: %s", record.dir)
    ranks = f", rank {place.rank} of {place.size}" * (place.size > 1)
    log.info("%s on %s in %s%s", cfg.model.backbone, device, str(dtype or torch.float32).removeprefix("torch."), ranks)

    examples = Examples(val_set, classes) if place.first else None

    def judge(model: Detector) -> dict[str, Any]:
        metrics = evaluate(model, val_loader, classes, cfg.evaluate, device, dtype)
        if examples is not None:
            record.picture(trainer.step, "val/examples", examples.sheet(model, device, dtype))
        return metrics

    with contextlib.closing(loader):
        trainer = Trainer(model, loader, judge, classes, replace(cfg, loader=asked.loader), device, dtype, record)
        if state is not None:
            trainer.restore(state)
            if trainer.finished:
                return _already_finished(trainer, record)
            log.info("resumed from %s: epoch %d, batch %d, step %d of %d", cfg.resume, trainer.epoch + 1, trainer.batch,
                     trainer.step, trainer.total_steps)
            record.rewind(trainer.step, judged=not trainer.unjudged)
        record.write("provenance.json", provenance(
            seeds={"seed": cfg.seed, "dataset.split.seed": cfg.dataset.split.seed}, data=index.stamp, loader=asdict(cfg.loader),
            resumed_from=cfg.resume, ranks=place.size))
        record.describe({
            "command": shlex.join(sys.argv), "directory": record.dir, "data": f"{index.root} ({index.stamp})",
            **{split: index.describe(split) for split in ("train", cfg.evaluate.split)},
            "model": f"{cfg.model.backbone}, {cfg.model.min_size} px", "device": device_name(device),
            **{note: "" for note in loader.plan.notes},
        })
        trainer.fit()
        result = trainer.summary()
        settings = flat(asdict(cfg))
        own = named(own_overrides(sys.argv)).keys() | set(_COMPARED)
        record.result({key: settings[key] for key in sorted(own & settings.keys())},
                      {"val/map_50": result["map_50"], "val/map": result["map"], "loader/images_per_s": result["images_per_s"]})
    record.summary |= {**result, "train_s": time.perf_counter() - start} | ({"status": PRUNED} if trainer.pruned else {})

    if place.first:
        ap_table(f"epoch {result['best_epoch'] + 1} on {len(val_set)} pictures of split '{cfg.evaluate.split}'", result)
    log.info("%.0f s, %.1f images/s, %.1f %% of it waiting for data", record.summary["train_s"], result["images_per_s"],
             result["data_wait_pct"])
    log.info("checkpoint: %s\nsummary:    %s\ncurves:     tensorboard --logdir %s",
             *(shlex.quote(str(p)) for p in (result["checkpoint"], record.dir / "summary.json", cfg.output_dir)))
    return result["map_50"]


def resumed_state(path: Path) -> dict[str, Any]:
    """The checkpoint, or where it is damaged the newest sound one of the same run. Raises DataError if there is none."""
    others = [other for other in sound(path.parent.parent) if other != path]
    for candidate in [path, *others]:
        try:
            state = checkpoint.load(candidate)
        except DataError as e:
            problem = e
            log.warning("%s", e)
            continue
        if "pictures" not in state:
            raise DataError("was written by an earlier release, which did not keep all that a run goes on from", candidate,
                            "start anew with model.weights=CHECKPOINT")
        return state
    raise problem


def _compare(state: dict[str, Any], cfg: Config, classes: list[str]) -> None:
    """Says which settings are others than before, and that these ones count. Raises ConfigError for other classes."""
    if state["classes"] != classes:
        raise ConfigError(f"the run knows {', '.join(state['classes'])}, the data has {', '.join(classes)}", "resume",
                          "start anew with model.weights=CHECKPOINT: all but the class layer is kept")
    before, now = flat(state["config"]), flat(asdict(cfg))
    for name in sorted(before.keys() | now.keys()):
        if name != "resume" and before.get(name) != now.get(name):
            log.warning("resume: %s is %s, it was %s; the new value counts", name, now.get(name), before.get(name))


def _already_finished(trainer: Trainer, record: RunRecord | Follower) -> float | None:
    record.unchanged = True
    log.info("this run is finished: %d steps in %d epochs; trainer.epochs=N with a larger N goes on", trainer.step, trainer.epoch)
    return trainer.best["metrics"]["map_50"]
