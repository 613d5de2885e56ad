"""Strategies by name, all with one signature: a problem and a reporter in, a result out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tccl_py.errors import (
    BudgetSpentError,
    InputError,
    MeasurementError,
    SearchError,
    check_type,
    require,
)
from tccl_py.model.rings import Ring, ring_like
from tccl_py.model.symmetry import Symmetry, keeping
from tccl_py.search.best_first import (
    Candidate,
    Incumbent,
    LocalSearch,
    RingSetSearch,
    Sequences,
    chain_hops,
)
from tccl_py.search.bounds import DIFFERENCE, Evaluator, checked_index, distinct_cuts
from tccl_py.search.problem import (
    HopIndex,
    Hops,
    Progress,
    Reporter,
    SearchProblem,
    SearchResult,
    admits,
    all_ring_sets,
    check_problem,
    count_ring_sets,
    random_rings,
)

FEW_RING_SETS = 150
"""So few ring sets are measured one by one: bounds would cost more."""
LOCAL_SHARE, LOCAL_SETS = 0.9, 2000
"""What a local search may measure: a share of the sets left, and sets."""
LOCAL_IDLE_SETS, UNLIMITED_IDLE_SETS = 1000, 100
"""Sets without a better ring that end it, with and without a limit of sets."""
SPOT_CHECKS = 2
"""Further members measured of each class of hops that symmetries call equal."""
LEAST_IMAGES, IMAGES_SHARE = 3, 0.1
"""Images measured to check a symmetry, and a share of the sets that a search measured."""
RING_SETS_DRAWN, DRAWS = 2, 10
"""Ring sets of each count measured to check bounds, and draws at most to find that many."""
AGREEMENT = 0.03
"""A rate by symmetry may differ this much (relative) from the set's own measurement."""
CONFIRMATIONS = 4
"""Fresh measurements of a finalist in each round; each round the better half stays."""
MONOTONE = "for the bound, adding a transfer never speeds up another"
LESS_SYMMETRIC = "the machine is less symmetric than described; searched again"
EXACT = "for the bound, single samples are exact: the source states no `noise`"
SYMMETRIC = "for the bound, sets that the machine's symmetry exchanges are equally fast"


