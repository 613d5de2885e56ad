"""Drawings of machines and of plans' rings, in notebooks and reports, and the templates of both.

A drawing is a column of views: a machine, or the row of its GPUs alone, with a ring's hops as lines
below. Importing this module gives machines and plans their `_repr_svg_`.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from textwrap import wrap
from typing import Any, Literal

import jinja2
import msgspec
import numpy as np
from markupsafe import Markup, escape
from msgspec.structs import replace

from tccl_py.errors import check_type, visible
from tccl_py.explanation.findings import Finding, kind_of
from tccl_py.explanation.paths import Paths
from tccl_py.files import check_value
from tccl_py.health.host import list_names
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import Measurement
from tccl_py.model.rings import neighbours
from tccl_py.model.transfer import Flow, TransferSet
from tccl_py.nccl.paths import path_types
from tccl_py.nccl.transport import pair_mechanism
from tccl_py.nccl.view import view
from tccl_py.plan.chains import slowest_first
from tccl_py.plan.plan import Plan
from tccl_py.plan.text import description, has_stand_ins, settings_words
from tccl_py.report.machine import (
    Layout,
    NvLinks,
    Wire,
    depth,
    lay_out,
    link_words,
    machine_sentence,
    nvlinks,
    wires,
)
from tccl_py.simulator.model import MachineModel, gpu_names

_VIRIDIS = (
    *((68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140)),
    *((34, 168, 132), (68, 191, 112), (122, 209, 81), (189, 223, 38), (253, 231, 37)),
)
"""matplotlib's viridis at eleven places: even in lightness, and distinct for everybody."""
Scheme = Literal["light", "dark"]
Journal = Mapping[TransferSet, Sequence[Measurement]]
_NARROW = 56
"""Characters of a line of a narrow drawing."""
_LINE, _TITLE = 18.0, 24.0
"""Heights of a line of text, and of a ring's title."""
_TOLERANCE = 1e-6
_PORT = 9.0
_PATHS = {
    "NVL": "over NVLink",
    "NVB": "over NVLink through another GPU",
    "C2C": "chip to chip",
    "PIX": "over one PCI bridge",
    "PXB": "over several PCI bridges",
    "PHB": "over the CPU",
    "SYS": "over two CPUs or NUMA nodes",
}


# Hops


class DrawnHop(msgspec.Struct, frozen=True, kw_only=True):
    """A hop between two devices; default NCCL's have neither flow nor rate."""

    source: str
    target: str
    kind: str
    """write, read, bounce or net"""
    flow: Flow | None = None
    gbps: float | None = None
    path: str
    """A path type or memory, "" if not known."""
    slowest: bool = False
    wire: Wire | None = None
    """The line, once it has a place."""

    @property
    def words(self) -> str:
        """The mechanism and the path in words."""
        mechanism = kind_of(self.flow) if self.flow is not None else self.kind
        return ", ".join(filter(None, (mechanism, self.path)))


def flow_hop(machine: Machine, flow: Flow, gbps: float) -> DrawnHop:
    """Return a flow as a hop."""
    source, target = str(flow.source), str(flow.destination)
    kind: str = "bounce" if flow.is_bounce else flow.transfers[0].operation
    memories = [part.destination for part in flow.transfers[:-1] if part.destination.kind == "C"]
    path = f"via {memories[0].device}" if memories else path_types(machine)[source, target].name
    kind = "net" if flow.is_network else kind
    return DrawnHop(source=source, target=target, kind=kind, flow=flow, gbps=gbps, path=path)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a drawing: a machine or a row of its GPUs, with a ring or other flows below."""

    id: str = ""
    title: str = ""
    layout: Layout
    hops: tuple[DrawnHop, ...] = ()
    order: str = ""
    rate: float | None = None
    node: NodeView | None = None
    """The machine that is drawn, with its links; None for a row of GPUs."""
    y: float = 0.0

    @property
    def bottom(self) -> float:
        """The y below the part."""
        lines = depth([hop.wire for hop in self.hops if hop.wire])
        linked = self.node.nvlinks.bottom if self.node is not None else 0.0
        return self.y + max(self.layout.bottom + lines, linked)

    @property
    def heading(self) -> str:
        """The title with the rate."""
        return self.title + ("" if self.rate is None else f": {self.rate:.2f} GB/s")

    @property
    def description(self) -> str:
        """The hops in words."""
        ends = [(hop, f"{hop.source} to {hop.target}") for hop in self.hops]
        slow = ", ".join(words for hop, words in ends if hop.slowest)
        return ", ".join(words for _, words in ends) + "." + f" The slowest: {slow}." * bool(slow)


def hops_view(hops: Sequence[DrawnHop], layout: Layout, **more: Any) -> View:
    """Return a view of hops as lines; none is the slowest where all have one rate."""
    rates = [hop.gbps for hop in hops if hop.gbps is not None]
    least, most = min(rates, default=0.0) * (1 + _TOLERANCE), max(rates, default=0.0)
    boxes = [(layout.boxes[hop.source], layout.boxes[hop.target]) for hop in hops]
    kinds = {"gpu"} | {box.kind for pair in boxes for box in pair}
    ports = [(source.middle + _PORT, target.middle - _PORT) for source, target in boxes]
    lines = wires(ports, layout.gaps(*kinds))
    drawn = tuple(
        replace(hop, wire=wire, slowest=hop.gbps is not None and hop.gbps <= least < most)
        for hop, wire in zip(hops, lines, strict=True)
    )
    return View(layout=layout, hops=drawn, **more)


def order_words(ring: Sequence[int]) -> str:
    """Return a ring's GPUs, back to the first: 0 → 2 → 1 → 0."""
    return " → ".join(str(gpu) for gpu in (*ring, ring[0]))


