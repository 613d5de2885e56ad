"""Routes and properties of transfers; limits of executors, fair sharing, and congestion rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.machine import Machine
from tccl_py.model.transfer import Flow, Place, Transfer
from tccl_py.simulator.model import (
    Congestion,
    ExecutorLimit,
    Figure,
    Figures,
    Key,
    MachineModel,
    Member,
    Traffic,
    figures_in,
)

Edge = tuple[str, str]  # A link in one direction, from device to device

# NVLink wins over PCI where it exists; else the path over the fewest links does.
_COST = {"nvlink": 0.1, "xgmi": 0.1, "c2c": 0.1, "hidden": 1.0, "pci": 1.0, "smp": 1.0}
_Executor = Literal["kernel", "copy_engine", "nic"]
_EXECUTORS: dict[str, _Executor] = {"G": "kernel", "D": "copy_engine", "N": "nic"}


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer with its route and the properties that capacities and rules match."""

    edges: tuple[Edge, ...]
    operation: Literal["write", "read"]
    path: Literal["peer", "host", "bounce", "network"]
    crosses: Literal["socket", "numa", "nothing"]
    memory: Literal["own", "other", ""]
    executor: _Executor
    keys: dict[Key, str]
    """The device for each grouping key that applies.

    source_gpu: the GPU that the bytes come from;
    source_uplink: the device at the root port where the route goes up into a CPU;
    destination_root: the device at the root port where the bytes come down again. Bytes that end
        in host memory count as going there; in a bounce, as going to the root port of the GPU
        that will read them, since each reader's buffers are its own;
    memory: the NUMA node whose memory is one end;
    executor_gpu: the GPU whose SMs or copy engine move the bytes; absent where a NIC does;
    nic: the NIC at one end.
    """


class Network:
    """The links of a model's machine, with hidden links, and the shortest paths."""

    def __init__(self, model: MachineModel) -> None:
        self.model = model
        self.machine: Machine = model.machine
        self.kinds: dict[Edge, str] = {}
        self._graph = self.machine.graph.copy()
        for link in model.knowledge.hidden_links:
            self._graph.add_edge(link.one, link.other, kind="hidden")
        for a, b, kind in self._graph.edges(data="kind"):
            self.kinds[a, b] = self.kinds[b, a] = kind
        self.roots = frozenset(node.id for node in self.machine.numa_nodes)
        self._ends = frozenset(end.id for end in (*self.machine.gpus, *self.machine.nics))
        self._sockets = {node.id: node.socket for node in self.machine.numa_nodes}
        self._paths: dict[str, dict[str, list[str]]] = {}

    def between_sockets(self, edge: Edge) -> bool:
        """Return whether a link joins two sockets; NUMA nodes of unknown socket have their own."""
        if self.kinds[edge] != "smp":
            return False
        first, second = (self._sockets[end] for end in edge)
        return first is None or second is None or first != second

    def path(self, source: str, destination: str) -> tuple[Edge, ...]:
        """Return the links from one device to another; MeasurementError without a path."""
        if source not in self._paths:
            self._paths[source] = self._paths_from(source)
        if destination not in self._paths[source]:
            raise MeasurementError(f"no link leads from {source} to {destination}")
        return tuple(pairwise(self._paths[source][destination]))

    def _paths_from(self, source: str) -> dict[str, list[str]]:
        """Return the shortest path to each device; GPUs and NICs end paths and forward nothing."""
        import networkx as nx  # noqa: PLC0415 (slow to import: commands that measure need none)

        def cost(device: str, further: str, _: object) -> float | None:
            ends = device in self._ends and device != source
            return None if ends else _COST[self.kinds[device, further]]

        found: dict[str, list[str]] = {}
        if source in self._graph:
            found = nx.single_source_dijkstra_path(self._graph, source, weight=cost)
        return found


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
    crosses: Literal["socket", "numa", "nothing"] = "nothing"
    if any(network.kinds[edge] == "smp" for edge in edges):
        crosses = "socket" if any(map(network.between_sockets, edges)) else "numa"
    halfway: Literal["bounce", "host"] = "bounce" if len(flow.transfers) > 1 else "host"
    keys = _keys(network, flow, transfer, edges)
    memory: Literal["own", "other", ""] = ""
    if "memory" in keys:
        near_node = f"C{network.machine.numa_of(transfer.executor.device)}"
        memory = "own" if keys["memory"] == near_node else "other"
    return Leg(
        edges=edges,
        operation=transfer.operation,
        path="network" if "N" in kinds else halfway if "C" in kinds else "peer",
        crosses=crosses,
        memory=memory,
        executor=_EXECUTORS[transfer.executor.kind],
        keys=keys,
    )


