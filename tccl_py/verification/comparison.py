"""Plan against stock from pairs of jobs: how much faster, how sure, and what that comes to.

The two jobs of a pair take turns, or run one after the other and which goes first alternates, so
that what drifts slowly touches both alike. If plan and stock are the same, the logarithms of the
pairs' ratios are symmetric about 0, whatever the noise: the signed-rank test of Wilcoxon (1945) is
exact then, and the averages of two ratios that it rests on give the interval of Hodges and Lehmann
(1963).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

Verdict = Literal["better", "same", "worse"]

SMALLEST_EFFECT = 0.01
"""Ratios closer to 1 than this count as the same."""
LEVEL = 0.95
"""Of the interval of a ratio."""
FALSE_RATE = 0.05
"""How often at most any size is called better or worse though plan and stock are the same."""
LEAST_PAIRS = 6
"""Fewer have no 95 % interval."""
MAX_PAIRS = 40


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Plan over stock in speed: above 1 the plan is faster.

    `ratio` is the median over pairs and their averages, `low` to `high` its 95 % interval; `p` is
    adjusted for all sizes compared.
    """

    ratio: float
    low: float
    high: float
    p: float

    @property
    def verdict(self) -> Verdict:
        """What it comes to: beyond chance, beyond the interval, and beyond the smallest effect."""
        if self.p > FALSE_RATE:
            return "same"
        if self.low > 1 and self.ratio >= 1 + SMALLEST_EFFECT:
            return "better"
        if self.high < 1 and self.ratio <= 1 - SMALLEST_EFFECT:
            return "worse"
        return "same"

    @property
    def half_width(self) -> float:
        """Of the interval, relative to the ratio."""
        return (self.high - self.low) / 2 / self.ratio

    @property
    def open(self) -> bool:
        """Whether more pairs might change the verdict.

        The interval leaves out 1, or reaches beyond the smallest effect, without a verdict.
        """
        if self.verdict != "same":
            return False
        edge = 1 + SMALLEST_EFFECT
        leaning = not self.low <= 1 <= self.high and not 1 / edge < self.ratio < edge
        return leaning or self.half_width > SMALLEST_EFFECT


def compare(
    plan: Sequence[Sequence[float]], stock: Sequence[Sequence[float]]
) -> tuple[Compared, ...]:
    """Compare sizes: for each the seconds a call in every pair, of the plan's job and of stock's.

    The p of all are adjusted after Holm (1979).

    Raises:
        ValueError: fewer than LEAST_PAIRS pairs, more than MAX_PAIRS, or not as many on both sides.
    """
    rows = []
    for ours, theirs in zip(plan, stock, strict=True):
        logs = [math.log(b / a) for a, b in zip(ours, theirs, strict=True)]
        rows.append((*_interval(logs), _p(logs)))
    adjusted = _holm([row[3] for row in rows])
    return tuple(
        Compared(ratio=math.exp(middle), low=math.exp(low), high=math.exp(high), p=p)
        for (middle, low, high, _), p in zip(rows, adjusted, strict=True)
    )


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """`worse` if any is, else `better` if any is.

    >>> overall(["same", "better", "worse"]), overall(["same", "better"])
    ('worse', 'better')
    """
    if "worse" in verdicts:
        return "worse"
    return "better" if "better" in verdicts else "same"


def _interval(logs: Sequence[float]) -> tuple[float, float, float]:
    """The middle of all averages of two, and how far its interval reaches."""
    count = len(logs)
    if not LEAST_PAIRS <= count <= MAX_PAIRS:
        raise ValueError(f"{count} pairs: {LEAST_PAIRS} to {MAX_PAIRS} can be compared")
    values = np.asarray(logs)
    first, second = np.triu_indices(count)
    averages = np.sort((values[first] + values[second]) / 2)
    out = _outside(count)
    middle = float(np.median(averages))
    return middle, float(averages[out]), float(averages[len(averages) - 1 - out])


def _outside(count: int) -> int:
    """How many averages lie beyond each end of the interval."""
    tails = np.cumsum(_rank_sums(count))
    return max(0, int(np.searchsorted(tails, (1 - LEVEL) / 2, side="right")) - 1)


def _p(logs: Sequence[float]) -> float:
    """Of Wilcoxon's signed-rank test, two-sided, ties in favour of no difference."""
    values = np.asarray(logs)
    sizes = np.abs(values)
    ranks = np.array([(np.sum(sizes < one) + (np.sum(sizes == one) + 1) / 2) for one in sizes])
    up, down = float(ranks[values > 0].sum()), float(ranks[values < 0].sum())
    zeros = float(ranks[values == 0].sum())
    smaller = math.ceil(min(up, down) + zeros)
    tails = np.cumsum(_rank_sums(len(logs)))
    return float(min(1.0, 2 * tails[min(smaller, len(tails) - 1)]))


@functools.cache
def _rank_sums(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """How likely each sum of the ranks 1 to `count` is, if each is in it or not by a coin."""
    chances = np.zeros(count * (count + 1) // 2 + 1)
    chances[0] = 1.0
    for rank in range(1, count + 1):
        shifted = np.zeros_like(chances)
        shifted[rank:] = chances[:-rank]
        chances = (chances + shifted) / 2
    return chances


def _holm(raw: Sequence[float]) -> list[float]:
    adjusted, worst = [1.0] * len(raw), 0.0
    for place, index in enumerate(sorted(range(len(raw)), key=lambda one: raw[one])):
        worst = max(worst, min(1.0, raw[index] * (len(raw) - place)))
        adjusted[index] = worst
    return adjusted
