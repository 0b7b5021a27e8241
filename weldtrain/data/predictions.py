"""What a detector found in pictures, and from a file of COCO results what it found in those of an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weldtrain.data.index import AnnotationIndex
from weldtrain.errors import DataError
from weldtrain.formats.files import Folder
from weldtrain.formats.results import read_results
from weldtrain.formats.written import PICTURES


class Detections(NamedTuple):
    """Of one picture: boxes float64 [n,4] x1,y1,x2,y2 in px, labels int64 [n] from 1, scores float64 [n]."""

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray


def predictions_of(path: Path, index: AnnotationIndex) -> tuple[list[str], dict[int, Detections], dict[str, Any]]:
    """The classes, what was found by row of the index, and what is said of how it was made.

    Raises DataError for a file that holds no such results, for pictures that are not clear in the index, and for those that were
    of another size when they were looked at.
    """
    classes, found, sizes, info = read_results(path)
    row_of, folder = {index.path(row): row for row in range(len(index))}, Folder(index.root)
    by_row: dict[int, Detections] = {}
    for name, parts in found.items():
        rows = [row_of[picture] for picture in folder.find(name) if picture in row_of]
        if len(rows) > 1 or (rows and rows[0] in by_row):
            raise DataError(f"'{name}' may mean several pictures of the data, or another result means the same one", path,
                            "predict with predict.source=DATASET.ROOT, so that paths are whole")
        for row in rows:
            seen, own = ("x".join(map(str, size)) for size in (sizes.get(name, index.sizes[row]), index.sizes[row]))
            if seen != own:
                raise DataError(f"{PICTURES} has {name} as {seen} px, and the picture is {own}: its boxes are of another scale",
                                path, "judge what was found in the pictures themselves, or correct boxes and sizes")
        by_row |= dict.fromkeys(rows, Detections(*parts))
    return classes, by_row, info
