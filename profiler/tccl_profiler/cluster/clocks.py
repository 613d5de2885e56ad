"""The clocks of a job's hosts, as the controller reads them."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tccl_profiler.messages import Pinged
from tccl_profiler.rates import Clock, ClockReading
from tccl_py.errors import SourceLostError

JUMP_NS = 1_000_000
"""More than this beyond all errors is a jump; below, NTP may have corrected a clock's rate."""
_LOOSE = 2.0
_SLACK_NS = 10_000
_OFTEN_S = 0.05  # a clock that cannot be read any better is not read more often


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
