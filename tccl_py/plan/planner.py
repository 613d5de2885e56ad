"""From a machine and a bandwidth source to a plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf

import msgspec

from tccl_py.errors import (
    BudgetSpentError,
    InputError,
    MeasurementError,
    check_type,
    counted,
    require,
)
from tccl_py.model.cluster import single_host
from tccl_py.model.machine import Knowledge, Machine, parse_gpus
from tccl_py.model.measurement import BandwidthSource, Measurement, dealt
from tccl_py.model.rings import RingSet
from tccl_py.model.symmetry import Symmetry, automorphisms, images_of_gpus
from tccl_py.model.transfer import Fifo, Flow, Place, Transfer, TransferSet, index_of, transfer_set
from tccl_py.nccl.graph_search import DefaultChoice
from tccl_py.nccl.plugin.index import plugin_environment
from tccl_py.nccl.settings import (
    Settings,
    check_settings,
    pinned_level,
    pinned_values,
)
from tccl_py.nccl.versions import ASSUMED, version_facts
from tccl_py.plan.choices import (
    OwnChoices,
    SettingsSearch,
    as_graph,
    interval,
    own_choices,
    own_gbps,
)
from tccl_py.plan.parts import (
    AS_GOOD,
    CUT_SHORT,
    Alternative,
    HostPath,
    Order,
    PlannedHost,
    SubsetRings,
    is_at_bound,
    plan_chain,
    sender_nodes,
    version_notices,
)
from tccl_py.plan.plan import Plan
from tccl_py.plan.tasks import Choice, Stock, Task, measured_well, search_under
from tccl_py.search.problem import Budget, Reporter
from tccl_py.search.strategies import STRATEGIES
from tccl_py.sources.bench import bench_for

ALL_SUBSETS_UP_TO = 8
"""Machines with more GPUs have too many subsets: only usual ones are planned."""
SUBSET_BUDGET = Budget(sets=60, idle_sets=15)
SUBSET_RING_COUNTS = (1, 2)
MOST_SETS = 2000
DEFAULT_BUDGET = Budget(sets=MOST_SETS, idle_sets=100)
RING_COUNTS = (1, 2, 4)
FEW_RING_COUNTS = (1, 2)
"""On machines of more than 8 GPUs sets of four rings are too many to say much about."""


def make_plan(
    machine: Machine,
    knowledge: Knowledge,
    source: BandwidthSource,
    *,
    gpus: Sequence[int] | str | None = None,
    version: str = ASSUMED,
    ring_counts: Sequence[int] | None = None,
    strategy: str = "best-first",
    budget: Budget = DEFAULT_BUDGET,
    reporter: Reporter | None = None,
    pinned_env: Mapping[str, str] | None = None,
    own_rings: Callable[[Sequence[Settings]], Sequence[DefaultChoice]] | None = None,
    subsets: bool | None = None,
) -> Plan:
    """Find the settings and rings that suit the machine best, as far as `source` tells.

    >>> from tccl_py.simulator.descriptions import load_bundled
    >>> from tccl_py.simulator.source import Simulator
    >>> model = load_bundled("h200x4-vm")
    >>> plan = make_plan(model.machine, model.knowledge, Simulator(model))
    >>> plan.rings[0].gpus, plan.proven, plan.simulated
    ((0, 1, 2, 3), True, True)
    >>> plan.rings[0].bottleneck.flow
    Flow('G0->G0->G1{blocks=24}')

    Args:
        machine: the node.
        knowledge: what is known of it beyond structure.
        source: answers transfer sets.
        gpus: NVML indices of the GPUs to join, or text as `0-3`; None is all.
        version: NCCL's version.
        ring_counts: how many rings a set may have; None is 1, 2 and, up to 8 GPUs, 4.
        strategy: a name in `tccl_py.search.strategies.STRATEGIES`.
        budget: for the whole plan. Half of the sets is for the search under settings; default NCCL
            and variables take half at most. A quarter is left for the bound, an eighth for the rest
            and smaller sets of GPUs.
        reporter: watches; KeyboardInterrupt ends the search with the best so far.
        pinned_env: NCCL_P2P_DISABLE or NCCL_P2P_LEVEL with the value that all jobs have, with the
            plan or without; no settings go beyond it, default NCCL's included.
        own_rings: returns NCCL's own rings under each of several settings; None computes them by
            its rules.
        subsets: whether smaller sets of GPUs get rings too; None is only where the plan recommends
            graph files.

    Raises InputError: unknown GPUs, version or strategy, fewer than two GPUs, or pinned variables
    that say nothing of P2P. SearchError: no ring exists. MeasurementError: the source cannot
    measure what is needed.
    """
    check_type(machine, "machine", Machine)
    check_type(knowledge, "knowledge", Knowledge)
    chosen = chosen_gpus(machine, gpus)
    pinned = pinned_values(pinned_env or {}, where="pinned environment")
    usual = RING_COUNTS if len(chosen) <= ALL_SUBSETS_UP_TO else FEW_RING_COUNTS
    task = Task(
        machine=machine,
        knowledge=knowledge,
        source=bench_for(source, machine.name),
        gpus=chosen,
        version=version,
        ring_counts=tuple(ring_counts or usual),
        strategy=check_strategy(strategy),
        budget=budget,
        reporter=reporter,
        p2p_level=pinned_level(pinned),
        own_rings=own_rings,
        placement=True,
    )
    check_settings(task.default_settings)
    with task.source.limited(budget.sets, budget.seconds) as allowance:
        allowance.allow(1 / 2)
        own = own_choices(task)
        known = [one.rings.rings for one in own.rated[1:]]
        search = SettingsSearch(task, as_graph(own.rated[0]), known)
        search.cancelled = own.cancelled
        if not own.cancelled:
            search.run(sets=max(1, (budget.sets or MOST_SETS) // 2), allow=allowance.allow)
        allowance.allow(1)
        plan = _assembled(task, own, search, subsets=subsets)
    odd = other_count_notices(ring_counts or (), len(plan.rings))
    short = (CUT_SHORT,) * task.source.cut_short
    return msgspec.structs.replace(plan, notices=(*plan.notices, *odd, *short), pinned_env=pinned)


def chosen_gpus(machine: Machine, gpus: Sequence[int] | str | None) -> tuple[int, ...]:
    """Return GPUs to plan for in ascending order, given by indices or text; None is all.

    Raises InputError: unknown GPUs, or fewer than two.
    """
    where = f"machine {machine.name}" if gpus is None else "`gpus`"
    gpus = parse_gpus(gpus, where) if isinstance(gpus, str) else gpus
    indices = machine.gpu_indices if gpus is None else tuple(gpus)
    chosen = tuple(sorted({machine.gpu(index).index for index in indices}))
    few = f"has {counted(len(chosen), 'GPU')} to plan for"
    require(len(chosen) > 1, where, few, "a ring joins 2 or more")
    return chosen


def check_strategy(strategy: str) -> str:
    """Return the name of a known strategy.

    Raises InputError: an unknown name.
    """
    if strategy not in STRATEGIES:
        right = f"there are {', '.join(STRATEGIES)}"
        raise InputError(f"strategy {strategy[:40]!r}", "is not known", right)
    return strategy


def _assembled(
    task: Task, own: OwnChoices, search: SettingsSearch, *, subsets: bool | None
) -> Plan:
    source = task.source
    best, measurement = _final(task, own.rated[0], search.best)
    results = [one.result for one in (*search.searched, best) if one.result is not None]
    notes = (note for result in results for note in result.notices)
    cluster = single_host(task.machine, task.knowledge, task.gpus)
    hops = ((hop.source, hop.target) for ring in best.rings.rings for hop in ring.hops)
    rates = dealt(measurement.transfers.flows, measurement.gbps)
    path = HostPath(
        node_class=0,
        chains=tuple(
            plan_chain(ring.hops, [rates[hop.flow].pop() for hop in ring.hops])
            for ring in best.rings.rings
        ),
        type_intra=task.view(best.settings).farthest(hops),
    )
    plan = Plan(
        cluster=cluster,
        class_gpus=(task.gpus,),
        hosts=(PlannedHost(name=cluster.hosts[0].name, path=0, first_rank=0),),
        paths=(path,),
        settings=best.settings,
        settings_verified=version_facts(task.version).verified,
        rate_gbps=best.rate_gbps,
        bound_gbps=best.bound_gbps,
        proven=is_at_bound(best.rate_gbps, best.bound_gbps) and not best.bound_assumptions,
        bound_assumptions=best.bound_assumptions,
        simulated=source.simulated,
        assumed=measurement.assumed,
        dry_run=source.dry_run,
        strategy=task.strategy,
        sets_measured=source.sets_measured,
        sets_remembered=source.sets_remembered,
        sets_by_symmetry=sum(result.sets_by_symmetry for result in results),
        stock=own.default,
        variables=own.variables,
        error=interval(measurement),
        alternatives=tuple(
            Alternative(
                settings=one.settings, rings_in_set=len(one.rings.rings), rate_gbps=one.rate_gbps
            )
            for one in sorted(search.searched, key=lambda choice: -choice.rate_gbps)
        ),
        notices=(*dict.fromkeys(notes), *version_notices(task.version)),
        cancelled=search.cancelled,
    )
    rings = {"default": own.rated[-1].rings, "variables": own.rated[0].rings, "graph": best.rings}
    if plan.cancelled:
        return plan
    changes: dict[str, object] = {}
    try:
        # Two sets, which those for smaller sets of GPUs must not use up.
        assumed = plan.assumed
        changes["limit_gbps"] = limit_gbps(source, rings[plan.recommended], assumed=assumed)
        if subsets is not False:
            changes["subsets"] = _smaller_sets(task, plan, best, everywhere=subsets is True)
    except KeyboardInterrupt:
        changes["cancelled"] = True
    counts = {"sets_measured": source.sets_measured, "sets_remembered": source.sets_remembered}
    return msgspec.structs.replace(plan, **changes, **counts)


def _smaller_sets(
    task: Task, plan: Plan, best: Choice, *, everywhere: bool
) -> tuple[SubsetRings, ...]:
    """Return what the recommended choice needs to know of smaller sets of GPUs.

    Only graph files need rings of their own, else rings are searched `everywhere` alone. Where the
    plugin gives variables to single communicators, NCCL's own rings are rated.
    """
    variables = plan.variables.settings
    if everywhere or plan.recommended == "graph":
        planned = subset_rings(task, best.settings, best.orders)
        return _rated(task, planned, (best.settings, variables))
    if plan.recommended == "variables" and plugin_environment(variables)[1]:
        return _gaining(task, variables)
    return ()


def other_count_notices(asked: Sequence[int], count: int) -> tuple[str, ...]:
    """Return a notice where a plan has none of the requested numbers of rings."""
    if not asked or count in asked:
        return ()
    wanted = ", ".join(map(str, asked))
    return (
        f"sets of {wanted} rings were asked for; the plan has NCCL's own {count}, as none of those "
        "is faster, or none divides the numbers of channels that are tried",
    )


def _final(task: Task, own: Stock, best: Choice) -> tuple[Choice, Measurement]:
    """Return the planned choice, measured well; NCCL's own where noise favoured another."""
    with suppress(BudgetSpentError):
        measurement = measured_well(task.source, best.rings)
        rate = best.rings.rate(measurement)
        if rate >= own.rate_gbps:
            return msgspec.structs.replace(best, rate_gbps=rate), measurement
    return as_graph(own), own.measurement


