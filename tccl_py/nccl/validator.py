"""What NCCL does with graph files: use them, ignore them, clip them, fail, or break."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine
from tccl_py.model.paths import PathType
from tccl_py.nccl.graph_file import (
    RING,
    TREE,
    TYPES,
    Channel,
    Graph,
    GraphCrashError,
    GraphFile,
    GraphRejectedError,
    NodeRings,
    connect,
    parse_graph_file,
    repeated,
)
from tccl_py.nccl.graph_search import search_ring, search_tree
from tccl_py.nccl.network import leaves_as_named, may_change_rails, net_path
from tccl_py.nccl.settings import Settings, final_channels, integer, settings_from_environment
from tccl_py.nccl.transport import pair_mechanism
from tccl_py.nccl.versions import LATEST, VersionFacts, version_facts
from tccl_py.nccl.view import NcclView, net_devices, view

# One node's ring and tree graphs, as NCCL has them after loading a file or searching.


_PATTERNS = {RING: (4,), TREE: (1, 2, 3)}
_BALANCED_TREE = 1
_ONE_LINK = 2
"""Up to so many nodes a tree has no node with children of both kinds."""


class _Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """One graph after loading (`graph`) or searching; GPUs by index, NICs by device number."""

    channels: int
    rate: float
    orders: tuple[Channel, ...]
    crossnic: int = 0
    graph: Graph | None = None


class NodeGraphs:
    """What one node brings to a communicator over `nodes` nodes.

    Args:
        seen: the node under the job's settings.
        gpus: its GPUs in rank order.
        nodes: how many nodes there are.
        variables: the job's environment.
        file: what is in its graph file.
        where: the file's name for messages.

    Raises:
        GraphRejectedError: init fails on this node.
        GraphCrashError: NCCL corrupts memory, or starts and then hangs or gives wrong sums.
    """

    def __init__(
        self,
        seen: NcclView,
        gpus: Sequence[int],
        *,
        nodes: int,
        variables: Mapping[str, str],
        file: GraphFile,
        where: str,
    ) -> None:
        self._seen, self._gpus, self._nodes = seen, tuple(gpus), nodes
        self._variables, self._file, self._where = variables, file, where
        self._facts: VersionFacts = version_facts(seen.settings.version)
        self._devices = net_devices(seen.system.machine, seen.settings)
        self._nics = {device: nic for nic, device in self._devices.items()}
        for graph in file.graphs:
            if not self._gated(graph):
                self._check(graph)
        self.ring = self._loaded(RING) or self._default_ring()
        self._tree = self._loaded(TREE)
        self.trees = self._tree.channels if self._tree else self._default_trees(self.ring.channels)

    @property
    def size(self) -> int:
        """How many GPUs the node has in the communicator."""
        return len(self._gpus)

    @property
    def sm(self) -> int:
        """The lowest compute capability among them."""
        return self._seen.system.sm_min

    @property
    def cut(self) -> bool:
        """Whether NCCL takes the node for several (`NcclView.parts`)."""
        return len(self._seen.parts) > 1

    def _gated(self, graph: Graph) -> bool:
        return graph.crossnic == 1 and integer(self._variables.get("NCCL_CROSS_NIC")) == 0

    def _loaded(self, number: int) -> _Loaded | None:
        """Return the file's graph with this id, if NCCL uses it."""
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

    # What NCCL does not survive

    def _check(self, graph: Graph) -> None:
        """Check a graph of the file.

        Raises:
            GraphRejectedError, GraphCrashError: as the class.
        """
        facts = self._facts
        if not 0 <= graph.nchannels <= facts.max_channels:
            right = f"0 to {facts.max_channels}; others corrupt NCCL's memory"
            raise GraphCrashError(*self._said(graph, f"has nchannels {graph.nchannels}"), right)
        if len(graph.channels) > facts.max_final_channels:
            what = f"has {len(graph.channels)} channels"
            right = f"more than {facts.max_final_channels} overflow NCCL's tables"
            raise GraphCrashError(*self._said(graph, what), right)
        strange = {gpu for channel in graph.channels for gpu in channel.gpus} - {*self._gpus}
        if strange:
            what = f"names GPU {min(strange)}, which the communicator does not have"
            right = f"NCCL says: dev {min(strange):x} not found"
            raise GraphRejectedError(*self._said(graph, what), right)
        if graph.id not in _PATTERNS or graph.nchannels == 0:
            return
        if graph.pattern not in _PATTERNS[graph.id] or graph.crossnic not in (0, 1, 2):
            what = f"has pattern {graph.pattern} and crossnic {graph.crossnic}"
            right = "a ring has pattern 4, a tree 1 to 3, and crossnic is 0, 1 or 2"
            raise GraphRejectedError(*self._said(graph, what), right)
        if min(graph.speedintra, graph.speedinter) <= 0:
            what, right = "has a speed of 0", "NCCL would find no algorithm"
            raise GraphRejectedError(*self._said(graph, what), right)
        self._check_channels(graph)
        if self.cut:
            one, other = (part[0] for part in self._seen.parts[:2])
            what = f"is for a node that NCCL cuts between {one} and {other}, which would use NICs"
            right = "set NCCL_NET_DISABLE_INTRA=1 in the job"
            raise GraphRejectedError(*self._said(graph, what), right)

    def _check_channels(self, graph: Graph) -> None:
        used = graph.channels[: graph.nchannels]
        if len(used) < graph.nchannels:
            what = f"has {len(used)} channels, but nchannels {graph.nchannels}"
            raise GraphRejectedError(*self._said(graph, what), "write all channels")
        for number, channel in enumerate(used):
            if sorted(channel.gpus[: self.size]) != sorted(self._gpus):
                what = f"has GPUs {list(channel.gpus)[:20]} in channel {number}"
                right = f"name each of {sorted(self._gpus)} once"
                if graph.id == TREE:
                    right += ", or NCCL starts and then hangs or sums wrongly"
                    raise GraphCrashError(*self._said(graph, what), right)
                raise GraphRejectedError(*self._said(graph, what), right)
            missing = [net for net in channel.nets[:2] if net not in self._nics]
            if missing and self._nodes > 1:
                what = f"names net {missing[0]}, which the node does not have"
                right = "NCCL fails when it connects"
                raise GraphRejectedError(*self._said(graph, what), right)

    def _said(self, graph: Graph, what: str) -> tuple[str, str]:
        """Return the place and the first part of an error about a graph."""
        return f"{self._where}:{graph.line}", f"graph {graph.id} {what}"

    def check_ranks(self, start: int) -> None:
        """Check ranks that the file gives GPUs, if this NCCL believes them.

        Args:
            start: the node's first rank.

        Raises:
            GraphRejectedError: a rank is another GPU's.
        """
        if not self._facts.rank_overrides_dev:
            return
        rank = {gpu: start + place for place, gpu in enumerate(self._gpus)}
        for graph in self._file.graphs:
            for channel in graph.channels:
                for gpu, given in zip(channel.gpus, channel.ranks, strict=True):
                    if given is not None and given != rank.get(gpu):
                        what = f"gives GPU {gpu} rank {given}, but it has {rank.get(gpu)}"
                        right = "leave ranks out: NCCL takes them unchecked"
                        raise GraphRejectedError(*self._said(graph, what), right)

    # What NCCL finds by itself

    def _default_ring(self) -> _Loaded:
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

    def _default_trees(self, channels: int) -> int:
        return len(search_tree(self._seen, nodes=self._nodes, channels=channels).orders)

    # What NCCL runs

    def rings(self, start: int) -> NodeRings:
        """Return the ring channels as ranks, on the node whose first rank is `start`."""
        rank = {gpu: start + place for place, gpu in enumerate(self._gpus)}
        used = self.ring.orders[: self.ring.channels]
        orders = tuple(tuple(rank[gpu] for gpu in one.gpus[: self.size]) for one in used)
        return NodeRings(orders, crossnic=self.ring.crossnic)

    def nic(self, channel: int, place: int) -> int | None:
        """The NIC by which a channel reaches the node's GPU at `place` in rank order.

        The channel's first GPU has the first NIC named, any other the second (ncclTopoGetNetDev).
        None where the node has no NIC.
        """
        one = self.ring.orders[channel]
        end = 0 if one.gpus[:1] == (self._gpus[place],) else 1
        named = one.nets[end] if end < len(one.nets) else 0
        return self._nics.get(named)

    def differences(self) -> list[str]:
        """What NCCL runs on this node that its file does not say; nothing where it has none."""
        graph = self.ring.graph
        if graph is None:
            return []
        found = [*self._too_much(graph), *self._other_nets(graph), *self._wrong_tree()]
        for one, other in sorted(self._seen.by_network)[:1]:
            pair = f"{one} and {other} would talk over NICs, where NCCL may cut the node"
            found.append(f"{pair}: set NCCL_NET_DISABLE_INTRA=1")
        if self.trees < self.ring.channels:
            found.append(f"the tree has {self.trees} of {self.ring.channels} channels")
        return found

    def _too_much(self, graph: Graph) -> list[str]:
        found = []
        if len(graph.channels) > graph.nchannels:
            found.append(f"nchannels is {graph.nchannels}, the file has {len(graph.channels)}")
        if any(len(channel.gpus) > len(self._gpus) for channel in graph.channels):
            found.append("GPUs beyond the communicator's number are dropped")
        return found

    def _other_nets(self, graph: Graph) -> list[str]:
        """On several nodes, channels without two NICs use NET 0."""
        if self._nodes == 1:
            return []
        used = graph.channels[: graph.nchannels]
        found = []
        if any(len(channel.nets) < 2 for channel in used):
            found.append("channels without <net> use NET 0")
        ends = (channel.nets for channel in used if len(channel.nets) >= 2)
        if not all(leaves_as_named(self._gpus, pair[0], pair[1]) for pair in ends):
            found.append("the node has one GPU: channels leave by the NIC that they enter by")
        return found

    def _wrong_tree(self) -> list[str]:
        """Balanced trees may hang other nodes from a second GPU, of which there is none here.

        NCCL then takes what lies behind the last channel's GPU (ncclTopoPreset). On two nodes it
        looks at the first GPU only.
        """
        tree = self._tree
        if self._nodes <= _ONE_LINK or self.size > 1 or tree is None or tree.graph is None:
            return []
        if tree.graph.pattern != _BALANCED_TREE:
            return []
        return ["the node has one GPU: a tree of pattern 1 hangs other nodes from a second"]

    def why_ignored(self) -> str:
        """Why the node's file has no say, if it has none."""
        graph = self._file.graph(RING)
        if graph is None:
            return "there is no graph with id 0; NCCL searches for itself"
        if graph.nchannels == 0:
            return "nchannels is 0; NCCL searches for itself"
        return "crossnic is 1 and NCCL_CROSS_NIC 0; NCCL searches for itself"


