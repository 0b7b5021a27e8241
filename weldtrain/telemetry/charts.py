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


_FEWEST_TICKS = 3
_XY_LEFT, _XY_RIGHT, _XY_TOP, _XY_BOTTOM = 34, 314, 10, 176


def xy_chart(
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]], marks: Sequence[tuple[float, float, str]],
    x_range: tuple[float, float], y_range: tuple[float, float], *, x_name: str, y_name: str, log: bool = False,
    bars: Sequence[tuple[float, float, float]] = (),
) -> dict[str, Any]:
    """Lines (kind, x, y), marked points (x, y, text) and upright bars (x, low, high) in a drawing of 320 by 210."""
    scale = math.log if log else float
    (x_low, x_high), (y_low, y_high) = map(scale, x_range), y_range

    def x(value: float) -> float:
        return round(_XY_LEFT + (_XY_RIGHT - _XY_LEFT) * (scale(value) - x_low) / ((x_high - x_low) or 1), 1)

    def y(value: float) -> float:
        return round(_XY_BOTTOM - (_XY_BOTTOM - _XY_TOP) * (value - y_low) / ((y_high - y_low) or 1), 1)

    return {
        "lines": [{"kind": kind, "points": " ".join(f"{x(a)},{y(b)}" for a, b in zip(xs, ys))} for kind, xs, ys in lines],
        "marks": [{"x": x(a), "y": y(b), "text": text, "title": f"{text}: {short(a)}", "end": x(a) > 240}
                  for a, b, text in marks],
        "bars": [{"x": x(a), "low": y(low), "high": y(high)} for a, low, high in bars],
        "x_ticks": [{"x": x(t), "text": short(t)} for t in _ticks(x_range, log)],
        "y_ticks": [{"y": y(t), "text": short(t)} for t in _ticks(y_range, False)], "x_name": x_name, "y_name": y_name,
    }


def _ticks(ends: tuple[float, float], log: bool) -> list[float]:
    """Round numbers between both ends: on a logarithmic scale 1, 2 and 5 of each power of ten, or where those are many the
    powers alone, and where they are few as on any other."""
    low, high = ends
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
        if len(found) > 8:
            return [t for t in found if math.isclose(math.log10(t) % 1, 0, abs_tol=1e-9)]
        if len(found) >= _FEWEST_TICKS:
            return found
    span = (high - low) or 1
    step = next(s * 10.0**p for p in range(-9, 12) for s in (1, 2, 2.5, 5) if span / (s * 10.0**p) <= 5)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
