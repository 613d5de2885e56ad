"""Verification: value checks, rounds of all arms, NCCL's log, and the winner; tuning by jobs.

Tuning is a sweep over settings, then comparisons of the best ones with default NCCL. In the sweep
each candidate has one job, interleaved with a baseline job. Socket threads come first where hosts
talk over sockets. Then come channels and FIFO size, because most follows from the footprint of all
FIFOs; then Ring alone, P2P levels or NIC buffer placements; last the owner of host buffers, reads
instead of writes, and copy engines. Only the best candidate of each choice is compared in rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from tccl_py.decision import LEAST_RATIO
from tccl_py.delivery.delivered import RingsFound, rings_found
from tccl_py.errors import InputError, MeasurementError, Terminated
from tccl_py.experiments.communication import Communication, communication_of, timed_calls
from tccl_py.experiments.comparison import (
    SMALLEST_EFFECT,
    Rounds,
    RunBudget,
    Timed,
    least_rounds,
    timed_rows,
)
from tccl_py.experiments.jobs import AGAIN, Arm, Launcher, Outcome
from tccl_py.experiments.record import ArmResult, Tried, Verification, good_choices
from tccl_py.experiments.spec import JobSpec, Row, WrongValue, large_gbps, rows_of, training_rows
from tccl_py.experiments.target import Target
from tccl_py.files import pick
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.transport import LAST_STAGE, PATH_STAGE, SIZE_STAGE, searched_in, values_of
from tccl_py.nccl.versions import version_facts
from tccl_py.plan.chains import BY_VARIABLES, CHOICES, ChoiceName, as_good
from tccl_py.plan.text import choice_words, plan_name

DRY_RUN = "a DRY RUN over gloo"
_equal = partial(math.isclose, rel_tol=5e-3)
"""Losses and gradients of a few training steps: sums in another order differ by rounding."""
Interrupted = Callable[[Verification], object]
"""Gets the comparison of the complete rounds where an interruption ends a verification."""
SWEEP_SECONDS = 105.0
COMPARISON_SECONDS = 150.0
"""For each comparison, before the sweep and after it."""
WHOLE_SECONDS = 480.0
"""With the first comparison: a second one after the sweep runs only if it will end by then."""
ATTEMPTS = 2
"""Comparisons after the sweep: of the best settings, and of the best with other channels if those
harm a training step or a size, about which one job says little."""
_LEAST = 0.9
"""Candidates with a smaller worst ratio are dropped: jobs of small messages differ by a fifth, and
a candidate has one job."""
Candidate = tuple[ChoiceName, Settings]
Stage = Callable[[Settings], Iterator[Settings]]
"""Returns the settings to try, from the best so far."""


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
    rows = judge.rows
    every = (*arms, replace(arms[0], name=AGAIN)) if len(arms) > 1 else arms
    rounds = Rounds(launcher, every, JobSpec(rows=rows), needed=("default", AGAIN))
    try:
        launcher.watch("checking values" if budget.checks else "starting")
        groups = tuple(dict.fromkeys(row.groups for row in rows if row.groups))
        rounds.check(JobSpec(checks=budget.checks, check_groups=groups))
        rounds.compare(budget, begun=begun)
    except (KeyboardInterrupt, Terminated):
        if interrupted is not None and rounds.table:
            del rounds.jobs[rounds.count * len(rounds.arms) :]
            result = judge.verdict(rounds)
            text = f"interrupted: these are the {rounds.count} complete rounds, which are not kept"
            interrupted(replace(result, notices=(*result.notices, text)))
        elif interrupted is not None:
            few = f"interrupted before {least_rounds(len(arms))} rounds were complete"
            launcher.say(f"{few}, so there is no table and nothing of them is kept")
        raise
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
    spec = JobSpec(checks=budget.checks, rows=budget.rows)
    rounds = Rounds(launcher, [arm], spec)
    rounds.check(spec)
    rounds.table = {name: timed_rows(launcher, [job]) for name, job in rounds.checked.items()}
    return judge.result(arm, rounds)


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
            raw=tuple(
                tuple(
                    tuple(times.seconds for times in ranks)
                    for ranks in job.rows
                    if not ranks[0].row.mode
                )
                for _, job in rounds.jobs
            ),
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


def run_tuning(
    plan: Target,
    launcher: Launcher,
    budget: RunBudget,
    first: Verification,
    *,
    seconds: float = SWEEP_SECONDS,
) -> tuple[Target, Verification]:
    """Try other settings for a plan, verified by `first`; its directory does not change.

    Return the best plan and its verification; the given plan where none is better. The best
    settings are compared with training steps as well: more channels can be faster alone and take
    from computation at the same time. The sweep ends after `seconds`.
    """
    begun = time.monotonic() - first.seconds
    # 1. Try candidates, one job each.
    sweep = Sweep(plan, launcher, budget, first)
    sweep.try_stages(deadline=time.monotonic() + seconds)
    trials, default = sweep.trials, sweep.baseline()
    tried = (default, *trials)
    # 2. Compare the best of each choice in rounds; the second best where those are no better.
    careful = replace(budget, training=True)
    judged, compared = first.by_winner(), list[tuple[Target, Verification]]()
    for _ in range(ATTEMPTS):
        best_of = {name: t for name in plan.choices if (t := _fastest(trials, name)) is not None}
        settings = {name: best.settings for name, best in best_of.items()}
        changes = {name: best for name, best in settings.items() if best != plan.choices[name]}
        # Predictions cannot be compared with job throughput: use the jobs' for all choices.
        rates = {name: gbps for name, gbps in first.achieved.items() if name not in plan.choices}
        trials_of = {"default": default, **best_of}
        rates |= {n: trial.achieved_gbps for n, trial in trials_of.items() if trial.achieved_gbps}
        changed = plan.retune(changes, rates) if changes else plan
        if changed.choices == plan.choices:
            break
        again = verify_target(changed, launcher, careful).by_winner()
        compared.append((changed, again))
        late = time.monotonic() - begun + again.seconds > WHOLE_SECONDS
        if late or _better(again, judged):
            break
        # The number of channels is what mostly harms small messages, or training.
        harmful = {(name, *best_of[name].channels) for name in changes}
        trials = [trial for trial in trials if (trial.name, *trial.channels) not in harmful]
    better = [each for each in compared if _better(each[1], judged)]
    rejected = [text for each in compared if each not in better for text in _rejections(each[1])]
    # 3. Offer settings that only large messages gain from; they are not recommended.
    if not better and judged.chosen == "default":
        right = (each for each in compared if not any(arm.faults for arm in each[1].arms))
        by_variables = ((each, each[1].arm("variables")) for each in right)
        least = 1 + SMALLEST_EFFECT
        better = [each for each, arm in by_variables if arm and arm.large.low > least]
    best_plan, best = (*better, (plan, judged))[0]
    # 4. Keep the plan where neither its settings nor its recommendation change.
    if best_plan is plan and best.chosen == first.recommended:
        best = first
    else:
        best_plan = best_plan.settle(best)
    return best_plan, replace(best, tried=tried, notices=(*best.notices, *rejected))


def _rejections(result: Verification) -> Iterator[str]:
    """Yield why the tuned settings of each choice are not used."""
    for arm in result.arms[1:]:
        if arm.name == "large-buffers":  # Are not tuned.
            continue
        why = "; ".join(result.objections(arm)) or "no clear gain"
        lead = f"{arm.large.ratio:.2f}x default NCCL at large sizes"
        yield f"tuned, not used: {choice_words(arm.name, arm.settings)}: {lead}, but {why}"


def _fastest(trials: Sequence[Tried], name: ChoiceName) -> Tried | None:
    """Return the fastest candidate at large sizes that is not much slower than default NCCL.

    Candidates that gain and leave send/recv and all-to-all as they are come first: only these may
    be harmless. Of equally fast ones it is the first.
    """
    usable = [trial for trial in trials if trial.name == name and trial.worst_ratio >= _LEAST]
    best: Tried | None = None
    for trial in usable:
        if best is None or _rank(trial) > _rank(best, 1 + SMALLEST_EFFECT):
            best = trial
    return best


def _rank(trial: Tried, times: float = 1.0) -> tuple[bool, float]:
    gains = trial.gain > 1 + SMALLEST_EFFECT and trial.transfer_ratio >= LEAST_RATIO
    return gains, (trial.achieved_gbps or 0.0) * times


def _better(result: Verification, first: Verification) -> bool:
    """Return whether a tuned plan is faster than the first, or as fast by a smaller choice.

    Both are relative to default NCCL.
    """
    if not (result.judged.accepted and first.judged.accepted):
        return result.judged.accepted
    lead = result.judged.large.ratio / first.judged.large.ratio
    if CHOICES.index(result.chosen) < CHOICES.index(first.chosen):
        return lead >= 1 - SMALLEST_EFFECT
    return lead >= 1 + SMALLEST_EFFECT


class Sweep:
    """One job for each candidate, interleaved with a baseline job, and their rates.

    `first`, the verification of the plan, has the slowest baseline job at each size; trials have
    some sizes of `budget`.
    """

    def __init__(
        self, target: Target, launcher: Launcher, budget: RunBudget, first: Verification
    ) -> None:
        self.trials: list[Tried] = []
        self._target, self._launcher = target, launcher
        slowest = {row.bytes: max(row.seconds) for row in first.arms[0].sizes}
        few = rows_of(budget.few_sizes, budget.collectives)
        self._slowest = {row: slowest.get(row.bytes, 0.0) for row in few}
        transfers = budget.transfers()
        largest = max((row.bytes for row in transfers), default=0)
        rows = (*few, *(row for row in transfers if row.bytes == largest))
        self._rounds = Rounds(launcher, (), JobSpec(rows=rows))
        self._default: dict[Row, Timed] = {}
        self._default_gbps: list[float] = []

    def try_stages(self, *, deadline: float) -> None:
        """Try the plan's own settings, and the stages' until the deadline.

        Each stage starts from the best settings of each choice so far. Raises MeasurementError: the
        baseline job failed.
        """
        target = self._target
        self._try(list(target.choices.items()))
        for steps in zip_longest(*(stages(target, name) for name in target.choices)):
            tried = {(trial.name, trial.settings) for trial in self.trials}
            candidates: dict[Candidate, None] = {}
            for name, stage in zip(target.choices, steps, strict=True):
                best = _fastest(self.trials, name)
                base = target.choices[name] if best is None else best.settings
                found = stage(base) if stage else ()
                candidates |= {(name, settings): None for settings in found}
            waiting = [pair for pair in candidates if pair not in tried and target.permits(*pair)]
            while waiting and time.monotonic() < deadline:
                count = max(1, self._rounds.at_once - 1)
                self._try(waiting[:count])
                waiting = waiting[count:]

    def baseline(self) -> Tried:
        """Return default NCCL with the median rate of its jobs."""
        settings = Settings(version=self._target.plan.choices["variables"].settings.version)
        rate = median(self._default_gbps)
        return Tried(name="default", settings=settings, achieved_gbps=rate, worst_ratio=1.0)

    def _try(self, candidates: Sequence[Candidate]) -> None:
        """Run a job of each candidate, with one of default NCCL if there is room."""
        named = (f"{name} of {settings.buffsize >> 10} KiB" for name, settings in candidates)
        self._launcher.watch(f"trying {', '.join(named)}")
        with_default = self._rounds.at_once > 1 or not self._default
        arms = [self._target.arms[0]] * with_default
        for name, settings in candidates:
            planned = settings == self._target.choices[name]
            target = self._target if planned else self._target.retune({name: settings})
            arms.append(target.arm(name))
        outcomes = [outcome for _, outcome in self._rounds.run(arms)]
        if with_default:
            default = outcomes.pop(0)
            if isinstance(default, MeasurementError):
                raise default
            self._default = timed_rows(self._launcher, [default])
        self._default_gbps += [self._gbps(self._default)] * len(candidates)
        self.trials += map(self._rate, candidates, outcomes)

    def _rate(self, candidate: Candidate, outcome: Outcome | MeasurementError) -> Tried:
        """Return a candidate's rates over those of the baseline job beside it."""
        name, settings = candidate
        if isinstance(outcome, MeasurementError):
            return Tried(name=name, settings=settings, failed=str(outcome))
        rows = timed_rows(self._launcher, [outcome])
        gbps, sizes, transfers = self._gbps(rows), list[float](), list[float]()
        for row, timed in rows.items():
            slowest = max(*self._default[row].seconds, self._slowest.get(row, 0.0))
            # What is no size is send/recv and all-to-all.
            (sizes if row in self._slowest else transfers).append(slowest / timed.seconds[0])
        return Tried(
            name=name,
            settings=settings,
            achieved_gbps=gbps,
            worst_ratio=min(sizes),
            transfer_ratio=min(transfers, default=1.0),
            gain=gbps / self._gbps(self._default),
        )

    def _gbps(self, rows: Mapping[Row, Timed]) -> float:
        """Return the bus bandwidth at the large sizes."""
        return large_gbps([(row.bytes, rows[row].gbps) for row in self._slowest]) or 0.0


