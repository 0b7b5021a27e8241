"""Tiles: pictures too large for the model cut into overlapping windows, each a sample like any picture, and what is found in
them put together again. A picture that is not larger than a tile stays whole.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from torchvision.ops import batched_nms

from weldtrain.config import AUTO, ModelConfig
from weldtrain.data.index import AnnotationIndex
from weldtrain.formats.record import DIFFICULT, MIN_SIDE_PX
from weldtrain.metrics.matching import overlap

_SHOWN = 0.4  # of a box's area: what is less in a tile is no defect to learn there
_AGREE = 0.5  # IoU of two findings within what both their tiles see
_MEET = 0.1  # of the narrower one: how far two halves of a slanting crack lie side by side
_AS_SURE = 0.8  # of the surer one: what is less sure is not one with it, so that doubtful pieces spoil no sure finding
_NEAR = 0.05  # of its length: so far from a tile's edge a finding is cut by it


class TiledIndex(AnnotationIndex):
    """An index whose rows are windows of another's pictures: `windows` int32 [n,4] x1,y1,x2,y2 in px of the whole picture.

    A box that a window cuts is a defect there where 0.4 of it are within, or as much of its length as tiles overlap: what is
    less is seen better by the next tile, and counts neither way.
    """

    def __init__(self, whole: AnnotationIndex, tile_px: int, overlap: float, cut: np.ndarray | None = None) -> None:
        """Tiles of `tile_px` squared that share at least `overlap` of their side; of the pictures bool [n] to `cut`, else of
        all."""
        self._whole, self._made_of = whole, (whole, tile_px, overlap, cut)
        self.file, self.root, self.stamp, self.findings = whole.file, whole.root, whole.stamp, whole.findings
        self.names, self.splits, self.format, self.classes = whole.names, whole.splits, whole.format, whole.classes
        cut = np.ones(len(whole), bool) if cut is None else cut
        of_picture = [list(_windows(*size, tile_px if tiled else max(size), overlap))
                      for size, tiled in zip(whole.sizes.tolist(), cut.tolist())]
        counts = np.array([len(windows) for windows in of_picture], np.int64)
        self._first = np.concatenate([[0], np.cumsum(counts)])
        self.windows = np.array([window for windows in of_picture for window in windows], np.int32).reshape(-1, 4)
        self._shown = np.repeat(np.arange(len(whole)), counts)
        self.sizes = self.windows[:, 2:] - self.windows[:, :2]
        self.grey, self.split_ids = whole.grey[self._shown], whole.split_ids[self._shown]
        self._cut_boxes(whole, int(tile_px * overlap))

    def __reduce__(self) -> tuple:
        return TiledIndex, self._made_of

    @property
    def whole(self) -> AnnotationIndex:
        return self._whole

    def shown(self, rows: np.ndarray | int) -> np.ndarray | int:
        return self._shown[rows]

    def window(self, row: int) -> np.ndarray:
        return self.windows[row]

    def siblings(self, row: int) -> range:
        first, end = self._first[self._shown[row] : self._shown[row] + 2]
        return range(first, end)

    def path(self, row: int) -> str:
        return self._whole.path(self._shown[row])

    def _cut_boxes(self, whole: AnnotationIndex, overlap_px: int) -> None:
        """The boxes of each window, in its own px."""
        counts = np.diff(whole.box_offsets)[self._shown]
        owner = np.repeat(np.arange(len(self._shown)), counts)
        at = np.arange(len(owner)) + np.repeat(whole.box_offsets[self._shown] - np.cumsum(counts) + counts, counts)
        boxes, window = whole.boxes[at], self.windows[owner]
        within = _clipped(boxes, window)
        sides, full = (b[:, 2:] - b[:, :2] for b in (within, boxes))
        cut_off = sides < full - MIN_SIDE_PX
        enough = (sides.prod(1) >= _SHOWN * full.prod(1)) | (cut_off & (sides >= overlap_px)).any(1)
        kept = (sides >= MIN_SIDE_PX).all(1)
        at, owner = at[kept], owner[kept]
        self.boxes = (within - np.tile(window[:, :2], 2))[kept].astype(np.float32)
        self.name_ids, self.lines = whole.name_ids[at], whole.lines[at]
        self.flags = np.where(enough[kept], whole.flags[at], whole.flags[at] | DIFFICULT).astype(np.uint8)
        self.box_offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(self._shown)))]).astype(np.int64)


def tiled(index: AnnotationIndex, model: ModelConfig) -> AnnotationIndex:
    """The index of the samples that a model takes: with `model.tiles` of windows of its pictures."""
    if model.tiles is None or index.whole is not index:
        return index
    return TiledIndex(index, model.min_size if model.tiles == AUTO else int(model.tiles), model.tile_overlap)


def _windows(width: int, height: int, tile_px: int, overlap: float) -> Iterator[tuple[int, int, int, int]]:
    """Row by row, evenly spaced, flush with the picture's edges."""
    for y in _starts(height, tile_px, overlap):
        for x in _starts(width, tile_px, overlap):
            yield x, y, min(x + tile_px, width), min(y + tile_px, height)


