"""Measures what the article claims on this machine; prints its figure, the one found here and what weldtrain does as a table.

    python scripts/article_claims.py [--pictures 192] [--xml 12843] [--only lru_and_mmap damaged]

Two to four minutes on two cores. All data is made in a temporary folder and is in memory when it is read; what is compared is
measured in turn, in the same run. A time or a rate is the best of several, with the worst in brackets.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import math
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import psutil
import torch
from benchmark_loader import make_pictures
from lxml import etree
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from weldtrain import config
from weldtrain.config import AugmentConfig, Config, DatasetConfig, LoaderConfig, ModelConfig, OptimizerConfig, SplitConfig
from weldtrain.data import audit
from weldtrain.data.baselines import ArticleDataset, NaiveDataset, article_loader, collate, naive_loader
from weldtrain.data.cache import open_cache
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.images import read_image
from weldtrain.data.index import AnnotationIndex
from weldtrain.data.indexing import open_index
from weldtrain.data.loader import Loader, batch_bytes, plan, training_loader
from weldtrain.data.sampler import Order
from weldtrain.telemetry.clock import StepClock
from weldtrain.telemetry.environment import environment
from weldtrain.telemetry.machine import MachineCounters, processor, usable_cores
from weldtrain.validation import validated

# A spawned worker imports this file: what loads torchvision's models, two seconds of work, is imported where it is needed.

CPU = torch.device("cpu")
NO_CUDA = "no CUDA device here"
CLASSES = ("crack", "porosity", "slag", "incomplete_fusion")
MODEL = ModelConfig(min_size=800, max_size=1333)
TINY = ModelConfig(backbone="resnet18", pyramid_channels=64, box_head_width=256, min_size=128, max_size=128,
                   rpn_post_nms_top_n_train=50)
LIGHT = AugmentConfig(hflip=0.5, vflip=0.5, brightness=0.15, contrast=0.2)
BATCH = 8
ARTICLE_BATCH, ARTICLE_CACHE, ARTICLE_WORKERS = 16, 1000, 4
REPEATS = 5
RATE_S, ROUNDS = 0.8, 3  # of each rate that is measured
XML_HEAD = """<annotation>
\t<folder>images</folder>
\t<filename>{0}.jpg</filename>
\t<path>/data/welding_v2/images/{0}.jpg</path>
\t<source>
\t\t<database>Unknown</database>
\t</source>
\t<size>
\t\t<width>{1}</width>
\t\t<height>{1}</height>
\t\t<depth>3</depth>
\t</size>
\t<segmented>0</segmented>
"""
XML_OBJECT = """\t<object>
\t\t<name>{}</name>
\t\t<pose>Unspecified</pose>
\t\t<truncated>0</truncated>
\t\t<difficult>0</difficult>
\t\t<bndbox>
\t\t\t<xmin>{}</xmin>
\t\t\t<ymin>{}</ymin>
\t\t\t<xmax>{}</xmax>
\t\t\t<ymax>{}</ymax>
\t\t</bndbox>
\t</object>
"""
OBJECTS_2_2 = 12  # in a file, by the article's section 2.2; by its section 2.1 they are 5.2


class Row(NamedTuple):
    claim: str
    article: str
    measured: str
    weldtrain: str


@dataclass
class Ground:
    """What everything is measured on."""

    place: Path
    many: Path  # welding_v2: as many files as the article has, 5.2 boxes each, and one picture under all names
    names: list[str]  # of `many`
    index: AnnotationIndex  # of `many`
    built_s: float
    pictures: Path  # welding_v2: pictures of 1024x1024 and 0.4 MB that differ
    jpegs: list[str]
    cores: int
    cuda: torch.device | None

    @classmethod
    def prepared(cls, place: Path, files: int, pictures: int) -> Ground:
        names = [f"w{i:05}" for i in range(files)]
        lay_out(place / "many", names, [5 + (i % 5 == 0) for i in range(files)], 1024)
        start = time.perf_counter()
        index = open_index(dataset_config(place / "many"), place / "cache")
        built_s = time.perf_counter() - start
        make_pictures(place / "pictures", (1024, 1024), 400e3, pictures)
        return cls(place, place / "many", names, index, built_s, place / "pictures",
                   sorted(map(str, (place / "pictures/images").glob("*.jpg"))), usable_cores(),
                   torch.device("cuda", 0) if torch.cuda.is_available() else None)

    def xml(self, name: str) -> str:
        return f"{self.many}/annotations/{name}.xml"

    def dataset(
        self, folder: Path | None = None, augment: AugmentConfig | None = LIGHT, model: ModelConfig = MODEL
    ) -> DetectionDataset:
        index = open_index(dataset_config(folder or self.pictures), self.place / "cache")
        return DetectionDataset(index, "train", index.names, model, augment=augment)

    def small(self, name: str, boxes: Sequence[int] = (2,) * 8) -> DetectionDataset:
        """A folder of its own with small pictures of so many boxes each, as it is on disk now."""
        lay_out(self.place / name, [f"{name}{i}" for i in range(len(boxes))], boxes, 128)
        return self.dataset(self.place / name, augment=None, model=TINY)


# ---- data


def lay_out(root: Path, names: Sequence[str], boxes: Sequence[int], side_px: int) -> None:
    """The layout of welding_v2: one picture under all names, and for each XML as labelImg writes it."""
    for folder in ("images", "annotations"):
        (root / folder).mkdir(parents=True)
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 255, (side_px // 16, side_px // 16, 3)).astype(np.uint8)
    jpeg = cv2.imencode(".jpg", cv2.resize(coarse, (side_px, side_px), interpolation=cv2.INTER_CUBIC))[1].tobytes()
    source = root.with_suffix(".jpg")
    for i, (name, count) in enumerate(zip(names, boxes)):
        if i % 30000 == 0:  # more links than a file system allows one file to have
            source.unlink(missing_ok=True)
            source.write_bytes(jpeg)
        (root / f"images/{name}.jpg").hardlink_to(source)
        corners = rng.integers(0, side_px // 2, (count, 2)).tolist()
        objects = (XML_OBJECT.format(CLASSES[k % 4], x, y, x + side_px // 3, y + side_px // 4)
                   for k, (x, y) in enumerate(corners))
        (root / f"annotations/{name}.xml").write_text(XML_HEAD.format(name, side_px) + "".join(objects) + "</annotation>\n")
    (root / "train_val_test_split.csv").write_text("image_id,split\n" + "".join(f"{name},train\n" for name in names))


def dataset_config(root: Path) -> DatasetConfig:
    return DatasetConfig(format="welding_v2", root=str(root), images="images", annotations="annotations",
                         split_csv="train_val_test_split.csv", split=SplitConfig(make="never"))


# ---- the article's code, as printed, where `weldtrain.data.baselines` has it otherwise


def article_parse(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Section 4.2: boxes and class names of one XML."""
    boxes, labels = [], []
    for obj in ET.parse(path).getroot().findall("object"):
        bndbox = obj.find("bndbox")
        boxes.append([int(bndbox.find(tag).text) for tag in ("xmin", "ymin", "xmax", "ymax")])
        labels.append(obj.find("name").text)
    return np.array(boxes, dtype=np.float32), np.array(labels)


