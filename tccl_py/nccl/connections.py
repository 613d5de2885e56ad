"""Connections between hosts: the NICs by which NCCL's rings and trees join them.

Source: ncclTopoPreset, ncclTopoPostset, connectRings and connectTrees (connect.cc), ncclGetDtree
(trees.cc) and ncclTopoGetNetDev (search.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from tccl_py.nccl.graph_search import DefaultChain, default_trees
from tccl_py.nccl.versions import SWAPPING
from tccl_py.nccl.view import NcclView


class HostChannels(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's channels on a host."""

    rings: tuple[DefaultChain, ...]
    trees: tuple[tuple[int, ...], ...]
    """The NICs of the first and the second GPU of each channel's tree."""
    cross_nic: int = 0
    spreads: bool = False
    """Whether the second GPU of a tree talks to other hosts too."""


class Connection(NamedTuple):
    """NICs between which data goes: of a host, by its number in rank order, and of another."""

    host: int
    nic: int
    peer: int
    far: int


def default_channels(
    topo: NcclView, chains: Sequence[DefaultChain], cross_nic: int
) -> HostChannels:
    """Return NCCL's own channels on a host of several, with the chains that its search found."""
    trees = default_trees(topo)
    spreads = trees.pattern == "balanced tree"
    return HostChannels(rings=tuple(chains), trees=trees.nics, cross_nic=cross_nic, spreads=spreads)


def swaps_pairs(cross_nic: int, number: int, channels: int) -> bool:
    """Return whether a host by its number swaps the rings of channels 0 and 1, 2 and 3, and so on.

    So rings that change NICs on a host stay on their rails between hosts, if hosts are even in
    number.
    """
    return cross_nic == SWAPPING and number % 2 == 1 and channels % 2 == 0


def ring_connections(hosts: Sequence[HostChannels]) -> list[list[Connection]]:
    """Return the connections of rings from each host to the next, one a channel."""
    count = min(len(host.rings) for host in hosts)
    ends = [
        [_nics(host, n, channel, count) for channel in range(count)] for n, host in enumerate(hosts)
    ]
    return [
        [
            Connection(n, leave, (n + 1) % len(hosts), entry)
            for (_, leave), (entry, _) in zip(here, ends[(n + 1) % len(hosts)], strict=True)
        ]
        for n, here in enumerate(ends)
    ]


def _nics(host: HostChannels, number: int, channel: int, count: int) -> tuple[int, int]:
    """Return the NICs in and out of a channel's ring on a host.

    A swapped ring keeps the channel's NICs: the first GPU of the channel's own ring has the entry,
    any other GPU the exit.
    """
    own = host.rings[channel]
    gpus = host.rings[channel ^ swaps_pairs(host.cross_nic, number, count)].gpus
    entry, leave = (own.entry if gpu == own.gpus[0] else own.exit for gpu in (gpus[0], gpus[-1]))
    return entry, leave


def tree_connections(hosts: Sequence[HostChannels]) -> Iterator[Connection]:
    """Yield the connections of trees, up and down."""
    count = min(len(host.trees) for host in hosts)
    for child, parent, first_child in _tree_edges(len(hosts)):
        below, above = hosts[child], hosts[parent]
        by_second = above.spreads and first_child
        for near, far in zip(below.trees[:count], above.trees[:count], strict=True):
            nic = far[-1] if by_second else far[0]
            yield Connection(child, near[0], parent, nic)
            yield Connection(parent, nic, child, near[0])


def _tree_edges(count: int) -> Iterator[tuple[int, int, bool]]:
    """Yield each host, its parent, and whether it is the first child, of both binary trees.

    >>> sorted(_tree_edges(3))
    [(0, 1, False), (1, 2, True), (2, 0, False), (2, 0, True)]
    """
    for number in range(1, count):
        bit = number & -number
        parent = (number ^ bit) | bit << 1
        parent = parent if parent < count else number ^ bit
        yield number, parent, number < parent
        # The second tree is shifted by a host, or of an even number of hosts mirrored.
        ends = [(n + 1) % count if count % 2 else count - 1 - n for n in (number, parent)]
        yield ends[0], ends[1], number < parent
