"""Best-first search on an upper bound for single rings and ring sets, and local search.

States are partial ring sets, built ring by ring and hop by hop. Bounds come from measured subsets
(`bounds`), so a state costs no measurement until it is complete. A complete set slower than its
bound is explained: its smallest slow part bounds every state that contains the part or an image of
it. Measurements are spent on reasons, not on every prefix.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.errors import MeasurementError
from tccl_py.model.rings import RingSet
from tccl_py.search.bounds import (
    DIFFERENCE,
    Bounds,
    Evaluator,
    Floats,
    best_connected,
    connected_above,
    crossing_bound,
    crossings,
    smallest_slow_part,
)
from tccl_py.search.problem import HopIndex, Hops, SearchProblem, admits

MAX_STATES = 10_000
"""States visited for one ring count before the search gives up on a proof."""
DIVE_SETS, DIVE_STATES = 30, 4_000
"""Sets without a better ring, and states without a set, that end the quick look before proofs."""
MAX_PAIRED_HOPS = 128
MAX_PAIR_KINDS = 64
"""All pairs of hops are measured first if symmetry leaves no more kinds of pairs."""
CROSSING_SETS = 64
"""Sets measured at most to bound one group of GPUs."""

MAX_FINALISTS = 64
"""Runners-up kept; more matter only where measurements are very noisy."""
Sequences = tuple[tuple[int, ...], ...]
"""The hop numbers of each ring of a set."""


def chain_hops(sequences: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the hops of all rings of a set, one after the other."""
    return tuple(itertools.chain.from_iterable(sequences))


