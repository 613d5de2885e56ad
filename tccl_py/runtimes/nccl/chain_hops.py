"""The hops that settings leave to chains: those inside a node, its entries and its exits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import msgspec

from tccl_py.chains.space import WORLD, chain_space, entry, entry_nic, exit_nic, leave
from tccl_py.errors import SearchError
from tccl_py.runtimes.nccl.gpu_direct import Direction
from tccl_py.runtimes.nccl.landing import entry_flow, exit_flow, net_path, open_ends
from tccl_py.runtimes.nccl.settings import Settings, final_channels
from tccl_py.runtimes.nccl.transport import View, hop_space, view
from tccl_py.runtimes.nccl.versions import Level
from tccl_py.topology.knowledge import Knowledge
from tccl_py.topology.machine import Machine
from tccl_py.topology.paths import PathType
from tccl_py.transfers.hops import HopSpace, Ring, ring

_GDR_LEVELS: tuple[Level | None, ...] = (None, "SYS", "PHB", "PXB", "PIX", "LOC")


def chain_hop_space(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings,
    *,
    nics: Sequence[int] | None = None,
    gpus: Sequence[int] | None = None,
    chains_in_set: int = 1,
) -> HopSpace:
    """One hop per pair of GPUs, and one between each GPU and the world by every NIC.

    Nearest NICs come first, so that what is tried first is what NCCL itself would take. As in
    `hop_space`, the final channels' blocks are shared evenly by the chains of a set.

    Args:
        machine: the node.
        knowledge: what is known of it.
        settings: process-wide; they decide where bytes land.
        nics: indices of the NICs to use; None is all that the settings let NCCL use.
        gpus: NVML indices; None is all.
        chains_in_set: how many chains run together.

    Raises:
        InputError: settings the version does not have, unknown GPUs.
        SearchError: there is no NIC.
    """
    inner = hop_space(machine, knowledge, settings, gpus=gpus, rings_in_set=chains_in_set)
    seen = view(machine, knowledge, settings, gpus=gpus)
    channels = final_channels(settings.channels, sm=seen.system.sm_min, version=settings.version)
    blocks = max(1, channels // chains_in_set)
    ends = [(gpu, nic) for gpu, nic in open_ends(seen) if nics is None or nic in nics]
    if not ends:
        raise SearchError(f"machine {machine.name} has no NIC for a chain to enter or leave by")

    def nearest(direction: Direction) -> list[tuple[int, int]]:
        def distance(end: tuple[int, int]) -> tuple[PathType, int, int]:
            return net_path(seen, *end, direction), abs(end[0] - end[1]), end[1]

        return sorted(ends, key=distance)

    return chain_space(
        inner,
        [
            entry(gpu, entry_flow(machine, knowledge, settings, nic, gpu, blocks=blocks, gpus=gpus))
            for gpu, nic in nearest("receive")
        ],
        [
            leave(gpu, exit_flow(machine, knowledge, settings, gpu, nic, blocks=blocks, gpus=gpus))
            for gpu, nic in nearest("send")
        ],
    )


def farthest_end(seen: View, ends: Sequence[tuple[int, int, int, int]]) -> PathType:
    """The farthest path between a NIC and a GPU among chains' ends, as typeinter counts it.

    An end is (first GPU, entry NIC, last GPU, exit NIC).
    """
    types = [
        kind
        for first, entry_nic, last, exit_nic in ends
        for kind in (
            net_path(seen, first, entry_nic, "receive"),
            net_path(seen, last, exit_nic, "send"),
        )
    ]
    return max(types)


def chains_as_rings(
    space: HopSpace, chains: Sequence[tuple[int, Sequence[int], int]]
) -> tuple[Ring, ...]:
    """Chains named by entry NIC, GPUs in order and exit NIC as rings through the world.

    Raises:
        SearchError: the space lacks a hop of one of them.
    """
    return tuple(_as_ring(space, *chain) for chain in chains)


def _as_ring(space: HopSpace, entered: int, gpus: Sequence[int], left: int) -> Ring:
    into = [hop for hop in space.between(WORLD, gpus[0]) if entry_nic(hop) == entered]
    out = [hop for hop in space.between(gpus[-1], WORLD) if exit_nic(hop) == left]
    inner = [space.between(one, other)[:1] for one, other in pairwise(gpus)]
    if not into or not out or not all(inner):
        raise SearchError(f"{space.name}: no chain by NIC {entered}, GPUs {gpus}, NIC {left}")
    return ring([into[0], *(choices[0] for choices in inner), out[0]])


def network_candidates(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings,
    *,
    gpus: Sequence[int],
    nics: Sequence[int],
) -> tuple[Settings, ...]:
    """Settings that change where bytes land between GPUs and NICs, and nothing else.

    Of settings that come to the same landings the first is kept, which departs least from NCCL's
    defaults; those that come to the landings of `settings` are left out.
    """
    distinct: dict[tuple[str, ...], Settings] = {}
    for level, read in product(_GDR_LEVELS, (None, True, False)):
        changed = msgspec.structs.replace(settings, net_gdr_level=level, net_gdr_read=read)
        ends = tuple(
            str(flow)
            for gpu, nic in product(gpus, nics)
            for flow in (
                entry_flow(machine, knowledge, changed, nic, gpu, blocks=1, gpus=gpus),
                exit_flow(machine, knowledge, changed, gpu, nic, blocks=1, gpus=gpus),
            )
        )
        distinct.setdefault(ends, changed)
    return tuple(distinct.values())[1:]
