"""Tiles: they cover a picture, show each small defect whole, and what is found in them is found once, however long."""

import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest

from weldtrain.config import LoaderConfig, ModelConfig
from weldtrain.data.batch import IGNORED
from weldtrain.data.cache import open_cache
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.data.predictions import Detections
from weldtrain.data.tiles import Lately, TiledIndex
from weldtrain.engine.joining import joined
from weldtrain.formats.record import DIFFICULT

RNG = np.random.default_rng(3)
STRIP = RNG.integers(0, 256, (100, 430)).astype(np.uint8)
SMALL = RNG.integers(0, 256, (60, 90)).astype(np.uint8)
MODEL = ModelConfig(min_size=100, max_size=200, tiles="auto", tile_overlap=0.25)


@pytest.fixture
def strips(plates, cache):
    """A strip with a long crack, a pore, and one in the middle of two tiles' overlap, beside a picture of one tile."""
    def box(*corners, name="crack"):
        return plates.crack(corners, name)
    xml = {"a": box(10, 40, 420, 60) + box(30, 5, 39, 14, name="pore") + box(80, 70, 130, 90, name="pore"),
           "b": box(5, 5, 40, 50)}
    return open_index(plates({"a.png": STRIP, "b.png": SMALL}, xml), cache)


@pytest.mark.parametrize("size", [(100, 100), (101, 99), (1203, 217), (64, 5000)])
@pytest.mark.parametrize("overlap", [0.0, 0.2, 0.5])
def test_tiles_are_full_overlap_enough_and_cover_every_pixel(strips, size, overlap):
    strips.sizes = np.array([size, (90, 60)], np.int32)
    index = TiledIndex(strips, 100, overlap)
    windows = index.windows[list(index.siblings(0))]
    assert (windows[:, 2:] - windows[:, :2] == np.minimum(size, 100)).all()
    covered = np.zeros(size[::-1], int)
    for x1, y1, x2, y2 in windows:
        covered[y1:y2, x1:x2] += 1
    assert covered.min() == 1 and (covered[0, 0], covered[-1, -1]) == (1, 1)
    for axis in (0, 1):
        starts = np.unique(windows[:, axis])
        assert (np.diff(starts) <= 100 * (1 - overlap)).all()


def test_a_small_defect_is_whole_in_some_tile_and_a_long_one_is_learnt_piece_by_piece(strips):
    index = TiledIndex(strips, 100, 0.25)
    shown = {name: [] for name in index.names}
    for row in index.siblings(0):
        for box, name, flags in zip(*(a[index.box_rows(row)] for a in (index.boxes, index.name_ids, index.flags))):
            shown[index.names[name]].append((*(box + np.tile(index.windows[row, :2], 2)).tolist(), bool(flags & DIFFICULT)))
    assert shown["crack"] == [(10, 40, 100, 60, False), (66, 40, 166, 60, False), (132, 40, 232, 60, False),
                              (198, 40, 298, 60, False), (264, 40, 364, 60, False), (330, 40, 420, 60, False)]
    # 20 of the 50 px of the pore are just enough to be one.
    assert shown["pore"] == [(30, 5, 39, 14, False), (80, 70, 100, 90, False), (80, 70, 130, 90, False)]


def test_a_sliver_of_a_defect_counts_neither_way(plates, cache):
    index = open_index(plates({"a.png": STRIP}, {"a": plates.crack((92, 10, 120, 30), "pore")}), cache)
    data = DetectionDataset(index, "train", ["pore"], MODEL)
    assert [data.load(0, row).labels.tolist() for row in (0, 1, 2)] == [[IGNORED], [1], []]


def test_tiles_show_the_pixels_of_their_windows_with_any_cache(strips, tmp_path):
    data = DetectionDataset(strips, "train", strips.names, MODEL)
    cached = DetectionDataset(strips, "train", strips.names, MODEL)
    cached.cache, _ = open_cache(LoaderConfig(cache="ram"), cached.index, cached.sizes, cached.window, tmp_path,
                                 rows=cached.rows, passes=2, workers=1, decoded=cached.decoded)
    assert len(data) == 7 and data.pictures.tolist() == [0, 1]
    for row in data.rows[:6]:
        x1, y1, x2, y2 = data.index.windows[row]
        for dataset in (data, cached, pickle.loads(pickle.dumps(data))):
            assert np.array_equal(dataset.load(0, row).image[..., 0], STRIP[y1:y2, x1:x2])
    assert all(row in cached.cache for row in range(6)) and 6 not in cached.cache


def test_one_tile_of_a_picture_in_the_cache_brings_all_of_them(strips, tmp_path, monkeypatch):
    data = DetectionDataset(strips, "train", strips.names, MODEL)
    data.cache, _ = open_cache(LoaderConfig(cache="ram"), data.index, data.sizes, data.window, tmp_path, rows=data.rows,
                               passes=2, workers=1, decoded=data.decoded)
    data.watch(1)
    read = []
    monkeypatch.setattr(data, "_from_file", lambda row, *_: read.append(row) or STRIP[..., None])
    for row in (3, 0, 5):
        data.load(0, row)
    assert read == [0]


