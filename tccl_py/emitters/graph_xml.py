"""Graph XML that NCCL 2.18, 2.28 and 2.30 read alike."""

from __future__ import annotations

import math

import msgspec

from tccl_py.errors import InputError
from tccl_py.runtimes.nccl.graph_file import RING, TREE
from tccl_py.runtimes.nccl.versions import LATEST, version_facts

_RING_PATTERN = 4
_TREE_PATTERN = 1
_TYPES = ("LOC", "NVL", "NVB", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_MAX_DEVICE = 255


class GraphRings(msgspec.Struct, frozen=True, kw_only=True):
    """What a graph file says of one node.

    `orders` has one order of GPU indices (NVML) for each channel, `nets` one (entry, exit) pair of
    NIC numbers for each, and none for a single node. `speed_gbps` is what one channel
    carries, `speed_inter_gbps` what it carries between nodes; types are the farthest path on the
    way. NCCL's tuner believes all of these: they must be true.
    """

    orders: tuple[tuple[int, ...], ...]
    speed_gbps: float
    type_intra: str
    nets: tuple[tuple[int, int], ...] = ()
    speed_inter_gbps: float | None = None
    type_inter: str = "PIX"
    crossnic: int = 0


def graph_xml(rings: GraphRings, *, version: str = LATEST) -> str:
    """The text of a graph file with a ring and a tree graph over the same orders.

    Args:
        rings: what to say; every order holds the same GPUs.
        version: NCCL's; it limits how many channels there may be.

    Raises:
        InputError: orders that differ in their GPUs, too many channels, or facts out of range.
    """
    _check(rings, version)
    graphs = "".join(
        _graph(rings, number, pattern)
        for number, pattern in ((RING, _RING_PATTERN), (TREE, _TREE_PATTERN))
    )
    return f'<graphs version="1">\n{graphs}</graphs>\n'


def _graph(rings: GraphRings, number: int, pattern: int) -> str:
    inter = rings.speed_gbps if rings.speed_inter_gbps is None else rings.speed_inter_gbps
    same = len(set(rings.orders)) == 1 and len(set(rings.nets)) <= 1
    # One tag is one line, since a newline inside a tag ends NCCL's parser.
    head = (
        f'<graph id="{number}" pattern="{pattern}" crossnic="{rings.crossnic}" '
        f'nchannels="{len(rings.orders)}" speedintra="{_number(rings.speed_gbps)}" '
        f'speedinter="{_number(inter)}" latencyinter="0" typeintra="{rings.type_intra}" '
        f'typeinter="{rings.type_inter}" samechannels="{int(same)}">'
    )
    channels = "".join(_channel(rings, index) for index in range(len(rings.orders)))
    return f"  {head}\n{channels}  </graph>\n"


def _channel(rings: GraphRings, index: int) -> str:
    devices = [f'<gpu dev="{gpu:#x}"/>' for gpu in rings.orders[index]]
    if rings.nets:
        entry, leave = rings.nets[index]
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
    if rings.nets and len(rings.nets) != count:
        raise InputError(
            "graph file", f"has NICs for {len(rings.nets)} of {count} channels", "one pair for each"
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
    devices = [*first, *(net for pair in rings.nets for net in pair)]
    if not all(0 <= device <= _MAX_DEVICE for device in devices):
        raise InputError("graph file", f"names devices {devices}", f"0 to {_MAX_DEVICE}")


def _check_facts(rings: GraphRings) -> None:
    speeds = [rings.speed_gbps]
    if rings.speed_inter_gbps is not None:
        speeds.append(rings.speed_inter_gbps)
    if not all(math.isfinite(speed) and 0 < speed < 100_000 for speed in speeds):
        raise InputError("graph file", f"has speeds {speeds}", "GB/s of one channel, above 0")
    for kind in (rings.type_intra, rings.type_inter):
        if kind not in _TYPES:
            raise InputError(
                "graph file", f"has path type {kind[:20]!r}", f"one of {', '.join(_TYPES)}"
            )
    if rings.crossnic not in (0, 1):
        raise InputError("graph file", f"has crossnic {rings.crossnic}", "0 or 1: 2 swaps channels")
