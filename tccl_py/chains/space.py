"""A node with the network: the world outside is one more vertex, and a chain is a ring through it.

So everything that finds rings finds chains: bounds, symmetries, explanations of slow sets. The hop
from the world to a GPU is an entry, the one from a GPU to the world an exit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tccl_py.errors import SearchError
from tccl_py.transfers.hops import Hop, HopSpace, Ring, RingSet
from tccl_py.transfers.transfer import Flow, TransferSet, receiving_nic, sending_nic, transfer_set

WORLD = -1
"""The vertex that stands for all other nodes; lower than any GPU, so that rings begin there."""


class Chain(msgspec.Struct, frozen=True, order=True):
    """An open sequence of hops over a node's GPUs, with the entry before and the exit behind it.

    >>> from tccl_py.transfers.transfer import direct_write, entering, leaving
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
