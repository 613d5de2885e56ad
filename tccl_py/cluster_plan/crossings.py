"""Crossings: by which NICs the rings leave one node and enter the next, all rings at once.

A crossing is a pair of NIC tuples, the exits of one node and the entries of the next, an element
for each ring. On a network of rails NIC i reaches NIC i alone, so both are one tuple.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice

import msgspec

from tccl_py.search.chains import NicPair, Pairing

Nics = tuple[int, ...]
"""A NIC for each ring."""

MANY_TUPLES = 24
"""Up to so many even tuples are all tried; of more, those that the best chains lead to."""


class Crossing(msgspec.Struct, frozen=True, order=True):
    """From a node to the next: by `exits` out of the one, by `entries` into the other."""

    exits: Nics
    entries: Nics

    @property
    def on_rails(self) -> bool:
        """Whether every ring crosses from a NIC to the same NIC of the next node."""
        return self.exits == self.entries


def pairing_of(entries: Nics, exits: Nics) -> Pairing:
    """The NIC pairs of a node that is entered and left so; rings have no names here.

    >>> pairing_of((1, 0), (0, 1)).pairs
    ((0, 1), (1, 0))
    """
    return Pairing(tuple(sorted(zip(entries, exits, strict=True))))


def rail_tuples(
    pairings: Sequence[Sequence[NicPair]], nics: Sequence[Sequence[int]]
) -> tuple[Nics, ...]:
    """The tuples that rings on rails may have between nodes.

    `pairings` has the NIC pairs of the best chains of each class, `nics` the NICs it has. All even
    tuples are taken where there are no more than MANY_TUPLES of them; else those to which the best
    chains of any class lead, from the first one's on.

    >>> rail_tuples([[(0, 1), (1, 0)]], [(0, 1)])
    ((0, 1), (1, 0))
    """
    rings = len(pairings[0])
    even = {one for each in set(map(tuple, nics)) for one in _even_tuples(each, rings)}
    if len(even) <= MANY_TUPLES:
        return tuple(sorted(even))
    found = list(dict.fromkeys(tuple(sorted(pair[0] for pair in one)) for one in pairings))
    for one in found:
        for pairs in pairings:
            for image in (_led(one, pairs), _led(one, [(b, a) for a, b in pairs])):
                if image is not None and image not in found and len(found) < MANY_TUPLES:
                    found.append(image)
    return tuple(found)


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
    """Every order of these items once, equal ones being one; lazily, as there may be very many.

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
    """Where chains with these NIC pairs lead rings that come in by `nics`; None if they cannot."""
    left = sorted(pairs)
    out = []
    for nic in nics:
        taken = next((pair for pair in left if pair[0] == nic), None)
        if taken is None:
            return None
        left.remove(taken)
        out.append(taken[1])
    return tuple(out)


def rail_crossings(
    pairings: Sequence[Sequence[NicPair]], nics: Sequence[Sequence[int]]
) -> tuple[Crossing, ...]:
    """A crossing for each of `rail_tuples`."""
    return tuple(Crossing(one, one) for one in rail_tuples(pairings, nics))


def free_crossings(pairings: Sequence[Sequence[NicPair]]) -> tuple[Crossing, ...]:
    """Crossings that lead from the best chains of each class straight to those of each.

    Any NIC reaches any other, so every node can be gone through as is best for it.
    """
    exits = [tuple(pair[1] for pair in sorted(pairs)) for pairs in pairings]
    entries = [tuple(pair[0] for pair in sorted(pairs)) for pairs in pairings]
    return tuple(dict.fromkeys(Crossing(out, into) for out in exits for into in entries))
