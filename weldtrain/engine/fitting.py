"""loader.batch_size=auto: as many pictures as the GPU's memory holds, found by training on the worst batch there can be."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator

import numpy as np
import torch

from weldtrain.config import OptimizerConfig
from weldtrain.data.batch import Batch, Sample, collate
from weldtrain.data.dataset import DetectionDataset
from weldtrain.engine.optim import build_optimizer
from weldtrain.engine.step import TrainingStep
from weldtrain.errors import ConfigError, TrainingError
from weldtrain.models.detector import Detector

ELSEWHERE = 8  # pictures, where memory is not the device's own
_AT_MOST = 256
_SHARE = 0.9  # of memory, the rest is for what pieces of other sizes leave unused


def fitting_batch_size(
    model: Detector, dataset: DetectionDataset, cfg: OptimizerConfig, device: torch.device, dtype: torch.dtype | None
) -> tuple[int, str]:
    """Pictures of a batch, a power of two, and why so many. Raises ConfigError where not one fits. Leaves `model` as it is."""
    if device.type != "cuda":
        return ELSEWHERE, f"loader.batch_size=auto: {ELSEWHERE}, only a GPU's memory is measured"
    total = torch.cuda.mem_get_info(device)[1]
    fits, peak, size = 0, 0, 1
    while size <= min(_AT_MOST, len(dataset)):
        try:
            used = _peak(model, _worst(dataset, size), cfg, device, dtype)
        except torch.OutOfMemoryError:
            break
        if used > _SHARE * total:
            break
        fits, peak, size = size, used, 2 * size
    if not fits:
        raise ConfigError(f"not one picture fits into {total / 2**30:.0f} GB", "loader.batch_size=auto",
                          "lower model.min_size and model.max_size")
    return fits, f"loader.batch_size=auto: {fits}, at most {peak / 2**30:.1f} of {total / 2**30:.1f} GB"


@contextlib.contextmanager
def memory_told(key: str, pictures: int, device: torch.device, accumulate: int = 0) -> Iterator[None]:
    """Around what runs on batches of so many pictures: of a GPU's memory that is full it says by how much to lower `key`. With
    `accumulate`, the batches of a step, also how to learn the same from smaller ones."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        peak, total = torch.cuda.max_memory_reserved(device), torch.cuda.mem_get_info(device)[1]
        less = f"set {key}={pictures // 2}" if pictures > 1 else "halve model.min_size and model.max_size"
        if accumulate and pictures % 2 == 0:
            less += f" with trainer.accumulate={2 * accumulate}, which learns the same"
        raise TrainingError(f"the GPU is full: a batch of {pictures} took {peak / 2**30:.1f} of {total / 2**30:.1f} GB and "
                            "wanted more", key, less) from e


def _peak(
    model: Detector, batch: Batch, cfg: OptimizerConfig, device: torch.device, dtype: torch.dtype | None
) -> int:
    """Bytes that two steps on a batch take at most; their gradients and the optimiser's state are there from the first on."""
    try:
        tried = copy.deepcopy(model).train()
        step = TrainingStep(tried, build_optimizer(tried, cfg), device, dtype)
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(2):
            step.add(batch.to(device))
            step.update()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device)
    finally:
        tried = step = None
        gc.collect()
        torch.cuda.empty_cache()


def _worst(dataset: DetectionDataset, size: int) -> Batch:
    """So many pictures of the largest size, with a box each."""
    width, height = dataset.largest()
    channels = 1 if dataset.index.grey[dataset.rows].all() else 3
    image, box = np.zeros((height, width, channels), np.uint8), np.array([[0, 0, width / 2, height / 2]], np.float32)
    return collate([Sample(image, box, np.array([1]), i, (height, width)) for i in range(size)])
