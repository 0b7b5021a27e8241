"""Tiles: pictures too large for the model cut into overlapping windows, each a sample like any picture.

A picture that is not larger than a tile stays whole.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from weldtrain.config import AUTO, ModelConfig
from weldtrain.data.index import AnnotationIndex
from weldtrain.formats.record import DIFFICULT, MIN_SIDE_PX

_SHOWN = 0.4  # of a box's area: what is less in a tile is no defect to learn there
_PIECE = 0.1  # of a tile's side: as much of a long defect is one to learn, however little tiles overlap


class TiledIndex(AnnotationIndex):
    """An index whose rows are windows of another's pictures: `windows` int32 [n,4] x1,y1,x2,y2 in px of the whole picture.

    A box that a window cuts is a defect there where 0.4 of it are within, or as much of its length as tiles overlap (a tenth of
    their side at least): what is less is seen better by the next tile, and counts neither way. All tiles of a picture that is cut
    are seen at one scale, also where it is narrower than a tile.
    """

    def __init__(self, whole: AnnotationIndex, tile_px: int, overlap: float, cut: np.ndarray | None = None) -> None:
        """Tiles of `tile_px` squared that share at least `overlap` of their side; of the pictures bool [n] to `cut`, else of
        all."""
        self._whole, self.tile_px = whole, tile_px
        self.file, self.root, self.stamp, self.findings = whole.file, whole.root, whole.stamp, whole.findings
        self.names, self.splits, self.format, self.classes = whole.names, whole.splits, whole.format, whole.classes
        cut = np.ones(len(whole), bool) if cut is None else cut
        grids = [_windows(*size, tile_px if tiled else max(size), overlap)
                 for size, tiled in zip(whole.sizes.tolist(), cut.tolist())]
        counts = np.array([len(windows) for windows in grids], np.int64)
        self._first = np.concatenate([[0], np.cumsum(counts)])
        self.windows = np.concatenate([np.zeros((0, 4), np.int32), *grids])
        self._shown = np.repeat(np.arange(len(whole)), counts)
        self.sizes = self.windows[:, 2:] - self.windows[:, :2]
        self.grey, self.split_ids = whole.grey[self._shown], whole.split_ids[self._shown]
        self._cut_boxes(grids, max(int(tile_px * overlap), int(tile_px * _PIECE)))

    def __reduce__(self) -> tuple:
        # A spawned worker receives what was computed; the index of whole pictures it maps again.
        return object.__new__, (TiledIndex,), vars(self)

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

    def identities(self, rows: np.ndarray) -> np.ndarray:
        return self._whole.identities(np.unique(self._shown[rows]))

    def path(self, row: int) -> str:
        return self._whole.path(self._shown[row])

    def target_sizes(self, min_size: int, max_size: int) -> np.ndarray:
        several = np.diff(self._first)[self._shown] > 1
        at_tiles_scale = np.maximum(self.sizes * min_size // self.tile_px, 1)
        return np.where(several[:, None], at_tiles_scale, super().target_sizes(min_size, max_size))

    def _cut_boxes(self, grids: list[np.ndarray], long_px: int) -> None:
        """The boxes of each window, in its own px; what is cut and at least so long is a defect."""
        whole = self._whole
        pairs = [_meeting(windows, whole.boxes[whole.box_rows(row)]) for row, windows in enumerate(grids)]
        sizes = [len(owner) for owner, _ in pairs]
        owner, at = (np.concatenate([np.zeros(0, np.int64), *part]) for part in zip(*pairs))
        owner, at = owner + np.repeat(self._first[:-1], sizes), at + np.repeat(whole.box_offsets[:-1], sizes)
        boxes, window = whole.boxes[at], self.windows[owner]
        within = clipped(boxes, window)
        sides, full = (b[:, 2:] - b[:, :2] for b in (within, boxes))
        cut_off = sides < full - MIN_SIDE_PX
        enough = (sides.prod(1) >= _SHOWN * full.prod(1)) | (cut_off & (sides >= long_px)).any(1)
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


def _windows(width: int, height: int, tile_px: int, overlap: float) -> np.ndarray:
    """int32 [n,4] x1,y1,x2,y2, row by row, evenly spaced, flush with the picture's edges."""
    y, x = (grid.ravel() for grid in np.meshgrid(
        _starts(height, tile_px, overlap), _starts(width, tile_px, overlap), indexing="ij"))
    return np.stack([x, y, np.minimum(x + tile_px, width), np.minimum(y + tile_px, height)], 1).astype(np.int32)


def _starts(side: int, tile_px: int, overlap: float) -> np.ndarray:
    if side <= tile_px:
        return np.zeros(1, int)
    stride = max(1, int(tile_px * (1 - overlap)))
    return np.linspace(0, side - tile_px, 1 + -(-(side - tile_px) // stride)).astype(int)


def _meeting(windows: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which windows and boxes of one picture share any pixel: int64 [pairs] rows of each, window by window."""
    return np.nonzero(((windows[:, None, :2] < boxes[None, :, 2:]) & (boxes[None, :, :2] < windows[:, None, 2:])).all(2))


def clipped(boxes: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Boxes [n,4] within windows [n,4] or [4]: of no extent where they do not meet."""
    corners = np.maximum(boxes[..., :2], windows[..., :2])
    return np.concatenate([corners, np.maximum(corners, np.minimum(boxes[..., 2:], windows[..., 2:]))], -1)


class Lately:
    """The last things made by many threads, each made once; what is being made is kept beside them."""

    def __init__(self, keep: int = 2) -> None:
        self._keep, self._lock = keep, threading.Lock()
        self._made: OrderedDict[int, Future[np.ndarray]] = OrderedDict()

    def __reduce__(self) -> tuple:
        return Lately, (self._keep,)

    def get(self, key: int, make: Callable[[], np.ndarray]) -> np.ndarray:
        """What was made for `key`, or else is now. Raises what `make` raises."""
        with self._lock:
            mine = key not in self._made
            if mine:
                self._made[key] = Future()
            made = self._made[key]
            self._made.move_to_end(key)
            done = [k for k, other in self._made.items() if other.done() and k != key]
            for k in done[: max(0, len(self._made) - self._keep)]:
                del self._made[k]
        if mine:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)
                with self._lock:
                    self._made.pop(key, None)
        return made.result()
