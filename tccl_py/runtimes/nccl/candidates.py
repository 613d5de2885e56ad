"""The settings worth searching under: each makes some pair of GPUs talk in another way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

import msgspec

from tccl_py.runtimes.nccl.settings import CopyEngineSide, Settings, check_settings
from tccl_py.runtimes.nccl.transport import Mechanism, pair_mechanism, view
from tccl_py.runtimes.nccl.versions import LATEST, Level, version_facts
from tccl_py.topology.knowledge import Knowledge
from tccl_py.topology.machine import Machine
from tccl_py.transfers.transfer import DEFAULT_FIFO_BYTES, Side

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
