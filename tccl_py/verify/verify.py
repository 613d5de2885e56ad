"""Verification: value checks, interleaved rounds of all arms, NCCL's log, and the winner."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from tccl_py.plan.plan import ChoiceName
from tccl_py.verify.jobs import Arm, ConcurrentJobs, JobError, Launcher, Outcome
from tccl_py.verify.record import (
    EQUAL,
    LEAST_ROUNDS,
    MAX_ROUNDS,
    ArmResult,
    Compared,
    Row,
    Verification,
    compare,
    find_winner,
)
from tccl_py.verify.rings import RingsFound, rings_found
from tccl_py.verify.spec import (
    SIZES,
    Collective,
    JobSpec,
    TimedRow,
    WrongValue,
    bus_gbps,
    groups_of,
    large_gbps,
)
from tccl_py.verify.target import Target

DEFAULT_ROUNDS = 10
DEFAULT_SECONDS = 300.0
"""Three arms have some 30 rows: with fewer than 11 rounds no verdict is beyond chance."""
FEW_SIZES = (16 << 10, 256 << 10, 1 << 20, 64 << 20, 256 << 20)
"""Sizes of the sweep's jobs and, except the largest, of smaller communicators."""
_TRANSFER_BYTES = 64 << 20
"""Size of send/recv, which no sweep of sizes has: small FIFOs slow it alike from 16 MiB up."""
_NARROW = 1 << 20
"""From this size on ratios have to be known to 1 %; smaller calls take microseconds."""
_alike = partial(math.isclose, rel_tol=5e-3)
"""Losses and gradients of a few training steps: sums in another order differ by rounding."""

Watcher = Callable[[str], None]
"""Receives a line on the current work."""


class RunBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Work of a comparison: rounds, sizes in bytes, and seconds after which no round begins.

    LEAST_ROUNDS are always run; fewer than `rounds` where all verdicts are clear, more where one is
    open and time is left.
    """

    rounds: int = DEFAULT_ROUNDS
    sizes: tuple[int, ...] = SIZES
    seconds: float = DEFAULT_SECONDS
    collective: Collective = "all_reduce"
    checks: bool = True
    training: bool = False
    extra: int = 4
    """Factor on the number of rounds where a verdict is open and time is left."""

    @property
    def few_sizes(self) -> tuple[int, ...]:
        """Return some sizes up to the largest one."""
        return tuple(size for size in FEW_SIZES if size <= max(self.sizes)) or self.sizes

    @property
    def transfer_sizes(self) -> tuple[int, ...]:
        """Return the size at which send/recv is timed as well; () where it is the collective."""
        own = self.collective == "send_recv"
        return () if own else (min(_TRANSFER_BYTES, max(self.sizes)),)


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of all rounds with their arms, in order, without arms of which a job failed.

    `at_once` is the final number of concurrent jobs; `compared` has every row of every arm but the
    baseline.
    """

    jobs: Sequence[tuple[ChoiceName, Outcome]]
    failures: Mapping[ChoiceName, str]
    at_once: int
    compared: Mapping[tuple[ChoiceName, TimedRow], Compared]


