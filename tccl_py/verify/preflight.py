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
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.files import picked
from tccl_py.health.drift import (
    ROUNDS,
    Drift,
    Effort,
    Journal,
    collapse_patterns,
    drift_json,
    find_drift,
    joined,
    measuring_again,
    metric,
)
from tccl_py.health.drift_statistics import FALSE_ALARM_RATE, chance, common_spread
from tccl_py.model.measurement import BandwidthSource
from tccl_py.plan.again import class_sources, hosts_again, journal_by_class, journal_of
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import JOURNAL_FILE
from tccl_py.sources.journal import JournalFile
from tccl_py.sources.opening import HostsSource, OpenedSource
from tccl_py.sources.profiled import is_dry_run
from tccl_py.sources.remembering import AnewSource
from tccl_py.statistics import holm
from tccl_py.verify.jobs import Arm, Launcher, Outcome
from tccl_py.verify.nccl_tests import NO_TORCH, PROGRAMS
from tccl_py.verify.plans import JobOptions, launcher_of
from tccl_py.verify.record import Row, Verification
from tccl_py.verify.spec import MIB, Collective, JobSpec, bus_gbps, is_large, size_text
from tccl_py.verify.target import Target, read_target
from tccl_py.verify.verify import rings_of_jobs, row_seconds

FAMILIES = 2
"""Comparisons of transfers, and of collectives, share the rate of false alarms."""
_SIZES = (MIB, 64 * MIB, 256 * MIB)
"""Sizes of a plan that was not verified."""
_LONGEST_S = 0.1
"""The longest call that is timed: a job makes a dozen of each size."""
_CLOSING_S, _LEAST_S = 5.0, 5.0
"""Seconds to close the profiler and to learn patterns, and for the least check of transfers."""
_DRY_SETS = 4
"""Sets of a dry run's check: its rates say nothing about GPUs, and two minutes are long for it."""
_UNEXPLAINED = "no transfer is slower than planned: NCCL, its settings, or the host's CPUs"


class Problem(msgspec.Struct, frozen=True):
    """A reason to keep jobs off a machine."""

    what: str
    where: str
    expected: str
    measured: str


class BusRate(msgspec.Struct, frozen=True, kw_only=True):
    """Bus bandwidth of a size now and when the plan was verified, GB/s; None if it was not.

    `p` is the chance of such a change if the true one is small, adjusted for all sizes.
    """

    bytes: int
    gbps: float
    expected_gbps: float | None = None
    p: float = 1.0

    @property
    def slower(self) -> bool:
        """Return whether the bandwidth fell beyond doubt."""
        fell = self.expected_gbps is not None and self.gbps < self.expected_gbps
        return fell and self.p <= FALSE_ALARM_RATE


