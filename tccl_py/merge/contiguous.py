"""The best order and crossings for hosts under a tree of switches, whose uplinks have limits.

For one rate, every switch whose uplink carries the ring only once is a group: its hosts stay
together. Hosts of other switches come in any order. Groups become pieces from the leaves of the
tree upwards (`pieces`), and the pieces at the root make a ring in any order (`circuits`). Around it
the rate is searched (`relations`), below the ceiling that fractions of hosts, and no groups, would
have.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import msgspec
import numpy as np

from tccl_py.merge.circuits import closed_walk, could_close
from tccl_py.merge.pieces import (
    Decision,
    Host,
    Joiner,
    Kinds,
    Piece,
    Relation,
    Walk,
    highest,
    path,
    possible,
    power,
    product,
    staying,
    worthwhile,
)
from tccl_py.merge.tables import (
    ChainTable,
    MergedRing,
    Rates,
    check_class,
    check_size,
    no_ring,
    ring_rate,
    stacked,
)

LOOSE = (2, 4, 16, math.inf)
"""Groups come apart whose uplinks carry so many times the rate; 2 is the least that helps."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts by number, and groups of them behind an uplink (GB/s), each a cluster again."""

    hosts: tuple[int, ...] = ()
    groups: tuple[Cluster, ...] = ()
    uplink: float = math.inf

    @property
    def all_hosts(self) -> Iterator[int]:
        """The hosts here and in all groups."""
        yield from self.hosts
        for group in self.groups:
            yield from group.all_hosts

    @property
    def all_groups(self) -> Iterator[Cluster]:
        """It and all groups in it; neighbours in the tree are near each other."""
        yield self
        for group in self.groups:
            yield from group.all_groups


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts in ring order, `crossings[n]` from the n-th to the next, and a bound on all orders."""

    hosts: tuple[int, ...]
    crossings: tuple[int, ...]
    bound: float


def exits(group: Collection[int], order: Sequence[int]) -> int:
    """Return how often a ring in this order leaves a group of hosts.

    >>> exits([0, 1], [0, 2, 1, 3])
    2
    """
    inside = np.isin(np.asarray(order), np.fromiter(group, dtype=np.int64))
    return int((inside & ~np.roll(inside, -1)).sum())


def uplink_share(cluster: Cluster, order: Sequence[int]) -> float:
    """Return what uplinks leave of a ring, GB/s: each is shared by all passes of the ring."""
    limited = [group for group in cluster.all_groups if group.uplink < math.inf]
    times = [exits(tuple(group.all_hosts), order) for group in limited]
    shares = [group.uplink / n for group, n in zip(limited, times, strict=True) if n]
    return min(shares, default=math.inf)


def best_order(rates: Rates, classes: Sequence[int], cluster: Cluster) -> Order | None:
    """Return the order of hosts with the fastest ring; None if none was found.

    `rates` are class x entry x exit, `classes[h]` is the class of host h. The bound holds for all
    orders, also those in which hosts of a group are apart.
    """
    counts = np.bincount(classes, minlength=len(rates))
    used = np.flatnonzero(counts)
    # A ring passes every uplink once at least, so no chain is of use beyond that.
    some = np.minimum(rates[used], uplink_share(cluster, tuple(cluster.all_hosts)))
    candidates = possible(
        np.union1d(worthwhile(some), _shares(cluster, some.max(axis=(1, 2)).min())),
        lambda asked: could_close(some >= asked, counts[used].tolist()),
    )
    best = highest(
        candidates,
        lambda asked: _decided(rates >= asked, classes, cluster, asked),
        lambda walk: _rate(walk, rates, classes, cluster),
        _staying(some, cluster),
    )
    if best.walk is None:
        return None
    return Order(hosts=best.walk.kinds, crossings=best.walk.crossings, bound=best.bound)


def _shares(cluster: Cluster, ceiling: float) -> Rates:
    """Return what each uplink leaves of a ring that passes it twice, three times, and so on."""
    everyone = len(tuple(cluster.all_hosts))
    found = []
    for group in cluster.all_groups:
        inside = len(tuple(group.all_hosts))
        if group.uplink < math.inf and 0 < inside < everyone:
            found.append(group.uplink / np.arange(2, min(inside, everyone - inside) + 1))
    shares: Rates = np.unique(np.concatenate(found)) if found else np.zeros(0)
    return shares[shares <= ceiling]


def _rate(walk: Walk, rates: Rates, classes: Sequence[int], cluster: Cluster) -> float:
    chains = ring_rate(rates, [classes[host] for host in walk.kinds], walk.crossings)
    return min(chains, uplink_share(cluster, walk.kinds))


def _staying(rates: Rates, cluster: Cluster) -> Walk | None:
    """A ring that uses one crossing only: any order is as good as any other."""
    crossing, rate = staying(rates)
    hosts = tuple(cluster.all_hosts)
    return Walk(kinds=hosts, crossings=(crossing,) * len(hosts)) if rate > 0 else None


def _decided(
    relations: Relation, classes: Sequence[int], cluster: Cluster, asked: float
) -> Decision:
    """Decide whether there is a ring at the rate asked for, in any order that uplinks allow.

    1. The hosts of every group stay together, which passes every uplink once.
    2. Groups behind uplinks that carry the ring twice come apart. Without a ring then, no order has
       one, because the others have to stay together.
    3. If the ring found passes an uplink too often, groups behind narrow uplinks stay together.
    """
    together = _closed(relations, classes, cluster)
    ways = [_loosened(cluster, share * asked) for share in LOOSE]
    if together.walk is not None or ways[0] == cluster:
        return together
    for number, loose in enumerate(ways):
        if loose == cluster or loose in ways[:number]:
            continue
        decision = _closed(relations, classes, loose)
        if decision.walk is None:
            return decision if number == 0 else Decision(certain=False)
        walk = _neat(decision.walk, classes, cluster, loose)
        if uplink_share(cluster, walk.kinds) >= asked:
            return Decision(walk=walk)
    return Decision(certain=False)


def _loosened(cluster: Cluster, wide: float) -> Cluster:
    """Return the cluster without groups behind uplinks of `wide` GB/s and more."""
    hosts, groups = list(cluster.hosts), []
    for group in cluster.groups:
        inner = _loosened(group, wide)
        if group.uplink < wide:
            groups.append(inner)
        else:
            hosts += inner.hosts
            groups += inner.groups
    return Cluster(hosts=tuple(hosts), groups=tuple(groups), uplink=cluster.uplink)


def _neat(walk: Walk, classes: Sequence[int], cluster: Cluster, loose: Cluster) -> Walk:
    """Swap hosts of one class within groups of `loose`, so that few steps leave a group."""
    held = {host: n for n, group in enumerate(loose.all_groups) for host in group.hosts}
    near = {host: n for n, group in enumerate(cluster.all_groups) for host in group.hosts}
    pools: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for host in sorted(walk.kinds, reverse=True):
        pools[classes[host], held[host]][near[host]].append(host)
    kinds: list[int] = []
    for host in walk.kinds:
        pool = pools[classes[host], held[host]]
        last = near[kinds[-1]] if kinds else 0
        closest = min((abs(group - last), group) for group in pool)[1]
        kinds.append(pool[closest].pop())
        if not pool[closest]:
            del pool[closest]
    return Walk(kinds=tuple(kinds), crossings=walk.crossings)


def _closed(relations: Relation, classes: Sequence[int], cluster: Cluster) -> Decision:
    """Decide about a ring in which groups stay together; its walk's kinds are host numbers."""
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


# The best crossings for nodes whose order is given.


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
        lambda asked: _in_order_closed(rates >= asked, order),
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


def _in_order_closed(relations: Relation, order: tuple[int, ...]) -> Decision:
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
