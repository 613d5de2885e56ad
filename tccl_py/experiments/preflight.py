"""Preflight: a job of checked collectives, judged by the plan's verification, beside the drift.

The expected bandwidth is what the same choice of the same plan achieved when it was verified: no
threshold is fixed. The comparison shares its rate of false alarms with that of transfers, and a
second job has to confirm a change.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from typing import cast

import msgspec
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError, counted, require, size_text
from tccl_py.experiments.collectives import PROGRAMS, Collective
from tccl_py.experiments.comparison import Timed, single, timed_rows
from tccl_py.experiments.jobs import Arm, Launcher, Outcome
from tccl_py.experiments.nccl_tests import NO_TORCH
from tccl_py.experiments.plans import launcher_of
from tccl_py.experiments.record import Verification
from tccl_py.experiments.spec import MIB, JobSpec, is_large, rows_of
from tccl_py.experiments.target import Target, read_target
from tccl_py.experiments.verify import rings_of_jobs
from tccl_py.health.drift import Drift, Effort, TooShortError
from tccl_py.health.drift_statistics import FALSE_ALARM_RATE, chance, common_spread
from tccl_py.health.remeasuring import remeasuring
from tccl_py.plan.plan import Plan
from tccl_py.planning.cables import facing_ports
from tccl_py.planning.plan_sources import journal_of
from tccl_py.sources.profiled import users_of
from tccl_py.statistics import holm

FAMILIES = 2
"""Comparisons of transfers, and of collectives, share the rate of false alarms."""
_SIZES = (MIB, 16 * MIB, 256 * MIB)
"""Sizes of a plan that was not verified, which grow by one factor, as nccl-tests need it."""
_LONGEST_S = 0.1
"""The longest call that is timed: a job makes some ten of each size."""
_CLOSING_S, _LEAST_S = 5.0, 5.0
"""Seconds to close the profiler and to learn patterns, and for the least check of transfers."""
_DRY_SETS = 4
"""Sets of a dry run's check: its rates say nothing about GPUs, and two minutes are long for it."""
_UNEXPLAINED = "no transfer is slower than planned: NCCL, its settings, or the host's CPUs"
_NOT_JUDGED = "an unknown place: no transfer was judged"


class Problem(msgspec.Struct, frozen=True):
    """A reason to keep jobs off a machine."""

    what: str
    where: str
    expected: str
    measured: str


