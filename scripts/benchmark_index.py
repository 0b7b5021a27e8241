"""Times the annotation index on 12,843 pictures of 5 boxes (the article's count): cold build, warm open, bytes on disk;
and what the index costs four loader workers in memory, as their proportional set size (Linux).

    python scripts/benchmark_index.py [pictures [xml|csv [samples read by the workers]]]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image

from weldtrain.config import DatasetConfig, LoaderConfig, ModelConfig
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.index import AnnotationIndex
from weldtrain.data.indexing import open_index
from weldtrain.data.loader import training_loader
from weldtrain.formats import stamp

BOX = ("<object><name>{}</name><difficult>0</difficult>"
       "<bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>\n")
SIDE_PX = 256
WORKERS = 4


def make(root: Path, n: int, form: str) -> DatasetConfig:
    """One JPEG under n names, and five boxes for each: in n XML files and a split CSV, or in one CSV."""
    (root / "images").mkdir()
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (SIDE_PX, SIDE_PX, 3), np.uint8)).save(root / "one.jpg")
    lines = ["image_id,split"] if form == "xml" else ["image,x1,y1,x2,y2,class,split"]
    (root / "annotations").mkdir()
    for i in range(n):
        if i % 30000 == 0:  # more links than a file system allows one file to have
            source = root / f"one{i}.jpg"
            source.write_bytes((root / "one.jpg").read_bytes())
        (root / f"images/{i:06d}.jpg").hardlink_to(source)
        split = "val" if i % 5 == 0 else "train"
        boxes = [(x, y, x + 40, y + 30, ("crack", "slag")[j % 2]) for j, (x, y) in enumerate(rng.integers(0, 200, (5, 2)))]
        if form == "xml":
            objects = "".join(BOX.format(name, *corners) for *corners, name in boxes)
            (root / f"annotations/{i:06d}.xml").write_text(f"<annotation>\n{objects}</annotation>")
            lines.append(f"{i:06d},{split}")
        else:
            lines += [f"images/{i:06d}.jpg,{x1},{y1},{x2},{y2},{name},{split}" for x1, y1, x2, y2, name in boxes]
    (root / "list.csv").write_text("\n".join(lines))
    common = {"root": str(root), "images": "images"}
    if form == "xml":
        return DatasetConfig(format="voc", annotations="annotations", split_csv="list.csv", **common)
    return DatasetConfig(format="csv", annotations="list.csv", **common)


def workers_pss_mb() -> float:
    return sum(p.memory_full_info().pss for p in psutil.Process().children(recursive=True)) / 2**20


def memory(file: Path, samples: int) -> None:
    """Prints how the workers' memory grows while they read samples from all over the index."""
    index = AnnotationIndex(file)
    dataset = DetectionDataset(index, "train", index.names, ModelConfig(min_size=64, max_size=64))
    cfg = LoaderConfig(workers="process", num_workers=WORKERS, batch_size=20)
    loader = training_loader(dataset, cfg, torch.device("cpu"), seed=0)
    batches = min(samples // 20, len(loader))
    for i, _ in enumerate(loader, 1):
        if i == 50 * WORKERS:  # imports and buffers are there
            start = workers_pss_mb()
        if i == batches:
            end = workers_pss_mb()
            break
    size = index.file.stat().st_size / 2**20
    print(f"{WORKERS} workers, {batches * 20} samples: PSS {start:.1f} to {end:.1f} MB together, growth {end - start:.2f} MB "
          f"= {100 * (end - start) / size:.1f} % of the index")


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:
        return memory(Path(sys.argv[2]), int(sys.argv[3]))
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 12843
    form = sys.argv[2] if len(sys.argv) > 2 else "xml"
    samples = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    with tempfile.TemporaryDirectory() as folder:
        dataset = make(Path(folder), n, form)
        cache = Path(folder) / "cache"
        start = time.perf_counter()
        index = open_index(dataset, cache)
        print(f"built: {time.perf_counter() - start:.2f} s for {len(index)} pictures, {len(index.boxes)} boxes from {form}, "
              f"{index.file.stat().st_size / 2**20:.2f} MB")
        for name, act in (("opened by memory map", lambda: AnnotationIndex(index.file)),
                          ("state of every file looked at", lambda: stamp(dataset)),
                          ("both, as at every start of a run", lambda: open_index(dataset, cache))):
            times = []
            for _ in range(5):
                start = time.perf_counter()
                act()
                times.append(time.perf_counter() - start)
            print(f"{name}: {min(times):.4f} s (best of 5)")
        if samples:
            # Its own process, as a run that finds its index ready: what building left behind is no part of this.
            subprocess.run([sys.executable, __file__, "--memory", index.file, str(samples)], check=True)


if __name__ == "__main__":
    main()
