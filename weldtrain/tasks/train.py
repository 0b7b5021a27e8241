"""task=train: trains on the train split, judges on the validation split, keeps the best."""

from __future__ import annotations

import contextlib
import logging
import shlex
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from weldtrain.config import AUTO, PATH_KEYS, Config, flat
from weldtrain.data.audit import label_findings, survival, survival_findings
from weldtrain.data.cache import open_cache
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.index import AnnotationIndex
from weldtrain.data.indexing import open_index
from weldtrain.data.loader import Loader, evaluation_loader, training_loader
from weldtrain.data.tuned import tuned, tuned_file
from weldtrain.engine import checkpoint
from weldtrain.engine.device import autocast_dtype, choose_device, device_name, make_deterministic
from weldtrain.engine.distributed import gathered, in_turn, world
from weldtrain.engine.evaluator import evaluate
from weldtrain.engine.examples import Examples
from weldtrain.engine.fitting import fitting_batch_size
from weldtrain.engine.trainer import Trainer
from weldtrain.errors import ConfigError, DataError, HangError
from weldtrain.formats.record import summary
from weldtrain.interruption import listen
from weldtrain.models.detector import Detector, build_detector
from weldtrain.models.weights import load_weights
from weldtrain.overrides import command_line, named
from weldtrain.resuming import MADE_OF, own_overrides, sound, varied
from weldtrain.telemetry.console import ap_table
from weldtrain.telemetry.provenance import provenance
from weldtrain.telemetry.record import PRUNED, Follower, RunRecord
from weldtrain.watchdog import watching

log = logging.getLogger(__name__)

# By which runs are compared, beside what their commands name.
_COMPARED = ("model.backbone", "model.min_size", "loader.batch_size", "optimizer.name", "optimizer.lr", "trainer.epochs", "seed")


class _Data(NamedTuple):
    index: AnnotationIndex
    classes: list[str]
    train: DetectionDataset
    val: DetectionDataset


def run(cfg: Config, record: RunRecord | Follower) -> float | None:
    """Returns the best epoch's AP50 on the validation split, None where it has no defects."""
    asked = cfg
    device, dtype = _prepared(cfg)
    state = resumed_state(Path(cfg.resume)) if cfg.resume not in (None, AUTO) else None
    if cfg.resume == AUTO:
        log.info("resume=auto: no run to go on with in %s, this is a new one", cfg.output_dir)
    data = _data(cfg)
    if state is not None:
        _compare(state, cfg, data.classes)
    cfg = replace(cfg, loader=tuned(cfg.loader, tuned_file(cfg, data.index, device_name(device))))
    model, trained_before = _model(cfg, data.classes, state is None, device)
    if cfg.loader.batch_size == "auto":
        size, note = min(gathered(fitting_batch_size(model, data.train, cfg.optimizer, device, dtype)))
        cfg, asked = (replace(c, loader=replace(c.loader, batch_size=size)) for c in (cfg, asked))
        log.info(note)
    loader, val_loader = _loaders(cfg, data, device)
    if cfg.trainer.compile:
        model.backbone.compile()
    place = world()
    log.info("run directory: %s", record.dir)
    log.info("%s on %s in %s%s", cfg.model.backbone, device, str(dtype or torch.float32).removeprefix("torch."),
             f", rank {place.rank} of {place.size}" * (place.size > 1))

    def last_words(error: HangError) -> None:
        record.__exit__(type(error), error, error.__traceback__)
        print(f"weldtrain: {error}", file=sys.stderr, flush=True)

    with contextlib.closing(loader), watching(cfg.trainer.hang_s, record.log_file, loader.stacks, last_words):
        trainer = Trainer(model, loader, lambda model: evaluate(model, val_loader, data.classes, cfg.evaluate, device, dtype),
                          data.classes, replace(cfg, loader=asked.loader), device, dtype, record,
                          Examples(data.val, data.classes) if place.first else None, trained_before)
        if state is not None:
            trainer.restore(state)
            if Path(cfg.resume) == record.checkpoints / "last.pt":
                trainer.complete(state)
            if trainer.finished:
                return _already_finished(trainer, record)
            log.info("resumed from %s: epoch %d, batch %d, step %d of %d", cfg.resume, trainer.epoch + 1, trainer.batch,
                     trainer.step, trainer.total_steps)
            record.rewind(trainer.step, judged=not trainer.unjudged)
        _describe(record, cfg, data, device, loader.plan.notes)
        trainer.fit()
        result = trainer.summary()
        record.result(_compared(cfg, record.dir),
                      {"val/map_50": result["map_50"], "val/map": result["map"], "loader/images_per_s": result["images_per_s"]})
    record.summary |= {**result, "train_s": record.elapsed_s} | ({"status": PRUNED} if trainer.pruned else {})

    if place.first:
        ap_table(f"epoch {result['best_epoch'] + 1} on {len(data.val.pictures)} pictures of split '{cfg.evaluate.split}'", result)
    log.info("%.0f s, %.1f images/s, %.1f %% of it waiting for data", record.summary["train_s"], result["images_per_s"],
             result["data_wait_pct"])
    log.info("checkpoint: %s\nsummary:    %s", shlex.quote(result["checkpoint"]), shlex.quote(str(record.dir / "summary.json")))
    if "tensorboard" in cfg.trainer.log:
        among = cfg.output_dir if record.dir.is_relative_to(cfg.output_dir) else record.dir
        log.info("curves:     tensorboard --logdir %s", shlex.quote(str(among)))
    return result["map_50"]


