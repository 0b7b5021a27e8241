"""The figures themselves come back, resampling is counting pictures again, and intervals hold what they should."""

import math

import numpy as np
import pytest

from weldtrain.metrics.bootstrap import ap_intervals, interval, ratio_interval, resampled_aps, resamples, totals, weighted_ap
from weldtrain.metrics.detection import evaluate_detections
from weldtrain.metrics.matching import Boxes, match

CLASSES = ("a", "b", "c", "nowhere")
FIGURES = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar", "per_class_ap", "per_class_ap_50")


def scene(seed, n=150, pictures=6):
    """Truth, a quarter of it to be ignored, and detections around it and elsewhere, of 3 classes; the last picture is empty."""
    rng = np.random.default_rng(seed)
    xy = rng.random((n, 2)) * 200
    truth = Boxes(rng.integers(0, pictures - 1, n), np.concatenate([xy, xy + 8 + rng.random((n, 2)) * 60], 1),
                  rng.integers(1, 4, n), ignore=rng.random(n) < 0.25)
    row = rng.integers(0, n, 2 * n)
    boxes = truth.boxes[row] + rng.normal(0, 4, (2 * n, 4))
    boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
    return truth, Boxes(truth.image[row], boxes, truth.labels[row], rng.random(2 * n))


def repeated(boxes, times):
    """The boxes of each picture so often, each time on a picture of their own."""
    rows = np.repeat(np.arange(len(boxes.labels)), times[boxes.image])
    again = np.concatenate([np.arange(k) for k in times[boxes.image]])
    first = np.cumsum(times) - times
    return Boxes(first[boxes.image[rows]] + again, *(None if a is None else a[rows] for a in (
        boxes.boxes, boxes.labels, boxes.scores, boxes.ignore)))


def evaluated(truth, found, pictures):
    told = evaluate_detections(truth, found, match(found, truth), pictures=pictures, classes=CLASSES, max_detections=10_000)
    return {name: told[name] for name in FIGURES}


def alone(aps, of=0):
    """The figures of one resample, None where they are NaN."""
    def plain(values):
        return None if math.isnan(values[of]) else float(values[of])

    return {name: {k: plain(v) for k, v in f.items()} if isinstance(f, dict) else plain(f) for name, f in aps.items()}


def same(told, expected):
    for name in FIGURES:
        assert told[name] == pytest.approx(expected[name], abs=1e-9), name


def test_resamples_take_whole_groups_and_as_many_as_there_are():
    groups = np.array([7, 3, 7, 5, 3, 7])
    drawn = resamples(groups, 500, seed=0)
    assert drawn.shape == (500, 6) and (drawn[:, [0, 1]] == drawn[:, [2, 4]]).all() and (drawn[:, 0] == drawn[:, 5]).all()
    assert (drawn[:, [0, 1, 3]].sum(1) == 3).all() and drawn.mean(0) == pytest.approx(1, abs=0.15)
    assert (resamples(groups, 500, seed=0) == drawn).all() and (resamples(groups, 500, seed=1) != drawn).any()
    assert resamples(np.zeros(0, int), 3, 0).shape == (3, 0) and resamples(np.zeros(1, int), 3, 0).tolist() == [[1]] * 3


def test_interval_by_hand():
    assert interval(np.arange(101.0)) == (2, 98) and interval(np.arange(101.0), 0.5) == (25, 75)
    assert interval(np.array([1.0, 2.0, np.nan])) == (1, 2) and interval(np.array([1.0, np.inf])) == (1, np.inf)
    assert interval(np.array([1.0, np.nan, np.nan])) is None and interval(np.zeros(0)) is None
    assert interval(np.ones(100)) is None  # of no spread resampling tells nothing


def ratio(numerator, denominator, weights):
    return ratio_interval(totals(weights, numerator), totals(weights, denominator))


def test_ratios_by_hand():
    weights = np.array([[2, 0], [1, 1], [0, 2]])
    assert totals(weights, np.array([1, 3])).tolist() == [2, 4, 6]
    assert ratio(np.array([1, 3]), np.array([2, 4]), weights) == (1 / 2, 3 / 4)  # of 1/2, 4/6 and 3/4
    assert ratio(np.array([1, 0]), np.array([2, 0]), weights) is None  # the last has nothing to tell of, the others tell the same
    assert ratio(np.zeros(2), np.zeros(2), weights) is None


def test_the_true_ratio_lies_within_nineteen_times_of_twenty():
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(200):
        defects = rng.poisson(3, 100)
        low, high = ratio(rng.binomial(defects, 0.2), defects, resamples(np.arange(100), 300, seed))
        held += low <= 0.2 <= high
    assert 0.90 <= held / 200 <= 0.99  # three standard deviations of 200 draws