def test_a_full_cache_makes_no_sample_decode_its_siblings(strips, tmp_path, monkeypatch):
    data = DetectionDataset(strips, "train", strips.names, MODEL)
    data.cache, _ = open_cache(LoaderConfig(cache="ram"), data.index, data.sizes, data.window, tmp_path, rows=data.rows,
                               passes=2, workers=1, decoded=data.decoded)
    data.cache._full, made = True, []
    decoded = data.decoded
    monkeypatch.setattr(data, "decoded", lambda row, laps: made.append(row) or decoded(row, laps))
    for row in (3, 0, 5):
        data.load(0, row)
    assert made == [3, 0, 5]


def test_a_picture_is_known_by_what_it_shows(strips):
    known = strips.identities(np.array([0, 1]))
    assert len(set(known.tolist())) == 2 and np.array_equal(known, TiledIndex(strips, 100, 0.25).identities(np.array([0, 3, 6])))
    strips.boxes = strips.boxes + np.float32(1)
    assert not np.isin(strips.identities(np.array([0, 1])), known).any()


def test_a_picture_no_larger_than_a_tile_is_the_same_sample_as_without_tiles(strips):
    whole = DetectionDataset(strips, "train", strips.names, replace(MODEL, tiles=None))
    tiles = DetectionDataset(strips, "train", strips.names, MODEL)
    one, other = whole.load(0, 1), tiles.load(0, 6)
    assert np.array_equal(one.image, other.image) and np.array_equal(one.boxes, other.boxes)
    assert np.array_equal(one.labels, other.labels) and one.original_size == other.original_size


