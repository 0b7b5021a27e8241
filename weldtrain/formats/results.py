"""COCO results as task=predict writes them, or any other detector's beside a description of its pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weldtrain.errors import DataError
from weldtrain.formats.written import PICTURES

_EXPECTED = 'expected a list of {"image_id": 1, "category_id": 1, "bbox": [x, y, width, height], "score": 0.9}'


class Results(NamedTuple):
    """By the path of each picture that was looked at boxes float64 [n,4] x1,y1,x2,y2 px, labels int64 [n] from 1 of `classes`,
    and scores float64 [n]; its width and height in px as it was looked at, where that is told; and what is said of how they were
    made."""

    classes: list[str]
    found: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    sizes: dict[str, tuple[int, int]]
    info: dict[str, Any]


def read_results(path: Path) -> Results:
    """Reads the list at `path` and images.json beside it, a COCO description with `images` and `categories`.

    Raises DataError where one is not there or is something else, and for a result of no picture or category.
    """
    results, about = _json(path), _json(path.with_name(PICTURES))
    try:
        names = {image["id"]: str(image["file_name"]) for image in about["images"]}
        sizes = {names[image["id"]]: (image["width"], image["height"]) for image in about["images"]
                 if image.get("width") and image.get("height")}
        categories = sorted(about["categories"], key=lambda category: category["id"])
        labels = {category["id"]: label for label, category in enumerate(categories, 1)}
        classes = [str(category["name"]) for category in categories]
    except (KeyError, TypeError, AttributeError) as e:
        raise DataError(f"is no COCO description of pictures and categories ({e!r})", path.with_name(PICTURES),
                        "it needs images with id and file_name, and categories with id and name") from None
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in names.values()}
    if not isinstance(results, list):
        raise DataError("is no list of results", path, _EXPECTED)
    for number, result in enumerate(results, 1):
        try:
            x, y, width, height = map(float, result["bbox"])
            picture, label = names.get(result["image_id"]), labels.get(result["category_id"])
            row = (x, y, x + width, y + height, label or 0, float(result["score"]))
        except (KeyError, TypeError, ValueError) as e:
            raise DataError(f"result {number} is none ({e!r})", path, _EXPECTED) from None
        if picture is None or label is None:
            kind = "image" if picture is None else "category"
            raise DataError(f"result {number} has {kind}_id {result[f'{kind}_id']}, which {PICTURES} does not know", path,
                            "it describes all pictures that were looked at, and all categories")
        if not np.isfinite(row).all() or not 0 <= row[5] <= 1 or width < 0 or height < 0:
            raise DataError(f"result {number} holds {row[5]:g} as its score, or a box [{x:g}, {y:g}, {width:g}, {height:g}] that "
                            "is none", path, "scores are from 0 to 1, and sides no less than 0")
        rows[picture].append(row)
    tables = {name: np.array(table, np.float64).reshape(-1, 6) for name, table in rows.items()}
    info = about.get("info")
    return Results(classes, {name: (table[:, :4], table[:, 4].astype(np.int64), table[:, 5]) for name, table in tables.items()},
                   sizes, info if isinstance(info, dict) else {})


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror})", path, f"results need {PICTURES} beside them, as task=predict writes it"
                        ) from None
    except (ValueError, RecursionError) as e:
        raise DataError(f"is no JSON ({e})", path, _EXPECTED) from None
