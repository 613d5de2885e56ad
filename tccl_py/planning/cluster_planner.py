"""Several hosts: chains of each class, rings over all, and tables for jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, combinations, combinations_with_replacement, islice

import msgspec

from tccl_py.errors import InputError, MeasurementError, SearchError
from tccl_py.merge.cables import cabled_ring
from tccl_py.model.cluster import Cluster, Host, NodeClass, cabled_nics, gpus_text
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.reports import part_of
from tccl_py.nccl.settings import Settings, check_settings, pinned_level
from tccl_py.nccl.versions import ASSUMED
from tccl_py.plan.plan import Plan
from tccl_py.plan.tables import ClassRates, KeptTable
from tccl_py.planning.chain_search import ClassStudy, HostTask, used_nics
from tccl_py.planning.join import best_rings, plan_over
from tccl_py.planning.parts import job_gpus
from tccl_py.planning.request import PlanRequest
from tccl_py.search.problem import Reporter
from tccl_py.sources.bench import bench_of

FEW_RINGS = 4
"""Beyond a ring for each NIC, sets of up to so many are tried."""
MAX_RINGS = 8
MAX_PAIRS = 100
"""Pairs of tables for which a job over two hosts is planned, so that its questions have answers."""


def plan_cluster(
    request: PlanRequest,
    cluster: Cluster,
    sources: Sequence[BandwidthSource | None],
    *,
    kept: Sequence[ClassRates] = (),
    reporter: Reporter | None = None,
    tables: list[KeptTable] | None = None,
) -> Plan:
    """Return the plan of several hosts; see `planner.plan_hosts`."""
    gpus = _gpus(cluster)
    if cluster.cables:
        check_settings(Settings(version=request.version or ASSUMED, subnet_routing=True))
        # Without a ring nothing need be measured.
        cabled_ring(cluster.names, cluster.cables, 1, lambda *_: 1, keep_order=request.keep_order)
    # A ring on each NIC, among others.
    ports = {min(len(_nics(cluster, node_class)), MAX_RINGS) for node_class in cluster.classes}
    counts = request.ring_counts or tuple(sorted({1, 2, FEW_RINGS} | ports))
    sets = request.budget.sets
    budget = msgspec.structs.replace(request.budget, sets=sets and max(1, sets // 2))

    def task_of(node_class: NodeClass, source: BandwidthSource, gpus: tuple[int, ...]) -> HostTask:
        return HostTask(
            machine=node_class.machine,
            knowledge=node_class.knowledge,
            # A journal remembers, and must hear of it when a set is wanted once more.
            source=bench_of(source),
            gpus=gpus,
            nics=_nics(cluster, node_class),
            version=request.version or ASSUMED,
            p2p_level=pinned_level(request.pinned_env),
            budget=budget,
            strategy=request.strategy,
            reporter=reporter,
            ring_counts=counts,
            cabled=bool(cluster.cables),
        )

    classes = [
        _Class(host, ids, None if source is None else task_of(host, source, ids), kept)
        for host, source, ids in zip(cluster.classes, sources, gpus, strict=True)
    ]
    further = [subsets[1:] for subsets in job_gpus(request.gpus_per_job, *gpus)]
    growing = not all(member.gpus in member.tables for member in classes)
    nodes = [member.node(member.gpus, growing) for member in classes]
    plan = plan_over(cluster, nodes, request)
    cancelled = plan.cancelled or any(map(_is_cancelled, nodes))
    notices = list(plan.notices)
    if tables is not None and not cancelled:
        try:
            for member, subsets in zip(classes, further, strict=True):
                # Tables of earlier get further sets of GPUs only if these are named.
                named = [] if member.tables and request.gpus_per_job is None else subsets
                nodes += member.others(named, growing, notices)
            ask = _ask_along_cables if cluster.cables else _ask_for_pairs
            ask(cluster, nodes)
        except KeyboardInterrupt:
            cancelled = True
        tables += [node.table() for node in nodes]
    used = [member.task.source for member in classes if member.task is not None]
    return msgspec.structs.replace(
        plan,
        notices=tuple(notices),
        cancelled=cancelled,
        sets_measured=sum(source.sets_measured for source in used),
        sets_remembered=sum(source.sets_remembered for source in used),
        sets_by_symmetry=sum(node.study.sets_by_symmetry for node in nodes if node.study),
    )


def _nics(cluster: Cluster, node_class: NodeClass) -> tuple[int, ...]:
    """Return the NICs of rings: with cables, those that have one."""
    used, of = used_nics(node_class.machine), cluster.host_classes
    if not cluster.cables:
        return used
    ends = cabled_nics(cluster.cables)
    cabled = {nic for host, nic, _ in ends if cluster.classes[of[host]].name == node_class.name}
    return tuple(nic for nic in used if nic in cabled)


class _Class:
    """A class of hosts: `gpus` in the plan, `tables` by GPUs, and its task if it has a source."""

    def __init__(
        self,
        node_class: NodeClass,
        gpus: tuple[int, ...],
        task: HostTask | None,
        rates: Sequence[ClassRates],
    ) -> None:
        self.node_class, self.gpus, self.task = node_class, gpus, task
        self.tables = {t.gpus: t for t in rates if t.node_class.name == node_class.name}
        if task is None and gpus not in self.tables:
            fault, right = "has no table, and no host to measure", "start a rank on a host of it"
            raise InputError(f"class {node_class.name}", fault, right)

    def node(self, gpus: tuple[int, ...], growing: bool, *, parts: int = 1) -> ClassRates:
        """Return the table for these GPUs, or that of a search with one of `parts` of the budget.

        While the cluster is `growing`, tables may grow as well.
        """
        table = self.tables.get(gpus)
        if self.task is None or (table is not None and not growing):
            return self.tables[gpus]
        sets = self.task.budget.sets
        few = msgspec.structs.replace(self.task.budget, sets=sets and max(1, sets // parts))
        task = msgspec.structs.replace(self.task, gpus=gpus, budget=few)
        return ClassStudy(self.node_class, task, None if table is None else table.kept).rates

    def others(
        self, gpu_sets: Sequence[tuple[int, ...]], growing: bool, notices: list[str]
    ) -> Iterator[ClassRates]:
        """Yield nodes for other GPUs: `gpu_sets` without table, whose search may fail, and kept.

        The notices get the reason where a search fails.
        """
        new = [gpus for gpus in gpu_sets if gpus not in self.tables]
        for gpus in new:
            name = f"{self.node_class.name}, GPUs {gpus_text(gpus)}"
            try:
                if self.task is None:
                    raise MeasurementError("no host of the class is at hand")
                node = self.node(gpus, growing, parts=len(new))
            except (InputError, SearchError, MeasurementError) as error:
                notices.append(f"{name}: no jobs can be planned ({error})")
                continue
            yield node
            if _is_cancelled(node):
                raise KeyboardInterrupt
        yield from (self.node(gpus, growing) for gpus in self.tables if gpus != self.gpus)


def _is_cancelled(node: ClassRates) -> bool:
    return node.study is not None and node.study.cancelled


def _gpus(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return the GPUs of each class: the lowest indices, as many as its hosts have ranks.

    Raises InputError: hosts of a class have unequal numbers of ranks.
    """
    slots: dict[int, tuple[str, int]] = {}
    for host in cluster.hosts:
        name, count = slots.setdefault(host.node_class, (host.name, host.slots))
        if host.slots != count:
            raise InputError(
                f"host {host.name}",
                f"has {host.slots} ranks, {name} of the same class has {count}",
                "give hosts with equal machines equal numbers of ranks",
            )
    return tuple(
        node_class.machine.gpu_indices[: slots[number][1]] if number in slots else ()
        for number, node_class in enumerate(cluster.classes)
    )


