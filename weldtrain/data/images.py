"""Pictures from files: upright, 8 bit, RGB or one grey channel, whatever the file held.

The rule, the same in training, evaluation and prediction: EXIF orientation is applied; a file of one channel stays
so until it is on the device, where it becomes three equal ones; palettes become RGB; alpha is dropped, the colours
below it stay; CMYK is converted; of several pages the first is taken; 16-bit pictures are windowed linearly to
0..255, from percentiles of their own or from fixed levels, so that a 12-bit radiograph shows its contrast.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from weldtrain.config import ModelConfig
from weldtrain.errors import PictureError
from weldtrain.formats.pictures import JPEG_TAIL_BYTES, cut_off, has_jpeg_end, unreadable

# Workers are processes already, and a pool inherited through a fork can deadlock.
cv2.setNumThreads(0)


class Window(NamedTuple):
    """How 16 bits become 8: between two grey levels of the file, or else between two percentiles of the picture."""

    percentiles: tuple[float, float] = (0.1, 99.9)
    levels: tuple[float, float] | None = None

    @classmethod
    def of(cls, cfg: ModelConfig) -> Window:
        return cls(tuple(cfg.window_percentiles), tuple(cfg.window_levels) if cfg.window_levels else None)

    def apply(self, image: np.ndarray) -> np.ndarray:
        """uint16 of any shape to uint8, linear between the two bounds and flat beyond them."""
        low, high = self.levels or np.percentile(image, self.percentiles)
        high = max(high, low + 1.0)
        scale = 255.0 / (high - low)
        return cv2.convertScaleAbs(np.clip(image, low, high).astype(np.float32), alpha=scale, beta=-low * scale)


def read_image(
    path: Path, size: tuple[int, int] | None = None, grey: bool | None = None, window: Window | None = None
) -> np.ndarray:
    """uint8 [H,W,3] RGB, or [H,W,1] where the file has one channel.

    `size` (width, height in px) and `grey` are what its header said. Raises PictureError for a file that is no whole
    picture, or is not of that size.
    """
    try:
        data = np.fromfile(path, np.uint8)  # imread would not find names outside the locale on every system
    except OSError as e:
        raise unreadable(path, e.strerror) from None
    if len(data) == 0:
        raise unreadable(path)
    if data[:2].tobytes() == b"\xff\xd8" and not has_jpeg_end(data[-JPEG_TAIL_BYTES:].tobytes()):
        # Some releases of OpenCV fill the missing part with grey and say nothing.
        raise cut_off(path)
    # Not IMREAD_COLOR_RGB: OpenCV 5.0 turns 16-bit colour TIFFs into noise with it.
    kind = cv2.IMREAD_GRAYSCALE if grey else cv2.IMREAD_COLOR if grey is False else cv2.IMREAD_ANYCOLOR
    try:
        image = cv2.imdecode(data, kind | cv2.IMREAD_ANYDEPTH)
    except cv2.error as e:
        raise unreadable(path, e.err or e.msg) from None
    if image is None:
        raise unreadable(path, "damaged, or of a kind OpenCV does not decode")
    image = image[:, :, None] if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    if image.dtype not in (np.uint8, np.uint16):
        raise PictureError(f"has {image.dtype} pixels", path, "only 8 and 16 bits have a defined range: convert it")
    if size is not None and (image.shape[1], image.shape[0]) != tuple(size):
        raise PictureError(f"decodes to {image.shape[1]}x{image.shape[0]}, its header says {size[0]}x{size[1]}", path,
                           "it was replaced during the run, or its orientation tag is not understood: save it upright")
    return (window or Window()).apply(image).reshape(image.shape) if image.dtype == np.uint16 else image


def target_size(width: int, height: int, min_size: int, max_size: int) -> tuple[int, int]:
    """The size in px at which the detector sees a picture: torchvision's rule.

    The shorter side becomes `min_size` unless that would make the longer one exceed `max_size`.
    """
    scale = min(min_size / min(width, height), max_size / max(width, height))
    return max(1, int(width * scale)), max(1, int(height * scale))


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [H,W,C] to `size` (width, height): area average where it shrinks, bilinear where it grows."""
    if (image.shape[1], image.shape[0]) == size:
        return image
    shrinks = size[0] < image.shape[1]
    resized = cv2.resize(image, size, interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
    return resized.reshape(size[1], size[0], image.shape[2])  # OpenCV drops a single channel
