"""A source that is asked for each set once: later askers get what was answered before."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from tccl_py.errors import MeasurementError
from tccl_py.model.measurement import BandwidthSource, Measurement
from tccl_py.model.transfer import TransferSet


class RememberingSource:
    """Wraps a source; several searches over it share their measurements.

    `sets_measured` counts what the source itself was asked, `sets_remembered` what it was not.
    The source is asked for one set at a time, so that little is lost when it fails. Hardware is
    asked in random order, so that what drifts meanwhile favours no place in a list.
    """

    def __init__(
        self,
        source: BandwidthSource,
        known: Mapping[TransferSet, Sequence[Measurement]] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self._source = source
        self._before = known if known is not None else {}
        self._times: dict[TransferSet, int] = {}
        self._answers: dict[tuple[TransferSet, int], Measurement] = {}
        self._random = random.Random(seed)
        self.sets_measured = 0
        self.sets_remembered = 0

    @property
    def simulated(self) -> bool:
        """As the source behind it."""
        return self._source.simulated

    @property
    def times_known(self) -> dict[TransferSet, int]:
        """How often each set was measured."""
        times = {key: len(known) for key, known in self._before.items()} | self._times
        return {key: count for key, count in times.items() if count}

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Answer each set from memory or, once, by the source.

        A set that is listed twice in one call is wanted twice: it gets two measurements.

        Raises:
            MeasurementError: as the source behind it, or its flows did not run together.
        """
        missing = self._missing(sets)
        self.sets_remembered += len(sets) - len(missing)
        if not self.simulated:
            self._random.shuffle(missing)
        for one in missing:
            (measurement,) = self._source.measure([one])
            if not measurement.is_together:
                raise MeasurementError(
                    f"{one}: its flows ran together for only {measurement.overlap:.0%} of the time"
                )
            self._keep(measurement)
            times = self.times_of(one)
            self._answers[one, times] = measurement
            self._times[one] = times + 1
            self.sets_measured += 1
        given = Counter[TransferSet]()
        answers = []
        for key in sets:
            answers.append(self._answer(key, given[key]))
            given[key] += 1
        return answers

    def _answer(self, key: TransferSet, number: int) -> Measurement:
        if (key, number) not in self._answers:
            self._answers[key, number] = self._before[key][number]
        return self._answers[key, number]

    def times_of(self, key: TransferSet) -> int:
        """Return how often a set was measured."""
        if key not in self._times:
            self._times[key] = len(self._before.get(key, ()))
        return self._times[key]

    def _missing(self, sets: Sequence[TransferSet]) -> list[TransferSet]:
        wanted = Counter[TransferSet]()
        missing = []
        for one in sets:
            wanted[one] += 1
            if wanted[one] > self.times_of(one):
                missing.append(one)
        return missing

    def _keep(self, measurement: Measurement) -> None:
        """Called with every new measurement before it is used."""
