"""Augmentation in uint8, at the model's scale. Every draw comes from the sample's own generator."""

from __future__ import annotations

import cv2
import numpy as np

from weldtrain.config import AugmentConfig


def augment(
    image: np.ndarray, boxes: np.ndarray, cfg: AugmentConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """image uint8 [H,W,C], boxes float32 [n,4] in its pixels; returns both anew, the inputs are left alone."""
    # All numbers are drawn whatever is switched on, so that one option does not change another's draws.
    flip_h, flip_v, shift, stretch = rng.random(4)
    height, width = image.shape[:2]
    horizontal, vertical = flip_h < cfg.hflip, flip_v < cfg.vflip
    if horizontal or vertical:
        image = cv2.flip(image, -1 if horizontal and vertical else int(horizontal))
        boxes = boxes.copy()
        if horizontal:
            boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        if vertical:
            boxes[:, [1, 3]] = height - boxes[:, [3, 1]]
    if cfg.brightness or cfg.contrast:
        factor = 1 + (2 * stretch - 1) * cfg.contrast
        levels = (np.arange(256) - 127.5) * factor + 127.5 + (2 * shift - 1) * cfg.brightness * 255
        image = cv2.LUT(image, np.clip(np.rint(levels), 0, 255).astype(np.uint8))
    return image.reshape(height, width, -1), boxes  # OpenCV drops a single channel
