"""From a cluster and a source for each class of its nodes to a plan, and tables for jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations_with_replacement, islice
from typing import Any

import msgspec

from tccl_py.errors import InputError, MeasurementError, SearchError
from tccl_py.model.cluster import Cluster, Host, NodeClass
from tccl_py.model.measurement import BandwidthSource
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.variables import pinned_level, pinned_values
from tccl_py.nccl.versions import LATEST
from tccl_py.plan.cluster_choices import best_rings, plan_over
from tccl_py.plan.host_class import HostClass, HostTask, KeptClass, used_nics
from tccl_py.plan.plan import AS_GOOD, Plan
from tccl_py.plan.planner import DEFAULT_BUDGET, check_strategy, other_count_notices
from tccl_py.plan.tables import HostNode, HostTable, KeptTable, gpus_text, job_gpus
from tccl_py.search.problem import Budget, Reporter
from tccl_py.sources.journal import remembering

FEW_RINGS = 4
"""Beyond a ring for each NIC, sets of up to so many are tried."""
MAX_RINGS = 8
MAX_PAIRS = 100
"""Pairs of tables for which a job over two hosts is planned, so that its questions have answers."""
Node = HostClass | HostTable


def make_cluster_plan(
    cluster: Cluster,
    sources: Sequence[BandwidthSource | None],
    *,
    kept: Sequence[HostTable] = (),
    version: str = LATEST,
    ring_counts: Sequence[int] | None = None,
    strategy: str = "best-first",
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
        budget: for each class, shared out between settings. The rest, but half of it at least, is
            for chains shared by all classes. Tuning settings and measuring the result come on top.
        keep_order: leave the hosts in the given order.
        ib_gid_index: the address of RoCE ports for NCCL; None is NCCL's own choice.
        gpus_per_job: sets of GPUs that `tables` are for, beside all, as `job_gpus` reads them.
        tables: a list that takes the tables of every class; None makes none. Their sets come on
            top: the other sets of GPUs share another budget.

    Raises InputError: one host, a class without NIC, unknown version or strategy, or pinned
    variables that say nothing of P2P. SearchError: no ring exists. MeasurementError: a source
    cannot measure a needed set.
    """
    gpus = _gpus(cluster)
    check_strategy(strategy)
    pinned = pinned_values(pinned_env or {}, where="pinned environment")
    level = pinned_level(pinned)
    check_settings(Settings(version=version, p2p_level=level))
    counts = tuple(ring_counts or _ring_counts(cluster))
    limits: dict[str, Any] = {"version": version, "p2p_level": level, "ring_counts": counts}
    how: dict[str, Any] = {"strategy": strategy, "budget": budget, "reporter": reporter}
    tasks = _tasks(cluster, sources, gpus, **limits, **how)
    wanted = [job_gpus(gpus_per_job, all_, where="--gpus-per-job")[1:] for all_ in gpus]
    makers = [
        _Maker(one, task, [table for table in kept if table.node_class.name == one.name])
        for one, task in zip(cluster.classes, tasks, strict=True)
    ]
    growing = not all(maker.table(all_) for maker, all_ in zip(makers, gpus, strict=True))
    nodes = [maker.node(all_, growing) for maker, all_ in zip(makers, gpus, strict=True)]
    searches = [node for node in nodes if isinstance(node, HostClass)]
    for node in searches:
        node.explore()
    plan = plan_over(
        cluster,
        nodes,
        strategy=strategy,
        keep_order=keep_order,
        ib_gid_index=ib_gid_index,
        pinned_env=pinned,
    )
    cancelled = plan.cancelled or any(node.cancelled for node in searches)
    told = [*plan.notices, *other_count_notices(ring_counts or (), plan.ring_count)]
    told += _ceiling_notice(plan, nodes)
    if tables is not None and not cancelled:
        parts, chosen = zip(makers, wanted, strict=True), gpus_per_job is not None
        cancelled = _interrupted_jobs(cluster, nodes, parts, told, growing=growing, chosen=chosen)
        tables += [node.table() for node in nodes]
    used = [task.source for task in tasks if task is not None]
    return msgspec.structs.replace(
        plan,
        notices=tuple(told),
        cancelled=cancelled,
        sets_measured=sum(source.sets_measured for source in used),
        sets_remembered=sum(source.sets_remembered for source in used),
        sets_by_symmetry=sum(node.sets_by_symmetry for node in nodes),
    )


def _ceiling_notice(plan: Plan, nodes: Sequence[HostNode]) -> Iterator[str]:
    """Yield what a plan may lose as tables have no chains under the settings of new classes."""
    names = [node.node_class.name for node in nodes if type(node) is HostTable]
    best = min(node.choices[0][1].rate_gbps for node in nodes)
    if names and len(names) < len(nodes) and plan.rate_gbps < best * (1 - AS_GOOD):
        yield (
            f"tables of {', '.join(names)} have no chains under some settings: with a rank on a "
            f"host of each the plan may get up to {best:.2f} GB/s"
        )


