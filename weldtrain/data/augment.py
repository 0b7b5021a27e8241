"""Augmentation in uint8, at the model's scale: recipes are drawn for a whole batch, pixels follow picture by picture.

What is drawn depends on `(seed, epoch, row, repeat)` alone, and no option changes what is drawn for another. All geometry of a
sample is one affine map for each picture that it shows, so that pixels and boxes cannot part; all tone is one table of 256
levels. The rule of visibility: a box of which at least `min_visible` of the area shows stays, clipped to what shows; one of
which less shows is IGNORED, for half a defect is neither one to learn nor background; one of which nothing shows is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import cv2
import numpy as np

from weldtrain.config import AugmentConfig
from weldtrain.data.batch import IGNORED

HFLIP, VFLIP, TRANSPOSE = 1, 2, 4  # bits of a turn; transposed first
PATCHES = 3  # at most so many are pasted
_TRIES = 4  # to find each of them a place
_FLIPS = {HFLIP: 1, VFLIP: 0, HFLIP | VFLIP: -1}  # OpenCV's codes
IDENTITY = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
# [8,2,2]: what each turn does to the two axes.
_TURNS = np.array([np.diag([1 - 2 * (t & 1), 1 - (t & 2)]) @ np.eye(2)[:: -1 if t & TRANSPOSE else 1] for t in range(8)])
_ACROSS = np.array([[0, -1], [1, 0]]) @ _TURNS  # and a right angle on
# Of a normal distribution, one for each value of a random byte.
_QUANTILES = np.array([NormalDist().inv_cdf((level + 0.5) / 256) for level in range(256)])


class Pool(NamedTuple):
    """The pictures that samples are made of.

    rows int64 [n] of a mosaic's other pictures, donors int64 [k] those that show defects; sizes int64 [N,2] width, height in
    px of every picture; `boxes(rows)` gives how many boxes each row has, and of all of them one after the other the boxes
    float32 [m,4] in px and the labels int64 [m].
    """

    rows: np.ndarray
    donors: np.ndarray
    sizes: np.ndarray
    boxes: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


class Layer(NamedTuple):
    """A picture within a sample: the row of the index, the affine map [2,3] from its pixels to the sample's, the part
    x1,y1,x2,y2 of the sample in which it shows, and the px over which a patch fades into what lies below it."""

    row: int
    matrix: np.ndarray
    region: tuple[int, int, int, int]
    fade: int = 0


class Recipe(NamedTuple):
    """What becomes of one sample: its size (width, height) in px; the pictures it shows; the turn of a picture that fills it
    whole and unscaled, None for others; the table uint8 [256] of its greys; standard deviations of its blur in px and of
    its noise in grey levels, and the seed of that."""

    size: tuple[int, int]
    layers: tuple[Layer, ...]
    turn: int | None = 0
    tone: np.ndarray | None = None
    blur_px: float = 0.0
    noise: float = 0.0
    noise_seed: int = 0


def recipes(cfg: AugmentConfig | None, seed: int, keys: Sequence[tuple[int, int, int]], pool: Pool) -> list[Recipe]:
    """The recipes of samples `(epoch, row, repeat)`."""
    keys = np.array(keys)
    sizes = pool.sizes[keys[:, 1]]
    if cfg is None:
        return [Recipe(size, (Layer(row, IDENTITY, (0, 0, *size)),))
                for row, size in zip(keys[:, 1].tolist(), map(tuple, sizes.tolist()))]
    draws, of_parts = np.split(uniform(seed, keys, 13 + 4 * 8), [13], axis=1)
    mosaic = draws[:, 0] < cfg.mosaic
    parts = np.where(mosaic, 4, 1)
    first = np.cumsum(parts) - parts
    sample = np.repeat(np.arange(len(keys)), parts)
    part = np.arange(len(sample)) - first[sample]  # 0 is the sample's own picture
    of_part = of_parts.reshape(-1, 4, 8)[sample, part]
    rows = np.where(part, _picked(pool.rows, of_part[:, 0]), keys[sample, 1])
    turns = _turns(cfg, of_part[:, 1:4])
    sizes = _turned(sizes, turns[first])
    corner = (part + (4 * draws[sample, 1]).astype(np.int64)) % 4
    regions = _regions(sizes[sample], mosaic[sample], corner, draws[sample, 2:4])
    maps, plain = _maps(cfg, pool.sizes[rows], turns, regions, mosaic[sample], of_part[:, 4:])
    layers = [Layer(row, matrix, tuple(region)) for row, matrix, region in zip(rows.tolist(), maps, regions.tolist())]
    tones = _tones(cfg, draws[:, 4:9])
    blurs_px = cfg.blur * draws[:, 9]
    blurs_px[blurs_px < 0.25] = 0  # a kernel of 8 bit has nothing of them
    made = []
    for i, at in enumerate(first.tolist()):
        made.append(Recipe(tuple(sizes[i].tolist()), tuple(layers[at : at + parts[i]]), int(turns[at]) if plain[at] else None,
                           tones[i], float(blurs_px[i]), float(255 * cfg.noise * draws[i, 10]), int(draws[i, 11] * 2**53)))
    if cfg.copy_paste and len(pool.donors):
        of_patches = uniform(seed, np.column_stack([keys, np.ones_like(keys[:, 0])]), 4 + PATCHES * (1 + 2 * _TRIES))
        donors, turns = _picked(pool.donors, of_patches[:, 0]), _turns(cfg, of_patches[:, 1:4])
        for i in np.flatnonzero(draws[:, 12] < cfg.copy_paste):
            made[i] = _pasted(made[i], int(donors[i]), int(turns[i]), of_patches[i, 4:].reshape(PATCHES, -1), pool,
                              cfg.min_visible)
    return made


def paint(pictures: Mapping[int, np.ndarray], recipe: Recipe, out: np.ndarray) -> None:
    """Fills `out` uint8 [h,w,C], which may be a part of a batch, from `pictures` uint8 [h,w,1 or C] by row of the index."""
    flat = _flat(out, out)
    ground = [layer for layer in recipe.layers if not layer.fade]
    turn = recipe.turn or 0
    if recipe.turn is None:
        for layer in ground:
            _warp(_flat(pictures[layer.row], out), layer, flat)
        shown = flat
    else:
        shown = _flat(pictures[ground[0].row], out)
        if turn & TRANSPOSE:
            cv2.transpose(shown, flat)
            shown = flat
    if recipe.tone is not None:
        _look_up(shown, recipe.tone, flat)
        shown = flat
    if turn & ~TRANSPOSE:
        cv2.flip(shown, _FLIPS[turn & ~TRANSPOSE], flat)  # quicker in place, where the tone has just been
    elif shown is not flat:
        np.copyto(flat, shown)
    for layer in recipe.layers[len(ground):]:
        _paste(_flat(pictures[layer.row], out), layer, recipe.tone, flat)
    if recipe.blur_px:
        cv2.GaussianBlur(flat, (0, 0), recipe.blur_px, flat)
    if recipe.noise:
        _add_noise(flat, recipe.noise, recipe.noise_seed)


def boxes_of(
    recipes: Sequence[Recipe], counts: np.ndarray, boxes: np.ndarray, labels: np.ndarray, min_visible: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What shows of the boxes float32 [n,4] with labels int64 [n] of the layers' pictures, one after the other, `counts` of
    each layer: boxes float32 [m,4] and labels int64 [m] by the rule of visibility, and the position of each one's sample.

    A box that is warped becomes the bounding box of its four corners, which is close while rotations are small.
    """
    layers = [layer for recipe in recipes for layer in recipe.layers]
    which = np.repeat(np.arange(len(layers)), counts)
    matrix = np.stack([layer.matrix for layer in layers])[which]
    low, high = np.split(boxes.astype(np.float64), 2, axis=1)
    middle = (matrix[:, :, :2] * ((low + high) / 2)[:, None]).sum(2) + matrix[:, :, 2]
    reach = (np.abs(matrix[:, :, :2]) * ((high - low) / 2)[:, None]).sum(2)
    moved = np.concatenate([middle - reach, middle + reach], axis=1).astype(np.float32)
    region = np.array([layer.region for layer in layers], np.float32)[which]
    shown = np.minimum(np.maximum(moved, region[:, [0, 1, 0, 1]]), region[:, [2, 3, 2, 3]])
    area, left = ((b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]) for b in (moved, shown))
    labels = np.where(left < min_visible * area, IGNORED, labels)
    owner = np.repeat(np.arange(len(recipes)), [len(recipe.layers) for recipe in recipes])[which]
    some = left > 0
    return shown[some], labels[some], owner[some]


