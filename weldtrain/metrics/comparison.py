"""What runs with different settings tell: which are better beyond the noise of repeated seeds, and which keys made it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; beyond them the normal distribution's is near enough.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
      2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
_NORMAL = 1.96
_LESS_IS_BETTER = ("train_s", "false_calls")


def objective_of(summary: Mapping[str, Any], name: str) -> float | None:
    """The value of an objective such as val/map_50, val/ap/crack or images_per_s; None where a run has none."""
    _, _, metric = name.rpartition("val/")
    if metric.startswith("ap/"):
        value = summary.get("per_class_ap", {}).get(metric[3:])
    else:
        value = summary.get(metric)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def worst(objective: str) -> float:
    """What a run without a result is worth to a sweeper."""
    return math.inf if is_minimised(objective) else -math.inf


def is_minimised(objective: str) -> bool:
    """Whether less of it is better."""
    return objective.rpartition("/")[2].startswith(_LESS_IS_BETTER)


class Group(NamedTuple):
    """Runs that differ by their seed alone. `half_width` is that of the mean's 95 % interval by Student's t, None of one run."""

    members: tuple[int, ...]
    mean: float
    half_width: float | None


def group(settings: Sequence[Hashable], values: Sequence[float]) -> list[Group]:
    """A group for each of the `settings`, of the runs whose `values` are finite, the highest mean first."""
    rows: dict[Hashable, list[int]] = {}
    for i, (setting, value) in enumerate(zip(settings, values)):
        if math.isfinite(value):
            rows.setdefault(setting, []).append(i)
    groups = []
    for members in rows.values():
        of = np.array([values[i] for i in members])
        half = _quantile(len(of) - 1) * of.std(ddof=1) / math.sqrt(len(of)) if len(of) > 1 else None
        groups.append(Group(tuple(members), float(of.mean()), None if half is None else float(half)))
    return sorted(groups, key=lambda g: -g.mean)


def ties(groups: Sequence[Group], values: Sequence[float]) -> list[bool | None]:
    """For each group whether the first one's lead over it is within the noise: the 95 % interval of the difference of both means
    holds zero (Welch's t). A single run is taken to be as noisy as the repeated ones are on average; None where none is."""
    spreads = [float(np.var([values[i] for i in g.members], ddof=1)) for g in groups if len(g.members) > 1]
    freedom = sum(len(g.members) - 1 for g in groups)
    if not spreads:
        return [None] * len(groups)
    pooled = sum(s * (len(g.members) - 1) for s, g in zip(spreads, (g for g in groups if len(g.members) > 1))) / freedom

    def of_mean(g: Group) -> tuple[float, int]:
        """The variance of a group's mean, and its degrees of freedom."""
        n = len(g.members)
        return (float(np.var([values[i] for i in g.members], ddof=1)) / n, n - 1) if n > 1 else (pooled, freedom)

    best, best_freedom = of_mean(groups[0])
    told: list[bool | None] = [False]
    for other in groups[1:]:
        variance, its_freedom = of_mean(other)
        total = best + variance
        degrees = total**2 / (best**2 / best_freedom + variance**2 / its_freedom) if total else 1.0
        told.append(groups[0].mean - other.mean <= _quantile(int(degrees)) * math.sqrt(total))
    return told


def importance(columns: Mapping[str, Sequence[object]], values: Sequence[float]) -> dict[str, float]:
    """For each key the share of the objective's variance that it explains alone, the most first: between its values (eta²), or
    where it is a number with almost as many values as runs by rank correlation (Spearman's, squared). Runs whose value is
    not finite are left out."""
    kept = [i for i, value in enumerate(values) if math.isfinite(value)]
    y = np.array([values[i] for i in kept], float)
    if len(y) < 3 or not y.std():
        return dict.fromkeys(columns, 0.0)
    found = {}
    for key, column in columns.items():
        x = [column[i] for i in kept]
        distinct = list(dict.fromkeys(map(str, x)))
        if len(distinct) > len(x) / 2 and all(isinstance(v, (int, float)) for v in x):
            ranks = [_ranks(np.array(v, float)) for v in (x, y)]
            share = float(np.corrcoef(*ranks)[0, 1] ** 2) if all(r.std() for r in ranks) else 0.0
        else:
            member = np.array([distinct.index(str(v)) for v in x])
            means = np.array([y[member == k].mean() for k in range(len(distinct))])
            share = float(((means[member] - y.mean()) ** 2).sum() / ((y - y.mean()) ** 2).sum())
        found[key] = share
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _ranks(values: np.ndarray) -> np.ndarray:
    """float [n]: places in order, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _quantile(freedom: int) -> float:
    return _T[max(freedom, 1) - 1] if freedom <= len(_T) else _NORMAL
