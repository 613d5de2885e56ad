"""A machine as a drawing: its parts in a layout, and its NVLinks below them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from markupsafe import Markup

from tccl_py.model.machine import Machine
from tccl_py.report.lanes import LANE, depth, wires
from tccl_py.report.layout import Box, Layout, lay_out, link_words
from tccl_py.report.svg import element, figure, fitted, join

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
