"""From a cluster and a source for each class of its nodes to a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import msgspec

from tccl_py.errors import InputError, SearchError
from tccl_py.merge.rings import uplink_limit
from tccl_py.model.cluster import Cluster
from tccl_py.model.measurement import BandwidthSource
from tccl_py.nccl.graph_search import DefaultChain, DefaultChoice
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.variables import pinned_level, pinned_values
from tccl_py.nccl.versions import LATEST, SWAPPING, version_facts
from tccl_py.plan.choices import WORTH, interval, preferred
from tccl_py.plan.cluster_rings import ClusterRings, cluster_rings
from tccl_py.plan.host_class import HostChains, HostClass, HostTask, used_nics
from tccl_py.plan.plan import HostPath, Plan, PlanChoice, PlannedHost
from tccl_py.plan.planner import (
    DEFAULT_BUDGET,
    check_strategy,
    is_proven,
    other_count_notices,
    plan_chains,
    version_notices,
)
from tccl_py.plan.tasks import Stock
from tccl_py.plan.variants import ends_as_measured, path_types
from tccl_py.search.problem import Budget, Reporter
from tccl_py.sources.memory import remembering

FEW_RINGS = 4
"""Beyond a ring for each NIC, sets of up to so many are tried."""
MAX_RINGS = 8
CANDIDATES = 6
"""Choices of settings that are merged over all classes, the most promising first."""


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
) -> Plan:
    """Find the best settings, chains, NICs and order of hosts for a cluster.

    Args:
        cluster: hosts in rank order, their classes, and the switches between them.
        sources: a source for each class, which answers sets of a host; flows over the network have
            only the host's part: `G3->N0->N0` leaves it, `N0->N0->G0` enters it.
        version: NCCL's version.
        ring_counts: possible numbers of rings; None is 1, 2 and 4, and one for each NIC.
        strategy: a name in `tccl_py.search.strategies.STRATEGIES`.
        budget: for each class, shared out between settings. The rest, but half of it at least, is
            for chains shared by all classes. Tuning settings and measuring the result come on top.
        keep_order: leave the hosts in the given order.
        ib_gid_index: the address of RoCE ports for NCCL; None is NCCL's own choice.
        reporter: watches; KeyboardInterrupt ends the search with the best so far.
        pinned_env: as `make_plan`.

    Raises:
        InputError: one host, a class without NIC, unknown version or strategy, or pinned
            variables that say nothing of P2P.
        SearchError: no ring exists.
        MeasurementError: a source cannot measure a needed set.
    """
    gpus = _gpus(cluster)
    check_strategy(strategy)
    pinned = pinned_values(pinned_env or {}, where="pinned environment")
    level = pinned_level(pinned)
    check_settings(Settings(version=version, p2p_level=level))
    counts = ring_counts or _ring_counts(cluster)
    nodes = [
        HostClass(
            one,
            HostTask(
                machine=one.machine,
                knowledge=one.knowledge,
                # A journal remembers, and must hear of it when a set is wanted once more.
                source=remembering(source),
                gpus=of_class,
                version=version,
                ring_counts=tuple(counts),
                strategy=strategy,
                budget=budget,
                reporter=reporter,
                p2p_level=level,
                nics=used_nics(one.machine),
            ),
            nodes=len(cluster.hosts),
        )
        for one, source, of_class in zip(cluster.classes, sources, gpus, strict=True)
    ]
    best: ClusterRings | None = None
    cancelled = False
    try:
        for node in nodes:
            node.explore()
        for settings, count, promise in _candidates(nodes):
            if best is not None and promise <= best.rate_gbps * (1 + WORTH):
                break
            found = _realisable(cluster, nodes, settings, count, keep_order=keep_order)
            if found is not None and (best is None or _preferred(found, best)):
                best = found
    except KeyboardInterrupt:
        if best is None:
            raise
        cancelled = True
    if best is None:
        raise SearchError("no ring over all hosts was found: no settings suit every class")
    plan = _assembled(cluster, gpus, nodes, best, strategy=strategy, ib_gid_index=ib_gid_index)
    return msgspec.structs.replace(
        plan,
        notices=(*plan.notices, *other_count_notices(ring_counts or (), best.rings)),
        pinned_env=pinned,
        cancelled=cancelled or any(node.cancelled for node in nodes),
    )


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


def _candidates(nodes: Sequence[HostClass]) -> Iterator[tuple[Settings, int, float]]:
    """Yield settings and ring counts, each with an upper estimate of its rate, best first.

    A class that was not searched under them may still turn out to be slower.
    """
    promises: dict[tuple[Settings, int], float] = {}
    for node in nodes:
        for choice in node.choices:
            key = (choice.settings, len(choice.rings.rings))
            promises[key] = min(promises.get(key, float("inf")), choice.rate_gbps)
    for node in nodes:
        best = node.choices[0].rate_gbps
        promises = {key: min(hope, best) for key, hope in promises.items()}
    ranked = sorted(promises.items(), key=lambda one: (-one[1], one[0][1]))
    # NCCL's own chains are always among them: a plan is never below them.
    own = {(node.stock.settings, len(node.stock.rings.rings)) for node in nodes}
    chosen = ranked[:CANDIDATES]
    chosen += [one for one in ranked[CANDIDATES:] if one[0] in own]
    for (settings, count), promise in chosen:
        yield settings, count, promise


def _realisable(
    cluster: Cluster,
    nodes: Sequence[HostClass],
    settings: Settings,
    count: int,
    *,
    keep_order: bool,
) -> ClusterRings | None:
    """Return the best rings under settings with which NCCL runs the measured channels.

    Between hosts NCCL doubles few and quick channels once more. Then the file asks for as many.
    """
    sm, hosts = min(one.task.view(settings).system.sm_min for one in nodes), len(cluster.hosts)
    while True:
        found = cluster_rings(cluster, nodes, settings, count, keep_order=keep_order)
        if found is None or ends_as_measured(
            settings, sm=sm, hosts=hosts, rate_gbps=found.rate_gbps
        ):
            return found
        settings = msgspec.structs.replace(settings, channels=2 * settings.channels)


def _preferred(one: ClusterRings, other: ClusterRings) -> bool:
    less = (one.rings, one.settings.channels) < (other.rings, other.settings.channels)
    return preferred(one.rate_gbps, other.rate_gbps, less=less)


def _assembled(
    cluster: Cluster,
    gpus: tuple[tuple[int, ...], ...],
    nodes: Sequence[HostClass],
    best: ClusterRings,
    *,
    strategy: str,
    ib_gid_index: int | None,
) -> Plan:
    kinds: dict[tuple[int, tuple[object, ...]], int] = {}
    paths: list[HostPath] = []
    hosts: list[PlannedHost] = []
    rank = 0
    for name, host_chains in zip(best.hosts, best.chains, strict=True):
        number = cluster.host_classes[name]
        key = (number, host_chains.chains)
        if key not in kinds:
            kinds[key] = len(paths)
            paths.append(_host_path(nodes[number], number, best.settings, host_chains))
        hosts.append(PlannedHost(name=name, path=kinds[key], first_rank=rank))
        rank += len(gpus[number])
    settings = _with_nics(best.settings, nodes, paths, ib_gid_index)
    measured = [each.measurement for each in best.chains]
    stock, variables = _own_choices(cluster, nodes)
    return Plan(
        cluster=cluster,
        class_gpus=gpus,
        hosts=tuple(hosts),
        paths=tuple(paths),
        settings=settings,
        settings_verified=version_facts(settings.version).verified,
        rate_gbps=best.rate_gbps,
        bound_gbps=best.bound_gbps,
        proven=is_proven(best.rate_gbps, best.bound_gbps),
        simulated=any(one.simulated for one in measured),
        assumed=any(one.assumed for one in measured),
        strategy=strategy,
        sets_measured=sum(node.task.source.sets_measured for node in nodes),
        sets_remembered=sum(node.task.source.sets_remembered for node in nodes),
        sets_by_symmetry=sum(node.sets_by_symmetry for node in nodes),
        stock=stock,
        variables=variables,
        notices=tuple(_notices(best, nodes, settings)),
    )


def _host_path(
    node: HostClass, number: int, settings: Settings, host_chains: HostChains
) -> HostPath:
    """Return a path as it is saved, each hop with its rate with all others running."""
    chains = plan_chains(host_chains.chains, host_chains.measurement)
    type_intra, type_inter = path_types(node.task.view(settings), chains)
    return HostPath(node_class=number, chains=chains, type_intra=type_intra, type_inter=type_inter)


def _with_nics(
    settings: Settings,
    nodes: Sequence[HostClass],
    paths: Sequence[HostPath],
    ib_gid_index: int | None,
) -> Settings:
    """Return the settings with the NICs for NCCL, and leave for rings to change NICs."""
    nics = [nic for node in nodes for nic in node.task.machine.nics if nic.index in node.task.nics]
    rdma = all(nic.rdma for nic in nics)
    names = dict.fromkeys(f"{nic.name}:{nic.port or 1}" if rdma else nic.name for nic in nics)
    chains = [chain for path in paths for chain in path.chains]
    return msgspec.structs.replace(
        settings,
        ib_hca=tuple(names) if rdma else (),
        ib_gid_index=ib_gid_index if rdma else None,
        socket_ifname=() if rdma else tuple(names),
        # By itself NCCL lets rings change NICs only where it finds that better.
        cross_nic=1 if any(c.entry_nic != c.exit_nic for c in chains) else settings.cross_nic,
    )


def _own_choices(cluster: Cluster, nodes: Sequence[HostClass]) -> tuple[PlanChoice, PlanChoice]:
    """Return default NCCL, and NCCL with the variables without which its rings have no rate.

    The slowest class decides, and uplinks in the order given. Both are equal where all classes are
    rated without variables.
    """
    variables = _own_choice(cluster, nodes, [node.stock for node in nodes])
    rated = [node.plain for node in nodes if isinstance(node.plain, Stock)]
    if len(rated) == len(nodes):
        return _own_choice(cluster, nodes, rated), variables
    note = next(node.plain for node in nodes if isinstance(node.plain, str))
    settings = nodes[0].task.default_settings
    default = PlanChoice(settings=settings, rings=variables.rings, rate_gbps=None, note=note)
    return default, variables


def _own_choice(cluster: Cluster, nodes: Sequence[HostClass], own: Sequence[Stock]) -> PlanChoice:
    """Return NCCL's own rings over the hosts in the order given."""
    rate = min(stock.rate_gbps for stock in own)
    if cluster.switches is not None:
        rate = min(rate, uplink_limit(cluster.switches, cluster.names))
    settings = nodes[0].task.default_settings
    for stock in own:
        settings = msgspec.structs.replace(
            settings,
            p2p_level=stock.settings.p2p_level or settings.p2p_level,
            net_disable_intra=stock.settings.net_disable_intra or settings.net_disable_intra,
        )
    fallback = any(stock.nccl.fallback for stock in own)
    return PlanChoice(
        settings=settings,
        rings=_own_rings(cluster, nodes, own),
        rate_gbps=rate,
        error=max(interval(stock.measurement) for stock in own),
        assumed=any(stock.measurement.assumed for stock in own),
        note="NCCL's search finds no rings and takes its simple order" if fallback else "",
    )


