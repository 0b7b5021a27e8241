"""COCO average precision of detections, and false calls. Pure functions of arrays; any ids are renumbered inside."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval import mask as mask_api

_AREAS = ("small", "medium", "large")  # COCO's: below 32², below 96², and above, in px² of the file's picture


@dataclass
class Boxes:
    """Boxes of many pictures, flat: boxes [n,4] x1,y1,x2,y2 in px; labels int [n] from 1; image int [n], which picture
    in 0..P-1; scores [n] for detections; ignore bool [n] for truth that counts neither way."""

    image: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray | None = None
    ignore: np.ndarray | None = None


def evaluate_detections(
    truth: Boxes, found: Boxes, *, pictures: int, classes: Sequence[str], max_detections: int = 100,
    false_call_score: float = 0.5,
) -> dict[str, float | dict[str, float | None] | None]:
    """AP as COCO defines it (101 recall points, IoU 0.50:0.05:0.95), and the false calls at one threshold.

    Returns `map map_50 map_75 map_small map_medium map_large mar`, `per_class_ap` and `per_class_ap_50` by name,
    `false_calls_per_picture` (detections of at least `false_call_score` that match no truth of their class at IoU 0.5)
    and `false_calls_per_clean_picture`. None where nothing can be said: a class, size or set without truth.
    """
    scored = truth if truth.ignore is None else _take(truth, ~truth.ignore)
    result: dict = {"map": None, "map_50": None, "map_75": None}
    result |= {f"map_{area}": None for area in _AREAS} | {"mar": None}
    result["per_class_ap"] = dict.fromkeys(classes)
    result["per_class_ap_50"] = dict.fromkeys(classes)
    if len(scored.labels):
        precision, recall = _coco(truth, found, pictures, len(classes), max_detections)
        for k, name in enumerate(classes):
            result["per_class_ap"][name] = _mean(precision[:, :, k, 0])
            result["per_class_ap_50"][name] = _mean(precision[0, :, k, 0])
        result["map"], result["map_50"], result["map_75"] = (
            _mean(precision[at, :, :, 0]) for at in (slice(None), 0, 5))
        for i, area in enumerate(_AREAS, 1):
            result[f"map_{area}"] = _mean(precision[:, :, :, i])
        result["mar"] = _mean(recall[:, :, 0])
    return result | _false_calls(truth, found, pictures, false_call_score)


def _coco(truth: Boxes, found: Boxes, pictures: int, classes: int, max_detections: int) -> tuple[np.ndarray, np.ndarray]:
    """Precision [IoU 10, recall 101, class, area 4] and recall [IoU, class, area]; -1 where there is no truth."""
    ignore = np.zeros(len(truth.labels), bool) if truth.ignore is None else truth.ignore
    xywh = _xywh(truth.boxes)
    # Ids from 1: both COCO implementations take 0 for "unmatched".
    annotations = [
        {"id": i, "image_id": int(picture) + 1, "category_id": int(label), "bbox": box.tolist(),
         "area": float(box[2] * box[3]), "iscrowd": int(crowd)}
        for i, (picture, label, box, crowd) in enumerate(zip(truth.image, truth.labels, xywh, ignore), 1)
    ]
    detections = [
        {"image_id": int(picture) + 1, "category_id": int(label), "bbox": box.tolist(), "score": float(score)}
        for picture, label, box, score in zip(found.image, found.labels, _xywh(found.boxes), found.scores)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        gt = COCO({
            "images": [{"id": i} for i in range(1, pictures + 1)],
            "categories": [{"id": i, "name": str(i)} for i in range(1, classes + 1)],
            "annotations": annotations,
        })
        evaluation = COCOeval_faster(gt, gt.loadRes(detections), "bbox", print_function=lambda *_: None)
        evaluation.params.maxDets = [max_detections]
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation.eval["precision"][..., 0], evaluation.eval["recall"][..., 0]


def _false_calls(truth: Boxes, found: Boxes, pictures: int, score: float) -> dict[str, float | None]:
    sure = _take(found, found.scores >= score)
    false_in = np.bincount(sure.image, minlength=pictures)
    for here, there in zip(_by_picture(sure, pictures), _by_picture(truth, pictures)):
        if len(here.labels):
            false_in[here.image[0]] -= _matches(here, there)
    clean = np.bincount(truth.image, minlength=pictures) == 0
    return {
        "false_calls_per_picture": float(false_in.mean()) if pictures else None,
        "false_calls_per_clean_picture": float(false_in[clean].mean()) if clean.any() else None,
    }


def _matches(found: Boxes, truth: Boxes, min_iou: float = 0.5) -> int:
    """How many detections, surest first, meet a truth of their class that no surer one has taken."""
    if not len(truth.labels):
        return 0
    crowd = np.zeros(len(truth.labels), np.uint8)
    iou = np.asarray(mask_api.iou(_xywh(found.boxes), _xywh(truth.boxes), crowd)).reshape(len(found.labels), -1)
    iou[found.labels[:, None] != truth.labels[None]] = 0
    ignore = np.zeros(len(truth.labels), bool) if truth.ignore is None else truth.ignore
    taken, matched = np.zeros(len(truth.labels), bool), 0
    for i in np.argsort(-found.scores, kind="stable"):
        free = np.where(taken, 0, iou[i])
        best = int(free.argmax())
        if free[best] >= min_iou:
            taken[best] = not ignore[best]
            matched += 1
    return matched


def _by_picture(boxes: Boxes, pictures: int) -> Iterator[Boxes]:
    order = np.argsort(boxes.image, kind="stable")
    ends = np.searchsorted(boxes.image[order], np.arange(pictures + 1))
    return (_take(boxes, order[start:end]) for start, end in itertools.pairwise(ends))


def _take(boxes: Boxes, which: np.ndarray) -> Boxes:
    return Boxes(*(None if a is None else a[which]
                   for a in (boxes.image, boxes.boxes, boxes.labels, boxes.scores, boxes.ignore)))


def _xywh(boxes: np.ndarray) -> np.ndarray:
    boxes = np.asarray(boxes, np.float64).reshape(-1, 4)
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)


def _mean(values: np.ndarray) -> float | None:
    present = values[values > -1]
    return float(present.mean()) if present.size else None
