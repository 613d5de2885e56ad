"""Settings worth searching under: each gives some pair of GPUs another mechanism."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

import msgspec

from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.transfer import DEFAULT_FIFO_BYTES, Side
from tccl_py.nccl.settings import CopyEngineSide, Settings, check_settings
from tccl_py.nccl.transport import Mechanism, pair_mechanism
from tccl_py.nccl.versions import LATEST, Level, version_facts
from tccl_py.nccl.view import view

DEFAULT_CHANNELS = (1, 4, 8)
DEFAULT_BUFFSIZES = (DEFAULT_FIFO_BYTES, 512 * 1024)
"""FIFO sizes tried where something bounces: NCCL's default, and a size that gained 1.4 on 4x H200.
"""
_LEVELS: tuple[Level | None, ...] = (None, "SYS", "PHB", "PXB", "PIX", "NVL", "LOC")
_ENGINES: dict[CopyEngineSide | None, tuple[Side, ...]] = {
    None: (),
    "both": ("receiver", "sender"),
    "sender": ("sender",),
    "receiver": ("receiver",),
}
_SIDES: tuple[Side, ...] = ("receiver", "sender")

_Pairs = dict[tuple[int, int], Mechanism]


def expressible(version: str = LATEST, *, p2p_level: Level | None = None) -> tuple[Settings, ...]:
    """Return every combination of mechanism switches of this NCCL version, defaults first.

    Channels and FIFO size are NCCL's defaults; `p2p_level` fixes the level (None: any).
    """
    facts = version_facts(version)
    engines = list(_ENGINES) if facts.shm_copy_engine else [None]
    copies = (False, True) if facts.p2p_copy_engine else (False,)
    levels = _LEVELS if p2p_level is None else (p2p_level,)
    fields = "p2p_level p2p_read p2p_copy_engine shm_locality shm_copy_engine net_disable_intra"
    choices = product(levels, (None, True, False), copies, _SIDES, engines, (False, True))
    each = (dict(zip(fields.split(), choice, strict=True)) for choice in choices)
    return tuple(msgspec.convert({"version": version, **chosen}, Settings) for chosen in each)


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
    """Return settings under which the pairs' mechanisms differ, for every number of channels.

    Of settings with equal outcome the first is returned, which departs least from NCCL's defaults;
    FIFO sizes vary only where a pair bounces. `p2p_level` fixes the level (None: any).
    """
    distinct: dict[tuple[Mechanism, ...], Settings] = {}
    known: dict[tuple[Level | None, bool], _Pairs] = {}
    for settings in expressible(version, p2p_level=p2p_level):
        key = settings.p2p_level, settings.net_disable_intra
        if key not in known:
            plain = Settings(version=version, p2p_level=key[0], net_disable_intra=key[1])
            seen = view(machine, knowledge, plain, gpus=gpus)
            known[key] = {p: pair_mechanism(seen, *p) for p in permutations(seen.gpus, 2)}
        outcome = tuple(
            _switched(machine, mechanism, settings, pair) for pair, mechanism in known[key].items()
        )
        distinct.setdefault(outcome, settings)
    found = []
    for outcome, settings in distinct.items():
        bounces = any(mechanism.kind == "bounce" for mechanism in outcome)
        for count, size in product(channels, buffsizes if bounces else buffsizes[:1]):
            chosen = msgspec.structs.replace(settings, channels=count, buffsize=size)
            found.append(check_settings(chosen))
    return tuple(found)


def _switched(
    machine: Machine, default: Mechanism, settings: Settings, pair: tuple[int, int]
) -> Mechanism:
    """Return the mechanism under switches; `path` is a bounce's NUMA node, and nothing else."""
    if default.kind == "network":
        return Mechanism(kind="network", path="", gbps=0.0)
    if default.kind == "bounce":
        owner = pair[0] if settings.shm_locality == "sender" else pair[1]
        engines = _ENGINES[settings.shm_copy_engine]
        host = f"C{machine.numa_of(f'G{owner}')}"
        return Mechanism(kind="bounce", path=host, gbps=0.0, copy_engines=engines)
    if settings.p2p_copy_engine:
        return Mechanism(kind="write", path="", gbps=0.0, copy_engines=("sender",))
    reads = default.kind == "read" if settings.p2p_read is None else settings.p2p_read
    return Mechanism(kind="read" if reads else "write", path="", gbps=0.0)
