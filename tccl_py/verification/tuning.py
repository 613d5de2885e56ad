"""The search over Settings, closed by the real thing: NCCL itself says which is fastest.

Channels and FIFO size first, because most follows from the footprint of all FIFOs; then, with the
best of those, who holds a bounce's buffer, reads instead of writes, copy engines, and Ring alone.
One job tells how fast a choice is; only the best is compared with stock in pairs, and stock stays
where it is not beaten.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tccl_py.plan.directory import nccl_files, planned_fingerprint, planned_model, write_plan
from tccl_py.plan.plan import Plan, PlanHop, PlanRing
from tccl_py.plan.staging import write_file
from tccl_py.runtimes.nccl.settings import Settings, check_settings, final_channels
from tccl_py.runtimes.nccl.transport import mechanism_flow, pair_mechanism, view
from tccl_py.runtimes.nccl.versions import version_facts
from tccl_py.transfers.transfer import DEFAULT_FIFO_BYTES
from tccl_py.verification.comparison import SMALLEST_EFFECT
from tccl_py.verification.jobs import JobError, Outcome
from tccl_py.verification.orders import Order, bus_gbps
from tccl_py.verification.record import Tried, Verification
from tccl_py.verification.sides import STOCK, Place, plan_side
from tccl_py.verification.verify import (
    Effort,
    Watcher,
    job_seconds,
    large_gbps,
    run_verification,
)

CHANNELS = (8, 16, 4, 32)
"""Most promising first, should the time be up before all are tried."""
BUFFSIZES = (DEFAULT_FIFO_BYTES, 512 << 10)
MORE_BUFFSIZES = (1 << 20, 256 << 10)
"""Tried with the best number of channels only: each job takes seconds."""
DEFAULT_SECONDS = 105.0
COMPARISON_SECONDS = 150.0
"""For each of the two comparisons, before and after: with them tuning takes 8 minutes at most."""
_SIZES = (16 << 10, 1 << 20, 64 << 20, 256 << 20)
_LEAST = 0.9
"""One job is noisy: a choice this much slower than stock at some size is not tried further."""
_NOTE = "settings tuned: rates are shares of what NCCL's all-reduce achieved, not predictions"


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan and what was verified of it; the plan is the one given where none is better."""

    plan: Plan
    verification: Verification


class _Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, and seconds a call by size; None if the job failed."""

    settings: Settings | None
    seconds: tuple[float, ...] | None
    failed: str = ""


def run_tuning(
    plan: Plan,
    directory: Path,
    place: Place,
    effort: Effort,
    first: Verification,
    *,
    seconds: float = DEFAULT_SECONDS,
    watch: Watcher = lambda _: None,
) -> Tuned:
    """Try other settings for a plan that was verified; nothing in its directory is changed.

    Args:
        plan: what to start from.
        directory: where its files are.
        place: where jobs run.
        effort: of the comparison of what is found.
        first: what was found of `plan`.
        seconds: after this no more settings are tried.
        watch: is told what runs.

    Raises:
        JobError: stock's job failed.
    """
    screen = _Screen(plan, place, effort, deadline=time.monotonic() + seconds, watch=watch)
    stock = screen.stock()
    current = screen.tried(plan.settings)
    trials = [current]
    for stage in _stages(plan):
        base = (_best(trials, stock, screen) or current).settings or plan.settings
        for settings in stage(base):
            if screen.late:
                break
            if all(settings != one.settings for one in trials):
                trials.append(screen.tried(settings))
    tried = tuple(screen.told(one, stock) for one in (stock, *trials))
    best = _best(trials, stock, screen)
    known = msgspec.structs.replace(first, tried=tried)
    if best is None or best.settings in (None, plan.settings):
        return Tuned(plan=plan, verification=known)
    gbps, before = screen.gbps(best), screen.gbps(current)
    if first.accepted and gbps < before * (1 + SMALLEST_EFFECT):
        return Tuned(plan=plan, verification=known)
    other = retuned(plan, best.settings or plan.settings, rate_gbps=gbps)
    with _files(other) as folder:
        found = run_verification(other, folder, place, effort, watch=watch)
    if not found.accepted or not _gains(found, first):
        return Tuned(plan=plan, verification=known)
    # It was tried in another place than where it will lie.
    environment = {**found.plan_environment, **plan_side(other, directory).variables}
    found = msgspec.structs.replace(found, tried=tried, plan_environment=environment)
    return Tuned(plan=other, verification=found)


def retuned(plan: Plan, settings: Settings, *, rate_gbps: float) -> Plan:
    """The same rings under other settings, whose rate is what was achieved, GB/s.

    Raises:
        InputError: settings that the version does not have.
    """
    check_settings(settings)
    seen = view(plan.machine, plan.knowledge, settings, gpus=plan.gpus)
    channels = final_channels(settings.channels, sm=seen.system.sm_min, version=settings.version)
    blocks = max(1, channels // len(plan.rings))
    share = rate_gbps / len(plan.rings)

    def hop(old: PlanHop) -> PlanHop:
        way = pair_mechanism(seen, old.source, old.target)
        if way.kind == "network":
            return msgspec.structs.replace(old, gbps=share)
        flow = mechanism_flow(plan.machine, settings, way, old.source, old.target, blocks=blocks)
        return msgspec.structs.replace(old, flow=str(flow), gbps=share)

    return msgspec.structs.replace(
        plan,
        settings=settings,
        rings=tuple(PlanRing(hops=tuple(map(hop, ring.hops))) for ring in plan.rings),
        rate_gbps=rate_gbps,
        bound_gbps=None,
        proven=False,
        notices=(*(one for one in plan.notices if one != _NOTE), _NOTE),
    )


def rewrite_plan(plan: Plan, directory: Path) -> None:
    """Write a tuned plan in the place of the one that it was made from.

    Raises:
        InputError: a file cannot be written, or the machine's is damaged.
    """
    model = planned_model(plan, directory)
    fingerprint = None if model else planned_fingerprint(plan, directory)
    write_plan(plan, directory, model=model, fingerprint=fingerprint)


class _Screen:
    """One job for each choice, and what it came to."""

    def __init__(
        self, plan: Plan, place: Place, effort: Effort, *, deadline: float, watch: Watcher
    ) -> None:
        self._plan, self._place, self._effort = plan, place, effort
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
        return _Trial(settings=None, seconds=self._seconds(self._place.run(STOCK, self._order)))

    def tried(self, settings: Settings) -> _Trial:
        """The plan's rings under these settings."""
        self._watch(f"trying {settings.channels} channels of {settings.buffsize >> 10} KiB")
        other = msgspec.structs.replace(self._plan, settings=settings)
        try:
            with _files(other) as folder:
                outcome = self._place.run(plan_side(other, folder), self._order)
        except JobError as error:
            return _Trial(settings=settings, seconds=None, failed=str(error))
        return _Trial(settings=settings, seconds=self._seconds(outcome))

    def gbps(self, trial: _Trial) -> float:
        """Bus bandwidth at the large sizes; 0 if the job failed."""
        if trial.seconds is None:
            return 0.0
        rates = [
            (size, bus_gbps(self._effort.collective, len(self._plan.gpus), size, seconds))
            for size, seconds in zip(self._sizes, trial.seconds, strict=True)
        ]
        return large_gbps(rates) or 0.0

    def low(self, trial: _Trial, stock: _Trial) -> float:
        """The worst ratio to stock's speed at any size; 0 if the job failed."""
        if trial.seconds is None or stock.seconds is None:
            return 0.0
        return min(b / a for a, b in zip(trial.seconds, stock.seconds, strict=True))

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
    """The fastest at large sizes of those not much slower than stock anywhere."""
    usable = [one for one in trials if screen.low(one, stock) >= _LEAST]
    return max(usable, key=screen.gbps, default=None)


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


