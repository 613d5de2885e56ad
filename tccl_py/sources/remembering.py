"""A source that measures each set once."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tccl_py.errors import BudgetSpentError, MeasurementError, require
from tccl_py.model.measurement import BandwidthSource, Measurement
from tccl_py.model.transfer import Sets, TransferSet, listed_sets

if TYPE_CHECKING:
    from typing_extensions import Self

    from tccl_py.sources.journal import JournalFile


def remembering(source: BandwidthSource) -> RememberingSource:
    """Return a source that remembers: `source` itself if it does, as the source of a journal."""
    return source if isinstance(source, RememberingSource) else RememberingSource(source)


def source_for(source: BandwidthSource, machine: str) -> RememberingSource:
    """Return a source that remembers, for a machine of this name.

    Raises InputError: the source simulates another machine.
    """
    remembered = remembering(source)
    right = "give a source of the machine"
    is_other = remembered.model not in ("", machine)
    require(not is_other, f"machine {machine}", f"the source simulates {remembered.model}", right)
    return remembered


class RememberingSource:
    """A source with a memory, shared by several searches; a context manager.

    `source` measures sets that neither `known` nor the open `journal` has, each by itself, hardware
    in random order, so that drift favours no place in a list. New measurements are appended to the
    journal, which is closed with this source. `times_measured` counts measurements by the wrapped
    source, `sets_remembered` answers from memory. A class that measures by itself wraps no source.
    """

    def __init__(
        self,
        source: BandwidthSource | None,
        known: Mapping[TransferSet, Sequence[Measurement]] | None = None,
        *,
        journal: JournalFile | None = None,
    ) -> None:
        self._source = source
        self._journal = journal
        self._before = (known or {}) if journal is None else journal.measurements
        self._new: dict[TransferSet, list[Measurement]] = {}
        self._random = random.Random(0)
        self._asked: set[tuple[TransferSet, int]] = set()
        self._most_sets, self._ends, self._deadline = math.inf, math.inf, math.inf
        self._spent_s = 0.0
        self.cut_short = False
        self.times_measured = 0
        self.sets_remembered = 0

    @property
    def simulated(self) -> bool:
        """Return whether the wrapped source simulates."""
        return self._source is not None and self._source.simulated

    @property
    def dry_run(self) -> bool:
        """Return whether the wrapped source measures host memory in the place of GPUs."""
        return getattr(self._source, "dry_run", False)

    @property
    def bounds_hold(self) -> bool:
        """Return whether rates by parts and by images hold by construction of the source."""
        return bool(getattr(self._source, "bounds_hold", False))

    @property
    def model(self) -> str:
        """Name of the simulated machine, "" of hardware."""
        simulated = getattr(self._source, "model", None)
        return simulated.machine.name if simulated is not None else ""

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices for the user on the journal, and on damaged lines in it."""
        return self._journal.notices if self._journal is not None else ()

    @property
    def sets_measured(self) -> int:
        """Number of sets that the wrapped source measured, each once or several times."""
        return len(self._new)

    @property
    def times_known(self) -> dict[TransferSet, int]:
        """Number of measurements of each set."""
        return {key: self.times_of(key) for key in (*self._before, *self._new)}

    def times_of(self, key: TransferSet) -> int:
        """Return how often a set was measured."""
        return len(self._before.get(key, ())) + len(self._new.get(key, ()))

    def measure(self, sets: Sets) -> Sequence[Measurement]:
        """Answer each set from memory or, once, by the source.

        A set may be a flow, or text as `0:4` or `G0->G0->G4 G4->G4->G0`. A set that is listed twice
        in one call gets two measurements. Raises MeasurementError: the source fails, or the flows
        of a set did not run together. BudgetSpentError: see `limited`. SourceLostError: a host is
        gone, or sets that were measured cannot be any more.
        """
        counts, requests = Counter[TransferSet](), []
        for key in listed_sets(sets):
            requests.append((key, counts[key]))
            counts[key] += 1
        # What a journal answers counts as well: a resumed run goes the same way.
        new = {request for request in requests if request not in self._asked}
        if self._asked and new:
            self._refuse_if(len(self._asked) + len(new) > self._most_sets or not self.has_time())
        self._asked |= new
        return self._answers(requests)

    def repeated(self, transfers: TransferSet, times: int) -> Sequence[Measurement]:
        """Answer a set several times, as `measure` does, or less often if the time is up.

        The set counts once for `limited`.
        """
        answers: list[Measurement] = []
        for number in range(times):
            try:
                answers += self._answers([(transfers, number)])
            except BudgetSpentError:
                if not answers:
                    raise
                break
        return answers

    def has_time(self) -> bool:
        """Return whether a set may be begun: the time is not up, and will not be up within it.

        The first set may always be.
        """
        time_now, usual_s = time.monotonic(), self._spent_s / max(1, self.times_measured)
        over = self._answered and (time_now > self._ends or time_now + usual_s > self._deadline)
        self.cut_short |= over
        return not over

    @property
    def _answered(self) -> bool:
        return self.times_measured + self.sets_remembered > 0

    def _refuse_if(self, over: bool) -> None:
        if over:
            self.cut_short = True
            raise BudgetSpentError("as many sets were measured, or as long, as is allowed")

    def _answers(self, requests: Sequence[tuple[TransferSet, int]]) -> Sequence[Measurement]:
        missing = [key for key, number in requests if number >= self.times_of(key)]
        self.sets_remembered += len(requests) - len(missing)
        if not self.simulated:
            self._random.shuffle(missing)
        for key in missing:
            self._refuse_if(not self.has_time())
            self.measure_anew(key)
        return [self._answer(key, number) for key, number in requests]

    @contextmanager
    def limited(self, sets: int | None, seconds: float | None) -> Iterator[Callable[[float], None]]:
        """Limit new sets in a block, which gets a function that allows a share of the limits.

        Beyond the share, sets that were not asked for before are refused, and `cut_short` tells so.
        The first set is not refused. A set that runs when all `seconds` are over is cut, where its
        source can.
        """
        begun, before, self.cut_short = time.monotonic(), len(self._asked), False

        def allow(share: float) -> None:
            self._most_sets = math.inf if sets is None else before + max(1, int(share * sets))
            self._ends = math.inf if seconds is None else begun + share * seconds

        try:
            allow(1.0)
            self._deadline = self._ends
            yield allow
        finally:
            self._most_sets = self._ends = self._deadline = math.inf

    def _answer(self, key: TransferSet, number: int) -> Measurement:
        before = self._before.get(key, ())
        return before[number] if number < len(before) else self._new[key][number - len(before)]

    def measure_anew(self, transfers: TransferSet) -> Measurement:
        """Measure a set once more, whatever is known of it, and keep the result."""
        self._start()
        begun = time.monotonic()
        measurement = self._measured(transfers)
        self._spent_s += time.monotonic() - begun
        if not measurement.is_together:
            share = f"{measurement.overlap:.0%}"
            raise MeasurementError(f"{transfers}: its flows ran together for only {share} of it")
        if self._journal is not None:
            self._journal.append(measurement)
        self._new.setdefault(transfers, []).append(measurement)
        self.times_measured += 1
        return measurement

    def _start(self) -> None:
        """Start what measures, which takes long once."""

    def _measured(self, transfers: TransferSet) -> Measurement:
        assert self._source is not None
        (measurement,) = self._source.measure([transfers])
        return measurement

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the journal, if there is one; it already has every measurement."""
        if self._journal is not None:
            self._journal.close()


class AnewSource:
    """Measures every set anew by a source that remembers, for comparisons over time."""

    def __init__(self, source: RememberingSource) -> None:
        self._source = source

    @property
    def simulated(self) -> bool:
        """Return whether the source simulates."""
        return self._source.simulated

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Measure each set once more; see `RememberingSource.measure`."""
        return [self._source.measure_anew(transfers) for transfers in sets]
