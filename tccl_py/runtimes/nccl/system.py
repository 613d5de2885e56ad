"""NCCL's view of a machine: nodes and links with the bandwidths it believes in.

Source: topo.cc of NCCL 2.30.7 (ncclTopoGetSystemFromXml and what it calls).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tccl_py.errors import InputError
from tccl_py.runtimes.nccl.bandwidths import (
    C2C_GBPS,
    DEFAULT_NET_MBPS,
    LOCAL_GBPS,
    MBPS_PER_GBPS,
    between_cpus_gbps,
    nvlink_gbps,
    pci_gbps,
)
from tccl_py.topology.machine import Machine, Nic
from tccl_py.topology.paths import PathType, merged_bridges

Kind = Literal["gpu", "pci", "nvs", "cpu", "nic", "net"]

_UNKNOWN_SM = 80
"""A GPU whose sm nobody reported counts as this."""


@dataclass(slots=True)
class Link:
    """A one-way link; `index` numbers it within its system."""

    index: int
    type: PathType
    gbps: float
    source: str
    target: str


@dataclass(slots=True)
class Node:
    """A device, its links in the order NCCL walks them."""

    id: str
    kind: Kind
    links: list[Link] = field(default_factory=list)


@dataclass(slots=True)
class System:
    """The nodes of a machine seen by a communicator over some of its GPUs.

    `gpus` are ids in NCCL's own order (that of the PCI tree), `nets` and `cpus` likewise.
    `gpu_direct` are the pairs of GPU and port that support GPU direct RDMA.
    """

    machine: Machine
    nodes: dict[str, Node]
    gpus: tuple[str, ...]
    nets: tuple[str, ...]
    cpus: tuple[str, ...]
    nvs: tuple[str, ...]
    sm: dict[str, int]
    links: list[Link]
    gpu_direct: frozenset[tuple[str, str]] = frozenset()

    @property
    def sm_min(self) -> int:
        """The lowest compute capability among the GPUs."""
        return min(self.sm.values())

    @property
    def intel(self) -> bool:
        """Whether the CPUs are Intel's; NCCL takes all CPUs to be like the first."""
        first = self.machine.numa_nodes[0]
        return is_x86(first.arch) and first.vendor == "GenuineIntel"

    @property
    def amd(self) -> bool:
        """Whether the CPUs are AMD's."""
        first = self.machine.numa_nodes[0]
        return is_x86(first.arch) and first.vendor == "AuthenticAMD"

    def connect(self, source: str, target: str, kind: PathType, gbps: float) -> None:
        """Add a link, or widen the one there is; a node's links stay sorted, widest first."""
        links = self.nodes[source].links
        found = next((one for one in links if one.target == target and one.type == kind), None)
        if found is None:
            found = Link(len(self.links), kind, 0.0, source, target)
            self.links.append(found)
        else:
            links.remove(found)
        found.gbps += gbps
        place = len(links)
        while place and links[place - 1].gbps < found.gbps:
            place -= 1
        links.insert(place, found)


def is_x86(arch: str) -> bool:
    """Whether this is what NCCL calls x86_64."""
    return arch in ("x86_64", "x86", "amd64")


def build_system(
    machine: Machine, *, gpus: Sequence[int] | None = None, nics: Sequence[int] | None = None
) -> System:
    """NCCL's view of `machine` for a communicator over `gpus` (NVML indices; None is all).

    `nics` are the numbers of the NICs that it may use; None is all.

    Raises:
        InputError: no GPU, an unknown or doubled one, or an NVLink that goes one way only.
    """
    chosen = _checked(machine, gpus)
    ports = [nic for nic in machine.nics if nics is None or nic.index in nics]
    system = _nodes(machine, chosen, ports)
    parents, bridges = _flattened(machine)
    for cpu in system.cpus:
        _add_below(system, cpu, _children(system, parents, bridges))
    _add_nvlinks(system, chosen)
    _connect_cpus(system)
    for cpu in system.cpus:
        _sort_links(system, cpu, None)
    _check_both_ways(system)
    return system


def _checked(machine: Machine, gpus: Sequence[int] | None) -> frozenset[str]:
    wanted = machine.gpu_indices if gpus is None else tuple(gpus)
    if not wanted:
        raise InputError("GPUs of a communicator", "are none", "name at least one")
    if len(set(wanted)) != len(wanted):
        raise InputError("GPUs of a communicator", "name one twice", "name each once")
    return frozenset(machine.gpu(index).id for index in wanted)


def _nodes(machine: Machine, chosen: frozenset[str], ports: Sequence[Nic]) -> System:
    kinds: dict[str, Kind] = {cpu.id: "cpu" for cpu in machine.numa_nodes}
    kinds.update((bridge.id, "pci") for bridge in machine.bridges)
    kinds.update((gpu.id, "gpu") for gpu in machine.gpus if gpu.id in chosen)
    for nic in ports:
        kinds[_card(nic)] = "nic"
        kinds[nic.id] = "net"
    switches = tuple(switch.id for switch in machine.nvswitches)[:1]
    kinds.update((switch, "nvs") for switch in switches)
    return System(
        machine=machine,
        nodes={name: Node(name, kind) for name, kind in kinds.items()},
        gpus=_tree_order(machine, [gpu.id for gpu in machine.gpus if gpu.id in chosen]),
        nets=_tree_order(machine, [nic.id for nic in ports]),
        cpus=tuple(cpu.id for cpu in machine.numa_nodes),
        nvs=switches,
        sm={gpu.id: gpu.sm or _UNKNOWN_SM for gpu in machine.gpus if gpu.id in chosen},
        links=[],
        gpu_direct=frozenset(
            (gpu.id, nic.id) for gpu in machine.gpus if gpu.gdr for nic in ports if nic.gdr
        ),
    )


