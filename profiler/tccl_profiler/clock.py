"""Device clocks on the host's CLOCK_MONOTONIC, with error bounds; an offset is device minus host.

Stamps are about 10^18 ns, where float64 steps by 128 ns: only differences become floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from tccl_py.errors import MeasurementError

DRIFT_LIMIT_PPM = 500
"""Bound of two clocks' drift: crystals differ by 100 ppm, NTP slews by up to 500."""
WANDER_PPM = 1.0  # assumed deviation of a clock's rate from the fit, as devices warm up
KEPT = 32  # readings in a fit; older ones say little of a clock that wanders

_TOLERANCE_NS = 2_000  # deviation of a reading beyond all errors that is no jump


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """Device minus host was `offset_ns` +- `error_ns`, at the host's `at_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


def offset_from_pings(
    t0_ns: Sequence[int], d_ns: Sequence[int], t1_ns: Sequence[int], *, resolution_ns: int = 1
) -> ClockReading:
    """Return the reading of one burst: ping i left at t0, was stamped d, and was back at t1.

    The stamp was taken between t0 and t1, however unequal the ways, so the offset lies in [d - t1,
    d - t0]. The reading is the intersection of all pings' intervals (Cristian 1989, Marzullo 1984)
    at the middle of the shortest, each widened by the drift until then and by the counter's step.
    If it is empty, a clock jumped, and the shortest ping stands alone.
    """
    pings = [(int(t0), int(d), int(t1)) for t0, d, t1 in zip(t0_ns, d_ns, t1_ns, strict=True)]
    shortest = min(pings, key=lambda ping: ping[2] - ping[0])
    at = (shortest[0] + shortest[2]) // 2
    bounds = [_offset_bounds(ping, at, resolution_ns) for ping in pings]
    low, high = max(bound[0] for bound in bounds), min(bound[1] for bound in bounds)
    if low > high:
        low, high = _offset_bounds(shortest, at, resolution_ns)
    middle = (low + high) // 2
    return ClockReading(at_ns=at, offset_ns=middle, error_ns=high - middle)


def _offset_bounds(ping: tuple[int, int, int], at: int, resolution_ns: int) -> tuple[int, int]:
    t0, d, t1 = ping
    drifted = max(abs(t0 - at), abs(t1 - at)) * DRIFT_LIMIT_PPM // 1_000_000 + 1
    return d - t1 - drifted, d + resolution_ns - 1 - t0 + drifted


class Clock:
    """Offset and drift of one device, fitted to its readings; ask `jumped` before `add`.

    The fit is a line of offset over host time, about the first reading kept, in ns and ns/ns.
    Errors are bounds: a way back that is always longer does not average away.
    """

    def __init__(self, *, device: str = "device") -> None:
        self.device = device
        self._readings: tuple[ClockReading, ...] = ()

    def add(self, reading: ClockReading) -> None:
        """Add a reading to the fit; the oldest beyond 32 are dropped."""
        self._readings = (*self._readings, reading)[-KEPT:]
        first = self._readings[0]
        self._times = np.array([float(seen.at_ns - first.at_ns) for seen in self._readings])
        offsets = np.array([float(seen.offset_ns - first.offset_ns) for seen in self._readings])
        errors = np.array([float(max(seen.error_ns, 1)) for seen in self._readings])
        # Least squares with weights 1/error^2, and "no drift" as one more observation, as wrong as
        # a drift can be: it says nothing once readings lie seconds apart. About the weighted mean
        # time, offset and slope are independent.
        weights = errors**-2.0
        mean_time = float(weights @ self._times / weights.sum())
        away = weights * (self._times - mean_time)
        prior = 1e6 / DRIFT_LIMIT_PPM
        curvature = float(away @ (self._times - mean_time)) + prior**2
        self._slope = float(away @ offsets) / curvature
        self._start = float(weights @ offsets / weights.sum()) - self._slope * mean_time
        self._slope_error = (float(np.abs(away) @ errors) + prior) / curvature
        self._errors = np.abs(offsets - self._start - self._slope * self._times) + errors

    def host_ns(self, device_ns: int) -> tuple[int, int]:
        """Return the host time of a device's stamp and its error bound, both in ns.

        The bound holds, however unequal the ways of the pings, if the device's rate stays within 1
        ppm of an even one. It grows with the time to the nearest reading.
        """
        if not self._readings:
            raise MeasurementError(f"{self.device}: its clock was never read; ping it first")
        first = self._readings[0]
        since = int(device_ns) - first.at_ns - first.offset_ns
        elapsed = (since - self._start) / (1 + self._slope)
        # At the drift limit, a host's ns is that much longer than a device's; 1 ns is rounding.
        return first.at_ns + round(elapsed), math.ceil(self._error(elapsed) * 1.001) + 1

    def jumped(self, reading: ClockReading) -> str | None:
        """Return a notice if a new reading contradicts the fit beyond errors and tolerance."""
        if not self._readings:
            return None
        elapsed = float(reading.at_ns - self._readings[0].at_ns)
        offset = reading.offset_ns - self._readings[0].offset_ns
        off = offset - self._start - self._slope * elapsed
        allowed = reading.error_ns + self._error(elapsed)
        if abs(off) <= allowed + _TOLERANCE_NS:
            return None
        return (
            f"{self.device}: its clock jumped by {off / 1e3:+,.1f} us against the host's, of which "
            f"{allowed / 1e3:,.1f} us are explained; discard what it stamped since the last reading"
        )

    def _error(self, elapsed: float) -> float:
        """Return the line's error bound at a time, in ns: a reading's, and the drift since."""
        rate_error = self._slope_error + WANDER_PPM / 1e6
        return float(np.min(self._errors + np.abs(self._times - elapsed) * rate_error))
