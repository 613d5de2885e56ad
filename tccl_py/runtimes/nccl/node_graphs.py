"""One node's ring and tree graphs, as NCCL has them after loading a file or searching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tccl_py.runtimes.nccl.graph_file import RING, TREE, Channel, Graph, GraphFile
from tccl_py.runtimes.nccl.graph_search import search_ring, search_tree
from tccl_py.runtimes.nccl.landing import leaves_as_named
from tccl_py.runtimes.nccl.rings import NodeRings, node_rings
from tccl_py.runtimes.nccl.settings import integer
from tccl_py.runtimes.nccl.transport import View, net_devices
from tccl_py.runtimes.nccl.versions import VersionFacts, version_facts
from tccl_py.runtimes.nccl.xml_lexer import GraphCrashError, GraphRejectedError

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

    Raises:
        GraphRejectedError: init fails on this node.
        GraphCrashError: init segfaults or corrupts memory.
    """

    def __init__(
        self,
        seen: View,
        gpus: Sequence[int],
        *,
        nodes: int,
        variables: Mapping[str, str],
        file: GraphFile,
    ) -> None:
        self._seen, self._gpus, self._nodes = seen, tuple(gpus), nodes
        self._variables, self._file = variables, file
        self._facts: VersionFacts = version_facts(seen.settings.version)
        self._devices = net_devices(seen.system.machine, seen.settings)
        self._nics = {device: nic for nic, device in self._devices.items()}
        self.ring = self._load(RING) or self._stock_ring()
        self._tree = self._load(TREE)
        self.trees = self._tree.channels if self._tree else self._stock_trees(self.ring.channels)

    @property
    def size(self) -> int:
        """How many GPUs the node has in the communicator."""
        return len(self._gpus)

    @property
    def sm(self) -> int:
        """The lowest compute capability among them."""
        return self._seen.system.sm_min

    def _load(self, number: int) -> _Loaded | None:
        """Every graph with this id in turn, as NCCL loads one over the other; None if unused."""
        loaded = None
        for graph in self._file.graphs:
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
        return _Loaded(
            channels=loaded.nchannels,
            rate=loaded.speedintra,
            orders=loaded.channels,
            crossnic=loaded.crossnic if self._nodes > 1 else 0,
            graph=loaded,
        )

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
                if self._given_rank(channel, position) is None and device not in self._gpus:
                    raise GraphRejectedError(
                        f"graph {graph.id}",
                        f"XML Import Channel : dev {device} not found.",
                        "name only GPUs of the communicator",
                    )

    def _given_rank(self, channel: Channel, position: int) -> int | None:
        if not self._facts.rank_overrides_dev or position >= len(channel.ranks):
            return None
        return channel.ranks[position]

    def _stock_ring(self) -> _Loaded:
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

    def _stock_trees(self, channels: int) -> int:
        return len(search_tree(self._seen, nodes=self._nodes, channels=channels).orders)

    def rings(self, start: int) -> NodeRings:
        """The ring graph in memory, on the node whose first rank is `start`."""
        rank = {gpu: start + place for place, gpu in enumerate(self._gpus)}
        orders = []
        for channel in self.ring.orders:
            given = [self._given_rank(channel, place) for place in range(len(channel.gpus))]
            pairs = zip(channel.gpus, given, strict=True)
            orders.append([rank[gpu] if one is None else one for gpu, one in pairs])
        return node_rings(orders, size=self.size, crossnic=self.ring.crossnic)

    def nic(self, channel: int, place: int) -> int | None:
        """The NIC by which a channel reaches the node's GPU at `place` in rank order.

        The channel's first GPU has the first NIC named, any other the second (ncclTopoGetNetDev).
        None where the node has no NIC.
        """
        if channel >= len(self.ring.orders):
            return self._nics.get(0)
        one = self.ring.orders[channel]
        end = 0 if one.gpus[:1] == (self._gpus[place],) else 1
        named = one.nets[end] if end < len(one.nets) else 0
        return self._nics.get(named, self._nics.get(0))

    def differences(self) -> list[str]:
        """What NCCL runs on this node that its file does not say; nothing where it has none."""
        graph = self.ring.graph
        if graph is None:
            return []
        found = [*self._too_much(graph), *self._wrong_nets(graph), *self._wrong_tree()]
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

    def _wrong_nets(self, graph: Graph) -> list[str]:
        """On several nodes, channels without two known NICs use NET 0."""
        if self._nodes == 1:
            return []
        used = graph.channels[: graph.nchannels]
        found = []
        if any(len(channel.nets) < 2 for channel in used):
            found.append("channels without <net> use NET 0")
        if any(net not in self._nics for channel in used for net in channel.nets):
            found.append("a <net> that the node does not have is replaced by NET 0")
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
        if graph.nchannels <= 0:
            return f"nchannels is {graph.nchannels}; NCCL searches for itself"
        return "crossnic is 1 and NCCL_CROSS_NIC 0; NCCL searches for itself"
