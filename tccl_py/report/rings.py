"""Rings as drawings below a machine: every hop a line with a rate, the slowest marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from tccl_py.explain.findings import kind_of
from tccl_py.health.host import listed
from tccl_py.model.machine import Machine
from tccl_py.model.transfer import Flow
from tccl_py.nccl.paths import path_types
from tccl_py.plan.plan import WORLD, Plan, PlanChain
from tccl_py.plan.words import order_words
from tccl_py.report.machine import LANE, Layout, Wire, depth, wires

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
    """A ring, or a ring's chain on some hosts; `paths` explains the words below hops."""

    id: str
    title: str
    order: str
    rate: float
    layout: Layout
    hops: tuple[DrawnHop, ...]
    bottom: float
    paths: str
    description: str


def ring_views(plan: Plan, number: int, layout: Layout) -> list[RingView]:
    """Return the plan's different rings on hosts of a class, drawn below its machine."""
    machine = plan.cluster.classes[number].machine
    return [
        _view(machine, chain, (place, at), layout, plan)
        for place, path in enumerate(plan.paths)
        if path.node_class == number
        for at, chain in enumerate(path.chains)
    ]


def _view(
    machine: Machine, ring: PlanChain, place: tuple[int, int], layout: Layout, plan: Plan
) -> RingView:
    path, number = place
    hops = drawn_hops(machine, ring, layout)
    hosts = tuple(host.name for host in plan.hosts if host.path == path)
    slow = ", ".join(f"{hop.source} to {hop.target}" for hop in hops if hop.slowest)
    used = {hop.path for hop in hops}
    paths = [f"{path} {meaning}" for path, meaning in _PATHS.items() if path in used]
    paths += [f"{path} through that NUMA node's memory" for path in sorted(used - set(_PATHS))]
    order = order_words(ring.gpus)
    if ring.entry_nic is not None:
        order = " → ".join([f"N{ring.entry_nic}", *map(str, ring.gpus), f"N{ring.exit_nic}"])
    return RingView(
        id=f"ring-{path}-{number}",
        title=f"Ring {number}" + (f" on {listed(hosts)}" if plan.is_cluster else ""),
        order=order,
        rate=ring.rate,
        layout=layout,
        hops=hops,
        bottom=layout.bottom + depth([hop.wire for hop in hops]),
        paths="; ".join(paths),
        description=f"{order}; {ring.rate:.2f} GB/s, {plan.provenance}. "
        + (f"The slowest: {slow}." if slow else "All hops have the same rate.")
        + " The table below lists every hop.",
    )


def drawn_hops(machine: Machine, ring: PlanChain, layout: Layout) -> tuple[DrawnHop, ...]:
    """Return the hops of a ring; none is the slowest where all have one rate."""
    rates = [hop.gbps for hop in ring.hops]
    limit = ring.rate * (1 + _SAME)
    ends = [
        (
            f"N{ring.entry_nic}" if hop.source == WORLD else f"G{hop.source}",
            f"N{ring.exit_nic}" if hop.target == WORLD else f"G{hop.target}",
        )
        for hop in ring.hops
    ]
    ports = [(layout.boxes[a].middle + _PORT, layout.boxes[b].middle - _PORT) for a, b in ends]
    nics = machine.nics if ring.entry_nic is not None else ()
    leaves = [*(gpu.id for gpu in machine.gpus), *(nic.id for nic in nics)]
    found = wires(ports, layout.gaps(leaves))
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


def _kind(flow: Flow) -> str:
    if flow.is_network:
        return "net"
    return "bounce" if flow.is_bounce else flow.transfers[0].operation


def _path(machine: Machine, flow: Flow) -> str:
    for part in flow.transfers[:-1]:
        if part.destination.kind == "C":
            return f"via {part.destination}"
    return path_types(machine)[str(flow.source), str(flow.destination)].name


def default_rings(plan: Plan) -> Counter[str]:
    """Return the orders of default NCCL's rings on one host, with their numbers of channels."""
    if plan.is_cluster:
        return Counter()
    turned = (
        ring[ring.index(min(ring)) :] + ring[: ring.index(min(ring))] for ring in plan.stock.rings
    )
    return Counter(map(order_words, turned))


def drawn_kinds(rings: Sequence[RingView]) -> set[str]:
    """Return the kinds of lines in the drawings of rings."""
    hops = [hop for ring in rings for hop in ring.hops]
    slow = {"write slowest"} if any(hop.slowest for hop in hops) else set()
    return {hop.kind for hop in hops} | slow
