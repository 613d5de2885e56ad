"""Every ring set there is, for small machines and as the yardstick of the other strategies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from tccl_py.search.hop_index import HopIndex
from tccl_py.search.incumbent import Sequences
from tccl_py.search.problem import SetRule
from tccl_py.transfers.hops import HopSpace


def count_ring_sets(space: HopSpace, rings: int) -> int:
    """How many sets of `rings` rings the space has, at most: all orders, all mechanisms.

    >>> from tccl_py.transfers.hops import Hop
    >>> from tccl_py.transfers.transfer import direct_write
    >>> pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    >>> hops = {(i, j): (Hop(i, j, direct_write(i, j)),) for i, j in pairs}
    >>> count_ring_sets(HopSpace(name="toy", gpus=(0, 1, 2, 3), hops=hops), 2)
    21
    """
    widest = max((len(choices) for choices in space.hops.values()), default=0)
    single = math.factorial(len(space.gpus) - 1) * widest ** len(space.gpus)
    return math.comb(single + rings - 1, rings)


def all_rings(index: HopIndex) -> Iterator[tuple[int, ...]]:
    """Every ring, once, as hop numbers that begin at the first GPU."""
    first, *rest = range(len(index.gpus))
    for order in itertools.permutations(rest):
        stations = (first, *order, first)
        choices = [
            [hop for hop in index.pair[i, j].tolist() if hop >= 0]
            for i, j in itertools.pairwise(stations)
        ]
        yield from itertools.product(*choices)


def all_ring_sets(index: HopIndex, rings: int, rule: SetRule | None = None) -> Iterator[Sequences]:
    """Every set of so many rings that keeps to the rule, once."""
    for found in itertools.combinations_with_replacement(all_rings(index), rings):
        if admitted(index, found, rule):
            yield found


def admitted(index: HopIndex, rings: Sequence[Sequence[int]], rule: SetRule | None) -> bool:
    """Whether these rings, the last one perhaps unfinished, keep to the rule."""
    if rule is None:
        return True
    return rule.admits([[index.hops[number] for number in one] for one in rings])
