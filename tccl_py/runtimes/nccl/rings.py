"""From graphs to the final rings of a communicator, the way NCCL connects them.

Source: ncclTopoPreset and ncclTopoPostset (connect.cc), ncclBuildRings (rings.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SWAPPING = 2
"""The crossnic of a graph whose pairs of channels are swapped on odd nodes."""


class RingsBrokenError(Exception):
    """The rings do not close over all ranks; the text is NCCL's own."""


class RanksOutOfBoundsError(Exception):
    """A rank that is not in the communicator would be looked up in NCCL's tables."""


@dataclass(frozen=True, slots=True)
class NodeRings:
    """One node's channels as NCCL holds them in memory: global ranks, slot by slot.

    A channel's slots beyond what the file gave are 0; what a channel has too many of lies in the
    next channel's slots, unless that one is read later and overwrites them.
    """

    slots: tuple[int, ...]
    size: int
    crossnic: int = 0

    def channel(self, number: int) -> tuple[int, ...]:
        """The ranks of one channel, one for each of the node's GPUs."""
        part = self.slots[number * self.size : (number + 1) * self.size]
        return part + (0,) * (self.size - len(part))


def node_rings(channels: Sequence[Sequence[int]], *, size: int, crossnic: int = 0) -> NodeRings:
    """One node's channels (global ranks in order), on a node of `size` GPUs."""
    slots = [0] * (len(channels) * size)
    for number, ranks in enumerate(channels):
        start = number * size
        slots[start : start + len(ranks)] = ranks
    return NodeRings(tuple(slots), size, crossnic)


@dataclass(frozen=True, slots=True)
class _Place:
    """What one rank tells the others of one channel."""

    receives: int = 0
    sends: int = 0
    following: int = 0


def connect(nodes: Sequence[NodeRings], *, channels: int) -> list[tuple[int, ...]]:
    """Rank orders of the first `channels` rings, each once, beginning at rank 0.

    Raises:
        RingsBrokenError: a ring does not close, or a rank is missing from it.
        RanksOutOfBoundsError: a rank at the head of a channel does not exist.
    """
    ranks = sum(node.size for node in nodes)
    places = _places(nodes, channels)
    # A node is known by its channel 0's first GPU, and counts from when a rank first names it.
    numbers: dict[int, int] = {}
    node_of = [numbers.setdefault(place.receives, len(numbers)) for place in places[0]]
    firsts = list(numbers)
    if any(not 0 <= first < ranks for first in firsts):
        raise RanksOutOfBoundsError(f"a channel begins with a rank beyond {ranks - 1}")
    _exchange(nodes, places, node_of)
    following = _following(places, firsts, channels, ranks)
    return [_build(following, channel, ranks) for channel in range(channels)]


def _places(nodes: Sequence[NodeRings], channels: int) -> list[list[_Place]]:
    table = []
    for number in range(channels):
        row = []
        start = 0
        for node in nodes:
            order = node.channel(number)
            for rank in range(start, start + node.size):
                row.append(_place(order, rank))
            start += node.size
        table.append(row)
    return table


def _place(order: Sequence[int], rank: int) -> _Place:
    found = [at for at, one in enumerate(order) if one == rank]
    if not found:
        return _Place()
    last = found[-1]
    following = order[last + 1] if last + 1 < len(order) else -1
    return _Place(order[0], order[-1], following)


def _exchange(
    nodes: Sequence[NodeRings], places: list[list[_Place]], node_of: Sequence[int]
) -> None:
    """With crossed NICs, ranks of odd nodes swap the channels of each pair."""
    crossed = [node.crossnic == SWAPPING for node in nodes for _ in range(node.size)]
    if len(places) % 2:
        return
    for rank, odd in enumerate(node_of):
        if crossed[rank] and odd % 2:
            for channel in range(0, len(places), 2):
                one, other = places[channel][rank], places[channel + 1][rank]
                places[channel][rank], places[channel + 1][rank] = other, one


def _following(
    places: list[list[_Place]], firsts: Sequence[int], channels: int, ranks: int
) -> dict[int, int]:
    """Each channel's successor table in one run of memory, doubled as NCCL doubles it."""
    table: dict[int, int] = {}
    for channel in range(channels):
        for rank in range(ranks):
            table[channel * ranks + rank] = places[channel][rank].following
    for channel in range(channels):
        heads = [places[channel][first] for first in firsts]
        for one, other in zip(heads, [*heads[1:], heads[0]], strict=True):
            table[channel * ranks + one.sends] = other.receives
    size = channels * ranks
    for slot in range(size):
        table[size + slot] = table.get(slot, 0)
    return table


def _build(following: dict[int, int], channel: int, ranks: int) -> tuple[int, ...]:
    order, current = [], 0
    for _ in range(ranks):
        order.append(current)
        current = following.get(channel * ranks + current, 0)
    if current != 0:
        raise RingsBrokenError(f"ring {channel} does not loop back to start ({current} != 0)")
    missing = set(range(ranks)).difference(order)
    if missing:
        raise RingsBrokenError(f"ring {channel} does not contain rank {min(missing)}")
    return tuple(order)


def repeated(rings: Sequence[tuple[int, ...]], count: int) -> tuple[tuple[int, ...], ...]:
    """The final `count` channels: the rings over and over."""
    return tuple(rings[number % len(rings)] for number in range(count))
