"""The search over Settings, closed by the real thing: NCCL itself says which is fastest.

Channels and FIFO size first, because most follows from the footprint of all FIFOs; then, with the
best of those, Ring alone, and where bytes land between GPUs and NICs; last who holds a bounce's
buffer, reads instead of writes, and copy engines. One job tells how fast a choice is, beside those
of others and of stock with which it takes turns; only the best is compared with stock in pairs, and
stock stays where it is not beaten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from statistics import median

import msgspec

from tccl_py.runtimes.nccl.settings import Settings, check_settings
from tccl_py.runtimes.nccl.versions import version_facts
from tccl_py.transfers.transfer import DEFAULT_FIFO_BYTES
from tccl_py.verification.comparison import SMALLEST_EFFECT
from tccl_py.verification.jobs import JobError, Outcome
from tccl_py.verification.orders import Order, bus_gbps
from tccl_py.verification.record import Tried, Verification
from tccl_py.verification.sides import AnyPlace, Side
from tccl_py.verification.subjects import Subject
from tccl_py.verification.tunable import Achieved, Tunable
from tccl_py.verification.verify import (
    Effort,
    Watcher,
    job_seconds,
    jobs_at_once,
    large_gbps,
    verify_subject,
)

BUFFSIZES = (DEFAULT_FIFO_BYTES, 512 << 10)
MORE_BUFFSIZES = (256 << 10, 1 << 20, 128 << 10)
"""Tried with the best number of channels only: each job takes seconds."""
DEFAULT_SECONDS = 105.0
COMPARISON_SECONDS = 150.0
"""For each comparison, the one before and those after."""
WHOLE_SECONDS = 480.0
"""With the comparison before: a second one after is run if it will have ended by then."""
ATTEMPTS = 2
"""Settings that are compared with stock in pairs: the best, and the best of other channels should
those harm a size, of which one job says little."""
_SIZES = (16 << 10, 1 << 20, 64 << 20, 256 << 20)
_LEAST = 0.9
"""A choice this much slower than stock's slowest job at some size is not tried further: jobs of
small messages differ by a fifth, and one job of each choice has to do."""


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan and what was verified of it; the plan is the one given where none is better."""

    plan: Tunable
    verification: Verification


_Seconds = tuple[float, ...]
"""Of a call, by size."""


class _Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, what their job took, None if it failed, and what stock's took beside it."""

    settings: Settings
    seconds: _Seconds | None
    stock: _Seconds
    failed: str = ""


def run_tuning(
    plan: Tunable,
    place: AnyPlace,
    effort: Effort,
    first: Verification,
    *,
    seconds: float = DEFAULT_SECONDS,
    watch: Watcher = lambda _: None,
) -> Tuned:
    """Try other settings for a plan that was verified; nothing in its directory is changed.

    What is found is compared with training steps beside: channels that are faster by themselves
    take from what computes at the same time.

    Args:
        plan: what to start from.
        place: where jobs run.
        effort: of the comparison of what is found.
        first: what was found of `plan`.
        seconds: after this no more settings are tried.
        watch: is told what runs.

    Raises:
        JobError: stock's job failed.
        SourceLostError: a host is gone.
    """
    begun = time.monotonic() - first.seconds
    deadline = time.monotonic() + seconds
    screen = _Screen(plan, place, effort, first, watch=watch)
    trials: list[_Trial] = []
    for stage in _stages(plan):
        best = _best(trials, screen)
        base = plan.settings if best is None else best.settings
        wanted = [one for one in stage(base) if plan.permits(one)]
        tried = {one.settings for one in trials}
        waiting = list(dict.fromkeys(one for one in wanted if one not in tried))
        while waiting and (not trials or time.monotonic() < deadline):
            count = screen.at_once
            trials += screen.tried(waiting[:count])
            waiting = waiting[count:]
    current = trials[0]
    tried_all = (screen.told_stock(trials), *map(screen.told, trials))
    unchanged = Tuned(plan=plan, verification=msgspec.structs.replace(first, tried=tried_all))
    careful = msgspec.structs.replace(effort, training=True)
    for _ in range(ATTEMPTS):
        best = _best(trials, screen)
        if best is None or best.settings == plan.settings:
            break
        gbps, before = screen.gbps(best.seconds), screen.gbps(current.seconds)
        if first.accepted and gbps < before * (1 + SMALLEST_EFFECT):
            break
        # One scale for both: what the profiler said of stock is no match for what jobs achieve.
        achieved = Achieved(gbps=gbps, stock_gbps=screen.gbps(best.stock))
        other = plan.retuned(best.settings, achieved=achieved)
        if other.settings == plan.settings:
            break
        with other.elsewhere() as subject:
            found = verify_subject(subject, place, careful, watch=watch)
        if found.accepted and _gains(found, first):
            # It was tried in another place than where it will lie.
            environment = {**found.plan_environment, **other.in_place().side.variables}
            found = msgspec.structs.replace(found, tried=tried_all, plan_environment=environment)
            return Tuned(plan=other, verification=found)
        if time.monotonic() - begun + found.seconds > WHOLE_SECONDS:
            break
        # What harms small messages, or training, is mostly how many channels there are.
        trials = [one for one in trials if one.settings.channels != best.settings.channels]
    return unchanged


