"""Comparison of an arm with a baseline from rounds of jobs: ratio, 95 % interval and verdict.

The jobs of a round are interleaved, or run one after the other in an order that is reversed and
rotated from round to round, so that slow drift touches all arms alike. If two arms are equal, the
logarithms of their ratios, one a round, are symmetric about 0, whatever the noise: the signed-rank
test of Wilcoxon (1945) is exact then, and the averages of two ratios that it rests on give the
interval of Hodges and Lehmann (1963).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from tccl_py.statistics import hodges_lehmann, holm, signed_rank_p

Verdict = Literal["better", "same", "worse"]

SMALLEST_EFFECT = 0.01
"""Ratios closer to 1 than this count as the same."""
LEVEL = 0.95
"""Of the interval of a ratio."""
FALSE_RATE = 0.05
"""How often at most any row of any arm is called better or worse though all arms are equal."""
LEAST_ROUNDS = 6
"""Fewer have no 95 % interval."""
MAX_ROUNDS = 40


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of an arm over that of the baseline: above 1 the arm is faster.

    `ratio` is the median over rounds and their averages, `low` to `high` its 95 % interval; `p` is
    adjusted for all rows compared.
    """

    ratio: float
    low: float
    high: float
    p: float

    @property
    def verdict(self) -> Verdict:
        """Say better or worse only beyond chance, the interval and the smallest effect."""
        if self.p > FALSE_RATE:
            return "same"
        if self.low > 1 and self.ratio >= 1 + SMALLEST_EFFECT:
            return "better"
        if self.high < 1 and self.ratio <= 1 - SMALLEST_EFFECT:
            return "worse"
        return "same"

    @property
    def loses(self) -> bool:
        """Whether the whole interval lies below 1, by the smallest effect; by chance, perhaps."""
        return self.high < 1 and self.ratio <= 1 - SMALLEST_EFFECT

    @property
    def half_width(self) -> float:
        """Return half the width of the interval, relative to the ratio."""
        return (self.high - self.low) / 2 / self.ratio

    @property
    def open(self) -> bool:
        """Whether more rounds might change the verdict.

        The interval leaves out 1, or reaches beyond the smallest effect, without a verdict.
        """
        if self.verdict != "same":
            return False
        edge = 1 + SMALLEST_EFFECT
        leaning = not self.low <= 1 <= self.high and not 1 / edge < self.ratio < edge
        return leaning or self.half_width > SMALLEST_EFFECT


EQUAL = Compared(ratio=1.0, low=1.0, high=1.0, p=1.0)
"""The baseline over itself."""


def compare(
    arm: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]
) -> tuple[Compared, ...]:
    """Compare rows of seconds, one value a round, with the baseline's.

    The p of all rows are adjusted after Holm (1979): give those of all arms in one call.

    Raises:
        ValueError: fewer than LEAST_ROUNDS rounds, more than MAX_ROUNDS, or rows of other lengths.
    """
    logs = [
        [math.log(b / a) for a, b in zip(ours, base, strict=True)]
        for ours, base in zip(arm, baseline, strict=True)
    ]
    for row in logs:
        if not LEAST_ROUNDS <= len(row) <= MAX_ROUNDS:
            raise ValueError(f"{len(row)} rounds: {LEAST_ROUNDS} to {MAX_ROUNDS} can be compared")
    spans = [hodges_lehmann(row, level=LEVEL) for row in logs]
    return tuple(
        Compared(ratio=math.exp(span.middle), low=math.exp(span.low), high=math.exp(span.high), p=p)
        for span, p in zip(spans, holm([signed_rank_p(row) for row in logs]), strict=True)
    )
