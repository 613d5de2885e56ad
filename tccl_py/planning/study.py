"""The study of a class of hosts under one choice of settings, and joined rings as a Plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from typing import Any

import msgspec

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.files import pick
from tccl_py.model.cluster import Cluster
from tccl_py.model.measurement import BandwidthSource, Measurement, deal_out
from tccl_py.model.rings import Ring, RingSet, nics_of
from tccl_py.model.transfer import Fifo, Flow, Place, Transfer, TransferSet, transfer_set
from tccl_py.nccl.graph_search import DefaultRings
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.versions import say_unchecked, version_facts
from tccl_py.nccl.view import NcclView
from tccl_py.plan.chains import (
    Choice,
    ChoiceName,
    HostPath,
    Order,
    PlanChain,
    PlannedHost,
    condense,
    is_at_bound,
    plan_chain,
)
from tccl_py.plan.machine_files import path_types
from tccl_py.plan.plan import Plan
from tccl_py.planning.request import PlanRequest, Rings, Task
from tccl_py.search.problem import SearchResult
from tccl_py.search.strategies import find_rings, strategy_name
from tccl_py.sources.bench import Bench

PRECISE = 0.005
"""A rate whose standard error is smaller (relative) was not chosen for its luck."""
SIMPLE_ORDER = "NCCL's search finds no rings and takes its simple order"
CAREFUL = 8
"""Measurements of default NCCL's rings and of the plan's where samples spread."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Rings under settings, while they are planned: on hosts of a class, or over all hosts."""

    settings: Settings
    rate_gbps: float
    """The bandwidth of all rings together, GB/s."""
    rings: RingSet = RingSet(())
    """The hops on a host of a class."""
    hosts: Mapping[str, tuple[PlanChain, ...]] = {}
    """The chains on each host in the order of hosts, once rings over several are joined."""
    error: float = 0.0
    """Half the 95 % interval of the rate, relative."""
    assumed: bool = False
    """Whether assumed values lie behind the rate."""
    bound_gbps: float | None = None
    """What no set of as many rings under these settings exceeds, in any order of hosts and over any
    NICs, if NICs carry equal numbers of rings or one more; None is not known."""
    bound_assumptions: tuple[str, ...] = ()
    """What the bound assumes and was not checked, in sentences."""
    order_bound_gbps: float | None = None
    """What no order of hosts exceeds with these chains; None: none is better, or it was given."""
    nccl: DefaultRings | None = None
    """NCCL's own choice, of which these are the rings."""
    measurement: Measurement | None = None
    """The measurement of the rings, where their hops need rates."""

    @property
    def orders(self) -> tuple[Order, ...]:
        """GPU orders of the rings."""
        return tuple(ring.gpus for ring in self.rings.rings)

    @property
    def ring_count(self) -> int:
        """The number of different rings."""
        return len(next(iter(self.hosts.values()), self.rings.rings))

    @property
    def bounces(self) -> bool:
        """Whether data goes through host memory on some hop."""
        return any(hop.flow.is_bounce for ring in self.rings.rings for hop in ring.hops)

    def as_choice(self, name: ChoiceName, note: str = "") -> Choice:
        """Return the rings as a choice of a plan."""
        return Choice(
            name=name,
            rings=self.orders if self.nccl is None else self.nccl.rings,
            predicted_gbps=self.rate_gbps,
            note=note,
            **pick(self, "settings", "error", "assumed"),
        )


def candidate_of(settings: Settings, result: SearchResult) -> Candidate:
    """Return the result of a search under these settings."""
    return Candidate(
        settings=settings,
        **pick(result, "rings", "rate_gbps", "bound_gbps"),
        bound_assumptions=() if result.bound_gbps is None else result.assumptions,
    )


def rate_rings(
    settings: Settings, rings: RingSet, measurement: Measurement, **more: Any
) -> Candidate:
    """Return measured rings under settings, with `more` fields."""
    return Candidate(
        settings=settings,
        rings=rings,
        rate_gbps=rings.rate(measurement),
        error=interval(measurement),
        assumed=measurement.assumed,
        measurement=measurement,
        **more,
    )


def interval(measurement: Measurement) -> float:
    """Return half the 95 % interval of a set's slowest flow, relative to its rate."""
    return 1.96 * measurement.relative_error


