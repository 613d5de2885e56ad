"""Whether sums of steps can come out at all, negative numbers of steps allowed.

Branch and bound cannot see that an odd number of nodes that all change sides ends on the wrong
side: every half-open choice still has a fractional solution. Integer elimination (Hermite normal
form: Cohen, A Course in Computational Algebraic Number Theory, 2.4) sees it at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy  # whose parts load when they are first used, so that commands start without them

Ints = npt.NDArray[np.int64]

LARGEST = 1 << 30
"""Elimination stops, and knows nothing, before products could leave 64 bits."""


def sums_can_match(kinds: Ints, tails: Ints, heads: Ints, counts: Ints, crossings: int) -> bool:
    """Whether steps, so many of each kind, can sum to a closed walk; true where it is not known.

    Step i is of `kinds[i]`, from crossing `tails[i]` to `heads[i]`. The pairs of a kind
    are edges of a bipartite graph; those of a spanning forest generate all its others, because the
    steps along a path of it sum up alternately to the one that closes it.
    """
    basis: dict[int, Ints] = {}
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


def _spanning(tails: Ints, heads: Ints, crossings: int) -> list[tuple[int, int]]:
    edges = (np.ones(len(tails)), (tails, crossings + heads))
    forest = scipy.sparse.csgraph.minimum_spanning_tree(
        scipy.sparse.coo_array(edges, shape=(2 * crossings, 2 * crossings))
    )
    rows, columns = forest.nonzero()
    ends = zip(rows.tolist(), columns.tolist(), strict=True)
    return [(min(pair), max(pair) - crossings) for pair in ends]


def _insert(basis: dict[int, Ints], vector: Ints) -> bool:
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


def _divides(basis: dict[int, Ints], rest: Ints) -> bool:
    """Whether whole multiples of the basis sum to a vector; true if numbers are too large."""
    while rest.any() and np.abs(rest).max() <= LARGEST:
        pivot = int(np.flatnonzero(rest)[0])
        if pivot not in basis or rest[pivot] % basis[pivot][pivot]:
            return False
        rest = rest - (rest[pivot] // basis[pivot][pivot]) * basis[pivot]
    return True
