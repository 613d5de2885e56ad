"""The best order and crossings for hosts of which some must stay together.

For one rate, groups become pieces from the leaves of the tree upwards (`pieces`), and the pieces at
the root make a ring in any order (`circuits`). Around it the rate is searched (`relations`), below
the ceiling that fractions of hosts, and no groups, would have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tccl_py.merge.circuits import closed_walk, could_close
from tccl_py.merge.pieces import Host, Joiner, Kinds, Piece
from tccl_py.merge.relations import (
    Decision,
    Relation,
    Walk,
    highest,
    possible,
    staying,
    worthwhile,
)
from tccl_py.merge.tables import MergedRing, Rates, ring_rate


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts by number, and groups of them that stay together in the ring, each a cluster again."""

    hosts: tuple[int, ...] = ()
    groups: tuple[Cluster, ...] = ()

    @property
    def all_hosts(self) -> Iterator[int]:
        """The hosts here and in all groups."""
        yield from self.hosts
        for group in self.groups:
            yield from group.all_hosts


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts in ring order, `crossings[n]` from the n-th to the next, and a bound on all orders."""

    hosts: tuple[int, ...]
    crossings: tuple[int, ...]
    bound: float


def best_order(rates: Rates, classes: Sequence[int], cluster: Cluster) -> Order | None:
    """The order of the hosts of a cluster with the fastest ring; None if none was found.

    `rates` are class x entry x exit, `classes[h]` is the class of host h.
    """
    counts = np.bincount(classes, minlength=len(rates))
    used = np.flatnonzero(counts)
    some = rates[used]
    candidates = possible(
        worthwhile(some), lambda asked: could_close(some >= asked, counts[used].tolist())
    )
    best = highest(
        candidates,
        lambda asked: _closed(rates >= asked, classes, cluster),
        lambda walk: ring_rate(rates, [classes[host] for host in walk.kinds], walk.crossings),
        _staying(some, cluster),
    )
    if best.walk is None:
        return None
    return Order(hosts=best.walk.kinds, crossings=best.walk.crossings, bound=best.bound)


def ring_in(found: Order, rates: Rates, classes: Sequence[int]) -> MergedRing:
    """The ring over hosts of these classes in the order found, at the rate that it really has."""
    order = tuple(classes[host] for host in found.hosts)
    return MergedRing(
        rate_gbps=ring_rate(rates, order, found.crossings),
        bound_gbps=found.bound,
        order=order,
        crossings=found.crossings,
    )


def _staying(rates: Rates, cluster: Cluster) -> Walk | None:
    """A ring that uses one crossing only: any order is as good as any other."""
    crossing, rate = staying(rates)
    hosts = tuple(cluster.all_hosts)
    return Walk(kinds=hosts, crossings=(crossing,) * len(hosts)) if rate > 0 else None


def _closed(relations: Relation, classes: Sequence[int], cluster: Cluster) -> Decision:
    """A ring through all hosts; the kinds of its walk are the hosts' numbers."""
    joiner = Joiner()
    pieces = _pieces(relations, classes, cluster, joiner)
    if len(pieces) == 1 or Kinds([piece.relation for piece in pieces]).few:
        return _around(joiner.together(pieces))
    decision = _ring([piece.relation for piece in pieces])
    if decision.walk is not None:
        return Decision(walk=_hosts(decision.walk, pieces))
    if all(piece.relation is piece.at_most for piece in pieces):
        return decision
    most = _ring([piece.at_most for piece in pieces])
    return Decision(certain=most.walk is None and most.certain)


def _around(piece: Piece) -> Decision:
    """A ring that leaves all hosts, as one piece, by the crossing by which it entered them."""
    closed = np.flatnonzero(np.diagonal(piece.relation))
    if len(closed):
        start = int(closed[0])
        return Decision(walk=_hosts(Walk(kinds=(0,), crossings=(start,)), [piece]))
    return Decision(certain=not np.diagonal(piece.at_most).any())


def _pieces(
    relations: Relation, classes: Sequence[int], cluster: Cluster, joiner: Joiner
) -> list[Piece]:
    """Hosts and groups at the top of a cluster; groups without a host are none."""
    pieces: list[Piece] = [Host(host, relations[classes[host]]) for host in cluster.hosts]
    for group in cluster.groups:
        inside = _pieces(relations, classes, group, joiner)
        if inside:
            pieces.append(joiner.together(inside))
    return pieces


def _ring(relations: Sequence[Relation]) -> Decision:
    """A ring through pieces, each once; its kinds are their positions."""
    kinds = Kinds(relations)
    decision = closed_walk(np.stack(kinds.relations), kinds.counts)
    if decision.walk is None:
        return decision
    pools = [iter(mine) for mine in kinds.members]
    positions = tuple(next(pools[kind]) for kind in decision.walk.kinds)
    return Decision(walk=Walk(kinds=positions, crossings=decision.walk.crossings))


def _hosts(walk: Walk, pieces: Sequence[Piece]) -> Walk:
    """The walk over pieces as one over hosts."""
    entries = (walk.crossings[-1], *walk.crossings)
    ways = zip(walk.kinds, entries, walk.crossings, strict=False)
    steps = list(itertools.chain.from_iterable(pieces[i].steps(a, b) for i, a, b in ways))
    return Walk(kinds=tuple(s[0] for s in steps), crossings=tuple(s[1] for s in steps))
