"""Routes: the links of a transfer, and its properties for capacities and rules."""

from __future__ import annotations

import heapq
from typing import Literal

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.machine import Machine
from tccl_py.model.transfer import Flow, Place, Transfer
from tccl_py.simulator.model import Key, MachineModel

Edge = tuple[str, str]  # A link in one direction, from device to device

# NVLink wins over PCI where it exists; else the path over the fewest links does.
_COST = {"nvlink": 0.1, "xgmi": 0.1, "c2c": 0.1, "hidden": 1.0, "pci": 1.0, "smp": 1.0}
_Executor = Literal["kernel", "copy_engine", "nic"]
_EXECUTORS: dict[str, _Executor] = {"G": "kernel", "D": "copy_engine", "N": "nic"}


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer with its route and the properties that capacities and rules match.

    `keys` has the devices for each grouping key; a key that does not apply is absent:
    source_gpu: the GPU that the bytes come from;
    source_uplink: the device at the root port where the route goes up into a CPU;
    destination_root: the device at the root port where the bytes come down again. Bytes that end
        in host memory count as going there; in a bounce, as going to the root port of the GPU
        that will read them, since each reader's buffers are its own;
    memory: the NUMA node whose memory is one end;
    executor_gpu: the GPU whose SMs or copy engine move the bytes; absent where a NIC does.
    """

    edges: tuple[Edge, ...]
    operation: Literal["write", "read"]
    path: Literal["peer", "host", "bounce", "network"]
    crosses: Literal["socket", "numa", "nothing"]
    memory: Literal["own", "other", ""]
    executor: _Executor
    keys: dict[Key, str]


class Network:
    """The links of a model's machine, with hidden links, and the shortest paths."""

    def __init__(self, model: MachineModel) -> None:
        self.model = model
        self.machine: Machine = model.machine
        self.kinds: dict[Edge, str] = {}
        hidden = [(link.one, link.other, "hidden") for link in model.knowledge.hidden_links]
        for a, b, kind in (*self.machine.graph.edges(data="kind"), *hidden):
            self.kinds[a, b] = self.kinds[b, a] = kind
        self._neighbours: dict[str, list[str]] = {}
        for a, b in sorted(self.kinds):
            self._neighbours.setdefault(a, []).append(b)
        self.roots = frozenset(node.id for node in self.machine.numa_nodes)
        self._ends = frozenset(end.id for end in (*self.machine.gpus, *self.machine.nics))
        self._sockets = {node.id: node.socket for node in self.machine.numa_nodes}
        self._paths: dict[str, dict[str, str]] = {}

    def between_sockets(self, edge: Edge) -> bool:
        """Return whether a link joins two sockets; NUMA nodes of unknown socket have their own."""
        if self.kinds[edge] != "smp":
            return False
        one, other = (self._sockets[end] for end in edge)
        return one is None or other is None or one != other

    def path(self, source: str, destination: str) -> tuple[Edge, ...]:
        """Return the links from one device to another; MeasurementError without a path."""
        if source not in self._paths:
            self._paths[source] = self._search(source)
        previous = self._paths[source]
        if destination not in previous:
            raise MeasurementError(f"no link leads from {source} to {destination}")
        edges: list[Edge] = []
        while destination != source:
            edges.append((previous[destination], destination))
            destination = previous[destination]
        return tuple(reversed(edges))

    def _search(self, source: str) -> dict[str, str]:
        """Dijkstra from `source`; GPUs and NICs end paths and forward nothing."""
        costs = {source: 0.0}
        previous: dict[str, str] = {}
        queue = [(0.0, source)]
        while queue:
            cost, device = heapq.heappop(queue)
            if cost > costs[device] or (device != source and device in self._ends):
                continue
            for neighbour in self._neighbours.get(device, ()):
                further = cost + _COST[self.kinds[device, neighbour]]
                if further < costs.get(neighbour, float("inf")):
                    costs[neighbour] = further
                    previous[neighbour] = device
                    heapq.heappush(queue, (further, neighbour))
        return previous


