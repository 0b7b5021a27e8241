"""The loader's settings by measurement: every candidate gets a short look, the better half twice as long a one, and so on.

Successive halving (Jamieson, Talwalkar 2016): what is clearly slow costs little time, and those that are close are told apart
by what was measured longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from weldtrain.config import LoaderConfig
from weldtrain.engine.ledger import Rate

WORKERS_AT_MOST = 16
# Within this share of the best, or within the noise of both, the cheaper setting is the better one.
AS_GOOD = 0.03


class Setting(NamedTuple):
    """What is tried out; `cache` says whether pictures come from one, not where it lies."""

    workers: str
    num_workers: int
    prefetch_factor: int
    cache: bool

    def of(self, cfg: LoaderConfig) -> LoaderConfig:
        """The loader's configuration with this setting, and without a cache of its own."""
        return replace(cfg, **self._asdict() | {"cache": "none"})


@dataclass
class Point:
    setting: Setting
    rate: Rate = field(default_factory=Rate)
    looks: int = 0  # how long it stayed in the race
    problem: str = ""

    @property
    def uncertainty(self) -> float:
        """Standard error of the mean rate."""
        return self.rate.noise / max(len(self.rate.windows), 1) ** 0.5

    def described(self, model_per_s: float) -> dict[str, Any]:
        """Plain values, and whether such a loader or the model would be the limit."""
        rate = self.rate
        return {**self.setting._asdict(), "images_per_s": rate.mean, "noise": rate.noise, "windows": len(rate.windows),
                "looks": self.looks, "cpu_pct": rate.cpu_pct, "cpu_ms": rate.cpu_ms, "gpu_pct": rate.gpu_pct,
                "bottleneck": "model" if rate.mean >= model_per_s else "loader", "problem": self.problem}


def candidates(cores: int, cache: bool, processes: bool = True) -> list[Setting]:
    """The article's ladder of workers, as threads and as processes, with less and with more in hand, with and without the
    cache."""
    ladder = sorted({min(n, WORKERS_AT_MOST) for n in (1, 2, 4, 8, 16) if n <= 2 * cores})
    kinds = ("thread", "process") if processes else ("thread",)
    tried = [Setting("process", 0, 2, False)]
    tried += [Setting(kind, n, 2, False) for kind in kinds for n in ladder]
    tried += [Setting("thread", min(cores, WORKERS_AT_MOST), depth, False) for depth in (1, 4)]
    if cache:
        tried += [setting._replace(cache=True) for setting in tried]
    return tried


def search(settings: Iterable[Setting], measured: Callable[[Setting, float], Rate], budget_s: float) -> list[Point]:
    """Measures settings by successive halving within about `budget_s`; returns all, the best first."""
    points = [Point(setting) for setting in settings]
    alive = list(points)
    rounds = max(1, int(np.ceil(np.log2(len(alive)))))
    while alive:
        share_s = budget_s / rounds / len(alive)
        for point in alive:
            try:
                rate = measured(point.setting, share_s)
            except (OSError, RuntimeError) as e:  # such as processes that cannot be started
                point.problem = str(e)
                continue
            rate.windows = point.rate.windows + rate.windows
            point.rate, point.looks = rate, point.looks + 1
        alive = sorted((p for p in alive if not p.problem), key=lambda p: -p.rate.mean)[: len(alive) // 2]
    return sorted(points, key=lambda p: -p.rate.mean)


def choose(points: Sequence[Point], enough: float) -> Point:
    """Of the settings with workers that are as good as the best, or give `enough` images per second, the one that takes least
    of the processor; of equals the one with fewer workers and less in hand."""
    points = [p for p in points if p.setting.num_workers and p.looks]
    best = points[0]
    wanted = min(enough, (1 - AS_GOOD) * best.rate.mean - best.uncertainty)
    good = [p for p in points if p.rate.mean + p.uncertainty >= wanted]
    least = min(p.rate.cpu_ms for p in good)
    cheap = [p for p in good if p.rate.cpu_ms <= 1.1 * least + 0.05]
    return min(cheap, key=lambda p: (p.setting.num_workers, p.setting.prefetch_factor, p.setting.workers != "thread"))
