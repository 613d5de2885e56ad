"""Verdicts on graph files: NCCL uses them, ignores them, clips them, fails, or breaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle, islice
from typing import Annotated, Literal, NamedTuple

import msgspec

from tccl_py.errors import require, spell
from tccl_py.files import says
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.rings import neighbours
from tccl_py.nccl.connections import swaps_pairs
from tccl_py.nccl.graph_file import Channel, Graph, GraphFaultError, parse_graph_file
from tccl_py.nccl.graph_search import search_ring, search_tree
from tccl_py.nccl.settings import Settings, settings_from_environment
from tccl_py.nccl.transport import final_channels
from tccl_py.nccl.versions import ASSUMED, RING, TREE
from tccl_py.nccl.view import leaves_as_named, net_devices, view

VerdictKind = Literal["used", "ignored", "clipped", "rejected", "crash"]
MAX_NODES = 65_536
_SHOWN_NODES = 8
_TREE_PATTERN, _NVLS_PATTERN = 3, 5
_ONE_LINK = 2
"""Up to so many nodes a tree has no node with children of both kinds."""


class ChannelNics(NamedTuple):
    """The NICs by which a channel enters and leaves a node; None where NCCL has no NIC."""

    entry: int | None
    exit: int | None


class GraphVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on graph files, as `tccl validate --json` prints it."""

    verdict: VerdictKind
    reason: str
    rings: Annotated[tuple[tuple[int, ...], ...], says("of the final channels, as ranks")] = ()


class Verdict(GraphVerdict, frozen=True, kw_only=True):
    """The verdict on the graph files of a job.

    `used`: NCCL runs the files' channels. `clipped`: fewer or other channels, or only some nodes
    use their files. `ignored`: NCCL searches for itself. `rejected`: init fails. `crash`: NCCL
    segfaults, corrupts memory, hangs or gives wrong sums.

    `rings` are the final channels' rank orders, each from rank 0 on; empty where init fails, and
    for a node that NCCL cuts in parts.
    """

    nics: tuple[tuple[ChannelNics, ...], ...] = ()
    """A row for each ring with one entry a node, in rank order; empty for one node."""


class NodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a job."""

    machine: Machine
    knowledge: Knowledge
    gpus: tuple[int, ...] | None = None
    """Its GPUs in rank order; None is all, by index."""
    graph: str = ""
    """The text of its graph file, "" for none."""
    where: str = "graph file"
    """The file's name for messages."""
    environment: Mapping[str, str] = {}
    """NCCL variables that its ranks have in the place of the job's."""


def validate(
    text: str,
    machine: Machine,
    knowledge: Knowledge,
    *,
    gpus: Sequence[int] | None = None,
    nodes: int = 1,
    version: str = ASSUMED,
    environment: Mapping[str, str] | None = None,
    where: str = "graph file",
) -> Verdict:
    """Return the verdict on `text` on each of `nodes` equal nodes; see `validate_cluster`."""
    ranks = None if gpus is None else tuple(gpus)
    job = NodeJob(machine=machine, knowledge=knowledge, gpus=ranks, graph=text, where=where)
    _check_count(nodes)
    return validate_cluster([job] * nodes, version=version, environment=environment)


def validate_cluster(
    nodes: Sequence[NodeJob],
    *,
    version: str = ASSUMED,
    environment: Mapping[str, str] | None = None,
) -> Verdict:
    """Return the verdict on the graph files of a job whose nodes, in rank order, may all differ.

    Every rank of a node has the node's file; `environment` has the job's other NCCL variables.
    Nodes that share their Machine, Knowledge and file are judged once.
    """
    _check_count(len(nodes))
    variables = environment or {}
    # 1. Load each kind of node, by identity: comparing machines costs more than judging them.
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, node in enumerate(nodes):
        own = tuple(sorted(node.environment.items()))
        key = id(node.machine), id(node.knowledge), node.gpus, node.graph, node.where, own
        kinds.setdefault(key, []).append(number)
    loaded: dict[int, _LoadedNode] = {}
    faults: list[tuple[bool, str]] = []
    for numbers in kinds.values():
        shown = [*map(str, numbers[:_SHOWN_NODES]), *["..."] * (len(numbers) > _SHOWN_NODES)]
        plural = "s" * (len(numbers) > 1)
        prefix = f"node{plural} {', '.join(shown)}: " if len(kinds) > 1 else ""
        try:
            node = nodes[numbers[0]]
            under = settings_from_environment({**variables, **node.environment}, version=version)
            loaded_node = _LoadedNode(node, under, len(nodes), prefix)
            loaded |= dict.fromkeys(numbers, loaded_node)
        except GraphFaultError as fault:
            faults.append((fault.crash, f"{prefix}{fault}"))
    if faults:
        return _fail(*max(faults, key=lambda fault: fault[0]))
    # 2. Connect the rings.
    settings = settings_from_environment(variables, version=version)
    job = _JobRings([loaded[number] for number in range(len(nodes))], settings)
    try:
        return job.verdict()
    except GraphFaultError as fault:
        return _fail(fault.crash, str(fault))