class _Screen:
    """One job for each choice of settings beside one of stock, and what they came to."""

    def __init__(
        self,
        plan: Tunable,
        place: AnyPlace,
        effort: Effort,
        first: Verification,
        *,
        watch: Watcher,
    ) -> None:
        self._plan, self._place, self._effort = plan, place, effort
        self._slowest = {one.bytes: max(one.stock_seconds) for one in first.sizes}
        self._watch = watch
        largest = max(effort.sizes)
        self._sizes = tuple(size for size in _SIZES if size <= largest) or effort.sizes
        self._world = 0
        self._stock: _Seconds = ()
        self._jobs = jobs_at_once(place, self._sizes)

    @property
    def at_once(self) -> int:
        """How many choices are tried at once; stock's job runs beside them."""
        return max(1, self._jobs - 1)

    def tried(self, choices: Sequence[Settings]) -> list[_Trial]:
        """The plan's rings under each of these settings.

        Raises:
            JobError: stock's job failed.
        """
        told = ", ".join(f"{one.channels} x {one.buffsize >> 10} KiB" for one in choices)
        self._watch(f"trying channels of {told}")
        with ExitStack() as stack:
            subjects = [stack.enter_context(self._subject(one)) for one in choices]
            stock = subjects[0].stock
            if self._jobs > 1:
                with suppress(JobError):
                    sides = [stock, *(one.side for one in subjects)]
                    theirs, *ours = map(self._seconds, self._place.run(sides, self._order))
                    self._stock = theirs
                    return [
                        _Trial(settings=settings, seconds=one, stock=theirs)
                        for settings, one in zip(choices, ours, strict=True)
                    ]
                # One that fails fails them all, or together they ask for too much.
                self._jobs = 1
            theirs = self._stock = self._stock or self._alone(stock)
            return [
                self._trial(settings, subject, theirs)
                for settings, subject in zip(choices, subjects, strict=True)
            ]

    def _trial(self, settings: Settings, subject: Subject, stock: _Seconds) -> _Trial:
        try:
            return _Trial(settings=settings, seconds=self._alone(subject.side), stock=stock)
        except JobError as error:
            return _Trial(settings=settings, seconds=None, stock=stock, failed=str(error))

    def _subject(self, settings: Settings) -> AbstractContextManager[Subject]:
        given = settings == self._plan.settings
        return (self._plan if given else self._plan.retuned(settings)).elsewhere()

    def _alone(self, side: Side) -> _Seconds:
        (outcome,) = self._place.run([side], self._order)
        return self._seconds(outcome)

    def gbps(self, seconds: _Seconds | None) -> float:
        """Bus bandwidth at the large sizes; 0 if the job failed."""
        if seconds is None:
            return 0.0
        rates = [
            (size, bus_gbps(self._effort.collective, self._world, size, one))
            for size, one in zip(self._sizes, seconds, strict=True)
        ]
        return large_gbps(rates) or 0.0

    def low(self, trial: _Trial) -> float:
        """The worst ratio to the speed of stock's slowest job at any size; 0 if the job failed."""
        if trial.seconds is None:
            return 0.0
        return min(
            max(theirs, self._slowest.get(size, 0.0)) / ours
            for size, ours, theirs in zip(self._sizes, trial.seconds, trial.stock, strict=True)
        )

    def told(self, trial: _Trial) -> Tried:
        """A trial as verify.json has it."""
        return Tried(
            settings=trial.settings,
            gbps=self.gbps(trial.seconds),
            low=self.low(trial),
            failed=trial.failed,
        )

    def told_stock(self, trials: Sequence[_Trial]) -> Tried:
        """Stock beside them, by the median of its jobs."""
        return Tried(settings=None, gbps=median(self.gbps(one.stock) for one in trials), low=1.0)

    @property
    def _order(self) -> Order:
        return msgspec.structs.replace(self._effort.order, sizes=self._sizes, training=False)

    def _seconds(self, outcome: Outcome) -> _Seconds:
        self._world = len(outcome.answers)
        return tuple(job_seconds(outcome, index) for index in range(len(self._sizes)))