class Run:
    """One run of one strategy: the problem, the evaluator, the incumbent, and the reporter.

    A strategy may store upper bounds by ring count in `bounds`, with unchecked `assumptions` that
    they rest on, and remarks in `notices`; `symmetric` is whether measurements confirmed the
    symmetry that the problem describes.
    """

    def __init__(self, problem: SearchProblem, strategy: str, reporter: Reporter | None) -> None:
        self.problem = problem
        self.strategy = strategy
        self.incumbent = Incumbent(error=problem.noise, floor=problem.floor_gbps)
        self.evaluator = Evaluator(
            problem.source,
            budget=problem.budget,
            noise=problem.noise,
            measured=self.report,
        )
        self.bounds: dict[int, float] = {}
        self.assumptions: tuple[str, ...] = ()
        self.notices: list[str] = []
        self.symmetric = False
        self._reporter = reporter
        self._count = min(problem.spaces)
        self._plain: dict[int, HopIndex] = {}

    @property
    def bound_gbps(self) -> float:
        """Upper bound over all ring counts, never below the best found."""
        return max(self.incumbent.score, *self.bounds.values(), 0.0)

    def report(self) -> None:
        """Send the state to the reporter."""
        if self._reporter is not None:
            progress = Progress(
                rings_in_set=self._count,
                sets_measured=self.evaluator.sets_measured,
                best_gbps=self.incumbent.score,
                bound_gbps=self.bound_gbps,
            )
            self._reporter(progress)

    def begin(self, count: int) -> None:
        """Report that sets of `count` rings are searched from here on."""
        self._count = count
        self.report()

    def offer(self, index: HopIndex, sequences: Sequence[Sequence[int]]) -> None:
        """Measure a ring set and offer it to the incumbent."""
        before = self.incumbent.score
        self.incumbent.measure(self.evaluator, index, sequences)
        if self.incumbent.score > before:
            self.report()

    def offer_known(self, sets: Sequence[Sequence[Ring | Sequence[int]]]) -> None:
        """Measure ring sets given as GPU orders, or as rings of another space.

        Raises InputError: what is no ring, or has not each GPU once.
        """
        check_type(sets, "sets", Sequence)
        for known in sets:
            check_type(known, "sets", Sequence)
            require(known, "`sets`", "has a set without rings", "a set has one ring at least")
            for ring in known:
                check_type(ring, "sets", Sequence, Ring)
                order = ring.gpus if isinstance(ring, Ring) else ring
                for number in order:
                    check_type(number, "sets", int, np.integer)
                right = f"each of {', '.join(map(str, self.problem.gpus))} once"
                good = sorted(order) == sorted(self.problem.gpus)
                require(good, "`sets`", f"has a ring {tuple(order)}"[:80], right)
        for count in self.problem.spaces:
            index = self.plain_index(count)
            for known in sets:
                if count % len(known) == 0:
                    try:
                        rings = [ring_like(index.space, ring) for ring in known]
                    except SearchError:
                        continue  # the space lacks one of the hops
                    sequences = [[index.number[hop] for hop in ring.hops] for ring in rings]
                    sequences *= count // len(known)
                    if admits(index, sequences, self.problem.rules.get(count)):
                        self.offer(index, sequences)

    def plain_index(self, count: int) -> HopIndex:
        """Index the hops of one ring count without symmetry: every set is measured as it is."""
        if count not in self._plain:
            symmetry = self.problem.symmetry
            identity = keeping(symmetry, np.zeros(len(symmetry.elements), dtype=bool))
            self._plain[count] = HopIndex(self.problem.spaces[count], identity)
        return self._plain[count]


Strategy = Callable[[Run], None]


def find_rings(
    problem: SearchProblem,
    *,
    strategy: str | Strategy = "best-first",
    reporter: Reporter | None = None,
) -> SearchResult:
    """Find the ring set with the highest score, by a named strategy or by the caller's own.

    An own strategy is a function of the `Run`: it measures rings by `offer_known` or `offer` and
    looks at `incumbent`. An upper bound for each ring count may go into `bounds`; without bounds
    nothing is proven.

    Ctrl-C (KeyboardInterrupt) and a spent budget end the search with the best so far; Ctrl-C before
    the first ring goes on to the caller. Raises InputError: unknown strategy (the names are
    listed). SearchError: no ring possible, or none found yet when the budget was spent.
    """
    check_type(problem, "problem", SearchProblem)
    name = strategy_name(strategy)
    fault, right = f"is of type {type(reporter).__name__}", "give a function that takes a Progress"
    require(reporter is None or callable(reporter), "`reporter`", fault, right)
    check_problem(problem)
    run = Run(problem, name, reporter)
    search = strategy if callable(strategy) else STRATEGIES[strategy]
    cancelled = False
    try:
        search(run)
    except KeyboardInterrupt:
        if run.incumbent.best is None:
            raise
        cancelled = True
    except BudgetSpentError:
        pass
    except MeasurementError as error:
        if run.incumbent.best is None:
            raise
        run.notices.append(f"the search ended early: {error}")
    if run.incumbent.best is None:
        raise SearchError("no ring was found: cut short, or no closed ring exists")
    return _result(run, cancelled=cancelled)


def strategy_name(strategy: str | Strategy) -> str:
    """Return the name of a strategy: that of a function is the function's.

    Raises InputError: an unknown name, or no function.
    """
    if callable(strategy):
        return str(getattr(strategy, "__name__", type(strategy).__name__))
    if str(strategy) not in STRATEGIES:
        right = f"there are {', '.join(STRATEGIES)}, or give a function of a Run"
        raise InputError(f"strategy {str(strategy)[:40]!r}", "is not known", right)
    return strategy