def _fail(crash: bool, reason: str) -> Verdict:
    return Verdict(verdict="crash" if crash else "rejected", reason=reason)


def _check_count(nodes: int) -> None:
    require(1 <= nodes <= MAX_NODES, "`nodes`", f"is {nodes}", f"1 to {MAX_NODES}")


class _LoadedNode:
    """The ring and tree of one node of a job of `count` nodes, loaded from the file or searched.

    `ring` is None where NCCL searches for itself; `orders` are the ring channels in use, by GPU
    indices and device numbers of NICs. Raises GraphFaultError.
    """

    def __init__(self, node: NodeJob, settings: Settings, count: int, prefix: str) -> None:
        self.gpus = tuple(sorted(node.machine.gpu_indices)) if node.gpus is None else node.gpus
        self.size, self.prefix, self._count = len(self.gpus), prefix, count
        self._place = {gpu: place for place, gpu in enumerate(self.gpus)}
        self._topo = topo = view(node.machine, node.knowledge, settings, gpus=self.gpus)
        self._facts, self.sm = topo.system.rules, topo.system.sm_min
        devices = net_devices(node.machine, settings)
        self._nics = {device: nic for nic, device in devices.items()}
        self.cut = len(topo.parts) > 1
        self._file = parse_graph_file(
            node.graph, where=node.where, version=settings.version, cross_nic=settings.cross_nic
        )
        if count == 1 and self._facts.rank_overrides_dev:
            self._file = {number: self._by_rank(graph) for number, graph in self._file.items()}
        for graph in self._file.values():
            self._check(graph)
        self.ring, self._tree = self._load(RING), self._load(TREE)
        if self.ring is None:
            searched = search_ring(topo, nodes=count)
            self.rate, self.crossnic = searched.rate_intra, searched.cross_nic
            self.orders = tuple(
                Channel(order, tuple(devices[nic] for nic in nics))
                for order, nics in zip(searched.orders, searched.nics, strict=True)
            )
        else:
            self.rate, self.crossnic = self.ring.speedintra, self.ring.crossnic
            self.orders = self.ring.channels[: self.ring.nchannels]
        if self._tree is None:
            self.trees = len(search_tree(topo, nodes=count, channels=len(self.orders)).orders)
        else:
            self.trees = self._tree.nchannels
        self.channels = min(len(self.orders), self.trees)

    def _load(self, number: int) -> Graph | None:
        graph = self._file.get(number)
        return None if graph is None or not graph.nchannels else graph

    def _by_rank(self, graph: Graph) -> Graph:
        """Return a graph with the GPUs of the ranks that it names, which count more than dev."""
        gpu_of_rank: dict[int | None, int] = dict(enumerate(self.gpus))
        channels = []
        for gpus, nets, ranks in map(msgspec.structs.astuple, graph.channels):
            named = tuple(gpu_of_rank.get(r, gpu) for gpu, r in zip(gpus, ranks, strict=True))
            wrong = tuple(None if rank in gpu_of_rank else rank for rank in ranks)
            channels.append(Channel(named, nets, wrong))
        return msgspec.structs.replace(graph, channels=tuple(channels))

    # Graphs with which NCCL does not start

    def _check(self, graph: Graph) -> None:
        facts, channels = self._facts, len(graph.channels)
        # NCCL takes the smaller number of channels of the ring and the tree.
        peer = self._file.get(TREE if graph.id == RING else RING, graph)
        counts = (count for count in (graph.nchannels, peer.nchannels) if count > 0)
        used = min(counts, default=0)
        if used > facts.max_channels or not 0 <= graph.nchannels <= facts.max_final_channels:
            right = f"0 to {facts.max_channels}; others corrupt NCCL's memory"
            graph.fail(f"has nchannels {graph.nchannels}", right, crash=True)
        if channels > facts.max_final_channels:
            right = f"more than {facts.max_final_channels} overflow NCCL's tables"
            graph.fail(f"has {channels} channels", right, crash=True)
        strange = {gpu for channel in graph.channels for gpu in channel.gpus} - {*self.gpus}
        if strange:
            fault = f"names GPU {min(strange)}, which the communicator does not have"
            graph.fail(fault, f"NCCL says: dev {min(strange):x} not found")
        if graph.id not in (RING, TREE) or graph.nchannels == 0:
            return
        if graph.pattern == _NVLS_PATTERN and self._count > 1:
            graph.fail("has pattern 5, of NVLS", "a ring has pattern 4, a tree 1 to 3")
        speed = graph.speedintra if self._count <= _ONE_LINK else graph.speedinter
        if graph.id == RING and not speed > 0:
            graph.fail(f"has a speed of {speed:g}", "NCCL would find no algorithm")
        # With a tree that is not whole NCCL starts, and hangs or sums wrongly.
        if channels < used:
            fault = f"has {channels} channels, but nchannels {graph.nchannels}"
            graph.fail(fault, "write all channels", crash=graph.id == TREE)
        for number, channel in enumerate(graph.channels[:used]):
            if sorted(channel.gpus[: self.size]) != sorted(self.gpus):
                fault = f"has GPUs {list(channel.gpus)[:20]} in channel {number}"
                right = f"name each of {sorted(self.gpus)} once"
                graph.fail(fault, right, crash=graph.id == TREE)
            missing = [net for net in channel.nets[:2] if net not in self._nics]
            if missing and self._count > 1:
                fault = f"names net {missing[0]}, which the node does not have"
                graph.fail(fault, "NCCL fails when it connects")
        if self.cut:
            low, high = (part[0] for part in self._topo.parts[:2])
            fault = f"is for a node that NCCL cuts between {low} and {high}, which would use NICs"
            graph.fail(fault, f"{self._keeps_whole} in the job")

    @property
    def _keeps_whole(self) -> str:
        """What a job has to do so that its GPUs talk over no NIC inside the node."""
        without_memory = self._topo.settings.shm_disable
        return "unset NCCL_SHM_DISABLE" if without_memory else "set NCCL_NET_DISABLE_INTRA=1"

    def check_ranks(self, start: int) -> None:
        """Check ranks given to GPUs, from rank `start` on, if this NCCL believes them."""
        graphs = self._file.values() if self._facts.rank_overrides_dev else ()
        rank = {gpu: start + place for gpu, place in self._place.items()}
        for graph in graphs:
            for channel in graph.channels:
                for gpu, rank_given in zip(channel.gpus, channel.ranks, strict=True):
                    if rank_given is not None and rank_given != rank.get(gpu):
                        fault = f"gives GPU {gpu} rank {rank_given}, but it has {rank.get(gpu)}"
                        graph.fail(fault, "leave ranks out: NCCL takes them unchecked")

    # Rings and NICs in use

    def ranks_of(self, channel: int, start: int) -> list[int]:
        """Return a ring channel as ranks, on the node whose first rank is `start`."""
        return [start + self._place[gpu] for gpu in self.orders[channel].gpus[: self.size]]

    def nic(self, channel: int, place: int) -> int | None:
        """Return the NIC by which a channel reaches the node's GPU at `place`; None without a NIC.

        The channel's first GPU has the first NIC named, any other the second (ncclTopoGetNetDev).
        """
        order = self.orders[channel]
        end = 0 if order.gpus[:1] == (self.gpus[place],) else 1
        return self._nics.get(order.nets[end] if end < len(order.nets) else 0)

    # Differences between the file and the run

    def differences(self, channels: int) -> list[str]:
        """Return where a run of `channels` channels departs from the node's file."""
        graph, several = self.ring, self._count > 1
        if graph is None:
            return [self.why_ignored()]
        nets = [channel.nets[:2] for channel in self.orders]
        ends = [pair for pair in nets if len(pair) == 2]
        tree = _TREE_PATTERN if self._tree is None else self._tree.pattern
        routed = self._topo.settings.subnet_routing
        departures = {
            f"nchannels is {graph.nchannels}, the file has {len(graph.channels)}": (
                len(graph.channels) > graph.nchannels
            ),
            "GPUs beyond the communicator's number are dropped": any(
                len(channel.gpus) > self.size for channel in graph.channels
            ),
            "channels without <net> use NET 0": several and len(ends) < len(nets),
            "the node has one GPU: channels leave by the NIC that they enter by": (
                several
                and not all(leaves_as_named(self.gpus, *p, subnet_routing=routed) for p in ends)
            ),
            # NCCL then reads beyond the last channel's GPU (ncclTopoPreset).
            f"the node has one GPU: a tree of pattern {tree} hangs other nodes from a second": (
                self._count > _ONE_LINK and self.size == 1 and tree != _TREE_PATTERN
            ),
            f"some GPUs would talk over NICs, where NCCL may cut the node: {self._keeps_whole}": (
                bool(self._topo.by_network)
            ),
            f"the tree has {self.trees} of {graph.nchannels} channels": (
                self.trees < graph.nchannels
            ),
            f"another node has {channels} of {self.channels} channels": channels < self.channels,
        }
        return [text for text, holds in departures.items() if holds]

    def why_ignored(self) -> str:
        """Return why NCCL does not use the node's file."""
        passed = " whose crossnic is not 1" if self._topo.settings.cross_nic == 0 else ""
        why = "nchannels is 0" if RING in self._file else f"there is no graph with id 0{passed}"
        return f"{why}; NCCL searches for itself"