def hop_rates(rings: RingSet, measurement: Measurement) -> Iterator[tuple[float, ...]]:
    """Yield the rate of each hop of each ring, GB/s."""
    rates = deal_out(measurement.transfers.flows, measurement.gbps)
    for ring in rings.rings:
        yield tuple(rates[hop.flow].pop() for hop in ring.hops)


def not_below(bound_gbps: float | None, rate_gbps: float) -> float | None:
    """Return a bound, or a rate that noise has put above it; None is no bound."""
    return None if bound_gbps is None else max(bound_gbps, rate_gbps)


def condensed_rings(rings: Sequence[Ring]) -> tuple[Ring, ...]:
    """Return the shortest list of rings with the same shares; rings are equal by GPUs and NICs."""
    routes = {route(path): path for path in rings}
    return tuple(routes[path] for path in condense([route(path) for path in rings]))


def route(ring: Ring) -> tuple[tuple[object, ...], ...]:
    """Return a ring's GPUs in order and the NICs between, which settings do not change."""
    return tuple((hop.source, *nics_of(hop)) for hop in ring.hops)


def measured_well(source: Bench, rings: RingSet) -> Measurement:
    """Measure a ring set; where samples spread, several times, all samples in one measurement.

    A choice among many noisy rates prefers lucky ones: the rate in a plan must rest on more than
    the measurement by which its rings were chosen, unless hardware has the precision that was
    asked for, or cannot repeat the set. Raises MeasurementError: the source cannot measure the set.
    """
    (first,) = source.measure([rings.flows])
    if first.relative_error < PRECISE or (first.settled and not first.simulated):
        return first
    try:
        again = source.samples(rings.flows, CAREFUL)
    except MeasurementError:
        return first
    rows = zip(*(repeat.samples_gbps for repeat in again), strict=True)
    samples = tuple(tuple(chain.from_iterable(row)) for row in rows)
    # Suspect repeats are numbered through.
    firsts = accumulate((len(repeat.samples_gbps[0]) for repeat in again), initial=0)
    outliers = [at + o for at, repeat in zip(firsts, again, strict=False) for o in repeat.outliers]
    settled = all(repeat.settled for repeat in again)
    return msgspec.structs.replace(
        first, samples_gbps=samples, settled=settled, outliers=tuple(outliers)
    )


def search_under(
    task: Task,
    settings: Settings,
    *,
    known: Sequence[Rings] = (),
    floor: float,
    sets: int,
    check_bound: bool = False,
) -> SearchResult | None:
    """Search for rings under one choice of settings; None without time, or if a GPU has no hop.

    Args:
        task: the input of planning.
        settings: the choice; ring counts that do not divide its channels are left out.
        known: ring sets known beforehand.
        floor: scores up to this, GB/s, are of no interest.
        sets: the limit of measured sets.
        check_bound: whether to measure more, as a check of what the bound assumes.
    """
    if not task.source.has_time():
        return None
    counts = [count for count in task.ring_counts if settings.channels % count == 0]

    def search(counts: Sequence[int]) -> SearchResult:
        problem = msgspec.structs.replace(
            task.problem(settings, counts),
            known=tuple(tuple(candidate) for candidate in known),
            floor_gbps=floor,
            budget=msgspec.structs.replace(task.budget, sets=sets),
            check_bound=check_bound,
        )
        return find_rings(problem, strategy=task.strategy, reporter=task.reporter)

    try:
        if task.fewest_first and len(counts) > 1 and task.orders_alike(settings):
            result = search(counts[:1])
            if result.cancelled or result.symmetric:
                return result
        return search(counts)
    except (SearchError, MeasurementError):
        return None


def answer_under(
    task: Task, settings: Settings, known: Sequence[Rings], *, sets: int
) -> SearchResult | None:
    """Search as `search_under` does; KeyboardInterrupt where the search was interrupted."""
    result = search_under(task, settings, known=known, floor=0.0, sets=sets)
    if result is not None and result.cancelled:
        raise KeyboardInterrupt
    return result


# The machine's limit for given rings: bare copies over the same hops, all at the same time.
def limit_gbps(source: BandwidthSource, rings: RingSet, *, assumed: bool) -> float | None:
    """Measure bare copies over the hops of a ring set, by copy engines and by kernels.

    Return the better of the two in GB/s, scored as the rings are; None if neither can be measured.
    With `assumed` assumed values may lie behind the limit, as they do behind the plan.
    """
    rates = []
    for copy_engine in (True, False):
        with suppress(MeasurementError):
            (measurement,) = source.measure([bare_copies(rings, copy_engine=copy_engine)])
            if assumed or not measurement.assumed:
                rates.append(rings.rate(measurement))
    return max(rates, default=None)


