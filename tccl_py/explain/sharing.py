"""Links, memories and CPUs that flows share, by the machine's structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.transfer import Flow, Transfer
from tccl_py.simulator.descriptions import model_for
from tccl_py.simulator.routes import Edge, Network

Kind = Literal["uplink", "chip", "socket", "numa", "memory", "nvlink", "own", "cpu"]
_RANK: tuple[Kind, ...] = (
    "uplink", "chip", "socket", "numa", "memory", "nvlink", "own", "cpu",
)  # fmt: skip
"""The order in which shared places are named; a CPU only where nothing else is shared."""
_DIRECTIONS = {"up": "upwards", "down": "downwards"}
_OF_GPU = {"up": "outwards", "down": "inwards"}


class Place(NamedTuple):
    """A link, memory or CPU on a path; `below` is the device below the link."""

    kind: Kind
    below: str
    words: str


class Passing(NamedTuple):
    """A flow through a place; its direction is `up`, away from GPUs, `down`, or "" without any."""

    place: Place
    direction: Literal["up", "down", ""] = ""


class Shared(NamedTuple):
    """A place of several flows in words; equal kinds of places have one `kind`."""

    kind: str
    words: str


class Sharing:
    """The places on the paths of flows on a machine."""

    def __init__(self, machine: Machine, knowledge: Knowledge) -> None:
        self.machine = machine
        self._network = Network(model_for(machine, knowledge))
        self._known: dict[tuple[Transfer, ...], tuple[Passing, ...]] = {}

    def passes(self, flow: Flow) -> tuple[Passing, ...]:
        """Return the places on a flow's path, once for each direction."""
        if flow.transfers not in self._known:
            found = [passing for part in flow.transfers for passing in self._of(part)]
            self._known[flow.transfers] = tuple(dict.fromkeys(found))
        return self._known[flow.transfers]

    def related(self, one: Flow, other: Flow) -> int:
        """Return the number of places two flows share; the same direction counts twice."""
        first, second = set(self.passes(one)), set(self.passes(other))
        places = {passing.place for passing in first} & {passing.place for passing in second}
        return len(places) + len(first & second)

    def shared(self, flows: Sequence[Flow]) -> tuple[Shared, ...]:
        """Return the places of most of the flows, of two at least; nearest to the CPU first."""
        users: dict[Place, list[str]] = {}
        counts: Counter[Place] = Counter()
        for flow in flows:
            passings = self.passes(flow)
            counts.update({passing.place for passing in passings})
            for passing in passings:
                users.setdefault(passing.place, []).append(passing.direction)
        most = max(counts.values(), default=0)
        if most < 2:
            return ()
        # A place of some flows says little where all flows share another.
        places = [place for place, count in counts.items() if count == most]
        places = [place for place in places if place.kind != "cpu"] or places
        # Of links above one another only the one nearest to the CPU.
        uplinks = {place.below for place in places if place.kind == "uplink"}
        places = [
            place
            for place in places
            if place.kind not in ("uplink", "own")
            or not uplinks.intersection(self.machine.ancestors(place.below))
        ]
        places.sort(key=lambda place: (_RANK.index(place.kind), place.below))
        return tuple(_shared(place, sorted(set(users[place]))) for place in places)

    def _of(self, transfer: Transfer) -> list[Passing]:
        source, destination = str(transfer.source), str(transfer.destination)
        edges = self._network.path(source, destination)
        found = [self._passing(edge) for edge in edges]
        for node in self.machine.numa_nodes:
            if node.id in (source, destination):
                words = f"the host memory of NUMA node {node.index}"
                found.append(Passing(Place("memory", node.id, words)))
            elif any(node.id in edge for edge in edges):
                found.append(Passing(Place("cpu", node.id, f"the CPU of NUMA node {node.index}")))
        return found

    def _passing(self, edge: Edge) -> Passing:
        kind = self._network.kinds[edge]
        start, end = edge
        if kind == "pci":
            up = self.machine.parents.get(start) == end
            return Passing(self._pci_link(start if up else end), "up" if up else "down")
        if kind == "smp":
            return Passing(self._between_nodes(edge))
        if kind == "hidden":
            words = f"the inside of the chip that joins switches {min(edge)} and {max(edge)}"
            place = Place("chip", "+".join(sorted(edge)), words)
        elif "S" in (start[0], end[0]):
            gpu = min(edge)
            place = Place("nvlink", gpu, f"GPU {gpu[1:]}'s NVLinks")
            return Passing(place, "up" if start == gpu else "down")
        else:
            place = Place("nvlink", "-".join(sorted(edge)), f"the link of {min(edge)}, {max(edge)}")
        return Passing(place, "up" if start < end else "down")

    def _pci_link(self, child: str) -> Place:
        if child[0] in "GN":
            kind = "GPU" if child[0] == "G" else "NIC"
            return Place("own", child, f"{kind} {child[1:]}'s own PCIe link")
        above = self.machine.parents[child]
        upper = "" if above[0] == "C" else f" to {above}"
        return Place("uplink", child, f"the uplink of switch {child}{upper}")

    def _between_nodes(self, edge: Edge) -> Place:
        sockets = {node.id: node.socket for node in self.machine.numa_nodes}
        start, end = edge
        if self._network.between_sockets(edge):
            ends = [sockets[node] if sockets[node] is not None else node[1:] for node in edge]
            words = f"the link from socket {ends[0]} to socket {ends[1]}"
            return Place("socket", f"{ends[0]}>{ends[1]}", words)
        words = f"the link from NUMA node {start[1:]} to NUMA node {end[1:]}"
        return Place("numa", f"{start}>{end}", words)


def _shared(place: Place, directions: Sequence[str]) -> Shared:
    kind = f"{place.kind} {'+'.join(directions)}"
    if directions == [""] or place.kind == "chip":
        return Shared(kind, place.words)
    if len(directions) > 1:
        return Shared(kind, f"{place.words} (in both directions)")
    names = _OF_GPU if place.kind in ("own", "nvlink") else _DIRECTIONS
    return Shared(kind, f"{place.words} ({names[directions[0]]})")


def busy(machine: Machine, flows: Sequence[Flow]) -> Iterator[Shared]:
    """Yield GPUs that move bytes of all flows, some over host memory and some directly."""
    tasks: dict[str, list[tuple[int, str]]] = {}
    for number, flow in enumerate(flows):
        for part in flow.transfers:
            if part.executor.kind != "N":
                gpu = f"GPU {part.executor.index}"
                tasks.setdefault(gpu, []).append((number, _task(machine, part)))
    mixed = len({flow.is_bounce for flow in flows}) > 1
    for gpu, found in sorted(tasks.items()):
        kinds = sorted({task for _, task in found})
        if mixed and len({number for number, _ in found}) == len(flows) and len(kinds) > 1:
            yield Shared(f"busy {'+'.join(kinds)}", f"{gpu}, which at once {' and '.join(kinds)}")


def _task(machine: Machine, part: Transfer) -> str:
    verb, other = "reads", part.source
    if part.operation == "write":
        verb, other = "writes into", part.destination
    if other.kind == "N":
        return f"{verb} a NIC"
    near = machine.numa_of(str(other)) == machine.numa_of(f"G{part.executor.index}")
    what = "the memory" if other.kind == "C" else "a GPU"
    return f"{verb} {what} of {'its own' if near else 'another'} NUMA node"
