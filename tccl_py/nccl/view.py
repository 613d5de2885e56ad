"""A machine as one NCCL communicator sees it under given settings.

Source: ncclTopoCheckP2p, ncclTopoCheckNet, ncclTopoComputePaths and ncclTopoTrimSystem (paths.cc)
of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, permutations, product

from tccl_py.errors import InputError
from tccl_py.model.links import LinkFact
from tccl_py.model.machine import Knowledge, Machine, Nic
from tccl_py.model.transfer import index_of
from tccl_py.nccl.paths import Direction, TopoPath, TopoPaths, shortest_paths, with_policy
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.system import PathType, System, build_system
from tccl_py.nccl.versions import AMD, Level

Pairs = frozenset[tuple[str, str]]
_VIEW_FIELDS = ("version", "p2p_level", "shm_disable", "net_disable_intra", "net_gdr_level",
         "net_gdr_read", "ib_hca", "socket_ifname")  # fmt: skip
"""Settings that change paths, transports or parts of a node; views are kept for each of these."""


@dataclass(frozen=True, slots=True)
class NcclView:
    """A machine as one communicator sees it."""

    system: System
    knowledge: Knowledge
    settings: Settings
    plain: TopoPaths
    """Before policy is applied."""
    paths: TopoPaths
    direct: Pairs
    """Those that talk without the CPU."""
    by_network: Pairs
    """Those that NCCL sends over NICs."""

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """The GPUs grouped as by ncclTopoTrimSystem: each joins the lowest earlier group.

        More than one part is a node that NCCL cuts at init: it refuses a graph file over all GPUs.
        """
        gpus, group = self.system.gpus, list[int]()
        for number, gpu in enumerate(gpus):
            near = (group[at] for at in range(number) if (gpu, gpus[at]) not in self.by_network)
            group.append(min([number, *near]))
        return tuple(
            tuple(gpu for gpu, first in zip(gpus, group, strict=True) if first == number)
            for number in dict.fromkeys(group)
        )

    @property
    def machine(self) -> Machine:
        """The machine seen."""
        return self.system.machine

    @property
    def gpus(self) -> tuple[int, ...]:
        """NVML indices of the communicator's GPUs, ascending."""
        return tuple(sorted(index_of(gpu) for gpu in self.system.gpus))

    @property
    def nics(self) -> tuple[int, ...]:
        """Numbers of the NICs that NCCL may use, ascending."""
        return tuple(sorted(index_of(net) for net in self.system.nets))

    @property
    def p2p(self) -> frozenset[tuple[int, int]]:
        """The pairs of GPUs of which one maps the other's memory, relays to GPUs and NICs included.

        The lower index is the first. A pair with a relay is one too: its P2P is what is measured.
        """
        ways = [(pair, self.plain[pair]) for pair in self.direct - self.by_network]
        ways += [(ends, self.paths[ends]) for ends in product(self.system.gpus, self.system.nets)]
        stops = ([ends[0], *_gpus_on(self.system, path)] for ends, path in ways)
        named = {*(self.direct - self.by_network), *(p for names in stops for p in pairwise(names))}
        pairs = (map(index_of, pair) for pair in named)
        return frozenset((min(pair), max(pair)) for pair in map(tuple, pairs))

    @property
    def unsound(self) -> tuple[LinkFact, ...]:
        """The links that no plan may use, and some communicator of these GPUs uses by P2P."""
        return _find_unsound(self.machine, self.gpus, self.knowledge, _of_view(self.settings))

    def farthest(self, pairs: Iterable[tuple[int, int]]) -> str:
        """Return the name of the farthest path between pairs of GPUs, as NCCL's tuner reads it."""
        types = (self.paths[f"G{source}", f"G{target}"].type for source, target in pairs)
        return max(types, default=PathType.LOC).name


def view(
    machine: Machine,
    knowledge: Knowledge,
    settings: Settings | None = None,
    *,
    gpus: Sequence[int] | None = None,
) -> NcclView:
    """Return NCCL's view for a communicator over `gpus` (NVML indices; None is all GPUs)."""
    settings = settings or Settings()
    order = tuple(sorted(machine.gpu_indices if gpus is None else gpus))
    return replace(_view_of(machine, order, knowledge, _of_view(settings)), settings=settings)


def _of_view(settings: Settings) -> Settings:
    return Settings(**{name: getattr(settings, name) for name in _VIEW_FIELDS})


def direct_pairs(
    machine: Machine, knowledge: Knowledge, level: Level | None, *, gpus: Sequence[int]
) -> frozenset[tuple[int, int]] | None:
    """Return the pairs of GPUs that a level lets talk directly; None is all pairs."""
    if level is None:
        return None
    topo = view(machine, knowledge, Settings(p2p_level=level), gpus=gpus)
    return frozenset((index_of(source), index_of(target)) for source, target in topo.direct)


def usable_nics(machine: Machine, settings: Settings) -> tuple[int, ...]:
    """Return the numbers of the NICs that NCCL uses under these settings, in order.

    NCCL_IB_HCA chooses among RDMA ports, NCCL_SOCKET_IFNAME among interfaces, which have no port.
    """

    def is_used(nic: Nic) -> bool:
        names = settings.ib_hca if nic.port else settings.socket_ifname
        return not names or nic.name in names or f"{nic.name}:{nic.port}" in names

    return tuple(sorted(nic.index for nic in machine.nics if is_used(nic)))


