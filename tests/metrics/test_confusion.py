"""What is called what, on cases by hand."""

import numpy as np
import pytest

from weldtrain.metrics.confusion import confusion
from weldtrain.metrics.matching import Boxes, match

HALF = np.full(3, 0.5)


def boxes(rows, scores=None, ignore=None):
    """rows of (picture, label, x1, y1, x2, y2)."""
    a = np.array(rows, float).reshape(-1, 6)
    return Boxes(a[:, 0].astype(int), a[:, 2:], a[:, 1].astype(int),
                 None if scores is None else np.array(scores, float), None if ignore is None else np.array(ignore, bool))


def counted(matrix):
    """What is not 0, as {(there, called): count}."""
    return {(int(r), int(c)): int(matrix[r, c]) for r, c in zip(*matrix.nonzero())}


def random_scene(seed, n=150):
    rng = np.random.default_rng(seed)
    xy = rng.random((n, 2)) * 200
    rows = np.concatenate([rng.integers(0, 6, (n, 1)), rng.integers(1, 4, (n, 1)), xy, xy + 8 + rng.random((n, 2)) * 60], 1)
    found = rows[rng.integers(0, n, 2 * n)].copy()
    found[:, 1] = rng.integers(1, 4, 2 * n)
    return boxes(rows, ignore=rng.random(n) < 0.25), boxes(found + np.array([0, 0, 1, 0, 1, 0]), rng.random(2 * n))


def test_the_truth_itself_lies_on_the_diagonal():
    rows = [(0, 1, 0, 0, 9, 9), (0, 2, 20, 0, 29, 9), (1, 3, 0, 0, 9, 9), (1, 3, 20, 0, 29, 9)]
    matrix = confusion(boxes(rows, [0.9, 0.8, 0.7, 0.6]), boxes(rows), HALF, 3)
    assert matrix.shape == (4, 4) and matrix.dtype == np.int64 and counted(matrix) == {(0, 0): 1, (1, 1): 1, (2, 2): 2}


def test_by_hand():
    truth = boxes([(0, 1, 0, 0, 10, 10), (0, 2, 50, 0, 60, 10), (1, 3, 0, 0, 10, 10)])
    found = boxes([(0, 2, 0, 0, 10, 10), (0, 1, 80, 0, 90, 10), (0, 2, 50, 0, 60, 9), (0, 3, 50, 0, 60, 10),
                   (0, 3, 0, 0, 10, 10)], [0.9, 0.8, 0.7, 0.6, 0.6])
    # A crack is called slag; a crack is called where nothing is; slag is found, and called once more as the third, which is also
    # called where the crack was taken; the third itself is missed.
    assert counted(confusion(found, truth, HALF, 3)) == {(0, 1): 1, (3, 0): 1, (1, 1): 1, (3, 2): 2, (2, 3): 1}


def test_the_threshold_is_that_of_the_class():
    truth = boxes([(0, 1, 0, 0, 10, 10), (0, 2, 50, 0, 60, 10)])
    found = boxes([(0, 1, 0, 0, 10, 10), (0, 2, 50, 0, 60, 10)], [0.6, 0.6])
    assert counted(confusion(found, truth, np.array([0.6, 0.7]), 2)) == {(0, 0): 1, (1, 2): 1}
    # What is too unsure takes no defect from what is surer of another class.
    found = boxes([(0, 1, 0, 0, 10, 10), (0, 2, 0, 0, 10, 10)], [0.6, 0.5])
    assert counted(confusion(found, truth, np.array([0.7, 0.5]), 2)) == {(0, 1): 1, (1, 2): 1}


def test_the_surest_takes_what_it_overlaps_most_and_of_equals_its_own():
    truth = boxes([(0, 1, 0, 0, 10, 10), (0, 2, 0, 0, 10, 10), (0, 3, 2, 0, 12, 10)])
    for label in (1, 2):
        found = boxes([(0, label, 0, 0, 10, 10)], [0.9])
        assert counted(confusion(found, truth, HALF, 3))[label - 1, label - 1] == 1
    found = boxes([(0, 3, 0, 0, 10, 10), (0, 1, 0, 0, 10, 10)], [0.9, 0.8])  # the third has a box of its class, but further off
    assert counted(confusion(found, truth, HALF, 3)) == {(0, 2): 1, (1, 0): 1, (2, 3): 1}


def test_what_meets_ignored_truth_alone_counts_nowhere():
    truth = boxes([(0, 1, 0, 0, 100, 100), (0, 2, 0, 0, 10, 10)], ignore=[True, False])
    inside = [(0, 1, 50, 50, 60, 60), (0, 2, 70, 70, 80, 80), (0, 1, 95, 0, 105, 10)]  # the last by half
    assert counted(confusion(boxes(inside, [0.9] * 3), truth, HALF, 3)) == {(1, 3): 1}
    assert counted(confusion(boxes([(0, 1, 96, 0, 106, 10), (0, 1, 0, 0, 10, 10)], [0.9, 0.8]), truth, HALF, 3)) == {
        (3, 0): 1, (1, 0): 1}


@pytest.mark.parametrize("seed", range(5))
def test_every_defect_and_every_call_counts_once(seed):
    truth, found = random_scene(seed)
    matrix = confusion(found, truth, HALF, 3)
    assert matrix[:3].sum(1).tolist() == [np.count_nonzero((truth.labels == k) & ~truth.ignored) for k in (1, 2, 3)]
    called = found.scores >= 0.5
    assert matrix[:, :3].sum() <= called.sum() and matrix[3, 3] == 0
    truth.ignore = None
    assert confusion(found, truth, HALF, 3)[:, :3].sum(0).tolist() == [
        np.count_nonzero(called & (found.labels == k)) for k in (1, 2, 3)]


@pytest.mark.parametrize("seed", range(5))
def test_of_one_class_it_is_the_one_matching(seed):
    truth, found = random_scene(seed)
    truth.labels, found.labels = np.ones(len(truth.labels), int), np.ones(len(found.labels), int)
    called = found.scores >= 0.5
    met = match(found, truth)[called]
    hits, false = np.count_nonzero((met >= 0) & ~truth.ignored[met]), np.count_nonzero(met < 0)
    assert confusion(found, truth, HALF[:1], 1).tolist() == [[hits, np.count_nonzero(~truth.ignored) - hits], [false, 0]]


def test_nothing_is_confused_with_nothing():
    none, some = boxes([], []), boxes([(0, 2, 0, 0, 9, 9)], [0.9])
    assert counted(confusion(none, none, HALF, 3)) == {}
    assert counted(confusion(some, none, HALF, 3)) == {(3, 1): 1}
    assert counted(confusion(none, some, HALF, 3)) == {(1, 3): 1}
