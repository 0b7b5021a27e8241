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
from weldtrain.telemetry.drawing import draw_dashed, draw_found, enlarged

SCALE = 2
SCORE = 0.5


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
        tile = enlarged(sample.image, SCALE)
        for box in sample.boxes:
            draw_dashed(tile, box * SCALE)
        for box, label, score in zip(found["boxes"].numpy(), found["labels"].tolist(), found["scores"].tolist()):
            draw_found(tile, box * SCALE, label, f"{classes[label - 1]} {score:.2f}")
        tiles.append(tile)
    columns = min(3, len(tiles))
    tiles += [np.zeros_like(tiles[0])] * (-len(tiles) % columns)
    sheet = np.concatenate([np.concatenate(tiles[i : i + columns], 1) for i in range(0, len(tiles), columns)])
    cv2.imwrite(str(Path(sys.argv[2])), cv2.cvtColor(sheet, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 80])


if __name__ == "__main__":
    main()
