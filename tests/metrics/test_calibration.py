"""Scores that are probabilities are calibrated, others are not; bins by hand."""

import numpy as np
import pytest

from weldtrain.metrics.bootstrap import resamples
from weldtrain.metrics.calibration import calibration_error, error_interval, judged, reliability
from weldtrain.metrics.matching import Boxes, match


def test_bins_by_hand():
    told = reliability(np.array([0.1, 0.25, 0.45, 1.0]), np.array([False, True, False, True]), bins=4)
    assert [b[:5] for b in told] == [(0.0, 0.25, 1, 0.1, 0.0), (0.25, 0.5, 2, pytest.approx(0.35), 0.5), (0.75, 1.0, 1, 1.0, 1.0)]
    assert calibration_error(np.array([0.1, 0.25, 0.45, 1.0]), np.array([False, True, False, True]), 4) == pytest.approx(
        (0.1 + 2 * 0.15 + 0.0) / 4)


@pytest.mark.parametrize(("right", "n"), [(0, 5), (8, 10), (5, 5), (70, 300)])
def test_the_bounds_are_wilsons(right, n):
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    (only,) = reliability(np.full(n, 0.75), np.arange(n) < right)
    expected = proportion.proportion_confint(right, n, method="wilson")
    assert only[-2:] == pytest.approx(expected, abs=1e-12) and only.precision_low <= only.precision <= only.precision_high


def test_probabilities_are_calibrated_and_boasts_are_not():
    rng = np.random.default_rng(0)
    p = rng.random(100_000)
    correct = rng.random(100_000) < p
    assert calibration_error(p, correct) < 0.01 and calibration_error(np.sqrt(p), correct) == pytest.approx(1 / 6, abs=0.01)
    told = reliability(p, correct)
    assert len(told) == 10 and sum(b.count for b in told) == 100_000
    assert sum(b.precision_low <= b.mean_score <= b.precision_high for b in told) >= 8


def test_the_error_moves_with_the_pictures():
    # Picture 0 is sure by 0.9 and right, picture 1 by 0.6 and wrong: errors of 0.1 and 0.6 alone, of 0.35 together.
    scores, correct, picture = np.array([0.9, 0.6]), np.array([True, False]), np.array([0, 1])
    weights = np.array([[1, 1], [2, 0], [0, 2]])
    assert calibration_error(scores, correct) == pytest.approx(0.35)  # as the three are on average
    assert error_interval(scores, correct, picture, weights) == pytest.approx((0.1, 0.6))
    assert error_interval(scores, correct, picture, weights[:2]) == pytest.approx((0.1, 0.35))
    assert error_interval(scores[:0], correct[:0], picture[:0], weights) is None


@pytest.mark.parametrize("seed", range(8))
def test_the_error_lies_within_its_interval_also_where_all_of_it_is_chance(seed):
    rng = np.random.default_rng(seed)
    scores, picture = rng.random(300), np.arange(300)
    correct = rng.random(300) < scores
    low, high = error_interval(scores, correct, picture, resamples(picture, 300, seed))
    assert low < calibration_error(scores, correct) < high


def test_without_detections_nothing_can_be_said():
    assert reliability(np.zeros(0), np.zeros(0, bool)) == [] and calibration_error(np.zeros(0), np.zeros(0, bool)) is None


def test_what_meets_ignored_truth_is_left_out():
    place = np.array([[0, 0, 9, 9], [20, 0, 29, 9], [40, 0, 49, 9]], float)
    truth = Boxes(np.zeros(2, int), place[:2], np.ones(2, int), ignore=np.array([False, True]))
    found = Boxes(np.zeros(3, int), place, np.ones(3, int), np.array([0.9, 0.8, 0.7]))
    scores, correct, picture = judged(found, truth, match(found, truth))
    assert scores.tolist() == [0.9, 0.7] and correct.tolist() == [True, False] and picture.tolist() == [0, 0]
    assert judged(found, truth, match(found, truth), np.array([0.5, 0.5, 0.75]))[0].tolist() == [0.9]
    none = Boxes(np.zeros(0, int), np.zeros((0, 4)), np.zeros(0, int), np.zeros(0))
    assert judged(found, none, match(found, none))[1].tolist() == [False] * 3
    assert judged(none, truth, match(none, truth))[0].tolist() == []
