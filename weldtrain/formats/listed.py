"""What COCO and CSV share: one file lists many pictures and their boxes."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats.files import Folder
from weldtrain.formats.pictures import Header
from weldtrain.formats.record import ERROR, Box, Finding, Reader, Size, are_shares
from weldtrain.formats.splits import empty_split, own_splits, split_of_path


class Listed(Reader):
    """Several files, one for each split, are read as one. Boxes end in flat arrays, which travel to processes at no cost."""

    # Whether a picture that the files do not name is none of the data, rather than one without annotation.
    names_every_picture: bool
    # What a box is called by its number in the file.
    box_is_called: str

    def __init__(self, folder: Folder, dataset: DatasetConfig, files: Sequence[str]) -> None:
        super().__init__(folder, dataset)
        self._chosen: dict[str, tuple[str, str]] = {}  # picture -> file, split
        self._rows: dict[str, list[tuple]] = {}  # picture -> corners, class, flags, number in the file
        self._sizes: dict[str, tuple[float, float]] = {}
        self._found: dict[tuple[str, str], list[str]] = {}
        for file in files:
            told, split = len(self.findings), split_of_path(file)
            self.read_file(file)
            if split and len(self.findings) == told and all(source != file for source, _ in self._chosen.values()):
                self.findings.append(empty_split(file, split))
        if not self._chosen:
            problem = next((f for f in self.findings if f.level == ERROR), None)
            raise DataError("lists no picture that is there", folder.path(files[0]),
                            problem.text if problem else "export it anew")
        listed, by = self._chosen, " and ".join(files)
        if dataset.split_csv is not None or not any(split for _, split in listed.values()):
            splits, names, found = own_splits(folder, dataset.split_csv)
            self.findings += found
            if self.names_every_picture:
                pictures = listed
            elif splits is not None:
                pictures, by = splits, names
            else:
                pictures = folder.pictures
            listed = {p: (listed[p][0] if p in listed else "", (splits or {}).get(p, "")) for p in pictures}
        self.unlisted(listed, by)
        self.settle(listed, " and ".join(files))
        self._flatten()

    @abstractmethod
    def read_file(self, file: str) -> None:
        """Calls `place` for each picture and `add` for each box of a file."""

    def find(self, name: str, file: str) -> list[str]:
        """The pictures that a name in a file may mean; several only where nothing tells them apart."""
        key = name, file
        if key not in self._found:
            found = self.folder.find(name, file.rpartition("/")[0])
            split = split_of_path(file)
            self._found[key] = [p for p in found if split and split_of_path(p) == split] or found
        return self._found[key]

    def place(self, picture: str, file: str, split: str, size: tuple[float, float] | None = None) -> tuple[str, str]:
        """Takes a picture, unless it was placed before; returns the file and the split that it has."""
        if picture not in self._chosen:
            self._chosen[picture] = file, split
            self._rows[picture] = []
            if size is not None:
                self._sizes[picture] = size
        return self._chosen[picture]

    def add(self, picture: str, corners: tuple[float, float, float, float], name: str, flags: int, number: object) -> None:
        """A box of a picture that was placed; `number` is its line or id in the file."""
        self._rows[picture].append((corners, name, flags, number))

    def refuse_shares(self, coordinates: np.ndarray, file: str) -> None:
        """An error where pixels were expected and all coordinates of a file are shares of the picture."""
        if are_shares(coordinates):
            self.findings.append(Finding(ERROR, "box-not-pixels", file, 0, "all coordinates are shares of the picture",
                                         "give them in pixels"))

    def annotations(self, i: int, header: Header) -> Iterator[Box | Size | Finding]:
        if self._claimed[i].any():
            yield Size(*map(float, self._claimed[i]), 0)
        for k in range(self._starts[i], self._starts[i + 1]):
            number = self._numbers[k]
            yield Box(tuple(map(float, self._corners[k])), self._names[self._name_ids[k]],
                      number if self.box_is_called == "row" else 0, int(self._flags[k]), f"{self.box_is_called} {number}")

    def _flatten(self) -> None:
        rows = list(itertools.chain.from_iterable(self._rows.get(p, ()) for p in self.images))
        self._starts = np.cumsum([0, *(len(self._rows.get(p, ())) for p in self.images)])
        self._corners = np.array([r[0] for r in rows], np.float64).reshape(-1, 4)
        self._names, self._name_ids = (a.tolist() for a in np.unique(np.array([r[1] for r in rows], object), return_inverse=True))
        self._flags = np.array([r[2] for r in rows], np.uint8)
        self._numbers = [r[3] for r in rows]
        self._claimed = np.array([self._sizes.get(p, (0.0, 0.0)) for p in self.images]).reshape(-1, 2)
        self._rows, self._sizes, self._found, self._chosen = {}, {}, {}, {}
