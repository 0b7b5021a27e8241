"""What a picture costs on its way through the pipeline, stage by stage, and what this machine could do at best.

Stages are timed one after the other in one thread, waiting for the device at each boundary: nothing overlaps, so the parts add
up to the wall clock. Rates are timed as training runs, with everything at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from weldtrain.config import OptimizerConfig
from weldtrain.data import images
from weldtrain.data.batch import STAGES, Batch
from weldtrain.data.buffers import Buffers, pinned, shared_memory
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.loader import Loader
from weldtrain.data.sampler import Key
from weldtrain.engine.optim import build_optimizer
from weldtrain.engine.prefetch import device_batches
from weldtrain.models.detector import Detector
from weldtrain.telemetry.clock import StepClock

DEVICE_STAGES = ("h2d",)
BETWEEN = "between processes"
STEP_STAGES = ("forward", "backward", "optimizer")
_PROBE_BYTES = 128 * 2**20


@dataclass
class Ledger:
    """Milliseconds per picture by stage, of the wall clock's; `rest` is what lies between the stages."""

    ms: dict[str, float]
    wall_ms: float
    pictures: int

    @property
    def loading_ms(self) -> float:
        """What the loader's workers do, on one core."""
        return sum(self.ms[stage] for stage in STAGES)

    @property
    def step_ms(self) -> float:
        return sum(self.ms[stage] for stage in STEP_STAGES)


class TrainingStep:
    """Forward, backward and optimiser on one batch, as the trainer does them between its log steps."""

    def __init__(self, model: Detector, cfg: OptimizerConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        self.model, self.device, self.dtype = model.train(), device, dtype
        self.optimizer = build_optimizer(model, cfg)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0  # costs the same, and the weights of a thousand steps on one batch do not run away
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)

    def __call__(self, batch: Batch, lap: Callable[[str], None] = lambda stage: None) -> None:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            losses = self.model(batch)
        total = torch.stack(list(losses.values())).sum()
        lap("forward")
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(total).backward()
        lap("backward")
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        lap("optimizer")


def take_ledger(
    dataset: DetectionDataset, batches: Iterable[list[Key]], step: TrainingStep, pin: bool, budget_s: float
) -> Ledger:
    """Runs batches through every stage for `budget_s` seconds, at least two, the first of which is not counted."""
    device = step.device
    names = (*STAGES, *DEVICE_STAGES, *STEP_STAGES)
    empty = pinned if pin else Buffers(at_most=2)
    seconds, wall_s, pictures = dict.fromkeys(names, 0.0), 0.0, 0
    begun = time.perf_counter()
    for k, keys in enumerate(batches):
        start = mark = time.perf_counter()
        taken: dict[str, float] = {}

        def lap(stage: str) -> None:
            nonlocal mark
            wait_for(device)
            now = time.perf_counter()
            taken[stage] = now - mark  # noqa: B023
            mark = now

        batch = dataset.fetch(keys, empty)
        mark = time.perf_counter()
        batch = batch.to(device, non_blocking=pin)
        lap("h2d")
        step(batch, lap)
        end = time.perf_counter()
        if k:
            for stage, value in (taken | dict(zip(STAGES, batch.work_s.sum(0).tolist()))).items():
                seconds[stage] += value
            wall_s += end - start
            pictures += len(keys)
        if k and end - begun > budget_s:
            break
    ms = {stage: 1e3 * value / pictures for stage, value in seconds.items()}
    wall_ms = 1e3 * wall_s / pictures
    return Ledger(ms | {"rest": wall_ms - sum(ms.values())}, wall_ms, pictures)


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
    loader: Loader, device: torch.device, seconds: float, cores: int, step: Callable[[Batch], None] | None = None,
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
            _taken(next(stream), step)
            if time.perf_counter() - started > seconds:
                break
        wait_for(device)
        clock.read()
        begun, cpu, seen, busy = time.perf_counter(), _cpu_s(), 0, []
        while len(rate.windows) < windows and not (rate.windows and time.perf_counter() - begun > 1.5 * seconds):
            start, images_seen = time.perf_counter(), 0
            while not images_seen or time.perf_counter() - start < seconds / windows:
                images_seen += _taken(next(stream), step)
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
    step(batch)
    wait_for(step.device)
    rate, begun = Rate(), time.perf_counter()
    while len(rate.windows) < 2 or time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        step(batch)
        wait_for(step.device)
        rate.windows.append(len(batch) / (time.perf_counter() - start))
    return rate


