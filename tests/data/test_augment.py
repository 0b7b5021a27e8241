"""Augmentation: boxes keep to their pixels through every option; what is drawn depends on the key alone."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from omegaconf import OmegaConf

from weldtrain import config
from weldtrain.config import AugmentConfig, ModelConfig
from weldtrain.data.augment import Layer, Pool, Recipe, boxes_of, paint, recipes
from weldtrain.data.batch import IGNORED
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index

DARK, BRIGHT = 60, 190
OPTIONS = [
    {}, {"hflip": 1}, {"vflip": 1}, {"hflip": 1, "vflip": 1}, {"quarter_turns": 1}, {"hflip": 0.5, "quarter_turns": 0.5},
    {"rotate_deg": 8}, {"scale": 0.3}, {"translate": 0.2}, {"brightness": 0.2}, {"contrast": 0.3}, {"gamma": 0.3},
    {"window": 0.1}, {"blur": 1.5}, {"noise": 0.05}, {"mosaic": 1}, {"copy_paste": 1},
]
CONF = {path.stem: AugmentConfig(**OmegaConf.load(path)) for path in (config.CONF_DIR / "augment").glob("*.yaml")}
FULL = replace(CONF["full"], mosaic=0.5, copy_paste=0.7)
ALL = pytest.mark.parametrize("cfg", [*(AugmentConfig(**option) for option in OPTIONS), FULL],
                              ids=[*("+".join(option) or "nothing" for option in OPTIONS), "full"])


def plate(boxes, size=(150, 110), channels=1):
    """A dark picture of size (width, height), bright where there are boxes."""
    pixels = np.full((*size[::-1], channels), DARK, np.uint8)
    for x1, y1, x2, y2 in boxes:
        pixels[y1:y2, x1:x2] = BRIGHT
    pixels.flags.writeable = False  # as in a cache that is mapped
    return pixels


BOXES = [[(30, 40, 70, 52)], [(90, 30, 110, 66), (30, 70, 64, 84), (0, 4, 14, 20)], [], [(60, 45, 84, 61)], [(20, 30, 40, 60)]]
SIZES = [(150, 110), (150, 110), (110, 150), (120, 90), (90, 140)]
PLATES = [plate(boxes, size) for boxes, size in zip(BOXES, SIZES)]
LABELS = [[k + 1 for k in range(len(boxes))] for boxes in BOXES]


def pool(pictures=PLATES, boxes=BOXES, labels=LABELS):
    def boxes_at(rows):
        chosen = [np.array(boxes[row], np.float32).reshape(-1, 4) for row in rows]
        return np.array([len(b) for b in chosen]), np.concatenate(chosen), np.concatenate([np.int64(labels[row]) for row in rows])

    donors = np.array([row for row, b in enumerate(boxes) if len(b)], np.int64)
    return Pool(np.arange(len(pictures)), donors, np.array([p.shape[1::-1] for p in pictures]), boxes_at)


def drawn(cfg, keys, of=None, seed=0):
    """The recipes, and for each its boxes and labels."""
    of = of or pool()
    made = recipes(cfg, seed, keys, of)
    shown = [layer.row for recipe in made for layer in recipe.layers]
    boxes, labels, owner = boxes_of(made, *of.boxes(shown), cfg.min_visible if cfg else 0.0)
    return [(recipe, boxes[owner == i], labels[owner == i]) for i, recipe in enumerate(made)]


def painted(recipe, pictures=PLATES, channels=1):
    """The sample's pixels, written into a part of something larger."""
    width, height = recipe.size
    canvas = np.full((height + 3, width + 4 + width % 3, channels), 77, np.uint8)  # rows of odd and of even length
    paint(dict(enumerate(pictures)), recipe, canvas[:height, :width])
    assert (canvas[height:] == 77).all() and (canvas[:, width:] == 77).all()
    return canvas[:height, :width]


def keys(n, row=None):
    return [(epoch, epoch % len(PLATES) if row is None else row, 0) for epoch in range(n)]