def verify_target(
    target: Target, launcher: Launcher, budget: RunBudget, *, watch: Watcher = lambda _: None
) -> Verification:
    """Run real collectives in every arm of a plan. Raises JobError: a job of default NCCL failed,
    so nothing can be said of the others.
    """
    begun = time.monotonic()
    # 1. Check values, where every arm may fail.
    watch("checking values" if budget.checks else "starting")
    names = [arm.name for arm in target.arms]
    first = ConcurrentJobs(launcher, ()).run(target.arms, JobSpec(checks=budget.checks))
    checked = dict(zip(names, first, strict=True))
    baseline = checked["default"]
    if isinstance(baseline, JobError):
        raise baseline
    failures = {name: str(error) for name, error in checked.items() if isinstance(error, JobError)}
    # 2. Time the arms that ran. Variables hold for smaller communicators of a process as well.
    running = [arm for arm in target.arms if arm.name not in failures]
    with_groups = not target.hosts and any(arm.name == "variables" for arm in running)
    spec = JobSpec(
        sizes=budget.sizes,
        groups=groups_of(target.world) if with_groups else (),
        group_sizes=budget.few_sizes[:4],
        transfer_sizes=budget.transfer_sizes,
        collectives=(budget.collective,),
        training=budget.training,
    )
    rounds = run_rounds(launcher, running, budget, spec, begun=begun, watch=watch)
    failures |= rounds.failures
    # 3. Judge each arm, and find the winner.
    found: list[ArmResult] = []
    for arm in target.arms:
        result = ArmResult(
            name=arm.name,
            settings=arm.settings,
            environment=launcher.variables(arm),
            predicted_gbps=arm.predicted_gbps,
            failure=failures.get(arm.name, ""),
        )
        outcome = checked[arm.name]
        if arm.name not in failures and isinstance(outcome, Outcome):
            logs = [outcome, *_jobs_of(arm.name, rounds.jobs)]
            rings = rings_of_jobs(target, launcher, arm, logs, checks=budget.checks)
            rows = _rows(target, spec, rounds, arm)
            transfers = tuple(row for timed, row in rows.items() if timed in spec.transfers)
            judged = tuple(row for timed, row in rows.items() if timed not in spec.transfers)
            result = msgspec.structs.replace(result, rows=judged, transfers=transfers, rings=rings)
            result = _judged(result, logs, rounds, found[0] if found else None)
        found.append(result)
    letters = dict(zip(names, "ABC", strict=False))
    return Verification(
        machine=target.name,
        gpus=target.gpus,
        hosts=target.hosts,
        backend=launcher.backend,
        arms=tuple(found),
        recommended=target.plan.recommended,
        chosen=target.chosen,
        winner=find_winner(found),
        simulated=target.plan.simulated,
        assumed=target.plan.assumed,
        tuned=target.plan.tuned,
        collective=budget.collective,
        left_out=baseline.results[0].left_out,
        versions={"torch": baseline.results[0].torch, "nccl": baseline.results[0].nccl},
        devices=tuple(rank.device for rank in baseline.results),
        order="".join(letters[name] for name, _ in rounds.jobs),
        at_once=rounds.at_once,
        raw=tuple(
            tuple(zip(*(rank.timings for rank in job.results), strict=True))
            for _, job in rounds.jobs
        ),
        seconds=time.monotonic() - begun,
    )


