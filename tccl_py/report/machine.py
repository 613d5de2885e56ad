"""The drawing of a machine, and lanes below it for lines between devices.

Sockets stand around NUMA nodes, above switches, above GPUs. Each box is as wide as its children,
so every PCIe link is a vertical line, and all GPUs stand in one row, by index as far as the tree
allows. `templates/macros.html` turns the geometry, in pixels, into SVG.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import msgspec
from msgspec.structs import replace

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
    def right(self) -> float:
        """The x of the right edge."""
        return self.x + self.width

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

    `id` is the drawing's in a page, and `foot` the y of the lower edge of GPUs and NICs.
    """

    id: str
    name: str
    frames: tuple[Box, ...]
    lines: tuple[Stroke, ...]
    boxes: dict[str, Box]
    width: float
    foot: float

    @property
    def bottom(self) -> float:
        """The y below all of it."""
        return self.foot + _PAD

    def gaps(self, *kinds: str) -> list[float]:
        """Return the x between each device of these kinds and the next, from left to right."""
        row = sorted(box.middle for box in self.boxes.values() if box.kind in kinds)
        return [(start + end) / 2 for start, end in itertools.pairwise(row)]

    def row(self) -> Layout:
        """Return the GPUs and NICs alone, each where it stands."""
        leaves = {name: box for name, box in self.boxes.items() if box.kind in ("gpu", "nic")}
        boxes = {name: replace(box, y=2.0) for name, box in leaves.items()}
        return Layout(self.id, self.name, (), (), boxes, self.width, 2.0 + _HEIGHTS["gpu"])


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
    # 1. Boxes: NUMA nodes in the first row, GPUs and NICs in the last.
    sockets, edges = _columns(machine, narrow=narrow)
    several = len(sockets) > 1
    top = _BUS_HEIGHT + _LINK / 2 + 2 if several else 2.0
    rows = {device: len(machine.ancestors(device)) for device in edges}
    boxes: dict[str, Box] = {}
    for device, (x, right) in edges.items():
        box = _box(machine, device, x, right - x, narrow=narrow)
        row = max(rows.values()) if box.kind in ("gpu", "nic") else rows[device]
        below = _HEIGHTS["numa"] + _LINK + (row - 1) * (_HEIGHTS["bridge"] + _LINK) if row else 0.0
        faint = box.kind == "gpu" and gpus is not None and index_of(device) not in gpus
        boxes[device] = replace(box, y=top + _HEADER + below, faint=faint)
    foot = max(box.bottom for box in boxes.values())
    # 2. Frames around sockets, and links between them.
    frames, lines = list[Box](), list[Stroke]()
    for words, nodes in sockets.items():
        x, right = boxes[nodes[0]].x - _PAD, boxes[nodes[-1]].right + _PAD
        label, height = fit_text(words, right - x - 20, 11), foot + _PAD - top
        frame = Box(kind="socket", x=x, y=top, width=right - x, height=height, label=label)
        frames.append(frame)
        if several:
            lines.append(Stroke(kind="smp", x=frame.middle, top=_BUS_HEIGHT + 2, bottom=top))
    width = frames[-1].right + 2
    if several:
        known = all(node.socket is not None for node in machine.numa_nodes)
        words = f"links between {'sockets' if known else 'CPUs'}"
        frames.append(Box(kind="bus", x=2, y=2, width=width - 4, height=_BUS_HEIGHT, label=words))
    # 3. PCIe links.
    for device, parent in machine.parents.items():
        if device in boxes:
            left, words = ("", "") if narrow else link_words(machine.links[device])
            ends = {"top": boxes[parent].bottom, "bottom": boxes[device].y}
            x = boxes[device].middle
            lines.append(Stroke(kind="pci", x=x, **ends, left=left, right=words))
    name = f"machine-{number}"
    return Layout(name, machine.name, tuple(frames), tuple(lines), boxes, width, foot)


