"""At which score to call a defect: by a promise about misses that holds for new data, or by false calls, F1 or cost.

All take scores of one class: `hits` float [defects], the score of the detection that meets each defect, -inf where none does; and
`false` float [false calls]. A detection counts at a threshold when its score is at least that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from weldtrain.metrics.matching import Boxes


class NoPromise(ValueError):
    """The data do not support the promise. `defects` are so many more as would, if as few of them are missed; None if none do."""

    def __init__(self, why: str, defects: int | None) -> None:
        super().__init__(why)
        self.defects = defects


class Rule(NamedTuple):
    """How a threshold is chosen: `by` missed, f1, false_calls or cost, and what each of them asks for."""

    by: str = "missed"
    at_most_missed: float = 0.02
    confidence: float = 0.95
    false_calls_per_picture: float = 0.1  # of a class
    cost_of_a_miss: float = 10.0  # in false calls

    def told(self) -> str:
        """In words."""
        return {
            "missed": f"no more than {exactly(self.at_most_missed)} of a class missed, with {exactly(self.confidence)} "
                      "confidence",
            "f1": "the best F1 of each class",
            "false_calls": f"no more than {self.false_calls_per_picture:g} false calls of a class per picture",
            "cost": f"the least cost, a miss as dear as {self.cost_of_a_miss:g} false calls",
        }[self.by]


def exactly(share: float) -> str:
    """In percent, with all the digits that were asked for: 1.25%, 99.9%."""
    return f"{100 * share:.6g}%"


_ASKS = {"missed": ("at_most_missed", "confidence"), "f1": (), "false_calls": ("false_calls_per_picture",),
         "cost": ("cost_of_a_miss",)}
_MOST = 100_000  # defects: no one will find so many more
_UNSEEN = 0.5  # the threshold of a class of which there is no defect to choose by


def choose(
    found: Boxes, truth: Boxes, met: np.ndarray, classes: Sequence[str], pictures: int, rule: Rule
) -> dict[str, dict[str, Any]]:
    """By class the `threshold` in 0 ... 1, and `why` it is not that of the rule, "" where it is."""
    points = {}
    for label, name in enumerate(classes, 1):
        hits, false = scores_of(truth, found, label, met)
        threshold, why = _chosen(hits, false, pictures, rule) if len(hits) else (_UNSEEN, "there is no defect to choose by")
        points[name] = {"threshold": min(threshold, 1.0), "why": why}  # beyond every score it may be infinite
    return points


def _chosen(hits: np.ndarray, false: np.ndarray, pictures: int, rule: Rule) -> tuple[float, str]:
    if rule.by == "false_calls":
        return at_most_false(false, pictures, rule.false_calls_per_picture), ""
    if rule.by == "cost":
        return least_cost(hits, false, rule.cost_of_a_miss, 1), ""
    if rule.by == "f1":
        return best_f1(hits, false), ""
    try:
        return at_most_missed(hits, rule.at_most_missed, rule.confidence), ""
    except NoPromise as e:
        return best_f1(hits, false), f"{e}; the threshold is that of the best F1 instead"


def same_rule(rule: Rule, saved: Mapping[str, Any]) -> bool:
    """Whether thresholds that were `saved` with a rule, as a mapping, are those of this one, by what it asks for."""
    return all(saved.get(name) == getattr(rule, name) for name in ("by", *_ASKS[rule.by]))


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
    return _where_it_ends(lambda share: _binomial(missed, defects, share) > 1 - confidence, missed / defects, 1.0)


def rate_at_most(count: int, pictures: int, confidence: float = 0.95) -> float:
    """The upper bound of the rate per picture of which so few false calls are improbable, were they a Poisson process (Garwood,
    1936)."""
    def probable(rate: float) -> bool:
        return _so_few(count, rate) > 1 - confidence

    beyond = count + 1.0
    while probable(beyond):
        beyond *= 2
    return _where_it_ends(probable, 0.0, beyond) / pictures


def share_between(missed: int, defects: int, confidence: float = 0.95) -> tuple[float, float]:
    """Both bounds of the share that is missed, by Clopper and Pearson: either is wrong half as often as both together."""
    one_side = (1 + confidence) / 2
    return 1 - missed_at_most(defects - missed, defects, one_side), missed_at_most(missed, defects, one_side)


def rate_between(count: int, pictures: int, confidence: float = 0.95) -> tuple[float, float]:
    """Both bounds of the rate per picture, by Garwood."""
    one_side = (1 + confidence) / 2

    def improbable(rate: float) -> bool:  # so many
        return bool(count) and 1 - _so_few(count - 1, rate) <= 1 - one_side

    return (_where_it_ends(improbable, 0.0, float(count)) / pictures if count else 0.0), rate_at_most(count, pictures, one_side)


def verified(missed: int, defects: int, share: float, confidence: float = 0.95) -> str:
    """What other defects say of the promise that no more than `share` are missed: that it `holds`, with this confidence, that it
    is `broken`, with the same, or neither: `open`."""
    if _refused(missed, defects, share, confidence):
        return "holds"
    return "broken" if missed and 1 - _binomial(missed - 1, defects, share) <= 1 - confidence else "open"


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


def _where_it_ends(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The number between both from which on something that holds at the lower one does not."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high


def _refused(missed: int, n: int, share: float, confidence: float) -> bool:
    """Whether so few misses are improbable, were more than `share` missed: Clopper and Pearson's bound then lies below it."""
    return missed < n and _binomial(missed, n, share) <= 1 - confidence


def _so_few(count: int, rate: float) -> float:
    """The probability of at most `count` events of a Poisson process: the regularised upper incomplete gamma function."""
    return float(torch.special.gammaincc(*torch.tensor([count + 1.0, rate], dtype=torch.float64)))


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
    promise = f"no more than {exactly(share)} missed, with {exactly(confidence)} confidence"
    if n and missed / n >= share:
        return (f"{missed} of {n} defects are found at no threshold: at such a share no number of defects supports the promise "
                f"of {promise}"), None

    def supports(m: int) -> bool:
        return _refused(round(missed * m / max(n, 1)), m, share, confidence)

    low, enough = n, 2 * n + 1
    while not supports(enough):
        if enough > _MOST:
            return f"{n} defects, of which {n - missed} can be found, are far too few for the promise of {promise}", None
        low, enough = enough, 2 * enough
    while enough - low > 1:
        middle = (low + enough) // 2
        low, enough = (low, middle) if supports(middle) else (middle, enough)
    return (f"{n} defects, of which {n - missed} can be found, are too few for the promise of {promise}: some "
            f"{enough - n} more are needed"), enough - n
