"""One planner for one host or several: from a request and sources to a Plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tccl_py.errors import (
    BudgetSpentError,
    InputError,
    MeasurementError,
    check_type,
    require,
    spell,
)
from tccl_py.files import pick
from tccl_py.model.cluster import Cluster, doubtful_uplinks, single_host
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import RingSet
from tccl_py.model.transfer import Fifo, Flow, Place, Transfer, TransferSet, transfer_set
from tccl_py.nccl.settings import Settings, check_settings, pinned_values
from tccl_py.nccl.versions import ASSUMED, plain_version
from tccl_py.nccl.view import view
from tccl_py.plan.chains import CUT_SHORT, Choice, Order, failure_over
from tccl_py.plan.plan import Plan
from tccl_py.planning.handle import PlanHandle, with_methods
from tccl_py.planning.request import (
    DEFAULT_BUDGET,
    OwnRings,
    PlanRequest,
    Task,
    chosen_gpus,
    gpus_of_classes,
)
from tccl_py.planning.settings_search import (
    Candidate,
    SettingsSearch,
    as_graph,
    assemble_plan,
    own_gbps,
    rate_rings,
    settings_search,
    sound_gpus,
)
from tccl_py.search.problem import Budget, Reporter
from tccl_py.search.strategies import Strategy
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Allowance, Bench, UnsoundLinkError, bench_for

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
    tables: list[KeptTable] | None = None,
) -> Plan:
    """Plan for the hosts of a cluster, one or several, with a source for each of its classes.

    Args:
        request: what is planned for. Its fields from `version` on are read.
        cluster: the hosts. The chains of a single one close to rings inside it.
        sources: answer the sets of each class.
        gpus: those to join on a single host; None is as many of the lowest as it has ranks.
        kept: tables of classes of several hosts, measured earlier.
        own_rings: returns NCCL's own rings on a single host; None computes them by its rules.
        tables: a list that takes the tables of every class of several hosts.

    Raises InputError: unknown version or strategy, or pinned variables that pin nothing; or
    as `make_plan` and `make_cluster_plan`.
    """
    pinned = pinned_values(request.pinned_env, where="pinned environment")
    version = plain_version(request.version or ASSUMED)
    request = replace(request, version=version, pinned_env=pinned)
    check_settings(request.default_settings)
    class_gpus = gpus_of_classes(cluster) if gpus is None else (gpus,)
    of_classes = [
        None if source is None else bench_for(source, host.machine.name)
        for source, host in zip(sources, cluster.classes, strict=True)
    ]
    benches = [bench for bench in of_classes if bench is not None]
    plans_of: Callable[..., Iterable[Plan]] = partial(_plans_of_one, own_rings=own_rings)
    sets = request.budget.sets
    if not cluster.closes:
        from tccl_py.planning.cluster_planner import SeveralHosts  # noqa: PLC0415 (not for one)

        # Sets are limited for each search.
        sets, plans_of = None, partial(SeveralHosts, kept=kept, tables=tables)
    while True:
        allowance = Allowance(sets, request.budget.seconds)
        try:
            with _judging_links(benches), ExitStack() as limits:
                for bench in benches:
                    limits.enter_context(bench.limit(allowance))
                of_all = request, cluster, class_gpus, of_classes
                plan = _last(iter(plans_of(*of_all, allowance=allowance)), allowance)
                cut_short = any(bench.cut_short for bench in benches)
        except UnsoundLinkError:
            # The benches remember what they measured, and each time a link more is known.
            del (tables or [])[:]
            cluster = _with_links(cluster, class_gpus, of_classes, version)
        else:
            return replace(
                plan,
                notices=(*plan.notices, *(CUT_SHORT,) * cut_short, *doubtful_uplinks(cluster)),
                sets_measured=sum(bench.sets_measured for bench in benches),
                sets_remembered=sum(bench.sets_remembered for bench in benches),
            )


def _last(plans: Iterator[Plan], allowance: Allowance) -> Plan:
    """Return the last plan, which says the most; an interruption ends with the one before."""
    plan = next(plans)
    if not plan.cancelled:
        try:
            for plan in plans:  # noqa: B007 (is returned)
                pass
        except KeyboardInterrupt:
            allowance.stopped = True
    return replace(plan, cancelled=plan.cancelled or allowance.stopped)


@contextmanager
def _judging_links(benches: Iterable[Bench]) -> Iterator[None]:
    """Find out in a block for which links sets cannot be measured; see Bench."""
    judging = list(benches)
    for bench in judging:
        bench.judges_links = True
    try:
        yield
    finally:
        for bench in judging:
            bench.judges_links = False


def _with_links(
    cluster: Cluster, class_gpus: Sequence[Order], benches: Sequence[Bench | None], version: str
) -> Cluster:
    """Return the cluster with the links that are unsound by its benches, all others tried too."""
    classes = list(cluster.classes)
    widest = Settings(version=version, p2p_level="SYS")
    for number, bench in enumerate(benches):
        if bench is None or not bench.unsound:
            continue
        host, knowledge = classes[number], classes[number].knowledge
        facts = {(fact.one, fact.other): fact for fact in knowledge.links or ()}
        topo = view(host.machine, knowledge, widest, gpus=class_gpus[number])
        bench.try_links(sorted(topo.p2p - facts.keys()))
        facts |= {(fact.one, fact.other): fact for fact in bench.unsound.values()}
        links = tuple(fact for _, fact in sorted(facts.items()))
        knowledge = replace(knowledge, links=links)
        classes[number] = replace(host, knowledge=knowledge)
    return replace(cluster, classes=tuple(classes))


def _plans_of_one(
    request: PlanRequest,
    cluster: Cluster,
    gpus: Sequence[Order],
    sources: Sequence[Bench | None],
    *,
    allowance: Allowance,
    own_rings: OwnRings | None,
) -> Iterator[Plan]:
    """Yield the plan of a single host: its chains close, and what is searched is joined already.

    The plan comes again with the machine's limit, and then with rings for smaller sets of GPUs.
    """
    (source,), count, where = sources, len(gpus[0]), f"host {cluster.names[0]}"
    if source is None:
        raise InputError(where, "has no source", "give one that measures its GPUs")
    few = f"has {spell(count, 'GPU')} to plan for"
    require(count > 1, where, few, "a ring joins 2 or more")
    task = Task.of(
        request,
        cluster.classes[0],
        source,
        gpus[0],
        ring_counts=request.ring_counts or (RING_COUNTS if count <= 8 else FEW_RING_COUNTS),
        fewest_first=request.ring_counts is None,
        own_rings=own_rings,
    )
    # 1. The best choice; an interruption ends this with the best so far.
    allowance.allow(1 / 2)
    search = settings_search(task, allow=allowance.allow)
    allowance.allow(1)
    variables = search.own["variables"]
    best = _final(task, variables, search.best)
    searched = sorted(search.searched, key=lambda choice: -choice.rate_gbps)
    # Over NVLink through another GPU default NCCL may be faster than what has a rate.
    default_view = task.view(task.default_settings)
    relays = not ("default" in search.own or default_view.by_network or default_view.unsound)
    plan = assemble_plan(
        cluster,
        gpus,
        best,
        choices_of(search, task),
        request,
        views=[task.view(best.settings)],
        notices=dict.fromkeys(note for result in search.results for note in result.notices),
        simulated=source.simulated,
        dry_run=source.dry_run,
        cancelled=search.cancelled,
        alternatives=tuple(choice.as_choice("graph") for choice in searched),
        winner="default" if relays else None,
        sets_by_symmetry=sum(result.sets_by_symmetry for result in search.results),
    )
    yield plan
    # 2. The limit: two sets, which those for subsets of GPUs must not use up.
    rings = {"default": variables, **search.own, "graph": best}[plan.recommended].rings
    limit = limit_gbps(source, rings, assumed=plan.assumed)
    measure_hops_alone(source, best.rings)
    notices = (*plan.notices, *sound_part(task, plan))
    plan = replace(plan, limit_gbps=limit, notices=notices)
    yield plan
    # 3. Smaller sets of GPUs.
    asked = request.subsets
    if asked or (asked is None and plan.recommended != "default"):
        from tccl_py.planning.parts import smaller_sets  # noqa: PLC0415 (not for all)

        parts = smaller_sets(task, plan, best, everywhere=asked is True)
        if not allowance.stopped:
            yield replace(plan, subsets=parts)


def sound_part(task: Task, plan: Plan) -> Iterator[str]:
    """Yield a notice with default NCCL's bandwidth on the GPUs between which links are sound."""
    gpus = sound_gpus(task)
    if len(gpus) in (1, len(task.gpus)):
        return
    rate = own_gbps(task.over(gpus), task.default_settings)
    if 0 < rate < inf:
        listed = ",".join(map(str, gpus))
        yield (
            f"a job on GPUs {listed} alone (CUDA_VISIBLE_DEVICES={listed}) needs no variable: "
            f"default NCCL {rate:.2f} GB/s ({plan.provenance_of('variables')})"
        )