class _Maker:
    """Makes the nodes of a class, from `kept` tables or by its task."""

    def __init__(self, one: NodeClass, task: HostTask | None, kept: Sequence[HostTable]) -> None:
        self.one, self.task, self.kept = one, task, kept

    def table(self, gpus: tuple[int, ...]) -> HostTable | None:
        """Return the table for these GPUs."""
        return next((table for table in self.kept if table.gpus == gpus), None)

    def node(self, gpus: tuple[int, ...], growing: bool, *, parts: int = 1) -> Node:
        """Return the node for these GPUs; while the cluster is `growing`, tables may grow as well.

        Raises:
            InputError: there is no table, and none of the hosts can be measured.
        """
        table = self.table(gpus)
        if self.task is None and table is None:
            what, right = "has no table, and no host to measure", "start a rank on a host of it"
            raise InputError(f"class {self.one.name}", what, right)
        if self.task is None or (table is not None and not growing):
            assert table is not None
            return table
        budget = self.task.budget if parts == 1 else _shared(self.task.budget, parts)
        live = HostClass(self.one, msgspec.structs.replace(self.task, gpus=gpus, budget=budget))
        return live if table is None else KeptClass(table, live)

    def others(
        self, wanted: Sequence[tuple[int, ...]], growing: bool, notices: list[str]
    ) -> Iterator[Node]:
        """Yield explored nodes for other GPUs that have no table; notices tell why one has none."""
        new = [gpus for gpus in wanted if self.table(gpus) is None]
        for gpus in new:
            try:
                node = self.node(gpus, growing, parts=len(new))
                assert isinstance(node, HostClass)
                node.explore()
            except (InputError, SearchError, MeasurementError) as error:
                name = f"{self.one.name}, GPUs {gpus_text(gpus)}"
                notices.append(f"{name}: no jobs can be planned ({error})")
                continue
            yield node
            if node.cancelled:
                raise KeyboardInterrupt

    def left(self, nodes: Sequence[Node], growing: bool) -> list[Node]:
        """Return nodes for the tables that no node has yet."""
        name = self.one.name
        there = {node.gpus for node in nodes if node.node_class.name == name}
        return [self.node(t.gpus, growing) for t in self.kept if t.gpus not in there]


def _tasks(
    cluster: Cluster,
    sources: Sequence[BandwidthSource | None],
    gpus: Sequence[tuple[int, ...]],
    **common: Any,
) -> list[HostTask | None]:
    """Return the planning task of each class with a source, over its GPUs."""
    return [
        None
        if source is None
        else HostTask(
            machine=one.machine,
            knowledge=one.knowledge,
            # A journal remembers, and must hear of it when a set is wanted once more.
            source=remembering(source),
            gpus=of_class,
            nics=used_nics(one.machine),
            **common,
        )
        for one, source, of_class in zip(cluster.classes, sources, gpus, strict=True)
    ]


def _gpus(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return the GPUs of each class: the lowest indices, as many as its hosts have ranks.

    Raises:
        InputError: hosts of a class have unequal numbers of ranks, or there is one host.
    """
    if len(cluster.hosts) < 2:
        what = f"has {len(cluster.hosts)} host"
        raise InputError("cluster", what, "rings over nodes need 2 or more; plan one machine alone")
    slots: dict[int, tuple[str, int]] = {}
    for host in cluster.hosts:
        name, wanted = slots.setdefault(host.node_class, (host.name, host.slots))
        if host.slots != wanted:
            raise InputError(
                f"host {host.name}",
                f"has {host.slots} ranks, {name} of the same class has {wanted}",
                "give hosts with equal machines equal numbers of ranks",
            )
    return tuple(
        one.machine.gpu_indices[: slots[number][1]] if number in slots else ()
        for number, one in enumerate(cluster.classes)
    )


def _ring_counts(cluster: Cluster) -> tuple[int, ...]:
    """Return 1, 2, 4, and the number of NICs, for a ring on each.

    Raises:
        InputError: a class without NIC.
    """
    ports = {min(len(used_nics(one.machine)), MAX_RINGS) for one in cluster.classes}
    return tuple(sorted({1, 2, FEW_RINGS} | ports))


# Tables for other jobs.


def _shared(budget: Budget, parts: int) -> Budget:
    """Return the budget of one of so many other sets of GPUs."""
    sets = None if budget.sets is None else max(1, budget.sets // max(1, parts))
    return msgspec.structs.replace(budget, sets=sets)


def _interrupted_jobs(
    cluster: Cluster,
    nodes: list[HostClass | HostTable],
    parts: Iterable[tuple[_Maker, Sequence[tuple[int, ...]]]],
    notices: list[str],
    *,
    growing: bool,
    chosen: bool,
) -> bool:
    """Add the nodes of jobs over each class's sets of GPUs; return whether that was interrupted.

    With `chosen` sets, classes with tables of earlier get tables of these sets too.
    """
    try:
        for maker, of_class in parts:
            if not maker.kept or chosen:
                nodes += maker.others(of_class, growing, notices)
            nodes += maker.left(nodes, growing)
        _ask_for_pairs(cluster, nodes)
    except KeyboardInterrupt:
        return True
    return False


def _ask_for_pairs(cluster: Cluster, nodes: Sequence[HostNode]) -> None:
    """Plan for two hosts of every pair of nodes, those with equal numbers of GPUs first.

    Two tables have answered already.
    """
    found = combinations_with_replacement(nodes, 2)
    pairs = [pair for pair in found if any(type(node) is not HostTable for node in pair)]
    pairs.sort(key=lambda pair: abs(len(pair[0].gpus) - len(pair[1].gpus)))
    for pair in islice(pairs, MAX_PAIRS):
        both = list(dict.fromkeys(pair))
        hosts = tuple(
            Host(name=str(n), node_class=n % len(both), slots=len(pair[n].gpus)) for n in range(2)
        )
        classes = tuple(node.node_class for node in both)
        with suppress(SearchError, MeasurementError):
            _, cancelled = best_rings(
                Cluster(hosts=hosts, classes=classes, rails=cluster.rails), both
            )
            if cancelled:
                raise KeyboardInterrupt
