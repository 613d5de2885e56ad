"""The flows of a plan's rings and of stock NCCL's, each hop by the mechanism it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from tccl_py.errors import SearchError
from tccl_py.model.rings import ring_from_order, ring_set
from tccl_py.model.transfer import Flow, parse_flow
from tccl_py.nccl.transport import hop_space
from tccl_py.plan.plan import Plan
from tccl_py.plan.tasks import condensed


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Rings to explain: their flows, ring after ring, and how many rings they are."""

    name: Literal["plan", "stock"]
    flows: tuple[Flow, ...]
    rings: int


def subjects(plan: Plan) -> Iterator[Subject]:
    """The plan's rings, and stock's where they are not the same."""
    flows = tuple(parse_flow(hop.flow) for ring in plan.rings for hop in ring.hops)
    yield Subject(name="plan", flows=flows, rings=len(plan.rings))
    stock = _stock(plan)
    if stock is not None and sorted(map(str, stock.flows)) != sorted(map(str, flows)):
        yield stock


def _stock(plan: Plan) -> Subject | None:
    """Return default NCCL's rings; None if it would move a hop of them over NICs."""
    orders = condensed(plan.stock.rings)
    space = hop_space(
        plan.machine,
        plan.knowledge,
        plan.stock.settings,
        gpus=plan.gpus,
        rings_in_set=len(orders),
    )
    try:
        rings = ring_set([ring_from_order(space, order) for order in orders])
    except SearchError:
        return None
    flows = tuple(hop.flow for ring in rings.rings for hop in ring.hops)
    return Subject(name="stock", flows=flows, rings=len(orders))
