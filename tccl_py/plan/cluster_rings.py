"""Rings over all hosts under one choice of settings, and with one number of rings.

A NIC map is a pair of NIC tuples, the exits of a host and the entries of the next, with an element
for each ring. On a network of rails NIC i reaches only NIC i, so both tuples are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, islice

import msgspec
import numpy as np

from tccl_py.errors import SearchError
from tccl_py.merge.rings import ChainTable, MergedRing, merge_with_switches, passes, uplink_limit
from tccl_py.model.cluster import Cluster, SwitchTree
from tccl_py.nccl.network import NicPair, Pairing
from tccl_py.nccl.settings import Settings
from tccl_py.plan.parts import AS_GOOD as WORTH
from tccl_py.plan.tables import ChainSet, HostChains, HostTable

Nics = tuple[int, ...]
"""A NIC for each ring."""

MANY_TUPLES = 24
"""Up to so many even tuples are all tried; of more, those that the best chains lead to."""


class NicMap(msgspec.Struct, frozen=True, order=True):
    """From a host to the next: out by `exits`, in by `entries`."""

    exits: Nics
    entries: Nics


def pairing_of(entries: Nics, exits: Nics) -> Pairing:
    """Return the NIC pairs of a host's chains, whichever ring takes which.

    >>> pairing_of((1, 0), (0, 1)).pairs
    ((0, 1), (1, 0))
    """
    return Pairing(tuple(sorted(zip(entries, exits, strict=True))))


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
    even = {found for each in set(map(tuple, nics)) for found in _even_tuples(each, rings)}
    if len(even) <= MANY_TUPLES:
        return tuple(sorted(even))
    known = list(dict.fromkeys(tuple(sorted(pair[0] for pair in pairs)) for pairs in pairings))
    for entered in known:
        for pairs in pairings:
            for image in (_led(entered, pairs), _led(entered, [(b, a) for a, b in pairs])):
                if image is not None and image not in known and len(known) < MANY_TUPLES:
                    known.append(image)
    return tuple(known)


def _even_tuples(nics: Sequence[int], rings: int) -> Iterator[Nics]:
    """Tuples in which no NIC comes twice more often than another; at most MANY_TUPLES and one."""
    least, more = divmod(rings, len(nics))
    several = (
        permutation
        for extra in combinations(nics, more)
        for permutation in multiset_permutations([*nics] * least + [*extra])
    )
    return islice(several, MANY_TUPLES + 1)


def multiset_permutations(items: Sequence[int]) -> Iterator[Nics]:
    """Yield every different order of these items, lazily: there may be very many.

    >>> list(multiset_permutations([0, 1, 0]))
    [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
    """
    if not items:
        yield ()
    for first in sorted(set(items)):
        rest = list(items)
        rest.remove(first)
        for others in multiset_permutations(rest):
            yield (first, *others)


def _led(nics: Nics, pairs: Iterable[NicPair]) -> Nics | None:
    """The exits of chains with these NIC pairs for rings that enter by `nics`; None if none fit."""
    left = sorted(pairs)
    out = []
    for nic in nics:
        taken = next((pair for pair in left if pair[0] == nic), None)
        if taken is None:
            return None
        left.remove(taken)
        out.append(taken[1])
    return tuple(out)


class ClusterRings(msgspec.Struct, frozen=True, kw_only=True):
    """Rings over all hosts: the order of hosts, and the chains of each.

    `nic_maps[n]` leads from host n to the next. `rate_gbps` is the bandwidth of all rings together.
    No set of as many rings under these settings exceeds `bound_gbps`, in any order of hosts and
    over any NICs, if NICs carry equal numbers of rings or one more; None is not known.
    No order of hosts exceeds `order_bound_gbps` with these chains; None: no order is better, or the
    order was given.
    """

    settings: Settings
    rings: int
    hosts: tuple[str, ...]
    nic_maps: tuple[NicMap, ...]
    chains: tuple[HostChains, ...]
    rate_gbps: float
    bound_gbps: float | None
    order_bound_gbps: float | None


def cluster_rings(
    cluster: Cluster,
    nodes: Sequence[HostTable],
    settings: Settings,
    count: int,
    *,
    keep_order: bool,
) -> ClusterRings | None:
    """Return the best rings over all hosts under these settings; None if a class has none.

    Rings stay on rails (a NIC reaches the same NIC of the next host) unless leaving them gains more
    than WORTH and the network lets any NIC reach any other.
    """
    choices = [node.best_under(settings, count) for node in nodes]
    found = [choice for choice in choices if choice is not None]
    if len(found) < len(nodes):
        return None
    pairs = [choice.pairs for choice in found]
    ceiling = min(choice.rate_gbps for choice in found)
    limits = [choice.bound_gbps for choice in found if choice.bound_gbps is not None]
    bound = min(limits) if len(limits) == len(nodes) else None
    rails = [NicMap(nics, nics) for nics in rail_tuples(pairs, [node.nics for node in nodes])]
    merged = _merged(cluster, nodes, settings, found, rails, keep_order=keep_order)
    if cluster.rails == "any" and (merged is None or merged[0].rate_gbps < ceiling * (1 - WORTH)):
        free = _merged(cluster, nodes, settings, found, free_maps(pairs), keep_order=keep_order)
        if free is not None and (
            merged is None or free[0].rate_gbps > merged[0].rate_gbps * (1 + WORTH)
        ):
            merged = free
    if merged is None:
        return None
    ring, nic_maps = merged
    chains = _chains_of_hosts(cluster, nodes, settings, ring, nic_maps)
    carried = most = np.inf
    if cluster.switches is not None:
        carried = uplink_limit(cluster.switches, ring.hosts)
        most = uplink_limit(cluster.switches, tuple(cluster.switches.all_hosts))
    rate = min(ring.rate_gbps, carried, *(one.rate_gbps for one in chains))
    return ClusterRings(
        settings=settings,
        rings=count,
        hosts=ring.hosts,
        nic_maps=nic_maps,
        chains=chains,
        rate_gbps=float(rate),
        # With noise, chains with other NICs may do better than the best of all were thought to.
        bound_gbps=None if bound is None else float(max(min(bound, most), rate)),
        order_bound_gbps=None if ring.proven else float(ring.bound_gbps),
    )


def _merged(
    cluster: Cluster,
    nodes: Sequence[HostTable],
    settings: Settings,
    choices: Sequence[ChainSet],
    nic_maps: Sequence[NicMap],
    *,
    keep_order: bool,
) -> tuple[MergedRing, tuple[NicMap, ...]] | None:
    """Return the best ring of hosts over these NIC maps, and its maps.

    The best chains of every class are tried alone first: if they close, no other chains between the
    same NICs need be searched.
    """
    pairings = [{Pairing(choice.pairs)} for choice in choices]
    ceiling = min(choice.rate_gbps for choice in choices)
    found = None
    for allowed in (pairings, [None] * len(nodes)):
        tables = [
            _table(node, settings, nic_maps, only)
            for node, only in zip(nodes, allowed, strict=True)
        ]
        try:
            ring = _ordered(cluster, tables, keep_order=keep_order)
        except SearchError:
            continue
        found = ring, tuple(nic_maps[number] for number in ring.crossings)
        if ring.rate_gbps >= ceiling * (1 - WORTH):
            break
    return found


def _table(
    node: HostTable,
    settings: Settings,
    nic_maps: Sequence[NicMap],
    only: Collection[Pairing] | None,
) -> ChainTable:
    """The bandwidth of all rings together on a host, by NIC map in and out, GB/s.

    Where `only` is given, other pairings have none.
    """
    rates = np.zeros((len(nic_maps), len(nic_maps)))
    for x, into in enumerate(nic_maps):
        for y, out in enumerate(nic_maps):
            pairing = pairing_of(into.entries, out.exits)
            if only is None or pairing in only:
                host_chains = node.chains_with(settings, pairing)
                rates[x, y] = host_chains.rate_gbps if host_chains is not None else 0.0
    return ChainTable(name=node.node_class.name, rates=rates)


def _ordered(cluster: Cluster, tables: Sequence[ChainTable], *, keep_order: bool) -> MergedRing:
    """The order of hosts: the given order, unless another is better.

    Raises:
        SearchError: there is no ring.
    """
    tree = cluster.switches or SwitchTree(name="", hosts=cluster.names)
    crossed = passes(tree, cluster.names)
    try:
        given = merge_with_switches(tables, cluster.host_classes, tree, given_order=cluster.names)
    except SearchError:
        if keep_order:
            raise
        given = None
    if given is not None and (keep_order or (not crossed and _cannot_improve(given, tables))):
        return given
    free = merge_with_switches(tables, cluster.host_classes, tree)
    if given is None or given.rate_gbps < free.rate_gbps or crossed > passes(tree, free.hosts):
        return free
    return msgspec.structs.replace(given, bound_gbps=free.bound_gbps)


def _cannot_improve(ring: MergedRing, tables: Sequence[ChainTable]) -> bool:
    """Return whether no order is better: equal hosts, or a class whose best chain is no faster."""
    used = set(ring.order)
    return len(used) == 1 or ring.rate_gbps >= min(tables[one].rates.max() for one in used)


def _chains_of_hosts(
    cluster: Cluster,
    nodes: Sequence[HostTable],
    settings: Settings,
    ring: MergedRing,
    nic_maps: Sequence[NicMap],
) -> tuple[HostChains, ...]:
    """The chains of each host, in ring order."""

    @cache
    def between(node_class: int, into: NicMap, out: NicMap) -> HostChains:
        pairing = pairing_of(into.entries, out.exits)
        found = nodes[node_class].chains_with(settings, pairing)
        assert found is not None
        # In the order of the rings that take them.
        left, chains = list(found.chains), []
        for wanted in zip(into.entries, out.exits, strict=True):
            chain = next(one for one in left if (one.entry_nic, one.exit_nic) == wanted)
            left.remove(chain)
            chains.append(chain)
        return msgspec.structs.replace(found, chains=tuple(chains))

    return tuple(
        between(cluster.host_classes[host], nic_maps[number - 1], nic_maps[number])
        for number, host in enumerate(ring.hosts)
    )
