"""YOLO: one text file a picture, one defect a line, in shares of the picture; data.yaml in the dialects that tools write."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import yaml

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats.files import Folder, as_number, folded, path_parts, read_text
from weldtrain.formats.pictures import Header
from weldtrain.formats.record import ERROR, LARGEST_SHARE, NOTE, ONE_SPLIT, Box, Finding, Reader, Size
from weldtrain.formats.splits import empty_split, own_splits, read_lists, split_name

_YAML = (".yaml", ".yml")
_NAMES = ("classes.txt", "obj.names", "names.txt", "labels.txt", "_darknet.labels", "predefined_classes.txt")
# Text that lies beside labels and is none.
_OTHER_TEXT = re.compile(rf"(^|/)({'|'.join(map(re.escape, _NAMES))}|(train|val|valid|validation|test)\.txt|readme[^/]*)$",
                         re.IGNORECASE)
_SPLITS = ("train", "val", "valid", "validation", "test")


class Yolo(Reader):
    """Labels lie in `labels` for pictures in `images`, or beside them, or in any folder with the same file names."""

    def __init__(self, folder: Folder, dataset: DatasetConfig) -> None:
        super().__init__(folder, dataset)
        if dataset.one_based:
            raise DataError("has no meaning for shares of the picture", "dataset.one_based", "leave it false for YOLO")
        wanted = dataset.annotations or ""
        self.yaml, described = find_yaml(folder, wanted)
        self.keypoints = _keypoints(described)
        self.classes = _class_names(folder, self.yaml, described, dataset)
        labels_below = folder.folder(wanted, "annotations") if wanted and not wanted.lower().endswith(_YAML) else ""
        named = {key: described[key] for key in _SPLITS if described.get(key, "null") not in ("", "null", "~")}
        if named and dataset.split_csv is None:
            splits, by = self._named(named, described.get("path")), self.yaml
        else:
            splits, by, found = own_splits(folder, dataset.split_csv)
            self.findings += found
        if splits is not None:
            self.unlisted(splits, by)
        pictures = splits if splits is not None else dict.fromkeys(folder.pictures, "")
        labels = [n for n in folder.ending((".txt",), labels_below) if not _OTHER_TEXT.search(n)]
        pairs = self.match(pictures, labels, labels_below)
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

    def _named(self, named: dict[str, Any], base: Any) -> dict[str, str]:
        """Picture -> split of what data.yaml names: folders, lists, or several of either."""
        splits: dict[str, str] = {}
        places = _places(self.folder)
        for key, value in named.items():
            split = split_name(key)
            for reference in value if isinstance(value, list) else [value]:
                listed = self._below(reference, split, base, places) if isinstance(reference, str) else ()
                if not listed:
                    what = reference if isinstance(reference, str) else "what is there"
                    self.findings.append(empty_split(
                        self.yaml, split, f"{key}: {what} names no picture below the root",
                        "correct it, or delete the line; only what lies below dataset.root is read"))
                for picture in listed:
                    if splits.setdefault(picture, split) != split:
                        self.findings.append(Finding(
                            ERROR, "split-twice", self.yaml, 0, f"{picture} is in {splits[picture]} and in {split}",
                            ONE_SPLIT))
        return splits

    def _below(self, reference: str, split: str, base: Any, places: Sequence[dict[str, str]]) -> Collection[str]:
        """The pictures in the folder or list that data.yaml refers to."""
        place = self._place(reference, base, places)
        if place is None:
            return ()
        if place.lower().endswith(".txt"):
            listed, found = read_lists(self.folder, [(place, split)])
            self.findings += found
            return listed
        return [p for p in self.folder.pictures if p.startswith(f"{place}/" if place else "")]

    def _place(self, reference: str, base: Any, places: Sequence[dict[str, str]]) -> str | None:
        """The folder or list below the root that a reference means, or None. Another spelling becomes a finding."""
        base = base.replace("\\", "/") if isinstance(base, str) else ""
        path = reference.replace("\\", "/")
        beside = self.yaml.rpartition("/")[0]
        own, parts = path_parts(base), path_parts(path)
        # As written; as Roboflow means it, whose `..` leads nowhere; below `path:`; and as it was on another machine.
        candidates = [posixpath.normpath(posixpath.join(beside, base, path))]
        tails = [own[i:] + parts for i in range(len(own) + 1)]
        tails += [parts[i:] for i in range(1, len(parts))] if path.startswith("/") or ":" in path[:3] else []
        candidates += ["/".join([*start, *tail]) for tail in tails for start in (path_parts(beside), ())]
        for same, known in zip((folded, _spelled), places):
            for candidate in candidates:
                found = known.get(same(candidate))
                if found is not None:
                    if found != candidate and candidate not in ("", "."):
                        self.findings.append(Finding(NOTE, "split-renamed", self.yaml, 0,
                                                     f"{reference} is not there, {found} is: used"))
                    return found
        return None


def find_yaml(folder: Folder, wanted: str | None = None) -> tuple[str, dict[str, Any]]:
    """The file that describes a YOLO data set, and what it says, all as text; ("", {}) where there is none.

    Raises DataError for two that differ, and for one that was asked for and cannot be read.
    """
    if wanted and not wanted.lower().endswith(_YAML):
        wanted = None
    found: dict[str, dict[str, Any]] = {}
    for name in folder.ending(_YAML):
        if wanted and name.casefold() != wanted.casefold():
            continue
        try:
            # BaseLoader keeps everything as written: a class named `no` is no boolean.
            described = yaml.load(read_text(folder.path(name)), Loader=yaml.BaseLoader)
        except (yaml.YAMLError, RecursionError, ValueError, DataError) as e:
            if wanted or name.lower() in ("data.yaml", "data.yml", "dataset.yaml"):
                raise DataError(f"is not readable YAML ({e})", folder.path(name), "mend or export it anew") from None
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
    return len(row) >= 5 and all(as_number(v) is not None for v in row) and float(row[0]).is_integer()


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
    if not names:
        file, names = _names_file(folder)
    if not names and dataset.classes:  # last, since a user lists the names in an order of his own
        return list(dataset.classes)
    if not names or not all(isinstance(n, str) and n.strip() for n in names):
        raise DataError("no names for the class numbers", folder.path(file),
                        "write them into data.yaml or classes.txt, or give dataset.classes=[…] in the order of the numbers")
    names = [n.strip() for n in names]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise DataError(f"class '{twice[0]}' stands twice", folder.path(file), "give each number its own name")
    if (count := described.get("nc", str(len(names)))) != str(len(names)):
        raise DataError(f"nc is {count if isinstance(count, str) else 'no number'}, but there are {len(names)} names",
                        folder.path(file), "correct one of them")
    return names


def _names_file(folder: Folder) -> tuple[str, list[str]]:
    """The text with one class name a line, and its names. Raises DataError for several that differ."""
    for name in _NAMES:
        found = {n: [line.strip() for line in read_text(folder.path(n)).strip().splitlines()]
                 for n in folder.ending((".txt", ".names", ".labels")) if n.rpartition("/")[2].lower() == name}
        for file, names in found.items():
            first = next(iter(found))
            if names != found[first]:
                raise DataError(f"{first} and {file} name the classes differently", folder.root,
                                "labels by two lists cannot be told apart: correct them, or keep one list")
        if found:
            return next(iter(found.items()))
    return "", []


def _keypoints(described: dict[str, Any]) -> int:
    """How many numbers of keypoints follow the box in each row."""
    shape = described.get("kpt_shape")
    try:
        return int(shape[0]) * int(shape[1]) if shape else 0
    except (TypeError, ValueError, LookupError):
        return 0


def _row(line: str, number: int, source: str, names: Sequence[str], size: tuple[int, int], keypoints: int) -> Box | Finding:
    """One line: `class cx cy w h`, or `class x1 y1 x2 y2 x3 y3 …`, a polygon, of which the enclosing box is taken."""
    def wrong(kind: str, text: str, fix: str) -> Finding:
        return Finding(ERROR, kind, source, number, text, fix)

    row = line.split()
    values = [as_number(v) for v in row]
    if None in values:
        return wrong("row-not-numbers", f"holds '{row[values.index(None)]}'",
                     "expected numbers: class cx cy w h, separated by blanks")
    index, shares = values[0], values[1:]
    if len(shares) == 5 and not keypoints:
        return wrong("row-six-columns", "has six columns: a confidence, as predictions have it?",
                     "annotations have five: remove the sixth")
    polygon = len(shares) >= 6 and len(shares) % 2 == 0 and not keypoints
    if not polygon and len(shares) != 4 + keypoints:
        return wrong("row-columns", f"has {len(row)} columns", "expected class cx cy w h, or class and the corners of a polygon")
    if index not in range(len(names)):
        return wrong("class-number", f"class {row[0]} is not in 0-{len(names) - 1} ({', '.join(names)})",
                     "numbers count from 0: do yours count from 1? Else correct the number, or complete the list of names"
                     if index == len(names) else "correct the number, or complete the list of names")
    largest = max((v for v in shares if abs(v) < float("inf")), key=abs, default=0.0)
    if abs(largest) > LARGEST_SHARE:
        return wrong("row-not-shares", f"holds {largest:g}: pixels?", "coordinates are shares of the picture, from 0 to 1")
    if polygon:
        xs, ys = shares[0::2], shares[1::2]
        # Not min and max of a list with nan in it: they would drop it.
        corners = (min(xs), min(ys), max(xs), max(ys)) if all(v == v for v in shares) else (float("nan"),) * 4
    else:
        cx, cy, w, h = shares[:4]
        corners = (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2)
    width, height = size
    pixels = tuple(c * s for c, s in zip(corners, (width, height, width, height)))
    return Box(pixels, names[int(index)], number, called=f"row {number}")


def _places(folder: Folder) -> tuple[dict[str, str], dict[str, str]]:
    """Every folder and text file, the root as ".": by its name in lower case, and by what a split's folder may be called."""
    folders = {n.rpartition("/")[0] for n in folder.names}
    folders |= {"/".join(f.split("/")[:i]) for f in folders for i in range(1, f.count("/") + 1)}
    places = sorted(folders | set(folder.ending((".txt",))), reverse=True)
    exact, spelled = ({same(p): p for p in places} for same in (folded, _spelled))
    return {**exact, **dict.fromkeys(("", "."), "")}, spelled


def _spelled(path: str) -> str:
    return "/".join(split_name(folded(part)) for part in path.split("/"))
