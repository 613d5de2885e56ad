"""From a cluster and a source for each class of its nodes to a plan, and tables for jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from tccl_py.plan.host_class import HostClass, HostTask, used_nics
from tccl_py.plan.plan import Plan
from tccl_py.plan.planner import DEFAULT_BUDGET, check_strategy, other_count_notices
from tccl_py.plan.tables import KeptTable, gpus_text, job_gpus
from tccl_py.search.problem import Budget, Reporter
from tccl_py.sources.journal import remembering

FEW_RINGS = 4
"""Beyond a ring for each NIC, sets of up to so many are tried."""
MAX_RINGS = 8
MAX_PAIRS = 100
"""Pairs of tables for which a job over two hosts is planned, so that its questions have answers."""


def make_cluster_plan(
    cluster: Cluster,
    sources: Sequence[BandwidthSource],
    *,
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
            only the host's part: `G3->N0->N0` leaves it, `N0->N0->G0` enters it.
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
    tasks = _tasks(
        cluster,
        sources,
        gpus,
        version=version,
        ring_counts=tuple(ring_counts or _ring_counts(cluster)),
        strategy=strategy,
        budget=budget,
        reporter=reporter,
        p2p_level=level,
    )
    nodes = [HostClass(one, task) for one, task in zip(cluster.classes, tasks, strict=True)]
    subsets = [job_gpus(gpus_per_job, all_, where="--gpus-per-job")[1:] for all_ in gpus]
    for node in nodes:
        node.explore()
    plan = plan_over(
        cluster,
        nodes,
        strategy=strategy,
        keep_order=keep_order,
        ib_gid_index=ib_gid_index,
        pinned_env=pinned,
    )
    cancelled = plan.cancelled or any(node.cancelled for node in nodes)
    kept: list[str] = []
    if tables is not None and not cancelled:
        try:
            for number, task in enumerate(tasks):
                nodes += _explored(cluster.classes[number], task, subsets[number], kept)
            _ask_for_pairs(cluster, nodes)
        except KeyboardInterrupt:
            cancelled = True
        tables += [node.table() for node in nodes]
    return msgspec.structs.replace(
        plan,
        notices=(*plan.notices, *other_count_notices(ring_counts or (), plan.ring_count), *kept),
        cancelled=cancelled,
        sets_measured=sum(task.source.sets_measured for task in tasks),
        sets_remembered=sum(task.source.sets_remembered for task in tasks),
        sets_by_symmetry=sum(node.sets_by_symmetry for node in nodes),
    )


def _tasks(
    cluster: Cluster,
    sources: Sequence[BandwidthSource],
    gpus: Sequence[tuple[int, ...]],
    **common: Any,
) -> list[HostTask]:
    """Return the planning task of each class, over its GPUs."""
    return [
        HostTask(
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
def _explored(
    of_class: NodeClass, task: HostTask, subsets: Sequence[tuple[int, ...]], notices: list[str]
) -> Iterator[HostClass]:
    """Yield a class over each other set of GPUs after its search, all within another budget.

    A set without chains is left out with a notice.
    """
    budget = task.budget
    if budget.sets is not None:
        sets = max(1, budget.sets // max(1, len(subsets)))
        budget = msgspec.structs.replace(budget, sets=sets)
    for gpus in subsets:
        node = HostClass(of_class, msgspec.structs.replace(task, gpus=gpus, budget=budget))
        try:
            node.explore()
        except (SearchError, MeasurementError) as error:
            name = f"{of_class.name}, GPUs {gpus_text(gpus)}"
            notices.append(f"{name}: no jobs can be planned ({error})")
            continue
        yield node
        if node.cancelled:
            raise KeyboardInterrupt


def _ask_for_pairs(cluster: Cluster, nodes: Sequence[HostClass]) -> None:
    """Plan for two hosts of every pair of nodes, those with equal numbers of GPUs first."""
    pairs = list(combinations_with_replacement(nodes, 2))
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
