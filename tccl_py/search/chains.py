"""A node with the network: the world outside is one more vertex, and a chain is a ring through it.

So everything that finds rings finds chains: bounds, symmetries, explanations of slow sets. The hop
from the world to a GPU is an entry, the one from a GPU to the world an exit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import Hop, HopSpace, Ring, RingSet
from tccl_py.model.symmetry import Symmetry, keeping
from tccl_py.model.transfer import Flow, TransferSet, receiving_nic, sending_nic, transfer_set
from tccl_py.search.problem import Budget, Reporter, SearchProblem, SearchResult
from tccl_py.search.strategies import find_rings

WORLD = -1
"""The vertex that stands for all other nodes; lower than any GPU, so that rings begin there."""
PAIRING_BUDGET = Budget(sets=200, idle_sets=40)


class Chain(msgspec.Struct, frozen=True, order=True):
    """An open sequence of hops over a node's GPUs, with the entry before and the exit behind it.

    >>> from tccl_py.model.transfer import direct_write, entering, leaving
    >>> between = Hop(0, 1, direct_write(0, 1))
    >>> one = Chain(entry(0, entering(2, 0)), (between,), leave(1, leaving(1, 3)))
    >>> one.gpus, one.entry_nic, one.exit_nic
    ((0, 1), 2, 3)
    """

    entry: Hop
    hops: tuple[Hop, ...]
    exit: Hop

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPU indices in the order of the chain."""
        return (self.entry.target, *(hop.target for hop in self.hops))

    @property
    def entry_nic(self) -> int:
        """Index of the NIC by which the chain is entered."""
        return entry_nic(self.entry)

    @property
    def exit_nic(self) -> int:
        """Index of the NIC by which it is left."""
        return exit_nic(self.exit)

    @property
    def all_hops(self) -> tuple[Hop, ...]:
        """Entry, hops and exit, in order."""
        return (self.entry, *self.hops, self.exit)

    @property
    def flows(self) -> TransferSet:
        """Everything that runs at the same time on this node for this chain."""
        return flows_of([self])


def entry(gpu: int, flow: Flow) -> Hop:
    """The hop by which a chain comes to `gpu`."""
    return Hop(WORLD, gpu, flow)


def leave(gpu: int, flow: Flow) -> Hop:
    """The hop by which a chain leaves from `gpu`."""
    return Hop(gpu, WORLD, flow)


def entry_nic(hop: Hop) -> int:
    """Index of an entry's NIC.

    Raises:
        SearchError: the hop is no entry.
    """
    nic = receiving_nic(hop.flow)
    if nic is None:
        raise SearchError(f"{hop.flow} does not come from the network")
    return nic


def exit_nic(hop: Hop) -> int:
    """Index of an exit's NIC.

    Raises:
        SearchError: the hop is no exit.
    """
    nic = sending_nic(hop.flow)
    if nic is None:
        raise SearchError(f"{hop.flow} does not go to the network")
    return nic


def chain_space(inner: HopSpace, entries: Iterable[Hop], exits: Iterable[Hop]) -> HopSpace:
    """The hops inside a node and those between it and the world.

    Args:
        inner: hops between the node's GPUs; a node of one GPU has none.
        entries: hops from WORLD, several to a GPU if it can be reached by several NICs; those that
            should be tried first come first.
        exits: hops to WORLD.
    """
    hops: dict[tuple[int, int], list[Hop]] = {
        pair: list(choices) for pair, choices in inner.hops.items()
    }
    for hop in (*entries, *exits):
        hops.setdefault((hop.source, hop.target), []).append(hop)
    return HopSpace(
        name=f"{inner.name}, with the network",
        gpus=(WORLD, *inner.gpus),
        hops={pair: tuple(choices) for pair, choices in hops.items()},
    )


def chain_of(ring: Ring) -> Chain:
    """The chain that a ring through the world is.

    Raises:
        SearchError: it does not lead through the world.
    """
    first, *hops, last = ring.hops
    if first.source != WORLD or last.target != WORLD:
        raise SearchError(f"the ring over {ring.gpus} does not lead through the network")
    return Chain(first, tuple(hops), last)


def ring_of(chain: Chain) -> Ring:
    """The ring through the world that a chain is."""
    return Ring(chain.all_hops)


