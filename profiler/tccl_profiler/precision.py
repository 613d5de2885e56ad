"""Precision of measurements: windows and copy paces, the stopping rule, and outliers.

A kernel stops by the clock; a copy engine's work is queued beforehand, so its pace must last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from tccl_profiler.messages import Pace
from tccl_profiler.program import FlowEndpoint, Program
from tccl_profiler.shared_memory import MAX_STAMPS
from tccl_py.statistics import LEAST_VALUES, median_interval

STRETCH = 4  # factor of the next window, if not every repeat in this one counts
LONGER = 1.25
"""Least factor between the window needed and the window used that makes a new choice worth it."""
CARRIED_GROUP_US = 5_000.0
"""An NCCL collective begins tens of microseconds after the previous one has ended."""
COPIED_GROUP_US = 500.0  # a stamp is a kernel between copies and costs them about ten microseconds
_TRIAL_GROUPS = 6  # slices of a copy in a trial, after it has filled its FIFO twice
_MOST_GROUPS, _MOST_SLICES = 120, 200


class ChannelRate(msgspec.Struct, frozen=True, kw_only=True):
    """The bandwidth of one channel, 0 at rest, with its slices; its FIFO holds `fifo_slices`."""

    slice_bytes: int
    gbps: float
    fifo_slices: int

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


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Warm-up and window of a repeat."""

    warm_us: float
    window_us: float


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
    )


def needs_longer(
    window: Window,
    channels: Sequence[ChannelRate],
    start_error_us: float,
    limits: WindowLimits | None = None,
) -> bool:
    """Return whether the window was clearly too short; choose again with `at_least=window` then."""
    longer = choose_window(channels, start_error_us, limits)
    too_short = longer.window_us > LONGER * window.window_us
    return too_short or longer.warm_us > LONGER * window.warm_us


def stretch(window: Window, limits: WindowLimits) -> Window:
    """Return a longer window after the same warm-up, the same at its longest."""
    longest_us = max(limits.longest_ms, limits.maximum_ms) * 1e3
    return msgspec.structs.replace(window, window_us=min(window.window_us * STRETCH, longest_us))


def paces_for(
    program: Program, channels: Sequence[ChannelRate] | None, lasting_us: float
) -> dict[str, tuple[Pace, ...]]:
    """Return each copy's pace by device, to last the window; a flow's ends move as much."""
    devices = program.devices.items()
    paces = {name: [Pace(groups=1)] * len(share.copies) for name, share in devices if share.copies}
    rates = iter(() if channels is None else [channel.gbps for channel in channels])
    for counted, uncounted in zip(program.counted, program.other, strict=True):
        gbps = [next(rates, 0.0) for _ in counted.numbers]
        for part in (end for end in (counted, *uncounted) if end.engine):
            device_paces = paces[part.device]
            # A device's stamps are shared by its copies.
            most = min(_MOST_GROUPS, MAX_STAMPS // len(device_paces) - 2)
            for number, rate in zip(part.numbers, gbps, strict=True):
                device_paces[number] = _pace(part, rate, lasting_us, most)
    return {device: tuple(lane_paces) for device, lane_paces in paces.items()}


def _pace(part: FlowEndpoint, gbps: float, lasting_us: float, most: int) -> Pace:
    if not gbps:
        return Pace(groups=min(2 * part.ends[0].slices + _TRIAL_GROUPS, most))
    slice_us, wanted_us = part.slice_bytes / (gbps * 1e3), 1.1 * lasting_us
    least_us = CARRIED_GROUP_US if part.links else COPIED_GROUP_US
    group_us = max(least_us, wanted_us / (most - 2))
    slices = min(math.ceil(group_us / slice_us), _MOST_SLICES)
    return Pace(groups=min(math.ceil(wanted_us / (slices * slice_us)) + 2, most), slices=slices)


# Stopping rule and outliers of repeated measurements.


OUTLIER_SCORE = 3.5  # modified z-score beyond which a sample is flagged (Iglewicz & Hoaglin 1993)
MAD_FLOOR = 0.001  # share of the median below which a spread is the timer's step


def relative_width(samples: Sequence[float]) -> float:
    """Return the width of the median's interval over the median; infinite if it is 0 or unknown."""
    if len(samples) < LEAST_VALUES:
        return math.inf
    interval = median_interval(samples)
    return (interval.high - interval.low) / interval.middle if interval.middle else math.inf


def outliers(samples: Sequence[float]) -> tuple[int, ...]:
    """Return the indices of samples far from the median by modified z-score, to be flagged.

    The median absolute deviation counts as at least 0.1 % of the median, because a coarse timer
    makes samples equal: nothing within 0.5 % of the median is flagged.
    """
    if not len(samples):
        return ()
    values = np.asarray(samples, dtype=np.float64)
    median = float(np.median(values))
    distances = np.abs(values - median)
    spread = max(float(np.median(distances)), MAD_FLOOR * abs(median))
    return tuple(int(i) for i in np.flatnonzero(0.6745 * distances > OUTLIER_SCORE * spread))


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """When a set has enough repeats. Rows of `samples_by_flow` are flows, columns repeats."""

    target: float = 0.01
    """Every flow's 95 % interval of the median, relative to it, is to be narrower."""
    minimum: int = 6
    """Repeats that are always made."""
    limit: int = 30
    """Repeats after which no more are made."""
    seconds: float = 5.0
    """Time after which no more are made."""

    def enough(self, samples_by_flow: Sequence[Sequence[float]], lasted_s: float = 0.0) -> bool:
        """Return whether a limit or the target is reached."""
        count = len(samples_by_flow[0])
        late = lasted_s > self.seconds and count >= self.minimum
        return late or count >= self.limit or self.is_reached(samples_by_flow)

    def is_reached(self, samples_by_flow: Sequence[Sequence[float]]) -> bool:
        """Return whether every flow's interval is narrower than the target."""
        return len(samples_by_flow[0]) >= self.minimum and all(
            relative_width(row) < self.target for row in samples_by_flow
        )
