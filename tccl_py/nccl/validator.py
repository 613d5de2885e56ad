"""Verdicts on graph files: NCCL uses them, ignores them, clips them, fails, or breaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal, NoReturn

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.nccl.graph_file import (
    Channel,
    Graph,
    GraphCrashError,
    GraphFile,
    GraphRejectedError,
    parse_graph_file,
)
from tccl_py.nccl.graph_search import search_ring, search_tree
from tccl_py.nccl.settings import final_channels, settings_from_environment
from tccl_py.nccl.versions import LATEST, RING, SWAPPING, TREE, version_facts
from tccl_py.nccl.view import NcclView, leaves_as_named, net_devices, view

VerdictKind = Literal["used", "ignored", "clipped", "rejected", "crash"]
MAX_NODES = 65_536
_SHOWN_NODES = 8
_PATTERNS = {RING: (4,), TREE: (1, 2, 3)}
_BALANCED_TREE = 1
_ONE_LINK = 2
"""Up to so many nodes a tree has no node with children of both kinds."""


class ChannelNics(msgspec.Struct, frozen=True, kw_only=True):
    """The NICs by which a channel enters and leaves a node; None where NCCL has no NIC."""

    entry: int | None
    exit: int | None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on the graph files of a job.

    `used`: NCCL runs the files' channels. `clipped`: fewer or other channels, or only some nodes
    use their files. `ignored`: NCCL searches for itself. `rejected`: init fails, or the file has a
    form that not every NCCL reads. `crash`: NCCL segfaults, corrupts memory, hangs or gives wrong
    sums.

    `rings` are the final channels' rank orders, each from rank 0 on; empty where init fails, and
    for a node that NCCL cuts in parts. `nics` has a row for each of `rings` with one entry a node,
    in rank order; empty for one node.
    """

    verdict: VerdictKind
    reason: str
    rings: tuple[tuple[int, ...], ...] = ()
    nics: tuple[tuple[ChannelNics, ...], ...] = ()


class NodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a job: its machine, and its GPUs in rank order (None: all, by index).

    `graph` is the text of its graph file, "" for none; `where` the file's name for messages.
    """

    machine: Machine
    knowledge: Knowledge
    gpus: tuple[int, ...] | None = None
    graph: str = ""
    where: str = "graph file"


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
    """Return the verdict on `text` as NCCL_GRAPH_FILE on every one of `nodes` equal nodes.

    Other arguments and errors are as of `NodeJob` and `validate_cluster`.
    """
    ranks = None if gpus is None else tuple(gpus)
    job = NodeJob(machine=machine, knowledge=knowledge, gpus=ranks, graph=text, where=where)
    _check_count(nodes)
    return validate_cluster([job] * nodes, version=version, environment=environment)


def validate_cluster(
    nodes: Sequence[NodeJob], *, version: str = LATEST, environment: Mapping[str, str] | None = None
) -> Verdict:
    """Return the verdict on the graph files of a job whose nodes, in rank order, may all differ.

    Every rank of a node has the node's file; `environment` has the job's other NCCL variables.
    Nodes that share their Machine, Knowledge and file are judged once.
    """
    _check_count(len(nodes))
    try:
        return _Job(nodes, dict(environment or {}), version).judge()
    except _FaultError as fault:
        return Verdict(verdict=fault.verdict, reason=fault.reason)


def _check_count(nodes: int) -> None:
    if not 1 <= nodes <= MAX_NODES:
        raise InputError("nodes", f"is {nodes}", f"1 to {MAX_NODES}")


# One node's ring and tree graphs, as NCCL has them after loading a file or searching.
class _Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """One graph after loading (`graph`) or searching; GPUs by index, NICs by device number."""

    channels: int
    rate: float
    orders: tuple[Channel, ...]
    crossnic: int = 0
    graph: Graph | None = None


class _NodeGraphs:
    """The ring and tree of one node with GPUs in rank order, in a communicator over `nodes` nodes.

    Raises GraphRejectedError: init fails on this node. GraphCrashError: NCCL corrupts memory, or
    starts and then hangs or gives wrong sums.
    """

    def __init__(
        self, seen: NcclView, gpus: tuple[int, ...], nodes: int, *, file: GraphFile, where: str
    ) -> None:
        self._seen, self._gpus, self._nodes = seen, gpus, nodes
        self._file, self._where = file, where
        self._place = {gpu: place for place, gpu in enumerate(self._gpus)}
        self._facts = version_facts(seen.settings.version)
        self._devices = net_devices(seen.machine, seen.settings)
        self._nics = {device: nic for nic, device in self._devices.items()}
        self.size, self.sm = len(self._gpus), seen.system.sm_min
        self.cut = len(seen.parts) > 1
        for graph in file.graphs:
            if not self._gated(graph):
                self._check(graph)
        self.ring = self._loaded(RING) or self._searched_ring()
        self._tree = self._loaded(TREE)
        if self._tree is None:
            self.trees = len(search_tree(seen, nodes=nodes, channels=self.ring.channels).orders)
        else:
            self.trees = self._tree.channels

    def _gated(self, graph: Graph) -> bool:
        return graph.crossnic == 1 and self._seen.settings.cross_nic == 0

    def _loaded(self, number: int) -> _Loaded | None:
        graph = self._file.graph(number)
        if graph is None or graph.nchannels == 0 or self._gated(graph):
            return None
        return _Loaded(
            channels=graph.nchannels,
            rate=graph.speedintra,
            orders=graph.channels,
            crossnic=graph.crossnic if self._nodes > 1 else 0,
            graph=graph,
        )

    def _searched_ring(self) -> _Loaded:
        found = search_ring(self._seen, nodes=self._nodes)
        orders = tuple(
            Channel(
                tuple(int(gpu[1:]) for gpu in order),
                tuple(self._devices[int(net[1:])] for net in ends if net),
            )
            for order, ends in zip(found.orders, found.ports, strict=True)
        )
        return _Loaded(
            channels=len(orders), rate=found.rate_intra, orders=orders, crossnic=found.cross_nic
        )

    # Graphs with which NCCL does not start

    def _reject(self, graph: Graph, what: str, right: str) -> NoReturn:
        raise GraphRejectedError(f"{self._where}:{graph.line}", f"graph {graph.id} {what}", right)

    def _crash(self, graph: Graph, what: str, right: str) -> NoReturn:
        raise GraphCrashError(f"{self._where}:{graph.line}", f"graph {graph.id} {what}", right)

    def _check(self, graph: Graph) -> None:
        facts, channels = self._facts, len(graph.channels)
        if not 0 <= graph.nchannels <= facts.max_channels:
            right = f"0 to {facts.max_channels}; others corrupt NCCL's memory"
            self._crash(graph, f"has nchannels {graph.nchannels}", right)
        if channels > facts.max_final_channels:
            right = f"more than {facts.max_final_channels} overflow NCCL's tables"
            self._crash(graph, f"has {channels} channels", right)
        strange = {gpu for channel in graph.channels for gpu in channel.gpus} - {*self._gpus}
        if strange:
            what = f"names GPU {min(strange)}, which the communicator does not have"
            self._reject(graph, what, f"NCCL says: dev {min(strange):x} not found")
        if graph.id not in _PATTERNS or graph.nchannels == 0:
            return
        if graph.pattern not in _PATTERNS[graph.id] or graph.crossnic not in (0, 1, 2):
            what = f"has pattern {graph.pattern} and crossnic {graph.crossnic}"
            right = "a ring has pattern 4, a tree 1 to 3, and crossnic is 0, 1 or 2"
            self._reject(graph, what, right)
        if min(graph.speedintra, graph.speedinter) <= 0:
            self._reject(graph, "has a speed of 0", "NCCL would find no algorithm")
        self._check_channels(graph)
        if self.cut:
            low, high = (part[0] for part in self._seen.parts[:2])
            what = f"is for a node that NCCL cuts between {low} and {high}, which would use NICs"
            self._reject(graph, what, "set NCCL_NET_DISABLE_INTRA=1 in the job")

    def _check_channels(self, graph: Graph) -> None:
        used = graph.channels[: graph.nchannels]
        if len(used) < graph.nchannels:
            what = f"has {len(used)} channels, but nchannels {graph.nchannels}"
            self._reject(graph, what, "write all channels")
        for number, channel in enumerate(used):
            if sorted(channel.gpus[: self.size]) != sorted(self._gpus):
                what = f"has GPUs {list(channel.gpus)[:20]} in channel {number}"
                right = f"name each of {sorted(self._gpus)} once"
                if graph.id == TREE:
                    self._crash(graph, what, f"{right}, or NCCL starts and hangs or sums wrongly")
                self._reject(graph, what, right)
            missing = [net for net in channel.nets[:2] if net not in self._nics]
            if missing and self._nodes > 1:
                what = f"names net {missing[0]}, which the node does not have"
                self._reject(graph, what, "NCCL fails when it connects")

    def check_ranks(self, start: int) -> None:
        """Check ranks given to GPUs, from rank `start` on, if this NCCL believes them.

        Raises GraphRejectedError: a rank is another GPU's.
        """
        if not self._facts.rank_overrides_dev:
            return
        rank = {gpu: start + place for gpu, place in self._place.items()}
        for graph in self._file.graphs:
            for channel in graph.channels:
                for gpu, given in zip(channel.gpus, channel.ranks, strict=True):
                    if given is not None and given != rank.get(gpu):
                        what = f"gives GPU {gpu} rank {given}, but it has {rank.get(gpu)}"
                        self._reject(graph, what, "leave ranks out: NCCL takes them unchecked")

    # Rings and NICs in use

    def ranks_of(self, channel: int, start: int) -> list[int]:
        """Return a ring channel as ranks, on the node whose first rank is `start`."""
        return [start + self._place[gpu] for gpu in self.ring.orders[channel].gpus[: self.size]]

    def nic(self, channel: int, place: int) -> int | None:
        """Return the NIC by which a channel reaches the node's GPU at `place`; None without a NIC.

        The channel's first GPU has the first NIC named, any other the second (ncclTopoGetNetDev).
        """
        order = self.ring.orders[channel]
        end = 0 if order.gpus[:1] == (self._gpus[place],) else 1
        return self._nics.get(order.nets[end] if end < len(order.nets) else 0)

    # Differences between the file and the run

    def differences(self, channels: int) -> list[str]:
        """Return where a run of `channels` channels departs from the node's file."""
        graph, nodes = self.ring.graph, self._nodes
        if graph is None:
            return [self.why_ignored()]
        found, used = [], graph.channels[: graph.nchannels]
        if len(graph.channels) > graph.nchannels:
            found.append(f"nchannels is {graph.nchannels}, the file has {len(graph.channels)}")
        if any(len(channel.gpus) > self.size for channel in graph.channels):
            found.append("GPUs beyond the communicator's number are dropped")
        if nodes > 1 and any(len(channel.nets) < 2 for channel in used):
            found.append("channels without <net> use NET 0")
        ends = [channel.nets[:2] for channel in used if len(channel.nets) >= 2]
        if nodes > 1 and not all(leaves_as_named(self._gpus, *pair) for pair in ends):
            found.append("the node has one GPU: channels leave by the NIC that they enter by")
        tree = self._tree.graph if self._tree is not None else None
        balanced = tree is not None and tree.pattern == _BALANCED_TREE
        # NCCL then reads beyond the last channel's GPU (ncclTopoPreset).
        if nodes > _ONE_LINK and self.size == 1 and balanced:
            found.append(
                "the node has one GPU: a tree of pattern 1 hangs other nodes from a second"
            )
        for pair in sorted(self._seen.by_network)[:1]:
            what = f"{pair[0]} and {pair[1]} would talk over NICs, where NCCL may cut the node"
            found.append(f"{what}: set NCCL_NET_DISABLE_INTRA=1")
        own = min(self.ring.channels, self.trees)
        if own < self.ring.channels:
            found.append(f"the tree has {self.trees} of {self.ring.channels} channels")
        if channels < own:
            found.append(f"another node has {channels} of {own} channels")
        return found

    def why_ignored(self) -> str:
        """Return why NCCL does not use the node's file."""
        graph = self._file.graph(RING)
        if graph is None:
            return "there is no graph with id 0; NCCL searches for itself"
        if graph.nchannels == 0:
            return "nchannels is 0; NCCL searches for itself"
        return "crossnic is 1 and NCCL_CROSS_NIC 0; NCCL searches for itself"


