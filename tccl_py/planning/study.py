"""The study of a class of hosts under one choice of settings, and joined rings as a Plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain

import msgspec

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.model.cluster import Cluster
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.measurement import BandwidthSource, Measurement
from tccl_py.model.rings import Hop, HopSpace, Ring, RingSet, nics_of, ring_like, ring_set
from tccl_py.model.symmetry import Symmetry, automorphisms, natural_cuts
from tccl_py.model.transfer import Fifo, Flow, Place, Transfer, TransferSet, transfer_set
from tccl_py.nccl.graph_search import DefaultChoice
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.versions import Level, version_facts
from tccl_py.nccl.view import NcclView, view
from tccl_py.plan.chains import (
    HostPath,
    Order,
    PlanChain,
    PlanChoice,
    PlannedHost,
    condensed,
    is_at_bound,
    version_notices,
)
from tccl_py.plan.plan import Plan
from tccl_py.planning.request import PlanRequest
from tccl_py.search.problem import Budget, Reporter, SearchProblem, SearchResult, SetRule
from tccl_py.search.strategies import Strategy, find_rings, strategy_name
from tccl_py.sources.bench import Bench

Rings = Sequence[Ring] | Sequence[Order]
"""Orders of GPUs, or rings that were found under other settings: their GPUs and NICs count."""

OwnRings = Callable[[Sequence[Settings]], Sequence[DefaultChoice]]
"""Returns NCCL's own rings under each of several settings."""

PRECISE = 0.005
"""A rate whose standard error is smaller (relative) was not chosen for its luck."""
CAREFUL = 8
"""Measurements of stock's rings and of the plan's where samples spread."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The input of planning.

    `p2p_level` is pinned for all jobs, if set. `own_rings` returns NCCL's own rings under each of
    several settings; None computes them by NCCL's rules. `nics` are those of chains over several
    hosts. With `placement` the jobs load the NCCL plugin, which places bounce buffers, on `nodes`
    by GPU where these are known. `spaces` caches hop spaces.
    """

    machine: Machine
    knowledge: Knowledge
    source: Bench
    gpus: tuple[int, ...]
    version: str
    ring_counts: tuple[int, ...] = (1,)
    strategy: str | Strategy = "best-first"
    budget: Budget = Budget()
    reporter: Reporter | None = None
    nics: tuple[int, ...] = ()
    p2p_level: Level | None = None
    own_rings: OwnRings | None = None
    placement: bool = False
    nodes: Mapping[int, int] = {}
    spaces: dict[tuple[object, ...], HopSpace] = msgspec.field(default_factory=dict)

    @property
    def default_settings(self) -> Settings:
        """The settings of default NCCL: its defaults, and the pinned level."""
        return Settings(version=self.version, p2p_level=self.p2p_level)

    def view(self, settings: Settings) -> NcclView:
        """Return NCCL's view of the machine under these settings."""
        return view(self.machine, self.knowledge, settings, gpus=self.gpus)

    def space(self, settings: Settings, count: int) -> HopSpace:
        """Return the hops open to each ring of a set of `count`."""
        key = (settings, count, self.gpus, self.nics)
        if key not in self.spaces:
            self.spaces[key] = self.hops(self.view(settings), count)
        return self.spaces[key]

    def hops(self, host_view: NcclView, count: int) -> HopSpace:
        """Return the hops of a view; a host of several adds those over its NICs."""
        space = hop_space(host_view, rings_in_set=count)
        if not self.nodes:
            return space
        open_to = {gpu: (None, node) for gpu, node in self.nodes.items()}
        hops = {
            pair: tuple(hop for hop in choices if hop.flow.through in open_to[pair[0]])
            for pair, choices in space.hops.items()
        }
        return msgspec.structs.replace(space, hops=hops)

    @property
    def least_channels(self) -> int:
        """Return the channels that a graph file has at least, on a network that is not slow."""
        return 1

    @property
    def symmetry(self) -> Symmetry:
        """The symmetry of the machine as far as it exchanges the GPUs."""
        return automorphisms(self.machine, self.knowledge, gpus=self.gpus)

    def problem(self, settings: Settings, counts: Sequence[int]) -> SearchProblem:
        """Return the search for sets of so many rings under one choice of settings."""
        rules = {count: self.rule(settings, count) for count in counts}
        return SearchProblem(
            spaces={count: self.space(settings, count) for count in counts},
            source=self.source,
            symmetry=self.symmetry,
            rules={count: rule for count, rule in rules.items() if rule is not None},
            cuts=natural_cuts(self.machine, self.knowledge, gpus=self.gpus),
            budget=self.budget,
        )

    def rule(self, settings: Settings, count: int, /) -> SetRule | None:
        """Return the rule for sets of so many rings, if any."""
        return OneNode() if settings.shm_placement and count > 1 else None


class OneNode(SetRule):
    """All bounces from a GPU go through one NUMA node: its process places its buffers."""

    def admits(self, rings: Sequence[Sequence[Hop]]) -> bool:
        """Return whether no GPU bounces through two nodes."""
        nodes = {(hop.source, hop.flow.through) for ring in rings for hop in ring}
        bounces = [source for source, node in nodes if node is not None]
        return len(set(bounces)) == len(bounces)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with the best ring set found under them; `result` is None without a search.

    `searched` are the settings of the search: channels and FIFO size may differ by now.
    """

    settings: Settings
    rings: RingSet
    rate_gbps: float
    result: SearchResult | None = None
    searched: Settings | None = None

    @property
    def bound_gbps(self) -> float | None:
        """The bound on ring sets searched under just these settings, GB/s."""
        if self.result is None or self.result.bound_gbps is None or self.searched != self.settings:
            return None
        return max(self.result.bound_gbps, self.rate_gbps)

    @property
    def bound_assumptions(self) -> tuple[str, ...]:
        """The unchecked assumptions of the bound, in sentences."""
        return () if self.result is None or self.bound_gbps is None else self.result.assumptions

    @property
    def orders(self) -> tuple[Order, ...]:
        """GPU orders of the rings."""
        return tuple(ring.gpus for ring in self.rings.rings)


def choice_found(settings: Settings, result: SearchResult) -> Choice:
    """Return the result of a search under these settings as a choice."""
    rings, rate = result.rings, result.rate_gbps
    return Choice(settings=settings, rings=rings, rate_gbps=rate, result=result, searched=settings)


class Stock(Choice, frozen=True, kw_only=True):
    """NCCL's own choice with its rings, and their measurement."""

    nccl: DefaultChoice
    measurement: Measurement


