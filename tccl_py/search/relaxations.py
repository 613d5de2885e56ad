"""Upper bounds on whole ring sets, before a ring is known: what every ring set must contain.

Every ring leaves and enters every group of GPUs, so k rings hold k hops out of it and k hops in.
The best such choice bounds all ring sets. Choices are bounded by what is known, and the most
promising one is measured until the best is known exactly or good enough (a lazy best-first).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tccl_py.search.bounds import Bounds, Floats
from tccl_py.search.conflicts import smallest_slow_part
from tccl_py.search.hop_index import HopIndex

MAX_CHOICES = 5_000
"""Groups with more choices of hops are bounded by fewer hops at a time."""


Choices = npt.NDArray[np.int64]
"""Rows of hop numbers; every ring set contains at least one of the rows."""


def crossings(index: HopIndex, group: Iterable[int], rings: int) -> list[Choices]:
    """The ways in which `rings` rings can leave, enter, and do both at a group of GPU positions."""
    inside = np.isin(index.gpu_positions, list(group))
    out = np.flatnonzero(inside[index.source] & ~inside[index.target])
    back = np.flatnonzero(~inside[index.source] & inside[index.target])
    leaving, entering = _choices(out, rings), _choices(back, rings)
    # One way alone has few choices and often says enough; both ways together say more.
    found = [leaving, entering]
    if len(leaving) * len(entering) <= MAX_CHOICES:
        both = [np.concatenate([one, other]) for one, other in itertools.product(leaving, entering)]
        found.append(np.sort(np.array(both), axis=1))
    return found


def _choices(hops: npt.NDArray[np.int64], count: int) -> Choices:
    """Multisets of `count` hops, or of as many as MAX_CHOICES allows."""
    while count > 1 and _multisets(len(hops), count) > MAX_CHOICES:
        count -= 1
    return np.array(list(itertools.combinations_with_replacement(hops.tolist(), count)))


def _multisets(kinds: int, count: int) -> float:
    total = 1.0
    for i in range(count):
        total *= (kinds + i) / (i + 1)
    return total


def crossing_bound(
    choices: Choices,
    bounds: Bounds,
    *,
    enough: float,
    measure: Callable[[Sequence[int]], float],
    limit: int,
) -> float:
    """Upper bound on any set that contains one of these choices, GB/s.

    Args:
        choices: rows of hop numbers.
        bounds: what is known; grows as choices are measured.
        enough: at or below this bound no more is measured.
        measure: gives an upper bound on the rate of hops by measuring them.
        limit: at most so many choices are measured; why one is slow takes further sets.
    """
    least = bounds.pair_bounds(choices)
    exact: set[int] = set()
    while True:
        # Patterns are looked up only for the row that is best so far, and lower it.
        best = int(np.argmax(least))
        choice = tuple(choices[best].tolist())
        known = bounds.pattern_bound(choice)
        if known < least[best]:
            least[best] = known
            continue
        if least[best] <= enough or best in exact or limit == 0:
            return float(least[best])
        limit -= 1
        exact.add(best)
        upper = max(measure(choice), enough)
        if upper < least[best]:
            slow = smallest_slow_part(choice, lambda part: measure(part) <= upper)  # noqa: B023
            bounds.learn(slow, upper)
            np.minimum(least, bounds.pair_bounds(choices), out=least)


def connected_above(weights: Floats, least: float) -> bool:
    """Whether GPUs stay strongly connected by hops of at least this rate (no cut is below it).

    `weights[i, j]` is an upper bound on the rate of a hop from i to j, GB/s.
    """
    reach = (weights >= least) | np.eye(len(weights), dtype=bool)
    steps = 1
    while steps < len(weights):
        reach = reach @ reach
        steps *= 2
    return bool(reach.all())


def best_connected(weights: Floats) -> float:
    """The highest rate at which `connected_above` still holds, by bisection over the rates."""
    rates = np.unique(weights[np.isfinite(weights)])
    low, high = 0, len(rates) - 1
    if not len(rates) or not connected_above(weights, rates[0]):
        return float("inf") if not len(rates) else 0.0
    while low < high:
        middle = (low + high + 1) // 2
        if connected_above(weights, rates[middle]):
            low = middle
        else:
            high = middle - 1
    return float(rates[low])
