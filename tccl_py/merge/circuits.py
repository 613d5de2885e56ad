"""Whether nodes, in any order, make a ring: closed walks with one step for every node.

A node is a step from its entry to its exit, so a ring is an Eulerian circuit: every crossing is
left as often as it is entered (`balance`), and the steps hang together. As for tours (Dantzig,
Fulkerson, Johnson 1954), a choice that falls apart is cut off: a ring leaves each of its parts that
it comes to, or lies within one; those are searched by themselves. That is exact, as long as the
effort is not spent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import scipy  # its parts load when first used: commands start without them

from tccl_py.merge.pieces import Decision, Relation, Walk

# Whether sums of steps can come out at all, negative numbers of steps allowed.


LatticeInts = npt.NDArray[np.int64]

LARGEST = 1 << 30
"""Elimination stops, and knows nothing, before products could leave 64 bits."""


def sums_can_match(
    kinds: LatticeInts, tails: LatticeInts, heads: LatticeInts, counts: LatticeInts, crossings: int
) -> bool:
    """Whether steps, so many of each kind, can sum to a closed walk; true where it is not known.

    Step i is of `kinds[i]`, from crossing `tails[i]` to `heads[i]`. The pairs of a kind
    are edges of a bipartite graph; those of a spanning forest generate all its others, because the
    steps along a path of it sum up alternately to the one that closes it.
    """
    basis: dict[int, LatticeInts] = {}
    for kind in range(len(counts)):
        mine = kinds == kind
        for tail, head in _spanning(tails[mine], heads[mine], crossings):
            step = np.zeros(len(counts) + crossings, dtype=np.int64)
            step[kind] = 1
            step[len(counts) + head] += 1
            step[len(counts) + tail] -= 1
            if not _insert(basis, step):
                return True
    rest = np.concatenate([counts, np.zeros(crossings, dtype=np.int64)])
    return _divides(basis, rest)


def _spanning(tails: LatticeInts, heads: LatticeInts, crossings: int) -> list[tuple[int, int]]:
    edges = (np.ones(len(tails)), (tails, crossings + heads))
    forest = scipy.sparse.csgraph.minimum_spanning_tree(
        scipy.sparse.coo_array(edges, shape=(2 * crossings, 2 * crossings))
    )
    rows, columns = forest.nonzero()
    ends = zip(rows.tolist(), columns.tolist(), strict=True)
    return [(min(pair), max(pair) - crossings) for pair in ends]


def _insert(basis: dict[int, LatticeInts], vector: LatticeInts) -> bool:
    """Extend an echelon basis, by pivot, by a vector; false if numbers become too large."""
    while vector.any():
        pivot = int(np.flatnonzero(vector)[0])
        if pivot not in basis:
            basis[pivot] = vector
            return True
        other = basis[pivot]
        while vector[pivot]:
            other, vector = vector, other - (other[pivot] // vector[pivot]) * vector
            if np.abs(vector).max(initial=0) > LARGEST:
                return False
        basis[pivot] = other
    return True


def _divides(basis: dict[int, LatticeInts], rest: LatticeInts) -> bool:
    """Whether whole multiples of the basis sum to a vector; true if numbers are too large."""
    while rest.any() and np.abs(rest).max() <= LARGEST:
        pivot = int(np.flatnonzero(rest)[0])
        if pivot not in basis or rest[pivot] % basis[pivot][pivot]:
            return False
        rest = rest - (rest[pivot] // basis[pivot][pivot]) * basis[pivot]
    return True


# Balanced choices: one crossing pair for every node, with as many ways into a crossing as out.


Ints = npt.NDArray[np.int64]

FEW_BRANCHES = 3_000
MANY_BRANCHES = 20_000
"""Nodes of the branch and bound, before and after the sums are looked at."""
HIGHS_INFEASIBLE, HIGHS_FAILED = 2, 4


class Pairs(msgspec.Struct, frozen=True):
    """The pairs that are open: pair i takes a node of `kinds[i]` from `tails[i]` to `heads[i]`."""

    kinds: Ints
    tails: Ints
    heads: Ints
    crossings: int

    @classmethod
    def of(cls, relations: Relation) -> Pairs:
        """All pairs of relations, kind x entry x exit."""
        kinds, tails, heads = np.nonzero(relations)
        return cls(kinds, tails, heads, relations.shape[1])

    def chosen(self, which: npt.NDArray[np.bool_] | Ints) -> Pairs:
        """Some of the pairs."""
        return Pairs(self.kinds[which], self.tails[which], self.heads[which], self.crossings)


class Cut(msgspec.Struct, frozen=True):
    """Crossings that a ring leaves: `inside[x]` of them; at least once, or only if it comes there.

    `needed` is 1 if no ring can keep away from them, else 0.
    """

    inside: npt.NDArray[np.bool_]
    needed: int


class Choice(msgspec.Struct, frozen=True):
    """How often each pair is used; None if there is no choice, which may be `certain`."""

    uses: Ints | None
    certain: bool = True


def balanced(pairs: Pairs, counts: Ints, cuts: Sequence[Cut]) -> Choice:
    """A balanced choice that leaves the crossings of every cut that it uses."""
    choice = _solved(pairs, counts, cuts, FEW_BRANCHES)
    if choice.uses is not None or choice.certain:
        return choice
    if not sums_can_match(pairs.kinds, pairs.tails, pairs.heads, counts, pairs.crossings):
        return Choice(None)
    return _solved(pairs, counts, cuts, MANY_BRANCHES)


def balanced_in_fractions(pairs: Pairs, counts: Ints) -> bool:
    """Whether there is a balanced choice if nodes may be split between pairs; true if not known."""
    number = len(pairs.kinds)
    constraints = _constraints(pairs, counts, ())
    result = scipy.optimize.milp(
        np.zeros(number),
        bounds=scipy.optimize.Bounds(0, counts[pairs.kinds]),
        constraints=constraints,
    )
    return bool(result.status != HIGHS_INFEASIBLE)


def _solved(pairs: Pairs, counts: Ints, cuts: Sequence[Cut], branches: int) -> Choice:
    # HiGHS (seen with 1.12) now and then gives up on what its own presolve made of a program.
    for presolve in (True, False):
        result = scipy.optimize.milp(
            np.zeros(len(pairs.kinds)),
            integrality=np.ones(len(pairs.kinds)),
            bounds=scipy.optimize.Bounds(0, counts[pairs.kinds]),
            constraints=_constraints(pairs, counts, cuts),
            options={"node_limit": branches, "presolve": presolve},
        )
        if result.status != HIGHS_FAILED:
            break
    if result.x is not None:
        uses = np.rint(result.x).astype(np.int64)
        if _holds(pairs, counts, uses):
            return Choice(uses)
    return Choice(None, certain=result.status == HIGHS_INFEASIBLE)


def _constraints(
    pairs: Pairs, counts: Ints, cuts: Sequence[Cut]
) -> scipy.optimize.LinearConstraint:
    """Rows: the count of every kind, the balance of every crossing, the way out of every cut."""
    first, each = len(counts), np.arange(len(pairs.kinds))
    moving = np.flatnonzero(pairs.tails != pairs.heads)
    rows = [pairs.kinds, first + pairs.tails[moving], first + pairs.heads[moving]]
    columns = [each, moving, moving]
    values = [np.ones(len(each)), np.ones(len(moving)), -np.ones(len(moving))]
    for number, cut in enumerate(cuts):
        there = np.flatnonzero(cut.inside[pairs.tails])
        leaving = ~cut.inside[pairs.heads[there]]
        rows.append(np.full(len(there), first + pairs.crossings + number))
        columns.append(there)
        # As many steps as there are nodes can be there for each that leaves.
        values.append(leaving * (1 if cut.needed else counts.sum()) - (1.0 - cut.needed))
    needed = np.array([cut.needed for cut in cuts])
    least = np.concatenate([counts, np.zeros(pairs.crossings), needed])
    most = np.concatenate([counts, np.zeros(pairs.crossings), np.full(len(cuts), np.inf)])
    entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
    matrix = scipy.sparse.coo_array(entries, shape=(len(least), len(each)))
    return scipy.optimize.LinearConstraint(matrix.tocsr(), least, most)


def _holds(pairs: Pairs, counts: Ints, uses: Ints) -> bool:
    per_kind = np.bincount(pairs.kinds, uses, minlength=len(counts))
    out = np.bincount(pairs.tails, uses, minlength=pairs.crossings)
    into = np.bincount(pairs.heads, uses, minlength=pairs.crossings)
    return bool((uses >= 0).all() and (per_kind == counts).all() and (out == into).all())


MAX_PROGRAMS = 100
"""Integer programs solved for one question before it counts as open."""
FEW_PAIRS = 4_000
"""More pairs than that are thinned out first: a ring over some is a ring over all."""
MAX_PAIRS = 400_000
"""Larger integer programs are not tried; the question stays open."""

Mask = npt.NDArray[np.bool_]


def closed_walk(relations: Relation, counts: Sequence[int]) -> Decision:
    """A closed walk with `counts[k]` >= 1 steps of every kind k, each one of `relations[k]`."""
    flat = np.packbits(relations.reshape(len(relations), -1), axis=1)
    _, firsts, twins = np.unique(flat, axis=0, return_index=True, return_inverse=True)
    twins = twins.reshape(-1)
    sums = np.bincount(twins, counts).astype(np.int64)
    decision = _Search(relations[firsts], sums).within(np.arange(relations.shape[1]))
    if decision.walk is None:
        return decision
    # Kinds with the same relation were taken as one: the steps are dealt out to them.
    members = [np.flatnonzero(twins == kind) for kind in range(len(sums))]
    pools = [iter(np.repeat(mine, np.asarray(counts)[mine]).tolist()) for mine in members]
    kinds = tuple(next(pools[kind]) for kind in decision.walk.kinds)
    return Decision(walk=Walk(kinds=kinds, crossings=decision.walk.crossings))


def could_close(relations: Relation, counts: Sequence[int]) -> bool:
    """False only if there is no closed walk: as `closed_walk`, with fractions of steps allowed."""
    sums = np.asarray(counts, dtype=np.int64)
    for part in _parts(relations, np.arange(relations.shape[1])):
        pairs = Pairs.of(relations[:, part][:, :, part])
        if len(pairs.kinds) > MAX_PAIRS:
            return True
        few = pairs.chosen(_thinned(pairs, len(sums)))
        if balanced_in_fractions(few, sums) or balanced_in_fractions(pairs, sums):
            return True
    return False


class _Search:
    """The search for one closed walk; `within` answers it for a set of crossings."""

    def __init__(self, relations: Relation, counts: Ints) -> None:
        self.relations = relations
        self.counts = counts
        self._programs = 0

    def within(self, crossings: Ints) -> Decision:
        """A closed walk that uses none but these crossings."""
        certain = True
        for part in _parts(self.relations, crossings):
            decision = self._in_part(part)
            if decision.walk is not None:
                return decision
            certain &= decision.certain
        return Decision(certain=certain)

    def _in_part(self, part: Ints) -> Decision:
        inside = self.relations[:, part][:, :, part]
        loops = np.flatnonzero(np.diagonal(inside, axis1=1, axis2=2).all(axis=0))
        if len(loops):
            kinds = np.repeat(np.arange(len(self.counts)), self.counts).tolist()
            stay = int(part[loops[0]])
            return Decision(walk=Walk(kinds=tuple(kinds), crossings=(stay,) * len(kinds)))
        pairs = Pairs.of(inside)
        if len(pairs.kinds) > FEW_PAIRS:
            few = self._connected(pairs.chosen(_thinned(pairs, len(self.counts))), part)
            if few.walk is not None:
                return few
        if len(pairs.kinds) > MAX_PAIRS:
            return Decision(certain=False)
        return self._connected(pairs, part)

    def _connected(self, pairs: Pairs, part: Ints) -> Decision:
        """A balanced choice in one piece: what falls apart is cut off until none is left."""
        cuts: list[Cut] = []
        while self._programs < MAX_PROGRAMS:
            self._programs += 1
            choice = balanced(pairs, self.counts, cuts)
            if choice.uses is None:
                return self._apart(choice, cuts, part)
            pieces = _pieces(pairs.chosen(choice.uses > 0))
            if len(pieces) == 1:
                return Decision(walk=_circuit(pairs, choice.uses, part))
            cuts.extend(_cut(piece, pairs, len(self.counts)) for piece in pieces)
        return Decision(certain=False)

    def _apart(self, choice: Choice, cuts: Sequence[Cut], part: Ints) -> Decision:
        """No ring leaves all the cuts that it uses: does one lie inside of one?"""
        certain = choice.certain
        smaller = {tuple(part[cut.inside].tolist()) for cut in cuts}
        for crossings in sorted(smaller):
            decision = self.within(np.array(crossings, dtype=np.int64))
            if decision.walk is not None:
                return decision
            certain &= decision.certain
        return Decision(certain=certain)


def _parts(relations: Relation, crossings: Ints) -> Iterator[Ints]:
    """Sets of crossings of which one holds a ring if there is any: strongly connected, a step of
    every kind in each, and no crossing that another can stand in for.
    """
    union = relations[:, crossings][:, :, crossings].any(axis=0)
    _, labels = scipy.sparse.csgraph.connected_components(union, directed=True, connection="strong")
    for label in np.argsort(-np.bincount(labels), kind="stable"):
        part = crossings[labels == label]
        inside = relations[:, part][:, :, part]
        if inside.any(axis=(1, 2)).all():
            needed = _undominated(inside)
            yield from [part] if needed.all() else _parts(relations, part[needed])


def _undominated(inside: Relation) -> Mask:
    """The crossings that no other can stand in for, everywhere; of equal ones the first stays.

    Replacing one by another that all kinds enter and leave at least as freely keeps a ring a ring.
    """
    size = inside.shape[1]
    ways = np.concatenate([inside.transpose(1, 0, 2), inside.transpose(2, 0, 1)], axis=1)
    features = ways.reshape(size, -1).astype(np.float32)
    covers = (1 - features) @ features.T == 0  # [x, y]: nothing that y can and x cannot
    earlier = np.arange(size)[:, None] < np.arange(size)[None, :]
    stands_in = covers & (~covers.T | earlier)
    undominated: Mask = ~stands_in.any(axis=0)
    return undominated


def _thinned(pairs: Pairs, kinds: int) -> Mask:
    """Some pairs of every kind, those that stay at a crossing among them; always the same ones."""
    drawn = np.random.default_rng(0).uniform(size=len(pairs.kinds))
    drawn[pairs.tails == pairs.heads] = 0.0
    order = np.lexsort((drawn, pairs.kinds))
    sizes = np.bincount(pairs.kinds, minlength=kinds)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    few: Mask = rank < max(8, FEW_PAIRS // kinds)
    return few


def _cut(inside: Mask, pairs: Pairs, kinds: int) -> Cut:
    """The cut around a piece; it is needed if some kind has no step outside."""
    outside = ~inside[pairs.tails] & ~inside[pairs.heads]
    return Cut(inside, int(np.unique(pairs.kinds[outside]).size < kinds))


def _pieces(used: Pairs) -> list[Mask]:
    """The sets of crossings that the used pairs hold together."""
    shape = (used.crossings, used.crossings)
    graph = scipy.sparse.coo_array(
        (np.ones(len(used.kinds)), (used.tails, used.heads)), shape=shape
    )
    _, labels = scipy.sparse.csgraph.connected_components(graph, directed=False)
    return [labels == label for label in np.unique(labels[used.tails])]


def _circuit(pairs: Pairs, uses: Ints, part: Ints) -> Walk:
    """One walk over all uses of all pairs (Hierholzer 1873); linear in the steps."""
    ways: dict[int, list[tuple[int, int]]] = {}
    for i in np.flatnonzero(uses).tolist():
        way = (int(pairs.heads[i]), int(pairs.kinds[i]))
        ways.setdefault(int(pairs.tails[i]), []).extend([way] * int(uses[i]))
    stack, steps = [(next(iter(ways)), -1)], []
    while stack:
        onward = ways[stack[-1][0]]
        if onward:
            stack.append(onward.pop())
        else:
            steps.append(stack.pop())
    steps = steps[-2::-1]  # backwards as found; the last one is the start, not a step
    crossings = tuple(int(part[at]) for at, _ in steps)
    return Walk(kinds=tuple(kind for _, kind in steps), crossings=crossings)
