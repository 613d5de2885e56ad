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
    TYPES,
    GraphCrashError,
    GraphRejectedError,
    connect,
    parse_graph_file,
    repeated,
)
from tccl_py.nccl.landing import may_change_rails, net_path
from tccl_py.nccl.node_graphs import NodeGraphs
from tccl_py.nccl.settings import Settings, final_channels, settings_from_environment
from tccl_py.nccl.transport import View, net_devices, pair_mechanism, view
from tccl_py.nccl.versions import LATEST, version_facts

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
    seen: View, orders: Sequence[tuple[int, ...]], ends: Sequence[tuple[int, int]]
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


def _both_ways(seen: View, gpu: int, nic: int) -> list[PathType]:
    return [net_path(seen, gpu, nic, "receive"), net_path(seen, gpu, nic, "send")]


def _farthest(kinds: Sequence[PathType], settings: Settings) -> str:
    """The farthest type, by the nearest name that is as far at least."""
    farthest = max(kinds, default=PathType.LOC)
    known = (name for name in TYPES if name not in version_facts(settings.version).unknown_levels)
    for name in known:
        if PathType[name] >= farthest:
            return name
    raise InputError("channels over several nodes", "join devices without a path", "choose others")
