"""A plan over hosts from the rates of their classes: the best graph files, and NCCL's own rings.

Classes are searched and measured while this asks them, or answer from kept tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import msgspec

from tccl_py.errors import SearchError
from tccl_py.merge.rings import uplink_limit
from tccl_py.model.cluster import Cluster
from tccl_py.model.transfer import index_of
from tccl_py.nccl.connections import (
    HostChannels,
    default_channels,
    swaps_pairs,
    tree_connections,
)
from tccl_py.nccl.graph_search import DefaultChain, DefaultRings, default_rings
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import view
from tccl_py.plan.chains import AS_GOOD as WORTH
from tccl_py.plan.chains import Choice, ChoiceName, Failure, condense, failure_over, prefer
from tccl_py.plan.plan import Plan
from tccl_py.plan.retuning import ends_as_measured
from tccl_py.plan.tables import ClassRates
from tccl_py.planning.cables import (
    channels_on,
    choices_along_cables,
    failing,
    notices_of_cables,
)
from tccl_py.planning.host_rings import RingSearch
from tccl_py.planning.request import PlanRequest
from tccl_py.planning.study import Candidate, assemble_plan

CANDIDATES = 12
"""Choices of settings that are merged over all classes, the most promising first, and the most
promising one of each number of rings."""


def plan_over(cluster: Cluster, nodes: Sequence[ClassRates], request: PlanRequest) -> Plan:
    """Return the best plan over a cluster's hosts, with a node for each of its classes.

    KeyboardInterrupt ends it with the best so far. The counts of sets are left 0.

    Raises SearchError: no ring exists. MeasurementError: a source cannot measure a needed set.
    """
    best, cancelled = best_rings(cluster, nodes, keep_order=request.keep_order)
    settings = _with_nics(cluster, best, nodes, request)
    default, variables = _own_choices(cluster, nodes)
    if cluster.cables:
        default, variables = choices_along_cables(default, variables, cluster, nodes, settings)
    elif cluster.rails == "only":
        default, variables = _on_rails(default, variables, cluster, nodes)
    used = {cluster.host_classes[name] for name in best.hosts}
    return assemble_plan(
        cluster,
        tuple(node.gpus for node in nodes),
        msgspec.structs.replace(best, settings=settings),
        (default, variables),
        request,
        views=[node.view(best.settings) for node in nodes],
        notices=(
            *_notices(cluster, best, nodes),
            *notices_of_cables(cluster, settings),
            *_notices_of_names(nodes, settings),
            *_notices_of_rails(default, cluster, nodes),
        ),
        simulated=any(nodes[number].kept.simulated for number in used),
        dry_run=any(nodes[number].kept.dry_run for number in used),
        cancelled=cancelled,
    )


def best_rings(
    cluster: Cluster, nodes: Sequence[ClassRates], *, keep_order: bool = False
) -> tuple[Candidate, bool]:
    """Return the best rings over all hosts, and whether KeyboardInterrupt ended the search.

    Raises SearchError: no ring exists. MeasurementError: a source cannot measure a needed set.
    """
    best: Candidate | None = None
    cancelled = False
    try:
        for settings, count, promise in _candidates(nodes):
            if best is not None and promise <= best.rate_gbps * (1 + WORTH):
                break
            search = RingSearch(
                cluster=cluster, nodes=nodes, settings=settings, keep_order=keep_order
            )
            rings = _realisable(search, count)
            if rings is None:
                continue
            cost = rings.ring_count, rings.settings.channels
            less = best is not None and cost < (best.ring_count, best.settings.channels)
            if best is None or prefer(rings.rate_gbps, best.rate_gbps, less=less):
                best = rings
        if best is not None and cluster.cables:
            best = _of_all_dealings(cluster, nodes, best, keep_order=keep_order)
    except KeyboardInterrupt:
        if best is None:
            raise
        cancelled = True
    if best is None:
        raise SearchError("no ring over all hosts was found: no settings suit every class")
    return best, cancelled


def _of_all_dealings(
    cluster: Cluster, nodes: Sequence[ClassRates], best: Candidate, *, keep_order: bool
) -> Candidate:
    """Return the best of rings along cables, and of fewer, with their functions in any order."""
    search = RingSearch(
        cluster=cluster, nodes=nodes, settings=best.settings, keep_order=keep_order, thorough=True
    )
    for count in range(best.ring_count, 0, -1):
        rings = _realisable(search, count) if best.settings.channels % count == 0 else None
        if rings is None or rings.settings != best.settings:
            continue
        if prefer(rings.rate_gbps, best.rate_gbps, less=False):
            best = rings
        elif count == best.ring_count:
            # The first dealing is as fast, and bounded now.
            best = msgspec.structs.replace(best, bound_gbps=rings.bound_gbps, bound_assumptions=())
    if best.bound_gbps is None:
        # Dealings may be too many questions, but no chains of a host exceed this.
        bounds = [node.most(best.settings, best.ring_count) for node in nodes]
        if None not in bounds:
            most, assumptions = min(bound for bound in bounds if bound is not None)
            most = max(most, best.rate_gbps)
            best = msgspec.structs.replace(best, bound_gbps=most, bound_assumptions=assumptions)
    return best


def _candidates(nodes: Sequence[ClassRates]) -> Iterator[tuple[Settings, int, float]]:
    """Yield settings and ring counts, each with an upper estimate of its rate, best first.

    A class that was not searched under them may still turn out to be slower.
    """
    promises: dict[tuple[Settings, int], float] = {}
    for node in nodes:
        for settings, chains in node.choices:
            key = (settings, len(chains.pairs))
            promises[key] = min(promises.get(key, float("inf")), chains.rate_gbps)
    least = min(node.choices[0][1].rate_gbps for node in nodes)
    # Of equal promises the rates that are known decide, so that the order of classes does not.
    ranked = sorted(promises.items(), key=lambda row: (-min(row[1], least), row[0][1], -row[1]))
    usable = [row for row in ranked if all(node.may_answer(*row[0]) for node in nodes)]
    # NCCL's own chains are always among them: a plan is never below them.
    own = [(node.rated_default, node.default_rings(node.rated_default).chains) for node in nodes]
    defaults = {(default.settings, len(condense(chains))) for default, chains in own}
    counts = set[int]()
    for number, ((settings, count), promise) in enumerate(usable):
        if number < CANDIDATES or (settings, count) in defaults or count not in counts:
            counts.add(count)
            yield settings, count, min(promise, least)


def _realisable(search: RingSearch, count: int) -> Candidate | None:
    """Return the best rings under settings with which NCCL runs the measured channels.

    Between hosts NCCL doubles few and quick channels once more. Then the file asks for as many.
    """
    settings, hosts = search.settings, len(search.cluster.hosts)
    sm = min(node.view(settings).system.sm_min for node in search.nodes)
    while True:
        rings = msgspec.structs.replace(search, settings=settings).rings(count)
        if rings is None or ends_as_measured(
            settings, sm=sm, hosts=hosts, rate_gbps=rings.rate_gbps
        ):
            return rings
        settings = msgspec.structs.replace(settings, channels=2 * settings.channels)


def _with_nics(
    cluster: Cluster, joined: Candidate, nodes: Sequence[ClassRates], request: PlanRequest
) -> Settings:
    """Return the settings with the NICs for NCCL, and leave for rings to change NICs."""
    nics = [n for node in nodes for n in node.node_class.machine.nics if n.index in node.nics]
    rdma = all(nic.rdma for nic in nics)
    texts = (f"{nic.name}:{nic.port or 1}" if rdma else nic.name for nic in nics)
    names = dict.fromkeys(texts if all(nic.has_name for nic in nics) else ())
    chains, settings = chain.from_iterable(joined.hosts.values()), joined.settings
    return msgspec.structs.replace(
        settings,
        ib_hca=tuple(names) if rdma else (),
        ib_gid_index=request.ib_gid_index if rdma else None,
        socket_ifname=() if rdma else tuple(names),
        # By itself NCCL lets rings change NICs only where it finds that better.
        cross_nic=1 if any(c.entry_nic != c.exit_nic for c in chains) else settings.cross_nic,
        subnet_routing=bool(cluster.cables),
        subnet_prefix=request.subnet_prefix,
        # Trees join hosts that no cable joins, and the entries of hosts, on whichever rails.
        algo="Ring" if cluster.cables or _trees_cross(cluster, joined) else settings.algo,
    )


def _notices_of_names(nodes: Sequence[ClassRates], settings: Settings) -> Iterator[str]:
    """Yield on which hosts the names of other hosts' NICs bring back NICs that were left out."""
    variable = "NCCL_IB_HCA" if settings.ib_hca else "NCCL_SOCKET_IFNAME"
    names = {*settings.ib_hca, *settings.socket_ifname}
    for node in nodes:
        told = {
            nic.index: f"{nic.name}:{nic.port or 1}" if settings.ib_hca else nic.name
            for nic in node.node_class.machine.nics
        }
        back = ", ".join(f"N{n}" for n in told if told[n] in names and n not in node.nics)
        own = ",".join(told[nic] for nic in node.nics)
        if back:
            yield (
                f"{node.node_class.name}: NCCL takes {back} too, since one list of NICs holds for "
                f"all hosts; there {variable}=={own} is right"
            )


