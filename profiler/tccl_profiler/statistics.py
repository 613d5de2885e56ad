"""Stopping rule, outliers, and drift of repeated measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np

from tccl_py.errors import InputError, MeasurementError

OUTLIER_SCORE = 3.5  # modified z-score beyond which a sample is flagged (Iglewicz & Hoaglin 1993)
MAD_FLOOR = 0.001  # share of the median below which a spread is the timer's step
_DRIFT = 0.02  # relative change of a median that is ignored


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A confidence interval of a median, both ends included; infinite for too few samples."""

    low: float
    high: float


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the confidence interval of the median, for any distribution.

    The ends are order statistics: the number of n samples below the median is binomial with p = 1/2
    (Hoefler & Belli, SC15; Hunold & Carpen-Amarie, TPDS 2016). Between two ranks they are
    interpolated after Hettmansperger & Sheather (1986), so that the width shrinks with every
    sample. Below 6 samples no pair of order statistics holds the median with 95 %.
    """
    ordered = _checked(samples)
    ranks = _ranks(len(ordered), confidence)
    if ranks is None:
        return Interval(low=-math.inf, high=math.inf)
    rank, inwards = ranks
    low, high = ordered[rank - 1], ordered[-rank]

    def step(gap: float) -> float:
        # A gap over half the interval parts two modes: a point inside may miss the median.
        return inwards * gap if gap <= (high - low) / 2 else 0.0

    return Interval(
        low=low + step(ordered[rank] - low), high=high - step(high - ordered[-rank - 1])
    )


def relative_width(interval: Interval, median: float) -> float:
    """Return width over median; infinite for a median of 0."""
    return (interval.high - interval.low) / abs(median) if median else math.inf


def outliers(samples: Sequence[float]) -> tuple[int, ...]:
    """Return the indices of samples far from the median by modified z-score, to be flagged.

    The median absolute deviation counts as at least 0.1 % of the median, because a coarse timer
    makes samples equal: nothing within 0.5 % of the median is flagged.
    """
    if not _checked(samples):
        return ()
    values = np.asarray(samples, dtype=np.float64)
    median = float(np.median(values))
    distances = np.abs(values - median)
    spread = max(float(np.median(distances)), MAD_FLOOR * abs(median))
    return tuple(int(i) for i in np.flatnonzero(0.6745 * distances > OUTLIER_SCORE * spread))


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """Repeat until every flow's 95 % interval of the median, relative to it, is below `target`.

    `minimum` and `limit` count repeats. Rows of `samples_by_flow` are flows, columns repeats.
    """

    target: float = 0.01
    minimum: int = 6
    limit: int = 30

    def __post_init__(self) -> None:
        if not (self.target > 0 and 1 <= self.minimum <= self.limit):
            what = f"target {self.target}, minimum {self.minimum}, limit {self.limit}"
            raise InputError("stopping rule", what, "give target > 0 and 1 <= minimum <= limit")

    def enough(self, samples_by_flow: Sequence[Sequence[float]]) -> bool:
        """Return whether the limit or the target is reached."""
        return _repeats(samples_by_flow) >= self.limit or self.reached(samples_by_flow)

    def reached(self, samples_by_flow: Sequence[Sequence[float]]) -> bool:
        """Return whether every flow's interval is narrower than the target."""
        if _repeats(samples_by_flow) < self.minimum:
            return False
        return all(
            relative_width(median_interval(row), float(np.median(row))) < self.target
            for row in samples_by_flow
        )


class Sentinel:
    """A set measured repeatedly during a run, to detect drift of the machine."""

    def __init__(self, *, transfers: str) -> None:
        self.transfers = transfers
        self._times = 0
        self._first: Sequence[Sequence[float]] = ()
        self._newest: Sequence[Sequence[float]] = ()

    def add(self, samples_by_flow: Sequence[Sequence[float]]) -> None:
        """Add a measurement of the set, rows as in `Stopping`."""
        _repeats(samples_by_flow)
        self._first = self._first or samples_by_flow
        if len(samples_by_flow) != len(self._first):
            counts = f"{len(samples_by_flow)} flows after {len(self._first)}"
            raise MeasurementError(f"sentinel {self.transfers}: {counts}; measure the same set")
        self._newest, self._times = samples_by_flow, self._times + 1

    def drift(self) -> str | None:
        """Return a notice of the flow that moved furthest beyond what is tolerated, or None."""
        pairs = list(zip(self._first, self._newest, strict=True))
        changes = [_certain_change(*pair) for pair in pairs]
        flow = max(range(len(changes)), key=lambda i: abs(changes[i]), default=0)
        if not changes or abs(changes[flow]) <= _DRIFT:
            return None
        before, after = (float(np.median(row)) for row in pairs[flow])
        return (
            f"sentinel {self.transfers}: flow {flow} went from {before:.4g} to {after:.4g} GB/s "
            f"({changes[flow]:+.1%}) since the first of {self._times} times; rates between "
            "may not be comparable: look for other jobs and for clocks lowered by heat"
        )


def _certain_change(first: Sequence[float], newest: Sequence[float]) -> float:
    """Return the median's relative change, 0 if facing sides of the intervals explain it."""
    before, after = float(np.median(first)), float(np.median(newest))
    old, new = median_interval(first), median_interval(newest)
    fell = math.hypot(before - old.low, new.high - after)
    rose = math.hypot(old.high - before, after - new.low)
    if abs(after - before) <= (fell if after < before else rose):
        return 0.0
    return (after - before) / before if before else math.copysign(math.inf, after)


@lru_cache(maxsize=1024)
def _ranks(count: int, confidence: float) -> tuple[int, float] | None:
    """Return the rank of the lower end, from 1, and the share of the way to the next rank."""
    if not 0 < confidence < 1:
        raise InputError("confidence", f"{confidence} is none", "give one between 0 and 1")
    below = 0  # of 2^count equally likely cases, those with fewer than `rank` samples below
    rank, held = 0, 1.0
    while rank <= count // 2:
        below += math.comb(count, rank)
        narrower = 1 - 2 * below / 2**count
        if narrower < confidence:
            break
        rank, held = rank + 1, narrower
    share = (held - confidence) / (held - narrower)
    inwards = (count - rank) * share / (rank + (count - 2 * rank) * share) if rank else 0.0
    return (rank, inwards) if rank else None


def _repeats(samples_by_flow: Sequence[Sequence[float]]) -> int:
    counts = sorted({len(row) for row in samples_by_flow})
    if len(counts) != 1:
        what = f"flows with {counts} samples" if counts else "no flows"
        raise MeasurementError(f"{what}; every flow of a set has one sample a repeat")
    return counts[0]


def _checked(samples: Sequence[float]) -> list[float]:
    for index, sample in enumerate(samples):
        if not math.isfinite(sample):
            raise MeasurementError(f"sample {index} is {sample}; a rate is a finite number")
    return sorted(float(sample) for sample in samples)
