"""DetectionDataset: rows of the index become batches at the model's scale.

What a sample looks like depends on `(seed, epoch, row, repeat)` alone: not on the worker, the batch, the cache, or what came
before. A batch is first drafted, which needs no pixel, and then filled picture by picture, in any order and by any thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from weldtrain.config import AugmentConfig, ModelConfig
from weldtrain.data import images
from weldtrain.data.augment import Pool, Recipe, boxes_of, paint, recipes, seeds_of
from weldtrain.data.batch import IGNORED, STAGES, Batch, Failure, Sample, blank, room
from weldtrain.data.buffers import KEY, PID, PLACE, ROW, SINCE_NS, STAGE, Buffers, SharedBuffers
from weldtrain.data.cache import PictureCache
from weldtrain.data.images import Window
from weldtrain.data.index import AnnotationIndex
from weldtrain.data.sampler import Key
from weldtrain.data.tiles import Lately, tiled
from weldtrain.errors import PictureError


class Draft(NamedTuple):
    """A batch whose pictures are yet to be filled in, the memory [B,H,W,C] for them, and what each is to be."""

    batch: Batch
    canvas: np.ndarray
    recipes: list[Recipe]
    keys: Sequence[Key]


class DetectionDataset(Dataset):
    """Samples of one split. Keys are `(epoch, row, repeat)`, which is how the epoch reaches workers that outlive it."""

    def __init__(
        self,
        index: AnnotationIndex,
        split: str,
        classes: Sequence[str],
        model: ModelConfig,
        *,
        augment: AugmentConfig | None = None,
        seed: int = 0,
        spare: bool = False,
    ) -> None:
        """At the size, in the tiles and through the window of grey levels that `model` asks for.

        With `spare` a picture that cannot be decoded is black and marked as `unread` in its batch, instead of an error.
        Raises DataError for an empty split and for a class in the data that is not in `classes`.
        """
        self.index = index = tiled(index, model)
        self.rows = index.rows(split)
        self.window = Window.of(model)
        self.sizes = index.target_sizes(model.min_size, model.max_size)
        self.augment, self.seed, self.spare = augment, seed, spare
        self.defective = self.rows[np.diff(index.box_offsets)[self.rows] > 0]
        self.cache: PictureCache | None = None
        self._labels = index.labels(classes)
        self.watch(1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: Sequence[Key]) -> Batch | Failure:
        """A whole batch: torch's loader asks for it at once."""
        try:
            return self.fetch(keys, self._empty)
        except Exception as error:
            return Failure.of(error)

    def fetch(self, keys: Sequence[Key], empty: Callable[[int], torch.Tensor] | None = None) -> Batch:
        """The batch of samples `keys`; `empty` gives memory uint8 [n] for n bytes. Raises DataError for an unreadable picture."""
        draft = self.draft(keys, empty)
        for i in range(len(keys)):
            self.fill(draft, i, self._worker)
        return draft.batch

    def load(self, epoch: int, row: int) -> Sample:
        """One sample. Raises DataError for an unreadable picture."""
        batch = self.fetch([(epoch, int(row), 0)])
        (height, width), (original,) = batch.image_sizes[0].tolist(), batch.original_sizes.tolist()
        image = batch.images[0].permute(1, 2, 0)[:height, :width].numpy()
        return Sample(image, batch.boxes.numpy(), batch.labels.numpy(), int(row), tuple(original))

    def draft(self, keys: Sequence[Key], empty: Callable[[int], torch.Tensor] | None = None) -> Draft:
        """All of a batch but its pixels; `empty` gives memory uint8 [n] for n bytes."""
        start = time.perf_counter()
        index = self.index
        rows = np.array([row for _, row, _ in keys])
        made = recipes(self.augment, self.seed, keys, Pool(self.rows, self.defective, self.sizes, self._boxes))
        shown = np.array([layer.row for recipe in made for layer in recipe.layers])
        boxes, labels, owner = boxes_of(made, *self._boxes(shown), self.augment.min_visible if self.augment else 0.0)
        batch, canvas = blank(
            np.array([recipe.size[::-1] for recipe in made]),
            1 if index.grey[shown].all() else 3,
            boxes,
            labels,
            owner,
            rows,
            index.sizes[rows, ::-1].astype(np.int64),
            seeds_of(self.seed, keys),
            empty,
        )
        batch.work_s[:, STAGES.index("assemble")] = (time.perf_counter() - start) / len(made)
        return Draft(batch, canvas, made, keys)

    def fill(self, draft: Draft, i: int, worker: int = 0) -> None:
        """Puts the ith picture into its place. Raises PictureError; what is raised has it in `samples`."""
        recipe, place = draft.recipes[i], self.reading[worker]
        laps = Laps(draft.batch.work_s[i], place)
        try:
            laps("assemble")
            place[KEY] = draft.keys[i]
            out = room(draft.canvas[i], *recipe.size[::-1])
            pictures = {}
            for row in dict.fromkeys(layer.row for layer in recipe.layers):
                place[ROW] = row
                pictures[row] = self._picture(row, laps)
            laps("augment")
            paint(pictures, recipe, out)
        except Exception as error:
            if self.spare and isinstance(error, PictureError):
                out[:] = 0
                draft.batch.unread[i] = True
                return
            error.samples = self.named([draft.keys[i]])
            raise
        finally:
            laps.end()
            place[ROW] = -1

    def named(self, keys: Sequence[Key]) -> list[dict[str, int | str]]:
        """Samples in a form that outlives the process: with the picture's path below the root."""
        return [{"epoch": int(epoch), "row": int(row), "repeat": int(repeat), "picture": self.index.path(int(row))}
                for epoch, row, repeat in keys]

    @property
    def pictures(self) -> np.ndarray:
        """int64: the rows of the index of whole pictures that are shown, in path order."""
        return np.unique(self.index.shown(self.rows))

    def keep(self, rows: np.ndarray) -> None:
        """From now on only these rows of the index are there, also for what a sample is made of."""
        self.rows, self.defective = rows, np.intersect1d(self.defective, rows)

    def watch(self, workers: int, shared: SharedBuffers | None = None) -> None:
        """Notes from now on what each worker is at in `reading`, int64 [workers, PID ROW STAGE SINCE_NS KEY]: its process, the
        row of the index that it reads (-1 for none), the place in STAGES, since when by `perf_counter`, and the sample's key.
        Worker processes see `shared` and hand their batches over in it."""
        self.reading = shared.reading if shared else np.full((max(workers, 1), PLACE), -1)
        self._shared, self._worker, self._empty, self._wholes = shared, 0, Buffers(at_most=2), Lately()

    def work_as(self, worker: int) -> None:
        """Called in a worker process."""
        self._worker = worker
        if self._shared:
            self.reading, self._empty = self._shared.reading, self._shared.of(worker)
            self._shared.show_stack(worker)
        self.reading[worker, PID] = os.getpid()

    def largest(self) -> tuple[int, int]:
        """The width and the height in px that no sample of this split exceeds."""
        width, height = self.sizes[self.rows].max(0).tolist()
        if self.augment and self.augment.quarter_turns:
            width = height = max(width, height)
        return width, height

    def shapes(self) -> np.ndarray:
        """float64 [len(rows)], width over height; of pictures that may be turned, the longer side over the shorter."""
        width, height = self.sizes[self.rows].T
        turned = self.augment is not None and self.augment.quarter_turns > 0
        return np.maximum(width, height) / np.minimum(width, height) if turned else width / height

    def shown_by_class(self) -> list[np.ndarray]:
        """For each class the positions in `rows` of the pictures that show it, ignored boxes aside."""
        index = self.index
        position = np.full(len(index), -1)
        position[self.rows] = np.arange(len(self.rows))
        owner = np.repeat(position, np.diff(index.box_offsets))
        labels = np.where(index.ignored(slice(None)), 0, self.labels_of(slice(None)))
        return [np.unique(owner[(labels == label) & (owner >= 0)]) for label in np.unique(self._labels)]

    def labels_of(self, boxes: slice | np.ndarray) -> np.ndarray:
        """int64 labels, 1 for the first class, of rows of `index.boxes`."""
        return self._labels[self.index.name_ids[boxes]]

    def _boxes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How many boxes each row has, and of all of them the boxes at the model's scale and the labels."""
        index = self.index
        first, counts = index.box_offsets[rows], index.box_offsets[rows + 1] - index.box_offsets[rows]
        at = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
        scale = (self.sizes[rows] / index.sizes[rows]).astype(np.float32)
        boxes = index.boxes[at] * np.tile(np.repeat(scale, counts, 0), 2)
        return counts, boxes, np.where(index.ignored(at), IGNORED, self.labels_of(at))

    def _picture(self, row: int, laps: Laps) -> np.ndarray:
        """uint8 [h,w,C] at the model's scale, possibly read-only."""
        if self.cache is None:
            return self.decoded(row, laps)
        laps("cache")
        if (kept := self.cache.get(row)) is not None:
            return kept
        picture = self._kept(row, laps)
        for at in self.index.siblings(row):  # as long as the file is at hand, and where the cache has room
            if row in self.cache and at not in self.cache:
                self._kept(at, laps)
        return picture

    def _kept(self, row: int, laps: Laps) -> np.ndarray:
        """Decoded, and put into the cache."""
        picture = self.decoded(row, laps)
        laps("cache")
        return self.cache.put(row, picture)

    def decoded(self, row: int, laps: Callable[[str], None] = lambda stage: None) -> np.ndarray:
        """uint8 [h,w,C], a picture from its file or a tile of it, at the model's scale. Raises PictureError."""
        whole, wanted = self.index.whole, tuple(self.sizes[row].tolist())
        if whole is self.index:
            picture = self._from_file(row, laps, wanted)
        else:
            at = int(self.index.shown(row))
            x1, y1, x2, y2 = self.index.windows[row].tolist()
            picture = self._wholes.get(at, lambda: self._from_file(at, laps))[y1:y2, x1:x2]
        laps("resize")
        return images.resize(picture, wanted)

    def _from_file(self, row: int, laps: Callable[[str], None], wanted: tuple[int, int] | None = None) -> np.ndarray:
        """A whole picture, perhaps reduced where only `wanted` (width, height) of it is."""
        whole = self.index.whole
        path = whole.root / whole.path(row)
        laps("read")
        data = images.read_bytes(path)
        laps("decode")
        return images.decode(data, path, tuple(whole.sizes[row].tolist()), bool(whole.grey[row]), self.window, wanted)


class Laps:
    """Called when a stage begins: the seconds until the next go to that stage, and who looks on sees where the worker is."""

    def __init__(self, seconds: np.ndarray, place: np.ndarray) -> None:
        """seconds float [6], by STAGES; place is the worker's row of `reading`."""
        self._seconds, self._place, self._mark_s, self._stage = seconds, place, 0.0, -1

    def __call__(self, stage: str) -> None:
        self._begin(STAGES.index(stage))

    def end(self) -> None:
        """The last stage is over."""
        self._begin(-1)

    def _begin(self, stage: int) -> None:
        now = time.perf_counter()
        if self._stage >= 0:
            self._seconds[self._stage] += now - self._mark_s
        self._mark_s, self._stage = now, stage
        self._place[STAGE], self._place[SINCE_NS] = stage, int(1e9 * now)
