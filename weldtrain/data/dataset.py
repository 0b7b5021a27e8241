"""DetectionDataset: a row of the index becomes a sample at the model's scale.

What a sample looks like depends on `(seed, epoch, row)` alone: not on the worker, the batch, or what came before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.utils.data import Dataset

from weldtrain.config import AugmentConfig, ModelConfig
from weldtrain.data.augment import augment
from weldtrain.data.batch import IGNORED, Failure, Sample
from weldtrain.data.images import Window, resize, target_size
from weldtrain.data.index import AnnotationIndex


class DetectionDataset(Dataset):
    """Samples of one split. Keys are `(epoch, row)`, which is how the epoch reaches workers that outlive it."""

    def __init__(
        self,
        index: AnnotationIndex,
        split: str,
        classes: Sequence[str],
        model: ModelConfig,
        *,
        augment: AugmentConfig | None = None,
        seed: int = 0,
    ) -> None:
        """At the size and through the window that `model` asks for.

        Raises DataError for an empty split and for a class in the data that is not in `classes`.
        """
        self.index = index
        self.rows = index.rows(split)
        self.min_size, self.max_size, self.window = model.min_size, model.max_size, Window.of(model)
        self.augment, self.seed = augment, seed
        self._labels = index.labels(classes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[int, int]) -> Sample | Failure:
        try:
            return self.load(*key)
        except Exception as error:
            return Failure.of(error)

    def load(self, epoch: int, row: int) -> Sample:
        """The sample of a row of the index in an epoch. Raises DataError for an unreadable picture."""
        index, width_height = self.index, tuple(int(v) for v in self.index.sizes[row])
        image = index.picture(row, self.window)
        size = target_size(*width_height, self.min_size, self.max_size)
        image = resize(image, size)
        at = index.box_rows(row)
        scale = np.divide(size, width_height, dtype=np.float32)
        boxes = index.boxes[at] * np.tile(scale, 2)
        if self.augment is not None:
            image, boxes = augment(image, boxes, self.augment, np.random.default_rng((self.seed, epoch, row)))
        labels = np.where(index.ignored(at), IGNORED, self.labels_of(at))
        if (labels == IGNORED).any():
            last = np.argsort(labels == IGNORED, kind="stable")
            boxes, labels = boxes[last], labels[last]
        return Sample(image, boxes, labels, int(row), width_height[::-1])

    def labels_of(self, boxes: slice | np.ndarray) -> np.ndarray:
        """int64 labels, 1 for the first class, of rows of `index.boxes`."""
        return self._labels[self.index.name_ids[boxes]]