class _JobRings:
    """A communicator over loaded nodes."""

    def __init__(self, nodes: list[_LoadedNode], settings: Settings) -> None:
        self._nodes, self._settings = nodes, settings
        self._kinds = list(dict.fromkeys(nodes))
        self._starts = [0, *accumulate(node.size for node in nodes)]
        self._channels = min(node.channels for node in self._kinds)

    def verdict(self) -> Verdict:
        """Connect the rings and compare them with the files."""
        rings = self._connect()
        final = final_channels(
            self._settings,
            channels=self._channels,
            sm=min(node.sm for node in self._kinds),
            nodes=len(self._nodes),
            speed_intra=min(node.rate for node in self._kinds),
        )
        verdict, reason = self._compare(final)
        if any(node.cut for node in self._kinds):
            return Verdict(verdict=verdict, reason=f"{reason}; NCCL cuts a node in parts")
        several = rings if len(self._nodes) > 1 else ()
        nics = [self._nics(ring, channel) for channel, ring in enumerate(several)]
        return Verdict(
            verdict=verdict,
            reason=reason,
            rings=tuple(islice(cycle(rings), final)),
            nics=tuple(islice(cycle(nics), final)),
        )

    def _connect(self) -> list[tuple[int, ...]]:
        """Return the rings from rank 0 on; with crossed NICs odd nodes swap pairs of channels."""
        pairs = list(zip(self._nodes, self._starts, strict=False))
        for node, start in pairs:
            node.check_ranks(start)
        rings = []
        for channel in range(self._channels):
            ring: list[int] = []
            for number, (node, start) in enumerate(pairs):
                swapped = swaps_pairs(node.crossnic, number, self._channels)
                ring += node.ranks_of(channel ^ swapped, start)
            first = ring.index(0)
            rings.append((*ring[first:], *ring[:first]))
        return rings

    def _nics(self, ring: tuple[int, ...], channel: int) -> tuple[ChannelNics, ...]:
        """Return the NICs by which a ring enters and leaves each node."""
        nodes, starts = self._nodes, self._starts
        node_of = [number for number, node in enumerate(nodes) for _ in range(node.size)]
        entries: dict[int, int | None] = {}
        exits: dict[int, int | None] = {}
        for rank, following in neighbours(ring):
            source, target = node_of[rank], node_of[following]
            if source != target:
                exits[source] = nodes[source].nic(channel, rank - starts[source])
                entries[target] = nodes[target].nic(channel, following - starts[target])
        return tuple(ChannelNics(entries[n], exits[n]) for n in range(len(nodes)))

    def _compare(self, final: int) -> tuple[VerdictKind, str]:
        channels, kinds = self._channels, self._kinds
        departures = [(node.prefix, "; ".join(node.differences(channels))) for node in kinds]
        reason = "; ".join(f"{prefix}{text}" for prefix, text in departures if text)
        if all(node.ring is None for node in kinds):
            return "ignored", reason
        if final < channels:
            clip = f"NCCL_MAX_NCHANNELS leaves {final} of {channels} channels"
            reason = f"{reason}; {clip}" if reason else clip
        if reason:
            return "clipped", reason
        files = "file" if len(kinds) == 1 else "files"
        loaded = f"{spell(channels, 'channel')} of the {files}"
        return "used", f"{loaded}, {final} in the end"
