"""CSV with one box a line, in the columns that tools give them; a line with a picture alone says that it has no defect."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pandas as pd

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats.files import Folder, first_line
from weldtrain.formats.pictures import Header
from weldtrain.formats.record import DIFFICULT, ERROR, Box, Finding, Reader
from weldtrain.formats.splits import own_splits, read_table, split_name, split_of_path

_IMAGE = ("image", "filename", "file_name", "file", "image_path", "path", "filepath", "image_name", "image_id", "imageid", "img",
          "img_path", "id")
_CLASS = ("class", "label", "class_name", "label_name", "category", "labelname", "defect", "type", "name", "target")
_CORNERS = tuple(zip(*(names.split() for names in (
    "x1 xmin x_min left bbox_x1 xtl", "y1 ymin y_min top bbox_y1 ytl", "x2 xmax x_max right bbox_x2 xbr",
    "y2 ymax y_max bottom bbox_y2 ybr"))))
_EXTENTS = (("x", "y", "w", "h"), ("x", "y", "width", "height"), ("bbox_x", "bbox_y", "bbox_width", "bbox_height"),
            ("bbox_x", "bbox_y", "bbox_w", "bbox_h"), ("left", "top", "width", "height"))
_SPLIT = ("split", "subset", "set", "partition", "fold")
_HEADERLESS = ("image", "x1", "y1", "x2", "y2", "class")  # as keras-retinanet had it
_FIX = "expected the columns image,x1,y1,x2,y2,class"


class Table(Reader):
    """Boxes in pixels as corners, or as corner and extent. Several files, one for each split, are read as one."""

    def __init__(self, folder: Folder, dataset: DatasetConfig) -> None:
        super().__init__(folder, dataset)
        files = [n for n in folder.chosen(dataset.annotations, (".csv",)) if dataset.annotations or has_boxes(folder, n)]
        if not files:
            raise DataError("no .csv with boxes", folder.root, f"{_FIX}; or set dataset.annotations")
        self._boxes: dict[str, list[Box]] = {}
        chosen: dict[str, tuple[str, str]] = {}
        for file in files:
            self._read_file(file, chosen)
        if not chosen:
            problem = next((f for f in self.findings if f.level == ERROR), None)
            raise DataError("lists no picture that is there", folder.path(files[0]), problem.text if problem else _FIX)
        if dataset.split_csv is not None or not any(split for _, split in chosen.values()):
            splits, by, found = own_splits(folder, dataset.split_csv)
            self.findings += found
            if splits is not None:
                self.unlisted(splits, by)
            pictures = splits if splits is not None else dict.fromkeys(folder.pictures, "")
            chosen = {p: (chosen.get(p, ("", ""))[0], split) for p, split in pictures.items()}
        else:
            self.unlisted(chosen, " and ".join(files))
        self.settle(chosen, " and ".join(files))

    def annotations(self, i: int, header: Header) -> Iterator[Box]:
        return iter(self._boxes.get(self.images[i], ()))

    def _read_file(self, file: str, chosen: dict[str, tuple[str, str]]) -> None:
        def wrong(kind: str, line: int, text: str, fix: str) -> None:
            self.findings.append(Finding(ERROR, kind, file, line, text, fix))

        table, first_line = _table(self.folder, file)
        image, corners, is_extent, label, split = _columns(table, self.folder, file)
        numbers = [_numbers(table[c]) for c in corners]
        values = pd.concat(numbers, axis=1).to_numpy()
        if len(values) and (values == values).any() and 0 <= values[values == values].min() and values[values == values].max() <= 1:
            wrong("row-not-pixels", first_line, "all coordinates lie between 0 and 1: shares of the picture?", "give them in pixels")
        by_file = split_of_path(file)
        for i, (name, defect) in enumerate(zip(table[image], table[label])):
            line = first_line + i
            texts = [table[c].iat[i] for c in corners]
            if not name and not defect and not any(texts):
                continue
            found = self.folder.find(name, file.rpartition("/")[0])
            if len(found) != 1:
                kind, text = ("picture-unclear", f"may mean {' or '.join(found)}") if found else ("picture-missing", "is nowhere below the root")
                wrong(kind, line, f"'{name}' {text}", "restore it, or take the line out")
                continue
            part = split_name(table[split].iat[i]) if split else by_file
            source, earlier = chosen.setdefault(found[0], (file, part))
            if source != file or earlier != part:
                wrong("split-twice", line, f"{found[0]} is in {part or file} here and in {earlier or source} before",
                      "a picture belongs to one split, else the detector is judged on what it has seen")
                continue
            boxes = self._boxes.setdefault(found[0], [])
            if not defect and not any(texts):
                continue
            bad = [k for k, text in enumerate(texts) if text.lower() not in ("nan", "inf", "-inf", "infinity", "-infinity")
                   and values[i, k] != values[i, k]]
            if bad:
                wrong("box-not-a-number", line, f"column {corners[bad[0]]} holds '{texts[bad[0]]}'", "it must be a number of pixels")
            elif not defect:
                wrong("class-missing", line, f"a box without {label}", "give it a class, or leave all but the picture empty")
            else:
                x1, y1, x2, y2 = map(float, values[i])
                flags = DIFFICULT if "difficult" in table and table["difficult"].iat[i].lower() in ("1", "true") else 0
                boxes.append(Box((x1, y1, x1 + x2, y1 + y2) if is_extent else (x1, y1, x2, y2), defect, line, flags, f"row {line}"))


def has_boxes(folder: Folder, name: str) -> bool:
    """Whether a CSV has the columns of boxes."""
    try:
        table, _ = _table(folder, name, rows=2)
        _columns(table, folder, name)
    except DataError:
        return False
    return True


def _table(folder: Folder, name: str, rows: int | None = None) -> tuple[pd.DataFrame, int]:
    """The table as text with columns in lower case, and the line of its first row."""
    path = folder.path(name)
    try:
        first = first_line(path).split(",")
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror})", path, "restore the file or its permissions") from None
    headless = len(first) == 6 and first[0].strip() and (_all_numbers(first[1:5]) or not any(f.strip() for f in first[1:]))
    table = read_table(path, _FIX, header=None if headless else 0, rows=rows)
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
    image = next((c for c in _IMAGE if c in columns), None)
    label = next((c for c in _CLASS if c in columns and c != image), None)
    corners = next((c for c in _CORNERS if set(c) <= set(columns)), None)
    extents = next((c for c in _EXTENTS if set(c) <= set(columns)), None)
    if not image or not label or not (corners or extents):
        raise DataError(f"has the columns {', '.join(columns)}", f"{folder.path(name)}:1", _FIX)
    return image, corners or extents, corners is None, label, next((c for c in _SPLIT if c in columns), "")


def _numbers(column: pd.Series) -> pd.Series:
    return pd.to_numeric(column.where(~column.str.contains("_"), ""), errors="coerce").astype(float)


def _all_numbers(texts: list[str]) -> bool:
    return bool(pd.to_numeric(pd.Series(texts, dtype=str).str.strip(), errors="coerce").notna().all())


def _list_of_four(text: str) -> list[str]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return [text] * 4 if text else [""] * 4
    return [str(v) for v in values] if isinstance(values, list) and len(values) == 4 else [text] * 4