def _trees_cross(cluster: Cluster, joined: Candidate) -> bool:
    """Return whether trees of graph files, which use the entries of chains, would leave rails."""
    if cluster.rails == "any":
        return False
    entries = (
        tuple((cluster.classes[cluster.host_classes[name]].rail(c.entry_nic or 0),) for c in chains)
        for name, chains in joined.hosts.items()
    )
    hosts = [HostChannels(rings=(), trees=trees) for trees in entries]
    return any(link.nic != link.far for link in tree_connections(hosts))


def _own_choices(cluster: Cluster, nodes: Sequence[ClassRates]) -> tuple[Choice, Choice]:
    """Return default NCCL, and NCCL with the variables without which its rings have no rate.

    The slowest class decides, and uplinks in the order given. Both are equal where all classes are
    rated without variables.
    """
    variables = _own_choice("variables", cluster, nodes, [node.rated_default for node in nodes])
    unrated = [node.default for node in nodes if node.default.rate_gbps is None]
    if not unrated:
        return _own_choice("default", cluster, nodes, [node.default for node in nodes]), variables
    settings = nodes[0].kept.default_settings
    default = Choice(
        name="default",
        settings=settings,
        rings=variables.rings,
        note=_note(unrated),
        fails=_failure(cluster, nodes, settings),
    )
    return default, variables


