"""Judges a detector on one split: COCO AP and false calls, in pixels of the files' own pictures."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from weldtrain.config import EvaluateConfig
from weldtrain.data.batch import Batch
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.loader import Loader
from weldtrain.engine.distributed import agreed, gathered, world
from weldtrain.engine.fitting import memory_told
from weldtrain.engine.prefetch import device_batches
from weldtrain.metrics.detection import evaluate_detections
from weldtrain.metrics.matching import Boxes
from weldtrain.models.detector import Detector
from weldtrain.telemetry.clock import StepClock
from weldtrain.watchdog import beat


class Judged(NamedTuple):
    """`metrics` are those of `evaluate_detections`; `truth` and `found`, in pixels of the files' pictures, of the first rank
    alone, elsewhere None."""

    metrics: dict[str, Any]
    truth: Boxes | None
    found: Boxes | None


@torch.inference_mode()
def evaluate(
    model: Detector, loader: Loader, classes: Sequence[str], cfg: EvaluateConfig, device: torch.device,
    dtype: torch.dtype | None,
) -> Judged:
    """Judges every picture of the loaders of all ranks. Leaves the model in the mode it was in."""
    model.limit_detections(cfg.score_thresh, cfg.max_detections)
    parts: list[list[dict[str, np.ndarray]]] = []  # of each batch
    loader.set_epoch(0)
    beat("the first batch of the evaluation")
    with judging(model):
        for batch in device_batches(loader, device, StepClock(device)):
            beat("the evaluation")
            autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
            with loader.explained(), memory_told("evaluate.batch_size", len(batch), device), autocast:
                detections = model(batch)
            parts.append(_in_file_pixels(batch, detections))
    beat("the metrics")
    of_all, dataset = _dealt(gathered(parts)), loader.dataset
    if not world().first:
        return Judged(agreed(None), None, None)
    truth, found = _truth(dataset), _found(of_all, dataset)
    metrics = evaluate_detections(truth, found, pictures=len(dataset), classes=classes, max_detections=cfg.max_detections,
                                  false_call_score=cfg.false_call_score)
    return Judged(agreed(metrics), truth, found)


@contextlib.contextmanager
def judging(model: Detector) -> Iterator[None]:
    """The model as it is judged, and afterwards in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _dealt(parts: list[list[list[dict[str, np.ndarray]]]]) -> list[dict[str, np.ndarray]]:
    """Of all ranks' batches the pictures in the order in which one process would have met them."""
    rounds = itertools.zip_longest(*parts, fillvalue=())
    return [picture for batches in rounds for batch in batches for picture in batch]


def _found(parts: list[dict[str, np.ndarray]], dataset: DetectionDataset) -> Boxes:
    position = np.full(len(dataset.index), -1)
    position[dataset.rows] = np.arange(len(dataset))
    return Boxes(
        image=position[np.concatenate([p["row"] for p in parts])],
        boxes=np.concatenate([p["boxes"] for p in parts]),
        labels=np.concatenate([p["labels"] for p in parts]),
        scores=np.concatenate([p["scores"] for p in parts]),
    )


def tagged(split: str, metrics: dict[str, Any]) -> dict[str, float | None]:
    """The metrics under their tags in the run record: `val/map`, `val/ap/crack`, …"""
    flat = {f"{split}/{name}": value for name, value in metrics.items() if not isinstance(value, dict)}
    return flat | {f"{split}/ap/{name}": value for name, value in metrics["per_class_ap"].items()}


def _in_file_pixels(batch: Batch, detections: list[dict[str, torch.Tensor]]) -> list[dict[str, np.ndarray]]:
    parts = []
    for found, row, size, original in zip(detections, batch.image_ids, batch.image_sizes, batch.original_sizes):
        height_width = (original / size).numpy()
        boxes = found["boxes"].float().cpu().numpy() * np.tile(height_width[::-1], 2)
        parts.append({"row": np.full(len(boxes), int(row)), "boxes": boxes, "labels": found["labels"].cpu().numpy(),
                      "scores": found["scores"].float().cpu().numpy()})
    return parts


def _truth(dataset: DetectionDataset) -> Boxes:
    """The split's boxes as they stand in the index; difficult and crowd ones count neither as found nor as missed."""
    index = dataset.index
    at = [index.box_rows(row) for row in dataset.rows]
    rows = np.concatenate([np.arange(s.start, s.stop) for s in at])
    return Boxes(
        image=np.repeat(np.arange(len(at)), [s.stop - s.start for s in at]),
        boxes=index.boxes[rows],
        labels=dataset.labels_of(rows),
        ignore=index.ignored(rows),
    )
