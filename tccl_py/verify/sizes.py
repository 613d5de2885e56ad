"""Tuning by message size: a sweep of choices in one job, then fresh jobs that confirm or reject.

Choices are relative to the recommended choice of the plan without a table, whose jobs they share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from tccl_py.nccl.tuner import TunerEntry
from tccl_py.plan.plan import ChoiceName
from tccl_py.verify.jobs import Arm, ConcurrentJobs, JobError, Launcher, Outcome
from tccl_py.verify.size_table import SizeRow, confirm, entries, finalists, predict
from tccl_py.verify.spec import (
    FINAL_ROUNDS,
    KIB,
    Collective,
    Contest,
    ContestTimes,
    Dtype,
    JobSpec,
    TimedRow,
)
from tccl_py.verify.target import Target
from tccl_py.verify.timing import GRAPHED_BYTES

TUNER_VARIABLE = "NCCL_TUNER_PLUGIN"
ALL_SIZES = tuple(KIB << shift for shift in range(21))
"""1 KiB to 1 GiB in powers of two."""
_DTYPE: Dtype = "bfloat16"
_SPOT: Dtype = "float32"
_NOISY = 512 * KIB
_ROUNDS = {_NOISY: (12, 16), GRAPHED_BYTES: (FINAL_ROUNDS, 8), ALL_SIZES[-1]: (10, 5)}
"""Rounds up to a size in bytes, in the sweep and in a fresh job. Without P2P, CUDA graphs of the
same calls differed by 8 % at 16 KiB, 3 % at 512 KiB, and less above (two H200). Up to _NOISY bytes
a choice was 28 % faster in all graphs of one process, and no faster in ten others."""
_AGAIN_JOBS, _AGAIN_ROUNDS = 12, 6
LEAST_JOBS, MOST_JOBS = 6, 10
_START_S = 60.0
"""Time for the start of a job's ranks and its first collectives."""
_NEVER_S = 1e9

Watcher = Callable[[str], None]


class SizeBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Work of tuning a set of GPUs: collectives, each at all sizes in bytes, and seconds.

    The sweep has `sweep_seconds`. No fresh jobs start after `seconds`, but LEAST_JOBS always run.
    """

    collectives: tuple[Collective, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = ALL_SIZES
    sweep_seconds: float = 150.0
    seconds: float = 300.0


class SizeTuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows of a set of GPUs, and the entries for the tuner that follow.

    `arm` is the choice under which rows were timed. `skew` is the largest median difference between
    ranks in a sweep, as a share of the seconds. `jobs` fresh jobs ran of each arm. `by_plugin` are
    rows under the plugin's own table, whose `fresh` is the speed over NCCL's own choice.
    """

    gpus: tuple[int, ...]
    arm: ChoiceName
    backend: str
    nccl: str
    rows: tuple[SizeRow, ...]
    entries: tuple[TunerEntry, ...]
    jobs: int
    by_plugin: tuple[SizeRow, ...] = ()
    skew: float = 0.0
    seconds: float = 0.0

    @property
    def predictions(self) -> tuple[int, int]:
        """Return how many predictions fresh jobs found right, of how many."""
        asked = [row for row in self.rows if row.row.dtype == _DTYPE and row.fresh is not None]
        return sum(row.right for row in asked), len(asked)


def without(
    tuning: SizeTuning, harmful: Sequence[TunerEntry], by_plugin: Sequence[SizeRow]
) -> SizeTuning:
    """Return a tuning without harmful entries, with the rows by the plugin that found these."""

    def harms(row: SizeRow) -> bool:
        return any(
            entry.collective == row.row.collective
            and entry.from_bytes <= row.row.bytes <= entry.to_bytes
            for entry in harmful
        )

    replace = msgspec.structs.replace
    own = {row.row.collective for row in tuning.rows}
    return replace(
        tuning,
        rows=tuple(replace(row, kept=row.kept and not harms(row)) for row in tuning.rows),
        entries=tuple(entry for entry in tuning.entries if entry not in harmful),
        by_plugin=tuple(row for row in by_plugin if row.row.collective in own),
    )


def table_rows(entry: TunerEntry) -> list[TimedRow]:
    """Return rows to time of an entry: its ends, the measured sizes inside, and half-way sizes."""
    between = [math.isqrt(low * high) for low, high in pairwise(ALL_SIZES)]
    inside = {size for size in (*ALL_SIZES, *between) if entry.from_bytes <= size <= entry.to_bytes}
    return [
        TimedRow(collective=entry.collective, dtype=_DTYPE, bytes=size)
        for size in sorted(inside | {entry.from_bytes, entry.to_bytes})
    ]


def table_contests(rows: Sequence[TimedRow]) -> tuple[Contest, ...]:
    """Return contests of the plugin's table with NCCL's own choice."""
    return tuple(
        Contest(row=row, choices=(), rounds=_rounds(row.bytes)[1], beside=False, table=True)
        for row in rows
    )


def contests_again(sweep: Sequence[ContestTimes]) -> tuple[Contest, ...]:
    """Return contests of the finalists of small messages."""
    return tuple(
        Contest(row=times.row, choices=finalists(times), rounds=_AGAIN_ROUNDS, beside=False)
        for times in sweep
        if times.row.bytes <= _NOISY
    )


