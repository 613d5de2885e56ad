"""Chain sets worth trying first: where NICs and GPUs are alike, one of them is often the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tccl_py.model.rings import Hop, HopSpace, Ring, ring
from tccl_py.search.chains import WORLD, NicPair, entry_nic, exit_nic


def seeded(space: HopSpace, nics: Sequence[int], count: int) -> Iterator[tuple[Ring, ...]]:
    """Sets of `count` chains, each entered at a GPU near its NIC and left near another's.

    Chain c is entered by NIC c and left by NIC c + shift: a shift of 0 keeps to one NIC, others
    spare a way back through the node. The GPUs between are visited in ascending order from the
    first one on, so that equal hops of the chains are spread.
    """
    for shift in sorted({0, 1, len(nics) // 2, len(nics) - 1} & set(range(len(nics)))):
        ends = [(nics[c % len(nics)], nics[(c + shift) % len(nics)]) for c in range(count)]
        chains = paired_seed(space, ends)
        if chains:
            yield chains


def paired_seed(space: HopSpace, pairs: Sequence[NicPair]) -> tuple[Ring, ...]:
    """A chain for each pair of entry and exit NIC, near both; none if there is no such set."""
    chains: list[Ring] = []
    for number, (entered, left) in enumerate(pairs):
        turn = [pair[0] for pair in pairs[:number]].count(entered)
        entries, exits = (
            _nearest(space, nic, into=into) for nic, into in ((entered, True), (left, False))
        )
        # The last GPUs of the chains differ as far as they can.
        taken = [one.hops[-1].source for one in chains]
        exits = sorted(exits, key=lambda hop: taken.count(hop.source))
        chain = _chain(space, entries, exits, turn=turn)
        if chain is None:
            return ()
        chains.append(chain)
    return tuple(chains)


def _nearest(space: HopSpace, nic: int, *, into: bool) -> list[Hop]:
    """The hops of a NIC, nearest first: those listed before other NICs' at their GPU."""
    found = []
    for gpu in space.gpus:
        if gpu != WORLD:
            choices = space.between(WORLD, gpu) if into else space.between(gpu, WORLD)
            for place, hop in enumerate(choices):
                if (entry_nic(hop) if into else exit_nic(hop)) == nic:
                    found.append((place, gpu, hop))
    return [hop for _, _, hop in sorted(found, key=lambda one: one[:2])]


def _chain(space: HopSpace, entries: list[Hop], exits: list[Hop], *, turn: int) -> Ring | None:
    """The chain from the nearest GPU of one NIC to the nearest other one of the other."""
    inner = [gpu for gpu in space.gpus if gpu != WORLD]
    if not entries or not exits:
        return None
    begin = entries[turn % len(entries)] if turn < len(entries) else entries[0]
    ends = [hop for hop in exits if hop.source != begin.target or len(inner) == 1]
    if not ends:
        return None
    end = ends[0]
    at = inner.index(begin.target)
    between = [gpu for gpu in inner[at + 1 :] + inner[:at] if gpu != end.source]
    stations = [begin.target, *between, *([end.source] if len(inner) > 1 else [])]
    hops = [begin]
    for source, target in pairwise(stations):
        choices = space.between(source, target)
        if not choices:
            return None
        hops.append(choices[0])
    return ring([*hops, end])
