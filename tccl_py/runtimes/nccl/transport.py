"""Which transport NCCL takes for a pair of GPUs, and the hops that settings leave to a search.

Source: ncclTopoCheckP2p and ncclTopoCheckNet (paths.cc), p2p.cc and shm.cc of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Literal

import msgspec

from tccl_py.errors import InputError
from tccl_py.runtimes.nccl.bandwidths import PathType
from tccl_py.runtimes.nccl.paths import DISCONNECTED, Path, Paths, shortest_paths, with_policy
from tccl_py.runtimes.nccl.settings import (
    Settings,
    check_settings,
    environment,
    final_channels,
)
from tccl_py.runtimes.nccl.system import System, build_system
from tccl_py.runtimes.nccl.versions import version_facts
from tccl_py.topology.knowledge import Knowledge
from tccl_py.topology.machine import Machine
from tccl_py.transfers.hops import Hop, HopSpace
from tccl_py.transfers.transfer import Fifo, Flow, Place, Side, Transfer

MechanismKind = Literal["write", "read", "bounce", "network"]

_READS_ON_NVLINK = 80
"""Only between two GPUs of this sm does NCCL read over NVLink unasked."""


class Mechanism(msgspec.Struct, frozen=True, kw_only=True):
    """How NCCL moves bytes from one GPU to the next.

    `side` is where a bounce's buffer lies; `copy_engines` name the ends that use one. `path` and
    `gbps` are what NCCL believes of the way. `network` is a pair it sends over its NICs instead.
    """

    kind: MechanismKind
    path: str
    gbps: float
    side: Side | None = None
    copy_engines: tuple[Side, ...] = ()

    def __str__(self) -> str:
        if self.kind == "network":
            return "NET"
        return f"SHM/bounce@{self.side}" if self.kind == "bounce" else f"P2P/{self.kind}"


@dataclass(frozen=True, slots=True)
class View:
    """A machine as one communicator sees it under given settings."""

    system: System
    knowledge: Knowledge
    settings: Settings
    plain: Paths
    paths: Paths


def view(
    machine: Machine, knowledge: Knowledge, settings: Settings, *, gpus: Sequence[int] | None = None
) -> View:
    """NCCL's paths for a communicator over `gpus` (NVML indices; None is all of them).

    Raises:
        InputError: unknown GPUs, or a machine on which NCCL fails at init.
    """
    system = build_system(machine, gpus=gpus)
    plain = shortest_paths(system)
    level = p2p_level(system, settings)

    def direct(source: str, target: str) -> bool:
        return _direct(system, knowledge, plain, level, (source, target))

    paths = with_policy(
        system, plain, direct=direct, gpu_direct=lambda gpu, net: _gpu_direct(machine, gpu, net)
    )
    return View(system, knowledge, settings, plain, paths)


def p2p_level(system: System, settings: Settings) -> PathType:
    """The farthest path type over which NCCL lets a pair talk directly."""
    if settings.p2p_level is not None:
        return PathType[settings.p2p_level]
    facts = version_facts(settings.version)
    if system.amd and (facts.amd_gpus is None or len(system.gpus) <= facts.amd_gpus):
        return PathType[facts.amd_level]
    return PathType[facts.default_p2p_level]


def _direct(
    system: System, knowledge: Knowledge, paths: Paths, level: PathType, pair: tuple[str, str]
) -> bool:
    source, target = pair
    path = paths.get((source, target), DISCONNECTED)
    if path.type > level:
        return False
    stops = [source, *_gpus_between(system, path), target]
    return all(
        knowledge.can_access(system.machine, int(one[1:]), int(other[1:]))
        for one, other in pairwise(stops)
    )


def _gpus_between(system: System, path: Path) -> list[str]:
    inner = [link.target for link in path.links[:-1]]
    return [name for name in inner if system.nodes[name].kind == "gpu"]


def _gpu_direct(machine: Machine, gpu: str, net: str) -> bool:
    port = next(nic for nic in machine.nics if nic.id == net)
    return port.gdr and machine.gpu(int(gpu[1:])).gdr


def pair_mechanism(seen: View, source: int, target: int) -> Mechanism:
    """How NCCL connects GPU `source` to GPU `target` in this view.

    Raises:
        InputError: a GPU that is not in the communicator, or twice the same.
    """
    one, other = f"G{source}", f"G{target}"
    system, settings = seen.system, seen.settings
    if one not in system.sm or other not in system.sm or one == other:
        raise InputError(
            f"hop from GPU {source} to GPU {target}",
            "is no pair of the communicator's GPUs",
            f"choose two of {', '.join(system.gpus)}",
        )
    path = seen.paths[one, other]
    name, gbps = path.type.name, path.gbps
    if not settings.net_disable_intra and _network_is_nearer(seen, one, other):
        return Mechanism(kind="network", path=name, gbps=gbps)
    level = p2p_level(system, settings)
    if _direct(system, seen.knowledge, seen.plain, level, (one, other)):
        if settings.p2p_copy_engine:
            return Mechanism(kind="write", path=name, gbps=gbps, copy_engines=("sender",))
        kind: MechanismKind = "read" if _reads(seen, one, other) else "write"
        return Mechanism(kind=kind, path=name, gbps=gbps)
    engines: tuple[Side, ...] = ()
    if settings.shm_copy_engine == "both":
        engines = ("sender", "receiver")
    elif settings.shm_copy_engine is not None:
        engines = (settings.shm_copy_engine,)
    return Mechanism(
        kind="bounce", path=name, gbps=gbps, side=settings.shm_locality, copy_engines=engines
    )


def _reads(seen: View, one: str, other: str) -> bool:
    if seen.settings.p2p_read is not None:
        return seen.settings.p2p_read
    same = seen.system.sm[one] == seen.system.sm[other] == _READS_ON_NVLINK
    return same and seen.plain[one, other].type == PathType.NVL


def _network_is_nearer(seen: View, one: str, other: str) -> bool:
    """Whether both GPUs reach a NIC without the CPU, and faster than they reach each other."""
    gbps = seen.paths[one, other].gbps
    for gpu in (one, other):
        ways = [seen.paths.get((gpu, net), DISCONNECTED) for net in seen.system.nets]
        if max((way.gbps for way in ways if way.type <= PathType.PXB), default=0.0) <= gbps:
            return False
    return True


def mechanism(
    machine: Machine, knowledge: Knowledge, settings: Settings, source: int, target: int
) -> Mechanism:
    """How NCCL connects two GPUs of a communicator over the whole machine."""
    return pair_mechanism(view(machine, knowledge, settings), source, target)


def hop_space(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings,
    *,
    gpus: Sequence[int] | None = None,
    rings_in_set: int = 1,
) -> HopSpace:
    """One hop per ordered pair, by the mechanism the settings give it; none where NCCL uses NICs.

    Every hop is moved by the final channels' blocks, shared evenly by the rings of a set.

    Raises:
        InputError: settings the version does not have, unknown GPUs, or no ring.
    """
    check_settings(settings)
    if rings_in_set < 1:
        raise InputError("rings_in_set", f"is {rings_in_set}", "a set has at least one ring")
    seen = view(machine, knowledge, settings, gpus=gpus)
    chosen = tuple(sorted(int(gpu[1:]) for gpu in seen.system.gpus))
    channels = final_channels(settings.channels, sm=seen.system.sm_min, version=settings.version)
    blocks = max(1, channels // rings_in_set)
    hops = {}
    for source, target in permutations(chosen, 2):
        way = pair_mechanism(seen, source, target)
        if way.kind != "network":
            flow = mechanism_flow(machine, settings, way, source, target, blocks=blocks)
            hops[source, target] = (Hop(source, target, flow),)
    switches = [f"{name}={value}" for name, value in environment(settings).items()]
    name = " ".join([f"nccl {settings.version}, {channels} channels", *switches])
    return HopSpace(name=name, gpus=chosen, hops=hops)


def mechanism_flow(
    machine: Machine, settings: Settings, way: Mechanism, source: int, target: int, *, blocks: int
) -> Flow:
    """The flow a mechanism moves; a bounce lies on the allocating GPU's own NUMA node."""
    one, other = Place("G", source), Place("G", target)
    sender = Place("D", source) if "sender" in way.copy_engines else one
    receiver = Place("D", target) if "receiver" in way.copy_engines else other
    if way.kind == "read":
        return Flow((Transfer(one, receiver, other),), blocks)
    if way.kind == "write":
        return Flow((Transfer(one, sender, other),), blocks)
    owner = target if way.side == "receiver" else source
    host = Place("C", machine.numa_of(f"G{owner}"))
    fifo = Fifo(bytes=settings.buffsize, side=way.side or "receiver")
    return Flow((Transfer(one, sender, host), Transfer(host, receiver, other)), blocks, fifo)
