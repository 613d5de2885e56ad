"""Chains: a node with the network has one more vertex, the world, and a chain is a ring through it.

Bounds, symmetries and explanations of rings hold for chains too. A hop from the world to a GPU is
an entry, a hop from a GPU to the world an exit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from tccl_py.errors import SearchError
from tccl_py.model.rings import Hop, HopSpace
from tccl_py.model.symmetry import Symmetry, keeping
from tccl_py.model.transfer import Flow, receiving_nic, sending_nic

WORLD = -1
"""The vertex of all other nodes; lower than any GPU, so that rings begin at the world."""


def entry(gpu: int, flow: Flow) -> Hop:
    """Return the hop by which a chain enters at `gpu`."""
    return Hop(WORLD, gpu, flow)


def leave(gpu: int, flow: Flow) -> Hop:
    """Return the hop by which a chain leaves from `gpu`."""
    return Hop(gpu, WORLD, flow)


def entry_nic(hop: Hop) -> int:
    """Return the index of an entry's NIC; SearchError if the hop is no entry."""
    nic = receiving_nic(hop.flow)
    if nic is None:
        raise SearchError(f"{hop.flow} does not come from the network")
    return nic


def exit_nic(hop: Hop) -> int:
    """Return the index of an exit's NIC; SearchError if the hop is no exit."""
    nic = sending_nic(hop.flow)
    if nic is None:
        raise SearchError(f"{hop.flow} does not go to the network")
    return nic


def chain_space(inner: HopSpace, entries: Iterable[Hop], exits: Iterable[Hop]) -> HopSpace:
    """Return the hops inside a node (a node of one GPU has none), and to and from the world.

    `entries` are hops from WORLD, several to a GPU reached by several NICs; the first are tried
    first. `exits` are hops to WORLD.
    """
    hops = dict(inner.hops)
    for hop in (*entries, *exits):
        pair = hop.source, hop.target
        hops[pair] = (*hops.get(pair, ()), hop)
    return HopSpace(name=f"{inner.name}, with the network", gpus=(WORLD, *inner.gpus), hops=hops)


NicPair = tuple[int, int]
"""A chain's entry NIC and exit NIC."""


def nic_pair(hops: Sequence[Hop]) -> NicPair:
    """Return the entry NIC and the exit NIC of a chain; SearchError for a closed ring."""
    return entry_nic(hops[0]), exit_nic(hops[-1])


# Rules for the NICs of a set of chains.


class EvenUse(msgspec.Struct, frozen=True):
    """No NIC is used twice in one direction while another is idle; `same` ties exit to entry.

    >>> EvenUse(nics=(0, 1), chains=2).even([0, 0])
    False
    """

    nics: tuple[int, ...]
    chains: int
    same: bool = False

    def admits(self, rings: Sequence[Sequence[Hop]]) -> bool:
        """Return whether all NICs can still be used equally after these rings."""
        entries = [entry_nic(ring[0]) for ring in rings if ring]
        whole = [ring for ring in rings if ring and ring[-1].target == WORLD]
        exits = [exit_nic(ring[-1]) for ring in whole]
        if self.same and any(into != out for into, out in map(nic_pair, whole)):
            return False
        return self.even(entries) and self.even(exits)

    def even(self, used: Sequence[int]) -> bool:
        """Return whether chains that use these NICs can still become even."""
        least, more = divmod(self.chains, len(self.nics))
        counts = Counter(used)
        full = sum(count > least for count in counts.values())
        return full <= more and all(count <= least + 1 for count in counts.values())


class Pairing(msgspec.Struct, frozen=True):
    """Chains with exactly these pairs of entry and exit NIC, in any order."""

    pairs: tuple[NicPair, ...]

    def admits(self, rings: Sequence[Sequence[Hop]]) -> bool:
        """Return whether these rings can be among the chains."""
        left = Counter(self.pairs)
        begun: list[int] = []
        for ring in filter(None, rings):
            if ring[-1].target == WORLD:
                left[nic_pair(ring)] -= 1
            else:
                begun.append(entry_nic(ring[0]))
        if min(left.values()) < 0:
            return False
        open_ = Counter(pair[0] for pair in left.elements())
        return all(count <= open_[nic] for nic, count in Counter(begun).items())


def symmetry_keeping(symmetry: Symmetry, pairing: Pairing) -> Symmetry:
    """Return the symmetry elements that take the NIC pairs of a pairing to themselves."""
    column = {point: i for i, point in enumerate(symmetry.points)}
    names = {i: int(point[1:]) for point, i in column.items() if point[0] == "N"}
    ends = [
        symmetry.elements[:, [column[f"N{pair[end]}"] for pair in pairing.pairs]] for end in (0, 1)
    ]
    wanted = Counter(pairing.pairs)
    keep = [
        Counter((names[into], names[out]) for into, out in zip(*element, strict=True)) == wanted
        for element in zip(*(end.tolist() for end in ends), strict=True)
    ]
    return symmetry if all(keep) else keeping(symmetry, np.array(keep, dtype=bool))
