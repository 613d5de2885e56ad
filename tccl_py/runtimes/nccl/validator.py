"""What NCCL does with a graph file on a machine: use it, ignore it, clip it, fail, or crash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from tccl_py.errors import InputError
from tccl_py.runtimes.nccl.graph_file import RING, TREE, Graph, GraphFile, load_graph_file
from tccl_py.runtimes.nccl.graph_search import search_ring, search_tree
from tccl_py.runtimes.nccl.rings import (
    NodeRings,
    RanksOutOfBoundsError,
    RingsBrokenError,
    connect,
    node_rings,
    repeated,
)
from tccl_py.runtimes.nccl.settings import final_channels, integer, settings_from_environment
from tccl_py.runtimes.nccl.transport import View, view
from tccl_py.runtimes.nccl.versions import LATEST, VersionFacts, version_facts
from tccl_py.runtimes.nccl.xml_lexer import GraphCrashError, GraphRejectedError
from tccl_py.topology.knowledge import Knowledge
from tccl_py.topology.machine import Machine

VerdictKind = Literal["used", "ignored", "clipped", "rejected", "crash"]
MAX_NODES = 4096


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a graph file.

    `clipped`: NCCL loads it but runs less than, or something else than, it says. `rejected`: init
    fails. `crash`: init segfaults or corrupts memory. `rings` are the final channels' rank orders,
    each beginning at rank 0; empty where init does not end well.
    """

    verdict: VerdictKind
    reason: str
    rings: tuple[tuple[int, ...], ...] = ()


class _Loaded(msgspec.Struct, frozen=True):
    """One graph after loading (`graph`) or searching (`orders` of GPU indices)."""

    graph: Graph | None
    channels: int
    rate: float
    orders: tuple[tuple[int, ...], ...] = ()


def validate(
    text: str,
    machine: Machine,
    knowledge: Knowledge,
    *,
    gpus: Sequence[int] | None = None,
    nodes: int = 1,
    version: str = LATEST,
    environment: Mapping[str, str] | None = None,
    where: str = "graph file",
) -> Verdict:
    """What NCCL does with `text` as NCCL_GRAPH_FILE.

    Args:
        text: the file.
        machine: what every node is like.
        knowledge: which of its GPUs can access each other.
        gpus: the communicator's GPUs on every node, in rank order; None is all, by index.
        nodes: how many equal nodes; node n has ranks n * len(gpus) and on.
        version: NCCL's.
        environment: other NCCL variables of the job.
        where: name for messages.

    Raises:
        InputError: unknown GPUs, a node count out of range, or a file larger than any NCCL reads.
    """
    if not 1 <= nodes <= MAX_NODES:
        raise InputError("nodes", f"is {nodes}", f"1 to {MAX_NODES}")
    order = tuple(sorted(machine.gpu_indices)) if gpus is None else tuple(gpus)
    variables = dict(environment or {})
    settings = settings_from_environment(variables, version=version)
    seen = view(machine, knowledge, settings, gpus=order)
    case = _Case(seen, order, nodes, variables, version_facts(version))
    try:
        return case.judge(load_graph_file(text, where=where, version=version))
    except GraphRejectedError as error:
        return Verdict(verdict="rejected", reason=f"{error.where}: {error.what}")
    except GraphCrashError as error:
        return Verdict(verdict="crash", reason=f"{error.where}: {error.what}")
    except RingsBrokenError as error:
        return Verdict(verdict="rejected", reason=f"{where}: {error}")
    except RanksOutOfBoundsError as error:
        return Verdict(verdict="crash", reason=f"{where}: {error}")


