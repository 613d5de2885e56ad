"""Rings over hosts under a tree of switches: hosts of a switch stay together in the ring.

So the ring leaves and enters every switch once, which is the least there can be, and its uplink
carries the ring once in each direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from tccl_py.errors import InputError
from tccl_py.merge.contiguous import Cluster, best_order, ring_in
from tccl_py.merge.in_order import merge_in_order
from tccl_py.merge.tables import (
    ChainTable,
    MergedRing,
    check_class,
    check_size,
    no_ring,
    stacked,
)


class SwitchTree(msgspec.Struct, frozen=True, kw_only=True):
    """A switch, the hosts at it, and the switches below it.

    `uplink_gbps` is the rate of the link above it in each direction, GB/s; None is "no limit".
    """

    name: str
    hosts: tuple[str, ...] = ()
    switches: tuple[SwitchTree, ...] = ()
    uplink_gbps: float | None = None

    @property
    def all_hosts(self) -> Iterator[str]:
        """The hosts at it and below it."""
        yield from self.hosts
        for switch in self.switches:
            yield from switch.all_hosts

    @property
    def all_switches(self) -> Iterator[SwitchTree]:
        """It and all below it."""
        yield self
        for switch in self.switches:
            yield from switch.all_switches


def merge_with_switches(
    tables: Sequence[ChainTable],
    host_classes: Mapping[str, int],
    tree: SwitchTree,
    *,
    given_order: Sequence[str] | None = None,
) -> MergedRing:
    """The fastest ring in which the hosts of every switch stay together.

    Exact where every switch has few kinds of hosts and switches below it (up to some ten kinds,
    any number of equal ones); for others good orders are searched and the bound is what no order
    can exceed. A `given_order` is kept as it is: its uplinks are shared by as many passes as it
    makes, and its bound is that of its crossings.

    Raises:
        InputError: tables, hosts, switches or an order that cannot be used.
        SearchError: there is no ring.
    """
    _check_hosts(tables, host_classes, tuple(tree.all_hosts))
    _check_uplinks(tree)
    if given_order is not None:
        _check_order(given_order, host_classes)
    names = tuple(tree.all_hosts if given_order is None else given_order)
    classes = [host_classes[name] for name in names]
    # No chain is of use beyond what the uplinks carry.
    rates = np.minimum(stacked(tables), uplink_limit(tree, names))
    capped = [ChainTable(name=t.name, rates=r) for t, r in zip(tables, rates, strict=True)]
    if given_order is not None:
        return msgspec.structs.replace(merge_in_order(capped, classes), hosts=names)
    number = {name: position for position, name in enumerate(names)}
    found = best_order(rates, classes, _cluster(tree, number))
    if found is None:
        why = "no order was found in which hosts of a switch stay together and chains of all meet"
        raise no_ring(tables, sorted(set(classes)), why)
    hosts = tuple(names[host] for host in found.hosts)
    return msgspec.structs.replace(ring_in(found, rates, classes), hosts=hosts)


def _cluster(tree: SwitchTree, number: Mapping[str, int]) -> Cluster:
    return Cluster(
        hosts=tuple(number[name] for name in tree.hosts),
        groups=tuple(_cluster(switch, number) for switch in tree.switches),
    )


def uplink_limit(tree: SwitchTree, order: Sequence[str]) -> float:
    """What the uplinks leave of the ring, GB/s: each is shared by all passes of it."""
    carried = math.inf
    for switch in tree.all_switches:
        if switch.uplink_gbps is not None:
            times = _passes(switch, order)
            carried = min(carried, switch.uplink_gbps / times if times else math.inf)
    return carried


def passes(tree: SwitchTree, order: Sequence[str]) -> int:
    """How often the ring leaves a switch for another one, over all switches."""
    return sum(_passes(switch, order) for switch in tree.all_switches)


def _passes(switch: SwitchTree, order: Sequence[str]) -> int:
    below = set(switch.all_hosts)
    inside = np.array([name in below for name in order])
    return int((inside & ~np.roll(inside, -1)).sum())


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
