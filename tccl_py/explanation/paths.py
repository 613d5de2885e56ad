"""The parts of a machine on the paths of flows, parts that flows share, and collapsing writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.rings import direct_write
from tccl_py.model.transfer import Flow, Transfer, TransferSet, index_of, transfer_set
from tccl_py.plan.plan import Plan
from tccl_py.simulator.descriptions import model_for
from tccl_py.simulator.routes import Edge, Network

Kind = Literal["uplink", "chip", "socket", "numa", "memory", "nvlink", "own", "switch", "cpu"]
"""The kinds of parts, in the order in which shared parts are named."""
_VAGUE = ("switch", "cpu")
"""Parts named only where flows share nothing else."""
_DIRECTIONS = ("upwards", "downwards")


class Part(NamedTuple):
    """A link, switch, memory or CPU of a machine; `device` is the device below a link."""

    kind: Kind
    device: str
    words: str


class Passing(NamedTuple):
    """A flow through a part: `up`, away from GPUs, `down`, or "" without any direction."""

    part: Part
    direction: Literal["up", "down", ""] = ""

    @property
    def words(self) -> str:
        """The part, and the direction in words."""
        part, up = self.part, self.direction == "up"
        if part.kind in ("socket", "numa"):
            noun = "socket" if part.kind == "socket" else "NUMA node"
            start, end = part.device.split("-")[:: 1 if up else -1]
            return f"the link from {noun} {start} to {noun} {end}"
        if not self.direction:
            return part.words
        names = ("outwards", "inwards") if part.kind in ("own", "nvlink") else _DIRECTIONS
        return f"{part.words} ({names[not up]})"


class Shared(NamedTuple):
    """A part of several flows in words; equal kinds of parts have one `kind`."""

    kind: str
    words: str


class Paths:
    """The parts of a machine on the paths of flows; in the place of its GPUs may be cores."""

    def __init__(self, machine: Machine, knowledge: Knowledge, *, stand_ins: bool = False) -> None:
        self.machine, self._stand_ins = machine, stand_ins
        self._network = Network(model_for(machine, knowledge))
        self._known: dict[tuple[Transfer, ...], tuple[Passing, ...]] = {}

    def passes(self, flow: Flow) -> tuple[Passing, ...]:
        """Return the parts on a flow's path, once for each direction."""
        if flow.transfers not in self._known:
            passings = [passing for transfer in flow.transfers for passing in self._of(transfer)]
            self._known[flow.transfers] = tuple(dict.fromkeys(passings))
        return self._known[flow.transfers]

    def count_shared(self, flow: Flow, other: Flow) -> int:
        """Return the number of parts two flows share; the same direction counts twice."""
        first, second = set(self.passes(flow)), set(self.passes(other))
        parts = {passing.part for passing in first} & {passing.part for passing in second}
        return len(parts) + len(first & second)

    def find_shared(self, flows: Sequence[Flow]) -> tuple[Shared, ...]:
        """Return the parts of most of the flows, of two at least; nearest to the CPU first."""
        passings = [passing for flow in flows for passing in self.passes(flow)]
        counts = Counter(part for flow in flows for part in {way.part for way in self.passes(flow)})
        most = max(counts.values(), default=0)
        if most < 2:
            return ()
        # A part of some flows says little where all flows share another.
        parts = [part for part, count in counts.items() if count == most]
        parts = [part for part in parts if part.kind not in _VAGUE] or parts
        # Of links above one another only the one nearest to the CPU.
        uplinks = {part.device for part in parts if part.kind == "uplink"}
        parts = [
            part
            for part in parts
            if part.kind not in ("uplink", "own")
            or not uplinks.intersection(self.machine.ancestors(part.device))
        ]
        parts.sort(key=lambda part: (get_args(Kind).index(part.kind), *_by_index(part.device)))
        return tuple(_find_shared({way for way in passings if way.part == part}) for part in parts)

    def _of(self, transfer: Transfer) -> Iterator[Passing]:
        source, destination = transfer.source.device, transfer.destination.device
        edges = self._network.path(source, destination)
        links = [self._link(edge) for edge in edges]
        yield from links
        for (_, end), before, after in zip(edges, links, links[1:], strict=False):
            turning = before.direction == "up" and after.direction == "down"
            if turning and end in self.machine.parents:
                yield Passing(Part("switch", end, f"PCIe switch {end}"))
        for node in self.machine.numa_nodes:
            if node.id in (source, destination):
                words = f"the host memory of NUMA node {node.index}"
                yield Passing(Part("memory", node.id, words))
            elif any(node.id in edge for edge in edges):
                yield Passing(Part("cpu", node.id, f"the CPU of NUMA node {node.index}"))

    def _link(self, edge: Edge) -> Passing:
        kind, (start, end) = self._network.kinds[edge], edge
        low, high = sorted(edge, key=_by_index)
        if kind == "pci":
            upwards = self.machine.parents.get(start) == end
            child, above = edge if upwards else (end, start)
            to = "" if above[0] == "C" else f" to {above}"
            part = Part("uplink", child, f"the uplink of switch {child}{to}")
            if child[0] in "GN":
                link = f"{device_words(child)}'s own PCIe link"
                core = f"the core in the place of {device_words(child)}"
                part = Part("own", child, core if self._stand_ins else link)
        elif kind == "smp":
            return self._between_nodes(edge)
        elif kind == "hidden":
            words = f"the inside of the chip that joins switches {low} and {high}"
            return Passing(Part("chip", f"{low}+{high}", words))
        else:
            part = Part("nvlink", f"{low}-{high}", f"the link of {low}, {high}")
            if high[0] == "S":
                part = Part("nvlink", low, f"{device_words(low)}'s NVLinks")
            upwards = start == low
        return Passing(part, "up" if upwards else "down")

    def _between_nodes(self, edge: Edge) -> Passing:
        crosses_sockets = self._network.between_sockets(edge)
        sockets = {
            node.id: node.socket if crosses_sockets else None for node in self.machine.numa_nodes
        }
        places = ((index_of(node), sockets[node]) for node in edge)
        start, end = (index if socket is None else socket for index, socket in places)
        low, high = sorted((start, end))
        nouns = "sockets" if crosses_sockets else "NUMA nodes"
        words = f"the link between {nouns} {low} and {high}"
        part = Part("socket" if crosses_sockets else "numa", f"{low}-{high}", words)
        return Passing(part, "up" if start == low else "down")

    def busy(self, flows: Sequence[Flow]) -> Iterator[Shared]:
        """Yield GPUs that move bytes of all flows, some over host memory and some directly."""
        tasks: dict[str, list[tuple[int, str]]] = {}
        for number, flow in enumerate(flows):
            for transfer in flow.transfers:
                if transfer.executor.kind != "N":
                    gpu = f"GPU {transfer.executor.index}"
                    tasks.setdefault(gpu, []).append((number, self._task(transfer)))
        mixed = len({flow.is_bounce for flow in flows}) > 1
        for gpu, passings in sorted(tasks.items(), key=lambda task: _by_index(task[0])):
            kinds = sorted({task for _, task in passings})
            if mixed and len({number for number, _ in passings}) == len(flows) and len(kinds) > 1:
                words = f"{gpu}, which at once {' and '.join(kinds)}"
                yield Shared(f"busy {'+'.join(kinds)}", words)

    def _task(self, transfer: Transfer) -> str:
        verb, end = "reads", transfer.source
        if transfer.operation == "write":
            verb, end = "writes into", transfer.destination
        if end.kind == "N":
            return f"{verb} a NIC"
        gpu_node = self.machine.numa_of(f"G{transfer.executor.index}")
        near = self.machine.numa_of(end.device) == gpu_node
        memory = "the memory" if end.kind == "C" else "a GPU"
        return f"{verb} {memory} of {'its own' if near else 'another'} NUMA node"


