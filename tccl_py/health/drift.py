"""Measure chosen sets again, compare them with a plan's journal, and confirm what changed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.health.drift_causes import points_to, worst_of_each_set
from tccl_py.health.drift_statistics import (
    FALSE_ALARM_RATE,
    Comparison,
    common_spread,
    compared,
    log_rates,
)
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import BandwidthSource, Measurement
from tccl_py.model.paths import path_type
from tccl_py.model.transfer import Flow, TransferSet, parse_flow, transfer_set
from tccl_py.plan.plan import Plan

# Which sets of a journal a check measures again: few, and such that a change shows somewhere.


_TIMES_EACH_GPU = 3
"""Small sets that each GPU should be in, so that one slow GPU is told from one slow pair."""


def chosen_sets(
    plan: Plan, journal: Mapping[TransferSet, Sequence[Measurement]], *, most: int, seed: int
) -> tuple[TransferSet, ...]:
    """Sets of the journal, the most telling first, `most` at most.

    In this order: the plan's rings together and each alone, its slowest hop alone, one set of each
    class of links, small sets until every GPU is in several, and a random sample of the rest. What
    was measured often comes first: it is known better.
    """
    known = set(journal)
    often = sorted(known, key=lambda one: (-len(journal[one]), len(one), str(one)))
    small = sorted(often, key=len)
    order = dict.fromkeys(
        one
        for part in (
            _of_the_plan(plan),
            _one_of_each_class(plan.machine, small),
            _each_gpu(plan, small),
            _sampled(often, seed),
        )
        for one in part
        if one in known
    )
    return tuple(order)[:most]


def _of_the_plan(plan: Plan) -> Iterator[TransferSet]:
    rings = [[parse_flow(hop.flow) for hop in ring.hops] for ring in plan.rings]
    yield transfer_set(flow for ring in rings for flow in ring)
    yield from map(transfer_set, rings)
    slowest = min((ring.bottleneck for ring in plan.rings), key=lambda hop: hop.gbps)
    yield transfer_set([parse_flow(slowest.flow)])


def _one_of_each_class(machine: Machine, small: Sequence[TransferSet]) -> Iterator[TransferSet]:
    seen: set[str] = set()
    for one in small:
        classes = {link_class(machine, flow) for flow in one.flows}
        if not classes <= seen:
            seen |= classes
            yield one


def link_class(machine: Machine, flow: Flow) -> str:
    """How far a flow goes and by what means: `PIX write`, `SYS bounce`, `PHB read`."""
    ends = [str(place) for place in (flow.source, flow.destination)]
    means: str = "bounce" if flow.is_bounce else flow.transfers[0].operation
    if flow.transfers[0].uses_copy_engine:
        means += " by copy engine"
    return f"{path_type(machine, *ends).name} {means}"


def _each_gpu(plan: Plan, small: Sequence[TransferSet]) -> Iterator[TransferSet]:
    times = dict.fromkeys(plan.gpus, 0)
    joined: set[frozenset[int]] = set()
    for one in small:
        gpus = frozenset(gpus_of(one) & times.keys())
        few = any(times[gpu] < _TIMES_EACH_GPU for gpu in gpus)
        # The same GPUs by other means say nothing more of a GPU.
        if few and len(gpus) < len(times) and gpus not in joined:
            joined.add(gpus)
            for gpu in gpus:
                times[gpu] += 1
            yield one


def gpus_of(transfers: TransferSet) -> set[int]:
    """Indices of the GPUs at the ends of a set's flows."""
    ends = (place for flow in transfers.flows for place in (flow.source, flow.destination))
    return {place.index for place in ends if place.kind == "G"}


def _sampled(sets: Sequence[TransferSet], seed: int) -> list[TransferSet]:
    return random.Random(seed).sample(sorted(sets, key=str), len(sets))


ROUNDS = 3
"""Times each set is measured, the others between: this is what tells how far rates wander."""
CONFIRMATIONS = 2
"""Times a set that seems changed is measured again, before anybody is told."""
_FOR_FIRST, _FOR_ROUNDS = 0.3, 0.75
"""Shares of the time after which the first round, and all rounds, have to end."""

Known = Mapping[TransferSet, Sequence[Measurement]]


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much to measure: `seconds` in all, `sets` at most; `seed` picks the random sample."""

    seconds: float = 120.0
    sets: int = 24
    seed: int = 0


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found.

    `changes` has the flow that fell most of each set that changed, the worst set first. `rows` are
    all flows compared. `lost` says why sets cannot be measured any more, by set. `skipped` sets
    were chosen, but the time was up.
    """

    rows: tuple[Comparison, ...]
    changes: tuple[Comparison, ...]
    points_to: str
    lost: dict[TransferSet, str]
    skipped: tuple[TransferSet, ...]
    measurements: tuple[Measurement, ...]
    seconds: float
    false_alarm_rate: float = FALSE_ALARM_RATE

    @property
    def drifted(self) -> bool:
        """Whether anything changed."""
        return bool(self.changes or self.lost)

    @property
    def sets(self) -> dict[TransferSet, Comparison]:
        """The sets compared, each with the flow that fell most."""
        return {row.transfers: row for row in worst_of_each_set(self.rows)}