def ring_views(plan: Plan, number: int, layout: Layout) -> Iterator[View]:
    """Yield the plan's different rings on hosts of a class, then default NCCL's of one host."""
    machine = plan.cluster.classes[number].machine
    for place, path in enumerate(plan.paths):
        hosts = tuple(host.name for host in plan.hosts if host.path == place)
        for at, chain in enumerate(path.chains if path.node_class == number else ()):
            order = order_words(chain.gpus)
            if chain.entry_nic is not None:
                ends = [f"N{chain.entry_nic}", *map(str, chain.gpus), f"N{chain.exit_nic}"]
                order = " → ".join(ends)
            title = f"Ring {at}" + (f" on {list_names(hosts)}" if len(plan.paths) > 1 else "")
            hops = [flow_hop(machine, hop.flow, hop.rate_gbps) for hop in chain.hops]
            facts: dict[str, Any] = {"order": order, "rate": chain.rate_gbps}
            yield hops_view(hops, layout, id=f"ring-{place}-{at}", title=title, **facts)
    if not plan.cluster.closes:
        return
    turned = Counter(
        ring[ring.index(min(ring)) :] + ring[: ring.index(min(ring))]
        for ring in plan.choices["default"].rings or ()
    )
    topo = view(plan.machine, plan.knowledge, plan.choices["default"].settings, gpus=plan.gpus)
    for at, (ring, channels) in enumerate(turned.items()):
        hops = []
        for one, other in neighbours(ring) if len(ring) > 1 else ():
            kind = pair_mechanism(topo, one, other).replace("network", "net")
            source, target = f"G{one}", f"G{other}"
            way = path_types(machine)[source, target].name
            hops.append(DrawnHop(source=source, target=target, kind=kind, path=way))
        title = "Default NCCL's ring" + f" on {channels} channels" * (channels > 1)
        yield hops_view(hops, layout, id=f"default-{at}", title=title, order=order_words(ring))


def cause_view(name: str, machine: Machine, finding: Finding, layout: Layout) -> View | None:
    """Return a finding's flows as a drawing; None if an end is not drawn."""
    rates = zip(finding.flows, finding.each_gbps, strict=True)
    hops = [flow_hop(machine, flow, gbps) for flow, gbps in rates]
    if not all(end in layout.boxes for hop in hops for end in (hop.source, hop.target)):
        return None
    return hops_view(hops, layout, id=name, title="Flows that run together")


def cause_words(finding: Finding) -> str:
    """Return a finding in a sentence: mechanisms, rates together and alone, and what they share."""
    counts = Counter(map(kind_of, finding.flows))
    kinds = [f"{n} x {kind}" if n > 1 else kind for kind, n in sorted(counts.items())]
    text = f"{', '.join(kinds)}: {finding.gbps:.2f} GB/s"
    if len(finding.flows) > 1:
        each = " each" if max(finding.each_gbps) < finding.gbps + 0.005 else " at least"
        text += f"{each}, {finding.alone_gbps:.2f} alone"
        text += ", a collapse" * finding.is_collapse
    return text + (f". Shared: {', '.join(finding.shares)}." if finding.shares else ".")


def path_words(rings: Iterable[View]) -> str:
    """Return the meaning of the words below the hops of rings."""
    used = {hop.path for ring in rings for hop in ring.hops}
    paths = [f"{path} {meaning}" for path, meaning in _PATHS.items() if path in used]
    memories = sorted(used - {"", *_PATHS}, key=lambda node: (len(node), node))
    return "; ".join([*paths, *(f"{node} through that NUMA node's memory" for node in memories)])


# Loads of links


