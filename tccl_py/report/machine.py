"""The drawing of a machine, and lanes below it for lines between devices.

Sockets stand around NUMA nodes, above switches, above GPUs. Each box is as wide as its children,
so every PCIe link is a vertical line, and all GPUs stand in one row, by index as far as the tree
allows. `templates/macros.html` turns the geometry, in pixels, into SVG.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import count, pairwise

import msgspec

from tccl_py.errors import visible
from tccl_py.model.machine import Gpu, Machine, Nic, NumaNode, PciLink
from tccl_py.model.transfer import index_of

LANE = 36.0
"""Height of a lane: a rate above its line, a word below it."""
_SPACE = 6.0
_GAP, _PAD = 8.0, 12.0
_HEADER = 24.0
_LINK = 38.0
_NUMA_LEAST = 120.0
_BUS_HEIGHT = 22.0
_HEIGHTS = {"numa": 40.0, "bridge": 26.0, "gpu": 46.0, "nic": 46.0, "nvswitch": 26.0}
_CHARACTER = 0.6
"""About the width of a character, in font sizes; generous, because sans-serif fonts differ."""


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A device or socket with its words; x and y are of the upper left corner."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    label: str
    note: str = ""
    title: str = ""
    faint: bool = False

    @property
    def middle(self) -> float:
        """The x of the centre."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """The y of the lower edge."""
        return self.y + self.height


class Stroke(msgspec.Struct, frozen=True, kw_only=True):
    """A vertical link of a kind, with words to its left and right."""

    kind: str
    x: float
    top: float
    bottom: float
    left: str = ""
    right: str = ""


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """A line from port `start` to port `end`, both x, in a lane (0 is the uppermost)."""

    start: float
    end: float
    lane: int
    label_x: float


class Layout(msgspec.Struct, frozen=True):
    """A drawn machine: frames behind the links, links, and the boxes of devices by id.

    `bottom` is below all of them. `id` is the drawing's in a page.
    """

    id: str
    name: str
    frames: tuple[Box, ...]
    lines: tuple[Stroke, ...]
    boxes: dict[str, Box]
    width: float
    bottom: float

    def gaps(self, *kinds: str) -> list[float]:
        """Return the x between each device of these kinds and the next, from left to right."""
        row = sorted(box.middle for box in self.boxes.values() if box.kind in kinds)
        return [(start + end) / 2 for start, end in pairwise(row)]


def fit_text(text: str, width: float, size: float) -> str:
    """Return `text`, cut with an ellipsis to fit into `width` pixels.

    >>> fit_text("0000:03:00.0", 60, 10)
    '0000:03:0…'
    """
    text = visible(text)
    fits = max(1, int(width / (size * _CHARACTER)))
    return text if len(text) <= fits else text[: fits - 1] + "…"


def link_words(link: PciLink) -> tuple[str, str]:
    """Return the PCIe generation and lanes as two short words; "" where not reported.

    >>> link_words(PciLink(speed_gts=32.0, width=16))
    ('Gen5', 'x16')
    """
    generations = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
    speed = link.speed_gts
    generation = generations.get(speed or 0)
    first = f"Gen{generation}" if generation else f"{speed:g}GT" if speed else ""
    return first, f"x{link.lanes}" if link.lanes else ""


def lay_out(
    machine: Machine,
    gpus: Collection[int] | None = None,
    *,
    number: int = 0,
    narrow: bool = False,
) -> Layout:
    """Place every device with a GPU or NIC below it; GPUs that are not in `gpus` are faint.

    `narrow` is for a telephone's width.
    """
    tree = _Tree(machine, gpus, narrow=narrow)
    groups: dict[str, list[NumaNode]] = {}
    for node in sorted(machine.numa_nodes, key=lambda node: tree.order(node.id)):
        label = f"CPU of {node.id}" if node.socket is None else f"socket {node.socket}"
        groups.setdefault(label, []).append(node)
    several = len(groups) > 1
    top = _BUS_HEIGHT + _LINK / 2 + 2 if several else 2.0
    bottom = top + _HEADER + tree.row_y(tree.depth) + _HEIGHTS["gpu"] + _PAD
    frames: list[Box] = []
    lines: list[Stroke] = []
    x = 2.0
    for label, nodes in groups.items():
        start, x = x, x + _PAD
        for node in nodes:
            x = tree.place(node.id, x, top + _HEADER) + _GAP
        width, height = x + _PAD - _GAP - start, bottom - top
        words = fit_text(label, width - 20, 11)
        frames.append(Box(kind="socket", x=start, y=top, width=width, height=height, label=words))
        if several:
            lines.append(Stroke(kind="smp", x=start + width / 2, top=_BUS_HEIGHT + 2, bottom=top))
        x += _PAD + _GAP
    width = x - _GAP * 2 + 2
    if several:
        sockets_known = all(node.socket is not None for node in machine.numa_nodes)
        words = f"links between {'sockets' if sockets_known else 'CPUs'}"
        frames.append(Box(kind="bus", x=2, y=2, width=width - 4, height=_BUS_HEIGHT, label=words))
    for device, parent in machine.parents.items():
        if device in tree.boxes:
            box = tree.boxes[device]
            generation, right = ("", "") if narrow else link_words(machine.links[device])
            top = tree.boxes[parent].bottom
            x, y = box.middle, box.y
            lines.append(Stroke(kind="pci", x=x, top=top, bottom=y, left=generation, right=right))
    drawing = f"machine-{number}"
    return Layout(drawing, machine.name, tuple(frames), tuple(lines), tree.boxes, width, bottom)


def row_below(layout: Layout) -> Layout:
    """Return the GPUs and NICs of a drawn machine alone, each where it stands."""
    leaves = {name: box for name, box in layout.boxes.items() if box.kind in ("gpu", "nic")}
    boxes = {name: msgspec.structs.replace(box, y=2.0) for name, box in leaves.items()}
    bottom = 2.0 + _HEIGHTS["gpu"] + _PAD
    return Layout(layout.id, layout.name, (), (), boxes, layout.width, bottom)


class _Tree:
    """The devices that are drawn, their parents, and boxes as they are placed."""

    def __init__(self, machine: Machine, gpus: Collection[int] | None, *, narrow: bool) -> None:
        self._machine, self._gpus, self._narrow = machine, gpus, narrow
        leaves: tuple[Gpu | Nic, ...] = (*machine.gpus, *machine.nics)
        self._leaves = {leaf.id: leaf for leaf in leaves}
        # Each device with a GPU or NIC below it -> the lowest GPU index there.
        self._first: dict[str, float] = {}
        for name, leaf in self._leaves.items():
            index = leaf.index if isinstance(leaf, Gpu) else math.inf
            for device in (name, *machine.ancestors(name)):
                self._first[device] = min(self._first.get(device, math.inf), index)
        self._children: dict[str, list[str]] = {}
        drawn = (device for device in machine.parents if device in self._first)
        for device in sorted(drawn, key=self.order):
            self._children.setdefault(machine.parents[device], []).append(device)
        self.depth = 1 + max((len(machine.ancestors(leaf)) - 1 for leaf in self._leaves), default=0)
        self.boxes: dict[str, Box] = {}

    def order(self, device: str) -> tuple[float, int, str]:
        """Return a key from left to right: by GPU, then by id."""
        return self._first.get(device, math.inf), len(device), device

    def row_y(self, row: int) -> float:
        """Return the upper edge of a row below the NUMA nodes', which is row 0."""
        below = (row - 1) * (_HEIGHTS["bridge"] + _LINK)
        return _HEIGHTS["numa"] + _LINK + below if row else 0.0

    def place(self, device: str, x: float, top: float, row: int = 0) -> float:
        """Add the boxes of a device, from `x` on, and of all below it; return the right edge."""
        before = list(self.boxes)
        leaf = self._leaves.get(device)
        if leaf is not None:
            count = len(self._machine.gpus)
            roomy = 124.0 if count <= 4 else 92.0 if count <= 8 else 58.0
            roomy = 40.0 if self._narrow else roomy
            right = x + (roomy if isinstance(leaf, Gpu) else min(roomy, 58.0))
        else:
            right = x - _GAP / 2
            for child in self._children.get(device, ()):
                right = self.place(child, right + _GAP, top, row + 1)
            right += _GAP / 2
        short = x + _NUMA_LEAST - right if device not in self._machine.parents else 0.0
        if short > 0:
            right += short
            for below in self.boxes.keys() - before:
                box = self.boxes[below]
                self.boxes[below] = msgspec.structs.replace(box, x=box.x + short / 2)
        kind, label, note, title = self._words(device, right - x)
        self.boxes[device] = Box(
            kind=kind, x=x, y=top + self.row_y(self.depth if leaf else row),
            width=right - x, height=_HEIGHTS[kind], label=label, note=note, title=title,
            faint=kind == "gpu" and self._gpus is not None and index_of(device) not in self._gpus,
        )  # fmt: skip
        return right

    def _words(self, device: str, width: float) -> tuple[str, str, str, str]:
        """Return a device's kind, label, note and title."""
        leaf = self._leaves.get(device)
        if isinstance(leaf, Gpu):
            place = "" if self._narrow else leaf.bus_id.removeprefix("0000:")
            note = fit_text(place, width - 4, 9.5)
            return "gpu", leaf.id, note, f"{leaf.id} {leaf.name} {leaf.bus_id}"
        if isinstance(leaf, Nic):
            speed = f"{leaf.speed_mbps / 1000:g} Gb/s" if leaf.speed_mbps else "NIC"
            return "nic", leaf.id, fit_text(speed, width - 4, 9.5), f"{leaf.id} {leaf.name}"
        for node in self._machine.numa_nodes:
            if node.id == device:
                return "numa", f"{node.id} · NUMA node {node.numa_id}", "host memory", ""
        words = f"PCI bridge {device}"
        if fit_text(words, width - 8, 11) != words:
            words = fit_text(device.removeprefix("0000:"), width - 4, 10)
        return "bridge", words, "", ""


