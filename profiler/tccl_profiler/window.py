"""How long to measure a set: long enough for its slowest lane, and no longer.

A lane is one thread block of one flow; it moves a slice, counts it, and goes on. A repeat has a
warm-up and a window, and rates are taken between slices that ended within the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tccl_profiler.messages import Pace
from tccl_profiler.program import Part, Program
from tccl_profiler.shared_memory import MAX_STAMPS
from tccl_py.errors import InputError, MeasurementError

STRETCH = 4
"""A window in which not every repeat counts is this much longer in the next try."""
LONGER = 1.25
"""A window is chosen again only if it should have been longer by this: a rate that varies by less
between repeats asks for nothing, and each new choice is a real step towards the maximum."""


class LaneRate(msgspec.Struct, frozen=True, kw_only=True):
    """What one lane was seen to do, at rest (0 GB/s) included; its FIFO holds `fifo_slices`."""

    slice_bytes: int
    gbps: float
    fifo_slices: int

    def __post_init__(self) -> None:
        if self.slice_bytes < 1 or self.fifo_slices < 1 or not 0 <= self.gbps < math.inf:
            what = f"{self.slice_bytes} B x {self.fifo_slices} at {self.gbps} GB/s"
            raise MeasurementError(f"lane: {what}; a lane has slices of bytes and a finite rate")

    @property
    def slice_us(self) -> float:
        """Time of one slice; infinite for a lane at rest. 1 GB/s is 1000 bytes a microsecond."""
        return self.slice_bytes / (self.gbps * 1e3) if self.gbps else math.inf


class WindowLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a window must satisfy, and between which lengths.

    `slices` of the slowest lane bound how coarse its rate is: ten give 10 % in one repeat at worst,
    and the median of repeats is finer. `start_error_share` is how much of the window may pass
    before all lanes run. The minimum keeps the clocks' microseconds out of a rate; the maximum
    keeps a stalled lane from holding up a search of hundreds of sets. Beyond the maximum, up to
    `longest_ms`, windows grow only where flows do not run together, as on busy cores.
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
    """One repeat's warm-up and the time measured after it.

    `capped` says that the lanes asked for more than the maximum allows of either, so that rates
    are coarser than the limits promise.
    """

    warm_us: float
    window_us: float
    capped: bool = False


def choose_window(
    *,
    lanes: Sequence[LaneRate],
    start_error_us: float,
    limits: WindowLimits | None = None,
    at_least: Window | None = None,
) -> Window:
    """Shortest window that these lanes allow, or the maximum if one of them does not move.

    The window holds one slice more than the limits ask: n whole slices lie between n + 1 ends. The
    warm-up lasts until the lane that starts last has been through its FIFO once, because a lane
    that fills an empty FIFO is not yet slowed by the one that empties it; it may take at most half
    the maximum. `at_least` is the window a set had before: a new one is shorter in neither part,
    so that a set whose lanes take turns in being slow does not go back and forth.

    Raises:
        MeasurementError: no lanes, or a start error that is no time.
    """
    if not lanes or not 0 <= start_error_us < math.inf:
        what = f"window for {len(lanes)} lanes that start within {start_error_us} us"
        raise MeasurementError(f"{what}; a set has a lane, and its start an error of 0 or more")
    limits = limits or WindowLimits()
    maximum_us = limits.maximum_ms * 1e3
    window_us = max(
        limits.minimum_ms * 1e3,
        max(lane.slice_us for lane in lanes) * (limits.slices + 1),
        start_error_us / limits.start_error_share,
    )
    warm_us = max(
        limits.warm_minimum_ms * 1e3,
        max(lane.slice_us * lane.fifo_slices for lane in lanes) + start_error_us,
        at_least.warm_us if at_least else 0.0,
    )
    return Window(
        warm_us=min(warm_us, maximum_us / 2),
        window_us=max(min(window_us, maximum_us), at_least.window_us if at_least else 0.0),
        capped=window_us > maximum_us or warm_us > maximum_us / 2,
    )


def needs_longer(
    window: Window,
    *,
    lanes: Sequence[LaneRate],
    start_error_us: float,
    limits: WindowLimits | None = None,
) -> bool:
    """Whether the window used was clearly too short for what was seen in it.

    If so, choose again with `at_least=window`. Both parts then only grow, one of them by a quarter
    or more, so that this ends after a few choices whatever the lanes do; a window at its maximum
    is never too short. Whether it could be shorter is not asked: that would make sets alternate.
    """
    wanted = choose_window(lanes=lanes, start_error_us=start_error_us, limits=limits)
    too_short = wanted.window_us > LONGER * window.window_us
    return too_short or wanted.warm_us > LONGER * window.warm_us


def stretched(window: Window, limits: WindowLimits) -> Window:
    """The same warm-up before a longer window; the same window if that is the longest already."""
    longest_us = max(limits.longest_ms, limits.maximum_ms) * 1e3
    return msgspec.structs.replace(window, window_us=min(window.window_us * STRETCH, longest_us))


# How much each copy of a set moves, so that copies last as long as lanes do.


_TRIAL_GROUPS = 6
"""Slices that a copy moves in a trial, after it has been through its FIFO twice."""
_MOST_GROUPS, _MOST_SLICES = 120, 200


def paces_for(
    program: Program, lanes: Sequence[LaneRate] | None, lasting_us: float
) -> dict[str, tuple[Pace, ...]]:
    """How much each copy moves so that it lasts the window: both ends of a flow as much.

    `lanes` are rates in the order of `Reading.lanes`; None where nothing is known yet.
    """
    shares = {device: share.copies for device, share in program.devices.items() if share.copies}
    paces: dict[str, dict[int, Pace]] = {device: {} for device in shares}
    rates = iter(() if lanes is None else [lane.gbps for lane in lanes])
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
    """Groups long enough that their stamps cost nothing, and a few more than the window needs."""
    if not gbps:
        return Pace(groups=min(2 * part.slices + _TRIAL_GROUPS, most))
    slice_us, wanted_us = part.slice_bytes / (gbps * 1e3), 1.1 * lasting_us
    group_us = max(part.group_us, wanted_us / (most - 2))
    slices = min(math.ceil(group_us / slice_us), _MOST_SLICES)
    return Pace(groups=min(math.ceil(wanted_us / (slices * slice_us)) + 2, most), slices=slices)
