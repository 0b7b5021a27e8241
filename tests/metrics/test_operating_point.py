"""A promise about misses holds for new data, is as bold as the data allow, and says what is lacking where there is none."""

import math

import numpy as np
import pytest

from weldtrain.metrics.matching import Boxes, match
from weldtrain.metrics.operating_point import (
    NoPromise,
    Rule,
    at_most_false,
    at_most_missed,
    best_f1,
    choose,
    least_cost,
    missed_at_most,
    rate_at_most,
    rate_between,
    same_rule,
    scores_of,
    share_between,
    verified,
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
    with pytest.raises(NoPromise, match=r"100 defects, of which 100 can be found, are too few .* some 49 more") as caught:
        at_most_missed(np.full(100, 0.9), 0.02)
    assert caught.value.defects == 49
    at_most_missed(np.full(149, 0.9), 0.02)
    with pytest.raises(NoPromise, match="no number of defects supports") as caught:
        at_most_missed(np.append(np.full(90, 0.9), np.full(10, -np.inf)), 0.02)
    assert caught.value.defects is None
    with pytest.raises(NoPromise, match="0 defects"):
        at_most_missed(np.zeros(0), 0.02)
    with pytest.raises(NoPromise, match="of which 199 can be found") as caught:
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


def of_two_classes(hits, false):
    """Detections of crack at these scores, and false ones; slag is never there."""
    n, m = len(hits), len(false)
    places = np.arange(n + m)[:, None] * 20.0 + np.array([0, 0, 10, 10])
    truth = Boxes(np.zeros(n, int), places[:n], np.ones(n, int))
    found = Boxes(np.zeros(n + m, int), places, np.ones(n + m, int), np.concatenate([hits, false]))
    return found, truth, match(found, truth)


def test_each_rule_chooses_its_own_threshold_and_says_where_it_cannot():
    scores = np.linspace(0.1, 1, 300), np.array([0.2, 0.5, 0.95])
    chosen = {by: choose(*of_two_classes(*scores), ("crack", "slag"), 10, Rule(by, false_calls_per_picture=0.2))
              for by in ("missed", "f1", "false_calls", "cost")}
    thresholds = {by: points["crack"]["threshold"] for by, points in chosen.items()}
    assert thresholds["missed"] == at_most_missed(scores[0], 0.02) and thresholds["f1"] == best_f1(*scores)
    assert 0.2 < thresholds["false_calls"] < 0.5 and thresholds["cost"] == least_cost(*scores, 10, 1)
    assert all(p["crack"]["why"] == "" and p["slag"]["threshold"] == 0.5 and "no defect" in p["slag"]["why"]
               for p in chosen.values())
    few = choose(*of_two_classes(np.full(20, 0.9), [0.3]), ("crack",), 10, Rule())["crack"]
    assert few["threshold"] == 0.9 and "some 129 more are needed" in few["why"] and "best F1" in few["why"]


def test_a_class_that_is_never_found_has_a_threshold_that_json_knows():
    _, truth, _ = of_two_classes(np.full(3, 0.5), [])
    nothing = Boxes(np.zeros(0, int), np.zeros((0, 4)), np.zeros(0, int), np.zeros(0))
    none = choose(nothing, truth, np.zeros(0, int), ("crack",), 1, Rule())
    assert none["crack"]["threshold"] == 1.0
    assert same_rule(Rule(), Rule()._asdict()) and not same_rule(Rule(), Rule("f1")._asdict())
    assert same_rule(Rule("f1", confidence=0.9), Rule("f1")._asdict()) and not same_rule(Rule(confidence=0.9), Rule()._asdict())


def test_what_other_defects_say_of_a_promise():
    assert verified(0, 149, 0.02) == "holds" and verified(0, 148, 0.02) == "open"
    assert verified(2, 40, 0.02) == "open" and verified(5, 40, 0.02) == "broken"
    assert verified(0, 0, 0.02) == "open"


def test_false_calls_at_most_by_hand_and_by_scipy():
    assert rate_at_most(0, 18) == pytest.approx(-math.log(0.05) / 18)
    chi2 = pytest.importorskip("scipy.stats").chi2
    for count, confidence in ((1, 0.95), (7, 0.95), (200, 0.95), (100_000, 0.95), (1, 1 - 1e-9), (0, 1 - 1e-12)):
        expected = chi2.isf(1 - confidence, 2 * count + 2) / 2 / 50
        assert rate_at_most(count, 50, confidence) == pytest.approx(expected, rel=1e-6)


def test_bounds_of_both_sides_by_scipy():
    stats = pytest.importorskip("scipy.stats")
    for missed, defects in ((0, 12), (3, 40), (40, 40), (500, 9000)):
        low = stats.beta.ppf(0.025, missed, defects - missed + 1) if missed else 0.0
        high = stats.beta.ppf(0.975, missed + 1, defects - missed) if missed < defects else 1.0
        assert share_between(missed, defects) == pytest.approx((low, high), abs=1e-9)
    for count in (0, 1, 12, 900):
        low = stats.chi2.ppf(0.025, 2 * count) / 2 / 50 if count else 0.0
        assert rate_between(count, 50) == pytest.approx((low, stats.chi2.ppf(0.975, 2 * count + 2) / 2 / 50), rel=1e-7)