def _starts(side: int, tile_px: int, overlap: float) -> list[int]:
    if side <= tile_px:
        return [0]
    stride = max(1, int(tile_px * (1 - overlap)))
    return np.linspace(0, side - tile_px, 1 + -(-(side - tile_px) // stride)).astype(int).tolist()


def _clipped(boxes: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Boxes [n,4] within windows [n,4] or [4]: of no extent where they do not meet."""
    corners = np.maximum(boxes[..., :2], windows[..., :2])
    return np.concatenate([corners, np.maximum(corners, np.minimum(boxes[..., 2:], windows[..., 2:]))], -1)


class Lately:
    """The last things made by many threads, each made once."""

    def __init__(self, keep: int = 2) -> None:
        self._keep, self._lock, self._made = keep, threading.Lock(), OrderedDict()

    def __reduce__(self) -> tuple:
        return Lately, (self._keep,)

    def get(self, key: int, make: Callable[[], np.ndarray]) -> np.ndarray:
        """What was made for `key`, or else is now. Raises what `make` raises."""
        with self._lock:
            mine = key not in self._made
            if mine:
                self._made[key] = Future()
            made = self._made[key]
            while len(self._made) > self._keep:
                self._made.popitem(last=False)
        if mine:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)
                with self._lock:
                    self._made.pop(key, None)
        return made.result()


class Detections(NamedTuple):
    """Of one picture: boxes float64 [n,4] x1,y1,x2,y2 in px, labels int64 [n] from 1, scores float64 [n]."""

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray


def joined(found: list[Detections], windows: np.ndarray, nms_iou: float) -> Detections:
    """What was found in the tiles [t,4] of a picture, in its px, as findings of the picture.

    Two of one class from two tiles are the same where they agree within what both tiles see, where one that its tile's edge cuts
    lies in the other, or where such edges cut both and they lie side by side there, as the halves of a long crack do. Of each
    tile at most one joins.
    The surest stands for those that agree with it; what sees more than it makes it longer.
    """
    boxes, labels, scores = (np.concatenate(parts) for parts in zip(*found))
    if len(found) == 1:
        return Detections(boxes, labels, scores)
    of = np.repeat(np.arange(len(found)), [len(part.labels) for part in found])
    groups = np.arange(len(boxes))
    members = [{i} for i in groups]
    for *_, i, j in sorted(_same(boxes, labels, scores, of, windows)):
        a, b = groups[i], groups[j]
        if a != b and not set(of[list(members[a])]) & set(of[list(members[b])]):
            groups[list(members[b])] = a
            members[a] |= members[b]
    one = []
    for group in np.unique(groups):
        rows = np.array(sorted(members[group], key=lambda i: -scores[i]))
        surest = boxes[rows[0]]
        more = boxes[rows[overlap(boxes[rows], surest) < _AGREE]]
        together = np.concatenate([surest[None], more])
        one.append((*together[:, :2].min(0), *together[:, 2:].max(0), labels[rows[0]], scores[rows[0]]))
    table = np.array(one, np.float64).reshape(-1, 6)
    # What one tile saw as two may have become one.
    kept = batched_nms(*(torch.from_numpy(table[:, of]) for of in (slice(4), 5, 4)), nms_iou).numpy()
    return Detections(table[kept, :4], table[kept, 4].astype(np.int64), table[kept, 5])


def _same(
    boxes: np.ndarray, labels: np.ndarray, scores: np.ndarray, of: np.ndarray, windows: np.ndarray
) -> Iterator[tuple[float, float, int, int]]:
    """Pairs of findings that are the same thing in two tiles, behind what they are sorted by: the surest first, to a tenth, so
    that what becomes of sure findings does not hang on doubtful ones, and of those the ones that agree best."""
    rows = [np.flatnonzero(of == tile) for tile in range(len(windows))]
    for a in range(len(windows)):
        for b in range(a + 1, len(windows)):
            common = _clipped(windows[a], windows[b])
            if not len(rows[a]) or not len(rows[b]) or (common[2:] <= common[:2]).any():
                continue
            one, other = boxes[rows[a]][:, None], boxes[rows[b]][None]
            ends, others_ends = _cut(one, windows[a], windows[b]), _cut(other, windows[b], windows[a])
            seen, by_other = _clipped(one, common), _clipped(other, common)
            agree = overlap(seen, by_other)
            for ending, part, rest in ((ends, seen, by_other), (others_ends, by_other, seen)):  # one that goes on in the other
                agree = np.where(ending.any(-1), np.maximum(agree, overlap(part, rest, within=True)), agree)
            sure = np.stack(np.broadcast_arrays(scores[rows[a]][:, None], scores[rows[b]][None]))
            alike = (labels[rows[a]][:, None] == labels[rows[b]][None]) & (sure.min(0) >= _AS_SURE * sure.max(0))
            for i, j in np.argwhere(alike & ((agree >= _AGREE) | _halves(one, other, ends, others_ends))):
                yield -round(float(sure[:, i, j].min()), 1), -float(agree[i, j]), int(rows[a][i]), int(rows[b][j])


def _cut(boxes: np.ndarray, window: np.ndarray, other: np.ndarray) -> np.ndarray:
    """bool [...,4]: at which of its sides x1, y1, x2, y2 a box ends at an edge of its window that lies within the other one."""
    near = 1 + _NEAR * np.tile(boxes[..., 2:] - boxes[..., :2], 2)
    within = np.concatenate([window[:2] > other[:2], window[2:] < other[2:]])
    return (np.abs(boxes - window) <= near) & within


def _halves(one: np.ndarray, other: np.ndarray, ends: np.ndarray, others_ends: np.ndarray) -> np.ndarray:
    """bool: whether both end at facing edges, and lie side by side there."""
    beside = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    narrower = np.minimum(one[..., 2:] - one[..., :2], other[..., 2:] - other[..., :2])
    meet = (beside >= np.maximum(_MEET * narrower, 1))[..., ::-1]  # in the direction across
    facing = (ends[..., 2:] & others_ends[..., :2]) | (ends[..., :2] & others_ends[..., 2:])
    return (facing & meet).any(-1)
