"""The loader beside its limits and beside other loaders, in one run: a table of ratios with pass or fail.

    python scripts/benchmark_loader.py [--pictures 384 192] [--rounds 3] [--data FOLDER]

Makes noisy textures that compress like photographs, 1024x1024 at about 0.4 MB and 2448x2048 at about 1.7 MB, with boxes; asks
every contender for whole epochs in turn, and takes the median over rounds of each round's ratio. Two workers everywhere.
SPDL and Ultralytics are measured where they are installed (`pip install spdl`; Ultralytics is AGPL).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import multiprocessing
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2

from weldtrain.config import AugmentConfig, DatasetConfig, LoaderConfig, ModelConfig, SplitConfig
from weldtrain.data.augment import HFLIP, IDENTITY, Layer, Recipe, paint
from weldtrain.data.baselines import ArticleDataset, NaiveDataset, article_loader
from weldtrain.data.buffers import keep_pages
from weldtrain.data.cache import open_cache
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.data.loader import Loader, training_loader
from weldtrain.models.detector import build_detector

SIZES = {"1024²": ((1024, 1024), 400e3), "2448×2048": ((2448, 2048), 1.7e6)}
WORKERS, BATCH = 2, 8
LIGHT = AugmentConfig(hflip=0.5, vflip=0.5, brightness=0.15, contrast=0.2)
MODEL = ModelConfig(min_size=800, max_size=1333)
CPU = torch.device("cpu")
CLASSES = ["crack", "porosity"]

# What is asked of us: mode, against what, and the ratio to reach at either size.
REACH = [
    ("decoding", "article", (2.5, 4.5)),
    ("decoding", "limit: decode", (0.85, 0.75)),
    ("cache", "article", (30, 150)),
    ("cache, no augmentation", "article", (60, 300)),
    ("cache, no augmentation", "limit: copy", (0.7, 0.7)),
    ("cache", "Ultralytics, RAM cache", (10, 10)),
]


# ---- pictures


def make_pictures(folder: Path, size: tuple[int, int], nbytes: float, count: int) -> None:
    """Fills `folder` with JPEGs of about `nbytes` in the welding_v2 layout, five boxes each."""
    done = folder / f"{count}.done"
    if done.exists():
        return
    for name in ("images", "annotations"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    width, height = size
    coarse = cv2.resize(rng.normal(0, 25, (height // 8, width // 8)).astype(np.float32), size, interpolation=cv2.INTER_CUBIC)
    fine = rng.normal(0, 1, (height, width)).astype(np.float32)

    def jpeg(sigma: float, shift: int = 0) -> np.ndarray:
        grey = np.clip(120 + coarse + sigma * np.roll(fine, shift, (0, 1)), 0, 255).astype(np.uint8)
        return cv2.imencode(".jpg", cv2.merge([grey] * 3), [cv2.IMWRITE_JPEG_QUALITY, 92])[1]

    low, high = 0.0, 60.0
    for _ in range(12):
        low, high = ((low + high) / 2, high) if len(jpeg((low + high) / 2)) < nbytes else (low, (low + high) / 2)
    for i in range(count):
        jpeg(low, 17 * i).tofile(folder / "images" / f"{i:04}.jpg")
        corners = rng.integers(0, np.array([width, height]) - 80, (5, 2))
        objects = "".join(
            f"<object><name>{CLASSES[k % 2]}</name><bndbox><xmin>{x}</xmin><ymin>{y}</ymin><xmax>{x + 64}</xmax>"
            f"<ymax>{y + 40}</ymax></bndbox></object>" for k, (x, y) in enumerate(corners.tolist()))
        (folder / "annotations" / f"{i:04}.xml").write_text(f"<annotation>{objects}</annotation>")
    (folder / "train_val_test_split.csv").write_text("image_id,split\n" + "".join(f"{i:04},train\n" for i in range(count)))
    done.touch()


# ---- ours


def ours(folder: Path, cache: str = "none", augment: AugmentConfig | None = LIGHT, **settings) -> Loader:
    config = DatasetConfig(format="welding_v2", root=str(folder), images="images", annotations="annotations",
                           split_csv="train_val_test_split.csv", split=SplitConfig(make="never"))
    cfg = LoaderConfig(**{"batch_size": BATCH, "num_workers": WORKERS, "cache": cache} | settings)
    place = str(folder.parent / "cache")
    index = open_index(config, place)
    dataset = DetectionDataset(index, "train", CLASSES, MODEL, augment=augment)
    dataset.cache, _ = open_cache(cfg, index, dataset.sizes, dataset.window, place, rows=dataset.rows, passes=9, workers=WORKERS,
                                  decoded=dataset.decoded)
    return training_loader(dataset, cfg, CPU, seed=0)


# ---- others


class ArticleWithXml(ArticleDataset):
    """With the article's own annotations: parsed, and a thousand files of them kept."""

    def __init__(self, folder: Path, *args) -> None:
        super().__init__(*args)
        self._folder = folder

    @functools.lru_cache(1000)  # noqa: B019
    def annotations(self, row: int) -> tuple[np.ndarray, list[int]]:
        boxes, labels = [], []
        for item in ET.parse(self._folder / "annotations" / f"{row:04}.xml").getroot().findall("object"):
            corners = item.find("bndbox")
            boxes.append([int(corners.find(tag).text) for tag in ("xmin", "ymin", "xmax", "ymax")])
            labels.append(CLASSES.index(item.find("name").text))
        return np.array(boxes, np.float32), labels


