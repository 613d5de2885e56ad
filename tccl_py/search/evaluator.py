"""Evaluation of hop sets for a search: each set is measured once, up to symmetry, and counted.

Also here: the symmetry check by measurement, the smallest slow part of a set (QuickXplain), and the
incumbent with its runners-up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.model.measurement import BandwidthSource, Measurement
from tccl_py.model.rings import HopSpace
from tccl_py.model.symmetry import Symmetry, keeping
from tccl_py.search.problem import Budget, HopIndex

SAFETY = 3.0
"""Standard errors by which a noisy rate is raised before it counts as an upper bound."""
DIFFERENCE = 0.05
"""Hops that a symmetry exchanges may differ this much (relative) and still count as equal."""
MAX_FINALISTS = 64
"""Runners-up kept; more matter only where measurements are very noisy."""

IsSlow = Callable[[Sequence[int]], bool]
"""Tells whether hops are slow together; supersets of slow sets are slow."""
Sequences = tuple[tuple[int, ...], ...]


class BudgetSpentError(Exception):
    """The budget is used up; the search ends with the best so far."""


class Evaluator:
    """Measures sets of hops by a source, remembers the results, and counts the cost.

    `noise` is the relative standard deviation of a measurement that does not state its own;
    `measured` is called after each measurement.
    """

    def __init__(
        self,
        source: BandwidthSource,
        *,
        budget: Budget,
        noise: float,
        measured: Callable[[], None] = lambda: None,
    ) -> None:
        self._source, self._noise, self._measured = source, noise, measured
        self._budget = self._allotted = budget
        self._known: dict[str, Measurement] = {}
        self._started = time.monotonic()
        self.sets_measured = self.sets_by_symmetry = 0
        self.assumed = False
        self._remembered_before = self._remembered

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._started

    @property
    def _remembered(self) -> int:
        return int(getattr(self._source, "sets_remembered", 0))

    @property
    def sets_remembered(self) -> int:
        """The part of `sets_measured` that the source remembered."""
        return self._remembered - self._remembered_before

    def allot(self, parts: int) -> None:
        """Limit spending, from here on, to one of `parts` equal parts of the remaining budget."""
        sets, seconds = self._budget.sets, self._budget.seconds
        if sets is not None:
            sets = self.sets_measured + (sets - self.sets_measured) // parts
        if seconds is not None:
            seconds = self.seconds + (seconds - self.seconds) / parts
        self._allotted = Budget(sets=sets, seconds=seconds)

    @property
    def out_of_time(self) -> bool:
        """Whether the allotted seconds are over."""
        return self._allotted.seconds is not None and self.seconds >= self._allotted.seconds

    def rate(self, index: HopIndex, hops: Sequence[int]) -> float:
        """Return the slowest hop's rate with all `hops` running, GB/s."""
        return self.measurement(index, hops).rate_gbps

    def upper(self, index: HopIndex, hops: Sequence[int]) -> float:
        """Return the rate raised by its possible noise: an upper bound for supersets, GB/s."""
        measurement = self.measurement(index, hops)
        return measurement.rate_gbps * (1 + SAFETY * self.relative_error(measurement))

    def relative_error(self, measurement: Measurement) -> float:
        """Return a rate's relative standard error: its own, or the noise the problem states."""
        return max(measurement.relative_error, self._noise)

    def measurement(self, index: HopIndex, hops: Sequence[int]) -> Measurement:
        """Return the measurement of the smallest symmetric image of `hops`."""
        smallest = index.canonical(hops)
        if index.text(smallest) in self._known:
            self.sets_by_symmetry += 1
        return self.measurement_as_is(index, smallest)

    def measurement_as_is(self, index: HopIndex, hops: Sequence[int]) -> Measurement:
        """Return the measurement of `hops` themselves, not of an image."""
        key = index.text(hops)
        if key not in self._known:
            sets = self._allotted.sets
            if self.out_of_time or (sets is not None and self.sets_measured >= sets):
                raise BudgetSpentError
            (measurement,) = self._source.measure([index.transfer_set(hops)])
            self._known[key] = measurement
            self.sets_measured += 1
            self.assumed |= measurement.assumed
            self._measured()
        return self._known[key]

    def remeasure(self, index: HopIndex, hops: Sequence[int], times: int) -> list[float]:
        """Return the rates of several fresh measurements of `hops` themselves, GB/s."""
        measurements = self._source.measure([index.transfer_set(hops)] * times)
        self.sets_measured += times
        return [measurement.rate_gbps for measurement in measurements]


# The symmetry check: symmetries are spot-checked by measurements before they are used.
def checked_index(
    space: HopSpace, symmetry: Symmetry, evaluator: Evaluator, *, checks: int | None
) -> HopIndex:
    """Index the space under the part of the symmetry that measurements of single hops confirm.

    One hop of each class is measured, and `checks` more members of the class (None: all).
    """
    index = HopIndex(space, symmetry)
    rates = np.full(len(index.hops), np.nan)
    errors = [0.0]
    for orbit in _single_orbits(index):
        for hop in _spread(orbit, checks):
            measurement = evaluator.measurement_as_is(index, [hop])
            rates[hop] = measurement.rate_gbps
            errors.append(evaluator.relative_error(measurement))
        rates[orbit] = np.where(np.isnan(rates[orbit]), rates[orbit[0]], rates[orbit])
    classes = _classes(rates, max(DIFFERENCE, 2 * SAFETY * max(errors)))
    confirmed = (classes[index.images] == classes[None, :]).all(axis=1)
    if confirmed.all():
        return index
    # Elements that take a hop out of the space have no row in `images`, and are dropped too.
    keep = np.zeros(len(symmetry.elements), dtype=bool)
    keep[np.flatnonzero(index.inside)] = confirmed
    return HopIndex(space, keeping(symmetry, keep))


