"""Rings over hosts from chain tables: in a given order, or in any order under a tree of switches.

Hosts of a switch stay together at no cost in rate: the ring leaves and enters the switch once, and
the uplink carries the ring once in each direction. Otherwise hosts of a switch are apart, as far as
the rates of uplinks allow.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from tccl_py.errors import SearchError
from tccl_py.merge.walks import (
    MAX_PRODUCTS,
    Best,
    Decision,
    Joiner,
    Piece,
    Rates,
    Relation,
    Walk,
    highest,
    host_piece,
    is_ruled_out,
    path,
    power,
    product,
    products,
    worthwhile,
)
from tccl_py.model.cluster import SwitchTree

MOST_PARTS = 4
"""Parts of a switch's hosts that stay together where its uplink carries several passes."""


class ChainTable(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Rates of the best chains through a host of one class, by entry and exit crossing.

    `rates[x, y]`, GB/s, is for chains that the ring enters by crossing x and leaves by crossing y;
    0 is no chain. All tables of a ring are over the same crossings.
    """

    name: str
    rates: Rates


class MergedRing(msgspec.Struct, frozen=True, kw_only=True):
    """A ring over hosts, with an upper bound."""

    rate_gbps: float
    """The rate of the slowest chain or uplink."""
    bound_gbps: float
    """For all orders of hosts, or for the order that was given."""
    order: tuple[int, ...]
    """The class of each host, cyclic."""
    crossings: tuple[int, ...]
    """From each host to the next."""
    hosts: tuple[str, ...] = ()
    """Their names, if there are any."""

    @property
    def is_proven(self) -> bool:
        """Whether the ring reaches the bound."""
        return self.rate_gbps >= self.bound_gbps


# A given order.
def merge_in_order(
    tables: Sequence[ChainTable], order: Sequence[int], *, limit: float = math.inf
) -> MergedRing:
    """Find the fastest ring through hosts of classes `order`, in this order; uplinks `limit` it.

    With X crossings, R runs of equal hosts and E different rates: (R + log N) X^3 log E.

    >>> table = ChainTable(name="a", rates=np.array([[1.0, 5.0], [4.0, 2.0]]))
    >>> ring = merge_in_order([table], [0, 0])
    >>> ring.rate_gbps, ring.crossings
    (4.0, (1, 0))

    Raises SearchError: there is no ring.
    """
    rates = np.minimum([table.rates for table in tables], limit)
    order = tuple(order)
    used = sorted(set(order))
    best = highest(
        worthwhile(rates[used]),
        lambda asked: _in_order_closed(rates >= asked, order),
        lambda walk: _ring_rate(rates, order, walk.crossings),
        _one_crossing(rates[used], ("",) * len(order)),
    )
    if best.walk is None:
        raise _no_ring(tables, used, "chains of nodes in this order meet in no round of crossings")
    crossings = best.walk.crossings
    return MergedRing(
        rate_gbps=_ring_rate(rates, order, crossings),
        bound_gbps=best.bound,
        order=order,
        crossings=crossings,
    )


def _in_order_closed(relations: Relation, order: tuple[int, ...]) -> Decision:
    powers: dict[tuple[int, int], Relation] = {}
    whole = np.eye(relations.shape[1], dtype=np.bool_)
    for number, run in itertools.groupby(order):
        key = (number, sum(1 for _ in run))
        if key not in powers:
            powers[key] = power(relations[number], key[1])
        whole = product(whole, powers[key])
    closed = np.flatnonzero(np.diagonal(whole))
    if not len(closed):
        return Decision()
    crossings = path([relations[number] for number in order], int(closed[0]), int(closed[0]))
    return Decision(walk=Walk(hosts=("",) * len(order), crossings=crossings))


# Any order, under switches.
def merge_with_switches(
    tables: Sequence[ChainTable],
    host_classes: Mapping[str, int],
    tree: SwitchTree,
    *,
    given_order: Sequence[str] | None = None,
) -> MergedRing:
    """Find the fastest ring over hosts, in any order that uplinks allow.

    The bound holds for all orders. The search is exact for equal hosts, and for a few classes if no
    uplink limits rings or each limits them to one pass; elsewhere good orders are searched, and
    `proven` tells whether they reach the bound. A `given_order` is kept: its uplinks are shared by
    all its passes, and its bound is for this order.

    >>> there = ChainTable(name="there", rates=np.array([[0.0, 5.0], [1.0, 0.0]]))
    >>> back = ChainTable(name="back", rates=there.rates.T)
    >>> leaves = [SwitchTree(name=x, hosts=(f"{x}0", f"{x}1"), uplink_gbps=12) for x in "ab"]
    >>> tree = SwitchTree(name="root", switches=tuple(leaves))
    >>> ring = merge_with_switches([there, back], {"a0": 0, "a1": 0, "b0": 1, "b1": 1}, tree)
    >>> ring.hosts, ring.rate_gbps, ring.is_proven
    (('a0', 'b0', 'a1', 'b1'), 5.0, True)

    Raises SearchError: there is no ring.
    """
    if given_order is not None:
        order = tuple(host_classes[name] for name in given_order)
        ring = merge_in_order(tables, order, limit=uplink_limit(tree, given_order))
        return msgspec.structs.replace(ring, hosts=tuple(given_order))
    rates = np.stack([table.rates for table in tables])
    best = _best_order(rates, host_classes, tree)
    if best.walk is None:
        why = "no order was found in which chains of all nodes meet"
        raise _no_ring(tables, sorted({host_classes[host] for host in tree.all_hosts}), why)
    hosts, crossings = best.walk.hosts, best.walk.crossings
    order = tuple(host_classes[host] for host in hosts)
    return MergedRing(
        rate_gbps=min(_ring_rate(rates, order, crossings), uplink_limit(tree, hosts)),
        bound_gbps=best.bound,
        order=order,
        crossings=crossings,
        hosts=hosts,
    )


def uplink_limit(tree: SwitchTree, order: Sequence[str]) -> float:
    """Return the ring rate that uplinks allow in this order, GB/s; all passes share an uplink."""
    return min((_uplink(switch) / n for switch, n in _exits(tree, order) if n), default=math.inf)


def passes(tree: SwitchTree, order: Sequence[str]) -> int:
    """Count the steps of the ring that leave a switch, over all switches."""
    return sum(steps for _, steps in _exits(tree, order))


def _exits(tree: SwitchTree, order: Sequence[str]) -> Iterator[tuple[SwitchTree, int]]:
    """Yield each switch with the number of steps of a ring in this order that leave the switch.

    >>> pairs = [SwitchTree(name="", hosts=pair) for pair in (("a", "b"), ("c", "d"))]
    >>> [n for _, n in _exits(SwitchTree(name="", switches=tuple(pairs)), "acbd")]
    [0, 2, 2]
    """
    following = dict(zip(order, (*order[1:], *order[:1]), strict=True))
    for switch in tree.all_switches:
        inside = set(switch.all_hosts)
        yield switch, sum(following[host] not in inside for host in inside)


def _uplink(switch: SwitchTree) -> float:
    return math.inf if switch.uplink_gbps is None else switch.uplink_gbps


def _best_order(rates: Rates, classes: Mapping[str, int], root: SwitchTree) -> Best:
    """Find the fastest ring over hosts of these classes; the bound is for all orders."""
    hosts = tuple(root.all_hosts)
    used = sorted({classes[host] for host in hosts})
    # A ring passes every uplink once at least, so no chain is of use beyond that.
    capped = np.minimum(rates[used], uplink_limit(root, hosts))
    candidates = np.union1d(worthwhile(capped), _shares(root, capped.max(axis=(1, 2)).min()))
    numbers = Counter(classes[host] for host in hosts)
    counts = [numbers[number] for number in used]

    def decide(asked: float) -> Decision:
        return _decide(list(rates >= asked), classes, root, asked)

    many = products(counts, rates.shape[1]) > MAX_PRODUCTS and len(candidates)
    if many and decide(candidates[-1]).walk is None:
        candidates = _possible(candidates, rates[used], counts)
    return highest(
        candidates,
        decide,
        lambda walk: min(
            _ring_rate(rates, [classes[host] for host in walk.hosts], walk.crossings),
            uplink_limit(root, walk.hosts),
        ),
        _one_crossing(capped, hosts),
    )


def _possible(candidates: Rates, rates: Rates, counts: Sequence[int]) -> Rates:
    """Return the candidates that potentials do not rule out in any order, whatever uplinks allow.

    As the search for the highest rate does, this goes from the top in growing strides.
    """
    low, high, stride = 0, len(candidates), 1
    while low < high:
        middle = max(high - stride, (low + high) // 2)
        if is_ruled_out(list(rates >= candidates[middle]), counts):
            high, stride = middle, 4 * stride
        else:
            low = middle + 1
    return candidates[:high]


def _shares(root: SwitchTree, ceiling: float) -> Rates:
    """Return each uplink's share of a ring with two passes, three passes, and so on."""
    everyone = len(tuple(root.all_hosts))
    found = [np.zeros(0)]
    for switch in root.all_switches:
        inside = len(tuple(switch.all_hosts))
        if switch.uplink_gbps is not None and 0 < inside < everyone:
            most = min(inside, everyone - inside)
            found.append(switch.uplink_gbps / np.arange(2, most + 1))
    shares: Rates = np.unique(np.concatenate(found))
    return shares[shares <= ceiling]


def _one_crossing(rates: Rates, hosts: Sequence[str]) -> Walk | None:
    """Return the best ring over a single crossing, for which any order of hosts is equal."""
    slowest = np.diagonal(rates, axis1=1, axis2=2).min(axis=0)
    best = int(np.argmax(slowest))
    if not slowest[best]:
        return None
    return Walk(hosts=tuple(hosts), crossings=(best,) * len(hosts))


def _decide(
    relations: Sequence[Relation], classes: Mapping[str, int], root: SwitchTree, asked: float
) -> Decision:
    """Look for a ring at the rate asked for, in any order that uplinks allow.

    1. The hosts of every group stay together, which passes every uplink once.
    2. Groups behind uplinks that carry the ring several times are parted: each part stays together.
    3. These groups come apart. Without a ring then, no order has one, because the hosts of all
       other groups have to stay together.
    """
    joiner = Joiner()
    together = _close(relations, classes, root, joiner)
    loose = _loosen(root, 2 * asked)
    if together.walk is not None or loose == root:
        return together
    parted = _close(relations, classes, _part(root, classes, asked), joiner)
    if parted.walk is not None and uplink_limit(root, parted.walk.hosts) >= asked:
        return parted
    separate = _close(relations, classes, loose, joiner)
    if separate.walk is None:
        return separate
    walk = _with_few_exits(separate.walk, classes, root, loose)
    fits = uplink_limit(root, walk.hosts) >= asked
    return Decision(walk=walk) if fits else Decision(certain=False)


def _loosen(root: SwitchTree, wide: float) -> SwitchTree:
    """Return the tree without switches behind uplinks of `wide` GB/s and more."""
    hosts, switches = list(root.hosts), []
    for switch in root.switches:
        inner = _loosen(switch, wide)
        if _uplink(switch) < wide:
            switches.append(inner)
        else:
            hosts += inner.hosts
            switches += inner.switches
    return msgspec.structs.replace(root, hosts=tuple(hosts), switches=tuple(switches))


def _part(root: SwitchTree, classes: Mapping[str, int], asked: float) -> SwitchTree:
    """Return the tree with one switch for each pass that a lowest switch's uplink carries."""
    switches: list[SwitchTree] = []
    for switch in root.switches:
        inner = _part(switch, classes, asked)
        count = int(min(_uplink(switch) / asked, MOST_PARTS, len(switch.hosts)))
        if switch.switches or count < 2:
            switches.append(inner)
        else:
            hosts = sorted(switch.hosts, key=classes.__getitem__)
            parts = (tuple(hosts[start::count]) for start in range(count))
            switches += [msgspec.structs.replace(switch, hosts=part) for part in parts]
    return msgspec.structs.replace(root, switches=tuple(switches))


def _with_few_exits(
    walk: Walk, classes: Mapping[str, int], root: SwitchTree, loose: SwitchTree
) -> Walk:
    """Exchange hosts of one class within groups of `loose`, so that few steps leave a switch."""
    held = {host: n for n, switch in enumerate(loose.all_switches) for host in switch.hosts}
    near = {host: n for n, switch in enumerate(root.all_switches) for host in switch.hosts}
    pools: dict[tuple[int, int], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for host in reversed(list(root.all_hosts)):
        pools[classes[host], held[host]][near[host]].append(host)
    hosts: list[str] = []
    for host in walk.hosts:
        pool = pools[classes[host], held[host]]
        last = near[hosts[-1]] if hosts else 0
        closest = min((abs(number - last), number) for number in pool)[1]
        hosts.append(pool[closest].pop())
        if not pool[closest]:
            del pool[closest]
    return Walk(hosts=tuple(hosts), crossings=walk.crossings)


def _close(
    relations: Sequence[Relation], classes: Mapping[str, int], root: SwitchTree, joiner: Joiner
) -> Decision:
    """Look for a ring in which groups stay together."""

    def pieces(switch: SwitchTree) -> list[Piece]:
        pieces_below = [host_piece(host, relations[classes[host]]) for host in switch.hosts]
        inner = [pieces(below) for below in switch.switches]
        return pieces_below + [joiner.join(below) for below in inner if below]

    parts = pieces(root)
    whole = joiner.join(parts)
    closed = np.flatnonzero(np.diagonal(whole.relation))
    if not len(closed):
        kinds = joiner.kinds(parts)
        certain = whole.exact or (
            all(part.exact for part in parts) and is_ruled_out(kinds.relations, kinds.counts)
        )
        return Decision(certain=certain)
    hosts, crossings = zip(*whole.steps(int(closed[0]), int(closed[0])), strict=True)
    return Decision(walk=Walk(hosts=hosts, crossings=crossings))


def _ring_rate(rates: Rates, order: Sequence[int], crossings: Sequence[int]) -> float:
    """Return the slowest chain's rate, GB/s: node n is entered by crossing n - 1, left by n."""
    leave = np.asarray(crossings)
    return float(rates[np.asarray(order), np.roll(leave, 1), leave].min())


def _no_ring(tables: Sequence[ChainTable], used: Sequence[int], why: str) -> SearchError:
    for number in used:
        if not tables[number].rates.any():
            return SearchError(f"no ring: node class {tables[number].name} has no chain at all")
    return SearchError(f"no ring: {why}")