class ReferenceDataset(NaiveDataset):
    """torchvision's references/detection, preset hflip: Pillow, and float pictures of full size in a list."""

    def __getitem__(self, i: int):
        row = int(self.rows[i])
        image = Image.open(self.index.root / self.index.path(row)).convert("RGB")
        boxes, labels = self.annotations(row)
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=image.size[::-1])
        change = v2.Compose([v2.PILToTensor(), v2.RandomHorizontalFlip(0.5), v2.ToDtype(torch.float, scale=True)])
        return change(image, {"boxes": boxes, "labels": torch.tensor(labels)})


def reference_loader(dataset: ReferenceDataset) -> DataLoader:
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=_as_lists, drop_last=True,
                      persistent_workers=True)


def _as_lists(batch: list) -> tuple:
    return tuple(zip(*batch))


def ultralytics_loader(folder: Path) -> Callable[[], int] | None:
    """Ultralytics' loader with its RAM cache and light augmentation, on the same pictures and boxes."""
    if not importlib.util.find_spec("ultralytics"):
        return None
    logging.getLogger("ultralytics").setLevel(logging.ERROR)
    from ultralytics.cfg import get_cfg
    from ultralytics.data.build import build_dataloader, build_yolo_dataset

    labels = folder / "labels"
    labels.mkdir(exist_ok=True)
    for xml in (folder / "annotations").glob("*.xml"):
        (labels / f"{xml.stem}.txt").write_text("".join(f"0 0.5 0.{k} 0.1 0.1\n" for k in range(1, 6)))
    off = dict.fromkeys(("mosaic", "scale", "translate", "degrees", "hsv_h", "hsv_s", "erasing"), 0.0)
    cfg = get_cfg(overrides=off | {"task": "detect", "imgsz": MODEL.min_size, "cache": "ram", "hsv_v": 0.2, "fliplr": 0.5,
                                   "flipud": 0.5, "rect": False})
    data = {"names": dict(enumerate(CLASSES)), "nc": len(CLASSES), "channels": 3}
    dataset = build_yolo_dataset(cfg, str(folder / "images"), BATCH, data, mode="train", stride=32)
    loader = build_dataloader(dataset, BATCH, WORKERS, shuffle=True, rank=-1)

    return lambda: sum(len(batch["img"]) for batch in loader)


def spdl_epoch(files: list[str], size: tuple[int, int]) -> Callable[[], int] | None:
    """SPDL: its threads decode and resize to the model's scale in FFmpeg and hand over batches of uint8."""
    if not importlib.util.find_spec("spdl"):
        return None
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    def load(names: list[str]) -> torch.Tensor:
        cpu = spdl.io.load_image_batch(names, width=size[0], height=size[1], pix_fmt="rgb24")
        return spdl.io.to_torch(cpu)

    try:
        load(files[:1])
    except RuntimeError as e:  # such as a missing FFmpeg
        print(f"SPDL cannot decode here ({str(e).splitlines()[0]})", file=sys.stderr)
        return None

    def epoch() -> int:
        rng = np.random.default_rng()
        order = rng.permutation(files)
        batches = [list(map(str, order[i : i + BATCH])) for i in range(0, len(order) - BATCH + 1, BATCH)]
        pipeline = PipelineBuilder().add_source(batches).pipe(load, concurrency=WORKERS).add_sink(4).build(num_threads=WORKERS)
        with pipeline.auto_stop():
            return sum(len(batch) for batch in pipeline)

    return epoch


# ---- limits


def _decode_all(files: list[str], kind: int) -> int:
    cv2.setNumThreads(0)
    keep_pages()  # as our own workers do
    for file in files:
        cv2.imdecode(np.fromfile(file, np.uint8), kind)
    return len(files)


