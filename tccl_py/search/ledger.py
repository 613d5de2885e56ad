"""The ledger: every set a search asks for goes through it once, up to symmetry, and is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tccl_py.measurements.measurement import BandwidthSource, Measurement
from tccl_py.measurements.memory import RememberingSource
from tccl_py.search.hop_index import HopIndex
from tccl_py.search.problem import Budget

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