def choices_of(search: SettingsSearch, task: Task) -> Iterator[Choice]:
    """Yield the choices without a graph file: NCCL's own rings, measured."""
    if "default" not in search.own:
        settings = task.default_settings
        yield Choice(
            name="default",
            settings=settings,
            rings=task.default_rings(settings).rings or None,
            note=search.note,
            fails=failure_over(task.find_unsound(settings)),
        )
    for name, choice in search.own.items():
        yield choice.as_choice(name, search.note if name == "default" else "")


def _final(task: Task, own: Candidate, best: Candidate) -> Candidate:
    """Return the planned choice, measured well; NCCL's own where noise favoured another."""
    with suppress(BudgetSpentError):
        same = pick(best, "settings", "rings", "bound_gbps", "bound_assumptions")
        final = rate_rings(task.source, **same, well=True)
        if final.rate_gbps >= own.rate_gbps:
            return final
    return as_graph(own)


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


def make_plan(
    machine: Machine | str | Path,
    knowledge: Knowledge | None = None,
    source: BandwidthSource | None = None,
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
) -> PlanHandle:
    """Find the settings and rings that suit the machine best, as far as `source` tells.

    >>> plan = make_plan("h200x4-vm")
    >>> plan.rings[0].gpus, plan.proven, plan.simulated
    ((0, 1, 2, 3), True, True)
    >>> plan.rings[0].bottleneck.flow
    Flow('G0->G0->G1{blocks=24}')

    Args:
        machine: the node; or a model to simulate: a bundled name, a file, or the directory of a
            simulated plan.
        knowledge: what is known of it beyond structure; None is what a model knows, or nothing.
        source: answers transfer sets; None simulates a model.
        gpus: NVML indices of the GPUs to join, or text as `0-3`; None is all.
        version: NCCL's version.
        ring_counts: how many rings a set may have; None is 1, 2 and, up to 8 GPUs, 4.
        strategy: of the search: a name in `STRATEGIES`, or a function with the signature of
            `find_rings`.
        budget: for the whole plan. Half of the sets is for the search under settings; default NCCL
            and variables take half at most. A quarter is left for the bound, an eighth for the rest
            and smaller sets of GPUs.
        reporter: watches; KeyboardInterrupt ends the search with the best so far.
        pinned_env: NCCL_P2P_DISABLE, NCCL_P2P_LEVEL or NCCL_IB_HCA as all jobs have it, with the
            plan or without; no settings go beyond it, default NCCL's included.
        own_rings: returns NCCL's own rings under each of several settings; None computes them by
            its rules.
        subsets: whether smaller sets of GPUs get rings too; None is only where the plan recommends
            graph files.

    Raises InputError: unknown GPUs, version or strategy, fewer than two GPUs, or pinned variables
    that pin nothing. SearchError: no ring exists. MeasurementError: the source cannot
    measure what is needed.
    """
    check_type(machine, "machine", Machine, str, Path)
    if isinstance(machine, (str, Path)):
        model = _model_of(machine)
        machine, knowledge = model.machine, knowledge or model.knowledge
        source = source or Simulator(model)
    knowledge = knowledge or Knowledge()
    check_type(knowledge, "knowledge", Knowledge)
    if source is None:
        raise InputError("`source`", "is missing", "give one beside a Machine")
    indices = chosen_gpus(machine, gpus)
    request = PlanRequest(
        version=version,
        ring_counts=_counts(ring_counts),
        strategy=strategy,
        budget=budget,
        pinned_env=pinned_env or {},
        subsets=subsets,
        reporter=reporter,
    )
    cluster = single_host(machine, knowledge, indices)
    return with_methods(plan_hosts(request, cluster, [source], gpus=indices, own_rings=own_rings))


