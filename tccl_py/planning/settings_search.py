"""The search over settings: NCCL's own rings under variables first, then rings of graph files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from math import inf
from typing import Any

import msgspec
from msgspec.structs import replace

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.files import pick
from tccl_py.model.cluster import Cluster
from tccl_py.model.measurement import Measurement, deal_out
from tccl_py.model.rings import Ring, RingSet, nics_of
from tccl_py.nccl.graph_search import DefaultRings
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.transport import candidates, chunk_bytes, values_of
from tccl_py.nccl.versions import say_unchecked, version_facts
from tccl_py.nccl.view import NcclView
from tccl_py.plan.chains import (
    AS_GOOD,
    Choice,
    ChoiceName,
    HostPath,
    Order,
    PlanChain,
    PlannedHost,
    condense,
    is_at_bound,
    plan_chain,
    prefer,
    why_unsound,
)
from tccl_py.plan.machine_files import path_types
from tccl_py.plan.plan import Plan
from tccl_py.planning.request import PlanRequest, Rings, Task, of_transports
from tccl_py.search.problem import SearchResult
from tccl_py.search.strategies import strategy_name
from tccl_py.sources.bench import Bench

BASE_CHANNELS = 8
"""Channels under which mechanisms are compared first; the number is settled afterwards."""
CHANNELS: Sequence[int] = values_of("channels", "rings")
SLOW_NETWORK_MBPS, SLOW_NETWORK_CHANNELS = 50_000, 2
"""Below this speed of all NICs together no more channels are tried."""
BUFFSIZES: Sequence[int] = values_of("buffsize", "rings")
MIN_SETS = 40
"""Sets that the search under any one choice may measure at least, of a budget of as many."""
WORTH = AS_GOOD
"""Settings farther from NCCL's defaults must promise this much more (relative)."""
WORTH_ALL = 0.05
"""The same where jobs that are not known shall have them: more channels slow send/recv too."""
_NO_BOUND: Mapping[str, Any] = {"bound_gbps": None, "bound_assumptions": ()}


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
    source: Bench, settings: Settings, rings: RingSet, *, well: bool = False, **more: Any
) -> Candidate:
    """Return rings measured under settings, `well` as by `measured_well`, with `more` fields."""
    measurement = measured_well(source, rings) if well else source.measure([rings.flows])[0]
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
    return replace(first, samples_gbps=samples, settled=settled, outliers=tuple(outliers))


class SettingsSearch(msgspec.Struct):
    """What a search over settings has found, also if it was interrupted."""

    own: dict[ChoiceName, Candidate]
    """The choices without a graph file, but default NCCL where it has no rate."""
    best: Candidate
    """The best choice with a graph file."""
    note: str
    """Why default NCCL has no rate, or what is special about it."""
    cancelled: bool
    """Whether an interruption ended the search."""
    searched: list[Candidate] = []
    """All settings searched, in turn."""
    results: list[SearchResult] = []

    def add(self, settings: Settings, result: SearchResult) -> Candidate:
        """Take the result of a search under settings; return the rings."""
        self.results.append(result)
        self.cancelled = result.cancelled
        return candidate_of(settings, result)