def test_equal_pictures_of_a_weld_count_once():
    """Four pictures each of 40 welds that are the same: by weld the interval is twice as wide."""
    missed, weld = np.repeat(np.random.default_rng(0).random(40) < 0.3, 4), np.repeat(np.arange(40), 4)
    by_picture, by_weld = (np.diff(ratio(missed, np.ones(160), resamples(of, 2000, 0)))[0]
                           for of in (np.arange(160), weld))
    assert by_weld == pytest.approx(2 * by_picture, rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_weights_of_one_give_cocos_ap(seed):
    truth, found = scene(seed)
    same(alone(resampled_aps(found, truth, CLASSES, np.ones((1, 6)))), evaluated(truth, found, 6))
    met = match(found, truth)
    own = (found.labels == 1) & np.append(~truth.ignored, True)[met]
    defects_in = np.bincount(truth.image[(truth.labels == 1) & ~truth.ignored], minlength=6)
    ap = weighted_ap(found.scores[own], met[own] >= 0, found.image[own], defects_in, np.ones((1, 6)))
    assert ap == pytest.approx(evaluated(truth, found, 6)["per_class_ap_50"]["a"], abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_scores_that_are_equal_stand_in_cocos_order(seed):
    truth, found = scene(seed)
    found.scores = found.scores.round(1)
    same(alone(resampled_aps(found, truth, CLASSES, np.ones((1, 6)))), evaluated(truth, found, 6))


def test_a_resample_is_the_same_pictures_again():
    truth, found = scene(0)
    drawn = resamples(np.arange(6), 8, seed=0).astype(int)
    aps = resampled_aps(found, truth, CLASSES, drawn)
    for i, times in enumerate(drawn):
        same(alone(aps, i), evaluated(repeated(truth, times), repeated(found, times), int(times.sum())))


@pytest.mark.parametrize("side", [10, 32, 33, 96, 97])
def test_sizes_at_the_ends_of_cocos_areas(side):
    xy = np.arange(40)[:, None] * 120.0 + np.zeros((40, 2))
    sides = np.where(np.arange(40) % 2, side, 50)[:, None]
    truth = Boxes(np.zeros(40, int), np.concatenate([xy, xy + sides], 1), np.ones(40, int))
    found = Boxes(truth.image, truth.boxes + np.where(np.arange(40) % 3, 0, 4)[:, None], truth.labels, np.linspace(0, 1, 40))
    same(alone(resampled_aps(found, truth, CLASSES, np.ones((1, 1)))), evaluated(truth, found, 1))


def test_chunks_do_not_matter(monkeypatch):
    truth, found = scene(1)
    drawn = resamples(np.arange(6), 50, seed=0)
    at_once = resampled_aps(found, truth, CLASSES, drawn)["map"]
    monkeypatch.setattr("weldtrain.metrics.bootstrap._ENTRIES", 150)
    assert (resampled_aps(found, truth, CLASSES, drawn)["map"] == at_once).all()


def test_by_hand():
    # Of two pictures with a defect each the second one's is missed, and the first one has a surer false call.
    scores, hit, picture = np.array([0.9, 0.8]), np.array([False, True]), np.array([0, 0])
    weights = np.array([[1, 1], [2, 0], [0, 2], [0, 0]])
    ap = weighted_ap(scores, hit, picture, np.array([1, 1]), weights)
    assert ap[:3] == pytest.approx([0.5 * 51 / 101, 0.5, 0]) and math.isnan(ap[3])


def test_of_perfect_detections_resampling_tells_nothing():
    truth, _ = scene(0)
    truth.ignore = None
    found = Boxes(truth.image, truth.boxes, truth.labels, np.random.default_rng(0).random(len(truth.labels)))
    drawn = resamples(np.arange(6), 100, 0)
    assert (resampled_aps(found, truth, CLASSES, drawn)["map"] == 1).all()
    told = ap_intervals(found, truth, CLASSES, drawn)
    assert told["map"] is told["map_50"] is told["per_class_ap"]["a"] is None


def test_the_interval_holds_the_figure():
    truth, found = scene(2, n=600, pictures=60)
    told, figures = ap_intervals(found, truth, CLASSES, resamples(np.arange(60), 200, 0)), evaluated(truth, found, 60)
    for name in set(FIGURES[:7]) - {"map_large"}:  # there are none
        assert told[name][0] < figures[name] < told[name][1]
    assert told["map"][1] - told["map"][0] < told["per_class_ap"]["a"][1] - told["per_class_ap"]["a"][0] < 0.5


def test_where_nothing_can_be_said():
    truth, found = scene(0)
    none = Boxes(np.zeros(0, int), np.zeros((0, 4)), np.zeros(0, int), np.zeros(0))
    drawn = resamples(np.arange(6), 20, 0)
    blank = dict.fromkeys(FIGURES[:7]) | {f"per_class_ap{of}": dict.fromkeys(CLASSES) for of in ("", "_50")}
    assert ap_intervals(found, none, CLASSES, drawn) == ap_intervals(none, none, CLASSES, drawn) == blank
    truth.ignore = np.ones(len(truth.labels), bool)
    assert ap_intervals(found, truth, CLASSES, drawn) == blank
    truth.ignore = None
    assert ap_intervals(none, truth, CLASSES, drawn)["map"] is None
    assert (resampled_aps(none, truth, CLASSES, drawn)["map"] == 0).all()
    one = Boxes(np.zeros(1, int), np.array([[0, 0, 9, 9.0]]), np.ones(1, int), np.ones(1))
    assert ap_intervals(one, one, CLASSES, resamples(np.zeros(1, int), 5, 0))["map"] is None
    rare = Boxes(np.zeros(1, int), np.array([[0, 0, 9, 9.0]]), np.ones(1, int), np.ones(1))  # on one of 40 pictures
    assert ap_intervals(rare, rare, CLASSES, resamples(np.arange(40), 200, 0))["map"] is None
