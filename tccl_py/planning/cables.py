"""Hosts that cables or rails join: what NCCL's own rings and trees do there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, permutations, starmap

import msgspec

from tccl_py.merge.cables import steps_between
from tccl_py.model.cluster import Cluster, cabled_nics
from tccl_py.nccl.connections import (
    Connection,
    HostChannels,
    default_channels,
    ring_connections,
    tree_connections,
)
from tccl_py.nccl.graph_search import DefaultRings
from tccl_py.nccl.network import NicPair, route_nics
from tccl_py.nccl.settings import Settings, environment
from tccl_py.plan.chains import MOST_FAILING, Choice, FailingPair, Failure
from tccl_py.plan.tables import ClassRates, pairs_of

CANNOT_CONNECT = "cannot connect"
"""The verdict on a choice with which NCCL would join NICs that do not reach each other."""
_NAMED = 4
_REASONS = {
    "NCCL_IB_SUBNET_AWARE_ROUTING": "=1 (from NCCL 2.30.7 on) sends by the NIC of the cable",
    "NCCL_IB_MERGE_NICS": "=0 leaves each NIC its own subnet",
    "NCCL_IB_HCA": " fixes the numbers of NICs",
    "NCCL_SOCKET_IFNAME": " fixes the numbers of NICs",
    "NCCL_CROSS_NIC": " lets rings enter and leave by different ports",
    "NCCL_ALGO": "=Ring keeps to neighbours, as trees do not",
}

_CABLED_SETTINGS = (
    "cross_nic",
    "ib_hca",
    "socket_ifname",
    "subnet_routing",
    "subnet_prefix",
    "algo",
)


def failing(choice: Choice, cluster: Cluster, channels: Sequence[Sequence[HostChannels]]) -> Choice:
    """Return a choice with these channels, which fails where NCCL would connect NICs in vain.

    `channels` has a host's for each class: one, or one for each part in which NCCL cuts the host.
    """
    if choice.fails or not (cluster.cables or cluster.rails == "only"):
        return choice
    nodes = [(host, part) for host in cluster.hosts for part in channels[host.node_class]]
    names, hosts = [host.name for host, _ in nodes], [part for _, part in nodes]
    classes = [cluster.classes[host.node_class] for host, _ in nodes]
    steps, routing = steps_between(cluster.cables), choice.settings.subnet_routing

    def carries(link: Connection) -> bool:
        if not cluster.cables:
            return classes[link.host].rail(link.nic) == classes[link.peer].rail(link.far)
        return _way(link, steps, names, subnet_routing=routing) is not None

    graphs = {"NCCL": chain.from_iterable(ring_connections(hosts))}
    if not choice.settings.algo:
        graphs["NCCL's trees"] = chain(tree_connections(hosts))
    for graph, connections in graphs.items():
        broken = dict.fromkeys(link for link in connections if not carries(link))
        if broken:
            ends = [
                (f"{names[link.host]} N{link.nic}", f"{names[link.peer]} N{link.far}")
                for link in islice(broken, MOST_FAILING)
            ]
            why = "no cable joins" if cluster.cables else "are on different rails"
            note = f"{graph} would connect {' and '.join(ends[0])}, which {why}"
            pairs = tuple(starmap(FailingPair, ends))
            failure = Failure(verdict=CANNOT_CONNECT, pairs=pairs)
            return msgspec.structs.replace(choice, predicted_gbps=None, note=note, fails=failure)
    return choice


def channels_on(node: ClassRates, own: Choice | DefaultRings) -> list[HostChannels]:
    """Return NCCL's own channels on a host of a class, which it does not cut."""
    rings = node.default_rings(own) if isinstance(own, Choice) else own
    return [default_channels(node.view(rings.settings), rings.chains, rings.cross_nic)]


def choices_along_cables(
    default: Choice,
    variables: Choice,
    cluster: Cluster,
    nodes: Sequence[ClassRates],
    settings: Settings,
) -> tuple[Choice, Choice]:
    """Return default NCCL, and its own rings with the variables of a plan's settings."""
    own = [channels_on(node, node.rated_default) for node in nodes]
    default = _rate(default, cluster, nodes, own)
    if any(map(_excludes, nodes)):
        note = "NCCL takes NICs too that lead to no host of the job"
        fails = default.fails or Failure(verdict=CANNOT_CONNECT)
        default = msgspec.structs.replace(default, predicted_gbps=None, note=note, fails=fails)
    changes = {name: getattr(settings, name) for name in _CABLED_SETTINGS}
    under = msgspec.structs.replace(variables.settings, **changes)
    variables = msgspec.structs.replace(variables, settings=under)
    return default, _rate(variables, cluster, nodes, own)


def _excludes(node: ClassRates) -> bool:
    """Return whether a class's own chains leave out NICs, which have no cable."""
    own, nics = node.kept.default_settings, node.node_class.machine.nics
    return len(nics) > len(node.nics) and bool(own.ib_hca or own.socket_ifname)


