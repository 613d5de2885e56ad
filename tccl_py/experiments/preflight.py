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
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import cast

import msgspec
from msgspec.structs import replace

from tccl_py.errors import InputError, require, size_text, spell
from tccl_py.experiments.comparison import RunBudget, Timed, over_earlier
from tccl_py.experiments.jobs import Launcher
from tccl_py.experiments.nccl_tests import NO_TORCH
from tccl_py.experiments.plans import launcher_of
from tccl_py.experiments.record import ArmResult, Verification
from tccl_py.experiments.spec import MIB, PROGRAMS, Collective, is_large
from tccl_py.experiments.target import Target, read_target
from tccl_py.experiments.verify import run_once
from tccl_py.health.drift import FALSE_ALARM_RATE, Drift, Effort, TooShortError, remeasuring
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.plan import Plan
from tccl_py.planning.cables import facing_ports
from tccl_py.planning.plan_sources import journal_of
from tccl_py.sources.profiled import users_of

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


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a preflight; a check alone has no `arm`."""

    drift: Drift = Drift(rows=(), changes=(), points_to="", lost={}, skipped=(), seconds=0.0)
    arm: ArmResult | None = None
    """The recommended choice in the job, its rows beside those of the plan's verification."""
    collective: Collective = "all_reduce"
    places: Mapping[int, str] = {}
    """The name of each rank's GPU."""
    seconds: float = 0.0

    @property
    def rates(self) -> tuple[Timed, ...]:
        """Return the job's rows."""
        return self.arm.rows if self.arm else ()

    @property
    def checked(self) -> int:
        """Return the number of results that were compared."""
        return self.arm.checked if self.arm else 0

    @property
    def slower(self) -> list[Timed]:
        """Return the rows whose bandwidth fell beyond doubt."""
        rows = (row for row in self.rates if 0 < row.compared.ratio < 1)
        return [row for row in rows if row.compared.p <= FALSE_ALARM_RATE]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return all reasons to keep jobs off, faults of collectives first."""
        found, drift, arm = list[Problem](), self.drift, self.arm
        # 1. What is wrong in the job: a failure, wrong values, rings.
        if arm is not None and arm.failure:
            happened = "a rank failed or took too long"
            found.append(Problem("collectives", arm.failure, "every rank finishes", happened))
        wrong = arm.wrong if arm else ()
        first = {value.rank: value for value in reversed(wrong)}
        for rank, count in Counter(value.rank for value in wrong).most_common():
            what = f"values of {first[rank].case}: {first[rank].what}"
            measured = f"{count} wrong results"
            found.append(Problem(what, self.places[rank], "no wrong result", measured))
        rings = arm.log_rings.differences if arm and arm.log_rings else ()
        found += [Problem("rings", "NCCL, by its log", "as planned", text) for text in rings]
        # 2. Transfers that are lost, and bandwidths that fell.
        found += [
            Problem(f"transfers {transfers}", why, "measurable", "nothing")
            for transfers, why in drift.lost.items()
        ]
        fell = (row for row in drift.changes if row.ratio < 1)
        rates = [(f"{row.name} in {row.transfers}", row.was_gbps, row.is_gbps) for row in fell]
        cause = drift.points_to if rates or drift.lost else ""
        where = cause or (_UNEXPLAINED if drift.sets else _NOT_JUDGED)
        rates += [
            (f"{self.collective} of {size_text(row.bytes)}", row.expected_gbps or 0, row.gbps)
            for row in self.slower
        ]
        found += [
            Problem(f"bandwidth of {of}", where, f"{was:.2f} GB/s", f"{now:.2f} GB/s")
            for of, was, now in rates
        ]
        return tuple(found)

    @property
    def ok(self) -> bool:
        """Return whether jobs may run."""
        return not self.problems


def check_collectives(
    target: Target, launcher: Launcher, verified: Verification | None, *, until: float = math.inf
) -> Preflight:
    """Check values and bandwidth of collectives in a job of the plan's recommended choice.

    A job may take half of the time to `until`, by the monotonic clock. Bandwidths are compared with
    a verification by the same program, torch's or one of nccl-tests.
    """
    of_program = PROGRAMS[launcher.nccl_tests.name] if launcher.nccl_tests else None
    name = target.arm(target.plan.recommended).name
    history = _verified_rows(verified, name, launcher, of_program)
    collective = of_program or cast(Collective, verified.collective if verified else "all_reduce")
    longest = _LONGEST_S * target.plan.rate_gbps * 1e9 / 2
    sizes = tuple(history) or tuple(size for size in _SIZES if size <= longest) or _SIZES[:1]
    budget = RunBudget(sizes=sizes, collectives=(collective,))

    def judge(budget: RunBudget) -> ArmResult:
        seconds = max((until - time.monotonic()) / 2, _LEAST_S)
        limited = replace(launcher, timeout=min(seconds, launcher.timeout))
        arm = run_once(target, limited, budget)
        if not (arm.rows and history):
            return arm
        earlier = [history[row.bytes] for row in arm.rows]
        return replace(arm, rows=over_earlier(arm.rows, earlier, families=FAMILIES))

    arm = judge(budget)
    if any(row.compared.p <= FALSE_ALARM_RATE for row in arm.rows):
        # A second job has to confirm a change.
        second = judge(replace(budget, checks=False))
        rows = tuple(
            replace(row, compared=max(row.compared, again.compared, key=lambda one: one.p))
            for row, again in zip(arm.rows, second.rows, strict=False)
        )
        arm = replace(arm, failure=second.failure, rows=rows)
    places = {
        rank: f"GPU {gpu}" + f" of {host.name}" * bool(host.name)
        for host in launcher.hosts
        for rank, gpu in zip(host.ranks, host.gpus, strict=True)
    }
    return Preflight(arm=arm, collective=collective, places=places)


def _verified_rows(
    verified: Verification | None,
    name: ChoiceName,
    launcher: Launcher,
    of_program: Collective | None,
) -> dict[int, Timed]:
    """Return rows of a choice's verification by the same program, by size; {} if there was none.

    Of sizes below the first that takes long, the large ones, else the largest.
    """
    if verified is None or verified.backend != launcher.backend:
        return {}
    by_torch = not verified.versions.get("torch", "").startswith(NO_TORCH)
    if by_torch != (of_program is None) or of_program not in (None, verified.collective):
        return {}
    result = verified.arm(name)
    rows = result.sizes if result is not None else ()
    quick = takewhile(lambda row: statistics.median(row.seconds) <= _LONGEST_S, rows)
    short = list(quick) or rows[:1]
    return {row.bytes: row for row in [row for row in short if is_large(row.bytes)] or short[-1:]}


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
    journal, found = journal_of(plan, directory), Preflight()
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
            found = check_collectives(target, ready, verified, until=until)
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
            if replace(found, drift=drift).ok if preflight else not drift.has_drifted:
                if found.checked:
                    tell([f"{spell(found.checked, 'result')} of collectives compared, all right"])
                raise
            tell([f"not all transfers were judged: {error.where} {error.what}; {error.right}"])
        tell(again.learn_patterns(directory, until) if preflight else ())
    tell(again.source.notices)
    return replace(found, drift=drift, seconds=time.monotonic() - begun)
