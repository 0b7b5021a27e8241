"""What an inspector is told: nothing missed where all is found, the size from which defects are found, and why where not."""

import numpy as np
import pytest

from weldtrain.metrics.inspection import inspected, sizes_of
from weldtrain.metrics.matching import Boxes

RULE = {"at_most": 0.02, "confidence": 0.95, "otherwise": 0.5}


def squares(n, side, seed=0):
    """One square of a picture each."""
    xy = np.random.default_rng(seed).uniform(0, 100, (n, 2))
    return np.concatenate([xy, xy + np.broadcast_to(np.asarray(side, float), n)[:, None]], 1)


def test_sizes_by_hand():
    boxes = np.array([[0, 0, 3, 4], [10, 10, 15, 10]], float)
    assert sizes_of(boxes, "longer_side").tolist() == [4, 5] and sizes_of(boxes, "diagonal").tolist() == [5, 5]
    assert sizes_of(boxes, "area_root").tolist() == pytest.approx([12**0.5, 0])


def test_perfect_detections_miss_nothing_at_no_false_call():
    boxes, ones = squares(160, 20), np.ones(160, int)
    truth = Boxes(np.arange(160), boxes, ones)
    told = inspected(truth, Boxes(np.arange(160), boxes, ones, np.linspace(0.6, 1, 160)), ("crack", "slag"), 200, **RULE)
    assert told.keys() == {"crack"}
    crack = told["crack"]
    assert (crack["missed"], crack["defects"], crack["false_calls_per_picture"], crack["why"]) == (0, 160, 0.0, "")
    assert crack["threshold"] == pytest.approx(0.6) and 0 < crack["missed_at_most"] <= 0.02
    assert crack["a90"] is None and "all 160 defects were found" in crack["no_pod"]


def test_too_few_defects_give_no_promise_and_say_how_many_more():
    boxes, ones = squares(30, 20), np.ones(30, int)
    found = Boxes(np.arange(30), boxes, ones, np.full(30, 0.9))
    crack = inspected(Boxes(np.arange(30), boxes, ones), found, ("crack",), 30, **RULE)["crack"]
    assert crack["threshold"] == 0.5 and "some 119 more are needed" in crack["why"] and crack["missed"] == 0


def test_the_size_that_is_found_comes_back():
    rng = np.random.default_rng(1)
    side = rng.uniform(4, 40, 600)
    boxes, ones = squares(600, side), np.ones(600, int)
    seen = rng.random(600) < 1 / (1 + np.exp(-4 * np.log(side / 12)))
    far = squares(60, 10) + 500
    found = Boxes(np.concatenate([np.flatnonzero(seen), np.arange(60)]), np.concatenate([boxes[seen], far]),
                  np.ones(seen.sum() + 60, int), np.concatenate([np.full(seen.sum(), 0.9), np.full(60, 0.8)]))
    crack = inspected(Boxes(np.arange(600), boxes, ones), found, ("crack",), 600, **RULE)["crack"]
    assert "no number of defects supports" in crack["why"] and crack["false_calls_per_picture"] == pytest.approx(0.1)
    assert crack["missed"] == (~seen).sum() and crack["a50"] == pytest.approx(12, rel=0.1)
    assert crack["a90"] == pytest.approx(12 * 9**0.25, rel=0.1) and crack["a90"] < crack["a90_95"] < 1.3 * crack["a90"]


def test_ignored_truth_is_neither_missed_nor_called():
    boxes, ones = squares(20, 20), np.ones(20, int)
    truth = Boxes(np.arange(20), boxes, ones, ignore=np.arange(20) >= 10)
    found = Boxes(np.arange(10, 20), boxes[10:], ones[10:], np.full(10, 0.9))
    crack = inspected(truth, found, ("crack",), 20, **RULE)["crack"]
    assert (crack["defects"], crack["missed"], crack["false_calls_per_picture"]) == (10, 10, 0.0)