def chains_of(rings: RingSet) -> tuple[Chain, ...]:
    """The chains of a set of rings through the world, in its order."""
    return tuple(chain_of(one) for one in rings.rings)


def flows_of(chains: Sequence[Chain]) -> TransferSet:
    """Every flow of all these chains, all at the same time."""
    return transfer_set(hop.flow for chain in chains for hop in chain.all_hops)


# Which NICs the chains of a set may use together.


NicPair = tuple[int, int]
"""A chain's NICs: the one it is entered by, and the one it is left by."""


class EvenUse(msgspec.Struct, frozen=True):
    """No NIC is used twice in one direction while another is idle; `same` ties exit to entry.

    >>> EvenUse(nics=(0, 1), chains=2).even([0, 0])
    False
    """

    nics: tuple[int, ...]
    chains: int
    same: bool = False

    def admits(self, rings: Sequence[Sequence[Hop]]) -> bool:
        """Whether the rings so far leave it open that all NICs are used alike."""
        entries = [entry_nic(one[0]) for one in rings if one]
        whole = [one for one in rings if one and one[-1].target == WORLD]
        exits = [exit_nic(one[-1]) for one in whole]
        if self.same and any(entry_nic(one[0]) != exit_nic(one[-1]) for one in whole):
            return False
        return self.even(entries) and self.even(exits)

    def even(self, used: Sequence[int]) -> bool:
        """Whether chains that use these NICs, one after the other, can still become even."""
        least, more = divmod(self.chains, len(self.nics))
        counts = Counter(used)
        full = sum(count > least for count in counts.values())
        return full <= more and all(count <= least + 1 for count in counts.values())


class Pairing(msgspec.Struct, frozen=True):
    """Chains whose NICs are just these pairs of entry and exit, in any order."""

    pairs: tuple[NicPair, ...]

    def admits(self, rings: Sequence[Sequence[Hop]]) -> bool:
        """Whether the rings so far can be among the chains."""
        left = Counter(self.pairs)
        begun: list[int] = []
        for one in rings:
            if one and one[-1].target == WORLD:
                left[entry_nic(one[0]), exit_nic(one[-1])] -= 1
            elif one:
                begun.append(entry_nic(one[0]))
        if min(left.values()) < 0:
            return False
        open_ = Counter(pair[0] for pair in left.elements())
        return all(count <= open_[nic] for nic, count in Counter(begun).items())


def symmetry_keeping(symmetry: Symmetry, pairing: Pairing) -> Symmetry:
    """The part of a symmetry that takes the pairs of a pairing to themselves."""
    column = {point: i for i, point in enumerate(symmetry.points)}
    wanted = Counter(pairing.pairs)
    first, second = (
        symmetry.elements[:, [column[f"N{pair[end]}"] for pair in pairing.pairs]] for end in (0, 1)
    )
    names = {i: int(point[1:]) for point, i in column.items() if point[0] == "N"}
    keep = np.array(
        [
            Counter((names[one], names[other]) for one, other in zip(a, b, strict=True)) == wanted
            for a, b in zip(first.tolist(), second.tolist(), strict=True)
        ],
        dtype=bool,
    )
    return symmetry if keep.all() else keeping(symmetry, keep)


def paired_chains(
    space: HopSpace,
    pairing: Pairing,
    *,
    source: BandwidthSource,
    symmetry: Symmetry,
    cuts: Sequence[frozenset[int]] = (),
    known: Sequence[Sequence[Ring]] = (),
    budget: Budget = PAIRING_BUDGET,
    reporter: Reporter | None = None,
) -> SearchResult | None:
    """Find the best chains over exactly these pairs of NICs, together; None if there are none.

    Raises:
        KeyboardInterrupt: the search was interrupted.
    """
    count = len(pairing.pairs)
    problem = SearchProblem(
        spaces={count: space},
        source=source,
        symmetry=symmetry_keeping(symmetry, pairing),
        known=tuple(tuple(rings) for rings in known),
        rules={count: pairing},
        cuts=tuple(cuts),
        budget=budget,
    )
    try:
        result = find_rings(problem, reporter=reporter)
    except (SearchError, MeasurementError):
        return None
    if result.cancelled:
        raise KeyboardInterrupt
    return result
