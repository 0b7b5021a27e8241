"""The training loop: steps, logging, evaluation, checkpoints. Waits for the device on log steps only."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from weldtrain.config import Config
from weldtrain.data.batch import Batch
from weldtrain.data.loader import Loader
from weldtrain.engine import checkpoint
from weldtrain.engine.evaluator import tagged
from weldtrain.engine.optim import build_optimizer, build_scheduler
from weldtrain.engine.prefetch import device_batches
from weldtrain.errors import TrainingError
from weldtrain.models.detector import Detector
from weldtrain.telemetry.clock import StepClock
from weldtrain.telemetry.console import ProgressLine, figure, progress_line
from weldtrain.telemetry.machine import MachineCounters
from weldtrain.telemetry.record import RunRecord

log = logging.getLogger(__name__)

LOSSES = ("classifier", "box_reg", "objectness", "rpn_box_reg")


class Trainer:
    """Trains `model` on `loader`; `judge` returns the validation metrics of the model as it stands."""

    def __init__(
        self, model: Detector, loader: Loader, judge: Callable[[], dict[str, Any]], classes: list[str], cfg: Config,
        device: torch.device, dtype: torch.dtype | None, record: RunRecord,
    ) -> None:
        self.model, self.loader, self.judge, self.classes = model, loader, judge, classes
        self.cfg, self.device, self.dtype, self.record = cfg, device, dtype, record
        steps = cfg.trainer.epochs * len(loader)
        self.total_steps = min(steps, cfg.trainer.max_steps or steps)
        self.optimizer = build_optimizer(model, cfg.optimizer)
        self.scheduler = build_scheduler(self.optimizer, cfg.scheduler, self.total_steps)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        self.clock, self.machine = StepClock(device), MachineCounters(device)
        self.epoch = self.step = 0
        self.best: dict[str, Any] | None = None
        self._watch = LossWatch(device, loader)
        self._sums = torch.zeros(len(LOSSES), device=device)  # of the losses since the last log line
        self._unlogged = 0  # steps in `_sums`
        self._norm = torch.zeros((), device=device)

    def fit(self) -> dict[str, Any]:
        """Runs to the end of training; returns the summary of the best epoch. Raises TrainingError on a non-finite loss."""
        with progress_line(self.total_steps) as line:
            while self.step < self.total_steps:
                self._epoch(line)
                last = self.step == self.total_steps
                metrics = self._validate() if last or (self.epoch + 1) % self.cfg.trainer.eval_every == 0 else None
                self._save(metrics)
                self.epoch += 1
        assert self.best is not None
        totals = self.clock.totals()
        metrics = self.best["metrics"]
        return {
            **metrics,
            "epochs": self.epoch,
            "steps": self.step,
            "best_epoch": self.best["epoch"],
            "images_per_s": totals["loader/images_per_s"],
            "data_wait_pct": totals["loader/data_wait_pct"],
            "epoch_start_s": totals["loader/epoch_start_s"],
            "checkpoint": str(self.record.checkpoints / "best.pt"),
            "classes": self.classes,
        }

    def _epoch(self, line: ProgressLine) -> None:
        self.model.train()
        self.loader.set_epoch(self.epoch)
        self.clock.start_epoch()
        ends_at = min(self.step + len(self.loader), self.total_steps)
        for batch in device_batches(self.loader, self.device, self.clock):
            with self.loader.explained(), self.clock.compute():
                self._step(batch)
            self.clock.end_step(len(batch))
            self.step += 1
            self._unlogged += 1
            if self.step % self.cfg.trainer.log_every == 0 or self.step == ends_at:
                self._log(line)
            line.advance(epoch=f"{self.epoch + 1}/{self.cfg.trainer.epochs}")
            if self.step == ends_at:
                break
        self._watch.settle()

    def _step(self, batch: Batch) -> None:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            losses = self.model(batch)
        parts = torch.stack([losses[name] for name in LOSSES])
        total = parts.sum()
        self._watch.look(parts.detach(), self.epoch, self.step, batch)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(total).backward()
        self.scaler.unscale_(self.optimizer)
        clip = self.cfg.trainer.grad_clip
        self._norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if clip is None else clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self._sums += parts.detach()

    def _log(self, line: ProgressLine) -> None:
        lr = self.optimizer.param_groups[0]["lr"]
        figures = self.clock.read()
        losses = dict(zip(LOSSES, (self._sums / self._unlogged).tolist()))
        self._sums.zero_()
        self._unlogged = 0
        values = {"loss/total": sum(losses.values())} | {f"loss/{name}": value for name, value in losses.items()}
        values |= {"optim/lr": lr, "optim/grad_norm": float(self._norm)} | figures
        values["loader/epoch_start_s"] = self.clock.epoch_starts_s[-1]
        self.record.scalars(self.step, values | self.machine.read(), epoch=self.epoch)
        line.show(f"loss {values['loss/total']:.3f}  {figures['loader/images_per_s']:.1f} images/s  "
                  f"data wait {figures['loader/data_wait_pct']:.0f} %")

    def _validate(self) -> dict[str, Any]:
        metrics = self.judge()
        self.record.scalars(self.step, tagged("val", metrics), epoch=self.epoch)
        log.info("epoch %d: AP50 %s, AP %s", self.epoch + 1, figure(metrics["map_50"]), figure(metrics["map"]))
        return metrics

    def _save(self, metrics: dict[str, Any] | None) -> None:
        """Writes last.pt, and best.pt where no `metrics` before were better: without any AP the latest is the best."""
        last = self.record.checkpoints / "last.pt"
        better = metrics is not None and (self.best is None or _worth(metrics) >= _worth(self.best["metrics"]))
        if better:
            self.best = {"epoch": self.epoch, "metrics": metrics}
        checkpoint.save(last, {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "metrics": metrics,
            "best": self.best,
            "classes": self.classes,
            "config": asdict(self.cfg),
        })
        if better:
            checkpoint.publish(last, "best.pt")


def _worth(metrics: dict[str, Any]) -> float:
    return -1.0 if metrics["map"] is None else metrics["map"]


class _Seen(NamedTuple):
    parts: torch.Tensor
    ready: torch.cuda.Event | None
    epoch: int
    step: int
    image_ids: torch.Tensor


class LossWatch:
    """Stops the run on a loss that is not finite: at once on a CPU, one step late on CUDA, so that no step waits."""

    def __init__(self, device: torch.device, loader: Loader) -> None:
        self._on_cuda = device.type == "cuda"
        self._index = loader.dataset.index
        self._pending: deque[_Seen] = deque()

    def look(self, parts: torch.Tensor, epoch: int, step: int, batch: Batch) -> None:
        """Takes the losses [4] of a step on its way; raises TrainingError for an earlier one."""
        ready = None
        if self._on_cuda:
            pinned = torch.empty(parts.shape, dtype=parts.dtype, pin_memory=True)
            parts = pinned.copy_(parts, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self._pending.append(_Seen(parts, ready, epoch, step, batch.image_ids))
        self._check(keep=1 if self._on_cuda else 0)

    def settle(self) -> None:
        """Looks at all that is left; called before anything is saved."""
        self._check(keep=0)

    def _check(self, keep: int) -> None:
        while len(self._pending) > keep:
            seen = self._pending.popleft()
            if seen.ready is not None:
                seen.ready.synchronize()
            if not torch.isfinite(seen.parts).all():
                values = ", ".join(f"{name} {value:g}" for name, value in zip(LOSSES, seen.parts.tolist()))
                names = ", ".join(self._index.path(int(row)) for row in seen.image_ids)
                raise TrainingError(
                    f"the loss is not finite ({values})", f"epoch {seen.epoch + 1}, step {seen.step + 1}, pictures {names}",
                    "lower optimizer.lr, raise scheduler.warmup, or set trainer.precision=fp32; last.pt is from before",
                )
