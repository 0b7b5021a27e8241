"""Judges a detector on one split: COCO AP and false calls, in pixels of the files' own pictures."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from weldtrain.config import EvaluateConfig
from weldtrain.data.batch import Batch
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.index import AnnotationIndex
from weldtrain.data.loader import Loader
from weldtrain.data.predictions import Detections
from weldtrain.engine.distributed import agreed, gathered, world
from weldtrain.engine.fitting import memory_told
from weldtrain.engine.joining import joined
from weldtrain.engine.prefetch import device_batches
from weldtrain.metrics.detection import evaluate_detections
from weldtrain.metrics.matching import Boxes, match
from weldtrain.metrics.operating_point import Rule, choose
from weldtrain.models.detector import Detector
from weldtrain.telemetry.clock import StepClock
from weldtrain.watchdog import beat


class Judged(NamedTuple):
    """`metrics` are those of `evaluate_detections`; `truth` and `found`, in pixels of the files' pictures, `met`, the `match` of
    both, and `shown`, the pictures' `identities`, of the first rank alone, elsewhere None. `tile_px` is the side of the tiles in
    which pictures were looked at, None where that was whole."""

    metrics: dict[str, Any]
    truth: Boxes | None
    found: Boxes | None
    met: np.ndarray | None
    pictures: int = 0
    shown: np.ndarray | None = None
    tile_px: int | None = None


class Seen(NamedTuple):
    """What was found in a sample, a row of the index, in pixels of the file's picture; None where that could not be read."""

    row: int
    found: Detections | None


def evaluate(
    model: Detector, loader: Loader, classes: Sequence[str], cfg: EvaluateConfig, device: torch.device,
    dtype: torch.dtype | None,
) -> Judged:
    """Judges every picture of the loaders of all ranks. Leaves the model in the mode it was in."""
    dataset = loader.dataset
    model.limit_detections(cfg.score_thresh, cfg.max_detections)
    parts = list(seen(model, loader, device, dtype, "evaluate.batch_size", "the evaluation"))
    beat("the metrics")
    of_all = _dealt(gathered(parts))
    return judge(pictures(of_all, dataset, model), dataset.index.whole, dataset.pictures, classes, cfg, dataset.index.tile_px)


def judge(
    found: Iterable[Seen], index: AnnotationIndex, rows: np.ndarray, classes: Sequence[str], cfg: EvaluateConfig,
    tile_px: int | None = None,
) -> Judged:
    """What was `found` in all pictures `rows` of an index, in that order, beside what is there; on the first rank. All of it
    counts: evaluate.max_detections is what the detector was held to."""
    if not world().first:
        return Judged(agreed(None), None, None, None, tile_px=tile_px)
    truth, called = _truth(index, rows, classes), _found(found, rows)
    met = match(called, truth)
    most = int(np.bincount(called.image, minlength=1).max())
    metrics = evaluate_detections(truth, called, met, pictures=len(rows), classes=classes,
                                  max_detections=max(cfg.max_detections, most), false_call_score=cfg.false_call_score)
    return Judged(agreed(metrics), truth, called, met, len(rows), index.identities(rows), tile_px)


def operating_points(judged: Judged, classes: Sequence[str], cfg: EvaluateConfig) -> dict[str, Any]:
    """The thresholds that the rule of `cfg` chooses by what was judged, as a checkpoint keeps them: `rule`, `split`, `seen_in`,
    how pictures were looked at, and `points` by class."""
    points = choose(judged.found, judged.truth, judged.met, classes, judged.pictures, rule_of(cfg))
    return {"rule": rule_of(cfg)._asdict(), "split": cfg.split, "points": points, "seen_in": seen_in(judged.tile_px, cfg)}


def seen_in(tile_px: int | None, cfg: EvaluateConfig) -> dict[str, Any]:
    """How a detector looks at pictures: thresholds that were chosen in one way promise nothing in another."""
    return {"tile_px": tile_px, "max_detections": cfg.max_detections, "score_thresh": cfg.score_thresh}


