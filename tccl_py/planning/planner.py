"""One planner for one host or several: from a request and sources to a Plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tccl_py.errors import BudgetSpentError, InputError, check_type, require, spell
from tccl_py.files import pick
from tccl_py.model.cluster import Cluster, doubtful_uplinks, single_host
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.measurement import BandwidthSource
from tccl_py.nccl.settings import Settings, check_settings, pinned_level, pinned_values
from tccl_py.nccl.versions import ASSUMED, plain_version
from tccl_py.nccl.view import view
from tccl_py.plan.chains import CUT_SHORT, Choice, Order, failure_over
from tccl_py.plan.plan import Plan
from tccl_py.planning.choices import (
    SettingsSearch,
    as_graph,
    own_gbps,
    rate_own,
    sound_gpus,
)
from tccl_py.planning.handle import PlanHandle, with_methods
from tccl_py.planning.request import (
    DEFAULT_BUDGET,
    OwnRings,
    PlanRequest,
    Task,
    all_limited,
    chosen_gpus,
    gpus_of_classes,
    task_for,
)
from tccl_py.planning.study import (
    Candidate,
    assemble_plan,
    limit_gbps,
    measure_hops_alone,
    measured_well,
    rate_rings,
)
from tccl_py.search.problem import Budget, Reporter
from tccl_py.search.strategies import Strategy
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Allowance, Bench, UnsoundLinkError, bench_for

if TYPE_CHECKING:
    from tccl_py.plan.tables import ClassRates, KeptTable
    from tccl_py.planning.cluster_planner import SeveralHosts

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

    Raises InputError: unknown version or strategy, or pinned variables that say nothing of P2P; or
    as `make_plan` and `make_cluster_plan`.
    """
    pinned = pinned_values(request.pinned_env, where="pinned environment")
    version = plain_version(request.version or ASSUMED)
    check_settings(Settings(version=version, p2p_level=pinned_level(pinned)))
    request = msgspec.structs.replace(request, version=version, pinned_env=pinned)
    class_gpus = gpus_of_classes(cluster) if gpus is None else (gpus,)
    benches = [
        None if source is None else bench_for(source, host.machine.name)
        for source, host in zip(sources, cluster.classes, strict=True)
    ]
    hosts: OneHost | SeveralHosts
    while True:
        try:
            with _judging_links(filter(None, benches)):
                of_all = request, cluster, class_gpus, benches
                if cluster.closes:
                    hosts = OneHost(*of_all, own_rings=own_rings)
                else:
                    from tccl_py.planning import cluster_planner  # noqa: PLC0415 (not for one)

                    hosts = cluster_planner.SeveralHosts(*of_all, kept=kept, tables=tables)
                return _plan(hosts)
        except UnsoundLinkError:
            # The benches remember what they measured, and each time a link more is known.
            del (tables or [])[:]
            cluster = _with_links(cluster, class_gpus, benches, version)


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
        knowledge = msgspec.structs.replace(knowledge, links=links)
        classes[number] = msgspec.structs.replace(host, knowledge=knowledge)
    return msgspec.structs.replace(cluster, classes=tuple(classes))


def _plan(hosts: OneHost | SeveralHosts) -> Plan:
    """Plan for hosts of which all links are known that no plan may use."""
    with all_limited(hosts.sources, hosts.allowance):
        plan = hosts.plan()
        further = iter(()) if plan.cancelled else hosts.with_parts(plan)
        try:
            while more_known := next(further, None):
                plan = more_known
        except KeyboardInterrupt:
            plan = msgspec.structs.replace(plan, cancelled=True)
        # Beyond a bound that is reached, further sets of a search would find nothing.
        searches = hosts.cut_short and not plan.at_bound
        short = (CUT_SHORT,) * (searches or any(source.cut_short for source in hosts.sources))
    return msgspec.structs.replace(
        plan,
        notices=(*plan.notices, *short, *doubtful_uplinks(hosts.cluster)),
        sets_measured=sum(source.sets_measured for source in hosts.sources),
        sets_remembered=sum(source.sets_remembered for source in hosts.sources),
        sets_by_symmetry=hosts.sets_by_symmetry,
    )


