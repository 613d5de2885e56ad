"""One host: rings that close inside it, their limit, and rings for subsets of its GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf

import msgspec

from tccl_py.errors import BudgetSpentError, MeasurementError
from tccl_py.model.cluster import Cluster
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import BandwidthSource, Measurement, dealt
from tccl_py.model.rings import RingSet
from tccl_py.model.symmetry import Symmetry, automorphisms, images_of_gpus
from tccl_py.model.transfer import Fifo, Flow, Place, Transfer, TransferSet, index_of, transfer_set
from tccl_py.nccl.plugin.index import plugin_environment
from tccl_py.nccl.settings import Settings, pinned_level
from tccl_py.nccl.versions import ASSUMED
from tccl_py.plan.chains import (
    AS_GOOD,
    CUT_SHORT,
    Alternative,
    Order,
    PlanChain,
    SubsetRings,
    plan_chain,
    sender_nodes,
)
from tccl_py.plan.plan import Plan
from tccl_py.planning.choices import (
    Rated,
    SettingsSearch,
    as_graph,
    interval,
    own_gbps,
    rated_choices,
)
from tccl_py.planning.request import MOST_SETS, PlanRequest
from tccl_py.planning.study import (
    Choice,
    JoinedRings,
    OwnRings,
    Stock,
    Task,
    assembled,
    measured_well,
    search_under,
)
from tccl_py.search.problem import Budget, Reporter
from tccl_py.sources.bench import bench_for

RING_COUNTS = (1, 2, 4)
FEW_RING_COUNTS = (1, 2)
"""On machines of more than 8 GPUs sets of four rings are too many to say much about."""
ALL_SUBSETS_UP_TO = 8
"""Machines with more GPUs have too many subsets: only usual ones are planned."""
SUBSET_BUDGET = Budget(sets=60, idle_sets=15)
SUBSET_RING_COUNTS = (1, 2)


def plan_machine(
    request: PlanRequest,
    cluster: Cluster,
    gpus: tuple[int, ...],
    source: BandwidthSource,
    *,
    own_rings: OwnRings | None = None,
    reporter: Reporter | None = None,
) -> Plan:
    """Return the plan of a single host; see `planner.plan_hosts`."""
    (host,), budget = cluster.classes, request.budget
    usual = RING_COUNTS if len(gpus) <= ALL_SUBSETS_UP_TO else FEW_RING_COUNTS
    task = Task(
        machine=host.machine,
        knowledge=host.knowledge,
        source=bench_for(source, host.machine.name),
        gpus=gpus,
        version=request.version or ASSUMED,
        ring_counts=request.ring_counts or usual,
        strategy=request.strategy,
        budget=budget,
        reporter=reporter,
        p2p_level=pinned_level(request.pinned_env),
        own_rings=own_rings,
        placement=True,
    )
    with task.source.limited(budget.sets, budget.seconds) as allowance:
        allowance.allow(1 / 2)
        rated = rated_choices(task)
        known = [] if rated.by_default is rated.by_variables else [rated.by_default.rings.rings]
        search = SettingsSearch(task, as_graph(rated.by_variables), known)
        search.cancelled = rated.cancelled
        if not rated.cancelled:
            search.run(sets=max(1, (budget.sets or MOST_SETS) // 2), allow=allowance.allow)
        allowance.allow(1)
        plan = _completed(task, rated, search, request, cluster)
    short = (CUT_SHORT,) * task.source.cut_short
    return msgspec.structs.replace(plan, notices=(*plan.notices, *short))


def _completed(
    task: Task, rated: Rated, search: SettingsSearch, request: PlanRequest, cluster: Cluster
) -> Plan:
    """Return the plan of the best choice, with its limit and rings for subsets."""
    source = task.source
    best, measurement = _final(task, rated.by_variables, search.best)
    results = [one.result for one in (*search.searched, best) if one.result is not None]
    rates = dealt(measurement.transfers.flows, measurement.gbps)
    joined = JoinedRings(
        settings=best.settings,
        rings=len(best.rings.rings),
        hosts=cluster.names,
        chains=(
            tuple(
                plan_chain(ring.hops, [rates[hop.flow].pop() for hop in ring.hops])
                for ring in best.rings.rings
            ),
        ),
        rate_gbps=best.rate_gbps,
        error=interval(measurement),
        assumed=measurement.assumed,
        bound_gbps=best.bound_gbps,
        bound_assumptions=best.bound_assumptions,
    )

    def types(_: int, chains: Sequence[PlanChain]) -> tuple[str, str]:
        pairs = (hop.ends for chain in chains for hop in chain.hops)
        return task.view(best.settings).farthest(pairs), ""

    plan = assembled(
        cluster,
        (task.gpus,),
        joined,
        (rated.default, rated.variables),
        request,
        types=types,
        notices=dict.fromkeys(note for result in results for note in result.notices),
        simulated=source.simulated,
        dry_run=source.dry_run,
        cancelled=search.cancelled,
    )
    rings = {
        "default": rated.by_default.rings,
        "variables": rated.by_variables.rings,
        "graph": best.rings,
    }
    changes: dict[str, object] = {
        "alternatives": tuple(
            Alternative(
                settings=one.settings, rings_in_set=len(one.rings.rings), rate_gbps=one.rate_gbps
            )
            for one in sorted(search.searched, key=lambda choice: -choice.rate_gbps)
        ),
        "sets_by_symmetry": sum(result.sets_by_symmetry for result in results),
    }
    if not plan.cancelled:
        try:
            # Two sets, which those for subsets of GPUs must not use up.
            limit = limit_gbps(source, rings[plan.recommended], assumed=plan.assumed)
            changes["limit_gbps"] = limit
            if request.subsets is not False:
                everywhere = request.subsets is True
                changes["subsets"] = smaller_sets(task, plan, best, everywhere=everywhere)
        except KeyboardInterrupt:
            changes["cancelled"] = True
    counts = {"sets_measured": source.sets_measured, "sets_remembered": source.sets_remembered}
    return msgspec.structs.replace(plan, **changes, **counts)


def _final(task: Task, own: Stock, best: Choice) -> tuple[Choice, Measurement]:
    """Return the planned choice, measured well; NCCL's own where noise favoured another."""
    with suppress(BudgetSpentError):
        measurement = measured_well(task.source, best.rings)
        rate = best.rings.rate(measurement)
        if rate >= own.rate_gbps:
            return msgspec.structs.replace(best, rate_gbps=rate), measurement
    return as_graph(own), own.measurement


def smaller_sets(
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
