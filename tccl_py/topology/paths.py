"""How near two devices are to each other, in NCCL's words and computed as NCCL computes it.

NCCL searches breadth first from each device, by number of links and then by the bandwidth it
assumes for them, and calls the path by its worst link. The constants below serve only to break
such ties; they are no statement about real rates. Source: NCCL 2.30 graph/paths.cc, graph/topo.cc.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from tccl_py.errors import InputError
from tccl_py.topology.machine import Gpu, Machine, Nic, NumaNode, NvLink, PciBridge, PciLink


class PathType(IntEnum):
    """The kinds of path, from near to far; comparable (`PathType.PIX < PathType.PHB`).

    LOC the device itself; NVL NVLink; NVB NVLink through one GPU; C2C chip to chip; PIX one PCI
    bridge; PXB several; P2C to a NIC over C2C; PXN to a NIC through an NVLinked GPU; PHB over the
    CPU; SYS over two CPUs. PXN is named for settings and graph files; `path_type` never gives it,
    because it holds in one direction and depends on settings.
    """

    LOC = 0
    NVL = 1
    NVB = 2
    C2C = 3
    PIX = 4
    PXB = 5
    P2C = 6
    PXN = 7
    PHB = 8
    SYS = 9


# GB/s that NCCL assumes (graph/topo.h).
_LOCAL_GBPS = 5000.0
_NVLINK_GBPS = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (70, 20.0), (60, 18.0))
_NVLINK_DEFAULT_GBPS = 20.0
_C2C_GBPS = 44.7
_PCI_LANE_GBPS = {2.5: 15 / 80, 5.0: 30 / 80, 8.0: 60 / 80, 16.0: 1.5, 32.0: 3.0, 64.0: 6.0}
_PCI_DEFAULT_LANE_GBPS = 60 / 80
_PCI_DEFAULT_WIDTH = 16
_AMD_GBPS = 16.0
_INTEL_GBPS = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0))
_INTEL_DEFAULT_GBPS = 6.0
_OTHER_CPU_GBPS = {"arm64": 6.0, "ppc64": 32.0}

_MAX_HOPS_BEFORE_A_GPU = 1


@dataclass(frozen=True, kw_only=True)
class _Link:
    target: str
    kind: PathType
    gbps: float


@dataclass(frozen=True, kw_only=True)
class _Path:
    type: PathType
    hops: int
    gbps: float


_Links = dict[str, list[_Link]]


@dataclass(frozen=True, kw_only=True)
class _Graph:
    links: _Links
    gpus: frozenset[str]
    bridges: frozenset[str]
    cpus: frozenset[str]


def path_type(machine: Machine, a: str, b: str) -> PathType:
    """The path from device `a` to device `b` (GPUs, NICs, NUMA nodes) as NCCL sees it.

    This is the path before settings: see `path_type_through_cpu` for pairs that NCCL_P2P_DISABLE
    or NCCL_P2P_LEVEL keep apart. One-way NVLinks count for nothing (`one_way_nvlinks`).

    >>> from tccl_py.topology.machine import toy_machine
    >>> path_type(toy_machine(gpus=4, per_switch=2), "G0", "G1").name
    'PIX'

    Raises:
        InputError: a device that is no GPU, NIC or NUMA node of the machine.
    """
    _check_known(machine, a)
    _check_known(machine, b)
    return _type_of(machine, a, b, _paths_to(machine, b))


def path_types(machine: Machine) -> Mapping[tuple[str, str], PathType]:
    """`path_type` of every ordered pair of GPUs, NICs and NUMA nodes; cost is quadratic."""
    devices = _end_devices(machine)
    types = {}
    for b in devices:
        paths = _paths_to(machine, b)
        types.update({(a, b): _type_of(machine, a, b, paths) for a in devices})
    return types


def path_type_through_cpu(machine: Machine, source: str, destination: str) -> PathType:
    """The path from GPU `source` to GPU `destination` when direct access is not used.

    NCCL then takes the way to the CPU nearest the destination and on from there, whatever NVLinks
    and PCI switches join the two: this is what it reports with NCCL_P2P_DISABLE=1, and for pairs
    farther apart than NCCL_P2P_LEVEL.

    Raises:
        InputError: a device that the machine does not have.
    """
    _check_known(machine, source)
    _check_known(machine, destination)
    cpu = _local_cpu(machine, destination)
    to_cpu = _paths_to(machine, cpu)[source].type
    from_cpu = _paths_to(machine, destination)[cpu].type
    return _merged(to_cpu, from_cpu)


def one_way_nvlinks(machine: Machine) -> tuple[NvLink, ...]:
    """GPU to GPU NVLinks without one back; NCCL fails to start on a machine that has any."""
    joined = {(link.source, link.target) for link in machine.nvlinks}
    return tuple(
        link
        for link in machine.nvlinks
        if link.target[0] == "G" and (link.target, link.source) not in joined
    )


def _end_devices(machine: Machine) -> tuple[str, ...]:
    return (
        *(gpu.id for gpu in machine.gpus),
        *(nic.id for nic in machine.nics),
        *(node.id for node in machine.numa_nodes),
    )


def _check_known(machine: Machine, device: str) -> None:
    known = _end_devices(machine)
    if device not in known:
        raise InputError(
            device,
            f"is no GPU, NIC or NUMA node of machine {machine.name}",
            f"it has {', '.join(known)}",
        )


def _type_of(machine: Machine, a: str, b: str, paths: Mapping[str, _Path]) -> PathType:
    found = paths[a].type
    if found == PathType.PHB and _has_c2c(machine) and {a[0], b[0]} == {"G", "N"}:
        gpu, nic = (a, b) if a[0] == "G" else (b, a)
        return PathType.P2C if _over_c2c(machine, gpu, nic) else found
    return found


def _has_c2c(machine: Machine) -> bool:
    return any(link.kind == "c2c" for link in machine.nvlinks)


def _merged(one: PathType, other: PathType) -> PathType:
    if {one, other} == {PathType.PHB, PathType.C2C}:
        return PathType.P2C
    return max(one, other)


def _local_cpu(machine: Machine, device: str) -> str:
    paths = {node.id: _paths_to(machine, node.id)[device] for node in machine.numa_nodes}
    return min(paths, key=lambda cpu: paths[cpu].hops)


def _over_c2c(machine: Machine, gpu: str, nic: str) -> bool:
    """Whether NCCL calls a GPU and a NIC P2C: C2C on one side, and no better NIC for that GPU."""
    cpu = _local_cpu(machine, gpu)
    to_cpu = _paths_to(machine, cpu)
    if _merged(to_cpu[gpu].type, to_cpu[nic].type) != PathType.P2C:
        return False
    ranks = {}
    for other in machine.nics:
        path = _paths_to(machine, other.id)[gpu]
        ranks[other.id] = (-path.gbps, path.type)
    return ranks[nic] == min(ranks.values())


@lru_cache(maxsize=512)
def _paths_to(machine: Machine, base: str) -> Mapping[str, _Path]:
    """The path of every device to `base`, by NCCL's breadth-first search."""
    graph = _graph(machine)
    paths = {base: _Path(type=PathType.LOC, hops=0, gbps=_LOCAL_GBPS)}
    frontier = [base]
    while frontier:
        following: dict[str, None] = {}
        for node in frontier:
            for link in graph.links[node]:
                if node != base and not _may_pass(graph, node, link, paths[node]):
                    continue
                path = _extended(graph, paths[node], node, link)
                if _is_better(path, paths.get(link.target)):
                    paths[link.target] = path
                    following[link.target] = None
        frontier = list(following)
    return paths


