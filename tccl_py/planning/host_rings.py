"""Rings over all hosts under one choice of settings, and with one number of rings.

A NIC map is a pair of NIC tuples, the exits of a host and the entries of the next, with an element
for each ring. Over switches, NICs are numbered by their rails: on a network of rails a NIC reaches
only those on its own, so both tuples are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from math import inf

import msgspec
import numpy as np

from tccl_py.errors import SearchError
from tccl_py.merge.cables import CabledRing, NicMap, Nics, Rate, cabled_ring
from tccl_py.merge.rings import ChainTable, MergedRing, merge_with_switches, passes, uplink_limit
from tccl_py.model.cluster import Cluster, NodeClass, SwitchTree
from tccl_py.nccl.network import EvenUse, NicPair
from tccl_py.nccl.settings import Settings
from tccl_py.plan.chains import AS_GOOD as WORTH
from tccl_py.plan.chains import PlanChain, prefer
from tccl_py.plan.tables import ClassRates, KeptChains, NicPairs
from tccl_py.planning.study import Candidate, not_below

MANY_TUPLES = 24
"""Up to so many even tuples are all tried; of more, those that the best chains lead to."""


def pairs_of(entries: Nics, exits: Nics) -> NicPairs:
    """Return the NIC pairs of a host's chains, whichever ring takes which.

    >>> pairs_of((1, 0), (0, 1))
    ((0, 1), (1, 0))
    """
    return tuple(sorted(zip(entries, exits, strict=True)))


def free_maps(pairings: Sequence[Sequence[NicPair]]) -> tuple[NicMap, ...]:
    """Return the NIC maps from the best chains of each class to those of each class.

    Any NIC reaches any other, so every host can have its best chains.
    """
    exits = [tuple(pair[1] for pair in sorted(pairs)) for pairs in pairings]
    entries = [tuple(pair[0] for pair in sorted(pairs)) for pairs in pairings]
    return tuple(dict.fromkeys(NicMap(out, into) for out in exits for into in entries))


def rail_tuples(
    pairings: Sequence[Sequence[NicPair]], nics: Sequence[Sequence[int]]
) -> tuple[Nics, ...]:
    """Return the NIC tuples of rings on rails between hosts.

    `pairings` has the NIC pairs of the best chains of each class, `nics` the NICs of each. All even
    tuples are taken where there are no more than MANY_TUPLES of them; else those to which the best
    chains of any class lead, from the first class's on.

    >>> rail_tuples([[(0, 1), (1, 0)]], [(0, 1)])
    ((0, 1), (1, 0))
    """
    rings = len(pairings[0])
    rules = [EvenUse(nics=used, chains=rings) for used in sorted(set(map(tuple, nics)))]
    even = {nics for rule in rules for nics in islice(_even_tuples(rule), MANY_TUPLES + 1)}
    if len(even) <= MANY_TUPLES:
        return tuple(sorted(even))
    tuples = list(dict.fromkeys(tuple(sorted(pair[0] for pair in pairs)) for pairs in pairings))
    for entered in tuples:
        for pairs in pairings:
            for image in (
                _exits_of(entered, pairs),
                _exits_of(entered, [(b, a) for a, b in pairs]),
            ):
                if image is not None and image not in tuples and len(tuples) < MANY_TUPLES:
                    tuples.append(image)
    return tuple(tuples)


def _even_tuples(rule: EvenUse, begun: Nics = ()) -> Iterator[Nics]:
    """Yield the tuples in which no NIC comes twice more often than another."""
    if len(begun) == rule.chains:
        yield begun
        return
    for nic in rule.nics:
        if rule.even((*begun, nic)):
            yield from _even_tuples(rule, (*begun, nic))


def _exits_of(nics: Nics, pairs: Iterable[NicPair]) -> Nics | None:
    """The exits of chains with these NIC pairs for rings that enter by `nics`; None if none fit."""
    remaining = sorted(pairs)
    out = []
    for nic in nics:
        match = next((pair for pair in remaining if pair[0] == nic), None)
        if match is None:
            return None
        remaining.remove(match)
        out.append(match[1])
    return tuple(out)


Joined = tuple[MergedRing | CabledRing, tuple[NicMap, ...]]
"""A ring of hosts, and its NIC maps."""


class RingSearch(msgspec.Struct, frozen=True, kw_only=True):
    """The search for rings over all hosts, with a node for each class, under some settings."""

    cluster: Cluster
    nodes: Sequence[ClassRates]
    settings: Settings
    keep_order: bool = False
    thorough: bool = False

    def rings(self, count: int) -> Candidate | None:
        """Return the best rings over all hosts; None if a class has none.

        Rings stay on rails (a NIC reaches the same NIC of the next host) unless leaving them gains
        more than WORTH and the network lets any NIC reach any other. Cables decide where hosts are
        joined by these; a `thorough` search compares all dealings of their functions to rings.
        """
        choices = [node.best_under(self.settings, count) for node in self.nodes]
        best = [choice for choice in choices if choice is not None]
        if len(best) < len(choices):
            return None
        pairs = [
            tuple(sorted((node.rail(a), node.rail(b)) for a, b in choice.pairs))
            for node, choice in zip(self._classes, best, strict=True)
        ]
        ceiling = min(choice.rate_gbps for choice in best) * (1 - WORTH)
        along = self._along_cables(count) if self.cluster.cables else self._free(pairs, ceiling)
        if along is None:
            return None
        ring, nic_maps = along
        bounds = [choice.bound_gbps for choice in best if choice.bound_gbps is not None]
        bound = min(bounds) if len(bounds) == len(best) else None
        assumptions = [text for choice in best for text in choice.bound_assumptions]
        if self.cluster.cables:
            bound, assumptions = self._bound_along_cables(count), []
        if bound is not None and (tree := self.cluster.switches) is not None:
            bound = min(bound, uplink_limit(tree, tuple(tree.all_hosts)))
        order = [self.cluster.host_classes[host] for host in ring.hosts]
        ways = list(zip(order, (nic_maps[-1], *nic_maps[:-1]), nic_maps, strict=True))
        rated = {way: self._between(*way) for way in dict.fromkeys(ways)}
        chains = {way: self._in_order(*way, row) for way, row in rated.items() if row is not None}
        return Candidate(
            settings=self.settings,
            hosts={host: chains[way] for host, way in zip(ring.hosts, ways, strict=True)},
            rate_gbps=float(ring.rate_gbps),
            error=max(row.error for row in rated.values() if row is not None),
            assumed=any(row.assumed for row in rated.values() if row is not None),
            # With noise, chains with other NICs may do better than the best of all were thought to.
            bound_gbps=not_below(bound, float(ring.rate_gbps)),
            bound_assumptions=() if bound is None else tuple(dict.fromkeys(assumptions)),
            order_bound_gbps=None if ring.is_proven else float(ring.bound_gbps),
        )

    def _free(self, best: Sequence[NicPairs], ceiling: float) -> Joined | None:
        """Return the best ring of hosts over a network of switches, and its NIC maps."""
        rails = rail_tuples(
            best, [tuple(sorted(map(node.node_class.rail, node.nics))) for node in self.nodes]
        )
        merged = self._merge(best, ceiling, [NicMap(nics, nics) for nics in rails])
        if self.cluster.rails == "any" and (merged is None or merged[0].rate_gbps < ceiling):
            free = self._merge(best, ceiling, free_maps(best))
            worth = 0.0 if merged is None else merged[0].rate_gbps * (1 + WORTH)
            merged = free if free is not None and free[0].rate_gbps > worth else merged
        return merged

    def _along_cables(self, count: int) -> Joined | None:
        """Return the best ring of hosts along cables, and its NIC maps."""

        def rate(host: str, entries: Nics, exits: Nics) -> float:
            chains = self._over_cables(host, entries, exits)
            return 0.0 if chains is None else chains.rate_gbps

        ring = self._ring_by(rate, count, keep_order=self.keep_order)
        if ring is not None and ring.hosts != self.cluster.names:
            with suppress(SearchError):
                given = self._ring_by(rate, count, keep_order=True)
                if given and not prefer(ring.rate_gbps, given.rate_gbps, less=False):
                    ring = msgspec.structs.replace(given, bound_gbps=given.rate_gbps)
        return None if ring is None else (ring, ring.crossings)

    def _bound_along_cables(self, count: int) -> float | None:
        """Return the rate that no order of hosts and no dealing exceeds; None if it is unknown."""

        def most(host: str, entries: Nics, exits: Nics) -> float:
            chains = self._over_cables(host, entries, exits)
            if chains is None or chains.bound_gbps is None or chains.bound_assumptions:
                return inf
            return max(chains.bound_gbps, chains.rate_gbps)

        ring = self._ring_by(most, count) if self.thorough else None
        return ring.bound_gbps if ring and ring.complete and ring.bound_gbps < inf else None

    def _ring_by(self, rate: Rate, count: int, *, keep_order: bool = False) -> CabledRing | None:
        cluster, thorough = self.cluster, self.thorough
        how = {"keep_order": keep_order, "thorough": thorough}
        return cabled_ring(cluster.names, cluster.cables, count, rate, **how)

    def _over_cables(self, host: str, entries: Nics, exits: Nics) -> KeptChains | None:
        node = self.nodes[self.cluster.host_classes[host]]
        pairs = pairs_of(entries, exits)
        return node.between(self.settings, pairs, only_few=self.thorough)

    def _between(self, node_class: int, into: NicMap, out: NicMap) -> KeptChains | None:
        node = self.nodes[node_class]
        # A table has NCCL's own chains too, which may use NICs that are left out of rings.
        if not {*into.entries, *out.exits} <= set(map(node.node_class.rail, node.nics)):
            return None
        return node.between(self.settings, pairs_of(*self._nics(node_class, into, out)))

    def _nics(self, node_class: int, into: NicMap, out: NicMap) -> tuple[Nics, Nics]:
        """Return the NICs of a class by which rings enter and leave over these rails."""
        nic_on = self._classes[node_class].nic_on
        return tuple(map(nic_on, into.entries)), tuple(map(nic_on, out.exits))

    @property
    def _classes(self) -> list[NodeClass]:
        return [node.node_class for node in self.nodes]

    def _in_order(
        self, node_class: int, into: NicMap, out: NicMap, answer: KeptChains
    ) -> tuple[PlanChain, ...]:
        """Return the chains in the order of the rings that take them."""
        remaining = list(self.nodes[node_class].plan_chains(answer))
        chains = []
        for nics in zip(*self._nics(node_class, into, out), strict=True):
            chains.append(next(c for c in remaining if (c.entry_nic, c.exit_nic) == nics))
            remaining.remove(chains[-1])
        return tuple(chains)

    def _merge(
        self, best: Sequence[NicPairs], enough: float, nic_maps: Sequence[NicMap]
    ) -> Joined | None:
        """Return the best ring of hosts over these NIC maps, and its maps.

        The `best` chains of every class are tried alone first: if they close to a ring fast
        `enough`, no other chains between the same NICs need be searched.
        """
        merged = None
        for only in (best, [None] * len(best)):
            tables = [self._table(number, nic_maps, pairs) for number, pairs in enumerate(only)]
            with suppress(SearchError):
                ring = self._order_hosts(tables)
                merged = ring, tuple(nic_maps[number] for number in ring.crossings)
                if ring.rate_gbps >= enough:
                    break
        return merged

    def _table(
        self, node_class: int, nic_maps: Sequence[NicMap], only: NicPairs | None
    ) -> ChainTable:
        """Return the bandwidth of all rings together on a host, by NIC map in and out, GB/s.

        Where `only` is given, chains between other NICs have none.
        """
        rates = np.zeros((len(nic_maps), len(nic_maps)))
        for x, into in enumerate(nic_maps):
            for y, out in enumerate(nic_maps):
                if only in (None, pairs_of(into.entries, out.exits)):
                    answer = self._between(node_class, into, out)
                    rates[x, y] = 0.0 if answer is None else answer.rate_gbps
        return ChainTable(name=self.nodes[node_class].node_class.name, rates=rates)

    def _order_hosts(self, tables: Sequence[ChainTable]) -> MergedRing:
        """Return the ring in the given order of hosts, unless another order is better.

        Raises SearchError: there is no ring.
        """
        names, classes = self.cluster.names, self.cluster.host_classes
        tree = self.cluster.switches or SwitchTree(name="", hosts=names)
        crossed = passes(tree, names)
        try:
            fixed = merge_with_switches(tables, classes, tree, given_order=names)
        except SearchError:
            if self.keep_order:
                raise
            fixed = None
        if fixed is not None and (self.keep_order or (not crossed and _is_best(fixed, tables))):
            return fixed
        free = merge_with_switches(tables, classes, tree)
        if fixed is None or fixed.rate_gbps < free.rate_gbps or crossed > passes(tree, free.hosts):
            return free
        return msgspec.structs.replace(fixed, bound_gbps=free.bound_gbps)


def _is_best(ring: MergedRing, tables: Sequence[ChainTable]) -> bool:
    """Return whether no order is better: equal hosts, or a class whose best chain is no faster."""
    used = set(ring.order)
    return len(used) == 1 or ring.rate_gbps >= min(tables[number].rates.max() for number in used)
