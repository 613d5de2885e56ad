"""The NICs by which rings leave a host and enter the next, and chains to start a search from.

A NIC map is a pair of NIC tuples, the exits of a host and the entries of the next, with an element
for each ring. On a network of rails NIC i reaches only NIC i, so both tuples are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice, pairwise

import msgspec

from tccl_py.model.rings import Hop, HopSpace, Ring, ring
from tccl_py.search.chains import WORLD, NicPair, Pairing, entry_nic, exit_nic

Nics = tuple[int, ...]
"""A NIC for each ring."""

MANY_TUPLES = 24
"""Up to so many even tuples are all tried; of more, those that the best chains lead to."""


class NicMap(msgspec.Struct, frozen=True, order=True):
    """From a host to the next: out by `exits`, in by `entries`."""

    exits: Nics
    entries: Nics


def pairing_of(entries: Nics, exits: Nics) -> Pairing:
    """Return the NIC pairs of a host's chains, whichever ring takes which.

    >>> pairing_of((1, 0), (0, 1)).pairs
    ((0, 1), (1, 0))
    """
    return Pairing(tuple(sorted(zip(entries, exits, strict=True))))


def rail_maps(
    pairings: Sequence[Sequence[NicPair]], nics: Sequence[Sequence[int]]
) -> tuple[NicMap, ...]:
    """Return a NIC map for each of `rail_tuples`."""
    return tuple(NicMap(nics, nics) for nics in rail_tuples(pairings, nics))


def free_maps(pairings: Sequence[Sequence[NicPair]]) -> tuple[NicMap, ...]:
    """Return the NIC maps from the best chains of each class to those of each class.

    Any NIC reaches any other, so every host can have its best chains.
    """
    exits = [tuple(pair[1] for pair in sorted(pairs)) for pairs in pairings]
    entries = [tuple(pair[0] for pair in sorted(pairs)) for pairs in pairings]
    return tuple(dict.fromkeys(NicMap(out, into) for out in exits for into in entries))


def rail_tuples(
    pairings: Sequence[Sequence[NicPair]], nics: Sequence[Sequence[int]]
) -> tuple[Nics, ...]:
    """Return the NIC tuples of rings on rails between hosts.

    `pairings` has the NIC pairs of the best chains of each class, `nics` the NICs of each. All even
    tuples are taken where there are no more than MANY_TUPLES of them; else those to which the best
    chains of any class lead, from the first class's on.

    >>> rail_tuples([[(0, 1), (1, 0)]], [(0, 1)])
    ((0, 1), (1, 0))
    """
    rings = len(pairings[0])
    even = {found for each in set(map(tuple, nics)) for found in _even_tuples(each, rings)}
    if len(even) <= MANY_TUPLES:
        return tuple(sorted(even))
    known = list(dict.fromkeys(tuple(sorted(pair[0] for pair in pairs)) for pairs in pairings))
    for entered in known:
        for pairs in pairings:
            for image in (_led(entered, pairs), _led(entered, [(b, a) for a, b in pairs])):
                if image is not None and image not in known and len(known) < MANY_TUPLES:
                    known.append(image)
    return tuple(known)


def _even_tuples(nics: Sequence[int], rings: int) -> Iterator[Nics]:
    """Tuples in which no NIC comes twice more often than another; at most MANY_TUPLES and one."""
    least, more = divmod(rings, len(nics))
    several = (
        permutation
        for extra in combinations(nics, more)
        for permutation in multiset_permutations([*nics] * least + [*extra])
    )
    return islice(several, MANY_TUPLES + 1)


def multiset_permutations(items: Sequence[int]) -> Iterator[Nics]:
    """Yield every different order of these items, lazily: there may be very many.

    >>> list(multiset_permutations([0, 1, 0]))
    [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
    """
    if not items:
        yield ()
    for first in sorted(set(items)):
        rest = list(items)
        rest.remove(first)
        for others in multiset_permutations(rest):
            yield (first, *others)


def _led(nics: Nics, pairs: Iterable[NicPair]) -> Nics | None:
    """The exits of chains with these NIC pairs for rings that enter by `nics`; None if none fit."""
    left = sorted(pairs)
    out = []
    for nic in nics:
        taken = next((pair for pair in left if pair[0] == nic), None)
        if taken is None:
            return None
        left.remove(taken)
        out.append(taken[1])
    return tuple(out)


# Chains to start a search from: where NICs and GPUs are alike, they are often the best.


def initial_chains(space: HopSpace, nics: Sequence[int], count: int) -> Iterator[tuple[Ring, ...]]:
    """Yield sets of `count` chains, each entered at a GPU near its NIC and left near another NIC's.

    Chain c is entered by NIC c and left by NIC c + shift: a shift of 0 keeps to one NIC, others
    spare the path back through the host. GPUs between are visited in ascending order from the first
    GPU on, so that equal hops of the chains are spread.
    """
    for shift in sorted({0, 1, len(nics) // 2, len(nics) - 1} & set(range(len(nics)))):
        ends = [(nics[c % len(nics)], nics[(c + shift) % len(nics)]) for c in range(count)]
        chains = paired_chain_set(space, ends)
        if chains:
            yield chains


def paired_chain_set(space: HopSpace, pairs: Sequence[NicPair]) -> tuple[Ring, ...]:
    """Return a chain for each pair of entry and exit NIC, near both; () without such a set."""
    chains: list[Ring] = []
    for number, (entered, left) in enumerate(pairs):
        turn = [pair[0] for pair in pairs[:number]].count(entered)
        entries = _nearest(space, entered, into=True)
        # The last GPUs of the chains differ as far as they can.
        taken = [chain.hops[-1].source for chain in chains]
        exits = _nearest(space, left, into=False)
        exits.sort(key=lambda hop: taken.count(hop.source))
        chain = _chain(space, entries, exits, turn=turn)
        if chain is None:
            return ()
        chains.append(chain)
    return tuple(chains)


def _nearest(space: HopSpace, nic: int, *, into: bool) -> list[Hop]:
    """Return the hops of a NIC, nearest first: by their place among the hops of their GPU."""
    found = []
    for gpu in space.gpus:
        if gpu != WORLD:
            choices = space.between(WORLD, gpu) if into else space.between(gpu, WORLD)
            for place, hop in enumerate(choices):
                if (entry_nic(hop) if into else exit_nic(hop)) == nic:
                    found.append((place, gpu, hop))
    return [hop for _, _, hop in sorted(found, key=lambda near: near[:2])]


def _chain(space: HopSpace, entries: list[Hop], exits: list[Hop], *, turn: int) -> Ring | None:
    """The chain from the nearest GPU of the entry NIC to the nearest other GPU of the exit NIC."""
    inner = [gpu for gpu in space.gpus if gpu != WORLD]
    if not entries or not exits:
        return None
    begin = entries[turn] if turn < len(entries) else entries[0]
    end = next((hop for hop in exits if hop.source != begin.target or len(inner) == 1), None)
    if end is None:
        return None
    at = inner.index(begin.target)
    between = [gpu for gpu in inner[at + 1 :] + inner[:at] if gpu != end.source]
    stations = [begin.target, *between, *([end.source] if len(inner) > 1 else [])]
    choices = [space.between(source, target) for source, target in pairwise(stations)]
    if not all(choices):
        return None
    return ring([begin, *(choice[0] for choice in choices), end])
