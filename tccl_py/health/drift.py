"""Selected sets of a plan's journal measured again, changes confirmed, and the part they point to.

A flow's rate in one measurement is one number, the median of its repeats: repeats are correlated,
and only measurements at different times show the spread. Few sets have many measurements, so the
spread of all flows moderates each flow's (Smyth, Statistical Applications in Genetics and
Molecular Biology 3, 2004). The null hypothesis is "changed by no more than `SMALLEST`", not
"unchanged": a small drift is no news.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import scipy  # whose parts load when they are first used, so that commands start without them
from msgspec.structs import replace

from tccl_py.delivery.fit import check_same_machine
from tccl_py.errors import InputError, MeasurementError
from tccl_py.explanation.paths import Paths, collapse_patterns, device_words
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import (
    JOURNAL_FILE,
    BandwidthSource,
    JournalHeader,
    Measurement,
    deal_out,
)
from tccl_py.model.transfer import Flow, TransferSet, transfer_set
from tccl_py.nccl.paths import path_types
from tccl_py.plan.plan import Plan
from tccl_py.plan.text import plan_name
from tccl_py.planning.plan_sources import (
    class_sources,
    hosts_again,
    journal_by_class,
    known_model,
    measured_as,
)
from tccl_py.sources.bench import Bench, bench_of
from tccl_py.sources.hosts import HostsSource
from tccl_py.sources.journal import JournalContents, JournalFile
from tccl_py.sources.opening import open_source
from tccl_py.sources.profiled import search_options
from tccl_py.statistics import holm

if TYPE_CHECKING:
    from tccl_py.sources.hosts import Job

SMALLEST = 0.03
"""Relative changes up to this are not worth an alarm."""
FALSE_ALARM_RATE = 0.01
"""The chance, at most, of any alarm in a check of an unchanged machine."""
_FLOOR = 0.001**2
"""The smallest variance of a log rate: timers have steps."""
_MANY = 1e6
"""Degrees of freedom for equal spreads of all flows."""
_EVEN = 0.1
"""Changes whose ratios differ by no more than this share are equal."""
_NEARLY_ALL = 0.8
_NAMED = 3
_FASTER = (
    "higher clocks, or the end of what slowed the machine when the plan was measured: all that "
    "changed became faster; plan again"
)
_EVERYTHING = (
    "clocks, a power limit, heat, or other work on this machine (`tccl doctor`, "
    "nvidia-smi -q -d PERFORMANCE): nearly everything changed alike"
)
_DOWNTRAINED, _HOT = " (downtrained?)", " (its clocks, power limit or heat?)"
_SEVERAL = "more than one cause: no single link or memory explains all changes"
ROUNDS = 3
"""Measurements of each set, interleaved with the other sets to show the spread over time."""
CONFIRMATIONS = 2
"""Measurements that have to confirm a change before it is reported."""
_FOR_FIRST, _FOR_ROUNDS = 0.3, 0.75
"""Shares of the time at which the first round, and all rounds, have to end."""
_TIMES_EACH_GPU = 3
"""Small sets for each GPU, enough to distinguish a slow GPU from a slow pair."""
Journal = Mapping[TransferSet, Sequence[Measurement]]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The variance of log rates between measurements, and its degrees of freedom."""

    variance: float
    freedom: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One flow of a set then and now, GB/s."""

    transfers: TransferSet
    flow: Flow
    hosts: str = ""
    """Their class if there are several, which may have equal sets."""
    was_gbps: float
    is_gbps: float
    p: float
    """The chance of so large a change if the rate changed by `SMALLEST` at most, adjusted for all
    flows compared."""

    @property
    def name(self) -> str:
        """The flow, and the hosts it is on."""
        return f"{self.flow} on {self.hosts}" if self.hosts else str(self.flow)

    @property
    def ratio(self) -> float:
        """Now over then."""
        return self.is_gbps / self.was_gbps

    @property
    def alarming(self) -> bool:
        """True if the rate changed beyond doubt."""
        return self.p <= FALSE_ALARM_RATE


def worst_of_each_set(rows: Iterable[Comparison]) -> list[Comparison]:
    """Return the flow of each set that fell most (or rose least), the worst set first."""
    worst: dict[tuple[str, TransferSet], Comparison] = {}
    for row in sorted(rows, key=lambda row: row.ratio):
        worst.setdefault((row.hosts, row.transfers), row)
    return list(worst.values())


def log_rates(measurements: Sequence[Measurement]) -> dict[Flow, list[float]]:
    """Return the logarithm of each different flow's rate in each measurement.

    Equal flows of a set share a rate, their mean.
    """
    rates: dict[Flow, list[float]] = {}
    for measurement in measurements:
        logs = np.log(np.median(np.asarray(measurement.samples_gbps), axis=1)).tolist()
        for flow, equal in deal_out(measurement.transfers.flows, logs).items():
            rates.setdefault(flow, []).append(fmean(equal))
    return rates


def common_spread(groups: Iterable[Sequence[float]]) -> Spread:
    """Return the spread of all flows; each group has one flow's log rates at different times.

    The logarithms of the groups' variances scatter by chance and by differences between flows;
    their moments give the degrees of freedom (Smyth 2004, section 6.2).
    """
    repeated = [group for group in groups if len(group) > 1]
    if not repeated:
        return Spread(variance=_FLOOR, freedom=0.0)
    freedom = np.array([len(group) - 1.0 for group in repeated])
    variances = np.maximum([np.var(group, ddof=1) for group in repeated], _FLOOR)
    half = freedom / 2
    logs = np.log(variances) - scipy.special.digamma(half) + np.log(half)
    beyond = 0.0
    if len(repeated) > 1:
        beyond = float(np.var(logs, ddof=1) - np.mean(scipy.special.polygamma(1, half)))
    if beyond <= 1 / _MANY:
        pooled = float(np.average(variances, weights=freedom))
        return Spread(variance=pooled, freedom=min(float(freedom.sum()), _MANY))
    # Of equal variances beyond chance trigamma(freedom / 2) is the variance of the logarithms.
    prior = 2 * scipy.optimize.brentq(
        lambda y: scipy.special.polygamma(1, y) - beyond, 1 / _MANY, 2 * _MANY
    )
    middle = float(np.mean(logs)) + scipy.special.digamma(prior / 2) - math.log(prior / 2)
    return Spread(variance=max(math.exp(middle), _FLOOR), freedom=min(prior, _MANY))


def compare_sets(
    earlier: Mapping[TransferSet, Sequence[Measurement]],
    later: Mapping[TransferSet, Sequence[Measurement]],
    spread: Spread,
    *,
    families: int = 1,
) -> list[Comparison]:
    """Compare each flow of the sets in `later` with its earlier rate, the least likely first."""
    flows = []
    for transfers, measurements in later.items():
        before = log_rates(earlier[transfers])
        for flow, after in log_rates(measurements).items():
            flows.append((transfers, flow, before[flow], after))
    p_values = chances([flow[2:] for flow in flows], spread, families=families)
    rows = []
    for (transfers, flow, *rates), p in zip(flows, p_values, strict=True):
        was, new = (math.exp(fmean(logs)) for logs in rates)
        rows.append(Comparison(transfers=transfers, flow=flow, was_gbps=was, is_gbps=new, p=p))
    return sorted(rows, key=lambda row: (row.p, str(row.transfers), row.flow))


def chances(
    changes: Iterable[Sequence[Sequence[float]]], spread: Spread, *, families: int = 1
) -> list[float]:
    """Return the chance of each change of log rates, then and now, adjusted for all of them.

    Holm's adjustment (1979) bounds the chance of any false alarm, whatever the dependence; with
    several `families` of comparisons, over all of them.
    """
    raw = [_chance(before, after, spread) for before, after in changes]
    return [min(1.0, families * p) for p in holm(raw)]


def _chance(before: Sequence[float], after: Sequence[float], spread: Spread) -> float:
    """Return the chance of such a change of log rates if the true one is `SMALLEST` at most."""
    freedom = spread.freedom + len(before) + len(after) - 2
    if freedom <= 0:
        return 1.0
    squares = sum(float(np.var(row)) * len(row) for row in (before, after))
    variance = max((spread.freedom * spread.variance + squares) / freedom, _FLOOR)
    error = math.sqrt(variance * (1 / len(before) + 1 / len(after)))
    change = abs(fmean(after) - fmean(before))
    smallest = math.log1p(SMALLEST)
    if change <= smallest:
        return 1.0
    tails = scipy.stats.t.sf([(change - smallest) / error, (change + smallest) / error], freedom)
    return float(min(1.0, tails.sum()))


class Suspect(NamedTuple):
    """A part on a flow's path, in words; of suspects alike those of the lowest `rank` are named.

    A link explains more than one direction of it, and both more than a whole GPU.
    """

    words: str
    rank: int = 0


def points_to(paths: Paths, rows: Sequence[Comparison]) -> str:
    """Return a noun for the cause of the changes among `rows`, and why; "" if nothing changed."""
    changed = [row for row in rows if row.alarming]
    if not changed:
        return ""
    ratios = [row.ratio for row in changed]
    if min(ratios) > 1:
        return _FASTER
    sets, hit = ({row.transfers for row in part} for part in (rows, changed))
    users = _sets_by_suspect(paths, rows)
    blamed = _sets_by_suspect(paths, changed)
    # The suspects: parts of all changed sets, and of the fewest unchanged sets.
    unharmed = {part: len(users[part] - hit) for part, used in blamed.items() if used == hit}
    fewest = min(unharmed.values(), default=len(sets))
    # A part of the changed sets alone explains more than "nearly everything".
    exact = fewest == 0 and len(hit) < len(sets)
    equal = max(ratios) <= min(ratios) * (1 + _EVEN)
    if not exact and len(hit) > 1 and len(hit) >= len(sets) * _NEARLY_ALL and equal:
        return _EVERYTHING
    if not unharmed:
        return _SEVERAL
    tied = [part for part in unharmed if unharmed[part] == fewest]
    rank = min(part.rank for part in tied)
    best = [part.words for part in tied if part.rank == rank]
    best.sort(key=lambda words: not words.startswith("GPU"))
    named = " or ".join(best[:_NAMED])
    used = len(hit) + fewest
    if used == 1:
        return f"{named}: the changed set uses it, and no other measured set does"
    share = f"{len(hit)} of the {used} that use it changed"
    return f"{named}: all sets that changed use it, and {share}"


def _sets_by_suspect(paths: Paths, rows: Sequence[Comparison]) -> dict[Suspect, set[TransferSet]]:
    sets_of: dict[Suspect, set[TransferSet]] = {}
    for row in rows:
        for suspect in _suspects(paths, row.flow):
            sets_of.setdefault(suspect, set()).add(row.transfers)
    return sets_of


def _suspects(paths: Paths, flow: Flow) -> Iterator[Suspect]:
    """Yield the parts on a flow's path, directions of links, and whole GPUs."""
    passes = paths.passes(flow)
    between = any(passing.part.kind in ("socket", "numa") for passing in passes)
    for passing in passes:
        kind, _, words = passing.part
        if kind == "cpu" and between:
            continue  # The link between CPUs says more than either CPU.
        yield Suspect(words + _DOWNTRAINED * (kind in ("own", "uplink")))
        if kind in ("own", "nvlink"):
            yield Suspect(passing.words, 1)
    for end in dict.fromkeys(place.device for place in flow.places):
        if end[0] == "G":
            yield Suspect(f"{device_words(end)} by any path{_HOT}", 2)


