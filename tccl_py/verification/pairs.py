"""Pairs of jobs, the plan's and stock's, until what they say is clear."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import msgspec

from tccl_py.verification.comparison import LEAST_PAIRS, MAX_PAIRS, Compared, compare
from tccl_py.verification.jobs import JobError, Outcome
from tccl_py.verification.orders import SIZES, Collective, Order
from tccl_py.verification.sides import AnyPlace, Side

DEFAULT_PAIRS = 10
DEFAULT_SECONDS = 200.0
_NARROW = 1 << 20
"""From this size on ratios are to be known to 1 %; below, calls take microseconds."""
_EXTRA = 4
"""How many times the pairs asked for are run where a verdict is open and there is time."""
_AT_ONCE = (4, 2, 1)
_AT_ONCE_BYTES = 4 << 30
"""Of the buffers of jobs at once on a device, which may have few GiB."""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much is run: pairs of jobs, sizes in bytes, and seconds after which no pair begins.

    LEAST_PAIRS pairs are run in any case; fewer than `pairs` where all is clear, more where a
    verdict is open and time is left.
    """

    pairs: int = DEFAULT_PAIRS
    sizes: tuple[int, ...] = SIZES
    seconds: float = DEFAULT_SECONDS
    collective: Collective = "all_reduce"
    checks: bool = True
    training: bool = False

    @property
    def order(self) -> Order:
        """What the jobs of a pair do."""
        return Order(
            backend="host",
            world=0,
            sizes=self.sizes,
            collective=self.collective,
            training=self.training,
        )


class Pairs(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of all pairs, of the plan and of stock, in order; and what they come to.

    `at_once` is how many of them ran at once, at the end.
    """

    plan: tuple[Outcome, ...]
    stock: tuple[Outcome, ...]
    order: str
    at_once: int
    compared: tuple[Compared, ...]


Watcher = Callable[[str], None]
"""Is told what runs."""


class PlanJobError(JobError):
    """A job under a plan failed."""


def run_alone(place: AnyPlace, side: Side, order: Order) -> Outcome:
    """Run one job under a plan.

    Raises:
        PlanJobError: it failed.
    """
    try:
        (outcome,) = place.run([side], order)
    except JobError as error:
        raise PlanJobError(str(error)) from error
    return outcome


def jobs_at_once(place: AnyPlace, sizes: Sequence[int]) -> int:
    """How many jobs may run at once: 4, 2 or 1, by what their buffers take of a device."""
    sharing = place.ranks if place.backend == "host" else 1
    largest = max(sizes, default=1) * sharing
    return next((one for one in _AT_ONCE if one * largest <= _AT_ONCE_BYTES), 1)


def run_pairs(
    place: AnyPlace,
    side: Side,
    other: Side,
    effort: Effort,
    *,
    begun: float,
    watch: Watcher = lambda _: None,
) -> Pairs:
    """Run pairs of jobs, A B B A ..., until the verdicts are clear or the time is up.

    As many run at once as devices have room for, and take turns; one after the other where several
    fail, for which each may have been right.

    Raises:
        PlanJobError: a job of `side` failed.
        JobError: one of `other` did.
    """
    ours: list[Outcome] = []
    theirs: list[Outcome] = []
    order = ""
    at_once = jobs_at_once(place, effort.sizes)
    most = min(MAX_PAIRS, max(effort.pairs, LEAST_PAIRS) * _EXTRA)
    while len(ours) < most:
        # Which job of a round starts first makes a difference, so that alternates as well.
        usual, other_way = ("ABBA", "BAAB") if at_once == len("ABBA") else ("AB", "BA")
        letters = usual if len(order) // len(usual) % 2 == 0 else other_way
        numbers = sorted({len(ours) + 1, len(ours) + len(letters) // 2})
        watch(f"pair {' and '.join(map(str, numbers))}")
        sides = [side if letter == "A" else other for letter in letters]
        try:
            found = _round(place, sides, side, effort.order, at_once)
        except JobError:
            if at_once == 1:
                raise
            at_once = 1
            continue
        for letter, outcome in zip(letters, found, strict=True):
            (ours if letter == "A" else theirs).append(outcome)
        order += letters
        if len(ours) < LEAST_PAIRS:
            continue
        compared = _compared(effort, ours, theirs)
        if _enough(effort, compared, len(ours)) or time.monotonic() - begun > effort.seconds:
            break
    return Pairs(
        plan=tuple(ours), stock=tuple(theirs), order=order, at_once=at_once, compared=compared
    )


def _round(
    place: AnyPlace, sides: Sequence[Side], ours: Side, order: Order, at_once: int
) -> tuple[Outcome, ...]:
    """A job of each side, at once if that is possible."""
    if at_once > 1:
        return place.run(sides, order)
    return tuple(
        run_alone(place, side, order) if side is ours else place.run([side], order)[0]
        for side in sides
    )


def _enough(effort: Effort, compared: Sequence[Compared], count: int) -> bool:
    """Whether more pairs would say nothing new; beyond those asked for, of a training step and of
    sizes below _NARROW only a lean to harm is worth more."""
    for one, size in zip(compared, (*effort.sizes, *[0] * len(compared)), strict=False):
        worth = count < effort.pairs or size >= _NARROW or one.high < 1
        if one.open and worth:
            return False
    return True


def _compared(
    effort: Effort, ours: Sequence[Outcome], theirs: Sequence[Outcome]
) -> tuple[Compared, ...]:
    rows = [[_rows(effort, one) for one in side] for side in (ours, theirs)]
    by_size = [list(zip(*side, strict=True)) for side in rows]
    return compare(by_size[0], by_size[1])


def _rows(effort: Effort, outcome: Outcome) -> list[float]:
    """Seconds of one job: of each size, then of each way of training."""
    found = [job_seconds(outcome, index) for index in range(len(effort.sizes))]
    if effort.training:
        found += [training_seconds(outcome, mode) for mode in outcome.answers[0].training]
    return found


def job_seconds(outcome: Outcome, size: int) -> float:
    """Seconds a call of the size at this place: the median of batches, of the slowest rank."""
    return max(statistics.median(answer.timings[size]) for answer in outcome.answers)


def training_seconds(outcome: Outcome, mode: str) -> float:
    """Seconds a step, as `job_seconds`."""
    return max(statistics.median(answer.training[mode]) for answer in outcome.answers)
