"""Trade-offs between choices: what each wins and loses for bundled workloads, none dominated.

The times of a workload are estimated from the rows of a verification: between two sizes of its
collective in communicators of as many ranks on a line of logarithms, beyond the largest size in
proportion to bytes where it is near or large, a little below the smallest as that one. A send is
taken as one of send/recv.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Annotated

import msgspec
import numpy as np

from tccl_py.decision import drop_worse
from tccl_py.experiments.comparison import Timed
from tccl_py.experiments.record import ArmResult, Verification
from tccl_py.experiments.spec import Row, calls_of, is_large
from tccl_py.files import says
from tccl_py.plan.chains import ChoiceName
from tccl_py.workloads.bundled import BUNDLED, load_bundled

_MOST_UNKNOWN = 0.1
"""Share of a workload's bytes that may be without times."""

_NEAR = 4
"""A size is near another up to this factor: that between the usual sizes."""

Curve = list[tuple[int, float]]
"""Seconds of a call by bytes, ascending."""
Curves = Mapping[tuple[str, int], Curve]
"""Curves by collective and ranks of the communicator."""


class TradeOff(msgspec.Struct, frozen=True, kw_only=True):
    """A choice's speed over default NCCL's for each bundled workload, and whether it harms none."""

    choice: ChoiceName
    harmless: bool
    workloads: Annotated[dict[str, float], says("estimated from the rows; without unknown ones")]


def trade_offs(result: Verification) -> tuple[TradeOff, ...]:
    """Return the choices that no other equals or exceeds for all bundled workloads."""
    ranks = len(result.devices)
    arms = {arm.name: arm for arm in result.arms if not arm.faults and arm.sizes}
    if ranks < 2 or "default" not in arms:
        return ()
    curves = {name: _curves(arm, ranks) for name, arm in arms.items()}
    jobs = {name: calls_of(load_bundled(name, ranks)) for name in BUNDLED}
    speeds: dict[ChoiceName, dict[str, float]] = {
        name: {
            job: speed
            for job, calls in jobs.items()
            if (speed := _speed(calls, curves["default"], curves[name], ranks)) is not None
        }
        for name in arms
    }
    # Speeds within 1 % are equal, and a job that a choice cannot run has none by it.
    compared = {
        name: {job: round(of.get(job, 0.0), 2) for job in speeds["default"]}
        for name, of in speeds.items()
    }
    return tuple(
        TradeOff(choice=name, harmless=arms[name].accepted, workloads=speeds[name])
        for name in drop_worse(compared)
    )


def _curves(arm: ArmResult, ranks: int) -> Curves:
    """Return an arm's median seconds by size."""
    rows: dict[tuple[str, int], dict[int, float]] = {}
    for row in (*arm.rows, *arm.transfers):
        if row.bytes and not (row.mode or row.beside):
            rows.setdefault(_kind(row, ranks), {}).setdefault(row.bytes, median(row.seconds))
    return {kind: sorted(seconds.items()) for kind, seconds in rows.items()}


def _kind(row: Row | Timed, ranks: int) -> tuple[str, int]:
    collective = "send_recv" if row.collective == "send" else row.collective
    return collective, max(map(len, row.groups), default=ranks)


def _speed(calls: Mapping[Row, float], default: Curves, arm: Curves, ranks: int) -> float | None:
    """Return the speed of a step's calls over default NCCL's; None where too much is unknown."""
    timed = {kind: default[kind] for kind in default.keys() & arm.keys()}
    known = {
        row: n for row, n in calls.items() if _is_near(timed.get(_kind(row, ranks)), row.bytes)
    }
    if _bytes(known.items()) < (1 - _MOST_UNKNOWN) * _bytes(calls.items()):
        return None

    def seconds(curves: Curves) -> float:
        return sum(n * at_size(curves[_kind(row, ranks)], row.bytes) for row, n in known.items())

    return seconds(default) / seconds(arm)


def _is_near(curve: Curve | None, size: int) -> bool:
    """Return whether a size is among those of a curve, near them, or as large as the largest."""
    if curve is None:
        return False
    (smallest, _), (largest, _) = curve[0], curve[-1]
    reach = math.inf if is_large(largest) else _NEAR * largest
    return smallest <= _NEAR * size and size <= reach


def _bytes(calls: Iterable[tuple[Row, float]]) -> float:
    return sum(row.bytes * count for row, count in calls)


def at_size(curve: Curve, size: int) -> float:
    """Return the seconds of a call of `size` bytes.

    >>> [round(at_size([(4, 1.0), (16, 4.0)], size), 6) for size in (1, 4, 8, 16, 64)]
    [1.0, 1.0, 2.0, 4.0, 16.0]
    """
    sizes, seconds = np.array(curve).T
    known = math.exp(np.interp(math.log(size), np.log(sizes), np.log(seconds)))
    return known * max(1.0, size / curve[-1][0])