# Rings for communicators over some of the GPUs, planned once for each class of equal subsets.
def subset_rings(
    task: Task, settings: Settings, orders: Sequence[Order]
) -> tuple[SubsetRings, ...]:
    """Return rings for every proper subset of two GPUs or more, under the plan's settings.

    Subsets that a symmetry of the machine exchanges share one search. Of more than
    ALL_SUBSETS_UP_TO GPUs only the usual subsets are planned.
    """
    wanted = subsets(task.machine, task.gpus)
    symmetry = automorphisms(task.machine, task.knowledge)
    found: dict[Order, SubsetRings] = {}
    for subset in wanted:
        if subset not in found and (planned := _subset(task, settings, orders, subset)):
            found.update(_images(planned, symmetry))
    # A symmetry of the whole machine may take a subset to GPUs that are not planned for.
    return tuple(found[subset] for subset in wanted if subset in found)


def _rated(
    task: Task, planned: Iterable[SubsetRings], settings: Iterable[Settings]
) -> tuple[SubsetRings, ...]:
    """Return the subsets, with whether NCCL's own rings are slower under any of these settings."""
    plain = dict.fromkeys(msgspec.structs.replace(one, shm_placement=False) for one in settings)

    def gains(subset: SubsetRings) -> bool:
        part = msgspec.structs.replace(task, gpus=subset.gpus, own_rings=None)
        return any(subset.rate_gbps > own_gbps(part, one) * (1 + AS_GOOD) for one in plain)

    return tuple(msgspec.structs.replace(subset, gains=gains(subset)) for subset in planned)


