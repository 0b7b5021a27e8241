"""What an inspector is told at given thresholds: nothing missed where all is found, the size from which defects are found, and
where a detector is weak; small cases by hand."""

import numpy as np
import pytest

from weldtrain.metrics import inspection
from weldtrain.metrics.bootstrap import resamples
from weldtrain.metrics.inspection import sizes_of
from weldtrain.metrics.matching import Boxes, match


def squares(n, side, seed=0):
    """One square of a picture each."""
    xy = np.random.default_rng(seed).uniform(0, 100, (n, 2))
    return np.concatenate([xy, xy + np.broadcast_to(np.asarray(side, float), n)[:, None]], 1)


def inspected(truth, found, classes=("crack", "slag"), pictures=None, threshold=0.5, unit=1.0):
    n = pictures or int(truth.image.max()) + 1
    return inspection.inspect(found, truth, match(found, truth), classes, n, thresholds=dict.fromkeys(classes, threshold),
                              size="longer_side", unit=unit, weights=resamples(np.arange(n), 200, 0), each=True, confidence=0.95)


def test_sizes_by_hand():
    boxes = np.array([[0, 0, 3, 4], [10, 10, 15, 10]], float)
    assert sizes_of(boxes, "longer_side").tolist() == [4, 5] and sizes_of(boxes, "diagonal").tolist() == [5, 5]
    assert sizes_of(boxes, "area_root").tolist() == pytest.approx([12**0.5, 0])


def test_perfect_detections_miss_nothing_at_no_false_call():
    boxes, ones = squares(160, 20), np.ones(160, int)
    truth = Boxes(np.arange(160), boxes, ones)
    found = Boxes(np.arange(160), boxes, ones, np.linspace(0.6, 1, 160))
    seen = inspected(truth, found, pictures=200)
    told, pods = inspection.by_class(seen, "logit", "log")
    assert told["slag"]["defects"] == 0 and told["slag"]["missed_share"] is told["slag"]["a90"] is None and not pods
    crack = told["crack"]
    assert (crack["missed"], crack["defects"], crack["false_calls_per_picture"]) == (0, 160, 0.0)
    assert crack["missed_at_most"] == pytest.approx(1 - 0.05 ** (1 / 160)) and (
        crack["missed_interval"] == pytest.approx((0, 1 - 0.025 ** (1 / 160))))  # exact, since no resample tells of a spread
    assert crack["false_calls_interval"] == pytest.approx((0, -np.log(0.025) / 200))
    assert crack["a90"] is None and "all 160 defects were found" in crack["no_pod"]
    clean = inspection.clean_pictures(seen)
    assert (clean["pictures"], clean["defects"], clean["missed_share"], clean["false_calls_per_picture"]) == (40, 0, None, 0.0)
    assert clean["false_calls_at_most"] == pytest.approx(-np.log(0.05) / 40)  # Garwood's for no event
    assert [r["ap_50"] for r in inspection.by_size(seen, found, truth, match(found, truth), 1.0, "longer_side")] == [1.0]
    assert not len(inspection.worst_misses(seen)) and not len(inspection.worst_false_calls(seen))


def test_pictures_in_groups_have_no_exact_interval():
    boxes, ones = squares(40, 20), np.ones(40, int)
    truth = Boxes(np.arange(40), boxes, ones)
    found, weld = Boxes(np.arange(40), boxes, ones, np.full(40, 0.9)), np.arange(40) // 10
    seen = inspection.inspect(found, truth, match(found, truth), ("crack",), 40, thresholds={"crack": 0.5}, size="diagonal",
                              unit=1.0, weights=resamples(weld, 200, 0), each=False, confidence=0.95)
    crack = inspection.by_class(seen, "logit", "log")[0]["crack"]
    assert crack["missed_interval"] is crack["false_calls_interval"] is None and crack["missed_at_most"] > 0


def test_the_size_that_is_found_comes_back_in_any_unit():
    rng = np.random.default_rng(1)
    side = rng.uniform(4, 40, 600)
    boxes, ones = squares(600, side), np.ones(600, int)
    hit = rng.random(600) < 1 / (1 + np.exp(-4 * np.log(side / 12)))
    far = squares(60, 10) + 500
    found = Boxes(np.concatenate([np.flatnonzero(hit), np.arange(60)]), np.concatenate([boxes[hit], far]),
                  np.ones(hit.sum() + 60, int), np.concatenate([np.full(hit.sum(), 0.9), np.full(60, 0.8)]))
    for unit in (1.0, 0.05, np.linspace(0.05, 0.0500001, 600)):
        (crack,), pods = (list(part.values()) for part in inspection.by_class(
            inspected(Boxes(np.arange(600), boxes, ones), found, ("crack",), unit=unit), "logit", "log"))
        mm = float(np.mean(unit))
        assert crack["false_calls_per_picture"] == pytest.approx(0.1) and crack["missed"] == (~hit).sum()
        assert crack["a50"] == pytest.approx(12 * mm, rel=0.1) and len(pods) == 1
        assert crack["a90"] == pytest.approx(12 * mm * 9**0.25, rel=0.1) and crack["a90"] < crack["a90_95"] < 1.3 * crack["a90"]
        assert crack["a50_interval"][0] < crack["a50"] < crack["a50_interval"][1] < 1.2 * crack["a50"]
        assert crack["a90_interval"][0] < crack["a90"] < crack["a90_interval"][1] < 1.3 * crack["a90"]


def test_ignored_truth_is_neither_missed_nor_called():
    boxes, ones = squares(20, 20), np.ones(20, int)
    truth = Boxes(np.arange(20), boxes, ones, ignore=np.arange(20) >= 10)
    found = Boxes(np.arange(10, 20), boxes[10:], ones[10:], np.full(10, 0.9))
    crack = inspection.by_class(inspected(truth, found, ("crack",)), "logit", "log")[0]["crack"]
    assert (crack["defects"], crack["missed"], crack["false_calls_per_picture"]) == (10, 10, 0.0)