def _device(network: Network, place: Place) -> str:
    if place.host:
        right = "name of a way over the network this node's part, as G0->N0->N0"
        raise MeasurementError(f"{place} is on another host; leave {place.host}. out, and {right}")
    device = place.device
    if device not in network.machine.graph:
        of_kind = [name for name in network.machine.graph if name[0] == device[0]]
        numbered = [name for name in of_kind if name[1:].isdigit()]
        right = f"it has {', '.join(numbered) or 'none of this kind'}"
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
        if end.kind == "N":
            keys["nic"] = str(end)
    for a, b in edges:
        if network.kinds[a, b] == "pci" and b in network.roots:
            keys["source_uplink"] = a
        if network.kinds[a, b] == "pci" and a in network.roots:
            keys["destination_root"] = b
    if transfer.destination.kind == "C":
        keys["destination_root"] = str(transfer.destination)
        if len(flow.transfers) > 1:
            reader = network.path(str(transfer.destination), _device(network, flow.destination))
            ports = [b for a, b in reader if a in network.roots and b not in network.roots]
            keys["destination_root"] = ports[0]
    return keys


# Limits of executors, max-min fair sharing, and congestion rules.
def applies(limit: ExecutorLimit, network: Network, flow: Flow, legs: tuple[Leg, ...]) -> bool:
    """Return whether a limit is about this flow; a NIC's FIFO in host memory is as a bounce."""
    piped = flow.is_bounce or (flow.is_network and any("memory" in leg.keys for leg in legs))
    if (limit.path == "bounce") != piped:
        return False
    return any(
        leg.executor == limit.executor
        and limit.operation in ("any", leg.operation)
        and limit.over in ("any", _over(network, leg))
        for leg in legs
    )


def _over(network: Network, leg: Leg) -> str:
    kinds = {network.kinds[edge] for edge in leg.edges}
    return "nvlink" if kinds <= {"nvlink", "xgmi", "c2c"} else "pci"


def figures_used(limit: ExecutorLimit, flow: Flow) -> tuple[Figure, ...]:
    """Return the figures behind a flow's limit; without blocks, the ceiling only."""
    used = [limit.ceiling]
    if _blocks(limit, flow) is not None:
        used += [limit.per_block, limit.latency_us if limit.path == "bounce" else None]
    return tuple(figure for figure in used if figure is not None)


