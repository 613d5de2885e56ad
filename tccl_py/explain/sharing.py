"""What flows share, in words: the links, memories and CPUs that each passes by the structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine
from tccl_py.model.transfer import Flow, Transfer
from tccl_py.simulator.generic import model_for
from tccl_py.simulator.routes import Edge, Network

Kind = Literal["uplink", "chip", "socket", "numa", "memory", "nvlink", "own", "cpu"]
_RANK: tuple[Kind, ...] = (
    "uplink", "chip", "socket", "numa", "memory", "nvlink", "own", "cpu",
)  # fmt: skip
"""The order in which shared places are named; a CPU only where nothing else is shared."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Something that transfers pass; `below` is the device whose link it is."""

    kind: Kind
    below: str
    words: str


class Passing(msgspec.Struct, frozen=True, kw_only=True):
    """A flow at a place, and which way: away from the GPUs (`up`, `out`) or to them."""

    place: Place
    way: Literal["up", "down", ""]


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """A place that several flows pass, in words; `kind` is the same for places alike."""

    kind: str
    words: str


class Sharing:
    """Which places the flows on a machine pass."""

    def __init__(self, machine: Machine, knowledge: Knowledge) -> None:
        self.machine = machine
        self._network = Network(model_for(machine, knowledge))
        self._known: dict[tuple[Transfer, ...], tuple[Passing, ...]] = {}

    def passes(self, flow: Flow) -> tuple[Passing, ...]:
        """The places that a flow passes, each once a way."""
        if flow.transfers not in self._known:
            found = [one for part in flow.transfers for one in self._of(part)]
            self._known[flow.transfers] = tuple(dict.fromkeys(found))
        return self._known[flow.transfers]

    def related(self, one: Flow, other: Flow) -> int:
        """How many places two flows share; a place passed the same way counts twice."""
        first, second = self.passes(one), self.passes(other)
        places = {here.place for here in first} & {there.place for there in second}
        return len(places) + len(set(first) & set(second))

    def shared(self, flows: Sequence[Flow]) -> tuple[Shared, ...]:
        """What most of the flows pass, two of them at least; what is nearest to the CPU first."""
        users: dict[Place, list[Passing]] = {}
        counts: Counter[Place] = Counter()
        for flow in flows:
            passings = self.passes(flow)
            counts.update({passing.place for passing in passings})
            for passing in passings:
                users.setdefault(passing.place, []).append(passing)
        most = max(counts.values(), default=0)
        if most < 2:
            return ()
        # What only some share says little where something is shared by all.
        places = [place for place, count in counts.items() if count == most]
        named = self._highest([place for place in places if place.kind != "cpu"] or places)
        named.sort(key=lambda place: (_RANK.index(place.kind), place.below))
        return tuple(_shared(place, users[place]) for place in named)

    def busy(self, flows: Sequence[Flow]) -> tuple[Shared, ...]:
        """GPUs that move the bytes of all flows, some over host memory and some directly."""
        return tuple(_busy(self.machine, flows))

    def _highest(self, places: list[Place]) -> list[Place]:
        """Of links above one another only the one nearest to the CPU."""
        uplinks = {place.below for place in places if place.kind == "uplink"}
        return [
            place
            for place in places
            if place.kind not in ("uplink", "own")
            or not uplinks.intersection(self.machine.ancestors(place.below))
        ]

    def _of(self, transfer: Transfer) -> list[Passing]:
        source, destination = (str(end) for end in (transfer.source, transfer.destination))
        edges = self._network.path(source, destination)
        found = [self._passing(edge) for edge in edges]
        for node in self.machine.numa_nodes:
            if node.id in (source, destination):
                words = f"the host memory of NUMA node {node.index}"
                found.append(_at(Place(kind="memory", below=node.id, words=words)))
            elif any(node.id in edge for edge in edges):
                words = f"the CPU of NUMA node {node.index}"
                found.append(_at(Place(kind="cpu", below=node.id, words=words)))
        return found

    def _passing(self, edge: Edge) -> Passing:
        kind = self._network.kinds[edge]
        one, other = edge
        if kind == "pci":
            up = self.machine.parents.get(one) == other
            return Passing(place=self._link(one if up else other), way="up" if up else "down")
        if kind == "smp":
            return _at(self._between(edge))
        if kind == "hidden":
            words = f"the inside of the chip that joins switches {min(edge)} and {max(edge)}"
            return Passing(
                place=Place(kind="chip", below="+".join(sorted(edge)), words=words),
                way="up" if one < other else "down",
            )
        return self._nvlink(edge)

    def _link(self, child: str) -> Place:
        if child[0] == "G":
            return Place(kind="own", below=child, words=f"GPU {child[1:]}'s own PCIe link")
        above = self.machine.parents[child]
        more = "" if above[0] == "C" else f" to {above}"
        return Place(kind="uplink", below=child, words=f"the uplink of switch {child}{more}")

    def _between(self, edge: Edge) -> Place:
        """The two directions of a link between CPUs are places of their own."""
        sockets = {node.id: node.socket for node in self.machine.numa_nodes}
        one, other = edge
        if self._network.between_sockets(edge):
            ends = [sockets[end] if sockets[end] is not None else end[1:] for end in edge]
            words = f"the link from socket {ends[0]} to socket {ends[1]}"
            return Place(kind="socket", below=f"{ends[0]}>{ends[1]}", words=words)
        words = f"the link from NUMA node {one[1:]} to NUMA node {other[1:]}"
        return Place(kind="numa", below=f"{one}>{other}", words=words)

    def _nvlink(self, edge: Edge) -> Passing:
        one, other = edge
        gpu = min(edge) if "S" in (one[0], other[0]) else ""
        if gpu:
            words = f"GPU {gpu[1:]}'s NVLinks"
            place = Place(kind="nvlink", below=gpu, words=words)
            return Passing(place=place, way="up" if one == gpu else "down")
        low, high = sorted(edge)
        place = Place(kind="nvlink", below=f"{low}-{high}", words=f"the link of {low} and {high}")
        return Passing(place=place, way="up" if one == low else "down")


