"""What an inspector asks of a detector, by class: what it misses, at how many false calls, and which sizes it finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weldtrain.metrics.matching import Boxes, match
from weldtrain.metrics.operating_point import NoPromise, at_most_missed, missed_at_most, scores_of
from weldtrain.metrics.pod import NoPod, fit_pod

SIZES = ("longer_side", "diagonal", "area_root")


def sizes_of(boxes: np.ndarray, size: str) -> np.ndarray:
    """float64 [n], in the unit of the boxes [n,4] x1,y1,x2,y2: one of SIZES."""
    sides = np.asarray(boxes, np.float64).reshape(-1, 4)
    sides = sides[:, 2:] - sides[:, :2]
    return {"longer_side": lambda: sides.max(1), "diagonal": lambda: np.hypot(*sides.T),
            "area_root": lambda: np.sqrt(sides.prod(1))}[size]()


def inspected(
    truth: Boxes, found: Boxes, classes: Sequence[str], pictures: int, *, at_most: float, confidence: float, otherwise: float,
    size: str = "longer_side",
) -> dict[str, dict[str, Any]]:
    """By class that has defects: `threshold`, the highest that keeps the promise of no more than `at_most` missed, or where the
    data do not support it `otherwise`, and `why` in words ("" where it is kept); `defects`, `missed` and `missed_at_most` (the
    bound of that confidence), `false_calls_per_picture` there; and of the POD there `a50 a90 a90_95` in px and `pod_warnings`, or
    None and `no_pod`, the reason."""
    met = match(found, truth)
    result = {}
    for label, name in enumerate(classes, 1):
        real = (truth.labels == label) & ~truth.ignored
        if not real.any():
            continue
        hits, false = scores_of(truth, found, label, met)
        try:
            threshold, why = at_most_missed(hits, at_most, confidence), ""
        except NoPromise as e:
            threshold, why = otherwise, str(e)
        seen = hits >= threshold
        result[name] = {
            "threshold": threshold, "why": why, "defects": len(hits), "missed": int((~seen).sum()),
            "missed_at_most": missed_at_most(int((~seen).sum()), len(hits), confidence),
            "false_calls_per_picture": float((false >= threshold).sum()) / pictures,
            **_pod(sizes_of(truth.boxes[real], size), seen),
        }
    return result


def _pod(sizes: np.ndarray, seen: np.ndarray) -> dict[str, Any]:
    try:
        pod = fit_pod(sizes, seen)
    except NoPod as e:
        return {"a50": None, "a90": None, "a90_95": None, "pod_warnings": [], "no_pod": str(e)}
    return {"a50": pod.a50, "a90": pod.a90, "a90_95": pod.a90_95, "pod_warnings": list(pod.warnings), "no_pod": ""}
