"""The search over Settings, closed by the real thing: NCCL itself says which is fastest.

Channels and FIFO size first, because most follows from the footprint of all FIFOs; then, with the
best of those, Ring alone, and where bytes land between GPUs and NICs; last who holds a bounce's
buffer, reads instead of writes, and copy engines. One job tells how fast a choice is; only the best
is compared with stock in pairs, and stock stays where it is not beaten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tccl_py.runtimes.nccl.settings import Settings, check_settings
from tccl_py.runtimes.nccl.versions import version_facts
from tccl_py.transfers.transfer import DEFAULT_FIFO_BYTES
from tccl_py.verification.comparison import SMALLEST_EFFECT
from tccl_py.verification.jobs import JobError, Outcome
from tccl_py.verification.orders import Order, bus_gbps
from tccl_py.verification.record import Tried, Verification
from tccl_py.verification.sides import STOCK, AnyPlace
from tccl_py.verification.tunable import Achieved, Tunable
from tccl_py.verification.verify import (
    Effort,
    Watcher,
    job_seconds,
    large_gbps,
    verify_subject,
)

BUFFSIZES = (DEFAULT_FIFO_BYTES, 512 << 10)
MORE_BUFFSIZES = (1 << 20, 256 << 10)
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


class _Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, and seconds a call by size; None if the job failed."""

    settings: Settings | None
    seconds: tuple[float, ...] | None
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
    screen = _Screen(plan, place, effort, first, deadline=deadline, watch=watch)
    stock = screen.stock()
    current = screen.tried(plan.settings)
    trials = [current]
    for stage in _stages(plan):
        base = (_best(trials, stock, screen) or current).settings or plan.settings
        for settings in stage(base):
            if screen.late:
                break
            if all(settings != one.settings for one in trials) and plan.permits(settings):
                trials.append(screen.tried(settings))
    tried = tuple(screen.told(one, stock) for one in (stock, *trials))
    unchanged = Tuned(plan=plan, verification=msgspec.structs.replace(first, tried=tried))
    for _ in range(ATTEMPTS):
        best = _best(trials, stock, screen)
        if best is None or best.settings in (None, plan.settings):
            break
        channels = best.settings.channels
        gbps, before = screen.gbps(best), screen.gbps(current)
        if first.accepted and gbps < before * (1 + SMALLEST_EFFECT):
            break
        # One scale for both: what the profiler said of stock is no match for what jobs achieve.
        achieved = Achieved(gbps=gbps, stock_gbps=screen.gbps(stock))
        other = plan.retuned(best.settings, achieved=achieved)
        if other.settings == plan.settings:
            break
        with other.elsewhere() as subject:
            found = verify_subject(subject, place, effort, watch=watch)
        if found.accepted and _gains(found, first):
            # It was tried in another place than where it will lie.
            environment = {**found.plan_environment, **other.in_place().side.variables}
            found = msgspec.structs.replace(found, tried=tried, plan_environment=environment)
            return Tuned(plan=other, verification=found)
        if time.monotonic() - begun + found.seconds > WHOLE_SECONDS:
            break
        # What harms small messages is mostly how many channels share them.
        trials = [one for one in trials if one.settings and one.settings.channels != channels]
    return unchanged


class _Screen:
    """One job for each choice, and what it came to."""

    def __init__(
        self,
        plan: Tunable,
        place: AnyPlace,
        effort: Effort,
        first: Verification,
        *,
        deadline: float,
        watch: Watcher,
    ) -> None:
        self._plan, self._place, self._effort = plan, place, effort
        self._slowest = {one.bytes: max(one.stock_seconds) for one in first.sizes}
        self._deadline, self._watch = deadline, watch
        largest = max(effort.sizes)
        self._sizes = tuple(size for size in _SIZES if size <= largest) or effort.sizes

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._deadline

    def stock(self) -> _Trial:
        """NCCL as it is."""
        self._watch("trying stock")
        outcome = self._place.run(STOCK, self._order)
        self._world = len(outcome.answers)
        return _Trial(settings=None, seconds=self._seconds(outcome))

    def tried(self, settings: Settings) -> _Trial:
        """The plan's rings under these settings."""
        self._watch(f"trying {settings.channels} channels of {settings.buffsize >> 10} KiB")
        given = settings == self._plan.settings
        other = self._plan if given else self._plan.retuned(settings)
        try:
            with other.elsewhere() as subject:
                outcome = self._place.run(subject.side, self._order)
        except JobError as error:
            return _Trial(settings=settings, seconds=None, failed=str(error))
        return _Trial(settings=settings, seconds=self._seconds(outcome))

    def gbps(self, trial: _Trial) -> float:
        """Bus bandwidth at the large sizes; 0 if the job failed."""
        if trial.seconds is None:
            return 0.0
        rates = [
            (size, bus_gbps(self._effort.collective, self._world, size, seconds))
            for size, seconds in zip(self._sizes, trial.seconds, strict=True)
        ]
        return large_gbps(rates) or 0.0

    def low(self, trial: _Trial, stock: _Trial) -> float:
        """The worst ratio to the speed of stock's slowest job at any size; 0 if the job failed."""
        if trial.seconds is None or stock.seconds is None:
            return 0.0
        return min(
            max(theirs, self._slowest.get(size, 0.0)) / ours
            for size, ours, theirs in zip(self._sizes, trial.seconds, stock.seconds, strict=True)
        )

    def told(self, trial: _Trial, stock: _Trial) -> Tried:
        """A trial as verify.json has it."""
        return Tried(
            settings=trial.settings,
            gbps=self.gbps(trial),
            low=self.low(trial, stock),
            failed=trial.failed,
        )

    @property
    def _order(self) -> Order:
        return msgspec.structs.replace(self._effort.order, sizes=self._sizes, training=False)

    def _seconds(self, outcome: Outcome) -> tuple[float, ...]:
        return tuple(job_seconds(outcome, index) for index in range(len(self._sizes)))


def _best(trials: Sequence[_Trial], stock: _Trial, screen: _Screen) -> _Trial | None:
    """The fastest at large sizes of those not much slower than stock anywhere; of those that are as
    fast, the one that was tried first."""
    best: _Trial | None = None
    for one in trials:
        if screen.low(one, stock) < _LEAST:
            continue
        if best is None or screen.gbps(one) > screen.gbps(best) * (1 + SMALLEST_EFFECT):
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
