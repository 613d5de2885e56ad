"""Strategies by name, all with one signature: a problem and a reporter in, a result out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tccl_py.errors import SearchError
from tccl_py.model.rings import HopSpace, Ring, ring_from_order, ring_like
from tccl_py.model.symmetry import Symmetry, keeping
from tccl_py.search.best_first import RingSetSearch
from tccl_py.search.evaluator import BudgetSpentError, Candidate, Incumbent, Ledger, trusted_index
from tccl_py.search.problem import (
    HopIndex,
    Progress,
    Reporter,
    SearchProblem,
    SearchResult,
    SilentReporter,
    check_problem,
)
from tccl_py.search.tccl_paper import (
    admitted,
    all_ring_sets,
    count_ring_sets,
    eager_rings,
    interchangeable,
)

Strategy = Callable[["Run"], None]
_Known = TypeVar("_Known")

MAX_BRUTE_FORCE = 200_000
"""Ring sets that brute force measures at most; more are skipped, with their number."""
FEW_RING_SETS = 150
"""So few ring sets are measured one by one: bounds would cost more."""
SPOT_CHECKS = 2
"""Further members measured of each class of hops that symmetries call equal."""
AGREEMENT = 0.03
"""An answer that symmetry vouched for may differ this much (relative) from its own measurement."""
CONFIRMATIONS = 4
"""Fresh measurements of a finalist in each round; each round the better half stays."""


class SkippedError(SearchError):
    """A strategy that would need too many states; `states` says how many."""

    def __init__(self, strategy: str, states: int) -> None:
        super().__init__(f"{strategy} skipped: {states} states")
        self.states = states


class Run:
    """One run of one strategy: the problem, what is known by now, and who watches."""

    def __init__(self, problem: SearchProblem, strategy: str, reporter: Reporter) -> None:
        self.problem = problem
        self.strategy = strategy
        self.reporter = reporter
        self.incumbent = Incumbent(error=problem.noise, floor=problem.floor_gbps)
        self.ledger = Ledger(
            problem.source, budget=problem.budget, noise=problem.noise, watch=self.report
        )
        self.bounds: dict[int, float] = {}
        self.notices: list[str] = []
        self.current = min(problem.spaces)
        self.budget_spent = False

    @property
    def bound_gbps(self) -> float:
        """Upper bound over all ring counts, never below the best found."""
        return max(self.incumbent.score, *self.bounds.values(), 0.0)

    def report(self) -> None:
        """Tell the reporter how far the run is."""
        self.reporter.update(
            Progress(
                strategy=self.strategy,
                rings_in_set=self.current,
                sets_measured=self.ledger.sets_measured,
                best_gbps=self.incumbent.score,
                bound_gbps=self.bound_gbps,
            )
        )

    def offer(self, index: HopIndex, sequences: Sequence[Sequence[int]]) -> None:
        """Measure a ring set and take note of it."""
        hops = [hop for sequence in sequences for hop in sequence]
        rate = self.ledger.rate(index, hops)
        at = self.ledger.sets_measured
        self.incumbent.offer(len(sequences) * rate, index, sequences, at=at)

    def offer_orders(self, orders: Sequence[Sequence[Sequence[int]]]) -> None:
        """Measure rings known beforehand by their orders, just as they are."""
        self._offer_all(orders, ring_from_order)

    def offer_known(self) -> None:
        """Measure the rings that the problem says were found elsewhere."""
        self._offer_all(self.problem.known, ring_like)

    def _offer_all(
        self, sets: Sequence[Sequence[_Known]], make: Callable[[HopSpace, _Known], Ring]
    ) -> None:
        for count in self.problem.spaces:
            index = _plain_index(self, count)
            for known in sets:
                if count % len(known) == 0:
                    try:
                        rings = [make(index.space, one) for one in known]
                    except SearchError:
                        continue  # it needs a hop that the space does not have
                    sequences = [[index.number[hop] for hop in one.hops] for one in rings]
                    sequences *= count // len(known)
                    if admitted(index, sequences, self.problem.rules.get(count)):
                        self.offer(index, sequences)


def find_rings(
    problem: SearchProblem,
    *,
    strategy: str | Strategy = "best-first",
    reporter: Reporter | None = None,
) -> SearchResult:
    """Find the ring set with the highest score, by the named strategy or by one of your own.

    One of your own is a function that is given the `Run`: it measures rings by `offer_orders` or
    `offer`, looks at `incumbent`, and returns when it has looked enough. If it knows a bound for
    each ring count it may say so in `bounds`; otherwise nothing is proven.

    Ctrl-C (KeyboardInterrupt) and a spent budget end the search with the best so far; Ctrl-C
    before there is one goes on to the caller.

    Raises:
        SearchError: unknown strategy (the names are listed), no ring possible, or none found yet
            when the budget was spent.
        SkippedError: brute force over too many states.
    """
    name, act = _strategy(strategy)
    check_problem(problem)
    run = Run(problem, name, reporter or SilentReporter())
    cancelled = False
    try:
        act(run)
    except KeyboardInterrupt:
        if run.incumbent.best is None:
            raise
        cancelled = True
    except BudgetSpentError:
        run.budget_spent = True
    if run.incumbent.best is None:
        raise SearchError("no ring was found: cut short, or no closed ring exists")
    return _result(run, cancelled=cancelled)


def _strategy(wanted: str | Strategy) -> tuple[str, Strategy]:
    """A strategy and what to call it."""
    if not isinstance(wanted, str):
        return getattr(wanted, "__name__", type(wanted).__name__), wanted
    if wanted not in STRATEGIES:
        raise SearchError(f"no strategy {wanted!r}; there are {', '.join(STRATEGIES)}")
    return wanted, STRATEGIES[wanted]


def _result(run: Run, *, cancelled: bool) -> SearchResult:
    best = run.incumbent.best
    assert best is not None
    known = set(run.bounds) == set(run.problem.spaces) and np.isfinite(run.bound_gbps)
    bound = run.bound_gbps if known else None
    close = bound is not None and bound <= best.score * (1 + run.problem.tolerance) * (1 + 1e-9)
    return SearchResult(
        strategy=run.strategy,
        rings=best.index.rings(best.sequences),
        rate_gbps=best.score,
        bound_gbps=bound,
        proven=close,
        sets_measured=run.ledger.sets_measured - run.ledger.sets_remembered,
        sets_remembered=run.ledger.sets_remembered,
        sets_by_symmetry=run.ledger.sets_by_symmetry,
        seconds=run.ledger.seconds,
        simulated=run.ledger.simulated,
        assumed=run.ledger.assumed,
        cancelled=cancelled,
        notices=tuple(run.notices),
    )


def _best_first(run: Run) -> None:
    """Search under the symmetry, as far as measurements bear it out; then check the answer."""
    symmetry = run.problem.symmetry
    known = (*run.problem.orders, (run.problem.gpus,))
    run.offer_known()
    run.offer_orders(known)
    indices = _trusted_indices(run, symmetry, SPOT_CHECKS)
    _search_all_counts(run, indices)
    if not _answer_holds(run):
        # Some device is unlike its images: measure every hop, keep what symmetry is left.
        run.notices.append("the machine is less symmetric than described; searched again")
        run.incumbent.forget()
        run.bounds.clear()
        run.offer_known()
        run.offer_orders(known)
        _search_all_counts(run, _trusted_indices(run, symmetry, None))


def _trusted_indices(run: Run, symmetry: Symmetry, checks: int | None) -> dict[int, HopIndex]:
    indices: dict[int, HopIndex] = {}
    for count in sorted(run.problem.spaces):
        run.current = count
        space = run.problem.spaces[count]
        index = trusted_index(space, symmetry, run.ledger, checks=checks)
        # Hops that differ at one ring count are not trusted at the next.
        symmetry = index.symmetry
        indices[count] = index
    return indices


def _plain_index(run: Run, count: int) -> HopIndex:
    """The hops of one ring count without any symmetry: every set is measured as it is."""
    symmetry = run.problem.symmetry
    identity = keeping(symmetry, np.zeros(len(symmetry.elements), dtype=bool))
    return HopIndex(run.problem.spaces[count], identity)


def _search_all_counts(run: Run, indices: dict[int, HopIndex]) -> None:
    position = {gpu: i for i, gpu in enumerate(run.problem.gpus)}
    singles = [(i,) for i in position.values()]
    groups = [tuple(position[gpu] for gpu in cut if gpu in position) for cut in run.problem.cuts]
    cuts = [cut for cut in (*singles, *groups) if 0 < len(cut) < len(position)]
    for turn, (count, index) in enumerate(indices.items()):
        run.current = count
        run.ledger.share_out(len(indices) - turn)
        search = RingSetSearch(
            index,
            run.ledger,
            run.incumbent,
            count=count,
            tolerance=run.problem.tolerance,
            idle_sets=run.problem.budget.idle_sets,
            rule=run.problem.rules.get(count),
        )
        try:
            search.dive()
            if count_ring_sets(index.space, count) <= FEW_RING_SETS:
                search.exhaust()
            else:
                search.relax(_one_of_each(index, cuts))
                search.run()
        except BudgetSpentError:
            run.budget_spent = True
        finally:
            run.bounds[count] = search.bound_gbps
    run.ledger.share_out(1)
    _confirm(run)


def _one_of_each(index: HopIndex, cuts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Leaves out cuts that the symmetry takes to one already there."""
    names = [f"G{gpu}" for gpu in index.gpus]
    point = {name: i for i, name in enumerate(index.symmetry.points)}
    # Where a ring leads through the world outside, that is no device, and stays where it is.
    moving = [cut for cut in cuts if all(names[i] in point for i in cut)]
    elements = index.symmetry.elements[index.inside]
    kept: dict[tuple[int, ...], tuple[int, ...]] = {}
    for cut in moving:
        columns = [point[names[i]] for i in cut]
        images = np.unique(np.sort(elements[:, columns], axis=1), axis=0)
        kept.setdefault(tuple(images[0].tolist()), cut)
    return [cut for cut in cuts if cut not in moving] + list(kept.values())


