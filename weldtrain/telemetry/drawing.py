"""Boxes on pictures: what is true and what was found, legible at any size.

Lines run around a box rather than over it, so that a defect of a few pixels stays to be seen.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterator, Sequence

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from weldtrain.errors import one_line

# Okabe and Ito's palette, which colour-blind readers can tell apart; RGB.
COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
WHITE, BLACK, RIM = (255, 255, 255), (0, 0, 0), (40, 40, 40)
_TEXT_PX, _LINE_PX = (11, 40), (1, 6)
_IN_NO_FONT = "\U00013000"  # a hieroglyph
_LONGEST = 28  # characters of a class's name
_OPEN = 6  # widths of a line: a shorter side is hidden by a line over it
_FURTHER = 5  # heights of a label that it may be away from its box, tied to it by a line
_AROUND, _LEAST_PX, _CROP_PX = 3.0, 48, 300  # of a crop: how many times its box, at least so many px, enlarged to so many
_HARDLY_HIDDEN, _MOST_HIDDEN = 0.1, 0.5  # shares of a box that a label covers


def enlarged(image: np.ndarray, scale: float) -> np.ndarray:
    """uint8 [H,W,3] RGB at `scale`, of RGB or one channel."""
    return cv2.resize(_rgb(image), None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)


def _rgb(image: np.ndarray) -> np.ndarray:
    """A copy in colour: grey pictures take colours as well."""
    return np.repeat(image, 3 // image.shape[2], axis=2)


def cropped(image: np.ndarray, box: Sequence[float], there: np.ndarray, called: np.ndarray, labels: Sequence[int]) -> np.ndarray:
    """uint8 [h,w,3] RGB: a box x1,y1,x2,y2 of uint8 [H,W,C] amid what is around it, enlarged; with what is `there`, boxes [n,4],
    dashed, and what was `called`, [m,4], in the colours of its labels."""
    x1, y1, x2, y2 = box
    side = max(_AROUND * max(x2 - x1, y2 - y1), _LEAST_PX)
    size = np.array(image.shape[1::-1])
    centre = np.clip([(x1 + x2) / 2, (y1 + y2) / 2], 1, np.maximum(size - 1, 1))  # also of a box beyond the picture
    corner, end = (np.clip(centre + sign * side / 2, 0, size).astype(int) for sign in (-1, 1))
    scale = _CROP_PX / max(end - corner)
    crop = enlarged(np.ascontiguousarray(image[corner[1] : end[1], corner[0] : end[0]]), scale)
    called, there = ((np.asarray(boxes, float).reshape(-1, 4) - np.tile(corner, 2)) * scale for boxes in (called, there))
    for place, label in zip(called, labels):
        if _visible(place, crop):
            _frame(crop, _pixels(place, crop), _colour(label), 2)
    for place in there:
        draw_dashed(crop, place)
    return crop


def draw_all(
    image: np.ndarray, boxes: np.ndarray, labels: Sequence[int], scores: Sequence[float], classes: Sequence[str]
) -> np.ndarray:
    """uint8 [H,W,3] RGB, a picture uint8 [H,W,3] or [H,W,1] with what was found: boxes [n,4] x1,y1,x2,y2 in px, labels from 1.

    Classes share the colours in turn: the second seven are dashed, those behind them dotted. A class whose name holds a
    letter that no font has is called by its number. Labels keep clear of each other and of defects where there is room,
    are shorter where there is little, and missing where there is none; the surest are placed first.
    """
    drawn = _rgb(image)
    shown = [k for k in np.argsort(-np.asarray(scores, float), kind="stable").tolist() if _visible(boxes[k], image)]
    frames = np.array([_pixels(boxes[k], image) for k in shown], int).reshape(-1, 4)
    text_px, width = _sizes(image)
    for frame, k in zip(frames[::-1], shown[::-1]):
        _frame(drawn, frame, _colour(labels[k]), width, (0, 4 * width, 2 * width)[min((labels[k] - 1) // len(COLOURS), 2)])
    placed: list[tuple[np.ndarray, np.ndarray, np.ndarray, int]] = []
    for frame, k in zip(frames, shown):
        number, name = int(labels[k]), _legible(classes[labels[k] - 1], int(labels[k]))
        taken = np.array([spot for spot, *_ in placed], int).reshape(-1, 4)
        if label := _label((f"{name} {scores[k]:.2f}", name, str(number)), frame, taken, frames, image.shape, text_px, width):
            placed.append((label[0], frame, label[1], number))
    for spot, frame, _, number in placed:
        _tie(drawn, spot, frame, _colour(number), width)
    for spot, _, ink, number in placed:
        _stamp(drawn, spot, ink, _colour(number))
    return drawn


def draw_dashed(image: np.ndarray, box: Sequence[float], colour: tuple[int, int, int] = WHITE, dash: int = 5) -> None:
    """A dashed rectangle around x1, y1, x2, y2 in px, onto uint8 [H,W,3]."""
    if _visible(box, image):
        _frame(image, _pixels(box, image), colour, _sizes(image)[1], dash)


def draw_found(image: np.ndarray, box: Sequence[float], label: int, text: str) -> None:
    """A rectangle in the colour of its label (1 for the first class) with a text, onto uint8 [H,W,3]."""
    if not _visible(box, image):
        return
    frame, (text_px, width) = _pixels(box, image), _sizes(image)
    _frame(image, frame, _colour(label), width)
    if found := _label((text, str(label)), frame, np.empty((0, 4), int), frame[None], image.shape, text_px, width):
        _stamp(image, *found, _colour(label))


def _sizes(image: np.ndarray) -> tuple[int, int]:
    """The height of text and the width of lines in px, by the shorter side of the picture: at 640 px, 16 and 2."""
    side = min(image.shape[:2])
    return int(np.clip(side / 40, *_TEXT_PX)), int(np.clip(round((side / 110) ** 0.5), *_LINE_PX))


def _colour(label: int) -> tuple[int, int, int]:
    return COLOURS[(label - 1) % len(COLOURS)]


def _visible(box: Sequence[float], image: np.ndarray) -> bool:
    """Whether any of a box lies in the picture; not so where a corner is no number."""
    x1, y1, x2, y2 = box
    return bool(x1 < image.shape[1] and y1 < image.shape[0] and x2 >= 0 and y2 >= 0)


def _pixels(box: Sequence[float], image: np.ndarray) -> np.ndarray:
    """int [4]: the pixels that a box touches, at least one, as x1, y1 and behind the last x2, y2."""
    height, width = image.shape[:2]
    x1, y1 = (int(min(max(v, 0), side - 1)) for v, side in zip(box[:2], (width, height)))
    x2, y2 = (int(min(max(np.ceil(v), first + 1), side)) for v, first, side in zip(box[2:], (x1, y1), (width, height)))
    return np.array((x1, y1, x2, y2))


def _frame(image: np.ndarray, frame: np.ndarray, colour: tuple[int, int, int], width: int, dash: int = 0) -> None:
    """Four sides around the pixels of a frame, solid or in dashes of some px, within a dark rim that tells them from what
    is bright. At the picture's edge a side runs inside the frame, or is left out where it would hide a short one."""
    for reach, tone in ((width + _rim(width), RIM), (width, colour)):
        left, right, xs = _sides(frame[0], frame[2], image.shape[1], width, reach)
        top, bottom, ys = _sides(frame[1], frame[3], image.shape[0], width, reach)
        for side in (top, bottom):
            image[side, _inked(xs, dash)] = tone
        for side in (left, right):
            image[_inked(ys, dash), side] = tone


