"""COCO JSON: one file, or one for each split; pictures anywhere below the root. Ids are mapped, never used as numbers."""

from __future__ import annotations

import json
import mmap
from typing import Any

import numpy as np

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats.files import Folder
from weldtrain.formats.listed import Listed
from weldtrain.formats.record import CROWD, DIFFICULT, ERROR, Finding
from weldtrain.formats.splits import split_of_path

MAX_JSON_BYTES = 2 * 2**30
_KEYS = ("images", "annotations", "categories")


class Coco(Listed):
    """Classes are the names of `categories`; a listed picture without annotations is defect-free."""

    names_every_picture = True
    box_is_called = "annotation"

    def __init__(self, folder: Folder, dataset: DatasetConfig) -> None:
        files = [n for n in folder.chosen(dataset.annotations, (".json",)) if is_coco(folder, n)]
        if not files:
            raise DataError("no COCO file: a .json with images, annotations and categories", folder.root,
                            "set dataset.annotations, or choose dataset=auto")
        super().__init__(folder, dataset, files)

    def read_file(self, file: str) -> None:
        def wrong(kind: str, text: str, fix: str) -> None:
            self.findings.append(Finding(ERROR, kind, file, 0, text, fix))

        content = _load(self.folder, file)
        names: dict[Any, str] = {}
        for category in content["categories"]:
            number, name = _get(category, "id"), _get(category, "name")
            if not _is_id(number) or not isinstance(name, str) or not name.strip():
                wrong("category-broken", f"category {_short(category)} has no id or name", "give it both")
            elif number in names:
                wrong("category-twice", f"categories '{names[number]}' and '{name}' have the id {number}", "number them apart")
            else:
                names[number] = name.strip()
        ordered = sorted(names.items(), key=lambda item: (isinstance(item[0], str), item[0]))
        self.classes += [n for n in dict.fromkeys(name for _, name in ordered) if n not in self.classes]

        named: dict[Any, str] = {}
        pictures: dict[Any, str | None] = {}
        split = split_of_path(file)
        for image in content["images"]:
            number, name = _get(image, "id"), _get(image, "file_name")
            if not _is_id(number) or not isinstance(name, str):
                wrong("image-broken", f"image {_short(image)} has no id or file_name", "give it both")
            elif number in named:
                wrong("image-twice", f"two images have the id {number}: {named[number]} and {name}", "number them apart")
            else:
                named[number] = name
                pictures[number] = self._picture(number, name, image, file, split, wrong)

        coordinates = []
        for position, annotation in enumerate(content["annotations"], 1):
            number, category = _get(annotation, "id", f"at position {position}"), _get(annotation, "category_id")
            image = _get(annotation, "image_id")
            called = f"annotation {number}"
            if not _is_id(category) or category not in names:
                wrong("class-number", f"{called} has category_id {_short(category)}, which is in no category",
                      f"the categories are {', '.join(f'{k} {v}' for k, v in names.items())}")
            elif not _is_id(image) or image not in pictures:
                wrong("image-unknown", f"{called} has image_id {_short(image)}, which is in no image",
                      "delete it or restore the image")
            elif isinstance(corners := _corners(annotation), str):
                wrong("box-broken", f"{called} ({names[category]}) {corners}", "give it a bbox [x, y, width, height] in pixels")
            elif picture := pictures[image]:
                flags = sum(flag for key, flag in (("iscrowd", CROWD), ("ignore", DIFFICULT)) if _get(annotation, key) == 1)
                self.add(picture, corners, names[category], flags, number)
                coordinates.append(corners)
        self.refuse_shares(np.array(coordinates), file)

    def _picture(self, number: Any, name: str, image: Any, file: str, split: str, wrong) -> str | None:
        """The picture of an entry in `images`, or None where there is none to be had."""
        found = self.find(name, file)
        if len(found) != 1:
            kind, text = self.no_picture(found)
            wrong(kind, f"image {number}: '{name}' {text}", "restore it, or take it out of the file")
            return None
        if found[0] in self._chosen:
            wrong("image-twice", f"image {number}: {found[0]} is listed in {self._chosen[found[0]][0]} already",
                  "list a picture once; if both files mean the same, choose one with dataset.annotations")
            return None
        width, height = (_get(image, side) for side in ("width", "height"))
        self.place(found[0], file, split, (float(width), float(height)) if _is_number(width) and _is_number(height) else None)
        return found[0]


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
    # pandas writes whole numbers as 1.0, which Python takes for the same key as 1.
    return (isinstance(value, (int, str)) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _is_number(value: Any) -> bool:
    # NaN and Infinity are numbers of Python's JSON: they make a box that is dropped. A longer integer is no float.
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e300)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
