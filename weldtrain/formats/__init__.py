"""Readers of annotation formats. Each turns a folder into the same records and never writes to it."""

from __future__ import annotations

from pathlib import Path

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats import voc
from weldtrain.formats.record import Reader

# The synthetic data set is written in the layout of welding_v2.
_READERS: dict[str, type[Reader]] = {
    "welding_v2": voc.WeldingV2,
    "synthetic": voc.WeldingV2,
}


def open_reader(dataset: DatasetConfig) -> Reader:
    """The reader for `dataset.format`. Raises DataError if `dataset.root` is no folder."""
    _check_root(dataset)
    return _READERS[dataset.format](dataset)


def stamp(dataset: DatasetConfig) -> str:
    """A digest of the state of every file that the reader would read. Parses nothing."""
    _check_root(dataset)
    return _READERS[dataset.format].stamp(dataset)


def _check_root(dataset: DatasetConfig) -> None:
    root = Path(dataset.root or "")
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "no such folder"
        raise DataError(what, f"dataset.root={root}", "give the folder that holds your pictures and annotations")