VerdictKind = Literal["used", "ignored", "clipped", "rejected", "crash"]
MAX_NODES = 65_536
_SHOWN_NODES = 8


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a graph file.

    `used`: NCCL runs what it says. `clipped`: NCCL loads it but runs less than, or something else
    than, it says. `ignored`: NCCL searches for itself. `rejected`: init fails, or the file has a
    form that not every NCCL reads. `crash`: NCCL segfaults, corrupts memory, or starts and then
    hangs or gives wrong sums. `rings` are the final channels' rank orders, each beginning at
    rank 0; empty where init does not end well, and for a node that NCCL cuts in parts.
    """

    verdict: VerdictKind
    reason: str
    rings: tuple[tuple[int, ...], ...] = ()


class NodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a job: what it is like, which GPUs it gives in rank order (None: all, by index).

    `graph` is the text of its graph file, "" where it has none; `where` its name for messages.
    """

    machine: Machine
    knowledge: Knowledge
    gpus: tuple[int, ...] | None = None
    graph: str = ""
    where: str = "graph file"


class ChannelNics(msgspec.Struct, frozen=True, kw_only=True):
    """The NICs by which one channel enters and leaves one node; None where NCCL has none to use."""

    entry: int | None
    exit: int | None


class ClusterVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of the graph files of all nodes of a job.

    `verdict`, `reason` and `rings` are as in `Verdict`, with ranks of the whole job; files that
    only some nodes use are `clipped`. `nics` has a row for each of `rings`, with what that channel
    uses on every node, in rank order; it is empty for one node.
    """

    verdict: VerdictKind
    reason: str
    rings: tuple[tuple[int, ...], ...] = ()
    nics: tuple[tuple[ChannelNics, ...], ...] = ()


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
    """What NCCL does with `text` as NCCL_GRAPH_FILE on every one of equal nodes.

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
    one = NodeJob(
        machine=machine,
        knowledge=knowledge,
        gpus=None if gpus is None else tuple(gpus),
        graph=text,
        where=where,
    )
    _check_count(nodes)
    found = validate_cluster([one] * nodes, version=version, environment=environment)
    return Verdict(verdict=found.verdict, reason=found.reason, rings=found.rings)


