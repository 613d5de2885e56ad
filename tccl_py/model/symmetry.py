"""Automorphisms of a machine: relabellings of devices that keep the structure; and natural groups.

A stabiliser chain is built from the bottom: for each GPU in turn, the images while all earlier GPUs
stay. Colour refinement says "no" cheaply, networkx's VF2 gives a mapping for "yes"; orbits of known
mappings save most of these questions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.rings import Hop, elsewhere
from tccl_py.model.transfer import Flow, Place, index_of

if TYPE_CHECKING:
    import networkx as nx

T = TypeVar("T", int, str)
Permutation = dict[str, str]
_Level = tuple[list[Permutation], dict[str, Permutation]]
"""One step of the chain: its generators, and a mapping to each image of its base point."""

_ROUNDS = 8  # Of colour refinement; VF2 decides where more would distinguish devices
MAX_ELEMENTS = 8_192  # Mappings listed; of a larger group a subgroup is used


class Symmetry(msgspec.Struct, frozen=True, kw_only=True):
    """A group of relabellings: row r maps `points[i]` to `points[elements[r, i]]`."""

    points: tuple[str, ...]
    elements: npt.NDArray[np.int16]
    """The group or, if that is too long, a subgroup, the identity first."""
    order: int
    """The size of the whole group."""
    generators: tuple[Permutation, ...] = ()
    """Those of the whole group where that is longer."""


def automorphisms(
    machine: Machine, knowledge: Knowledge | None = None, *, gpus: Sequence[int] | None = None
) -> Symmetry:
    """Return the automorphism group of the machine that keeps the set `gpus` (default all)."""
    return _automorphisms(machine, knowledge or Knowledge(), None if gpus is None else tuple(gpus))


@functools.lru_cache(maxsize=64)  # every search of a plan asks for the same groups
def _automorphisms(
    machine: Machine, knowledge: Knowledge, gpus: tuple[int, ...] | None
) -> Symmetry:
    graph = _coloured_graph(machine, knowledge, gpus)
    base = [gpu.id for gpu in machine.gpus]
    levels = _stabiliser_chain(graph, base)
    points = tuple(end.id for end in (*machine.gpus, *machine.numa_nodes, *machine.nics))
    return Symmetry(
        points=points,
        elements=_list_products(levels, points),
        generators=tuple(mapping for mappings, _ in levels for mapping in mappings),
        order=math.prod(len(transversal) for _, transversal in levels),
    )


def keeping(symmetry: Symmetry, keep: npt.NDArray[np.bool_]) -> Symmetry:
    """Return the subgroup of the listed elements for which `keep`, a group, is true."""
    chosen = keep.copy()
    chosen[0] = True
    elements = symmetry.elements[chosen]
    return Symmetry(points=symmetry.points, elements=elements, order=len(elements))


def onto(symmetry: Symmetry, points: Sequence[str], images: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Mark the listed elements that map a set of points onto a set of as many images."""
    numbers = np.sort([symmetry.points.index(point) for point in images])
    marked: npt.NDArray[np.bool_] = (_move(symmetry, points) == numbers).all(axis=1)
    return marked


def images_of_gpus(symmetry: Symmetry, gpus: Sequence[int]) -> dict[tuple[int, ...], Permutation]:
    """Return the sets of GPUs that listed elements exchange with `gpus`, and the first mapping."""
    _, rows = np.unique(_move(symmetry, [f"G{g}" for g in gpus]), axis=0, return_index=True)
    mappings = (mapping(symmetry, row) for row in symmetry.elements[rows])
    return {tuple(sorted(index_of(names[f"G{g}"]) for g in gpus)): names for names in mappings}


def _move(symmetry: Symmetry, points: Sequence[str]) -> npt.NDArray[np.int16]:
    """Return the image of a set of points, in ascending order, under each listed element."""
    columns = [symmetry.points.index(point) for point in points]
    return np.sort(symmetry.elements[:, columns], axis=1)


def mapping(symmetry: Symmetry, row: npt.NDArray[np.int16]) -> Permutation:
    """Return a listed element by names."""
    return {point: symmetry.points[int(to)] for point, to in zip(symmetry.points, row, strict=True)}


