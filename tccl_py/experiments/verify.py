"""Verification: value checks, interleaved rounds of all arms, NCCL's log, and the winner."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from tccl_py.delivery.delivered import RingsFound, rings_found
from tccl_py.errors import InputError, MeasurementError
from tccl_py.experiments.communication import Communication, communication_of, timed_calls
from tccl_py.experiments.comparison import timed_rows
from tccl_py.experiments.jobs import AGAIN, Arm, Launcher, Outcome
from tccl_py.experiments.record import ArmResult, Verification, good_choices
from tccl_py.experiments.rounds import Rounds, RunBudget, least_rounds, run_rounds
from tccl_py.experiments.spec import JobSpec, Row, WrongValue, large_gbps, training_rows
from tccl_py.experiments.target import Target
from tccl_py.files import pick
from tccl_py.plan.chains import BY_VARIABLES, ChoiceName, as_good
from tccl_py.plan.text import plan_name

DRY_RUN = "a DRY RUN over gloo"
_equal = partial(math.isclose, rel_tol=5e-3)
"""Losses and gradients of a few training steps: sums in another order differ by rounding."""
Interrupted = Callable[[Verification], object]
"""Gets the comparison of the complete rounds where an interruption ends a verification."""


def verify_target(
    target: Target,
    launcher: Launcher,
    budget: RunBudget,
    *,
    interrupted: Interrupted | None = None,
) -> Verification:
    """Run real collectives in every arm of a plan, or in default NCCL and one choice.

    With `interrupted` it says so where an interruption comes before there is a comparison. Raises
    MeasurementError: a job of default NCCL failed, so nothing can be said of the others.
    """
    begun, arms, only = time.monotonic(), _choose_arms(target, budget), budget.only
    if only is not None:
        arms = arms[0], target.arm(only)
        if arms[0] is arms[1]:
            what = "is not in the plan, or sets nothing that default NCCL has not"
            raise InputError(f"`choice` {only}", what, "leave it out")
    workload = budget.workload
    calls = {} if workload is None else timed_calls(workload, launcher.world)
    chosen = only or target.arm(target.plan.recommended).name
    judge = Judge(target, launcher, budget, arms, chosen, calls, begun)

    def judge_in_part(rounds: Rounds | None) -> None:
        if interrupted is None:
            return
        if rounds is None:
            few = f"interrupted before {least_rounds(len(arms))} rounds were complete"
            launcher.say(f"{few}, so there is no table and nothing of them is kept")
            return
        result = judge.verdict(rounds)
        text = f"interrupted: these are the {result.rounds} complete rounds, which are not kept"
        interrupted(replace(result, notices=(*result.notices, text)))

    every = (*arms, replace(arms[0], name=AGAIN)) if len(arms) > 1 else arms
    rounds = run_rounds(launcher, every, budget, judge.rows, begun=begun, interrupted=judge_in_part)
    return judge.verdict(rounds)


def _choose_arms(target: Target, budget: RunBudget) -> tuple[Arm, ...]:
    """Return the arms to compare: of four a graph file that promises no more is left out.

    With the second arm of default NCCL four jobs run at the same time, and five take twice as long.
    """
    names: tuple[ChoiceName, ...] = ("variables", "graph")
    plan = target.plan
    rates = {name: (plan.choices[name].best_known_gbps or 0.0, 0.0) for name in names}
    promises = "graph" in (as_good(rates), plan.recommended)
    if promises or plan.choices.get("large-buffers") is None or budget.workload is not None:
        return target.arms
    return tuple(arm for arm in target.arms if arm.name != "graph")


def run_once(target: Target, launcher: Launcher, budget: RunBudget) -> ArmResult:
    """Return the results of one job of the recommended choice, over no baseline.

    Its rows are the collectives of `budget` over all ranks.
    """
    arm = target.arm(target.plan.recommended)
    judge = Judge(target, launcher, budget, (arm,), arm.name, {}, time.monotonic())
    rounds = Rounds(checked={}, jobs=(), failures={}, at_once=1, table={})
    try:
        (job,) = launcher.run([arm], JobSpec(checks=budget.checks, rows=budget.rows))
    except MeasurementError as error:
        return judge.result(arm, replace(rounds, failures={arm.name: str(error)}))
    jobs, table = ((arm.name, job),), {arm.name: timed_rows(launcher, [job])}
    return judge.result(arm, replace(rounds, checked=dict(jobs), jobs=jobs, table=table))


class Judge(NamedTuple):
    """A comparison of a plan's arms: its rows, and what their rounds say."""

    target: Target
    launcher: Launcher
    budget: RunBudget
    arms: tuple[Arm, ...]
    """Default NCCL first."""
    chosen: ChoiceName
    """The choice in question."""
    calls: Mapping[Row, float]
    """The rows of a workload with their number in a step."""
    begun: float
    """When it began, by the monotonic clock."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return the rows that each job times."""
        budget, world = self.budget, self.launcher.world
        # Variables hold for smaller communicators of a process as well.
        by_variables = any(arm.name in BY_VARIABLES for arm in self.arms)
        groups = self.target.groups(world) if by_variables else ()
        # Cables need not join all pairs of hosts.
        transfers = () if self.target.plan.cluster.cables else budget.transfers(groups)
        steps = training_rows(world, self.launcher.backend) if budget.training else ()
        further: tuple[Row, ...] = ()
        if budget.every and not self.target.plan.cluster.cables:
            further = budget.further_rows(world, pairs=bool(groups))
        rows = (*budget.rows, *budget.rows_in(groups), *transfers, *self.calls, *further, *steps)
        return tuple(dict.fromkeys(rows))

    def verdict(self, rounds: Rounds) -> Verification:
        """Return the results of all arms, and the winner."""
        target, results = self.target, [self.result(arm, rounds) for arm in self.arms]
        for at, result in enumerate(results):
            if at and not result.failure:
                results[at] = replace(result, large=result.over(results[0]))
        names: list[ChoiceName] = [*(arm.name for arm in self.arms), AGAIN]
        letters = dict(zip(names, "ABCDE", strict=False))
        ranks = rounds.checked["default"].results
        return Verification(
            machine=plan_name(target.plan),
            **pick(target, "gpus", "hosts"),
            **pick(target.plan, "recommended", "simulated", "jobs_ran"),
            dry_plan=target.plan.dry_run,
            backend=self.launcher.backend,
            arms=tuple(results),
            again=tuple(rounds.table.get(AGAIN, {}).values()),
            chosen=self.chosen,
            winner=good_choices(results)[0],
            collective=self.budget.collectives[0],
            workload=self._communication(results, rounds),
            left_out=ranks[0].left_out,
            versions={"torch": ranks[0].torch, "nccl": ranks[0].nccl},
            devices=tuple(rank.device for rank in ranks),
            order="".join(letters[name] for name, _ in rounds.jobs),
            at_once=rounds.at_once,
            raw=tuple(tuple(_collective_seconds(job)) for _, job in rounds.jobs),
            seconds=time.monotonic() - self.begun,
        )

    def _communication(self, results: Sequence[ArmResult], rounds: Rounds) -> Communication | None:
        """Return the workload's communication by each choice without faults."""
        workload = self.budget.workload
        if workload is None or AGAIN not in rounds.table:
            return None
        sound = [result.name for result in results if not result.faults]
        times = {
            name: {row: timed.seconds for row, timed in rounds.table[name].items()}
            for name in dict.fromkeys(("default", *sound))
        }
        basis = DRY_RUN if self.launcher.backend == "host" else ""
        return communication_of(workload, self.calls, times, basis=basis)

    def result(self, arm: Arm, rounds: Rounds) -> ArmResult:
        """Return the rows, checked values and rings of an arm's jobs, or why one failed."""
        target, launcher, budget = self.target, self.launcher, self.budget
        result = ArmResult(
            **pick(arm, "name", "settings", "predicted_gbps", "assumed"),
            environment=launcher.variables(arm),
            failure=rounds.failures.get(arm.name, ""),
        )
        if result.failure:
            return result
        first, jobs = rounds.checked[arm.name], rounds.of(arm.name)
        trained = _wrong_training(rounds.of("default") or jobs, jobs)
        rows = dict(rounds.table.get(arm.name, {}))
        main = {*budget.rows, *budget.rows_in(row.groups for row in rows if row.groups)}
        transfers = tuple(rows.pop(row) for row in list(rows) if row not in main and not row.trains)
        return replace(
            result,
            achieved_gbps=large_gbps(
                [(row.bytes, row.gbps) for row in rows.values() if row.over_all]
            ),
            rows=tuple(rows.values()),
            transfers=transfers,
            checked=sum(rank.checked for rank in first.results),
            wrong=(*first.wrong, *trained),
            log_rings=rings_of_jobs(target, launcher, arm, [first, *jobs], checks=budget.checks),
        )