def validate_cluster(
    nodes: Sequence[NodeJob],
    *,
    version: str = LATEST,
    environment: Mapping[str, str] | None = None,
) -> ClusterVerdict:
    """What NCCL does with the graph files of a job whose nodes may all be different.

    Every rank of a node has the node's file. Nodes that share their Machine, Knowledge and file are
    judged once. Cost: ranks times channels.

    Args:
        nodes: in rank order; each has the ranks after those of the nodes before it.
        version: NCCL's.
        environment: other NCCL variables of the job.

    Raises:
        InputError: unknown GPUs, no nodes or too many, or a file larger than any NCCL reads.
    """
    _check_count(len(nodes))
    try:
        return _Job(nodes, dict(environment or {}), version).judge()
    except _FaultError as fault:
        return ClusterVerdict(verdict=fault.verdict, reason=fault.reason)


def _check_count(nodes: int) -> None:
    if not 1 <= nodes <= MAX_NODES:
        raise InputError("nodes", f"is {nodes}", f"1 to {MAX_NODES}")


class _FaultError(Exception):
    """Init does not end well."""

    def __init__(self, verdict: VerdictKind, reason: str) -> None:
        super().__init__(reason)
        self.verdict, self.reason = verdict, reason


@dataclass(slots=True)
class _Class:
    """Nodes that are alike, by number, and what each of them brings."""

    job: NodeJob
    numbers: list[int]
    graphs: NodeGraphs


