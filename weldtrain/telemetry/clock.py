"""StepClock: keeps apart waiting for data, copying to the device and computing, without making the device wait.

On CUDA, copying and computing are timed by events that are read only when the figures are asked for; waiting is the
time the host stands in the loader. The first step is counted apart: it holds the start of the workers and of libraries.
What an epoch's first batch keeps waiting is waiting like any other, and told once more as the epoch's start.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class _Sums:
    wait_s: float = 0.0
    copy_s: float = 0.0
    compute_s: float = 0.0
    wall_s: float = 0.0
    steps: int = 0
    images: int = 0
    work_s: Counter[str] = field(default_factory=Counter)  # of the loader, by stage
    worked: int = 0  # pictures in work_s
    ready: int = 0  # batches that lay ready when one was taken, over the `asked` times that this is known
    asked: int = 0

    def add(self, other: _Sums) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def rates(self) -> dict[str, float]:
        """Means per step in ms, images per second of wall clock, and the share of it spent waiting for data; the loader's own
        work in ms per picture."""
        steps, wall = max(self.steps, 1), max(self.wall_s, 1e-9)
        stages = {f"loader/{stage}_ms": 1e3 * seconds / self.worked for stage, seconds in self.work_s.items()}
        if self.asked:
            stages["loader/queue_depth"] = self.ready / self.asked
        return stages | {
            "loader/images_per_s": self.images / wall,
            "loader/data_wait_ms": 1e3 * self.wait_s / steps,
            "loader/data_wait_pct": 100 * self.wait_s / wall,
            "loader/h2d_ms": 1e3 * self.copy_s / steps,
            "step/compute_ms": 1e3 * self.compute_s / steps,
            "step/total_ms": 1e3 * self.wall_s / steps,
        }


def _plain(sums: _Sums, ranks: int) -> dict[str, Any]:
    return {**vars(sums), "work_s": dict(sums.work_s), "images": sums.images * ranks}


def _sums(plain: Mapping[str, Any], ranks: int) -> _Sums:
    return _Sums(**{**plain, "work_s": Counter(plain["work_s"]), "images": plain["images"] / ranks})


@dataclass
class StepClock:
    """One for a training run. The order of calls: `start_epoch`, then for each step `wait copy compute end_step`."""

    device: torch.device
    epoch_starts_s: list[float] = field(default_factory=list)
    _starting: bool = True
    _first_step: _Sums | None = None
    _run: _Sums = field(default_factory=_Sums)
    _interval: _Sums = field(default_factory=_Sums)
    _events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = field(default_factory=dict)
    _mark_s: float = 0.0
    _epoch_starts: bool = True

    def start_epoch(self) -> None:
        self._epoch_starts, self._mark_s = True, time.perf_counter()

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Around asking the loader for a batch."""
        start = time.perf_counter()
        yield
        now = time.perf_counter()
        self._interval.wait_s += now - start
        if self._epoch_starts:
            self.epoch_starts_s.append(now - self._mark_s)
            self._epoch_starts = False

    def took(self, images: int, work_s: Mapping[str, float], ready: int | None) -> None:
        """What the loader tells of a batch: seconds of its work by stage, and how many more lie ready, if that is known."""
        self._interval.work_s.update(work_s)
        self._interval.worked += images
        if ready is not None:
            self._interval.ready += ready
            self._interval.asked += 1

    def copy(self) -> contextlib.AbstractContextManager[None]:
        """Around handing a batch to the device, on the stream that copies."""
        return self._timed("copy_s")

    def compute(self) -> contextlib.AbstractContextManager[None]:
        """Around forward, backward and optimiser."""
        return self._timed("compute_s")

    def end_step(self, images: int, whole: bool = True) -> None:
        """After each batch; not a `whole` step where more are to come before the weights change."""
        now = time.perf_counter()
        self._interval.wall_s += now - self._mark_s
        self._mark_s = now
        self._interval.steps += whole
        self._interval.images += images
        if self._starting:
            self._take_events()
            self._starting, self._first_step, self._interval, self._mark_s = False, self._interval, _Sums(), time.perf_counter()

    def read(self) -> dict[str, float]:
        """The rates since the last reading; of the first step, where there was no other. Waits for the device: call it on log
        steps only."""
        self._take_events()
        # What reading took belongs to no step.
        self._mark_s = time.perf_counter()
        rates = self._or_first(self._interval).rates()
        self._run.add(self._interval)
        self._interval = _Sums()
        return rates

    def totals(self) -> dict[str, float]:
        """The rates of the whole run, and the mean start of the epochs after the first (of the first, if alone)."""
        self.read()
        later = self.epoch_starts_s[1:] or self.epoch_starts_s
        return self._or_first(self._run).rates() | {"loader/epoch_start_s": sum(later) / max(len(later), 1)}

    def state(self, ranks: int = 1) -> dict[str, Any]:
        """All that was counted so far, as plain values, pictures over all ranks: a run that is resumed counts on from it. Waits
        for the device."""
        self._take_events()
        run = _Sums()
        run.add(self._run)
        run.add(self._interval)
        return {"run": _plain(run, ranks), "first_step": self._first_step and _plain(self._first_step, ranks),
                "epoch_starts_s": [*self.epoch_starts_s]}

    def restore(self, state: Mapping[str, Any], ranks: int = 1) -> None:
        """Counts on from a `state`. This process's own first step is left out like any run's."""
        self._run, self._first_step = _sums(state["run"], ranks), state["first_step"] and _sums(state["first_step"], ranks)
        self.epoch_starts_s = [*state["epoch_starts_s"]]

    def _or_first(self, sums: _Sums) -> _Sums:
        return sums if sums.wall_s or self._first_step is None else self._first_step

    def _take_events(self) -> None:
        for name, pairs in self._events.items():
            for start, end in pairs:
                end.synchronize()
                setattr(self._interval, name, getattr(self._interval, name) + start.elapsed_time(end) / 1e3)
        self._events.clear()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.setdefault(name, []).append((start, end))
        else:
            begin = time.perf_counter()
            yield
            setattr(self._interval, name, getattr(self._interval, name) + time.perf_counter() - begin)