def find_drift(
    plan: Plan,
    journal: Known,
    source: BandwidthSource,
    *,
    effort: Effort | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Drift:
    """Compare what `source` measures now with a plan's journal.

    A set is said to have changed if the chance of any such alarm on an unchanged machine is at
    most `FALSE_ALARM_RATE`, all flows compared together, and if new measurements of it alone
    say so again.

    Raises:
        InputError: the journal has nothing to compare with.
        SourceLostError: nothing can be measured any more.
    """
    effort = effort or Effort()
    chosen = chosen_sets(plan, journal, most=effort.sets, seed=effort.seed)
    if not chosen:
        raise InputError("the journal", "has no measurements", "plan again")
    bench = _Bench(source, effort, clock)
    bench.measure_rounds(chosen)
    now = {text: found for text, found in bench.found.items() if len(found) > 1}
    if not now and not bench.lost:
        raise InputError(
            "--max-seconds", "is too short to measure one set twice", "give it more seconds"
        )
    rows = _confirmed(bench, chosen, journal, now)
    changes = worst_of_each_set(row for row in rows if row.alarming)
    return Drift(
        rows=tuple(rows),
        changes=tuple(changes),
        points_to=points_to(plan.machine, rows),
        lost=bench.lost,
        skipped=tuple(one for one in chosen if one not in {*now, *bench.lost}),
        measurements=tuple(one for found in bench.found.values() for one in found),
        seconds=bench.elapsed,
    )


class _Bench:
    """Measures sets, keeps what it found, and watches the time."""

    def __init__(self, source: BandwidthSource, effort: Effort, clock: Callable[[], float]) -> None:
        self._source, self._limit, self._clock = source, effort.seconds, clock
        self._random = random.Random(effort.seed)
        self._began = clock()
        self.found: dict[TransferSet, list[Measurement]] = {}
        self.lost: dict[TransferSet, str] = {}

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began

    def measure_rounds(self, sets: Sequence[TransferSet]) -> None:
        """Each set `ROUNDS` times; the first round tells how many there is time for."""
        # 1. In order of weight: what there is no time for is what matters least.
        first = self._round(sets, _FOR_FIRST)
        spent = self.elapsed
        # 2. In random order: what drifts meanwhile favours no set. The first start of workers is
        # counted as if it were measuring, so the estimate errs to the safe side.
        share = (self._limit * _FOR_ROUNDS - spent) / max(spent * (ROUNDS - 1), 1e-9)
        kept = first[: max(1, int(len(first) * min(1.0, share)))]
        for _ in range(ROUNDS - 1):
            self._round(self._random.sample(kept, len(kept)), _FOR_ROUNDS)

    def again(self, sets: Sequence[TransferSet]) -> dict[TransferSet, list[Measurement]]:
        """New measurements of some sets, `CONFIRMATIONS` each while there is time."""
        before = {one: len(self.found[one]) for one in sets}
        for _ in range(CONFIRMATIONS):
            self._round(sets, 1.0)
        return {text: self.found[text][count:] for text, count in before.items()}

    def _round(self, sets: Sequence[TransferSet], share: float) -> list[TransferSet]:
        """Measure each set once until that share of the time is spent; those measured."""
        done = []
        for one in sets:
            if self.found and self.elapsed > self._limit * share:
                break
            if one not in self.lost and self._measured(one):
                done.append(one)
        return done

    def _measured(self, one: TransferSet) -> bool:
        try:
            (measurement,) = self._source.measure([one])
        except MeasurementError as error:
            self.lost[one] = str(error)
            return False
        self.found.setdefault(one, []).append(measurement)
        return True


def _confirmed(
    bench: _Bench, chosen: Sequence[TransferSet], journal: Known, now: Known
) -> list[Comparison]:
    """All comparisons; those that alarm do so by what was measured first and again by the rest."""
    groups = [
        logs
        for part in (journal, now)
        for found in part.values()
        for logs in log_rates(found).values()
    ]
    spread = common_spread(groups)
    rows = compared(journal, now, spread)
    alarmed = {row.transfers for row in rows if row.alarming}
    fresh = bench.again([one for one in chosen if one in alarmed])
    second = {
        (row.transfers, row.flow): row
        for row in compared(journal, {text: new for text, new in fresh.items() if new}, spread)
    }
    return [_both(row, second.get((row.transfers, row.flow))) for row in rows]


def _both(first: Comparison, second: Comparison | None) -> Comparison:
    """The first comparison, no more certain than the second; without one it is not confirmed."""
    if not first.alarming:
        return first
    if second is None or (second.ratio > 1) != (first.ratio > 1):
        return msgspec.structs.replace(first, p=1.0)
    return msgspec.structs.replace(first, p=max(first.p, second.p))
