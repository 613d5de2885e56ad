"""Several hosts: chains of each class, rings over all, and tables for jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import combinations, combinations_with_replacement, islice
from typing import Any, NamedTuple

import msgspec

from tccl_py.errors import InputError, MeasurementError, SearchError
from tccl_py.merge.cables import cabled_ring
from tccl_py.model.cluster import Cluster, Host, NodeClass, cabled_nics, gpus_text
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.reports import part_of
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.versions import ASSUMED
from tccl_py.plan.chains import Order
from tccl_py.plan.plan import Plan
from tccl_py.plan.tables import ClassRates, KeptTable
from tccl_py.planning.chain_search import ClassStudy, HostTask, used_nics
from tccl_py.planning.join import best_rings, plan_over
from tccl_py.planning.parts import answered, job_gpus
from tccl_py.planning.request import PlanRequest, task_for
from tccl_py.search.problem import Reporter
from tccl_py.sources.bench import Bench

FEW_RINGS = 4
"""Beyond a ring for each NIC, sets of up to so many are tried."""
MAX_RINGS = 8
MOST_JOBS = 100
"""Small jobs that are planned, so that tables have answers for them."""


class SeveralHosts:
    """Several hosts: the chains of their classes are joined to rings over all of them.

    `kept` are tables of earlier, and `tables` takes those of every class, if it is a list.
    """

    def __init__(
        self,
        request: PlanRequest,
        cluster: Cluster,
        gpus: Sequence[Order],
        sources: Sequence[BandwidthSource | None],
        *,
        kept: Sequence[ClassRates],
        reporter: Reporter | None,
        tables: list[KeptTable] | None,
    ) -> None:
        self.request, self.cluster, self.gpus = request, cluster, gpus
        self.tables, self.nodes, self.sources = tables, list[ClassRates](), list[Bench]()
        if cluster.cables:
            check_settings(Settings(version=request.version or ASSUMED, subnet_routing=True))
            # Without a ring nothing need be measured.
            keep_order = request.keep_order
            cabled_ring(cluster.names, cluster.cables, 1, lambda *_: 1, keep_order=keep_order)
        # A ring on each NIC, among others.
        nics = [_nics(cluster, node_class) for node_class in cluster.classes]
        counts = {1, 2, FEW_RINGS} | {min(len(used), MAX_RINGS) for used in nics}
        more: dict[str, Any] = {
            "ring_counts": request.ring_counts or tuple(sorted(counts)),
            "reporter": reporter,
            "cabled": bool(cluster.cables),
        }
        # Their time is limited all together.
        budget = msgspec.structs.replace(request.budget, seconds=None)
        untimed = msgspec.structs.replace(request, budget=budget)
        self.classes = []
        for host, source, ids, used in zip(cluster.classes, sources, gpus, nics, strict=True):
            tables_of = {t.gpus: t for t in kept if t.node_class.name == host.name}
            task = None
            if source is not None:
                task = task_for(HostTask, untimed, host, source, ids, nics=used, **more)
                self.sources.append(task.source)
            elif ids not in tables_of:
                right = "start a rank on a host of it"
                raise InputError(
                    f"class {host.name}", "has no table, and no host to measure", right
                )
            self.classes.append(_Class(host, ids, task, tables_of))
        self.growing = not all(member.gpus in member.tables for member in self.classes)

    def limited(self) -> ExitStack:
        """Limit the seconds of all that is measured; sets are limited for each search."""
        stack, seconds = ExitStack(), self.request.budget.seconds
        limits = (source.limited(None, seconds) for source in self.sources)
        self.allowances = [stack.enter_context(limit) for limit in limits]
        return stack

    def _allow(self, share: float) -> None:
        for allowance in self.allowances:
            allowance.allow(share)

    def _allot(self, parts: int, *, classes: int) -> None:
        for allowance in self.allowances:
            allowance.allot(parts=parts * classes)

    @property
    def sets_by_symmetry(self) -> int:
        """The number of sets that symmetries have spared."""
        return sum(node.study.sets_by_symmetry for node in self.nodes if node.study)

    def plan(self) -> Plan:
        """Return the best rings over all hosts; KeyboardInterrupt ends it with the best so far."""
        self._study()
        self._allow(3 / 4)
        try:
            plan = plan_over(self.cluster, self.nodes, self.request)
        except SearchError:
            if not any(source.cut_short for source in self.sources):
                raise
            # No settings were rated on all classes. Rings over all get the whole limit once more
            # beside what is remembered, and a new set of each class in any case.
            self._study()
            budget = self.request.budget
            with ExitStack() as stack:
                for source in self.sources:
                    stack.enter_context(source.limited(budget.sets, budget.seconds))
                plan = plan_over(self.cluster, self.nodes, self.request)
        cancelled = plan.cancelled or any(map(_is_cancelled, self.nodes))
        return msgspec.structs.replace(plan, cancelled=cancelled)

    def _study(self) -> None:
        """Search every class, each in its part of the first half of the time."""
        self.nodes.clear()
        for number, member in enumerate(self.classes, 1):
            self._allow(number / len(self.classes) / 2)
            allow = partial(self._allow, 3 / 4)
            self.nodes.append(member.node(member.gpus, self.growing, allow=allow))

    def with_parts(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plan, with notices on jobs that cannot be planned; make the tables of all."""
        if self.tables is None:
            return
        notices, asked = list(plan.notices), self.request.gpus_per_job
        try:
            of_classes = zip(self.classes, job_gpus(asked, *self.gpus), strict=True)
            for number, (member, (_, *subsets)) in enumerate(of_classes):
                allot = partial(self._allot, classes=len(self.classes) - number)
                # Tables of earlier get further sets of GPUs only if these are named.
                named = [] if member.tables and asked is None else subsets
                self.nodes += member.others(named, self.growing, notices, allot)
            # Jobs are asked about, so that tables have answers for them.
            for job, nodes in islice(_small_jobs(self.cluster, self.nodes), MOST_JOBS):
                with suppress(SearchError, MeasurementError):
                    if best_rings(job, nodes)[1]:
                        raise KeyboardInterrupt
        finally:
            self.tables += [node.table() for node in self.nodes]
        yield msgspec.structs.replace(plan, notices=tuple(notices))