def stages(target: Target, name: ChoiceName) -> tuple[Stage, ...]:
    """Return the stages of a choice's sweep.

    Where the plugin places bounce buffers, its index holds for the planned settings alone.
    """
    if target.choices[name].shm_placement:
        return ()
    facts = version_facts(target.choices[name].version)

    def channels_and_sizes(base: Settings) -> Iterator[Settings]:
        for count in target.channels(name):
            # NCCL doubles the channels of a file, and of its own search.
            changes: dict[str, object] = {"channels": count}
            if name == "variables":
                changes = {"min_channels": 2 * count if count > base.channels else None}
            if count <= facts.max_channels:
                for size in values_of("buffsize", "jobs", SIZE_STAGE):
                    yield _list_changes(base, **changes, buffsize=size)

    def others(stage: int, base: Settings) -> Iterator[Settings]:
        kinds = target.kinds(name, base)
        for row in searched_in("jobs", stage, network=target.network):
            for changes in row.changes if row.fits(kinds) else ():
                with suppress(InputError):  # This version has no such setting.
                    if (changed := _list_changes(base, **changes)) != base:
                        yield changed
        if stage == PATH_STAGE:
            yield from map(check_settings, target.other_paths(name, base))

    return tuple(
        channels_and_sizes if stage == SIZE_STAGE else partial(others, stage)
        for stage in range(1, LAST_STAGE + 1)
    )


def _list_changes(base: Settings, **changes: object) -> Settings:
    return check_settings(replace(base, **changes))
