"""Pictures from files: upright, 8 bit, RGB or one grey channel, whatever the file held.

The rule, the same in training, evaluation and prediction: EXIF orientation is applied; a file of one channel stays
so until it is on the device, where it becomes three equal ones; palettes become RGB; alpha is dropped, the colours
below it stay; CMYK is converted; of several pages the first is taken; 16-bit pictures are windowed linearly to
0..255, from percentiles of their own or from fixed levels, so that a 12-bit radiograph shows its contrast. A JPEG of
which at most half, a quarter or an eighth is wanted is decoded at that scale, which its DCT allows; what then remains
is an area average where it shrinks by two or more, else bilinear.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from weldtrain.config import ModelConfig
from weldtrain.errors import PictureError
from weldtrain.formats.pictures import JPEG_TAIL_BYTES, cut_off, has_jpeg_end, unreadable

# Pictures are worked on side by side already, and a pool inherited through a fork can deadlock.
cv2.setNumThreads(0)

_SHIFT_PX = 0.5
_FILL = 128  # the grey that libjpeg makes of what is missing


class Window(NamedTuple):
    """How 16 bits become 8: between two grey levels of the file, or else between two percentiles of the picture."""

    percentiles: tuple[float, float] = (0.1, 99.9)
    levels: tuple[float, float] | None = None

    @classmethod
    def of(cls, cfg: ModelConfig) -> Window:
        return cls(tuple(cfg.window_percentiles), tuple(cfg.window_levels) if cfg.window_levels else None)

    def apply(self, image: np.ndarray) -> np.ndarray:
        """uint16 of any shape to uint8, linear between the two bounds and flat beyond them."""
        low, high = self.levels or _percentiles(image, self.percentiles)
        high = max(high, low + 1.0)
        scale = 255.0 / (high - low)
        shown = np.clip(np.arange(65536), low, high).astype(np.float32)  # of every grey there is, then looked up
        return cv2.convertScaleAbs(shown, alpha=scale, beta=-low * scale).ravel()[image]


def _percentiles(image: np.ndarray, shares: tuple[float, float]) -> np.ndarray:
    """np.percentile of uint16, from counts instead of a sort: a sixth of the time."""
    up_to = np.cumsum(np.bincount(image.ravel(), minlength=65536))
    place = np.asarray(shares) / 100 * (image.size - 1)
    below = np.floor(place)
    low, high = (np.searchsorted(up_to, np.minimum(at, image.size - 1), "right") for at in (below, below + 1))
    return low + (high - low) * (place - below)


def read_image(
    path: Path, size: tuple[int, int] | None = None, grey: bool | None = None, window: Window | None = None
) -> np.ndarray:
    """uint8 [H,W,3] RGB, or [H,W,1] where the file has one channel.

    `size` (width, height in px) and `grey` are what its header said. Raises PictureError for a file that is no whole
    picture, or is not of that size.
    """
    return decode(read_bytes(path), path, size, grey, window)


def read_bytes(path: Path) -> np.ndarray:
    """uint8 [n], the file. Raises PictureError if it cannot be read, is empty, or is a JPEG without an end."""
    try:
        data = np.fromfile(path, np.uint8)  # imread would not find names outside the locale on every system
    except OSError as e:
        raise unreadable(path, e.strerror) from None
    if len(data) == 0:
        raise unreadable(path)
    if _is_jpeg(data) and not has_jpeg_end(data[-JPEG_TAIL_BYTES:].tobytes()):
        # Some releases of OpenCV fill the missing part with grey and say nothing.
        raise cut_off(path)
    return data


def decode(
    data: np.ndarray, path: Path, size: tuple[int, int] | None = None, grey: bool | None = None, window: Window | None = None,
    wanted: tuple[int, int] | None = None,
) -> np.ndarray:
    """The picture in `data`, as `read_image` gives it; where only `wanted` (width, height) of it is, perhaps reduced.

    A JPEG then has the smallest of its whole, half, quarter and eighth that is not below `wanted`.
    """
    is_jpeg = _is_jpeg(data)
    reduce = reduction(size, wanted) if is_jpeg and size and wanted else 1
    kind = cv2.IMREAD_GRAYSCALE if grey else cv2.IMREAD_COLOR if grey is False else cv2.IMREAD_ANYCOLOR
    if is_jpeg and grey is False:
        # Free in a JPEG's decoder. Not for others: OpenCV 5.0 turns 16-bit colour TIFFs into noise with it.
        kind = cv2.IMREAD_COLOR_RGB
    if reduce > 1:
        # The flags of reduced scales do not go with that of any depth, which a JPEG of 8 bit does not need.
        kind = {2: 16, 4: 32, 8: 64}[reduce] | (0 if grey else cv2.IMREAD_COLOR_RGB)
    else:
        kind |= cv2.IMREAD_ANYDEPTH
    try:
        image = cv2.imdecode(data, kind)
    except cv2.error as e:
        raise unreadable(path, e.err or e.msg) from None
    if image is None:
        raise unreadable(path, "damaged, or of a kind OpenCV does not decode")
    if is_jpeg and _has_grey_corner(image, 8 // reduce) and _ends_early(data, kind, image):
        raise cut_off(path, "its lower part is missing")
    if image.ndim == 2:
        image = image[:, :, None]
    elif not kind & cv2.IMREAD_COLOR_RGB:
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    if image.dtype not in (np.uint8, np.uint16):
        raise PictureError(f"has {image.dtype} pixels", path, "only 8 and 16 bits have a defined range: convert it")
    if size is not None and (image.shape[1], image.shape[0]) != (-(-size[0] // reduce), -(-size[1] // reduce)):
        raise PictureError(f"decodes to {image.shape[1] * reduce}x{image.shape[0] * reduce}, its header says {size[0]}x{size[1]}",
                           path, "it was replaced during the run, or its orientation tag is not understood: save it upright")
    return (window or Window()).apply(image).reshape(image.shape) if image.dtype == np.uint16 else image


def _has_grey_corner(image: np.ndarray, block: int) -> bool:
    """Whether a picture's last block of that many px, wherever EXIF has turned it to, may be what is missing."""
    ends = (slice(-block, None), slice(block))
    return any((image[rows, columns] == _FILL).all() for rows in ends for columns in ends)


