"""Parts of a ring that stay together, at one rate: hosts, and the groups of them under a switch.

A piece knows by which crossings it can be entered and left if its own pieces come in any order.
For a group that is a dynamic program over how many pieces of each kind (with equal relations) have
been passed: exact, and small if there are few kinds. A larger group is dealt into parts that stay
together too, which may miss orders; then `at_most` says what no order can exceed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.merge.tables import Rates

# What is possible at one rate: boolean matrices over crossings, and the search for that rate.


Relation = npt.NDArray[np.bool_]
"""`relation[x, y]`: something can be entered by crossing x and left by crossing y."""


class Walk(msgspec.Struct, frozen=True, kw_only=True):
    """A closed walk over crossings: step n is one of `kinds[n]` and ends at `crossings[n]`."""

    kinds: tuple[int, ...]
    crossings: tuple[int, ...]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A ring as good as asked for; or None, and whether it is certain that there is none."""

    walk: Walk | None = None
    certain: bool = True


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """The walk at the highest rate found (None: at no rate), and the highest rate not ruled out."""

    walk: Walk | None
    bound: float


def product(one: Relation, other: Relation) -> Relation:
    """Through one, then the other; X^3, as a product of floats, which is the quickest."""
    both: Relation = (one.astype(np.float32) @ other.astype(np.float32)) > 0
    return both


def power(relation: Relation, exponent: int) -> Relation:
    """Through the relation `exponent` >= 1 times, by repeated squaring."""
    result: Relation | None = None
    while True:
        if exponent & 1:
            result = relation if result is None else product(result, relation)
        exponent >>= 1
        if not exponent:
            return relation if result is None else result
        relation = product(relation, relation)


def path(relations: Sequence[Relation], start: int, end: int) -> tuple[int, ...]:
    """Where each of the relations is left on a way through all, which must exist; N X^2."""
    reached = [np.arange(len(relations[0])) == start]
    for relation in relations[:-1]:
        reached.append(relation[reached[-1]].any(axis=0))
    exits = [end]
    for relation, before in zip(reversed(relations), reversed(reached), strict=True):
        exits.append(int(np.argmax(before & relation[:, exits[-1]])))
    return tuple(reversed(exits[:-1]))


def worthwhile(rates: Rates) -> Rates:
    """Rates of chains that could be a ring's, ascending: none is above every chain of a class."""
    entries = np.unique(rates)
    ceiling = rates.max(axis=(1, 2)).min()
    some: Rates = entries[(entries > 0) & (entries <= ceiling)]
    return some


def staying(rates: Rates) -> tuple[int, float]:
    """The best crossing for rings that use one only, and their rate (0: there is no such)."""
    slowest = np.diagonal(rates, axis1=1, axis2=2).min(axis=0)
    best = int(np.argmax(slowest))
    return best, float(slowest[best])