def article_collate(batch: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Section 3.4."""
    images = torch.stack([item[0] for item in batch])
    batch_boxes, batch_labels = [], []
    for i, (_, boxes, labels) in enumerate(batch):
        if len(boxes) > 0:
            batch_idx = torch.full((len(boxes), 1), i, dtype=torch.long)
            batch_boxes.append(torch.cat([batch_idx, boxes], dim=1))
            batch_labels.append(labels)
    if batch_boxes:
        return images, torch.cat(batch_boxes, dim=0), torch.cat(batch_labels, dim=0)
    return images, torch.empty(0, 5), torch.empty(0, dtype=torch.long)


def article_monitor(batches: Iterable, batch_times: list[float]) -> Iterator:
    """Section 4.4."""
    start_time = time.time()
    for batch in batches:
        batch_times.append(time.time() - start_time)
        yield batch
        start_time = time.time()


class ArticleChecked(ArticleDataset):
    """Section 4.2's test of what `imread` gave, in front."""

    def __getitem__(self, i: int):
        path = str(self.index.root / self.index.path(int(self.rows[i])))
        if cv2.imread(path) is None:
            raise FileNotFoundError(f"Image not found: {path}")
        return super().__getitem__(i)


def article_variant(dataset: Dataset, workers: int, *, persistent: bool = True, context: str | None = None) -> DataLoader:
    """`baselines.article_loader` with other settings of its workers."""
    with_workers = {"prefetch_factor": 2, "timeout": 60, "persistent_workers": persistent, "multiprocessing_context": context}
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, collate_fn=collate, drop_last=True,
                      **(with_workers if workers else {}))


# ---- measuring


