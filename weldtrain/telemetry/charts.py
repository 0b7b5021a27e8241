"""Numbers into the units of the reports' drawings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_BAR_PX = 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 630, 10, 235


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def bar_rows(values: Mapping[str, float], marked: str = "", logarithmic: bool = False) -> list[dict[str, Any]]:
    """A row for each value, its bar as a share of the largest; on a logarithmic scale each factor of ten takes as much."""
    def length(value: float) -> float:
        return math.log10(1 + max(value, 0.0)) if logarithmic else max(value, 0.0)

    longest = max(map(length, values.values())) or 1.0
    return [{"name": name, "text": short(value), "width": round(_BAR_PX * length(value) / longest, 1),
             "kind": "bad" if name == marked else "soft" if name == "rest" else ""} for name, value in values.items()]


def line_chart(points: Sequence[Mapping[str, Any]], model_per_s: float) -> dict[str, Any]:
    """Rates of loader settings by number of workers, a line for each kind with and without the cache, at the usual prefetch."""
    counts = sorted({p["num_workers"] for p in points})
    most = max((p["images_per_s"] for p in points), default=1.0) or 1.0
    x = {n: round(_LEFT + 20 + i * (_RIGHT - _LEFT - 40) / max(len(counts) - 1, 1), 1) for i, n in enumerate(counts)}

    def y(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * min(max(value, 0.0), most) / most, 1)

    series = []
    for workers in ("thread", "process"):
        for cache in (False, True):
            dots = sorted((p for p in points if (p["workers"] == workers or not p["num_workers"]) and p["cache"] == cache
                           and p["prefetch_factor"] == 2 and not p["problem"]), key=lambda p: p["num_workers"])
            series.append({
                "kind": workers + " cached" * cache,
                "points": " ".join(f"{x[p['num_workers']]},{y(p['images_per_s'])}" for p in dots),
                "dots": [{"x": x[p["num_workers"]], "y": y(p["images_per_s"]), "low": y(p["images_per_s"] - p["noise"]),
                          "high": y(p["images_per_s"] + p["noise"]),
                          "title": f"{p['num_workers']} {workers}: {short(p['images_per_s'])} ± {short(p['noise'])} images/s"}
                         for p in dots],
            })
    return {"series": series, "workers": [{"x": x[n], "text": n} for n in counts],
            "ticks": [{"y": y(most * k / 4), "text": short(most * k / 4)} for k in range(5)],
            "model_y": y(model_per_s) if model_per_s <= most else None}


_AXIS_PX, _AXES_PX, _AXIS_TOP, _AXIS_BOTTOM, _TICKS = 150, 600, 30, 260, 6


def parallel_axes(names: Sequence[str], runs: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Parallel coordinates: an axis for each name, a line for each run. Numbers stand to scale, or where they span more than a
    factor of twenty to that of their logarithms; other values in order."""
    axes, at = [], []
    apart = max(_AXIS_PX, _AXES_PX / max(len(names) - 1, 1))
    for k, name in enumerate(names):
        column = [run[k] for run in runs]
        numbers = bool(column) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in column)
        scale = math.log10 if numbers and min(column) > 0 and max(column) > 20 * min(column) else float
        distinct = sorted(set(column)) if numbers else sorted({str(v) for v in column})
        places = [scale(v) for v in distinct] if numbers else list(range(len(distinct)))
        low, span = (places[0], (places[-1] - places[0]) or 1) if places else (0, 1)
        y = {v: round(_AXIS_BOTTOM - (_AXIS_BOTTOM - _AXIS_TOP) * (p - low) / span, 1) for v, p in zip(distinct, places)}
        at.append([y[v if numbers else str(v)] for v in column])
        shown = distinct if len(distinct) <= _TICKS else [distinct[0], distinct[len(distinct) // 2], distinct[-1]]
        axes.append({"x": round(70 + k * apart), "name": name,
                     "ticks": [{"y": y[v], "text": short(v) if isinstance(v, float) else v} for v in shown]})
    lines = [" ".join(f"{axis['x']},{column[i]}" for axis, column in zip(axes, at)) for i in range(len(runs))]
    return {"axes": axes, "lines": lines, "width": round(160 + apart * max(len(names) - 1, 1))}
