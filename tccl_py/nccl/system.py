"""NCCL's view of a machine: nodes, and links with NCCL's model of their bandwidths.

Source: topo.cc of NCCL 2.30.7 (ncclTopoGetSystemFromXml and its callees).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise, permutations
from typing import Literal

from tccl_py.errors import require
from tccl_py.model.machine import Machine, Nic, PciBridge
from tccl_py.nccl.versions import (
    ASSUMED,
    C2C_GBPS,
    DEFAULT_NET_MBPS,
    LOCAL_GBPS,
    MBPS_PER_GBPS,
    VersionFacts,
    between_cpus_gbps,
    nvlink_gbps,
    pci_gbps,
    version_facts,
)

Kind = Literal["gpu", "pci", "nvs", "cpu", "nic", "net"]

_UNKNOWN_SM = 80
"""A GPU whose sm nobody reported counts as this."""


class PathType(IntEnum):
    """The kinds of path, from near to far; comparable (`PathType.PIX < PathType.PHB`).

    LOC the device itself; NVL NVLink; NVB NVLink through one GPU; C2C chip to chip; PIX one PCI
    bridge; PXB several; P2C to a NIC over C2C; PXN to a NIC through an NVLinked GPU; PHB over the
    CPU; SYS over two CPUs; NET over the network; DIS no path. Links have the same types, where one
    PCI link is PIX and a NIC's port NET.
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
    NET = 10
    DIS = 11


@dataclass(slots=True)
class TopoLink:
    """A one-way link; `index` numbers it within its system."""

    index: int
    type: PathType
    gbps: float
    source: str
    target: str


@dataclass(slots=True)
class TopoNode:
    """A device, its links in the order NCCL walks them."""

    kind: Kind
    links: list[TopoLink] = field(default_factory=list)


@dataclass(slots=True)
class System:
    """The nodes of a machine seen by a communicator over some of its GPUs.

    Ids are in the order of the PCI tree.
    """

    machine: Machine
    nodes: dict[str, TopoNode]
    gpus: tuple[str, ...]
    nets: tuple[str, ...]
    cpus: tuple[str, ...]
    nvs: tuple[str, ...]
    sm: dict[str, int]
    links: dict[tuple[str, str, PathType], TopoLink]
    rules: VersionFacts
    gpu_direct: frozenset[tuple[str, str]] = frozenset()
    """The pairs of GPU and port that support GPU direct RDMA."""

    @property
    def sm_min(self) -> int:
        """The lowest compute capability among the GPUs."""
        return min(self.sm.values())

    @property
    def vendor(self) -> str:
        """The vendor of x86 CPUs, else ""; NCCL takes all CPUs to be like the first."""
        first = next(node for node in self.machine.numa_nodes if node.id == self.cpus[0])
        return first.vendor if first.arch in ("x86_64", "x86", "amd64") else ""

    def connect(self, source: str, target: str, kind: PathType, gbps: float) -> None:
        """Add a link, or widen an existing link; a node's links stay sorted, widest first."""
        links = self.nodes[source].links
        new = TopoLink(len(self.links), kind, 0.0, source, target)
        link = self.links.setdefault((source, target, kind), new)
        if link is not new:
            links.remove(link)
        link.gbps += gbps
        place = len(links)
        while place and links[place - 1].gbps < link.gbps:
            place -= 1
        links.insert(place, link)

    def back(self, link: TopoLink) -> TopoLink:
        """Return the link backwards, of the same type."""
        return self.links[link.target, link.source, link.type]

    def join(self, first: str, second: str, kind: PathType, gbps: float) -> None:
        """Add links in both directions, or widen them."""
        self.connect(first, second, kind, gbps)
        self.connect(second, first, kind, gbps)


