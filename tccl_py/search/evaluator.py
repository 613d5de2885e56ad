"""The ledger: every set a search asks for goes through it once, up to symmetry, and is counted."""

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
from tccl_py.sources.memory import RememberingSource

SAFETY = 3.0
"""Standard errors by which a noisy rate is raised before it counts as an upper bound."""


class BudgetSpentError(Exception):
    """The budget is used up; the search ends with the best so far."""


class Ledger:
    """Asks a source for sets of hops; knows the answers, and what asking has cost."""

    def __init__(
        self,
        source: BandwidthSource,
        *,
        budget: Budget,
        noise: float,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source
        self._budget = budget
        self._share = budget
        self._noise = noise
        self._watch = watch
        self._known: dict[str, Measurement] = {}
        self._started = time.monotonic()
        self.sets_measured = 0
        self.sets_by_symmetry = 0
        self.assumed = False
        self._remembered_before = self._remembered

    @property
    def seconds(self) -> float:
        """Since the search began."""
        return time.monotonic() - self._started

    @property
    def _remembered(self) -> int:
        source = self._source
        return source.sets_remembered if isinstance(source, RememberingSource) else 0

    @property
    def sets_remembered(self) -> int:
        """Of `sets_measured`, those that the source had the answer to already."""
        return self._remembered - self._remembered_before

    @property
    def simulated(self) -> bool:
        """Whether the source answers from a model."""
        return self._source.simulated

    def share_out(self, parts: int) -> None:
        """From here on, let one of `parts` equal parts of what is left of the budget be spent."""
        sets, seconds = self._budget.sets, self._budget.seconds
        if sets is not None:
            sets = self.sets_measured + (sets - self.sets_measured) // parts
        if seconds is not None:
            seconds = self.seconds + (seconds - self.seconds) / parts
        self._share = Budget(sets=sets, seconds=seconds)

    @property
    def out_of_time(self) -> bool:
        """Whether this part's seconds are over."""
        return self._share.seconds is not None and self.seconds >= self._share.seconds

    def check_budget(self) -> None:
        """Raise BudgetSpentError if this part of it is."""
        share = self._share
        if share.sets is not None and self.sets_measured >= share.sets:
            raise BudgetSpentError
        if self.out_of_time:
            raise BudgetSpentError

    def rate(self, index: HopIndex, hops: Sequence[int]) -> float:
        """The slowest hop's rate with all of `hops` running, GB/s, measured at most once.

        Raises:
            BudgetSpentError: it would have to be measured and may not.
        """
        return self.measurement(index, hops).rate_gbps

    def upper(self, index: HopIndex, hops: Sequence[int]) -> float:
        """The rate, raised by what noise may have taken from it: an upper bound for supersets."""
        measurement = self.measurement(index, hops)
        return measurement.rate_gbps * (1 + SAFETY * self.relative_error(measurement))

    def relative_error(self, measurement: Measurement) -> float:
        """Relative standard error of a rate: its own, or the noise the problem states."""
        return max(measurement.relative_error, self._noise)

    def measurement(self, index: HopIndex, hops: Sequence[int]) -> Measurement:
        """The measurement of the smallest image of these hops."""
        smallest = index.canonical(hops)
        key = index.text(smallest)
        if key in self._known:
            self.sets_by_symmetry += 1
            return self._known[key]
        self.check_budget()
        (measurement,) = self._source.measure([index.transfer_set(smallest)])
        self._note(key, measurement)
        return measurement

    def exactly(self, index: HopIndex, hops: Sequence[int]) -> Measurement:
        """The measurement of these very hops, no image of them."""
        key = index.text(hops)
        if key not in self._known:
            self.check_budget()
            (measurement,) = self._source.measure([index.transfer_set(hops)])
            self._note(key, measurement)
        return self._known[key]

    def again(self, index: HopIndex, hops: Sequence[int], times: int) -> list[float]:
        """Rates of several fresh measurements of these very hops, GB/s."""
        wanted = index.transfer_set(hops)
        measurements = self._source.measure([wanted] * times)
        self.sets_measured += times
        return [measurement.rate_gbps for measurement in measurements]

    def _note(self, key: str, measurement: Measurement) -> None:
        self._known[key] = measurement
        self.sets_measured += 1
        self.assumed |= measurement.assumed
        self._watch()


# Symmetries are spot-checked by measuring before they are trusted.


DIFFERENCE = 0.05
"""Hops that a symmetry exchanges may differ this much (relative) and still count as equal."""


def trusted_index(
    space: HopSpace, symmetry: Symmetry, ledger: Ledger, *, checks: int | None
) -> HopIndex:
    """Index the space under the part of the symmetry that measurements of single hops bear out.

    Args:
        space: the hops.
        symmetry: automorphisms of the machine as described.
        ledger: measures; each class of hops is measured once, and `checks` more of its members.
        checks: None checks every member.
    """
    index = HopIndex(space, symmetry)
    rates = np.full(len(index.hops), np.nan)
    errors = [0.0]
    for orbit in _single_orbits(index):
        for hop in _spread(orbit, checks):
            measurement = ledger.exactly(index, [hop])
            rates[hop] = measurement.rate_gbps
            errors.append(ledger.relative_error(measurement))
        rates[orbit] = np.where(np.isnan(rates[orbit]), rates[orbit[0]], rates[orbit])
    allowed = max(DIFFERENCE, 2 * SAFETY * max(errors))
    classes = _classes(rates, allowed)
    kept = (classes[index.images] == classes[None, :]).all(axis=1)
    if kept.all():
        return index
    return HopIndex(space, _subgroup(index, symmetry, classes))


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
    """The first member and `checks` others, evenly spread."""
    if checks is None or checks + 1 >= len(orbit):
        return [int(hop) for hop in orbit]
    picked = np.linspace(0, len(orbit) - 1, checks + 1).astype(int)
    return [int(orbit[i]) for i in picked]


def _classes(rates: npt.NDArray[np.float64], allowed: float) -> npt.NDArray[np.int64]:
    """Numbers rates so that neighbours in size, closer than `allowed`, have one number."""
    order = np.argsort(rates)
    ordered = rates[order]
    jumps = ordered[1:] > ordered[:-1] * (1 + allowed)
    classes = np.empty(len(rates), dtype=np.int64)
    classes[order] = np.concatenate([[0], np.cumsum(jumps)])
    return classes


def _subgroup(index: HopIndex, symmetry: Symmetry, classes: npt.NDArray[np.int64]) -> Symmetry:
    # An element that takes a hop out of the space has no row of its own in `images`, so rows
    # are matched through the elements that stay inside.
    inside = index.inside
    keep = np.zeros(len(symmetry.elements), dtype=bool)
    keep[np.flatnonzero(inside)] = (classes[index.images] == classes[None, :]).all(axis=1)
    return keeping(symmetry, keep)


# Why is a set slow? The smallest part of it that is slow already, with few measurements.


Slow = Callable[[Sequence[int]], bool]
"""Tells whether hops are slow together; supersets of slow sets are slow."""


def smallest_slow_part(hops: Sequence[int], slow: Slow) -> tuple[int, ...]:
    """A subset that is slow and of which no proper part is; `hops` themselves must be slow.

    >>> smallest_slow_part([1, 2, 3, 4, 5], lambda part: {2, 5} <= set(part))
    (2, 5)
    """
    return tuple(sorted(_needed([], False, list(hops), _remembered(slow))))


def _needed(beside: list[int], grown: bool, hops: list[int], slow: Slow) -> list[int]:
    if grown and slow(beside):
        return []
    if len(hops) == 1:
        return hops
    half = len(hops) // 2
    first, second = hops[:half], hops[half:]
    from_second = _needed(beside + first, True, second, slow)
    from_first = _needed(beside + from_second, bool(from_second), first, slow)
    return from_first + from_second


def _remembered(slow: Slow) -> Slow:
    """`slow`, not asked again about parts of sets known to be quick."""
    quick: list[Counter[int]] = []

    def asked(part: Sequence[int]) -> bool:
        count = Counter(part)
        if any(count <= known for known in quick):
            return False
        answer = slow(part)
        if not answer:
            quick.append(count)
        return answer

    return asked


# The best ring set so far, and those so close that noise may have misjudged them.


Sequences = tuple[tuple[int, ...], ...]

MAX_FINALISTS = 64
"""Runners-up kept; more matter only where measurements are very noisy."""


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
        """How many of the hops bounce."""
        return int(self.index.bounces[list(self.hops)].sum())


class Incumbent:
    """Keeps the best candidate and the runners-up.

    `error` is the relative standard error of a score, the largest seen; `floor` is a score that
    is reached elsewhere.
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
    def surely_reached(self) -> float:
        """The score less what luck may have added to it: the best of many noisy ones is lucky."""
        return max(self._floor, self.score * (1 - 2 * self.error))

    @property
    def best(self) -> Candidate | None:
        """The best candidate, if there is one."""
        return self._candidates[0] if self._candidates else None

    def offer(
        self, score: float, index: HopIndex, sequences: Sequence[Sequence[int]], *, at: int
    ) -> None:
        """Take note of a measured ring set; on equal scores fewer bounces and rings win.

        `at` is how many sets had been measured by then; `improved_at` keeps it for the best.
        """
        if score > self.score:
            self.improved_at = at
        candidate = Candidate(
            score=score, index=index, sequences=tuple(tuple(one) for one in sequences)
        )
        self._candidates.append(candidate)
        self._candidates.sort(key=lambda c: (-round(c.score, 6), c.bounces, len(c.sequences)))
        del self._candidates[MAX_FINALISTS:]

    def finalists(self) -> list[Candidate]:
        """Candidates whose score is within three standard errors of the best."""
        return [c for c in self._candidates if c.score >= self.score * (1 - 3 * self.error)]

    def forget(self) -> None:
        """Forget all candidates, because what they were judged by no longer holds."""
        self._candidates.clear()
