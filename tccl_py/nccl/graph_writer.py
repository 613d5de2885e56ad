"""Graph XML that NCCL 2.18, 2.28 and 2.30 read alike."""

from __future__ import annotations

import math

import msgspec

from tccl_py.errors import InputError
from tccl_py.nccl.graph_file import RING, TREE, TYPES
from tccl_py.nccl.versions import LATEST, version_facts

_RING_PATTERN = 4
_BALANCED_TREE_PATTERN = 1
_TREE_PATTERN = 3
"""All that a tree sends to other nodes goes by its first GPU; pattern 1 needs a second one."""

_MAX_DEVICE = 255


class GraphRings(msgspec.Struct, frozen=True, kw_only=True):
    """What a graph file says of one node.

    `orders` has one order of GPU indices (NVML) for each channel. `speed_gbps` is what one channel
    carries; types are the farthest path on the way. NCCL's tuner believes these: they must be true.

    `nets` has for each channel the device numbers of the NICs by which it enters and leaves; none
    for a single node. `speed_inter_gbps` is what a channel carries between nodes (None: the same).
    `tree_nets` and `tree_type_inter` are the tree's; without them it has the rings' entries. With
    `tree_spreads` its first two GPUs talk to other nodes, else only the first.
    """

    orders: tuple[tuple[int, ...], ...]
    speed_gbps: float
    type_intra: str
    nets: tuple[tuple[int, int], ...] = ()
    speed_inter_gbps: float | None = None
    type_inter: str = "PIX"
    tree_nets: tuple[tuple[int, int], ...] = ()
    tree_type_inter: str | None = None
    tree_spreads: bool = True


def graph_xml(rings: GraphRings, *, version: str = LATEST) -> str:
    """The text of a graph file with a ring and a tree graph over the same orders.

    Args:
        rings: what to say; every order holds the same GPUs.
        version: NCCL's; it limits how many channels there may be.

    Raises:
        InputError: orders that differ in their GPUs, too many channels, or facts out of range.
    """
    _check(rings, version)
    inter = rings.speed_gbps if rings.speed_inter_gbps is None else rings.speed_inter_gbps
    # A single node's tree uses no NIC, whatever its pattern.
    spreads = not rings.nets or (rings.tree_spreads and len(rings.orders[0]) > 1)
    ring = _Graph(
        number=RING,
        pattern=_RING_PATTERN,
        orders=rings.orders,
        nets=rings.nets,
        speeds=(rings.speed_gbps, inter),
        types=(rings.type_intra, rings.type_inter),
    )
    tree = msgspec.structs.replace(
        ring,
        number=TREE,
        pattern=_BALANCED_TREE_PATTERN if spreads else _TREE_PATTERN,
        nets=rings.tree_nets or tuple((entry, entry) for entry, _ in rings.nets),
        types=(rings.type_intra, rings.tree_type_inter or rings.type_inter),
    )
    return f'<graphs version="1">\n{_graph(ring)}{_graph(tree)}</graphs>\n'


class _Graph(msgspec.Struct, frozen=True, kw_only=True):
    """One graph; speeds and types inside the node, then between nodes."""

    number: int
    pattern: int
    orders: tuple[tuple[int, ...], ...]
    nets: tuple[tuple[int, int], ...]
    speeds: tuple[float, float]
    types: tuple[str, str]


def _graph(graph: _Graph) -> str:
    # Of the GPUs alone: NCCL's own dumps say 1 of channels over different NICs.
    same = len(set(graph.orders)) == 1
    crossed = any(entry != leave for entry, leave in graph.nets)
    # One tag is one line, since a newline inside a tag ends NCCL's parser.
    head = (
        f'<graph id="{graph.number}" pattern="{graph.pattern}" crossnic="{int(crossed)}" '
        f'nchannels="{len(graph.orders)}" speedintra="{_number(graph.speeds[0])}" '
        f'speedinter="{_number(graph.speeds[1])}" latencyinter="0" '
        f'typeintra="{graph.types[0]}" typeinter="{graph.types[1]}" samechannels="{int(same)}">'
    )
    channels = "".join(_channel(graph, index) for index in range(len(graph.orders)))
    return f"  {head}\n{channels}  </graph>\n"


def _channel(graph: _Graph, index: int) -> str:
    devices = [f'<gpu dev="{gpu:#x}"/>' for gpu in graph.orders[index]]
    if graph.nets:
        entry, leave = graph.nets[index]
        devices = [f'<net dev="{entry:#x}"/>', *devices, f'<net dev="{leave:#x}"/>']
    lines = "".join(f"      {device}\n" for device in devices)
    return f"    <channel>\n{lines}    </channel>\n"


def _number(value: float) -> str:
    return f"{value:.6g}"


def _check(rings: GraphRings, version: str) -> None:
    facts = version_facts(version)
    count = len(rings.orders)
    if not 1 <= count <= facts.max_channels:
        raise InputError(
            "graph file",
            f"would have {count} channels",
            f"NCCL {version} takes 1 to {facts.max_channels}, more overflow its memory",
        )
    for nets in (rings.nets, rings.tree_nets):
        if nets and len(nets) != count:
            raise InputError(
                "graph file", f"has NICs for {len(nets)} of {count} channels", "one pair for each"
            )
    _check_orders(rings, facts.max_children)
    elements = 1 + 2 * (1 + count * (1 + len(rings.orders[0]) + 2 * bool(rings.nets)))
    if elements > facts.max_elements:
        raise InputError(
            "graph file",
            f"would have {elements} elements",
            f"NCCL {version} takes {facts.max_elements}: use fewer channels",
        )
    _check_facts(rings)


def _check_orders(rings: GraphRings, most: int) -> None:
    first = rings.orders[0]
    for order in rings.orders:
        if not order or len(set(order)) != len(order) or set(order) != set(first):
            raise InputError(
                "graph file",
                f"channel {list(order)} does not visit each GPU of {sorted(first)} once",
                "NCCL fails at init unless every channel does",
            )
    if len(first) + 2 > most:
        raise InputError("graph file", f"has {len(first)} GPUs a channel", f"at most {most - 2}")
    if len(first) == 1 and any(entry != leave for entry, leave in rings.nets):
        raise InputError(
            "graph file",
            "leaves a node of one GPU by another NIC than it enters by",
            "NCCL leaves it by the first NIC of the channel: name that twice",
        )
    devices = [*first, *(net for pair in (*rings.nets, *rings.tree_nets) for net in pair)]
    if not all(0 <= device <= _MAX_DEVICE for device in devices):
        raise InputError("graph file", f"names devices {devices}", f"0 to {_MAX_DEVICE}")


def _check_facts(rings: GraphRings) -> None:
    speeds = [rings.speed_gbps]
    if rings.speed_inter_gbps is not None:
        speeds.append(rings.speed_inter_gbps)
    if not all(math.isfinite(speed) and 0 < speed < 100_000 for speed in speeds):
        raise InputError("graph file", f"has speeds {speeds}", "GB/s of one channel, above 0")
    for kind in (rings.type_intra, rings.type_inter, rings.tree_type_inter or "LOC"):
        if kind not in TYPES:
            raise InputError(
                "graph file", f"has path type {kind[:20]!r}", f"one of {', '.join(TYPES)}"
            )