@ALL
def test_bright_defects_stay_within_their_boxes_and_fill_them(cfg):
    count, off_by_px = 0, 2 if cfg.rotate_deg else 1 if cfg.scale or cfg.blur else 0
    for recipe, boxes, labels in drawn(cfg, keys(60)):
        tone = np.arange(256) if recipe.tone is None else recipe.tone
        bright = painted(recipe)[..., 0] > (tone[DARK].astype(int) + tone[BRIGHT]) / 2
        covered = np.zeros_like(bright)
        for (x1, y1, x2, y2), label in zip(boxes, labels):
            around = np.s_[max(0, int(y1) - 1) : int(np.ceil(y2)) + 1, max(0, int(x1) - 1) : int(np.ceil(x2)) + 1]
            covered[around] = True
            if label == IGNORED or 0 in (x1, y1) or (x2, y2) >= recipe.size or len(recipe.layers) == 4:
                continue  # of a turned rectangle that is cut, less shows than of its box
            ys, xs = np.nonzero(bright[around])
            edges = np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]) + (around[1].start, around[0].start) * 2
            assert np.abs(edges - (x1, y1, x2, y2)).max() <= off_by_px
            count += 1
        assert not (bright & ~covered).any()
    assert count or cfg.mosaic == 1


def test_flips_and_quarter_turns_are_exact():
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (31, 54, 3)).astype(np.uint8)
    of = pool([picture], [[(10, 5, 30, 9)]], [[1]])
    seen = {}
    for recipe, (box,), _ in drawn(AugmentConfig(hflip=0.5, vflip=0.5, quarter_turns=0.5), keys(64, row=0), of):
        out = painted(recipe, [picture], 3)
        x1, y1, x2, y2 = box.astype(int)
        inside = out[y1:y2, x1:x2]
        assert recipe.size == out.shape[1::-1] and inside.size == 20 * 4 * 3
        seen[out.tobytes()] = sorted(map(tuple, inside.reshape(-1, 3))) == sorted(map(tuple, picture[5:9, 10:30].reshape(-1, 3)))
    eight = {np.rot90(p, k).tobytes() for p in (picture, picture[:, ::-1]) for k in range(4)}
    assert set(seen) == eight and all(seen.values())


@pytest.mark.parametrize("width", [1, 2, 53, 54])
@pytest.mark.parametrize("channels", [1, 3])
def test_tones_are_looked_up_exactly_at_any_width(width, channels):
    picture = np.random.default_rng(0).integers(0, 256, (31, width, channels)).astype(np.uint8)
    cfg = AugmentConfig(hflip=0.5, vflip=0.5, quarter_turns=0.5, brightness=0.3, contrast=0.3, gamma=0.5, window=0.1)
    of = pool([picture], [[]], [[]])
    for (recipe, *_), (plain, *_) in zip(drawn(cfg, keys(16, row=0), of),
                                         drawn(replace(cfg, brightness=0, contrast=0, gamma=0, window=0), keys(16, row=0), of)):
        assert np.array_equal(painted(recipe, [picture], channels), recipe.tone[painted(plain, [picture], channels)])
        assert (np.diff(recipe.tone.astype(int)) >= 0).all()


@ALL
def test_a_grey_picture_is_augmented_as_each_channel_of_its_rgb(cfg):
    rng = np.random.default_rng(1)
    grey = [rng.integers(0, 256, (*p.shape[:2], 1)).astype(np.uint8) for p in PLATES]
    rgb = [np.repeat(p, 3, axis=2) for p in grey]
    mixed = [(grey, rgb)[row % 2][row] for row in range(len(grey))]
    for recipe, *_ in drawn(cfg, keys(12)):
        one = painted(recipe, grey)
        assert np.array_equal(np.repeat(one, 3, axis=2), painted(recipe, rgb, 3))
        assert np.array_equal(np.repeat(one, 3, axis=2), painted(recipe, mixed, 3))


@ALL
def test_the_same_key_gives_the_same_pixels_in_any_batch_and_thread(cfg):
    some = keys(16)
    together = drawn(cfg, some)
    pixels = [painted(recipe).tobytes() for recipe, *_ in together]
    for key, (_, boxes, labels), expected in reversed(list(zip(some, together, pixels))):
        ((recipe, alone, its_labels),) = drawn(cfg, [key])
        assert painted(recipe).tobytes() == expected
        assert np.array_equal(alone, boxes) and np.array_equal(its_labels, labels)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda sample: painted(sample[0]).tobytes(), together)) == pixels


@pytest.mark.parametrize("change", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["epoch", "row", "repeat"])
def test_another_key_or_seed_gives_other_pixels(change):
    twins = [PLATES[1]] * 2
    of = pool(twins, [BOXES[1]] * 2, [LABELS[1]] * 2)

    def pixels(*key, seed=0):
        ((recipe, *_),) = drawn(FULL, [key], of, seed)
        return painted(recipe, twins).tobytes()

    assert pixels(0, 0, 0) != pixels(*change) and pixels(0, 0, 0) != pixels(0, 0, 0, seed=1)


