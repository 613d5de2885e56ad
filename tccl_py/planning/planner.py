"""One planner for one host or several: from a request and sources to a Plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from tccl_py.errors import (
    BudgetSpentError,
    InputError,
    check_type,
    counted,
    require,
)
from tccl_py.model.cluster import Cluster, parse_gpus, single_host
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.measurement import BandwidthSource, Measurement, dealt
from tccl_py.nccl.settings import Settings, check_settings, pinned_level, pinned_values
from tccl_py.nccl.versions import ASSUMED
from tccl_py.plan.chains import CUT_SHORT, Alternative, PlanChain, plan_chain
from tccl_py.plan.plan import Plan
from tccl_py.planning.choices import Rated, SettingsSearch, as_graph, interval, rated_choices
from tccl_py.planning.request import DEFAULT_BUDGET, MOST_SETS, PlanRequest
from tccl_py.planning.study import (
    Choice,
    JoinedRings,
    OwnRings,
    Stock,
    Task,
    assembled,
    limit_gbps,
    measured_well,
)
from tccl_py.search.problem import Budget, Reporter, SearchProblem
from tccl_py.search.strategies import Strategy
from tccl_py.sources.bench import bench_for

if TYPE_CHECKING:
    from tccl_py.plan.tables import ClassRates, KeptTable

RING_COUNTS = (1, 2, 4)
FEW_RING_COUNTS = (1, 2)
"""On machines of more than 8 GPUs sets of four rings are too many to say much about."""


def plan_hosts(
    request: PlanRequest,
    cluster: Cluster,
    sources: Sequence[BandwidthSource | None],
    *,
    gpus: tuple[int, ...] | None = None,
    kept: Sequence[ClassRates] = (),
    own_rings: OwnRings | None = None,
    reporter: Reporter | None = None,
    tables: list[KeptTable] | None = None,
) -> Plan:
    """Plan for the hosts of a cluster, one or several, with a source for each of its classes.

    The chains of a single host close to rings inside it; `gpus` are those to join there, None as
    many of the lowest indices as it has ranks. `own_rings` is for a single host, `kept` and
    `tables` for several; these and `reporter` are as `make_plan` and `make_cluster_plan` take them.

    Raises InputError: unknown version or strategy, or pinned variables that say nothing of P2P; or
    as those.
    """
    pinned = pinned_values(request.pinned_env, where="pinned environment")
    version = request.version or ASSUMED
    check_settings(Settings(version=version, p2p_level=pinned_level(pinned)))
    request = msgspec.structs.replace(request, version=version, pinned_env=pinned)
    if len(cluster.hosts) > 1:
        from tccl_py.planning.cluster_planner import plan_cluster  # noqa: PLC0415 (not for one)

        return plan_cluster(request, cluster, sources, kept=kept, reporter=reporter, tables=tables)
    (host,), (source, *_) = cluster.hosts, sources
    if source is None:
        raise InputError(f"host {host.name}", "has no source", "give one that measures its GPUs")
    lowest = cluster.classes[host.node_class].machine.gpu_indices[: host.slots]
    return plan_machine(
        request, cluster, gpus or lowest, source, own_rings=own_rings, reporter=reporter
    )


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
    usual = RING_COUNTS if len(gpus) <= 8 else FEW_RING_COUNTS
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
        seeds = [] if rated.by_default is rated.by_variables else [rated.by_default.rings.rings]
        search = SettingsSearch(task, as_graph(rated.by_variables), seeds)
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
    results = [choice.result for choice in (*search.searched, best) if choice.result is not None]
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
                settings=tried.settings,
                rings_in_set=len(tried.rings.rings),
                rate_gbps=tried.rate_gbps,
            )
            for tried in sorted(search.searched, key=lambda choice: -choice.rate_gbps)
        ),
        "sets_by_symmetry": sum(result.sets_by_symmetry for result in results),
    }
    if not plan.cancelled:
        try:
            # Two sets, which those for subsets of GPUs must not use up.
            limit = limit_gbps(source, rings[plan.recommended], assumed=plan.assumed)
            changes["limit_gbps"] = limit
            if request.subsets or (request.subsets is None and plan.recommended != "default"):
                from tccl_py.planning.parts import smaller_sets  # noqa: PLC0415 (not for all)

                everywhere = request.subsets is True
                changes["subsets"] = smaller_sets(task, plan, best, everywhere=everywhere)
        except KeyboardInterrupt:
            changes["cancelled"] = True
    counts = {"sets_measured": source.sets_measured, "sets_remembered": source.sets_remembered}
    return msgspec.structs.replace(plan, **changes, **counts)


def _final(task: Task, default: Stock, best: Choice) -> tuple[Choice, Measurement]:
    """Return the planned choice, measured well; NCCL's own where noise favoured another."""
    with suppress(BudgetSpentError):
        measurement = measured_well(task.source, best.rings)
        rate = best.rings.rate(measurement)
        if rate >= default.rate_gbps:
            return msgspec.structs.replace(best, rate_gbps=rate), measurement
    return as_graph(default), default.measurement


