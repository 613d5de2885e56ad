"""One choice of settings and of a number of rings, for all classes of nodes together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from tccl_py.cluster_plan.crossings import (
    Crossing,
    free_crossings,
    pairing_of,
    rail_crossings,
)
from tccl_py.cluster_plan.node import Node, Passage, passage_pairs
from tccl_py.errors import SearchError
from tccl_py.merge.rings import (
    ChainTable,
    MergedRing,
    least_passes_limit,
    merge_with_switches,
    passes,
    uplink_limit,
)
from tccl_py.model.cluster import Cluster, SwitchTree
from tccl_py.nccl.settings import Settings
from tccl_py.plan.settings_search import WORTH
from tccl_py.plan.tasks import Choice
from tccl_py.search.chains import Pairing


class Joint(msgspec.Struct, frozen=True, kw_only=True):
    """Rings over all hosts: their order, and the passage that each of them has.

    `crossings[n]` leads from host n to the next one. `rate_gbps` is what all rings carry together.
    No set of as many rings under these settings is above `bound_gbps`, in any order of hosts and
    over any NICs, if each NIC carries as many rings as any other or one more; None is not known.
    `order_proven`: no order of hosts is better for these chains; or one had to be kept.
    """

    settings: Settings
    rings: int
    hosts: tuple[str, ...]
    crossings: tuple[Crossing, ...]
    passages: tuple[Passage, ...]
    rate_gbps: float
    bound_gbps: float | None
    order_proven: bool


def joint(
    cluster: Cluster,
    nodes: Sequence[Node],
    settings: Settings,
    count: int,
    *,
    keep_order: bool,
) -> Joint | None:
    """The best rings over all hosts under one choice of settings; None if a class has none.

    Rings stay on rails (a NIC reaches the same NIC of the next node) unless that costs more than
    WORTH and the network lets any NIC reach any other.
    """
    choices = [node.best_under(settings, count) for node in nodes]
    found = [choice for choice in choices if choice is not None]
    if len(found) < len(nodes):
        return None
    pairs = [passage_pairs(choice.rings) for choice in found]
    ceiling = min(choice.rate_gbps for choice in found)
    bounds = [choice.bound_gbps for choice in found]
    limits = [bound for bound in bounds if bound is not None]
    bound = min(limits) if len(limits) == len(nodes) else None
    merged = _merged(
        cluster,
        nodes,
        settings,
        found,
        rail_crossings(pairs, [node.nics for node in nodes]),
        keep_order=keep_order,
    )
    if cluster.rails == "any" and (merged is None or merged[0].rate_gbps < ceiling * (1 - WORTH)):
        free = _merged(
            cluster, nodes, settings, found, free_crossings(pairs), keep_order=keep_order
        )
        if free is not None and (
            merged is None or free[0].rate_gbps > merged[0].rate_gbps * (1 + WORTH)
        ):
            merged = free
    if merged is None:
        return None
    ring, crossings = merged
    passages = _passages(cluster, nodes, settings, ring, crossings)
    carried = most = np.inf
    if cluster.switches is not None:
        carried = uplink_limit(cluster.switches, ring.hosts)
        most = least_passes_limit(cluster.switches)
    rate = min(ring.rate_gbps, carried, *(passage.rate_gbps for passage in passages))
    return Joint(
        settings=settings,
        rings=count,
        hosts=ring.hosts,
        crossings=crossings,
        passages=passages,
        rate_gbps=float(rate),
        # With noise, chains with other NICs may do better than the best of all were thought to.
        bound_gbps=None if bound is None else float(max(min(bound, most), rate)),
        order_proven=ring.proven,
    )


def _merged(
    cluster: Cluster,
    nodes: Sequence[Node],
    settings: Settings,
    choices: Sequence[Choice],
    crossings: Sequence[Crossing],
    *,
    keep_order: bool,
) -> tuple[MergedRing, tuple[Crossing, ...]] | None:
    """The best ring of nodes over these crossings, and the crossings it takes.

    The best chains of every class are tried alone first: often they close, and then no other
    chains between the same crossings need be searched.
    """
    pairings = [{Pairing(passage_pairs(choice.rings))} for choice in choices]
    ceiling = min(choice.rate_gbps for choice in choices)
    found = None
    for allowed in (pairings, [None] * len(nodes)):
        tables = [
            _table(node, settings, crossings, only)
            for node, only in zip(nodes, allowed, strict=True)
        ]
        try:
            ring = _ordered(cluster, tables, keep_order=keep_order)
        except SearchError:
            continue
        found = ring, tuple(crossings[number] for number in ring.crossings)
        if ring.rate_gbps >= ceiling * (1 - WORTH):
            break
    return found


def _table(
    node: Node,
    settings: Settings,
    crossings: Sequence[Crossing],
    only: Collection[Pairing] | None,
) -> ChainTable:
    """How much all rings together carry through a node, by crossing in and crossing out, GB/s.

    Where `only` is given, other pairings than those count as none.
    """
    rates = np.zeros((len(crossings), len(crossings)))
    for x, into in enumerate(crossings):
        for y, out in enumerate(crossings):
            pairing = pairing_of(into.entries, out.exits)
            if only is None or pairing in only:
                passage = node.passage(settings, pairing)
                rates[x, y] = passage.rate_gbps if passage is not None else 0.0
    return ChainTable(name=node.node_class.name, rates=rates)


def _ordered(cluster: Cluster, tables: Sequence[ChainTable], *, keep_order: bool) -> MergedRing:
    """The order of hosts: the one they are given in, unless another one is better.

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
    """Whether no order is better: a class's best chain is no faster, or all hosts are alike."""
    used = set(ring.order)
    return len(used) == 1 or ring.rate_gbps >= min(tables[one].rates.max() for one in used)


def _passages(
    cluster: Cluster,
    nodes: Sequence[Node],
    settings: Settings,
    ring: MergedRing,
    crossings: Sequence[Crossing],
) -> tuple[Passage, ...]:
    """How the rings go through each host, in ring order."""
    passages = []
    for number, host in enumerate(ring.hosts):
        into, out = crossings[number - 1], crossings[number]
        node = nodes[cluster.host_classes[host]]
        passage = node.passage(settings, pairing_of(into.entries, out.exits))
        assert passage is not None
        passages.append(_dealt(passage, into, out))
    return tuple(passages)


def _dealt(passage: Passage, into: Crossing, out: Crossing) -> Passage:
    """The passage with its chains in the order of the rings that take them."""
    left = list(passage.chains)
    chains = []
    for wanted in zip(into.entries, out.exits, strict=True):
        chain = next(one for one in left if (one.entry_nic, one.exit_nic) == wanted)
        left.remove(chain)
        chains.append(chain)
    return msgspec.structs.replace(passage, chains=tuple(chains))
