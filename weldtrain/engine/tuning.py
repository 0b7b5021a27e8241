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
from weldtrain.engine.rates import Rate
from weldtrain.errors import TrainingError, one_line

WORKERS_AT_MOST = 16
# Within this share of the best, or within the noise of both, the cheaper setting is the better one.
AS_GOOD = 0.03
ENOUGH = 0.9  # of the model's own rate, from which on tuning the loader is a waste of time


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
        """Plain values, and whether with such a loader it or the model would be the limit."""
        rate = self.rate
        return {**self.setting._asdict(), "images_per_s": rate.mean, "noise": rate.noise, "windows": len(rate.windows),
                "looks": self.looks, "cpu_pct": rate.cpu_pct, "cpu_ms": rate.cpu_ms, "gpu_pct": rate.gpu_pct,
                "bottleneck": "model" if rate.mean >= ENOUGH * model_per_s else "loader", "problem": self.problem}


def candidates(now: Setting, cores: int, cache: bool) -> list[Setting]:
    """The present setting first; then the article's ladder of workers, as threads and as processes, with less and with more in
    hand; each with and without the cache, where there can be one."""
    all_cores = min(cores, WORKERS_AT_MOST)
    ladder = sorted({all_cores} | {n for n in (1, 2, 4, 8, 16) if n <= min(2 * cores, WORKERS_AT_MOST)})
    tried = [now, Setting("process", 0, 2, False)]
    tried += [Setting(kind, n, 2, False) for kind in ("thread", "process") for n in ladder]
    tried += [Setting("thread", all_cores, depth, False) for depth in (1, 4)]
    cached = [setting._replace(cache=True) for setting in tried] if cache else []
    return list(dict.fromkeys([now, *(setting._replace(cache=False) for setting in tried), *cached]))


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
            except (OSError, RuntimeError, TrainingError) as e:  # such as processes that die for lack of memory
                point.problem = one_line(str(e))
                continue
            point.rate, point.looks = rate, point.looks + 1  # the longest look counts
        alive = sorted((p for p in alive if not p.problem), key=lambda p: -p.rate.mean)[: len(alive) // 2]
    return sorted(points, key=lambda p: (bool(p.problem), -p.looks, -p.rate.mean))


def choose(points: Sequence[Point], enough: float) -> Point:
    """Of the settings with workers that are as good as the best, or give `enough` images per second, the one that takes least
    of the processor; of equals the one with fewer workers and less in hand."""
    points = [p for p in points if p.setting.num_workers and p.looks and not p.problem]
    best = points[0]
    wanted = min(enough, (1 - AS_GOOD) * best.rate.mean - best.uncertainty)
    good = [p for p in points if p.rate.mean + p.uncertainty >= wanted]
    least = min(p.rate.cpu_ms for p in good)
    cheap = [p for p in good if p.rate.cpu_ms <= 1.1 * least + 0.05]
    return min(cheap, key=lambda p: (p.setting.num_workers, p.setting.prefetch_factor, p.setting.workers != "thread"))
