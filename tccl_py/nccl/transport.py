"""Which transport NCCL takes for a pair of GPUs, and the hops that settings leave to a search.

Source: ncclTopoCheckP2p, ncclTopoCheckNet, ncclTopoComputePaths and ncclTopoTrimSystem (paths.cc),
p2p.cc and shm.cc of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations
from typing import Literal, NamedTuple, TypeVar

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine, Nic
from tccl_py.model.paths import PathType
from tccl_py.model.rings import Hop, HopSpace
from tccl_py.model.transfer import (
    Fifo,
    Flow,
    Place,
    Side,
    Transfer,
    direct_read,
    direct_write,
    entering,
    leaving,
)
from tccl_py.nccl.paths import (
    DISCONNECTED,
    Direction,
    GpuDirectRule,
    Path,
    Paths,
    gpu_direct_rule,
    local_cpu,
    local_gpu,
    local_nets,
    nearest,
    nvlinked,
    relay_of,
    shortest_paths,
    with_policy,
)
from tccl_py.nccl.settings import Settings, check_settings, environment, listed, settings_channels
from tccl_py.nccl.system import System, build_system
from tccl_py.nccl.versions import version_facts

MechanismKind = Literal["write", "read", "bounce", "network"]
TRANSPORTS = {"write": "P2P", "read": "P2P", "bounce": "SHM", "network": "NET"}
"""The name in NCCL's log of each mechanism."""

_READS_ON_NVLINK = 80
"""Only between two GPUs of this sm does NCCL read over NVLink unasked."""
_KEPT = 64
"""Communicators kept for one machine, and levels kept for one communicator."""
_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")


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
class _Reach:
    """What follows from settings of transports and the knowledge of who can access whom.

    `direct` are the pairs that talk without the CPU, `by_network` the pairs that NCCL sends over
    NICs, `nvlinked` the GPUs with an NVLink to another. `parts` are the GPUs in NCCL's order, by
    groups: more than one is a node that NCCL cuts when it starts, because too many pairs would go
    over NICs. Each group is then a node of its own, and a graph file over all GPUs is refused.
    """

    paths: Paths
    direct: frozenset[tuple[str, str]]
    by_network: frozenset[tuple[str, str]]
    parts: tuple[tuple[str, ...], ...]
    nvlinked: frozenset[str]


@dataclass(frozen=True, slots=True)
class View(_Reach):
    """A machine as one communicator sees it under given settings; views share what they hold."""

    system: System
    knowledge: Knowledge
    settings: Settings
    plain: Paths


@dataclass(frozen=True, slots=True)
class _Survey:
    """What no setting changes, and what has been asked of it so far."""

    system: System
    plain: Paths
    reaches: dict[_ReachKey, _Reach]


class _ReachKey(NamedTuple):
    """The settings that paths and transports depend on."""

    level: PathType
    rule: GpuDirectRule
    network: bool
    shared_memory: bool
    knowledge: Knowledge


def view(
    machine: Machine, knowledge: Knowledge, settings: Settings, *, gpus: Sequence[int] | None = None
) -> View:
    """NCCL's paths for a communicator over `gpus` (NVML indices; None is all of them).

    What was computed once is kept with the machine: planning asks under hundreds of settings.

    Raises:
        InputError: unknown GPUs, or a machine on which NCCL fails at init.
    """
    survey = _survey(machine, gpus, usable_nics(machine, settings), settings.version)
    key = _ReachKey(
        level=p2p_level(survey.system, settings),
        rule=gpu_direct_rule(settings),
        network=not settings.net_disable_intra,
        shared_memory=not settings.shm_disable,
        knowledge=knowledge,
    )
    reach = _reach(survey, key)
    return View(
        system=survey.system,
        knowledge=knowledge,
        settings=settings,
        plain=survey.plain,
        paths=reach.paths,
        direct=reach.direct,
        by_network=reach.by_network,
        parts=reach.parts,
        nvlinked=reach.nvlinked,
    )


def usable_nics(machine: Machine, settings: Settings) -> tuple[int, ...]:
    """Numbers of the NICs that NCCL uses under these settings, in order.

    NCCL_IB_HCA chooses among RDMA ports, which count from 1; NCCL_SOCKET_IFNAME among interfaces,
    which have no port. A machine's NICs are of one kind: NCCL uses interfaces only without RDMA.
    """
    chosen = (
        nic
        for nic in machine.nics
        if listed(settings.ib_hca if nic.port else settings.socket_ifname, nic.name, nic.port)
    )
    return tuple(sorted(nic.index for nic in chosen))