class _Case:
    """A communicator for which files are judged."""

    def __init__(
        self,
        seen: View,
        gpus: tuple[int, ...],
        nodes: int,
        variables: Mapping[str, str],
        facts: VersionFacts,
    ) -> None:
        self._seen, self._gpus, self._nodes = seen, gpus, nodes
        self._variables, self._facts = variables, facts

    def judge(self, file: GraphFile) -> Verdict:
        ring = self._load(file, RING) or self._stock_ring()
        tree = self._load(file, TREE)
        trees = tree.channels if tree else self._stock_trees(ring.channels)
        channels = min(ring.channels, trees)
        rings = connect(
            [self._on_node(ring, node) for node in range(self._nodes)], channels=channels
        )
        final = final_channels(
            channels,
            sm=self._seen.system.sm_min,
            nodes=self._nodes,
            speed_intra=ring.rate,
            variables=self._variables,
            version=self._seen.settings.version,
        )
        verdict, reason = self._verdict(file, ring, channels, final)
        return Verdict(verdict=verdict, reason=reason, rings=repeated(rings, final))

    def _load(self, file: GraphFile, number: int) -> _Loaded | None:
        """Every graph with this id in turn, as NCCL loads one over the other; None if unused."""
        loaded = None
        for graph in file.graphs:
            if graph.id == number and not self._gated(graph):
                self._check(graph)
                loaded = graph if graph.nchannels > 0 else None
        if loaded is None:
            return None
        if loaded.nchannels > self._facts.max_channels:
            raise GraphCrashError(
                f"graph {number}",
                f"nchannels is {loaded.nchannels}, and more than {self._facts.max_channels} "
                "overflow NCCL's tables",
                "split the job's channels",
            )
        return _Loaded(loaded, loaded.nchannels, loaded.speedintra)

    def _gated(self, graph: Graph) -> bool:
        return graph.crossnic == 1 and integer(self._variables.get("NCCL_CROSS_NIC")) == 0

    def _check(self, graph: Graph) -> None:
        for name in ("typeintra", "typeinter"):
            if getattr(graph, name) is None:
                raise GraphCrashError(
                    f"graph {graph.id}", f"has no {name}", "NCCL reads a null pointer"
                )
        for channel in graph.channels:
            for position, device in enumerate(channel.gpus):
                if self._given_rank(channel.ranks, position) is None and device not in self._gpus:
                    raise GraphRejectedError(
                        f"graph {graph.id}",
                        f"XML Import Channel : dev {device} not found.",
                        "name only GPUs of the communicator",
                    )

    def _given_rank(self, ranks: Sequence[int | None], position: int) -> int | None:
        if not self._facts.rank_overrides_dev or position >= len(ranks):
            return None
        return ranks[position]

    def _stock_ring(self) -> _Loaded:
        found = search_ring(self._seen, nodes=self._nodes)
        orders = tuple(tuple(int(gpu[1:]) for gpu in order) for order in found.orders)
        return _Loaded(None, len(orders), found.rate_intra, orders)

    def _stock_trees(self, channels: int) -> int:
        return len(search_tree(self._seen, nodes=self._nodes, channels=channels).orders)

    def _on_node(self, ring: _Loaded, node: int) -> NodeRings:
        start, size = node * len(self._gpus), len(self._gpus)
        if ring.graph is None:
            orders = [[start + self._gpus.index(gpu) for gpu in order] for order in ring.orders]
            return node_rings(orders, size=size)
        orders = []
        for channel in ring.graph.channels:
            ranks = []
            for position, device in enumerate(channel.gpus):
                given = self._given_rank(channel.ranks, position)
                ranks.append(start + self._gpus.index(device) if given is None else given)
            orders.append(ranks)
        crossnic = ring.graph.crossnic if self._nodes > 1 else 0
        return node_rings(orders, size=size, crossnic=crossnic)

    def _verdict(
        self, file: GraphFile, ring: _Loaded, channels: int, final: int
    ) -> tuple[VerdictKind, str]:
        graph = ring.graph
        if graph is None:
            return "ignored", _why_ignored(file)
        differences = [*self._too_much(graph), *self._wrong_nets(graph)]
        if channels < ring.channels:
            differences.append(f"the tree has {channels} of {ring.channels} channels")
        if final < channels:
            differences.append(f"NCCL_MAX_NCHANNELS leaves {final} of {channels} channels")
        if differences:
            return "clipped", "; ".join(differences)
        return "used", f"{channels} channels of the file, {final} in the end"

    def _too_much(self, graph: Graph) -> list[str]:
        found = []
        if len(graph.channels) > graph.nchannels:
            found.append(f"nchannels is {graph.nchannels}, the file has {len(graph.channels)}")
        if any(len(channel.gpus) > len(self._gpus) for channel in graph.channels):
            found.append("GPUs beyond the communicator's number are dropped")
        return found

    def _wrong_nets(self, graph: Graph) -> list[str]:
        """On several nodes, channels without two known NICs use NET 0."""
        if self._nodes == 1:
            return []
        known = {int(net[1:]) for net in self._seen.system.nets}
        used = graph.channels[: graph.nchannels]
        found = []
        if any(len(channel.nets) < 2 for channel in used):
            found.append("channels without <net> use NET 0")
        if any(net not in known for channel in used for net in channel.nets):
            found.append("a <net> that the node does not have is replaced by NET 0")
        return found


def _why_ignored(file: GraphFile) -> str:
    graph = file.graph(RING)
    if graph is None:
        return "there is no graph with id 0; NCCL searches for itself"
    if graph.nchannels <= 0:
        return f"nchannels is {graph.nchannels}; NCCL searches for itself"
    return "crossnic is 1 and NCCL_CROSS_NIC 0; NCCL searches for itself"