def traits(cfg):
    """What each option decides, of many samples."""
    for recipe, *_ in drawn(cfg, keys(40)):
        ground = [layer for layer in recipe.layers if not layer.fade]
        linear = ground[0].matrix[:, :2]
        zoom = np.sqrt(np.abs(np.linalg.det(linear)))
        turn = np.rint(linear / zoom)
        rotation = linear @ turn.T / zoom
        yield {
            **dict.fromkeys(["hflip", "vflip", "quarter_turns"], turn), "rotate_deg": rotation.round(9), "scale": zoom.round(9),
            **dict.fromkeys(["brightness", "contrast", "gamma", "window"], recipe.tone), "blur": recipe.blur_px,
            "noise": (recipe.noise, recipe.noise_seed), "mosaic": [layer.row for layer in ground],
            "copy_paste": {layer.row for layer in recipe.layers if layer.fade},
        }


TOGETHER = [{"hflip", "vflip", "quarter_turns"}, {"brightness", "contrast", "gamma", "window"}, {"scale", "mosaic"}]


@pytest.mark.parametrize("option", sorted({f.name for f in fields(AugmentConfig)} - {"min_visible", "translate", "copy_paste"}))
def test_options_do_not_change_each_others_draws(option):
    own = next((group for group in TOGETHER if option in group), {option}) - {option}  # these share a trait
    beside = replace(FULL, **dict.fromkeys(own, 0))
    alone = AugmentConfig(**{option: getattr(FULL, option)})
    seen = [(a[option], b[option]) for a, b in zip(traits(alone), traits(beside))]
    assert all(np.array_equal(a, b) for a, b in seen) and not all(np.array_equal(a, seen[0][0]) for a, _ in seen)


def test_pasted_defects_are_the_same_with_other_options():
    alone = [t["copy_paste"] for t in traits(AugmentConfig(copy_paste=0.7))]
    assert alone == [t["copy_paste"] for t in traits(AugmentConfig(copy_paste=0.7, noise=0.1, gamma=0.3, blur=1))] and any(alone)


@pytest.mark.parametrize(("box", "region", "shown", "label"), [
    ((10, 10, 20, 20), (0, 0, 100, 100), (10, 10, 20, 20), 3),
    ((10, 10, 20, 20), (0, 0, 100, 14), (10, 10, 20, 14), 3),  # 40 %
    ((10, 10, 20, 20), (0, 0, 100, 13), (10, 10, 20, 13), IGNORED),
    ((10, 10, 20, 20), (15, 15, 100, 100), (15, 15, 20, 20), IGNORED),  # 25 %
    ((10, 10, 20, 20), (13, 13, 100, 100), (13, 13, 20, 20), 3),  # 49 %
    ((10, 10, 20, 20), (20, 0, 100, 100), None, None),
    ((10, 10, 20, 20), (50, 50, 50, 100), None, None),  # of no width
])
def test_what_is_cut_off_is_kept_ignored_or_dropped(box, region, shown, label):
    recipe = Recipe((100, 100), (Layer(0, np.eye(2, 3), region),))
    boxes, labels, owner = boxes_of([recipe], [1], np.array([box], np.float32), np.array([3]), 0.4)
    assert boxes.tolist() == ([] if shown is None else [list(shown)])
    assert labels.tolist() == ([] if shown is None else [label]) and len(owner) == len(boxes)


def test_an_ignored_box_stays_ignored_and_samples_keep_apart():
    two = [Recipe((9, 9), (Layer(0, np.eye(2, 3), (0, 0, 9, 9)),) * n) for n in (1, 2)]
    boxes = np.array([[1, 1, 3, 3], [2, 2, 4, 4], [3, 3, 5, 5]], np.float32)
    shown, labels, owner = boxes_of(two, [1, 0, 2], boxes, np.array([1, IGNORED, 2]), 0.4)
    assert np.array_equal(shown, boxes) and labels.tolist() == [1, IGNORED, 2] and owner.tolist() == [0, 1, 1]