@pytest.fixture
def small():
    """Picture 0: a crack of 10 found, one of 40 missed; picture 1: slag of 12 found below the threshold, a false crack of 9;
    picture 2: clean, a false slag of 70."""
    truth = Boxes(np.array([0, 0, 1]), np.array([[0, 0, 10, 10], [50, 50, 90, 60], [80, 80, 92, 90]], float), np.array([1, 1, 2]))
    found = Boxes(np.array([0, 1, 1, 2]), np.array([[0, 0, 10, 10], [80, 80, 92, 90], [5, 5, 14, 14], [10, 10, 80, 80]], float),
                  np.array([1, 2, 1, 2]), np.array([0.9, 0.3, 0.6, 0.7]))
    return truth, found, inspected(truth, found, pictures=3)


def test_rows_by_hand(small):
    truth, found, seen = small
    told = inspection.by_class(seen, "logit", "log")[0]
    assert {name: (r["defects"], r["missed"], r["false_calls_per_picture"]) for name, r in told.items()} == {
        "crack": (2, 1, pytest.approx(1 / 3)), "slag": (1, 1, pytest.approx(1 / 3))}
    assert told["crack"]["missed_share"] == 0.5 and "2 defects are too few" in told["crack"]["no_pod"]
    clean = inspection.clean_pictures(seen)
    assert (clean["pictures"], clean["false_calls_per_picture"]) == (1, 1.0)
    sizes = inspection.by_size(seen, found, truth, match(found, truth), 1.0, "longer_side")
    # 8 to 16: the crack above its false call, AP50 1, and slag that is called at 0.3, AP50 1; above 32 nothing is found.
    assert [tuple(r[key] for key in ("low", "high", "defects", "missed", "ap_50")) for r in sizes] == [
        (8, 16, 2, 1, 1.0), (32, 64, 1, 1, 0.0)]
    places = inspection.by_place(seen, np.array([[100, 100]] * 3))
    assert {name: (r["defects"], r["missed"], round(3 * r["false_calls_per_picture"])) for name, r in places.items()
            if r["defects"] or r["false_calls_per_picture"]} == {
        "top left": (1, 0, 1), "middle centre": (0, 0, 1), "middle right": (1, 1, 0), "bottom right": (1, 1, 0)}
    films = inspection.by_picture(seen, ["a", "b", "a"])
    assert {name: (r["pictures"], r["defects"], r["missed"], r["false_calls_per_picture"]) for name, r in films.items()} == {
        "a": (2, 2, 1, 0.5), "b": (1, 1, 1, 1.0)}


def test_small_false_calls_on_a_large_defect_count_against_small_ones():
    truth = Boxes(np.array([0, 0]), np.array([[0, 0, 200, 60], [300, 300, 310, 310]], float), np.array([1, 1]))
    inside = [[20 * k, 20, 20 * k + 10, 30] for k in range(1, 6)]
    boxes = np.array([*inside, [300, 300, 310, 310]], float)
    found = Boxes(np.zeros(6, int), boxes, np.ones(6, int), np.array([0.9] * 5 + [0.6]))
    seen = inspected(truth, found, ("crack",))
    small, large = inspection.by_size(seen, found, truth, match(found, truth), 1.0, "longer_side")
    assert small["ap_50"] == pytest.approx(1 / 6) and large["ap_50"] == 0.0


def test_a_false_call_of_a_class_that_is_not_there_has_its_row(small):
    _, found, _ = small
    crack = Boxes(np.array([0]), np.array([[0, 0, 10, 10]], float), np.array([1]))
    slag = inspection.by_class(inspected(crack, found, pictures=3), "logit", "log")[0]["slag"]
    assert (slag["defects"], slag["false_calls"], slag["false_calls_per_picture"]) == (0, 1, pytest.approx(1 / 3))


def test_values_behind_the_fortieth_stand_together(small):
    truth, found, _ = small
    seen = inspected(truth, found, pictures=50)
    told = inspection.by_picture(seen, [f"film {k // 2 if k < 20 else k}" for k in range(50)])
    assert next(iter(told)) == "film 0" and told["film 0"]["defects"] == 3 and len(told) == 40
    told = inspection.by_picture(seen, [f"film {k:02}" for k in range(50)])
    assert len(told) == 41 and told["10 others"]["pictures"] == 10 and sum(r["pictures"] for r in told.values()) == 50


def test_the_worst_come_first(small):
    _, _, seen = small
    assert inspection.worst_misses(seen).tolist() == [1, 2]  # 40 of cracks that are 25 in the middle, 12 of 12
    assert seen.false.scores[inspection.worst_false_calls(seen)].tolist() == [0.7, 0.6]
    assert inspection.worst_false_calls(seen, 1).tolist() == [1] and np.isneginf(seen.best[1]) and seen.best[2] == 0.3


def test_nothing_there_and_nothing_found_is_no_failure():
    none = Boxes(np.zeros(0, int), np.zeros((0, 4)), np.zeros(0, int), np.zeros(0))
    seen = inspected(none, none, pictures=2)
    sizes = inspection.by_size(seen, none, none, match(none, none), 1.0, "diagonal")
    told, pods = inspection.by_class(seen, "logit", "log")
    assert not pods and not sizes and all(r["defects"] == r["missed"] == 0 and r["missed_share"] is None for r in told.values())
    assert inspection.clean_pictures(seen)["false_calls_per_picture"] == 0.0
    assert all(r["missed_share"] is None for r in inspection.by_place(seen, np.array([[9, 9]] * 2)).values())
