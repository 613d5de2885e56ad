"""Default NCCL's choice: ring orders, channels, and the rate NCCL expects of them.

Source: ncclTopoCompute (search.cc) and ncclTopoPostset (connect.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.nccl.graph_search import search_ring, search_tree
from tccl_py.nccl.settings import Settings, final_channels
from tccl_py.nccl.view import NcclView, view


class DefaultChain(NamedTuple):
    """One channel on one node: in by NIC `entry`, along the GPUs, out by NIC `exit`."""

    entry: int
    gpus: tuple[int, ...]
    exit: int


class DefaultChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Default NCCL's choice on one node, or on each of several equal nodes.

    `rings` has one GPU order a searched channel, `chains` those of several nodes that run. The
    final `channels` are no more than the tree has, then doubled. Rates are GB/s of a channel inside
    a node and between nodes. `fallback` is true where the search found nothing and NCCL took its
    simple order, `assumed_sys` where it found nothing without NCCL_P2P_LEVEL=SYS.
    """

    rings: tuple[tuple[int, ...], ...]
    chains: tuple[DefaultChain, ...] = ()
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

    Raises:
        InputError: several nodes without a NIC that the settings allow.
    """
    if nodes > 1 and not seen.system.nets:
        where = f"default NCCL on {nodes} nodes of {seen.machine.name}"
        raise InputError(where, "has no network to use", "give a NIC that the settings allow")
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
    used = min(count, trees)
    rings = tuple(tuple(int(gpu[1:]) for gpu in order) for order in ring.orders)
    ends = [(int(entry[1:]), int(leave[1:])) for entry, leave in ring.ports if nodes > 1][:used]
    chains = tuple(
        DefaultChain(entry, order, leave)
        for order, (entry, leave) in zip(rings, ends, strict=False)
    )
    return DefaultChoice(
        rings=rings,
        chains=tuple(
            DefaultChain(pair[0], gpus, pair[1]) for gpus, pair in zip(rings, ends, strict=False)
        ),
        bw_intra=ring.rate_intra,
        bw_inter=ring.rate_inter,
        type_intra=ring.type_intra.name,
        type_inter=ring.type_inter.name,
        cross_nic=ring.cross_nic,
        channels=final_channels(
            used,
            sm=seen.system.sm_min,
            nodes=nodes,
            speed_intra=ring.rate_intra,
            version=settings.version,
        ),
        settings=settings,
        fallback=ring.fallback,
    )


def default_choice_or_sys(seen: NcclView, *, nodes: int) -> DefaultChoice:
    """Return the choice of a plan's baseline: under NCCL_P2P_LEVEL=SYS where only that helps.

    A P2P level among the view's settings stays.
    """
    choice = default_choice(seen, nodes=nodes)
    if not choice.fallback or seen.settings.p2p_level is not None:
        return choice
    wider = replace(seen.settings, p2p_level="SYS")
    wide = default_choice(view(seen.machine, seen.knowledge, wider, gpus=seen.gpus), nodes=nodes)
    return choice if wide.fallback else replace(wide, assumed_sys=True)