def _may_pass(graph: _Graph, node: str, link: _Link, path: _Path) -> bool:
    """GPUs forward to NVLinked GPUs only, and only one of them on a path."""
    if node not in graph.gpus:
        return True
    to_gpu = link.kind == PathType.NVL and link.target in graph.gpus
    return to_gpu and path.hops <= _MAX_HOPS_BEFORE_A_GPU


def _is_better(path: _Path, known: _Path | None) -> bool:
    return known is None or (known.hops >= path.hops and known.gbps < path.gbps)


def _extended(graph: _Graph, path: _Path, node: str, link: _Link) -> _Path:
    kind, ends = link.kind, {node, link.target}
    if ends <= graph.bridges:
        kind = PathType.PXB
    elif kind == PathType.PIX and ends & graph.cpus:
        kind = PathType.PHB
    elif node in graph.gpus and path.type == PathType.NVL == kind:
        kind = PathType.NVB
    return _Path(type=max(path.type, kind), hops=path.hops + 1, gbps=min(path.gbps, link.gbps))


@lru_cache(maxsize=64)
def _graph(machine: Machine) -> _Graph:
    """Each device's links, NVLink and C2C before PCI before links between CPUs.

    Beside the machine's own ids there is one `card ...` per network card, which joins its ports.
    """
    links: _Links = {device: [] for device in _end_devices(machine)}
    links.update({bridge.id: [] for bridge in machine.bridges})
    links.update({switch.id: [] for switch in machine.nvswitches})
    _add_nvlinks(machine, links)
    _add_pci(machine, links)
    for one in machine.numa_nodes:
        for other in machine.numa_nodes:
            if one != other:
                gbps = _between_cpus_gbps(one)
                links[one.id].append(_Link(target=other.id, kind=PathType.SYS, gbps=gbps))
    return _Graph(
        links=links,
        gpus=frozenset(gpu.id for gpu in machine.gpus),
        bridges=frozenset(bridge.id for bridge in machine.bridges),
        cpus=frozenset(node.id for node in machine.numa_nodes),
    )


