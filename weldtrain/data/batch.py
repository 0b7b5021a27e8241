"""Sample and Batch: what travels from the loader to the device. Pictures stay uint8 until they are there."""

from __future__ import annotations

import functools
import math
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch

from weldtrain.data.buffers import SharedBuffers
from weldtrain.errors import IN_WORKER

STRIDE = 32  # of the coarsest backbone level that the pyramid uses: padding to it keeps every level whole

_ALIGN = 64  # bytes

IGNORED = -1  # the label of a box that is neither a defect to learn nor background: difficult, or a crowd

STAGES = ("read", "decode", "resize", "cache", "augment", "assemble")  # of the work on a batch, in order


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
            samples = getattr(error, "samples", ())
            error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
            error.samples = samples
        return cls(error, "".join(traceback.format_exception(error)))

    def reraise(self) -> None:
        """Raises the error, with the worker's traceback as its cause."""
        raise self.error from RuntimeError(f"{IN_WORKER}\n{self.traceback}")


@dataclass
class Batch:
    """B padded pictures and their N boxes, flat, in one piece of memory that is pinned and copied as a whole.

    images uint8 [B,3,H,W] RGB, or [B,1,H,W] if all are grey, zero right of and below each picture, in channels-last
    memory; image_sizes int64 [B,2] height, width in px before padding; boxes float32 [N,4] x1,y1,x2,y2 in px; batch_index
    int64 [N], non-decreasing; labels int64 [N], 1 for the first class or IGNORED; image_ids int64 [B], rows of the index;
    original_sizes int64 [B,2] height, width in px of the files' pictures; seeds int64 [B] for what the model draws at random
    for a picture. A picture without defects has no rows in `boxes`.

    `image_sizes`, `image_ids`, `original_sizes`, `seeds`, `unread` bool [B] (pictures that could not be decoded, all black),
    `box_counts` and `ignored_counts` (of each picture's last boxes) stay on the host: the detector needs them as Python
    numbers, and asking the device for them would make it wait. `work_s` float [B,6] are the seconds that the loader spent on
    each picture, by STAGES.
    """

    memory: torch.Tensor  # uint8, flat: images, boxes, batch_index, labels, each beginning at a multiple of _ALIGN
    shape: tuple[int, int, int, int]  # B, H, W, C
    # Plain arrays and views made on demand: a batch is put together while its pixels have emptied the processor's caches, and
    # there each torch operation costs ten times its usual time. Between processes each tensor costs an open file.
    host: dict[str, np.ndarray]
    box_counts: tuple[int, ...]
    ignored_counts: tuple[int, ...]
    work_s: np.ndarray

    def __len__(self) -> int:
        return len(self.box_counts)

    def __reduce__(self) -> tuple:
        return Batch, (_Sent(self.memory), *(getattr(self, f.name) for f in fields(self)[1:]))  # without the views

    @functools.cached_property
    def images(self) -> torch.Tensor:
        return self._part(0).permute(0, 3, 1, 2)

    @functools.cached_property
    def boxes(self) -> torch.Tensor:
        return self._part(1)

    @functools.cached_property
    def batch_index(self) -> torch.Tensor:
        return self._part(2)

    @functools.cached_property
    def labels(self) -> torch.Tensor:
        return self._part(3)

    @functools.cached_property
    def image_sizes(self) -> torch.Tensor:
        return torch.from_numpy(self.host["image_sizes"])

    @functools.cached_property
    def image_ids(self) -> torch.Tensor:
        return torch.from_numpy(self.host["image_ids"])

    @functools.cached_property
    def original_sizes(self) -> torch.Tensor:
        return torch.from_numpy(self.host["original_sizes"])

    @functools.cached_property
    def seeds(self) -> torch.Tensor:
        return torch.from_numpy(self.host["seeds"])

    @property
    def unread(self) -> np.ndarray:
        return self.host["unread"]

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, from which the device copies by itself. DataLoader calls this."""
        return replace(self, memory=self.memory.pin_memory())

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch with its pictures, boxes and labels on `device`, still uint8: one copy."""
        return replace(self, memory=self.memory.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps memory that was filled on another stream from being reused before `stream` is done with it."""
        self.memory.record_stream(stream)

    def boxes5(self) -> torch.Tensor:
        """float32 [N,5]: index within the batch, x1, y1, x2, y2; `[0,5]` where no picture has a defect."""
        return torch.cat([self.batch_index[:, None].to(self.boxes.dtype), self.boxes], dim=1)

    def targets(self) -> list[dict[str, torch.Tensor]]:
        """What torchvision's detectors take: boxes [n,4] and labels [n] of each picture, as views; `ignored` [k,4] apart."""
        boxes, labels = self.boxes.split(self.box_counts), self.labels.split(self.box_counts)
        return [{"boxes": b[: len(b) - k], "labels": v[: len(b) - k], "ignored": b[len(b) - k :]}
                for b, v, k in zip(boxes, labels, self.ignored_counts)]

    def _part(self, which: int) -> torch.Tensor:
        dtype, shape, start, end = _layout(self.shape, sum(self.box_counts))[which]
        return self.memory[start:end].view(getattr(torch, dtype)).view(shape)


class _Sent(NamedTuple):
    """A batch's memory on its way to another process."""

    memory: torch.Tensor

    def __reduce__(self) -> tuple:
        return SharedBuffers.sent(self.memory)


def collate(samples: Sequence[Sample | Failure]) -> Batch | Failure:
    """One batch of samples of any sizes, padded to the largest and to a multiple of STRIDE; or the first failure."""
    for sample in samples:
        if isinstance(sample, Failure):
            return sample
    batch, canvas = blank(
        np.array([s.image.shape[:2] for s in samples]),
        max(s.image.shape[2] for s in samples),  # grey ones beside RGB are repeated
        np.concatenate([s.boxes for s in samples]),
        np.concatenate([s.labels for s in samples]),
        np.repeat(np.arange(len(samples)), [len(s.boxes) for s in samples]),
        np.array([s.image_id for s in samples]),
        np.array([s.original_size for s in samples]),
        np.array([s.image_id for s in samples]),
    )
    for i, s in enumerate(samples):
        room(canvas[i], *s.image.shape[:2])[:] = s.image
    return batch


def blank(
    image_sizes: np.ndarray, channels: int, boxes: np.ndarray, labels: np.ndarray, batch_index: np.ndarray,
    image_ids: np.ndarray, original_sizes: np.ndarray, seeds: np.ndarray, empty: Callable[[int], torch.Tensor] | None = None,
) -> tuple[Batch, np.ndarray]:
    """A batch whose pictures are yet to be put into their `room`, and the memory [B,H,W,C] for them. The other arrays are a
    Batch's own, boxes in any order; `empty` gives memory uint8 [n] for n bytes."""
    order = np.lexsort((labels == IGNORED, batch_index))
    boxes, index, labels = boxes[order], batch_index[order], labels[order]
    height, width = (-(-int(side) // STRIDE) * STRIDE for side in image_sizes.max(0))
    shape = (len(image_sizes), height, width, channels)
    layout = _layout(shape, len(boxes))
    nbytes = layout[-1][-1]
    memory = empty(nbytes) if empty else torch.empty(nbytes, dtype=torch.uint8)
    flat = memory.numpy()
    for (dtype, _, start, end), values in zip(layout[1:], (boxes, index, labels)):
        flat[start:end].view(dtype).reshape(values.shape)[:] = values
    batch = Batch(
        memory=memory,
        shape=shape,
        host={"image_sizes": image_sizes, "image_ids": image_ids, "original_sizes": original_sizes, "seeds": seeds,
              "unread": np.zeros(len(image_sizes), bool)},
        box_counts=tuple(np.bincount(index, minlength=len(image_sizes)).tolist()),
        ignored_counts=tuple(np.bincount(index[labels == IGNORED], minlength=len(image_sizes)).tolist()),
        work_s=np.zeros((len(image_sizes), len(STAGES))),
    )
    return batch, flat[: layout[0][-1]].reshape(shape)


def room(canvas: np.ndarray, height: int, width: int) -> np.ndarray:
    """The part [h,w,C] of a picture's memory [H,W,C] that it fills; clears the padding around it."""
    canvas[height:] = 0
    canvas[:height, width:] = 0
    return canvas[:height, :width]


def _layout(shape: tuple[int, int, int, int], boxes: int) -> list[tuple[str, tuple[int, ...], int, int]]:
    """Type, shape, first and last byte of images, boxes, batch_index and labels in a batch's memory."""
    parts, start = [], 0
    for dtype, size, of in (("uint8", 1, shape), ("float32", 4, (boxes, 4)), ("int64", 8, (boxes,)), ("int64", 8, (boxes,))):
        end = start + math.prod(of) * size
        parts.append((dtype, of, start, end))
        start = -(-end // _ALIGN) * _ALIGN
    return parts