def _failure(cluster: Cluster, nodes: Sequence[ClassRates], settings: Settings) -> Failure | None:
    """Return how NCCL fails over broken links of the first host of each class, if it does."""
    firsts = {number: name for name, number in reversed(cluster.host_classes.items())}
    failures = [
        failure_over(node.view(settings).unsound, firsts[number])
        for number, node in enumerate(nodes)
        if number in firsts
    ]
    return next(filter(None, failures), None)


def _on_rails(
    default: Choice, variables: Choice, cluster: Cluster, nodes: Sequence[ClassRates]
) -> tuple[Choice, Choice]:
    """Return the choices, which fail where they leave rails.

    Variables include NCCL_CROSS_NIC=0 where only that connects, or is clearly faster.
    """
    default = failing(default, cluster, list(map(_default_channels, nodes)))
    own = [[channels_on(node, node.default_rings(node.rated_default))] for node in nodes]
    variables = failing(variables, cluster, own)
    railed = [node.kept.railed for node in nodes if node.kept.railed is not None]
    if len(railed) == len(nodes):
        own = [
            [channels_on(node, node.default_rings(choice))]
            for node, choice in zip(nodes, railed, strict=True)
        ]
        stays = failing(_own_choice("variables", cluster, nodes, railed), cluster, own)
        rate = variables.rate_gbps or 0.0
        if stays.rate_gbps is not None and prefer(stays.rate_gbps, rate, less=False):
            variables = stays
    return default, variables


