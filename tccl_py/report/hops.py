"""Hops below the drawing of a machine: rings, flows that slow each other, and loads of links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tccl_py.explanation.findings import Finding, kind_of
from tccl_py.explanation.paths import Paths
from tccl_py.health.host import list_names
from tccl_py.model.machine import Machine
from tccl_py.model.rings import neighbours
from tccl_py.model.transfer import Flow
from tccl_py.nccl.paths import path_types
from tccl_py.nccl.transport import pair_mechanism
from tccl_py.nccl.view import view
from tccl_py.plan.chains import slowest_first
from tccl_py.plan.plan import Plan
from tccl_py.report.machine import Layout, Wire, depth, wires

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

Ends = tuple[str, str, str, Flow | None, float | None]
"""A hop to draw: its two devices, kind (write, read, bounce or net), flow and rate.

Default NCCL's hops have no flow and no rate.
"""


class DrawnHop(msgspec.Struct, frozen=True, kw_only=True):
    """A hop as the line `wire` below a device with the lower edge `top`.

    `path` is a path type or memory, "" if not known.
    """

    source: str
    target: str
    kind: str
    flow: Flow | None
    gbps: float | None
    path: str
    slowest: bool
    wire: Wire
    top: float

    @property
    def words(self) -> str:
        """The mechanism and the path in words."""
        mechanism = kind_of(self.flow) if self.flow is not None else self.kind
        return ", ".join(filter(None, (mechanism, self.path)))

    def move(self, layout: Layout) -> DrawnHop:
        """Return the hop below another drawing of the same devices."""
        return msgspec.structs.replace(self, top=layout.boxes[self.source].bottom)


class HopsView(msgspec.Struct, frozen=True, kw_only=True):
    """Hops below a machine: a ring, a ring's chain on some hosts, or flows that slow each other."""

    id: str
    title: str
    layout: Layout
    hops: tuple[DrawnHop, ...]
    order: str = ""
    rate: float | None = None

    @property
    def bottom(self) -> float:
        """The y below all lines."""
        return self.layout.bottom + depth([hop.wire for hop in self.hops])

    @property
    def description(self) -> str:
        """The hops in words."""
        ends = [(hop, f"{hop.source} to {hop.target}") for hop in self.hops]
        slow = ", ".join(words for hop, words in ends if hop.slowest)
        return ", ".join(words for _, words in ends) + "." + f" The slowest: {slow}." * bool(slow)


def order_words(ring: Sequence[int]) -> str:
    """Return a ring's GPUs, back to the first: 0 → 2 → 1 → 0."""
    return " → ".join(str(gpu) for gpu in (*ring, ring[0]))


def ring_views(plan: Plan, number: int, layout: Layout) -> list[HopsView]:
    """Return the plan's different rings on hosts of a class, then default NCCL's of one host."""
    machine = plan.cluster.classes[number].machine
    views = []
    for place, path in enumerate(plan.paths):
        hosts = tuple(host.name for host in plan.hosts if host.path == place)
        for at, chain in enumerate(path.chains if path.node_class == number else ()):
            order = order_words(chain.gpus)
            if chain.entry_nic is not None:
                ends = [f"N{chain.entry_nic}", *map(str, chain.gpus), f"N{chain.exit_nic}"]
                order = " → ".join(ends)
            title = f"Ring {at}" + (f" on {list_names(hosts)}" if len(plan.paths) > 1 else "")
            hops = flow_ends((hop.flow, hop.rate_gbps) for hop in chain.hops)
            shown = {"order": order, "rate": chain.rate_gbps}
            views.append(hops_view(f"ring-{place}-{at}", title, machine, hops, layout, **shown))
    return [*views, *_default_views(plan, layout)] if plan.cluster.closes else views


def _default_views(plan: Plan, layout: Layout) -> Iterator[HopsView]:
    turned = Counter(
        ring[ring.index(min(ring)) :] + ring[: ring.index(min(ring))]
        for ring in plan.choices["default"].rings or ()
    )
    topo = view(plan.machine, plan.knowledge, plan.choices["default"].settings, gpus=plan.gpus)
    for at, (ring, channels) in enumerate(turned.items()):
        hops: list[Ends] = []
        for a, b in neighbours(ring) if len(ring) > 1 else ():
            kind = pair_mechanism(topo, a, b).replace("network", "net")
            hops.append((f"G{a}", f"G{b}", kind, None, None))
        title = "Default NCCL's ring" + f" on {channels} channels" * (channels > 1)
        shown = {"order": order_words(ring)}
        yield hops_view(f"default-{at}", title, plan.machine, hops, layout, **shown)


