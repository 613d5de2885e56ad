"""A machine as a drawing: its parts in a layout, and its NVLinks below them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import msgspec
from markupsafe import Markup

from tccl_py.model.machine import Gpu, Machine, Nic, NumaNode, PciLink
from tccl_py.report.svg import element, figure, fitted, join

# Where the parts of a machine are drawn: sockets around NUMA nodes above switches above GPUs.


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
    groups = _layout_sockets(machine, tree)
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


def _layout_sockets(machine: Machine, tree: _Tree) -> list[tuple[str, list[NumaNode]]]:
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


# Lanes below a row of devices: lines between them that never lie on each other, nor on a label.


LANE = 36.0
"""Height of a lane: a rate above its line, a word below it."""
_APART = 6.0


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """A line from port `start` to port `end`, both x, in a lane (0 is the uppermost)."""

    start: float
    end: float
    lane: int
    label_x: float


def wires(ends: Sequence[tuple[float, float]], gaps: Sequence[float]) -> list[Wire]:
    """Lines between these ports, short ones in upper lanes; labels stand at one of `gaps`.

    >>> [wire.lane for wire in wires([(10, 90), (30, 50), (60, 80)], [40, 70])]
    [1, 0, 0]
    """
    lanes: list[list[tuple[float, float]]] = []
    found: dict[int, Wire] = {}
    for index in sorted(range(len(ends)), key=lambda i: (abs(ends[i][1] - ends[i][0]), i)):
        start, end = ends[index]
        low, high = min(start, end), max(start, end)
        lane = next((n for n, taken in enumerate(lanes) if _free(taken, low, high)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append((low, high))
        label = _label(low, high, gaps)
        found[index] = Wire(start=start, end=end, lane=lane, label_x=label)
    return [found[index] for index in range(len(ends))]


def _free(taken: Sequence[tuple[float, float]], low: float, high: float) -> bool:
    return all(high + _APART < one or other + _APART < low for one, other in taken)


def _label(low: float, high: float, gaps: Sequence[float]) -> float:
    middle = (low + high) / 2
    inside = [gap for gap in gaps if low < gap < high] or [middle]
    return min(inside, key=lambda gap: (abs(gap - middle), gap))


def depth(found: Sequence[Wire]) -> float:
    """How far down the lanes of these wires reach, in pixels."""
    return LANE * (1 + max((wire.lane for wire in found), default=-1))


_SWITCH = 26.0
_DROP = 30.0


def machine_figure(machine: Machine, gpus: Collection[int]) -> Markup:
    """The whole machine; GPUs that are not among `gpus` are faint."""
    layout = lay_out(machine)
    below, height = _nvlinks(machine, layout)
    return figure(
        machine_parts(machine, layout, gpus),
        below,
        name="machine",
        title=f"The machine {machine.name}",
        description=machine_sentence(machine) + " The table below the drawing lists every part.",
        width=layout.width,
        height=height + 4,
    )


def machine_sentence(machine: Machine) -> str:
    """What a machine consists of, for who cannot see it."""
    parts = [
        _count(len(machine.numa_nodes), "NUMA node"),
        _count(len(machine.bridges), "PCI bridge"),
        _count(len(machine.gpus), "GPU"),
        _count(len(machine.nics), "NIC"),
        _count(len(machine.nvswitches), "NVLink switch", "es"),
    ]
    unknown = any(node.socket is None for node in machine.numa_nodes)
    sockets = " In which sockets the CPUs are is not reported." if unknown else ""
    return f"{', '.join(part for part in parts if part)}.{sockets}"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}" if number else ""


def machine_parts(machine: Machine, layout: Layout, gpus: Collection[int]) -> Markup:
    """Sockets, NUMA nodes, switches, GPUs and NICs, without NVLinks."""
    return join(
        [
            *_sockets(machine, layout),
            *_pci_links(machine, layout),
            *_numa_nodes(machine, layout),
            *_bridges(machine, layout),
            *_gpus(machine, layout, gpus),
            *_nics(machine, layout),
        ]
    )


def _box(box: Box, kind: str, *, round_: float = 5) -> Markup:
    return element(
        "rect", x=box.x, y=box.y, width=box.width, height=box.height, rx=round_, class_=kind
    )


def _words(text: str, x: float, y: float, kind: str, anchor: str = "middle") -> Markup:
    return element("text", text, x=x, y=y, class_=kind, text_anchor=anchor)


def _sockets(machine: Machine, layout: Layout) -> Iterator[Markup]:
    for socket in layout.sockets:
        yield _box(socket, "socket", round_=9)
        label = fitted(socket.id, socket.width - 20, 11)
        yield _words(label, socket.x + 12, socket.y + 16, "small", anchor="start")
        if layout.bus is not None:
            yield _line(socket.middle, layout.bus.bottom, socket.y, "smp")
    if layout.bus is not None:
        yield _box(layout.bus, "bus")
        known = all(node.socket is not None for node in machine.numa_nodes)
        words = f"links between {'sockets' if known else 'CPUs'}"
        yield _words(words, layout.bus.middle, layout.bus.y + 15, "small")


def _line(x: float, top: float, bottom: float, kind: str) -> Markup:
    return element("line", x1=x, y1=top, x2=x, y2=bottom, class_=kind)


def _pci_links(machine: Machine, layout: Layout) -> Iterator[Markup]:
    for device, parent in machine.parents.items():
        box = layout.boxes.get(device)
        if box is None:
            continue
        yield _line(box.middle, layout.boxes[parent].bottom, box.y, "pci")
        generation, lanes = link_words(machine.links[device])
        yield _words(generation, box.middle - 4, box.y - 11, "tiny", anchor="end")
        yield _words(lanes, box.middle + 4, box.y - 11, "tiny", anchor="start")


def _numa_nodes(machine: Machine, layout: Layout) -> Iterator[Markup]:
    for node in machine.numa_nodes:
        box = layout.boxes[node.id]
        yield _box(box, "numa")
        yield _words(f"{node.id} · NUMA node {node.numa_id}", box.middle, box.y + 17, "name")
        yield _words("host memory", box.middle, box.y + 31, "small")


def _bridges(machine: Machine, layout: Layout) -> Iterator[Markup]:
    for bridge in machine.bridges:
        box = layout.boxes.get(bridge.id)
        if box is None:
            continue
        yield _box(box, "bridge")
        full = f"PCI bridge {bridge.bus_id}"
        roomy = fitted(full, box.width - 8, 11) == full
        label = full if roomy else fitted(bridge.bus_id.removeprefix("0000:"), box.width - 4, 10)
        yield _words(label, box.middle, box.y + 17, "small" if roomy else "tiny")


def _gpus(machine: Machine, layout: Layout, gpus: Collection[int]) -> Iterator[Markup]:
    for gpu in machine.gpus:
        box = layout.boxes[gpu.id]
        yield element(
            "g",
            element("title", f"{gpu.id} {gpu.name} {gpu.bus_id}"),
            _box(box, "gpu"),
            _words(gpu.id, box.middle, box.y + 20, "gpu-name"),
            _words(
                fitted(gpu.bus_id.removeprefix("0000:"), box.width - 4, 9.5),
                *(box.middle, box.y + 36),
                "gpu-note",
            ),
            class_=None if gpu.index in gpus else "unused",
        )


def _nics(machine: Machine, layout: Layout) -> Iterator[Markup]:
    for nic in machine.nics:
        box = layout.boxes[nic.id]
        speed = f"{nic.speed_mbps / 1000:g} Gb/s" if nic.speed_mbps else "NIC"
        yield element(
            "g",
            element("title", f"{nic.id} {nic.name}"),
            _box(box, "nic"),
            _words(nic.id, box.middle, box.y + 20, "name"),
            _words(fitted(speed, box.width - 4, 9.5), box.middle, box.y + 36, "tiny"),
        )


def _nvlinks(machine: Machine, layout: Layout) -> tuple[Markup, float]:
    """Links of GPUs to each other in lanes, then to switches, and where they end."""
    parts, y = _between_gpus(machine, layout)
    for switch in machine.nvswitches:
        bar = Box(id=switch.id, x=2, y=y + _DROP, width=layout.width - 4, height=_SWITCH)
        for link in machine.nvlinks:
            box = layout.boxes.get(link.source)
            if link.target == switch.id and box is not None:
                parts.append(_line(box.middle, box.bottom, bar.y, "nvlink"))
                parts.append(_words(f"{link.count}x", box.middle + 5, bar.y - 7, "tiny", "start"))
        parts.append(_box(bar, "nvswitch"))
        parts.append(_words(f"{switch.id} · NVLink switch", bar.middle, bar.y + 17, "name"))
        y = bar.bottom
    return join([*_to_cpus(machine, layout), *parts]), y


def _to_cpus(machine: Machine, layout: Layout) -> Iterator[Markup]:
    """Links of GPUs to the CPU above them, beside the PCI Express link."""
    for link in machine.nvlinks:
        if link.target in machine.ancestors(link.source):
            gpu, cpu = layout.boxes[link.source], layout.boxes[link.target]
            yield _line(gpu.x + 5, cpu.bottom, gpu.y, "nvlink")


def _between_gpus(machine: Machine, layout: Layout) -> tuple[list[Markup], float]:
    counts: dict[tuple[str, str], int] = {}
    for link in machine.nvlinks:
        if link.source[0] == link.target[0] == "G":
            one, other = sorted((link.source, link.target), key=lambda i: layout.boxes[i].middle)
            counts[one, other] = max(counts.get((one, other), 0), link.count)
    pairs = list(counts)
    ports = _ports(pairs, layout)
    ends = [(ports[pair, pair[0]], ports[pair, pair[1]]) for pair in pairs]
    found = wires(ends, layout.gaps([gpu.id for gpu in machine.gpus]))
    top, start = layout.bottom, layout.boxes[machine.gpus[0].id].bottom
    parts = []
    for pair, wire in zip(pairs, found, strict=True):
        y = top + LANE * wire.lane + LANE / 2
        path = f"M{wire.start:.1f} {start:.1f}V{y:.1f}H{wire.end:.1f}V{start:.1f}"
        parts.append(element("path", d=path, class_="nvlink"))
        parts.append(_words(f"{counts[pair]}x", wire.label_x, y - 4, "tiny"))
    return parts, top + depth(found)


def _ports(
    pairs: list[tuple[str, str]], layout: Layout
) -> dict[tuple[tuple[str, str], str], float]:
    """Where each pair's line leaves each of its GPUs: side by side below the GPU's middle."""
    ports = {}
    for gpu in {one for pair in pairs for one in pair}:
        own = [pair for pair in pairs if gpu in pair]
        own.sort(key=lambda pair: sum(layout.boxes[one].middle for one in pair))
        box = layout.boxes[gpu]
        step = min(9.0, box.width * 0.6 / len(own))
        for place, pair in enumerate(own):
            ports[pair, gpu] = box.middle + (place - (len(own) - 1) / 2) * step
    return ports
