"""Times the annotation index on 12,843 pictures of 5 boxes (the article's count): cold build, warm open, bytes on disk.

    python scripts/benchmark_index.py [pictures]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from weldtrain.config import DatasetConfig
from weldtrain.data.index import open_index

BOX = ("<object><name>{}</name><difficult>0</difficult>"
       "<bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>\n")


def make(root: Path, n: int) -> None:
    """One JPEG under n names, and n annotations of five boxes each."""
    (root / "images").mkdir()
    (root / "annotations").mkdir()
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (1024, 1024, 3), np.uint8)).save(root / "one.jpg")
    lines = ["image_id,split"]
    for i in range(n):
        (root / f"images/{i:06d}.jpg").hardlink_to(root / "one.jpg")
        corners = rng.integers(0, 500, (5, 2))
        objects = "".join(BOX.format(("crack", "slag")[j % 2], x, y, x + 40, y + 30) for j, (x, y) in enumerate(corners))
        (root / f"annotations/{i:06d}.xml").write_text(f"<annotation>\n{objects}</annotation>")
        lines.append(f"{i:06d},{'val' if i % 5 == 0 else 'train'}")
    (root / "train_val_test_split.csv").write_text("\n".join(lines))


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 12843
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make(root, n)
        dataset = DatasetConfig(format="welding_v2", root=folder)
        for name in ("cold", "warm", "warm", "warm"):
            start = time.perf_counter()
            index = open_index(dataset, root / "cache")
            print(f"{name}: {time.perf_counter() - start:.3f} s for {len(index)} pictures, {len(index.boxes)} boxes")
        print(f"size: {index.file.stat().st_size / 2**20:.2f} MB")


if __name__ == "__main__":
    main()
