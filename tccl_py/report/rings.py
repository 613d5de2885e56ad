"""A ring drawn below its machine: every hop a line with its rate, the slowest one marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import msgspec
from markupsafe import Markup

from tccl_py.model.machine import Machine
from tccl_py.model.paths import path_type
from tccl_py.model.transfer import parse_flow
from tccl_py.plan.plan import Plan, PlanHop, PlanRing
from tccl_py.report.machine import LANE, Layout, Wire, depth, lay_out, machine_parts, wires
from tccl_py.report.svg import element, figure, join
from tccl_py.report.words import order_words

_SAME = 1e-6
_PORT = 9.0


class DrawnHop(msgspec.Struct, frozen=True, kw_only=True):
    """A hop and what is said of it: `kind` is write, read or bounce, `path` how it goes."""

    hop: PlanHop
    kind: str
    path: str
    slowest: bool

    @property
    def words(self) -> str:
        """What the hop does, in words."""
        kinds = {"write": "direct write", "read": "direct read", "bounce": "bounce"}
        return f"{kinds[self.kind]}, {self.path}"


def drawn_hops(machine: Machine, ring: PlanRing) -> list[DrawnHop]:
    """The hops of a ring; none is the slowest where all have one rate."""
    rates = [hop.gbps for hop in ring.hops]
    uneven = max(rates) > min(rates) * (1 + _SAME)
    return [
        _drawn(machine, hop, slowest=uneven and hop.gbps <= ring.rate * (1 + _SAME))
        for hop in ring.hops
    ]


def _drawn(machine: Machine, hop: PlanHop, *, slowest: bool) -> DrawnHop:
    flow = parse_flow(hop.flow)
    if flow.is_bounce:
        kind, path = "bounce", f"via {flow.transfers[0].destination}"
    else:
        kind = flow.transfers[0].operation
        path = path_type(machine, f"G{hop.source}", f"G{hop.target}").name
    return DrawnHop(hop=hop, kind=kind, path=path, slowest=slowest)


def ring_figure(
    machine: Machine, ring: PlanRing, number: int, gpus: Collection[int], provenance: str
) -> Markup:
    """The machine with one ring below it; `number` counts the plan's rings from 0."""
    layout = lay_out(machine)
    hops = drawn_hops(machine, ring)
    row = layout.gaps([gpu.id for gpu in machine.gpus])
    found = wires([_ends(layout, one.hop) for one in hops], row)
    # Slow hops last: nothing is drawn over them.
    pairs = sorted(zip(hops, found, strict=True), key=lambda pair: pair[0].slowest)
    return figure(
        machine_parts(machine, layout, gpus),
        join(part for hop, wire in pairs for part in _hop(layout, hop, wire)),
        name=f"ring-{number}",
        title=f"Ring {number} over {machine.name}",
        description=_sentence(ring, hops, provenance),
        width=layout.width,
        height=layout.bottom + depth(found) + 4,
    )


def _sentence(ring: PlanRing, hops: list[DrawnHop], provenance: str) -> str:
    order = " to ".join(f"G{gpu}" for gpu in (*ring.gpus, ring.gpus[0]))
    slow = [f"G{one.hop.source} to G{one.hop.target}" for one in hops if one.slowest]
    which = f"The slowest: {', '.join(slow)}." if slow else "All hops have the same rate."
    return f"{order}; {ring.rate:.2f} GB/s, {provenance}. {which} The table below lists every hop."


def _ends(layout: Layout, hop: PlanHop) -> tuple[float, float]:
    source, target = layout.boxes[f"G{hop.source}"], layout.boxes[f"G{hop.target}"]
    return source.middle + _PORT, target.middle - _PORT


def _hop(layout: Layout, one: DrawnHop, wire: Wire) -> Iterator[Markup]:
    top = layout.boxes[f"G{one.hop.source}"].bottom
    y = layout.bottom + LANE * wire.lane + LANE / 2
    kind = f"hop {one.kind}{' slowest' if one.slowest else ''}"
    tip = f"G{one.hop.source} to G{one.hop.target}: {one.hop.gbps:.2f} GB/s, {one.words}"
    path = f"M{wire.start:.1f} {top:.1f}V{y:.1f}H{wire.end:.1f}V{top + 7:.1f}"
    head = f"M{wire.end:.1f} {top + 1:.1f}l-4.5 8h9z"
    yield element("path", element("title", tip), d=path, class_=kind)
    yield element("path", d=head, class_=f"head {kind}")
    x = wire.label_x
    way = f"▲ {one.path}" if one.slowest else one.path
    yield element("text", _short(one.hop.gbps), x=x, y=y - 4, class_=f"rate {kind}")
    yield element("text", way, x=x, y=y + 12, class_=f"way {kind}")


def _short(gbps: float) -> str:
    return f"{gbps:.2f}" if gbps < 100 else f"{gbps:.1f}"


# The report's rings: drawing, hops and words of each, and NCCL's own beside them.


_PATHS = {
    "NVL": "over NVLink",
    "NVB": "over NVLink through another GPU",
    "C2C": "chip to chip",
    "PIX": "over one PCI bridge",
    "PXB": "over several PCI bridges",
    "PHB": "over the CPU",
    "SYS": "over two CPUs or NUMA nodes",
}


class RingView(msgspec.Struct, frozen=True, kw_only=True):
    """A ring as the page shows it; `paths` explains the words below its hops."""

    number: int
    order: str
    rate: float
    figure: Markup
    hops: list[DrawnHop]
    paths: str


class StockRing(msgspec.Struct, frozen=True, kw_only=True):
    """A ring that NCCL picks itself, and by how many channels."""

    order: str
    channels: int


def ring_views(plan: Plan) -> list[RingView]:
    """The plan's different rings."""
    return [_view(plan, ring, number) for number, ring in enumerate(plan.rings)]


def _view(plan: Plan, ring: PlanRing, number: int) -> RingView:
    hops = drawn_hops(plan.machine, ring)
    return RingView(
        number=number,
        order=order_words(ring.gpus),
        rate=ring.rate,
        figure=ring_figure(plan.machine, ring, number, plan.gpus, plan.provenance),
        hops=hops,
        paths=_path_words(hops),
    )


def _path_words(hops: Sequence[DrawnHop]) -> str:
    used = {hop.path for hop in hops}
    words = [f"{path} {meaning}" for path, meaning in _PATHS.items() if path in used]
    words += [f"{path} through that NUMA node's memory" for path in sorted(used - set(_PATHS))]
    return "; ".join(words)


def stock_rings(plan: Plan) -> list[StockRing]:
    """NCCL's own rings, each once."""
    counts = Counter(_from_lowest(ring) for ring in plan.stock.rings)
    return [StockRing(order=order_words(ring), channels=n) for ring, n in counts.items()]


def _from_lowest(ring: tuple[int, ...]) -> tuple[int, ...]:
    start = ring.index(min(ring))
    return (*ring[start:], *ring[:start])


def drawn_kinds(plan: Plan) -> set[str]:
    """The kinds of line that the drawings of the rings have."""
    hops = [hop for ring in plan.rings for hop in drawn_hops(plan.machine, ring)]
    return {hop.kind for hop in hops} | (
        {"write slowest"} if any(h.slowest for h in hops) else set()
    )
