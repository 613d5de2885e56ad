"""Measurements, and the protocol of anything that answers a transfer set with one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from tccl_py.transfers.transfer import TransferSet


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of one transfer set, all flows running together.

    `samples_gbps[i][r]` is flow i's rate in repeat r, in 10^9 bytes a second, flows in the set's
    order. `simulated` is true wherever the figure came from a model, and never lost on the way.
    `assumed` is true if the model's figures behind it are nobody's measurement.
    """

    transfers: str
    samples_gbps: tuple[tuple[float, ...], ...]
    simulated: bool
    assumed: bool = False
    skew_us: float | None = None
    overlap: float | None = None
    source: str = ""

    @property
    def gbps(self) -> tuple[float, ...]:
        """Median rate of each flow, in GB/s."""
        return tuple(float(np.median(row)) for row in self.samples_gbps)

    @property
    def total_gbps(self) -> float:
        """Sum of the flows' median rates, in GB/s."""
        return sum(self.gbps)

    @property
    def rate_gbps(self) -> float:
        """The slowest flow's median rate: what a ring gets, in GB/s."""
        return min(self.gbps)

    @property
    def relative_error(self) -> float:
        """Standard error of the slowest flow's median, relative to it; 0 with one sample.

        The median of n normal samples spreads sqrt(pi/2) times as far as their mean.
        """
        slowest = min(self.samples_gbps, key=lambda row: float(np.median(row)))
        middle = float(np.median(slowest))
        if len(slowest) < 2 or middle <= 0:
            return 0.0
        deviation = float(np.std(slowest, ddof=1))
        return math.sqrt(math.pi / 2 / len(slowest)) * deviation / middle


@runtime_checkable
class BandwidthSource(Protocol):
    """Anything that answers transfer sets: the profiler, the simulator, a journal."""

    @property
    def simulated(self) -> bool:
        """Whether its answers come from a model."""

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Answer each set, in the order given.

        Raises:
            MeasurementError: a set cannot be measured.
        """