def run_jobs(
    launcher: Launcher, arm: Arm, contests: tuple[Contest, ...], count: int = LEAST_JOBS
) -> list[Outcome]:
    """Run fresh jobs of an arm with these contests. Raises JobError: a job failed."""
    spec = JobSpec(contests=contests, contest_seconds=_NEVER_S)
    jobs = ConcurrentJobs(launcher, [contest.row.bytes for contest in contests])
    found = []
    for outcome in jobs.run([arm] * count, spec):
        if isinstance(outcome, JobError):
            raise outcome
        found.append(outcome)
    return found


class SizeArms(msgspec.Struct, frozen=True, kw_only=True):
    """The arm whose choices are timed, and the arms beside it, default NCCL the first."""

    plan: Arm
    others: tuple[Arm, ...]

    @property
    def everything(self) -> tuple[Arm, ...]:
        """Return all arms, the plan's first."""
        return self.plan, *self.others


def arms_of(target: Target, library: Path | None) -> SizeArms:
    """Return the arms of a plan: the recommended choice has the plugin's tuner, if any."""
    plan = target.arm(target.plan.recommended)
    others = tuple(arm for arm in target.arms if arm.name not in ("graph", plan.name))
    variables = dict(plan.variables)
    if library is not None:
        variables[TUNER_VARIABLE] = str(library.resolve())
    return SizeArms(plan=msgspec.structs.replace(plan, variables=variables), others=others)


def tune_sizes(
    arms: SizeArms,
    launcher: Launcher,
    budget: SizeBudget,
    *,
    watch: Watcher = lambda _: None,
) -> tuple[SizeTuning, tuple[ContestTimes, ...]]:
    """Find choices of algorithm, protocol and channels that are faster than NCCL's own.

    Also returns all times of the sweep.

    Raises JobError: the sweep's job failed, or too many fresh jobs.
    """
    begun = time.monotonic()
    timeout = max(launcher.timeout, budget.sweep_seconds + _START_S)
    launcher = msgspec.structs.replace(launcher, timeout=timeout)
    # 1. Sweep over all choices in one job.
    watch(f"trying algorithms, protocols and channels of {arms.plan.name}")
    contests = tuple(
        Contest(
            row=TimedRow(collective=collective, dtype=_DTYPE, bytes=size),
            rounds=_rounds(size)[0],
        )
        for collective in budget.collectives
        for size in budget.sizes
    )
    spec = JobSpec(contests=contests, contest_seconds=budget.sweep_seconds)
    (job,) = launcher.run([arms.plan], spec)
    sweep = job.results[0].contests
    # 2. Small messages depend on the process: time their finalists in several ones.
    watch("timing the best of small messages again")
    again = contests_again(sweep)
    small = run_jobs(launcher, arms.plan, again, _AGAIN_JOBS) if again else []
    predicted = with_spots(predict(sweep, [each.results[0].contests for each in small]))
    # 3. Time the predicted choices in fresh jobs, which decide.
    fresh = _fresh_jobs(arms, launcher, predicted, until=begun + budget.seconds, watch=watch)
    rows = confirm(predicted, fresh, plan=arms.plan.name)
    tuning = SizeTuning(
        gpus=tuple(gpu for host in launcher.hosts for gpu in host.gpus),
        arm=arms.plan.name,
        backend=launcher.backend,
        nccl=job.results[0].nccl,
        rows=tuple(rows),
        entries=entries(rows, sweep),
        jobs=len(fresh[arms.plan.name]),
        skew=max((times.skew for times in sweep), default=0.0),
        seconds=time.monotonic() - begun,
    )
    return tuning, sweep


def _rounds(size: int) -> tuple[int, int]:
    return next(
        (rounds for most, rounds in _ROUNDS.items() if size <= most), _ROUNDS[ALL_SIZES[-1]]
    )


def with_spots(rows: Sequence[SizeRow]) -> list[SizeRow]:
    """Return the rows, and all-reduces of the other dtype where the first one is to gain.

    NCCL does not tell a tuner the dtype: an entry holds for all of them.
    """
    return [
        *rows,
        *(
            msgspec.structs.replace(row, row=msgspec.structs.replace(row.row, dtype=_SPOT))
            for row in rows
            if row.gains and not row.harms and row.row.collective == "all_reduce"
        ),
    ]


def _fresh_jobs(
    arms: SizeArms,
    launcher: Launcher,
    predicted: Sequence[SizeRow],
    *,
    until: float,
    watch: Watcher,
) -> dict[ChoiceName, list[Sequence[ContestTimes]]]:
    """Return the times of each arm's jobs: MOST_JOBS, fewer if it is late."""
    contests = tuple(
        Contest(
            row=row.row,
            choices=() if row.choice is None else (row.choice,),
            rounds=_rounds(row.row.bytes)[1],
            beside=False,
        )
        for row in predicted
    )
    found: dict[ChoiceName, list[Sequence[ContestTimes]]]
    found = {arm.name: [] for arm in arms.everything}
    if not contests:
        return found
    spec = JobSpec(contests=contests, contest_seconds=_NEVER_S)
    jobs = ConcurrentJobs(launcher, [row.row.bytes for row in predicted])
    own = found[arms.plan.name]
    while len(own) < LEAST_JOBS or (len(own) < MOST_JOBS and time.monotonic() < until):
        watch(f"fresh jobs, round {len(own) + 1}")
        batch = arms.everything * max(1, jobs.at_once // len(arms.everything))
        for arm, outcome in zip(batch, jobs.run(batch, spec), strict=True):
            if isinstance(outcome, JobError):
                raise outcome
            found[arm.name].append(outcome.results[0].contests)
    return found