def _prepared(cfg: Config) -> tuple[torch.device, torch.dtype | None]:
    """The device, and the type of autocast on it; this process set up to train on it."""
    if cfg.trainer.stop_signal:
        listen(getattr(signal, f"SIG{cfg.trainer.stop_signal}"))
    torch.manual_seed(cfg.seed)
    device = choose_device(cfg.device, cfg.trainer.cpu_threads)
    if cfg.trainer.deterministic:
        for note in make_deterministic(device):
            log.info("trainer.deterministic: %s", note)
    return device, autocast_dtype(cfg.trainer.precision, device)


def _data(cfg: Config) -> _Data:
    """The two splits; what their annotations make of a model like this is told."""
    index = in_turn(lambda: open_index(cfg.dataset, cfg.cache_dir))
    index.report_findings()
    classes = list(index.class_names(cfg.dataset.classes))
    _, of_class, name = cfg.sweep.objective.partition("val/ap/")
    if of_class and name not in classes:
        raise ConfigError(f"no class '{name}'", "sweep.objective", f"there are {', '.join(classes)}")
    train_set = DetectionDataset(index, "train", classes, cfg.model, augment=cfg.augment, seed=cfg.seed)
    val_set = DetectionDataset(index, cfg.evaluate.split, classes, cfg.model)
    log.info("labels: %s", ", ".join(f"{label} {name}" for label, name in enumerate(classes, 1)))
    for split in ("train", cfg.evaluate.split):
        log.info("%s: %s", split, index.describe(split))
    if cfg.model.tiles is not None:
        rare = cfg.loader.sampling == "uniform" and 3 * len(train_set.defective) < len(train_set)
        log.info("model.tiles=%s: %d tiles of %d training pictures, %d of them with defects%s", cfg.model.tiles, len(train_set),
                 len(train_set.pictures), len(train_set.defective), "; loader.sampling=balanced shows these more often" * rare)
    for line in summary([*label_findings(index, cfg), *survival_findings(survival(train_set.index, cfg.model), cfg.model)]):
        log.warning(line)
    return _Data(index, classes, train_set, val_set)


def _model(cfg: Config, classes: list[str], anew: bool, device: torch.device) -> tuple[Detector, torch.Tensor | None]:
    """The model to train, and the identities of the pictures that its weights come from."""
    model = build_detector(cfg.model, len(classes))
    trained_before = load_weights(model, cfg.model, classes) if anew else None
    if cfg.model.norm == "sync" and world().size > 1 and device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model.to(device, memory_format=torch.channels_last), trained_before


def _loaders(cfg: Config, data: _Data, device: torch.device) -> tuple[Loader, Loader]:
    """Of this rank's share, to train on and to judge by; both read through one cache."""
    share = (world().rank, world().size)
    loader = training_loader(data.train, cfg.loader, device, cfg.seed, cfg.trainer.epochs, share)
    val_loader = evaluation_loader(data.val, cfg.loader, cfg.evaluate.batch_size, device, share)
    epochs = cfg.trainer.epochs
    if cfg.trainer.max_steps is not None:
        epochs = min(epochs, -(-cfg.trainer.max_steps * cfg.trainer.accumulate // loader.order.rounds))
    data.train.cache, why = in_turn(lambda: open_cache(
        cfg.loader, data.train.index, data.train.sizes, data.train.window, cfg.cache_dir,
        rows=np.concatenate([data.train.rows, data.val.rows]), passes=epochs, workers=loader.plan.num_workers,
        decoded=data.train.decoded,
    ))
    data.val.cache = data.train.cache
    for note in dict.fromkeys([*loader.plan.notes, *val_loader.plan.notes, why]):
        log.info(note)
    return loader, val_loader


def _describe(record: RunRecord | Follower, cfg: Config, data: _Data, device: torch.device, notes: list[str]) -> None:
    record.write(MADE_OF, provenance(
        seeds={"seed": cfg.seed, "dataset.split.seed": cfg.dataset.split.seed}, data=data.index.stamp, loader=asdict(cfg.loader),
        resumed_from=cfg.resume, ranks=world().size))
    record.describe({
        "command": command_line(sys.argv[1:]), "directory": record.dir, "data": f"{data.index.root} ({data.index.stamp})",
        **{split: data.index.describe(split) for split in ("train", cfg.evaluate.split)},
        "model": f"{cfg.model.backbone}, {cfg.model.min_size} px", "device": device_name(device),
        **{note: "" for note in notes},
    }, flat(asdict(cfg)))


def _compared(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """The settings that runs are compared by: in a sweep those that it varies, since TensorBoard shows the first few alone."""
    settings, own = flat(asdict(cfg)), own_overrides(sys.argv)
    asked = varied(own, run_dir)
    if asked is None:
        asked = {**dict.fromkeys(_COMPARED, ""), **named(own)}
    return {key: settings.get(key, value) for key, value in asked.items() if key not in PATH_KEYS and not key.startswith("hydra")}


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
    limit = "trainer.max_steps" if trainer.step == trainer.cfg.trainer.max_steps else "trainer.epochs"
    log.info("this run is finished: %d steps in %d epochs; %s=N with a larger N goes on", trainer.step, trainer.epochs_done,
             limit)
    return trainer.standing.best["metrics"]["map_50"]