# The best ring set so far, and runners-up that noise may have misjudged.
class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A measured ring set: one sequence of hop numbers a ring, and its score in GB/s.

    Of two candidates the one of lower `order` is better.
    """

    order: tuple[float, int, int]
    score: float
    index: HopIndex
    sequences: Sequences

    @property
    def hops(self) -> tuple[int, ...]:
        """All hops of all rings."""
        return chain_hops(self.sequences)

    @property
    def rings(self) -> RingSet:
        """The rings of these hops."""
        return self.index.rings(self.sequences)


class Incumbent:
    """The best candidate and the runners-up.

    `error` is the largest relative standard error of a score; `floor` is a score reached elsewhere;
    `improved_at` is the number of sets measured when the best was found.
    """

    def __init__(self, *, error: float = 0.0, floor: float = 0.0) -> None:
        self.error = error
        self._floor = floor
        self._candidates: list[Candidate] = []
        self.improved_at = 0

    @property
    def score(self) -> float:
        """The best score so far, GB/s; 0 before the first."""
        return self._candidates[0].score if self._candidates else 0.0

    @property
    def lower_bound(self) -> float:
        """The score less possible luck: the best of many noisy scores is lucky."""
        return max(self._floor, self.score * (1 - 2 * self.error))

    @property
    def best(self) -> Candidate | None:
        """The best candidate, if there is one."""
        return self._candidates[0] if self._candidates else None

    def offer(
        self, score: float, index: HopIndex, sequences: Sequence[Sequence[int]], *, at: int
    ) -> None:
        """Take a ring set measured as number `at`; fewer bounces and rings win equal scores."""
        if score > self.score:
            self.improved_at = at
        rings = tuple(tuple(sequence) for sequence in sequences)
        bounces = int(index.bounces[list(chain_hops(rings))].sum())
        order = (-round(score, 6), bounces, len(rings))
        made = Candidate(order=order, score=score, index=index, sequences=rings)
        bisect.insort(self._candidates, made, key=lambda one: one.order)
        del self._candidates[MAX_FINALISTS:]

    def measure(
        self, evaluator: Evaluator, index: HopIndex, sequences: Sequence[Sequence[int]]
    ) -> None:
        """Measure a ring set and offer it."""
        measurement = evaluator.measurement(index, chain_hops(sequences))
        self.error = max(self.error, evaluator.relative_error(measurement))
        score = len(sequences) * measurement.rate_gbps
        self.offer(score, index, sequences, at=evaluator.sets_measured)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The best candidate and the runners-up."""
        return tuple(self._candidates)

    def finalists(self) -> list[Candidate]:
        """Return the candidates within three standard errors of the best, one of each set."""
        close = [c for c in self._candidates if c.score >= self.score * (1 - 3 * self.error)]
        distinct: dict[str, Candidate] = {}
        for candidate in close:
            distinct.setdefault(candidate.index.text(candidate.hops), candidate)
        return list(distinct.values())

    def clear(self) -> None:
        """Drop all candidates, because their scores are no longer valid."""
        self._candidates.clear()


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A partial ring set: whole rings, and a path (GPU positions) with its hops."""

    bound: float
    rings: tuple[tuple[int, ...], ...]
    path: tuple[int, ...]
    hops: tuple[int, ...]
    all_hops: tuple[int, ...]
    """Those of rings and path."""
    stabilizer: npt.NDArray[np.int64]
    """The symmetry elements that fix every hop."""
    version: int
    """The age of the bound."""
    compatibility: float = 0.0
    """The mean bound of two of the hops."""
    ahead: bool = False
    """Whether the bound knows the hops still to come."""


class RingSetSearch:
    """The search for sets of `count` rings; shares evaluator and incumbent with other counts.

    Call `dive`, `relax` and `run`. Each raises BudgetSpentError when the budget is used up;
    `bound_gbps` holds all the same.
    """

    def __init__(
        self,
        index: HopIndex,
        evaluator: Evaluator,
        incumbent: Incumbent,
        problem: SearchProblem,
        count: int,
    ) -> None:
        self.index, self._problem, self.count = index, problem, count
        self.rule = problem.rules.get(count)
        self.bounds = Bounds(index, copies=count)
        self._bounces: list[int] = index.bounces.astype(int).tolist()
        self._target: list[int] = index.target.tolist()
        self._marks = (
            index.marks(self.rule) if self.rule is not None else [None] * len(self._target)
        )
        self.evaluator, self.incumbent = evaluator, incumbent
        self._queue: list[tuple[tuple[float, ...], State]] = []
        self._serial = itertools.count()
        self._discarded_bound = 0.0
        self._relaxation_bound = float("inf")

    @property
    def bound_gbps(self) -> float:
        """Upper bound on the score of any set of this many rings, GB/s."""
        queued = max((state.bound for _, state in self._queue), default=0.0)
        return self.count * min(self._relaxation_bound, max(queued, self._discarded_bound))

    @property
    def is_contradicted(self) -> bool:
        """Whether a measured ring set is faster than its bound, so that an assumption is false."""
        allowed = 1 + DIFFERENCE + 6 * self.incumbent.error
        return any(
            one.score > self.count * self.bounds.bound(one.hops) * allowed
            for one in self.incumbent.candidates
            if len(one.sequences) == self.count
        )

    @property
    def is_over(self) -> bool:
        """Whether no set of this many rings can beat the incumbent, as far as bounds tell."""
        return self.bound_gbps <= self.count * self._enough

    @property
    def _enough(self) -> float:
        """Hop rate that a set must exceed to be worth finding."""
        return self.incumbent.lower_bound * (1 + self._problem.tolerance) / self.count

    def dive(self) -> None:
        """Search a little, for a good answer before proofs are tried."""
        everyone = np.arange(len(self.index.images))
        root = State(
            bound=float("inf"),
            rings=(),
            path=(0,),
            hops=(),
            all_hops=(),
            stabilizer=everyone,
            version=self.bounds.version,
        )
        self._push(root)
        for hops in self._classes():
            self.bounds.learn(hops, self.evaluator.upper(self.index, hops))
        self._relaxation_bound = best_connected(self._weights(self.bounds.single))
        self._search(DIVE_SETS, DIVE_STATES)

    def relax(self, cuts: Sequence[Sequence[int]]) -> None:
        """Bound all ring sets by the hops that cross each cut."""
        for cut in cuts:
            for choices in crossings(self.index, cut, self.count):
                if self._relaxation_bound <= self._enough or not self._queue:
                    return
                found = crossing_bound(
                    choices,
                    self.bounds,
                    enough=self._enough,
                    measure=lambda hops: self.evaluator.upper(self.index, hops),
                    limit=CROSSING_SETS,
                )
                self._relaxation_bound = min(self._relaxation_bound, found)

    def run(self) -> None:
        """Search until nothing can beat the incumbent, or MAX_STATES or the budget is spent."""
        if self._relaxation_bound > self._enough:
            self._search(self._problem.budget.idle_sets, MAX_STATES)

    def _classes(self) -> list[tuple[int, ...]]:
        """List one hop of each kind; for several rings also one pair of each kind, if few."""
        hops = np.unique(self.index.images.min(axis=0))
        kinds: list[tuple[int, ...]] = [(int(hop),) for hop in hops]
        count = len(self.index.hops)
        if self.count == 1 or count > MAX_PAIRED_HOPS:
            return kinds
        pairs: set[tuple[int, ...]] = set()
        known: set[tuple[int, ...]] = set()
        for pair in itertools.combinations_with_replacement(range(count), 2):
            if pair not in known:
                images = [tuple(row) for row in self.index.orbit(pair).tolist()]
                known.update(images)
                pairs.add(images[0])
                if len(pairs) > MAX_PAIR_KINDS:
                    return kinds
        return kinds + sorted(pairs)

    def _search(self, idle_sets: int | None, idle_states: int) -> None:
        begun = measured = self.evaluator.sets_measured
        since = 0
        for visited in range(MAX_STATES):
            if self.evaluator.sets_measured > measured:
                measured, since = self.evaluator.sets_measured, visited
            last = max(begun, self.incumbent.improved_at)
            idle = idle_sets is not None and measured - last >= idle_sets
            idle |= visited - since >= idle_states
            if not self._queue or idle or self.evaluator.allowance.out_of_time:
                break
            _, state = heapq.heappop(self._queue)
            self._visit(state)

    def _visit(self, state: State) -> None:
        try:
            # 1. Discard a state that cannot beat the incumbent.
            if state.bound <= self._enough:
                self._discarded_bound = max(self._discarded_bound, state.bound)
            # 2. Requeue a state whose bound is older than the newest pattern.
            elif state.version != self.bounds.version or not state.ahead:
                self._push(self._rebound(state))
            # 3. Measure a complete set, and learn why it is slow.
            elif len(state.rings) == self.count:
                self._measure(state)
            # 4. Extend a partial set by one hop.
            else:
                for child in self._children(state):
                    self._push(child)
        except (MeasurementError, KeyboardInterrupt):
            # What it may lead to counts for the bound.
            self._push(state)
            raise

    def _push(self, state: State) -> None:
        if state.bound <= self._enough:
            self._discarded_bound = max(self._discarded_bound, state.bound)
            return
        hops, count = state.all_hops, next(self._serial)
        bounces = sum([self._bounces[hop] for hop in hops])
        # Ties: the deeper state, then fewer bounces, then hops with little contention in pairs.
        order = (-round(state.bound, 6), -len(hops), bounces, -state.compatibility, count)
        heapq.heappush(self._queue, (order, state))

    def _compatibilities(self, sets: Sequence[Sequence[int]]) -> list[float]:
        """Return the mean bound of two hops of each set; all have as many hops."""
        if not sets:
            return []
        rows = np.array(sets, dtype=np.int64)
        pairs = self.bounds.pair[rows[:, :, None], rows[:, None, :]].reshape(len(rows), -1)
        means: list[float] = (pairs.sum(axis=1) / pairs.shape[1]).tolist()
        return means

    def _measure(self, state: State) -> None:
        hops = state.all_hops
        self.incumbent.measure(self.evaluator, self.index, state.rings)
        upper = self.evaluator.upper(self.index, hops)
        self._discarded_bound = max(self._discarded_bound, min(upper, state.bound))
        if upper > self._enough:
            return  # within noise of the best: a finalist, and nothing to learn from
        slow = smallest_slow_part(hops, self._is_slow)
        self.bounds.learn(slow, self.evaluator.upper(self.index, slow))

    def _is_slow(self, hops: Sequence[int]) -> bool:
        if self.bounds.bound(hops) <= self._enough:
            return True
        return self.evaluator.upper(self.index, hops) <= self._enough

    def _rebound(self, state: State) -> State:
        hops, bound, compatibility = state.all_hops, state.bound, state.compatibility
        if hops and state.version != self.bounds.version:
            bound = min(bound, self.bounds.bound(hops))
            (compatibility,) = self._compatibilities([hops])
        if bound > self._enough and len(state.rings) < self.count:
            bound = min(bound, self._completion_bound(state))
        news = {"bound": bound, "compatibility": compatibility}
        return msgspec.structs.replace(state, version=self.bounds.version, ahead=True, **news)

    def _weights(self, rates: Floats) -> Floats:
        """Return the best rate from each GPU to each other, over all mechanisms; 0 is no hop."""
        padded = np.zeros(len(rates) + 1)
        padded[:-1] = rates
        between = padded[self.index.pair]
        best: Floats = between[:, :, 0] if between.shape[2] == 1 else between.max(axis=2)
        return best

    def _completion_bound(self, state: State) -> float:
        """Return an upper bound on the hops still to come, beside the state's own hops."""
        weights = self._weights(self.bounds.beside(state.all_hops))
        bound = np.inf
        if len(state.rings) + 1 < self.count:
            bound = _least_degree(weights)
        rest = [i for i in range(len(self.index.gpus)) if i not in state.path]
        if rest and len(state.path) > 1:
            # The path so far counts as one GPU: entered at its start, left at its end.
            rows, columns = np.array([*rest, state.path[-1]]), np.array([*rest, state.path[0]])
            weights = weights[rows[:, None], columns]
            weights[-1, -1] = 0.0
        bound = min(bound, _least_degree(weights)) if rest else bound
        if rest and bound > self._enough and not connected_above(weights, self._enough):
            bound = self._enough
        return bound

    def _children(self, state: State) -> list[State]:
        rest = [i for i in range(len(self.index.gpus)) if i not in state.path]
        targets = rest or [state.path[0]]
        hops = self.index.pair[state.path[-1], targets].reshape(-1)
        hops = hops[hops >= 0]
        # Of these hops that the stabilizer exchanges, the smallest stands for all.
        if len(state.stabilizer) > 1:
            images = self.index.images[state.stabilizer[:, None], hops]
            among = np.zeros(len(self.index.hops), dtype=bool)
            among[hops] = True
            hops = hops[np.where(among[images], images, hops).min(axis=0) == hops]
        beside = self.bounds.beside(state.all_hops)[hops].tolist()
        bounds: dict[int, float] = {}
        for hop, rate in zip(hops.tolist(), beside, strict=True):
            if rate > 0 and self._may_follow(state, hop):
                bounds[hop] = min(state.bound, rate)
                if bounds[hop] <= self._enough:
                    self._discarded_bound = max(self._discarded_bound, bounds.pop(hop))
        means = self._compatibilities([(*state.all_hops, hop) for hop in bounds])
        return [
            self._child(state, hop, bound, mean)
            for (hop, bound), mean in zip(bounds.items(), means, strict=True)
        ]

    def _may_follow(self, state: State, hop: int) -> bool:
        """Return whether rings still ascend, so that a set is built once, and the rule admits."""
        ring = (*state.hops, hop)
        if state.rings and ring < state.rings[-1][: len(ring)]:
            return False
        return self._marks[hop] is None or admits(self.index, (*state.rings, ring), self.rule)

    def _child(self, state: State, hop: int, bound: float, compatibility: float) -> State:
        target = self._target[hop]
        hops, all_hops = (*state.hops, hop), (*state.all_hops, hop)
        stabilizer = state.stabilizer
        if len(stabilizer) > 1:  # the identity fixes everything
            stabilizer = stabilizer[self.index.images[stabilizer, hop] == hop]
        bound = min(bound, self.bounds.pattern_bound(all_hops, newest=hop))
        closed = target == state.path[0]
        return State(
            bound=bound,
            rings=(*state.rings, hops) if closed else state.rings,
            path=(0,) if closed else (*state.path, target),
            hops=() if closed else hops,
            all_hops=all_hops,
            stabilizer=stabilizer,
            version=self.bounds.version,
            compatibility=compatibility,
        )


