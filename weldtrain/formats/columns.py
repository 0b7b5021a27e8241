"""What a CSV with a line for each picture says beyond its split: the size of a pixel, the part, the film, the inspector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weldtrain.config import DatasetConfig, nearest
from weldtrain.errors import ConfigError, DataError
from weldtrain.formats import split_csv_of
from weldtrain.formats.files import Folder, as_number
from weldtrain.formats.splits import read_table
from weldtrain.formats.table import IMAGE_COLUMNS


def picture_column(dataset: DatasetConfig, root: str, pictures: Sequence[str], column: str, key: str) -> list[str]:
    """The text of `column` for each of the `pictures`, paths below `root`, in dataset.picture_csv; `key` asks for it.

    Raises ConfigError where there is no such file or column, DataError for a picture that is not in it or twice with two values.
    """
    folder = Folder(root, dataset.images)
    name = dataset.picture_csv or dataset.split_csv or split_csv_of(folder)
    if not name:
        raise ConfigError(f"'{column}' is to be a column of a CSV, and none is named", key,
                          "set dataset.picture_csv=NAME, a file with the columns image and " + column)
    path = folder.path(name)
    table = read_table(path, f"expected the columns image,{column}")
    by = next((c for c in IMAGE_COLUMNS if c in table.columns), None)
    wanted = column.strip().lower()
    if by is None or wanted not in table.columns:
        near = nearest(wanted, list(table.columns))
        raise ConfigError(f"{path} has no column '{column if by else 'image'}'; its columns are {', '.join(table.columns)}", key,
                          f"did you mean '{near}'?" if by and near else "name one of them")
    values: dict[str, tuple[str, int]] = {}
    for line, (reference, value) in enumerate(zip(table[by], table[wanted]), 2):
        for picture in folder.find(reference)[:1] if reference else ():
            earlier = values.setdefault(picture, (value, line))
            if earlier[0] != value:
                raise DataError(f"{picture} has {column} {value} here and {earlier[0]} on line {earlier[1]}", f"{path}:{line}",
                                "one picture has one value")
    missing = [picture for picture in pictures if picture not in values]
    if missing:
        raise DataError(f"has no line for {missing[0]}" + f" and {len(missing) - 1} other pictures" * (len(missing) > 1), path,
                        f"{key} needs a value for each picture")
    return [values[picture][0] for picture in pictures]


def mm_per_pixel(dataset: DatasetConfig, root: str, pictures: Sequence[str]) -> np.ndarray | None:
    """float64 [pictures], by dataset.mm_per_pixel: a number, or the column that holds it; None where it is not set.

    Raises ConfigError and DataError as `picture_column` does, and DataError for what is no number above 0.
    """
    asked = dataset.mm_per_pixel
    if asked is None:
        return None
    if not isinstance(asked, str):
        return np.full(len(pictures), float(asked))
    texts = picture_column(dataset, root, pictures, asked, "dataset.mm_per_pixel")
    numbers = [as_number(text) for text in texts]
    for picture, text, number in zip(pictures, texts, numbers):
        if number is None or not 0 < number < np.inf:
            raise DataError(f"'{text}' for {picture} is no number of millimetres", f"column {asked}", "it must be above 0")
    return np.array(numbers, np.float64)