def rings_of_jobs(
    target: Target, launcher: Launcher, arm: Arm, outcomes: Sequence[Outcome], *, checks: bool
) -> RingsFound | None:
    """Compare the logs of jobs under a graph file with the plan; None of other jobs."""
    if launcher.backend != "cuda" or arm.name != "graph":
        return None
    # Without checks the first job moves nothing, and NCCL connects nothing in it.
    logs = outcomes if checks or len(outcomes) == 1 else outcomes[1:]
    variables = launcher.variables(arm)
    judge = target.verdict
    comparisons = [rings_found(target.plan, judge, job.log, variables) for job in logs]
    return next((rings for rings in comparisons if not rings.same), comparisons[0])


def _collective_seconds(job: Outcome) -> Iterator[tuple[tuple[float, ...], ...]]:
    """Yield the seconds of each collective on all ranks, by batch."""
    for ranks in job.rows:
        if not ranks[0].row.mode:
            yield tuple(times.seconds for times in ranks)


def _wrong_training(baseline: Sequence[Outcome], jobs: Sequence[Outcome]) -> Iterator[WrongValue]:
    """Yield losses and gradients that are not those of default NCCL's first job."""
    for job in jobs:
        for expected, rank in zip(baseline[0].results, job.results, strict=True):
            trained = {times.row: times.trained for times in expected.times}
            for times in rank.times:
                # A job under a graph file leaves some steps out.
                before = trained[times.row]
                pairs = zip(before, times.trained, strict=True) if times.trained else ()
                if not all(a is not None and b is not None and _equal(a, b) for a, b in pairs):
                    what = f"loss and gradients {times.trained} instead of {before}"
                    case = f"training step, {times.row.mode}"
                    yield WrongValue(case=case, rank=rank.rank, what=what)