def _result(run: Run, *, cancelled: bool) -> SearchResult:
    best = run.incumbent.best
    assert best is not None
    known = set(run.bounds) == set(run.problem.spaces) and np.isfinite(run.bound_gbps)
    bound = run.bound_gbps if known else None
    assumptions = (*run.assumptions, *(EXACT,) * run.evaluator.taken_as_exact)
    close = bound is not None and bound <= best.score * (1 + run.problem.tolerance) * (1 + 1e-9)
    return SearchResult(
        strategy=run.strategy,
        rings=best.rings,
        rate_gbps=best.score,
        bound_gbps=bound,
        proven=close and not assumptions,
        assumptions=assumptions if known else (),
        sets_measured=run.evaluator.sets_measured - run.evaluator.sets_remembered,
        sets_remembered=run.evaluator.sets_remembered,
        sets_by_symmetry=run.evaluator.sets_by_symmetry,
        seconds=run.evaluator.allowance.seconds,
        simulated=run.problem.source.simulated,
        assumed=run.evaluator.assumed,
        cancelled=cancelled,
        symmetric=run.symmetric,
        notices=tuple(run.notices),
    )


def _best_first(run: Run) -> None:
    """Search under the symmetry, as far as measurements confirm it; then check answer and bound.

    Where a check fails, every hop is measured to find the symmetry that is left. If that is not
    enough either, the search uses no symmetry. Where ring sets are few, each is measured instead.
    """
    symmetry, spaces = run.problem.symmetry, run.problem.spaces
    few = _few_ring_sets(run)
    many = [count for count in sorted(spaces) if count not in few]
    known = [*run.problem.known, (run.problem.gpus,)]
    attempts: tuple[Callable[[], dict[int, HopIndex]], ...] = (
        lambda: _checked_indices(run, symmetry, many, SPOT_CHECKS),
        lambda: _checked_indices(run, symmetry, many, None),
        lambda: {count: run.plain_index(count) for count in many},
    )
    for indices in attempts:
        run.offer_known(known)
        for count, sets in few.items():
            run.begin(count)
            for sequences in sets:
                run.offer(run.plain_index(count), sequences)
        _bound_few(run, few)
        searches = _search_all_counts(run, indices())
        if _holds(run, searches):
            described = len(symmetry.elements)
            kept = all(len(search.index.symmetry.elements) == described for search in searches)
            equal = all(_images_agree(run, count, sets) for count, sets in few.items())
            run.symmetric = kept and equal and LESS_SYMMETRIC not in run.notices
            break
        run.report()
        run.bounds.clear()
        if not any(search.index.is_symmetric for search in searches):
            run.notices.append("a set of transfers is faster than a part of it: no bound holds")
            return
        if run.incumbent.best is not None:
            known.append(run.incumbent.best.rings.rings)
        run.incumbent.clear()
        run.notices += [] if LESS_SYMMETRIC in run.notices else [LESS_SYMMETRIC]
    _bound_few(run, few)


def _few_ring_sets(run: Run) -> dict[int, list[Sequences]]:
    """Return all ring sets of each number of rings that has few, as far as the budget allows.

    Of images one is enough where the source's rates are as symmetric as described.
    """
    few: dict[int, list[Sequences]] = {}
    for count, space in sorted(run.problem.spaces.items()):
        if count_ring_sets(space, count) <= FEW_RING_SETS:
            exact = run.evaluator.bounds_hold
            index = HopIndex(space, run.problem.symmetry) if exact else run.plain_index(count)
            sets = all_ring_sets(index, count, run.problem.rules.get(count))
            few[count] = list({index.canonical(chain_hops(one)): one for one in sets}.values())
            if not run.evaluator.allowance.covers(sum(map(len, few.values()))):
                del few[count]
    return few


