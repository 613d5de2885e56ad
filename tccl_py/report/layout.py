"""Where the parts of a machine are drawn: sockets around NUMA nodes above switches above GPUs.

Everything is as wide as what hangs from it, so every PCIe link is a vertical line, and all GPUs
stand in one row, by index as far as the tree lets them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from tccl_py.model.machine import Gpu, Machine, Nic, NumaNode, PciLink

GAP = 8.0
PAD = 12.0
HEADER = 24.0
WIRE = 30.0
NUMA_HEIGHT = 40.0
BRIDGE_HEIGHT = 26.0
LEAF_HEIGHT = 46.0
_NUMA_LEAST = 120.0
_BUS_HEIGHT = 22.0


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A device or socket: its id and its place, from its upper left corner."""

    id: str
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        """The x of its centre."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """The y of its lower edge."""
        return self.y + self.height


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Boxes by id; `sockets` by label; `bus` joins several sockets; `bottom` is below them all."""

    boxes: dict[str, Box]
    sockets: tuple[Box, ...]
    bus: Box | None
    width: float
    bottom: float

    def gaps(self, gpus: Sequence[str]) -> list[float]:
        """The x between each of these GPUs and the next, from left to right."""
        row = sorted(self.boxes[gpu].middle for gpu in gpus)
        return [(one + other) / 2 for one, other in pairwise(row)]


def lay_out(machine: Machine) -> Layout:
    """Place every device of a machine that a GPU or NIC hangs from, in pixels."""
    tree = _Tree(machine)
    groups = _sockets(machine, tree)
    top = _BUS_HEIGHT + WIRE / 2 + 2 if len(groups) > 1 else 2.0
    bottom = top + HEADER + tree.depth_y(tree.depth) + LEAF_HEIGHT + PAD
    boxes: dict[str, Box] = {}
    sockets = []
    x = 2.0
    for label, nodes in groups:
        start, x = x, x + PAD
        for node in nodes:
            tree.place(node.id, x, top + HEADER, boxes)
            x += tree.widths[node.id] + GAP
        x += PAD - GAP
        sockets.append(Box(id=label, x=start, y=top, width=x - start, height=bottom - top))
        x += GAP * 2
    width = x - GAP * 2 + 2
    bus = Box(id="bus", x=2, y=2, width=width - 4, height=_BUS_HEIGHT) if len(groups) > 1 else None
    return Layout(boxes=boxes, sockets=tuple(sockets), bus=bus, width=width, bottom=bottom)


class _Tree:
    """The devices that are drawn, below whom, and how wide they are."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        leaves: tuple[Gpu | Nic, ...] = (*machine.gpus, *machine.nics)
        self._leaves = {leaf.id: leaf for leaf in leaves}
        self._first = self._lowest_gpus()
        self._children: dict[str, list[str]] = {}
        for device, parent in machine.parents.items():
            if device in self._first:
                self._children.setdefault(parent, []).append(device)
        for listed in self._children.values():
            listed.sort(key=self.order)
        self.depth = 1 + max((len(machine.ancestors(one)) - 1 for one in self._leaves), default=0)
        self.widths: dict[str, float] = {}
        for node in machine.numa_nodes:
            self._measure(node.id)

    def _lowest_gpus(self) -> dict[str, float]:
        """Each device that has a GPU or NIC below it, or is one -> the lowest GPU index there."""
        found: dict[str, float] = {}
        for name, leaf in self._leaves.items():
            index = leaf.index if isinstance(leaf, Gpu) else math.inf
            for device in (name, *self._machine.ancestors(name)):
                found[device] = min(found.get(device, math.inf), index)
        return found

    def order(self, device: str) -> tuple[float, int, str]:
        """From left to right: by GPU, then by id."""
        return self._first.get(device, math.inf), len(device), device

    def _measure(self, device: str) -> float:
        below = [self._measure(child) for child in self._children.get(device, ())]
        width = sum(below) + GAP * max(0, len(below) - 1)
        if device in self._leaves:
            width = _leaf_width(len(self._machine.gpus), self._leaves[device])
        elif device in self._machine.parents:
            width += GAP
        else:
            width = max(_NUMA_LEAST, width + GAP)
        self.widths[device] = width
        return width

    def depth_y(self, depth: int) -> float:
        """The upper edge of a row below the NUMA nodes' (which is row 0)."""
        if depth == 0:
            return 0.0
        return NUMA_HEIGHT + WIRE + (depth - 1) * (BRIDGE_HEIGHT + WIRE)

    def place(self, device: str, x: float, top: float, boxes: dict[str, Box], row: int = 0) -> None:
        """Add the boxes of a device and of all below it, from `x` on."""
        leaf = device in self._leaves
        height = LEAF_HEIGHT if leaf else BRIDGE_HEIGHT if row else NUMA_HEIGHT
        y = top + self.depth_y(self.depth if leaf else row)
        width = self.widths[device]
        boxes[device] = Box(id=device, x=x, y=y, width=width, height=height)
        below = self._children.get(device, [])
        taken = sum(self.widths[child] for child in below) + GAP * max(0, len(below) - 1)
        x += (width - taken) / 2
        for child in below:
            self.place(child, x, top, boxes, row + 1)
            x += self.widths[child] + GAP


def _leaf_width(gpus: int, leaf: Gpu | Nic) -> float:
    roomy = 124.0 if gpus <= 4 else 92.0 if gpus <= 8 else 58.0
    return roomy if isinstance(leaf, Gpu) else min(roomy, 58.0)


def _sockets(machine: Machine, tree: _Tree) -> list[tuple[str, list[NumaNode]]]:
    """NUMA nodes by socket, in the order of their GPUs; one whose socket is not known is alone."""
    groups: dict[str, list[NumaNode]] = {}
    for node in sorted(machine.numa_nodes, key=lambda one: tree.order(one.id)):
        known = node.socket is not None
        label = f"socket {node.socket}" if known else f"CPU of {node.id}"
        groups.setdefault(label, []).append(node)
    return list(groups.items())


_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


def link_words(link: PciLink) -> tuple[str, str]:
    """PCI Express generation and lanes, as two short words; empty where not reported.

    >>> link_words(PciLink(speed_gts=32.0, width=16))
    ('Gen5', 'x16')
    """
    speed = link.speed_gts
    generation = _GENERATIONS.get(speed or 0)
    first = f"Gen{generation}" if generation else f"{speed:g}GT" if speed else ""
    return first, f"x{link.width}" if link.width else ""