class CollectivesChecked(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the jobs, if any ran: how many were compared and wrong, faults, bandwidths.

    These are relative to those of the verification, if any; p values are adjusted for all sizes.
    """

    collective: Collective = "all_reduce"
    checked: int = 0
    wrong: int = 0
    problems: tuple[Problem, ...] = ()
    rates: tuple[Timed, ...] = ()

    @property
    def slower(self) -> list[Timed]:
        """Return the rows whose bandwidth fell beyond doubt."""
        rows = (row for row in self.rates if 0 < row.compared.ratio < 1)
        return [row for row in rows if row.compared.p <= FALSE_ALARM_RATE]


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a preflight."""

    drift: Drift
    collectives: CollectivesChecked
    seconds: float

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return all reasons to keep jobs off, faults of collectives first."""
        jobs, drift = self.collectives, self.drift
        lost = [
            Problem(f"transfers {transfers}", why, "measurable", "nothing")
            for transfers, why in drift.lost.items()
        ]
        fell = (row for row in drift.changes if row.ratio < 1)
        rates = [(f"{row.name} in {row.transfers}", row.was_gbps, row.is_gbps) for row in fell]
        cause = drift.points_to if rates or lost else ""
        rates += [
            (f"{jobs.collective} of {size_text(row.bytes)}", row.expected_gbps or 0, row.gbps)
            for row in jobs.slower
        ]
        for of, was, now in rates:
            before, after = f"{was:.2f} GB/s", f"{now:.2f} GB/s"
            where = cause or (_UNEXPLAINED if drift.sets else _NOT_JUDGED)
            lost.append(Problem(f"bandwidth of {of}", where, before, after))
        return (*jobs.problems, *lost)

    @property
    def ok(self) -> bool:
        """Return whether jobs may run."""
        return not self.problems


def check_collectives(
    target: Target, launcher: Launcher, verified: Verification | None, *, until: float = math.inf
) -> CollectivesChecked:
    """Check values and bandwidth of collectives in a job of the plan's recommended choice.

    A job may take half of the time to `until`, by the monotonic clock. Bandwidths are compared with
    a verification by the same program, torch's or one of nccl-tests.
    """
    arm = target.arm(target.plan.recommended)
    of_program = PROGRAMS[launcher.nccl_tests.name] if launcher.nccl_tests else None
    history = _verified_rows(verified, arm, launcher, of_program)
    collective = of_program or cast(Collective, verified.collective if verified else "all_reduce")
    longest = _LONGEST_S * target.plan.rate_gbps * 1e9 / 2
    sizes = history or [size for size in _SIZES if size <= longest] or _SIZES[:1]
    spec = JobSpec(checks=True, rows=rows_of(sizes, (collective,)))
    try:
        (job,) = _limited(launcher, until).run([arm], spec)
        rates = _rates(history, launcher, job)
        if any(row.compared.p <= FALSE_ALARM_RATE for row in rates):
            (second,) = _limited(launcher, until).run([arm], replace(spec, checks=False))
            for at, again in enumerate(_rates(history, launcher, second)):
                likelier = max(rates[at].compared.p, again.compared.p)
                rates[at] = replace(rates[at], compared=replace(rates[at].compared, p=likelier))
    except MeasurementError as error:
        happened = "a rank failed or took too long"
        fault = Problem("collectives", str(error), "every rank finishes", happened)
        return CollectivesChecked(collective=collective, problems=(fault,))
    rings = rings_of_jobs(target, launcher, arm, [job], checks=True)
    differences = rings.differences if rings is not None else ()
    return CollectivesChecked(
        collective=collective,
        checked=sum(rank.checked for rank in job.results),
        wrong=len(job.wrong),
        problems=(
            *_wrong(launcher, job),
            *(Problem("rings", "NCCL, by its log", "as planned", text) for text in differences),
        ),
        rates=tuple(rates),
    )


def _verified_rows(
    verified: Verification | None, arm: Arm, launcher: Launcher, of_program: Collective | None
) -> dict[int, Timed]:
    """Return rows of an arm's verification by the same program, by size; {} if there was none.

    Of sizes below the first that takes long, the large ones, else the largest.
    """
    if verified is None or verified.backend != launcher.backend:
        return {}
    by_torch = not verified.versions.get("torch", "").startswith(NO_TORCH)
    if by_torch != (of_program is None) or of_program not in (None, verified.collective):
        return {}
    result = verified.arm(arm.name)
    rows = result.sizes if result is not None else ()
    quick = takewhile(lambda row: statistics.median(row.seconds) <= _LONGEST_S, rows)
    short = list(quick) or rows[:1]
    return {row.bytes: row for row in [row for row in short if is_large(row.bytes)] or short[-1:]}


def _limited(launcher: Launcher, until: float) -> Launcher:
    seconds = max((until - time.monotonic()) / 2, _LEAST_S)
    return replace(launcher, timeout=min(seconds, launcher.timeout))


def _rates(history: dict[int, Timed], launcher: Launcher, job: Outcome) -> list[Timed]:
    """Return a job's rows, with the chance of each change, adjusted for sizes and both families."""
    rows = list(timed_rows(launcher, [job]).values())
    if not history:
        return rows
    was = [history[row.bytes] for row in rows]
    logs = [
        [[-math.log(s) for s in of.seconds] for of in pair] for pair in zip(was, rows, strict=True)
    ]
    spread = common_spread([before for before, _ in logs])
    raw = holm([chance(before, after, spread) for before, after in logs])
    return [
        replace(row, compared=single(row.gbps / before.gbps, p=min(1.0, FAMILIES * p)))
        for row, before, p in zip(rows, was, raw, strict=True)
    ]


def _wrong(launcher: Launcher, job: Outcome) -> list[Problem]:
    """Return the wrong values of each GPU, of the GPU with most first."""
    names = {
        rank: f"GPU {gpu}" + f" of {host.name}" * bool(host.name)
        for host in launcher.hosts
        for rank, gpu in zip(host.ranks, host.gpus, strict=True)
    }
    first = {value.rank: value for value in reversed(job.wrong)}
    return [
        Problem(
            f"values of {first[rank].case}: {first[rank].what}",
            names[rank],
            "no wrong result",
            f"{count} wrong results",
        )
        for rank, count in Counter(value.rank for value in job.wrong).most_common()
    ]


def measure_plan_again(
    plan: Plan,
    directory: Path,
    effort: Effort,
    launcher: Launcher,
    *,
    preflight: bool,
    watching: Callable[[], Callable[[int], None]],
) -> Preflight:
    """Measure a plan's drift and, of a preflight, check collectives in a job before.

    A measured cluster's plan needs the MPI job of `launcher`; `watching` begins to show sets
    measured. What a job found wrong stays where the time does not suffice for the drift. Raises
    InputError: a preflight by a simulated plan, or of GPUs that are in use, or by nccl-tests over
    hosts or in a dry run; TooShortError.
    """
    if preflight and plan.simulated:
        what = "is simulated, which says nothing of this machine"
        raise InputError(str(directory), what, "name a measured plan, or leave out `preflight`")
    begun = time.monotonic()
    until = begun + effort.seconds
    journal, jobs = journal_of(plan, directory), CollectivesChecked()
    if launcher.nccl_tests is not None and (launcher.job is not None or journal.header.dry_run):
        raise InputError("`with_`", "drives the GPUs of one machine", "leave it out")

    def tell(texts: Iterable[str]) -> None:
        for text in texts:
            launcher.say(text)

    tell((*journal.notices, *facing_ports(plan.cluster)))
    if journal.header.dry_run:
        launcher = replace(launcher, backend="host")
        effort = replace(effort, sets=_DRY_SETS)
    if preflight:
        with launcher_of(plan, directory, launcher) as ready:
            on_gpus = ready.backend == "cuda" and ready.job is None
            users = users_of(plan.gpus) if on_gpus else ""
            require(not users, "`preflight`", users, "let it end: preflights need idle GPUs")
            verified, target = Verification.load(directory), read_target(plan, directory)
            jobs = check_collectives(target, ready, verified, until=until)
    watch = watching()
    job, alike = launcher.job, launcher.alike
    with remeasuring(plan, directory, journal, effort.seed, job=job, alike=alike) as again:
        tell(again.notices)
        again.source.watch(watch)
        remaining = max(until - time.monotonic() - _CLOSING_S * preflight, _LEAST_S * preflight)
        try:
            drift = again.drift(replace(effort, seconds=remaining))
        except TooShortError as error:
            # What is wrong is an answer; that a part of it all is right is none.
            drift = error.drift
            sound = Preflight(drift=drift, collectives=jobs, seconds=0.0).ok
            if sound if preflight else not drift.drifted:
                if jobs.checked:
                    tell([f"{counted(jobs.checked, 'result')} of collectives compared, all right"])
                raise
            tell([f"not all transfers were judged: {error.where} {error.what}; {error.right}"])
        tell(again.learn_patterns(directory, until) if preflight else ())
    tell(again.source.notices)
    return Preflight(drift=drift, collectives=jobs, seconds=time.monotonic() - begun)