def _single_orbits(index: HopIndex) -> list[npt.NDArray[np.int32]]:
    seen = np.zeros(len(index.hops), dtype=bool)
    orbits = []
    for hop in range(len(index.hops)):
        if not seen[hop]:
            orbit = np.unique(index.images[:, hop])
            seen[orbit] = True
            orbits.append(orbit)
    return orbits


def _spread(orbit: npt.NDArray[np.int32], checks: int | None) -> list[int]:
    """Return the first member and `checks` others, evenly spread."""
    if checks is None or checks + 1 >= len(orbit):
        return [int(hop) for hop in orbit]
    picked = np.linspace(0, len(orbit) - 1, checks + 1).astype(int)
    return [int(orbit[i]) for i in picked]


def _classes(rates: npt.NDArray[np.float64], allowed: float) -> npt.NDArray[np.int64]:
    """Number rates so that neighbours in size, closer than `allowed`, have one number."""
    order = np.argsort(rates)
    ordered = rates[order]
    jumps = ordered[1:] > ordered[:-1] * (1 + allowed)
    classes = np.empty(len(rates), dtype=np.int64)
    classes[order] = np.concatenate([[0], np.cumsum(jumps)])
    return classes


# QuickXplain (Junker 2004): the smallest slow part of a slow set, with few measurements.
def smallest_slow_part(hops: Sequence[int], is_slow: IsSlow) -> tuple[int, ...]:
    """Return a slow subset without a slow proper subset; `hops` themselves must be slow.

    >>> smallest_slow_part([1, 2, 3, 4, 5], lambda part: {2, 5} <= set(part))
    (2, 5)
    """
    return tuple(sorted(_quickxplain([], False, list(hops), _without_repetition(is_slow))))


def _quickxplain(background: list[int], grown: bool, hops: list[int], is_slow: IsSlow) -> list[int]:
    """Return the part of `hops` that is slow together with `background`."""
    # 1. If the background grew and is slow by itself, no hop is needed.
    if grown and is_slow(background):
        return []
    # 2. A single hop is needed.
    if len(hops) == 1:
        return hops
    # 3. Find what is needed of each half beside the other half.
    half = len(hops) // 2
    first, second = hops[:half], hops[half:]
    from_second = _quickxplain(background + first, True, second, is_slow)
    from_first = _quickxplain(background + from_second, bool(from_second), first, is_slow)
    return from_first + from_second


def _without_repetition(is_slow: IsSlow) -> IsSlow:
    """Return `is_slow`, but without calls for subsets of sets known to be fast."""
    fast: list[Counter[int]] = []

    def known_or_asked(part: Sequence[int]) -> bool:
        count = Counter(part)
        if any(count <= known for known in fast):
            return False
        slow = is_slow(part)
        if not slow:
            fast.append(count)
        return slow

    return known_or_asked


# The best ring set so far, and runners-up that noise may have misjudged.
class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A measured ring set: one sequence of hop numbers a ring, and its score in GB/s."""

    score: float
    index: HopIndex
    sequences: Sequences

    @property
    def hops(self) -> tuple[int, ...]:
        """All hops of all rings."""
        return tuple(hop for sequence in self.sequences for hop in sequence)

    @property
    def bounces(self) -> int:
        """The number of hops that bounce through host memory."""
        return int(self.index.bounces[list(self.hops)].sum())


class Incumbent:
    """The best candidate and the runners-up.

    `error` is the largest relative standard error of a score; `floor` is a score reached elsewhere;
    `improved_at` is the number of sets measured when the best was found.
    """

    def __init__(self, *, error: float = 0.0, floor: float = 0.0) -> None:
        self.error = error
        self._floor = floor
        self._candidates: list[Candidate] = []
        self.improved_at = 0

    @property
    def score(self) -> float:
        """The best score so far, GB/s; 0 before the first."""
        return self._candidates[0].score if self._candidates else 0.0

    @property
    def lower_bound(self) -> float:
        """The score less possible luck: the best of many noisy scores is lucky."""
        return max(self._floor, self.score * (1 - 2 * self.error))

    @property
    def best(self) -> Candidate | None:
        """The best candidate, if there is one."""
        return self._candidates[0] if self._candidates else None

    def offer(
        self, score: float, index: HopIndex, sequences: Sequence[Sequence[int]], *, at: int
    ) -> None:
        """Take a ring set measured as number `at`; fewer bounces and rings win equal scores."""
        if score > self.score:
            self.improved_at = at
        rings = tuple(tuple(sequence) for sequence in sequences)
        self._candidates.append(Candidate(score=score, index=index, sequences=rings))
        self._candidates.sort(key=lambda c: (-round(c.score, 6), c.bounces, len(c.sequences)))
        del self._candidates[MAX_FINALISTS:]

    def finalists(self) -> list[Candidate]:
        """Return the candidates within three standard errors of the best, one of each set."""
        close = [c for c in self._candidates if c.score >= self.score * (1 - 3 * self.error)]
        distinct: dict[str, Candidate] = {}
        for candidate in close:
            distinct.setdefault(candidate.index.text(candidate.hops), candidate)
        return list(distinct.values())

    def clear(self) -> None:
        """Drop all candidates, because their scores are no longer valid."""
        self._candidates.clear()
