"""Max-min fair sharing: nobody can be given more without taking from one who has less."""

from __future__ import annotations

import math
from collections.abc import Sequence

Bound = dict[int, float]
"""Flow -> what one GB/s of it takes of the bound; the sum over all flows is at most 1."""

_TIE = 1.0 + 1e-12
"""Bounds that tighten at the same rate but for rounding are one bottleneck."""


def max_min_rates(count: int, bounds: Sequence[Bound]) -> list[float]:
    """Rates of `count` flows under the bounds, by progressive filling; a flow in none gets inf.

    Exact up to rounding. O(bottlenecks x bounds) time; the slowest rate is
    min(1 / sum of a bound's shares), so a further flow or bound never raises it.
    """
    bounds = _tightest(bounds)
    rates = [math.inf] * count
    room = [1.0] * len(bounds)
    pull = [sum(bound.values()) for bound in bounds]
    growing = [len(bound) for bound in bounds]
    bounds_of: list[list[int]] = [[] for _ in range(count)]
    for index, bound in enumerate(bounds):
        for flow in bound:
            bounds_of[flow].append(index)
    alive = [index for index, bound in enumerate(bounds) if bound]
    while alive:
        # 1. All growing rates rise together until the first bounds are full.
        level = min(room[index] / pull[index] for index in alive)
        full = [index for index in alive if room[index] <= level * _TIE * pull[index]]
        # 2. Every flow in them keeps this rate; what it takes elsewhere is gone there.
        stopped = {f for index in full for f in bounds[index] if rates[f] == math.inf}
        for flow in stopped:
            rates[flow] = level
            for index in bounds_of[flow]:
                share = bounds[index][flow]
                room[index] = max(room[index] - share * level, 0.0)
                pull[index] -= share
                growing[index] -= 1
        alive = [index for index in alive if growing[index]]
    return rates


def _tightest(bounds: Sequence[Bound]) -> list[Bound]:
    """The bounds, with only the tightest of those that hold one flow alone."""
    alone: dict[int, float] = {}
    shared = []
    for bound in bounds:
        if len(bound) == 1:
            ((flow, share),) = bound.items()
            alone[flow] = max(share, alone.get(flow, 0.0))
        else:
            shared.append(bound)
    return shared + [{flow: share} for flow, share in alone.items()]