def seeds_of(seed: int, keys: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """int64 [n] in [0, 2^53): for what the model draws at random for samples `(epoch, row, repeat)`."""
    apart = np.column_stack([np.array(keys), np.full(len(keys), 2)])  # from the draws for pixels
    return (uniform(seed, apart, 1)[:, 0] * 2**53).astype(np.int64)


def uniform(seed: int, keys: np.ndarray, count: int) -> np.ndarray:
    """float64 [n,count] in [0,1): a function of seed and key alone, for keys int64 [n,k].

    SplitMix64 (Steele, Lea, Flood 2014) as a hash: a numpy generator for each sample would cost more than its pixels.
    """
    state = np.full(len(keys), seed, np.uint64)
    for column in keys.T:
        state = _mix(state) + column.astype(np.uint64)
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(_mix(state)[:, None] + steps) >> np.uint64(11)) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _picked(items: np.ndarray, draws: np.ndarray) -> np.ndarray:
    return items[(draws * len(items)).astype(np.int64)]


def _turns(cfg: AugmentConfig, draws: np.ndarray) -> np.ndarray:
    """int64 [n] turns from draws [n,3]."""
    return (draws < (cfg.hflip, cfg.vflip, cfg.quarter_turns)) @ np.array([HFLIP, VFLIP, TRANSPOSE])


