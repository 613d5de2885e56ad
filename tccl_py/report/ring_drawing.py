"""A ring drawn below its machine: every hop a line with its rate, the slowest one marked."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec
from markupsafe import Markup

from tccl_py.model.machine import Machine
from tccl_py.model.paths import path_type
from tccl_py.model.transfer import parse_flow
from tccl_py.plan.plan import PlanHop, PlanRing
from tccl_py.report.lanes import LANE, Wire, depth, wires
from tccl_py.report.layout import Layout, lay_out
from tccl_py.report.machine_drawing import machine_parts
from tccl_py.report.svg import element, figure, join

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