def _model_of(name: str | Path) -> MachineModel:
    """Return the model of a bundled name, a file, or the directory of a simulated plan."""
    from tccl_py.plan.directory import machine_file  # noqa: PLC0415 (slow)
    from tccl_py.plan.load import load_plan  # noqa: PLC0415
    from tccl_py.simulator.descriptions import bundled_names, load_machine  # noqa: PLC0415

    if name not in bundled_names() and Path(name).is_dir():
        plan = load_plan(Path(name))
        right = "`load_plan` has it, and `tccl plan` measures again"
        fits = plan.simulated and not plan.dry_run
        require(fits, str(name), "is measured", right)
        name = machine_file(plan, Path(name))
    return load_machine(name)


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
) -> PlanHandle:
    """Find the best settings, chains, NICs and order of hosts for a cluster.

    Args:
        cluster: hosts in rank order, their classes, and the switches between them.
        sources: a source for each class, which answers sets of a host; flows over the network have
            only the host's part: `G3->N0->N0` leaves it, `N0->N0->G0` enters it. None has `kept`.
        kept: tables of classes measured earlier, taken in their searches' place.
        version: NCCL's version.
        ring_counts: possible numbers of rings; None is 1, 2 and 4, and one for each NIC.
        budget: of sets, for each class; half of them is for the chains over all GPUs, and of these
            half at least for chains shared by all classes. Tuning settings and measuring the result
            come on top. Of the seconds half is for the classes, and a quarter for `tables`. They
            are doubled where in that time no settings were rated on all classes.
        strategy: of the search: a name in `STRATEGIES`, or a function with the signature of
            `find_rings`.
        keep_order: leave the hosts in the given order.
        ib_gid_index: the address of RoCE ports for NCCL; None is NCCL's own choice.
        reporter: watches; KeyboardInterrupt ends the search with the best so far.
        pinned_env: NCCL_P2P_DISABLE, NCCL_P2P_LEVEL or NCCL_IB_HCA as all jobs have it, with the
            plan or without.
        gpus_per_job: sets of GPUs that `tables` are for, beside all, as `job_gpus` reads them.
        tables: a list that takes the tables of every class; None makes none. The other sets of GPUs
            share the other half of the budget.

    Raises InputError: several hosts and a class without NIC, unknown version or strategy, or pinned
    variables that pin nothing. SearchError: no ring exists. MeasurementError: a source
    cannot measure a needed set.
    """
    check_type(cluster, "cluster", Cluster)
    fits = isinstance(sources, Sequence) and len(sources) == len(cluster.classes)
    require(fits, "`sources`", "are of other classes", "give one for each class of hosts")
    request = PlanRequest(
        version=version,
        ring_counts=_counts(ring_counts),
        strategy=strategy,
        budget=budget,
        pinned_env=pinned_env or {},
        keep_order=keep_order,
        ib_gid_index=ib_gid_index,
        gpus_per_job=gpus_per_job,
        reporter=reporter,
    )
    return with_methods(plan_hosts(request, cluster, sources, kept=kept, tables=tables))


def _counts(ring_counts: Sequence[int] | None) -> tuple[int, ...] | None:
    check_type(ring_counts, "ring_counts", Iterable, type(None))
    return None if ring_counts is None else tuple(ring_counts) or None
