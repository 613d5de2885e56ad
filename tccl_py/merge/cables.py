"""Rings over hosts that are joined by cables, without a switch: a ring exists only along them.

A cable joins a port of one host to a port of another, function by function: a port of an RDMA card
may have several, each a NIC of the host. All rings of a job pass the hosts in one order, as NCCL
joins nodes in the order of ranks, so the cables of a step are shared by its rings.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from tccl_py.errors import SearchError
from tccl_py.model.cluster import Cable, cabled_nics

Nics = tuple[int, ...]
"""A NIC for each ring."""
Rate = Callable[[str, Nics, Nics], float]
"""The bandwidth of all chains of a host, GB/s, by its NICs in and out; 0 is none."""

Way = tuple[float, tuple["NicMap", ...]]
"""The rate of the slowest host along crossings, and these."""

MAX_STEPS = 200_000
"""Hosts that a search may append to its orders: all orders of 16 hosts with three cables each."""
MAX_DEALINGS = 16
"""Ways to deal the functions of a step to rings that are all compared."""
_NAMED = 5
_NO_ORDER = "no order of these hosts has cables at all its steps that carry it"
_CUT_OFF = f"none in {MAX_STEPS} steps of the search; list hosts in an order along cables"


class NicMap(msgspec.Struct, frozen=True, order=True):
    """From a host to the next: out by `exits`, in by `entries`."""

    exits: Nics
    entries: Nics


class CabledRing(msgspec.Struct, frozen=True, kw_only=True):
    """Rings along cables."""

    hosts: tuple[str, ...]
    """In order, cyclic."""
    crossings: tuple[NicMap, ...]
    """From each host to the next."""
    rate_gbps: float
    """The rate of the slowest host's chains."""
    bound_gbps: float
    """No order of hosts has more, with the dealings of functions that were compared."""
    complete: bool = False
    """Whether these are all dealings."""

    @property
    def is_proven(self) -> bool:
        """Whether the ring reaches the bound."""
        return self.rate_gbps >= self.bound_gbps


def cabled_ring(
    hosts: Sequence[str],
    cables: Iterable[Cable],
    rings: int,
    rate: Rate,
    *,
    keep_order: bool = False,
    thorough: bool = False,
) -> CabledRing | None:
    """Find the order of hosts whose slowest host is fastest; exact up to MAX_STEPS.

    Functions are dealt to the rings in turn; a `thorough` search compares all dealings of a step
    that has no more than MAX_DEALINGS. None where chains of a host have no rate in any order.

    >>> ends = [("a", "b"), ("b", "c"), ("c", "a")]
    >>> cables = [Cable.between(x, (0, 2), y, (1, 3)) for x, y in ends]
    >>> ring = cabled_ring("abc", cables, 2, lambda host, entries, exits: 12.5)
    >>> ring.hosts, ring.crossings[0]
    (('a', 'b', 'c'), NicMap(exits=(0, 2), entries=(1, 3)))

    Raises SearchError: the cables close to no ring over these hosts.
    """
    ways = steps_between(cables)
    orders = [tuple(hosts)] if keep_order else None
    best = _Search(tuple(hosts), ways, rings, rate, thorough=thorough).run(orders)
    if best is None:
        search = _Search(tuple(hosts), ways, 1, lambda *_: 1.0)
        if search.run(orders) is None:
            why = _why_none(hosts, ways, keep_order=keep_order)
            raise SearchError(f"no ring: {_CUT_OFF if why == _NO_ORDER and search.cut else why}")
    return best


