"""Default NCCL's choice: ring orders, channels, and the rate NCCL expects of them.

Source: ncclTopoCompute (search.cc) and ncclTopoPostset (connect.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

import functools

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.nccl.graph_search import search_ring, search_tree
from tccl_py.nccl.settings import Settings, final_channels
from tccl_py.nccl.view import NcclView, view


class DefaultChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Default NCCL's choice; `rings` has one GPU order a searched channel, `bw_intra` GB/s of each.

    `channels` is the final number: no more than the tree has, then doubled. `fallback` is true
    where the search found nothing and NCCL took its simple order.
    """

    rings: tuple[tuple[int, ...], ...]
    nchannels: int
    bw_intra: float
    type_intra: str
    channels: int
    settings: Settings
    fallback: bool = False


class DefaultChain(msgspec.Struct, frozen=True, kw_only=True):
    """One channel on one node: in by NIC `entry`, along the GPUs, out by NIC `exit`."""

    entry: int
    gpus: tuple[int, ...]
    exit: int


class DefaultChains(msgspec.Struct, frozen=True, kw_only=True):
    """Default NCCL's choice on each of several equal nodes.

    `chains` has one for every searched channel that runs; the final `channels` repeat them. Rates
    are GB/s of a channel inside a node and between nodes. `assumed_sys` is true where the
    search found nothing without NCCL_P2P_LEVEL=SYS.
    """

    chains: tuple[DefaultChain, ...]
    bw_intra: float
    bw_inter: float
    type_intra: str
    type_inter: str
    cross_nic: int
    channels: int
    settings: Settings
    fallback: bool = False
    assumed_sys: bool = False


def default_choice(seen: NcclView, *, nodes: int = 1) -> DefaultChoice:
    """Return default NCCL's choice for a communicator over these GPUs of each of `nodes` nodes.

    Settings count only for paths and transports; channels and buffer size do not.
    """
    return _choice(seen.machine, seen.knowledge, seen.settings, seen.gpus, nodes)


@functools.lru_cache(maxsize=64)  # plans, explanations and subsets ask for the same choices
def _choice(
    machine: Machine, knowledge: Knowledge, settings: Settings, gpus: tuple[int, ...], nodes: int
) -> DefaultChoice:
    seen = view(machine, knowledge, settings, gpus=gpus)
    ring = search_ring(seen, nodes=nodes)
    count = len(ring.orders)
    # A tree always has one channel: for one ring channel there is no need to search.
    trees = len(search_tree(seen, nodes=nodes, channels=count).orders) if count > 1 else 1
    channels = final_channels(
        min(count, trees),
        sm=seen.system.sm_min,
        nodes=nodes,
        speed_intra=ring.rate_intra,
        version=settings.version,
    )
    rings = tuple(tuple(int(gpu[1:]) for gpu in order) for order in ring.orders)
    return DefaultChoice(
        rings=rings,
        nchannels=count,
        bw_intra=ring.rate_intra,
        type_intra=ring.type_intra.name,
        channels=channels,
        settings=settings,
        fallback=ring.fallback,
    )


def default_chains(seen: NcclView, *, nodes: int) -> DefaultChains:
    """Return default NCCL's choice on each of `nodes` equal nodes, NICs included."""
    if nodes < 2 or not seen.system.nets:
        raise InputError(
            f"default NCCL on {nodes} nodes of {seen.machine.name}",
            "has no network to use",
            "give two nodes or more, with a NIC that the settings allow",
        )
    ring = search_ring(seen, nodes=nodes)
    tree = search_tree(seen, nodes=nodes, channels=len(ring.orders))
    count = min(len(ring.orders), len(tree.orders))
    chains = tuple(
        DefaultChain(
            entry=int(ports[0][1:]),
            gpus=tuple(int(gpu[1:]) for gpu in order),
            exit=int(ports[1][1:]),
        )
        for order, ports in zip(ring.orders[:count], ring.ports, strict=False)
    )
    return DefaultChains(
        chains=chains,
        bw_intra=ring.rate_intra,
        bw_inter=ring.rate_inter,
        type_intra=ring.type_intra.name,
        type_inter=ring.type_inter.name,
        cross_nic=ring.cross_nic,
        channels=final_channels(
            count,
            sm=seen.system.sm_min,
            nodes=nodes,
            speed_intra=ring.rate_intra,
            version=seen.settings.version,
        ),
        settings=seen.settings,
        fallback=ring.fallback,
    )


def default_chains_or_sys(seen: NcclView, *, nodes: int) -> DefaultChains:
    """Return the chains of a plan's baseline: under NCCL_P2P_LEVEL=SYS where only that helps.

    A P2P level among the view's settings stays.
    """
    chains = default_chains(seen, nodes=nodes)
    if not chains.fallback or seen.settings.p2p_level is not None:
        return chains
    wider = msgspec.structs.replace(seen.settings, p2p_level="SYS")
    wide = default_chains(view(seen.machine, seen.knowledge, wider, gpus=seen.gpus), nodes=nodes)
    return chains if wide.fallback else msgspec.structs.replace(wide, assumed_sys=True)
