"""The best ring over nodes that may come in any order, as far as ranks can be chosen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tccl_py.errors import InputError
from tccl_py.merge.contiguous import Cluster, best_order, ring_in
from tccl_py.merge.tables import (
    ChainTable,
    MergedRing,
    check_size,
    no_ring,
    stacked,
)


def merge_any_order(
    tables: Sequence[ChainTable],
    counts: Sequence[int],
    *,
    groups: Sequence[Sequence[int]] | None = None,
) -> MergedRing:
    """The fastest ring through `counts[c]` nodes of every class c, and the order it has them in.

    `groups` are the counts of nodes that must stay together in the ring, group by group; together
    they must be all nodes. Exact (`proven`) as a rule; the question is that of an integer program,
    so that some may be given up on, which the bound tells.

    >>> import numpy as np
    >>> left = ChainTable(name="left", rates=np.array([[0.0, 5.0], [1.0, 0.0]]))
    >>> right = ChainTable(name="right", rates=left.rates.T)
    >>> ring = merge_any_order([left, right], [2, 2])
    >>> ring.rate_gbps, sorted(ring.order), ring.proven
    (5.0, [0, 0, 1, 1], True)

    Raises:
        InputError: tables, counts or groups that cannot be used.
        SearchError: there is no ring.
    """
    rates = stacked(tables)
    _check_counts(counts, len(tables), "node counts")
    check_size(sum(counts), "node counts")
    if groups is not None:
        _check_groups(groups, counts)
    parts = [_classes(part) for part in (groups if groups is not None else [counts])]
    classes = list(itertools.chain.from_iterable(parts))
    found = best_order(rates, classes, _cluster([len(part) for part in parts]))
    if found is None:
        used = [number for number, count in enumerate(counts) if count]
        raise no_ring(tables, used, "no order was found in which chains of all nodes meet")
    return ring_in(found, rates, classes)


def _cluster(sizes: Sequence[int]) -> Cluster:
    """Groups of that many hosts, numbered in turn; a single one makes no difference."""
    ends = list(itertools.accumulate(sizes))
    spans = [tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    if len(spans) == 1:
        return Cluster(hosts=spans[0])
    return Cluster(groups=tuple(Cluster(hosts=span) for span in spans))


def _classes(counts: Sequence[int]) -> list[int]:
    return [number for number, count in enumerate(counts) for _ in range(count)]


def _check_counts(counts: Sequence[int], classes: int, where: str) -> None:
    if len(counts) != classes:
        what = f"there are {len(counts)} numbers for {classes} node classes"
        raise InputError(where, what, "one for each class is needed, 0 for none")
    for number, count in enumerate(counts):
        if count < 0:
            what = f"there are {count} nodes of class {number}"
            raise InputError(where, what, "0 or more are needed")


def _check_groups(groups: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
    for position, group in enumerate(groups):
        _check_counts(group, len(counts), f"group {position}")
    for number, count in enumerate(counts):
        inside = sum(group[number] for group in groups)
        if inside != count:
            what = f"they have {inside} nodes of class {number}, of {count}"
            raise InputError("groups", what, "every node must be in one group")
