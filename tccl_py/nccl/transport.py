"""Transports that NCCL takes for pairs of GPUs, and the hops that settings leave to a search.

Source: p2p.cc and shm.cc of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Literal

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.rings import Hop, HopSpace, direct_read, direct_write
from tccl_py.model.transfer import DEFAULT_FIFO_BYTES, Fifo, Flow, Place, Side, Transfer
from tccl_py.nccl.settings import CopyEngineSide, Settings, check_settings, environment_text
from tccl_py.nccl.system import PathType
from tccl_py.nccl.versions import ASSUMED, Level, version_facts
from tccl_py.nccl.view import NcclView, view

MechanismKind = Literal["write", "read", "bounce", "network"]
TRANSPORTS = {"write": "P2P", "read": "P2P", "bounce": "SHM", "network": "NET"}
"""Each mechanism's name in NCCL's log."""
_READS_ON_NVLINK = 80
"""Only between two GPUs of this sm does NCCL read over NVLink unasked."""


def pair_mechanism(topo: NcclView, source: int, target: int) -> MechanismKind:
    """Return how NCCL moves bytes from GPU `source` to GPU `target`; `network` is over NICs."""
    pair = (f"G{source}", f"G{target}")
    if source == target or not all(gpu in topo.system.sm for gpu in pair):
        fault, right = "is no pair of the communicator's GPUs", ", ".join(topo.system.gpus)
        raise InputError(f"hop from GPU {source} to GPU {target}", fault, f"choose two of {right}")
    if pair in topo.by_network:
        return "network"
    if pair not in topo.direct:
        return "bounce"
    return "read" if not topo.settings.p2p_copy_engine and _reads(topo, pair) else "write"


def _copy_engines(settings: Settings, kind: MechanismKind) -> tuple[Side, ...]:
    """Return the ends of a hop that use a copy engine."""
    if kind == "write":
        return ("sender",) if settings.p2p_copy_engine else ()
    sides: tuple[Side, ...] = ("sender", "receiver")
    chosen = settings.shm_copy_engine if kind == "bounce" else None
    return tuple(side for side in sides if chosen in (side, "both"))


def _reads(topo: NcclView, pair: tuple[str, str]) -> bool:
    if topo.settings.p2p_read is not None:
        return topo.settings.p2p_read
    both_read = all(topo.system.sm[gpu] == _READS_ON_NVLINK for gpu in pair)
    return both_read and topo.plain[pair].type == PathType.NVL


def hop_space(topo: NcclView, *, rings_in_set: int = 1) -> HopSpace:
    """Return one hop per ordered pair, by the mechanism the settings give the pair.

    The space is empty where NCCL would send any pair over NICs: it may then cut the node in parts.
    Every hop is moved by the final channels' blocks, shared evenly by the rings of a set. With
    placement a bounce has a hop for each NUMA node, the sender's own first.
    """
    settings = check_settings(topo.settings)
    if rings_in_set < 1:
        raise InputError("rings_in_set", f"is {rings_in_set}", "a set has at least one ring")
    channels = final_channels(settings, sm=topo.system.sm_min)
    blocks = blocks_of_ring(topo, rings_in_set)
    hops = {}
    for pair in permutations(topo.gpus, 2) if not topo.by_network else ():
        kind = pair_mechanism(topo, *pair)
        hops[pair] = tuple(
            Hop(*pair, mechanism_flow(topo, kind, *pair, blocks=blocks, node=node))
            for node in _nodes(topo, kind, pair[0])
        )
    name = f"nccl {settings.version}, {channels} channels {environment_text(settings)}".rstrip()
    return HopSpace(name=name, gpus=topo.gpus, hops=hops)


def blocks_of_ring(topo: NcclView, rings_in_set: int) -> int:
    """Return the blocks of each hop where the rings of a set share the final channels evenly."""
    return max(1, final_channels(topo.settings, sm=topo.system.sm_min) // rings_in_set)


def final_channels(
    settings: Settings,
    *,
    sm: int | None,
    channels: int | None = None,
    nodes: int = 1,
    speed_intra: float = 0.0,
) -> int:
    """Return the final number of channels for `channels` (None: the settings') of search or file.

    Doubled always; once more from sm 90 on several nodes above 45 GB/s a channel while there are
    fewer than 16 (connect.cc); then limited by the settings.

    >>> final_channels(Settings(channels=8), sm=90)
    16
    """
    limit = version_facts(settings.version).max_final_channels
    count = min(2 * (settings.channels if channels is None else channels), limit)
    if (sm or 0) >= 90 and nodes > 1 and speed_intra > 45 and count < 16:
        count *= 2
    low, high = settings.min_channels or 0, settings.max_channels or limit
    return min(max(min(count, high), low), limit)


def _nodes(topo: NcclView, kind: MechanismKind, source: int) -> tuple[int | None, ...]:
    """Return the NUMA nodes open to a hop's buffer, NCCL's own choice first (None: only this)."""
    if kind != "bounce" or not topo.settings.shm_placement:
        return (None,)
    nearest = topo.machine.numa_of(f"G{source}")
    nodes = [node.index for node in topo.machine.numa_nodes if node.index != nearest]
    return (nearest, *nodes)


def mechanism_flow(
    topo: NcclView,
    kind: MechanismKind,
    source: int,
    target: int,
    *,
    blocks: int,
    node: int | None = None,
) -> Flow:
    """Return the flow of a mechanism.

    A bounce buffer lies on NUMA node `node`, by default that of the allocating GPU.
    NCCL_BUFFSIZE is the size of direct hops' FIFOs too, which lie in GPU memory (p2p.cc).
    """
    start, end = Place("G", source), Place("G", target)
    engines = _copy_engines(topo.settings, kind)
    sender = Place("D", source) if "sender" in engines else start
    receiver = Place("D", target) if "receiver" in engines else end
    size = topo.settings.buffsize
    if kind in ("read", "write"):
        if engines:
            return Flow((Transfer(start, sender, end),), blocks)
        make = direct_read if kind == "read" else direct_write
        return make(source, target, blocks=blocks, fifo=Fifo(bytes=size))
    side = topo.settings.shm_locality
    owner = target if side == "receiver" else source
    host = Place("C", topo.machine.numa_of(f"G{owner}") if node is None else node)
    fifo = Fifo(bytes=size, side=side)
    return Flow((Transfer(start, sender, host), Transfer(host, receiver, end)), blocks, fifo)


# Settings worth searching under: each gives some pair of GPUs another mechanism.


DEFAULT_CHANNELS = (1, 4, 8)
DEFAULT_BUFFSIZES = (DEFAULT_FIFO_BYTES, 512 * 1024)
"""FIFO sizes tried where something bounces: NCCL's default, and a size that gained 1.4 on 4x H200.
"""
_LEVELS: tuple[Level | None, ...] = (None, "SYS", "PHB", "PXB", "PIX", "NVL", "LOC")
_ENGINES: tuple[CopyEngineSide | None, ...] = (None, "both", "sender", "receiver")
_SIDES: tuple[Side, ...] = ("receiver", "sender")


def expressible(version: str = ASSUMED, *, p2p_level: Level | None = None) -> tuple[Settings, ...]:
    """Return every combination of mechanism switches of this NCCL version, defaults first.

    Channels and FIFO size are NCCL's defaults; `p2p_level` fixes the level (None: any).
    """
    facts = version_facts(version)
    engines = _ENGINES if facts.shm_copy_engine else (None,)
    levels = _LEVELS if p2p_level is None else (p2p_level,)
    fields = "p2p_level p2p_read p2p_copy_engine shm_locality shm_copy_engine net_disable_intra"
    choices = product(levels, (None, True, False), (False, True), _SIDES, engines, (False, True))
    switches = (dict(zip(fields.split(), choice, strict=True)) for choice in choices)
    return tuple(msgspec.convert({"version": version, **chosen}, Settings) for chosen in switches)


def candidates(
    machine: Machine,
    knowledge: Knowledge,
    version: str = ASSUMED,
    *,
    gpus: Sequence[int] | None = None,
    channels: Sequence[int] = DEFAULT_CHANNELS,
    buffsizes: Sequence[int] = DEFAULT_BUFFSIZES,
    p2p_level: Level | None = None,
) -> tuple[Settings, ...]:
    """Return settings under which the pairs' mechanisms differ, for every number of channels.

    Of settings with equal outcome the first is returned, which departs least from NCCL's defaults;
    FIFO sizes vary only where a pair bounces. `p2p_level` fixes the level (None: any).
    """
    distinct: dict[tuple[object, ...], tuple[Settings, bool]] = {}
    views: dict[tuple[Level | None, bool], NcclView] = {}
    for settings in expressible(version, p2p_level=p2p_level):
        # No other switch changes the paths, and defaults come first.
        key = settings.p2p_level, settings.net_disable_intra
        if key not in views:
            views[key] = view(machine, knowledge, settings, gpus=gpus)
        topo = replace(views[key], settings=settings)
        outcome = tuple(_outcome(topo, pair) for pair in permutations(topo.gpus, 2))
        bounces = any(kind == "bounce" for kind, _, _ in outcome)
        distinct.setdefault(outcome, (settings, bounces))
    return tuple(
        check_settings(msgspec.structs.replace(settings, channels=count, buffsize=size))
        for settings, bounces in distinct.values()
        for count, size in product(channels, buffsizes if bounces else buffsizes[:1])
    )


def _outcome(
    topo: NcclView, pair: tuple[int, int]
) -> tuple[MechanismKind, tuple[Side, ...], int | None]:
    """Return what settings change: the mechanism, and the NUMA node of a bounce's buffer."""
    kind = pair_mechanism(topo, *pair)
    owner = pair[topo.settings.shm_locality == "receiver"]
    node = topo.machine.numa_of(f"G{owner}") if kind == "bounce" else None
    return kind, _copy_engines(topo.settings, kind), node
