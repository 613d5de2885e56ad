"""A source that measures each set once: it answers from memory, or from a journal file."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tccl_py.errors import MeasurementError
from tccl_py.model.measurement import BandwidthSource, Measurement
from tccl_py.model.transfer import TransferSet

if TYPE_CHECKING:
    from typing_extensions import Self

    from tccl_py.sources.journal import JournalFile


def remembering(source: BandwidthSource) -> RememberingSource:
    """Return a source that remembers: `source` itself if it does, as the source of a journal."""
    return source if isinstance(source, RememberingSource) else RememberingSource(source)


class RememberingSource:
    """A source with a memory, shared by several searches; a context manager.

    `source` measures sets that neither `known` nor the open `journal` has, each by itself, hardware
    in random order (of `seed`), so that drift favours no place in a list. New measurements are
    appended to the journal, which is closed with this source. `sets_measured` counts sets that the
    wrapped source measured, `sets_remembered` sets answered from memory.
    """

    def __init__(
        self,
        source: BandwidthSource,
        known: Mapping[TransferSet, Sequence[Measurement]] | None = None,
        *,
        journal: JournalFile | None = None,
        seed: int = 0,
    ) -> None:
        self._source = source
        self._journal = journal
        known = known if journal is None else journal.measurements
        self._before = known if known is not None else {}
        self._times: dict[TransferSet, int] = {}
        self._answers: dict[tuple[TransferSet, int], Measurement] = {}
        self._random = random.Random(seed)
        self.sets_measured = 0
        self.sets_remembered = 0

    @property
    def simulated(self) -> bool:
        """Return whether the wrapped source simulates."""
        return self._source.simulated

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices for the user on the journal, and on damaged lines in it."""
        return self._journal.notices if self._journal is not None else ()

    @property
    def times_known(self) -> dict[TransferSet, int]:
        """Number of measurements of each set."""
        times = {key: len(known) for key, known in self._before.items()} | self._times
        return {key: count for key, count in times.items() if count}

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Answer each set from memory or, once, by the source.

        A set that is listed twice in one call gets two measurements. Raises MeasurementError: the
        source fails, or the flows of a set did not run together.
        """
        missing = []
        wanted = Counter[TransferSet]()
        for key in sets:
            wanted[key] += 1
            if wanted[key] > self.times_of(key):
                missing.append(key)
        self.sets_remembered += len(sets) - len(missing)
        if not self.simulated:
            self._random.shuffle(missing)
        for key in missing:
            self.measure_anew(key)
        given = Counter[TransferSet]()
        answers = []
        for key in sets:
            number = given[key]
            if (key, number) not in self._answers:
                self._answers[key, number] = self._before[key][number]
            answers.append(self._answers[key, number])
            given[key] += 1
        return answers

    def measure_anew(self, transfers: TransferSet) -> Measurement:
        """Measure a set once more, whatever is known of it, and keep the result."""
        (measurement,) = self._source.measure([transfers])
        if not measurement.is_together:
            share = f"{measurement.overlap:.0%}"
            raise MeasurementError(f"{transfers}: its flows ran together for only {share} of it")
        if self._journal is not None:
            self._journal.append(measurement)
        times = self.times_of(transfers)
        self._answers[transfers, times] = measurement
        self._times[transfers] = times + 1
        self.sets_measured += 1
        return measurement

    def times_of(self, key: TransferSet) -> int:
        """Return how often a set was measured."""
        if key not in self._times:
            self._times[key] = len(self._before.get(key, ()))
        return self._times[key]

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
