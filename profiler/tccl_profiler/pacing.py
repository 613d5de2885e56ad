"""How much each copy of a set moves, so that copies last as long as lanes do.

A lane stops by the clock. A copy engine's work is queued beforehand, and ends when that is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tccl_profiler.control import MAX_STAMPS
from tccl_profiler.messages import Pace
from tccl_profiler.program import Part, Program
from tccl_profiler.window import LaneRate

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