def build_system(
    machine: Machine,
    *,
    gpus: Sequence[int] | None = None,
    nics: Sequence[int] | None = None,
    version: str = ASSUMED,
) -> System:
    """Return NCCL's view for ranks on `gpus` (NVML indices), with usable `nics`; None is all."""
    indices = machine.gpu_indices if gpus is None else tuple(gpus)
    different = 0 < len(set(indices)) == len(indices)
    require(different, "GPUs of a communicator", f"are {indices}", "name at least one, each once")
    chosen = tuple(machine.gpu(index).id for index in indices)
    ports = [nic for nic in machine.nics if nics is None or nic.index in nics]
    rules = version_facts(version)
    below = _fused_tree(machine, chosen, ports, rules)
    system = _nodes(machine, chosen, ports, below, rules)
    flat = _flatten(machine, below)
    for cpu in system.cpus:
        _add_below(system, cpu, flat)
    _add_nvlinks(system)
    numa = {node.id: node for node in machine.numa_nodes}
    for source, target in permutations(system.cpus, 2):
        system.connect(source, target, PathType.SYS, between_cpus_gbps(numa[source], rules))
    for cpu in system.cpus:
        _sort_links(system, cpu, None)
    where, right = f"machine {machine.name}", "NCCL fails at init without both directions"
    for source, target, kind in system.links:
        fault = f"an NVLink goes from {source} to {target} but not back"
        require((target, source, kind) in system.links, where, fault, right)
    return system


def _fused_tree(
    machine: Machine, gpus: Sequence[str], ports: Sequence[Nic], rules: VersionFacts
) -> dict[str, list[str]]:
    """Return the children of every parent in NCCL's order; children of "" are CPUs.

    A rank meets first the ancestors of its own GPU, then those of the NICs, and sorts the children
    of CPUs and bridges by bus id. Its view is added to the views of earlier ranks
    (ncclTopoGetSystem and ncclTopoFuseXml, without NCCL_TOPO_FILE).
    """
    bus = {device.id: device.bus_id.lower() or "~" for device in machine.pci_devices}
    nets = [port.id for port in sorted(ports, key=lambda port: port.index)]
    fused: dict[str, list[str]] = {}
    for own_gpus in [[gpu] for gpu in gpus] if rules.fuses_topologies else [gpus]:
        children_of: dict[str, dict[str, None]] = {}
        for device in (*own_gpus, *nets):
            for child, parent in pairwise((device, *machine.ancestors(device), "")):
                children_of.setdefault(parent, {})[child] = None
        for parent, children in children_of.items():
            fused_children = fused.setdefault(parent, [])
            new = [child for child in children if child not in fused_children]
            fused_children += sorted(new, key=bus.__getitem__) if parent else new
    return fused


def _walk(tree: Mapping[str, Sequence[str]], parent: str = "") -> Iterator[str]:
    for child in tree.get(parent, ()):
        yield child
        yield from _walk(tree, child)


def _nodes(
    machine: Machine,
    chosen: Sequence[str],
    ports: Sequence[Nic],
    below: Mapping[str, Sequence[str]],
    rules: VersionFacts,
) -> System:
    order = list(_walk(below))
    kinds: dict[str, Kind] = dict.fromkeys(below[""], "cpu")
    kinds.update((name, "pci") for name in below if name and name not in kinds)
    kinds.update((name, "gpu") for name in chosen)
    for nic in ports:
        kinds[_card(nic)] = "nic"
        kinds[nic.id] = "net"
    linked = {link.target for link in machine.nvlinks if link.source in chosen}
    switches = [switch.id for switch in machine.nvswitches if switch.id in linked][:1]
    kinds.update((switch, "nvs") for switch in switches)
    return System(
        machine=machine,
        nodes={name: TopoNode(kind) for name, kind in kinds.items()},
        gpus=tuple(name for name in order if kinds[name] == "gpu"),
        nets=tuple(name for name in order if kinds[name] == "net"),
        cpus=tuple(below[""]),
        nvs=tuple(switches),
        sm={gpu.id: gpu.sm or _UNKNOWN_SM for gpu in machine.gpus if gpu.id in chosen},
        links={},
        rules=rules,
        gpu_direct=frozenset(
            (gpu.id, nic.id) for gpu in machine.gpus if gpu.gdr for nic in ports if nic.gdr
        ),
    )