def _gaining(task: Task, variables: Settings) -> tuple[SubsetRings, ...]:
    """Return the subsets, without rings, with whether the variables beat default NCCL."""
    if len(task.gpus) > ALL_SUBSETS_UP_TO:
        return ()
    found = []
    for gpus in subsets(task.machine, task.gpus):
        part = msgspec.structs.replace(task, gpus=gpus, own_rings=None)
        default, rate = (own_gbps(part, one) for one in (task.default_settings, variables))
        # Rates of sets that may not be measured any more are infinite.
        if 0 < rate < inf:
            gains = rate > default * (1 + AS_GOOD)
            found.append(SubsetRings(gpus=gpus, rings=(), rate_gbps=rate, gains=gains))
    return tuple(found)


def subsets(machine: Machine, gpus: Order) -> tuple[Order, ...]:
    """Return the proper subsets of two GPUs or more that a plan has rings for, by size.

    Of more than ALL_SUBSETS_UP_TO GPUs they are halves and quarters in the order of indices, all
    GPUs below one switch, and pairs of these.
    """
    count, combinations = len(gpus), itertools.combinations
    if count <= ALL_SUBSETS_UP_TO:
        return tuple(one for size in range(2, count) for one in combinations(gpus, size))
    parts = [
        gpus[at : at + size] for size in (count // 2, count // 4) for at in range(0, count, size)
    ]
    parents = {gpu.index: gpu.parent for gpu in machine.gpus}
    below = [
        tuple(gpu for gpu in gpus if parents[gpu] == parent)
        for parent in dict.fromkeys(parents[gpu] for gpu in gpus)
    ]
    pairs = [pair for group in below for pair in combinations(group, 2)]
    found = {one for one in (*parts, *below, *pairs) if 2 <= len(one) < count}
    return tuple(sorted(found, key=lambda one: (len(one), one)))


def _subset(
    task: Task, settings: Settings, orders: Sequence[Order], gpus: Order
) -> SubsetRings | None:
    """Return rings over exactly these GPUs; None where the settings leave a GPU without a hop."""
    part = msgspec.structs.replace(
        task, gpus=gpus, ring_counts=SUBSET_RING_COUNTS, budget=SUBSET_BUDGET
    )
    # The whole machine's rings without the GPUs that are missing are a good beginning.
    known = [tuple(tuple(gpu for gpu in order if gpu in gpus) for order in orders)]
    result = search_under(part, settings, known=known, floor=0.0, sets=SUBSET_BUDGET.sets or 1)
    if result is None:
        return None
    if result.cancelled:
        raise KeyboardInterrupt
    rings = tuple(one.gpus for one in result.rings.rings)
    nodes = sender_nodes(task.machine, result.rings.rings) if settings.shm_placement else ()
    return SubsetRings(gpus=gpus, rings=rings, rate_gbps=result.rate_gbps, nodes=nodes)


def _images(planned: SubsetRings, symmetry: Symmetry) -> dict[Order, SubsetRings]:
    """The plan of a subset carried over to all subsets that look the same."""
    found = {planned.gpus: planned}
    for gpus, names in images_of_gpus(symmetry, planned.gpus).items():
        rings = tuple(tuple(index_of(names[f"G{gpu}"]) for gpu in ring) for ring in planned.rings)
        places = zip(planned.gpus, planned.nodes, strict=False)
        nodes = sorted(
            (index_of(names[f"G{g}"]), index_of(names[f"C{node}"])) for g, node in places
        )
        image = {"gpus": gpus, "rings": rings, "nodes": tuple(node for _, node in nodes)}
        found.setdefault(gpus, msgspec.structs.replace(planned, **image))
    return found


# The machine's limit for given rings: bare copies over the same hops, all at the same time.
def limit_gbps(source: BandwidthSource, rings: RingSet, *, assumed: bool) -> float | None:
    """Measure bare copies over the hops of a ring set, by copy engines and by kernels.

    Return the better of the two in GB/s, scored as the rings are; None if neither can be measured.
    With `assumed` assumed values may lie behind the limit, as they do behind the plan.
    """
    rates = []
    for copy_engine in (True, False):
        with suppress(MeasurementError):
            (found,) = source.measure([bare_copies(rings, copy_engine=copy_engine)])
            if assumed or not found.assumed:
                rates.append(rings.rate(found))
    return max(rates, default=None)


def bare_copies(rings: RingSet, *, copy_engine: bool) -> TransferSet:
    """Return a plain transfer for each transfer of the rings' hops.

    A bounce becomes an independent write and read of host memory as large as its FIFOs together:
    in a larger buffer the host's memory would decide, not its caches.
    """
    flows = []
    for flow in rings.flows.flows:
        size = (flow.blocks or 1) * (flow.fifo or Fifo()).bytes if flow.is_bounce else None
        for one in flow.transfers:
            executor = Place("D" if copy_engine else "G", one.executor.index)
            bare = Transfer(one.source, executor, one.destination)
            flows.append(Flow((bare,), buffer=size))
    return transfer_set(flows)
