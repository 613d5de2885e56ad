"""The settings worth searching under: each makes some pair of GPUs talk in another way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations, product

import msgspec

from tccl_py.errors import SearchError
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine
from tccl_py.model.paths import PathType
from tccl_py.model.rings import HopSpace, Ring, ring
from tccl_py.model.transfer import DEFAULT_FIFO_BYTES, Side
from tccl_py.nccl.paths import Direction
from tccl_py.nccl.settings import CopyEngineSide, Settings, check_settings, final_channels
from tccl_py.nccl.transport import (
    Mechanism,
    View,
    entry_flow,
    exit_flow,
    hop_space,
    net_path,
    open_ends,
    pair_mechanism,
    view,
)
from tccl_py.nccl.versions import LATEST, Level, version_facts
from tccl_py.search.chains import WORLD, chain_space, entry, entry_nic, exit_nic, leave

DEFAULT_CHANNELS = (1, 4, 8)
DEFAULT_BUFFSIZES = (DEFAULT_FIFO_BYTES, 512 * 1024)
"""FIFO sizes tried where something bounces: NCCL's default, and what gained 1.4 on 4x H200."""

_LEVELS: tuple[Level | None, ...] = (None, "SYS", "PHB", "PXB", "PIX", "NVL", "LOC")
_ENGINES: tuple[CopyEngineSide | None, ...] = (None, "both", "sender", "receiver")
_SIDES: tuple[Side, ...] = ("receiver", "sender")


def expressible(version: str = LATEST, *, p2p_level: Level | None = None) -> tuple[Settings, ...]:
    """Every combination of mechanism switches that this version of NCCL takes, defaults first.

    `p2p_level` is one that all of them have; None is any.

    Channels and FIFO size are left at their defaults; whether a machine tells two of them apart is
    another question, see `candidates`.
    """
    engines = _ENGINES if version_facts(version).shm_copy_engine else _ENGINES[:1]
    copies = (False, True) if version_facts(version).p2p_copy_engine else (False,)
    levels = _LEVELS if p2p_level is None else (p2p_level,)
    choices = product(levels, (None, True, False), copies, _SIDES, engines, (False, True))
    return tuple(
        Settings(
            version=version,
            p2p_level=level,
            p2p_read=read,
            p2p_copy_engine=copy,
            shm_locality=side,
            shm_copy_engine=engine,
            net_disable_intra=off,
        )
        for level, read, copy, side, engine, off in choices
    )


def candidates(
    machine: Machine,
    knowledge: Knowledge,
    version: str = LATEST,
    *,
    gpus: Sequence[int] | None = None,
    channels: Sequence[int] = DEFAULT_CHANNELS,
    buffsizes: Sequence[int] = DEFAULT_BUFFSIZES,
    p2p_level: Level | None = None,
) -> tuple[Settings, ...]:
    """Settings under which the pairs' mechanisms differ, for every number of channels.

    Of settings that come to the same, sides of a bounce on one NUMA node among them, the first is
    kept, which departs least from NCCL's defaults; FIFO sizes vary only where a pair bounces.
    `p2p_level` is one that all of them have; None is any.

    Raises:
        InputError: unknown GPUs, or channels or sizes out of range.
    """
    distinct: dict[tuple[Mechanism, ...], Settings] = {}
    views: dict[tuple[Level | None, bool], _Pairs] = {}
    for settings in expressible(version, p2p_level=p2p_level):
        pairs = _pairs(machine, knowledge, settings, gpus, views)
        distinct.setdefault(_outcome(machine, pairs, settings), settings)
    found = []
    for ways, settings in distinct.items():
        bounces = any(way.kind == "bounce" for way in ways)
        for count, size in product(channels, buffsizes if bounces else buffsizes[:1]):
            chosen = msgspec.structs.replace(settings, channels=count, buffsize=size)
            found.append(check_settings(chosen))
    return tuple(found)


_Pairs = dict[tuple[int, int], tuple[Mechanism, bool]]
"""A pair -> its mechanism without switches, and whether it would read unasked."""


def _pairs(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings,
    gpus: Sequence[int] | None,
    known: dict[tuple[Level | None, bool], _Pairs],
) -> _Pairs:
    """Mechanisms as far as levels and the network decide them; views are costly and few."""
    plain = Settings(
        version=settings.version,
        p2p_level=settings.p2p_level,
        net_disable_intra=settings.net_disable_intra,
    )
    key = settings.p2p_level, settings.net_disable_intra
    if key not in known:
        seen = view(machine, knowledge, plain, gpus=gpus)
        order = sorted(int(gpu[1:]) for gpu in seen.system.gpus)
        ways = {pair: pair_mechanism(seen, *pair) for pair in permutations(order, 2)}
        known[key] = {pair: (way, way.kind == "read") for pair, way in ways.items()}
    return known[key]


def _outcome(machine: Machine, pairs: _Pairs, settings: Settings) -> tuple[Mechanism, ...]:
    """What the switches make of the pairs; `path` is a bounce's NUMA node, and nothing else."""
    ways = []
    for (source, target), (way, reads) in pairs.items():
        if way.kind == "bounce":
            owner = source if settings.shm_locality == "sender" else target
            ways.append(_bouncing(settings, f"C{machine.numa_of(f'G{owner}')}"))
        else:
            ways.append(_direct(way, reads, settings))
    return tuple(ways)


def _bouncing(settings: Settings, host: str) -> Mechanism:
    ends: dict[CopyEngineSide | None, tuple[Side, ...]] = {
        None: (),
        "both": _SIDES,
        "sender": ("sender",),
        "receiver": ("receiver",),
    }
    engines = ends[settings.shm_copy_engine]
    return Mechanism(kind="bounce", path=host, gbps=0.0, copy_engines=engines)


def _direct(way: Mechanism, reads: bool, settings: Settings) -> Mechanism:
    if way.kind == "network":
        return Mechanism(kind="network", path="", gbps=0.0)
    if settings.p2p_copy_engine:
        return Mechanism(kind="write", path="", gbps=0.0, copy_engines=("sender",))
    wanted = reads if settings.p2p_read is None else settings.p2p_read
    return Mechanism(kind="read" if wanted else "write", path="", gbps=0.0)


# The hops that settings leave to chains: those inside a node, its entries and its exits.


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