def legs_of(network: Network, flow: Flow) -> tuple[Leg, ...]:
    """Return a leg for each transfer; InputError: no such device, MeasurementError: no access."""
    return tuple(_leg(network, flow, transfer) for transfer in flow.transfers)


def _leg(network: Network, flow: Flow, transfer: Transfer) -> Leg:
    source, destination = (_device(network, p) for p in (transfer.source, transfer.destination))
    _device(network, transfer.executor)
    kinds = transfer.source.kind + transfer.destination.kind
    if kinds == "GG":
        _check_access(network, transfer)
    edges = network.path(source, destination)
    halfway: Literal["bounce", "host"] = "bounce" if len(flow.transfers) > 1 else "host"
    return Leg(
        edges=edges,
        operation=transfer.operation,
        path="network" if "N" in kinds else halfway if "C" in kinds else "peer",
        crosses=_crossing(network, edges),
        memory=_memory(network.machine, transfer),
        executor=_EXECUTORS[transfer.executor.kind],
        keys=_keys(network, flow, transfer, edges),
    )


def _device(network: Network, place: Place) -> str:
    if place.host:
        right = "name of a way over the network this node's part, as G0->N0->N0"
        raise MeasurementError(f"{place} is on another host; leave {place.host}. out, and {right}")
    device = place.device
    if device not in network.machine.graph:
        alike = [name for name in network.machine.graph if name[0] == device[0]]
        known = [name for name in alike if name[1:].isdigit()]
        right = f"it has {', '.join(known) or 'none of this kind'}"
        raise InputError(str(place), f"is not in machine {network.machine.name}", right)
    return device


def _check_access(network: Network, transfer: Transfer) -> None:
    source, target = transfer.source.index, transfer.destination.index
    # A write needs the sender to reach the receiver's memory; a read the other way round.
    reach = (source, target) if transfer.operation == "write" else (target, source)
    if not network.model.knowledge.can_access(network.machine, *reach):
        raise MeasurementError(
            f"{transfer}: GPU {reach[0]} has no direct access to GPU {reach[1]} on "
            f"{network.machine.name}; bounce through host memory instead"
        )


def _crossing(network: Network, edges: tuple[Edge, ...]) -> Literal["socket", "numa", "nothing"]:
    smp = [edge for edge in edges if network.kinds[edge] == "smp"]
    if any(network.between_sockets(edge) for edge in smp):
        return "socket"
    return "numa" if smp else "nothing"


def _memory(machine: Machine, transfer: Transfer) -> Literal["own", "other", ""]:
    for end in (transfer.source, transfer.destination):
        if end.kind == "C":
            return "own" if end.index == machine.numa_of(transfer.executor.device) else "other"
    return ""


def _keys(
    network: Network, flow: Flow, transfer: Transfer, edges: tuple[Edge, ...]
) -> dict[Key, str]:
    keys: dict[Key, str] = {}
    if transfer.executor.kind != "N":
        keys["executor_gpu"] = transfer.executor.device
    if transfer.source.kind == "G":
        keys["source_gpu"] = str(transfer.source)
    for end in (transfer.source, transfer.destination):
        if end.kind == "C":
            keys["memory"] = str(end)
    for a, b in edges:
        if network.kinds[a, b] == "pci" and b in network.roots:
            keys["source_uplink"] = a
        if network.kinds[a, b] == "pci" and a in network.roots:
            keys["destination_root"] = b
    if transfer.destination.kind == "C":
        keys["destination_root"] = str(transfer.destination)
        if len(flow.transfers) > 1:
            reader = network.path(str(transfer.destination), str(flow.destination))
            ports = [b for a, b in reader if a in network.roots and b not in network.roots]
            keys["destination_root"] = ports[0]
    return keys
