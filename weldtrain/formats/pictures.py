"""What a picture's header says, and the one error for files that hold no whole picture."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import ExifTags, Image, UnidentifiedImageError

from weldtrain.errors import PictureError

Image.MAX_IMAGE_PIXELS = None  # a header costs no memory; dataset.max_megapixels decides before anything is decoded
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".tif", ".tiff", ".webp")
# Beyond this the short side of a picture at any usual model scale is a few pixels: a strip, in which nothing is found.
MAX_ASPECT = 300
_TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_GREY = ("1", "L", "I;16", "I;16B", "I;16L", "I;16N", "I")
JPEG_TAIL_BYTES = 64 * 1024  # cameras append previews and maps behind the end of a JPEG
OR_SKIP = "; dataset.bad_images=skip leaves such pictures out"
_FIX = f"replace the file or take it out of the data{OR_SKIP}"


class Header(NamedTuple):
    """Size in px as a viewer shows the picture (EXIF applied), whether it has one channel, and how many pages it holds."""

    width: int
    height: int
    grey: bool = False
    pages: int = 1


def picture_header(path: Path, max_megapixels: float) -> Header:
    """The header of a picture, read without decoding it. Raises PictureError, also for a JPEG without an end."""
    try:
        with open(path, "rb") as file:
            with Image.open(file) as image:
                width, height = image.size
                # Not a PNG's own getexif, which decodes the whole picture in search of a tag behind it.
                turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation) in _TRANSPOSED
                # Pillow has swapped the sides of a turned TIFF already.
                if turned and image.format != "TIFF":
                    width, height = height, width
                header = Header(width, height, image.mode in _GREY, _pages(image))
                if image.mode == "F":
                    raise PictureError("has floating-point pixels", path,
                                       f"save it with 8 or 16 bit, which have a defined range; {_FIX}")
                is_jpeg = image.format in ("JPEG", "MPO")
            if is_jpeg and not _ends(file):
                raise cut_off(path)
    except PictureError:
        raise
    # Pillow's decoders of headers let through what a damaged field makes of Python's own operations.
    except (UnidentifiedImageError, OSError, SyntaxError, struct.error, ValueError, OverflowError, TypeError, KeyError,
            EOFError, IndexError, ArithmeticError, AttributeError, MemoryError) as e:
        raise unreadable(path, e) from None
    if width * height > max_megapixels * 1e6:
        raise PictureError(f"is {width}x{height}, larger than {max_megapixels:g} megapixels", path,
                           f"if that is right, raise dataset.max_megapixels{OR_SKIP}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise PictureError(f"is {width}x{height}, a strip: its short side would vanish at any scale", path, _FIX)
    return header


def cut_off(path: Path, sign: str = "the JPEG has no end") -> PictureError:
    """The error for a JPEG of which a part is missing."""
    return PictureError(f"is cut off: {sign}", path, f"copy it again; {_FIX}")


def has_jpeg_end(data: bytes) -> bool:
    """Whether the last JPEG_TAIL_BYTES of a JPEG hold its end marker."""
    return b"\xff\xd9" in data


def unreadable(path: Path, cause: object = "") -> PictureError:
    """The error for a file that holds no readable picture, by what can be seen from outside."""
    if path.is_dir():
        what = "is a folder, not a picture"
    elif not os.path.exists(path):
        return PictureError("no such picture", path, f"a broken link? {_FIX}")
    elif not os.access(path, os.R_OK):
        what = "may not be read (permission denied)"
    elif path.stat().st_size == 0:
        what = "is empty (0 bytes)"
    elif _start(path).lstrip()[:1] == b"<":
        what = "is not a picture but a page of HTML or XML"
    else:
        # Pillow's words for an unknown format say no more, but hold the whole path.
        words = "" if isinstance(cause, UnidentifiedImageError) else str(cause).replace(str(path), path.name)
        what = "cannot be read as a picture" + f" ({words})" * bool(words)
    return PictureError(what, path, _FIX)


def _pages(image: Image.Image) -> int:
    try:
        return image.n_frames if image.format == "TIFF" else 1
    except (OSError, SyntaxError, struct.error, ValueError, TypeError, KeyError, EOFError):  # a later page is damaged
        return 1


def _ends(file: BinaryIO) -> bool:
    file.seek(-min(2, file.seek(0, os.SEEK_END)), os.SEEK_END)
    if file.read() == b"\xff\xd9":
        return True
    file.seek(-min(JPEG_TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
    return has_jpeg_end(file.read())


def _start(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(256)
