"""Probability of detection against defect size from hits and misses, as MIL-HDBK-1823A and ASTM E2862 have it.

POD(a) = g(b0 + b1 x), with g the inverse of the link and x the size or its logarithm; b by maximum likelihood. a90/95 is the
upper 95 % bound of the size that is found nine times in ten: by the likelihood ratio, with Wald's beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch

_FEWEST, _ENOUGH = 10, 60  # defects: below, nothing can be said; MIL-HDBK-1823A asks for 60 of hits and misses
_CHI2 = 2.7055434540954146  # 90 % quantile of chi² with one degree of freedom: of one side 95 %
_Z95 = 1.6448536269514722  # quantile of the normal distribution
_STEPS, _CLOSE, _FAR = 100, 1e-10, 36.0
_RESAMPLED_STEPS, _LONGEST_STEP, _CLOSE_ENOUGH = 40, 2.0, 1e-6  # in units of the sizes' spread
_ENTRIES = 2_000_000  # of resamples by defects that are in memory at once
_GROUPS = 10  # of the test of fit
_FIT_P = 0.05


_FALLS = "larger defects are not found more often than smaller ones: POD does not rise with size"


class NoPod(ValueError):
    """There is no curve for these hits and misses, and why."""


@dataclass(frozen=True)
class Pod:
    """A fitted curve. Sizes are in the unit that was given; `covariance` float64 [2,2] is of (b0, b1), the inverse of Fisher's
    information; `warnings` say what speaks against relying on it."""

    link: str
    scale: str
    b0: float
    b1: float
    covariance: np.ndarray
    log_likelihood: float
    defects: int
    hits: int
    a90_95: float
    a90_95_wald: float
    fit_p: float
    warnings: tuple[str, ...]

    @property
    def a50(self) -> float:
        """The size that is found every other time."""
        return self.size_of(0.5)

    @property
    def a90(self) -> float:
        """The size that is found nine times in ten."""
        return self.size_of(0.9)

    def size_of(self, pod: float) -> float:
        """The size that is found with this probability."""
        return _size((_LINKS[self.link].quantile(pod) - self.b0) / self.b1, self.scale)

    def curve(self, sizes: Sequence[float] | np.ndarray) -> np.ndarray:
        """POD float64 [n] at these sizes."""
        return _LINKS[self.link].probability(self.b0 + self.b1 * _scaled(sizes, self.scale))

    def lower(self, sizes: Sequence[float] | np.ndarray) -> np.ndarray:
        """The lower 95 % bound of POD float64 [n] at these sizes, by Wald's interval of b0 + b1 x."""
        x = np.stack([np.ones(len(sizes)), _scaled(sizes, self.scale)])
        spread = np.sqrt(np.einsum("in,ij,jn->n", x, self.covariance, x))
        return _LINKS[self.link].probability(self.b0 + self.b1 * x[1] - _Z95 * spread)