def _bound_few(run: Run, few: Mapping[int, Sequence[Sequences]]) -> None:
    """Bound by measurements of all ring sets, without an assumption."""
    best = run.incumbent.best
    for count, sets in few.items():
        index = run.plain_index(count)
        own = best.index.text(best.hops) if best is not None else ""
        rivals = (hops for hops in map(chain_hops, sets) if index.text(hops) != own)
        measurements = (run.evaluator.measurement_as_is(index, hops) for hops in rivals)
        run.bounds[count] = count * max(map(run.evaluator.raise_rate, measurements), default=0.0)


def _images_agree(run: Run, count: int, sets: Sequence[Sequences]) -> bool:
    """Return whether ring sets that the described symmetry exchanges are equally fast."""
    index, plain = HopIndex(run.problem.spaces[count], run.problem.symmetry), run.plain_index(count)
    rates: dict[Hops, list[float]] = {}
    for hops in map(chain_hops, sets):
        rate = run.evaluator.measurement_as_is(plain, hops).rate_gbps
        rates.setdefault(index.canonical(hops), []).append(rate)
    allowed = 1 + DIFFERENCE + 6 * run.incumbent.error
    return all(max(images) <= allowed * min(images) for images in rates.values())


def _checked_indices(
    run: Run, symmetry: Symmetry, counts: Sequence[int], checks: int | None
) -> dict[int, HopIndex]:
    indices: dict[int, HopIndex] = {}
    for count in counts:
        run.begin(count)
        space = run.problem.spaces[count]
        index = checked_index(space, symmetry, run.evaluator, checks=checks)
        # Hops that differ at one ring count are not equal at the next.
        symmetry = index.symmetry
        indices[count] = index
    return indices


def _search_all_counts(run: Run, indices: dict[int, HopIndex]) -> list[RingSetSearch]:
    position = {gpu: i for i, gpu in enumerate(run.problem.gpus)}
    singles = [(i,) for i in position.values()]
    groups = [tuple(position[gpu] for gpu in cut if gpu in position) for cut in run.problem.cuts]
    cuts = [cut for cut in (*singles, *groups) if 0 < len(cut) < len(position)]
    if indices and not run.evaluator.bounds_hold:
        symmetric = any(index.is_symmetric for index in indices.values())
        run.assumptions = (MONOTONE, *(SYMMETRIC,) * symmetric)
    searches: list[RingSetSearch] = []
    for turn, (count, index) in enumerate(indices.items()):
        run.begin(count)
        run.evaluator.allowance.allot(parts=len(indices) - turn)
        search = RingSetSearch(index, run.evaluator, run.incumbent, run.problem, count)
        searches.append(search)
        begun, budget = run.evaluator.sets_measured, run.problem.budget
        try:
            search.dive()
            limited = run.evaluator.allowance.left < float("inf")
            idle_sets = LOCAL_IDLE_SETS if limited else UNLIMITED_IDLE_SETS
            _search_locally(run, search, budget.idle_sets / 2 if budget.idle_sets else idle_sets)
            search.relax(distinct_cuts(index, cuts))
            search.run()
            if not budget.idle_sets:
                _search_locally(run, search, (run.evaluator.sets_measured - begun) / 2, seed=1)
        except BudgetSpentError:
            pass
        finally:
            run.bounds[count] = search.bound_gbps
    run.evaluator.allowance.allot(parts=1)
    _confirm(run)
    return searches


def _search_locally(run: Run, search: RingSetSearch, idle_sets: float, *, seed: int = 0) -> None:
    if search.is_over:
        return
    sets = min(run.evaluator.allowance.left * LOCAL_SHARE, LOCAL_SETS)
    LocalSearch(search, sets=sets, idle_sets=idle_sets, seed=seed).run()


