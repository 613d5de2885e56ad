"""From a machine and a bandwidth source to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from tccl_py.errors import (
    BudgetSpentError,
    MeasurementError,
    check_type,
    counted,
    require,
)
from tccl_py.model.cluster import single_host
from tccl_py.model.machine import Knowledge, Machine, parse_gpus
from tccl_py.model.measurement import BandwidthSource, Measurement, dealt
from tccl_py.model.rings import RingSet
from tccl_py.model.transfer import Fifo, Flow, Place, Transfer, TransferSet, transfer_set
from tccl_py.nccl.graph_search import DefaultChoice
from tccl_py.nccl.settings import (
    Settings,
    check_settings,
    pinned_level,
    pinned_values,
)
from tccl_py.nccl.versions import ASSUMED, version_facts
from tccl_py.plan.chains import (
    CUT_SHORT,
    Alternative,
    HostPath,
    PlannedHost,
    is_at_bound,
    plan_chain,
    version_notices,
)
from tccl_py.plan.plan import Plan
from tccl_py.planning.choices import (
    OwnChoices,
    SettingsSearch,
    as_graph,
    interval,
    own_choices,
)
from tccl_py.planning.groups import ALL_SUBSETS_UP_TO, smaller_sets
from tccl_py.planning.study import Choice, Stock, Task, measured_well
from tccl_py.search.problem import Budget, Reporter, SearchProblem
from tccl_py.search.strategies import Strategy, strategy_name
from tccl_py.sources.bench import bench_for

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
    strategy: str | Strategy = "best-first",
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
    strategy_name(strategy)  # Raises InputError
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
        strategy=strategy,
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
        strategy=strategy_name(task.strategy),
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
            changes["subsets"] = smaller_sets(task, plan, best, everywhere=subsets is True)
    except KeyboardInterrupt:
        changes["cancelled"] = True
    counts = {"sets_measured": source.sets_measured, "sets_remembered": source.sets_remembered}
    return msgspec.structs.replace(plan, **changes, **counts)


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
