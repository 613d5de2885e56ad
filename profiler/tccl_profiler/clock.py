"""Stamps of a device's own counter on the host's CLOCK_MONOTONIC, with an error that holds.

An offset is the device's counter minus the host's clock at the same moment. Stamps are about
10^18 ns, where float64 steps by 128 ns: only differences to a reference reading become floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tccl_py.errors import MeasurementError

DRIFT_LIMIT_PPM = 500
"""Most that two clocks are taken to part: crystals do by 100 ppm, NTP slews by up to 500."""

WANDER_PPM = 1.0
"""How far a clock's rate is taken to stray from the fitted one, as devices warm up."""

KEPT = 32
"""Readings a fit is over; older ones say little of a clock that wanders."""

_Floats = NDArray[np.float64]


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """At the host's `at_ns`, device minus host was `offset_ns`, give or take `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


def offset_from_pings(
    t0_ns: Sequence[int],
    d_ns: Sequence[int],
    t1_ns: Sequence[int],
    *,
    resolution_ns: int = 1,
) -> ClockReading:
    """Reading from one burst: ping i left at t0, was stamped d, and was seen back at t1.

    The stamp was taken between t0 and t1, however unequal the two ways, so the offset lies in
    [d - t1, d - t0]; the reading is where the intervals of all pings meet (Cristian 1989, Marzullo
    1984), at the middle of the shortest. Each is widened by the drift until then and by the
    counter's step. If they do not meet, a clock jumped, and the shortest ping stands alone.

    Raises:
        MeasurementError: no ping, lists of unequal length, or a ping that ended before it began.
    """
    if not len(t0_ns) or not len(t0_ns) == len(d_ns) == len(t1_ns):
        what = f"{len(t0_ns)} departures, {len(d_ns)} stamps, {len(t1_ns)} returns"
        raise MeasurementError(f"pings: {what}; each ping needs all three")
    pings = [(int(t0), int(d), int(t1)) for t0, d, t1 in zip(t0_ns, d_ns, t1_ns, strict=True)]
    for index, (t0, _, t1) in enumerate(pings):
        if t1 < t0:
            raise MeasurementError(f"ping {index}: back {t0 - t1} ns before it left")
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
    away = max(abs(t0 - at), abs(t1 - at))
    drifted = away * DRIFT_LIMIT_PPM // 1_000_000 + 1
    return d - t1 - drifted, d + resolution_ns - 1 - t0 + drifted


class Clock:
    """Offset and drift of one device, fitted to its readings.

    Ask `jumped` before `add`; if it did, discard what was stamped since, and begin a new Clock.

    Args:
        device: its name, for sentences.
        tolerance_ns: what a reading may be off beyond all errors before that is called a jump.
    """

    def __init__(self, *, device: str = "device", tolerance_ns: int = 2_000) -> None:
        self.device, self.tolerance_ns = device, tolerance_ns
        self._readings: tuple[ClockReading, ...] = ()
        self._line: _Line | None = None

    def add(self, reading: ClockReading) -> None:
        """Take one more reading into the fit; the oldest beyond 32 are forgotten."""
        self._readings = (*self._readings, reading)[-KEPT:]
        self._line = _Line(self._readings, self.tolerance_ns)

    @property
    def drift_ppm(self) -> float:
        """How much faster the device counts than the host, in parts per million."""
        return self._fitted().slope * 1e6

    def host_ns(self, device_ns: int) -> tuple[int, int]:
        """Host time of a device's stamp and the error of that, both in ns.

        The error is a bound, however unequal the ways of the pings, if the device's rate stays
        within 1 ppm of an even one. It grows with the time to the nearest reading.

        Raises:
            MeasurementError: there is no reading yet.
        """
        line = self._fitted()
        since = int(device_ns) - line.device_ns
        elapsed = (since - line.start) / (1 + line.slope)
        # At the drift limit, a host's ns is that much longer than a device's; 1 ns is rounding.
        return line.at_ns + round(elapsed), math.ceil(line.error(elapsed) * 1.001) + 1

    def jumped(self, reading: ClockReading) -> str | None:
        """Say that a new reading contradicts the fit beyond both errors and the tolerance."""
        off, allowed = self._line.misses(reading) if self._line else (0.0, 0.0)
        if abs(off) <= allowed + self.tolerance_ns:
            return None
        return (
            f"{self.device}: its clock jumped by {off / 1e3:+,.1f} us against the host's, of which "
            f"{allowed / 1e3:,.1f} us are explained; discard what it stamped since the last reading"
        )

    def _fitted(self) -> _Line:
        if self._line is None:
            raise MeasurementError(f"{self.device}: its clock was never read; ping it first")
        return self._line


class _Line:
    """Offset over host time about a reference reading: `start` there, and `slope`, in ns and ns/ns.

    Its errors are bounds, not standard deviations: a way back that is always longer does not
    average away.
    """

    def __init__(self, readings: Sequence[ClockReading], tolerance_ns: int) -> None:
        # The reading in the middle is no outlier, so all that count are near it.
        middle = sorted(readings, key=lambda one: one.offset_ns)[len(readings) // 2]
        self.at_ns, self._offset_ns = middle.at_ns, middle.offset_ns
        self.device_ns = self.at_ns + self._offset_ns
        times = np.array([float(one.at_ns - self.at_ns) for one in readings])
        offsets = np.array([float(one.offset_ns - self._offset_ns) for one in readings])
        errors = np.array([float(max(one.error_ns, 1)) for one in readings])
        start, slope = _robust_line(times, offsets, errors)
        kept = np.abs(offsets - start - slope * times) <= errors + tolerance_ns
        self._fit(times[kept], offsets[kept], errors[kept])

    def _fit(self, times: _Floats, offsets: _Floats, errors: _Floats) -> None:
        """Least squares with weights 1/error^2, and "the drift is 0" as one more observation.

        That one is as far off as a drift can be, and says nothing once readings lie seconds apart.
        About the weighted mean time, offset and slope do not depend on each other.
        """
        weights = errors**-2.0
        mean_time = float(weights @ times / weights.sum())
        away = weights * (times - mean_time)
        prior = 1e6 / DRIFT_LIMIT_PPM
        curvature = float(away @ (times - mean_time)) + prior**2
        self.slope = float(away @ offsets) / curvature
        self.start = float(weights @ offsets / weights.sum()) - self.slope * mean_time
        self._slope_error = (float(np.abs(away) @ errors) + prior) / curvature
        self._times = times
        self._errors = np.abs(offsets - self.start - self.slope * times) + errors

    def error(self, elapsed: float) -> float:
        """Most the line can be off at a time, in ns: what some reading allows, and drift since."""
        rate_error = self._slope_error + WANDER_PPM / 1e6
        return float(np.min(self._errors + np.abs(self._times - elapsed) * rate_error))

    def misses(self, reading: ClockReading) -> tuple[float, float]:
        """How far a reading is off the line, and how far its error and the line's let it be."""
        elapsed = float(reading.at_ns - self.at_ns)
        off = reading.offset_ns - self._offset_ns - self.start - self.slope * elapsed
        return off, reading.error_ns + self.error(elapsed)


def _robust_line(times: _Floats, offsets: _Floats, errors: _Floats) -> tuple[float, float]:
    """Start and slope by weighted medians (Theil 1950, Sen 1968); a quarter may be wrong."""
    one, other = np.triu_indices(len(times), k=1)
    apart = times[other] - times[one]
    one, other, apart = one[apart != 0], other[apart != 0], apart[apart != 0]
    slope = 0.0
    if len(apart):
        slopes = (offsets[other] - offsets[one]) / apart
        slope = _weighted_median(slopes, np.abs(apart) / (errors[one] + errors[other]))
        slope = max(-DRIFT_LIMIT_PPM / 1e6, min(DRIFT_LIMIT_PPM / 1e6, slope))
    return _weighted_median(offsets - slope * times, 1 / errors), slope


def _weighted_median(values: _Floats, weights: _Floats) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
