"""What a data set is worth before anything is trained: damaged pictures, pictures in two splits, and how many pixels of
each defect reach the detector.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import cv2
import numpy as np

from weldtrain.config import Config, ModelConfig, nearest
from weldtrain.data.images import Window
from weldtrain.data.index import AnnotationIndex
from weldtrain.errors import PictureError, one_line
from weldtrain.formats.record import ERROR, NOTE, Finding
from weldtrain.formats.splits import source_of
from weldtrain.telemetry.machine import usable_cores

THUMB_PX, DETAIL_PX = 32, 128
# Whether two pictures may be the same is asked of thumbnails; whether they are, of finer details, since all pictures of
# one set-up share their layout. Seen: copies correlate by 0.99, frames that follow each other in a film of a weld by 0.58
# and 0.72, separate pictures of one set-up by up to 0.36.
TWIN_BITS = 12
TWIN_CORRELATION = 0.9
TWIN_DETAIL = 0.5
SAME_DETAIL = 0.9
_FLAT = 0.5  # grey levels of standard deviation: below it a thumbnail shows noise
_HASHED, _CANDIDATES = 8, 3  # for each picture, of which thumbnails and of which details are compared
_TOGETHER = 64  # pictures decoded before their decoders' complaints are looked at
_BLOCK = 2**21  # pairs of hashes compared at once
_COMMON_FROM, _COMMON_OF = 20, 200  # pictures from which on, and of how many, the common part is taken

# Two cells of the finest feature map: what is smaller leaves hardly a trace.
_FINEST_STRIDE_PX = {"resnet": 4, "mobilenet": 32}
SMALL_SHARE = 0.05  # of a class's boxes may be below that before it is worth a word
_ANCHOR_IOU = 0.3  # torchvision's limit, below which an anchor is background


class Twin(NamedTuple):
    """Two pictures that are the same or nearly so: rows of the index, and the correlation of their details."""

    row: int
    other: int
    correlation: float


class Survival(NamedTuple):
    """How large a class's boxes are on the device: `sizes_px` float [n], the root of the area at the model's scale."""

    name: str
    sizes_px: np.ndarray
    limit_px: float
    below: float  # share of boxes smaller than the limit
    unanchored: float  # share that meets no anchor's shape with IoU 0.3
    advice: str  # for the small ones, "" where there is no need


class Look(NamedTuple):
    """What reading a picture whole showed: a grey thumbnail uint8 [32,32] or the error; and what its decoder complained of."""

    row: int
    thumb: np.ndarray | None
    error: PictureError | None
    complaint: str = ""


def look_at_all(index: AnnotationIndex, window: Window) -> Iterator[Look]:
    """Decodes every picture, in parallel."""
    def look(row: int) -> Look:
        try:
            return Look(row, thumbnail(index, row, window, THUMB_PX), None)
        except PictureError as error:
            return Look(row, None, error)

    # OpenCV decodes without holding the interpreter.
    with ThreadPoolExecutor(usable_cores()) as pool, _complaints() as complaint:
        for start in range(0, len(index), _TOGETHER):
            looks = list(pool.map(look, range(start, min(start + _TOGETHER, len(index)))))
            if complaint():  # whose, only one at a time can tell
                looks = [look(one.row)._replace(complaint=complaint()) for one in looks]
            yield from looks


@contextlib.contextmanager
def _complaints() -> Iterator[Callable[[], str]]:
    """Gives what decoders have printed on standard error since it was last asked for: libjpeg, libpng and libtiff go on
    after many a damage, and say so there alone. What Python prints still reaches the screen."""
    shown, kept = sys.stderr, os.dup(2)
    shown.flush()
    with tempfile.TemporaryFile(buffering=0) as file, os.fdopen(os.dup(2), "w", errors="backslashreplace") as screen:
        def complaint() -> str:
            file.seek(0)
            lines = file.read(4096).decode("utf-8", "replace").splitlines()
            file.seek(0)
            file.truncate()
            # Without OpenCV's mark, which holds the time, and libpng's words on colour profiles, which harm nothing.
            lines = [re.sub(r"^\[[^]]*\]\s*", "", line) for line in lines if "iCCP" not in line and "sRGB" not in line]
            return one_line(" ".join(lines[:1]))[:160]

        os.dup2(file.fileno(), 2)
        sys.stderr = screen
        try:
            yield complaint
        finally:
            sys.stderr = shown
            os.dup2(kept, 2)
            os.close(kept)


def thumbnail(index: AnnotationIndex, row: int, window: Window, side_px: int) -> np.ndarray:
    """Grey, uint8 [side,side]. Raises PictureError."""
    small = cv2.resize(index.picture(row, window), (side_px, side_px), interpolation=cv2.INTER_AREA)
    return small if small.ndim == 2 else cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)


def twins_across(thumbs: np.ndarray, index: AnnotationIndex, detail: Callable[[int], np.ndarray]) -> list[Twin]:
    """For each picture of a split its nearest twin in another, upright, turned or mirrored: of val and test pictures in
    train, else of those of the smaller split in the larger.

    thumbs uint8 [n,32,32]; `detail` gives the thumbnail uint8 [128,128] of a row. What all pictures of the set have in
    common (a fixture, a burned-in text) is taken off; then by the signs of low frequencies (a perceptual hash), the
    correlation of the thumbnails, and the correlation of aligned details.
    """
    ids = index.split_ids
    order = sorted(range(len(index.splits)), key=lambda s: (index.splits[s] == "train", int((ids == s).sum()), s))
    search = _Search(thumbs, detail)
    best: dict[int, Twin] = {}
    for a, b in itertools.combinations(order, 2):
        for twin in search.twins(np.flatnonzero(ids == a), np.flatnonzero(ids == b), 8, TWIN_DETAIL):
            if twin.row not in best or best[twin.row].correlation < twin.correlation:
                best[twin.row] = twin
    return sorted(best.values(), key=lambda t: (-round(t.correlation, 2), t.row))


def twins_within(thumbs: np.ndarray, index: AnnotationIndex, detail: Callable[[int], np.ndarray]) -> list[Twin]:
    """Pictures that are the same, upright, as an earlier one of their split."""
    search = _Search(thumbs, detail)
    found = []
    for split in range(len(index.splits)):
        rows = np.flatnonzero(index.split_ids == split)
        found += search.twins(rows, rows, 1, SAME_DETAIL, earlier=True)
    return found


def sources_across(paths: Sequence[str], splits: Sequence[str]) -> dict[str, dict[str, list[int]]]:
    """Name of a film or of a copied picture -> split -> rows, for those whose frames or copies lie in several splits."""
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (path, split) in enumerate(zip(paths, splits)):
        groups[source_of(path)][split].append(row)
    return {name: dict(by_split) for name, by_split in sorted(groups.items()) if len(by_split) > 1}


def label_findings(index: AnnotationIndex, cfg: Config) -> list[Finding]:
    """Classes that are unknown, alike, unused, or absent where they are needed; splits that are needed and empty or too
    small; coordinates that seem to count from 1."""
    findings = []
    made = any(f.kind == "split-made" for f in index.findings)
    anew = "choose another dataset.split.seed, or give dataset.split_csv" if made else \
        "dataset.split.make=always spreads each class over the splits"
    counted = ~index.ignored(slice(None))
    counts = {split: np.bincount(index.name_ids[index.boxes_in(split) & counted], minlength=len(index.names))
              for split in index.splits}
    wanted = cfg.dataset.classes
    for name_id, name in enumerate(index.names):
        box = int(np.flatnonzero(index.name_ids == name_id)[0])
        total = int((index.name_ids == name_id).sum())
        first = index.path(index.row_of(box)), 0
        if wanted is not None and name not in wanted:
            near = nearest(name, wanted)
            findings.append(Finding(ERROR, "class-unknown", *first, f"class '{name}' ({total} boxes) is not in dataset.classes",
                                    f"did you mean '{near}'?" if near else "add it there, or set dataset.classes=null"))
        for near in (n for n in index.names[:name_id] if _plain(n) == _plain(name)):
            findings.append(Finding(NOTE, "class-alike", *first, f"class '{name}' ({total} boxes) differs from '{near}' in "
                                    "spelling alone", "one class or two?"))
        for split in dict.fromkeys(("train", cfg.evaluate.split)):
            if split in counts and not counts[split][name_id]:
                why = "it cannot be learned" if split == "train" else "its AP cannot be told"
                findings.append(Finding(NOTE, "class-absent", "", 0,
                                        f"class '{name}' ({total} boxes) has none in {split}: {why}", anew))
    for number, name in enumerate(index.classes if wanted is None else wanted):
        if name not in index.names:
            suspect = number == 0 and index.format == "yolo" and wanted is None
            hint = " (number 0 never occurs: do the numbers count from 1?)" if suspect else ""
            findings.append(Finding(NOTE, "class-unused", "", 0, f"class '{name}' has no boxes{hint}",
                                    "a misspelled or forgotten class?"))
    if index.format != "yolo" and _counts_from_one(index):
        findings.append(Finding(NOTE, "coordinates-from-1", "", 0, "no box begins at 0, all numbers are whole and some boxes "
                                "end at the edge: is the first pixel 1?", "if so, set dataset.one_based=true"))
    if not counted.any():
        findings.append(Finding(ERROR, "nothing-to-learn", "", 0, "no picture has a box that counts",
                                "a detector needs defects to learn from"))
    training = int((index.split_ids == index.splits.index("train")).sum()) if "train" in index.splits else 0
    if cfg.loader.batch_size != "auto" and 0 < training < cfg.loader.batch_size and cfg.loader.drop_last:
        findings.append(Finding(NOTE, "train-small", "", 0, f"{training} training pictures do not fill one batch of "
                                f"{cfg.loader.batch_size}: training would refuse", f"set loader.batch_size={training}, or lower"))
    for split in dict.fromkeys(("train", cfg.evaluate.split)):
        if split not in index.splits:
            there = ", ".join(index.splits) or "none"
            findings.append(Finding(ERROR, "split-empty", "", 0, f"no picture in split '{split}'; the splits are {there}",
                                    "too few pictures, or too few groups, to make one: set dataset.split.group=null, or give "
                                    "dataset.split_csv" if made else "name it in the split file, or set dataset.split.make"))
    return findings


def leak_shares(index: AnnotationIndex, across: Sequence[Twin]) -> list[str]:
    """How much of each split is known from a larger one, in words."""
    split = index.split_names()
    of = Counter(split)
    pairs = Counter((split[t.row], split[t.other]) for t in across)
    return [f"{n} of {of[a]} {a} pictures ({n / of[a]:.0%}) are the same or nearly the same as one in {b}"
            for (a, b), n in sorted(pairs.items())]


def leak_findings(index: AnnotationIndex, across: Sequence[Twin], within: Sequence[Twin],
                  sources: dict[str, dict[str, list[int]]], level: str) -> list[Finding]:
    """What is shared between splits, at `level`; what stands twice in one split is a note."""
    split = index.split_names()
    findings = [Finding(level, "leak-twin", index.path(t.row), 0,
                        f"{split[t.row]} picture is nearly the same as {index.path(t.other)} in {split[t.other]} "
                        f"(details correlate by {t.correlation:.2f})", "move one of them, or delete it") for t in across]
    findings += [Finding(NOTE, "picture-twice", index.path(t.row), 0, f"is the same picture as {index.path(t.other)}",
                         "delete one") for t in within]
    for name, by_split in sources.items():
        where = ", ".join(f"{len(rows)} in {s}" for s, rows in sorted(by_split.items()))
        first = next(iter(by_split.values()))[0]
        findings.append(Finding(level, "leak-source", index.path(first), 0,
                                f"pictures of one source '{name}' lie in several splits: {where}",
                                "dataset.split.make=always splits anew and dataset.split.group=auto keeps each source together"))
    return findings


def survival_findings(survived: Sequence[Survival], model: ModelConfig) -> list[Finding]:
    """Classes of which a part will hardly be seen."""
    findings = []
    anchors = f"anchors are {_listed(model.anchor_sizes)} px with ratios {_listed(model.anchor_ratios)}"
    for s in survived:
        if s.advice:
            count = len(s.sizes_px)
            findings.append(Finding(NOTE, "boxes-small", "", 0, f"{round(s.below * count)} of {count} boxes of {s.name} "
                                    f"({s.below:.0%}) are below {s.limit_px:g} px after resizing to model.min_size="
                                    f"{model.min_size}, model.max_size={model.max_size}", s.advice))
        if s.unanchored > SMALL_SHARE:
            low, high = np.quantile(s.sizes_px, (0.05, 0.95))
            findings.append(Finding(NOTE, "boxes-no-anchor", "", 0, f"{s.unanchored:.0%} of {s.name} has a shape that no anchor "
                                    f"is near to: {anchors}, most boxes at the model's scale {low:.0f} to {high:.0f} px",
                                    "set model.anchor_sizes for their size, or model.anchor_ratios for height over width"))
    return findings


def limit_px(model: ModelConfig) -> float:
    """The size below which a box leaves hardly a trace."""
    return 2.0 * next(px for name, px in _FINEST_STRIDE_PX.items() if model.backbone.startswith(name))


def survival(index: AnnotationIndex, model: ModelConfig) -> list[Survival]:
    """How large each class's boxes are at the model's scale, against what its feature map and anchors can hold."""
    scale = (index.target_sizes(model.min_size, model.max_size) / index.sizes).mean(1)
    per_box = np.repeat(scale, np.diff(index.box_offsets))
    extents = (index.boxes[:, 2:] - index.boxes[:, :2]) * per_box[:, None]
    limit = limit_px(model)
    ignored = index.ignored(slice(None))
    result = []
    for name_id, name in enumerate(index.names):
        mine = (index.name_ids == name_id) & ~ignored
        if mine.any():
            sizes = np.sqrt(extents[mine].prod(1))
            below = float((sizes < limit).mean())
            advice = _advice(sizes, per_box[mine], limit, model) if below > SMALL_SHARE else ""
            unanchored = float((_best_shape_iou(extents[mine], model) < _ANCHOR_IOU).mean())
            result.append(Survival(name, sizes, limit, below, unanchored, advice))
    return result


def _advice(sizes: np.ndarray, scale: np.ndarray, limit: float, model: ModelConfig) -> str:
    """What to set so that no more than SMALL_SHARE of these sizes stay below the limit."""
    factor = limit / max(float(np.quantile(sizes, SMALL_SHARE)), 1e-3)
    min_size, max_size = (math.ceil(side * factor / 10) * 10 for side in (model.min_size, model.max_size))
    tile = int(model.min_size / (float(np.median(scale)) * factor))
    raised = f"raise model.min_size to {min_size} and model.max_size to {max_size}"
    return f"{raised}, or set model.tiles={tile}" if tile >= 64 else f"{raised}, or take sharper pictures"


def _counts_from_one(index: AnnotationIndex) -> bool:
    """Whether the boxes look like VOC's own devkit wrote them: from 1 to the picture's size."""
    boxes = index.boxes
    size = np.repeat(index.sizes, np.diff(index.box_offsets), axis=0)
    at_edge = (boxes[:, 2:] == size).sum()
    return at_edge >= 10 and boxes[:, :2].min() == 1 and bool((boxes == np.rint(boxes)).all())


def _plain(name: str) -> str:
    """A class name without what people write differently: letter case, blanks, hyphens, a plural s."""
    return re.sub(r"[\W_]+", "", name.casefold()).removesuffix("s")


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{v:g}" for v in values)


def _best_shape_iou(extents: np.ndarray, model: ModelConfig) -> np.ndarray:
    """IoU of boxes [n,2] with the anchor whose shape is nearest, both at one centre."""
    size, ratio = (a.ravel() for a in np.meshgrid(model.anchor_sizes, np.sqrt(model.anchor_ratios)))
    best = np.zeros(len(extents))
    for width, height in zip(size / ratio, size * ratio):
        shared = np.minimum(extents[:, 0], width) * np.minimum(extents[:, 1], height)
        best = np.maximum(best, shared / (extents.prod(1) + width * height - shared))
    return best


class _Search:
    """Looks for twins among pictures, all compared after what they have in common is taken off."""

    def __init__(self, thumbs: np.ndarray, detail: Callable[[int], np.ndarray]) -> None:
        self.thumbs = thumbs.astype(np.float32)
        self.clear = self.thumbs.std(axis=(1, 2)) > _FLAT
        self.detail, self.common = detail, np.zeros((DETAIL_PX, DETAIL_PX), np.float32)
        rows = np.flatnonzero(self.clear)
        if len(rows) >= _COMMON_FROM:
            self.thumbs -= self.thumbs[rows].mean(0)
            some = rows[np.unique(np.linspace(0, len(rows) - 1, _COMMON_OF).astype(int))]
            self.common = np.mean([self.detail(int(row)) for row in some], axis=0, dtype=np.float32)

    def twins(self, rows: np.ndarray, others: np.ndarray, turns: int, at_least: float, earlier: bool = False) -> list[Twin]:
        """For each of `rows` the most similar of `others`, or of the `earlier` ones among them."""
        rows, others = rows[self.clear[rows]], others[self.clear[others]]
        if not len(rows) or not len(others):
            return []
        hashes = _hash(self.thumbs[others])
        step = max(1, _BLOCK // len(others))
        found = []  # row, other, turn, correlation
        for turn, start in itertools.product(range(turns), range(0, len(rows), step)):
            some = rows[start : start + step]
            turned = _turned(self.thumbs[some], turn)
            agree = _hash(turned) @ hashes.T
            if earlier:
                agree[others >= some[:, None]] = -np.inf
            # A bounded number for each, since in a set where all look alike all would be candidates.
            likeliest = np.argpartition(-agree, min(_HASHED, len(others)) - 1, axis=1)[:, :_HASHED]
            i, k = np.nonzero(np.take_along_axis(agree, likeliest, 1) >= hashes.shape[1] - 2 * TWIN_BITS)
            j = likeliest[i, k]
            similar = _correlation(turned[i], self.thumbs[others[j]])
            keep = similar >= TWIN_CORRELATION
            found += zip(some[i[keep]].tolist(), others[j[keep]].tolist(), itertools.repeat(turn), similar[keep].tolist())
        twins = []
        found.sort(key=lambda f: (f[0], -f[3]))
        for row, candidates in itertools.groupby(found, key=lambda f: f[0]):
            likely = [Twin(row, other, self._likeness(row, other, turn))
                      for _, other, turn, _ in itertools.islice(candidates, _CANDIDATES)]
            best = max(likely, key=lambda t: t.correlation)
            if best.correlation >= at_least:
                twins.append(best)
        return twins

    def _likeness(self, row: int, other: int, turn: int) -> float:
        return _detail_correlation(_turned(self.detail(row) - self.common, turn), self.detail(other) - self.common)


def _turned(pictures: np.ndarray, turn: int) -> np.ndarray:
    """Pictures [...,H,W] in one of the eight ways in which a square can be laid down."""
    turned = np.rot90(pictures, turn % 4, axes=(-2, -1))
    return turned[..., ::-1] if turn >= 4 else turned


def _detail_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's, of what is finer than a blur of 2 px in two thumbnails, at the shift of up to an eighth that fits best."""
    pair = (np.ascontiguousarray(p, np.float32) for p in (a, b))
    fine = [d - d.mean() for d in (p - cv2.GaussianBlur(p, (0, 0), 2) for p in pair)]
    product = np.fft.ifft2(np.fft.fft2(fine[0]) * np.conj(np.fft.fft2(fine[1]))).real
    reach = len(a) // 8
    product = np.roll(product, (reach, reach), axis=(0, 1))[: 2 * reach + 1, : 2 * reach + 1]
    return float(product.max() / max(np.sqrt((fine[0] ** 2).sum() * (fine[1] ** 2).sum()), 1e-6))


def _hash(thumbs: np.ndarray) -> np.ndarray:
    """float32 [n,63] of -1 and 1: whether each of the lowest 8x8 frequencies but the mean is above their median."""
    cosine = np.cos(np.pi / THUMB_PX * np.outer(np.arange(8), np.arange(THUMB_PX) + 0.5)).astype(np.float32)
    low = np.einsum("uy,nyx,vx->nuv", cosine, thumbs, cosine, optimize=True).reshape(len(thumbs), -1)[:, 1:]
    return np.where(low > np.median(low, axis=1, keepdims=True), np.float32(1), np.float32(-1))


def _correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Pearson's, of thumbnails float32 [n,32,32] in pairs."""
    a, b = (t.reshape(-1, THUMB_PX**2) for t in (a, b))
    a, b = (t - t.mean(1, keepdims=True) for t in (a, b))
    return (a * b).mean(1) / np.maximum(a.std(1) * b.std(1), 1e-6)
