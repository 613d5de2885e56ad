"""Verification: value checks, interleaved rounds of all arms, NCCL's log, and the winner."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.plan.parts import ChoiceName
from tccl_py.verify.jobs import Arm, ConcurrentJobs, Launcher, Outcome
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
    Dtype,
    JobSpec,
    TimedRow,
    WrongValue,
    bus_gbps,
    groups_of,
    large_gbps,
)
from tccl_py.verify.target import Target

FEW_SIZES = (16 << 10, 256 << 10, 1 << 20, 64 << 20, 256 << 20)
"""Sizes of the sweep's jobs and, except the largest, of smaller communicators."""
_TRANSFER_BYTES = 64 << 20
"""Size of send/recv, which no sweep of sizes has: small FIFOs slow it alike from 16 MiB up."""
_NARROW = 1 << 20
"""From this size on ratios have to be known to 1 %; smaller calls take microseconds."""
_alike = partial(math.isclose, rel_tol=5e-3)
"""Losses and gradients of a few training steps: sums in another order differ by rounding."""


class RunBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Work of a comparison: rounds, sizes in bytes, and seconds after which no round begins.

    LEAST_ROUNDS are always run; fewer than `rounds` where all verdicts are clear, more where one is
    open and time is left.
    """

    rounds: int = 10
    """Three arms have some 30 rows: with fewer than 11 rounds no verdict is beyond chance."""
    sizes: tuple[int, ...] = SIZES
    seconds: float = 300.0
    collectives: tuple[Collective, ...] = ("all_reduce",)
    dtype: Dtype = "float32"
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
        own = "send_recv" in self.collectives
        return () if own else (min(_TRANSFER_BYTES, max(self.sizes)),)

    @property
    def spec(self) -> JobSpec:
        """Return the collectives that each job times over all ranks."""
        return JobSpec(collectives=self.collectives, dtypes=(self.dtype,), sizes=self.sizes)


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of all rounds with their arms, in order, without arms of which a job failed.

    `checked` has each arm's first job. `at_once` is the final number of concurrent jobs; `compared`
    has every row of every arm but the baseline.
    """

    checked: Mapping[ChoiceName, Outcome]
    jobs: Sequence[tuple[ChoiceName, Outcome]]
    failures: Mapping[ChoiceName, str]
    at_once: int
    compared: Mapping[tuple[ChoiceName, TimedRow], Compared]

    def of(self, name: ChoiceName) -> list[Outcome]:
        """Return the jobs of an arm."""
        return [job for arm, job in self.jobs if arm == name]


def verify_target(
    target: Target, launcher: Launcher, budget: RunBudget, *, only: ChoiceName | None = None
) -> Verification:
    """Run real collectives in every arm of a plan, or in default NCCL and `only` one choice.

    Raises MeasurementError: a job of default NCCL failed, so nothing can be said of the others.
    """
    begun, arms = time.monotonic(), target.arms
    if only is not None:
        arms = arms[0], target.arm(only)
        if arms[0] is arms[1]:
            what = "sets nothing that default NCCL has not"
            raise InputError(f"--choice {only}", what, "leave it out")
    # 1. Run the jobs. Variables hold for smaller communicators of a process as well.
    with_groups = not target.hosts and any(arm.name == "variables" for arm in arms)
    spec = msgspec.structs.replace(
        budget.spec,
        groups=groups_of(target.world) if with_groups else (),
        group_sizes=budget.few_sizes[:4],
        transfer_sizes=budget.transfer_sizes,
        training=budget.training,
    )
    rounds = run_rounds(launcher, arms, budget, spec, begun=begun)
    # 2. Judge each arm, and find the winner.
    found: list[ArmResult] = []
    for arm in arms:
        result = _arm_result(arm, target, launcher, spec, rounds, checks=budget.checks)
        if found and not result.failure:
            result = msgspec.structs.replace(result, large=result.over(found[0]))
        found.append(result)
    letters = dict(zip((arm.name for arm in arms), "ABC", strict=False))
    ranks = rounds.checked["default"].results
    return Verification(
        machine=target.name,
        gpus=target.gpus,
        hosts=target.hosts,
        backend=launcher.backend,
        arms=tuple(found),
        recommended=target.plan.recommended,
        chosen=only or target.arm(target.plan.recommended).name,
        winner=find_winner(found),
        simulated=target.plan.simulated,
        assumed=target.plan.assumed,
        tuned=target.plan.tuned,
        collective=budget.collectives[0],
        left_out=ranks[0].left_out,
        versions={"torch": ranks[0].torch, "nccl": ranks[0].nccl},
        devices=tuple(rank.device for rank in ranks),
        order="".join(letters[name] for name, _ in rounds.jobs),
        at_once=rounds.at_once,
        raw=tuple(
            tuple(zip(*(rank.timings for rank in job.results), strict=True))
            for _, job in rounds.jobs
        ),
        seconds=time.monotonic() - begun,
    )


