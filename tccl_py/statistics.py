"""Robust statistics: corrections for many tests, signed-rank estimates, intervals of medians."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt

LEAST_VALUES = 6
"""Values for an interval of 95 %: the median of fewer may lie beyond all of them."""
_CONFIDENCE = 0.95


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate and its confidence interval, both ends included.

    >>> f"{Interval(middle=1.234, low=1.2, high=1.3):.2f}"
    '1.23 (1.20 to 1.30)'
    """

    middle: float
    low: float
    high: float

    def __format__(self, digits: str) -> str:
        """Return the estimate, and the interval in brackets."""
        middle, low, high = (format(value, digits) for value in (self.middle, self.low, self.high))
        return f"{middle} ({low} to {high})"


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for multiple tests, in the given order (Holm 1979).

    >>> holm([0.01, 0.5, 0.02])
    [0.03, 0.5, 0.04]
    """
    raw = np.asarray(p_values, dtype=float)
    order = np.argsort(raw, kind="stable")
    steps = np.minimum(1.0, raw[order] * np.arange(len(raw), 0, -1))
    adjusted = np.empty_like(raw)
    adjusted[order] = np.maximum.accumulate(steps)
    return [float(p) for p in adjusted]


def ratios_of(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """Return the speed of `fast` over `slow` from times, pair by pair.

    >>> ratios_of([3.0, 4.0], [2.0, 2.0])
    [1.5, 2.0]
    """
    return [a / b for a, b in zip(slow, fast, strict=False)]


def ratio_interval(ratios: Sequence[float], *, level: float = 0.95) -> Interval:
    """Return the median of all pairwise geometric means of ratios, with its exact interval.

    The ends follow from the null distribution of the signed-rank sum (Hodges & Lehmann 1963).

    >>> ratio_interval([2.0, 0.5]).middle
    1.0
    """
    logs = np.asarray([math.log(ratio) for ratio in ratios])
    first, second = np.triu_indices(len(logs))
    averages = np.sort((logs[first] + logs[second]) / 2)
    tails = _signed_rank_tails(len(logs))
    outside = max(0, int(np.searchsorted(tails, (1 - level) / 2, side="right")) - 1)
    return _interval(averages, outside)


def unpaired_interval(slow: Sequence[float], fast: Sequence[float]) -> Interval:
    """Return the speed of `fast` over `slow` from times of jobs that are no pairs: 95 % interval.

    It is the median of all their ratios; the ends follow from the normal approximation of the
    rank-sum statistic (Hodges & Lehmann 1963), which holds 95 % from 6 against 12 values on.

    >>> f"{unpaired_interval([3.0, 3.1, 2.9] * 4, [2.0] * 6):.2f}"
    '1.50 (1.45 to 1.55)'
    """
    ratios = np.sort([math.log(a / b) for a in slow for b in fast])
    spread = math.sqrt(len(ratios) * (len(slow) + len(fast) + 1) / 12)
    outside = int(len(ratios) / 2 - NormalDist().inv_cdf((1 + _CONFIDENCE) / 2) * spread) - 1
    return _interval(ratios, max(0, outside))


def _interval(ordered: npt.NDArray[np.float64], outside: int) -> Interval:
    """Return the median of logarithms, with the ends that leave so many out on either side."""
    low, high = ordered[outside], ordered[-1 - outside]
    return Interval(middle=math.exp(np.median(ordered)), low=math.exp(low), high=math.exp(high))


def sign_flip_p(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return p values of rows whose values in each round are symmetric about 0, adjusted for all.

    The signs of whole rounds are flipped, all rows at once, in all ways (from 14 rounds on, in 4096
    random ones): a p value is the share of flips after which any row is as far from 0 as the row
    (Westfall & Young 1993). Fewer rounds than with Holm's correction suffice for large effects.

    >>> sign_flip_p([[0.3, 0.31, 0.3, 0.29, 0.3, 0.3], [0.1, -0.1, 0.1, 0.2, -0.3, 0.0]])
    [0.03125, 1.0]
    """
    if not rows:
        return []
    values = np.asarray(rows, dtype=float)
    sizes = np.abs(values)
    # 1. Let no round count more than twice the median round.
    clipped = np.minimum(sizes, 2 * np.median(sizes, axis=1, keepdims=True)) * np.sign(values)
    lengths = np.sqrt(np.sum(clipped**2, axis=1, keepdims=True))
    directions = np.divide(clipped, lengths, out=np.zeros_like(clipped), where=lengths > 0)
    # 2. Flip; the first flip is none, and the opposite of each is as far from 0.
    distances = np.abs(_flips(values.shape[1]) @ directions.T)
    farthest = np.max(distances, axis=1)
    return [float(np.mean(farthest >= own - 1e-9)) for own in distances[0]]


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median with its distribution-free 95 % interval.

    The ends are order statistics: the number of n values below the median is binomial with p = 1/2
    (Hoefler & Belli, SC15; Hunold & Carpen-Amarie, TPDS 2016). Between two ranks they are
    interpolated after Hettmansperger & Sheather (1986), so that the width shrinks with every
    value. Fewer than LEAST_VALUES values have no 95 % interval: the ends are the smallest and the
    largest then.

    >>> found = median_interval([4.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    >>> found.middle, round(found.low, 2), round(found.high, 2)
    (5.0, 2.23, 7.77)
    """
    ordered = sorted(values)
    rank, inwards = _ranks(len(ordered))
    low, high = ordered[rank - 1], ordered[-rank]

    def step(gap: float) -> float:
        # A gap over half the interval parts two modes: a point inside may miss the median.
        return inwards * gap if gap <= (high - low) / 2 else 0.0

    if inwards:
        low, high = low + step(ordered[rank] - low), high - step(high - ordered[-rank - 1])
    return Interval(middle=float(np.median(ordered)), low=low, high=high)


@functools.lru_cache(maxsize=1024)
def _ranks(count: int) -> tuple[int, float]:
    """Return the rank of the lower end, from 1, and the share of the way to the next."""
    if count < LEAST_VALUES:
        return 1, 0.0
    below = 0  # of 2^count equally likely cases, those with fewer than `rank` values below
    rank, held = 0, 1.0
    while True:
        below += math.comb(count, rank)
        narrower = 1 - 2 * below / 2**count
        if narrower < _CONFIDENCE:
            break
        rank, held = rank + 1, narrower
    share = (held - _CONFIDENCE) / (held - narrower)
    return rank, (count - rank) * share / (rank + (count - 2 * rank) * share)


@functools.cache
def _signed_rank_tails(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return P(sum <= k) for the sum of a random subset of the ranks 1 to `count`."""
    chances = np.ones(1)
    for rank in range(1, count + 1):
        step = np.zeros(rank + 1)
        step[[0, rank]] = 0.5
        chances = np.convolve(chances, step)
    return np.cumsum(chances)


def _flips(rounds: int) -> npt.NDArray[np.float64]:
    """Return signs of rounds, a row a flip; the first row is all 1."""
    if rounds <= 13:
        numbers = np.arange(2 ** (rounds - 1))[:, np.newaxis]
        return np.asarray(1.0 - 2 * (numbers >> np.arange(rounds) & 1))
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(4096, rounds))
    signs[0] = 1
    return signs
