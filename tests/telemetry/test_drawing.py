"""What is drawn is legible and hides no defect, whatever the size of picture and box."""

import cv2
import numpy as np
import pytest

from weldtrain.telemetry import drawing
from weldtrain.telemetry.drawing import COLOURS, draw_all, draw_dashed, draw_found

CLASSES = [f"kind {i}" for i in range(1, 21)]


def grey(width, height, tone=128):
    return np.full((height, width, 3), tone, np.uint8)


def changed(before, after):
    return (before != after).any(2)


def spots(monkeypatch, image, boxes, labels=None, scores=None, classes=CLASSES):
    """The corners [n,4] of the labels that are drawn."""
    found = []
    stamp = drawing._stamp
    monkeypatch.setattr(drawing, "_stamp", lambda image, spot, *rest: (found.append(spot.tolist()), stamp(image, spot, *rest)))
    draw_all(image, np.array(boxes, float), labels or [1] * len(boxes), scores or [0.9] * len(boxes), classes)
    return found


@pytest.fixture(params=["OpenCV 5", "Pillow"])
def font(request, monkeypatch):
    """Both fonts in turn."""
    def forget():
        drawing._written.cache_clear()
        drawing._has_glyph.cache_clear()

    if request.param == "Pillow":
        monkeypatch.delattr(cv2, "FontFace", raising=False)
    elif not hasattr(cv2, "FontFace"):
        pytest.skip("this OpenCV has no font")
    forget()
    yield request.param
    forget()


def test_zero_boxes_leave_the_picture_as_it_is():
    image = grey(64, 48)
    assert np.array_equal(draw_all(image, np.zeros((0, 4)), [], [], CLASSES), image)


def test_the_picture_that_is_given_stays_clean():
    image = grey(64, 48)
    drawn = draw_all(image, np.array([[10, 10, 30, 30.0]]), [1], [0.5], CLASSES)
    assert (image == 128).all() and drawn.dtype == np.uint8 and drawn.shape == image.shape and changed(image, drawn).any()


@pytest.mark.parametrize("size", [(32, 32), (64, 64), (256, 256), (1920, 1080), (3000, 500)])
@pytest.mark.parametrize("place", ["middle", "left top", "right top", "left bottom", "right bottom"])
def test_a_tiny_box_is_not_hidden(size, place):
    width, height = size
    x = 0 if "left" in place else width - 3 if "right" in place else width // 2
    y = 0 if "top" in place else height - 3 if "bottom" in place else height // 2
    image = grey(width, height)
    for label in (1, 8, 15):
        drawn = changed(image, draw_all(image, np.array([[x, y, x + 3, y + 3.0]]), [label], [0.9], CLASSES))
        assert not drawn[y : y + 3, x : x + 3].any()
        assert drawn[max(y - 1, 0) : y + 4, max(x - 1, 0) : x + 4].any()


def test_a_box_as_large_as_the_picture_is_seen():
    image = grey(200, 100)
    drawn = draw_all(image, np.array([[0, 0, 200, 100.0]]), [3], [0.9], CLASSES)
    for side in (drawn[0], drawn[-1], drawn[:, 0], drawn[:, -1]):
        assert (side == COLOURS[2]).all(1).mean() > 0.5


@pytest.mark.parametrize("size", [(40, 40), (64, 64), (256, 256), (1920, 1080)])
def test_labels_lie_in_the_picture_at_every_corner_and_edge(monkeypatch, size):
    width, height = size
    for side in (3, 20):
        for x in (0, (width - side) // 2, width - side):
            for y in (0, (height - side) // 2, height - side):
                with monkeypatch.context() as patch:
                    (spot,) = spots(patch, grey(width, height), [[x, y, x + side, y + side]])
                assert 0 <= spot[0] < spot[2] <= width and 0 <= spot[1] < spot[3] <= height


def test_labels_never_cover_each_other_nor_most_of_a_defect(monkeypatch):
    rng = np.random.default_rng(1)
    corners = rng.uniform(0, 500, (60, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(4, 120, (60, 2))], 1)
    found = spots(monkeypatch, grey(640, 640), boxes, [1 + i % 20 for i in range(60)], rng.uniform(0.3, 1, 60).tolist())
    assert len(found) >= 20
    for i, a in enumerate(found):
        for b in found[:i]:
            assert min(a[2], b[2]) <= max(a[0], b[0]) or min(a[3], b[3]) <= max(a[1], b[1])
        for x1, y1, x2, y2 in boxes:
            shared = max(0, min(a[2], x2) - max(a[0], x1)) * max(0, min(a[3], y2) - max(a[1], y1))
            assert shared <= 0.6 * (x2 - x1) * (y2 - y1)


def test_neighbours_all_get_their_whole_label(monkeypatch):
    boxes = [[300 + 14 * k, 300, 309 + 14 * k, 309] for k in range(5)]
    found = spots(monkeypatch, grey(640, 640), boxes, [1, 2, 3, 4, 5])
    assert len(found) == 5 and min(x2 - x1 for x1, _, x2, _ in found) > 60


def test_sizes_follow_the_shorter_side():
    texts, widths = zip(*(drawing._sizes(grey(w, h)) for w, h in ((1, 1), (64, 64), (640, 640), (1920, 1080), (12000, 2000))))
    assert list(texts) == sorted(texts) and list(widths) == sorted(widths)
    assert widths[0] == 1 and texts[0] >= 10 and texts[-1] <= 40


def test_classes_of_one_colour_are_told_apart_by_their_lines():
    image, box = grey(400, 400), np.array([[100, 100, 300, 300.0]])
    ink = [(draw_all(image, box, [label], [0.9], CLASSES)[300, 150:300] == COLOURS[0]).all(1) for label in (1, 8, 15)]
    assert ink[0].all() and 0.3 < ink[1].mean() < 0.7 and 0.3 < ink[2].mean() < 0.7
    assert np.diff(ink[2].astype(int)).astype(bool).sum() > np.diff(ink[1].astype(int)).astype(bool).sum() > 3


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (3, 2), (17, 50), (500, 333)])
def test_nothing_raises_whatever_the_box(size):
    width, height = size
    rng = np.random.default_rng(2)
    corners = rng.uniform(-1.5, 1.5, (40, 2)) * size
    boxes = np.concatenate([corners, corners + rng.uniform(0, 2, (40, 2)) * size], 1)
    boxes = np.concatenate([boxes, [[5, 5, 5, 5], [0, 0, 0, 0], [-1e30, -1e30, 1e30, 1e30], [np.nan] * 4, [-np.inf, 0, np.inf, 9],
                                    [width, height, width + 5, height + 5], [9, 9, 3, 3]]])
    labels = np.arange(len(boxes)) % 20 + 1
    draw_all(grey(width, height), boxes, labels, np.linspace(0, 1, len(boxes)), CLASSES)
    for box, label in zip(boxes, labels.tolist()):
        draw_dashed(grey(width, height), box)
        draw_found(grey(width, height), box, label, "crack 0.90")


