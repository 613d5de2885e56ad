"""The smallest slow parts of a set of flows, and the places that flows share.

Parts are found by removing flows and measuring again. Supersets of slow sets are slow, so known
rates of parts and of wholes answer most questions. Next, pairs that share a link or memory are
measured, then QuickXplain halves the rest (`search/evaluator.py`). Further causes are found in the
rest without a flow of every known cause: the hitting-set tree of Reiter (Artificial Intelligence
32, 1987), depth first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import msgspec

from tccl_py.explanation.probing import Flows, Prober
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.transfer import Flow, Transfer, TransferSet, transfer_set
from tccl_py.search.evaluator import BudgetSpentError, smallest_slow_part
from tccl_py.simulator.descriptions import model_for
from tccl_py.simulator.routes import Edge, Network

HURT = 0.95
"""Flows with less than this share of the slowest's rate alone slow each other."""
NEAR = 1.1
"""A part shows the slowdown if its rate is at most this times the whole's."""
CERTAIN = 2.0
"""Standard errors between a rate and the limit; closer rates are measured again."""
AGAIN = 3
"""Measurements of one set, at most."""
PAIRS = 24
"""Pairs measured before the set is halved."""
NODES = 200
"""States of the hitting-set tree, at most; most cost no measurement."""

Label = Callable[[Flows], object]
Related = Callable[[Flow, Flow], int]
Part = frozenset[int]
"""Positions of flows in the whole."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A slow part of a set, `minimal` if no flow can be left out; `alike` more parts are equal."""

    flows: tuple[Flow, ...]
    minimal: bool
    alike: int = 0


class Causes(msgspec.Struct, frozen=True, kw_only=True):
    """The causes found, the worst first, and the rest, which contains none of them as a whole.

    `spent` is true if the budget ended first.
    """

    found: tuple[Cause, ...]
    rest: tuple[Flow, ...]
    spent: bool


class ContradictionError(Exception):
    """A set is fast although earlier measurements make it slow."""


def find_causes(
    prober: Prober, flows: Flows, *, most: int, related: Related, label: Label | None = None
) -> Causes:
    """Find up to `most` different causes for flows that are slower together than alone.

    Flows without the first causes have a higher rate, whose causes are found next. Pairs that
    share most by `related` are measured first; parts of one rate with one `label` (by default the
    symmetry key) are one cause. Raises MeasurementError or ContradictionError: a part cannot be
    measured, or measurements contradict each other, twice.
    """
    found: list[Cause] = []
    rest, spent = tuple(flows), False
    try:
        while not spent and len(found) < most and is_hurt(prober, rest):
            level = _Level(prober, rest, related, label or prober.symmetry.key)
            more, rest, spent = level.causes(most - len(found))
            found += more
            if not more:
                break
    except BudgetSpentError:
        spent = True
    return Causes(found=tuple(found), rest=rest, spent=spent)


def is_hurt(prober: Prober, flows: Flows) -> bool:
    """Return whether flows together are slower than the slowest of them alone."""
    if len(flows) < 2:
        return False
    together, alone = prober.rate(flows), prober.slowest_alone(flows)
    doubt = CERTAIN * (together.error + alone.error)
    return together.gbps < HURT * alone.gbps * (1 - min(doubt, 1.0))


