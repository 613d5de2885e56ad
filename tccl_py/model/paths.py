"""Distances between devices, in NCCL's path types and by structure alone.

`tccl_py.nccl.paths` adds NCCL's bandwidths and policies. Source: graph/paths.cc and graph/topo.cc
of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import TypeVar

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge, Machine, PciBridge

T = TypeVar("T", int, str)


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


def path_type(machine: Machine, a: str, b: str) -> PathType:
    """Return NCCL's path type from device `a` to device `b` (GPUs, NICs, NUMA nodes).

    Settings and bandwidths are left out, and NVLinks between GPUs win over PCI; NCCL may prefer a
    PCI path as short as a path over a GPU, or reach another socket's CPU through an NVLinked GPU.
    One-way NVLinks do not count. InputError: no such device.
    """
    known = [end.id for end in (*machine.gpus, *machine.nics, *machine.numa_nodes)]
    for device in (a, b):
        if device not in known:
            what = f"is no GPU, NIC or NUMA node of machine {machine.name}"
            raise InputError(device, what, f"it has {', '.join(known)}")
    cards = {nic.id: nic.bus_id for nic in machine.nics}
    if a == b or (cards.get(a) and cards.get(a) == cards.get(b)):
        return PathType.LOC
    return min(_over_nvlinks(machine, a, b), _over_tree(machine, a, b))


def merged_bridges(machine: Machine) -> dict[str, str]:
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


def _over_nvlinks(machine: Machine, a: str, b: str) -> PathType:
    """Return NVL between GPUs directly or by a switch or CPU, NVB through a GPU, else DIS."""
    if (a[0], b[0]) != ("G", "G"):
        return PathType.DIS
    ways = {(link.source, link.target) for link in machine.nvlinks if link.kind != "c2c"}
    # Links to switches and CPUs are described by the GPU alone, those between GPUs by both.
    both = {(gpu, end) for gpu, end in ways if end[0] != "G" or (end, gpu) in ways}
    near, far = ({end for source, end in both if source == gpu} for gpu in (a, b))
    common = near & far
    if b in near or any(device[0] != "G" for device in common):
        return PathType.NVL
    return PathType.NVB if common else PathType.DIS


def _over_tree(machine: Machine, a: str, b: str) -> PathType:
    merged = merged_bridges(machine)
    above, below = _way_up(machine, merged, a), _way_up(machine, merged, b)
    common = next((device for device in above if device in below), None)
    if common is None:
        return PathType.SYS
    if common == above[-1]:
        return _over_cpu(machine, common, a, b)
    bridges = {*above[1 : above.index(common) + 1], *below[1 : below.index(common) + 1]}
    return PathType.PIX if len(bridges) == 1 else PathType.PXB


def _way_up(machine: Machine, merged: Mapping[str, str], device: str) -> tuple[str, ...]:
    ways = (device, *machine.ancestors(device))
    return tuple(dict.fromkeys(merged.get(place, place) for place in ways))


def _over_cpu(machine: Machine, cpu: str, a: str, b: str) -> PathType:
    kinds = {(link.source, link.target): link.kind for link in machine.nvlinks}
    legs = set()
    for device in (a, b):
        kind = kinds.get((device, cpu))
        linked = PathType.C2C if kind == "c2c" else PathType.NVL
        legs.add(PathType.LOC if device == cpu else linked if kind else PathType.PHB)
    if legs == {PathType.C2C, PathType.PHB} and "N" in (a[0], b[0]):
        return PathType.P2C
    return max(legs)


def natural_cuts(
    machine: Machine, knowledge: Knowledge, *, gpus: Sequence[int]
) -> tuple[frozenset[int], ...]:
    """Return groups of `gpus` that share a bridge, chip, node, socket or NVLinks, small first."""
    below: dict[str, set[int]] = {}
    for gpu in machine.gpus:
        if gpu.index in gpus:
            for ancestor in machine.ancestors(gpu.id):
                below.setdefault(ancestor, set()).add(gpu.index)
    for node in machine.numa_nodes:
        if node.socket is not None:
            below.setdefault(f"socket {node.socket}", set()).update(below.get(node.id, ()))
    for chip in joined_groups((link.one, link.other) for link in knowledge.hidden_links):
        together = set().union(*(below.get(part, set()) for part in chip))
        below.setdefault(" ".join(chip), set()).update(together)
    groups = {frozenset(group) for group in below.values()}
    links = [link for link in machine.nvlinks if link.source[0] == link.target[0] == "G"]
    bridged = joined_groups((int(link.source[1:]), int(link.target[1:])) for link in links)
    groups |= {frozenset(group) & set(gpus) for group in bridged}
    proper = [group for group in groups if 1 < len(group) < len(gpus)]
    return tuple(sorted(proper, key=lambda group: (len(group), sorted(group))))


def joined_groups(pairs: Iterable[tuple[T, T]], nodes: Iterable[T] = ()) -> list[list[T]]:
    """Return the connected components of a graph, each sorted; `nodes` are in even without pair."""
    import networkx as nx  # noqa: PLC0415 (slow to import, and few commands need it)

    graph = nx.Graph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(pairs)
    return [sorted(group) for group in nx.connected_components(graph)]