def test_a_label_that_is_away_from_its_box_is_tied_to_it():
    image, frame = grey(100, 100), np.array([50, 60, 60, 70])
    drawing._tie(image, np.array([30, 10, 62, 20]), frame, COLOURS[1], 2)
    assert (image[20:58, 60:62] == COLOURS[1]).all() and changed(grey(100, 100), image).sum() == 38 * 2
    drawing._tie(image, np.array([48, 80, 90, 90]), frame, COLOURS[2], 2)
    assert (image[72:80, 48:50] == COLOURS[2]).all()


def test_what_lies_outside_leaves_no_trace():
    image = grey(100, 100)
    drawn = draw_all(image, np.array([[120, 10, 150, 40], [-50, -50, -10, -10.0]]), [1, 2], [0.9, 0.8], CLASSES)
    assert np.array_equal(drawn, image)


def test_text_is_legible_on_every_colour():
    for colour in COLOURS:
        canvas, ink = grey(10, 10), np.full((10, 10), 255, np.uint8)
        drawing._stamp(canvas, np.array([0, 0, 10, 10]), ink, colour)
        dark, light = sorted(np.power(np.array(c) / 255, 2.2) @ (0.2126, 0.7152, 0.0722) for c in (colour, canvas[0, 0]))
        assert (light + 0.05) / (dark + 0.05) > 4.4  # WCAG asks for 4.5


def test_names_are_written_or_given_by_number(font):
    assert drawing._legible("lack of fusion?", 1) == "lack of fusion?"
    assert drawing._legible("x" * 100, 1) == "x" * 25 + "..."
    assert drawing._legible(" a\u3000b\xa0c ", 2) == "a b c"
    assert drawing._legible("a\x00b", 2) == "class 2"
    assert drawing._legible("\udcff", 3) == "class 3"
    assert drawing._legible("no glyph \U0010fffe", 4) == "class 4"
    for name in ("Überlappung", "U\u0308berlappung", "трещина", "裂纹"):
        assert drawing._legible(name, 5) == ("class 5" if font == "Pillow" else name.replace("U\u0308", "Ü"))


@pytest.mark.parametrize("text_px", [11, 16, 40])
def test_no_letter_is_cut_off(font, text_px):
    ink = drawing._written("Ågjpqy|0.93", text_px) if font != "Pillow" else drawing._written("Agjpqy|0.93", text_px)
    assert ink.any() and not ink[[0, -1]].any() and not ink[:, [0, -1]].any()


def test_a_text_that_no_font_takes_does_not_end_the_process(font):
    for text in ("\udcff", "\x00", "\n", "\u202e", "\U0010ffff", ""):
        draw_found(grey(100, 100), (10, 10, 50, 50), 1, text)


def test_letters_without_ink_make_a_label():
    assert not drawing._written(" ", 12).any()


def test_truth_is_seen_on_white_and_on_black():
    for tone in (0, 255):
        image = grey(200, 200, tone)
        draw_dashed(image, (50, 50, 150, 150))
        ring = changed(image, grey(200, 200, tone))
        assert ring.sum() > 100 and not ring[50:150, 50:150].any()


def test_one_finding_is_drawn_in_its_colour_with_its_text():
    image = grey(300, 300)
    draw_found(image, (100, 100, 200, 200), 9, "porosity 0.80")
    assert (image == COLOURS[1]).all(2).sum() > 1000 and (image[100:200, 100:200] == 128).all()