def unbent(limit: ExecutorLimit, figures: Figures, flow: Flow) -> float:
    """Return the rate of a flow's blocks without the ceiling, GB/s; inf if it names none."""
    blocks = _blocks(limit, flow)
    if blocks is None or limit.per_block is None:
        return math.inf
    rate = figures.value(limit.per_block)
    # A direct flow's FIFO lies in GPU memory: its size is not known to matter.
    if limit.latency_us is None or flow.fifo is None or limit.path != "bounce":
        return blocks * rate
    size = flow.fifo.bytes
    if limit.executor == "copy_engine":
        size = max(1, size // flow.fifo.slots)
    # 1 GB/s is 1000 bytes a microsecond.
    micros = figures.value(limit.latency_us) + size / (rate * 1000.0)
    return blocks * (size / micros / 1000.0)


def bent(limit: ExecutorLimit, figures: Figures, together: float) -> float:
    """Return the rate of blocks under the ceiling; `together` is the rate without a ceiling."""
    ceiling = figures.value(limit.ceiling) if limit.ceiling is not None else math.inf
    if math.inf in (together, ceiling):
        return min(together, ceiling)
    # Scaled by the smaller of the two, so that powers neither overflow nor vanish.
    small, large = sorted((together, ceiling))
    bend: float = (1.0 + (small / large) ** limit.sharpness) ** (-1.0 / limit.sharpness)
    return small * bend


def _blocks(limit: ExecutorLimit, flow: Flow) -> int | None:
    return 1 if limit.executor == "copy_engine" else flow.blocks


# Max-min fair sharing: no flow can get more without taking from a flow that has less.


Bound = dict[int, float]  # Flow -> the bound's part that 1 GB/s takes; their sum is at most 1

_TIE = 1.0 + 1e-12  # Bounds that tighten at the same rate but for rounding are one bottleneck


def max_min_rates(count: int, bounds: Sequence[Bound]) -> list[float]:
    """Return the rates of `count` flows under bounds, by progressive filling; inf without any."""
    rates = [math.inf] * count
    room = [1.0] * len(bounds)
    pull = [sum(bound.values()) for bound in bounds]
    growing = [len(bound) for bound in bounds]
    bounds_of: list[list[int]] = [[] for _ in range(count)]
    for index, bound in enumerate(bounds):
        for flow in bound:
            bounds_of[flow].append(index)
    alive = [index for index, bound in enumerate(bounds) if bound]
    while alive:
        # 1. All growing rates rise together until the first bounds are full.
        level = min(room[index] / pull[index] for index in alive)
        full = [index for index in alive if room[index] <= level * _TIE * pull[index]]
        # 2. Every flow in them keeps this rate, and takes its share of its other bounds.
        stopped = {f for index in full for f in bounds[index] if rates[f] == math.inf}
        for flow in stopped:
            rates[flow] = level
            for index in bounds_of[flow]:
                share = bounds[index][flow]
                room[index] = max(room[index] - share * level, 0.0)
                pull[index] -= share
                growing[index] -= 1
        alive = [index for index in alive if growing[index]]
    return rates


class Role(NamedTuple):
    """The part of a flow's leg in a rule: the member, the group, and the keys to count."""

    rule: int
    member: int
    group: str
    leg: int
    keys: dict[Key, str]


def matches(traffic: Traffic, leg: Leg) -> bool:
    """Return whether a leg is of this traffic."""
    fields = traffic.__struct_fields__
    return all(getattr(traffic, name) in ("any", getattr(leg, name)) for name in fields)


def roles(rules: Sequence[Congestion], number: int, leg: Leg) -> Iterator[Role]:
    """Yield the parts that leg `number` of a flow may have in rules."""
    groups: dict[Key, str] = {**leg.keys, "transfer": ""}
    for place, rule in enumerate(rules):
        for index, member in enumerate(rule.members):
            if rule.together_at in groups and matches(member.traffic, leg):
                yield Role(place, index, groups[rule.together_at], number, leg.keys)


def congestion_bounds(
    rules: Sequence[Congestion], flows: Sequence[Sequence[Role]], figures: Figures
) -> Iterator[tuple[list[Bound], bool]]:
    """Yield the bounds of each rule in force on each group, and whether any bound is assumed."""
    groups: dict[tuple[int, str], list[tuple[int, Role]]] = {}
    for flow, own in enumerate(flows):
        for role in own:
            alone = f"{flow}/{role.leg}" if rules[role.rule].together_at == "transfer" else ""
            groups.setdefault((role.rule, role.group + alone), []).append((flow, role))
    for (number, _), group in groups.items():
        rule = rules[number]
        present = [rule.members[index] for index in sorted({role.member for _, role in group})]
        applies = rule.needs == "any" or len(present) == len(rule.members)
        # The different values of each key; each leg is a transfer of its own.
        keys = [{**role.keys, "transfer": (flow, role.leg)} for flow, role in group]
        least = rule.at_least.items()
        if applies and all(len({k[key] for k in keys if key in k}) >= n for key, n in least):
            yield _bounds(rule, present, group, figures)


def _bounds(
    rule: Congestion,
    present: Sequence[Member],
    group: Sequence[tuple[int, Role]],
    figures: Figures,
) -> tuple[list[Bound], bool]:
    used = [figure for member in present for figure in figures_in(member).values()]
    bounds: list[Bound] = []
    totals = [figures.value(member.total) for member in present if member.total is not None]
    if totals:
        legs = Counter(flow for flow, _ in {(flow, role.leg) for flow, role in group})
        bounds.append({flow: sum([1.0 / min(totals)] * count) for flow, count in legs.items()})
    for flow, role in group:
        share = rule.members[role.member].each
        if share is not None:
            bounds.append({flow: 1.0 / figures.value(share)})
    return bounds, any(figures.is_assumed(figure) for figure in used)