def _nics(cluster: Cluster, node_class: NodeClass) -> tuple[int, ...]:
    """Return the NICs of rings: with cables, those that have one."""
    used, of = used_nics(node_class.machine), cluster.host_classes
    if not cluster.cables:
        return used
    ends = cabled_nics(cluster.cables)
    cabled = {nic for host, nic, _ in ends if cluster.classes[of[host]].name == node_class.name}
    return tuple(nic for nic in used if nic in cabled)


class _Class(NamedTuple):
    """A class of hosts: `gpus` in the plan, its task if it has a source, and `tables` by GPUs."""

    node_class: NodeClass
    gpus: Order
    task: HostTask | None
    tables: Mapping[Order, ClassRates]

    def node(
        self,
        gpus: tuple[int, ...],
        growing: bool,
        *,
        parts: int = 1,
        allow: Callable[[], object] = lambda: None,
    ) -> ClassRates:
        """Return the table for these GPUs, or that of a search with one of `parts` of the budget.

        While the cluster is `growing`, tables may grow as well.
        """
        table = self.tables.get(gpus)
        if self.task is None or (table is not None and not growing):
            return self.tables[gpus]
        sets = self.task.budget.sets
        few = msgspec.structs.replace(self.task.budget, sets=sets and max(1, sets // parts))
        task = msgspec.structs.replace(self.task, gpus=gpus, budget=few)
        kept = None if table is None else table.kept
        return ClassStudy(self.node_class, task, kept, allow=allow).rates

    def others(
        self,
        gpu_sets: Sequence[Order],
        growing: bool,
        notices: list[str],
        allot: Callable[[int], None],
    ) -> tuple[ClassRates, ...]:
        """Return nodes for other GPUs: `gpu_sets` without table, whose search may fail, and kept.

        The notices get the reason where a search fails. Each gets its part of the time, which
        `allot` allows one of.
        """
        new = [gpus for gpus in gpu_sets if gpus not in self.tables]

        def searched(gpus: Order) -> ClassRates | None:
            if gpus in self.tables:
                return self.node(gpus, growing)
            allot(len(new) - new.index(gpus))
            try:
                if self.task is None:
                    raise MeasurementError("no host of the class is at hand")
                node = self.node(gpus, growing, parts=len(new))
            except (InputError, SearchError, MeasurementError) as error:
                name = f"{self.node_class.name}, GPUs {gpus_text(gpus)}"
                notices.append(f"{name}: no jobs can be planned ({error})")
                return None
            if _is_cancelled(node):
                raise KeyboardInterrupt
            return node

        return answered([*new, *(gpus for gpus in self.tables if gpus != self.gpus)], searched)


def _is_cancelled(node: ClassRates) -> bool:
    return node.study is not None and node.study.cancelled


def _small_jobs(
    cluster: Cluster, nodes: Sequence[ClassRates]
) -> Iterator[tuple[Cluster, Sequence[ClassRates]]]:
    """Yield small jobs, of which those without a ring are none, with the nodes of their classes.

    Along cables they are parts of the hosts, small ones first; else two hosts of every pair of
    nodes, those with equal numbers of GPUs first. Two tables have answered already.
    """
    if cluster.cables:
        names, of = cluster.names, cluster.host_classes
        for count in range(2, len(names)):
            for part in combinations(names, count):
                yield part_of(cluster, part), [nodes[n] for n in {of[name]: 0 for name in part}]
        return
    combined = combinations_with_replacement(nodes, 2)
    pairs = [pair for pair in combined if any(node.study for node in pair)]
    for pair in sorted(pairs, key=lambda pair: abs(len(pair[0].gpus) - len(pair[1].gpus))):
        used = list(dict.fromkeys(pair))
        hosts = tuple(
            Host(name=str(n), node_class=n % len(used), slots=len(pair[n].gpus)) for n in range(2)
        )
        classes = tuple(node.node_class for node in used)
        yield Cluster(hosts=hosts, classes=classes, rails=cluster.rails), used