def _notices_of_rails(
    default: Choice, cluster: Cluster, nodes: Sequence[ClassRates]
) -> Iterator[str]:
    """Yield that default NCCL fails on one host fewer, where it runs on all."""
    if cluster.rails == "any" or default.fails or len(cluster.hosts) < 3:
        return
    fewer = msgspec.structs.replace(cluster, hosts=cluster.hosts[:-1])
    if failing(default, fewer, list(map(_default_channels, nodes))).fails:
        count = len(fewer.hosts)
        yield (
            f"jobs on some of the hosts, as {count} of them, need the files that `tccl export` "
            "makes: default NCCL would connect NICs on different rails there"
        )


def _default_channels(node: ClassRates) -> list[HostChannels]:
    """Return the channels of default NCCL on a host of a class, or of each part that it cuts."""
    if node.default.rate_gbps is not None:
        return [channels_on(node, node.default_rings(node.default))]
    topo = node.view(node.kept.default_settings)
    views = [
        view(topo.machine, topo.knowledge, topo.settings, gpus=tuple(map(index_of, part)))
        for part in sorted(topo.parts, key=lambda part: min(map(index_of, part)))
    ]
    own = [default_rings(part, nodes=2) for part in views]
    return [
        default_channels(part, choice.chains, choice.cross_nic)
        for part, choice in zip(views, own, strict=True)
    ]


def _own_choice(
    name: ChoiceName,
    cluster: Cluster,
    nodes: Sequence[ClassRates],
    defaults: Sequence[Choice],
) -> Choice:
    """Return NCCL's own rings over the hosts in the order given."""
    rate = min(default.rate_gbps or 0.0 for default in defaults)
    if cluster.switches is not None:
        rate = min(rate, uplink_limit(cluster.switches, cluster.names))
    settings = nodes[0].kept.default_settings
    for default in defaults:
        settings = msgspec.structs.replace(
            settings,
            p2p_level=default.settings.p2p_level or settings.p2p_level,
            net_disable_intra=default.settings.net_disable_intra or settings.net_disable_intra,
            cross_nic=default.settings.cross_nic,
        )
    # For each host the ranks of each channel that every class has.
    ranks: list[list[list[int]]] = []
    own = [node.default_rings(default) for node, default in zip(nodes, defaults, strict=True)]
    first, count = 0, min(len(rings.chains) for rings in own)
    for number, host in enumerate(cluster.hosts):
        at = {gpu: first + slot for slot, gpu in enumerate(nodes[host.node_class].gpus)}
        chains = _chains_on(own[host.node_class], number, count)
        ranks.append([[at[gpu] for gpu in own_chain.gpus] for own_chain in chains])
        first += host.slots
    return Choice(
        name=name,
        settings=settings,
        rings=tuple(tuple(chain.from_iterable(parts)) for parts in zip(*ranks, strict=True))
        or None,
        predicted_gbps=rate,
        error=max(default.error for default in defaults),
        assumed=any(default.assumed for default in defaults),
        note=_note(defaults),
    )


def _note(choices: Iterable[Choice]) -> str:
    return next((choice.note for choice in choices if choice.note), "")


def _chains_on(default: DefaultRings, number: int, count: int) -> list[DefaultChain]:
    """Return NCCL's own chains of `count` channels on a host by its number in rank order."""
    swapped = swaps_pairs(default.cross_nic, number, count)
    return [default.chains[channel ^ swapped] for channel in range(count)]


def _notices(cluster: Cluster, best: Candidate, nodes: Sequence[ClassRates]) -> Iterator[str]:
    for node in nodes:
        yield from node.kept.notices
        machine = node.node_class.machine
        names = ", ".join(nic.id for nic in machine.nics if nic.index not in node.nics)
        if names and not cluster.cables:
            yield f"{node.node_class.name}: {names} left out, as too slow or of another kind"
        if not all(nic.has_name for nic in machine.nics if nic.index in node.nics):
            yield (
                f"{node.node_class.name}: its description has no names of NICs, so no variable "
                "tells NCCL which NICs to take"
            )
    most = best.order_bound_gbps
    if most is not None:
        yield f"another order of the hosts may reach up to {most:.2f} GB/s: not all were ruled out"
