"""Verification: value checks, interleaved rounds of all arms, NCCL's log, and the winner."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import msgspec
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError
from tccl_py.experiments.collectives import Collective, bus_gbps
from tccl_py.experiments.jobs import Arm, ConcurrentJobs, Ended, Launcher, Outcome
from tccl_py.experiments.record import (
    EQUAL,
    LEAST_ROUNDS,
    MAX_ROUNDS,
    ArmResult,
    Compared,
    Row,
    Verification,
    compare,
    good_choices,
)
from tccl_py.experiments.rings import RingsFound, rings_found
from tccl_py.experiments.spec import (
    SIZES,
    Dtype,
    JobSpec,
    TimedRow,
    WrongValue,
    groups_of,
    large_gbps,
    rows_of,
)
from tccl_py.experiments.target import Target
from tccl_py.plan.parts import ChoiceName
from tccl_py.plan.words import plan_name

FEW_SIZES = (16 << 10, 256 << 10, 1 << 20, 64 << 20, 256 << 20)
"""Sizes of the sweep's jobs and, except the largest, of smaller communicators."""
_TRANSFER_BYTES = 64 << 20
"""Size of send/recv, which no sweep of sizes has: small FIFOs slow it alike from 16 MiB up."""
_LARGEST_DRY, _DRY_SECONDS = 4 << 20, 30.0
"""The largest size of a dry run: 1 GiB takes a second a call there; and its seconds."""
_NARROW = 1 << 20
"""From this size on ratios have to be known to 1 %; smaller calls take microseconds."""
_alike = partial(math.isclose, rel_tol=5e-3)
"""Losses and gradients of a few training steps: sums in another order differ by rounding."""


class RunBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Work of a comparison: rounds, sizes in bytes, and seconds after which no round begins.

    LEAST_ROUNDS are always run, of three arms one more; fewer than `rounds` where all verdicts are
    clear, more where one is open and time is left.
    """

    rounds: int = 10
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
    def rows(self) -> tuple[TimedRow, ...]:
        """Return the collectives that each job times over all ranks."""
        return rows_of(self.sizes, self.collectives, self.dtype)

    @property
    def transfers(self) -> tuple[TimedRow, ...]:
        """Return send/recv, which is timed beside; () where it is the collective."""
        size = min(_TRANSFER_BYTES, max(self.sizes))
        return () if "send_recv" in self.collectives else rows_of((size,), ("send_recv",))


def budget_of(backend: str | None) -> RunBudget:
    """Return the usual work of a comparison; a dry run on a laptop takes about a minute."""
    if backend != "host":
        return RunBudget()
    sizes = tuple(size for size in SIZES if size <= _LARGEST_DRY)
    return RunBudget(sizes=sizes, seconds=_DRY_SECONDS)


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of all rounds with their arms, in order, without arms of which a job failed.

    `checked` has each arm's first job, and `rows` what the rounds come to. `at_once` is the final
    number of concurrent jobs.
    """

    checked: Mapping[ChoiceName, Outcome]
    jobs: Sequence[tuple[ChoiceName, Outcome]]
    failures: Mapping[ChoiceName, str]
    at_once: int
    rows: Mapping[ChoiceName, Mapping[TimedRow, Row]]

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
            raise InputError(f"`choice` {only}", what, "leave it out")
    # 1. Run the jobs. Variables hold for smaller communicators of a process as well.
    with_groups = not target.hosts and any(arm.name == "variables" for arm in arms)
    groups = groups_of(launcher.world) if with_groups else ()
    beside = rows_of(budget.few_sizes[:4], budget.collectives, budget.dtype, groups=groups)
    spec = JobSpec(rows=(*budget.rows, *beside, *budget.transfers), training=budget.training)
    rounds = run_rounds(launcher, arms, budget, spec, begun=begun)
    # 2. Judge each arm, and find the winner.
    found: list[ArmResult] = []
    for arm in arms:
        result = _arm_result(arm, target, launcher, budget, rounds)
        if found and not result.failure:
            result = replace(result, large=result.over(found[0]))
        found.append(result)
    letters = dict(zip((arm.name for arm in arms), "ABC", strict=False))
    ranks = rounds.checked["default"].results
    return Verification(
        machine=plan_name(target.plan),
        gpus=target.gpus,
        hosts=target.hosts,
        backend=launcher.backend,
        arms=tuple(found),
        recommended=target.plan.recommended,
        chosen=only or target.arm(target.plan.recommended).name,
        winner=good_choices(found)[0],
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
    arm: Arm, target: Target, launcher: Launcher, budget: RunBudget, rounds: Rounds
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
    rows = dict(rounds.rows.get(arm.name, {}))
    transfers = tuple(rows.pop(row) for row in budget.transfers if row in rows)
    return replace(
        result,
        gbps=large_gbps([(row.bytes, found.gbps) for row, found in rows.items() if row.over_all]),
        rows=tuple(rows.values()),
        transfers=transfers,
        checked=sum(rank.checked for rank in first.results),
        wrong=(*first.wrong, *_wrong_training(rounds.of("default"), jobs)),
        rings=rings_of_jobs(target, launcher, arm, [first, *jobs], checks=budget.checks),
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


def _wrong_training(baseline: Sequence[Outcome], jobs: Sequence[Outcome]) -> Iterator[WrongValue]:
    """Yield losses and gradients that are not those of default NCCL's first job."""
    for job in jobs:
        for expected, rank in zip(baseline[0].results, job.results, strict=True):
            for mode, found in rank.trained.items():
                pairs = zip(found, expected.trained[mode], strict=True)
                if not all(a is not None and b is not None and _alike(a, b) for a, b in pairs):
                    what = f"loss and gradients {found} instead of {expected.trained[mode]}"
                    yield WrongValue(case=f"training step, {mode}", rank=rank.rank, what=what)


def run_rounds(
    launcher: Launcher, arms: Sequence[Arm], budget: RunBudget, spec: JobSpec, *, begun: float
) -> Rounds:
    """Check values in a first job of each arm, and run rounds until the verdicts are clear.

    An arm of which a job fails leaves the comparison with all its jobs. Raises MeasurementError: a
    job of the first arm, the baseline, failed.
    """
    running, failures = list(arms), dict[ChoiceName, str]()

    def sound(ended: Iterable[Ended]) -> Iterator[tuple[ChoiceName, Outcome]]:
        for arm, outcome in ended:
            if not isinstance(outcome, MeasurementError):
                yield arm.name, outcome
            elif arm is arms[0]:
                raise outcome
            else:
                failures[arm.name] = str(outcome)
        running[:] = [arm for arm in arms if arm.name not in failures]

    launcher.watch("checking values" if budget.checks else "starting")
    checked = dict(sound(ConcurrentJobs(launcher, JobSpec(checks=budget.checks)).run(arms)))
    jobs = ConcurrentJobs(launcher, spec)
    found: list[tuple[ChoiceName, Outcome]] = []
    rows: dict[ChoiceName, dict[TimedRow, Row]] = {}
    # Six rounds have 32 flips of signs, too few for a verdict on each of two arms.
    least = LEAST_ROUNDS if len(arms) == 2 else LEAST_ROUNDS + 1
    most, at_once = min(MAX_ROUNDS, max(budget.rounds * budget.extra, least)), 0
    for ended in jobs.rounds(running, most) if len(running) > 1 else ():
        found += sound(ended)
        found = [(name, job) for name, job in found if name not in failures]
        at_once = min(jobs.at_once, len(ended))
        count = len(found) // len(running)
        if count < least and len(running) > 1:
            continue
        # Compare all rows of all arms at once; stop where more rounds add nothing.
        rows = _compared(launcher, spec, found)
        late = time.monotonic() - begun > budget.seconds
        if late or len(running) == 1 or _enough(budget, rows, count):
            break
    return Rounds(checked=checked, jobs=found, failures=failures, at_once=at_once, rows=rows)


def _enough(
    budget: RunBudget, rows: Mapping[ChoiceName, Mapping[TimedRow, Row]], count: int
) -> bool:
    """Return whether more rounds add nothing.

    Beyond the budget's rounds, only a lean to harm counts, and sizes from _NARROW on over all
    ranks.
    """
    for row, found in chain.from_iterable(each.items() for each in rows.values()):
        narrow = row.bytes >= _NARROW and not row.groups
        wanted = count < budget.rounds or narrow or found.compared.high < 1
        if found.compared.open and wanted and row not in budget.transfers:
            return False
    return True


def _compared(
    launcher: Launcher, spec: JobSpec, jobs: Sequence[tuple[ChoiceName, Outcome]]
) -> dict[ChoiceName, dict[TimedRow, Row]]:
    """Return the rows of every arm, with the speed over the first one's."""
    names = dict.fromkeys(name for name, _ in jobs)
    seconds = {name: row_seconds(spec, [job for own, job in jobs if own == name]) for name in names}
    first, *others = seconds
    found = {first: {row: _row(launcher, row, taken) for row, taken in seconds[first].items()}}
    for name in others:
        rows = seconds[name]
        baseline = [seconds[first][row] for row in rows]
        compared = compare(list(rows.values()), baseline, arms=len(others))
        found[name] = {
            row: _row(launcher, row, taken, one)
            for (row, taken), one in zip(rows.items(), compared, strict=True)
        }
    return found


def _row(
    launcher: Launcher, row: TimedRow, seconds: tuple[float, ...], compared: Compared = EQUAL
) -> Row:
    gpus = launcher.hosts[0].gpus
    ranks = len(row.groups[0]) if row.groups else launcher.world
    return Row(
        bytes=row.bytes,
        groups=tuple(tuple(gpus[rank] for rank in group) for group in row.groups),
        mode=row.mode,
        seconds=seconds,
        gbps=bus_gbps(row.collective, ranks, row.bytes, statistics.median(seconds)),
        compared=compared,
        verdict=compared.verdict,
    )


def row_seconds(spec: JobSpec, jobs: Sequence[Outcome]) -> dict[TimedRow, tuple[float, ...]]:
    """Return the seconds of each timed row, one value a job: the slowest rank's median.

    Ranks outside all groups, and jobs under a graph file, have no times of groups.
    """
    found: dict[TimedRow, list[float]] = {}
    for job in jobs:
        rows = {row: [rank.timings[at] for rank in job.results] for at, row in enumerate(spec.rows)}
        for mode in job.results[0].training:
            rows[TimedRow(mode=mode)] = [rank.training[mode] for rank in job.results]
        for row, ranks in rows.items():
            medians = [statistics.median(batches) for batches in ranks if batches]
            if medians:
                found.setdefault(row, []).append(max(medians))
    return {row: tuple(seconds) for row, seconds in found.items()}