def _rate(
    choice: Choice,
    cluster: Cluster,
    nodes: Sequence[ClassRates],
    own: Sequence[Sequence[HostChannels]],
) -> Choice:
    """Return NCCL's own rings over hosts in the order given, with the rate that cables let them.

    `own` are its channels on hosts of each class. The choice fails where NCCL would connect
    functions that no cable joins.
    """
    choice = failing(choice, cluster, own)
    if choice.fails:
        return choice
    hosts = [channels for host in cluster.hosts for channels in own[host.node_class]]
    used = own_pairs(cluster, hosts, subnet_routing=choice.settings.subnet_routing)
    rates = []
    for host, pairs in zip(cluster.hosts, used, strict=True):
        node = nodes[host.node_class]
        default_settings = node.rated_default.settings
        under = msgspec.structs.replace(default_settings, channels=len(pairs))
        rated = node.between(under, pairs_of(*zip(*pairs, strict=True)))
        if rated is None:
            note = f"no chains by these NICs of {host.name} were rated"
            return msgspec.structs.replace(choice, predicted_gbps=None, note=note)
        rates.append(rated.rate_gbps)
        if len(node.gpus) > 1 and choice.rate_gbps is not None:
            # These are the best chains between the NICs; NCCL's own are no faster than rated.
            rates.append(choice.rate_gbps)
    return msgspec.structs.replace(choice, predicted_gbps=min(rates))


def own_pairs(
    cluster: Cluster, hosts: Sequence[HostChannels], *, subnet_routing: bool
) -> list[list[NicPair]]:
    """Return the NICs in and out of each channel's ring along cables, for each host."""
    steps, names = steps_between(cluster.cables), cluster.names
    crossings = [
        [
            way
            for link in links
            if (way := _way(link, steps, names, subnet_routing=subnet_routing)) is not None
        ]
        for links in ring_connections(hosts)
    ]
    return [
        [(into, out) for (_, into), (out, _) in zip(crossings[number - 1], ways, strict=True)]
        for number, ways in enumerate(crossings)
    ]


def _way(
    link: Connection,
    steps: Mapping[tuple[str, str], Sequence[NicPair]],
    names: Sequence[str],
    *,
    subnet_routing: bool,
) -> NicPair | None:
    """Return the NICs of a connection along cables; None where none joins its ends."""
    step = steps.get((names[link.host], names[link.peer]), ())
    return route_nics(link.nic, link.far, step, subnet_routing=subnet_routing)


def notices_of_cables(cluster: Cluster, settings: Settings) -> Iterator[str]:
    """Yield why hosts that cables join need the variables set, and what NCCL cannot do there."""
    if not cluster.cables:
        return
    variables = environment(settings)
    yield ", ".join(f"{name}{why}" for name, why in _REASONS.items() if name in variables)
    steps = steps_between(cluster.cables)
    pairs = list(permutations(cluster.names, 2))
    if gaps := [f"{a} and {b}" for a, b in pairs if a < b and (a, b) not in steps]:
        yield (
            f"no cable joins {_few(gaps)}: send/recv and all-to-all between them fail, as do all "
            "jobs with NCCL_RUNTIME_CONNECT=0 or NCCL_CUMEM_ENABLE=0, which connect trees too"
        )
    yield from facing_ports(cluster)
    yield from _doubtful_ports(cluster)


def _doubtful_ports(cluster: Cluster) -> Iterator[str]:
    """Yield where a cable has functions of two ports, or half of a port's.

    A port's functions have the same place on buses of several PCI domains.
    """
    joined, halves = [], []
    used = {(host, nic) for host, nic, _ in cabled_nics(cluster.cables)}
    for end in chain.from_iterable(cable.ends for cable in cluster.cables):
        nics = cluster.classes[cluster.host_classes[end.host]].machine.nics
        names = {nic.index: f"{nic.name} of {end.host}" for nic in nics}
        ports = {nic.index: nic.bus_id.partition(":")[2] for nic in nics if nic.bus_id}
        own = {ports.get(nic, "") for nic in end.nics}
        if len(own) > 1 and "" not in own:
            joined.append(" and ".join(names[nic] for nic in end.nics))
        for nic, port in ports.items():
            if own == {port} and (end.host, nic) not in used:
                halves.append(names[nic])
    if joined:
        yield f"one cable has functions of two ports: {_few(joined, '; ')}"
    if halves:
        yield f"half of a port stays unused, since no cable has {_few(sorted(set(halves)))}"


def facing_ports(cluster: Cluster) -> Iterator[str]:
    """Yield between which hosts send/recv fails, if any, and by which NICs.

    NCCL numbers NICs of both hosts alike for send and receive, unlike those of rings.
    """
    steps, nics = steps_between(cluster.cables), defaultdict[str, list[int]](list)
    for host, nic, _ in cabled_nics(cluster.cables):
        nics[host].append(nic)
    facing = []
    for (a, b), step in steps.items():
        machine = cluster.classes[cluster.host_classes[a]].machine
        lost = {nic for nic in nics[a] if route_nics(nic, nic, step, subnet_routing=True) is None}
        if lost:
            names = ", ".join(nic.name for nic in machine.nics if nic.index in lost)
            facing.append(f"{a} to {b} by {names}")
    if facing:
        yield (
            f"NCCL names NICs of one number at both ends of send/recv, which fails from "
            f"{_few(facing, '; ')}; with two ports join port 0 of each host to port 1 of the next"
        )


def _few(names: Sequence[str], by: str = ", ") -> str:
    return by.join(names[:_NAMED]) + (f"{by}..." if len(names) > _NAMED else "")
