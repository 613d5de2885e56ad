"""Whether nodes, in any order, make a ring: closed walks with one step for every node.

A node is a step from its entry to its exit, so a ring is an Eulerian circuit: every crossing is
left as often as it is entered (`balance`), and the steps hang together. As for tours (Dantzig,
Fulkerson, Johnson 1954), a choice that falls apart is cut off: a ring leaves each of its parts that
it comes to, or lies within one; those are searched by themselves. That is exact, as long as the
effort is not spent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import scipy  # whose parts load when they are first used, so that commands start without them

from tccl_py.merge.balance import Choice, Cut, Ints, Pairs, balanced, balanced_in_fractions
from tccl_py.merge.relations import Decision, Relation, Walk

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
