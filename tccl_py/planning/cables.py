"""Hosts that cables join: what NCCL's own rings do there, and the chains that jobs may need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import permutations

import msgspec

from tccl_py.merge.cables import steps_between
from tccl_py.model.cluster import Cluster, cabled_nics
from tccl_py.nccl.graph_search import DefaultChain, default_choice_or_sys
from tccl_py.nccl.network import NicPair, routed
from tccl_py.nccl.settings import Settings, environment
from tccl_py.plan.chains import PlanChoice
from tccl_py.plan.tables import ClassRates
from tccl_py.planning.host_rings import pairs_of

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


class _NoCableError(Exception):
    """A connection of NCCL's own rings that no cable carries."""


def choices_along_cables(
    default: PlanChoice,
    variables: PlanChoice,
    cluster: Cluster,
    nodes: Sequence[ClassRates],
    settings: Settings,
) -> tuple[PlanChoice, PlanChoice]:
    """Return default NCCL, and its own rings with the variables of a plan's settings."""
    own: list[Sequence[DefaultChain]] = [node.stock.chains for node in nodes]
    default = _rated(default, cluster, nodes, own, subnet_routing=False)
    if any(map(_excluded, nodes)):
        note = "NCCL takes NICs too that lead to no host of the job"
        default = msgspec.structs.replace(default, rate_gbps=None, note=note)
    changes = {name: getattr(settings, name) for name in _CABLED_SETTINGS}
    under = msgspec.structs.replace(variables.settings, **changes)
    own = [_chains_under(node, settings) for node in nodes]
    variables = _rated(variables, cluster, nodes, own, subnet_routing=True)
    return default, msgspec.structs.replace(variables, settings=under)


def _excluded(node: ClassRates) -> set[str]:
    """Return the names of a class's NICs without a cable, which its own chains leave out."""
    own, nics = node.kept.default_settings, node.node_class.machine.nics
    excludes = own.ib_hca or own.socket_ifname
    return {nic.name for nic in nics if nic.index not in node.nics} if excludes else set()


def _chains_under(node: ClassRates, settings: Settings) -> Sequence[DefaultChain]:
    """Return NCCL's own chains on a host of a class with the NICs that settings name.

    One list holds for all hosts: a NIC with a cable on one may have none on another.
    """
    names = {name.partition(":")[0] for name in (*settings.ib_hca, *settings.socket_ifname)}
    if names.isdisjoint(_excluded(node)):
        return node.stock.chains
    named = {"ib_hca": settings.ib_hca, "socket_ifname": settings.socket_ifname}
    under = msgspec.structs.replace(node.stock.settings, **named)
    return default_choice_or_sys(node.view(under), nodes=2).chains


def _rated(
    choice: PlanChoice,
    cluster: Cluster,
    nodes: Sequence[ClassRates],
    own: Sequence[Sequence[DefaultChain]],
    *,
    subnet_routing: bool,
) -> PlanChoice:
    """Return NCCL's own rings over hosts in the order given, with the rate that cables let them.

    `own` are its chains on hosts of each class. The rate is None, with a note, where NCCL would
    connect functions that no cable joins.
    """
    try:
        chains = [own[host.node_class] for host in cluster.hosts]
        used = own_pairs(cluster, chains, subnet_routing=subnet_routing)
    except _NoCableError as error:
        return msgspec.structs.replace(choice, rate_gbps=None, note=str(error))
    rates = []
    for host, pairs in zip(cluster.hosts, used, strict=True):
        node = nodes[host.node_class]
        default_settings = node.stock.settings
        under = msgspec.structs.replace(default_settings, channels=len(pairs))
        rated = node.between(under, pairs_of(*zip(*pairs, strict=True)))
        if rated is None:
            note = f"no chains by these NICs of {host.name} were rated"
            return msgspec.structs.replace(choice, rate_gbps=None, note=note)
        rates.append(rated.rate_gbps)
        if len(node.gpus) > 1 and choice.rate_gbps is not None:
            # These are the best chains between the NICs; NCCL's own are no faster than rated.
            rates.append(choice.rate_gbps)
    return msgspec.structs.replace(choice, rate_gbps=min(rates))


def own_pairs(
    cluster: Cluster, default_chains: Sequence[Sequence[DefaultChain]], *, subnet_routing: bool
) -> list[list[NicPair]]:
    """Return the NICs in and out of each channel of NCCL's own chains, for each host."""
    steps, hosts = steps_between(cluster.cables), cluster.hosts
    crossings: list[list[NicPair]] = []
    for number, host in enumerate(hosts):
        following = (number + 1) % len(hosts)
        step = steps.get((host.name, hosts[following].name), ())
        ways = []
        for chain, into in zip(default_chains[number], default_chains[following], strict=False):
            way = routed(_sends_by(chain), into.entry, step, subnet_routing=subnet_routing)
            if way is None:
                ends = f"{host.name} N{_sends_by(chain)} and {hosts[following].name} N{into.entry}"
                raise _NoCableError(f"NCCL would connect {ends}, which no cable joins")
            ways.append(way)
        crossings.append(ways)
    return [
        [(into, out) for (_, into), (out, _) in zip(crossings[number - 1], ways, strict=False)]
        for number, ways in enumerate(crossings)
    ]


def _sends_by(chain: DefaultChain) -> int:
    """Return the NIC by which NCCL would leave a host: of one GPU, that of the entry."""
    return chain.exit if len(chain.gpus) > 1 else chain.entry


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
        lost = {nic for nic in nics[a] if routed(nic, nic, step, subnet_routing=True) is None}
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
