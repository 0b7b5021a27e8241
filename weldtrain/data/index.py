"""AnnotationIndex: the whole data set as a few flat arrays in one file, opened by memory map and shared by all workers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weldtrain.atomic import whole
from weldtrain.config import nearest
from weldtrain.data.images import Window, read_image, target_sizes
from weldtrain.errors import DataError, one_line
from weldtrain.formats.record import CROWD, DECISIONS, DIFFICULT, Finding, dropped_boxes, summary

log = logging.getLogger(__name__)

_MAGIC = b"weldtrain index 3\n"
_LENGTH_CRC = struct.Struct("<QI")  # of the header
_ALIGN = 64
_CRC_UP_TO = 64 * 2**20  # a larger file is checked by its length alone, so that opening stays a matter of milliseconds


class AnnotationIndex:
    """Row i is one picture. All arrays are read-only views of one memory map.

    path_bytes uint8, path_offsets int64 [n+1]; sizes int32 [n,2] width, height in px of the upright picture; grey bool
    [n], whether it has one channel; split_ids uint8 [n]; box_offsets int64 [n+1]; boxes float32 [m,4] x1,y1,x2,y2 in
    px; name_ids int32 [m] into `names`; flags uint8 [m]; lines int32 [m] in the annotation file, 0 where that has none.
    """

    tile_px: int | None = None  # the side of the tiles that its rows are; None of whole pictures

    def __init__(self, file: Path) -> None:
        """Opens an index file. Raises ValueError if it is damaged or of another release, OSError if it is absent."""
        self.file = Path(file)
        header, arrays = _open(self.file)
        self.root = Path(header["root"])
        self.stamp: str = header["stamp"]
        self.names: list[str] = header["names"]
        self.splits: list[str] = header["splits"]
        self.format: str = header["format"]
        self.classes: list[str] = header["classes"]  # as the format declares them, used or not
        self.findings = [Finding(*f) for f in header["findings"]]
        self._paths, self._path_offsets = arrays["path_bytes"], arrays["path_offsets"]
        self.sizes, self.grey, self.split_ids = arrays["sizes"], arrays["grey"], arrays["split_ids"]
        self.box_offsets, self.boxes = arrays["box_offsets"], arrays["boxes"]
        self.name_ids, self.flags, self.lines = arrays["name_ids"], arrays["flags"], arrays["lines"]

    def __reduce__(self) -> tuple:
        # A spawned worker maps the file again instead of receiving a copy.
        return AnnotationIndex, (self.file,)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def whole(self) -> AnnotationIndex:
        """The index of whole pictures: this one, unless its rows are windows of another's."""
        return self

    def shown(self, rows: np.ndarray | int) -> np.ndarray | int:
        """The rows of `whole` that these rows show."""
        return rows

    def window(self, row: int) -> np.ndarray:
        """int [4]: x1,y1,x2,y2 of what this row shows of its picture, in px."""
        return np.array([0, 0, *self.sizes[row]])

    def siblings(self, row: int) -> range:
        """All rows that show the picture of this one."""
        return range(row, row + 1)

    def target_sizes(self, min_size: int, max_size: int) -> np.ndarray:
        """int64 [n,2]: the width and height in px at which a model of these sizes sees each row."""
        return target_sizes(self.sizes, min_size, max_size)

    def path(self, row: int) -> str:
        """The picture's path below `root`."""
        start, end = self._path_offsets[row : row + 2]
        return self._paths[start:end].tobytes().decode("utf-8", "surrogateescape")

    def picture(self, row: int, window: Window | None = None) -> np.ndarray:
        """The decoded picture, as `read_image` gives it. Raises PictureError."""
        return read_image(self.root / self.path(row), tuple(self.sizes[row].tolist()), bool(self.grey[row]), window)

    def identities(self, rows: np.ndarray) -> np.ndarray:
        """int64 [k]: of those of the rows that show defects a number each, by file name, size and boxes: by these a picture is
        known again, wherever its data set lies and whichever split it is in. One without defects has too little of its own."""
        found = []
        for row in rows[np.diff(self.box_offsets)[rows] > 0].tolist():
            name = self.path(row).rpartition("/")[2].encode("utf-8", "surrogateescape")
            parts = name, self.sizes[row].tobytes(), self.boxes[self.box_rows(row)].tobytes()
            found.append(int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little", signed=True))
        return np.array(found, np.int64)

    def split_names(self) -> list[str]:
        """The split of each picture."""
        return [self.splits[k] for k in self.split_ids]

    def box_rows(self, row: int) -> slice:
        """Where the boxes of a picture lie in `boxes`, `name_ids`, `flags` and `lines`."""
        return slice(int(self.box_offsets[row]), int(self.box_offsets[row + 1]))

    def row_of(self, box: int) -> int:
        """The picture to which a row of `boxes` belongs."""
        return int(np.searchsorted(self.box_offsets, box, "right")) - 1

    def boxes_in(self, split: str) -> np.ndarray:
        """bool [m]: rows of `boxes` whose picture is in a split, or in one of several, `val+test`."""
        return np.repeat(self._is_in(split), np.diff(self.box_offsets))

    def boxes_per_name(self, split: str) -> np.ndarray:
        """int64 [len(names)]: how many boxes of each name a split has."""
        return np.bincount(self.name_ids[self.boxes_in(split)], minlength=len(self.names))

    def ignored(self, boxes: slice | np.ndarray) -> np.ndarray:
        """bool: rows of `boxes` marked difficult or crowd: in no loss, and neither found nor missed in AP."""
        return (self.flags[boxes] & (DIFFICULT | CROWD)) > 0

    def rows(self, split: str) -> np.ndarray:
        """int64 rows of a split, or of several, `val+test`, in path order. Raises DataError if one holds no picture."""
        for name in self.lacking(split):
            raise DataError(f"no picture in split '{name}'", self.root, f"the splits are {', '.join(self.splits)}")
        return np.flatnonzero(self._is_in(split))

    def lacking(self, split: str) -> list[str]:
        """Those of the splits that are named which hold no picture."""
        return [name for name in self._named(split) if name not in self.splits]

    def _is_in(self, split: str) -> np.ndarray:
        return np.isin(self.split_ids, [self.splits.index(name) for name in self._named(split)])

    def _named(self, split: str) -> list[str]:
        return [split] if split in self.splits else split.split("+")

    def class_names(self, wanted: Sequence[str] | None) -> Sequence[str]:
        """The classes to train on: `wanted`, or those found in the data. Raises DataError if there is none."""
        classes = wanted or self.names
        if not classes:
            raise DataError("no picture has a box", self.root,
                            "check dataset.annotations; a detector needs defects to learn from")
        return classes

    def labels(self, classes: Sequence[str]) -> np.ndarray:
        """int64 [len(names)]: the label of each name id, 1 for the first of `classes`; 0 is the background.

        Raises DataError for a name in the data that is not among `classes`, with the file and the nearest class.
        """
        for name_id, name in enumerate(self.names):
            if name not in classes:
                box = int(np.flatnonzero(self.name_ids == name_id)[0])
                row = self.row_of(box)
                near = nearest(name, classes)
                raise DataError(
                    f"class '{name}' is not in dataset.classes [{', '.join(classes)}]",
                    f"annotation of {self.path(row)}" + (f", line {self.lines[box]}" if self.lines[box] else ""),
                    f"did you mean '{near}'?" if near else "add it there, or set dataset.classes=null",
                )
        return np.array([list(classes).index(name) + 1 for name in self.names], np.int64)

    def report_findings(self) -> None:
        """Logs what the reader found odd: each kind once, how often, and the first case."""
        for finding in self.findings:
            if finding.kind in DECISIONS:
                log.info(one_line(finding.text))
        for line in summary(f for f in self.findings if f.kind not in DECISIONS):
            log.warning(line)
        if lost := self.dropped_boxes():
            log.warning(lost)

    def dropped_boxes(self) -> str:
        """How many boxes the reader dropped, in how many files; "" if none."""
        lost = dropped_boxes(self.findings)
        return f"{len(lost)} boxes dropped in {len({f.file for f in lost})} files" if lost else ""

    def describe(self, split: str) -> str:
        """One line of counts: pictures, defect-free ones, boxes by class."""
        rows = self.rows(split)
        counts = np.diff(self.box_offsets)[rows]
        by_class = ", ".join(f"{name} {n}" for name, n in zip(self.names, self.boxes_per_name(split)))
        ignored = int(self.ignored(self.boxes_in(split)).sum())
        aside = f" ({ignored} of them ignored as difficult or crowd)" if ignored else ""
        return f"{len(rows)} pictures ({int((counts == 0).sum())} without defects), {counts.sum()} boxes{aside}: {by_class}"


def write_index(file: Path, header: dict, arrays: dict[str, np.ndarray]) -> None:
    """One file: magic, length and checksum of the header, header in JSON, then the arrays, each on a 64-byte boundary.

    Written beside its place and renamed, so that concurrent builds and readers of an older one never meet half a file.
    """
    table, body = {}, bytearray()
    for name, array in arrays.items():
        body += b"\0" * (-len(body) % _ALIGN)
        table[name] = (array.dtype.str, array.shape, len(body))
        body += np.ascontiguousarray(array).tobytes()
    text = json.dumps({**header, "arrays": table, "bytes": len(body), "crc": zlib.crc32(body)}).encode()
    head = _MAGIC + _LENGTH_CRC.pack(len(text), zlib.crc32(text)) + text
    try:
        with whole(file, "wb", private=True) as out:
            out.write(head + b"\0" * (-len(head) % _ALIGN) + body)
    except OSError as e:
        raise DataError(f"the index cannot be written ({e.strerror})", file.parent, "set cache_dir to a folder with room") from e


def _open(file: Path) -> tuple[dict, dict[str, np.ndarray]]:
    with open(file, "rb") as f:
        start = f.read(len(_MAGIC) + _LENGTH_CRC.size)
        if not start.startswith(_MAGIC) or len(start) < len(_MAGIC) + _LENGTH_CRC.size:
            raise ValueError("not an index of this release")
        length, crc = _LENGTH_CRC.unpack_from(start, len(_MAGIC))
        size = os.fstat(f.fileno()).st_size
        text = f.read(min(length, size))
    if zlib.crc32(text) != crc:
        raise ValueError("the checksum of its header is wrong")
    header = json.loads(text)
    base = len(start) + length
    base += -base % _ALIGN
    if size != base + header["bytes"]:
        raise ValueError(f"{size} bytes instead of {base + header['bytes']}")
    body = np.memmap(file, np.uint8, "r", offset=0)[base:] if header["bytes"] else np.empty(0, np.uint8)
    if header["bytes"] <= _CRC_UP_TO and zlib.crc32(body) != header["crc"]:
        raise ValueError("its checksum is wrong")
    arrays = {}
    for name, (dtype, shape, at) in header["arrays"].items():
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        # asarray: a plain view, since indexing a memmap object costs ten times an array's.
        arrays[name] = np.asarray(body[at : at + nbytes]).view(dtype).reshape(shape)
    return header, arrays