class LinkLoad(msgspec.Struct, frozen=True):
    """The rate over a PCIe link in the busier direction, and the link's bandwidth, GB/s.

    `capacity` is None where speed or width are not reported; `slowest` marks the fullest link on
    the path of the slowest hop, which texts name.
    """

    gbps: float
    capacity: float | None
    slowest: bool = False

    @property
    def level(self) -> str:
        """The class of colours: 0 below half of the capacity, 1 below four fifths, 2, unknown."""
        if not self.capacity:
            return "unknown"
        share = self.gbps / self.capacity
        return str((share >= 0.5) + (share >= 0.8))

    @property
    def words(self) -> str:
        """The rate, and the share of the capacity."""
        of = f", {self.gbps / self.capacity:.0%} of {self.capacity:.1f}" if self.capacity else ""
        return f"{self.gbps:.1f} GB/s{of}"


def link_loads(paths: Paths, hops: Sequence[tuple[Flow, float]]) -> dict[str, LinkLoad]:
    """Return the load of each PCIe link, by the device below it, while all of `hops` run."""
    totals: dict[str, Counter[str]] = {"up": Counter(), "down": Counter()}
    for flow, gbps in hops:
        for passing in paths.passes(flow):
            if passing.part.kind in ("own", "uplink"):
                totals[passing.direction].update({passing.part.device: gbps})
    used = totals["up"] | totals["down"]
    capacities = {device: paths.machine.links[device].gbps for device in used}
    shares = {device: used[device] / (capacities[device] or math.inf) for device in used}
    slowest, _ = min(hops, key=lambda hop: slowest_first(hop[1], hop[0]), default=(None, 0.0))
    passed = [way.part.device for way in (paths.passes(slowest) if slowest else ())]
    fullest = max(filter(used.__contains__, passed), key=lambda one: shares[one], default=None)
    return {key: LinkLoad(used[key], capacities[key], key == fullest) for key in used}


# Maps of rates


class HeatMap(msgspec.Struct, frozen=True, kw_only=True):
    """The rate of each pair of GPUs alone, from rows to columns."""

    gpus: tuple[int, ...]
    rates: dict[tuple[int, int], tuple[Flow, float]]
    """By sending and receiving GPU: the flow, and its rate, GB/s."""

    @property
    def largest(self) -> float:
        """The largest rate, GB/s: the end of the colours."""
        return max((gbps for _, gbps in self.rates.values()), default=0.0)

    @property
    def is_complete(self) -> bool:
        """True if every pair has a rate."""
        return len(self.rates) == len(self.gpus) * (len(self.gpus) - 1)

    @property
    def caption(self) -> str:
        """The meaning of the cells."""
        blocks = next((flow.blocks for flow, _ in self.rates.values()), None)
        channels = "as many channels as help" if blocks is None else f"{blocks} channels"
        sentence = f"The fastest mechanism from one GPU to another alone, each with {channels}."
        more = " For all: `tccl measure --journal DIR/measurements.jsonl`."
        return sentence + more * (not self.is_complete)


def heat_map(journal: Journal, gpus: tuple[int, ...], hosts: Collection[str] = ("",)) -> HeatMap:
    """Return the rates of pairs of GPUs, by the number of channels of which most are known.

    Sets over `hosts` count, by the names in flows; the single host's name there is "".
    """
    known: dict[int | None, dict[tuple[int, int], tuple[Flow, float]]] = {}
    for transfers, measured in journal.items():
        flow, *others = transfers.flows
        ends = flow.source.index, flow.destination.index
        between = flow.source.kind == flow.destination.kind == "G" and set(ends) <= set(gpus)
        if others or not between or len(flow.hosts) != 1 or not set(flow.hosts) <= set(hosts):
            continue
        samples = itertools.chain.from_iterable(one.samples_gbps[0] for one in measured)
        rates, gbps = known.setdefault(flow.blocks, {}), median(samples)
        if ends not in rates or gbps > rates[ends][1]:
            rates[ends] = flow, gbps
    usual = max(known, key=lambda blocks: (len(known[blocks]), blocks or math.inf), default=None)
    return HeatMap(gpus=gpus, rates=dict(sorted(known.get(usual, {}).items())))


def viridis(share: float) -> tuple[int, int, int]:
    """Return the colour at `share` of the scale, 0 to 1.

    >>> viridis(0.05)
    (70, 18, 100)
    """
    steps = np.linspace(0, 1, len(_VIRIDIS))
    red, green, blue = (
        round(np.interp(share, steps, values)) for values in zip(*_VIRIDIS, strict=True)
    )
    return red, green, blue


def cell_colours(gbps: float, largest: float) -> tuple[str, str]:
    """Return the colours of a cell: background by rate, and legible ink."""
    red, green, blue = viridis(gbps / largest)
    ink = "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "#ffffff"
    return f"#{red:02x}{green:02x}{blue:02x}", ink


def cell_text(gbps: float) -> str:
    """Return a rate in few characters.

    >>> cell_text(3.478), cell_text(50.65), cell_text(360.6)
    ('3.5', '50.6', '361')
    """
    return f"{gbps:.0f}" if gbps >= 100 else f"{gbps:.1f}"


