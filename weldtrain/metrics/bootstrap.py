"""95 % intervals of figures by resampling pictures, or whole groups of them such as all pictures of one weld (Efron, 1979).

They tell how far a figure would move with other pictures from where these come from. Pictures of one weld are alike, so that
taking them for independent promises too much; and of few groups, below some twenty, even theirs are too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weldtrain.metrics.matching import Boxes, counted, matches, take

Interval = tuple[float, float]

_IOUS = np.linspace(0.5, 0.95, 10)  # of COCO
_RECALLS = np.linspace(0, 1, 101)
_AREAS = {"small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, 1e10)}  # of COCO, px², both ends included
_ENTRIES = 2_000_000  # of resamples by detections that are in memory at once


def resamples(groups: np.ndarray, n: int, seed: int) -> np.ndarray:
    """How often each picture counts in each of `n` resamples, uint16 [n, pictures]. `groups` int [pictures] names the group of
    each; as many groups as there are get drawn with replacement, each with all its pictures. One group alone gives no spread."""
    names, member = np.unique(groups, return_inverse=True)
    rng, many = np.random.default_rng(seed), len(names)
    drawn = np.empty((n, len(member)), np.uint16)
    for row in drawn:
        row[:] = np.bincount(rng.integers(many, size=many), minlength=many)[member]
    return drawn


def totals(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """float64 [n]: in each resample the sum of `values` float [pictures], what each picture adds."""
    there = np.flatnonzero(values)
    adds, rows = np.asarray(values, np.float64)[there], max(1, _ENTRIES // max(len(there), 1))
    parts = [weights[start : start + rows, there] @ adds for start in range(0, len(weights), rows)]
    return np.concatenate([np.zeros(0), *parts])


def interval(values: np.ndarray, confidence: float = 0.95) -> Interval | None:
    """The ends, values themselves, between which this share of a figure's values float [n] in the resamples lies. Those of which
    nothing can be said are NaN and left out. None where they are more than half, and where all others are equal, as where nothing
    was missed: how sure that is, resampling cannot tell."""
    told = values[~np.isnan(values)]
    if 2 * len(told) < len(values) or not len(told) or told.min() == told.max():
        return None
    low, high = np.quantile(told, [(1 - confidence) / 2, (1 + confidence) / 2], method="inverted_cdf")
    return float(low), float(high)


def ratio_interval(numerator: np.ndarray, denominator: np.ndarray) -> Interval | None:
    """Of a ratio such as missed / defects, from the `totals` [n] of both."""
    return interval(np.divide(numerator, denominator, out=np.full(len(numerator), np.nan), where=denominator != 0))


def weighted_ap(
    scores: np.ndarray, hit: np.ndarray, picture: np.ndarray, defects_in: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """AP of one class at one IoU over COCO's 101 recall points in each resample, float64 [n]; NaN where it has no defects.

    Of each detection its `scores`, whether it is a `hit` and its `picture`, [d]; `defects_in` [pictures]; `weights` [n, pictures]
    as of `resamples`: ones give the AP itself.
    """
    defects = totals(weights, defects_in)
    ap = np.where(defects > 0, 0.0, np.nan)
    order = np.lexsort((picture, -scores))  # as COCO has it: of equal scores in the order of pictures
    at = np.flatnonzero(hit[order])
    if not len(at):
        return ap
    # Recall rises at hits alone and precision is highest there, so that the calls between two of them need no place each.
    calls_of, hits_of, first = picture[order[: at[-1] + 1]], picture[order[at]], np.append(0, at[:-1] + 1)
    rows = max(1, _ENTRIES // len(calls_of))
    for start in range(0, len(ap), rows):
        some = weights[start : start + rows]
        hits = np.cumsum(np.take(some, hits_of, axis=1), axis=1, dtype=np.float64)
        calls = np.cumsum(np.add.reduceat(np.take(some, calls_of, axis=1), first, axis=1, dtype=np.float64), axis=1)
        precision = np.zeros((len(some), len(at) + 1))  # 0 beyond the last hit
        np.divide(hits, calls, out=precision[:, :-1], where=calls > 0)
        precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        for i in np.flatnonzero(defects[start : start + rows]):
            reached = np.searchsorted(hits[i] / defects[start + i], _RECALLS)
            ap[start + i] = precision[i, reached].mean()
    return ap


def class_aps(found: Boxes, truth: Boxes, met: np.ndarray, classes: int, weights: np.ndarray) -> np.ndarray:
    """`weighted_ap` float64 [classes, n] of each of so many classes, by `met` of `match`."""
    ap = np.full((classes, len(weights)), np.nan)
    counts = counted(truth, met)
    for label in range(1, classes + 1):
        own = (found.labels == label) & counts
        defects_in = np.bincount(truth.image[(truth.labels == label) & ~truth.ignored], minlength=weights.shape[1])
        ap[label - 1] = weighted_ap(found.scores[own], met[own] >= 0, found.image[own], defects_in, weights)
    return ap


def resampled_aps(
    found: Boxes, truth: Boxes, classes: Sequence[str], weights: np.ndarray
) -> dict[str, np.ndarray | dict[str, np.ndarray]]:
    """COCO's AP in each resample: `map map_50 map_75 map_small map_medium map_large mar` float64 [n], and `per_class_ap
    per_class_ap_50` by name. `weights` [n, pictures] as of `resamples`; ones [1, pictures] give the figures of
    `evaluate_detections` of all detections. NaN without defects; the means are of the classes that have some in that resample."""
    met = list(matches(found, truth, _IOUS))
    ap = np.stack([class_aps(found, truth, of, len(classes), weights) for of in met])
    recall = np.mean([_recalls(truth, of, len(classes), weights) for of in met], 0)
    by_area = {f"map_{area}": mean_of_classes(_aps_of_area(found, truth, *ends, len(classes), weights))
               for area, ends in _AREAS.items()}
    return {"map": mean_of_classes(ap.mean(0)), "map_50": mean_of_classes(ap[0]), "map_75": mean_of_classes(ap[5]), **by_area,
            "mar": mean_of_classes(recall),
            "per_class_ap": dict(zip(classes, ap.mean(0))), "per_class_ap_50": dict(zip(classes, ap[0]))}


def _recalls(truth: Boxes, met: np.ndarray, classes: int, weights: np.ndarray) -> np.ndarray:
    """The share of each class's defects that any detection meets, float64 [classes, n]; NaN without defects."""
    hit = np.isin(np.arange(len(truth.labels)), met)
    share = np.full((classes, len(weights)), np.nan)
    for label in range(1, classes + 1):
        own = (truth.labels == label) & ~truth.ignored
        found, there = (totals(weights, np.bincount(truth.image[of], minlength=weights.shape[1])) for of in (own & hit, own))
        np.divide(found, there, out=share[label - 1], where=there > 0)
    return share


def _aps_of_area(found: Boxes, truth: Boxes, low: float, high: float, classes: int, weights: np.ndarray) -> np.ndarray:
    """AP over all IoUs of defects of such an area, float64 [classes, n], as COCO has it: a defect of another one, and what meets
    it, counts neither way, as does what meets nothing and is itself of another one."""
    there, called = (((area >= low) & (area <= high)) for area in (
        (boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (of.boxes.astype(np.float64) for of in (truth, found))))
    of_area, ap = replace(truth, ignore=truth.ignored | ~there), []
    for met in matches(found, truth, _IOUS, aside=~there):
        kept = (met >= 0) | called
        ap.append(class_aps(take(found, kept), of_area, met[kept], classes, weights))
    return np.mean(ap, 0)


def ap_intervals(
    found: Boxes, truth: Boxes, classes: Sequence[str], weights: np.ndarray
) -> dict[str, Interval | dict[str, Interval | None] | None]:
    """The interval of each figure of `resampled_aps`, by the same names; None where nothing can be said."""
    return {name: {of: interval(values) for of, values in figure.items()} if isinstance(figure, dict) else interval(figure)
            for name, figure in resampled_aps(found, truth, classes, weights).items()}


def mean_of_classes(ap: np.ndarray) -> np.ndarray:
    """float64 [n], of ap [classes, n] those that are numbers; NaN where none is."""
    there = (~np.isnan(ap)).sum(0)
    return np.divide(np.nansum(ap, 0), there, out=np.full(ap.shape[1], np.nan), where=there > 0)