def stock(nccl: DefaultChoice, settings: Settings, rings: RingSet, answer: Measurement) -> Stock:
    """Return NCCL's own choice with the rate of its rings in a measurement."""
    rate = rings.rate(answer)
    return Stock(nccl=nccl, settings=settings, rings=rings, rate_gbps=rate, measurement=answer)


def condensed_rings(rings: Sequence[Ring]) -> tuple[Ring, ...]:
    """Return the shortest list of rings with the same shares; rings are equal by GPUs and NICs."""
    routes = {route(path): path for path in rings}
    return tuple(routes[path] for path in condensed([route(path) for path in rings]))


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


def rings_under(task: Task, settings: Settings, rings: Rings) -> RingSet:
    """Return the ring set over the same GPUs and NICs by the mechanisms of these settings.

    Raises SearchError: a pair of neighbours has no hop.
    """
    space = task.space(settings, len(rings))
    return ring_set([ring_like(space, order) for order in rings])


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
    try:
        problem = msgspec.structs.replace(
            task.problem(settings, counts),
            known=tuple(tuple(candidate) for candidate in known),
            floor_gbps=floor,
            budget=msgspec.structs.replace(task.budget, sets=sets),
            check_bound=check_bound,
        )
        return find_rings(problem, strategy=task.strategy, reporter=task.reporter)
    except (SearchError, MeasurementError):
        return None


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


class JoinedRings(msgspec.Struct, frozen=True, kw_only=True):
    """Rings over all hosts: the order of hosts, and the chains of each, in the order of rings.

    `rate_gbps` is the bandwidth of all rings together, and `error` half its 95 % interval,
    relative. If `bound_assumptions` hold, no set of as many rings under these settings exceeds
    `bound_gbps`, in any order of hosts and over any NICs, if NICs carry equal numbers of rings or
    one more; None is not known.
    """

    settings: Settings
    rings: int
    hosts: tuple[str, ...]
    chains: tuple[tuple[PlanChain, ...], ...]
    rate_gbps: float
    error: float
    assumed: bool
    bound_gbps: float | None
    bound_assumptions: tuple[str, ...]


PathTypes = Callable[[int, Sequence[PlanChain]], tuple[str, str]]
"""The farthest paths of chains on a host of a class, inside it and to its NICs, by name."""


def assembled(
    cluster: Cluster,
    class_gpus: Sequence[tuple[int, ...]],
    joined: JoinedRings,
    rated: tuple[PlanChoice, PlanChoice],
    request: PlanRequest,
    *,
    types: PathTypes,
    notices: Iterable[str],
    simulated: bool,
    dry_run: bool,
    cancelled: bool,
) -> Plan:
    """Return the plan of rings over one host or several; the counts of sets are left 0.

    `rated` are default NCCL and NCCL by variables alone.
    """
    numbers: dict[tuple[int, tuple[PlanChain, ...]], int] = {}
    hosts: list[PlannedHost] = []
    rank = 0
    for name, chains in zip(joined.hosts, joined.chains, strict=True):
        node_class = cluster.host_classes[name]
        path = numbers.setdefault((node_class, chains), len(numbers))
        hosts.append(PlannedHost(name=name, path=path, first_rank=rank))
        rank += len(class_gpus[node_class])
    paths = []
    for number, chains in numbers:
        intra, inter = types(number, chains)
        paths.append(HostPath(node_class=number, chains=chains, type_intra=intra, type_inter=inter))
    default, variables = rated
    version = joined.settings.version
    other_count = other_count_notices(request.ring_counts or (), joined.rings)
    return Plan(
        cluster=cluster,
        class_gpus=tuple(class_gpus),
        hosts=tuple(hosts),
        paths=tuple(paths),
        settings=joined.settings,
        settings_verified=version_facts(version).verified,
        rate_gbps=joined.rate_gbps,
        error=joined.error,
        bound_gbps=joined.bound_gbps,
        proven=is_at_bound(joined.rate_gbps, joined.bound_gbps) and not joined.bound_assumptions,
        bound_assumptions=joined.bound_assumptions,
        simulated=simulated,
        assumed=joined.assumed,
        dry_run=dry_run,
        strategy=strategy_name(request.strategy),
        sets_measured=0,
        sets_remembered=0,
        sets_by_symmetry=0,
        stock=default,
        variables=variables,
        notices=(*notices, *version_notices(version), *other_count),
        pinned_env=dict(request.pinned_env),
        cancelled=cancelled,
    )


def other_count_notices(counts: Sequence[int], count: int) -> tuple[str, ...]:
    """Return a notice where a plan has none of the requested numbers of rings."""
    if not counts or count in counts:
        return ()
    listed = ", ".join(map(str, counts))
    return (
        f"sets of {listed} rings were asked for; the plan has NCCL's own {count}, as none of those "
        "is faster, or none divides the numbers of channels that are tried",
    )