def _card(nic: Nic) -> str:
    """The card that ports share, a node of its own in NCCL's view."""
    return f"nic {nic.bus_id}" if nic.bus_id else f"nic of {nic.id}"


def _bus(machine: Machine) -> dict[str, str]:
    names = {bridge.id: bridge.bus_id for bridge in machine.bridges}
    names.update((gpu.id, gpu.bus_id) for gpu in machine.gpus)
    names.update((nic.id, nic.bus_id) for nic in machine.nics)
    return {device: bus_id.lower() or "~" for device, bus_id in names.items()}


def _tree_order(machine: Machine, devices: Sequence[str]) -> tuple[str, ...]:
    """Devices in the order of the PCI tree: by NUMA node, then by bus id at every level."""
    bus = _bus(machine)
    order = {node.id: position for position, node in enumerate(machine.numa_nodes)}

    def place(device: str) -> tuple[int, tuple[str, ...]]:
        *bridges, root = machine.ancestors(device)
        return order[root], tuple(bus[one] for one in (*reversed(bridges), device))

    return tuple(sorted(devices, key=place))


def _flattened(machine: Machine) -> tuple[dict[str, str], frozenset[str]]:
    """Parents after the second level of Broadcom switches is merged into the first."""
    merged = merged_bridges(machine)
    parents = {
        device: merged.get(parent, parent)
        for device, parent in machine.parents.items()
        if device not in merged
    }
    return parents, frozenset(merged)


def _children(
    system: System, parents: dict[str, str], merged: frozenset[str]
) -> dict[str, list[str]]:
    machine = system.machine
    left_out = {gpu.id for gpu in machine.gpus} - {*system.gpus}
    left_out |= {nic.id for nic in machine.nics} - {*system.nets}
    devices = [one for one in parents if one not in merged and one not in left_out]
    below: dict[str, list[str]] = {}
    for device in _tree_order(machine, devices):
        below.setdefault(parents[device], []).append(device)
    return below


def _add_below(system: System, parent: str, below: dict[str, list[str]]) -> None:
    for device in below.get(parent, ()):
        _add_below(system, device, below)
        if device in system.nets:
            _add_net(system, device, parent)
        else:
            gbps = pci_gbps(system.machine.links[device])
            system.connect(device, parent, PathType.PIX, gbps)
            system.connect(parent, device, PathType.PIX, gbps)


def _add_net(system: System, device: str, parent: str) -> None:
    nic = next(one for one in system.machine.nics if one.id == device)
    card = _card(nic)
    speed = (nic.speed_mbps if nic.speed_mbps > 0 else DEFAULT_NET_MBPS) / MBPS_PER_GBPS
    for source, target in ((card, device), (device, card)):
        system.connect(source, target, PathType.NET, speed)
    if any(link.target == parent for link in system.nodes[card].links):
        return
    gbps = pci_gbps(nic.link) if nic.bus_id else LOCAL_GBPS
    for source, target in ((card, parent), (parent, card)):
        system.connect(source, target, PathType.PIX, gbps)


def _add_nvlinks(system: System, chosen: frozenset[str]) -> None:
    switches = {switch.id for switch in system.machine.nvswitches}
    for link in system.machine.nvlinks:
        source, target = link.source, link.target
        if source in chosen and target in switches:
            target = system.nvs[0]
        elif source not in chosen or (target not in chosen and target not in system.cpus):
            continue
        kind = PathType.C2C if link.kind == "c2c" else PathType.NVL
        each = C2C_GBPS if link.kind == "c2c" else nvlink_gbps(system.sm[source])
        system.connect(source, target, kind, link.count * each)
        if target not in chosen:
            system.connect(target, source, kind, link.count * each)


def _connect_cpus(system: System) -> None:
    for node in system.machine.numa_nodes:
        for other in system.cpus:
            if other != node.id:
                system.connect(node.id, other, PathType.SYS, between_cpus_gbps(node))


def _sort_links(system: System, name: str, up: str | None) -> None:
    """Move the link to the parent behind all others, at every level."""
    links = system.nodes[name].links
    for link in [one for one in links if one.target == up]:
        links.remove(link)
        links.append(link)
    for link in links:
        if link.type == PathType.PIX and link.target != up:
            _sort_links(system, link.target, name)


def _check_both_ways(system: System) -> None:
    ways = {(link.source, link.target, link.type) for link in system.links}
    for source, target, kind in ways:
        if (target, source, kind) not in ways:
            raise InputError(
                f"machine {system.machine.name}",
                f"an NVLink goes from {source} to {target} but not back",
                "NCCL fails at init unless both directions are described",
            )
