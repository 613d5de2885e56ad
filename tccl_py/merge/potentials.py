"""Proofs that no order of pieces closes to a ring, where there are too many orders to try.

Give each crossing a potential. A step of the ring from crossing x to y rises by the difference, and
all steps together by 0. Where every step of a kind rises by its least or more, and the least rises
of all pieces have a sum above 0, there is no ring in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tccl_py.merge.walks import Relation, power

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
