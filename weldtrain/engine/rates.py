"""Images per second of loaders and of training, timed as training runs, with everything at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader

from weldtrain.data.batch import Batch
from weldtrain.data.loader import Loader
from weldtrain.engine.device import wait_for
from weldtrain.engine.prefetch import device_batches
from weldtrain.engine.step import TrainingStep
from weldtrain.telemetry.clock import StepClock


@dataclass
class Rate:
    """Images per second over several windows, and what the machine did meanwhile."""

    windows: list[float] = field(default_factory=list)
    cpu_pct: float = 0.0  # of all usable cores, by this process and its workers
    cpu_ms: float = 0.0  # of a core, per picture
    gpu_pct: float | None = None
    data_wait_pct: float = 0.0

    @property
    def mean(self) -> float:
        return float(np.mean(self.windows)) if self.windows else 0.0

    @property
    def noise(self) -> float:
        """Standard deviation of the windows' rates."""
        return float(np.std(self.windows)) if len(self.windows) > 1 else 0.0


def measure(
    loader: Loader, device: torch.device, seconds: float, cores: int, step: TrainingStep | None = None,
    gpu_pct: Callable[[], float] | None = None, windows: int = 4,
) -> Rate:
    """The rate at which batches arrive on the device and, with `step`, are trained on. Starting up is not counted, nor are
    the batches that were ready by then; where single batches take long, there are fewer windows."""
    rate, clock = Rate(), StepClock(device)
    stream = _for_ever(loader, device, clock)
    with contextlib.closing(stream):
        started = time.perf_counter()
        plan = loader.plan
        for _ in range(1 + (plan.prefetch_factor or 1) * (plan.num_workers if plan.workers == "process" else 1)):
            trained(step, next(stream))
            if time.perf_counter() - started > seconds:
                break
        wait_for(device)
        clock.read()
        begun, cpu, seen, busy = time.perf_counter(), _cpu_s(), 0, []
        while len(rate.windows) < windows and not (rate.windows and time.perf_counter() - begun > 1.5 * seconds):
            start, images_seen = time.perf_counter(), 0
            while not images_seen or time.perf_counter() - start < seconds / windows:
                images_seen += trained(step, next(stream))
                clock.end_step(0)
            wait_for(device)
            rate.windows.append(images_seen / (time.perf_counter() - start))
            seen += images_seen
            if gpu_pct:
                busy.append(gpu_pct())
        wall, cpu = time.perf_counter() - begun, _cpu_s() - cpu
        rate.cpu_pct, rate.cpu_ms = 100 * cpu / wall / cores, 1e3 * cpu / seen
        rate.gpu_pct = float(np.mean(busy)) if busy else None
        rate.data_wait_pct = min(100.0, clock.read()["loader/data_wait_pct"])
    loader.close()
    return rate


def plain_rate(loader: DataLoader, device: torch.device, seconds: float) -> float:
    """Images per second of a loader of `baselines`, to the device, after its first batches."""
    seen, begun, batches = 0, 0.0, 0
    while True:
        for pictures, boxes, labels in loader:
            for part in (*pictures, boxes, labels) if isinstance(pictures, list) else (pictures, boxes, labels):
                part.to(device, non_blocking=True)
            wait_for(device)
            batches += 1
            if batches <= 2:
                begun = time.perf_counter()
                continue
            seen += len(pictures)
            if time.perf_counter() - begun > seconds:
                return seen / (time.perf_counter() - begun)


def step_rate(step: TrainingStep, batch: Batch, seconds: float) -> Rate:
    """Training on one batch that stays on the device: what no loader can exceed."""
    trained(step, batch)
    wait_for(step.device)
    rate, begun = Rate(), time.perf_counter()
    while len(rate.windows) < 2 or time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        trained(step, batch)
        wait_for(step.device)
        rate.windows.append(len(batch) / (time.perf_counter() - start))
    return rate


def _for_ever(loader: Loader, device: torch.device, clock: StepClock) -> Iterator[Batch]:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from device_batches(loader, device, clock)
        epoch += 1


def trained(step: TrainingStep | None, batch: Batch) -> int:
    """One step on one batch, if there is a step; returns its pictures."""
    if step:
        step.add(batch)
        step.update()
    return len(batch)


def _cpu_s() -> float:
    """Processor seconds of this process and its children so far."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
