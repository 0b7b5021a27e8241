"""What was found in the tiles of a picture, put together again: no defect twice, no long crack in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torchvision.ops import batched_nms

from weldtrain.data.predictions import Detections
from weldtrain.data.tiles import clipped
from weldtrain.metrics.matching import overlap

_AGREE = 0.5  # IoU of two findings within what both their tiles see
_MEET = 0.1  # of the narrower one: how far two halves of a slanting crack lie side by side
_AS_SURE = 0.8  # of the surer one: what is less sure makes no finding longer, so that doubtful pieces spoil no sure one
_NEAR = 0.05  # of its length: so far from a tile's edge a finding is cut by it


class _Pair(NamedTuple):
    """Two findings that are the same thing in two tiles, in the order in which they are put together: those that agree before
    halves; the surest first, to a tenth, so that what becomes of sure findings does not hang on doubtful ones; and of those the
    ones that agree best."""

    halves: bool
    doubt: float
    disagreement: float
    one: int
    other: int


def joined(found: list[Detections], windows: np.ndarray, nms_iou: float) -> Detections:
    """What was found in the tiles [t,4] of a picture, in its px, as findings of the picture.

    Two of one class from two tiles are the same where they agree within what both tiles see, where one that its tile's edge cuts
    lies in the other, or where such edges cut both and they lie side by side there, as the halves of a long crack do. Of each
    tile at most one joins.
    The surest stands for those that agree with it; what sees more than it, and is about as sure, makes it longer. What is less
    sure and lies in a surer one goes.
    """
    boxes, labels, scores = (np.concatenate(parts) for parts in zip(*found))
    if len(found) == 1:
        return Detections(boxes, labels, scores)
    of = np.repeat(np.arange(len(found)), [len(part.labels) for part in found])
    groups = np.arange(len(boxes))
    members = [{i} for i in groups]
    doubtful: list[tuple[int, int]] = []  # one that is less sure, and a surer one
    for pair in sorted(_same(boxes, labels, scores, of, windows)):
        i, j = sorted((pair.one, pair.other), key=lambda k: scores[k])
        if scores[i] < _AS_SURE * scores[j]:
            doubtful += [(i, j)] * (not pair.halves)
            continue
        a, b = groups[i], groups[j]
        if a != b and not set(of[list(members[a])]) & set(of[list(members[b])]):
            groups[list(members[b])] = a
            members[a] |= members[b]
    one = np.array([_as_one(boxes, scores, list(members[group])) for group in range(len(boxes))]).reshape(-1, 5)
    lies_in = np.zeros(len(boxes), bool)
    for i, j in doubtful:
        lies_in[i] |= overlap(boxes[i], one[groups[j], :4], within=True) >= _AGREE
    stay = [group for group in np.unique(groups) if not lies_in[list(members[group])].all()]
    # What one tile saw as two may have become one.
    table = np.column_stack([one, labels[groups]])[stay]
    kept = batched_nms(*(torch.from_numpy(table[:, part]) for part in (slice(4), 4, 5)), nms_iou).numpy()
    return Detections(table[kept, :4], table[kept, 5].astype(np.int64), table[kept, 4])


def _as_one(boxes: np.ndarray, scores: np.ndarray, rows: list[int]) -> np.ndarray:
    """float64 [5]: corners and score of findings that are one."""
    rows = sorted(rows, key=lambda row: -scores[row])
    surest = boxes[rows[0]]
    together = np.concatenate([surest[None], boxes[rows][overlap(boxes[rows], surest) < _AGREE]])
    return np.concatenate([together[:, :2].min(0), together[:, 2:].max(0), scores[rows[:1]]])


def _same(
    boxes: np.ndarray, labels: np.ndarray, scores: np.ndarray, of: np.ndarray, windows: np.ndarray
) -> Iterator[_Pair]:
    """All pairs of findings that are the same thing in two tiles."""
    rows = [np.flatnonzero(of == tile) for tile in range(len(windows))]
    for a in range(len(windows)):
        for b in range(a + 1, len(windows)):
            common = clipped(windows[a], windows[b])
            if not len(rows[a]) or not len(rows[b]) or (common[2:] < common[:2]).any():
                continue
            one, other = boxes[rows[a]][:, None], boxes[rows[b]][None]
            ends, others_ends = _cut(one, windows[a], windows[b]), _cut(other, windows[b], windows[a])
            seen, by_other = clipped(one, common), clipped(other, common)
            agree = overlap(seen, by_other)
            for ending, part, rest in ((ends, seen, by_other), (others_ends, by_other, seen)):  # one that goes on in the other
                agree = np.where(ending.any(-1), np.maximum(agree, overlap(part, rest, within=True)), agree)
            alike = labels[rows[a]][:, None] == labels[rows[b]][None]
            for i, j in np.argwhere(alike & ((agree >= _AGREE) | _halves(one, other, ends, others_ends))):
                k, m, shared = int(rows[a][i]), int(rows[b][j]), float(agree[i, j])
                yield _Pair(shared < _AGREE, -round(float(min(scores[k], scores[m])), 1), -shared, k, m)


def _cut(boxes: np.ndarray, window: np.ndarray, other: np.ndarray) -> np.ndarray:
    """bool [...,4]: at which of its sides x1, y1, x2, y2 a box ends at an edge of its window that lies within the other one."""
    within = np.concatenate([window[:2] > other[:2], window[2:] < other[2:]])
    return (np.abs(boxes - window) <= np.tile(_near(boxes), 2)) & within


def _near(boxes: np.ndarray) -> np.ndarray:
    """float64 [...,2]: how far from an edge a box may end that it cuts, in px across and down."""
    return 1 + _NEAR * (boxes[..., 2:] - boxes[..., :2])


def _halves(one: np.ndarray, other: np.ndarray, ends: np.ndarray, others_ends: np.ndarray) -> np.ndarray:
    """bool: whether both end at facing edges, reach each other there, and lie side by side."""
    beside = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    narrower = np.minimum(one[..., 2:] - one[..., :2], other[..., 2:] - other[..., :2])
    across = (beside >= np.maximum(_MEET * narrower, 1))[..., ::-1]
    along = beside >= -(_near(one) + _near(other))  # what one tile shows to its very edge the other one shows as well
    facing = (ends[..., 2:] & others_ends[..., :2]) | (ends[..., :2] & others_ends[..., 2:])
    return (facing & along & across).any(-1)