# Lanes: lines below a row of devices that never lie on each other, nor on a label. A line leaves a
# device at a port near its middle, runs along a lane, and comes up at another port. Its label is
# between two devices, where no line comes down.
def wires(ends: Sequence[tuple[float, float]], gaps: Sequence[float]) -> list[Wire]:
    """Return lines between these ports, short lines in upper lanes; labels are at one of `gaps`.

    >>> [wire.lane for wire in wires([(10, 90), (30, 50), (60, 80)], [40, 70])]
    [1, 0, 0]
    """
    occupied: list[tuple[int, float, float]] = []
    by_number: dict[int, Wire] = {}
    for index in sorted(range(len(ends)), key=lambda i: (abs(ends[i][1] - ends[i][0]), i)):
        low, high = sorted(ends[index])
        near = {at for at, start, end in occupied if start <= high + _SPACE and low <= end + _SPACE}
        lane = next(number for number in count() if number not in near)
        occupied.append((lane, low, high))
        middle = (low + high) / 2
        inside = [gap for gap in gaps if low < gap < high] or [middle]
        label = min(inside, key=lambda gap: (abs(gap - middle), gap))
        start, end = ends[index]
        by_number[index] = Wire(start=start, end=end, lane=lane, label_x=label)
    return [by_number[index] for index in range(len(ends))]


