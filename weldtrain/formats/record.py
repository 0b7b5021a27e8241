"""The one record that every format is read into, and what all formats share: picture sizes, sound boxes, file stamps."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from weldtrain.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".tif", ".tiff", ".webp")
DIFFICULT = 1
CROWD = 2
# An edge that is less than this many pixels long is no box: cases 2 and 27 (zero after rounding or resizing).
MIN_SIDE_PX = 0.5
_TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that swap width and height


class Box(NamedTuple):
    """One annotated defect as a reader found it: corners in pixels, before any check."""

    corners: tuple[float, float, float, float]
    name: str
    line: int
    flags: int = 0


class Finding(NamedTuple):
    """Something about the data that its owner should know. It never stops the run."""

    file: str
    line: int
    text: str


@dataclass
class Record:
    """What is known of one picture. Boxes are float32 [n,4] x1,y1,x2,y2 in pixels of the upright decoded image."""

    image: str
    width: int
    height: int
    split: str
    source: str
    boxes: np.ndarray
    names: list[str]
    flags: np.ndarray
    lines: np.ndarray
    findings: list[Finding] = field(default_factory=list)


class Reader(Protocol):
    """A folder of one format. Must pickle, so that records can be read in several processes."""

    images: list[str]
    findings: list[Finding]

    @staticmethod
    def stamp(dataset: object) -> str:
        """A digest that changes whenever any file that records are read from does. Cheap: it parses nothing."""

    def read(self, i: int) -> Record:
        """The record of `images[i]`. Raises DataError with file and line."""


def make_record(root: Path, image: str, split: str, source: str, boxes: Iterable[Box]) -> Record:
    """Takes the picture's true size, clips the boxes to it, and drops with a finding those that enclose nothing.

    Raises DataError for a picture that cannot be read and for a coordinate that is no finite number.
    """
    width, height = picture_size(root / image)
    findings: list[Finding] = []
    kept: list[Box] = []
    for number, box in enumerate(boxes, 1):
        if not np.isfinite(box.corners).all():
            # Before any clamp: max(0, nan) is 0, and a broken box would become a large one.
            raise DataError(
                f"object {number} ({box.name}) has coordinates {_text(box.corners)}", f"{root / source}:{box.line}",
                "every coordinate must be a finite number",
            )
        x1, y1, x2, y2 = box.corners
        clipped = (max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height)))
        if clipped[2] - clipped[0] < MIN_SIDE_PX or clipped[3] - clipped[1] < MIN_SIDE_PX:
            reason = "encloses nothing" if x2 - x1 < MIN_SIDE_PX or y2 - y1 < MIN_SIDE_PX else \
                f"lies outside the picture of {width}x{height}"
            findings.append(Finding(source, box.line, f"object {number} ({box.name}) {_text(box.corners)} {reason}: dropped"))
        else:
            kept.append(box._replace(corners=clipped))
    return Record(
        image=image, width=width, height=height, split=split, source=source,
        boxes=np.array([b.corners for b in kept], np.float32).reshape(-1, 4),
        names=[b.name for b in kept],
        flags=np.array([b.flags for b in kept], np.uint8),
        lines=np.array([b.line for b in kept], np.int32),
        findings=findings,
    )


def picture_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels of the picture as a viewer shows it (EXIF applied), from its header alone."""
    try:
        with Image.open(path) as image:
            width, height = image.size
            turned = image.getexif().get(ExifTags.Base.Orientation) in _TRANSPOSED
            # Pillow has swapped the sides of a turned TIFF already.
            return (height, width) if turned and image.format != "TIFF" else (width, height)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, struct.error, ValueError) as e:
        raise unreadable(path, e) from None


def unreadable(path: Path, cause: object = "") -> DataError:
    """The error for a file that holds no readable picture, by what can be seen from outside."""
    if path.is_dir():
        what = "is a folder, not a picture"
    elif not os.path.exists(path):
        return DataError("no such picture", path, "a broken link? Remove it from the split file or restore it")
    elif not os.access(path, os.R_OK):
        what = "may not be read (permission denied)"
    elif path.stat().st_size == 0:
        what = "is empty (0 bytes)"
    elif path.read_bytes()[:256].lstrip()[:1] == b"<":
        what = "is not a picture but a page of HTML or XML"
    else:
        what = f"cannot be read as a picture ({cause})" if str(cause) else "cannot be read as a picture"
    return DataError(what, path, "replace the file or take it out of the split file")


def stamp_files(paths: Iterable[Path]) -> str:
    """A digest of the names and states of files and of all that folders hold, however deep.

    A state is size, modification and change time, and inode: the change time cannot be set back, so an edit that
    keeps size and date is seen. Costs one stat a file.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(os.fsencode(path) + b"\0")
        if path.is_dir():
            found = sorted((name, _status(entry)) for name, entry in _walk(str(path)))
            digest.update(os.fsencode("\0".join(name for name, _ in found)))
            digest.update(b"".join(status for _, status in found))
        elif path.exists():
            digest.update(_status(path))
    return digest.hexdigest()


def list_files(folder: Path) -> list[str]:
    """Every data file under `folder` as a relative path with `/`, sorted."""
    return sorted(name for name, _ in _walk(str(folder)))


def _status(file: os.DirEntry[str] | Path) -> bytes:
    try:
        st = file.stat()
    except OSError:  # a link that leads nowhere is a state too
        return bytes(32)
    return struct.pack("<4Q", st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino)


def _walk(folder: str, prefix: str = "", above: frozenset[str] = frozenset()) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Files below `folder`, links followed but never in a circle; dot-files and `__MACOSX` are no data."""
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        entries = os.scandir(folder)
    except OSError as e:
        raise DataError(f"the folder cannot be listed ({e.strerror})", folder, "give yourself the right to read it") from None
    with entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name == "__MACOSX":
                continue
            try:
                is_folder = entry.is_dir()
            except OSError:  # a link to itself
                is_folder = False
            if is_folder:
                yield from _walk(entry.path, f"{prefix}{entry.name}/", above | {real})
            else:
                yield prefix + entry.name, entry


def _text(corners: Iterable[float]) -> str:
    return "[" + ", ".join(f"{c:g}" for c in corners) + "]"
