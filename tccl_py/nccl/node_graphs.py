"""One node's ring and tree graphs, as NCCL has them after loading a file or searching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tccl_py.nccl.graph_file import (
    RING,
    TREE,
    Channel,
    Graph,
    GraphCrashError,
    GraphFile,
    GraphRejectedError,
    NodeRings,
)
from tccl_py.nccl.graph_search import search_ring, search_tree
from tccl_py.nccl.landing import leaves_as_named
from tccl_py.nccl.settings import integer
from tccl_py.nccl.transport import View, net_devices
from tccl_py.nccl.versions import VersionFacts, version_facts

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
        seen: View,
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
        """Whether NCCL takes the node for several (`View.parts`)."""
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