def steps_between(cables: Iterable[Cable]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Return the functions that lead from a host to another: a NIC out and a NIC in."""
    steps: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for host, out, (following, into) in cabled_nics(cables):
        steps[host, following].append((out, into))
    return dict(steps)


def _crossings(functions: Sequence[tuple[int, int]], rings: int, turns: int) -> list[NicMap]:
    """Return a step's functions dealt to rings in turn, begun by the first, or half way as well.

    Of 0 turns they are all dealings.
    """
    count, numbers = len(functions), range(rings)
    dealt = [[functions[(ring + t * count // 2) % count] for ring in numbers] for t in range(2)]
    every = itertools.product(functions, repeat=rings)
    each = [*dealt[:1], *every] if turns == 0 else dealt[:turns]
    maps = (NicMap(tuple(a for a, _ in one), tuple(b for _, b in one)) for one in each)
    return list(dict.fromkeys(maps))


class _Search:
    """A depth-first search over orders of hosts, from the first host on, cut at the best rate."""

    def __init__(
        self,
        hosts: tuple[str, ...],
        ways: Mapping[tuple[str, str], Sequence[tuple[int, int]]],
        rings: int,
        rate: Rate,
        *,
        thorough: bool = False,
    ) -> None:
        self._hosts, self._rate = hosts, rate
        every = {pair: len(ways[pair]) ** rings <= MAX_DEALINGS and thorough for pair in ways}
        self._complete = all(every[pair] or len(ways[pair]) == 1 for pair in ways)
        # Over two hosts the way back may take other functions of the same cables.
        turns = 2 if len(hosts) == 2 else 1
        self._crossings = {
            pair: _crossings(functions, rings, 0 if every[pair] else turns)
            for pair, functions in ways.items()
        }
        place = {host: number for number, host in enumerate(hosts)}
        self._near: dict[str, list[str]] = {
            # The given order first: where orders are equally fast, it stays.
            host: sorted(
                (other for other in hosts if (host, other) in ways),
                key=lambda other: (place[other] - place[host]) % len(hosts),
            )
            for host in hosts
        }
        self._steps = 0
        self._best: CabledRing | None = None

    def run(self, orders: Sequence[tuple[str, ...]] | None) -> CabledRing | None:
        """Return the fastest ring over these orders of hosts, over all without."""
        bound = self._bound()
        for order in self._orders((self._hosts[0],)) if orders is None else orders:
            self._rate_order(order)
            if self._best is not None and self._best.rate_gbps >= bound:
                break
        if self._best is not None and (orders is not None or not self.cut):
            bound = self._best.rate_gbps
        return self._best and msgspec.structs.replace(
            self._best, bound_gbps=bound, complete=self._complete
        )

    @property
    def cut(self) -> bool:
        """Whether orders were left out."""
        return self._steps > MAX_STEPS

    def _bound(self) -> float:
        """Return the rate that no order exceeds: each host by its best pair of steps."""
        return min(
            max(
                (
                    self._rate(host, into.entries, out.exits)
                    for before, after in self._steps_through(host)
                    for into in self._crossings[before, host]
                    for out in self._crossings[host, after]
                ),
                default=0.0,
            )
            for host in self._hosts
        )

    def _steps_through(self, host: str) -> Iterator[tuple[str, str]]:
        for before, after in itertools.product(self._near[host], repeat=2):
            if before != after or len(self._hosts) == 2:
                yield before, after

    def _orders(self, begun: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Yield all orders of hosts along cables that begin so."""
        self._steps += 1
        if self.cut or self._passed_by(begun):
            return
        if len(begun) == len(self._hosts):
            if begun[0] in self._near[begun[-1]]:
                yield begun
            return
        if len(begun) > 2 and self._too_slow(begun[-3:]):
            return
        for host in self._near[begun[-1]]:
            if host not in begun:
                yield from self._orders((*begun, host))

    def _passed_by(self, begun: tuple[str, ...]) -> bool:
        """Return whether a host beside the last but one has no two ways that are still free."""
        taken = set(begun[1:-1])
        beside = [host for host in self._near[begun[-2]] if host not in begun] if taken else []
        return any(len(set(self._near[host]) - taken) < 2 for host in beside)

    def _too_slow(self, three: tuple[str, ...]) -> bool:
        """Return whether the middle host of three is no faster than the best ring."""
        before, host, after = three
        return not any(
            self._rate(host, into.entries, out.exits) > self._best_gbps
            for into in self._crossings[before, host]
            for out in self._crossings[host, after]
        )

    @property
    def _best_gbps(self) -> float:
        return 0.0 if self._best is None else self._best.rate_gbps

    def _rate_order(self, order: tuple[str, ...]) -> None:
        """Keep the order if it is faster than the best."""
        steps = list(zip(order, (*order[1:], order[0]), strict=True))
        if not all(step in self._crossings for step in steps):
            return
        firsts = self._crossings[steps[0]]
        if self._complete:
            # Rings are exchangeable: of equal dealings of the first step one will do.
            kinds = {tuple(sorted(zip(n.exits, n.entries, strict=True))): n for n in firsts[::-1]}
            firsts = list(kinds.values())[::-1]
        for first in firsts:
            self._rate_from(order, first, [self._crossings[step] for step in steps[1:]])

    def _rate_from(
        self, order: tuple[str, ...], first: NicMap, further: Sequence[Sequence[NicMap]]
    ) -> None:
        """Keep the fastest crossings of an order that begin so, if they are faster than the best.

        The fastest way to each crossing of a step extends to the fastest ways of the next step.
        """
        fastest: dict[NicMap, Way] = {first: (math.inf, (first,))}
        for host, choices in zip(order[1:] + order[:1], (*further, [first]), strict=True):
            reached: dict[NicMap, Way] = {}
            for out, (into, (so_far, way)) in itertools.product(choices, fastest.items()):
                rate = min(so_far, self._rate(host, into.entries, out.exits))
                if rate > max(self._best_gbps, reached.get(out, (0.0,))[0]):
                    reached[out] = rate, (*way, out)
            fastest = reached
        for rate, way in fastest.values():
            self._best = CabledRing(
                hosts=order, crossings=way[:-1], rate_gbps=rate, bound_gbps=rate
            )


def _why_none(
    hosts: Sequence[str], ways: Mapping[tuple[str, str], object], *, keep_order: bool
) -> str:
    """Return why no ring passes all hosts."""
    if keep_order:
        steps = zip(hosts, (*hosts[1:], hosts[0]), strict=True)
        lacking = [f"{a} to {b}" for a, b in steps if (a, b) not in ways]
        if lacking:
            return f"no cable leads from {', '.join(lacking[:_NAMED])}; give hosts in another order"
    import networkx as nx  # noqa: PLC0415 (slow to import, and most cablings have a ring)

    graph = nx.Graph(pair for pair in ways if set(pair) <= set(hosts))
    graph.add_nodes_from(hosts)
    few = [host for host in hosts if len(hosts) > 2 and graph.degree(host) < 2]
    if few:
        names = ", ".join(few[:_NAMED])
        return f"a ring enters a host by one cable and leaves it by another; no two lead to {names}"
    if not nx.is_connected(graph):
        parts = [sorted(part)[0] for part in nx.connected_components(graph)]
        return f"no cables lead from {parts[0]} to {parts[1]}"
    if cuts := sorted(nx.articulation_points(graph)):
        return f"a ring would pass {', '.join(cuts[:_NAMED])} twice; join the hosts around it"
    return _NO_ORDER