def link_class(machine: Machine, flow: Flow) -> str:
    """Return a flow's path type and mechanism: `PIX write`, `SYS bounce`."""
    mechanism: str = "bounce" if flow.is_bounce else flow.transfers[0].operation
    if flow.transfers[0].uses_copy_engine:
        mechanism += " by copy engine"
    return f"{path_types(machine)[str(flow.source), str(flow.destination)].name} {mechanism}"


def gpus_of(transfers: TransferSet) -> set[int]:
    """Return the indices of the GPUs at the ends of a set's flows."""
    ends = (place for flow in transfers.flows for place in (flow.source, flow.destination))
    return {place.index for place in ends if place.kind == "G"}


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a check."""

    seconds: float = 120.0
    """In all."""
    sets: int = 24
    seed: int = 0
    """Picks the random sample."""
    families: int = 1
    """Families of comparisons, this one and others, that share the rate of false alarms."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check."""

    rows: tuple[Comparison, ...]
    """All flows compared."""
    changes: tuple[Comparison, ...]
    """The flow with the largest fall of each changed set, the worst set first."""
    points_to: str
    lost: dict[TransferSet, str]
    """Why a set can no longer be measured."""
    skipped: tuple[TransferSet, ...]
    """Sets for which no time was left."""
    seconds: float
    false_alarm_rate: float = FALSE_ALARM_RATE

    @property
    def has_drifted(self) -> bool:
        """True if anything changed."""
        return bool(self.changes or self.lost)

    @property
    def sets(self) -> list[Comparison]:
        """The flow that fell most of each set compared."""
        return worst_of_each_set(self.rows)