def decode_limit(files: list[str], pool, kind: int) -> Callable[[], int]:
    """libjpeg-turbo alone, one process a worker."""
    return lambda: sum(pool.starmap(_decode_all, [(files[i::WORKERS], kind) for i in range(WORKERS)]))


def toned_and_flipped(picture: np.ndarray, out: np.ndarray) -> None:
    """The two passes over memory of light augmentation."""
    size = picture.shape[1::-1]
    paint({0: picture}, Recipe(size, (Layer(0, IDENTITY, (0, 0, *size)),), HFLIP, np.arange(256, dtype=np.uint8)[::-1]), out)


def copy_limit(loader: Loader, at_least: int, work: Callable[[np.ndarray, np.ndarray], None]) -> Callable[[], int]:
    """Nothing but `work` on the cached pictures and the memory of batches, by as many threads."""
    dataset = loader.dataset
    width, height = dataset.sizes[0].tolist()
    buffers = [np.zeros((BATCH, height, width, 3), np.uint8) for _ in range(2 * WORKERS)]

    def copy(thread: int, pictures: list[np.ndarray]) -> None:
        for i, picture in enumerate(pictures):
            work(picture, buffers[(thread + WORKERS * (i // BATCH)) % len(buffers)][i % BATCH])

    def run() -> int:
        order = np.resize(np.random.default_rng().permutation(dataset.rows), at_least)
        pictures = [dataset.cache.get(int(row)) for row in order]
        threads = [threading.Thread(target=copy, args=(k, pictures[k::WORKERS])) for k in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(pictures)

    return run


# ---- measuring


def epochs_of(loader: Loader, at_least: int) -> Callable[[], int]:
    """Whole epochs one after the other, of together at least so many pictures: a fast loader's epoch is too short to time."""
    state = iter(range(1 << 30))

    def run() -> int:
        seen = 0
        while seen < at_least:
            loader.set_epoch(next(state))
            for batch in loader:
                seen += len(batch)
        return seen

    return run


def rate(run: Callable[[], int]) -> float:
    start = time.perf_counter()
    return run() / (time.perf_counter() - start)


def compare(contenders: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Images per second of each in each round, after one unmeasured round."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for k in range(rounds + 1):
        for name, run in contenders.items():
            measured = rate(run)
            if k:
                rates[name].append(measured)
            print(f"  round {k} {name}: {measured:.0f}/s", file=sys.stderr, flush=True)
    return rates


def boundary(loader: Loader, epochs: int = 12) -> tuple[float, float]:
    """Seconds between the last batch of one epoch and the first of the next, and a steady batch: medians."""
    gaps, steady = [], []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        mark = time.perf_counter()
        for k, _ in enumerate(loader):
            now = time.perf_counter()
            if epoch and k == 0:
                gaps.append(now - mark)
            elif epoch:
                steady.append(now - mark)
            mark = now
    return float(np.median(gaps)), float(np.mean(steady))


def step_ratio(loader: Loader) -> float:
    """The time of a training step with the loader, over that on one batch that stays on the device."""
    torch.manual_seed(0)
    small = ModelConfig(backbone="resnet18", pyramid_channels=64, box_head_width=256, rpn_post_nms_top_n_train=200)
    model = build_detector(small, len(CLASSES)).train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step(batch) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            sum(model(batch).values()).backward()
        optimizer.step()

    batches = iter(_for_ever(loader))
    resident = next(batches)
    for _ in range(2):
        step(resident)
    ratios = []
    for _ in range(8):  # in turn, so that both meet the same machine
        start = time.perf_counter()
        step(resident)
        middle = time.perf_counter()
        step(next(batches))
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return float(np.median(ratios))


def _for_ever(loader: Loader) -> Iterator:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def memory_growth(loader: Loader) -> tuple[float, float]:
    """MB of PSS of all worker processes, or of this process where workers are threads, after epochs 2 and 10."""
    seen, before = [], psutil.Process().children(recursive=True)
    for epoch in range(10):
        loader.set_epoch(epoch)
        for _ in loader:
            pass
        workers = [p for p in psutil.Process().children(recursive=True) if p not in before]
        processes = workers if loader.plan.workers == "process" else [psutil.Process()]
        seen.append(sum(p.memory_full_info().pss for p in processes) / 2**20)
    return seen[1], seen[-1]


def contenders(folder: Path, size: tuple[int, int], count: int, pool) -> tuple[dict[str, Callable[[], int]], list[Loader]]:
    """What is measured on the pictures of one size, by name, and the loaders among it."""
    files = sorted(map(str, (folder / "images").glob("*.jpg")))
    half = size[0] > 2 * MODEL.min_size
    loaders = {
        "simple": ours(folder, num_workers=0),
        "decoding, processes": ours(folder, workers="process"),
        "decoding": ours(folder),
        "cache, processes": ours(folder, "disk", workers="process"),
        "cache": ours(folder, "disk"),
        "cache, no augmentation": ours(folder, "disk", None),
    }
    cached = loaders["cache"].dataset
    pictures = (cached.index, cached.rows[: count // 2], LIGHT)  # they take their time, and the same for each
    named = {
        "limit: decode": decode_limit(files, pool, cv2.IMREAD_COLOR),
        "limit: decode at half": decode_limit(files, pool, cv2.IMREAD_REDUCED_COLOR_2) if half else None,
        # A cached epoch is too short to be timed alone.
        **{name: epochs_of(loader, (12 if name.startswith("cache") else 1) * count) for name, loader in loaders.items()},
        "limit: copy": copy_limit(loaders["cache"], 24 * count, lambda picture, out: np.copyto(out, picture)),
        "limit: tone and flip": copy_limit(loaders["cache"], 12 * count, toned_and_flipped),
        "article": functools.partial(_epoch, article_loader(ArticleWithXml(folder, *pictures), BATCH, WORKERS)),
        "torchvision reference": functools.partial(_epoch, reference_loader(ReferenceDataset(*pictures))),
        "SPDL": spdl_epoch(files, tuple(cached.sizes[0].tolist())),
        "Ultralytics, RAM cache": ultralytics_loader(folder) if count >= 384 else None,
    }
    return {name: run for name, run in named.items() if run}, list(loaders.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, nargs=2, default=[384, 384], help="of either size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="keep pictures here for another run")
    parser.add_argument("--only", nargs="*", default=[], help="contenders by the start of their names, and no judgement")
    args = parser.parse_args()
    torch.set_num_threads(WORKERS)
    judged: list[tuple[str, str, float, float, bool]] = []
    with tempfile.TemporaryDirectory() as temporary, multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        place = args.data or Path(temporary)
        for k, ((label, (size, nbytes)), count) in enumerate(zip(SIZES.items(), args.pictures)):
            folder = place / f"{size[0]}x{size[1]}"
            make_pictures(folder, size, nbytes, count)
            named, loaders = contenders(folder, size, count, pool)
            rates = compare({n: r for n, r in named.items() if not args.only or n.startswith(tuple(args.only))}, args.rounds)
            print(f"\n{label}: images per second, median of {args.rounds} rounds (least to most)")
            for name, values in rates.items():
                print(f"  {name:28} {np.median(values):8.0f}   ({min(values):.0f} to {max(values):.0f})")
            for mode, against, reach in REACH:
                if mode in rates and against in rates:
                    ratio = float(np.median(np.divide(rates[mode], rates[against])))
                    judged.append((f"{label}, {mode}", against, ratio, reach[k], ratio >= reach[k]))
            for loader in loaders:
                loader.close()
            if k == 0 and not args.only:
                judged += others(folder)
    print(f"\n{'mode':36} {'against':36} {'ratio':>8} {'reach':>8}")
    for mode, against, ratio, reach, passed in judged:
        print(f"{mode:36} {against:36} {ratio:8.3g} {reach:8.3g}  {'pass' if passed else 'FAIL'}")
    return 0 if all(passed for *_, passed in judged) else 1


def others(folder: Path) -> list[tuple[str, str, float, float, bool]]:
    """Epoch boundary, training step and memory, on the pictures of one size."""
    judged = []
    for mode, loader in (("decoding", ours(folder)), ("cache", ours(folder, "disk"))):
        gap, steady = boundary(loader)
        judged.append((f"epoch boundary, {mode}", "a steady batch", gap / steady, 2.0, gap <= 2 * steady))
        loader.close()
    loader = ours(folder, "disk")
    ratio = step_ratio(loader)
    judged.append(("training step, cache", "one batch on the device", ratio, 1.02, ratio <= 1.02))
    loader.close()
    for kind in ("process", "thread"):
        loader = ours(folder, workers=kind)  # without the cache, whose mapped file counts as each page is first touched
        early, late = memory_growth(loader)
        loader.close()
        judged.append((f"memory after 10 epochs, {kind}", f"after 2 ({early:.0f} MB PSS)", late / early, 1.01,
                       late <= 1.01 * early))
    return judged


def _epoch(loader: DataLoader) -> int:
    return sum(len(batch[0]) for batch in loader)


if __name__ == "__main__":
    sys.exit(main())
