"""Rings of a communicator from the channels of its nodes.

Source: ncclTopoPreset and ncclTopoPostset (connect.cc), ncclBuildRings (rings.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Ranks = tuple[int, ...]
SWAPPING = 2
"""The crossnic of a graph whose pairs of channels are swapped on odd nodes."""


@dataclass(frozen=True, slots=True)
class NodeRings:
    """Rank orders of one node's channels; each has all ranks of the node once."""

    orders: tuple[Ranks, ...]
    crossnic: int = 0


def connect(nodes: Sequence[NodeRings], *, channels: int) -> list[Ranks]:
    """Return the first `channels` rings as rank orders that begin at rank 0.

    A ring visits the nodes in rank order. With crossed NICs odd nodes swap the channels of each
    pair, if all channels are in pairs.
    """
    rings = []
    for channel in range(channels):
        ring: list[int] = []
        for number, node in enumerate(nodes):
            swapped = node.crossnic == SWAPPING and number % 2 and channels % 2 == 0
            ring += node.orders[channel ^ 1 if swapped else channel]
        start = ring.index(0)
        rings.append((*ring[start:], *ring[:start]))
    return rings


def repeated(rings: Sequence[Ranks], count: int) -> tuple[Ranks, ...]:
    """Return the final `count` channels: the rings over and over."""
    return tuple(rings[number % len(rings)] for number in range(count))