def _coloured_graph(machine: Machine, knowledge: Knowledge, gpus: Sequence[int] | None) -> nx.Graph:
    graph = machine.graph.copy()
    for link in knowledge.hidden_links:
        graph.add_edge(link.one, link.other, colour=("hidden",))
    # A fact about an ordered pair becomes a small path, so that its direction counts too.
    for fact in knowledge.peer_access:
        head, tail = f"peer>{fact.source}>{fact.target}", f"peer<{fact.source}<{fact.target}"
        graph.add_node(head, colour=("peer-source", fact.supported))
        graph.add_node(tail, colour=("peer-target", fact.supported))
        for start, end in ((f"G{fact.source}", head), (head, tail), (tail, f"G{fact.target}")):
            graph.add_edge(start, end, colour=("peer",))
    for link_fact in knowledge.links or ():
        middle = f"link {link_fact.one} {link_fact.other}"
        graph.add_node(middle, colour=("link", link_fact.state))
        for gpu in (f"G{link_fact.one}", f"G{link_fact.other}"):
            graph.add_edge(gpu, middle, colour=("link",))
    if gpus is not None:
        for device in machine.gpus:
            node = graph.nodes[device.id]
            node["colour"] = (*node["colour"], "in" if device.index in gpus else "out")
    return graph


def _refine(graph: nx.Graph, fixed: Sequence[str]) -> dict[str, str]:
    """Return colours after refinement, every `fixed` device in a colour of its own."""
    import networkx as nx  # noqa: PLC0415 (slow to import, and few commands look for symmetries)

    for node, data in graph.nodes(data=True):
        # networkx hashes ASCII alone, and a device's name may have other letters.
        data["start"] = ascii((data["colour"], fixed.index(node) if node in fixed else -1))
    rounds = nx.weisfeiler_lehman_subgraph_hashes(
        graph, node_attr="start", edge_attr="colour", iterations=_ROUNDS
    )
    return {node: hashes[-1] for node, hashes in rounds.items()}


def _mapping(graph: nx.Graph, fixed: Sequence[str], point: str, image: str) -> Permutation | None:
    """Return an automorphism with these fixed devices that maps `point` to `image`, or None."""
    import networkx as nx  # noqa: PLC0415

    before, after = _refine(graph, [*fixed, point]), _refine(graph, [*fixed, image])
    if sorted(before.values()) != sorted(after.values()):
        return None
    # The matcher iterates over sets of devices. Sets of numbers have one order; the order of names
    # changes with every start of Python, and a resumed plan would search another way.
    names = list(graph)
    numbers = {name: number for number, name in enumerate(names)}
    first_graph, second_graph = nx.relabel_nodes(graph, numbers), nx.relabel_nodes(graph, numbers)
    for graph_there, colours in ((first_graph, before), (second_graph, after)):
        nx.set_node_attributes(graph_there, {numbers[n]: c for n, c in colours.items()}, "refined")
    matcher = nx.isomorphism.GraphMatcher(
        first_graph,
        second_graph,
        node_match=lambda a, b: a["refined"] == b["refined"],
        edge_match=lambda a, b: a["colour"] == b["colour"],
    )
    mapping = next(matcher.isomorphisms_iter(), None)
    return None if mapping is None else {names[a]: names[b] for a, b in mapping.items()}


def _transversal(
    point: str, generators: Iterable[Permutation], identity: Permutation
) -> dict[str, Permutation]:
    moves_to, queue = {point: identity}, [point]
    moves = list(generators)
    while queue:
        at = queue.pop()
        for move in moves:
            if move[at] not in moves_to:
                moves_to[move[at]] = {start: move[image] for start, image in moves_to[at].items()}
                queue.append(move[at])
    return moves_to