def _stages(plan: Plan) -> tuple[_Stage, ...]:
    """What is tried, a stage after the other; each starts from the best until then."""
    facts = version_facts(plan.settings.version)
    # Every ring of the plan, and of each subset, gets as many channels as any other.
    unit = math.lcm(len(plan.rings), *(len(one.rings) for one in plan.subsets))

    def sizes(base: Settings) -> Iterator[Settings]:
        for count in CHANNELS:
            if count % unit == 0 and count <= facts.max_channels:
                for size in BUFFSIZES:
                    yield _valid(base, channels=count, buffsize=size)

    def more_sizes(base: Settings) -> Iterator[Settings]:
        for size in MORE_BUFFSIZES:
            yield _valid(base, buffsize=size)

    def mechanisms(base: Settings) -> Iterator[Settings]:
        kinds = _kinds(plan, base)
        if "bounce" in kinds:
            side = "sender" if base.shm_locality == "receiver" else "receiver"
            yield _valid(base, shm_locality=side)
        if kinds & {"read", "write"}:
            yield _valid(base, p2p_read="read" not in kinds)
        if "bounce" in kinds and facts.shm_copy_engine:
            yield _valid(base, shm_copy_engine="both")
        if kinds & {"read", "write"} and facts.p2p_copy_engine:
            yield _valid(base, p2p_copy_engine=True)
        yield _valid(base, algo=None if base.algo else "Ring")

    return sizes, more_sizes, mechanisms


def _kinds(plan: Plan, settings: Settings) -> set[str]:
    """The mechanisms of the plan's hops under these settings."""
    seen = view(plan.machine, plan.knowledge, settings, gpus=plan.gpus)
    hops = [hop for ring in plan.rings for hop in ring.hops]
    return {pair_mechanism(seen, hop.source, hop.target).kind for hop in hops}


def _valid(base: Settings, **changes: object) -> Settings:
    return check_settings(msgspec.structs.replace(base, **changes))


@contextmanager
def _files(plan: Plan) -> Iterator[Path]:
    """A folder with what NCCL reads of a plan, gone after the block."""
    with tempfile.TemporaryDirectory(prefix="tccl-tune-") as name:
        for file, text in nccl_files(plan, Path(name)).items():
            write_file(Path(name) / "nccl" / file, text)
        yield Path(name)
