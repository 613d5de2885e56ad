"""Writer of graph files, in XML that NCCL 2.18 to 2.32 read alike."""

from __future__ import annotations

import msgspec

from tccl_py.errors import check_choice, require
from tccl_py.nccl.versions import ASSUMED, RING, TREE, TYPES, version_facts
from tccl_py.nccl.view import leaves_as_named

_RING_PATTERN = 4
_BALANCED_TREE_PATTERN = 1
_TREE_PATTERN = 3
"""A tree that reaches other nodes by its first GPU alone; pattern 1 needs a second GPU."""

_MAX_DEVICE = 255
_MAX_GBPS = 100_000


class GraphRings(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a graph file for one node."""

    orders: tuple[tuple[int, ...], ...]
    """GPU indices (NVML) for each channel."""
    speed_gbps: float
    """A channel's rate."""
    type_intra: str
    """The farthest path used; NCCL's tuner believes these types: they must be true."""
    nets: tuple[tuple[int, int], ...] = ()
    """Each channel's entry and exit NIC (device numbers; none for a single node); the tree uses the
    entries."""
    type_inter: str = "PIX"
    tree_type_inter: str = "PIX"
    tree_spreads: bool = True
    """Whether the tree's first two GPUs talk to other nodes; else only the first."""
    subnet_routing: bool = False
    """Whether NCCL leaves a node of one GPU by another NIC than its entry."""


def graph_xml(rings: GraphRings, *, version: str = ASSUMED) -> str:
    """Return the text of a graph file with a ring and a tree graph over the same orders."""
    _check(rings, version)
    # A single node's tree uses no NIC, whatever its pattern.
    spreads = not rings.nets or (rings.tree_spreads and len(rings.orders[0]) > 1)
    tree_nets = tuple((entry, entry) for entry, _ in rings.nets)
    tree_pattern = _BALANCED_TREE_PATTERN if spreads else _TREE_PATTERN
    ring = _graph_text(rings, RING, _RING_PATTERN, nets=rings.nets, type_inter=rings.type_inter)
    tree = _graph_text(rings, TREE, tree_pattern, nets=tree_nets, type_inter=rings.tree_type_inter)
    return f'<graphs version="1">\n{ring}{tree}</graphs>\n'


def _graph_text(
    rings: GraphRings,
    number: int,
    pattern: int,
    *,
    nets: tuple[tuple[int, int], ...],
    type_inter: str,
) -> str:
    # Of the GPUs alone: NCCL's own dumps say 1 of channels over different NICs.
    equal = len(set(rings.orders)) == 1
    crossed = any(entry != leave for entry, leave in nets)
    # One tag is one line, since a newline inside a tag ends NCCL's parser.
    head = (
        f'<graph id="{number}" pattern="{pattern}" crossnic="{int(crossed)}" '
        f'nchannels="{len(rings.orders)}" speedintra="{rings.speed_gbps:.6g}" '
        f'speedinter="{rings.speed_gbps:.6g}" latencyinter="0" '
        f'typeintra="{rings.type_intra}" typeinter="{type_inter}" samechannels="{int(equal)}">'
    )
    lines = [f"  {head}"]
    for index, order in enumerate(rings.orders):
        devices = [f'<gpu dev="{gpu:#x}"/>' for gpu in order]
        if nets:
            into, out = (f'<net dev="{net:#x}"/>' for net in nets[index])
            devices = [into, *devices, out]
        lines += ["    <channel>", *(f"      {device}" for device in devices), "    </channel>"]
    return "\n".join([*lines, "  </graph>\n"])


def _check(rings: GraphRings, version: str) -> None:
    facts, orders, nets = version_facts(version), rings.orders, rings.nets
    where, name = "graph file", f"NCCL {version}"
    right = f"{name} takes 1 to {facts.max_channels}, more overflow its memory"
    channels = len(orders)
    require(1 <= channels <= facts.max_channels, where, f"would have {channels} channels", right)
    first = orders[0]
    for order in orders:
        fault = f"channel {list(order)} does not visit each GPU of {sorted(first)} once"
        complete = 0 < len(set(order)) == len(order) and set(order) == set(first)
        require(complete, where, fault, "NCCL fails at init unless every channel does")
    fault = f"has NICs for {len(nets)} of {channels} channels"
    require(len(nets) in (0, channels), where, fault, "one pair for each")
    most = facts.max_children - 2
    require(len(first) <= most, where, f"has {len(first)} GPUs a channel", f"at most {most}")
    fault = "leaves a node of one GPU by another NIC than it enters by"
    right = "NCCL leaves it by the first NIC of the channel: name that twice"
    routed = rings.subnet_routing
    as_named = all(leaves_as_named(first, *pair, subnet_routing=routed) for pair in nets)
    require(as_named, where, fault, right)
    devices = [*first, *(net for pair in nets for net in pair)]
    in_range = all(0 <= device <= _MAX_DEVICE for device in devices)
    require(in_range, where, f"names devices {devices}", f"0 to {_MAX_DEVICE}")
    elements = 1 + 2 * (1 + channels * (1 + len(first) + 2 * bool(nets)))
    right = f"{name} takes {facts.max_elements}: use fewer channels"
    require(elements < facts.max_elements, where, f"would have {elements} elements", right)
    fault = f"has a speed of {rings.speed_gbps}"
    require(0 < rings.speed_gbps < _MAX_GBPS, where, fault, "GB/s of one channel, above 0")
    for kind in (rings.type_intra, rings.type_inter, rings.tree_type_inter):
        check_choice(f"{where}: path type", kind, TYPES)