def _least_degree(weights: Floats) -> float:
    """Return the least, over GPUs, of the best hop out and the best hop in."""
    least: float = min(min(np.maximum.reduce(weights, axis=at).tolist()) for at in (1, 0))
    return least


# Local search: ring sets that are faster than those near them, from random beginnings.
#
# Best-first search is stuck where bounds are far above the rates. There steps to near ring sets
# find better ones by fewer measurements.

SIDEWAYS = 5
"""Steps in a row to sets that are only equally fast."""
LOOKS = 500
"""Sets looked at in a row without a measurement, after which all near ones are known."""


class LocalSearch:
    """Climb from ring sets to faster ones near them, and offer each to the incumbent.

    A near set has one GPU elsewhere in one ring, or another mechanism for one hop. Sets that bounds
    of `search` show to be slower than where a step begins are not measured. The climb ends after
    `sets` measurements, or after `idle_sets` without a better ring.
    """

    def __init__(
        self, search: RingSetSearch, *, sets: float, idle_sets: float, seed: int = 0
    ) -> None:
        self._index, self._bounds, self._rule = search.index, search.bounds, search.rule
        self._evaluator, self._incumbent, self._count = (
            search.evaluator,
            search.incumbent,
            search.count,
        )
        self._idle_sets, self._begun, self._looks = idle_sets, self._evaluator.sets_measured, 0
        self._most = self._begun + sets
        self._random = random.Random(seed)  # a resumed plan draws the same
        self._seen: set[Hops] = set()

    @property
    def is_over(self) -> bool:
        """Whether enough was measured, or nothing new is near."""
        spent = self._evaluator.sets_measured
        idle = spent - max(self._begun, self._incumbent.improved_at)
        return spent >= self._most or idle >= self._idle_sets or self._looks >= LOOKS

    def run(self) -> None:
        """Climb from the best set of rings, then from random ones."""
        best, count = self._incumbent.best, self._count
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