def net_devices(machine: Machine, settings: Settings) -> dict[int, int]:
    """NIC number -> the device number that NCCL gives it under these settings.

    A graph file names devices. NCCL counts only the NICs that it uses, so where some are left out
    the others move up; where none is, they have the machine's own numbers.
    """
    nics = usable_nics(machine, settings)
    if len(nics) == len(machine.nics):
        return {nic: nic for nic in nics}
    return {nic: device for device, nic in enumerate(nics)}


def _survey(
    machine: Machine, gpus: Sequence[int] | None, nics: tuple[int, ...], version: str
) -> _Survey:
    """Kept on the instance, because hashing a Machine costs more than what is kept saves."""
    surveys: dict[tuple[tuple[int, ...], tuple[int, ...], str], _Survey]
    surveys = machine.__dict__.setdefault("_nccl_surveys", {})
    order = tuple(sorted(machine.gpu_indices if gpus is None else gpus))
    key = order, nics, version
    if key not in surveys:
        system = build_system(machine, gpus=order, nics=nics, version=version)
        _make_room(surveys)
        surveys[key] = _Survey(system=system, plain=shortest_paths(system), reaches={})
    return surveys[key]


def _reach(survey: _Survey, key: _ReachKey) -> _Reach:
    system = survey.system
    if key not in survey.reaches:
        direct = frozenset(
            pair
            for pair in permutations(system.gpus, 2)
            if _direct(system, key.knowledge, survey.plain, key.level, pair)
        )
        paths = with_policy(system, survey.plain, direct=direct, rule=key.rule)
        # NCCL decides this before it knows which NICs reach GPU memory: by the plain paths.
        net_gbps = _net_gbps(system, survey.plain) if key.network else {}
        by_network = frozenset(
            (one, other)
            for one, other in permutations(system.gpus, 2)
            if not (key.shared_memory or (one, other) in direct)
            or min(net_gbps.get(one, 0.0), net_gbps.get(other, 0.0)) > paths[one, other].gbps
        )
        _make_room(survey.reaches)
        survey.reaches[key] = _Reach(
            paths=paths,
            direct=direct,
            by_network=by_network,
            parts=_parts(system.gpus, by_network),
            nvlinked=nvlinked(system, paths),
        )
    return survey.reaches[key]


def _parts(
    gpus: Sequence[str], by_network: frozenset[tuple[str, str]]
) -> tuple[tuple[str, ...], ...]:
    """Group GPUs as ncclTopoTrimSystem does: each joins the lowest group of those before it."""
    group: list[int] = []
    for number, gpu in enumerate(gpus):
        near = (group[at] for at in range(number) if (gpu, gpus[at]) not in by_network)
        group.append(min([number, *near]))
    return tuple(
        tuple(gpu for gpu, own in zip(gpus, group, strict=True) if own == one)
        for one in dict.fromkeys(group)
    )


def _make_room(kept: dict[_Key, _Kept]) -> None:
    """Drop the oldest of too many."""
    if len(kept) >= _KEPT:
        del kept[next(iter(kept))]


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