def _own_rings(
    cluster: Cluster, nodes: Sequence[HostClass], own: Sequence[Stock]
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of NCCL's own rings for each channel that every class has."""
    chains = [
        _chains_on(own[host.node_class].nccl, number) for number, host in enumerate(cluster.hosts)
    ]
    ranks = [{gpu: at for at, gpu in enumerate(node.task.gpus)} for node in nodes]
    firsts = [0, *accumulate(host.slots for host in cluster.hosts)][:-1]
    return tuple(
        tuple(
            first + ranks[host.node_class][gpu]
            for host, first, channels in zip(cluster.hosts, firsts, chains, strict=True)
            for gpu in channels[channel].gpus
        )
        for channel in range(min(map(len, chains)))
    )


def _chains_on(own: DefaultChoice, number: int) -> tuple[DefaultChain, ...]:
    """Return NCCL's own chains on a host by its number in rank order.

    On odd hosts pairs of channels are swapped if they leave by another NIC than they enter by, so
    that each stays on its rail between hosts (ncclTopoPostset in connect.cc of NCCL 2.30.7).
    """
    chains = own.chains
    if own.cross_nic != SWAPPING or number % 2 == 0 or len(chains) % 2:
        return chains
    return tuple(chains[channel ^ 1] for channel in range(len(chains)))


def _notices(best: ClusterRings, nodes: Sequence[HostClass], settings: Settings) -> Iterator[str]:
    for node in nodes:
        found = [choice.result for choice in node.choices if choice.result is not None]
        yield from dict.fromkeys(note for result in found for note in result.notices)
        names = ", ".join(
            nic.id for nic in node.task.machine.nics if nic.index not in node.task.nics
        )
        if names:
            yield f"{node.node_class.name}: {names} left out, as too slow or of another kind"
    if not best.order_proven:
        yield "another order of the hosts may be better: not all could be ruled out"
    yield from version_notices(settings.version)