def _at(place: Place) -> Passing:
    return Passing(place=place, way="")


def _shared(place: Place, users: Sequence[Passing]) -> Shared:
    ways = sorted({one.way for one in users})
    kind = f"{place.kind} {'+'.join(ways)}"
    if ways == [""] or place.kind == "chip":
        return Shared(kind=kind, words=place.words)
    if len(ways) > 1:
        return Shared(kind=kind, words=f"{place.words} (in both directions)")
    names = {"up": "upwards", "down": "downwards"}
    if place.kind in ("own", "nvlink"):
        names = {"up": "outwards", "down": "inwards"}
    return Shared(kind=kind, words=f"{place.words} ({names[ways[0]]})")


def _busy(machine: Machine, flows: Sequence[Flow]) -> Iterator[Shared]:
    tasks: dict[str, list[tuple[int, str]]] = {}
    for number, flow in enumerate(flows):
        for part in flow.transfers:
            gpu = f"GPU {part.executor.index}"
            tasks.setdefault(gpu, []).append((number, _task(machine, part)))
    mixed = len({flow.is_bounce for flow in flows}) > 1
    for gpu, found in sorted(tasks.items()):
        kinds = sorted({task for _, task in found})
        if mixed and len({number for number, _ in found}) == len(flows) and len(kinds) > 1:
            yield Shared(
                kind=f"busy {'+'.join(kinds)}",
                words=f"{gpu}, which at once {' and '.join(kinds)}",
            )


def _task(machine: Machine, part: Transfer) -> str:
    """What the executor of a transfer does."""
    verb = "writes into" if part.operation == "write" else "reads"
    other = part.destination if part.operation == "write" else part.source
    own = machine.numa_of(f"G{part.executor.index}")
    if other.kind == "C":
        whose = "its own" if other.index == own else "another"
        return f"{verb} the memory of {whose} NUMA node"
    near = other.kind == "G" and machine.numa_of(str(other)) == own
    return f"{verb} a GPU of {'its own' if near else 'another'} NUMA node"
