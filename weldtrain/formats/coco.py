"""COCO JSON: one file, or one for each split; pictures anywhere below the root. Ids are mapped, never used as numbers."""

from __future__ import annotations

import itertools
import json
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats.files import Folder
from weldtrain.formats.pictures import Header
from weldtrain.formats.record import CROWD, DIFFICULT, ERROR, Box, Finding, Reader, Size
from weldtrain.formats.splits import own_splits, split_of_path

MAX_JSON_BYTES = 2 * 2**30
_KEYS = ("images", "annotations", "categories")


class Coco(Reader):
    """Classes are the names of `categories`; a listed picture without annotations is defect-free."""

    def __init__(self, folder: Folder, dataset: DatasetConfig) -> None:
        super().__init__(folder, dataset)
        files = [n for n in folder.chosen(dataset.annotations, (".json",)) if is_coco(folder, n)]
        if not files:
            raise DataError("no COCO file: a .json with images, annotations and categories", folder.root,
                            "set dataset.annotations, or choose dataset=auto")
        self._rows: dict[str, list[tuple]] = {}  # picture -> (corners, name, flags, what it is called)
        self._sizes: dict[str, tuple[float, float]] = {}
        chosen: dict[str, tuple[str, str]] = {}
        for file in files:
            self._read_file(file, _load(folder, file), chosen)
        if not chosen:
            problem = next((f for f in self.findings if f.level == ERROR), None)
            raise DataError("lists no picture that is there", folder.path(files[0]), problem.text if problem else "export it anew")
        if dataset.split_csv is not None or not any(split for _, split in chosen.values()):
            splits, _, found = own_splits(folder, dataset.split_csv)
            self.findings += found
            chosen = {p: (source, (splits or {}).get(p, "")) for p, (source, _) in chosen.items()}
        self.unlisted(chosen, " and ".join(files))
        self.settle(chosen, "")
        self._flatten()

    def annotations(self, i: int, header: Header) -> Iterator[Box | Size | Finding]:
        if (claimed := self._claimed[i]).all():
            yield Size(*map(float, claimed), 0)
        for k in range(self._starts[i], self._starts[i + 1]):
            yield Box(tuple(map(float, self._corners[k])), self.classes[self._names[k]], 0, int(self._flags[k]), self._called[k])

    def _read_file(self, file: str, content: dict[str, list], chosen: dict[str, tuple[str, str]]) -> None:
        def wrong(kind: str, text: str, fix: str) -> None:
            self.findings.append(Finding(ERROR, kind, file, 0, text, fix))

        names: dict[Any, str] = {}
        for category in content["categories"]:
            number, name = _get(category, "id"), _get(category, "name")
            if not _is_id(number) or not isinstance(name, str) or not name.strip():
                wrong("category-broken", f"category {_short(category)} has no id or name", "give it both")
            elif number in names:
                wrong("category-twice", f"categories '{names[number]}' and '{name}' have the id {number}", "number them apart")
            else:
                names[number] = name.strip()
        self.classes += [n for _, n in sorted(names.items(), key=lambda item: (str(type(item[0])), item[0])) if n not in self.classes]

        pictures: dict[Any, str] = {}
        split = split_of_path(file)
        for image in content["images"]:
            number, name = _get(image, "id"), _get(image, "file_name")
            if not _is_id(number) or not isinstance(name, str):
                wrong("image-broken", f"image {_short(image)} has no id or file_name", "give it both")
                continue
            if number in pictures:
                wrong("image-twice", f"two images have the id {number}: {pictures[number]} and {name}", "number them apart")
                continue
            pictures[number] = name
            found = self.folder.find(name, file.rpartition("/")[0])
            if len(found) > 1:
                found = [p for p in found if split and split_of_path(p) == split] or found
            if len(found) != 1:
                kind, text = ("picture-unclear", f"may mean {' or '.join(found)}") if found else ("picture-missing", "is nowhere below the root")
                wrong(kind, f"image {number}: '{name}' {text}", "restore it, or take it out of the file")
                continue
            if (earlier := chosen.get(found[0])) is not None:
                wrong("image-twice", f"image {number}: {found[0]} is listed in {earlier[0]} already",
                      "list a picture once; if both files mean the same, choose one with dataset.annotations")
                continue
            pictures[number] = found[0]
            chosen[found[0]] = (file, split)
            self._rows[found[0]] = []
            width, height = (_get(image, side) for side in ("width", "height"))
            self._sizes[found[0]] = (float(width), float(height)) if _is_number(width) and _is_number(height) else (0.0, 0.0)

        for position, annotation in enumerate(content["annotations"], 1):
            number, category = _get(annotation, "id", f"at position {position}"), _get(annotation, "category_id")
            image = _get(annotation, "image_id")
            called = f"annotation {number}"
            if not _is_id(category) or category not in names:
                wrong("class-number", f"{called} has category_id {_short(category)}, which is in no category",
                      f"the categories are {', '.join(f'{k} {v}' for k, v in names.items())}")
            elif not _is_id(image) or image not in pictures:
                wrong("image-unknown", f"{called} has image_id {_short(image)}, which is in no image", "delete it or restore the image")
            elif isinstance(corners := _corners(annotation), str):
                wrong("box-broken", f"{called} ({names[category]}) {corners}", "give it a bbox [x, y, width, height] in pixels")
            elif pictures[image] in self._rows and chosen[pictures[image]][0] == file:
                flags = (CROWD if _get(annotation, "iscrowd") in (1, True) else 0) | (DIFFICULT if _get(annotation, "ignore") in (1, True) else 0)
                self._rows[pictures[image]].append((corners, names[category], flags, called))

    def _flatten(self) -> None:
        """Into arrays, which travel to other processes at little cost."""
        counts = [len(self._rows[p]) for p in self.images]
        rows = list(itertools.chain.from_iterable(self._rows[p] for p in self.images))
        where = {name: k for k, name in enumerate(self.classes)}
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._corners = np.array([r[0] for r in rows], np.float64).reshape(-1, 4)
        self._names = np.array([where[r[1]] for r in rows], np.int32)
        self._flags = np.array([r[2] for r in rows], np.uint8)
        self._called = [r[3] for r in rows]
        self._claimed = np.array([self._sizes[p] for p in self.images], np.float64).reshape(-1, 2)
        self._rows, self._sizes = {}, {}