class _Job:
    """A communicator for which files are judged."""

    def __init__(self, nodes: Sequence[NodeJob], variables: dict[str, str], version: str) -> None:
        self._variables, self._version, self._count = variables, version, len(nodes)
        self._classes: list[_Class] = []
        self._of: list[NodeGraphs] = []
        self._group(nodes)
        self._starts = [0, *accumulate(graphs.size for graphs in self._of)]

    def _group(self, nodes: Sequence[NodeJob]) -> None:
        """Machines are told apart by identity: to compare them costs more than to judge them."""
        alike: dict[tuple[int, int, tuple[int, ...] | None, str, str], list[int]] = {}
        for number, node in enumerate(nodes):
            key = id(node.machine), id(node.knowledge), node.gpus, node.graph, node.where
            alike.setdefault(key, []).append(number)
        faults: list[_FaultError] = []
        for numbers in alike.values():
            node = nodes[numbers[0]]
            try:
                self._classes.append(_Class(node, numbers, self._load(node)))
            except (GraphRejectedError, GraphCrashError) as error:
                kind: VerdictKind = "crash" if isinstance(error, GraphCrashError) else "rejected"
                alone = len(alike) == 1
                faults.append(_FaultError(kind, _told(numbers, str(error), alone=alone)))
        if faults:
            raise next((one for one in faults if one.verdict == "crash"), faults[0])
        by_number = {number: one.graphs for one in self._classes for number in one.numbers}
        self._of = [by_number[number] for number in range(self._count)]

    def _load(self, node: NodeJob) -> NodeGraphs:
        gpus = tuple(sorted(node.machine.gpu_indices)) if node.gpus is None else node.gpus
        settings = settings_from_environment(self._variables, version=self._version)
        seen = view(node.machine, node.knowledge, settings, gpus=gpus)
        file = parse_graph_file(node.graph, where=node.where, version=self._version)
        return NodeGraphs(
            seen,
            gpus,
            nodes=self._count,
            variables=self._variables,
            file=file,
            where=node.where,
        )

    def judge(self) -> ClusterVerdict:
        """Connect the rings and say what is not as the files have it."""
        each = [one.graphs for one in self._classes]
        channels = min(min(one.ring.channels, one.trees) for one in each)
        rings = self._connected(channels)
        final = final_channels(
            channels,
            sm=min(one.sm for one in each),
            nodes=self._count,
            speed_intra=min(one.ring.rate for one in each),
            variables=self._variables,
            version=self._version,
        )
        verdict, reason = self._verdict(channels, final)
        if any(one.cut for one in each):
            return ClusterVerdict(verdict=verdict, reason=f"{reason}; NCCL cuts a node in parts")
        nics = [self._nics(ring, channel) for channel, ring in enumerate(rings)]
        return ClusterVerdict(
            verdict=verdict,
            reason=reason,
            rings=repeated(rings, final),
            nics=tuple(nics[channel % len(nics)] for channel in range(final)) if nics[0] else (),
        )

    def _connected(self, channels: int) -> list[tuple[int, ...]]:
        pairs = list(zip(self._of, self._starts, strict=False))
        try:
            for graphs, start in pairs:
                graphs.check_ranks(start)
        except GraphRejectedError as error:
            raise _FaultError("rejected", str(error)) from error
        return connect([graphs.rings(start) for graphs, start in pairs], channels=channels)

    def _nics(self, ring: tuple[int, ...], channel: int) -> tuple[ChannelNics, ...]:
        """Where a ring passes from node to node, and by which NICs."""
        if self._count == 1:
            return ()
        node_of = [number for number, graphs in enumerate(self._of) for _ in range(graphs.size)]
        entries: dict[int, int | None] = {}
        exits: dict[int, int | None] = {}
        for rank, following in zip(ring, (*ring[1:], ring[0]), strict=True):
            one, other = node_of[rank], node_of[following]
            if one != other:
                exits[one] = self._of[one].nic(channel, rank - self._starts[one])
                entries[other] = self._of[other].nic(channel, following - self._starts[other])
        return tuple(
            ChannelNics(entry=entries[number], exit=exits[number]) for number in range(self._count)
        )

    def _verdict(self, channels: int, final: int) -> tuple[VerdictKind, str]:
        if all(one.graphs.ring.graph is None for one in self._classes):
            return "ignored", self._joined(
                [(one, [one.graphs.why_ignored()]) for one in self._classes]
            )
        found = [(one, self._differences(one, channels)) for one in self._classes]
        reason = self._joined([(one, texts) for one, texts in found if texts])
        if final < channels:
            clip = f"NCCL_MAX_NCHANNELS leaves {final} of {channels} channels"
            reason = f"{reason}; {clip}" if reason else clip
        if reason:
            return "clipped", reason
        files = "file" if len(self._classes) == 1 else "files"
        loaded = f"{channels} channel{'s' * (channels != 1)} of the {files}"
        return "used", f"{loaded}, {final} in the end"

    def _differences(self, one: _Class, channels: int) -> list[str]:
        graphs = one.graphs
        if graphs.ring.graph is None:
            return [graphs.why_ignored()]
        found = graphs.differences()
        own = min(graphs.ring.channels, graphs.trees)
        if channels < own:
            found.append(f"another node has {channels} of {own} channels")
        return found

    def _joined(self, texts: Sequence[tuple[_Class, list[str]]]) -> str:
        alone = len(self._classes) == 1
        return "; ".join(_told(one.numbers, "; ".join(found), alone=alone) for one, found in texts)


