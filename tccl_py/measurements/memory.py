"""A source that is asked for each set once: later askers get what was answered before."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from tccl_py.measurements.measurement import BandwidthSource, Measurement
from tccl_py.transfers.transfer import TransferSet


class RememberingSource:
    """Wraps a source; several searches over it share their measurements.

    `sets_measured` counts what the source itself was asked, `sets_remembered` what it was not.
    The source is asked for one set at a time, so that little is lost when it fails. Hardware is
    asked in random order, so that what drifts meanwhile favours no place in a list.
    """

    def __init__(
        self,
        source: BandwidthSource,
        known: dict[str, list[Measurement]] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self._source = source
        self._known = known or {}
        self._random = random.Random(seed)
        self.sets_measured = 0
        self.sets_remembered = 0

    @property
    def simulated(self) -> bool:
        """As the source behind it."""
        return self._source.simulated

    @property
    def times_known(self) -> dict[str, int]:
        """How often each set was measured, by its text."""
        return {key: len(known) for key, known in self._known.items()}

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Answer each set from memory or, once, by the source.

        A set that is listed twice in one call is wanted twice: it gets two measurements.

        Raises:
            MeasurementError: as the source behind it.
        """
        missing = self._missing(sets)
        self.sets_remembered += len(sets) - len(missing)
        if not self.simulated:
            self._random.shuffle(missing)
        for one in missing:
            (measurement,) = self._source.measure([one])
            self._keep(measurement)
            self._known.setdefault(str(one), []).append(measurement)
            self.sets_measured += 1
        given = Counter[str]()
        answers = []
        for key in map(str, sets):
            answers.append(self._known[key][given[key]])
            given[key] += 1
        return answers

    def _missing(self, sets: Sequence[TransferSet]) -> list[TransferSet]:
        wanted = Counter[str]()
        missing = []
        for one in sets:
            wanted[str(one)] += 1
            if wanted[str(one)] > len(self._known.get(str(one), ())):
                missing.append(one)
        return missing

    def _keep(self, measurement: Measurement) -> None:
        """Called with every new measurement before it is used."""
