"""The clocks of hosts against the controller's: CLOCK_MONOTONIC by CLOCK_MONOTONIC.

A host is a device like another: its offset is read from a burst of pings, with a bound that holds
however unequal the two ways are (`tccl_profiler.clock`), and its drift is fitted over the session.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tccl_profiler.clock import Clock, ClockReading
from tccl_profiler.messages import Pinged
from tccl_py.errors import SourceLostError

JUMP_NS = 1_000_000
"""More than this beyond all errors is a jump; below, NTP may have corrected a clock's rate."""
_LOOSE = 2.0
_SLACK_NS = 10_000
_OFTEN_S = 0.05
"""A clock that cannot be read any better is not read more often."""


class HostClock:
    """One host's clock on the controller's.

    Args:
        host: its name.
        now_ns: the controller's CLOCK_MONOTONIC.
    """

    def __init__(self, host: str, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.host = host
        self._now_ns = now_ns
        self._clock = Clock(device=f"host {host}")
        self._best_ns = 0
        self._read_ns = 0

    def add(self, reading: ClockReading) -> None:
        """Take in a reading, host minus controller.

        Where it does not fit the others by a little, the clock's rate was corrected: from then on
        it is another clock.

        Raises:
            SourceLostError: the clock jumped.
        """
        if self._read_ns:
            at_ns, error_ns = self._clock.host_ns(reading.at_ns + reading.offset_ns)
            off_ns, allowed_ns = at_ns - reading.at_ns, error_ns + reading.error_ns
            if abs(off_ns) > allowed_ns + JUMP_NS:
                raise SourceLostError(
                    f"host {self.host}: its clock jumped by {off_ns / 1e6:+,.1f} ms, of which "
                    f"{allowed_ns / 1e6:,.1f} ms are explained; find out what sets or suspends it, "
                    "and measure again"
                )
            if self._clock.jumped(reading) is not None:
                self._clock = Clock(device=f"host {self.host}")
        self._clock.add(reading)
        self._best_ns, self._read_ns = reading.error_ns, reading.at_ns

    @property
    def is_due(self) -> bool:
        """Whether its error has grown so much since it was read that it should be read again."""
        if not self._read_ns:
            return True
        if self._now_ns() - self._read_ns < _OFTEN_S * 1e9:
            return False
        return self.error_ns > _LOOSE * self._best_ns + _SLACK_NS

    @property
    def error_ns(self) -> int:
        """How far off its time may be now."""
        return self._clock.host_ns(self.there_ns(self._now_ns()))[1]

    @property
    def offset_ns(self) -> int:
        """Its clock minus the controller's, now."""
        now = self._now_ns()
        return self.there_ns(now) - now

    @property
    def drift_ppm(self) -> float:
        """How much faster it goes than the controller's."""
        return self._clock.drift_ppm

    def here_ns(self, there_ns: int) -> tuple[int, int]:
        """The controller's time at a time of the host, and how far off that may be."""
        return self._clock.host_ns(there_ns)

    def there_ns(self, here_ns: int) -> int:
        """The host's time at a time of the controller."""
        guess = here_ns
        # The first step takes the offset, the second what the clocks drift within it.
        for _ in range(3):
            guess += here_ns - self._clock.host_ns(guess)[0]
        return guess

    def here(self, pinged: Pinged) -> Pinged:
        """Pings of a device by its host, as if the controller had sent them, bounds included."""
        asked, seen = [], []
        for asked_ns, seen_ns in zip(pinged.asked_ns, pinged.seen_ns, strict=True):
            one, error = self.here_ns(asked_ns)
            asked.append(one - error)
            one, error = self.here_ns(seen_ns)
            seen.append(one + error)
        return Pinged(asked_ns=tuple(asked), device_ns=pinged.device_ns, seen_ns=tuple(seen))


class OwnClock(HostClock):
    """The clock of the controller's own host, which needs no comparison."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.add(ClockReading(at_ns=time.monotonic_ns(), offset_ns=0, error_ns=0))

    @property
    def is_due(self) -> bool:
        """Never."""
        return False

    @property
    def error_ns(self) -> int:
        """None."""
        return 0

    def here_ns(self, there_ns: int) -> tuple[int, int]:
        """It is the same."""
        return there_ns, 0

    def there_ns(self, here_ns: int) -> int:
        """It is the same."""
        return here_ns
