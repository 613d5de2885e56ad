"""Lanes below a row of devices: lines between them that never lie on each other, nor on a label.

A line leaves a device at a port near its middle, runs along a lane, and comes up again at another
port. Its label stands between two devices, where no line comes down.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

LANE = 36.0
"""Height of a lane: a rate above its line, a word below it."""
_APART = 6.0


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """A line from port `start` to port `end`, both x, in a lane (0 is the uppermost)."""

    start: float
    end: float
    lane: int
    label_x: float


def wires(ends: Sequence[tuple[float, float]], gaps: Sequence[float]) -> list[Wire]:
    """Lines between these ports, short ones in upper lanes; labels stand at one of `gaps`.

    >>> [wire.lane for wire in wires([(10, 90), (30, 50), (60, 80)], [40, 70])]
    [1, 0, 0]
    """
    lanes: list[list[tuple[float, float]]] = []
    found: dict[int, Wire] = {}
    for index in sorted(range(len(ends)), key=lambda i: (abs(ends[i][1] - ends[i][0]), i)):
        start, end = ends[index]
        low, high = min(start, end), max(start, end)
        lane = next((n for n, taken in enumerate(lanes) if _free(taken, low, high)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append((low, high))
        label = _label(low, high, gaps)
        found[index] = Wire(start=start, end=end, lane=lane, label_x=label)
    return [found[index] for index in range(len(ends))]


def _free(taken: Sequence[tuple[float, float]], low: float, high: float) -> bool:
    return all(high + _APART < one or other + _APART < low for one, other in taken)


def _label(low: float, high: float, gaps: Sequence[float]) -> float:
    middle = (low + high) / 2
    inside = [gap for gap in gaps if low < gap < high] or [middle]
    return min(inside, key=lambda gap: (abs(gap - middle), gap))


def depth(found: Sequence[Wire]) -> float:
    """How far down the lanes of these wires reach, in pixels."""
    return LANE * (1 + max((wire.lane for wire in found), default=-1))