def read_rates(dataset: DetectionDataset, rows: np.ndarray, workers: int) -> dict[str, float]:
    """MB/s and files/s of the pictures' own files: from the disk, in random order by `workers` threads, and from memory.

    The system is asked to forget the files first; where it does not (network storage may), both are the same.
    """
    paths = [dataset.index.root / dataset.index.path(int(row)) for row in rows]
    nbytes = sum(path.stat().st_size for path in paths)

    def read_all(threads: int) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(images.read_bytes, paths))
        return time.perf_counter() - start

    for path in paths:
        _forget(path)
    cold, warm = read_all(max(workers, 1)), read_all(1)
    return {"random_mb_s": nbytes / 2**20 / cold, "random_files_s": len(paths) / cold, "memory_mb_s": nbytes / 2**20 / warm,
            "file_kb": nbytes / 1024 / len(paths)}


def sequential_mb_s(folder: Path) -> dict[str, float]:
    """Writing to and reading from the disk of a folder, in MB/s: 128 MB in one piece."""
    file = folder / f".probe-{os.getpid()}"
    block = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8).tobytes()  # no disk can compress it
    try:
        start = time.perf_counter()
        with open(file, "wb") as f:
            for _ in range(_PROBE_BYTES // len(block)):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
        written = time.perf_counter() - start
        _forget(file)
        start = time.perf_counter()
        with open(file, "rb", buffering=0) as f:
            while f.read(len(block)):
                pass
        read = time.perf_counter() - start
    finally:
        file.unlink(missing_ok=True)
    return {"write_mb_s": _PROBE_BYTES / 2**20 / written, "read_mb_s": _PROBE_BYTES / 2**20 / read}


def copy_gb_s(threads: int) -> float:
    """Memory copied by so many threads at once, in GB/s."""
    threads = min(threads, 16)  # more do not raise it, and each takes 64 MB
    pairs = [(np.ones(32 * 2**20, np.uint8), np.ones(32 * 2**20, np.uint8)) for _ in range(threads)]
    rounds = 4

    def copy(pair: tuple[np.ndarray, np.ndarray]) -> None:
        for _ in range(rounds):
            np.copyto(*pair)

    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(copy, pairs))
        return threads * rounds * pairs[0][0].nbytes / 1e9 / (time.perf_counter() - start)


def h2d_gb_s(device: torch.device, pin: bool) -> float:
    """Host to device in GB/s, from page-locked memory or not."""
    host = torch.empty(256 * 2**20, dtype=torch.uint8, pin_memory=pin)
    host.to(device)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(4):
        host.to(device, non_blocking=True)
    torch.cuda.synchronize(device)
    return 4 * host.nbytes / 1e9 / (time.perf_counter() - start)


def between_processes_ms(batch: Batch, batches: int = 12) -> float:
    """Milliseconds per picture between a worker process that fills shared memory and this one that reads it, beyond a copy
    within one process: fresh pages on both sides, a file descriptor, waking up."""
    loader = DataLoader(_Ready(batch, batches), batch_size=None, num_workers=1, prefetch_factor=2)
    arrivals = []
    for sent in loader:
        sent.memory.sum()  # the trainer's copy reads it too
        arrivals.append(time.perf_counter())
    target = batch.memory.clone()
    start = time.perf_counter()
    for _ in range(batches):
        target.copy_(batch.memory).sum()
    here_s = (time.perf_counter() - start) / batches
    # Of the first ones some lay ready when they were asked for.
    sending_s = (arrivals[-1] - arrivals[3]) / (len(arrivals) - 4)
    return 1e3 * max(sending_s - here_s, 0.0) / len(batch)


class _Ready(Dataset):
    def __init__(self, batch: Batch, count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Batch:
        return replace(self._batch, memory=shared_memory(self._batch.memory.nbytes).copy_(self._batch.memory))


def _for_ever(loader: Loader, device: torch.device, clock: StepClock) -> Iterator[Batch]:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from device_batches(loader, device, clock)
        epoch += 1


def _taken(batch: Batch, step: Callable[[Batch], None] | None) -> int:
    if step:
        step(batch)
    return len(batch)


def wait_for(device: torch.device) -> None:
    """Until everything that was queued on it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_s() -> float:
    """Processor seconds of this process and its children so far."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _forget(path: Path) -> None:
    """Asks the system to drop a file from memory, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