def make_plan(
    machine: Machine,
    knowledge: Knowledge,
    source: BandwidthSource,
    *,
    gpus: Sequence[int] | str | None = None,
    version: str = ASSUMED,
    ring_counts: Sequence[int] | None = None,
    strategy: str | Strategy = "best-first",
    budget: Budget = DEFAULT_BUDGET,
    reporter: Reporter | None = None,
    pinned_env: Mapping[str, str] | None = None,
    own_rings: OwnRings | None = None,
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
        strategy: of the search: a name in `STRATEGIES`, or a function as `find_rings` takes it.
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
    indices = chosen_gpus(machine, gpus)
    request = _request(version, ring_counts, strategy, budget, pinned_env, subsets=subsets)
    cluster = single_host(machine, knowledge, indices)
    return plan_hosts(
        request, cluster, [source], gpus=indices, own_rings=own_rings, reporter=reporter
    )


def make_cluster_plan(
    cluster: Cluster,
    sources: Sequence[BandwidthSource | None],
    *,
    kept: Sequence[ClassRates] = (),
    version: str = ASSUMED,
    ring_counts: Sequence[int] | None = None,
    strategy: str | Strategy = "best-first",
    budget: Budget = DEFAULT_BUDGET,
    keep_order: bool = False,
    ib_gid_index: int | None = None,
    reporter: Reporter | None = None,
    pinned_env: Mapping[str, str] | None = None,
    gpus_per_job: str | None = None,
    tables: list[KeptTable] | None = None,
) -> Plan:
    """Find the best settings, chains, NICs and order of hosts for a cluster.

    Args:
        cluster: hosts in rank order, their classes, and the switches between them.
        sources: a source for each class, which answers sets of a host; flows over the network have
            only the host's part: `G3->N0->N0` leaves it, `N0->N0->G0` enters it. None has `kept`.
        kept: tables of classes measured earlier, taken in their searches' place.
        version, strategy, reporter, pinned_env: as `make_plan`.
        ring_counts: possible numbers of rings; None is 1, 2 and 4, and one for each NIC.
        budget: for each class; half of the sets is for the chains over all GPUs, and of these half
            at least for chains shared by all classes. Tuning settings and measuring the result come
            on top.
        keep_order: leave the hosts in the given order.
        ib_gid_index: the address of RoCE ports for NCCL; None is NCCL's own choice.
        gpus_per_job: sets of GPUs that `tables` are for, beside all, as `job_gpus` reads them.
        tables: a list that takes the tables of every class; None makes none. The other sets of GPUs
            share the other half of the budget.

    Raises InputError: several hosts and a class without NIC, unknown version or strategy, or pinned
    variables that say nothing of P2P. SearchError: no ring exists. MeasurementError: a source
    cannot measure a needed set.
    """
    more = {"keep_order": keep_order, "ib_gid_index": ib_gid_index, "gpus_per_job": gpus_per_job}
    request = _request(version, ring_counts, strategy, budget, pinned_env, **more)
    return plan_hosts(request, cluster, sources, kept=kept, reporter=reporter, tables=tables)


def _request(
    version: str,
    ring_counts: Sequence[int] | None,
    strategy: str | Strategy,
    budget: Budget,
    pinned_env: Mapping[str, str] | None,
    **more: Any,
) -> PlanRequest:
    """Return a request with what is asked for one host as for several, and more."""
    check_type(ring_counts, "ring_counts", Iterable, type(None))
    return PlanRequest(
        version=version,
        ring_counts=tuple(ring_counts) if ring_counts else None,
        strategy=strategy,
        budget=budget,
        pinned_env=pinned_env or {},
        **more,
    )


def chosen_gpus(machine: Machine, gpus: Sequence[int] | str | None) -> tuple[int, ...]:
    """Return GPUs to plan for in ascending order, given by indices or text; None is all.

    Raises InputError: unknown GPUs, or fewer than two.
    """
    check_type(gpus, "gpus", Iterable, type(None))
    where = f"machine {machine.name}" if gpus is None else "`gpus`"
    gpus = parse_gpus(gpus, where) if isinstance(gpus, str) else gpus
    indices = machine.gpu_indices if gpus is None else tuple(gpus)
    chosen = tuple(sorted({machine.gpu(index).index for index in indices}))
    few = f"has {counted(len(chosen), 'GPU')} to plan for"
    require(len(chosen) > 1, where, few, "a ring joins 2 or more")
    return chosen


def search_problem(
    machine: Machine,
    knowledge: Knowledge,
    source: BandwidthSource,
    settings: Settings | None = None,
    *,
    gpus: Sequence[int] | str | None = None,
    ring_counts: Sequence[int] = (1,),
    budget: Budget = Budget(),  # noqa: B008 (is frozen)
) -> SearchProblem:
    """Return the search for rings under one choice of settings, as `find_rings` takes it.

    Args as `make_plan`; settings None are NCCL's defaults. Raises InputError: unknown GPUs, fewer
    than two, or settings that the version of NCCL does not have.
    """
    settings = check_settings(Settings() if settings is None else settings)
    task = Task(
        machine=machine,
        knowledge=knowledge,
        source=bench_for(source, machine.name),
        gpus=chosen_gpus(machine, gpus),
        version=settings.version,
        budget=budget,
    )
    return task.problem(settings, ring_counts)