def rule_of(cfg: EvaluateConfig) -> Rule:
    """How thresholds are to be chosen."""
    return Rule(cfg.operating_point, cfg.at_most_missed, cfg.confidence, cfg.false_calls_per_picture, cfg.cost_of_a_miss)


@torch.inference_mode()
def seen(
    model: Detector, loader: Loader, device: torch.device, dtype: torch.dtype | None, size_key: str, doing: str
) -> Iterator[list[Seen]]:
    """What the model finds in each batch of the loader. Leaves the model in the mode it was in."""
    loader.set_epoch(0)
    beat(f"the first batch of {doing}")
    with judging(model), contextlib.closing(device_batches(loader, device, StepClock(device))) as batches:
        for batch in batches:
            beat(doing)
            autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
            with loader.explained(), memory_told(size_key, len(batch), device), autocast:
                detections = model(batch)
            yield _in_file_pixels(batch, detections, loader.dataset)


def pictures(samples: Iterable[Seen], dataset: DetectionDataset, model: Detector) -> Iterator[Seen]:
    """What was found in each whole picture, of which `samples` in order show one tile after the other; a row is that of the
    index of whole pictures."""
    index = dataset.index
    for picture, group in itertools.groupby(samples, lambda sample: int(index.shown(sample.row))):
        tiles = list(group)
        windows = np.array([index.window(tile.row) for tile in tiles])
        unread = any(tile.found is None for tile in tiles)
        yield Seen(picture, None if unread else joined([tile.found for tile in tiles], windows, model.roi_heads.nms_thresh))


@contextlib.contextmanager
def judging(model: Detector) -> Iterator[None]:
    """The model as it is judged, and afterwards in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _dealt(parts: list[list[list[Seen]]]) -> list[Seen]:
    """Of all ranks' batches the samples in the order in which one process would have met them."""
    rounds = itertools.zip_longest(*parts, fillvalue=())
    return [sample for batches in rounds for batch in batches for sample in batch]


def _found(seen: Iterable[Seen], rows: np.ndarray) -> Boxes:
    """`image` is the place in `rows`."""
    of_pictures = list(seen)
    parts = [picture.found for picture in of_pictures]
    image = np.searchsorted(rows, [picture.row for picture in of_pictures])
    boxes, labels, scores = (np.concatenate(column) for column in zip(*parts))
    return Boxes(np.repeat(image, [len(part.labels) for part in parts]), boxes, labels, scores)


def tagged(split: str, metrics: dict[str, Any]) -> dict[str, float | None]:
    """The metrics under their tags in the run record: `val/map`, `val/ap/crack`, …"""
    flat = {f"{split}/{name}": value for name, value in metrics.items() if not isinstance(value, dict)}
    return flat | {f"{split}/ap/{name}": value for name, value in metrics["per_class_ap"].items()}


def _in_file_pixels(batch: Batch, detections: list[dict[str, torch.Tensor]], dataset: DetectionDataset) -> list[Seen]:
    parts = []
    columns = batch.image_ids.tolist(), batch.image_sizes, batch.original_sizes, batch.unread
    for found, row, size, original, unread in zip(detections, *columns):
        if unread:
            parts.append(Seen(row, None))
            continue
        height_width = (original / size).double().numpy()
        boxes = found["boxes"].cpu().double().numpy() * np.tile(height_width[::-1], 2)
        parts.append(Seen(row, Detections(boxes + np.tile(dataset.index.window(row)[:2], 2), found["labels"].cpu().numpy(),
                                        found["scores"].cpu().double().numpy())))
    return parts


def _truth(index: AnnotationIndex, pictures: np.ndarray, classes: Sequence[str]) -> Boxes:
    """Their boxes as they stand in the index; difficult and crowd ones count neither as found nor as missed."""
    at = [index.box_rows(row) for row in pictures]
    rows = np.concatenate([np.arange(s.start, s.stop) for s in at])
    return Boxes(
        image=np.repeat(np.arange(len(at)), [s.stop - s.start for s in at]),
        boxes=index.boxes[rows],
        labels=index.labels(classes)[index.name_ids[rows]],
        ignore=index.ignored(rows),
    )