def cause_view(name: str, machine: Machine, finding: Finding, layout: Layout) -> HopsView | None:
    """Return a finding's flows as a drawing; None if an end is not drawn."""
    ends = flow_ends(zip(finding.flows, finding.each_gbps, strict=True))
    if not all(end in layout.boxes for hop in ends for end in hop[:2]):
        return None
    return hops_view(name, "Flows that run together", machine, ends, layout)


def hops_view(
    name: str,
    title: str,
    machine: Machine,
    ends: Sequence[Ends],
    layout: Layout,
    **more: Any,
) -> HopsView:
    """Return a view of hops as lines; none is the slowest where all have one rate."""
    rates = [gbps for *_, gbps in ends if gbps is not None]
    least, most = min(rates, default=0.0) * (1 + _TOLERANCE), max(rates, default=0.0)
    ports = [(layout.boxes[a].middle + _PORT, layout.boxes[b].middle - _PORT) for a, b, *_ in ends]
    nics = any(layout.boxes[end].kind == "nic" for hop in ends for end in hop[:2])
    lines = wires(ports, layout.gaps("gpu", *["nic"] * nics))
    hops = tuple(
        DrawnHop(
            source=source,
            target=target,
            kind=kind,
            flow=flow,
            gbps=gbps,
            path=_path(machine, source, target, flow),
            slowest=gbps is not None and gbps <= least < most,
            wire=wire,
            top=layout.boxes[source].bottom,
        )
        for (source, target, kind, flow, gbps), wire in zip(ends, lines, strict=True)
    )
    return HopsView(id=name, title=title, layout=layout, hops=hops, **more)


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


def flow_ends(flows: Iterable[tuple[Flow, float | None]]) -> list[Ends]:
    """Return flows, each with its rate, as hops between devices."""
    drawn: list[Ends] = []
    for flow, gbps in flows:
        kind: str = "bounce" if flow.is_bounce else flow.transfers[0].operation
        kind = "net" if flow.is_network else kind
        drawn.append((str(flow.source), str(flow.destination), kind, flow, gbps))
    return drawn


def _path(machine: Machine, source: str, target: str, flow: Flow | None) -> str:
    for part in flow.transfers[:-1] if flow is not None else ():
        if part.destination.kind == "C":
            return f"via {part.destination.device}"
    return path_types(machine)[source, target].name


def path_words(rings: Sequence[HopsView]) -> str:
    """Return the meaning of the words below the hops of rings."""
    used = {hop.path for ring in rings for hop in ring.hops}
    paths = [f"{path} {meaning}" for path, meaning in _PATHS.items() if path in used]
    memories = sorted(used - {"", *_PATHS}, key=lambda node: (len(node), node))
    return "; ".join([*paths, *(f"{node} through that NUMA node's memory" for node in memories)])


def drawn_kinds(rings: Sequence[HopsView]) -> set[str]:
    """Return the kinds of lines in the drawings of rings."""
    hops = [hop for ring in rings for hop in ring.hops]
    slow = {"write slowest"} if any(hop.slowest for hop in hops) else set()
    return {hop.kind for hop in hops} | slow


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
        links = [
            passing for passing in paths.passes(flow) if passing.part.kind in ("own", "uplink")
        ]
        for link in links:
            totals[link.direction].update({link.part.device: gbps})
    used = totals["up"] | totals["down"]
    capacities = {device: paths.machine.links[device].gbps for device in used}
    shares = {device: used[device] / (capacities[device] or math.inf) for device in used}
    slowest, _ = min(hops, key=lambda hop: slowest_first(hop[1], hop[0]), default=(None, 0.0))
    passed = [way.part.device for way in (paths.passes(slowest) if slowest else ())]
    fullest = max(filter(used.__contains__, passed), key=lambda one: shares[one], default=None)
    return {key: LinkLoad(used[key], capacities[key], key == fullest) for key in used}