def settings_search(
    task: Task,
    rings_of: RingsOf | None = None,
    *,
    allow: Callable[[float], object] = lambda _: None,
) -> SettingsSearch:
    """Find the best settings with their rings: NCCL's own, and those of graph files.

    1. Rate default NCCL, and NCCL's own rings under variables, as `rings_of` yields them.
    2. Compare mechanisms under a fixed number of channels, and search the most promising one next,
       by the best rings known so far. Each search may spend half of the sets left, and gives up as
       soon as it cannot beat the best. Its rings are tried under all other mechanisms, and settle
       its channels and FIFO size.
    3. Search under exactly the best settings, for a bound that holds for them.

    Args:
        task: its budget limits the sets of steps 2 and 3.
        rings_of: as of `rate_own`, which is step 1.
        allow: sets a share of the plan's budget, of which a part is left to each step.

    An interruption ends it with the best so far, if anything is rated; else KeyboardInterrupt goes
    on. Raises errors as `rate_own`.
    """
    search, sets = rate_own(task, rings_of), task.budget.sets or 1
    if not search.cancelled:
        try:
            allow(5 / 8)
            remaining = _explore(task, search, sets)
            if not search.cancelled:
                allow(7 / 8)
                _settle(task, search, max(remaining, sets // 2))
        except KeyboardInterrupt:
            search.cancelled = True
    return search


def _explore(task: Task, search: SettingsSearch, remaining: int) -> int:
    """Search under one mechanism after the other; return the number of sets left."""
    own, least = search.own["variables"], min(MIN_SETS, remaining)
    default = search.own.get("default", own)
    # Each ring set is tried under every choice of settings.
    known: list[Rings] = [own.rings.rings, *[default.rings.rings] * (default is not own)]
    known += task.seeds(own.settings)
    waiting = [*mechanisms(task), *placements(task)]
    while waiting and remaining > 0 and not search.cancelled and task.source.has_time():
        settings = max(waiting, key=lambda settings: _promise(task, settings, known))
        waiting.remove(settings)
        share, floor = max(least, remaining // 2), search.best.rate_gbps
        result = task.search(settings, known=known, floor=floor, sets=share)
        if result is None:
            continue
        remaining -= result.sets
        found = search.add(settings, result)
        tuned = found if search.cancelled else _tune(task, found)
        search.searched.append(tuned)
        known.append(tuned.rings.rings)
        if tuned.rate_gbps > search.best.rate_gbps * (1 + WORTH):
            search.best = tuned
    return remaining


def _settle(task: Task, search: SettingsSearch, sets: int) -> None:
    best = search.best
    result = task.search(best.settings, known=[best.rings.rings], sets=sets, check_bound=True)
    if result is None:
        return
    found = search.add(best.settings, result)
    # NCCL's own rings may be another number than any that was searched.
    if found.rate_gbps <= best.rate_gbps * (1 + WORTH):
        counted = best.ring_count in task.ring_counts
        bound = pick(found, "bound_gbps", "bound_assumptions") if counted else _NO_BOUND
        found = replace(best, **bound)
    search.best = found


def mechanisms(task: Task) -> tuple[Settings, ...]:
    """Settings that give pairs different mechanisms, the nearest to NCCL's defaults first."""
    kinds = candidates(
        task.host.machine,
        task.host.knowledge,
        task.default_settings.version,
        gpus=task.gpus,
        channels=max(count for count in _channel_counts(task) if count <= BASE_CHANNELS),
        p2p_level=task.default_settings.p2p_level,
    )
    # NCCL's copies by copy engine go through its proxy threads, slot by slot. Neither a model nor
    # plain copies on hardware predict that: only running NCCL itself could choose them.
    return tuple(
        replace(kind, ib_hca=task.request.default_settings.ib_hca)
        for kind in kinds
        if not kind.p2p_copy_engine and kind.shm_copy_engine is None
    )


def placements(task: Task) -> tuple[Settings, ...]:
    """Return settings under which the NCCL plugin places bounce buffers, if nodes differ."""
    nodes = {node.numa_id for node in task.host.machine.numa_nodes}
    # The plugin does so in no job over several hosts.
    if task.nics or len(nodes) < 2 or -1 in nodes:
        return ()
    bouncing = (
        replace(kind, shm_locality="sender", shm_placement=True)
        for kind in mechanisms(task)
        if any(hop.flow.is_bounce for hop in task.space(kind, 1))
    )
    return tuple(dict.fromkeys(bouncing))


def _promise(task: Task, settings: Settings, candidates: Sequence[Rings]) -> tuple[float, int]:
    """Return the best rough score of the known rings under these settings, and the bounces."""
    best = 0.0
    bounces = sum(hop.flow.is_bounce for hop in task.space(settings, 1))
    for rings in candidates:
        try:
            under = task.rings_under(settings, rings)
            (measurement,) = task.source.measure([under.flows])
        except (SearchError, MeasurementError):
            continue
        best = max(best, under.rate(measurement))
    return float(f"{best:.2g}"), -bounces


def _channel_counts(task: Task) -> tuple[int, ...]:
    """Return the numbers of channels worth trying: on a slow network many FIFOs only wait."""
    most = version_facts(task.default_settings.version).max_channels
    if task.nics:
        speeds = [nic.speed_mbps for nic in task.host.machine.nics if nic.index in task.nics]
        if sum(speeds) < SLOW_NETWORK_MBPS:
            most = min(most, SLOW_NETWORK_CHANNELS)
    return tuple(count for count in CHANNELS if min(task.least_channels, most) <= count <= most)


def _tune(task: Task, choice: Candidate) -> Candidate:
    """Return the same rings with the best channels and FIFO size, fewest and largest first."""
    distinct = condensed_rings(choice.rings.rings)
    best = choice
    for channels in (count for count in _channel_counts(task) if count % len(distinct) == 0):
        for size in BUFFSIZES if choice.bounces else BUFFSIZES[:1]:
            settings = replace(choice.settings, channels=channels, buffsize=size)
            rings = task.rings_under(settings, distinct)
            try:
                (measurement,) = task.source.measure([rings.flows])
            except MeasurementError:
                # Many channels of large FIFOs may be more than hardware has room for.
                continue
            bound = pick(choice, *_NO_BOUND) if settings == choice.settings else _NO_BOUND
            rate = rings.rate(measurement)
            tried = Candidate(settings=settings, rings=rings, rate_gbps=rate, **bound)
            costs = [
                (option.ring_count, option.settings.channels, -option.settings.buffsize)
                for option in (tried, best)
            ]
            if prefer(tried.rate_gbps, best.rate_gbps, less=costs[0] < costs[1]):
                best = tried
    return best


# NCCL without a graph file: by default, and with the best environment variables.


MOST_CHANNELS = max(values_of("min_channels", "rings"))
"""Final channels that variables ask for at most."""
COMPARED_CHANNELS = 16
"""Final channels with which mechanisms are compared, if NCCL picks no more by itself."""
FINALISTS = 2
"""Mechanisms for which numbers of channels and FIFO sizes are tried."""


RingsOf = Callable[[Task, Candidate | None], Iterable[Candidate]]
"""Yields NCCL's own rings under environment variables, where default NCCL is rated so."""


def rate_own(task: Task, rings_of: RingsOf | None = None) -> SettingsSearch:
    """Rate default NCCL, and the best of NCCL under environment variables alone.

    "large-buffers" are the best variables that leave the chunks of send/recv as they are, where
    "variables" do not and these gain.

    Args:
        task: the input of planning.
        rings_of: yields what is compared with default NCCL; None is `by_mechanisms`.

    KeyboardInterrupt ends it with the best so far, if anything is rated. Raises SearchError: no
    setting gives every hop a mechanism that can be rated. MeasurementError: the source cannot
    measure a needed set.
    """
    settings = task.default_settings
    if task.own_rings is not None:
        # An installed NCCL is asked now: later the source may have the GPUs to itself.
        asked = (kind for kind in (settings, *mechanisms(task)) if not task.find_unsound(kind))
        task.own_rings([of_transports(kind) for kind in asked])
    default, note = _default(task, settings)
    tried = [] if default is None else [default]
    cancelled = False
    try:
        for choice in (rings_of or by_mechanisms)(task, default):
            tried.append(choice)
    except KeyboardInterrupt:
        if not tried:
            raise
        cancelled = True
    if not tried:
        facts = task.find_unsound(settings)
        why = f": {why_unsound(facts)}" if facts else ""
        raise SearchError(f"no settings of NCCL give every GPU a hop that can be measured{why}")
    best = _smallest(tried)
    # Between hosts NCCL has buffers of other sizes as well.
    large = None if task.nics else _large_buffers(task, best, default, tried)
    if best is not default and not cancelled:
        best = _rate_well(task, best)
        large = None if large is None else _rate_well(task, large)
    rated: dict[ChoiceName, Candidate | None]
    rated = {"default": default, "large-buffers": large, "variables": best}
    own = {name: choice for name, choice in rated.items() if choice is not None}
    return SettingsSearch(own=own, best=as_graph(best), note=note, cancelled=cancelled)


def _large_buffers(
    task: Task, best: Candidate, default: Candidate | None, tried: Sequence[Candidate]
) -> Candidate | None:
    """Return the best variables that keep default NCCL's chunks, if `best` does not; or None.

    Where links keep default NCCL from a rate, they are the fewest variables.
    """
    if default is None:
        few = _fewest(tried) if task.find_unsound(task.default_settings) else best
        return None if few.settings == best.settings else few
    chunk = chunk_bytes(task.view(default.settings))

    def keeps_chunks(choice: Candidate) -> bool:
        return chunk_bytes(task.view(choice.settings)) >= chunk

    if keeps_chunks(best):
        return None
    large = _smallest([choice for choice in tried if keeps_chunks(choice)], WORTH_ALL)
    return None if large is default else large


def _smallest(tried: Sequence[Candidate], worth: float = WORTH) -> Candidate:
    """Return of the choices within `worth` of the best the one with fewest variables, channels."""
    most = max(choice.rate_gbps for choice in tried)
    return min((choice for choice in tried if choice.rate_gbps * (1 + worth) >= most), key=_cost)


def _fewest(tried: Sequence[Candidate]) -> Candidate:
    """Return of the choices with the fewest variables the fastest."""
    return min(tried, key=lambda choice: (_cost(choice)[0], -choice.rate_gbps))


def _cost(choice: Candidate) -> tuple[int, int]:
    own = 0 if choice.nccl is None else choice.nccl.channels
    return len(environment(choice.settings)), max(own, choice.settings.min_channels or 0)


def _rate_well(task: Task, choice: Candidate) -> Candidate:
    how = pick(choice, "settings", "rings", "nccl")
    return rate_rings(task.source, **how, well=True)


def _default(task: Task, settings: Settings) -> tuple[Candidate | None, str]:
    """Rate NCCL as it runs without this project, with a note on anything special."""
    if facts := task.find_unsound(settings):
        return None, why_unsound(facts)
    by_network, nccl = task.view(settings).by_network, task.default_rings(settings)
    unknown = "NCCL joins {} and {} over their NICs, at a rate that is not known"
    if by_network and not task.nics:
        return None, unknown.format(*min(by_network))
    try:
        note = SIMPLE_ORDER if nccl.fallback else ""
        return rate_default(task, settings, nccl, well=True), note
    except SearchError:
        relayed = "NCCL joins GPUs through the memory of another one, at a rate that is not known"
        return None, unknown.format(*min(by_network)) if by_network else relayed


def by_mechanisms(task: Task, _: Candidate | None) -> Iterator[Candidate]:
    """Yield NCCL's own rings by all mechanisms, with numbers of channels and FIFO sizes."""
    # 1. Compare mechanisms, each with NCCL's own number of channels and with many.
    compared: list[tuple[float, Candidate, DefaultRings]] = []
    for settings in mechanisms(task):
        nccl, rated = task.default_rings(settings), list[Candidate]()
        counts = [count for count in _counts(nccl) if count <= COMPARED_CHANNELS]
        for choice in _with_channels(task, settings, nccl, counts[:1] + counts[1:][-1:]):
            rated.append(choice)
            yield choice
        if rated:
            compared.append((max(choice.rate_gbps for choice in rated), rated[0], nccl))
    # 2. Try all numbers of channels and FIFO sizes with the best mechanisms.
    compared.sort(key=lambda row: -row[0])
    for _rate, first, nccl in compared[:FINALISTS]:
        for size in BUFFSIZES if first.bounces else BUFFSIZES[:1]:
            sized = replace(first.settings, buffsize=size)
            yield from _with_channels(task, sized, nccl, _counts(nccl))


def _counts(nccl: DefaultRings) -> list[int]:
    """Return NCCL's own number of final channels, and doubles of it up to `MOST_CHANNELS`."""
    counts = [nccl.channels]
    while counts[-1] * 2 <= MOST_CHANNELS:
        counts.append(counts[-1] * 2)
    return counts


def _with_channels(
    task: Task, settings: Settings, nccl: DefaultRings, counts: Sequence[int]
) -> Iterator[Candidate]:
    """Yield NCCL's own rings with these numbers of final channels, as far as that is possible."""
    for count in counts:
        with suppress(SearchError, MeasurementError):
            yield rate_default(task, settings, nccl, channels=count)


def rate_default(
    task: Task,
    settings: Settings,
    nccl: DefaultRings,
    *,
    channels: int | None = None,
    well: bool = False,
) -> Candidate:
    """Rate NCCL's own rings, `nccl` under the settings.

    `channels` are final channels, by NCCL_MIN_NCHANNELS; None is NCCL's own number. With `well` a
    measurement whose samples spread is repeated.
    """
    more = channels is not None and channels > nccl.channels
    # A graph file's channels are doubled, and so are those of NCCL's search.
    settings = replace(
        settings, channels=max(1, nccl.channels // 2), min_channels=channels if more else None
    )
    rings = task.own_ring_set(nccl, settings)
    return rate_rings(task.source, settings, rings, well=well, nccl=nccl)


def own_gbps(task: Task, settings: Settings) -> float:
    """Return the bandwidth of NCCL's own rings under settings.

    It is 0.0 where pairs talk over NICs and are not rated, and infinite where it is not known: no
    further set may be measured, the measurement fails, or they pass the memory of another GPU.
    """
    if not task.source.has_time():
        return inf
    try:
        return rate_default(task, settings, task.default_rings(settings)).rate_gbps
    except SearchError:
        return 0.0 if task.view(settings).by_network else inf
    except MeasurementError:
        return inf


def sound_gpus(task: Task) -> tuple[int, ...]:
    """Return the GPUs between which default NCCL uses sound links alone.

    One after the other that has the most links which are not is left out.
    """
    gpus = task.gpus
    while facts := task.over(gpus).find_unsound(task.default_settings):
        counts = Counter(gpu for fact in facts for gpu in (fact.one, fact.other))
        worst = max(counts, key=lambda gpu: (counts[gpu], gpu))
        gpus = tuple(gpu for gpu in gpus if gpu != worst)
    return gpus


def as_graph(choice: Candidate) -> Candidate:
    """Return NCCL's own rings for a graph file with as many final channels."""
    settings = choice.settings
    if settings.min_channels is None:
        return choice
    channels = settings.min_channels // 2
    settings = replace(settings, channels=channels, min_channels=None)
    return replace(choice, settings=settings)


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
        notices=(*notices, *filter(None, [say_unchecked(version)]), *other_count),
        pinned_env=dict(request.pinned_env),
        **{"sets_by_symmetry": 0, **more},
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
