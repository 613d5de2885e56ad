"""Rings as drawings below their machine: every hop a line with its rate, the slowest marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from tccl_py.explain.findings import kind_of
from tccl_py.model.machine import Machine
from tccl_py.model.paths import path_type
from tccl_py.model.transfer import Flow
from tccl_py.plan.plan import Plan, PlanChain, PlanHop
from tccl_py.report.machine import LANE, Layout, Wire, depth, lay_out, wires
from tccl_py.report.words import order_words

_SAME = 1e-6
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


class DrawnHop(msgspec.Struct, frozen=True, kw_only=True):
    """A hop from device to device: `kind` is write, read or bounce, `path` a path type or memory.

    `wire` is its line, with the upper end at `top` and the lane at `y`.
    """

    source: str
    target: str
    flow: Flow
    gbps: float
    kind: str
    path: str
    slowest: bool
    wire: Wire
    top: float
    y: float

    @property
    def words(self) -> str:
        """The mechanism and the path in words."""
        return f"{kind_of(self.flow)}, {self.path}"


class RingView(msgspec.Struct, frozen=True, kw_only=True):
    """A ring as the page shows it; `paths` explains the words below its hops."""

    number: int
    order: str
    rate: float
    layout: Layout
    hops: tuple[DrawnHop, ...]
    bottom: float
    paths: str
    description: str


def ring_views(plan: Plan) -> list[RingView]:
    """Return the plan's different rings."""
    layout = lay_out(plan.machine, plan.gpus)
    return [
        _view(plan.machine, ring, number, layout, plan.provenance)
        for number, ring in enumerate(plan.rings)
    ]


def _view(
    machine: Machine, ring: PlanChain, number: int, layout: Layout, provenance: str
) -> RingView:
    hops = drawn_hops(machine, ring, layout)
    slow = ", ".join(f"{hop.source} to {hop.target}" for hop in hops if hop.slowest)
    used = {hop.path for hop in hops}
    paths = [f"{path} {meaning}" for path, meaning in _PATHS.items() if path in used]
    paths += [f"{path} through that NUMA node's memory" for path in sorted(used - set(_PATHS))]
    order = order_words(ring.gpus)
    return RingView(
        number=number,
        order=order,
        rate=ring.rate,
        layout=layout,
        hops=hops,
        bottom=layout.bottom + depth([hop.wire for hop in hops]),
        paths="; ".join(paths),
        description=f"{order}; {ring.rate:.2f} GB/s, {provenance}. "
        + (f"The slowest: {slow}." if slow else "All hops have the same rate.")
        + " The table below lists every hop.",
    )


def drawn_hops(machine: Machine, ring: PlanChain, layout: Layout) -> tuple[DrawnHop, ...]:
    """Return the hops of a ring; none is the slowest where all have one rate."""
    rates = [hop.gbps for hop in ring.hops]
    limit = ring.rate * (1 + _SAME)
    ends = [_ends(hop) for hop in ring.hops]
    ports = [(layout.boxes[a].middle + _PORT, layout.boxes[b].middle - _PORT) for a, b in ends]
    found = wires(ports, layout.gaps([gpu.id for gpu in machine.gpus]))
    return tuple(
        DrawnHop(
            source=source,
            target=target,
            flow=hop.flow,
            gbps=hop.gbps,
            kind=_kind(hop.flow),
            path=_path(machine, hop.flow),
            slowest=hop.gbps <= limit < max(rates),
            wire=wire,
            top=layout.boxes[source].bottom,
            y=layout.bottom + LANE * wire.lane + LANE / 2,
        )
        for hop, (source, target), wire in zip(ring.hops, ends, found, strict=True)
    )


def _ends(hop: PlanHop) -> tuple[str, str]:
    return f"G{hop.source}", f"G{hop.target}"


def _kind(flow: Flow) -> str:
    return "bounce" if flow.is_bounce else flow.transfers[0].operation


def _path(machine: Machine, flow: Flow) -> str:
    if flow.is_bounce:
        return f"via {flow.transfers[0].destination}"
    return path_type(machine, str(flow.source), str(flow.destination)).name


def default_rings(plan: Plan) -> Counter[str]:
    """Return the orders of default NCCL's rings, with their numbers of channels."""
    turned = (
        ring[ring.index(min(ring)) :] + ring[: ring.index(min(ring))] for ring in plan.stock.rings
    )
    return Counter(map(order_words, turned))


def drawn_kinds(rings: Sequence[RingView]) -> set[str]:
    """Return the kinds of lines in the drawings of rings."""
    hops = [hop for ring in rings for hop in ring.hops]
    slow = {"write slowest"} if any(hop.slowest for hop in hops) else set()
    return {hop.kind for hop in hops} | slow