def highest(
    candidates: Rates,
    decide: Callable[[float], Decision],
    rate: Callable[[Walk], float],
    known: Walk | None = None,
) -> Best:
    """The best walk over all candidate rates (ascending), from the top down in growing strides.

    `decide` says of a rate whether there is a walk, `rate` how fast one is; `known` is a first one.
    At most about 2 log E questions for E candidates; few if the answer is near the top.
    """
    best = known
    low = -1 if known is None else _reached(candidates, rate(known))
    high = ruled_out = len(candidates)
    stride = 1
    while low + 1 < high:
        middle = max(high - stride, (low + high) // 2)
        decision = decide(float(candidates[middle]))
        if decision.walk is not None:
            best = decision.walk
            low = max(middle, _reached(candidates, rate(best)))
        else:
            high, stride = middle, 4 * stride
            ruled_out = middle if decision.certain else ruled_out
    return Best(walk=best, bound=float(candidates[ruled_out - 1]) if ruled_out else 0.0)


def possible(candidates: Rates, could: Callable[[float], bool]) -> Rates:
    """The candidates (ascending) up to the last one of which `could` holds, by halving."""
    low, high = -1, len(candidates)
    while low + 1 < high:
        middle = high - 1 if high == len(candidates) else (low + high) // 2
        low, high = (middle, high) if could(float(candidates[middle])) else (low, middle)
    return candidates[: low + 1]


def _reached(candidates: Rates, rate: float) -> int:
    return int(np.searchsorted(candidates, rate, side="right")) - 1


MAX_PRODUCTS = 4_096
"""Products of relations for one group; above that it is dealt into parts."""
PART = 6
"""Pieces in such a part: at most 2^6 sets of them."""

Step = tuple[int, int]
"""The number of a host, and the crossing by which the ring leaves it."""


class Piece(Protocol):
    """Something that the ring enters once and leaves once.

    `relation` are the pairs of crossings for which `steps` gives a way through all hosts of it;
    no others are possible than those of `at_most`.
    """

    relation: Relation
    at_most: Relation

    def steps(self, entry: int, leave: int) -> Iterator[Step]:
        """A way through every host, for a pair in `relation`."""


class Host:
    """A single node."""

    def __init__(self, number: int, relation: Relation) -> None:
        self.number = number
        self.relation = self.at_most = relation

    def steps(self, entry: int, leave: int) -> Iterator[Step]:  # noqa: ARG002
        """The node itself."""
        yield self.number, leave


class Orders:
    """All orders of so many pieces of each kind, by what they connect."""

    def __init__(self, relations: Sequence[Relation], counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self._relations = relations
        self._after: dict[tuple[int, ...], Relation] = {}
        self.relation = self._all() if len(relations) > 1 else power(relations[0], counts[0])

    def _all(self) -> Relation:
        none = np.eye(len(self._relations[0]), dtype=np.bool_)
        for passed in itertools.product(*(range(count + 1) for count in self.counts)):
            last = [kind for kind, count in enumerate(passed) if count]
            before = [self._after[_less(passed, kind)] for kind in last]
            # The union of products is one product of the matrices side by side.
            self._after[passed] = (
                product(np.hstack(before), np.vstack([self._relations[kind] for kind in last]))
                if last
                else none
            )
        return self._after[self.counts]

    def route(self, entry: int, leave: int) -> list[tuple[int, int, int]]:
        """Kind, way in and way out of every piece in turn, for a pair in `relation`."""
        if len(self._relations) == 1:
            exits = path([self._relations[0]] * self.counts[0], entry, leave)
            return [(0, *pair) for pair in zip((entry, *exits), exits, strict=False)]
        backwards, passed = [], self.counts
        while any(passed):
            kind, before = self._last(passed, entry, leave)
            backwards.append((kind, before, leave))
            passed, leave = _less(passed, kind), before
        return backwards[::-1]

    def _last(self, passed: tuple[int, ...], entry: int, leave: int) -> tuple[int, int]:
        """The kind of the last piece that was passed, and where it was entered."""
        for kind, count in enumerate(passed):
            if count:
                ways = self._after[_less(passed, kind)][entry] & self._relations[kind][:, leave]
                if ways.any():
                    return kind, int(np.argmax(ways))
        raise AssertionError("only pairs in the relation are asked for")


class Group:
    """Pieces in any order."""

    def __init__(
        self, pieces: Sequence[Piece], members: Sequence[list[int]], orders: Orders, most: Relation
    ) -> None:
        self._pieces = pieces
        self._members = members
        self._orders = orders
        self.relation = orders.relation
        self.at_most = most

    def steps(self, entry: int, leave: int) -> Iterator[Step]:
        """Through all pieces, in an order that has such a way."""
        pools = [iter(mine) for mine in self._members]
        for kind, before, after in self._orders.route(entry, leave):
            yield from self._pieces[next(pools[kind])].steps(before, after)


class Either:
    """The same hosts dealt into parts in several ways."""

    def __init__(self, ways: Sequence[Piece], at_most: Relation) -> None:
        self._ways = ways
        self.relation = np.logical_or.reduce([way.relation for way in ways])
        self.at_most = at_most

    def steps(self, entry: int, leave: int) -> Iterator[Step]:
        """Through the first that has such a way."""
        way = next(way for way in self._ways if way.relation[entry, leave])
        return way.steps(entry, leave)


class Joiner:
    """Makes groups of pieces; equal groups share what was computed."""

    def __init__(self) -> None:
        self._orders: dict[tuple[tuple[bytes, int], ...], Orders] = {}

    def together(self, pieces: Sequence[Piece]) -> Piece:
        """The pieces as one piece, in any order."""
        if len(pieces) == 1:
            return pieces[0]
        kinds = Kinds([piece.relation for piece in pieces])
        exact = all(piece.at_most is piece.relation for piece in pieces)
        if not kinds.few:
            ways = [self._in_parts(pieces, kinds, deal) for deal in (_in_blocks, _in_turn)]
            return Either(ways, self._at_most(pieces))
        orders = self._ordered(kinds)
        most = orders.relation if exact else self._at_most(pieces)
        return Group(pieces, kinds.members, orders, most)

    def _in_parts(self, pieces: Sequence[Piece], kinds: Kinds, deal: Deal) -> Piece:
        alike = list(itertools.chain.from_iterable(kinds.members))
        return self.together(
            [self.together([pieces[i] for i in part]) for part in deal(alike, PART)]
        )

    def _ordered(self, kinds: Kinds) -> Orders:
        if kinds.key not in self._orders:
            self._orders[kinds.key] = Orders(kinds.relations, kinds.counts)
        return self._orders[kinds.key]

    def _at_most(self, pieces: Sequence[Piece]) -> Relation:
        kinds = Kinds([piece.at_most for piece in pieces])
        return self._ordered(kinds).relation if kinds.few else relaxed(kinds)


def relaxed(kinds: Kinds) -> Relation:
    """Pairs between which there may be an order: ways of the right length by steps of any kind,
    and for every kind a way of any length that has such a step.
    """
    union = np.logical_or.reduce(kinds.relations)
    size = len(union)
    anywhere = power(union | np.eye(size, dtype=np.bool_), size)
    possible = power(union, sum(kinds.counts))
    for relation in kinds.relations:
        possible &= product(anywhere, product(relation, anywhere))
    return possible


class Kinds:
    """Pieces sorted by relation: `members[k]` are the positions of those with `relations[k]`."""

    def __init__(self, relations: Sequence[Relation]) -> None:
        found: dict[bytes, list[int]] = {}
        for position, relation in enumerate(relations):
            found.setdefault(np.packbits(relation).tobytes(), []).append(position)
        names = sorted(found)
        self.members = [found[name] for name in names]
        self.relations = [relations[mine[0]] for mine in self.members]
        self.counts = [len(mine) for mine in self.members]
        self.key = tuple(zip(names, self.counts, strict=True))

    @property
    def few(self) -> bool:
        """Whether all orders can be looked at."""
        states = math.prod(count + 1 for count in self.counts)
        return len(self.counts) == 1 or states * len(self.counts) <= MAX_PRODUCTS


Deal = Callable[[Sequence[int], int], list[Sequence[int]]]


def _in_blocks(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _in_turn(items: Sequence[int], size: int) -> list[Sequence[int]]:
    parts = -(-len(items) // size)
    return [items[start::parts] for start in range(parts)]


def _less(passed: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*passed[:kind], passed[kind] - 1, *passed[kind + 1 :])
