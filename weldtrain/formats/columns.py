"""What a CSV with a line for each picture says beyond its split: the size of a pixel, the part, the film, the inspector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from weldtrain.config import DatasetConfig, nearest
from weldtrain.errors import ConfigError, DataError
from weldtrain.formats import split_csv_of
from weldtrain.formats.files import Folder, as_number
from weldtrain.formats.splits import read_table
from weldtrain.formats.table import IMAGE_COLUMNS


class Sheet:
    """dataset.picture_csv for some pictures, paths below `root`; read when a column is first asked for."""

    def __init__(self, dataset: DatasetConfig, root: Path, pictures: Sequence[str]) -> None:
        self._dataset, self._root, self._pictures = dataset, root, pictures
        self._path: Path | None = None
        self._texts: dict[str, list[str]] = {}  # by column, lower case
        self._meant: list[str] = []  # the picture of each line, "" for none

    def column(self, column: str, key: str) -> list[str]:
        """Its text for each of the pictures; `key` asks for it.

        Raises ConfigError where there is no such file or column, DataError for a picture that is not in it or twice with two
        values, and for a name that may mean several pictures.
        """
        if self._path is None:
            self._read(column, key)
        wanted = column.strip().lower()
        if wanted not in self._texts:
            self._lacks(column, key, nearest(wanted, list(self._texts)))
        values: dict[str, tuple[str, int]] = {}
        for line, (picture, value) in enumerate(zip(self._meant, self._texts[wanted]), 2):
            earlier = values.setdefault(picture, (value, line))
            if picture and earlier[0] != value:
                raise DataError(f"{picture} has {column} {value} here and {earlier[0]} on line {earlier[1]}",
                                f"{self._path}:{line}", "one picture has one value")
        missing = [picture for picture in self._pictures if picture not in values]
        if missing:
            raise DataError(f"has no line for {missing[0]}" + f" and {len(missing) - 1} other pictures" * (len(missing) > 1),
                            self._path, f"{key} needs a value for each picture")
        return [values[picture][0] for picture in self._pictures]

    def mm_per_pixel(self) -> np.ndarray | None:
        """float64 [pictures], by dataset.mm_per_pixel: a number, or the column that holds it; None where it is not set.

        Raises ConfigError and DataError as `column` does, and DataError for what is no number above 0.
        """
        asked = self._dataset.mm_per_pixel
        if asked is None:
            return None
        if not isinstance(asked, str):
            return np.full(len(self._pictures), float(asked))
        texts = self.column(asked, "dataset.mm_per_pixel")
        numbers = [as_number(text) for text in texts]
        for picture, text, number in zip(self._pictures, texts, numbers):
            if number is None or not 0 < number < np.inf:
                raise DataError(f"'{text}' for {picture} is no number of millimetres", f"column {asked}", "it must be above 0")
        return np.array(numbers, np.float64)

    def _read(self, column: str, key: str) -> None:
        folder = Folder(self._root, self._dataset.images)
        name = self._dataset.picture_csv or self._dataset.split_csv or split_csv_of(folder)
        if not name:
            raise ConfigError(f"'{column}' is to be a column of a CSV, and none is named", key,
                              "set dataset.picture_csv=NAME, a file with the columns image and " + column)
        path = folder.path(name)
        table, self._path = read_table(path, f"expected the columns image,{column}"), path
        self._texts = {name: table[name].tolist() for name in table.columns}
        by = next((c for c in IMAGE_COLUMNS if c in self._texts), None)
        if by is None:
            self._lacks("image", key)
        wanted = set(self._pictures)
        for line, reference in enumerate(self._texts[by], 2):
            found = folder.find(reference) if reference else []
            if len(found) > 1 and wanted.intersection(found):
                raise DataError(f"'{reference}' may mean {' or '.join(found[:2])}", f"{path}:{line}",
                                "write their paths below dataset.root")
            self._meant.append(found[0] if found else "")

    def _lacks(self, column: str, key: str, near: str | None = None) -> NoReturn:
        raise ConfigError(f"{self._path} has no column '{column}'; its columns are {', '.join(self._texts)}", key,
                          f"did you mean '{near}'?" if near else "name one of them")