def _judged(
    result: ArmResult, logs: Sequence[Outcome], rounds: Rounds, baseline: ArmResult | None
) -> ArmResult:
    """Add the checked values of an arm's jobs, and its bandwidth beside the baseline's."""
    ranks = logs[0].results
    wrong = [wrong for rank in ranks for wrong in rank.wrong]
    wrong += _wrong_training(_jobs_of("default", rounds.jobs), logs[1:])
    return msgspec.structs.replace(
        result,
        checked=sum(rank.checked for rank in ranks),
        wrong=tuple(wrong),
        gbps=large_gbps([(row.bytes, row.gbps) for row in result.sizes]),
        large=EQUAL if baseline is None else result.over(baseline),
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
    found = [rings_found(target.plan, target.graphs, job.log, variables) for job in logs]
    return next((rings for rings in found if not rings.same), found[0])


def _rows(target: Target, spec: JobSpec, rounds: Rounds, arm: Arm) -> dict[TimedRow, Row]:
    rows = {}
    for timed, seconds in row_seconds(spec, _jobs_of(arm.name, rounds.jobs)).items():
        compared = rounds.compared.get((arm.name, timed), EQUAL)
        ranks = len(timed.groups[0]) if timed.groups else target.world
        rows[timed] = Row(
            bytes=timed.bytes,
            groups=tuple(tuple(target.gpus[rank] for rank in group) for group in timed.groups),
            mode=timed.mode,
            seconds=seconds,
            gbps=bus_gbps(timed.collective, ranks, timed.bytes, statistics.median(seconds)),
            compared=compared,
            verdict=compared.verdict,
        )
    return rows


def _wrong_training(baseline: Sequence[Outcome], jobs: Sequence[Outcome]) -> Iterator[WrongValue]:
    """Yield losses and gradients that are not those of default NCCL's first job."""
    for job in jobs:
        for expected, rank in zip(baseline[0].results, job.results, strict=True):
            for mode, found in rank.trained.items():
                pairs = zip(found, expected.trained[mode], strict=True)
                if not all(a is not None and b is not None and _alike(a, b) for a, b in pairs):
                    what = f"loss and gradients {found} instead of {expected.trained[mode]}"
                    yield WrongValue(case=f"training step, {mode}", rank=rank.rank, what=what)


def _jobs_of(name: ChoiceName, jobs: Sequence[tuple[ChoiceName, Outcome]]) -> list[Outcome]:
    return [job for arm, job in jobs if arm == name]


def round_order(arms: Sequence[Arm], number: int) -> list[Arm]:
    """Return the order of jobs in a round: A B C, C B A, B C A, A C B, ..."""
    first = number // 2 % len(arms)
    rotated = [*arms[first:], *arms[:first]]
    return rotated[::-1] if number % 2 else rotated


def run_rounds(
    launcher: Launcher,
    arms: Sequence[Arm],
    budget: RunBudget,
    spec: JobSpec,
    *,
    begun: float,
    watch: Watcher = lambda _: None,
) -> Rounds:
    """Run rounds of jobs until the verdicts are clear or the time is up.

    An arm of which a job fails leaves the comparison with all its jobs. Raises JobError: a job of
    the first arm, the baseline, failed.
    """
    jobs = ConcurrentJobs(launcher, spec.sizes)
    ran: list[tuple[ChoiceName, Outcome]] = []
    failures: dict[ChoiceName, str] = {}
    compared: dict[tuple[ChoiceName, TimedRow], Compared] = {}
    running, count = list(arms), 0
    batch: list[Arm] = []
    most = min(MAX_ROUNDS, max(budget.rounds, LEAST_ROUNDS) * budget.extra)
    while len(running) > 1 and count < most:
        # 1. Run as many whole rounds as devices have room for.
        numbers = range(count, count + max(1, jobs.at_once // len(running)))
        watch(f"round {' and '.join(str(number + 1) for number in numbers)}")
        batch = [arm for number in numbers for arm in round_order(running, number)]
        for arm, outcome in zip(batch, jobs.run(batch, spec), strict=True):
            if not isinstance(outcome, JobError):
                ran.append((arm.name, outcome))
            elif arm is arms[0]:
                raise outcome
            else:
                failures[arm.name] = str(outcome)
        running = [arm for arm in running if arm.name not in failures]
        ran = [(name, job) for name, job in ran if name not in failures]
        count = len(_jobs_of(arms[0].name, ran))
        if count < LEAST_ROUNDS or len(running) == 1:
            continue
        # 2. Compare all rows of all arms at once; stop where more rounds add nothing.
        compared = _compare_arms(spec, {arm.name: _jobs_of(arm.name, ran) for arm in running})
        judged = {key: row for key, row in compared.items() if key[1] not in spec.transfers}
        if _enough(budget, judged, count) or time.monotonic() - begun > budget.seconds:
            break
    return Rounds(
        jobs=ran,
        failures=failures,
        at_once=min(jobs.at_once, len(batch)),
        compared=compared,
    )


def _enough(
    budget: RunBudget, compared: Mapping[tuple[ChoiceName, TimedRow], Compared], count: int
) -> bool:
    """Return whether more rounds add nothing.

    Beyond the budget's rounds, only a lean to harm counts, and sizes from _NARROW on over all
    ranks.
    """
    for (_, row), found in compared.items():
        narrow = row.bytes >= _NARROW and not row.groups
        if found.open and (count < budget.rounds or narrow or found.high < 1):
            return False
    return True


def _compare_arms(
    spec: JobSpec, outcomes: Mapping[ChoiceName, Sequence[Outcome]]
) -> dict[tuple[ChoiceName, TimedRow], Compared]:
    rows = {name: row_seconds(spec, jobs) for name, jobs in outcomes.items()}
    baseline = next(iter(rows.values()))
    keys = [(name, row) for name in list(rows)[1:] for row in rows[name]]
    found = compare([rows[name][row] for name, row in keys], [baseline[row] for _, row in keys])
    return dict(zip(keys, found, strict=True))


def row_seconds(spec: JobSpec, jobs: Sequence[Outcome]) -> dict[TimedRow, tuple[float, ...]]:
    """Return the seconds of each timed row, one value a job: the slowest rank's median.

    Ranks outside all groups, and jobs under a graph file, have no times of groups.
    """
    found: dict[TimedRow, list[float]] = {}
    for job in jobs:
        rows = {row: [rank.timings[at] for rank in job.results] for at, row in enumerate(spec.rows)}
        for mode in job.results[0].training if spec.training else ():
            rows[TimedRow(mode=mode)] = [rank.training[mode] for rank in job.results]
        for row, ranks in rows.items():
            medians = [statistics.median(batches) for batches in ranks if batches]
            if medians:
                found.setdefault(row, []).append(max(medians))
    return {row: tuple(seconds) for row, seconds in found.items()}
