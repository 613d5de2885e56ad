"""Closed walks over crossings at one rate: boolean relations, orders of hosts, and the rate search.

A relation says by which crossings a piece (a host, or hosts that stay together) is entered and
left. Hosts with equal relations are of one kind. All orders of a group are a dynamic program over
the number of hosts passed of each kind: exact, while the kinds are few. A larger group is dealt
into smaller groups that stay together, which may miss orders.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

Rates = npt.NDArray[np.float64]
Relation = npt.NDArray[np.bool_]
"""`relation[x, y]`: a piece can be entered by crossing x and left by crossing y."""
Step = tuple[str, int]
"""A host, and the crossing by which the ring leaves the host."""
Steps = Callable[[int, int], Iterator[Step]]

MAX_PRODUCTS = 4_096
"""Matrix products of an exact dynamic program over 64 crossings; more over fewer crossings."""
PART_PRODUCTS = 256
"""Matrix products for one part of a group that is dealt into parts."""
PART = 5
"""Pieces in a part whose pieces all differ."""


class Walk(msgspec.Struct, frozen=True, kw_only=True):
    """A closed walk: the ring leaves `hosts[n]` by `crossings[n]` and enters the next host.

    In a given order of hosts their names are empty.
    """

    hosts: tuple[str, ...]
    crossings: tuple[int, ...]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A ring at the asked rate; or None, and whether all orders were ruled out (`certain`)."""

    walk: Walk | None = None
    certain: bool = True


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """The walk at the highest rate found (None: at no rate), and the highest rate not ruled out."""

    walk: Walk | None
    bound: float


def product(first: Relation, second: Relation) -> Relation:
    """Compose two relations, X^3, by the fastest product: floats."""
    composed: Relation = (first.astype(np.float32) @ second.astype(np.float32)) > 0
    return composed