def test_what_many_threads_want_is_made_once_and_a_failure_is_told_to_all():
    made, release = [], threading.Event()

    def make():
        made.append(1)
        release.wait(5)
        return np.zeros(1)

    lately, results = Lately(), []
    threads = [threading.Thread(target=lambda: results.append(lately.get(1, make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    release.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and all(result is results[0] for result in results)
    with pytest.raises(OSError, match="gone"):
        lately.get(2, lambda: (_ for _ in ()).throw(OSError("gone")))
    assert lately.get(2, lambda: np.ones(1)) == 1  # tried again


def test_what_is_being_made_is_not_forgotten_for_what_is_newer():
    release, made, lately = threading.Event(), [], Lately(keep=2)

    def slow():
        made.append(0)
        release.wait(5)
        return np.zeros(1)

    first = threading.Thread(target=lambda: lately.get(0, slow))
    first.start()
    while not made:
        pass
    for key in range(1, 6):
        lately.get(key, lambda: np.ones(1))
    second = threading.Thread(target=lambda: lately.get(0, slow))
    second.start()
    release.set()
    first.join()
    second.join()
    assert made == [0]
    lately.get(6, lambda: np.ones(1))
    assert len(lately._made) == 2


def lines(*ends):
    """Cracks as straight lines x1, y1, x2, y2: what a perfect detector sees of them in a window, a box around the part."""
    def seen(window):
        parts = []
        for x1, y1, x2, y2 in ends:
            t = np.linspace(0, 1, 2001)
            x, y = x1 + t * (x2 - x1), y1 + t * (y2 - y1)
            inside = (x >= window[0]) & (x <= window[2]) & (y >= window[1]) & (y <= window[3])
            if inside.sum() > 20:
                parts.append((x[inside].min(), y[inside].min() - 2, x[inside].max(), y[inside].max() + 2))
        return np.array(parts).reshape(-1, 4)
    return seen


def found_in(windows, seen, rng=None):
    """What a detector with errors of 2 % of a side would find."""
    parts = []
    for window in windows:
        boxes = seen(window)
        if rng is not None:
            boxes = boxes + rng.normal(0, 0.01, boxes.shape) * np.tile(boxes[:, 2:] - boxes[:, :2], 2)
        parts.append(Detections(boxes, np.ones(len(boxes), int), np.full(len(boxes), 0.9)))
    return parts


@pytest.fixture
def windows(strips):
    strips.sizes = np.array([(2000, 600), (90, 60)], np.int32)
    index = TiledIndex(strips, 256, 0.2)
    return index.windows[list(index.siblings(0))]


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("ends", [
    [(100, 300, 1900, 310)],  # along the strip
    [(50, 20, 1950, 580)],  # across all of it
    [(1000, 10, 1010, 590)],
    [(100, 100, 900, 110), (100, 160, 900, 170)],  # side by side
    [(100, 100, 600, 110), (700, 100, 1300, 110)],  # one after the other, in one line
    [(x, y, x + 12, y + 8) for x in range(40, 1900, 60) for y in range(30, 550, 50)],  # pores
], ids=["along", "slanting", "upright", "parallel", "in a row", "pores"])
def test_long_cracks_are_neither_split_nor_doubled_and_neighbours_stay_apart(windows, ends, noise):
    seen = lines(*ends)
    rng = np.random.default_rng(0) if noise else None
    one = joined(found_in(windows, seen, rng), windows, 0.5)
    truth = seen((0, 0, 2000, 600))
    assert len(one.boxes) == len(truth)
    order = lambda boxes: boxes[np.lexsort(boxes.round(-1).T)]  # noqa: E731
    side = np.tile(truth[:, 2:] - truth[:, :2], 2).max()
    assert np.allclose(order(one.boxes), order(truth), atol=max(1.0, 0.04 * side) if noise else 1.0)
    assert (one.scores == 0.9).all() and (one.labels == 1).all()


def test_classes_are_not_mixed_and_noise_makes_no_finding_longer(windows):
    seen = lines((100, 300, 1900, 310))
    parts = found_in(windows, seen)
    middle = next(i for i, part in enumerate(parts) if len(part.labels) and windows[i][0] > 900)
    parts[middle] = parts[middle]._replace(labels=np.array([2]))
    one = joined(parts, windows, 0.5)
    assert sorted(one.labels.tolist()).count(2) == 1
    parts[middle] = parts[middle]._replace(labels=np.array([1]), scores=np.array([0.02]))
    widths = np.sort(np.diff(joined(parts, windows, 0.5).boxes[:, [0, 2]], axis=1).ravel())
    assert widths[-1] < 1100  # the rest beyond the doubtful piece is not one with it


def of(score, *boxes):
    """What one tile shows: boxes of one class."""
    return Detections(np.array(boxes, float).reshape(-1, 4), np.ones(len(boxes), int), np.full(len(boxes), score))


TWO = np.array([[0, 0, 256, 256], [228, 0, 484, 256]])  # that share 28 px


@pytest.mark.parametrize("score", [0.9, 0.6, 0.1])
def test_a_piece_of_what_the_next_tile_sees_whole_goes_however_doubtful(score):
    one = joined([of(score, (230, 100, 256, 120)), of(0.9, (232, 99, 290, 121))], TWO, 0.5)
    assert one.boxes.tolist() == [[230, 99, 290, 121] if score > 0.8 else [232, 99, 290, 121]] or score == 0.9
    assert len(one.boxes) == 1 and one.scores.tolist() == [0.9]


def test_a_doubtful_piece_that_goes_on_beyond_the_sure_one_stays_by_itself():
    one = joined([of(0.3, (20, 100, 256, 120)), of(0.9, (228, 99, 290, 121))], TWO, 0.5)
    assert one.boxes.tolist() == [[228, 99, 290, 121], [20, 100, 256, 120]] and one.scores.tolist() == [0.9, 0.3]


def test_two_pores_at_facing_edges_stay_two():
    one = joined([of(0.9, (250, 100, 256, 108)), of(0.9, (228, 101, 234, 109))], TWO, 0.5)
    assert len(one.boxes) == 2


@pytest.mark.parametrize("tiles", [TWO, np.array([[0, 0, 256, 256], [256, 0, 512, 256]])], ids=["overlapping", "touching"])
def test_halves_that_reach_each_other_are_one(tiles):
    one = joined([of(0.9, (100, 100, 256, 120)), of(0.9, (tiles[1, 0], 112, 400, 130))], tiles, 0.5)
    assert one.boxes.tolist() == [[100, 100, 400, 130]]


def test_all_tiles_of_a_picture_are_seen_at_one_scale(strips):
    strips.sizes = np.array([(430, 64), (90, 60)], np.int32)
    data = DetectionDataset(strips, "train", strips.names, replace(MODEL, min_size=200, max_size=400, tiles=100))
    assert data.sizes[:-1].tolist() == [[200, 128]] * 6  # twice as large, as full tiles are
    assert data.sizes[-1].tolist() == [300, 200]  # a whole picture as without tiles


def test_tiles_without_overlap_teach_no_slivers(plates, cache):
    index = open_index(plates({"a.png": STRIP[:, :400]}, {"a": plates.crack((10, 40, 204, 60))}), cache)
    data = TiledIndex(index, 100, 0.0)
    assert [(data.flags[data.box_rows(row)] & DIFFICULT).tolist() for row in range(4)] == [[0], [0], [DIFFICULT], []]


def test_nothing_found_is_nothing():
    none = Detections(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0))
    two = np.array([[0, 0, 10, 10], [8, 0, 18, 10]])
    assert len(joined([none, none], two, 0.5).boxes) == 0 and len(joined([none], two[:1], 0.5).boxes) == 0
