"""The best crossings for nodes whose order is given.

The inter-node merge of TCCL (ASPLOS 2024, the section on merging node-local chains): D[n][h][t],
the best rate from crossing h before the first node to t after the n-th, is the bottleneck product
of the tables. Runs of equal nodes cost a power instead, so equal nodes are nearly free.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tccl_py.merge.relations import (
    Decision,
    Relation,
    Walk,
    highest,
    path,
    power,
    product,
    staying,
    worthwhile,
)
from tccl_py.merge.tables import (
    ChainTable,
    MergedRing,
    check_class,
    check_size,
    no_ring,
    ring_rate,
    stacked,
)


def merge_in_order(tables: Sequence[ChainTable], order: Sequence[int]) -> MergedRing:
    """The fastest ring through nodes of classes `order`, in this order.

    With X crossings, R runs of equal nodes and E different rates: (R + log N) X^3 log E.

    >>> table = ChainTable(name="a", rates=np.array([[1.0, 5.0], [4.0, 2.0]]))
    >>> ring = merge_in_order([table], [0, 0])
    >>> ring.rate_gbps, ring.crossings
    (4.0, (1, 0))

    Raises:
        InputError: tables or an order that cannot be used.
        SearchError: there is no ring.
    """
    rates = stacked(tables)
    check_size(len(order), "node order")
    for position, number in enumerate(order):
        check_class(number, tables, f"node order, position {position}")
    order = tuple(int(number) for number in order)
    used = sorted(set(order))
    crossing, rate = staying(rates[used])
    best = highest(
        worthwhile(rates[used]),
        lambda asked: _closed(rates >= asked, order),
        lambda walk: ring_rate(rates, order, walk.crossings),
        Walk(kinds=order, crossings=(crossing,) * len(order)) if rate > 0 else None,
    )
    if best.walk is None:
        raise no_ring(tables, used, "chains of nodes in this order meet in no round of crossings")
    crossings = best.walk.crossings
    return MergedRing(
        rate_gbps=ring_rate(rates, order, crossings),
        bound_gbps=best.bound,
        order=order,
        crossings=crossings,
    )


def _closed(relations: Relation, order: tuple[int, ...]) -> Decision:
    """A closed walk through the relations of all nodes in order, if there is one."""
    powers: dict[tuple[int, int], Relation] = {}
    whole: Relation | None = None
    for number, run in itertools.groupby(order):
        key = (number, sum(1 for _ in run))
        if key not in powers:
            powers[key] = power(relations[number], key[1])
        whole = powers[key] if whole is None else product(whole, powers[key])
        if not whole.any():
            return Decision()
    assert whole is not None
    closed = np.flatnonzero(np.diagonal(whole))
    if not len(closed):
        return Decision()
    start = int(closed[0])
    crossings = path([relations[number] for number in order], start, start)
    return Decision(walk=Walk(kinds=order, crossings=crossings))
