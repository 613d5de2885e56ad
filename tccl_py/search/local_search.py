"""Local search: ring sets that are faster than those near them, from random beginnings.

Best-first search is stuck where bounds are far above the rates. There steps to near ring sets find
better ones by fewer measurements.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from tccl_py.search.best_first import Incumbent, Sequences, chain_hops
from tccl_py.search.bounds import Bounds, Evaluator
from tccl_py.search.problem import HopIndex, Hops, SetRule, admits

SIDEWAYS = 5
"""Steps in a row to sets that are only equally fast."""
LOOKS = 500
"""Sets looked at in a row without a measurement, after which all near ones are known."""


class LocalSearch:
    """Climb from ring sets to faster ones near them, and offer each to the incumbent.

    A near set has one GPU elsewhere in one ring, or another mechanism for one hop. Sets that
    `bounds` show to be slower than where a step begins are not measured. The search ends after
    `sets` measurements, or after `idle_sets` without a better ring.
    """

    def __init__(
        self,
        index: HopIndex,
        bounds: Bounds,
        evaluator: Evaluator,
        incumbent: Incumbent,
        *,
        rule: SetRule | None,
        sets: float,
        idle_sets: float,
        seed: int,
    ) -> None:
        self._index, self._bounds, self._rule = index, bounds, rule
        self._evaluator, self._incumbent = evaluator, incumbent
        self._idle_sets, self._begun, self._looks = idle_sets, evaluator.sets_measured, 0
        self._most = self._begun + sets
        self._random = random.Random(seed)  # a resumed plan draws the same
        self._seen: set[Hops] = set()

    @property
    def is_over(self) -> bool:
        """Whether enough was measured, or nothing new is near."""
        spent = self._evaluator.sets_measured
        idle = spent - max(self._begun, self._incumbent.improved_at)
        return spent >= self._most or idle >= self._idle_sets or self._looks >= LOOKS

    def run(self, count: int) -> None:
        """Climb from the best set of `count` rings, then from random ones."""
        best = self._incumbent.best
        if best is not None and best.index is self._index and len(best.sequences) == count:
            self._climb(best.sequences)
        rest = range(1, len(self._index.gpus))
        while not self.is_over:
            self._looks += 1
            orders = ((0, *self._random.sample(rest, len(rest))) for _ in range(count))
            rings = tuple(sorted(self._ring(order, {}) for order in orders))
            if all(rings) and admits(self._index, rings, self._rule):
                self._climb(rings)

    def _climb(self, rings: Sequences) -> None:
        rate, sideways, near = self._rate(rings), 0, self._near(rings)
        while not self.is_over and (rings := next(near, ())):
            self._looks += 1
            hops = chain_hops(rings)
            if self._bounds.bound(hops) < rate:
                continue
            is_new = self._index.canonical(hops) not in self._seen
            new = self._rate(rings)
            if new > rate or (new == rate and is_new and sideways < SIDEWAYS):
                sideways = 0 if new > rate else sideways + 1
                rate, near = new, self._near(rings)

    def _rate(self, rings: Sequences) -> float:
        """Return the rate of a set, which is offered the first time."""
        hops = chain_hops(rings)
        key = self._index.canonical(hops)
        if key not in self._seen:
            self._seen.add(key)
            self._looks = 0
            self._incumbent.measure(self._evaluator, self._index, rings)
        return self._evaluator.rate(self._index, hops)

    def _near(self, rings: Sequences) -> Iterator[Sequences]:
        """Yield the near sets that the rule admits, in random order."""
        near = [(at, ring) for at in range(len(rings)) for ring in self._rings_near(rings[at])]
        self._random.shuffle(near)
        for at, ring in near:
            changed = tuple(sorted((*rings[:at], ring, *rings[at + 1 :])))
            if admits(self._index, changed, self._rule):
                yield changed

    def _rings_near(self, ring: Hops) -> list[Hops]:
        order = self._index.source[list(ring)].tolist()
        hops = dict(zip(itertools.pairwise((*order, order[0])), ring, strict=True))
        near = set()
        for i, j in itertools.permutations(range(1, len(order)), 2):
            moved = [*order[:i], *order[i + 1 :]]
            moved.insert(j, order[i])
            near.add(self._ring(moved, hops))
        for at, pair in enumerate(hops):
            others = (int(hop) for hop in self._index.pair[pair] if hop >= 0)
            near |= {(*ring[:at], other, *ring[at + 1 :]) for other in others}
        return sorted(near - {ring, ()})

    def _ring(self, order: Sequence[int], hops: dict[tuple[int, int], int]) -> Hops:
        """Return a ring of `hops` where these join neighbours, else of the fastest; () if none."""
        ring = []
        for pair in itertools.pairwise((*order, order[0])):
            choices = [hops[pair]] if pair in hops else self._index.pair[pair].tolist()
            ring.append(max(choices, key=self._promise))
        return () if -1 in ring else tuple(ring)

    def _promise(self, hop: int) -> tuple[float, bool]:
        """Return the bound of a hop, and whether it is direct; the least where there is none."""
        return (
            (float(self._bounds.single[hop]), not self._index.bounces[hop])
            if hop >= 0
            else (-1.0, False)
        )