def seconds_of(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def in_turn(acts: dict[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, list[float]]:
    """Seconds of each in each repeat."""
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(repeats):
        for name, act in acts.items():
            times[name].append(seconds_of(act))
    return times


def said(seconds: Sequence[float], unit: str = "s", per: int = 1) -> str:
    """The best and the worst, for one of `per`."""
    scale = {"s": 1, "ms": 1e3, "µs": 1e6}[unit] / per
    return f"{number(min(seconds) * scale)} {unit} ({number(max(seconds) * scale)})"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def rates_said(rates: Sequence[float]) -> str:
    return f"{number(max(rates))} ({number(min(rates))})"


def standstill(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds that `act` takes in another thread, and the longest for which this one does not go on meanwhile."""
    thread = threading.Thread(target=act)
    start = mark = time.perf_counter()
    longest, running = 0.0, True
    thread.start()
    while running:
        running = thread.is_alive()
        time.sleep(0.0005)
        now = time.perf_counter()
        longest, mark = max(longest, now - mark), now
    return mark - start, longest


def megabytes_of(act: Callable[[], object]) -> float:
    """What Python keeps for the result."""
    tracemalloc.start()
    try:
        result = act()
        size = tracemalloc.get_traced_memory()[0]
        del result
    finally:
        tracemalloc.stop()
    return size / 2**20


def ours(
    dataset: DetectionDataset, kind: str = "thread", workers: int | str = 2, device: torch.device = CPU, **more
) -> Loader:
    cfg = LoaderConfig(**{"batch_size": BATCH, "workers": kind, "num_workers": workers, "cache": "none"} | more)
    return training_loader(dataset, cfg, device, seed=0)


def error_of(act: Callable[[], object]) -> Exception | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            act()
        except Exception as error:  # whichever it is, is the question
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)  # which would keep a loader and its workers alive
    return None


def first_of(loader: Loader | DataLoader) -> Callable[[], object]:
    return lambda: next(iter(loader))


def described(error: Exception | None) -> str:
    """Its type and its last line, of which a worker's begins with the type."""
    if error is None:
        return "no error"
    line = str(error).strip().splitlines()[-1].removeprefix(f"{type(error).__name__}: ")
    return f"{type(error).__name__}: {line[:90].rstrip('.')}"


def digest(parts: Iterable[bytes]) -> str:
    total = hashlib.blake2b(digest_size=4)
    for part in parts:
        total.update(part)
    return total.hexdigest()


@functools.cache
def composed(*overrides: str) -> Config:
    import hydra

    config.register()
    with hydra.initialize_config_dir(str(config.CONF_DIR), version_base="1.3"):
        return validated(hydra.compose("config", list(overrides)), "/")


# ---- the claims, in the order of the article


def memory(ground: Ground) -> Row:
    def listed() -> list[list[dict]]:
        kept = []
        for name in ground.names:
            boxes, labels = article_parse(ground.xml(name))
            kept.append([{"bbox": [*map(float, box), *map(float, box)], "label": label}  # eight floats, as the article counts
                         for box, label in zip(boxes, labels.tolist())])
        return kept

    def paths() -> tuple[list[str], dict[str, str], dict[str, str]]:
        ids = [name[:1] + name[1:] for name in ground.names]  # strings of their own, which are counted as well
        return ids, {i: ground.xml(i) for i in ids}, {i: f"{ground.many}/images/{i}.jpg" for i in ids}

    dicts_mb, trees_mb = megabytes_of(listed), megabytes_of(lambda: [ET.parse(ground.xml(name)) for name in ground.names])
    paths_mb, index_mb = megabytes_of(paths), ground.index.file.stat().st_size / 2**20
    ids, by_name, _ = paths()
    folder = f"{ground.many}/annotations"
    times = in_turn({
        "join": lambda: [os.path.join(folder, f"{i}.xml") for i in ids],
        "format": lambda: [f"{folder}/{i}.xml" for i in ids],
        "look up": lambda: [by_name[i] for i in ids],
        "open": lambda: AnnotationIndex(ground.index.file),
    })
    ratio = min(times["join"]) / min(times["look up"])
    return Row(
        "2.1 Do not keep all parsed XML in memory; keep paths, made in advance",
        "1.2 GB for 12,843 files of 5.2 boxes; joining a path takes 3.8 times a lookup",
        f"{len(ids):,} files, {len(ground.index.boxes):,} boxes: {dicts_mb:.0f} MB as dicts of 8 floats a box, {trees_mb:.0f} MB "
        f"as whole XML trees; path dictionaries {paths_mb:.1f} MB. All paths joined {said(times['join'], 'ms')}, as f-strings "
        f"{said(times['format'], 'ms')}, looked up {said(times['look up'], 'ms')}: joining takes {ratio:.0f} times as long, "
        f"{1e6 * min(times['join']) / len(ids):.1f} µs a picture",
        f"index with every box: {index_mb:.2f} MB, mapped, shared by all workers; built in {ground.built_s:.1f} s, once; opened "
        f"in {said(times['open'], 'ms')}",
    )


def same_order(ground: Ground) -> Row:
    names = [f"plate_{i:03}" for i in range(300)]
    orders, listings = [], []
    for place, made in (("first", names), ("second", np.random.default_rng(1).permutation(names).tolist())):
        lay_out(ground.place / place, made, [1] * len(made), 64)
        index = open_index(dataset_config(ground.place / place), ground.place / f"cache of {place}")
        keys = Order(index.rows("train"), BATCH, shuffle=True).epochs(0, until=2)
        orders.append(digest(f"{epoch} {index.path(row)}\n".encode() for batch in keys for epoch, row, _ in batch))
        listings.append(os.listdir(ground.place / place / "images"))
    alike = "alike" if listings[0] == listings[1] else "different"
    in_order = "" if listings[0] == sorted(listings[0]) else "not "
    return Row(
        "2.1 The order of files must be deterministic",
        "`os.listdir` differs between servers",
        f"two folders of the same {len(names)} names, created in different orders on one file system: `os.listdir` is "
        f"{in_order}sorted, the two are {alike}. Two epochs of weldtrain's order, digest: {orders[0]} and {orders[1]}",
        "rows in path order; the order is a function of seed and epoch, a sample's pixels of seed, epoch and row",
    )


def decoders(ground: Ground) -> Row:
    files, threads = ground.jpegs[:16], max(2, ground.cores)
    large = f"{ground.place}/large.jpg"
    cv2.imwrite(large, np.tile(cv2.imread(files[0]), (4, 4, 1)))
    numbers = np.random.default_rng(0).random(400_000).tolist()

    def pillow(file: str) -> np.ndarray:
        return np.array(Image.open(file).convert("RGB"))

    def opencv(file: str) -> np.ndarray:
        return cv2.cvtColor(cv2.imread(file), cv2.COLOR_BGR2RGB)

    kinds: dict[str, Callable[[str], object]] = {
        "Pillow": pillow,
        "cv2": opencv,
        "weldtrain": lambda file: read_image(Path(file), grey=False),
        "Python": lambda file: sum(k & 7 for k in range(100_000)),
    }
    with ThreadPoolExecutor(threads) as pool:
        acts: dict[str, Callable[[], object]] = {}
        for name, kind in kinds.items():
            acts[name] = lambda kind=kind: [kind(file) for file in files]
            acts[f"{name}, threads"] = lambda kind=kind: list(pool.map(kind, files))
        times = in_turn(acts, 7)
    faster = {name: f"{min(times[name]) / min(times[f'{name}, threads']):.2f}" for name in kinds}
    ms = {name: said(times[name], "ms", len(files)) for name in kinds}
    stood = {}
    for name, act in (("Pillow", lambda: pillow(large)), ("cv2", lambda: opencv(large)), ("sort", lambda: sorted(numbers))):
        whole, longest = min((standstill(act) for _ in range(REPEATS)), key=lambda found: found[1])
        stood[name] = f"{1e3 * longest:.0f} of {1e3 * whole:.0f} ms"
    return Row(
        "2.2 Pillow's GIL makes workers queue; decode with cv2",
        "8 workers: Pillow 23 % slower than with 4, cv2 41 % faster",
        f"a JPEG of 1024² on one core: Pillow {ms['Pillow']}, cv2 {ms['cv2']}: {min(times['Pillow']) / min(times['cv2']):.2f} "
        "times as fast. Workers are processes, each with a GIL of its own, and decoding lets go of it: while a thread decodes "
        f"4096², another stands still for at most {stood['Pillow']} (Pillow), {stood['cv2']} (cv2), against {stood['sort']} of a "
        f"sort, which holds it; {threads} threads against one: Pillow {faster['Pillow']} times as fast, cv2 {faster['cv2']}, "
        f"pure Python {faster['Python']}",
        f"cv2, straight to RGB: {ms['weldtrain']}, {threads} threads {faster['weldtrain']} times as fast; cv2's own threads are "
        f"off ({cv2.getNumThreads()} in use)",
    )


class Given(Dataset):
    """The same picture over and over: all time is the way from worker to trainer."""

    def __init__(self, picture: torch.Tensor, count: int) -> None:
        self.picture, self.count = picture, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.picture


def sent_ms(picture: torch.Tensor, batches: int = 12) -> float:
    """Milliseconds per picture between arrivals of stacked batches from one worker process: the median."""
    arrivals = [time.perf_counter() for _ in DataLoader(Given(picture, BATCH * batches), BATCH, num_workers=1)]
    return 1e3 * float(np.median(np.diff(arrivals[3:]))) / BATCH  # the first lay ready


def tensors(ground: Ground) -> Row:
    image = Image.open(ground.jpegs[0]).convert("RGB")
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "torch.tensor": lambda: torch.tensor(np.array(image)).permute(2, 0, 1) / 255.0,
        "from_numpy": lambda: torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255.0,
        "uint8": lambda: torch.from_numpy(np.array(image)).permute(2, 0, 1),
    }
    times = in_turn(dict(ways), 15)
    ms = {name: said(values, "ms") for name, values in times.items()}
    mb = {name: f"{way().nbytes / 1e6:.1f} MB" for name, way in ways.items()}
    sent = {name: sent_ms(ways[name]().contiguous()) for name in ("from_numpy", "uint8")}
    return Row(
        "2.2 `torch.from_numpy` instead of a second copy",
        "saves 3 MB a picture of 1024²",
        f"a picture to floats: torch.tensor {ms['torch.tensor']}, from_numpy {ms['from_numpy']}: what counts are the "
        f"{mb['from_numpy']} that `.float()` and `/ 255` write each. Left as uint8: {ms['uint8']}, {mb['uint8']}. Stacked and "
        f"sent from a worker process: {sent['from_numpy']:.1f} ms a picture as floats, {sent['uint8']:.1f} ms as uint8",
        "uint8 until on the device: a quarter of the bytes between processes, pinned and over PCIe; normalised there",
    )


@functools.lru_cache(ARTICLE_CACHE)
def _kept(row: int) -> int:
    return row


class Cached(Dataset):
    """Whether the worker's cache held an item."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> int:
        before = _kept.cache_info().hits
        _kept(row)
        return _kept.cache_info().hits - before


def hits_pct(count: int, persistent: bool, epochs: int = 3) -> list[float]:
    """Of each epoch, with the article's loader: torch itself deals the batches to worker processes."""
    loader = DataLoader(Cached(count), ARTICLE_BATCH, shuffle=True, num_workers=ARTICLE_WORKERS, drop_last=True,
                        persistent_workers=persistent, prefetch_factor=2, generator=torch.Generator().manual_seed(0))
    return [100 * float(torch.cat(list(loader)).float().mean()) for _ in range(epochs)]


def forget(files: Iterable[str]) -> bool:
    """Asks the system to drop files from memory; False where it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)  # what is yet to be written is not dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return True


def lru_and_mmap(ground: Ground) -> Row:
    files = [ground.xml(name) for name in ground.names]
    lay_out(ground.place / "twelve", [f"t{i}" for i in range(200)], [OBJECTS_2_2] * 200, 128)
    twelve = [f"{ground.place}/twelve/annotations/t{i % 200}.xml" for i in range(len(files))]

    def mapped(file: str) -> None:
        with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as view:
            ET.parse(view)

    def each(parse: Callable[[str], object], files: list[str]) -> Callable[[], None]:
        def act() -> None:
            for file in files:  # keeping none: many trees would slow down the next
                parse(file)

        return act

    times = in_turn({"path": each(ET.parse, files), "mmap": each(mapped, files), "twelve": each(ET.parse, twelve),
                     "lxml": each(lambda file: etree.fromstring(Path(file).read_bytes()), files)}, 3)
    s = {name: said(values) for name, values in times.items()}
    cold = f", 5.2 objects from disk {seconds_of(each(ET.parse, files)):.1f} s" if forget(files) else ""
    lasting, ending = (", ".join(f"{p:.1f}" for p in hits_pct(len(files), persistent)) for persistent in (True, False))
    return Row(
        "2.2 `lru_cache(1000)` of parsed XML, read through mmap",
        "95 % hits; 12,000 parses take 187 s, mmap is 3.2 times as fast",
        f"{ARTICLE_WORKERS} workers that last, {len(files):,} files shuffled: {lasting} % hits in epochs 1, 2, 3; {ending} where "
        f"workers end with the epoch: none comes twice in an epoch. All parsed once: {s['path']}, through mmap {s['mmap']}, lxml "
        f"{s['lxml']}, with {OBJECTS_2_2} objects, as 2.2 has them, {s['twelve']}{cold}; mmap is "
        f"{min(times['path']) / min(times['mmap']):.2f} times as fast",
        f"no XML is read while training: the index holds it all ({ground.built_s:.1f} s to build, picture headers included)",
    )


def label_zero(ground: Ground) -> Row:
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    torch.manual_seed(0)
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=len(CLASSES)).train()
    box = torch.tensor([[40.0, 40, 140, 120]])
    proposals = box + torch.randn(8, 4)
    parts = []
    for label in (0, 1):
        target = {"boxes": box, "labels": torch.tensor([label])}
        labels = model.roi_heads.select_training_samples([proposals], [target])[2][0]
        loss = model([torch.rand(3, 320, 320)], [target])["loss_box_reg"].item()
        parts.append(f"labelled {label}: {int((labels > 0).sum())} of {len(labels)} are taught as a defect, box loss {loss:.3f}")
    dataset = ground.dataset()
    labels = dataset.labels_of(slice(None))
    return Row(
        "2.2, 4.2 Labels `{crack: 0, porosity: 1, …}`",
        "no word about the background",
        f"torchvision's Faster R-CNN, proposals on the box of one crack: {'; '.join(parts)}. No error, no warning",
        f"0 is the background, inside only: labels {labels.min()} to {labels.max()} for {', '.join(dataset.index.names)}",
    )


def _length(file: Path, share: tuple[int, int]) -> tuple[int, int]:
    """In a process of its own: pictures, and batches of a rank."""
    rows = AnnotationIndex(file).rows("train")
    return len(rows), len(Order(rows, ARTICLE_BATCH, shuffle=True, drop_last=True, share=share))


def lengths(ground: Ground) -> Row:
    ranks = 3
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(_length, [ground.index.file] * ranks, [(rank, ranks) for rank in range(ranks)]))
    rows = ground.index.rows("train")

    def batches(size: int, share: tuple[int, int]) -> list[set]:
        return [set(batch) for batch in Order(rows, size, shuffle=True, drop_last=True, share=share).batches(0)]

    together = [set().union(*parts) for parts in zip(*(batches(ARTICLE_BATCH, (rank, ranks)) for rank in range(ranks)))]
    equal = "equal to" if together == batches(ARTICLE_BATCH * ranks, (0, 1)) else "NOT"
    sizes = (900, 900, 450)
    samples = [len(DistributedSampler(range(size), ranks, rank)) for rank, size in enumerate(sizes)]
    return Row(
        "2.3 `__len__` is deterministic and pure, under DDP too",
        "else `RuntimeError: Expected all tensors to be on the same device`",
        f"pictures and batches of ranks 0, 1, 2 in spawned processes: {', '.join(f'{n:,} and {count}' for n, count in found)}; "
        f"their batches together {equal} those of one process with batch {ARTICLE_BATCH * ranks}. Lengths of "
        f"{', '.join(map(str, sizes))} give `DistributedSampler`s of {', '.join(map(str, samples))}: unequal, and no "
        "error about devices",
        "the length of the index's row array; every rank has the same number of batches",
    )


def worker_table(ground: Ground) -> Row:
    from weldtrain.engine.probes import read_rates, sequential_mb_s
    from weldtrain.engine.rates import measure, plain_rate

    dataset = ground.dataset()
    article = ArticleDataset(dataset.index, dataset.rows, LIGHT)
    device = ground.cuda or CPU
    counts = (0, 1, 2, 4)
    kinds = [("article", n) for n in counts] + [("process", n) for n in counts] + [("thread", n) for n in counts[1:]]
    rates: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    busy: dict[tuple[str, int], float] = {}
    for _ in range(2):
        for kind, n in kinds:
            if kind == "article":
                rates[kind, n].append(plain_rate(article_variant(article, n), device, RATE_S))
            else:
                rate = measure(ours(dataset, kind, n, device), device, RATE_S, ground.cores)
                rates[kind, n].append(rate.mean)
                busy[kind, n] = max(rate.cpu_pct, busy.get((kind, n), 0.0))

    def listed(kind: str) -> str:
        found = ", ".join(rates_said(rates[k, n]) for k, n in kinds if k == kind)
        cpu = ", ".join(f"{busy[k, n]:.0f}" for k, n in busy if k == kind)
        return f"{found}; CPU {cpu} %" if cpu else found

    disk, files = sequential_mb_s(ground.place), read_rates(dataset, dataset.rows[:64], ground.cores)
    bound = disk["read_mb_s"] * 1024 / files["file_kb"]
    unasked = ours(dataset, "auto", "auto").plan
    return Row(
        "3.1 Choose `num_workers` by measuring, storage bandwidth first",
        "0, 4, 8, 12 workers: 85, 210, 205, 180 images/s, at 4 limited by the disk; at most min(cores, MB/s ÷ MB a picture)",
        f"images/s with {', '.join(map(str, counts))} workers on {ground.cores} cores: the article's loader {listed('article')}; "
        f"weldtrain's processes {listed('process')}; its threads (1, 2, 4) {listed('thread')}. The disk reads "
        f"{disk['read_mb_s']:.0f} MB/s, {bound:.0f} such pictures a second: min({ground.cores}, {bound:.0f}) compares cores with "
        "pictures a second. The article's own 210 × 2.1 MB are 0.44 of its disk's 3.5 GB/s",
        "`task=doctor` makes this table for your data, names the limit and writes the tuned loader; `num_workers=auto` is "
        f"{unasked.num_workers} of kind {unasked.workers} here",
    )


def transfers(device: torch.device, nbytes: int, pin: bool) -> list[float]:
    """Seconds of copies of one batch to the device."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)

    def copy() -> None:
        host.to(device, non_blocking=pin)
        torch.cuda.synchronize(device)

    copy()
    return [seconds_of(copy) for _ in range(10)]


def pinning(ground: Ground) -> Row:
    sizes = {"floats of 1024²": ARTICLE_BATCH * 1024 * 1024 * 3 * 4, "weldtrain's": batch_bytes(ground.dataset(), ARTICLE_BATCH)}
    parts = []
    for what, nbytes in sizes.items():
        parts.append(f"{nbytes / 1e6:.0f} MB ({what})")
        if ground.cuda is not None:
            pageable, pinned = (said(transfers(ground.cuda, nbytes, pin), "ms") for pin in (False, True))
            parts[-1] += f", pageable {pageable}, pinned {pinned}"

    def reason(device: str, workers: int) -> str:
        notes = plan(LoaderConfig(num_workers=workers), torch.device(device), 802, sizes["weldtrain's"]).notes
        decision = next(note for note in notes if note.startswith("loader.pin_memory")).split(": ", 1)[1]
        return f"{device}, {workers} workers: {decision}"

    return Row(
        "3.2 `pin_memory`: a decision tree",
        "18.7 ms → 4.3 ms a transfer; never without workers",
        f"a batch of {ARTICLE_BATCH}: {'; '.join(parts)}. " + f"Transfers: {NO_CUDA}" * (ground.cuda is None),
        f"`auto` follows the tree and logs why: {reason('cpu', 4)}; {reason('cuda', 4)}; {reason('cuda', 0)}. `loader/h2d_ms` "
        "shows it",
    )


def gaps(loader: Loader | DataLoader, epochs: int = 4, step_s: float = 0.1) -> list[float]:
    """Seconds from the end of an epoch's last step to the next epoch's first batch. A step leaves the processor free."""
    found, ended = [], 0.0
    for epoch in range(epochs):
        for k, _ in enumerate(loader):
            if epoch and k == 0:
                found.append(time.perf_counter() - ended)
            time.sleep(step_s)
            ended = time.perf_counter()
    if isinstance(loader, Loader):
        loader.close()
    return found


def epoch_starts(ground: Ground) -> Row:
    dataset, usual = ground.dataset(), multiprocessing.get_start_method()
    dataset.rows = dataset.rows[: 2 * BATCH]
    article = ArticleDataset(dataset.index, dataset.rows, LIGHT)
    s = {name: said(gaps(loader()), "ms") for name, loader in {
        "usual": lambda: article_variant(article, 2, persistent=False, context=usual),
        "spawn": lambda: article_variant(article, 2, persistent=False, context="spawn"),
        "lasting": lambda: article_variant(article, 2),
        "ours ending": lambda: ours(dataset, "process", persistent_workers=False),
        "ours": lambda: ours(dataset, "process"),
        "threads": lambda: ours(dataset, "thread"),
    }.items()}
    return Row(
        "3.3 `persistent_workers`",
        "3.2 s → 0.4 s to an epoch's first batch",
        f"2 workers, steps of 100 ms, from last step to next epoch's first batch: the article's loader {s['usual']} where "
        f"workers are started by {usual}, {s['spawn']} by spawn, {s['lasting']} where they last; weldtrain's processes "
        f"{s['ours ending']} where they end, {s['ours']} where they last; its threads {s['threads']}",
        "on wherever workers exist, and they begin the next epoch while the last batches are trained on; `loader/epoch_start_s`",
    )


def empty_pictures(ground: Ground) -> Row:
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    from weldtrain.models.detector import build_detector

    dataset = ground.small("empty", (2, 0, 0, 3))

    def item(i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        boxes, labels = article_parse(f"{dataset.index.root}/annotations/empty{i}.xml")
        return torch.rand(3, 128, 128), torch.tensor(boxes, dtype=torch.float32), torch.zeros(len(labels), dtype=torch.long)

    mixed, none = article_collate([item(0), item(1)]), article_collate([item(1), item(2)])
    flipped = error_of(lambda: item(1)[1].numpy()[:, [0, 2]])
    torch.manual_seed(0)
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=5).train()
    as_target = error_of(lambda: model([item(1)[0]], [{"boxes": item(1)[1], "labels": item(1)[2]}]))
    as_five = error_of(lambda: model(list(mixed[0]), mixed[1]))
    batch, alone = dataset.fetch([(0, row, 0) for row in dataset.rows.tolist()]), dataset.fetch([(0, 1, 0)])
    detector = build_detector(TINY, len(CLASSES)).train()
    finite = all(math.isfinite(loss.item()) for part in (batch, alone) for loss in detector(part).values())
    return Row(
        "3.4 Collate for ragged boxes, safe for pictures without a defect, batch index first",
        "it is what Faster R-CNN takes",
        f"as said: {list(mixed[1].shape)} with and {list(none[1].shape)} without a defect; its `len(boxes) > 0` steps over the "
        f"boxes of shape {list(item(1)[1].shape)} that its parser makes of an XML without objects. They fail elsewhere: flipped, "
        f"{described(flipped)}; as torchvision's target, {described(as_target)}. And `[N,5]` is not what Faster R-CNN takes: "
        f"{described(as_five)}",
        f"`(0,4)` boxes: `boxes5()` {list(batch.boxes5().shape)} for {len(batch)} pictures, {list(alone.boxes5().shape)} for one "
        f"without a defect, every loss {'finite' if finite else 'NOT finite'}; `targets()` is what torchvision takes",
    )


def surroundings(ground: Ground) -> Row:
    start = time.perf_counter()
    facts = environment(ground.cuda or CPU, ground.pictures, ground.place)
    spent = time.perf_counter() - start
    wrong = "; ".join(f"{fact.name}, {fact.problem}" for fact in facts if fact.problem)
    told = "; ".join(f"{fact.name} {fact.value}" for fact in facts if fact.name.startswith(("torch", "GPU", "OpenCV")))
    return Row(
        "4.1 Environment without conda; check CUDA",
        "`torch.cuda.is_available()`",
        f"{torch.cuda.is_available()}. weldtrain's report, {len(facts)} facts in {1e3 * spent:.0f} ms: {told}; "
        f"wrong here: {wrong or 'nothing'}",
        "pip and venv only; `task=doctor` prints the report, each problem with its remedy",
    )


def whole_setting(ground: Ground) -> Row:
    import pandas as pd

    cfg = composed("experiment=welding_v2", f"dataset.root={ground.many}").loader
    dataset = DetectionDataset(ground.index, "train", ground.index.names, MODEL)
    loader = training_loader(dataset, replace(cfg, pin_memory="auto"), CPU, seed=0)
    image_id = pd.read_csv(io.StringIO("image_id,split\n001,train\n"))["image_id"][0]
    lay_out(ground.place / "numbered", ["001"], [1], 64)
    found = ground.dataset(ground.place / "numbered").index.path(0)
    names = ("batch_size", "num_workers", "prefetch_factor", "drop_last", "timeout_s", "persistent_workers", "pin_memory")
    return Row(
        "4.2, 4.3 The whole Dataset and DataLoader",
        "batch 16, 4 workers, prefetch 2, drop_last, timeout 60: 802 batches",
        f"{', '.join(f'{name} {getattr(cfg, name)}' for name in names)}: {len(loader)} batches of {len(dataset):,} pictures. The "
        f"article's `pd.read_csv` makes {image_id} of the id 001 in its own tree, and {image_id}.jpg is not there",
        f"`experiment=welding_v2`; names are text: {found}",
    )


def monitor(ground: Ground) -> Row:
    wait_s, step_s, batches = 0.02, 0.05, 21

    def slow() -> Iterator[int]:
        for i in range(batches):
            time.sleep(wait_s)
            yield i

    article: list[float] = []
    for _ in article_monitor(slow(), article):
        time.sleep(step_s)
    clock, stream = StepClock(CPU), slow()
    clock.start_epoch()
    for _ in range(batches):
        with clock.wait():
            next(stream)
        with clock.compute():
            time.sleep(step_s)
        clock.end_step(1)
    rates = clock.read()
    theirs = 1e3 * float(np.mean(article))
    counted = "does" if theirs > 1e3 * (wait_s + step_s / 2) else "does not"
    return Row(
        "4.4 A monitor every 100 batches: CPU, GPU, memory, batch time",
        "its 'GPU %' is `memoryUtil`, the share of memory in use",
        f"a loader of {1e3 * wait_s:.0f} ms a batch, a step of {1e3 * step_s:.0f} ms: the article's batch time is {theirs:.1f} "
        f"ms. Set anew after the `yield`, its clock {counted} count the step; of copying and computing it says nothing. "
        f"weldtrain: waiting {rates['loader/data_wait_ms']:.1f} ms, computing {rates['step/compute_ms']:.1f} ms, a step "
        f"{rates['step/total_ms']:.1f} ms",
        "waiting, copying and computing apart, by CUDA events that are read on log steps; GPU use and GPU memory are two figures",
    )


def gpu_use_pct(device: torch.device, dataset: DetectionDataset, loader: Loader | DataLoader, seconds: float = 4.0) -> float:
    """While Faster R-CNN trains once for each batch that arrives, on one that stays on the device."""
    from weldtrain.engine.bench import idle_step
    from weldtrain.engine.device import wait_for
    from weldtrain.engine.rates import trained
    from weldtrain.models.detector import build_detector

    model = build_detector(MODEL, len(CLASSES)).to(device, memory_format=torch.channels_last)
    step, counters = idle_step(model, OptimizerConfig(), device, torch.bfloat16), MachineCounters(device)
    resident = dataset.fetch([(0, row, 0) for row in dataset.rows[:BATCH].tolist()]).to(device)
    for _ in range(3):
        trained(step, resident)
    seen, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        for batch in loader:
            (batch if isinstance(loader, Loader) else batch[0]).to(device, non_blocking=True)
            trained(step, resident)
            wait_for(device)
            seen.append(counters.read().get("system/gpu_util_pct", 0.0))
            if time.perf_counter() > until:
                break
    return float(np.mean(seen))


def before_and_after(ground: Ground) -> Row:
    from weldtrain.engine.rates import measure, plain_rate

    device, workers = ground.cuda or CPU, max(2, ground.cores)
    dataset, cached = ground.dataset(), ground.dataset()
    naive, article = (kind(dataset.index, dataset.rows, LIGHT) for kind in (NaiveDataset, ArticleDataset))
    cached.cache, _ = open_cache(LoaderConfig(cache="disk"), cached.index, cached.sizes, cached.window, ground.place / "cache",
                                 rows=cached.rows, passes=9, workers=workers, decoded=cached.decoded)
    for row in cached.rows.tolist():
        cached.cache.put(row, cached.decoded(row))
    loaders: dict[str, Callable[[], Loader | DataLoader]] = {
        "naive": lambda: naive_loader(naive, BATCH),
        "the article's": lambda: article_loader(article, BATCH, min(workers, ARTICLE_WORKERS), pin=ground.cuda is not None),
        "weldtrain, decoding": lambda: ours(dataset, "thread", workers, device),
        "weldtrain, cached": lambda: ours(cached, "thread", workers, device),
    }

    def rate(loader: Loader | DataLoader) -> float:
        if isinstance(loader, Loader):
            return measure(loader, device, RATE_S, ground.cores).mean
        return plain_rate(loader, device, RATE_S)

    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(ROUNDS):
        for name, made in loaders.items():
            rates[name].append(rate(made()))
    parts = []
    for name, values in rates.items():
        ratio = np.median(np.divide(values, rates["the article's"]))  # of each round, in which both met the same machine
        parts.append(f"{name} {rates_said(values)}" + f", {ratio:.2g} times the article's" * (name != "the article's"))
    gpu = f"GPU use: {NO_CUDA}"
    if ground.cuda is not None:
        gpu = "GPU use, ResNet-50: " + ", ".join(
            f"{name} {gpu_use_pct(device, dataset, made()):.0f} %" for name, made in loaders.items())
    return Row(
        "4.4 Before and after: epoch, GPU use, CPU peak",
        "24 m 12 s → 21 m 08 s (1.15 times); GPU 75 → 87 %",
        f"images/s of the loader alone, {workers} workers: {'; '.join(parts)}. {gpu}",
        "`task=doctor` prints it for your data and model: naive, the article's and the tuned loader, same machine, one run",
    )


def damaged(ground: Ground) -> Row:
    dataset = ground.small("damaged")
    file = dataset.index.root / dataset.index.path(3)
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole[: len(whole) // 2])  # after the index was built, which finds it too
    parts, texts = [], set()
    for mode, kind, workers in (("0 workers", "process", 0), ("2 threads", "thread", 2), ("2 processes", "process", 2)):
        with contextlib.closing(ours(dataset, kind, workers, shuffle=False, batch_size=4)) as loader:
            start = time.perf_counter()
            texts.add(str(error_of(lambda loader=loader: next(iter(loader)))))
            parts.append(f"{mode} after {1e3 * (time.perf_counter() - start):.0f} ms")
    text = " AND ".join(sorted(texts)).replace(str(dataset.index.root), "…")
    checked = ArticleChecked(dataset.index, dataset.rows)
    cut = error_of(lambda: list(article_variant(checked, 2, persistent=False)))
    file.unlink()
    gone = error_of(lambda: list(article_variant(checked, 2, persistent=False)))
    named = "that names the file" if file.name in str(gone) else "that does not name the file"
    pictures = ground.dataset()
    start = time.perf_counter()
    looked = sum(look.error is None for look in audit.look_at_all(pictures.index, pictures.window))
    spent = time.perf_counter() - start
    return Row(
        "5.1 BrokenPipe: a worker died; find the picture",
        "the trainer sees nothing but BrokenPipe; `num_workers=0` to find the line",
        f"torch's loader, 2 workers, a picture missing: {type(gone).__name__} {named}, with the worker's traceback. Half a JPEG, "
        "with the article's `imread(…) is None`: "
        f"{'no error, it trains on what imread makes up' if cut is None else described(cut)}",
        f"half a JPEG: `{text}`, from {', '.join(parts)}. {killed_worker(ground)}. `task=check` decodes every picture: {looked} "
        f"in {spent:.1f} s",
    )


def killed_worker(ground: Ground) -> str:
    """What is said of a worker that was killed while it read a picture, here a pipe that never gives anything."""
    if not hasattr(os, "mkfifo"):
        return "A killed worker: not tried here"
    dataset = ground.small("killed")
    file = dataset.index.root / dataset.index.path(5)
    file.unlink()
    os.mkfifo(file)
    with contextlib.closing(ours(dataset, "process", 2, shuffle=False, batch_size=2)) as loader:
        batches, until = iter(loader), time.perf_counter() + 30
        next(batches)
        while 5 not in dataset.reading[:, 1] and time.perf_counter() < until:
            time.sleep(0.01)
        pid = int(dataset.reading[dataset.reading[:, 1] == 5, 0][0])
        os.kill(pid, signal.SIGKILL)
        error = error_of(lambda: list(batches))
    return f"A killed worker: `{str(error).replace(str(pid), '…')}`"


class TouchesCuda(Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> float:
        return float(torch.ones(1, device="cuda"))


def start_methods(ground: Ground) -> Row:
    dataset = ground.small("started", (2,) * 16)
    cuda = NO_CUDA
    if ground.cuda is not None:
        torch.ones(1, device=ground.cuda)
        touching = DataLoader(TouchesCuda(), num_workers=1, multiprocessing_context="fork")
        cuda = f"CUDA was in use here before; a forked worker that touches it: {described(error_of(lambda: list(touching)))}"

    def epoch(kind: str, workers: int, context: str | None = None) -> str:
        with contextlib.closing(ours(dataset, kind, workers, batch_size=4, multiprocessing_context=context)) as loader:
            return digest(batch.memory.numpy().tobytes() for batch in loader)

    truth = epoch("process", 0)
    parts = []
    for kind, method in (("thread", None), *(("process", method) for method in torch.multiprocessing.get_all_start_methods())):
        start = time.perf_counter()
        same = "equal" if epoch(kind, 2, method) == truth else "DIFFERENT"
        parts.append(f"{method or 'threads'} {same} ({time.perf_counter() - start:.1f} s)")
    return Row(
        "5.2 CUDA's context is lost after fork; `worker_init_fn`",
        "disable CUDA in the workers",
        f"the bytes of an epoch with 2 workers, against those of 0 workers, and its time: {', '.join(parts)}. {cuda}",
        "workers hand over host memory and see no device; `loader.multiprocessing_context` may be any",
    )


CLAIMS: list[Callable[[Ground], Row]] = [
    memory, same_order, decoders, tensors, lru_and_mmap, label_zero, lengths, worker_table, pinning, epoch_starts, empty_pictures,
    surroundings, whole_setting, monitor, before_and_after, damaged, start_methods,
]


def others_s() -> float:
    """Processor seconds of everything but this process and those it has started and ended."""
    machine = psutil.cpu_times()
    return machine.user + machine.system + getattr(machine, "nice", 0.0) - sum(os.times()[:4])


def table(rows: Sequence[Row]) -> str:
    lines = [("the article says", "its figure", "measured here", "weldtrain"), ("---",) * 4, *rows]
    return "\n".join("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=192, help="JPEGs of 1024x1024 for whatever decodes, at least 32")
    parser.add_argument("--xml", type=int, default=12843, help="annotation files")
    parser.add_argument("--only", nargs="*", default=[], help="claims by the start of their functions' names")
    args = parser.parse_args()
    if args.pictures < 32:
        parser.error("--pictures: at least 32")
    chosen = [claim for claim in CLAIMS if not args.only or claim.__name__.startswith(tuple(args.only))]
    begun, others, rows = time.perf_counter(), others_s(), []
    with tempfile.TemporaryDirectory(prefix="weldtrain-claims-") as folder:
        ground = Ground.prepared(Path(folder), args.xml, args.pictures)
        print(f"{time.perf_counter() - begun:6.1f} s  data made", file=sys.stderr, flush=True)
        for claim in chosen:
            rows.append(claim(ground))
            print(f"{time.perf_counter() - begun:6.1f} s  {claim.__name__}", file=sys.stderr, flush=True)
    spent, cores = time.perf_counter() - begun, psutil.cpu_count() or 1
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else NO_CUDA
    others_pct = max(0.0, 100 * (others_s() - others) / spent / cores)
    print(f"`python scripts/article_claims.py --pictures {args.pictures} --xml {args.xml}`: {processor()}, {usable_cores()} "
          f"cores, {gpu}, torch {torch.__version__}; {spent:.0f} s, in which other programs took {others_pct:.0f} % of the "
          "processor. Times and rates are the best of several, in brackets the worst.\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