def power(relation: Relation, exponent: int) -> Relation:
    """Compose a relation `exponent` >= 1 times with itself, by repeated squaring."""
    if exponent == 1:
        return relation
    squared = power(product(relation, relation), exponent // 2)
    return product(squared, relation) if exponent % 2 else squared


def path(relations: Sequence[Relation], start: int, end: int) -> tuple[int, ...]:
    """Return the exit crossing of each relation on a path through all (which exists); N X^2."""
    reached = [np.arange(len(relations[0])) == start]
    for relation in relations[:-1]:
        reached.append(relation[reached[-1]].any(axis=0))
    exits = [end]
    for relation, before in zip(reversed(relations), reversed(reached), strict=True):
        exits.append(int(np.argmax(before & relation[:, exits[-1]])))
    return tuple(reversed(exits[:-1]))


# The search for the highest rate.
def worthwhile(rates: Rates) -> Rates:
    """Return candidate rates of a ring, ascending: none above the best chain of any class."""
    entries = np.unique(rates)
    ceiling = rates.max(axis=(1, 2)).min()
    candidates: Rates = entries[(entries > 0) & (entries <= ceiling)]
    return candidates


def highest(
    candidates: Rates,
    decide: Callable[[float], Decision],
    rate: Callable[[Walk], float],
    known: Walk | None = None,
) -> Best:
    """Find the best walk over candidate rates (ascending), from the top in growing strides.

    `decide` looks for a walk at a rate, `rate` rates a walk, `known` is a first walk. At most
    about 2 log E decisions for E candidates; few if the answer is near the top.
    """
    best = known
    low = -1 if known is None else _reach(candidates, rate(known))
    high = ruled_out = len(candidates)
    stride = 1
    while low + 1 < high:
        middle = max(high - stride, (low + high) // 2)
        decision = decide(float(candidates[middle]))
        if decision.walk is not None:
            best = decision.walk
            low = max(middle, _reach(candidates, rate(best)))
        else:
            high, stride = middle, 4 * stride
            ruled_out = middle if decision.certain else ruled_out
    return Best(walk=best, bound=float(candidates[ruled_out - 1]) if ruled_out else 0.0)


def _reach(candidates: Rates, rate: float) -> int:
    return int(np.searchsorted(candidates, rate, side="right")) - 1


# Pieces: hosts that stay together.
@dataclass(frozen=True)
class Piece:
    """Hosts between one entry and one exit of the ring."""

    relation: Relation
    steps: Steps
    """Yields a path through every host for an entry and an exit that are related."""
    exact: bool = True
    """Whether the relation holds for all orders of the hosts."""


def host_piece(host: str, relation: Relation) -> Piece:
    """Return a single host as a piece."""

    def steps(entry: int, leave: int) -> Iterator[Step]:  # noqa: ARG001
        yield host, leave

    return Piece(relation, steps)


class Joiner:
    """Joins pieces in any order; groups of the same kinds share one dynamic program."""

    def __init__(self) -> None:
        self._orders: dict[tuple[bytes, ...], Orders] = {}
        self._packed: dict[int, tuple[Relation, bytes]] = {}

    def join(self, pieces: Sequence[Piece]) -> Piece:
        """Return all pieces as one piece."""
        if len(pieces) == 1:
            return pieces[0]
        kinds = self.kinds(pieces)
        if kinds.products() <= MAX_PRODUCTS:
            return self._in_all_orders(pieces, kinds)
        joined = self.join([self.join([pieces[i] for i in part]) for part in kinds.deal()])
        return replace(joined, exact=False)

    def kinds(self, pieces: Sequence[Piece]) -> Kinds:
        """Return the pieces by equal relations."""
        relations = [piece.relation for piece in pieces]
        return Kinds(relations, [self._bits(relation) for relation in relations])

    def _bits(self, relation: Relation) -> bytes:
        """Return a relation as bytes; many pieces share one relation object."""
        if id(relation) not in self._packed:
            self._packed[id(relation)] = relation, np.packbits(relation).tobytes()
        return self._packed[id(relation)][1]

    def _in_all_orders(self, pieces: Sequence[Piece], kinds: Kinds) -> Piece:
        if kinds.names not in self._orders:
            self._orders[kinds.names] = Orders(kinds.relations)
        orders = self._orders[kinds.names]

        def steps(entry: int, leave: int) -> Iterator[Step]:
            pools = [iter(members) for members in kinds.members]
            for kind, before, after in orders.route(kinds.counts, entry, leave):
                yield from pieces[next(pools[kind])].steps(before, after)

        exact = all(piece.exact for piece in pieces)
        return Piece(orders.relation(kinds.counts), steps, exact)


def products(counts: Sequence[int], crossings: int) -> float:
    """Return the matrix products for all orders of so many pieces, as over 64 crossings."""
    if len(counts) == 1:
        return 0
    return math.prod(count + 1 for count in counts) * len(counts) * max(8, crossings) / 64


class Kinds:
    """Pieces by equal relations: `members[k]` are the positions of those with `relations[k]`."""

    def __init__(self, relations: Sequence[Relation], bits: Sequence[bytes]) -> None:
        indices: dict[bytes, list[int]] = {}
        for position, name in enumerate(bits):
            indices.setdefault(name, []).append(position)
        self.names = tuple(sorted(indices))
        self.members = [indices[name] for name in self.names]
        self.relations = [relations[members[0]] for members in self.members]
        self.counts = tuple(len(members) for members in self.members)
        self._size = len(relations[0])

    def products(self, share: int = 1) -> float:
        """Return the products of a part that has one of `share` equal shares of every kind."""
        return products([-(-count // share) for count in self.counts], self._size)

    def deal(self) -> list[list[int]]:
        """Return the pieces in parts: even shares of all kinds, or a few of many different ones."""
        order = list(itertools.chain.from_iterable(self.members))
        if len(order) == len(self.members):
            return [order[start : start + PART] for start in range(0, len(order), PART)]
        parts = 2
        while 2 * parts < len(order) and self._part_products(parts) > PART_PRODUCTS:
            parts *= 2
        return [order[start::parts] for start in range(parts)]

    def _part_products(self, parts: int) -> float:
        size = -(-sum(self.counts) // parts)
        if size < len(self.counts):
            return products([1] * size, self._size)
        return self.products(parts)


class Orders:
    """All orders of any numbers of pieces of each relation: which crossings they connect."""

    def __init__(self, relations: Sequence[Relation]) -> None:
        self._relations = relations
        none = np.eye(len(relations[0]), dtype=np.bool_)
        self._after: dict[tuple[int, ...], Relation] = {(0,) * len(relations): none}

    def relation(self, counts: tuple[int, ...]) -> Relation:
        """Return the crossings that `counts[k]` pieces of each relation k connect."""
        if len(counts) == 1:
            return power(self._relations[0], counts[0])
        every = itertools.product(*(range(count + 1) for count in counts))
        missing = sorted((passed for passed in every if passed not in self._after), key=sum)
        for _, level in itertools.groupby(missing, key=sum):
            self._pass_one_more(list(level))
        return self._after[counts]

    def _pass_one_more(self, level: Sequence[tuple[int, ...]]) -> None:
        """Add what is reached after each number of pieces in `level`, of equal sums."""
        size = len(self._relations[0])
        reached = np.zeros((len(level), size, size), dtype=np.bool_)
        for kind, relation in enumerate(self._relations):
            last = [at for at, passed in enumerate(level) if passed[kind]]
            if last:
                # The products with one relation are a single product of the matrices below others.
                before = np.vstack([self._after[_less(level[at], kind)] for at in last])
                reached[last] |= product(before, relation).reshape(-1, size, size)
        self._after.update(zip(level, reached, strict=True))

    def route(self, counts: tuple[int, ...], entry: int, leave: int) -> list[tuple[int, int, int]]:
        """Return kind, entry and exit of every piece in turn, for a pair in the relation."""
        if len(counts) == 1:
            exits = path([self._relations[0]] * counts[0], entry, leave)
            return [(0, *pair) for pair in zip((entry, *exits), exits, strict=False)]
        backwards, passed = [], counts
        while any(passed):
            kind, before = self._last(passed, entry, leave)
            backwards.append((kind, before, leave))
            passed, leave = _less(passed, kind), before
        return backwards[::-1]

    def _last(self, passed: tuple[int, ...], entry: int, leave: int) -> tuple[int, int]:
        """Return the kind of the last piece passed, and the crossing that enters it."""
        for kind, count in enumerate(passed):
            if count:
                ways = self._after[_less(passed, kind)][entry] & self._relations[kind][:, leave]
                if ways.any():
                    return kind, int(np.argmax(ways))
        raise AssertionError("only pairs in the relation are asked for")


def _less(passed: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*passed[:kind], passed[kind] - 1, *passed[kind + 1 :])


# Proofs that no order of pieces closes to a ring, where there are too many orders to try.
#
# Give each crossing a potential. A step of the ring from crossing x to y rises by the difference,
# and all steps together by 0. Where every step of a kind rises by its least or more, and the least
# rises of all pieces have a sum above 0, there is no ring in any order.

MAX_STEPS = 20_000
"""Steps of all kinds for which potentials are looked for."""
SCALE = 1 << 30
"""Potentials are whole numbers up to this, so that the proof is exact."""


def is_ruled_out(relations: Sequence[Relation], counts: Sequence[int]) -> bool:
    """Return whether potentials show that no order of `counts[k]` pieces of each relation k closes.

    >>> there = np.array([[False, True], [False, False]])
    >>> back = there.T
    >>> is_ruled_out([there, back], [2, 1]), is_ruled_out([there, back], [2, 2])
    (True, False)
    """
    if sum(int(relation.sum()) for relation in relations) > MAX_STEPS:
        return False
    for crossings in _connect(np.logical_or.reduce(relations)):
        inner = [relation[np.ix_(crossings, crossings)] for relation in relations]
        if all(relation.any() for relation in inner) and not _rises(inner, counts):
            return False
    return True


def _connect(steps: Relation) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the groups of crossings in which a ring may run: all lead to all."""
    size = len(steps)
    ahead = power(steps | np.eye(size, dtype=np.bool_), 1 << math.ceil(math.log2(size)))
    for group in np.unique(ahead & ahead.T, axis=0):
        yield np.flatnonzero(group)


def _rises(relations: Sequence[Relation], counts: Sequence[int]) -> bool:
    """Look for potentials by which a ring of these pieces would rise."""
    import scipy  # noqa: PLC0415 (its optimizers take half a second to load)

    kinds, before, after = np.nonzero(np.stack(relations))
    size, rows = len(relations[0]), np.arange(len(kinds))
    # Of each step: least rise of its kind + potential before - potential after <= 0.
    entries = np.repeat([1.0, 1.0, -1.0], len(rows))
    columns = np.concatenate([size + kinds, before, after])
    steps = scipy.sparse.csr_array((entries, (np.tile(rows, 3), columns)))
    found = scipy.optimize.linprog(
        np.concatenate([np.zeros(size), -np.asarray(counts, dtype=float)]),
        A_ub=steps,
        b_ub=np.zeros(len(rows)),
        bounds=[(0, 1)] * size + [(-1, 1)] * len(relations),
        method="highs",
    )
    if found.x is None:
        return False
    # The program's numbers are rounded: what they prove is counted again, exactly.
    potentials = np.rint(found.x[:size] * SCALE).astype(np.int64)
    rises = potentials[after] - potentials[before]
    least = [int(rises[kinds == kind].min()) for kind in range(len(relations))]
    return sum(count * rise for count, rise in zip(counts, least, strict=True)) > 0
