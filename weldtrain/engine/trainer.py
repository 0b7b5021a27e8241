"""The training loop: steps, logging, evaluation, checkpoints. Waits for the device on log steps only.

Between two steps the state is whole: that is where a signal ends a run, and where a run that is resumed goes on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from weldtrain import interruption
from weldtrain.config import AUTO, Config
from weldtrain.data.batch import Batch
from weldtrain.data.loader import Loader
from weldtrain.engine import checkpoint
from weldtrain.engine.distributed import StopTogether, agreed, same_buffers, summed, world
from weldtrain.engine.ema import Ema
from weldtrain.engine.evaluator import Judged, operating_points, tagged
from weldtrain.engine.examples import Examples
from weldtrain.engine.fitting import memory_told
from weldtrain.engine.losswatch import LossWatch
from weldtrain.engine.optim import build_optimizer, lr_factor, set_rates
from weldtrain.engine.prefetch import device_batches
from weldtrain.engine.profile import Profile
from weldtrain.engine.pruning import Pruner
from weldtrain.engine.standing import Standing, name_of
from weldtrain.engine.step import LOSSES, TrainingStep
from weldtrain.errors import ConfigError, HangError, TrainingError, WorkerError
from weldtrain.interruption import Interrupted, deferred
from weldtrain.metrics.matching import pr_curves
from weldtrain.models.detector import Detector
from weldtrain.telemetry.clock import StepClock
from weldtrain.telemetry.console import ProgressLine, figure, progress_line
from weldtrain.telemetry.machine import MachineCounters, Sampler
from weldtrain.telemetry.record import Follower, RunRecord
from weldtrain.watchdog import beat

log = logging.getLogger(__name__)

_LOG_LINES = 5000  # about, of a long run


class Trainer:
    """Trains `model` on `loader`; `judge` judges the model that it is given, and `examples` show what that one finds.
    `trained_before` are the identities of the pictures that its weights come from."""

    def __init__(
        self, model: Detector, loader: Loader, judge: Callable[[Detector], Judged], classes: list[str], cfg: Config,
        device: torch.device, dtype: torch.dtype | None, record: RunRecord | Follower, examples: Examples | None = None,
        trained_before: torch.Tensor | None = None,
    ) -> None:
        self.model, self.loader, self.judge, self.examples, self.classes = model, loader, judge, examples, classes
        self.cfg, self.device, self.dtype, self.record = cfg, device, dtype, record
        self.world = world()
        self.batches = _batches_of_an_epoch(loader, cfg.trainer.accumulate)
        steps = cfg.trainer.epochs * -(-self.batches // cfg.trainer.accumulate)
        self.total_steps = min(steps, cfg.trainer.max_steps or steps)
        # A curve of so many points is as fine as any screen, and files stay small however long a run is.
        every = cfg.trainer.log_every
        self.log_every = max(10, self.total_steps // _LOG_LINES) if every == AUTO else every
        self.ema = Ema(model, cfg.trainer.ema) if cfg.trainer.ema else None
        pictures = cfg.loader.batch_size * self.world.size * cfg.trainer.accumulate
        self.optimizer = build_optimizer(model, cfg.optimizer, pictures)
        # It gets no device_ids, which would have it move what is where it belongs.
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True) if self.world.size > 1 else model
        self.train_step = TrainingStep(trained, self.optimizer, device, dtype, cfg.trainer.grad_clip)
        self.clock = StepClock(device)
        # What comes next, and how far the run is: all that is not within model, optimiser and schedule.
        self.epoch = self.batch = self.step = 0
        self.unjudged = False  # an epoch has ended and its evaluation is still to come
        self.standing = Standing(cfg.trainer)
        self._trained_before = trained_before
        self._chosen_on: torch.Tensor | None = None  # of what operating points were chosen by
        self.skipped = 0
        self._sums = torch.zeros(len(LOSSES), device=device)  # of the losses since the last log line
        self._unlogged = 0  # steps in `_sums`
        self._whole = True  # weights, optimiser and counters are of the same step
        self._norm = torch.zeros((), device=device)
        self._profile = Profile(cfg.trainer.profile, device, record.dir) if self.world.first else None
        self._machine: Sampler | None = None
        self._pruner, self.pruned = Pruner(cfg.sweep.objective) if self.world.first else None, False
        self._watch = LossWatch(device, loader, skip=cfg.trainer.non_finite == "skip")
        self._stop = StopTogether()
        self._writer = checkpoint.Writer()

    @functools.cached_property
    def _trained_on(self) -> torch.Tensor:
        """Identities of all pictures that are in these weights, also by way of those it began with."""
        dataset, before = self.loader.dataset, self._trained_before
        own = dataset.index.identities(dataset.rows)
        return torch.from_numpy(own if before is None else np.union1d(before.numpy(), own))

    @property
    def finished(self) -> bool:
        """Nothing is left to do."""
        over = (self.step >= self.total_steps or self.epoch >= self.cfg.trainer.epochs or self.standing.out_of_patience
                or self.pruned)
        return over and not self.unjudged

    @property
    def epochs_done(self) -> int:
        """Also one that was begun."""
        return self.epoch + (self.batch > 0)

    def fit(self) -> None:
        """Runs to the end of training. Raises TrainingError on a loss that is not finite, and where a checkpoint cannot be
        written; a signal and a lost worker leave a checkpoint of the step they came in."""
        if self.world.first:
            checkpoint.tidy(self.record.checkpoints)
            self._machine = Sampler(MachineCounters(self.device))
        try:
            with progress_line(self.total_steps, self.step) as line:
                while not self.finished:
                    if not self.unjudged:
                        self._train_epoch(line)
                    self._end_epoch(self._validate() if self._evaluation_due() else None)
        except (Interrupted, WorkerError, HangError) as ended:
            if isinstance(ended, HangError):
                self.loader.kill()  # to wait for workers that may hang as well takes long
            if self._whole:
                self._save()
            raise
        finally:
            if self._profile is not None:
                self._profile.close()
            if self._machine is not None:
                self._machine.close()
            self._writer.close()

    def summary(self) -> dict[str, Any]:
        """What a finished run is known by: the metrics of its best epoch, and its rates."""
        best = self.standing.best
        assert best is not None
        totals = self.clock.totals()
        return {
            **best["metrics"],
            "epochs": self.epochs_done,
            "steps": self.step,
            "best_epoch": best["epoch"],
            "skipped_steps": self.skipped,
            "images_per_s": totals["loader/images_per_s"] * self.world.size,
            "data_wait_pct": totals["loader/data_wait_pct"],
            "epoch_start_s": totals["loader/epoch_start_s"],
            "checkpoint": str(self.record.checkpoints / "best.pt"),
            "classes": self.classes,
        }

    def _train_epoch(self, line: ProgressLine) -> None:
        """From where it stands to the end of the epoch, or of training."""
        self.model.train()
        self.loader.set_epoch(self.epoch, self.batch)
        self.clock.start_epoch()
        rows: list[int] = []  # of the pictures of the step so far
        batches = self._on_every_rank(device_batches(self.loader, self.device, self.clock))
        together = deferred() if self.world.size > 1 else contextlib.nullcontext()  # ranks stop after the same step
        with contextlib.closing(batches), together, contextlib.ExitStack() as whole:
            for i, batch in enumerate(batches, self.batch):  # of the epoch
                beat(f"epoch {self.epoch + 1}, step {self.step + 1}")
                if not rows:
                    whole.enter_context(deferred())  # until the step is done
                last = i % self.cfg.trainer.accumulate == self.cfg.trainer.accumulate - 1 or i + 1 == self.batches
                memory = memory_told("loader.batch_size", self.cfg.loader.batch_size, self.device, self.cfg.trainer.accumulate)
                with self.loader.explained(), memory, self.clock.compute():
                    self._add(batch, i, not rows, last)
                    rows += batch.image_ids.tolist()
                    if last:
                        self._update(rows)
                self.clock.end_step(self._counted(batch, i), last)
                beat(f"the batch after epoch {self.epoch + 1}, step {self.step}")
                if last:
                    self.batch, rows = i + 1, []
                    self._whole = True
                    self._after_step(line)
                    whole.close()  # raises what came meanwhile
                    if self.step == self.total_steps or self.batch == self.batches:
                        break
        if self.batch == self.batches:
            self.epoch, self.batch = self.epoch + 1, 0
        self.unjudged = True
        self._save()  # before the evaluation, which may take long or fail

    def _on_every_rank(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """As many batches as the rank that has most: a rank without one in the last round takes its last again, for nothing."""
        with contextlib.closing(batches):
            batch = None
            for _ in range(self.batch, self.batches):
                batch = next(batches, batch)
                if batch is None:  # resumed right before such a round
                    self.loader.set_epoch(self.epoch, 0)
                    batch = next(iter(self.loader)).to(self.device)
                yield batch

    def _counted(self, batch: Batch, i: int) -> int:
        """The pictures of a batch, the ith of the epoch; none where it stands in for one that this rank does not have."""
        return len(batch) if self.loader.order.pictures(i) > self.world.rank else 0

    def _add(self, batch: Batch, i: int, first: bool, last: bool) -> None:
        """The gradient of a batch, weighted so that every picture of the step counts the same, over all batches and ranks."""
        order, accumulate = self.loader.order, self.cfg.trainer.accumulate
        start = i - i % accumulate
        together = sum(map(order.pictures, range(start, min(start + accumulate, self.batches))))
        weight = self._counted(batch, i) * self.world.size / together
        if first:
            self._watch.begin(self.model)
        parts = self.train_step.add(batch, weight, last)
        self._parts = weight * parts if first else self._parts + weight * parts

    def _update(self, rows: list[int]) -> None:
        self._whole = False
        factor = lr_factor(self.step, self.total_steps, self.cfg.scheduler)
        set_rates(self.optimizer, factor)
        self._norm = self.train_step.update()
        kept = self._watch.look(self._parts, self._norm, self.train_step.scaler.is_enabled(), self.epoch, self.step, rows)
        if kept:
            self._sums += self._parts
            self._unlogged += 1
            if self.ema:
                self.ema.update()
        else:
            self.skipped += 1
            if self.skipped > self.cfg.trainer.skip_at_most:
                raise TrainingError(f"{self.skipped} steps were left out because their loss or gradient was not finite",
                                    f"epoch {self.epoch + 1}, step {self.step + 1}", "lower optimizer.lr, or raise "
                                    "trainer.skip_at_most")
        self.step += 1

    def _after_step(self, line: ProgressLine) -> None:
        ends = self.step == self.total_steps or self.batch == self.batches
        if self._profile is not None:
            self._profile.after(self.step)
        if self.step % self.log_every == 0 or ends:
            self._log(line)
        line.advance(epoch=f"{self.epoch + 1}/{self.cfg.trainer.epochs}")
        if self.cfg.trainer.save_every and self.step % self.cfg.trainer.save_every == 0 and not ends:
            self._save()
        if self.world.size > 1:
            if (number := interruption.came()) is not None:
                self._stop.ask(self.step, number)
            if (number := self._stop.due(self.step)) is not None:
                raise Interrupted(number)

    def _log(self, line: ProgressLine) -> None:
        figures = self.clock.read()
        figures["loader/images_per_s"] *= self.world.size
        means = summed(self._sums) / max(self._unlogged * self.world.size, 1)
        losses = dict(zip(LOSSES, means.tolist()))
        self._sums.zero_()
        self._unlogged = 0
        values = {"loss/total": sum(losses.values())} | {f"loss/{name}": value for name, value in losses.items()}
        values |= {"optim/lr": self.optimizer.param_groups[0]["lr"], "optim/grad_norm": float(self._norm)} | figures
        values["loader/epoch_start_s"] = self.clock.epoch_starts_s[-1]
        values |= self._machine.read() if self._machine is not None else {}
        self.record.scalars(self.step, values, epoch=self.epoch)
        line.show(f"loss {values['loss/total']:.3f}  {figures['loader/images_per_s']:.1f} images/s  "
                  f"data wait {figures['loader/data_wait_pct']:.0f} %")

    def _evaluation_due(self) -> bool:
        return (self.step >= self.total_steps or self.epoch >= self.cfg.trainer.epochs
                or self.epoch % self.cfg.trainer.eval_every == 0)

    def _validate(self) -> dict[str, Any]:
        model = self.ema.model if self.ema else self.model
        same_buffers(model)
        judged = self.judge(model)
        metrics = judged.metrics
        self.record.scalars(self.step, tagged("val", metrics), epoch=self.epochs_done - 1)
        if self.examples is not None and self._shown():
            self.record.picture(self.step, "val/examples", self.examples.sheet(model, self.device, self.dtype))
            self.record.curves(self.step, "val/pr", pr_curves(judged.found, judged.truth, judged.met, self.classes))
        if self.world.first:  # which alone writes checkpoints
            metrics["operating_points"] = operating_points(judged, self.classes, self.cfg.evaluate)
            self._chosen_on = torch.from_numpy(judged.shown)
        log.info("epoch %d: AP50 %s, AP %s", self.epochs_done, figure(metrics["map_50"]), figure(metrics["map"]))
        return metrics

    def _shown(self) -> bool:
        """Whether this evaluation is one of those, at most forty, whose pictures and curves are kept."""
        number, of_all = (epochs // self.cfg.trainer.eval_every for epochs in (self.epochs_done, self.cfg.trainer.epochs))
        last = self.step >= self.total_steps or self.epoch >= self.cfg.trainer.epochs
        return last or number % max(1, of_all // 20) == 0

    def _end_epoch(self, metrics: dict[str, Any] | None) -> None:
        """Keeps the epoch, under the names that its `metrics` earn it; None where it was not judged."""
        with deferred():
            self.unjudged = False
            names = []
            if metrics is not None:
                if self.standing.judged(self.epochs_done, metrics):
                    names.append("best.pt")
                self.pruned = agreed(self._pruner is not None and self._pruner.hopeless(self.epochs_done, metrics))
                if self.pruned:
                    log.info("epoch %d: worse than most trials were by then, training ends", self.epochs_done)
                if self.standing.out_of_patience:
                    log.info("%d evaluations without a better AP than epoch %d: training ends (trainer.patience)",
                             self.standing.stale, self.standing.best["epoch"] + 1)
            self._save(names, self.standing.kept(self.epochs_done), metrics)

    def _save(self, names: list[str] | None = None, kept: set[str] | None = None, metrics: dict[str, Any] | None = None) -> None:
        """Writes last.pt in the background, under `names` as well, and where epochs are `kept` also under this one's."""
        beat("writing a checkpoint")
        self._watch.settle()
        if not self.world.first:
            return
        with deferred():
            own = name_of(self.epochs_done)

            def publish(path: Path) -> None:
                for name in [*(names or []), *({own} & (kept or set()))]:
                    checkpoint.publish(path, name)
                if kept is not None:
                    for file in path.parent.glob("epoch_*.pt"):
                        if file.name not in kept:
                            file.unlink()

            self._writer.write(self.record.checkpoints / "last.pt", self.state() | {"metrics": metrics}, publish)

    def state(self) -> dict[str, Any]:
        """All that a run goes on from. The schedule is a function of the step, the order of pictures of epoch and batch."""
        dataset = self.loader.dataset
        return {
            "model": self.model.state_dict(),
            "ema": self.ema.model.state_dict() if self.ema else None,
            "ema_updates": self.ema.updates if self.ema else 0,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.train_step.scaler.state_dict(),
            "random": {"torch": torch.get_rng_state()}
            | ({"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {}),
            "epoch": self.epoch,
            "batch": self.batch,
            "pictures": self.batch * self.cfg.loader.batch_size * self.world.size,
            "step": self.step,
            "unjudged": self.unjudged,
            **self.standing.state(),
            "skipped": self.skipped,
            "sums": self._sums,
            "unlogged": self._unlogged,
            "clock": self.clock.state(self.world.size),
            "classes": self.classes,
            "trained_on": self._trained_on,
            "chosen_on": self._chosen_on,
            "trained_px": np.median(dataset.index.whole.sizes[dataset.pictures], 0).tolist(),
            "config": asdict(self.cfg),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`. Raises ConfigError where it is another model's or another optimiser's."""
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(_with_rates_of(self.optimizer, state["optimizer"]))
        except (RuntimeError, ValueError, KeyError) as e:
            raise ConfigError(f"does not fit this model or optimiser ({str(e).splitlines()[-1].strip()})", "resume",
                              "leave model and optimizer as they were, or start anew with model.weights=CHECKPOINT") from e
        if self.ema:
            self.ema.model.load_state_dict(state["ema"] or state["model"])
            self.ema.updates = state["ema_updates"]
        self.train_step.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["random"]["torch"])
        if "cuda" in state["random"] and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)
        for name in ("epoch", "step", "unjudged", "skipped"):
            setattr(self, name, state[name])
        self.standing.restore(state)
        self._chosen_on, self._trained_before = state.get("chosen_on"), state.get("trained_on")
        set_rates(self.optimizer, lr_factor(max(self.step - 1, 0), self.total_steps, self.cfg.scheduler))
        together = self.cfg.loader.batch_size * self.world.size
        self.batch, rest = divmod(state["pictures"], together)
        self.batch -= self.batch % self.cfg.trainer.accumulate
        if rest:
            log.warning("the batches are others than before: %d pictures of this epoch come twice", rest)
        self._sums.copy_(state["sums"])
        self._unlogged = state["unlogged"]
        if "clock" in state:
            self.clock.restore(state["clock"], self.world.size)

    def complete(self, state: Mapping[str, Any]) -> None:
        """Leaves the checkpoints of a run as it would have left them, had it not been killed between writing last.pt, of this
        `state`, and giving it its other names."""
        if not self.world.first:
            return
        checkpoint.tidy(self.record.checkpoints)
        if self.batch or self.unjudged:
            return
        own = name_of(self.epochs_done)
        copies = {own: state} if own in self.standing.kept(self.epochs_done) else {}
        if self.standing.is_best(self.epochs_done):
            copies["best.pt"] = {**state, "metrics": self.standing.best["metrics"]}
        for name, wanted in copies.items():
            path = self.record.checkpoints / name
            if not checkpoint.is_of_step(path, state["step"]):
                checkpoint.save(path, wanted)


def _with_rates_of(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state with the settings of this run: what was learnt is kept, what was asked for is new."""
    mine = optimizer.state_dict()["param_groups"]
    return {**state, "param_groups": [{**old, **{k: v for k, v in new.items() if k != "params"}}
                                      for old, new in zip(state["param_groups"], mine, strict=True)]}


def _batches_of_an_epoch(loader: Loader, accumulate: int) -> int:
    """Of the rank that has most; with drop_last only whole steps, as with the large batch that accumulation stands for."""
    rounds = loader.order.rounds
    if loader.order.drop_last and rounds >= accumulate:
        rounds -= rounds % accumulate
    return rounds
