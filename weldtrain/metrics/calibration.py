"""Whether scores are probabilities: of the detections with a score of 0.8, eight in ten should be right."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from weldtrain.metrics.bootstrap import Interval, interval, totals
from weldtrain.metrics.matching import Boxes, counted

_Z = 1.959963984540054  # 97.5 % quantile of the normal distribution: of both sides 95 %


class Bin(NamedTuple):
    """Detections with scores in [low, high), and 1 in the last: how many, their mean score, the share that is right, and the
    bounds of that share's 95 % interval (Wilson, 1927)."""

    low: float
    high: float
    count: int
    mean_score: float
    precision: float
    precision_low: float
    precision_high: float


def judged(found: Boxes, truth: Boxes, met: np.ndarray, least: np.ndarray | float = 0.0) -> tuple[np.ndarray, ...]:
    """Scores float [k] of the detections, whether each is right, bool [k], by `met` of `match`, and its picture, int [k]; of
    those of at least some score, 0 or float [detections]. What meets ignored truth is neither right nor wrong and left out."""
    counts = counted(truth, met) & (found.scores >= least)
    return found.scores[counts], met[counts] >= 0, found.image[counts]


def reliability(scores: np.ndarray, correct: np.ndarray, bins: int = 10) -> list[Bin]:
    """Of detections with `scores` float [n] in 0 ... 1 that are `correct` or not, bool [n]: `bins` of equal width, without those
    that are empty."""
    edges = np.linspace(0, 1, bins + 1)
    member = np.digitize(scores, edges[1:-1])
    count, score, right = (np.bincount(member, of, bins) for of in (None, scores, correct))
    return [Bin(float(edges[i]), float(edges[i + 1]), int(count[i]), float(score[i] / count[i]), float(right[i] / count[i]),
                *_wilson(right[i] / count[i], int(count[i]))) for i in np.flatnonzero(count)]


def calibration_error(scores: np.ndarray, correct: np.ndarray, bins: int = 10) -> float | None:
    """The expected calibration error: how far mean score and precision of a bin lie apart, on average of all detections (Guo et
    al., On Calibration of Modern Neural Networks, 2017). None without detections."""
    told = reliability(scores, correct, bins)
    return sum(b.count * abs(b.precision - b.mean_score) for b in told) / len(scores) if told else None


def error_interval(
    scores: np.ndarray, correct: np.ndarray, picture: np.ndarray, weights: np.ndarray, bins: int = 10
) -> Interval | None:
    """The interval of `calibration_error` by resampling, `weights` [n, pictures] as of `resamples`; `picture` int [k] of each
    detection. As an error is never below 0, chance makes it larger, and that of a resample once more: by as much as these lie
    above the figure on average they are lowered."""
    figure = calibration_error(scores, correct, bins)
    if figure is None:
        return None
    member, apart, count = np.digitize(scores, np.linspace(0, 1, bins + 1)[1:-1]), np.zeros(len(weights)), np.zeros(len(weights))
    for k in np.unique(member):
        own = member == k
        apart += np.abs(totals(weights, np.bincount(picture[own], correct[own] - scores[own], weights.shape[1])))
        count += totals(weights, np.bincount(picture[own], minlength=weights.shape[1]))
    errors = apart[count > 0] / count[count > 0]
    ends = interval(errors)
    above = max(0.0, float(errors.mean()) - figure) if ends else 0.0
    return ends and (max(0.0, ends[0] - above), ends[1] - above)


def _wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share that was seen in n."""
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return max(0.0, middle - half), min(1.0, middle + half)
