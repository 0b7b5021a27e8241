"""CSV with one box a line, in the columns that tools give them; a line with a picture alone says that it has no defect."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats.files import Folder, as_number, first_line
from weldtrain.formats.listed import Listed
from weldtrain.formats.record import DIFFICULT, ERROR, ONE_SPLIT, Finding
from weldtrain.formats.splits import read_table, split_name, split_of_path

IMAGE_COLUMNS = ("image", "filename", "file_name", "file", "image_path", "path", "filepath", "image_name", "image_id",
                 "imageid", "img", "img_path", "id")
_CLASS = ("class", "label", "class_name", "label_name", "category", "labelname", "defect", "type", "name", "target")
_CORNERS = tuple(zip(*(names.split() for names in (
    "x1 xmin x_min left bbox_x1 xtl", "y1 ymin y_min top bbox_y1 ytl", "x2 xmax x_max right bbox_x2 xbr",
    "y2 ymax y_max bottom bbox_y2 ybr"))))
_EXTENTS = (("x", "y", "w", "h"), ("x", "y", "width", "height"), ("bbox_x", "bbox_y", "bbox_width", "bbox_height"),
            ("bbox_x", "bbox_y", "bbox_w", "bbox_h"), ("left", "top", "width", "height"))
_SPLIT = ("split", "subset", "set", "partition", "fold")
_HEADERLESS = ("image", "x1", "y1", "x2", "y2", "class")  # as keras-retinanet had it
_FIX = "expected the columns image,x1,y1,x2,y2,class"


class Table(Listed):
    """Boxes in pixels as corners, or as corner and extent."""

    names_every_picture = False
    box_is_called = "row"

    def __init__(self, folder: Folder, dataset: DatasetConfig) -> None:
        tables = folder.chosen(dataset.annotations, (".csv",))
        # Of one table, whatever it is, what is wrong with it helps more.
        files = tables if dataset.annotations or len(tables) == 1 else [n for n in tables if not fault(folder, n)]
        if not files:
            raise DataError("no .csv with boxes", folder.root, f"{_FIX}; or set dataset.annotations")
        super().__init__(folder, dataset, files)

    def read_file(self, file: str) -> None:
        def wrong(kind: str, line: int, text: str, fix: str) -> None:
            self.findings.append(Finding(ERROR, kind, file, line, text, fix))

        table, first_row = _table(self.folder, file)
        image, corners, is_extent, label, split = _columns(table, self.folder, file)
        values = np.stack([_numbers(table[c]) for c in corners], axis=1)
        self.refuse_shares(values, file)
        if is_extent:
            values[:, 2:] += values[:, :2]
        difficult = table["difficult"].str.lower().isin(("1", "true")) if "difficult" in table else [False] * len(table)
        splits = map(split_name, table[split]) if split else [split_of_path(file)] * len(table)
        rows = zip(table[image].tolist(), table[label].tolist(), splits, zip(*(table[c].tolist() for c in corners)),
                   values.tolist(), difficult)
        for line, (name, defect, part, texts, box, is_difficult) in enumerate(rows, first_row):
            if not name and not defect and not any(texts):
                continue
            found = self.find(name, file)
            if len(found) != 1:
                kind, text = self.no_picture(found)
                wrong(kind, line, f"'{name}' {text}", "restore it, or take the line out")
                continue
            source, earlier = self.place(found[0], file, part)
            broken = next((k for k, text in enumerate(texts) if as_number(text) is None), None)
            if source != file or earlier != part:
                wrong("split-twice", line, f"{found[0]} is in {part or file} here and in {earlier or source} before",
                      ONE_SPLIT)
            elif not defect and not any(texts):
                continue  # a picture without defects
            elif broken is not None:
                wrong("box-not-a-number", line, f"column {corners[broken]} holds '{texts[broken]}'",
                      "it must be a number of pixels")
            elif not defect:
                wrong("class-missing", line, f"a box without {label}", "give it a class, or leave all but the picture empty")
            else:
                self.add(found[0], tuple(box), defect, DIFFICULT if is_difficult else 0, line)


def fault(folder: Folder, name: str) -> DataError | None:
    """Why a CSV is no table of boxes; None if it is one."""
    try:
        table, _ = _table(folder, name, head_only=True)
        _columns(table, folder, name)
    except DataError as error:
        return error
    return None


def _table(folder: Folder, name: str, head_only: bool = False) -> tuple[pd.DataFrame, int]:
    """The table as text with columns in lower case, and the line of its first row."""
    path = folder.path(name)
    try:
        first = first_line(path).split(",")
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror})", path, "restore the file or its permissions") from None
    headless = len(first) == 6 and bool(first[0].strip()) and (
        all(as_number(text) is not None for text in first[1:5]) or not any(text.strip() for text in first[1:]))
    table = read_table(path, _FIX, header=None if headless else 0, rows=int(headless) if head_only else None)
    if headless:
        table.columns = list(_HEADERLESS)
    if "bbox" in table.columns:  # "[x, y, width, height]"
        parts = [_list_of_four(text) for text in table["bbox"]]
        table = table.assign(**{c: [p[k] for p in parts] for k, c in enumerate(_EXTENTS[2])})
    return table, 1 if headless else 2


def _columns(table: pd.DataFrame, folder: Folder, name: str) -> tuple[str, tuple[str, ...], bool, str, str]:
    """The columns of picture, of four numbers, whether the last two are extents, of class and of split ("" if none)."""
    columns = list(table.columns)
    if len(set(columns)) != len(columns):
        raise DataError("two columns have one name", folder.path(name), "name each column once")
    image = next((c for c in IMAGE_COLUMNS if c in columns), None)
    label = next((c for c in _CLASS if c in columns and c != image), None)
    corners = next((c for c in _CORNERS if set(c) <= set(columns)), None)
    extents = next((c for c in _EXTENTS if set(c) <= set(columns)), None)
    if not image or not label or not (corners or extents):
        lacks = "picture" if not image else "class" if not label else "corners"
        raise DataError(f"has no column for the {lacks}; its columns are {', '.join(columns)}", f"{folder.path(name)}:1", _FIX)
    return image, corners or extents, corners is None, label, next((c for c in _SPLIT if c in columns), "")


def _numbers(column: pd.Series) -> np.ndarray:
    """float64, nan where there is no number."""
    return np.array([as_number(text) for text in column.tolist()], np.float64)  # None becomes nan


def _list_of_four(text: str) -> list[str]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return [text] * 4
    return [str(v) for v in values] if isinstance(values, list) and len(values) == 4 else [text] * 4