def _columns(
    machine: Machine, *, narrow: bool
) -> tuple[dict[str, list[str]], dict[str, tuple[float, float]]]:
    """Return the NUMA nodes of each socket, and the left and right edges of every device.

    GPUs and NICs have a column each, and what they hang from is as wide as all of its columns.
    """
    leaves = [leaf.id for leaf in (*machine.gpus, *machine.nics)]
    chains = {leaf: (leaf, *machine.ancestors(leaf)) for leaf in leaves}
    # From left to right by the lowest GPU below, then by id.
    lowest = dict.fromkeys((node.id for node in machine.numa_nodes), math.inf)
    for leaf in leaves:
        index = index_of(leaf) if leaf[0] == "G" else math.inf
        lowest |= {device: min(lowest.get(device, math.inf), index) for device in chains[leaf]}
    places = {device: (index, len(device), device) for device, index in lowest.items()}
    leaves.sort(key=lambda leaf: [places[device] for device in reversed(chains[leaf])])
    sockets: dict[str, list[str]] = {}
    for node in sorted(machine.numa_nodes, key=lambda node: places[node.id]):
        label = f"CPU of {node.id}" if node.socket is None else f"socket {node.socket}"
        sockets.setdefault(label, []).append(node.id)
    count = len(machine.gpus)
    gpu = 46.0 if narrow else 124.0 if count <= 4 else 92.0 if count <= 8 else 58.0
    edges: dict[str, tuple[float, float]] = {}
    x = 2 + _PAD
    for numa_ids in sockets.values():
        for numa in numa_ids:
            below = [leaf for leaf in leaves if chains[leaf][-1] == numa]
            widths = [gpu if leaf[0] == "G" else min(gpu, 58.0) for leaf in below]
            taken = sum(widths) + _GAP * (len(widths) - 1)
            left = x + max(0.0, (_NUMA_LEAST - taken) / 2)
            for leaf, width in zip(below, widths, strict=True):
                for device in chains[leaf][:-1]:
                    edges[device] = edges.get(device, (left, 0.0))[0], left + width
                left += width + _GAP
            edges[numa] = x, x + max(taken, _NUMA_LEAST)
            x = edges[numa][1] + _GAP
        x += 2 * _PAD
    return sockets, edges


def _box(machine: Machine, device: str, x: float, width: float, *, narrow: bool) -> Box:
    """Return the box of a device with its words."""
    one = next(each for each in machine.devices if each.id == device)
    kind, label, note, title = "numa", device, "host memory", ""
    if isinstance(one, Gpu):
        kind, title = "gpu", f"{one.id} {one.name} {one.bus_id}"
        note = fit_text("" if narrow else one.bus_id.removeprefix("0000:"), width - 4, 9.5)
    elif isinstance(one, Nic):
        kind, title = "nic", f"{one.id} {one.name}"
        speed = f"{one.speed_mbps / 1000:g} Gb/s" if one.speed_mbps else "NIC"
        note = fit_text(speed, width - 4, 9.5)
    elif isinstance(one, NumaNode):
        label = f"{one.id} · NUMA node {one.numa_id}"
    else:
        kind, label, note = "bridge", f"PCI bridge {device}", ""
        if fit_text(label, width - 8, 11) != label:
            label = fit_text(device.removeprefix("0000:"), width - 4, 10)
    height = _HEIGHTS[kind]
    return Box(kind=kind, x=x, y=0, width=width, height=height, label=label, note=note, title=title)


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
        lane = next(number for number in itertools.count() if number not in near)
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
    """The NVLinks of a machine below its drawing."""

    wires: tuple[tuple[Wire, int], ...]
    """Between GPUs, each pair once with its number of links."""
    lines: tuple[Stroke, ...]
    """To CPUs and switches."""
    switches: tuple[Box, ...]
    bottom: float


def nvlinks(machine: Machine, layout: Layout) -> NvLinks:
    """Place the NVLinks of a machine."""
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
    port = {(pair, gpu): _port(pair, gpu, list(counts), layout) for pair in counts for gpu in pair}
    lanes = wires(
        [(port[pair, pair[0]], port[pair, pair[1]]) for pair in counts], layout.gaps("gpu")
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
    return NvLinks(pairs, tuple(lines), tuple(switches), y)


def _port(
    pair: tuple[str, str], gpu: str, pairs: Sequence[tuple[str, str]], layout: Layout
) -> float:
    """Return where the line of a pair leaves a GPU, left of those to GPUs further right."""
    box, of_gpu = layout.boxes[gpu], [one for one in pairs if gpu in one]
    of_gpu.sort(key=lambda one: sum(layout.boxes[end].middle for end in one))
    step = min(9.0, box.width * 0.6 / len(of_gpu))
    return box.middle + (of_gpu.index(pair) - (len(of_gpu) - 1) / 2) * step


def machine_sentence(machine: Machine) -> str:
    """Return the number of devices of each kind in words."""
    kinds = {
        "NUMA nodes": machine.numa_nodes,
        "PCI bridges": machine.bridges,
        "GPUs": machine.gpus,
        "NICs": machine.nics,
        "NVLink switches": machine.nvswitches,
    }
    counts = ", ".join(f"{kind}: {len(names)}" for kind, names in kinds.items() if names)
    unknown = any(node.socket is None for node in machine.numa_nodes)
    return f"{counts}." + " In which sockets the CPUs are is not reported." * unknown