def _arm_result(
    arm: Arm, target: Target, launcher: Launcher, spec: JobSpec, rounds: Rounds, *, checks: bool
) -> ArmResult:
    """Return the rows, checked values and rings of an arm's jobs, or why one failed."""
    result = ArmResult(
        name=arm.name,
        settings=arm.settings,
        environment=launcher.variables(arm),
        predicted_gbps=arm.predicted_gbps,
        failure=rounds.failures.get(arm.name, ""),
    )
    if result.failure:
        return result
    first, jobs = rounds.checked[arm.name], rounds.of(arm.name)
    rows = _rows(target, spec, rounds, arm.name)
    transfers = tuple(rows.pop(timed) for timed in spec.transfers if timed in rows)
    over_all = [row for row in rows.values() if row.bytes and not row.groups]
    return msgspec.structs.replace(
        result,
        gbps=large_gbps([(row.bytes, row.gbps) for row in over_all]),
        rows=tuple(rows.values()),
        transfers=transfers,
        checked=sum(rank.checked for rank in first.results),
        wrong=(*first.wrong, *_wrong_training(rounds.of("default"), jobs)),
        rings=rings_of_jobs(target, launcher, arm, [first, *jobs], checks=checks),
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


def _rows(target: Target, spec: JobSpec, rounds: Rounds, name: ChoiceName) -> dict[TimedRow, Row]:
    rows = {}
    for timed, seconds in row_seconds(spec, rounds.of(name)).items():
        compared = rounds.compared.get((name, timed), EQUAL)
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
) -> Rounds:
    """Check values in a first job of each arm, and run rounds until the verdicts are clear.

    An arm of which a job fails leaves the comparison with all its jobs. Raises MeasurementError: a
    job of the first arm, the baseline, failed.
    """
    failures: dict[ChoiceName, str] = {}

    def ran(
        jobs: ConcurrentJobs, batch: Sequence[Arm], spec: JobSpec
    ) -> list[tuple[ChoiceName, Outcome]]:
        done = []
        for arm, outcome in zip(batch, jobs.run(batch, spec), strict=True):
            if not isinstance(outcome, MeasurementError):
                done.append((arm.name, outcome))
            elif arm.name == arms[0].name:
                raise outcome
            else:
                failures[arm.name] = str(outcome)
        return done

    launcher.watch("checking values" if budget.checks else "starting")
    checked = dict(ran(ConcurrentJobs(launcher, ()), arms, JobSpec(checks=budget.checks)))
    jobs = ConcurrentJobs(launcher, spec.sizes)
    found: list[tuple[ChoiceName, Outcome]] = []
    compared: dict[tuple[ChoiceName, TimedRow], Compared] = {}
    count, batch = 0, list[Arm]()
    most = min(MAX_ROUNDS, max(budget.rounds, LEAST_ROUNDS) * budget.extra)
    while count < most:
        running = [arm for arm in arms if arm.name not in failures]
        if len(running) == 1:
            break
        # 1. Run as many whole rounds as devices have room for.
        numbers = range(count, count + max(1, jobs.at_once // len(running)))
        launcher.watch(f"round {' and '.join(str(number + 1) for number in numbers)}")
        batch = [arm for number in numbers for arm in round_order(running, number)]
        found += ran(jobs, batch, spec)
        found = [(name, job) for name, job in found if name not in failures]
        count = sum(name == arms[0].name for name, _ in found)
        if count < LEAST_ROUNDS or len({name for name, _ in found}) == 1:
            continue
        # 2. Compare all rows of all arms at once; stop where more rounds add nothing.
        compared = _compare_arms(spec, found)
        judged = {key: row for key, row in compared.items() if key[1] not in spec.transfers}
        if _enough(budget, judged, count) or time.monotonic() - begun > budget.seconds:
            break
    return Rounds(
        checked=checked,
        jobs=found,
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
    spec: JobSpec, jobs: Sequence[tuple[ChoiceName, Outcome]]
) -> dict[tuple[ChoiceName, TimedRow], Compared]:
    names = dict.fromkeys(name for name, _ in jobs)
    baseline, *others = (
        (name, row_seconds(spec, [job for own, job in jobs if own == name])) for name in names
    )
    keys = [(name, row) for name, rows in others for row in rows]
    seconds = [seconds for _, rows in others for seconds in rows.values()]
    found = compare(seconds, [baseline[1][row] for _, row in keys])
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
