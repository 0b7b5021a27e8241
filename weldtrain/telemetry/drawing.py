"""Boxes on pictures: what is true and what was found, legible at any size."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

# Okabe and Ito's palette, which colour-blind readers can tell apart; RGB.
COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
WHITE = (255, 255, 255)


def enlarged(image: np.ndarray, scale: float) -> np.ndarray:
    """uint8 [H,W,3] RGB at `scale`, of RGB or one channel."""
    rgb = np.repeat(image, 3 // image.shape[2], axis=2)  # grey ones take colours as well
    return cv2.resize(rgb, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)


def draw_dashed(image: np.ndarray, box: Sequence[float], colour: tuple[int, int, int] = WHITE, dash: int = 5) -> None:
    """A dashed rectangle x1, y1, x2, y2 in px, onto uint8 [H,W,3]."""
    x1, y1, x2, y2 = (int(v) for v in box)
    for x in range(x1, x2, 2 * dash):
        for y in (y1, y2):
            cv2.line(image, (x, y), (min(x + dash, x2), y), colour, 2)
    for y in range(y1, y2, 2 * dash):
        for x in (x1, x2):
            cv2.line(image, (x, y), (x, min(y + dash, y2)), colour, 2)


def draw_found(image: np.ndarray, box: Sequence[float], label: int, text: str) -> None:
    """A solid rectangle in the colour of its label (1 for the first class), with a text above or, at the top, below it."""
    colour = COLOURS[(label - 1) % len(COLOURS)]
    x1, y1, x2, y2 = (int(v) for v in box)
    cv2.rectangle(image, (x1, y1), (x2, y2), colour, 2)
    cv2.putText(image, text, (x1, y1 - 5 if y1 > 16 else y2 + 14), cv2.FONT_HERSHEY_SIMPLEX, 0.45, colour, 1, cv2.LINE_AA)
