"""The embedded default data set: drawn radiographs of butt welds with four classes of indication.

Grey values follow a log-converted digital radiograph shown as a positive: linear in metal thickness, so the
reinforcement of the bead, lead and wires are bright and voids are dark. Same seed, same bytes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import cv2
import numpy as np

CLASSES = ("crack", "incomplete_fusion", "porosity", "slag")
VERSION = 1  # of the pictures: raised with any change to them, so that an older set on disk is not taken for this one

_SPLIT_NUMBERS = {"train": 0, "val": 1, "test": 2}
_CLEAN_SHARE = 0.2
_BOX_LEVEL = 0.3  # of a mask's peak: what still belongs to the indication
_OVERSAMPLE = 4  # strokes and outlines are drawn this much finer and area-averaged
# Peak contrast over the local noise (CNR, ISO 17636-2). Thin and small indications need more of it to be seen.
_CNR = {"crack": (7.0, 12.0), "incomplete_fusion": (5.0, 9.0), "porosity": (8.0, 13.0), "slag": (4.5, 8.0)}

Rng = np.random.Generator
Patch = tuple[np.ndarray, int, int]  # attenuation float32 [h, w] >= 0, column and row of its corner in the picture


def _rotation(angle: float) -> np.ndarray:
    """Rows are the turned axes: points [n, 2] @ matrix turns them by `angle` radians."""
    c, n = math.cos(angle), math.sin(angle)
    return np.array([[c, n], [-n, c]])


class _Seam:
    """Seam-aligned coordinates in pixels: s runs along the centreline, t across it (0 on the centreline)."""

    def __init__(self, rng: Rng, size: int) -> None:
        self.size, self.k = size, size / 256  # lengths below are written for 256 px and multiplied by k
        self.centre = size * (0.5 + rng.uniform(-0.06, 0.06, 2))
        self.axes = _rotation(math.radians(rng.uniform(-14, 14) + (90 if rng.random() < 0.2 else 0)))
        self.half = size * rng.uniform(0.13, 0.24)  # half width of the bead
        bend, wave, phase = size * rng.uniform(0, 0.013), size * rng.uniform(0.9, 2.2), rng.uniform(0, 2 * math.pi)
        self.sway = lambda s: bend * np.sin(2 * math.pi * s / wave + phase)  # no hand follows the joint exactly

    def to_image(self, st: np.ndarray) -> np.ndarray:
        """[n, 2] (s, t) -> [n, 2] (x, y)."""
        s, t = st.T
        return np.stack([s, t + self.sway(s)], 1) @ self.axes + self.centre

    def grid(self, x0: int, y0: int, w: int, h: int) -> tuple[np.ndarray, np.ndarray]:
        """s and t, float32 [h, w], of the pixels of a rectangle of the picture."""
        x = np.arange(x0, x0 + w, dtype=np.float32)[None] - np.float32(self.centre[0])
        y = np.arange(y0, y0 + h, dtype=np.float32)[:, None] - np.float32(self.centre[1])
        (sx, sy), (tx, ty) = self.axes.tolist()
        s = x * sx + y * sy
        return s, x * tx + y * ty - self.sway(s)


def _cloud(rng: Rng, h: int, w: int, cell: float) -> np.ndarray:
    """Smooth noise, float32 [h, w], about unit variance, features of `cell` pixels."""
    coarse = rng.standard_normal((math.ceil(h / cell) + 2, math.ceil(w / cell) + 2), dtype=np.float32)
    return cv2.resize(coarse, (w, h), interpolation=cv2.INTER_CUBIC)


def _wander(rng: Rng, s: np.ndarray, reach: float, cell: float) -> np.ndarray:
    """Smooth noise along the seam, about unit variance, at every s in [-reach, reach]."""
    knots = _cloud(rng, 1, 512, 512 * cell / (2 * reach))[0]
    return np.interp(s, np.linspace(-reach, reach, 512), knots).astype(np.float32)


def _bead(seam: _Seam, rng: Rng, s: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reinforcement 0..~1 and the distance from the centreline in local half widths, both float32 [size, size]."""
    k, size = seam.k, seam.size
    ragged = rng.uniform(0.012, 0.035)
    edges = [1 + ragged * (_wander(rng, s, size, 24 * k) + 0.7 * _wander(rng, s, size, 7 * k)) for _ in range(2)]
    u = np.abs(t) / (seam.half * np.where(t < 0, *edges))
    cap = np.clip(1 - u * u, 0, 1) ** rng.uniform(0.45, 0.9)
    # Solidification ripples: crescents that trail behind the pool, unevenly spaced and unevenly strong.
    spacing = rng.uniform(3.5, 8) * k
    knots = np.cumsum(spacing * rng.uniform(0.55, 1.5, math.ceil(6 * size / spacing)))
    trail = rng.choice([-1, 1]) * rng.uniform(0.25, 0.8) * seam.half
    along = s + trail * np.minimum(u, 1.2) ** 2 + 1.5 * k * _cloud(rng, size, size, 22 * k)
    ripple = np.sin(2 * math.pi * np.interp(along, knots - knots[len(knots) // 2], np.arange(len(knots))))
    strength = rng.uniform(0.025, 0.085) * np.clip(0.7 + 0.5 * _cloud(rng, size, size, 18 * k), 0, 1.6)
    relief = cap * (1 + strength * ripple + 0.03 * _cloud(rng, size, size, 14 * k))
    if rng.random() < 0.45:  # penetration at the root
        width = seam.half * rng.uniform(0.16, 0.3) * (1 + 0.18 * _wander(rng, s, size, 14 * k))
        offset = seam.half * rng.uniform(-0.12, 0.12)
        relief += rng.uniform(0.1, 0.22) * np.exp(-(((t - offset) / width) ** 4))
    return relief.astype(np.float32), u


def _window(xy: np.ndarray, pad: float) -> tuple[int, int, int, int]:
    """x, y, width, height of the whole pixels around points, `pad` pixels wider on every side."""
    low, high = np.floor(xy.min(0) - pad).astype(int), np.ceil(xy.max(0) + pad).astype(int)
    return int(low[0]), int(low[1]), int(high[0] - low[0]), int(high[1] - low[1])


def _fixed(xy: np.ndarray, x0: int, y0: int) -> np.ndarray:
    """Picture coordinates -> OpenCV's fixed point (4 fraction bits) on the oversampled patch."""
    return np.rint(((xy - (x0, y0) + 0.5) * _OVERSAMPLE - 0.5) * 16).astype(np.int32)


def _area_mean(fine: np.ndarray) -> np.ndarray:
    h, w = fine.shape
    return cv2.resize(fine, (w // _OVERSAMPLE, h // _OVERSAMPLE), interpolation=cv2.INTER_AREA) / np.float32(255)


def _jagged_path(rng: Rng, length: float, step: float) -> np.ndarray:
    """[n, 2] from (0, 0) to about (length, 0): short straight facets that keep changing sides."""
    n = max(4, round(length / step))
    side = np.where(rng.random(n) < 0.75, np.resize([1, -1], n), rng.choice([-1, 1], n))
    heading = side * np.radians(rng.uniform(6, 48, n)) + 0.2 * np.cumsum(rng.normal(0, 0.5, n)) / math.sqrt(n)
    path = np.cumsum(rng.uniform(0.5, 1.5, n)[:, None] * np.stack([np.cos(heading), np.sin(heading)], 1), axis=0)
    path = np.concatenate([np.zeros((1, 2)), path])
    return path * (length / path[-1, 0])


def _crack(seam: _Seam, rng: Rng) -> Patch:
    """Thin, jagged, tapering and now and then forked; along the centre of the seam or across it."""
    k = seam.k
    transverse = rng.random() < 0.35
    longest = min(0.3 * seam.size, 1.7 * seam.half) if transverse else 0.32 * seam.size
    length = rng.uniform(0.14 * seam.size, longest)
    path = _jagged_path(rng, length, rng.uniform(3.5, 6.5) * k) - (length / 2, 0)
    path[:, 1] -= path[:, 1].mean()
    if transverse:
        path = path[:, ::-1]
        centre = rng.uniform(-0.45, 0.45) * seam.size, rng.uniform(-0.5, 0.5) * max(0, 1.9 * seam.half - length)
    else:
        centre = rng.uniform(-0.5, 0.5) * (seam.size - length), rng.uniform(-0.55, 0.55) * seam.half
    widest = rng.uniform(1.7, 3.0) * k
    profile = np.sin(np.linspace(0.06, 0.97, len(path)) * math.pi) ** 0.4 * rng.uniform(0.7, 1, len(path))
    strokes = [(path, widest * profile)]
    for _ in range(rng.choice([0, 1, 2, 3], p=[0.35, 0.3, 0.2, 0.15])):
        i = rng.integers(1, len(path) - 1)
        twig = _jagged_path(rng, length * rng.uniform(0.1, 0.28), 4 * k)
        dx, dy = path[i + 1] - path[i]
        turn = math.atan2(dy, dx) + rng.choice([-1, 1]) * math.radians(rng.uniform(25, 65))
        strokes.append((path[i] + twig @ _rotation(turn), widest * np.linspace(0.65, 0.2, len(twig))))
    strokes = [(seam.to_image(p + centre), width) for p, width in strokes]
    x0, y0, w, h = _window(np.concatenate([p for p, _ in strokes]), 5 * k)
    fine = np.zeros((h * _OVERSAMPLE, w * _OVERSAMPLE), np.uint8)
    for p, width in reversed(strokes):
        q = _fixed(p, x0, y0)
        depth = np.clip(0.85 + 0.15 * rng.standard_normal(len(q)), 0.6, 1) * 255
        for a, b, px, grey in zip(q[:-1].tolist(), q[1:].tolist(), width[1:], depth[1:], strict=True):
            cv2.line(fine, a, b, int(grey), max(1, round(px * _OVERSAMPLE)), cv2.LINE_AA, shift=4)
    return _area_mean(fine), x0, y0


def _incomplete_fusion(seam: _Seam, rng: Rng) -> Patch:
    """Straight band on the fusion line: sharp towards the side wall, fading towards the centre of the bead."""
    k = seam.k
    length, width = rng.uniform(0.2, 0.42) * seam.size, rng.uniform(2.5, 5) * k
    side = rng.choice([-1, 1])
    s0, t0 = rng.uniform(-0.5, 0.5) * (seam.size - length), side * rng.uniform(0.6, 0.82) * seam.half
    ends = s0 + length * np.linspace(-0.5, 0.5, 16)
    x0, y0, w, h = _window(seam.to_image(np.stack([ends, np.full(16, t0)], 1)), 2 * width + 4 * k)
    s, t = seam.grid(x0, y0, w, h)
    inward = side * (t0 - t)
    sharp = np.clip(inward / (0.7 * k) + 0.5, 0, 1)
    feather = np.exp(-(np.maximum(inward, 0) / width) ** 2)
    fade = np.clip((0.5 * length - np.abs(s - s0)) / (rng.uniform(1, 6) * k), 0, 1)
    depth = np.clip(0.85 + 0.18 * _wander(rng, s, 2 * seam.size, 9 * k), 0.45, 1)
    return sharp * feather * fade * depth, x0, y0


def _spheres(xy: np.ndarray, radius: np.ndarray, depth: np.ndarray, rng: Rng) -> Patch:
    """Chord length through nearly round pores, deepest pore = its `depth`."""
    x0, y0, w, h = _window(xy, radius.max() + 4)
    x, y = np.arange(x0, x0 + w)[None], np.arange(y0, y0 + h)[:, None]
    patch = np.zeros((h, w), np.float32)
    for (px, py), r, d in zip(xy, radius, depth, strict=True):
        squash = rng.uniform(0.85, 1.18)
        inside = 1 - ((x - px) / (r * squash)) ** 2 - ((y - py) / (r / squash)) ** 2
        np.maximum(patch, d * np.sqrt(np.clip(inside, 0, 1)), out=patch)
    return patch, x0, y0


def _porosity(seam: _Seam, rng: Rng) -> Patch:
    """A cluster of gas pores, a row of them along the seam, or one larger pore."""
    k = seam.k
    kind = rng.choice(["cluster", "row", "single"], p=[0.6, 0.2, 0.2])
    n = 1 if kind == "single" else rng.integers(3, 16 if kind == "cluster" else 9)
    radius = k * (rng.uniform(4, 8, n) if kind == "single" else 1.6 + 3.6 * rng.beta(1.3, 2.4, n))
    if kind == "row":
        gaps = radius + np.roll(radius, 1) + k * rng.uniform(1, 5, n)
        st = np.stack([np.cumsum(gaps) - gaps.sum() / 2, rng.normal(0, 1.2 * k, n)], 1)
    else:
        spread = 0 if n == 1 else k * (3.5 + 1.6 * math.sqrt(n)) * rng.uniform(0.8, 1.4)
        st = np.clip(rng.normal(0, 1, (n, 2)), -1.8, 1.8) * spread
    st += rng.uniform(-0.45, 0.45) * seam.size, rng.uniform(-0.65, 0.65) * seam.half
    st[:, 1] = np.clip(st[:, 1], -0.8 * seam.half, 0.8 * seam.half)  # gas stays in the weld metal
    return _spheres(seam.to_image(st), radius, rng.uniform(0.65, 1, n), rng)


def _slag(seam: _Seam, rng: Rng) -> Patch:
    """Angular, mottled inclusion drawn out along the seam, sometimes with a fragment beside it."""
    k = seam.k
    width = rng.uniform(6, 16) * k
    length = np.clip(width * rng.uniform(1.5, 4), 15 * k, 50 * k)
    centre = rng.uniform(-0.45, 0.45) * seam.size, rng.uniform(-0.65, 0.65) * seam.half
    turn = _rotation(rng.normal(0, math.radians(9)))
    outlines = []
    for part in range(1 + (rng.random() < 0.3)):
        n = rng.integers(8, 14)
        theta = 2 * math.pi * (np.arange(n) + rng.uniform(-0.35, 0.35, n)) / n
        shape = np.stack([np.cos(theta), np.sin(theta)], 1) * rng.uniform(0.55, 1.08, n)[:, None]
        shape *= np.array([length, width]) / 2 * (1, rng.uniform(0.3, 0.5))[part]
        if part:
            shape += rng.choice([-1, 1]) * length * rng.uniform(0.6, 0.75), rng.normal(0, 0.2) * width
        outlines.append(seam.to_image(shape @ turn + centre))
    x0, y0, w, h = _window(np.concatenate(outlines), 4 * k)
    fine = np.zeros((h * _OVERSAMPLE, w * _OVERSAMPLE), np.uint8)
    for outline in outlines:
        cv2.fillPoly(fine, [_fixed(outline, x0, y0)], 255, cv2.LINE_AA, shift=4)
    texture = np.clip(0.8 + 0.16 * _cloud(rng, h, w, 7 * k) + 0.1 * _cloud(rng, h, w, 3 * k), 0.45, 1)
    return _area_mean(fine) * texture, x0, y0


_DRAW: dict[str, Callable[[_Seam, Rng], Patch]] = {
    "crack": _crack, "incomplete_fusion": _incomplete_fusion, "porosity": _porosity, "slag": _slag}


def _box(mask: np.ndarray, x0: int, y0: int, least: int) -> list[int]:
    """x1, y1, x2, y2 around what counts as visible, widened evenly to `least` pixels a side."""
    visible = mask > _BOX_LEVEL * mask.max()
    low, high = [], []
    for axis, corner in ((0, x0), (1, y0)):
        hit = corner + np.flatnonzero(visible.any(axis))
        low.append(int(hit[0]) - max(0, least - int(hit[-1] + 1 - hit[0])) // 2)
        high.append(max(int(hit[-1]) + 1, low[-1] + least))
    return low + high


def _add(picture: np.ndarray, patch: np.ndarray, x0: int, y0: int) -> None:
    """Add a patch in place; what lies outside the picture is cut off."""
    h, w = picture.shape
    x, y = max(0, x0), max(0, y0)
    part = patch[y - y0:max(0, h - y0), x - x0:max(0, w - x0)]
    picture[y:y + part.shape[0], x:x + part.shape[1]] += part


def _distractors(seam: _Seam, rng: Rng, s: np.ndarray, t: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Bright marks of daily practice that are no indications, float32 [size, size]: wires of an image quality
    indicator (ISO 19232-1), lead characters, spatter, scratches and dust on the plate."""
    k, size = seam.k, seam.size
    marks = np.zeros((size, size), np.float32)
    if rng.random() < 0.25:
        gap, first = rng.uniform(9, 15) * k, rng.uniform(-0.35, 0.1) * size
        reach = seam.half * rng.uniform(1.15, 1.5)
        for i in range(rng.integers(4, 8)):
            thick = k * 0.95 * 0.86**i
            marks += 0.09 * 0.84**i * np.exp(-(((s - first - i * gap) / thick) ** 2)) * (np.abs(t) < reach)
    plate = np.clip((u - 1.04) / 0.06, 0, 1)
    film, lead = np.zeros((2, size, size), np.uint8)
    for _ in range(rng.poisson(0.5)):
        a, heading = rng.uniform(0, size, 2), rng.uniform(0, 2 * math.pi)
        b = a + rng.uniform(0.08, 0.35) * size * np.array([math.cos(heading), math.sin(heading)])
        cv2.line(film, np.rint(a).astype(int).tolist(), np.rint(b).astype(int).tolist(), rng.uniform(60, 160),
                 max(1, round(0.8 * k)), cv2.LINE_AA)
    for _ in range(rng.poisson(2)):
        cv2.circle(film, rng.integers(0, size * 16, 2).tolist(), int(rng.uniform(8, 16) * k), rng.uniform(60, 200), -1,
                   cv2.LINE_AA, shift=4)
    if rng.random() < 0.35:
        text = str(rng.choice(["A", "B", "F", "R1", "W3", "10FE", "07", "12", "S4"]))
        at = rng.uniform(-0.35, 0.35) * size, rng.choice([-1, 1]) * (seam.half + rng.uniform(20, 34) * k)
        corner = seam.to_image(np.array([at]))[0] + (-6 * len(text) * k, 6 * k)
        cv2.putText(lead, text, np.rint(corner).astype(int).tolist(), cv2.FONT_HERSHEY_SIMPLEX, 0.5 * k, 255,
                    max(1, round(1.8 * k)), cv2.LINE_AA)
    marks += plate / 255 * (0.2 * film + rng.uniform(0.25, 0.4) * lead)
    for _ in range(rng.poisson(0.8)):
        at = rng.uniform(-0.5, 0.5) * size, rng.choice([-1, 1]) * seam.half * rng.uniform(1.05, 1.7)
        patch, x0, y0 = _spheres(seam.to_image(np.array([at])), rng.uniform(1.5, 4, 1) * k, np.ones(1), rng)
        _add(marks, rng.uniform(0.06, 0.16) * patch, x0, y0)
    return marks


def _indications(seam: _Seam, rng: Rng) -> tuple[list[tuple[Patch, float]], np.ndarray, list[str]]:
    """Patches (peak 1) with their contrast over noise, boxes float32 [n, 4] and class names; boxes lie apart."""
    k, size = seam.k, seam.size
    unsharp, least, margin = 0.6 * k, math.ceil(14 * k), 4 * k
    patches, boxes, names = [], [], []
    for _ in range(0 if rng.random() < _CLEAN_SHARE else rng.choice([1, 2, 3, 4], p=[0.35, 0.3, 0.22, 0.13])):
        name = str(rng.choice(CLASSES))
        for _ in range(40):
            mask, x0, y0 = _DRAW[name](seam, rng)
            mask = cv2.GaussianBlur(mask.astype(np.float32), (0, 0), unsharp)
            left, top, right, bottom = box = _box(mask, x0, y0, least)
            if min(left, top) >= 2 * k and max(right, bottom) <= size - 2 * k and all(
                    left > b[2] + margin or right < b[0] - margin or top > b[3] + margin or bottom < b[1] - margin
                    for b in boxes):
                patches.append(((mask / mask.max(), x0, y0), rng.uniform(*_CNR[name])))
                boxes.append(box)
                names.append(name)
                break
    return patches, np.array(boxes, np.float32).reshape(-1, 4), names


def draw_weld(rng: Rng, size_px: int = 256) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Draw one radiograph: about one in five is clean, the others hold 1 to 4 indications.

    Returns the picture uint8 [size_px, size_px], boxes float32 [n, 4] (x1, y1, x2, y2 in pixels, 0-based edges:
    x2 - x1 is the width) and n class names. Boxes are at least 8 px (of 256) a side and never touch.
    """
    if not 128 <= size_px <= 2048:
        raise ValueError(f"size_px is {size_px}; choose 128 to 2048")
    size, seam = size_px, _Seam(rng, size_px)
    k = seam.k
    s, t = seam.grid(0, 0, size, size)
    relief, u = _bead(seam, rng, s, t)
    patches, boxes, names = _indications(seam, rng)

    height = rng.uniform(0.2, 0.4)
    metal = height * relief + 0.012 * _cloud(rng, size, size, 60 * k)
    tilt = rng.uniform(-0.05, 0.05, 2) / size  # the source never stands exactly above the seam
    metal += tilt[0] * s + tilt[1] * t + rng.uniform(0, 0.12) * (s * s + t * t) / size**2
    metal = cv2.GaussianBlur(metal + _distractors(seam, rng, s, t, u), (0, 0), rng.uniform(0.5, 0.9) * k)
    # Quantum noise after the logarithm grows as exp(thickness / 2); the detector correlates it over neighbours.
    noise = rng.uniform(0.006, 0.019)
    grain = rng.standard_normal((size, size), dtype=np.float32)
    soft = cv2.GaussianBlur(grain, (0, 0), rng.uniform(0.6, 1.0))
    grain = soft / soft.std() + 0.25 * rng.standard_normal((size, size), dtype=np.float32)
    sigma = noise * np.exp(1.2 * np.clip(metal, 0, 0.5))
    for (mask, x0, y0), cnr in patches:
        depth = cnr * max(noise * math.exp(1.2 * height), 0.015)  # where noise is low it is ripples that hide
        _add(metal, -depth * mask, x0, y0)
    grey = np.clip(rng.uniform(0.15, 0.34) + metal + sigma * grain, 0, 1)
    return np.rint(255 * grey ** rng.uniform(0.8, 1.15)).astype(np.uint8), boxes, names


def _voc(name: str, size_px: int, boxes: np.ndarray, names: list[str]) -> str:
    size = f"<size><width>{size_px}</width><height>{size_px}</height><depth>1</depth></size>"
    lines = ["<annotation>", f"  <filename>{name}</filename>", f"  {size}"]
    for label, box in zip(names, boxes, strict=True):
        edges = "<xmin>{:g}</xmin><ymin>{:g}</ymin><xmax>{:g}</xmax><ymax>{:g}</ymax>".format(*box)
        lines.append(f"  <object><name>{label}</name><difficult>0</difficult><bndbox>{edges}</bndbox></object>")
    return "\n".join([*lines, "</annotation>", ""])


def write_dataset(folder: Path, *, counts: Mapping[str, int], size_px: int = 256, seed: int = 0) -> None:
    """Write images/0001.jpg.., annotations/0001.xml.. (Pascal VOC) and train_val_test_split.csv into `folder`.

    `counts` gives the pictures of each split; ids run over the splits in its order. Every picture has a random
    stream of its own from (seed, split, number), so larger counts keep the earlier pictures of a split. The folder
    appears complete or not at all; one that already has content stays as it is. Boxes are edges, as in `draw_weld`.
    """
    folder = Path(folder)
    if any(n < 0 for n in counts.values()):
        raise ValueError(f"counts {dict(counts)} holds a negative number; give each split 0 or more pictures")
    if folder.is_dir() and any(folder.iterdir()):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    others = [split for split in counts if split not in _SPLIT_NUMBERS]
    numbers = _SPLIT_NUMBERS | {split: len(_SPLIT_NUMBERS) + i for i, split in enumerate(others)}
    digits = max(4, len(str(sum(counts.values()))))
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        draft = Path(scratch) / "draft"  # a child, as the temporary folder itself is closed to other users
        for part in ("images", "annotations"):
            (draft / part).mkdir(parents=True)
        rows = [(split, i) for split, n in counts.items() for i in range(n)]
        table = ["image_id,split"]
        for number, (split, i) in enumerate(rows, 1):
            image_id = f"{number:0{digits}d}"
            image, boxes, names = draw_weld(np.random.default_rng([seed, numbers[split], i]), size_px)
            jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 92])[1]
            (draft / "images" / f"{image_id}.jpg").write_bytes(jpeg.tobytes())
            xml = _voc(f"{image_id}.jpg", size_px, boxes, names)
            (draft / "annotations" / f"{image_id}.xml").write_text(xml, newline="\n")
            table.append(f"{image_id},{split}")
        (draft / "train_val_test_split.csv").write_text("\n".join([*table, ""]), newline="\n")
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
