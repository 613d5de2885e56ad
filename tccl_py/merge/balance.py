"""Balanced choices: one crossing pair for every node, with as many ways into a crossing as out.

An integer program (HiGHS): variables say how many nodes of a kind use a pair. What HiGHS answers is
rounded and checked; that there is nothing is taken from it, or from `lattice`, which knows what
branching is bad at: sums that cannot come out for parity's sake.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import scipy  # whose parts load when they are first used, so that commands start without them

from tccl_py.merge.lattice import sums_can_match
from tccl_py.merge.relations import Relation

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
