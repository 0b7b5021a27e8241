"""YOLO: one text file a picture, one defect a line, in shares of the picture; data.yaml in the dialects that tools write."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats.files import Folder, read_text
from weldtrain.formats.pictures import Header
from weldtrain.formats.record import ERROR, NOTE, Box, Finding, Reader, Size
from weldtrain.formats.splits import own_splits, read_lists, split_name

_YAML = (".yaml", ".yml")
_NAMES = ("classes.txt", "obj.names", "names.txt", "labels.txt", "_darknet.labels", "predefined_classes.txt")
# Text that lies beside labels and is none.
_OTHER_TEXT = re.compile(rf"(^|/)({'|'.join(map(re.escape, _NAMES))}|(train|val|valid|validation|test)\.txt|readme[^/]*)$", re.IGNORECASE)
_SPLITS = ("train", "val", "valid", "validation", "test")
# Tools that draw write a box a little over the edge; beyond this a number is no share of the picture.
_LARGEST_SHARE = 2.0


class Yolo(Reader):
    """Labels lie in `labels` for pictures in `images`, or beside them, or in any folder with the same file names."""

    def __init__(self, folder: Folder, dataset: DatasetConfig) -> None:
        super().__init__(folder, dataset)
        self.yaml, described = find_yaml(folder, dataset.annotations)
        self.keypoints = _keypoints(described)
        self.classes = _class_names(folder, self.yaml, described, dataset)
        labels_below = folder.folder(dataset.annotations, "annotations") if dataset.annotations and not self.yaml else ""
        named = {key: described[key] for key in _SPLITS if described.get(key, "null") not in ("", "null", "~")}
        if named and dataset.split_csv is None:
            splits, by = self._named(named, described.get("path") or ""), self.yaml
        else:
            splits, by, found = own_splits(folder, dataset.split_csv)
            self.findings += found
        if splits is not None:
            self.unlisted(splits, by)
        pictures = splits if splits is not None else dict.fromkeys(folder.pictures, "")
        pairs = self.match(pictures, [n for n in folder.ending((".txt",), labels_below) if not _OTHER_TEXT.search(n)])
        if pictures and not pairs:
            stray = next(iter(folder.ending((".txt",), labels_below)), "none")
            raise DataError(f"no label for any of {len(pictures)} pictures", folder.root,
                            f"for {next(iter(pictures))} a .txt of the same name was looked for everywhere; .txt found: {stray}")
        self.settle({p: (pairs.get(p, ""), split) for p, split in pictures.items()}, "labels/ and beside the pictures")

    def annotations(self, i: int, header: Header) -> Iterator[Box | Size | Finding]:
        if not self.sources[i]:
            return
        source = self.sources[i]
        try:
            lines = read_text(self.folder.path(source)).splitlines()
        except DataError as e:
            yield Finding(ERROR, "label-unreadable", source, 0, *e.args[::2])
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _row(line, number, source, self.classes, (header.width, header.height), self.keypoints)

    def _named(self, named: dict[str, Any], base: str) -> dict[str, str]:
        """Picture -> split of what data.yaml names: folders, lists, or several of either."""
        splits: dict[str, str] = {}
        for key, value in named.items():
            split = split_name(key)
            for reference in [value] if isinstance(value, str) else value:
                place = self._place(str(reference), base, key)
                if place is None:
                    continue
                if place.lower().endswith(".txt"):
                    listed, found = read_lists(self.folder, [(place, split)])
                    self.findings += found
                else:
                    below = f"{place}/" if place else ""
                    listed = {p: split for p in self.folder.pictures if p.startswith(below)}
                for picture in listed:
                    if splits.setdefault(picture, split) != split:
                        self.findings.append(Finding(ERROR, "split-twice", self.yaml, 0,
                                                     f"{picture} is in {splits[picture]} and in {split}",
                                                     "a picture belongs to one split, else the detector is judged on what it has seen"))
        return splits

    def _place(self, reference: str, base: str, key: str) -> str | None:
        """The folder or list below the root that a reference means; what had to be bent to find it becomes a finding."""
        beside = PurePosixPath(self.yaml).parent.as_posix().strip(".")
        parts = [p for p in reference.replace("\\", "/").split("/") if p not in ("", ".", "..")]
        own = [p for p in base.replace("\\", "/").split("/") if p not in ("", ".", "..")]
        # As written below `path:` or the yaml, as Roboflow writes it, and as it was on another machine.
        tails = [[*own, *parts], *([*own[i:], *parts] for i in range(1, len(own) + 1))]
        absolute = reference.startswith("/") or ":" in reference[:3]
        tails += [parts[i:] for i in range(1, len(parts))] if absolute else []
        for names in (lambda p: [p], _spellings):
            for tail in tails:
                for spelled in _products([names(p) for p in tail]):
                    for start in dict.fromkeys((beside, "")):
                        place = "/".join([*filter(None, [start]), *spelled])
                        found = self.folder.has_folder(place) if not place.lower().endswith(".txt") else \
                            next((n for n in self.folder.ending((".txt",)) if n.casefold() == place.casefold()), "")
                        if found or not place:
                            if found.split("/")[-len(spelled):] != parts[-len(spelled):]:
                                self.findings.append(Finding(NOTE, "split-renamed", self.yaml, 0,
                                                             f"{key}: {reference} is not there, {found} is: used"))
                            return found
        self.findings.append(Finding(ERROR, "split-missing", self.yaml, 0, f"{key}: {reference} names nothing below {self.folder.root}",
                                     "correct it, or delete the line; only what lies below dataset.root is read"))
        return None


def find_yaml(folder: Folder, wanted: str | None = None) -> tuple[str, dict[str, Any]]:
    """The file that describes a YOLO data set, and what it says, all as text; ("", {}) where there is none.

    Raises DataError for two that differ, and for one that was asked for and cannot be read.
    """
    if wanted and not wanted.lower().endswith(_YAML):
        return "", {}
    found: dict[str, dict[str, Any]] = {}
    for name in folder.ending(_YAML):
        if wanted and name.casefold() != wanted.casefold():
            continue
        try:
            # BaseLoader keeps everything as written: a class named `no` is no boolean.
            described = yaml.load(read_text(folder.path(name)), Loader=yaml.BaseLoader)
        except (yaml.YAMLError, RecursionError, ValueError, DataError) as e:
            if wanted or name.lower() in ("data.yaml", "data.yml", "dataset.yaml"):
                raise DataError(f"is not readable YAML ({' '.join(str(e).split())})", folder.path(name), "mend or export it anew") from None
            continue
        if isinstance(described, dict) and ("names" in described or "nc" in described):
            found[name] = described
    if wanted and not found:
        raise DataError("no such file, or no names in it", folder.path(wanted), "set dataset.annotations to the data.yaml")
    nearest = [n for n in found if n.count("/") == min(map(len, (m.split("/") for m in found))) - 1]
    if len(nearest) > 1:
        raise DataError(f"holds {' and '.join(nearest)}", folder.root, f"say which: dataset.annotations={nearest[0]}")
    return (nearest[0], found[nearest[0]]) if nearest else ("", {})


def looks_like_labels(text: str) -> bool:
    """Whether the first line of a text could be a row of YOLO."""
    row = text.strip().split("\n", 1)[0].split()
    return len(row) >= 5 and all(_number(v) is not None for v in row) and float(row[0]).is_integer()


def _class_names(folder: Folder, file: str, described: dict[str, Any], dataset: DatasetConfig) -> list[str]:
    names = described.get("names")
    if isinstance(names, dict):
        try:
            numbered = {int(k): v for k, v in names.items()}
        except (TypeError, ValueError):
            raise DataError("the keys of names are no numbers", folder.path(file), "write 0: crack, 1: porosity, …") from None
        if sorted(numbered) != list(range(len(numbered))):
            raise DataError(f"names are numbered {', '.join(map(str, sorted(numbered)))}", folder.path(file),
                            "number them 0, 1, 2, … without a hole")
        names = [numbered[i] for i in range(len(numbered))]
    elif isinstance(names, str):
        names = [names]
    if not names and dataset.classes:
        return list(dataset.classes)
    if not names:
        file = next((n for n in folder.ending((".txt", ".names")) if n.rpartition("/")[2].lower() in _NAMES), "")
        names = [line.strip() for line in read_text(folder.path(file)).splitlines() if line.strip()] if file else []
    if not names or not all(isinstance(n, str) and n.strip() for n in names):
        raise DataError("no names for the class numbers", folder.path(file),
                        "write them into data.yaml or classes.txt, or give dataset.classes=[…] in the order of the numbers")
    names = [n.strip() for n in names]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise DataError(f"class '{twice[0]}' stands twice", folder.path(file), "give each number its own name")
    if "nc" in described and described["nc"] != str(len(names)):
        raise DataError(f"nc is {described['nc']}, but there are {len(names)} names", folder.path(file), "correct one of them")
    return names


def _keypoints(described: dict[str, Any]) -> int:
    """How many numbers of keypoints follow the box in each row."""
    shape = described.get("kpt_shape")
    try:
        return int(shape[0]) * int(shape[1]) if shape else 0
    except (TypeError, ValueError, IndexError):
        return 0


def _row(line: str, number: int, source: str, names: Sequence[str], size: tuple[int, int], keypoints: int) -> Box | Finding:
    """One line: `class cx cy w h`, or `class x1 y1 x2 y2 x3 y3 …`, a polygon, of which the enclosing box is taken."""
    def wrong(kind: str, text: str, fix: str) -> Finding:
        return Finding(ERROR, kind, source, number, text, fix)

    row = line.split()
    values = [_number(v) for v in row]
    if None in values:
        return wrong("row-not-numbers", f"holds '{row[values.index(None)]}'", "expected numbers: class cx cy w h, separated by blanks")
    index, shares = values[0], values[1:]
    if len(shares) == 5 and not keypoints:
        return wrong("row-six-columns", "has six columns: a confidence, as predictions have it?", "annotations have five: remove the sixth")
    polygon = len(shares) >= 6 and len(shares) % 2 == 0 and not keypoints
    if not polygon and len(shares) != 4 + keypoints:
        return wrong("row-columns", f"has {len(row)} columns", "expected class cx cy w h, or class and the corners of a polygon")
    if index not in range(len(names)):
        hint = "; numbers count from 0: do yours count from 1?" if index == len(names) else ""
        return wrong("class-number", f"class {row[0]} is not in 0-{len(names) - 1} ({', '.join(names)}){hint}",
                     "correct the number, or complete the list of names")
    if any(abs(v) > _LARGEST_SHARE for v in shares if abs(v) < float("inf")):
        return wrong("row-not-shares", f"holds {max(shares, key=abs):g}: pixels?", "coordinates are shares of the picture, from 0 to 1")
    if polygon:
        xs, ys = shares[0::2], shares[1::2]
        # Not min and max of a list with nan in it: they would drop it.
        corners = (min(xs), min(ys), max(xs), max(ys)) if all(v == v for v in shares) else (float("nan"),) * 4
    else:
        cx, cy, w, h = shares[:4]
        corners = (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2)
    width, height = size
    return Box(tuple(c * s for c, s in zip(corners, (width, height, width, height))), names[int(index)], number, called=f"row {number}")


def _number(text: str) -> float | None:
    try:
        return float(text) if "_" not in text else None  # float() takes 1_0 for 10
    except ValueError:
        return None


@functools.cache
def _spellings(name: str) -> tuple[str, ...]:
    """What else a folder of a split may be called."""
    same = {split_name(name)} & {"train", "val", "test"}
    words = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
    return words[same.pop()] if same else (name,)


def _products(choices: Sequence[Sequence[str]]) -> list[list[str]]:
    products: list[list[str]] = [[]]
    for some in choices:
        products = [[*p, s] for p in products for s in some]
    return products
