"""A source that is asked for each set once: later askers get what was answered before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tccl_py.measurements.measurement import BandwidthSource, Measurement
from tccl_py.transfers.transfer import TransferSet


class RememberingSource:
    """Wraps a source; several searches over it share their measurements.

    `sets_measured` counts what the source itself was asked, `sets_remembered` what it was not.
    """

    def __init__(
        self, source: BandwidthSource, known: dict[str, list[Measurement]] | None = None
    ) -> None:
        self._source = source
        self._known = known or {}
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
        answers, wanted = [], Counter[str]()
        for one in sets:
            key = str(one)
            known = self._known.setdefault(key, [])
            if wanted[key] < len(known):
                self.sets_remembered += 1
            else:
                (measurement,) = self._source.measure([one])
                self._keep(measurement)
                known.append(measurement)
                self.sets_measured += 1
            answers.append(known[wanted[key]])
            wanted[key] += 1
        return answers

    def _keep(self, measurement: Measurement) -> None:
        """Called with every new measurement before it is used."""
