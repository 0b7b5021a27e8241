"""Folders of small pictures in the article's layout, and pictures that are broken in every known way."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from weldtrain.config import DatasetConfig, ModelConfig, SplitConfig
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index

RNG = np.random.default_rng(5)
NOISE = RNG.integers(0, 256, (48, 64, 3)).astype(np.uint8)


@pytest.fixture
def plates(tmp_path):
    """`plates({"a.png": pixels}, {"a": xml}, strict=True)`: the settings for a folder of these pictures, all in train.

    Pixels are BGR or grey, None for noise of 64x48, or the file's bytes; without XML a picture shows one crack.
    """

    def write(pictures: dict[str, np.ndarray | bytes | None], xml: dict[str, str] | None = None, **settings) -> DatasetConfig:
        root = tmp_path / "plates"
        for folder in ("images", "annotations"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for name, pixels in pictures.items():
            data = pixels if isinstance(pixels, bytes) else encoded(Path(name).suffix, NOISE if pixels is None else pixels)
            (root / "images" / name).write_bytes(data)
            text = (xml or {}).get(Path(name).stem, crack())
            (root / "annotations" / f"{Path(name).stem}.xml").write_text(f"<annotation>\n{text}</annotation>")
        (root / "s.csv").write_text("image_id,split\n" + "".join(f"{name},train\n" for name in pictures))
        return DatasetConfig(format="welding_v2", root=str(root), images="images", annotations="annotations", split_csv="s.csv",
                             **{"split": SplitConfig(make="never")} | settings)

    write.crack, write.encoded, write.noise = crack, encoded, NOISE
    return write


@pytest.fixture
def kinds(plates, tmp_path):
    """`kinds(model={"min_size": 30}, seed=1)`: a dataset of ten pictures of every kind that is decoded differently, of many
    sizes and boxes, at a scale at which each is resized and large JPEGs are reduced. Opened anew each time; `kinds.root`."""
    grey, deep = RNG.integers(0, 256, (48, 64)).astype(np.uint8), RNG.integers(500, 3500, (50, 64)).astype(np.uint16)
    smooth = cv2.resize(RNG.integers(0, 255, (6, 8, 3)).astype(np.uint8), (150, 333), interpolation=cv2.INTER_CUBIC)
    turned = Image.Exif()
    turned[0x0112] = 6
    lying = io.BytesIO()
    Image.fromarray(smooth).resize((210, 125)).save(lying, "jpeg", exif=turned.tobytes())
    pictures = {"a.png": grey, "b.jpg": smooth, "c.png": deep, "d.png": None, "e.jpg": grey[:, :40], "f.jpg": None,
                "g.jpg": lying.getvalue(), "h.jpg": smooth[:250, :140, 0], "i.tif": deep.T.copy(), "j.bmp": grey[:, ::-1].copy()}
    xml = {"a": crack() + crack((1, 2, 9, 30), "slag"), "b": "", "c": crack((9, 9, 30, 40), more="<difficult>1</difficult>"),
           "d": crack() + crack((5, 5, 20, 40)), "g": crack((3, 100, 120, 180), "slag")}
    cfg = plates(pictures, xml)

    def make(kind=DetectionDataset, model=(), **settings):
        scale = ModelConfig(**{"min_size": 40, "max_size": 56} | dict(model))
        return kind(open_index(cfg, tmp_path / "index"), "train", ["crack", "slag"], scale, **settings)

    make.cfg, make.root = cfg, Path(cfg.root)
    return make


@pytest.fixture(scope="session")
def broken() -> dict[str, tuple[bytes | None, str]]:
    """name -> the bytes of a bad picture, and what is to be said of it. No bytes: a link that leads nowhere."""
    jpeg = encoded(".jpg", NOISE)
    return {
        "cut95.jpg": (jpeg[: len(jpeg) * 95 // 100], "cut off"),
        "cut50.jpg": (jpeg[: len(jpeg) // 2], "cut off"),
        "cut10.jpg": (jpeg[: len(jpeg) // 10], "cut off|cannot be read"),
        "empty.jpg": (b"", r"is empty \(0 bytes\)"),
        "page.jpg": (b"<!DOCTYPE html><title>404</title>", "a page of HTML"),
        "gone.jpg": (None, "no such picture"),
        "strip.png": (encoded(".png", np.zeros((2, 12000), np.uint8)), "is 12000x2, a strip"),
        "huge.png": (huge_png(40000), "is 40000x40000, larger than 200 megapixels"),
        "float.tif": (encoded(".tif", np.zeros((8, 8), np.float32)), "floating-point pixels"),
    }


@pytest.fixture(scope="session")
def torn_png() -> bytes:
    """Whole from outside: one byte in the middle of its pixels is another."""
    data = bytearray(encoded(".png", NOISE))
    data[len(data) // 2] ^= 0x41
    return bytes(data)


def encoded(suffix: str, pixels: np.ndarray) -> bytes:
    return cv2.imencode(suffix, pixels)[1].tobytes()


def crack(box=(10, 10, 30, 20), name="crack", more="") -> str:
    edges = "".join(f"<{tag}>{v}</{tag}>" for tag, v in zip(("xmin", "ymin", "xmax", "ymax"), box))
    return f"<object><name>{name}</name>{more}<bndbox>{edges}</bndbox></object>\n"


def huge_png(side: int) -> bytes:
    """A header that claims so many pixels, and a hundred bytes of them."""
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