def _ends_early(data: np.ndarray, kind: int, image: np.ndarray) -> bool:
    """Whether the JPEG's end mark comes before its last pixel: then what is put before the mark shows."""
    end = data.tobytes().rfind(b"\xff\xd9")
    more = np.random.default_rng(0).integers(0, 255, 256, np.uint8)  # without 255, with which a mark would begin
    longer = cv2.imdecode(np.concatenate([data[:end], more, data[end:]]), kind)
    return longer is None or not np.array_equal(longer, image)


def reduction(size: tuple[int, int], wanted: tuple[int, int]) -> int:
    """1, 2, 4 or 8: by how much a JPEG of `size` may be reduced in decoding and not fall below `wanted` on either side.

    A reduced side is rounded up and so stands for up to 7 px more than there are: none that would shift the edge by more
    than half a pixel of `wanted`.
    """
    def fits(side: int, want: int, k: int) -> bool:
        reduced = -(-side // k)
        return reduced >= want and (reduced * k - side) * want <= _SHIFT_PX * side

    return next(k for k in (8, 4, 2, 1) if k == 1 or all(fits(s, w, k) for s, w in zip(size, wanted)))


def _is_jpeg(data: np.ndarray) -> bool:
    return data[:2].tobytes() == b"\xff\xd8"


def target_size(width: int, height: int, min_size: int, max_size: int) -> tuple[int, int]:
    """The size in px at which the detector sees a picture: torchvision's rule.

    The shorter side becomes `min_size` unless that would make the longer one exceed `max_size`.
    """
    width, height = target_sizes(np.array([[width, height]]), min_size, max_size)[0].tolist()
    return width, height


def target_sizes(sizes: np.ndarray, min_size: int, max_size: int) -> np.ndarray:
    """int64 [n,2]: `target_size` of each row of sizes int [n,2]."""
    scale = np.minimum(min_size / sizes.min(1), max_size / sizes.max(1))
    return np.maximum((sizes * scale[:, None]).astype(np.int64), 1)


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [H,W,C] to `size` (width, height): area average where it shrinks by two or more, else bilinear."""
    if (image.shape[1], image.shape[0]) == size:
        return image
    much = image.shape[1] >= 2 * size[0] or image.shape[0] >= 2 * size[1]
    resized = cv2.resize(image, size, interpolation=cv2.INTER_AREA if much else cv2.INTER_LINEAR)
    return resized.reshape(size[1], size[0], image.shape[2])  # OpenCV drops a single channel
