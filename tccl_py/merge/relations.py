"""What is possible at one rate: boolean matrices over crossings, and the search for that rate.

In the (max, min) semiring ("maximum capacity": Pollack, Operations Research 8, 1960; the
semirings of Cormen et al., Introduction to Algorithms, all-pairs paths) every result is one of the
entries. So the best rate is found by halving the sorted entries and asking of each whether chains
of that rate and above make a ring; that needs boolean products only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.merge.tables import Rates

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
