"""Robust statistics: Holm's correction, signed-rank estimates, and intervals of medians.

scipy is imported when a test needs it, because commands start without it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import scipy  # whose parts load when they are first used


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate and its confidence interval, both ends included."""

    middle: float
    low: float
    high: float


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
    return Interval(
        middle=math.exp(np.median(averages)),
        low=math.exp(averages[outside]),
        high=math.exp(averages[-1 - outside]),
    )


def signed_rank_p(values: Sequence[float]) -> float:
    """Return the exact two-sided p value of Wilcoxon's signed-rank test (1945).

    Ties and zeros count in favour of the null hypothesis; scipy's exact test has neither.
    """
    array = np.asarray(values, dtype=float)
    ranks = scipy.stats.rankdata(np.abs(array))
    zeros = float(ranks[array == 0].sum())
    smaller = min(float(ranks[array > 0].sum()), float(ranks[array < 0].sum()))
    tails = _signed_rank_tails(len(array))
    return float(min(1.0, 2 * tails[min(math.ceil(smaller + zeros), len(tails) - 1)]))


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median with its distribution-free 95 % interval between two order statistics.

    Fewer than 6 values have no 95 % interval: the ends are the smallest and the largest then.

    >>> median_interval([4.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    Interval(middle=5.0, low=2.0, high=8.0)
    """
    ordered = sorted(values)
    # The number of values below the median is binomial.
    outside = max(0, int(scipy.stats.binom.ppf(0.025, len(ordered), 0.5)) - 1)
    return Interval(
        middle=float(np.median(ordered)), low=ordered[outside], high=ordered[-1 - outside]
    )


@functools.cache
def _signed_rank_tails(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return P(sum <= k) for the sum of a random subset of the ranks 1 to `count`."""
    chances = np.ones(1)
    for rank in range(1, count + 1):
        step = np.zeros(rank + 1)
        step[[0, rank]] = 0.5
        chances = np.convolve(chances, step)
    return np.cumsum(chances)