def _holds(run: Run, searches: Sequence[RingSetSearch]) -> bool:
    """Return whether measurements agree with what the search assumed.

    1. The answer's own measurement agrees with its image's.
    2. No ring set is faster than its bound: neither the best ones nor a few drawn at random.
    3. Images of the answer, and of sets that bound others, drawn at random, are as fast as these.

    The first suffices where bounds hold by construction of the source, or are not to be checked.
    """
    best = run.incumbent.best
    if best is None:
        return True
    if not _agrees(run, best.index, best.hops, best.score / len(best.sequences), AGREEMENT):
        return False
    if run.evaluator.bounds_hold or not run.problem.check_bound:
        return True
    chance = random.Random(0)  # a resumed plan draws the same
    for search in searches:
        _offer_drawn(run, search.count, chance)
        if search.is_contradicted:
            return False
    bounding = [(search.index, hops) for search in searches for hops in search.bounds.learned]
    chance.shuffle(bounding)
    orbits = (
        (index, hops, images)
        for index, hops in [(best.index, best.hops), *bounding]
        if len(images := index.orbit(hops)) > 1
    )
    most = LEAST_IMAGES + int(IMAGES_SHARE * run.evaluator.sets_measured)
    count = 0
    for index, hops, images in itertools.islice(orbits, most):
        image = images[chance.randrange(1, len(images))].tolist()
        if not _agrees(run, index, image, run.evaluator.rate(index, hops), DIFFERENCE):
            return False
        count += 1
    if count:
        run.assumptions = (MONOTONE, f"{SYMMETRIC} ({count} drawn at random were)")
    return True


def _offer_drawn(run: Run, count: int, chance: random.Random) -> None:
    """Offer a few ring sets drawn at random that were not measured."""
    index, rule = run.plain_index(count), run.problem.rules.get(count)
    offered = 0
    for _ in range(DRAWS):
        rings = random_rings(index, count, chance)
        hops = chain_hops(rings)
        new = rings and run.evaluator.known_rate(index, hops) is None
        if new and admits(index, rings, rule) and offered < RING_SETS_DRAWN:
            run.offer(index, rings)
            offered += 1


def _agrees(
    run: Run, index: HopIndex, hops: Sequence[int], expected: float, allowed: float
) -> bool:
    """Return whether the measurement of `hops` themselves is the expected rate, within noise."""
    itself = run.evaluator.measurement_as_is(index, hops)
    allowed += 6 * run.evaluator.relative_error(itself)
    return abs(itself.rate_gbps - expected) <= allowed * expected


def _confirm(run: Run) -> None:
    """Measure finalists within noise again and again, and halve them each round."""
    error = run.incumbent.error
    finalists = run.incumbent.finalists()
    if error <= run.problem.tolerance or len(finalists) < 2:
        return
    run.report()
    rates: dict[int, list[float]] = {turn: [] for turn in range(len(finalists))}
    while len(rates) > 1 or len(rates[min(rates)]) < 2 * CONFIRMATIONS:
        times = CONFIRMATIONS if len(rates) > 4 else 4 * CONFIRMATIONS
        for turn, samples in rates.items():
            index, hops = finalists[turn].index, finalists[turn].hops
            # The first sample, by which it became a finalist, is a lucky one.
            numbers = range(len(samples) + 1, len(samples) + 1 + times)
            samples.extend(run.evaluator.further_rates(index, hops, numbers))
        ranked = sorted(rates, key=lambda turn: -_score(finalists[turn], rates[turn]))
        rates = {turn: rates[turn] for turn in ranked[: max(1, len(ranked) // 2)]}
    (winner,) = rates
    score = _score(finalists[winner], rates[winner])
    run.incumbent.clear()
    run.incumbent.offer(
        score, finalists[winner].index, finalists[winner].sequences, at=run.evaluator.sets_measured
    )


def _score(candidate: Candidate, rates: Sequence[float]) -> float:
    return len(candidate.sequences) * float(np.mean(rates))


def _nccl_order(run: Run) -> None:
    """Measure the rings that the problem knows (NCCL's own), or the ascending order."""
    run.offer_known(run.problem.known or [(run.problem.gpus,)])


STRATEGIES: dict[str, Strategy] = {"best-first": _best_first, "nccl-order": _nccl_order}