def _ask_along_cables(cluster: Cluster, nodes: Sequence[ClassRates]) -> None:
    """Plan for parts of the hosts, small ones first; those without a ring are no jobs."""
    names = cluster.names
    parts = chain.from_iterable(combinations(names, count) for count in range(2, len(names)))
    for part in islice(parts, MAX_PAIRS):
        numbers = dict.fromkeys(cluster.host_classes[name] for name in part)
        with suppress(SearchError, MeasurementError):
            _, cancelled = best_rings(part_of(cluster, part), [nodes[n] for n in numbers])
            if cancelled:
                raise KeyboardInterrupt


def _ask_for_pairs(cluster: Cluster, nodes: Sequence[ClassRates]) -> None:
    """Plan for two hosts of every pair of nodes, those with equal numbers of GPUs first.

    Two tables have answered already.
    """
    combined = combinations_with_replacement(nodes, 2)
    pairs = [pair for pair in combined if any(node.study for node in pair)]
    pairs.sort(key=lambda pair: abs(len(pair[0].gpus) - len(pair[1].gpus)))
    for pair in islice(pairs, MAX_PAIRS):
        used = list(dict.fromkeys(pair))
        hosts = tuple(
            Host(name=str(n), node_class=n % len(used), slots=len(pair[n].gpus)) for n in range(2)
        )
        classes = tuple(node.node_class for node in used)
        with suppress(SearchError, MeasurementError):
            _, cancelled = best_rings(
                Cluster(hosts=hosts, classes=classes, rails=cluster.rails), used
            )
            if cancelled:
                raise KeyboardInterrupt
