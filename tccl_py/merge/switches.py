"""Rings over hosts under a tree of switches.

Hosts of a switch stay together where that costs nothing: the ring then leaves and enters the switch
once, and its uplink carries the ring once in each direction. Otherwise they are apart, as far as
the rates of uplinks allow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from tccl_py.errors import InputError
from tccl_py.merge.contiguous import Cluster, best_order, exits, merge_in_order, uplink_share
from tccl_py.merge.tables import (
    ChainTable,
    MergedRing,
    check_class,
    check_size,
    no_ring,
    ring_rate,
    stacked,
)
from tccl_py.model.cluster import SwitchTree


def merge_with_switches(
    tables: Sequence[ChainTable],
    host_classes: Mapping[str, int],
    tree: SwitchTree,
    *,
    given_order: Sequence[str] | None = None,
) -> MergedRing:
    """Return the fastest ring over hosts, in any order that uplinks allow.

    The bound holds for all orders. It is reached (`proven`) as a rule where no uplink limits rings,
    or where each limits them to one pass. Elsewhere, and where a switch has many kinds of hosts and
    switches below it, good orders are searched. A `given_order` is kept as it is: its uplinks are
    shared by as many passes as it makes, and its bound is that of its crossings.

    >>> there = ChainTable(name="there", rates=np.array([[0.0, 5.0], [1.0, 0.0]]))
    >>> back = ChainTable(name="back", rates=there.rates.T)
    >>> leaves = [SwitchTree(name=x, hosts=(f"{x}0", f"{x}1"), uplink_gbps=12) for x in "ab"]
    >>> tree = SwitchTree(name="root", switches=tuple(leaves))
    >>> ring = merge_with_switches([there, back], {"a0": 0, "a1": 0, "b0": 1, "b1": 1}, tree)
    >>> ring.hosts, ring.rate_gbps, ring.proven
    (('a0', 'b0', 'a1', 'b1'), 5.0, True)

    Raises:
        InputError: tables, hosts, switches or an order that cannot be used.
        SearchError: there is no ring.
    """
    _check_hosts(tables, host_classes, tuple(tree.all_hosts))
    _check_uplinks(tree)
    rates = stacked(tables)
    if given_order is not None:
        _check_order(given_order, host_classes)
        rates = np.minimum(rates, uplink_limit(tree, given_order))
        capped = [ChainTable(name=t.name, rates=r) for t, r in zip(tables, rates, strict=True)]
        ring = merge_in_order(capped, [host_classes[name] for name in given_order])
        return msgspec.structs.replace(ring, hosts=tuple(given_order))
    names = tuple(tree.all_hosts)
    classes = [host_classes[name] for name in names]
    check_size(len(names), "switch tree")
    found = best_order(rates, classes, _cluster(tree, names))
    if found is None:
        why = "no order was found in which chains of all nodes meet"
        raise no_ring(tables, sorted(set(classes)), why)
    order = tuple(classes[host] for host in found.hosts)
    hosts = tuple(names[host] for host in found.hosts)
    return MergedRing(
        rate_gbps=min(ring_rate(rates, order, found.crossings), uplink_limit(tree, hosts)),
        bound_gbps=found.bound,
        order=order,
        crossings=found.crossings,
        hosts=hosts,
    )


def _cluster(tree: SwitchTree, names: Sequence[str]) -> Cluster:
    """Return the tree with hosts by their positions in `names`."""
    number = {name: position for position, name in enumerate(names)}

    def cluster(switch: SwitchTree) -> Cluster:
        return Cluster(
            hosts=tuple(number[name] for name in switch.hosts),
            groups=tuple(cluster(one) for one in switch.switches),
            uplink=math.inf if switch.uplink_gbps is None else switch.uplink_gbps,
        )

    return cluster(tree)


def uplink_limit(tree: SwitchTree, order: Sequence[str]) -> float:
    """What the uplinks leave of the ring, GB/s: each is shared by all passes of it."""
    return uplink_share(_cluster(tree, order), range(len(order)))


def least_passes_limit(tree: SwitchTree) -> float:
    """What the uplinks leave of a ring in any order, GB/s: it passes each once at least."""
    return uplink_limit(tree, tuple(tree.all_hosts))


def passes(tree: SwitchTree, order: Sequence[str]) -> int:
    """How often the ring leaves a switch for another one, over all switches."""
    groups = _cluster(tree, order).all_groups
    return sum(exits(tuple(group.all_hosts), range(len(order))) for group in groups)


def _check_hosts(
    tables: Sequence[ChainTable], host_classes: Mapping[str, int], hosts: Sequence[str]
) -> None:
    stacked(tables)
    check_size(len(hosts), "switch tree")
    seen: set[str] = set()
    for name in hosts:
        if name in seen:
            raise InputError("switch tree", f"host {name} is in it twice", "once is right")
        if name not in host_classes:
            right = "every host in the tree needs one"
            raise InputError("switch tree", f"host {name} has no node class", right)
        check_class(host_classes[name], tables, f"host {name}")
        seen.add(name)
    for name in host_classes:
        if name not in seen:
            right = "every host must be at one of its switches"
            raise InputError("switch tree", f"host {name} is not in it", right)


def _check_uplinks(tree: SwitchTree) -> None:
    for switch in tree.all_switches:
        if switch.uplink_gbps is not None and not 0 < switch.uplink_gbps < math.inf:
            right = "a rate in GB/s above 0, or none for no limit, is needed"
            what = f"the uplink rate is {switch.uplink_gbps}"
            raise InputError(f"switch {switch.name}", what, right)


def _check_order(order: Sequence[str], host_classes: Mapping[str, int]) -> None:
    for position, name in enumerate(order):
        if name not in host_classes:
            what = f"host {name} is unknown"
            raise InputError(
                f"given order, position {position}", what, "the hosts of the switch tree are needed"
            )
    if len(order) != len(host_classes) or len(set(order)) != len(order):
        what = f"it has {len(order)} hosts, {len(set(order))} of them different"
        right = f"each of the {len(host_classes)} hosts must be in it once"
        raise InputError("given order", what, right)
