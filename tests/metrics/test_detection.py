"""AP: 1 for the truth itself, 0 for nothing, n/a where nothing can be said; small cases by hand."""

import numpy as np
import pytest

from weldtrain.metrics.detection import evaluate_detections
from weldtrain.metrics.matching import Boxes, match


def boxes(rows, scores=None, ignore=None):
    """rows of (picture, label, x1, y1, x2, y2)."""
    a = np.array(rows, float).reshape(-1, 6)
    return Boxes(a[:, 0].astype(int), a[:, 2:], a[:, 1].astype(int),
                 None if scores is None else np.array(scores, float), None if ignore is None else np.array(ignore, bool))


def judged(truth, found, pictures=2, classes=("crack", "slag"), **more):
    return evaluate_detections(truth, found, match(found, truth), pictures=pictures, classes=classes, **more)


TRUTH = boxes([(0, 1, 10, 10, 50, 30), (0, 2, 60, 60, 100, 100), (1, 1, 5, 5, 25, 45)])


def test_the_truth_itself_is_perfect():
    m = judged(TRUTH, boxes([(0, 1, 10, 10, 50, 30), (0, 2, 60, 60, 100, 100), (1, 1, 5, 5, 25, 45)], [0.9, 0.8, 0.7]))
    assert m["map"] == m["map_50"] == m["map_75"] == m["mar"] == 1.0
    assert m["per_class_ap"] == {"crack": 1.0, "slag": 1.0}
    assert m["false_calls_per_picture"] == 0


def test_one_picture_with_two_boxes_is_perfect_too():
    # Where ids begin at 0, both COCO implementations give 0.252 here.
    rows = [(0, 1, 0, 0, 30, 30), (0, 1, 50, 50, 90, 90)]
    assert judged(boxes(rows), boxes(rows, [0.5, 0.6]), pictures=1)["map"] == 1.0


def test_no_detections_is_zero_not_a_crash():
    m = judged(TRUTH, boxes([], []))
    assert m["map"] == m["map_50"] == 0.0 and m["per_class_ap"] == {"crack": 0.0, "slag": 0.0}


def test_a_class_without_truth_is_na_and_leaves_the_mean_alone():
    m = judged(TRUTH, boxes([(0, 1, 10, 10, 50, 30), (0, 3, 0, 0, 9, 9)], [0.9, 0.9]), classes=("crack", "slag", "porosity"))
    assert m["per_class_ap"]["porosity"] is None
    assert m["map"] == pytest.approx((m["per_class_ap"]["crack"] + 0.0) / 2)


def test_only_defect_free_pictures_give_na_and_count_false_calls():
    m = judged(boxes([]), boxes([(0, 1, 0, 0, 9, 9), (0, 1, 20, 0, 29, 9), (1, 1, 0, 0, 9, 9)], [0.9, 0.6, 0.1]))
    assert m["map"] is None and m["map_50"] is None and set(m["per_class_ap"].values()) == {None}
    assert m["false_calls_per_picture"] == m["false_calls_per_clean_picture"] == 1.0  # two sure ones on two pictures


def test_half_found_by_hand():
    # One of two cracks found, no false call: precision 1 up to recall 0.5, that is 51 of 101 recall points.
    truth = boxes([(0, 1, 0, 0, 40, 40), (1, 1, 0, 0, 40, 40)])
    m = judged(truth, boxes([(0, 1, 0, 0, 40, 40)], [0.9]))
    assert m["map_50"] == pytest.approx(51 / 101)


def test_a_surer_false_call_halves_precision_by_hand():
    m = judged(boxes([(0, 1, 0, 0, 40, 40)]), boxes([(0, 1, 60, 60, 90, 90), (0, 1, 0, 0, 40, 40)], [0.9, 0.8]), pictures=1)
    assert m["map_50"] == pytest.approx(0.5)
    assert m["false_calls_per_picture"] == 1.0 and m["false_calls_per_clean_picture"] is None


def test_iou_decides_by_hand():
    # 40x40 against 40x32 in the same corner: IoU 0.8, so found at 0.50 ... 0.80, seven thresholds of ten.
    m = judged(boxes([(0, 1, 0, 0, 40, 40)]), boxes([(0, 1, 0, 0, 40, 32.001)], [0.9]), pictures=1)
    assert m["map_75"] == 1.0 and m["map"] == pytest.approx(0.7)


def test_ignored_truth_counts_neither_way():
    truth = boxes([(0, 1, 0, 0, 40, 40), (0, 1, 50, 50, 90, 90)], ignore=[False, True])
    found = [(0, 1, 0, 0, 40, 40), (0, 1, 50, 50, 90, 90)]
    for rows in (found[:1], found):
        m = judged(truth, boxes(rows, [0.9] * len(rows)), pictures=1)
        assert m["map"] == 1.0 and m["false_calls_per_picture"] == 0


def test_a_second_detection_of_one_defect_is_a_false_call():
    m = judged(boxes([(0, 1, 0, 0, 40, 40)]), boxes([(0, 1, 0, 0, 40, 40), (0, 1, 0, 0, 40, 39)], [0.9, 0.8]), pictures=1)
    assert m["false_calls_per_picture"] == 1.0


def test_the_order_of_detections_and_pictures_does_not_matter():
    rng = np.random.default_rng(0)
    xy = rng.random((60, 2)) * 100
    rows = np.concatenate([rng.integers(0, 5, (60, 1)), rng.integers(1, 3, (60, 1)), xy, xy + 5 + rng.random((60, 2)) * 60], 1)
    noisy = rows + np.concatenate([np.zeros((60, 2)), rng.normal(0, 3, (60, 4))], 1)
    scores, order = rng.random(60), rng.permutation(60)
    assert judged(boxes(rows), boxes(noisy, scores), 5) == judged(boxes(rows[order]), boxes(noisy[order], scores[order]), 5)