def fit_pod(
    sizes: Sequence[float] | np.ndarray, detected: Sequence[bool] | np.ndarray, link: Literal["logit", "probit"] = "logit",
    scale: Literal["log", "linear"] = "log",
) -> Pod:
    """The curve for defects of these sizes float [n] that were `detected` or not, bool [n].

    Raises NoPod with the reason: sizes that are no numbers (of a logarithmic scale, not above 0), fewer than ten defects, all of
    them found or none, all found that are larger than those missed (so that every steeper curve fits better), and a POD that
    does not rise with size.
    """
    sizes, detected = np.asarray(sizes, np.float64), np.asarray(detected, bool)
    if sizes.shape != detected.shape or sizes.ndim != 1:
        raise ValueError(f"sizes {sizes.shape} and detected {detected.shape} must be of one length")
    if not np.isfinite(sizes).all() or (scale == "log" and (sizes <= 0).any()):
        raise NoPod("sizes must be finite numbers" + ", above 0 on a logarithmic scale" * (scale == "log"))
    _check(sizes, detected)
    of, x = _LINKS[link], _scaled(sizes, scale)
    # Equal sizes count together, and x stands around 0 in units of its spread: else a step of Newton loses digits.
    centre, unit = float(x.mean()), float(x.std())
    u, where = np.unique((x - centre) / unit, return_inverse=True)
    trials, hits = (np.bincount(where, weights=w, minlength=len(u)) for w in (None, detected))
    design = np.stack([np.ones(len(u)), u])
    b, information, best = _maximum(of, design, np.zeros_like(u), trials, hits)
    if b[1] <= 0:
        raise NoPod(_FALLS)
    covariance = np.linalg.inv(information)
    at = of.quantile(0.9)
    u90 = float((at - b[0]) / b[1])
    slope = np.array([-1 / b[1], -u90 / b[1]])  # of u90 by b
    wald = u90 + _Z95 * math.sqrt(slope @ covariance @ slope)
    upper = _upper_bound(of, u, trials, hits, best, u90, at)
    back = np.array([[1, -centre / unit], [0, 1 / unit]])
    fit_p = _fit(of.probability(b @ design), trials, hits)
    warnings = []
    if len(sizes) < _ENOUGH:
        warnings.append(f"{len(sizes)} defects are few: MIL-HDBK-1823A asks for {_ENOUGH}")
    if fit_p < _FIT_P:
        warnings.append(f"the curve does not fit (Hosmer and Lemeshow, p = {fit_p:.3g}): is another link or scale better, or do "
                        "other things than size decide?")
    if u90 > u[-1]:
        warnings.append("a90 lies beyond the largest defect")
    if not math.isfinite(upper):
        warnings.append("a90/95 has no bound: size hardly decides, or there are too few defects")
    return Pod(link, scale, *(back @ b).tolist(), back @ covariance @ back.T, best, len(sizes), int(detected.sum()),
               _size(centre + unit * upper, scale), _size(centre + unit * wald, scale), fit_p, tuple(warnings))