def test_a_mosaic_shows_four_pictures_none_below_half_its_size():
    greys = [np.full((80, 100, 1), 50 + 20 * k, np.uint8) for k in range(8)]
    whole = [[(0, 0, 100, 80)]] * 8
    rows, corners = set(), set()
    for recipe, boxes, _ in drawn(AugmentConfig(mosaic=1), keys(40, row=2), pool(greys, whole, [[1]] * 8)):
        out = painted(recipe, greys)
        assert recipe.size == (100, 80) and len(recipe.layers) == 4 and recipe.layers[0].row == 2
        area = 0
        for layer in recipe.layers:
            x1, y1, x2, y2 = layer.region
            area += (x2 - x1) * (y2 - y1)
            assert 0.29 * 100 <= x2 - x1 <= 0.71 * 100 and 0.29 * 80 <= y2 - y1 <= 0.71 * 80
            assert (out[y1:y2, x1:x2] == 50 + 20 * layer.row).all()
            assert 0.5 <= layer.matrix[0, 0] <= 1
            rows.add(layer.row)
        corners.add(tuple(np.array(recipe.layers[0].region[:2]) > 0))
        assert area == 100 * 80 and {tuple(b) for b in boxes.tolist()} <= {tuple(layer.region) for layer in recipe.layers}
    assert rows == set(range(8)) and len(corners) == 4


def test_pasted_defects_are_labelled_and_overlap_no_box():
    pasted = 0
    for recipe, boxes, labels in drawn(AugmentConfig(copy_paste=1), keys(100)):
        patches = [layer for layer in recipe.layers if layer.fade]
        own = len(BOXES[recipe.layers[0].row])
        assert len(boxes) - own >= len(patches) and (labels > 0).all()
        pasted += len(boxes) - own
        gaps = np.maximum(boxes[:, None, :2] - boxes[None, :, 2:], boxes[None, :, :2] - boxes[:, None, 2:]).max(-1)
        assert (gaps[~np.eye(len(boxes), dtype=bool)] >= 0).all()
    assert pasted > 50


def test_a_patch_takes_its_neighbours_along_whole_and_leaves_what_is_ignored():
    boxes = [[(60, 60, 80, 80), (84, 60, 94, 70), (150, 150, 170, 170)], []]
    labels = [[1, 2, IGNORED], []]
    pictures = [plate(boxes[0], (240, 240)), plate([], (240, 240))]
    patched = 0
    for recipe, shown, its in drawn(AugmentConfig(copy_paste=1), keys(30, row=1), pool(pictures, boxes, labels)):
        assert sorted(its) in ([], [1, 2])
        assert sorted((shown[:, 2] - shown[:, 0]).tolist()) in ([], [10, 20])
        bright = painted(recipe, pictures) > 125
        assert bright.sum() == (20 * 20 + 10 * 10 if len(its) else 0)
        patched += bool(len(its))
    assert patched > 20


def test_a_patch_is_as_bright_as_what_it_replaces():
    boxes = [(60, 60, 80, 80)]
    pictures = [plate([], (200, 200)), plate(boxes, (200, 200)) + np.uint8(50)]
    of = pool(pictures, [[], boxes], [[], [1]])
    for recipe, shown, labels in drawn(AugmentConfig(copy_paste=1, contrast=0.3), keys(20, row=0), of):
        out, tone = painted(recipe, pictures)[..., 0], recipe.tone.astype(int)
        if len(shown):
            x1, y1, x2, y2 = shown[0].astype(int)
            defect = min(255, tone[BRIGHT + 50] + tone[DARK] - tone[DARK + 50])
            assert (out[y1:y2, x1:x2] == defect).all() and labels.tolist() == [1]
            out[y1:y2, x1:x2] = tone[DARK]
        assert (out == tone[DARK]).all()


def test_defects_without_surroundings_or_too_large_are_not_pasted():
    boxes = [[(4, 60, 24, 80), (60, 170, 80, 195), (150, 10, 190, 190)], []]
    pictures = [plate(boxes[0], (200, 200)), plate([], (150, 150))]
    of = pool(pictures, boxes, [[1, 2, 3], []])
    assert all(len(recipe.layers) == 1 for recipe, *_ in drawn(AugmentConfig(copy_paste=1), keys(30, row=1), of))


def test_noise_is_normal_without_bias_or_pattern():
    grey = np.full((300, 400, 1), 128, np.uint8)
    for recipe, *_ in drawn(AugmentConfig(noise=0.1), keys(8, row=0), pool([grey], [[]], [[]])):
        noise = painted(recipe, [grey])[..., 0] - 128.0
        assert abs(noise.mean()) < 0.2 and noise.std() == pytest.approx(recipe.noise, rel=0.03, abs=0.1)
        assert abs((noise[1:] * noise[:-1]).mean()) + abs((noise[:, 1:] * noise[:, :-1]).mean()) < 0.03 * noise.var() + 0.02


