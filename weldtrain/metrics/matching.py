"""Which defect a detection meets: the one matching that false calls and curves rest on. Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

MIN_IOU = 0.5  # of a detection that meets a defect


@dataclass
class Boxes:
    """Boxes of many pictures, flat: boxes [n,4] x1,y1,x2,y2 in px; labels int [n] from 1; image int [n], which picture
    in 0..P-1; scores [n] for detections; ignore bool [n] for truth that counts neither way."""

    image: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray | None = None
    ignore: np.ndarray | None = None

    @property
    def ignored(self) -> np.ndarray:
        """bool [n]."""
        return np.zeros(len(self.labels), bool) if self.ignore is None else self.ignore


def match(
    found: Boxes, truth: Boxes, min_iou: float = MIN_IOU, any_class: bool = False, aside: np.ndarray | None = None
) -> np.ndarray:
    """For each detection the row of the truth it meets, -1 where it meets none: int64 [n].

    As COCO has it: the surest detection of a picture and class takes what it overlaps most; a truth is met once, one to be
    ignored any number of times and only by what meets no other, and of that one the share within it counts in place of IoU.
    So what those of at least some score meet does not hang on the others. With `any_class` also truth of another class is met,
    of equal overlaps that of its own first. Truth that is set `aside`, bool [t], is met last like that to be ignored, but by its
    IoU, and once.
    """
    return next(matches(found, truth, [min_iou], any_class, aside))


def matches(
    found: Boxes, truth: Boxes, min_ious: Sequence[float], any_class: bool = False, aside: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """`match` at each of several IoUs; what does not hang on these is worked out once."""
    of_found, of_truth = _pairs(found, truth, any_class)
    ignored, other = truth.ignored[of_truth], found.labels[of_found] != truth.labels[of_truth]
    shared = overlap(found.boxes[of_found], truth.boxes[of_truth], ignored)
    last = ignored if aside is None else ignored | aside[of_truth]
    order = np.lexsort((other, -shared, last, of_found, -found.scores[of_found]))
    for min_iou in min_ious:
        met, taken = np.full(len(found.labels), -1), np.zeros(len(truth.labels), bool)
        for pair in order[shared[order] >= min_iou]:
            detection, defect = of_found[pair], of_truth[pair]
            if met[detection] < 0 and not taken[defect]:
                met[detection] = defect
                taken[defect] = not ignored[pair]
        yield met


def counted(truth: Boxes, met: np.ndarray) -> np.ndarray:
    """bool [n]: the detections that are right or wrong; one that meets truth to be ignored is neither."""
    return np.append(~truth.ignored, True)[met]  # the last is for -1


def take(boxes: Boxes, which: np.ndarray) -> Boxes:
    """Those of them, a mask or rows."""
    return Boxes(*(None if a is None else a[which]
                   for a in (boxes.image, boxes.boxes, boxes.labels, boxes.scores, boxes.ignore)))


def pr_curves(
    found: Boxes, truth: Boxes, met: np.ndarray, classes: Sequence[str], points: int = 101
) -> dict[str, dict[str, np.ndarray]]:
    """By class with truth, at the scores 0 ... 1 of `points`: `tp fp fn` counts, `precision` and `recall`, float64 [points].
    Precision is 1 where nothing is that sure."""
    counts = counted(truth, met)
    thresholds = np.linspace(0, 1, points)
    curves = {}
    for label, name in enumerate(classes, 1):
        defects = int(np.count_nonzero((truth.labels == label) & ~truth.ignored))
        if not defects:
            continue
        own = (found.labels == label) & counts
        tp, fp = (_at_least(found.scores[own & which], thresholds) for which in (met >= 0, met < 0))
        curves[name] = {"tp": tp, "fp": fp, "fn": defects - tp, "recall": tp / defects,
                        "precision": np.divide(tp, tp + fp, out=np.ones(points), where=tp + fp > 0)}
    return curves


def _at_least(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    return (len(scores) - np.searchsorted(np.sort(scores), thresholds)).astype(float)


def _pairs(found: Boxes, truth: Boxes, any_class: bool) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of a detection and a truth of the same picture and class, as rows of both: int64 [pairs] each."""
    classes = 1 + max(found.labels.max(initial=0), truth.labels.max(initial=0))
    wanted, there = (boxes.image.astype(np.int64) * classes + (0 if any_class else boxes.labels) for boxes in (found, truth))
    order = np.argsort(there, kind="stable")
    first, end = (np.searchsorted(there[order], wanted, side) for side in ("left", "right"))
    many = end - first
    of_found = np.repeat(np.arange(len(wanted)), many)
    place = np.arange(len(of_found)) - np.repeat(np.cumsum(many) - many, many)  # 0, 1, … within a detection's pairs
    return of_found, order[np.repeat(first, many) + place]


def overlap(a: np.ndarray, b: np.ndarray, within: np.ndarray | bool = False) -> np.ndarray:
    """IoU of boxes a and b [...,4], broadcast, or where `within` the share of a that lies in b: float64 [...], 0 where there is
    no extent."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    sides = np.clip(np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]), 0, None)
    common, area, other = sides.prod(-1), (a[..., 2:] - a[..., :2]).prod(-1), (b[..., 2:] - b[..., :2]).prod(-1)
    whole = np.where(within, area, area + other - common)
    return np.divide(common, whole, out=np.zeros(whole.shape), where=whole > 0)
