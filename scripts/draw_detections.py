"""Draws truth (dashed, white) and detections (solid, a colour a class) on some pictures of a split, side by side.

    python scripts/draw_detections.py outputs/…/checkpoints/best.pt out.jpg [split] [pictures]
Reads the data set that the checkpoint was trained on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np
import torch

from weldtrain.config import section
from weldtrain.data.batch import collate
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.engine import checkpoint
from weldtrain.models.detector import build_detector

SCALE = 2
SCORE = 0.5
# Okabe & Ito's palette, which colour-blind readers can tell apart; RGB.
COLOURS = [(230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167)]


def dashed(image: np.ndarray, box: np.ndarray, dash: int = 5) -> None:
    x1, y1, x2, y2 = (int(v) for v in box * SCALE)
    for x in range(x1, x2, 2 * dash):
        for y in (y1, y2):
            cv2.line(image, (x, y), (min(x + dash, x2), y), (255, 255, 255), 1)
    for y in range(y1, y2, 2 * dash):
        for x in (x1, x2):
            cv2.line(image, (x, y), (x, min(y + dash, y2)), (255, 255, 255), 1)


def main() -> None:
    state = checkpoint.load(sys.argv[1])
    split = sys.argv[3] if len(sys.argv) > 3 else "test"
    pictures = int(sys.argv[4]) if len(sys.argv) > 4 else 6
    model_cfg, classes = section(state["config"], "model"), state["classes"]
    index = open_index(section(state["config"], "dataset"), state["config"]["cache_dir"])
    dataset = DetectionDataset(index, split, classes, model_cfg)
    model = build_detector(model_cfg, len(classes)).eval()
    model.load_state_dict(checkpoint.weights(state))
    model.limit_detections(SCORE, 100)
    tiles = []
    for row in dataset.rows[:pictures]:
        sample = dataset.load(0, int(row))
        with torch.inference_mode():
            found = model(collate([sample]))[0]
        rgb = np.repeat(sample.image, 3 // sample.image.shape[2], axis=2)  # grey ones take colours as well
        tile = cv2.resize(rgb, None, fx=SCALE, fy=SCALE, interpolation=cv2.INTER_CUBIC)
        for box in sample.boxes:
            dashed(tile, box)
        for box, label, score in zip(found["boxes"].numpy(), found["labels"].tolist(), found["scores"].tolist()):
            colour = COLOURS[(label - 1) % len(COLOURS)]
            x1, y1, x2, y2 = (int(v) for v in box * SCALE)
            cv2.rectangle(tile, (x1, y1), (x2, y2), colour, 2)
            place = (x1, y1 - 5 if y1 > 16 else y2 + 14)
            cv2.putText(tile, f"{classes[label - 1]} {score:.2f}", place, cv2.FONT_HERSHEY_SIMPLEX, 0.45, colour, 1, cv2.LINE_AA)
        tiles.append(tile)
    columns = min(3, len(tiles))
    tiles += [np.zeros_like(tiles[0])] * (-len(tiles) % columns)
    sheet = np.concatenate([np.concatenate(tiles[i : i + columns], 1) for i in range(0, len(tiles), columns)])
    cv2.imwrite(str(Path(sys.argv[2])), cv2.cvtColor(sheet, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 80])


if __name__ == "__main__":
    main()
