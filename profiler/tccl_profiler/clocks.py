"""Clocks of devices, and of a job's hosts, on the controller's CLOCK_MONOTONIC, with error bounds.

An offset is device minus host. Stamps are about 10^18 ns, where float64 steps by 128 ns: only
differences become floats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from tccl_profiler.messages import Pinged
from tccl_py.errors import MeasurementError, SourceLostError

DRIFT_LIMIT_PPM = 500
"""Bound of two clocks' drift: crystals differ by 100 ppm, NTP slews by up to 500."""
WANDER_PPM = 1.0  # assumed deviation of a clock's rate from the fit, as devices warm up
KEPT = 32  # readings in a fit; older ones say little of a clock that wanders

_TOLERANCE_NS = 2_000  # deviation of a reading beyond all errors that is no jump
JUMP_NS = 1_000_000
"""More than this beyond all errors is a jump; below, NTP may have corrected a clock's rate."""
_LOOSE = 2.0
_SLACK_NS = 10_000
_OFTEN_S = 0.05  # a clock that cannot be read any better is not read more often


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
    """Offset and drift of one device, fitted to its last 32 readings.

    The fit is a line of offset over host time, about the first reading kept, in ns and ns/ns.
    Errors are bounds: a way back that is always longer does not average away.
    """

    def __init__(self, *, device: str = "device") -> None:
        self.device = device
        self._readings: tuple[ClockReading, ...] = ()

    def add(self, reading: ClockReading) -> str | None:
        """Add a reading to the fit; begin a new fit, and return a notice, if the clock jumped."""
        jump = self.find_jump(reading)
        self._readings = (*(() if jump else self._readings), reading)[-KEPT:]
        first = self._readings[0]
        self._times = np.array([float(seen.at_ns - first.at_ns) for seen in self._readings])
        offsets = np.array([float(seen.offset_ns - first.offset_ns) for seen in self._readings])
        errors = np.array([float(max(seen.error_ns, 1)) for seen in self._readings])
        # Least squares with weights 1/error^2, and "no drift" as one more observation, as wrong as
        # a drift can be: it says nothing once readings lie seconds apart. About the weighted mean
        # time, offset and slope are independent.
        weights = errors**-2.0
        mean_time = float(weights @ self._times / weights.sum())
        weighted = weights * (self._times - mean_time)
        prior = 1e6 / DRIFT_LIMIT_PPM
        curvature = float(weighted @ (self._times - mean_time)) + prior**2
        self._slope = float(weighted @ offsets) / curvature
        self._start = float(weights @ offsets / weights.sum()) - self._slope * mean_time
        self._slope_error = (float(np.abs(weighted) @ errors) + prior) / curvature
        self._errors = np.abs(offsets - self._start - self._slope * self._times) + errors
        return jump

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

    def find_jump(self, reading: ClockReading) -> str | None:
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


class HostClock:
    """A host's CLOCK_MONOTONIC on the controller's, whose `own` clock needs no comparison."""

    def __init__(
        self, host: str, now_ns: Callable[[], int] = time.monotonic_ns, *, own: bool = False
    ) -> None:
        self.host = host
        self._own = own
        self._now_ns = now_ns
        self._clock = Clock(device=f"host {host}")
        self._best_ns = 0
        self._read_ns = 0

    def add(self, reading: ClockReading) -> None:
        """Add a reading, host minus controller; begin a new fit if the rate was corrected."""
        if self._read_ns:
            at_ns, error_ns = self._clock.host_ns(reading.at_ns + reading.offset_ns)
            off_ns, allowed_ns = at_ns - reading.at_ns, error_ns + reading.error_ns
            if abs(off_ns) > allowed_ns + JUMP_NS:
                raise SourceLostError(
                    f"host {self.host}: its clock jumped by {off_ns / 1e6:+,.1f} ms, of which "
                    f"{allowed_ns / 1e6:,.1f} ms are explained; find out what sets or suspends it, "
                    "and measure again"
                )
        self._clock.add(reading)
        self._best_ns, self._read_ns = reading.error_ns, reading.at_ns

    @property
    def is_due(self) -> bool:
        """Whether the error has grown so much that the clock should be read again."""
        if self._own:
            return False
        if not self._read_ns:
            return True
        if self._now_ns() - self._read_ns < _OFTEN_S * 1e9:
            return False
        return self.error_ns > _LOOSE * self._best_ns + _SLACK_NS

    @property
    def error_ns(self) -> int:
        """The error bound of the host's time now."""
        return self.here_ns(self.there_ns(self._now_ns()))[1]

    def here_ns(self, there_ns: int) -> tuple[int, int]:
        """Return the controller's time at a time of the host, and its error bound."""
        return (there_ns, 0) if self._own else self._clock.host_ns(there_ns)

    def there_ns(self, here_ns: int) -> int:
        """Return the host's time at a time of the controller."""
        guess = here_ns
        # The first step takes the offset, the second what the clocks drift within it.
        for _ in range(3):
            guess += here_ns - self.here_ns(guess)[0]
        return guess

    def here(self, pinged: Pinged) -> Pinged:
        """Return pings of a device as if the controller had sent them, bounds included."""
        asked_ns, seen_ns = map(self.here_ns, pinged.asked_ns), map(self.here_ns, pinged.seen_ns)
        return msgspec.structs.replace(
            pinged,
            asked_ns=tuple(at_ns - error_ns for at_ns, error_ns in asked_ns),
            seen_ns=tuple(at_ns + error_ns for at_ns, error_ns in seen_ns),
        )