# The communicator.
class _FaultError(Exception):
    def __init__(self, verdict: VerdictKind, reason: str) -> None:
        super().__init__(reason)
        self.verdict, self.reason = verdict, reason


class _Job:
    """A communicator for which files are judged."""

    def __init__(self, nodes: Sequence[NodeJob], variables: dict[str, str], version: str) -> None:
        self._variables, self._version, self._count = variables, version, len(nodes)
        self._classes = self._grouped(nodes)
        by_number = {n: graphs for numbers, graphs in self._classes for n in numbers}
        self._nodes = [by_number[number] for number in range(self._count)]
        self._starts = [0, *accumulate(graphs.size for graphs in self._nodes)]

    def _grouped(self, nodes: Sequence[NodeJob]) -> list[tuple[list[int], _NodeGraphs]]:
        """Return equal nodes, by number, and the graphs of each."""
        # By identity: comparing machines costs more than judging them.
        equal: dict[tuple[int, int, tuple[int, ...] | None, str, str], list[int]] = {}
        for number, node in enumerate(nodes):
            key = id(node.machine), id(node.knowledge), node.gpus, node.graph, node.where
            equal.setdefault(key, []).append(number)
        classes: list[tuple[list[int], _NodeGraphs]] = []
        faults: list[_FaultError] = []
        for numbers in equal.values():
            try:
                classes.append((numbers, self._load(nodes[numbers[0]])))
            except (GraphRejectedError, GraphCrashError) as error:
                kind: VerdictKind = "crash" if isinstance(error, GraphCrashError) else "rejected"
                faults.append(_FaultError(kind, _said_of(numbers, str(error), len(equal))))
        if faults:
            raise next((fault for fault in faults if fault.verdict == "crash"), faults[0])
        return classes

    def _load(self, node: NodeJob) -> _NodeGraphs:
        gpus = tuple(sorted(node.machine.gpu_indices)) if node.gpus is None else node.gpus
        settings = settings_from_environment(self._variables, version=self._version)
        seen = view(node.machine, node.knowledge, settings, gpus=gpus)
        file = parse_graph_file(node.graph, where=node.where, version=self._version)
        return _NodeGraphs(seen, gpus, self._count, file=file, where=node.where)

    def judge(self) -> Verdict:
        """Connect the rings and compare them with the files."""
        each = [graphs for _, graphs in self._classes]
        channels = min(min(graphs.ring.channels, graphs.trees) for graphs in each)
        rings = self._connected(channels)
        final = final_channels(
            channels,
            sm=min(graphs.sm for graphs in each),
            nodes=self._count,
            speed_intra=min(graphs.ring.rate for graphs in each),
            variables=self._variables,
            version=self._version,
        )
        verdict, reason = self._verdict(channels, final)
        if any(graphs.cut for graphs in each):
            return Verdict(verdict=verdict, reason=f"{reason}; NCCL cuts a node in parts")
        nics = [self._nics(ring, channel) for channel, ring in enumerate(rings)]
        return Verdict(
            verdict=verdict,
            reason=reason,
            rings=tuple(rings[channel % len(rings)] for channel in range(final)),
            nics=tuple(nics[channel % len(nics)] for channel in range(final)) if nics[0] else (),
        )

    def _connected(self, channels: int) -> list[tuple[int, ...]]:
        """Return the rings of the channels from rank 0 on, nodes in rank order.

        With crossed NICs odd nodes swap the channels of each pair, if all channels are in pairs.
        """
        pairs = list(zip(self._nodes, self._starts, strict=False))
        try:
            for graphs, start in pairs:
                graphs.check_ranks(start)
        except GraphRejectedError as error:
            raise _FaultError("rejected", str(error)) from error
        rings = []
        for channel in range(channels):
            ring: list[int] = []
            for number, (graphs, start) in enumerate(pairs):
                swapped = graphs.ring.crossnic == SWAPPING and number % 2 and channels % 2 == 0
                ring += graphs.ranks_of(channel ^ 1 if swapped else channel, start)
            first = ring.index(0)
            rings.append((*ring[first:], *ring[:first]))
        return rings

    def _nics(self, ring: tuple[int, ...], channel: int) -> tuple[ChannelNics, ...]:
        """Return the NICs by which a ring enters and leaves each node."""
        if self._count == 1:
            return ()
        node_of = [number for number, graphs in enumerate(self._nodes) for _ in range(graphs.size)]
        entries: dict[int, int | None] = {}
        exits: dict[int, int | None] = {}
        for rank, following in zip(ring, (*ring[1:], ring[0]), strict=True):
            source, target = node_of[rank], node_of[following]
            if source != target:
                exits[source] = self._nodes[source].nic(channel, rank - self._starts[source])
                entries[target] = self._nodes[target].nic(channel, following - self._starts[target])
        return tuple(ChannelNics(entry=entries[n], exit=exits[n]) for n in range(self._count))

    def _verdict(self, channels: int, final: int) -> tuple[VerdictKind, str]:
        every = [graphs for _, graphs in self._classes]
        if all(graphs.ring.graph is None for graphs in every):
            return "ignored", self._joined([[graphs.why_ignored()] for graphs in every])
        reason = self._joined([graphs.differences(channels) for graphs in every])
        if final < channels:
            clip = f"NCCL_MAX_NCHANNELS leaves {final} of {channels} channels"
            reason = f"{reason}; {clip}" if reason else clip
        if reason:
            return "clipped", reason
        files = "file" if len(self._classes) == 1 else "files"
        loaded = f"{channels} channel{'s' * (channels != 1)} of the {files}"
        return "used", f"{loaded}, {final} in the end"

    def _joined(self, texts: Sequence[list[str]]) -> str:
        return "; ".join(
            _said_of(numbers, "; ".join(found), len(self._classes))
            for (numbers, _), found in zip(self._classes, texts, strict=True)
            if found
        )


def _said_of(numbers: Sequence[int], text: str, classes: int) -> str:
    """Return a text with the nodes it is about, if there are others."""
    if classes == 1:
        return text
    shown = ", ".join(str(number) for number in numbers[:_SHOWN_NODES])
    more = ", ..." if len(numbers) > _SHOWN_NODES else ""
    return f"node{'s' * (len(numbers) > 1)} {shown}{more}: {text}"