def _card(nic: Nic) -> str:
    """Return the card of a port, a node of its own in NCCL's view."""
    return f"nic {nic.bus_id}" if nic.bus_id else f"nic of {nic.id}"


def _flatten(machine: Machine, below: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the tree with the second level of Broadcom switches merged into the first."""
    merged = _merged_bridges(machine)
    flat = {}
    for parent, children in below.items():
        inner = [child for child in children if child in merged]
        flat[parent] = [child for child in children if child not in merged]
        flat[parent] += [child for bridge in inner for child in below[bridge]]
    return flat


def _merged_bridges(machine: Machine) -> dict[str, str]:
    """Return Broadcom sub-switches -> the switch above: NCCL merges two levels, once."""
    kinds = {bridge.id: _broadcom(bridge) for bridge in machine.bridges}
    merged: dict[str, str] = {}
    for bridge in sorted(kinds, key=lambda bridge: len(machine.ancestors(bridge))):
        above = machine.parents[bridge]
        top, low = kinds.get(above), kinds[bridge]
        if top is None or low is None or above in merged or top[0] != low[0]:
            continue
        if top[1] in (-1, 0) and low[1] in (-1, 1):
            merged[bridge] = above
    return merged


def _broadcom(bridge: PciBridge) -> tuple[int, int] | None:
    """Return PCIe generation and level (0 upper, 1 lower, -1 either) of a PEX switch, or None."""
    parts = (bridge.vendor, bridge.device, bridge.subsystem_vendor, bridge.subsystem_device)
    try:
        vendor, device, sub_vendor, sub_device = (int(part, 16) for part in parts)
    except ValueError:
        return None
    if (vendor, sub_vendor) != (0x1000, 0x1000):
        return None
    if device == 0xC010 and sub_device >> 12 == 0xA:
        return 4, -1
    if device == 0xC030 and sub_device >> 12 in (0, 1):
        return 5, sub_device >> 12
    return None


def _add_below(system: System, parent: str, below: Mapping[str, Sequence[str]]) -> None:
    for device in below.get(parent, ()):
        _add_below(system, device, below)
        if device in system.nets:
            _add_net(system, device, parent)
        else:
            speed = system.rules.unknown_gts if device in system.sm else 8.0
            gbps = pci_gbps(system.machine.links[device], unknown_gts=speed)
            system.join(device, parent, PathType.PIX, gbps)


def _add_net(system: System, device: str, parent: str) -> None:
    nic = next(port for port in system.machine.nics if port.id == device)
    card = _card(nic)
    speed = (nic.speed_mbps if nic.speed_mbps > 0 else DEFAULT_NET_MBPS) / MBPS_PER_GBPS
    system.join(card, device, PathType.NET, speed)
    if all(link.target != parent for link in system.nodes[card].links):
        gbps = pci_gbps(nic.link) if nic.bus_id else LOCAL_GBPS
        system.join(card, parent, PathType.PIX, gbps)


def _add_nvlinks(system: System) -> None:
    switches = {switch.id for switch in system.machine.nvswitches}
    chosen = {gpu: place for place, gpu in enumerate(system.gpus)}
    links = [link for link in system.machine.nvlinks if link.source in chosen]
    for link in sorted(links, key=lambda link: chosen[link.source]):
        source, target = link.source, link.target
        if target in switches:
            target = system.nvs[0]
        elif target not in chosen and target not in system.cpus:
            continue
        kind = PathType.C2C if link.kind == "c2c" else PathType.NVL
        gbps = C2C_GBPS if link.kind == "c2c" else nvlink_gbps(system.sm[source], system.rules)
        system.connect(source, target, kind, link.count * gbps)
        if target not in chosen:
            system.connect(target, source, kind, link.count * gbps)


def _sort_links(system: System, name: str, up: str | None) -> None:
    """Move the link to the parent behind all siblings, at every level."""
    links = system.nodes[name].links
    for link in [link for link in links if link.target == up]:
        links.remove(link)
        links.append(link)
    for link in links:
        if link.type == PathType.PIX and link.target != up:
            _sort_links(system, link.target, name)