class OneHost:
    """A single host: its chains close, and what is searched is joined already; see `Task`."""

    cut_short = False

    def __init__(
        self,
        request: PlanRequest,
        cluster: Cluster,
        gpus: Sequence[Order],
        sources: Sequence[BandwidthSource | None],
        *,
        own_rings: OwnRings | None,
    ) -> None:
        self.request, self.cluster, self.gpus = request, cluster, gpus
        (host,), (source,) = cluster.classes, sources
        where, count = f"host {cluster.names[0]}", len(gpus[0])
        if source is None:
            raise InputError(where, "has no source", "give one that measures its GPUs")
        few = f"has {spell(count, 'GPU')} to plan for"
        require(count > 1, where, few, "a ring joins 2 or more")
        self.task = task_for(
            Task,
            request,
            host,
            source,
            gpus[0],
            ring_counts=request.ring_counts or (RING_COUNTS if count <= 8 else FEW_RING_COUNTS),
            fewest_first=request.ring_counts is None,
            placement=True,
            own_rings=own_rings,
        )
        self.sources = [self.task.source]
        self.allowance = Allowance(request.budget.sets, request.budget.seconds)

    def plan(self) -> Plan:
        """Return the plan of the best choice; KeyboardInterrupt ends it with the best so far."""
        task, allow = self.task, self.allowance.allow
        allow(1 / 2)
        search = rate_own(task)
        search.run(sets=task.budget.sets or 1, allow=allow)
        allow(1)
        variables = search.own["variables"]
        best = _final(task, variables, search.best)
        self.sets_by_symmetry = sum(result.sets_by_symmetry for result in search.results)
        self.choices = {"default": variables, **search.own, "graph": best}
        searched = sorted(search.searched, key=lambda choice: -choice.rate_gbps)
        # Over NVLink through another GPU default NCCL may be faster than what has a rate.
        default_view = task.view(task.default_settings)
        relays = not ("default" in search.own or default_view.by_network or default_view.unsound)
        return assemble_plan(
            self.cluster,
            self.gpus,
            best,
            choices_of(search, task),
            self.request,
            views=[task.view(best.settings)],
            notices=dict.fromkeys(note for result in search.results for note in result.notices),
            simulated=task.source.simulated,
            dry_run=task.source.dry_run,
            cancelled=search.cancelled,
            alternatives=tuple(choice.as_choice("graph") for choice in searched),
            winner="default" if relays else None,
        )

    def with_parts(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plan with the machine's limit, then with rings for smaller sets of GPUs."""
        # Two sets, which those for subsets of GPUs must not use up.
        rings = self.choices[plan.recommended].rings
        limit = limit_gbps(self.task.source, rings, assumed=plan.assumed)
        measure_hops_alone(self.task.source, self.choices["graph"].rings)
        notices = (*plan.notices, *sound_part(self.task, plan))
        plan = msgspec.structs.replace(plan, limit_gbps=limit, notices=notices)
        yield plan
        asked = self.request.subsets
        if asked or (asked is None and plan.recommended != "default"):
            from tccl_py.planning.parts import smaller_sets  # noqa: PLC0415 (not for all)

            parts = smaller_sets(self.task, plan, self.choices["graph"], everywhere=asked is True)
            yield msgspec.structs.replace(plan, subsets=parts)


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
        answer = measured_well(task.source, best.rings)
        bound = pick(best, "bound_gbps", "bound_assumptions")
        final = rate_rings(best.settings, best.rings, answer, **bound)
        if final.rate_gbps >= own.rate_gbps:
            return final
    return as_graph(own)


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
    that say nothing of P2P. SearchError: no ring exists. MeasurementError: the source cannot
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
    variables that say nothing of P2P. SearchError: no ring exists. MeasurementError: a source
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