def depth(lanes: Sequence[Wire]) -> float:
    """Return how far down the lanes of these wires reach."""
    return LANE * (1 + max((wire.lane for wire in lanes), default=-1))


class NvLinks(msgspec.Struct, frozen=True):
    """The NVLinks of a machine below its drawing: between GPUs in lanes, to CPUs and switches."""

    wires: tuple[tuple[Wire, int], ...]
    lines: tuple[Stroke, ...]
    switches: tuple[Box, ...]
    top: float
    bottom: float


def nvlinks(machine: Machine, layout: Layout) -> NvLinks:
    """Place the NVLinks of a machine, each pair of GPUs once with its number of links."""
    counts: dict[tuple[str, str], int] = {}
    lines: list[Stroke] = []
    for link in machine.nvlinks:
        box = layout.boxes.get(link.source)
        if link.joins_gpus:
            ends = sorted((link.source, link.target), key=lambda gpu: layout.boxes[gpu].middle)
            counts[ends[0], ends[1]] = max(counts.get((ends[0], ends[1]), 0), link.count)
        elif box is not None and link.target in machine.ancestors(link.source):
            cpu = layout.boxes[link.target]
            lines.append(Stroke(kind="nvlink", x=box.x + 5, top=cpu.bottom, bottom=box.y))
    ports = _ports(list(counts), layout)
    lanes = wires(
        [(ports[pair, pair[0]], ports[pair, pair[1]]) for pair in counts], layout.gaps("gpu")
    )
    switches: list[Box] = []
    y = layout.bottom + depth(lanes)
    for switch in machine.nvswitches:
        top, width, height = y + _LINK, layout.width - 4, _HEIGHTS["nvswitch"]
        for link in machine.nvlinks:
            box = layout.boxes.get(link.source)
            if link.target == switch.id and box is not None:
                count, x = f"{link.count}x", box.middle
                lines.append(Stroke(kind="nvlink", x=x, top=box.bottom, bottom=top, right=count))
        label = f"{switch.id} · NVLink switch"
        switches.append(Box(kind="nvswitch", x=2, y=top, width=width, height=height, label=label))
        y = switches[-1].bottom
    pairs = tuple(zip(lanes, counts.values(), strict=True))
    start = layout.boxes[machine.gpus[0].id].bottom
    return NvLinks(pairs, tuple(lines), tuple(switches), start, y)


def _ports(
    pairs: Sequence[tuple[str, str]], layout: Layout
) -> dict[tuple[tuple[str, str], str], float]:
    ports = {}
    for gpu in {end for pair in pairs for end in pair}:
        of_gpu = [pair for pair in pairs if gpu in pair]
        of_gpu.sort(key=lambda pair: sum(layout.boxes[end].middle for end in pair))
        box = layout.boxes[gpu]
        step = min(9.0, box.width * 0.6 / len(of_gpu))
        for place, pair in enumerate(of_gpu):
            ports[pair, gpu] = box.middle + (place - (len(of_gpu) - 1) / 2) * step
    return ports


def machine_sentence(machine: Machine) -> str:
    """Return the number of devices of each kind in words."""
    kinds = {
        "NUMA nodes": machine.numa_nodes,
        "PCI bridges": machine.bridges,
        "GPUs": machine.gpus,
        "NICs": machine.nics,
        "NVLink switches": machine.nvswitches,
    }
    unknown = any(node.socket is None for node in machine.numa_nodes)
    sockets = " In which sockets the CPUs are is not reported." if unknown else ""
    return (
        ", ".join(f"{kind}: {len(names)}" for kind, names in kinds.items() if names) + f".{sockets}"
    )