class CollectivesChecked(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the jobs, if any ran: number of compared results, faults of ranks, bandwidths."""

    collective: Collective = "all_reduce"
    checked: int = 0
    problems: tuple[Problem, ...] = ()
    rates: tuple[BusRate, ...] = ()


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a preflight."""

    drift: Drift
    collectives: CollectivesChecked
    seconds: float

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return all reasons to keep jobs off, faults of collectives first."""
        jobs = self.collectives
        lost = [
            Problem(f"transfers {lost}", why, "measurable", "nothing")
            for lost, why in self.drift.lost.items()
        ]
        slower = [row for row in self.drift.changes if row.ratio < 1]
        cause = self.drift.points_to if slower or lost else ""
        rates = [
            *((f"{row.flow} in {row.transfers}", row.was_gbps, row.is_gbps) for row in slower),
            *(
                (f"{jobs.collective} of {size_text(row.bytes)}", row.expected_gbps or 0, row.gbps)
                for row in jobs.rates
                if row.slower
            ),
        ]
        fallen = [
            Problem(
                f"bandwidth of {what}", cause or _UNEXPLAINED, f"{was:.2f} GB/s", f"{now:.2f} GB/s"
            )
            for what, was, now in rates
        ]
        return (*jobs.problems, *lost, *fallen)

    @property
    def ok(self) -> bool:
        """Return whether jobs may run."""
        return not self.problems


def check_collectives(
    target: Target,
    launcher: Launcher,
    verified: Verification | None,
    *,
    until: float = math.inf,
) -> CollectivesChecked:
    """Check values and bandwidth of collectives in a job of the plan's recommended choice.

    A job may take half of the time to `until`, by the monotonic clock. Bandwidths are compared with
    a verification by the same program, torch's or one of nccl-tests.
    """
    arm = target.arm(target.plan.recommended)
    timed = PROGRAMS[launcher.nccl_tests.name] if launcher.nccl_tests else None
    rows = _verified_rows(verified, arm, launcher, timed)
    short = [row for row in rows if statistics.median(row.seconds) <= _LONGEST_S] or rows[:1]
    expected = {
        row.bytes: row for row in [one for one in short if is_large(one.bytes)] or short[-1:]
    }
    gbps = target.plan.rate_gbps
    sizes = [size for size in _SIZES if 2 * size / (gbps * 1e9) <= _LONGEST_S]
    collective = timed or cast(Collective, verified.collective if verified else "all_reduce")
    spec = JobSpec(
        checks=True, sizes=tuple(expected or sizes or _SIZES[:1]), collectives=(collective,)
    )
    before = {size: _logs(row.seconds) for size, row in expected.items()}
    try:
        (job,) = _limited(launcher, until).run([arm], spec)
        p = _chances(before, spec, job)
        if min(p.values(), default=1.0) <= FALSE_ALARM_RATE:
            again = msgspec.structs.replace(spec, checks=False)
            (second,) = _limited(launcher, until).run([arm], again)
            confirming = _chances(before, again, second)
            p = {size: max(first, confirming[size]) for size, first in p.items()}
    except MeasurementError as error:
        happened = "a rank failed or took too long"
        fault = Problem("collectives", str(error), "every rank finishes", happened)
        return CollectivesChecked(collective=collective, problems=(fault,))
    rates = tuple(
        BusRate(
            bytes=row.bytes,
            gbps=bus_gbps(collective, target.world, row.bytes, seconds[0]),
            expected_gbps=expected[row.bytes].gbps if row.bytes in expected else None,
            p=p.get(row.bytes, 1.0),
        )
        for row, seconds in row_seconds(spec, [job]).items()
    )
    return CollectivesChecked(
        collective=collective,
        checked=sum(rank.checked for rank in job.results),
        problems=(*_wrong(launcher, job), *_not_as_planned(target, launcher, arm, job)),
        rates=rates,
    )


def _verified_rows(
    verified: Verification | None, arm: Arm, launcher: Launcher, timed: Collective | None
) -> Sequence[Row]:
    """Return the sizes of an arm's verification by the same program; () if there was none."""
    if verified is None or verified.backend != launcher.backend:
        return ()
    by_torch = not verified.versions.get("torch", "").startswith(NO_TORCH)
    if by_torch != (timed is None) or timed not in (None, verified.collective):
        return ()
    found = verified.arm(arm.name)
    return found.sizes if found is not None else ()


def _limited(launcher: Launcher, until: float) -> Launcher:
    left = max((until - time.monotonic()) / 2, _LEAST_S)
    return msgspec.structs.replace(launcher, timeout=min(left, launcher.timeout))


def _logs(seconds: Sequence[float]) -> list[float]:
    return [-math.log(one) for one in seconds]


def _chances(before: dict[int, list[float]], spec: JobSpec, job: Outcome) -> dict[int, float]:
    """Return the chance of each size's change, adjusted for all sizes and both families."""
    spread = common_spread(before.values())
    found = {row.bytes: _logs(seconds) for row, seconds in row_seconds(spec, [job]).items()}
    raw = [chance(logs, found[size], spread) for size, logs in before.items()]
    return {size: min(1.0, FAMILIES * p) for size, p in zip(before, holm(raw), strict=True)}


def _wrong(launcher: Launcher, job: Outcome) -> list[Problem]:
    """Return the wrong values of each GPU, of the GPU with most first."""
    names = {
        rank: f"GPU {gpu}" + f" of {host.name}" * bool(host.name)
        for host in launcher.hosts
        for rank, gpu in zip(host.ranks, host.gpus, strict=True)
    }
    first = {one.rank: one for one in reversed(job.wrong)}
    return [
        Problem(
            f"values of {first[rank].case}: {first[rank].what}",
            names[rank],
            "no wrong result",
            f"{count} wrong results",
        )
        for rank, count in Counter(one.rank for one in job.wrong).most_common()
    ]


def _not_as_planned(target: Target, launcher: Launcher, arm: Arm, job: Outcome) -> list[Problem]:
    rings = rings_of_jobs(target, launcher, arm, [job], checks=True)
    differences = rings.differences if rings is not None else ()
    return [Problem("rings", "NCCL, by its log", "as planned", found) for found in differences]


def measure_plan_again(
    plan: Plan,
    directory: Path,
    effort: Effort,
    options: JobOptions,
    *,
    preflight: bool,
    watching: Callable[[], Callable[[int], None]],
) -> tuple[Drift, CollectivesChecked]:
    """Return the drift and, of a preflight, what a job of collectives found before.

    A measured cluster's plan needs the MPI job of `options`; `watching` begins to show sets
    measured.
    """
    until = time.monotonic() + effort.seconds
    journal, jobs = journal_of(plan, directory), CollectivesChecked()

    def tell(texts: Iterable[str]) -> None:
        for text in texts:
            options.say(text)

    tell(journal.notices)
    if is_dry_run(journal.header):
        options = msgspec.structs.replace(options, backend="host")
        effort = msgspec.structs.replace(effort, sets=_DRY_SETS)
    with ExitStack() as stack:
        if preflight and plan.simulated:
            options.say("no collectives are run: the plan is simulated")
        elif preflight:
            with launcher_of(plan, directory, options) as launcher:
                verified, target = Verification.load(directory), read_target(plan, directory)
                jobs = check_collectives(target, launcher, verified, until=until)
        watch = watching()
        known: Sequence[Journal] = [journal.measurements]
        if options.job is not None:
            source: OpenedSource = stack.enter_context(
                hosts_again(plan, journal.header, options.job)
            )
            known = journal_by_class(plan, journal)
        else:
            source, told = measuring_again(plan, directory, journal.header, effort.seed)
            tell(told)
            stack.enter_context(source)
        source.watch(watch)
        left = max(until - time.monotonic() - _CLOSING_S * preflight, _LEAST_S * preflight)
        found = _drift(plan, source, known, msgspec.structs.replace(effort, seconds=left))
        if preflight:
            tell(learn_patterns(plan, directory, known[0], source, until))
    tell(source.notices)
    return found, jobs


def _drift(plan: Plan, source: OpenedSource, known: Sequence[Journal], effort: Effort) -> Drift:
    """Return the drift of all classes of hosts, which share the time."""
    effort = msgspec.structs.replace(effort, seconds=effort.seconds / len(plan.cluster.classes))
    sources: Sequence[BandwidthSource] = [AnewSource(source)]
    if isinstance(source, HostsSource):
        sources = class_sources(source, plan.cluster)
    found = [
        find_drift(plan, known[number], each, number=number, effort=effort)
        for number, each in enumerate(sources)
    ]
    return joined(plan, found)


def learn_patterns(
    plan: Plan, directory: Path, known: Journal, source: OpenedSource, until: float
) -> list[str]:
    """Add collapse patterns that a machine's journal lacks to it; return notices.

    None is measured after `until`, by the monotonic clock.
    """
    small = sorted(known, key=len)
    lacking = [one for one in collapse_patterns(plan, small) if one not in known]
    rounds = [one for _ in range(ROUNDS) for one in lacking]
    if not rounds or plan.simulated or plan.is_cluster:
        return []
    try:
        with closing(JournalFile(directory / JOURNAL_FILE, source.header)) as journal:
            for one in rounds:
                if time.monotonic() < until:
                    journal.append(source.measure_anew(one))
    except (InputError, MeasurementError) as error:
        return [f"writes above {len(lacking)} switches cannot be compared: {error}"]
    return [f"measured writes above {len(lacking)} switches: later preflights compare with them"]


def preflight_json(plan: Plan, found: Preflight) -> dict[str, Any]:
    """Return the JSON of `check --preflight --json`."""
    jobs = found.collectives
    return {
        "ok": found.ok,
        "findings": found.problems,
        "collective": jobs.collective,
        "collectives_checked": jobs.checked,
        "bandwidths": [picked(row, "bytes", "gbps", "expected_gbps", "p") for row in jobs.rates],
        **drift_json(plan, found.drift),
        "seconds": found.seconds,
    }


def preflight_metrics(found: Preflight, *, machine: str, simulated: bool) -> str:
    """Return the metrics that a preflight adds to those of a check."""
    own = {"machine": machine, "simulated": str(simulated).lower()}
    jobs = found.collectives
    sizes = [({**own, "bytes": str(row.bytes)}, row) for row in jobs.rates]
    now = [(labels, row.gbps) for labels, row in sizes]
    was = [(labels, row.expected_gbps) for labels, row in sizes if row.expected_gbps is not None]
    return "".join(
        (
            metric("preflight_ok", "Whether jobs may run (1) or not (0).", [(own, found.ok)]),
            metric("findings", "Reasons to keep jobs off.", [(own, len(found.problems))]),
            metric("collectives_checked", "Results compared bit by bit.", [(own, jobs.checked)]),
            metric("collective_gbps", "Bus bandwidth of a collective, GB/s.", now),
            metric("collective_expected_gbps", "Bus bandwidth when it was verified, GB/s.", was),
        )
    )