def _join(links: _Links, one: str, other: str, kind: PathType, gbps: float) -> None:
    links[one].append(_Link(target=other, kind=kind, gbps=gbps))
    links[other].append(_Link(target=one, kind=kind, gbps=gbps))


def _add_nvlinks(machine: Machine, links: _Links) -> None:
    sm = {gpu.id: gpu.sm for gpu in machine.gpus}
    one_way = set(one_way_nvlinks(machine))
    for nvlink in machine.nvlinks:
        source, target = nvlink.source, nvlink.target
        if nvlink in one_way:
            continue
        if nvlink.kind == "c2c":
            _join(links, source, target, PathType.C2C, nvlink.count * _C2C_GBPS)
            continue
        gbps = nvlink.count * _nvlink_gbps(sm.get(source))
        if target[0] == "G":
            # The link back is listed with the other GPU.
            links[source].append(_Link(target=target, kind=PathType.NVL, gbps=gbps))
        else:
            _join(links, source, target, PathType.NVL, gbps)


def _add_pci(machine: Machine, links: _Links) -> None:
    merged = _flattened_bridges(machine)
    for nic in machine.nics:
        _add_nic(nic, merged.get(nic.parent, nic.parent), links)
    tree: list[PciBridge | Gpu] = [*machine.bridges, *machine.gpus]
    for device in tree:
        if device.id not in merged:
            parent = merged.get(device.parent, device.parent)
            _join(links, device.id, parent, PathType.PIX, _pci_gbps(device.link))


def _add_nic(nic: Nic, parent: str, links: _Links) -> None:
    card = f"card {nic.bus_id or nic.id}"
    if card not in links:
        links[card] = []
        gbps = _pci_gbps(nic.link) if nic.bus_id else _LOCAL_GBPS
        _join(links, card, parent, PathType.PIX, gbps)
    _join(links, nic.id, card, PathType.LOC, _LOCAL_GBPS)


def _nvlink_gbps(sm: int | None) -> float:
    for least, gbps in _NVLINK_GBPS:
        if sm is not None and sm >= least:
            return gbps
    return _NVLINK_DEFAULT_GBPS


def _pci_gbps(link: PciLink) -> float:
    lane = _PCI_LANE_GBPS.get(link.speed_gts or 0.0, _PCI_DEFAULT_LANE_GBPS)
    return (link.width or _PCI_DEFAULT_WIDTH) * lane


def _between_cpus_gbps(node: NumaNode) -> float:
    if node.arch in _OTHER_CPU_GBPS:
        return _OTHER_CPU_GBPS[node.arch]
    if node.vendor == "AuthenticAMD":
        return _AMD_GBPS
    for least, gbps in _INTEL_GBPS:
        if node.family == 6 and (node.model or 0) >= least:
            return gbps
    return _INTEL_DEFAULT_GBPS


def _flattened_bridges(machine: Machine) -> dict[str, str]:
    """Broadcom sub-switches -> the switch that NCCL merges them into.

    PEX switches show as two levels of bridges although they are one crossbar, so NCCL makes one of
    them, once: a third level stays (ncclTopoFlattenBcmSwitches).
    """
    merged: dict[str, str] = {}
    for bridge in sorted(machine.bridges, key=lambda b: len(machine.ancestors(b.id))):
        generation = _broadcom_generation(bridge, level=0)
        if generation is None or bridge.id in merged:
            continue
        for below in machine.bridges:
            same = _broadcom_generation(below, level=1) == generation
            if same and below.parent == bridge.id:
                merged[below.id] = bridge.id
    return merged


def _broadcom_generation(bridge: PciBridge, *, level: int) -> int | None:
    """PCIe generation of a PEX switch at this level (0 upper, 1 lower); None: no such switch."""
    ids = (bridge.vendor, bridge.device, bridge.subsystem_vendor, bridge.subsystem_device)
    vendor, device, subsystem, part = (_hex(text) for text in ids)
    if (vendor, device, subsystem) == (0x1000, 0xC010, 0x1000) and part & 0xF000 == 0xA000:
        return 4
    if (vendor, device, subsystem) == (0x1000, 0xC030, 0x1000) and part & 0xF000 == level * 0x1000:
        return 5
    return None


def _hex(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0