def measure_hops_alone(source: Bench, rings: RingSet) -> None:
    """Measure each hop of a ring set alone, where none was: by these `check` tells links apart."""
    hops = [transfer_set([flow]) for flow in dict.fromkeys(rings.flows.flows)]
    if not any(source.recall(hop) for hop in hops):
        with suppress(MeasurementError):
            source.measure(hops)


def bare_copies(rings: RingSet, *, copy_engine: bool) -> TransferSet:
    """Return a plain transfer for each transfer of the rings' hops.

    A bounce becomes an independent write and read of host memory as large as its FIFOs together:
    in a larger buffer the host's memory would decide, not its caches.
    """
    flows = []
    for flow in rings.flows.flows:
        size = (flow.blocks or 1) * (flow.fifo or Fifo()).bytes if flow.is_bounce else None
        for leg in flow.transfers:
            executor = Place("D" if copy_engine else "G", leg.executor.index)
            bare = Transfer(leg.source, executor, leg.destination)
            flows.append(Flow((bare,), buffer=size))
    return transfer_set(flows)


# Rings over one host or several, as a Plan.


def assemble_plan(
    cluster: Cluster,
    class_gpus: Sequence[tuple[int, ...]],
    best: Candidate,
    own: Iterable[Choice],
    request: PlanRequest,
    *,
    views: Sequence[NcclView],
    notices: Iterable[str],
    **more: Any,
) -> Plan:
    """Return the plan of the best rings; the counts of sets are left 0.

    Args:
        cluster: the hosts, and their classes.
        class_gpus: the GPUs of each class.
        best: the rings of the graph files.
        own: the choices without a graph file.
        request: what was asked for.
        views: NCCL's view of a host of each class.
        notices: for the plan.
        more: further fields of the plan.
    """
    of_hosts = best.hosts
    if best.measurement is not None:
        rates = hop_rates(best.rings, best.measurement)
        hops = (ring.hops for ring in best.rings.rings)
        of_hosts = {cluster.names[0]: tuple(map(plan_chain, hops, rates))}
    numbers: dict[tuple[int, tuple[PlanChain, ...]], int] = {}
    hosts: list[PlannedHost] = []
    rank = 0
    for name, chains in of_hosts.items():
        node_class = cluster.host_classes[name]
        path = numbers.setdefault((node_class, chains), len(numbers))
        hosts.append(PlannedHost(name=name, path=path, first_rank=rank))
        rank += len(class_gpus[node_class])
    paths = []
    for number, chains in numbers:
        intra, inter = path_types(views[number], chains)
        paths.append(HostPath(node_class=number, chains=chains, type_intra=intra, type_inter=inter))
    version, bound = best.settings.version, not_below(best.bound_gbps, best.rate_gbps)
    other_count = other_count_notices(request.ring_counts or (), best.ring_count)
    plan = Plan(
        bound_gbps=bound,
        bound_assumptions=best.bound_assumptions,
        choices={choice.name: choice for choice in (*own, best.as_choice("graph"))},
        cluster=cluster,
        class_gpus=tuple(class_gpus),
        hosts=tuple(hosts),
        paths=tuple(paths),
        settings_verified=version_facts(version).verified,
        proven=is_at_bound(best.rate_gbps, bound) and not best.bound_assumptions,
        strategy=strategy_name(request.strategy),
        sets_measured=0,
        sets_remembered=0,
        sets_by_symmetry=0,
        notices=(*notices, *filter(None, [say_unchecked(version)]), *other_count),
        pinned_env=dict(request.pinned_env),
        **more,
    )
    # The rings of its channels follow from the paths.
    return plan.with_choice("graph", settings=best.settings)


def other_count_notices(counts: Sequence[int], count: int) -> tuple[str, ...]:
    """Return a notice where a plan has none of the requested numbers of rings."""
    if not counts or count in counts:
        return ()
    listed = ", ".join(map(str, counts))
    return (
        f"sets of {listed} rings were asked for; the plan has NCCL's own {count}, as none of those "
        "is faster, or none divides the numbers of channels that are tried",
    )
