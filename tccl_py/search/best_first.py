"""Best-first search on an upper bound, for single rings and ring sets.

States are partial ring sets, built ring by ring and hop by hop. Their bound comes from what is
known (`bounds`), so a state costs no measurement until it is complete; then it is measured, and if
it is slower than its bound, the smallest slow part is found and bounds every state that contains
it or an image of it. So measurements are spent on finding out why, not on every prefix.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.search.bounds import (
    Bounds,
    Floats,
    best_connected,
    connected_above,
    crossing_bound,
    crossings,
)
from tccl_py.search.evaluator import BudgetSpentError, Incumbent, Ledger, smallest_slow_part
from tccl_py.search.problem import HopIndex, SetRule
from tccl_py.search.tccl_paper import admitted, all_ring_sets

MAX_STATES = 10_000
"""States looked at for one ring count before the search gives up on a proof."""
DIVE_SETS = 30
"""Sets without a better ring that end the first, quick look for a good answer."""
MAX_PAIRED_HOPS = 128
MAX_PAIR_KINDS = 64
"""Pairs of hops are all measured beforehand if symmetry leaves no more kinds than that."""
CROSSING_SETS = 64
"""Sets measured at most to bound one group of GPUs."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A partial ring set: whole rings, and a path (GPU positions) with its hops.

    `alive` are the symmetry elements that fix all of it; `version` the age of its bound.
    """

    bound: float
    rings: tuple[tuple[int, ...], ...]
    path: tuple[int, ...]
    hops: tuple[int, ...]
    alive: npt.NDArray[np.int64]
    version: int = -1

    @property
    def all_hops(self) -> tuple[int, ...]:
        """Hops of the whole rings and of the path."""
        return (*itertools.chain.from_iterable(self.rings), *self.hops)


class RingSetSearch:
    """The search for sets of `count` rings; shares ledger and incumbent with other counts."""

    def __init__(
        self,
        index: HopIndex,
        ledger: Ledger,
        incumbent: Incumbent,
        *,
        count: int,
        tolerance: float,
        idle_sets: int | None = None,
        rule: SetRule | None = None,
    ) -> None:
        self.index = index
        self._rule = rule
        self.count = count
        self.bounds = Bounds(index, copies=count)
        self._bounces: list[int] = index.bounces.astype(int).tolist()
        self._ledger = ledger
        self._incumbent = incumbent
        self._tolerance = tolerance
        self._idle_sets = idle_sets
        self._queue: list[tuple[tuple[float, ...], State]] = []
        self._serial = itertools.count()
        self._dropped = 0.0
        self._relaxed = float("inf")

    @property
    def bound_gbps(self) -> float:
        """Upper bound on the score of any set of this many rings, GB/s."""
        waiting = max((state.bound for _, state in self._queue), default=0.0)
        return self.count * min(self._relaxed, max(waiting, self._dropped))

    @property
    def _enough(self) -> float:
        """Hop rate that a set must exceed to be worth finding."""
        return self._incumbent.surely_reached * (1 + self._tolerance) / self.count

    def exhaust(self) -> None:
        """Measure every ring set that could still beat the incumbent.

        Raises:
            BudgetSpentError: the budget is used up; `bound_gbps` holds all the same.
        """
        if self.bound_gbps <= self._enough * self.count:
            return
        for sequences in all_ring_sets(self.index, self.count, self._rule):
            hops = [hop for sequence in sequences for hop in sequence]
            bound = self.bounds.bound(hops)
            if bound > self._enough:
                self._offer(sequences, hops)
                bound = min(bound, self._ledger.upper(self.index, hops))
            self._dropped = max(self._dropped, bound)
        self._queue.clear()

    def _offer(self, sequences: Sequence[Sequence[int]], hops: Sequence[int]) -> None:
        rate = self._ledger.rate(self.index, hops)
        error = self._ledger.relative_error(self._ledger.measurement(self.index, hops))
        self._incumbent.error = max(self._incumbent.error, error)
        at = self._ledger.sets_measured
        self._incumbent.offer(self.count * rate, self.index, sequences, at=at)

    def relax(self, cuts: Sequence[Sequence[int]]) -> None:
        """Bound all ring sets by what crosses each cut.

        Raises:
            BudgetSpentError: the budget is used up; `bound_gbps` holds all the same.
        """
        for cut in cuts:
            for choices in crossings(self.index, cut, self.count):
                if self._relaxed <= self._enough or not self._queue:
                    return
                found = crossing_bound(
                    choices,
                    self.bounds,
                    enough=self._enough,
                    measure=lambda hops: self._ledger.upper(self.index, hops),
                    limit=CROSSING_SETS,
                )
                self._relaxed = min(self._relaxed, found)

    def dive(self) -> None:
        """Search a little, for a good answer before proofs are tried.

        Raises:
            BudgetSpentError: the budget is used up; `bound_gbps` holds all the same.
        """
        everyone = np.arange(len(self.index.images))
        self._push(State(bound=float("inf"), rings=(), path=(0,), hops=(), alive=everyone))
        for hops in self._classes():
            self.bounds.learn(hops, self._ledger.upper(self.index, hops))
        self._relaxed = best_connected(self._weights(self.bounds.single))
        self._search(idle_sets=DIVE_SETS)

    def _classes(self) -> list[tuple[int, ...]]:
        """One hop of each kind; for several rings also one pair of each kind, if those are few.

        Which pairs hurt each other decides most about several rings, and little about one.
        """
        hops = np.unique(self.index.images.min(axis=0))
        kinds: list[tuple[int, ...]] = [(int(hop),) for hop in hops]
        count = len(self.index.hops)
        if self.count == 1 or count > MAX_PAIRED_HOPS:
            return kinds
        pairs = itertools.combinations_with_replacement(range(count), 2)
        smallest = {self.index.canonical(pair) for pair in pairs}
        return kinds + (sorted(smallest) if len(smallest) <= MAX_PAIR_KINDS else [])

    def run(self) -> None:
        """Search until nothing can beat the incumbent, or the effort is spent.

        Raises:
            BudgetSpentError: the budget is used up; `bound_gbps` holds all the same.
        """
        if self._relaxed > self._enough:
            self._search(idle_sets=self._idle_sets)

    def _search(self, *, idle_sets: int | None) -> None:
        begun = self._ledger.sets_measured
        for _ in range(MAX_STATES):
            last = max(begun, self._incumbent.improved_at)
            idle = idle_sets is not None and self._ledger.sets_measured - last >= idle_sets
            if not self._queue or idle or self._ledger.out_of_time:
                break
            _, state = heapq.heappop(self._queue)
            self._visit(state)

    def _visit(self, state: State) -> None:
        try:
            if state.bound <= self._enough:
                self._dropped = max(self._dropped, state.bound)
            elif state.version != self.bounds.version:
                self._push(self._rebounded(state))
            elif len(state.rings) == self.count:
                self._measure(state)
            else:
                for child in self._children(state):
                    self._push(child)
        except (BudgetSpentError, KeyboardInterrupt):
            self._push(state)
            raise

    def _push(self, state: State) -> None:
        if state.bound <= self._enough:
            self._dropped = max(self._dropped, state.bound)
            return
        hops = state.all_hops
        depth = len(hops)
        kinship = 0.0
        if depth:
            numbers = np.array(hops)
            kinship = float(self.bounds.pair[numbers[:, None], numbers].sum()) / depth**2
        bounces = sum(self._bounces[hop] for hop in hops)
        # Ties: the deeper state, then fewer bounces, then hops that get on well in pairs.
        order = (-round(state.bound, 6), -depth, bounces, -kinship, next(self._serial))
        heapq.heappush(self._queue, (order, state))

    def _measure(self, state: State) -> None:
        hops = state.all_hops
        self._offer(state.rings, hops)
        upper = self._ledger.upper(self.index, hops)
        self._dropped = max(self._dropped, min(upper, state.bound))
        if upper > self._enough:
            return  # within noise of the best: a finalist, and nothing to learn from
        slow = smallest_slow_part(hops, self._is_slow)
        self.bounds.learn(slow, self._ledger.upper(self.index, slow))

    def _is_slow(self, hops: Sequence[int]) -> bool:
        if self.bounds.bound(hops) <= self._enough:
            return True
        return self._ledger.upper(self.index, hops) <= self._enough

    def _rebounded(self, state: State) -> State:
        """The state with its bound from all that is known by now."""
        hops = state.all_hops
        bound = min(state.bound, self.bounds.bound(hops) if hops else np.inf)
        if bound > self._enough and len(state.rings) < self.count:
            bound = min(bound, self._future(state))
        return msgspec.structs.replace(state, bound=bound, version=self.bounds.version)

    def _weights(self, rates: Floats) -> Floats:
        """Best rate from each GPU to each other over all mechanisms; 0 where there is no hop."""
        padded = np.append(rates, 0.0)
        best: Floats = padded[self.index.pair].max(axis=2)
        return best

    def _future(self, state: State) -> float:
        """Upper bound on what the hops still to come can have, beside those already there."""
        weights = self._weights(self.bounds.alongside(state.all_hops))
        bound = np.inf
        if len(state.rings) + 1 < self.count:
            bound = _each_way(weights)
        rest = [i for i in range(len(self.index.gpus)) if i not in state.path]
        if rest and len(state.path) > 1:
            # The path so far counts as one GPU: entered at its start, left at its end.
            rows, columns = [*rest, state.path[-1]], [*rest, state.path[0]]
            weights = weights[np.ix_(rows, columns)].copy()
            weights[-1, -1] = 0.0
        bound = min(bound, _each_way(weights)) if rest else bound
        if rest and bound > self._enough and not connected_above(weights, self._enough):
            bound = self._enough
        return bound

    def _children(self, state: State) -> list[State]:
        rest = [i for i in range(len(self.index.gpus)) if i not in state.path]
        targets = rest or [state.path[0]]
        hops = self.index.pair[state.path[-1], targets].reshape(-1)
        hops = hops[hops >= 0]
        if len(state.alive) > 1:
            images = self.index.images[state.alive[:, None], hops]
            hops = hops[images.min(axis=0) == hops]
        beside = self.bounds.alongside(state.all_hops)
        children = []
        for hop in hops.tolist():
            if self._in_order(state, hop) and self._admitted(state, hop):
                bound = min(state.bound, float(beside[hop]))
                children.append(self._child(state, hop, bound))
        return [child for child in children if child.bound > 0]

    def _admitted(self, state: State, hop: int) -> bool:
        return admitted(self.index, (*state.rings, (*state.hops, hop)), self._rule)

    def _in_order(self, state: State, hop: int) -> bool:
        """Rings come in ascending order, so that a set is built once."""
        if not state.rings:
            return True
        now = (*state.hops, hop)
        return now >= state.rings[-1][: len(now)]

    def _child(self, state: State, hop: int, bound: float) -> State:
        target = int(self.index.target[hop])
        hops = (*state.hops, hop)
        alive = state.alive
        if len(alive) > 1:  # the identity fixes everything
            alive = alive[self.index.images[alive, hop] == hop]
        if bound > self._enough:
            bound = min(bound, self.bounds.pattern_bound((*state.all_hops, hop), newest=hop))
        if target == state.path[0]:
            rings = (*state.rings, hops)
            return State(bound=bound, rings=rings, path=(0,), hops=(), alive=alive)
        return State(
            bound=bound, rings=state.rings, path=(*state.path, target), hops=hops, alive=alive
        )


def _each_way(weights: Floats) -> float:
    """The least over GPUs of the best hop out and the best hop in."""
    return float(min(weights.max(axis=1).min(), weights.max(axis=0).min()))