def _rim(width: int) -> int:
    return max(1, width // 3)


def _sides(first: int, last: int, size: int, width: int, reach: int) -> tuple[slice, slice, np.ndarray]:
    """Along one axis of a picture: the pixels of both sides of a frame, and int [n] all from one side to the other."""
    inside = width if last - first > _OPEN * width else 0
    start, end = max(first - reach, 0), min(last + reach, size)
    return slice(start, first or inside), slice(last if last < size else size - inside, end), np.arange(start, end)


def _inked(places: np.ndarray, dash: int) -> np.ndarray:
    """Those of the places along a line that have ink: it begins and ends with a dash, and has three at least; 0 is solid."""
    if not dash:
        return places
    pieces = max(round(len(places) / dash), 5) | 1
    return places[np.arange(len(places)) * pieces // len(places) % 2 == 0]


def _label(
    texts: Sequence[str], frame: np.ndarray, taken: np.ndarray, frames: np.ndarray, shape: Sequence[int], text_px: int, width: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """The corners int [4] and the ink uint8 [h,w] of a label: the first of the texts that has a place which hides nothing,
    else the one that hides least.

    None where there is no place in the picture that is free of `taken` int [m,4], other labels, and leaves of each of
    `frames` int [n,4] a half to be seen.
    """
    best, least = None, _MOST_HIDDEN
    for text in texts:
        ink = _written(text, text_px)
        h, w = ink.shape
        if h > shape[0] or w > shape[1]:
            continue
        spots = np.array([(x, y, x + w, y + h) for x, y in _places(frame.tolist(), w, h, width + _rim(width), shape)])
        hidden = _shared(spots, frames).max(1, initial=0)
        hidden[_shared(spots, taken).any(1)] = np.inf
        hidden += np.arange(len(spots)) * 1e-3  # the usual places first
        if hidden.min() < least:
            least, best = hidden.min(), (spots[hidden.argmin()], ink)
        if least < _HARDLY_HIDDEN:
            break
    return best


def _places(frame: Sequence[int], w: int, h: int, width: int, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Upper left corners, in the picture, for a label of w x h px: above a box, below, beside, inside at its corners, and
    further above and below."""
    x1, y1, x2, y2 = frame[0] - width, frame[1] - width, frame[2] + width, frame[3] + width
    above, below = ((x1, y1 - h), (x2 - w, y1 - h)), ((x1, y2), (x2 - w, y2))
    beside = ((x2, y1), (x1 - w, y1), (x2, y2 - h), (x1 - w, y2 - h))
    inside = ((x1, y1), (x2 - w, y1), (x1, y2 - h), (x2 - w, y2 - h))
    further = ((x, y) for k in range(1, _FURTHER) for y in (y1 - h - k * h, y2 + k * h) for x in (x1, x2 - w))
    for x, y in (*above, *below, *beside, *inside, *further):
        yield min(max(x, 0), shape[1] - w), min(max(y, 0), shape[0] - h)


def _shared(spots: np.ndarray, others: np.ndarray) -> np.ndarray:
    """float [k,n]: the share of each of `others` int [n,4] that each of `spots` int [k,4] covers."""
    sides = np.minimum(spots[:, None, 2:], others[None, :, 2:]) - np.maximum(spots[:, None, :2], others[None, :, :2])
    return sides.clip(0).prod(2) / (others[:, 2:] - others[:, :2]).prod(1)


def _stamp(image: np.ndarray, spot: np.ndarray, ink: np.ndarray, colour: tuple[int, int, int]) -> None:
    """A filled label, its text black or white, whichever has more contrast (WCAG 2, relative luminance)."""
    linear = np.power(np.array(colour) / 255, 2.2)
    text = BLACK if linear @ (0.2126, 0.7152, 0.0722) > 0.179 else WHITE
    x1, y1, x2, y2 = spot
    share = ink[..., None] / 255
    image[y1:y2, x1:x2] = (share * text + (1 - share) * colour).round()


def _tie(image: np.ndarray, spot: np.ndarray, frame: np.ndarray, colour: tuple[int, int, int], width: int) -> None:
    """A line from a frame straight up or down to its label, where that does not touch it."""
    nearer = frame[0] - width if abs(spot[0] - frame[0]) <= abs(spot[2] - frame[2]) else frame[2]
    x = int(np.clip(nearer, spot[0], spot[2] - width))
    image[spot[3] : max(frame[1] - width, 0), x : x + width] = colour
    image[frame[3] + width : spot[1], x : x + width] = colour


def _legible(name: str, number: int) -> str:
    """A class's name, cut where it is long, or its number where a letter of it is in no font."""
    name = " ".join(unicodedata.normalize("NFC", name).split())
    if not all(map(_has_glyph, name)):
        return f"class {number}"
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."


@functools.lru_cache(4096)
def _has_glyph(letter: str) -> bool:
    if letter.isascii() or not letter.isprintable():
        return letter.isprintable()
    drawn = _written(letter, 24)
    return drawn.any() and not any(np.array_equal(drawn, _written(missing, 24)) for missing in ("?", _IN_NO_FONT))


@functools.lru_cache(512)
def _written(text: str, text_px: int) -> np.ndarray:
    """uint8 [h,w] of ink, with a margin. OpenCV 5 has a font of most alphabets, Pillow one of English."""
    text = one_line(text)  # OpenCV crashes on half a character
    height, base = round(1.5 * text_px), round(1.12 * text_px)
    if hasattr(cv2, "FontFace"):
        canvas = np.zeros((height, (len(text) + 2) * text_px * 2), np.uint8)
        cv2.putText(canvas, text, (text_px, base), 255, cv2.FontFace("sans"), text_px, 550)
    else:
        font = ImageFont.load_default(text_px)
        page = Image.new("L", (round(font.getlength(text)) + 2 * text_px, height))
        ImageDraw.Draw(page).text((text_px, base), text, 255, font, anchor="ls")
        canvas = np.asarray(page)
    inked = np.flatnonzero(canvas.any(0))
    margin = max(2, text_px // 4)
    first, last = (inked[0], inked[-1] + 1) if len(inked) else (0, 0)
    return np.pad(canvas[:, first:last], ((0, 0), (margin, margin)))