@pytest.mark.parametrize("boxes", [[[(30, 40, 70, 52)]], [[], []]], ids=["one picture", "without defects"])
def test_small_and_clean_data_sets_can_be_augmented_in_full(boxes):
    pictures = [plate(b) for b in boxes]
    of = pool(pictures, boxes, [[1] * len(b) for b in boxes])
    for recipe, shown, _ in drawn(replace(FULL, copy_paste=1), keys(30, row=0), of):
        bright = painted(recipe, pictures) > 125
        assert bright.any() <= bool(len(shown)) <= bool(boxes[0])


def limits(field):
    top = field.metadata.get("le", field.metadata.get("lt"))
    return st.floats(0, top, exclude_max="lt" in field.metadata)


SIDES = st.integers(1, 90)


@st.composite
def pictures_with_boxes(draw):
    width, height = draw(SIDES), draw(SIDES)
    edges = draw(arrays(np.float32, (draw(st.integers(0, 5)), 4), elements=st.floats(0, 1, width=32)))
    low, high = np.minimum(edges[:, :2], edges[:, 2:]), np.maximum(edges[:, :2], edges[:, 2:])
    boxes = np.hstack([low, high]) * np.float32([width, height] * 2)
    return (width, height), boxes[((boxes[:, 2:] - boxes[:, :2]) >= 1).all(1)]


@settings(deadline=None, max_examples=150)
@given(st.builds(AugmentConfig, **{f.name: limits(f) for f in fields(AugmentConfig)}),
       st.lists(pictures_with_boxes(), min_size=1, max_size=4), st.integers(0, 2**63 - 1))
def test_boxes_are_whole_and_inside_whatever_is_set(cfg, some, seed):
    pictures = [np.full((*size[::-1], 1), 9, np.uint8) for size, _ in some]
    of = pool(pictures, [b for _, b in some], [[1] * len(b) for _, b in some])
    for recipe, boxes, labels in drawn(cfg, [(e, e % len(some), 0) for e in range(6)], of, seed):
        assert np.isfinite(boxes).all() and (boxes[:, :2] < boxes[:, 2:]).all()
        assert (boxes >= 0).all() and (boxes[:, 2:] <= recipe.size).all() and set(labels) <= {1, IGNORED}
        assert painted(recipe, pictures).shape == (*recipe.size[::-1], 1)


def test_without_augmentation_samples_are_the_pictures():
    for (recipe, boxes, labels), picture, expected in zip(drawn(None, keys(5)), PLATES, BOXES):
        assert np.array_equal(painted(recipe), picture) and boxes.tolist() == [list(b) for b in expected]
        assert labels.tolist() == list(range(1, len(expected) + 1))


def test_the_presets_name_what_they_set():
    assert CONF["none"] == AugmentConfig()
    assert set(OmegaConf.load(config.CONF_DIR / "augment" / "full.yaml")) == set(asdict(AugmentConfig()))
    assert all(value > 0 for value in asdict(CONF["full"]).values())


def test_a_batch_is_drafted_and_filled_from_every_picture_it_shows(plates, cache):
    grey = np.random.default_rng(0).integers(0, 256, (48, 64)).astype(np.uint8)
    index = open_index(plates({"a.png": grey, "b.png": np.dstack([grey] * 3), "c.png": grey[:32]}), cache)
    data = DetectionDataset(index, "train", ["crack"], ModelConfig(min_size=48, max_size=96), augment=FULL)
    width, height = data.largest()
    assert width == height == 96
    keys = [(epoch, row, 0) for epoch in range(12) for row in range(3)]
    batch = data.fetch(keys)
    assert (batch.image_sizes <= 96).all() and {(64, 48), (48, 64)} <= set(map(tuple, batch.image_sizes.tolist()))
    assert (batch.images == batch.images[:, :1]).all() and (data.reading[:, 1] == -1).all()
    for i, (epoch, row, _) in enumerate(keys):
        alone = data.load(epoch, row)
        height, width = alone.image.shape[:2]
        assert np.array_equal(batch.images[i, :1, :height, :width].permute(1, 2, 0), alone.image[..., :1])
        assert np.array_equal(batch.boxes[batch.batch_index == i], alone.boxes)
