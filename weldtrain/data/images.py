"""Pictures from files: upright, three channels, 8 bit, RGB, whatever the file held.

The rule, the same in training, evaluation and prediction: EXIF orientation is applied; grey and palette become RGB;
alpha is dropped, the colours below it stay; CMYK is converted; 16-bit pictures are windowed linearly from their own
0.1 to 99.9 percentile to 0..255, so that a 12-bit radiograph in a 16-bit file shows its contrast.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from weldtrain.errors import DataError
from weldtrain.formats.record import unreadable

# Workers are processes already, and a pool inherited through a fork can deadlock.
cv2.setNumThreads(0)

WINDOW_PERCENTILES = (0.1, 99.9)
_TAIL = 64 * 1024  # cameras append previews and maps behind the end of a JPEG


def read_image(path: Path, size: tuple[int, int] | None = None) -> np.ndarray:
    """uint8 [H,W,3] RGB. Raises DataError for a file that is no whole picture, or not of `size` (width, height) in px."""
    try:
        data = np.fromfile(path, np.uint8)  # imread would not find names outside the locale on every system
    except OSError as e:
        raise unreadable(path, e.strerror) from None
    if len(data) == 0:
        raise unreadable(path)
    if data[:2].tobytes() == b"\xff\xd8" and b"\xff\xd9" not in data[-_TAIL:].tobytes():
        # Some releases of OpenCV fill the missing part with grey and say nothing.
        raise DataError("is cut off: the JPEG has no end", path, "copy the file again or take it out of the split file")
    try:
        image = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_ANYDEPTH)
    except cv2.error as e:
        raise unreadable(path, e.err or e.msg) from None
    if image is None:
        raise unreadable(path, "damaged, or of a kind OpenCV does not decode")
    if image.dtype == np.uint16:
        image = window_16bit(image)
    elif image.dtype != np.uint8:
        raise DataError(f"has {image.dtype} pixels", path, "only 8- and 16-bit pictures have a defined range; convert it")
    if size is not None and (image.shape[1], image.shape[0]) != tuple(size):
        raise DataError(f"decodes to {image.shape[1]}x{image.shape[0]}, its header says {size[0]}x{size[1]}", path,
                        "it was replaced during the run, or its orientation tag is not understood: save it upright")
    return image


def window_16bit(image: np.ndarray) -> np.ndarray:
    """uint16 [H,W,3] to uint8, linear between the picture's percentiles WINDOW_PERCENTILES."""
    low, high = np.percentile(image, WINDOW_PERCENTILES)
    scale = 255.0 / max(high - low, 1.0)
    return cv2.convertScaleAbs(np.clip(image, low, max(high, low + 1.0)).astype(np.float32), alpha=scale, beta=-low * scale)


def target_size(width: int, height: int, min_size: int, max_size: int) -> tuple[int, int]:
    """The size in px at which the detector sees a picture: torchvision's rule.

    The shorter side becomes `min_size` unless that would make the longer one exceed `max_size`.
    """
    scale = min(min_size / min(width, height), max_size / max(width, height))
    return max(1, int(width * scale)), max(1, int(height * scale))


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [H,W,3] to `size` (width, height): area average where it shrinks, bilinear where it grows."""
    if (image.shape[1], image.shape[0]) == size:
        return image
    shrinks = size[0] < image.shape[1]
    return cv2.resize(image, size, interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