class _Level:
    """The causes of one rate: all parts about as slow as the whole.

    `limit` is between the whole's rate and each flow's own, so no single flow is slow.
    """

    def __init__(
        self, prober: Prober, flows: tuple[Flow, ...], related: Related, label: Label
    ) -> None:
        self._prober, self._flows, self._related, self._label = prober, flows, related, label
        whole, alone = prober.rate(flows).gbps, prober.slowest_alone(flows).gbps
        self.limit = min(NEAR * whole, (whole * alone) ** 0.5)
        self._rates: list[tuple[Counter[Flow], float]] = []
        self._remember_known()
        self._parts: list[Part] = []
        self._causes: dict[object, Cause] = {}
        self._counted: set[TransferSet] = set()

    def _remember_known(self) -> None:
        whole = Counter(self._flows)
        for known in self._prober.known:
            if whole.keys() >= set(known.flows) and Counter(known.flows) <= whole:
                self._rates.append((Counter(known.flows), self._prober.exact(known.flows).gbps))

    def causes(self, most: int) -> tuple[list[Cause], tuple[Flow, ...], bool]:
        """Return up to `most` causes, the first rest without any, and whether the budget ended."""
        first: tuple[Flow, ...] | None = None
        waiting: list[Part] = [frozenset()]
        seen: set[Part] = set()
        spent = False
        try:
            while waiting and len(seen) < NODES and len(self._causes) < most:
                removed = waiting.pop()
                if removed in seen:
                    continue
                seen.add(removed)
                part = self._part_without(removed)
                if part is None:
                    first = first or self._without(removed)
                else:
                    waiting += [removed | {flow} for flow in self._least_needed_first(part)]
        except BudgetSpentError:
            spent = True
        found = list(self._causes.values())
        if spent and not found:
            found = self._smallest_known()
        return found, first or self._greedy_rest(), spent

    def _without(self, removed: Part) -> tuple[Flow, ...]:
        return tuple(flow for i, flow in enumerate(self._flows) if i not in removed)

    def _greedy_rest(self) -> tuple[Flow, ...]:
        removed: set[int] = set()
        for part in self._parts:
            if not part & removed:
                removed.add(self._least_needed_first(part)[-1])
        return self._without(frozenset(removed))

    def _least_needed_first(self, part: Part) -> list[int]:
        return sorted(part, key=lambda flow: (sum(flow in found for found in self._parts), flow))

    def _part_without(self, removed: Part) -> Part | None:
        """Return a slow part without these flows, or None."""
        for part in self._parts:
            if not part & removed:
                return part
        rest = [i for i in range(len(self._flows)) if i not in removed]
        if not rest or not self._slow(rest):
            return None
        part = frozenset(self._smallest(rest))
        flows = tuple(self._flows[i] for i in sorted(part))
        self._parts += [part, *self._prober.symmetry.images_within(flows, self._flows)]
        # A part whose flows are in the whole twice counts once.
        sets = {transfer_set(self._flows[i] for i in found) for found in self._parts}
        label = self._label(flows)
        cause = self._causes.get(label) or Cause(flows=flows, minimal=True, alike=-1)
        more = cause.alike + len(sets - self._counted)
        self._causes[label] = msgspec.structs.replace(cause, alike=more)
        self._counted |= sets
        return part

    def _smallest(self, rest: Sequence[int]) -> tuple[int, ...]:
        """Return a minimal slow part of `rest`, which is slow; checked without any symmetry."""
        for _ in range(2):
            part = self._slow_pair(rest) or smallest_slow_part(rest, self._slow)
            # Noise may have kept flows that are not needed.
            for flow in part:
                less = tuple(i for i in part if i != flow)
                if len(less) > 1 and self._slow(less):
                    part = less
            if self._measured_slow(part, exact=True):
                return part
            # An image was slow and this part is not: the symmetry does not hold for rates.
            self._prober.symmetry.trust_nothing()
            self._rates.clear()
            self._remember_known()
        names = " ".join(str(self._flows[i]) for i in part)
        raise ContradictionError(f"{names} is slow in some measurements and fast in others")

    def _slow_pair(self, rest: Sequence[int]) -> tuple[int, ...] | None:
        shared = {
            pair: self._related(self._flows[pair[0]], self._flows[pair[1]])
            for pair in combinations(rest, 2)
        }
        likely = sorted((pair for pair in shared if shared[pair]), key=lambda pair: -shared[pair])
        tried: set[tuple[int, ...]] = set()
        for pair in likely:
            key = self._prober.symmetry.key([self._flows[i] for i in pair])
            if key in tried:
                continue
            if len(tried) >= PAIRS:
                break
            tried.add(key)
            if self._slow(pair):
                return pair
        return None

    def _slow(self, part: Sequence[int]) -> bool:
        if len(part) < 2:
            return False
        flows = Counter(self._flows[i] for i in part)
        if any(gbps <= self.limit and known <= flows for known, gbps in self._rates):
            return True
        if any(gbps > self.limit and flows <= known for known, gbps in self._rates):
            return False
        return self._measured_slow(part, exact=False)

    def _measured_slow(self, part: Sequence[int], *, exact: bool) -> bool:
        flows = [self._flows[i] for i in part]
        rate = self._prober.exact(flows) if exact else self._prober.rate(flows)
        for _ in range(AGAIN - 1):
            if abs(rate.gbps - self.limit) >= CERTAIN * rate.error * rate.gbps:
                break
            rate = self._prober.again(flows)
        self._rates.append((Counter(flows), rate.gbps))
        return bool(rate.gbps <= self.limit)

    def _smallest_known(self) -> list[Cause]:
        slow = [known for known, gbps in self._rates if gbps <= self.limit]
        smallest = min(slow, key=lambda known: known.total(), default=None)
        if smallest is None or smallest.total() >= len(self._flows):
            return []
        return [Cause(flows=transfer_set(smallest.elements()).flows, minimal=False)]


# Links, memories and CPUs that flows share, by the machine's structure.


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
