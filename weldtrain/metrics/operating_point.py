"""At which score to call a defect: by a promise about misses that holds for new data, or by false calls, F1 or cost.

All take scores of one class: `hits` float [defects], the score of the detection that meets each defect, -inf where none does; and
`false` float [false calls]. A detection counts at a threshold when its score is at least that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from weldtrain.metrics.matching import Boxes


class NoPromise(ValueError):
    """The data do not support the promise. `defects` are so many more as would, if as few of them are missed; None if none do."""

    def __init__(self, why: str, defects: int | None) -> None:
        super().__init__(why)
        self.defects = defects


def scores_of(truth: Boxes, found: Boxes, label: int, met: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`hits`, in the order of the truth, and `false` of a class, by `met` of `match`: what meets ignored truth is neither."""
    own = found.labels == label
    hits = np.full(len(truth.labels), -np.inf)
    hits[met[own & (met >= 0)]] = found.scores[own & (met >= 0)]
    return hits[(truth.labels == label) & ~truth.ignored], found.scores[own & (met < 0)]


def at_most_missed(hits: np.ndarray, share: float, confidence: float = 0.95) -> float:
    """The highest threshold of which it holds with this confidence that no more than `share` of defects are missed: of all that
    come from where these come from, each by itself.

    Thresholds are tested from the lowest up, each by the exact binomial test that more are missed, until the first that cannot be
    refused (fixed-sequence testing: Angelopoulos et al., Learn then Test, 2021); so the choice costs no confidence. Raises
    NoPromise where not even the lowest is refused.
    """
    n, missed = len(hits), int(np.isneginf(hits).sum())
    if not n or not _refused(missed, n, share, confidence):
        raise NoPromise(*_lack(n, missed, share, confidence))
    ranked = np.sort(hits[~np.isneginf(hits)])
    low, high = missed, n - 1  # misses that are allowed, and perhaps allowed
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _refused(middle, n, share, confidence) else (low, middle - 1)
    return float(ranked[low - missed])  # below which no more than so many lie


def missed_at_most(missed: int, defects: int, confidence: float = 0.95) -> float:
    """The upper bound of the share that is missed, by Clopper and Pearson: that of which so few misses are improbable."""
    if missed >= defects:
        return 1.0
    low, high = missed / defects, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _binomial(missed, defects, middle) > 1 - confidence else (low, middle)
    return high


def best_f1(hits: np.ndarray, false: np.ndarray) -> float:
    """The threshold of the highest F1 = 2 hits / (defects + calls); of equals the highest."""
    thresholds, found, calls = _counts(hits, false)
    return _best(thresholds, 2 * found / (len(hits) + found + calls))


def at_most_false(false: np.ndarray, pictures: int, per_picture: float) -> float:
    """The lowest threshold with no more false calls per picture than this."""
    allowed = math.floor(per_picture * pictures + 1e-9)
    ranked = np.sort(false)[::-1]
    return 0.0 if len(ranked) <= allowed else float(np.nextafter(ranked[allowed], np.inf))


def least_cost(hits: np.ndarray, false: np.ndarray, of_a_miss: float, of_a_false_call: float) -> float:
    """The threshold at which misses and false calls together cost least; of equals the highest."""
    thresholds, found, calls = _counts(hits, false)
    return _best(thresholds, -(of_a_miss * (len(hits) - found) + of_a_false_call * calls))


def _counts(hits: np.ndarray, false: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every threshold at which something changes, and one above all; hits and false calls at each."""
    hits = np.sort(hits[~np.isneginf(hits)])
    false = np.sort(false)
    thresholds = np.append(np.unique(np.concatenate([hits, false])), np.inf)
    return thresholds, len(hits) - np.searchsorted(hits, thresholds), len(false) - np.searchsorted(false, thresholds)


def _best(thresholds: np.ndarray, worth: np.ndarray) -> float:
    return float(thresholds[len(worth) - 1 - int(np.argmax(worth[::-1]))])


def _refused(missed: int, n: int, share: float, confidence: float) -> bool:
    """Whether so few misses are improbable, were more than `share` missed: Clopper and Pearson's bound then lies below it."""
    return missed < n and _binomial(missed, n, share) <= 1 - confidence


def _binomial(k: int, n: int, p: float) -> float:
    """The probability of at most k of n."""
    if p >= 1:
        return float(k >= n)
    i = np.arange(k + 1)
    ways = math.lgamma(n + 1) - _log_factorial(i) - _log_factorial(n - i)
    return float(np.exp(ways + i * math.log(p) + (n - i) * math.log1p(-p)).sum())


_log_factorial = np.vectorize(lambda n: math.lgamma(n + 1), otypes=[np.float64])


def _lack(n: int, missed: int, share: float, confidence: float) -> tuple[str, int | None]:
    """Why there is no promise, and how many more defects would support it."""
    promise = f"no more than {share:.2%} missed, with {confidence:.0%} confidence"
    if n and missed / n >= share:
        return (f"{missed} of {n} defects are missed at any threshold: at such a share no number of defects supports the promise "
                f"of {promise}"), None
    enough = next(m for m in _growing(n + 1) if _refused(round(missed * m / max(n, 1)), m, share, confidence))
    return (f"{n} defects, {missed} of them missed at any threshold, are too few for the promise of {promise}: some "
            f"{enough - n} more are needed"), enough - n


def _growing(m: int) -> Iterator[int]:
    """Every number from m on, then ever fewer of them: an answer to three digits."""
    while True:
        yield m
        m += max(1, m // 1000)
