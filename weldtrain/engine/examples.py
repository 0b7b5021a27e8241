"""A few validation pictures as the detector sees them now: the truth beside what it finds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weldtrain.data.dataset import DetectionDataset
from weldtrain.engine.evaluator import judging
from weldtrain.models.detector import Detector
from weldtrain.telemetry.drawing import draw_dashed, draw_found, enlarged

_AT_MOST = 4
_HEIGHT_PX = 320
_SURE = 0.3  # of what is drawn; below that a young detector's are countless


class Examples:
    """The same pictures at every evaluation, of as many classes as there are."""

    def __init__(self, dataset: DetectionDataset, classes: Sequence[str]) -> None:
        self._dataset, self._classes = dataset, classes
        first = [int(dataset.rows[places[0]]) for places in dataset.shown_by_class() if len(places)]
        self._rows = list(dict.fromkeys([*first, *dataset.rows.tolist()]))[:_AT_MOST]

    @torch.inference_mode()
    def sheet(self, model: Detector, device: torch.device, dtype: torch.dtype | None) -> np.ndarray:
        """uint8 [H,W,3] RGB: a row for each picture, truth to the left. Leaves the model in the mode it was in."""
        with judging(model):
            pairs = [self._pair(model, row, device, dtype) for row in self._rows]
        width = max(pair.shape[1] for pair in pairs)
        return np.concatenate([np.pad(pair, ((0, 4), (0, width - pair.shape[1]), (0, 0))) for pair in pairs])

    def _pair(self, model: Detector, row: int, device: torch.device, dtype: torch.dtype | None) -> np.ndarray:
        batch = self._dataset.fetch([(0, row, 0)])
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            (found,) = model(batch.to(device))
        height, width = batch.image_sizes[0].tolist()
        scale = min(_HEIGHT_PX / height, 2 * _HEIGHT_PX / width)
        truth = enlarged(np.ascontiguousarray(batch.images[0, :, :height, :width].permute(1, 2, 0).numpy()), scale)
        shown = truth.copy()
        for box in batch.boxes.numpy() * scale:
            draw_dashed(truth, box)
        boxes, labels, scores = (found[name].float().cpu().numpy() for name in ("boxes", "labels", "scores"))
        for box, label, score in zip(boxes * scale, labels.astype(int).tolist(), scores.tolist()):
            if score >= _SURE:
                draw_found(shown, box, label, f"{self._classes[label - 1]} {score:.2f}")
        return np.concatenate([truth, np.zeros((len(truth), 4, 3), np.uint8), shown], axis=1)