def resampled_sizes(
    pod: Pod, sizes: np.ndarray, detected: np.ndarray, picture: np.ndarray, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """`a50` and `a90` float64 [n] of the curve that fits each resample best, with the link and scale of `pod`, the curve of all.

    Of each defect its size, whether it was `detected` and its `picture`, [d]; `weights` [n, pictures] as of `resamples`. Sizes
    are taken to a hundredth of their spread. Infinity where POD does not rise, NaN where nothing is found or nothing missed.
    """
    of, x = _LINKS[pod.link], _scaled(sizes, pod.scale)
    centre, unit = float(x.mean()), float(x.std())
    u, where = np.unique(np.round((x - centre) / unit, 2), return_inverse=True)
    order = np.argsort(where, kind="stable")
    first, hit, picture = np.searchsorted(where[order], np.arange(len(u))), np.asarray(detected, bool)[order], picture[order]
    start, rows = np.array([pod.b0 + pod.b1 * centre, pod.b1 * unit]), max(1, _ENTRIES // len(x))
    found: dict[str, list[np.ndarray]] = {"a50": [], "a90": []}
    for chunk in range(0, len(weights), rows):
        times = np.take(weights[chunk : chunk + rows], picture, axis=1)
        trials, hits = (np.add.reduceat(part, first, axis=1, dtype=np.float64) for part in (times, times * hit))
        b0, b1 = _maxima(of, u, start, trials, hits)
        nothing = (hits.sum(1) == 0) | (hits.sum(1) == trials.sum(1))
        for name, share in (("a50", 0.5), ("a90", 0.9)):
            at = centre + unit * np.divide(of.quantile(share) - b0, b1, out=np.full(len(b1), np.inf), where=b1 > 0)
            size = np.exp(np.minimum(at, 700.0)) if pod.scale == "log" else at
            found[name].append(np.where(nothing, np.nan, np.where(b1 > 0, size, np.inf)))
    return {name: np.concatenate([np.zeros(0), *parts]) for name, parts in found.items()}


def _maxima(of: type, u: np.ndarray, start: np.ndarray, trials: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """float64 [2,n]: the b of highest likelihood of each row of trials and hits [n,u], by Fisher's scoring from `start`. A row in
    which a size parts hits from misses has none: its curve grows steeper until what it gains no longer counts."""
    b = np.repeat(start[:, None], len(trials), 1)
    for _ in range(_RESAMPLED_STEPS):
        log_p, log_rest, density = of.parts(np.clip(b[0][:, None] + b[1][:, None] * u, -_FAR, _FAR))
        by_p, by_rest = density * np.exp(-log_p), density * np.exp(-log_rest)
        score, information = hits * by_p - (trials - hits) * by_rest, trials * by_p * by_rest
        s0, s1, i0, i1, i2 = (score.sum(1), score @ u, information.sum(1), information @ u, information @ u**2)
        determinant = i0 * i2 - i1**2
        sound = determinant > 1e-12 * i0 * i2
        step = np.zeros_like(b)
        np.divide([i2 * s0 - i1 * s1, i0 * s1 - i1 * s0], determinant, out=step, where=sound)
        step /= np.maximum(1.0, np.abs(step).max(0) / _LONGEST_STEP)
        b += step
        if np.abs(step).max(initial=0) < _CLOSE_ENOUGH:
            break
    return b


def _check(sizes: np.ndarray, detected: np.ndarray) -> None:
    if len(sizes) < _FEWEST:
        raise NoPod(f"{len(sizes)} defects are too few: {_FEWEST} at least, {_ENOUGH} to rely on it")
    if detected.all() or not detected.any():
        raise NoPod(f"all {len(sizes)} defects were {'found' if detected.all() else 'missed'}: smaller "
                    f"and larger ones are needed, of which some are {'missed' if detected.all() else 'found'}")
    if sizes.min() == sizes.max():
        raise NoPod("all defects are of one size")
    found, missed = sizes[detected], sizes[~detected]
    if found.max() <= missed.min():
        raise NoPod(_FALLS)
    if missed.max() <= found.min():
        raise NoPod(f"every defect up to {missed.max():g} was missed and every one from {found.min():g} on found: between them "
                    "any curve fits; defects of sizes around there are needed")


class _Logit:
    @staticmethod
    def probability(z: np.ndarray) -> np.ndarray:
        return 0.5 * (1 + np.tanh(0.5 * z))

    @staticmethod
    def quantile(p: float) -> float:
        return math.log(p / (1 - p))

    @staticmethod
    def parts(z: np.ndarray) -> tuple[np.ndarray, ...]:
        """The logarithms of the probability and of its complement, and the derivative of the probability."""
        return -np.logaddexp(0, -z), -np.logaddexp(0, z), 0.25 / np.cosh(0.5 * z) ** 2


class _Probit:
    @staticmethod
    def probability(z: np.ndarray) -> np.ndarray:
        return 0.5 * torch.special.erfc(torch.as_tensor(-z / math.sqrt(2))).numpy()  # ndtr loses digits where it is small

    @staticmethod
    def quantile(p: float) -> float:
        return NormalDist().inv_cdf(p)

    @staticmethod
    def parts(z: np.ndarray) -> tuple[np.ndarray, ...]:
        """As those of _Logit."""
        log_p, log_rest = (torch.special.log_ndtr(torch.as_tensor(v)).numpy() for v in (z, -z))
        return log_p, log_rest, np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


_LINKS = {"logit": _Logit, "probit": _Probit}


def _scaled(sizes: Sequence[float] | np.ndarray, scale: str) -> np.ndarray:
    return np.log(np.asarray(sizes, np.float64)) if scale == "log" else np.asarray(sizes, np.float64)


def _size(x: float, scale: str) -> float:
    return math.exp(min(x, 700.0)) if scale == "log" and math.isfinite(x) else x


def _maximum(
    of: type, design: np.ndarray, offset: np.ndarray, trials: np.ndarray, hits: np.ndarray, start: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, float]:
    """The b [k] of highest likelihood for offset + b design, design [k,n]; Fisher's information [k,k] there, and the logarithm of
    the likelihood. By Fisher's scoring; a step that lowers the likelihood is halved."""
    b = np.zeros(len(design)) if start is None else start
    value, score, information = _likelihood(of, b, design, offset, trials, hits)
    for _ in range(_STEPS):
        step = np.linalg.solve(information, score)
        for _ in range(_STEPS):
            nearer = _likelihood(of, b + step, design, offset, trials, hits)
            if nearer[0] >= value - abs(value) * 1e-14:
                break
            step = step / 2
        gained = nearer[0] - value
        b, (value, score, information) = b + step, nearer
        if gained < _CLOSE and np.abs(step).max() < 1e-7 * max(1.0, np.abs(b).max()):
            break
    return b, information, value


def _likelihood(
    of: type, b: np.ndarray, design: np.ndarray, offset: np.ndarray, trials: np.ndarray, hits: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Its logarithm, the gradient of that, and Fisher's information."""
    log_p, log_rest, density = of.parts(np.clip(offset + b @ design, -_FAR, _FAR))
    by_p, by_rest = density * np.exp(-log_p), density * np.exp(-log_rest)  # neither p nor 1 - p loses digits where it is small
    score = design @ (hits * by_p - (trials - hits) * by_rest)
    information = (design * (trials * by_p * by_rest)) @ design.T
    return float(hits @ log_p + (trials - hits) @ log_rest), score, information


def _upper_bound(
    of: type, u: np.ndarray, trials: np.ndarray, hits: np.ndarray, best: float, u90: float, at: float
) -> float:
    """The largest x that the likelihood ratio does not refuse as that of a POD of 90 %: the curve through it that fits best is
    less likely than `best` by half of chi²'s quantile. Infinity where none is refused."""
    slope = np.ones(1)

    def beyond(x: float) -> float:
        nonlocal slope
        slope, _, value = _maximum(of, (u - x)[None], np.full_like(u, at), trials, hits, slope)
        return 2 * (best - value) - _CHI2

    low, value_low, width = u90, -_CHI2, 0.5
    while (value_high := beyond(high := u90 + width)) <= 0:
        low, value_low, width = high, value_high, 2 * width
        if width > 1e6:
            return math.inf
    # The secant, in Illinois' way: an end that stays counts half.
    side = 0
    while high - low > 1e-9 * max(1.0, abs(high)):
        x = (low * value_high - high * value_low) / (value_high - value_low)
        value = beyond(x)
        if abs(value) < 1e-9:
            return x
        if value > 0:
            high, value_high, value_low, side = x, value, value_low / (2 if side > 0 else 1), 1
        else:
            low, value_low, value_high, side = x, value, value_high / (2 if side < 0 else 1), -1
    return high


def _fit(p: np.ndarray, trials: np.ndarray, hits: np.ndarray) -> float:
    """Hosmer and Lemeshow's p: how often hits in ten groups of like POD would differ as much from what the curve expects, were it
    true. 1 where there are fewer than three groups."""
    order = np.argsort(p, kind="stable")
    place = np.cumsum(trials[order]) - trials[order] / 2
    member = np.minimum((_GROUPS * place / trials.sum()).astype(int), _GROUPS - 1)
    n, expected, seen = (np.bincount(member, weights=w[order]) for w in (trials, trials * p, hits))
    kept = (n > 0) & (expected > 0) & (expected < n)
    if kept.sum() < 3:
        return 1.0
    n, expected, seen = n[kept], expected[kept], seen[kept]
    return _chi2_beyond(float((((seen - expected) ** 2) / (expected * (1 - expected / n))).sum()), int(kept.sum()) - 2)


def _chi2_beyond(x: float, freedom: int) -> float:
    """The share of chi² above x: Abramowitz and Stegun, 26.4.4 and 26.4.5."""
    if freedom % 2 == 0:
        return math.exp(-x / 2) * sum((x / 2) ** i / math.factorial(i) for i in range(freedom // 2))
    terms, term = 0.0, 1.0
    for i in range(1, freedom, 2):
        terms += term
        term *= x / (i + 2)
    return math.erfc(math.sqrt(x / 2)) + math.sqrt(2 * x / math.pi) * math.exp(-x / 2) * terms