def _stabiliser_chain(graph: nx.Graph, base: Sequence[str]) -> list[_Level]:
    identity = {node: node for node in graph}
    levels: list[_Level] = []
    below: list[Permutation] = []  # generators that fix everything before this base point
    for depth in range(len(base) - 1, -1, -1):
        fixed, point = base[:depth], base[depth]
        generators: list[Permutation] = []
        colours = _refine(graph, fixed)
        for candidate in base[depth + 1 :]:
            if colours[candidate] != colours[point]:
                continue
            if candidate in _transversal(point, [*below, *generators], identity):
                continue
            automorphism = _mapping(graph, fixed, point, candidate)
            if automorphism is not None:
                generators.append(automorphism)
        below = [*below, *generators]
        levels.append((generators, _transversal(point, below, identity)))
    return levels


def _list_products(levels: Sequence[_Level], points: Sequence[str]) -> npt.NDArray[np.int16]:
    """Return the products of one mapping per level, from the bottom, up to MAX_ELEMENTS."""
    position = {point: i for i, point in enumerate(points)}
    rows = np.arange(len(points), dtype=np.int16)[None, :]
    for _, transversal in levels:
        if len(rows) * len(transversal) > MAX_ELEMENTS:
            break
        maps = transversal.values()  # the identity comes first
        moves = [np.array([position[move[p]] for p in points], dtype=np.int16) for move in maps]
        # Every element of this level's group is one of the group below, then one move.
        rows = np.concatenate([move[rows] for move in moves])
    return rows


class FlowCodes:
    """Numbers of flows: equal for equal flows alone, also for images of flows."""

    def __init__(self, symmetry: Symmetry) -> None:
        self._position = {point: i for i, point in enumerate(symmetry.points)}
        self._forms: dict[tuple[object, ...], int] = {}

    def images(
        self, flows: Sequence[Flow], elements: npt.NDArray[np.int16]
    ) -> npt.NDArray[np.int64]:
        """Return the numbers of the flows' images under each element, a row an element."""
        # The number of points stands for places that no symmetry moves.
        fixed = len(self._position)
        columns = elements.T.astype(np.int64, order="C")
        codes = np.empty((len(flows), len(elements)), dtype=np.int64)
        for at, flow in enumerate(flows):
            # A relabelling keeps the kinds of places and the options.
            form = (*(place.kind for place in flow.places), flow.blocks, flow.fifo, flow.buffer)
            code = np.full(len(elements), self._forms.setdefault(form, len(self._forms) + 1))
            for place in flow.places:
                column = self._position.get(place.device)
                code *= fixed + 1
                code += fixed if column is None else columns[column]
            codes[at] = code
        return np.ascontiguousarray(codes.T)


def smallest_row(rows: npt.NDArray[Any]) -> tuple[int, ...]:
    """Return the first row in lexicographic order, without sorting all of them."""
    for column in range(rows.shape[1]):
        rows = rows[rows[:, column] == rows[:, column].min()]
    return tuple(rows[0].tolist())


def relabel(flow: Flow, names: Mapping[str, str]) -> Flow:
    """Return the flow under a relabelling of devices; a copy engine moves with its GPU."""
    return elsewhere(flow, lambda p: Place(p.kind, index_of(names[p.device]), p.host))


def relabelled_hop(hop: Hop, names: Mapping[str, str]) -> Hop:
    """Return the hop under a relabelling; an end without a name (the world, of chains) stays."""
    ends = hop.source, hop.target
    source, target = (index_of(names[f"G{n}"]) if f"G{n}" in names else n for n in ends)
    return Hop(source, target, relabel(hop.flow, names))


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
    links = [link for link in machine.nvlinks if link.joins_gpus]
    bridged = joined_groups((index_of(link.source), index_of(link.target)) for link in links)
    groups |= {frozenset(group) & set(gpus) for group in bridged}
    proper = [group for group in groups if 1 < len(group) < len(gpus)]
    return tuple(sorted(proper, key=lambda group: (len(group), sorted(group))))


def joined_groups(pairs: Iterable[tuple[T, T]], nodes: Iterable[T] = ()) -> list[list[T]]:
    """Return the connected components of a graph, each sorted; `nodes` are in even without pair."""
    import networkx as nx  # noqa: PLC0415

    graph = nx.Graph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(pairs)
    return [sorted(group) for group in nx.connected_components(graph)]