def _net_gbps(system: System, paths: Paths) -> Mapping[str, float]:
    best = {}
    for gpu in system.gpus:
        ways = [paths.get((gpu, net), DISCONNECTED) for net in system.nets]
        best[gpu] = max((way.gbps for way in ways if way.type <= PathType.PXB), default=0.0)
    return best


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
    if (one, other) in seen.by_network:
        return Mechanism(kind="network", path=name, gbps=gbps)
    if (one, other) in seen.direct:
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
    """Return one hop per ordered pair, by the mechanism the settings give it.

    There is no hop at all where NCCL would send any pair over NICs: it may then cut the node in
    parts (`View.parts`), by an order of GPUs that depends on how it found them. Every hop is moved
    by the final channels' blocks, shared evenly by the rings of a set.

    Raises:
        InputError: settings the version does not have, unknown GPUs, or no ring.
    """
    check_settings(settings)
    if rings_in_set < 1:
        raise InputError("rings_in_set", f"is {rings_in_set}", "a set has at least one ring")
    seen = view(machine, knowledge, settings, gpus=gpus)
    chosen = tuple(sorted(int(gpu[1:]) for gpu in seen.system.gpus))
    channels = settings_channels(settings, sm=seen.system.sm_min)
    blocks = max(1, channels // rings_in_set)
    hops = {}
    for source, target in permutations(chosen, 2) if not seen.by_network else ():
        way = pair_mechanism(seen, source, target)
        flow = mechanism_flow(machine, settings, way, source, target, blocks=blocks)
        hops[source, target] = (Hop(source, target, flow),)
    switches = [f"{name}={value}" for name, value in environment(settings).items()]
    name = " ".join([f"nccl {settings.version}, {channels} channels", *switches])
    return HopSpace(name=name, gpus=chosen, hops=hops)


def mechanism_flow(
    machine: Machine, settings: Settings, way: Mechanism, source: int, target: int, *, blocks: int
) -> Flow:
    """The flow a mechanism moves; a bounce lies on the allocating GPU's own NUMA node.

    NCCL_BUFFSIZE is the size of direct hops' FIFOs too, which lie in GPU memory (p2p.cc).
    """
    one, other = Place("G", source), Place("G", target)
    sender = Place("D", source) if "sender" in way.copy_engines else one
    receiver = Place("D", target) if "receiver" in way.copy_engines else other
    if way.kind in ("read", "write"):
        if way.copy_engines:
            return Flow((Transfer(one, sender, other),), blocks)
        make = direct_read if way.kind == "read" else direct_write
        return make(source, target, blocks=blocks, fifo=Fifo(bytes=settings.buffsize))
    owner = target if way.side == "receiver" else source
    host = Place("C", machine.numa_of(f"G{owner}"))
    fifo = Fifo(bytes=settings.buffsize, side=way.side or "receiver")
    return Flow((Transfer(one, sender, host), Transfer(host, receiver, other)), blocks, fifo)


# How a ring leaves a node and enters the next: where the network transport has its buffers.


def landing(seen: View, gpu: int, nic: int, direction: Direction) -> int | None:
    """The NUMA node of the host buffer between a GPU and a NIC; None if there is none (GPU direct).

    Both have to support it, their path is within NCCL_NET_GDR_LEVEL (PXB by default, since 2.27
    also P2C, over C2C to a NIC of the same CPU), and for sending NCCL_NET_GDR_READ lets NICs read
    GPU memory: by default where sm >= 80, or an NVLink to another GPU of the communicator, or no
    other GPU in it. If another GPU sends for this one (see `relay`), its path is the one that
    counts, and in both directions: the NIC then writes to this GPU's memory however far that is.

    A host buffer comes from ncclCudaHostCalloc in the proxy thread (sendProxyConnect,
    recvProxyConnect), pinned where that thread runs: it is started while its rank is bound to the
    CPUs nearest to its GPU (ncclTopoGetCpuAffinity), so that is the GPU's own NUMA node. Only
    NCCL_IGNORE_CPU_AFFINITY, NCCL_PROXY_CPUSET or a rank bound elsewhere change it. When a relay
    sends, it is the relay's. Flushes after receiving (ncclTopoNeedFlush) move no
    data, and change none of this.

    Raises:
        InputError: a GPU that is not in the communicator, or a NIC that NCCL would not use.
    """
    one, port = _ends(seen, gpu, nic)
    path = seen.paths.get((one, port), DISCONNECTED)
    over = relay_of(seen.system, path)
    distance = seen.paths[over, port].type if over else path.type
    direct = gpu_direct_rule(seen.settings).allows(
        seen.system,
        one,
        port,
        distance=distance,
        direction=direction,
        nvlinked=seen.nvlinked,
    )
    if direct:
        return None
    owner = over if over and direction == "send" else one
    return int(local_cpu(seen.system, seen.plain, owner)[1:])


def relay(seen: View, gpu: int, nic: int) -> int | None:
    """The GPU that sends for this one by this NIC (PXN); None if it sends by itself.

    Rings use PXN whenever they leave by a NIC to which the path is PXN: the GPU's kernel writes
    into a buffer in the memory of the GPU beside the NIC, over NVLink, and the NIC reads it there.
    That is so where both GPUs have NVLink, and the other's way to the NIC is wider or avoids the
    CPU. NCCL receives without it. NCCL_PXN_DISABLE=1, which no Settings choose, turns it off;
    NCCL_P2P_PXN_LEVEL is for send and receive only.

    Raises:
        InputError: as `landing`.
    """
    one, port = _ends(seen, gpu, nic)
    over = relay_of(seen.system, seen.paths.get((one, port), DISCONNECTED))
    return None if over is None else int(over[1:])


def net_path(seen: View, gpu: int, nic: int, direction: Direction) -> PathType:
    """The type of the path between a GPU and a NIC, as a graph's typeinter counts it.

    Raises:
        InputError: as `landing`.
    """
    one, port = _ends(seen, gpu, nic)
    pair = (one, port) if direction == "send" else (port, one)
    return seen.paths.get(pair, DISCONNECTED).type


def _ends(seen: View, gpu: int, nic: int) -> tuple[str, str]:
    one, port = f"G{gpu}", f"N{nic}"
    if one not in seen.system.sm or port not in seen.system.nets:
        gpus, nets = ", ".join(seen.system.gpus), ", ".join(seen.system.nets)
        raise InputError(
            f"end of a ring at GPU {gpu} and NIC {nic}",
            f"is not on machine {seen.system.machine.name}, or not for this job",
            f"there are {gpus} and {nets or 'no NICs'}",
        )
    return one, port


def exit_flow(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings,
    gpu: int,
    nic: int,
    *,
    blocks: int,
    gpus: Sequence[int] | None = None,
) -> Flow:
    """What a ring moves that leaves a node from GPU `gpu` by NIC `nic`.

    `gpus` are the communicator's on this node (None: all). Where another GPU sends for this one,
    the flow goes through that one's memory, `G3->G3->G0->N0->N0`.

    Raises:
        InputError: settings the version does not have, or as `landing`.
    """
    seen = view(machine, knowledge, check_settings(settings), gpus=gpus)
    # Where a host buffer is needed, it is the relay's, and its GPU memory is left out.
    through, over = landing(seen, gpu, nic, "send"), relay(seen, gpu, nic)
    fifo = Fifo(bytes=settings.buffsize)
    return leaving(gpu, nic, through=through, relay=over, blocks=blocks, fifo=fifo)


def entry_flow(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings,
    nic: int,
    gpu: int,
    *,
    blocks: int,
    gpus: Sequence[int] | None = None,
) -> Flow:
    """What a ring moves that enters a node by NIC `nic` at GPU `gpu`.

    Raises:
        InputError: as `exit_flow`.
    """
    seen = view(machine, knowledge, check_settings(settings), gpus=gpus)
    through = landing(seen, gpu, nic, "receive")
    return entering(nic, gpu, through=through, blocks=blocks, fifo=Fifo(bytes=settings.buffsize))


def open_ends(seen: View) -> tuple[tuple[int, int], ...]:
    """Every (GPU, NIC) at which a ring can enter or leave under a graph file.

    That is any GPU of the communicator with any NIC that NCCL may use (`usable_nics`): NCCL takes
    the NICs as the file names them, however far they are.
    """
    gpus = sorted(int(gpu[1:]) for gpu in seen.system.gpus)
    nics = sorted(int(net[1:]) for net in seen.system.nets)
    return tuple((gpu, nic) for gpu in gpus for nic in nics)


def may_change_rails(settings: Settings) -> bool:
    """Whether a ring may leave a node by another NIC than it entered by (NCCL_CROSS_NIC).

    NCCL does not look at the NICs of a file's channels; but a graph that says of itself that rings
    change rails (crossnic 1) is ignored under NCCL_CROSS_NIC=0.
    """
    return settings.cross_nic != 0


def leaves_as_named(gpus: Sequence[int], entry: int, leave: int) -> bool:
    """Whether a channel leaves by the NIC that a file names, on a node with these GPUs.

    On a node with one GPU that GPU is the first of every channel, and ncclTopoGetNetDev gives the
    first one the entry's NIC for both directions: the exit that a file names is not used.

    >>> leaves_as_named([0], 0, 1), leaves_as_named([0], 1, 1), leaves_as_named([0, 1], 0, 1)
    (False, True, True)
    """
    return len(gpus) > 1 or entry == leave


# NIC ports as NCCL's channel search sees them: which to try, and in what order.


class NetPorts:
    """The ports of one machine.

    `gbps` is each port's bandwidth in GB/s, `names` are all names of the same port.
    """

    def __init__(self, system: System, paths: Paths) -> None:
        self._system, self._paths = system, paths
        ports = {nic.id: nic for nic in system.machine.nics}
        self._identity = {name: _identity(ports[name]) for name in system.nets}
        self.names = {
            name: tuple(other for other in system.nets if self.same_port(name, other))
            for name in system.nets
        }
        self.gbps = {
            name: max((link.gbps for link in system.nodes[name].links), default=0.0)
            for name in system.nets
        }
        self.selected = cache(self._select)
        self.local_gpus = cache(self._locals)

    def same_port(self, one: str, other: str) -> bool:
        """Whether two names are one port of one card."""
        return self._identity[one] == self._identity[other]

    def _select(self, limit: int, gpu: str | None) -> tuple[str, ...]:
        """Ports to try: those the GPUs prefer, then others by path type up to `limit`."""
        gpus = self._system.gpus if gpu is None else (gpu,)
        chosen: dict[str, None] = {}
        for one in gpus:
            chosen.update(dict.fromkeys(local_nets(self._system, self._paths, one)))
        for kind in range(limit + 1):
            for one in gpus:
                ways = {net: self._paths.get((one, net), DISCONNECTED) for net in self._system.nets}
                chosen.update((net, None) for net, way in ways.items() if way.type == kind)
        return tuple(chosen)

    def _locals(self, port: str) -> tuple[int, ...]:
        """Positions of the GPUs that begin a channel from this port."""
        first = local_gpu(self._system, self._paths, port)
        close = nearest(self._paths, port, self._system.gpus)
        order = dict.fromkeys((first, *close) if first else close)
        return tuple(self._system.gpus.index(gpu) for gpu in order)


def _identity(nic: Nic) -> tuple[str, int]:
    return nic.guid or f"device {nic.index}", nic.port
