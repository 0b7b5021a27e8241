"""Leads beyond the noise, and what made them, on figures that can be worked out by hand."""

import math

import numpy as np
import pytest

from weldtrain.metrics.comparison import group, importance, ties


def test_seeds_are_grouped_with_students_interval():
    values = [0.5, 0.7, 0.3, math.nan, 0.6]
    groups = group(["a", "b", "a", "a", "b"], values)
    assert [g.members for g in groups] == [(1, 4), (0, 2)] and [g.mean for g in groups] == pytest.approx([0.65, 0.4])
    # Of two values the standard error is half their distance, and t for one degree of freedom 12.706.
    assert [g.half_width for g in groups] == pytest.approx([12.706 * 0.05, 12.706 * 0.1])
    assert group(["a"], [0.5])[0].half_width is None and group(["a"], [math.nan]) == []


def test_the_interval_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(0).normal(size=12).tolist()
    (one,) = group(["a"] * 12, values)
    low, high = stats.t.interval(0.95, 11, np.mean(values), stats.sem(values))
    assert (one.mean - one.half_width, one.mean + one.half_width) == pytest.approx((low, high), rel=1e-3)


def test_a_lead_within_the_noise_is_a_tie_and_one_beyond_it_is_not():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, (3, 5))
    values = np.concatenate([0.80 + noise[0], 0.79 + noise[1], 0.5 + noise[2], [0.8 - 0.005, 0.6]]).tolist()
    settings = ["a"] * 5 + ["b"] * 5 + ["c"] * 5 + ["close alone", "far alone"]
    groups = group(settings, values)
    told = dict(zip((settings[g.members[0]] for g in groups), ties(groups, values)))
    assert told["b"] and told["close alone"] and not told["c"] and not told["far alone"]
    welch = pytest.importorskip("scipy.stats").ttest_ind
    for name in "bc":
        p = welch([v for s, v in zip(settings, values) if s == "a"], [v for s, v in zip(settings, values) if s == name],
                  equal_var=False).pvalue
        assert (p > 0.05) == told[name]


def test_without_repeats_nothing_is_known_of_the_noise():
    assert ties(group(["a", "b"], [0.5, 0.1]), [0.5, 0.1]) == [None, None] and ties([], []) == []


def test_the_key_that_makes_the_difference_comes_first():
    lr = [0.1, 0.1, 0.01, 0.01] * 2
    size = [1, 2] * 4
    values = [0.9, 0.8, 0.3, 0.2] * 2
    shares = importance({"size": size, "lr": lr, "name": ["x"] * 8}, values)
    assert list(shares) == ["lr", "size", "name"] and shares["lr"] == pytest.approx(0.36 / 0.37) and shares["name"] == 0
    drawn = np.random.default_rng(0).uniform(1e-4, 1e-1, 30).tolist()
    assert importance({"lr": drawn}, [math.log(v) for v in drawn])["lr"] == pytest.approx(1)
    assert importance({"lr": lr}, [math.nan] * 8) == {"lr": 0.0}