def _told(numbers: Sequence[int], text: str, *, alone: bool) -> str:
    if alone:
        return text
    shown = ", ".join(str(number) for number in numbers[:_SHOWN_NODES])
    more = ", ..." if len(numbers) > _SHOWN_NODES else ""
    return f"node{'s' * (len(numbers) > 1)} {shown}{more}: {text}"


# What a graph file has to say of its channels so that NCCL's tuner believes the truth.


class GraphFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one node's channels; types by the names that the settings' version reads.

    `nets` are the device numbers of each channel's NICs, `tree_nets` those of a tree along the same
    GPUs: it comes and goes by the ring's entry, as in NCCL's own dumps. It does so from its first
    GPU, or if `tree_spreads`, from the first two, where the second is as near to the NIC.
    """

    type_intra: str
    type_inter: str
    tree_type_inter: str
    nets: tuple[tuple[int, int], ...]
    tree_nets: tuple[tuple[int, int], ...]
    tree_spreads: bool


def graph_facts(
    seen: NcclView, orders: Sequence[tuple[int, ...]], ends: Sequence[tuple[int, int]]
) -> GraphFacts:
    """What is true of channels over `orders` that enter and leave by the NICs `ends`, by number.

    Raises:
        InputError: channels that change NICs where the settings forbid it, a pair without a path,
            or as `landing` for a NIC or GPU that is not there.
    """
    settings = seen.settings
    if not may_change_rails(settings) and any(entry != leave for entry, leave in ends):
        raise InputError(
            "channels over several nodes",
            "leave by other NICs than they enter by, with NCCL_CROSS_NIC=0",
            "choose cross_nic 1 or 2, or None",
        )
    hops = [pair for order in orders for pair in pairwise(order)]
    crossings: list[PathType] = []
    first: list[PathType] = []
    second: list[PathType] = []
    for order, (entry, leave) in zip(orders, ends, strict=True):
        crossings.append(net_path(seen, order[0], entry, "receive"))
        crossings.append(net_path(seen, order[-1], leave, "send"))
        first += _both_ways(seen, order[0], entry)
        second += [kind for gpu in order[1:2] for kind in _both_ways(seen, gpu, entry)]
    device = net_devices(seen.system.machine, settings)
    return GraphFacts(
        type_intra=_farthest(
            [PathType[pair_mechanism(seen, *pair).path] for pair in hops], settings
        ),
        type_inter=_farthest(crossings, settings),
        tree_type_inter=_farthest(first, settings),
        nets=tuple((device[entry], device[leave]) for entry, leave in ends),
        tree_nets=tuple((device[entry], device[entry]) for entry, _ in ends),
        tree_spreads=bool(second) and max(second) <= max(first),
    )


def _both_ways(seen: NcclView, gpu: int, nic: int) -> list[PathType]:
    return [net_path(seen, gpu, nic, "receive"), net_path(seen, gpu, nic, "send")]


def _farthest(kinds: Sequence[PathType], settings: Settings) -> str:
    """The farthest type, by the nearest name that is as far at least."""
    farthest = max(kinds, default=PathType.LOC)
    known = (name for name in TYPES if name not in version_facts(settings.version).unknown_levels)
    for name in known:
        if PathType[name] >= farthest:
            return name
    raise InputError("channels over several nodes", "join devices without a path", "choose others")