def net_devices(machine: Machine, settings: Settings) -> dict[int, int]:
    """Return NIC number -> NCCL's device number, which counts only NICs that settings allow."""
    nics = usable_nics(machine, settings)
    if len(nics) == len(machine.nics):
        return {nic: nic for nic in nics}
    return {nic: device for device, nic in enumerate(nics)}


def net_path(topo: NcclView, gpu: int, nic: int, direction: Direction) -> PathType:
    """Return the type of the path between a GPU and a NIC, as a graph's typeinter counts it."""
    name, port = net_ends(topo, gpu, nic)
    pair = (name, port) if direction == "send" else (port, name)
    return topo.paths[pair].type


def net_ends(topo: NcclView, gpu: int, nic: int) -> tuple[str, str]:
    """Return the names of a GPU and a NIC of the communicator (InputError)."""
    name, port = f"G{gpu}", f"N{nic}"
    if name not in topo.system.sm or port not in topo.system.nets:
        gpus, nets = ", ".join(topo.system.gpus), ", ".join(topo.system.nets)
        fault = f"is not on machine {topo.machine.name}, or not for this job"
        right = f"there are {gpus} and {nets or 'no NICs'}"
        raise InputError(f"end of a ring at GPU {gpu} and NIC {nic}", fault, right)
    return name, port


def leaves_as_named(
    gpus: Sequence[int], entry: int, leave: int, *, subnet_routing: bool = False
) -> bool:
    """Return whether a channel leaves by the NIC that a file names, on a node with these GPUs.

    ncclTopoGetNetDev gives a channel's first GPU the entry's NIC for both directions. With subnet
    routing the next node's entry decides by which NIC a connection leaves (ncclIbFindDevBySubnet).

    >>> leaves_as_named([0], 0, 1), leaves_as_named([0], 1, 1), leaves_as_named([0, 1], 0, 1)
    (False, True, True)
    """
    return len(gpus) > 1 or entry == leave or subnet_routing


def p2p_level(system: System, settings: Settings) -> PathType:
    """Return the farthest path type over which NCCL lets a pair talk directly."""
    if settings.p2p_level is not None:
        return PathType[settings.p2p_level]
    most = system.rules.amd_gpus
    if system.vendor == AMD and (most is None or len(system.gpus) <= most):
        return PathType.SYS
    return PathType.PXB


@lru_cache(maxsize=64)
def _survey(
    machine: Machine, gpus: tuple[int, ...], nics: tuple[int, ...], version: str
) -> tuple[System, TopoPaths]:
    system = build_system(machine, gpus=gpus, nics=nics, version=version)
    return system, shortest_paths(system)


@lru_cache(maxsize=256)
def _view_of(
    machine: Machine, gpus: tuple[int, ...], knowledge: Knowledge, settings: Settings
) -> NcclView:
    nics = usable_nics(machine, settings)
    system, plain = _survey(machine, gpus, nics, settings.version)
    level, pairs = p2p_level(system, settings), list(permutations(system.gpus, 2))
    direct = frozenset(pair for pair in pairs if _direct(system, knowledge, plain, level, pair))
    paths = with_policy(plain, direct=direct, settings=settings)
    # NCCL decides this before it knows which NICs reach GPU memory: by the plain paths.
    net_gbps = dict.fromkeys(system.gpus, 0.0)
    for ends in product(system.gpus, () if settings.net_disable_intra else system.nets):
        if plain[ends].type <= PathType.PXB:
            net_gbps[ends[0]] = max(net_gbps[ends[0]], plain[ends].gbps)
    by_network = frozenset(
        pair
        for pair in pairs
        if (settings.shm_disable and pair not in direct)
        or min(net_gbps[gpu] for gpu in pair) > paths[pair].gbps
    )
    return NcclView(system, knowledge, settings, plain, paths, direct, by_network)


def _direct(
    system: System, knowledge: Knowledge, paths: TopoPaths, level: PathType, pair: tuple[str, str]
) -> bool:
    path = paths[pair]
    if path.type > level:
        return False
    return all(
        knowledge.can_access(system.machine, index_of(source), index_of(target))
        for source, target in pairwise([pair[0], *_gpus_on(system, path)])
    )


def _gpus_on(system: System, path: TopoPath) -> list[str]:
    """Return the GPUs that a path leads to, in order."""
    return [link.target for link in path.links if link.target in system.sm]


@lru_cache(maxsize=256)
def _find_unsound(
    machine: Machine, gpus: tuple[int, ...], knowledge: Knowledge, settings: Settings
) -> tuple[LinkFact, ...]:
    """Return the facts on links that a communicator of all GPUs uses, or one of their two GPUs."""
    facts = {
        (fact.one, fact.other): fact
        for fact in knowledge.links or ()
        if {fact.one, fact.other} <= set(gpus) and settings.p2p_level != "LOC"
    }
    used = view(machine, knowledge, settings, gpus=gpus).p2p if facts else frozenset()
    return tuple(
        fact
        for pair, fact in facts.items()
        if pair in used or pair in view(machine, knowledge, settings, gpus=pair).p2p
    )