# Machines with rings


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A drawn machine, of the plan or of a class of its hosts, with the rings and rates on it."""

    machine: Machine
    layout: Layout
    nvlinks: NvLinks
    sentence: str
    rings: tuple[View, ...] = ()
    name: str = ""
    gpus: tuple[int, ...] = ()
    loads: dict[str, LinkLoad] = {}
    map: HeatMap | None = None

    def parts(self, y: float = 0.0) -> list[View]:
        """Return the machine with its first ring from `y` down, and a row of GPUs for each other.

        NVLinks have lanes below the machine, and then the first ring has a row of its own.
        """
        linked = bool(self.nvlinks.wires or self.nvlinks.lines)
        parts = [View(layout=self.layout, node=self, y=y)] if linked or not self.rings else []
        for ring in self.rings:
            y = (parts[-1].bottom if parts else y) + _TITLE
            first = {"node": self} if not parts else {"layout": self.layout.row()}
            parts.append(replace(ring, y=y, **first))
        return parts


def node_view(
    machine: Machine, plan: Plan | None = None, number: int = 0, *, narrow: bool = False
) -> NodeView:
    """Return a machine, of class `number` of a plan with the plan's rings and loads of links."""
    gpus = None if plan is None else plan.class_gpus[number]
    layout = lay_out(machine, gpus, number=number, narrow=narrow)
    links, sentence = nvlinks(machine, layout), machine_sentence(machine)
    shown = NodeView(machine=machine, layout=layout, nvlinks=links, sentence=sentence)
    if plan is None:
        return shown
    # Hosts of a class may have different paths: the first one's has the loads.
    path = next((path for path in plan.paths if path.node_class == number), None)
    chains = path.chains if path is not None and not has_stand_ins(plan) else ()
    hops = [(hop.flow, hop.rate_gbps) for chain in chains for hop in chain.hops]
    loads = link_loads(Paths(machine, plan.cluster.classes[number].knowledge), hops)
    rings = tuple(ring_views(plan, number, layout))
    return replace(shown, rings=rings, loads=loads, gpus=gpus or ())


@functools.cache
def templates() -> jinja2.Environment:
    """Return the environment of the report's templates."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("tccl_py.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "gbps": "{:.2f}".format,
        "px": lambda pixels: f"{round(pixels, 1):g}",
        "order": order_words,
        "path_words": path_words,
        "cell_style": lambda *rate: "background:{};color:{}".format(*cell_colours(*rate)),
        "cell_text": cell_text,
        "link_words": link_words,
        "cause_words": cause_words,
        "code": _code,
        "settings_words": settings_words,
    }
    templates.globals |= {"cause_view": cause_view, "gpu_names": gpu_names}
    return templates


def _visible(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(visible(line) for line in value.split("\n"))
    return value


def _code(text: str) -> Markup:
    """Return text with what it has between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(_visible(text)))))


def drawing(
    subject: Machine | MachineModel | Plan, *, scheme: Scheme | None = None, narrow: bool = False
) -> str:
    """Return an SVG file of a machine, or of a plan's rings on its machines.

    Its colours are those of `scheme`, or follow the reader's. `narrow` is for a telephone's width.
    """
    check_type(subject, "subject", Machine, MachineModel, Plan)
    check_value(scheme, Scheme | None, where="`scheme`")
    if isinstance(subject, MachineModel):
        subject = subject.machine
    if isinstance(subject, Plan):
        lines, parts = description(subject).splitlines(), list[View]()
        lines = [part for line in lines for part in wrap(line, _NARROW if narrow else 200)]
        for number, host in enumerate(subject.cluster.classes):
            y = parts[-1].bottom if parts else _LINE * len(lines) + 8
            parts += node_view(host.machine, subject, number, narrow=narrow).parts(y)
    else:
        lines, parts = [subject.name], node_view(subject, narrow=narrow).parts(_LINE + 8)
    words = max(len(line) for line in lines) * 7.0
    width = max(words, *(part.layout.width for part in parts)) + 4
    facts = {"lines": lines, "parts": parts, "width": width, "height": parts[-1].bottom + 6}
    return templates().get_template("drawing.svg").render(style=Markup(_style(scheme)), **facts)


@functools.cache
def _style(scheme: Scheme | None) -> str:
    loader = templates().loader
    assert loader is not None
    text = loader.get_source(templates(), "drawing.css")[0]
    head, dark, tail = re.split(r"@media [^{]*{\n(.*?)\n}\n", text, maxsplit=1, flags=re.DOTALL)
    return {None: text, "light": head + tail, "dark": head + dark + tail}[scheme]


for _kind in (Machine, MachineModel, Plan):
    setattr(_kind, "_repr_svg_", drawing)  # noqa: B010 (mypy knows no such attribute)
