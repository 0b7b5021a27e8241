"""One matching for all that counts hits, misses and false calls: COCO's, and curves that follow from it."""

import numpy as np
import pytest

from weldtrain.metrics.detection import evaluate_detections
from weldtrain.metrics.matching import Boxes, match, pr_curves


def boxes(rows, scores=None, ignore=None):
    """rows of (picture, label, x1, y1, x2, y2)."""
    a = np.array(rows, float).reshape(-1, 6)
    return Boxes(a[:, 0].astype(int), a[:, 2:], a[:, 1].astype(int),
                 None if scores is None else np.array(scores, float), None if ignore is None else np.array(ignore, bool))


def scene(seed, n=150):
    """Truth, a quarter of it to be ignored, and detections around it and elsewhere, of 6 pictures and 3 classes."""
    rng = np.random.default_rng(seed)
    xy = rng.random((n, 2)) * 200
    rows = np.concatenate([rng.integers(0, 6, (n, 1)), rng.integers(1, 4, (n, 1)), xy, xy + 8 + rng.random((n, 2)) * 60], 1)
    found = rows[rng.integers(0, n, 2 * n)].copy()
    found[:, 2:] += rng.normal(0, 4, (2 * n, 4))
    found[:, 4:] = np.maximum(found[:, 4:], found[:, 2:4] + 1)
    return boxes(rows, ignore=rng.random(n) < 0.25), boxes(found, rng.random(2 * n))


def test_by_hand():
    truth = boxes([(0, 1, 0, 0, 10, 10), (0, 1, 4, 0, 14, 10), (0, 2, 0, 0, 10, 10), (1, 1, 0, 0, 10, 10)])
    found = boxes([(0, 1, 3, 0, 13, 10), (0, 1, 1, 0, 11, 10), (0, 1, 0, 0, 10, 10), (1, 2, 0, 0, 10, 10)], [0.9, 0.8, 0.7, 0.6])
    # The first overlaps the second defect most, the next one takes the first, and the exact one comes too late.
    assert match(found, truth).tolist() == [1, 0, -1, -1]


def test_an_ignored_truth_is_met_often_by_what_lies_within_it_and_by_no_other():
    truth = boxes([(0, 1, 0, 0, 100, 100), (0, 1, 0, 0, 10, 10)], ignore=[True, False])
    found = boxes([(0, 1, 1, 1, 11, 11), (0, 1, 50, 50, 60, 60), (0, 1, 70, 70, 80, 80)], [0.5, 0.4, 0.3])
    assert match(found, truth).tolist() == [1, 0, 0]


@pytest.mark.parametrize("empty", ["truth", "found", "both"])
def test_nothing_meets_nothing(empty):
    none, some = boxes([], []), boxes([(0, 1, 0, 0, 9, 9)], [0.5])
    met = match(none if empty != "truth" else some, none if empty != "found" else some)
    assert met.tolist() == ([-1] if empty == "truth" else [])


@pytest.mark.parametrize("seed", range(5))
def test_hits_do_not_hang_on_less_sure_detections(seed):
    truth, found = scene(seed)
    sure = found.scores >= 0.5
    few = Boxes(found.image[sure], found.boxes[sure], found.labels[sure], found.scores[sure])
    assert (match(found, truth)[sure] == match(few, truth)).all()


@pytest.mark.parametrize("seed", range(5))
def test_ap_from_this_matching_is_cocos(seed):
    truth, found = scene(seed)
    met = match(found, truth)
    expected = evaluate_detections(truth, found, met, pictures=6, classes=("a", "b", "c"), max_detections=1000)["per_class_ap_50"]
    for label, name in enumerate("abc", 1):
        own = np.flatnonzero((found.labels == label) & ((met < 0) | ~truth.ignored[met]))
        hits = met[own[np.argsort(-found.scores[own], kind="stable")]] >= 0
        recall = hits.cumsum() / np.count_nonzero((truth.labels == label) & ~truth.ignored)
        precision = np.maximum.accumulate((hits.cumsum() / np.arange(1, len(hits) + 1))[::-1])[::-1]
        at = np.searchsorted(recall, np.linspace(0, 1, 101))
        assert np.append(precision, 0)[at].mean() == pytest.approx(expected[name])


def test_curves_by_hand():
    truth = boxes([(0, 1, 0, 0, 10, 10), (0, 1, 50, 50, 60, 60), (0, 1, 80, 80, 90, 90)], ignore=[False, False, True])
    found = boxes([(0, 1, 0, 0, 10, 10), (0, 1, 20, 20, 30, 30), (0, 1, 80, 80, 90, 90)], [0.9, 0.5, 0.8])
    curves = pr_curves(found, truth, match(found, truth), ("crack", "slag"), points=11)  # scores 0, 0.1, … 1
    assert curves.keys() == {"crack"}
    crack = curves["crack"]
    assert crack["tp"].tolist() == [1] * 10 + [0] and crack["fp"].tolist() == [1] * 6 + [0] * 5
    assert crack["fn"].tolist() == [1] * 10 + [2]
    assert crack["precision"].tolist() == [0.5] * 6 + [1] * 5 and crack["recall"].tolist() == [0.5] * 10 + [0]
