"""COCO average precision of detections, and false calls. Pure functions of arrays; any ids are renumbered inside."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster

from weldtrain.metrics.matching import Boxes

_AREAS = ("small", "medium", "large")  # COCO's: below 32², below 96², and above, in px² of the file's picture


def evaluate_detections(
    truth: Boxes, found: Boxes, met: np.ndarray, *, pictures: int, classes: Sequence[str], max_detections: int = 100,
    false_call_score: float = 0.5,
) -> dict[str, float | dict[str, float | None] | None]:
    """AP as COCO defines it (101 recall points, IoU 0.50:0.05:0.95), and by `met` of `match` the false calls at one threshold.

    Returns `map map_50 map_75 map_small map_medium map_large mar`, `per_class_ap` and `per_class_ap_50` by name,
    `false_calls_per_picture` (detections of at least `false_call_score` that match no truth of their class at IoU 0.5)
    and `false_calls_per_clean_picture`. None where nothing can be said: a class, size or set without truth.
    """
    result: dict = {"map": None, "map_50": None, "map_75": None}
    result |= {f"map_{area}": None for area in _AREAS} | {"mar": None}
    result["per_class_ap"] = dict.fromkeys(classes)
    result["per_class_ap_50"] = dict.fromkeys(classes)
    if not truth.ignored.all():
        precision, recall = _coco(truth, found, pictures, len(classes), max_detections)
        for k, name in enumerate(classes):
            result["per_class_ap"][name] = _mean(precision[:, :, k, 0])
            result["per_class_ap_50"][name] = _mean(precision[0, :, k, 0])
        result["map"], result["map_50"], result["map_75"] = (
            _mean(precision[at, :, :, 0]) for at in (slice(None), 0, 5))
        for i, area in enumerate(_AREAS, 1):
            result[f"map_{area}"] = _mean(precision[:, :, :, i])
        result["mar"] = _mean(recall[:, :, 0])
    return result | _false_calls(truth, found, met, pictures, false_call_score)


def _coco(truth: Boxes, found: Boxes, pictures: int, classes: int, max_detections: int) -> tuple[np.ndarray, np.ndarray]:
    """Precision [IoU 10, recall 101, class, area 4] and recall [IoU, class, area]; -1 where there is no truth."""
    xywh = _xywh(truth.boxes)
    # Ids from 1: both COCO implementations take 0 for "unmatched".
    annotations = [
        {"id": i, "image_id": int(picture) + 1, "category_id": int(label), "bbox": box.tolist(),
         "area": float(box[2] * box[3]), "iscrowd": int(crowd)}
        for i, (picture, label, box, crowd) in enumerate(zip(truth.image, truth.labels, xywh, truth.ignored), 1)
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


def _false_calls(truth: Boxes, found: Boxes, met: np.ndarray, pictures: int, score: float) -> dict[str, float | None]:
    false_in = np.bincount(found.image[(met < 0) & (found.scores >= score)], minlength=pictures)
    clean = np.bincount(truth.image, minlength=pictures) == 0
    return {
        "false_calls_per_picture": float(false_in.mean()) if pictures else None,
        "false_calls_per_clean_picture": float(false_in[clean].mean()) if clean.any() else None,
    }


def _xywh(boxes: np.ndarray) -> np.ndarray:
    boxes = np.asarray(boxes, np.float64).reshape(-1, 4)
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)


def _mean(values: np.ndarray) -> float | None:
    present = values[values > -1]
    return float(present.mean()) if present.size else None