def _best(trials: Sequence[_Trial], screen: _Screen) -> _Trial | None:
    """The fastest at large sizes of those not much slower than stock anywhere; of those that are as
    fast, the one that was tried first."""
    best: _Trial | None = None
    for one in trials:
        if screen.low(one) < _LEAST:
            continue
        gbps = screen.gbps(one.seconds)
        if best is None or gbps > screen.gbps(best.seconds) * (1 + SMALLEST_EFFECT):
            best = one
    return best


def _gains(found: Verification, first: Verification) -> bool:
    """Whether what was tuned is faster than what it was made from, both against stock."""
    if not first.accepted:
        return True
    ratio = _large_ratio(found)
    return ratio >= _large_ratio(first) * (1 + SMALLEST_EFFECT)


def _large_ratio(found: Verification) -> float:
    if not found.plan_gbps or not found.stock_gbps:
        return 0.0
    return found.plan_gbps / found.stock_gbps


_Stage = Callable[[Settings], Iterator[Settings]]


def _stages(plan: Tunable) -> tuple[_Stage, ...]:
    """What is tried, a stage after the other; each starts from the best until then."""
    facts = version_facts(plan.settings.version)

    def sizes(base: Settings) -> Iterator[Settings]:
        yield base
        for count in plan.channels:
            if count <= facts.max_channels:
                for size in BUFFSIZES:
                    yield _valid(base, channels=count, buffsize=size)

    def more_sizes(base: Settings) -> Iterator[Settings]:
        for size in MORE_BUFFSIZES:
            yield _valid(base, buffsize=size)

    def algorithm_and_network(base: Settings) -> Iterator[Settings]:
        yield _valid(base, algo=None if base.algo else "Ring")
        yield from plan.other_landings(base)

    def mechanisms(base: Settings) -> Iterator[Settings]:
        kinds = plan.kinds(base)
        if "bounce" in kinds:
            side = "sender" if base.shm_locality == "receiver" else "receiver"
            yield _valid(base, shm_locality=side)
        if kinds & {"read", "write"}:
            yield _valid(base, p2p_read="read" not in kinds)
        if "bounce" in kinds and facts.shm_copy_engine:
            yield _valid(base, shm_copy_engine="both")
        if kinds & {"read", "write"} and facts.p2p_copy_engine:
            yield _valid(base, p2p_copy_engine=True)

    return sizes, more_sizes, algorithm_and_network, mechanisms


def _valid(base: Settings, **changes: object) -> Settings:
    return check_settings(msgspec.structs.replace(base, **changes))