def is_coco(folder: Folder, name: str) -> bool:
    """Whether a JSON file holds the three words of COCO. Reads it through once, parses nothing."""
    try:
        with open(folder.path(name), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return all(data.find(f'"{key}"'.encode()) >= 0 for key in _KEYS)
    except (OSError, ValueError):  # mmap of an empty file
        return False


def _load(folder: Folder, name: str) -> dict[str, list]:
    path = folder.path(name)
    if path.stat().st_size > MAX_JSON_BYTES:
        raise DataError(f"is larger than {MAX_JSON_BYTES >> 30} GB", path, "split it")
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = json.load(file)
    except UnicodeDecodeError as e:
        raise DataError(f"is not in UTF-8 encoding (at byte {e.start})", path, "JSON is UTF-8: export it anew") from None
    except json.JSONDecodeError as e:
        raise DataError(f"is not JSON ({e.msg})", f"{path}:{e.lineno}", "was it copied whole? Export it anew") from None
    except RecursionError:
        raise DataError("is nested too deeply", path, "this is no COCO file") from None
    except ValueError as e:  # an integer of thousands of digits
        raise DataError(f"is not JSON that can be read ({e})", path, "export it anew") from None
    for key in _KEYS:
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DataError(f"has no list '{key}'", path, "COCO needs images, annotations and categories")
    return content


def _corners(annotation: Any) -> tuple[float, float, float, float] | str:
    """x1 y1 x2 y2 of an annotation's bbox, or of its polygons where it has none; or in words what is wrong."""
    bbox = _get(annotation, "bbox")
    if isinstance(bbox, list) and bbox:
        if len(bbox) != 4 or not all(map(_is_number, bbox)):
            return f"has the bbox {_short(bbox)}"
        x, y, w, h = map(float, bbox)
        return x, y, x + w, y + h
    polygons = _get(annotation, "segmentation")
    if isinstance(polygons, list) and polygons:
        polygons = [polygons] if all(map(_is_number, polygons)) else polygons
        if all(isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0 and all(map(_is_number, p)) for p in polygons):
            points = np.concatenate([np.array(p, np.float64).reshape(-1, 2) for p in polygons])
            return (*map(float, points.min(0)), *map(float, points.max(0)))  # nan stays nan
        return "has no bbox and a broken polygon"
    return "has neither bbox nor polygon"


def _get(item: Any, key: str, default: Any = None) -> Any:
    return item.get(key, default) if isinstance(item, dict) else default


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300 or value != value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
