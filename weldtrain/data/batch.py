"""Sample and Batch: what travels from the workers to the device. Pictures stay uint8 until they are there."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

STRIDE = 32  # of the coarsest backbone level that the pyramid uses: padding to it keeps every level whole

IGNORED = -1  # the label of a box that is neither a defect to learn nor background: difficult, or a crowd


class Sample(NamedTuple):
    """One picture at the model's scale: image uint8 [H,W,3] RGB or [H,W,1] grey, boxes float32 [n,4] in its pixels,
    labels int64 [n], 1 for the first class or IGNORED, which come last."""

    image: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    image_id: int
    original_size: tuple[int, int]


class Failure(NamedTuple):
    """An error on its way out of a worker, whole: DataLoader would rebuild it as another type with another text."""

    error: Exception
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # whatever a library's exception does: one that cannot travel would leave the trainer waiting
            error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
        return cls(error, "".join(traceback.format_exception(error)))

    def reraise(self) -> None:
        """Raises the error, with the worker's traceback as its cause."""
        raise self.error from RuntimeError(f"in a loader worker:\n{self.traceback}")


@dataclass
class Batch:
    """B padded pictures and their N boxes, flat.

    images uint8 [B,3,H,W] RGB, or [B,1,H,W] if all are grey, zero right of and below each picture, in channels-last
    memory; image_sizes int64 [B,2]
    height, width in px before padding; boxes float32 [N,4] x1,y1,x2,y2 in px; batch_index int64 [N], non-decreasing;
    labels int64 [N], 1 for the first class or IGNORED; image_ids int64 [B], rows of the index; original_sizes int64 [B,2]
    height, width in px of the files' pictures. A picture without defects has no rows in `boxes`.

    `image_sizes`, `image_ids`, `original_sizes`, `box_counts` and `ignored_counts` (of each picture's last boxes) stay on
    the host: the detector needs them as Python numbers, and asking the device for them would make it wait.
    """

    images: torch.Tensor
    image_sizes: torch.Tensor
    boxes: torch.Tensor
    batch_index: torch.Tensor
    labels: torch.Tensor
    image_ids: torch.Tensor
    original_sizes: torch.Tensor
    box_counts: tuple[int, ...]
    ignored_counts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.box_counts)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, from which the device copies by itself. DataLoader calls this."""
        return self._on_device_side(lambda t: t.pin_memory())

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch with its device-side tensors on `device`, still uint8."""
        return self._on_device_side(lambda t: t.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps memory that was filled on another stream from being reused before `stream` is done with it."""
        for tensor in (self.images, self.boxes, self.batch_index, self.labels):
            tensor.record_stream(stream)

    def boxes5(self) -> torch.Tensor:
        """float32 [N,5]: index within the batch, x1, y1, x2, y2; `[0,5]` where no picture has a defect."""
        return torch.cat([self.batch_index[:, None].to(self.boxes.dtype), self.boxes], dim=1)

    def targets(self) -> list[dict[str, torch.Tensor]]:
        """What torchvision's detectors take: boxes [n,4] and labels [n] of each picture, as views; `ignored` [k,4] apart."""
        boxes, labels = self.boxes.split(self.box_counts), self.labels.split(self.box_counts)
        return [{"boxes": b[: len(b) - k], "labels": v[: len(b) - k], "ignored": b[len(b) - k :]}
                for b, v, k in zip(boxes, labels, self.ignored_counts)]

    def _on_device_side(self, move) -> Batch:
        return replace(self, images=move(self.images), boxes=move(self.boxes),
                       batch_index=move(self.batch_index), labels=move(self.labels))


def collate(samples: Sequence[Sample | Failure]) -> Batch | Failure:
    """One batch of samples of any sizes, padded to the largest and to a multiple of STRIDE; or the first failure."""
    for sample in samples:
        if isinstance(sample, Failure):
            return sample
    counts = tuple(len(s.boxes) for s in samples)
    height = -(-max(s.image.shape[0] for s in samples) // STRIDE) * STRIDE
    width = -(-max(s.image.shape[1] for s in samples) // STRIDE) * STRIDE
    channels = max(s.image.shape[2] for s in samples)  # grey ones beside RGB are repeated
    images = torch.zeros(len(samples), height, width, channels, dtype=torch.uint8)
    canvas = images.numpy()
    for i, s in enumerate(samples):
        canvas[i, : s.image.shape[0], : s.image.shape[1]] = s.image
    return Batch(
        images=images.permute(0, 3, 1, 2),
        image_sizes=torch.tensor([s.image.shape[:2] for s in samples]),
        boxes=torch.from_numpy(np.concatenate([s.boxes for s in samples])),
        batch_index=torch.arange(len(samples)).repeat_interleave(torch.tensor(counts)),
        labels=torch.from_numpy(np.concatenate([s.labels for s in samples])),
        image_ids=torch.tensor([s.image_id for s in samples]),
        original_sizes=torch.tensor([s.original_size for s in samples]),
        box_counts=counts,
        ignored_counts=tuple(int((s.labels == IGNORED).sum()) for s in samples),
    )