class TooShortError(InputError):
    """The time did not suffice to judge a class of hosts; `drift` has its sets as skipped."""

    def __init__(self, what: str, chosen: Sequence[TransferSet], seconds: float) -> None:
        super().__init__("`max_seconds`", f"is too short to {what}", "give it more seconds")
        self.drift = Drift(
            rows=(), changes=(), points_to="", lost={}, skipped=tuple(chosen), seconds=seconds
        )


def find_drift(
    plan: Plan,
    journal: Journal,
    source: BandwidthSource,
    *,
    number: int = 0,
    effort: Effort | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Drift:
    """Compare new measurements by `source` with a plan's journal, on hosts of class `number`.

    A set is reported as changed if the chance of any such alarm on an unchanged machine is at
    most `FALSE_ALARM_RATE`, all flows compared together, and if new measurements of it confirm the
    change by themselves. The rate is shared among the classes of a cluster, whose flows over the
    network are those of one host. Raises InputError: the journal is empty; TooShortError.
    """
    effort = effort or Effort()
    chosen = chosen_sets(plan, journal, number=number, most=effort.sets, seed=effort.seed)
    if not chosen:
        raise InputError("the journal", "has no measurements", "plan again")
    sampler = _Sampler(source, effort, clock)
    sampler.measure_rounds(chosen)
    repeated = {key: samples for key, samples in sampler.samples.items() if len(samples) > 1}
    if not repeated and not sampler.lost:
        raise TooShortError("measure one set twice", chosen, sampler.elapsed)
    families = len(plan.cluster.classes) * effort.families
    rows = _confirm(sampler, chosen, journal, repeated, families)
    node = plan.cluster.classes[number]
    if len(plan.cluster.classes) > 1:
        rows = [replace(row, hosts=node.name) for row in rows]
        sampler.lost = {key: f"on {node.name}, {why}" for key, why in sampler.lost.items()}
    return Drift(
        rows=tuple(rows),
        changes=tuple(worst_of_each_set(row for row in rows if row.alarming)),
        points_to=points_to(Paths(node.machine, node.knowledge), rows),
        lost=sampler.lost,
        skipped=tuple(
            transfers for transfers in chosen if transfers not in {*repeated, *sampler.lost}
        ),
        seconds=sampler.elapsed,
    )


def join_drifts(plan: Plan, drifts: Sequence[Drift]) -> Drift:
    """Return the drift of all classes of a plan's hosts."""
    if len(drifts) == 1:
        return drifts[0]
    causes = zip(plan.cluster.classes, (drift.points_to for drift in drifts), strict=True)
    changes = (row for drift in drifts for row in drift.changes)
    lost: dict[TransferSet, str] = {}
    for transfers, why in (item for drift in drifts for item in drift.lost.items()):
        lost[transfers] = f"{lost[transfers]}; {why}" if transfers in lost else why
    return Drift(
        rows=tuple(row for drift in drifts for row in drift.rows),
        changes=tuple(sorted(changes, key=lambda row: row.ratio)),
        points_to="; ".join(f"on {part.name}, {cause}" for part, cause in causes if cause),
        lost=lost,
        skipped=tuple(transfers for drift in drifts for transfers in drift.skipped),
        seconds=sum(drift.seconds for drift in drifts),
    )


class _Sampler:
    """Measures sets, keeps the results, and watches the time."""

    def __init__(self, source: BandwidthSource, effort: Effort, clock: Callable[[], float]) -> None:
        self._bench, self._limit, self._clock = bench_of(source), effort.seconds, clock
        self._random = random.Random(effort.seed)
        self._began = clock()
        self.samples: dict[TransferSet, list[Measurement]] = {}
        self.lost: dict[TransferSet, str] = {}

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began

    def measure_rounds(self, sets: Sequence[TransferSet]) -> None:
        """Measure each set `ROUNDS` times, or fewer sets where time is short."""
        # 1. In order of weight, so that a lack of time drops the least important sets.
        first = list(self._round(sets, _FOR_FIRST))
        spent = self.elapsed
        # 2. In random order, so that drift meanwhile favours no set. The first round includes the
        # start of workers, so the estimate errs to the safe side.
        share = (self._limit * _FOR_ROUNDS - spent) / max(spent * (ROUNDS - 1), 1e-9)
        repeated = first[: max(1, int(len(first) * min(1.0, share)))]
        for _ in range(ROUNDS - 1):
            self._round(self._random.sample(repeated, len(repeated)), _FOR_ROUNDS)

    def again(self, sets: Sequence[TransferSet]) -> dict[TransferSet, list[Measurement]]:
        """Return new measurements of some sets, `CONFIRMATIONS` each while there is time."""
        rounds = [self._round(sets, 1.0) for _ in range(CONFIRMATIONS)]
        samples: dict[TransferSet, list[Measurement]] = {}
        for transfers, measurement in (item for done in rounds for item in done.items()):
            samples.setdefault(transfers, []).append(measurement)
        return samples

    def _round(self, sets: Sequence[TransferSet], share: float) -> dict[TransferSet, Measurement]:
        """Measure each set once until `share` of the time is spent; return the measurements."""
        done: dict[TransferSet, Measurement] = {}
        for transfers in sets:
            if self.samples and self.elapsed > self._limit * share:
                break
            if transfers not in self.lost:
                try:
                    done[transfers] = self._bench.again(transfers)
                except MeasurementError as error:
                    self.lost[transfers] = str(error)
                else:
                    self.samples.setdefault(transfers, []).append(done[transfers])
        return done


def _confirm(
    sampler: _Sampler,
    chosen: Sequence[TransferSet],
    journal: Journal,
    repeated: Journal,
    families: int,
) -> list[Comparison]:
    """Return all comparisons; alarms hold by the first measurements and by new ones alone."""
    measured = (*journal.values(), *repeated.values())
    spread = common_spread([logs for rows in measured for logs in log_rates(rows).values()])
    rows = compare_sets(journal, repeated, spread, families=families)
    alarmed = {row.transfers for row in rows if row.alarming}
    again = sampler.again([transfers for transfers in chosen if transfers in alarmed])
    confirming = compare_sets(journal, again, spread, families=families)
    second = {(row.transfers, row.flow): row for row in confirming}
    confirmed = []
    for row in rows:
        new = second.get((row.transfers, row.flow))
        same_direction = new is not None and (new.ratio > 1) == (row.ratio > 1)
        p = max(row.p, new.p) if new is not None and same_direction else 1.0
        confirmed.append(replace(row, p=p) if row.alarming else row)
    left_out = alarmed - again.keys()
    if left_out and not sampler.lost and not any(row.alarming for row in confirmed):
        raise TooShortError("confirm a change", chosen, sampler.elapsed)
    return confirmed


def chosen_sets(
    plan: Plan, journal: Journal, *, number: int = 0, most: int, seed: int
) -> tuple[TransferSet, ...]:
    """Return at most `most` sets of the journal of a class of hosts, the most important first.

    In this order: the plan's rings together and each alone, its slowest hop alone, writes that
    collapse above switches, small sets with each kind of link and several for each GPU, and a
    random sample of the rest. Sets with many measurements come first: their rates are known best.
    """
    often = sorted(journal, key=lambda key: (-len(journal[key]), len(key), str(key)))
    small = sorted(often, key=len)
    order = (
        *_of_the_plan(plan, number),
        *collapse_patterns(plan, small, number=number),
        *_covering(plan.cluster.classes[number].machine, plan.class_gpus[number], small),
        *random.Random(seed).sample(sorted(often, key=str), len(often)),
    )
    return tuple(transfers for transfers in dict.fromkeys(order) if transfers in journal)[:most]


def _of_the_plan(plan: Plan, number: int) -> Iterator[TransferSet]:
    for path in plan.paths:
        if path.node_class == number:
            rings = [[hop.flow for hop in chain.hops] for chain in path.chains]
            yield transfer_set(flow for ring in rings for flow in ring)
            yield from map(transfer_set, rings)
            slowest = min(
                (chain.bottleneck for chain in path.chains), key=lambda hop: hop.rate_gbps
            )
            yield transfer_set([slowest.flow])


def _covering(
    machine: Machine, indices: Sequence[int], small: Sequence[TransferSet]
) -> Iterator[TransferSet]:
    """Yield sets until each kind of link is in one of them, and each GPU in several."""
    kinds: set[str] = set()
    times = dict.fromkeys(indices, 0)
    covered: set[frozenset[int]] = set()
    for transfers in small:
        new = {link_class(machine, flow) for flow in transfers.flows} - kinds
        gpus = frozenset(gpus_of(transfers) & times.keys())
        few = any(times[gpu] < _TIMES_EACH_GPU for gpu in gpus)
        # The same GPUs by another mechanism add nothing about a GPU.
        if new or (few and len(gpus) < len(times) and gpus not in covered):
            kinds |= new
            covered.add(gpus)
            for gpu in gpus:
                times[gpu] += 1
            yield transfers


def metric_labels(plan: Plan) -> dict[str, str]:
    """Return the labels of a plan's metrics; those of a dry run say so."""
    labels = {"machine": plan_name(plan), "simulated": str(plan.simulated).lower()}
    return labels | ({"dry_run": "true"} if plan.dry_run else {})


def prometheus_text(drift: Drift, labels: Mapping[str, str], *, now: float) -> str:
    """Return a check in Prometheus' text format, with the plan's `labels`.

    `now` is its end, in seconds since 1970.

    The node exporter's textfile collector takes it. Source of the format:
    prometheus.io/docs/instrumenting/exposition_formats.
    """

    def of_set(transfers: TransferSet, hosts: str = "") -> dict[str, str]:
        return {**labels, "set": str(transfers)} | ({"hosts": hosts} if hosts else {})

    sets = [(of_set(row.transfers, row.hosts), row) for row in drift.sets]
    changed = [of_set(row.transfers, row.hosts) for row in drift.changes]
    ratios = [(of, row.ratio) for of, row in sets]
    flags = [(of, of in changed or row.transfers in drift.lost) for of, row in sets]
    compared_sets = {row.transfers for row in drift.sets}
    flags += [(of_set(key), True) for key in drift.lost if key not in compared_sets]
    totals = (
        ("drifted", "Whether rates differ from the plan's (1) or not (0).", drift.has_drifted),
        ("sets_compared", "Transfer sets that were compared.", len(drift.sets)),
        ("sets_lost", "Transfer sets that cannot be measured any more.", len(drift.lost)),
        ("false_alarm_rate", "Chance of an alarm on an unchanged machine, at most.",
         drift.false_alarm_rate),
        ("duration_seconds", "Duration of the check.", drift.seconds),
        ("timestamp_seconds", "End of the check, in seconds since 1970.", now),
    )  # fmt: skip
    metrics = [metric(name, text, [(labels, value)]) for name, text, value in totals]
    metrics += [
        metric("set_rate_ratio", "Rate of the flow that fell most, now over then.", ratios),
        metric("set_changed", "Whether the set changed beyond noise (1) or not (0).", flags),
    ]
    return "".join(metrics)


def metric(name: str, words: str, values: Iterable[tuple[Mapping[str, str], float]]) -> str:
    """Return a metric of `tccl check` with its labels; "" without values."""
    lines = []
    for labels, value in values:
        inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        lines.append(f"tccl_check_{name}{{{inside}}} {value:.10g}\n")
    if not lines:
        return ""
    head = f"# HELP tccl_check_{name} {words}\n# TYPE tccl_check_{name} gauge\n"
    return head + "".join(lines)


def _escape(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(char if char.isprintable() else "?" for char in escaped)


class Remeasuring(NamedTuple):
    """A source that measures a plan's sets again."""

    plan: Plan
    source: Bench
    journals: Sequence[Journal]
    """The plan's, by class of hosts."""
    notices: Sequence[str]
    extends: bool
    """Whether the source may add to the journal: of one host, the one that it is of."""

    def drift(self, effort: Effort) -> Drift:
        """Return the drift of all classes of hosts, which share the time.

        Raises TooShortError, with the drift of the other classes: it did not suffice for one.
        """
        effort = replace(effort, seconds=effort.seconds / len(self.plan.cluster.classes))
        sources: Sequence[BandwidthSource] = [self.source]
        if isinstance(self.source, HostsSource):
            sources = class_sources(self.source, self.plan.cluster)
        drifts, errors = [], []
        for number, source in enumerate(sources):
            rates = self.journals[number]
            try:
                drifts.append(find_drift(self.plan, rates, source, number=number, effort=effort))
            except TooShortError as error:
                drifts.append(error.drift)
                errors.append(error)
        found = join_drifts(self.plan, drifts)
        if errors:
            errors[0].drift = found
            raise errors[0]
        return found

    def learn_patterns(self, directory: Path, until: float) -> list[str]:
        """Add collapse patterns that a machine's journal lacks to it; return notices.

        None is measured after `until`, by the monotonic clock.
        """
        rates = self.journals[0]
        patterns = collapse_patterns(self.plan, sorted(rates, key=len)) if self.extends else ()
        lacking = [pattern for pattern in patterns if pattern not in rates]
        if not lacking:
            return []
        learnt: set[TransferSet] = set()
        try:
            with closing(JournalFile(directory / JOURNAL_FILE, self.source.header)) as journal:
                for pattern in lacking * ROUNDS:
                    if time.monotonic() < until:
                        journal.append(self.source.again(pattern))
                        learnt.add(pattern)
        except (InputError, MeasurementError) as error:
            return [f"writes above {len(lacking)} switch(es) cannot be compared: {error}"]
        text = f"measured writes above {len(learnt)} switch(es): later preflights compare with them"
        return [text] if learnt else []


@contextmanager
def remeasuring(
    plan: Plan,
    directory: Path,
    journal: JournalContents,
    seed: int,
    *,
    job: Job | None = None,
    alike: bool = False,
) -> Iterator[Remeasuring]:
    """Open the source of a plan: the hosts of a job, this machine, or a model.

    With `alike` a machine with equal GPUs at the same places will do. Raises InputError: other
    hosts, or this machine has other GPUs, another driver or other NUMA nodes.
    """
    if job is not None:
        with hosts_again(plan, journal.header, job) as hosts:
            yield Remeasuring(plan, hosts, journal_by_class(plan, journal), (), extends=False)
        return
    source, notices = _machine_again(plan, directory, journal.header, seed, alike=alike)
    with source:
        # The journal is another host's where this one is only alike.
        extends = not alike or source.header == journal.header
        yield Remeasuring(plan, source, [journal.measurements], notices, extends)


def _machine_again(
    plan: Plan, directory: Path, journal: JournalHeader, seed: int, *, alike: bool
) -> tuple[Bench, tuple[str, ...]]:
    """Return the source of a plan's machine, or its model with noise of its own, and notices."""
    if plan.simulated:
        model, noise, used = known_model(plan, directory), journal.noise, journal.seed
        same_model = open_source(model, noise=noise, seed=used).header == journal
        text = (
            "the model, or this program's parameters, are not those that the plan was simulated "
            "with: differences for that reason are reported as changes"
        )
        # The journal's own seed would draw the journal's own samples again.
        return open_source(model, noise=noise, seed=used + 1 + seed), () if same_model else (text,)
    right = "check it where it was measured"
    try:
        place = measured_as(journal, plan.machine)
    except InputError as error:
        raise InputError(error.where, error.what, right) from error
    right = f"plan again here, or {right}"
    gpus = place.machine.gpus if alike else None
    notes = check_same_machine(plan, directory, place.fingerprint, right=right, present_gpus=gpus)
    source = open_source(place, gpus=plan.gpus, options=search_options(place.backend))
    return source, tuple(f"{text}: that may explain what changed" for text in notes)