def _by_index(name: str) -> tuple[str, int, str]:
    """Return a key by which G9 comes before G10."""
    return name[0], len(name), name


def device_words(device: str) -> str:
    """Return the name of a GPU or NIC in words.

    >>> device_words("G3")
    'GPU 3'
    """
    return f"{'GPU' if device[0] == 'G' else 'NIC'} {device[1:]}"


def _find_shared(passings: set[Passing]) -> Shared:
    first = min(passings)
    kind = f"{first.part.kind} {'+'.join(sorted(passing.direction for passing in passings))}"
    words = first.words if len(passings) == 1 else f"{first.part.words} (in both directions)"
    return Shared(kind, words)


def collapse_patterns(
    plan: Plan, small: Iterable[TransferSet], *, number: int = 0
) -> Iterator[TransferSet]:
    """Yield a set for each PCIe uplink of GPUs that write to several root ports at once.

    Such writes collapse on some switches (`wrx90-16gpu-4switch` is a model of one). The first set
    of `small` with the pattern is taken, else two writes of the plan's number of blocks.
    """
    node, gpus = plan.cluster.classes[number], plan.class_gpus[number]
    machine, sets = node.machine, tuple(small)
    above = {gpu: (f"G{gpu}", *machine.ancestors(f"G{gpu}")) for gpu in gpus}
    ports = {gpu: chain[-2] for gpu, chain in above.items()}
    uplinks = [tuple(gpu for gpu in gpus if bridge.id in above[gpu]) for bridge in machine.bridges]
    chain = next(path for path in plan.paths if path.node_class == number).chains[0]
    for below in dict.fromkeys(uplinks):
        near = {ports[gpu] for gpu in below}
        far = {ports[gpu]: gpu for gpu in reversed(gpus) if ports[gpu] not in near}
        pairs = tuple(zip(below, far.values(), strict=False))[:2]
        if len(pairs) == 2 and all(node.knowledge.may_use(machine, *ends) for ends in pairs):
            far_ports = {gpu: port for gpu, port in ports.items() if port not in near}
            blocks = chain.hops[0].flow.blocks
            new = transfer_set(direct_write(*ends, blocks=blocks) for ends in pairs)
            yield next((bridge for bridge in sets if _leaves(bridge, below, far_ports)), new)


def _leaves(transfers: TransferSet, below: Sequence[int], far_ports: Mapping[int, str]) -> bool:
    """Return whether two GPUs of `below` write to two root ports, by GPU, of `far_ports`."""
    writes = {
        (flow.source.index, far_ports[flow.destination.index])
        for flow in transfers.flows
        if flow.source.kind == flow.destination.kind == "G" and not flow.is_bounce
        if flow.transfers[0].operation == "write"
        if flow.source.index in below and flow.destination.index in far_ports
    }
    return all(len({ends[at] for ends in writes}) > 1 for at in (0, 1))
