"""The decision between a plan's choices, from seconds of rows in rounds of jobs.

Without a workload a choice has to be harmless: no row may lose. With one, the time of its calls in
a step decides. All functions are pure: times come from jobs, from records, or from a model.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import NormalDist, median
from typing import Annotated, Literal, TypeVar

import msgspec

from tccl_py.files import says
from tccl_py.plan.chains import AS_GOOD, CHOICES, ChoiceName
from tccl_py.statistics import Interval, median_interval, ratio_interval, unpaired_interval

LEAST_RATIO = 0.97
"""A row of a harmless choice runs at this share of default NCCL's speed, or faster."""
NARROW = 0.03
"""Where default NCCL differs less from itself, the whole interval has to be above LEAST_RATIO."""
_LOSS, _POWER, _LEVEL = 0.05, 0.8, 0.95
"""A loss that has to be seen, in this share of runs, and the level of intervals."""
CLEAR_WIDTH = (
    2 * NormalDist().inv_cdf((1 + _LEVEL) / 2) / NormalDist().inv_cdf(_POWER)
) * math.log(LEAST_RATIO / (1 - _LOSS))
"""The widest interval, as the logarithm of its ends' ratio, with which a loss is seen: the estimate
of a row that is slower by 5 % falls below LEAST_RATIO in four of five runs."""

Harm = Literal["none", "open", "loses"]
"""Whether a row loses; an open one is not shown to be harmless, and more rounds may show it."""
Row = TypeVar("Row", bound=Hashable)
Name = TypeVar("Name", bound=Hashable)
Times = Mapping[Row, Sequence[float]]
"""Seconds of a call of each row, a value for each round; a model's times have one."""


def harm(arm: Sequence[float], default: Sequence[float], again: Sequence[float]) -> Harm:
    """Return whether an arm loses in a row, by its seconds in each round.

    `again` is a second arm of default NCCL in the same rounds: how much it differs from the first
    is what a difference may be by chance. Small messages of whole processes differ by 15 %, in one
    round as in different ones: so the arm's jobs are compared with all of default NCCL.

    >>> harm([1.0] * 6, [1.0] * 6, [1.0] * 6)
    'none'
    >>> harm([1.04] * 6, [1.0] * 6, [1.0] * 6)
    'loses'
    """
    ratio, noise = unpaired_interval((*default, *again), arm), over(again, default)
    if ratio.low >= LEAST_RATIO:
        return "none"
    if ratio.high < LEAST_RATIO:
        return "loses"
    if noise.low >= 1 - NARROW and noise.high <= 1 + NARROW:
        return "open"
    if math.log(ratio.high / ratio.low) > CLEAR_WIDTH:
        return "open"
    # Not worse than default NCCL against itself.
    return "open" if ratio.middle < LEAST_RATIO or ratio.high < 1 else "none"


def over(arm: Sequence[float], default: Sequence[float]) -> Interval:
    """Return the speed of an arm over default NCCL's by their seconds in each round."""
    return ratio_interval([slow / fast for slow, fast in zip(default, arm, strict=True)])


class StepTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The communication of a step by a choice, in seconds."""

    seconds: float
    low: Annotated[float, says("the 95 % interval of `seconds`")]
    high: float
    speed: Annotated[Interval, says("over default NCCL's")]
    faster: Annotated[bool, says("beyond chance")] = False


def step_times(
    calls: Mapping[Row, float], times: Mapping[ChoiceName, Times[Row]]
) -> dict[ChoiceName, StepTime]:
    """Return the time of so many calls of each row in a step, one call after the other.

    Choices without times of a row are left out; "default" has all.

    >>> calls = {"all-reduce": 10.0, "all-to-all": 2.0}
    >>> times = {
    ...     "default": {"all-reduce": [1.0] * 6, "all-to-all": [1.0] * 6},
    ...     "variables": {"all-reduce": [0.5] * 6, "all-to-all": [2.0] * 6},
    ... }
    >>> {name: time.seconds for name, time in step_times(calls, times).items()}
    {'default': 12.0, 'variables': 9.0}
    """
    times_of_step = {}
    for name, rows in times.items():
        if not calls.keys() <= rows.keys():
            continue
        steps = _steps(calls, rows)
        default = _steps(calls, times["default"])
        spread = median_interval(steps)
        rounds = [slow > fast for slow, fast in zip(default, steps, strict=True)]
        times_of_step[name] = StepTime(
            # By the medians of rows, so that rows add up to the whole.
            seconds=sum(count * median(rows[row]) for row, count in calls.items()),
            low=spread.low,
            high=spread.high,
            speed=over(steps, default),
            faster=len(rounds) == 1 or _sign_test(sum(rounds), len(rounds)) <= 1 - _LEVEL,
        )
    return times_of_step


def best_for(steps: Mapping[ChoiceName, StepTime]) -> ChoiceName:
    """Return the choice with which a step's communication takes the least time.

    A choice other than default NCCL has to be faster beyond chance, and each larger intervention
    faster by AS_GOOD than a smaller one. So more calls of a row that a choice wins never turn the
    decision from it to default NCCL.
    """
    compared = [name for name in CHOICES if name in steps]

    def handicap(name: ChoiceName) -> float:
        return steps[name].seconds * (1 + AS_GOOD) ** compared.index(name)

    usable = [name for name in compared if name == "default" or steps[name].faster]
    return min(usable, key=handicap)


def drop_worse(
    speeds: Mapping[Name, Mapping[str, float]],
) -> tuple[Name, ...]:
    """Return the choices that no other equals or exceeds everywhere; of equal ones the first.

    >>> drop_worse({"a": {"x": 1.0, "y": 1.0}, "b": {"x": 1.4, "y": 0.7}, "c": {"x": 0.9, "y": 1}})
    ('a', 'b')
    """
    names = list(speeds)

    def dominates(at: int, other: int) -> bool:
        ours, theirs = speeds[names[at]], speeds[names[other]]
        equal = all(ours[key] == speed for key, speed in theirs.items())
        return all(ours[key] >= speed for key, speed in theirs.items()) and (
            not equal or at < other
        )

    return tuple(
        name
        for other, name in enumerate(names)
        if not any(dominates(at, other) for at in range(len(names)) if at != other)
    )


def _steps(calls: Mapping[Row, float], rows: Times[Row]) -> list[float]:
    """Return the seconds of a step in each round."""
    columns = ([count * value for value in rows[row]] for row, count in calls.items())
    return [math.fsum(values) for values in zip(*columns, strict=True)]


def _sign_test(faster: int, rounds: int) -> float:
    """Return the chance that two equal arms differ in as many rounds, or more."""
    tail = sum(math.comb(rounds, k) for k in range(max(faster, rounds - faster), rounds + 1))
    return min(1.0, 2 * tail / 2**rounds) if 2 * faster > rounds else 1.0