def _turned(sizes: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Sizes [n,2] after the turns."""
    return np.where((turns & TRANSPOSE > 0)[:, None], sizes[:, ::-1], sizes)


def _regions(sizes: np.ndarray, mosaic: np.ndarray, corner: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """int64 [n,4], x1,y1,x2,y2 in px, of samples of `sizes` [n,2]: all, or one corner 0..3 beside the centre of a mosaic."""
    centre = np.rint(sizes * (0.3 + 0.4 * draws)).astype(np.int64)
    far = np.stack([corner & 1, corner >> 1], 1) > 0
    mosaic = mosaic[:, None]
    return np.hstack([np.where(mosaic & far, centre, 0), np.where(mosaic & ~far, centre, sizes)])


def _maps(
    cfg: AugmentConfig, sizes: np.ndarray, turns: np.ndarray, regions: np.ndarray, mosaic: np.ndarray, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The maps [n,2,3] of pictures of `sizes` [n,2] into regions [n,4], and of which [n] it is the turn alone."""
    angle = np.radians(cfg.rotate_deg * (2 * draws[:, 0] - 1))
    turned, room = _turned(sizes, turns), regions[:, 2:] - regions[:, :2]
    # Between just covering its corner of a mosaic and full scale: a pore at a quarter of its size would be lost.
    cover = np.clip((room / turned).max(1), 0.5, 1)
    zoom = np.where(mosaic, cover ** draws[:, 1], (1 + cfg.scale) ** (2 * draws[:, 1] - 1))
    slack = np.where(mosaic[:, None], np.abs(turned * zoom[:, None] - room) / 2, room * cfg.translate)
    shift = np.trunc((2 * draws[:, 2:] - 1) * slack)  # in whole px it blurs nothing
    cos, sin = (part[:, None, None] for part in (np.cos(angle) * zoom, np.sin(angle) * zoom))
    linear = cos * _TURNS[turns] + sin * _ACROSS[turns]
    move = (regions[:, :2] + regions[:, 2:]) / 2 + shift - (linear * sizes[:, None]).sum(2) / 2
    plain = ~mosaic & (angle == 0) & (zoom == 1) & ~shift.any(1)
    return np.concatenate([linear, move[:, :, None]], 2), plain


def _tones(cfg: AugmentConfig, draws: np.ndarray) -> Sequence[np.ndarray | None]:
    """Tables uint8 [256] from draws [n,5]: windowed, then bent, then stretched about mid-grey and shifted."""
    if not (cfg.brightness or cfg.contrast or cfg.gamma or cfg.window):
        return [None] * len(draws)
    shift, stretch, bend, low, high = draws.T[:, :, None]
    low, high = cfg.window * low, 1 - cfg.window * high
    level = np.clip((np.arange(256) / 255 - low) / (high - low), 0, 1)
    if cfg.gamma:
        level **= (1 + cfg.gamma) ** (2 * bend - 1)
    level = (level - 0.5) * (1 + (2 * stretch - 1) * cfg.contrast) + 0.5 + (2 * shift - 1) * cfg.brightness
    return list(np.clip(np.rint(level * 255), 0, 255).astype(np.uint8))


def _pasted(recipe: Recipe, donor: int, turn: int, draws: np.ndarray, pool: Pool, min_visible: float) -> Recipe:
    """The recipe with defects of picture `donor` where it shows no box, which so stay whole; draws [PATCHES,1+2*_TRIES]."""
    taken = boxes_of([recipe], *pool.boxes(np.array([layer.row for layer in recipe.layers])), min_visible)[0]
    _, boxes, labels = pool.boxes(np.array([donor]))
    left = np.flatnonzero(labels != IGNORED)
    layers = list(recipe.layers)
    for pick, *places in draws.tolist():
        if not len(left):
            break
        patch, fade, along = _patch(boxes, left[int(pick * len(left))])
        left = np.setdiff1d(left, along)
        size = _turned(patch[None, 2:] - patch[None, :2], np.array([turn]))[0]
        slack = np.array(recipe.size) - size
        if (patch[:2] < 0).any() or (patch[2:] > pool.sizes[donor]).any() or (slack < 0).any():
            continue
        for place in np.array(places).reshape(_TRIES, 2):
            start = np.floor(place * (slack + 1))
            region = np.concatenate([start, start + size])
            if not _touching(taken, region).any():
                linear = _TURNS[turn]
                move = start + size / 2 - linear @ (patch[:2] + patch[2:]) / 2
                layers.append(Layer(donor, np.column_stack([linear, move]), tuple(region.astype(int).tolist()), fade))
                taken = np.vstack([taken, region])
                break
    return recipe._replace(layers=tuple(layers))


def _patch(boxes: np.ndarray, pick: int) -> tuple[np.ndarray, int, np.ndarray]:
    """x1,y1,x2,y2 in whole px around a box, how many of them are surroundings, and which boxes lie inside.

    A box that it touches is taken along whole, so that no part of a defect is pasted without its label.
    """
    along, core = np.array([pick]), boxes[pick]
    while True:
        fade = int(np.clip((core[2:] - core[:2]).max() / 4, 8, 32))
        patch = np.concatenate([np.floor(core[:2]) - fade, np.ceil(core[2:]) + fade])
        touched = np.flatnonzero(_touching(boxes, patch))
        if len(touched) == len(along):
            return patch, fade, along
        along, core = touched, np.concatenate([boxes[touched, :2].min(0), boxes[touched, 2:].max(0)])


def _touching(boxes: np.ndarray, region: np.ndarray) -> np.ndarray:
    return ((boxes[:, :2] < region[2:]) & (boxes[:, 2:] > region[:2])).all(1)


def _flat(picture: np.ndarray, out: np.ndarray) -> np.ndarray:
    """As OpenCV has it, with the channels of `out`: [h,w] or [h,w,3]."""
    if picture.shape[2] != out.shape[2]:
        return cv2.cvtColor(picture, cv2.COLOR_GRAY2RGB)  # a grey one beside RGB is repeated
    return picture[:, :, 0] if out.shape[2] == 1 else picture


def _warp(picture: np.ndarray, layer: Layer, out: np.ndarray) -> None:
    """Puts the picture into its region of `out`, bilinear.

    Beyond its edge lies its own mean grey: a mirrored edge would show defects without boxes, and a black one an edge as no
    plate has it.
    """
    x1, y1, x2, y2 = layer.region
    room = out[y1:y2, x1:x2]
    if not room.size:
        return
    ground = np.ravel(picture[::16, ::16].mean((0, 1))).tolist()
    if picture.ndim == 2:
        _warped(picture, layer, ground, room)
    else:  # OpenCV warps four channels in half the time of three
        cv2.cvtColor(_warped(cv2.cvtColor(picture, cv2.COLOR_RGB2RGBA), layer, ground), cv2.COLOR_RGBA2RGB, room)


def _warped(picture: np.ndarray, layer: Layer, ground: Sequence[float], room: np.ndarray | None = None) -> np.ndarray:
    x1, y1, x2, y2 = layer.region
    matrix = layer.matrix.copy()
    matrix[:, 2] += matrix[:, :2].sum(1) / 2 - (0.5 + x1, 0.5 + y1)  # OpenCV counts from the centre of the first pixel
    return cv2.warpAffine(picture, matrix, (x2 - x1, y2 - y1), room, cv2.INTER_LINEAR, cv2.BORDER_CONSTANT, ground)


def _paste(picture: np.ndarray, layer: Layer, tone: np.ndarray | None, out: np.ndarray) -> None:
    """Puts a patch of the picture into its region of `out`, faded in, its rim as bright as what it replaces."""
    x1, y1, x2, y2 = layer.region
    room = out[y1:y2, x1:x2]
    patch = _warped(picture, layer, (0,))
    if tone is not None:
        patch = cv2.LUT(patch, tone)
    near = [np.clip((np.minimum(at, at[::-1]) + 0.5) / layer.fade, 0, 1) for at in map(np.arange, room.shape[:2])]
    weight = np.minimum.outer(*near)
    rim = weight < 1
    brighter = np.clip(room[rim].mean(0) - patch[rim].mean(0), -64, 64)  # more would drown the defect in white or black
    weight = weight if room.ndim == 2 else weight[:, :, None]
    room[:] = np.clip(np.rint(room + weight * (patch + brighter - room)), 0, 255)


def _look_up(picture: np.ndarray, tone: np.ndarray, out: np.ndarray) -> None:
    """Puts `tone` of each byte into `out`, which may be the picture. Pairs of bytes, where rows hold whole ones, take half the
    time."""
    height, width = len(out), out[0].size
    if (width | picture.strides[0] | out.strides[0]) % 2 == 0:
        picture, out = (pixels.reshape(height, width).view(np.uint16) for pixels in (picture, out))
        tone = (tone.astype(np.uint16)[:, None] << 8 | tone).reshape(1, -1)
    cv2.LUT(picture, tone, out)


def _add_noise(out: np.ndarray, deviation: float, seed: int) -> None:
    """Adds normal noise, in grey levels and the same in every channel, to `out`. Its 256 quantiles are looked up."""
    height, width = out.shape[:2]
    drawn = np.random.SFC64(seed).random_raw(-(-height * width // 8)).view(np.uint8)[: height * width]
    grain = cv2.LUT(drawn.reshape(height, width), np.rint(128 + deviation * _QUANTILES).astype(np.uint8))
    if out.ndim == 3:
        grain = cv2.cvtColor(grain, cv2.COLOR_GRAY2RGB)
    cv2.addWeighted(out, 1, grain, 1, -128, out)
