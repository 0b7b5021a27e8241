"""Two loaders to compare with, on the same pictures: what a first attempt looks like, and the article's tuned one.

Both hand over float pictures of full size, as the article's code does; the resizing is then the model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from weldtrain.config import AugmentConfig
from weldtrain.data.index import AnnotationIndex

Item = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class NaiveDataset(Dataset):
    """Pillow, and a float copy of every picture."""

    def __init__(self, index: AnnotationIndex, rows: np.ndarray, augment: AugmentConfig | None = None) -> None:
        self.index, self.rows, self.augment = index, rows, augment or AugmentConfig()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Item:
        row = int(self.rows[i])
        image = np.array(Image.open(self.index.root / self.index.path(row)).convert("RGB"))
        boxes, labels = self.annotations(row)
        image, boxes = _augmented(image, boxes, self.augment)
        return (torch.tensor(image).permute(2, 0, 1) / 255.0, torch.tensor(boxes, dtype=torch.float32),
                torch.tensor(labels, dtype=torch.long))

    def annotations(self, row: int) -> tuple[np.ndarray, Sequence[int]]:
        """Boxes [n,4] in px of the file's picture, and labels."""
        at = self.index.box_rows(row)
        return np.array(self.index.boxes[at]), self.index.name_ids[at].tolist()


class ArticleDataset(NaiveDataset):
    """The article's section 4.2: OpenCV, and no copy on the way to a tensor."""

    def __getitem__(self, i: int) -> Item:
        row = int(self.rows[i])
        image = cv2.imread(str(self.index.root / self.index.path(row)))
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        boxes, labels = self.annotations(row)
        image, boxes = _augmented(image, boxes, self.augment)
        return (torch.from_numpy(image).permute(2, 0, 1).float() / 255.0, torch.tensor(boxes, dtype=torch.float32),
                torch.tensor(labels, dtype=torch.long))


def collate(batch: Sequence[Item]) -> tuple[torch.Tensor | list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The article's section 3.4; pictures of several sizes, which it cannot stack, stay a list."""
    images = [image for image, _, _ in batch]
    boxes = [torch.cat([torch.full((len(b), 1), float(i)), b], 1) for i, (_, b, _) in enumerate(batch)]
    whole = len({image.shape for image in images}) == 1
    return torch.stack(images) if whole else images, torch.cat(boxes), torch.cat([labels for _, _, labels in batch])


def naive_loader(dataset: NaiveDataset, batch_size: int) -> DataLoader:
    """torch's defaults: everything in the training process."""
    return DataLoader(dataset, batch_size, shuffle=True, collate_fn=collate, drop_last=True)


def article_loader(dataset: ArticleDataset, batch_size: int, workers: int = 4, pin: bool = False) -> DataLoader:
    """The article's section 4.3."""
    return DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, collate_fn=collate, drop_last=True,
                      persistent_workers=workers > 0, prefetch_factor=2 if workers else None, pin_memory=pin,
                      timeout=60 if workers else 0)


def _augmented(image: np.ndarray, boxes: np.ndarray, cfg: AugmentConfig) -> tuple[np.ndarray, np.ndarray]:
    """Flips, brightness and contrast, as light augmentation has them."""
    rng = np.random.default_rng()
    height, width = image.shape[:2]
    boxes = np.array(boxes, np.float32).reshape(-1, 4)
    if rng.random() < cfg.hflip:
        image = cv2.flip(image, 1)
        boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    if rng.random() < cfg.vflip:
        image = cv2.flip(image, 0)
        boxes[:, [1, 3]] = height - boxes[:, [3, 1]]
    if cfg.brightness or cfg.contrast:
        image = cv2.convertScaleAbs(image, alpha=1 + cfg.contrast * rng.uniform(-1, 1), beta=255 * cfg.brightness * rng.random())
    return image, boxes
