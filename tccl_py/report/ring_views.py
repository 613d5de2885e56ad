"""The report's rings: drawing, hops and words of each, and NCCL's own beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from markupsafe import Markup

from tccl_py.plan.plan import Plan, PlanRing
from tccl_py.report.ring_drawing import DrawnHop, drawn_hops, ring_figure
from tccl_py.report.words import order_words

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