def _answer_holds(run: Run) -> bool:
    """Whether the answer itself measures as the image did that it was judged by."""
    best = run.incumbent.best
    if best is None:
        return True
    itself = run.ledger.exactly(best.index, best.hops)
    expected = best.score / len(best.sequences)
    allowed = AGREEMENT + 6 * run.ledger.relative_error(itself)
    return abs(itself.rate_gbps - expected) <= allowed * expected


def _confirm(run: Run) -> None:
    """Where noise could have chosen, measure the finalists again and again, and halve them."""
    error = run.incumbent.error
    finalists = run.incumbent.finalists()
    if error <= run.problem.tolerance or len(finalists) < 2:
        return
    rates: dict[int, list[float]] = {turn: [] for turn in range(len(finalists))}
    while len(rates) > 1 or len(rates[min(rates)]) < 2 * CONFIRMATIONS:
        for turn, known in rates.items():
            index, hops = finalists[turn].index, finalists[turn].hops
            times = CONFIRMATIONS if len(rates) > 4 else 4 * CONFIRMATIONS
            known.extend(run.ledger.again(index, hops, times))
        ranked = sorted(rates, key=lambda turn: -_score(finalists[turn], rates[turn]))
        rates = {turn: rates[turn] for turn in ranked[: max(1, len(ranked) // 2)]}
    (winner,) = rates
    score = _score(finalists[winner], rates[winner])
    run.incumbent.forget()
    run.incumbent.offer(
        score, finalists[winner].index, finalists[winner].sequences, at=run.ledger.sets_measured
    )


def _score(candidate: Candidate, rates: Sequence[float]) -> float:
    return len(candidate.sequences) * float(np.mean(rates))


def _tccl(run: Run) -> None:
    """Every child of a state is measured at once; interchangeable GPUs share the answers."""
    for count in sorted(run.problem.spaces):
        run.current = count
        eager_rings(
            run.ledger,
            run.incumbent,
            _plain_index(run, count),
            count=count,
            kin=interchangeable(run.problem.symmetry, run.problem.gpus),
        )


def _brute_force(run: Run) -> None:
    """Every ring set is measured."""
    states = sum(count_ring_sets(space, count) for count, space in run.problem.spaces.items())
    if states > MAX_BRUTE_FORCE:
        raise SkippedError("brute-force", states)
    for count in run.problem.spaces:
        run.current = count
        index = _plain_index(run, count)
        for sequences in all_ring_sets(index, count, run.problem.rules.get(count)):
            run.offer(index, sequences)
        run.bounds[count] = run.incumbent.score


def _nccl_order(run: Run) -> None:
    """What the problem knows beforehand (NCCL's own), or the ascending order, as it is."""
    run.offer_known()
    if run.problem.orders or not run.problem.known:
        run.offer_orders(run.problem.orders or [(run.problem.gpus,)])


STRATEGIES: dict[str, Strategy] = {
    "best-first": _best_first,
    "tccl": _tccl,
    "brute-force": _brute_force,
    "nccl-order": _nccl_order,
}
