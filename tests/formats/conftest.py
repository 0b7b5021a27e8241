"""A folder of small pictures and annotations that a test writes, and all that a reader makes of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from weldtrain.config import DatasetConfig
from weldtrain.formats import open_reader

SIZE = (64, 48)
_FORMATS = {"jpg": "jpeg", "jfif": "jpeg", "tif": "tiff"}


@pytest.fixture
def tree(tmp_path):
    """`tree({"a.jpg": None, "a.txt": "0 .5 .5 .2 .2"})`: the folder with these files; None is a picture of 64x48."""

    def write(files: dict[str, str | bytes | None], root: str = "data") -> Path:
        for name, content in files.items():
            path = tmp_path / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                suffix = path.suffix[1:].lower()
                Image.new("RGB", SIZE).save(path, _FORMATS.get(suffix, suffix))
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / root

    return write


@pytest.fixture(scope="session")
def read():
    """`read(root, "yolo", missing="negative")`: records, splits and boxes by picture, and all findings."""

    def reading(root: Path, fmt: str, **settings) -> SimpleNamespace:
        reader = open_reader(DatasetConfig(format=fmt, root=str(root), **settings))
        records = {image: reader.read(i) for i, image in enumerate(reader.images)}
        return SimpleNamespace(
            reader=reader, records=records, splits=dict(zip(reader.images, reader.splits)),
            boxes={image: [(n, tuple(b)) for n, b in zip(r.names, r.boxes.round(3).tolist())] for image, r in records.items()},
            findings=[*reader.findings, *(f for r in records.values() for f in r.findings)])

    return reading
