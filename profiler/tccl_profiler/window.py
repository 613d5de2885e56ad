"""Measurement windows and copy paces: as long as the slowest channel needs, and no longer.

A kernel stops by the clock; a copy engine's work is queued beforehand, so its pace must last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tccl_profiler.messages import Pace
from tccl_profiler.program import Part, Program
from tccl_profiler.shared_memory import MAX_STAMPS
from tccl_py.errors import InputError, MeasurementError

STRETCH = 4  # factor of the next window, if not every repeat in this one counts
LONGER = 1.25
"""Least factor between the window needed and the window used that makes a new choice worth it."""
_TRIAL_GROUPS = 6  # slices of a copy in a trial, after it has filled its FIFO twice
_MOST_GROUPS, _MOST_SLICES = 120, 200


class ChannelRate(msgspec.Struct, frozen=True, kw_only=True):
    """The bandwidth of one channel, 0 at rest, with its slices; its FIFO holds `fifo_slices`."""

    slice_bytes: int
    gbps: float
    fifo_slices: int

    def __post_init__(self) -> None:
        if self.slice_bytes < 1 or self.fifo_slices < 1 or not 0 <= self.gbps < math.inf:
            what = f"{self.slice_bytes} B x {self.fifo_slices} at {self.gbps} GB/s"
            raise MeasurementError(f"channel: {what}; it has slices of bytes and a finite rate")

    @property
    def slice_us(self) -> float:
        """Microseconds per slice, infinite at rest; 1 GB/s is 1000 bytes per microsecond."""
        return self.slice_bytes / (self.gbps * 1e3) if self.gbps else math.inf


class WindowLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a window.

    `slices` of the slowest channel bound the granularity of its rate: ten give 10 % in one repeat
    at worst. `start_error_share` is the share of the window that may pass before all channels run.
    Beyond the maximum, up to `longest_ms`, windows grow only where flows do not run together.
    """

    minimum_ms: float = 2.0
    maximum_ms: float = 50.0
    longest_ms: float = 400.0
    slices: int = 10
    start_error_share: float = 0.01
    warm_minimum_ms: float = 0.3

    def __post_init__(self) -> None:
        lengths = 0 < self.minimum_ms <= self.maximum_ms < math.inf and self.warm_minimum_ms > 0
        if not (lengths and self.slices >= 1 and 0 < self.start_error_share <= 1):
            right = "give 0 < minimum_ms <= maximum_ms, slices >= 1, 0 < start_error_share <= 1"
            raise InputError("window limits", f"{self} fit no window", right)


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Warm-up and window of a repeat.

    `capped`: the maximum cut what the channels need, so rates are coarser than the limits promise.
    """

    warm_us: float
    window_us: float
    capped: bool = False


def choose_window(
    channels: Sequence[ChannelRate],
    start_error_us: float,
    limits: WindowLimits | None = None,
    at_least: Window | None = None,
) -> Window:
    """Return the shortest window for these channels, the maximum if a channel does not move.

    1. The window holds one slice more than the limits ask: n whole slices lie between n + 1 ends.
    2. The warm-up lasts until the last channel to start has been through its FIFO once, at most
       half the maximum: a channel that fills an empty FIFO is not slowed by the reader yet.
    3. Neither part is shorter than in `at_least`, the previous window, so that a set whose channels
       take turns in being slow does not alternate.
    """
    if not channels or not 0 <= start_error_us < math.inf:
        what = f"window for {len(channels)} channels that start within {start_error_us} us"
        raise MeasurementError(f"{what}; a set has a channel, and its start an error of 0 or more")
    limits = limits or WindowLimits()
    maximum_us = limits.maximum_ms * 1e3
    window_us = max(
        limits.minimum_ms * 1e3,
        max(channel.slice_us for channel in channels) * (limits.slices + 1),
        start_error_us / limits.start_error_share,
    )
    warm_us = max(
        limits.warm_minimum_ms * 1e3,
        max(channel.slice_us * channel.fifo_slices for channel in channels) + start_error_us,
        at_least.warm_us if at_least else 0.0,
    )
    return Window(
        warm_us=min(warm_us, maximum_us / 2),
        window_us=max(min(window_us, maximum_us), at_least.window_us if at_least else 0.0),
        capped=window_us > maximum_us or warm_us > maximum_us / 2,
    )


def needs_longer(
    window: Window,
    channels: Sequence[ChannelRate],
    start_error_us: float,
    limits: WindowLimits | None = None,
) -> bool:
    """Return whether the window was clearly too short; choose again with `at_least=window` then."""
    wanted = choose_window(channels, start_error_us, limits)
    too_short = wanted.window_us > LONGER * window.window_us
    return too_short or wanted.warm_us > LONGER * window.warm_us


def stretched(window: Window, limits: WindowLimits) -> Window:
    """Return a longer window after the same warm-up, the same at its longest."""
    longest_us = max(limits.longest_ms, limits.maximum_ms) * 1e3
    return msgspec.structs.replace(window, window_us=min(window.window_us * STRETCH, longest_us))


def paces_for(
    program: Program, channels: Sequence[ChannelRate] | None, lasting_us: float
) -> dict[str, tuple[Pace, ...]]:
    """Return each copy's pace by device, to last the window; a flow's ends move as much."""
    shares = {device: share.copies for device, share in program.devices.items() if share.copies}
    paces: dict[str, dict[int, Pace]] = {device: {} for device in shares}
    rates = iter(() if channels is None else [channel.gbps for channel in channels])
    for counted, others in zip(program.counted, program.other, strict=True):
        copying = [part for part in (counted, *others) if part.kind == "copy"]
        for offset in range(len(counted.numbers)):
            gbps = next(rates, 0.0)
            for part in copying:
                # A device's stamps are shared by its copies.
                most = min(_MOST_GROUPS, MAX_STAMPS // len(shares[part.device]) - 2)
                paces[part.device][part.numbers[offset]] = _pace(part, gbps, lasting_us, most)
    return {
        device: tuple(pace for _, pace in sorted(found.items())) for device, found in paces.items()
    }


def _pace(part: Part, gbps: float, lasting_us: float, most: int) -> Pace:
    if not gbps:
        return Pace(groups=min(2 * part.slices + _TRIAL_GROUPS, most))
    slice_us, wanted_us = part.slice_bytes / (gbps * 1e3), 1.1 * lasting_us
    group_us = max(part.group_us, wanted_us / (most - 2))
    slices = min(math.ceil(group_us / slice_us), _MOST_SLICES)
    return Pace(groups=min(math.ceil(wanted_us / (slices * slice_us)) + 2, most), slices=slices)
