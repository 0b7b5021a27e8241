"""A promise about misses holds for new data, is as bold as the data allow, and says what is lacking where there is none."""

import math

import numpy as np
import pytest

from weldtrain.metrics.matching import Boxes, match
from weldtrain.metrics.operating_point import (
    NoPromise,
    at_most_false,
    at_most_missed,
    best_f1,
    least_cost,
    missed_at_most,
    scores_of,
)


def test_clopper_and_pearson_by_hand_and_by_scipy():
    assert missed_at_most(0, 149) == pytest.approx(1 - 0.05 ** (1 / 149)) and missed_at_most(5, 5) == 1.0
    beta = pytest.importorskip("scipy.stats").beta
    for missed, defects, confidence in ((0, 10, 0.95), (3, 100, 0.9), (17, 400, 0.99), (900, 30_000, 0.95)):
        expected = beta.ppf(confidence, missed + 1, defects - missed)
        assert missed_at_most(missed, defects, confidence) == pytest.approx(expected, rel=1e-9)


def test_the_highest_threshold_that_keeps_the_promise():
    hits = np.arange(1, 301) / 1000  # the threshold 0.001 (k + 1) misses k
    at = at_most_missed(hits, 0.02)
    allowed = max(k for k in range(300) if missed_at_most(k, 300) <= 0.02)
    assert allowed == 1 and at == pytest.approx(0.002) and (hits < at).sum() == allowed
    assert at_most_missed(hits[::-1], 0.02) == at


def test_scores_that_are_equal_are_missed_together():
    hits = np.full(300, 0.7)
    assert at_most_missed(hits, 0.02) == 0.7
    assert at_most_missed(np.append(hits, [0.1, 0.1, 0.1, 0.1]), 0.02) == 0.1


def test_the_promise_is_broken_in_no_more_than_one_of_twenty_new_processes():
    """400 times: thresholds from 400 defects, and the share of all defects that lie below them."""
    rng = np.random.default_rng(0)
    broken = 0
    for _ in range(400):
        hits = rng.beta(5, 2, 400)
        at = at_most_missed(hits, 0.05)
        broken += 6 * at**5 - 5 * at**6 > 0.05  # the share of Beta(5, 2) below the threshold
    assert broken <= 0.05 * 400 + 3 * math.sqrt(400 * 0.05 * 0.95)
    assert broken > 0  # it is no bolder for nothing


def test_what_is_lacking_is_said():
    with pytest.raises(NoPromise, match=r"100 defects, 0 of them missed .* too few .* some 49 more") as caught:
        at_most_missed(np.full(100, 0.9), 0.02)
    assert caught.value.defects == 49
    at_most_missed(np.full(149, 0.9), 0.02)
    with pytest.raises(NoPromise, match="no number of defects supports") as caught:
        at_most_missed(np.append(np.full(90, 0.9), np.full(10, -np.inf)), 0.02)
    assert caught.value.defects is None
    with pytest.raises(NoPromise, match="0 defects"):
        at_most_missed(np.zeros(0), 0.02)
    with pytest.raises(NoPromise, match="1 of them missed") as caught:
        at_most_missed(np.append(np.full(199, 0.9), -np.inf), 0.02)
    more = 200 + caught.value.defects
    assert missed_at_most(round(more / 200), more) <= 0.02


def test_other_rules_by_hand():
    hits, false = np.array([0.9, 0.8, 0.4, -np.inf]), np.array([0.7, 0.5, 0.3, 0.2])
    # F1 at 0.9, 0.8, 0.7, 0.5, 0.4: 2/5, 4/6, 4/7, 4/8, 6/9
    assert best_f1(hits, false) == 0.8
    assert at_most_false(false, pictures=4, per_picture=0.5) == pytest.approx(0.3) and at_most_false(false, 4, 0.5) > 0.3
    assert at_most_false(false, 4, 1.0) == 0.0 and at_most_false(false, 4, 0.0) > 0.7
    assert least_cost(hits, false, of_a_miss=10, of_a_false_call=1) == 0.4
    assert least_cost(hits, false, of_a_miss=1, of_a_false_call=10) == 0.8
    assert math.isinf(best_f1(np.full(3, -np.inf), np.zeros(0)))


def test_scores_come_from_the_one_matching():
    truth = Boxes(np.array([0, 0, 1]), np.array([[0, 0, 9, 9], [20, 20, 30, 30], [0, 0, 9, 9]], float), np.array([1, 1, 1]),
                  ignore=np.array([False, True, False]))
    found = Boxes(np.array([0, 0, 0, 1]), np.array([[0, 0, 9, 9], [20, 20, 30, 30], [40, 40, 50, 50], [0, 0, 9, 9]], float),
                  np.array([1, 1, 1, 2]), np.array([0.9, 0.8, 0.7, 0.6]))
    met = match(found, truth)
    hits, false = scores_of(truth, found, 1, met)
    assert hits.tolist() == [0.9, -np.inf] and false.tolist() == [0.7]
    assert scores_of(truth, found, 2, met)[1].tolist() == [0.6]
