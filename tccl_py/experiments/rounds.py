"""The work of a comparison, and its rounds, until what they say is clear.

The jobs of a round are interleaved, or run in an order that is reversed and rotated from round to
round, so that slow drift touches all arms alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from tccl_py.errors import MeasurementError, Terminated
from tccl_py.experiments.collectives import PROGRAMS, Collective
from tccl_py.experiments.comparison import (
    LEAST_ROUNDS,
    MAX_ROUNDS,
    SMALLEST_EFFECT,
    Table,
    table_of,
)
from tccl_py.experiments.jobs import AGAIN, Arm, ConcurrentJobs, Ended, Launcher, Outcome
from tccl_py.experiments.spec import SIZES, Groups, JobSpec, Row, pairs_of, rows_of
from tccl_py.plan.chains import ChoiceName
from tccl_py.workloads.workload import Workload

FEW_SIZES = (16 << 10, 256 << 10, 1 << 20, 64 << 20, 256 << 20)
"""Sizes of the sweep's jobs and, except the largest, of smaller communicators."""
_TRANSFERS: tuple[Collective, ...] = ("send_recv", "all_to_all")
_OF_ALL: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
_TRANSFER_SIZES = (64 << 10, 1 << 20, 64 << 20)
"""Sizes of transfers between pairs: small FIFOs slow them alike from 16 MiB up."""
_PAIRS_BYTES = 64 << 20
_LARGEST_DRY, _DRY_SECONDS = 4 << 20, 30.0
"""The largest size of a dry run: 1 GiB takes a second a call there; and its seconds."""
_EXTRA = 4
"""Factor on the number of rounds where a verdict is open and time is left."""
_NARROW = 1 << 20
"""From this size on ratios have to be known to 1 %; smaller calls take microseconds."""


class RunBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a comparison."""

    rounds: int = 10
    """Rounds of jobs. LEAST_ROUNDS are always run, of three arms one more; fewer than these where
    all verdicts are clear, more where one is open and time is left."""
    sizes: tuple[int, ...] = SIZES
    """Bytes."""
    seconds: float = 300.0
    """After so long no round begins."""
    collectives: tuple[Collective, ...] = ("all_reduce",)
    checks: bool = True
    training: bool = False
    every: bool = False
    """Whether `further_rows` are timed as well."""
    workload: Workload | None = None
    """Its rows are timed as well."""
    only: ChoiceName | None = None
    """The choice that is compared with default NCCL; None is all."""

    @property
    def few_sizes(self) -> tuple[int, ...]:
        """Return some sizes up to the largest one."""
        return tuple(size for size in FEW_SIZES if size <= max(self.sizes)) or self.sizes

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return the collectives that each job times over all ranks."""
        return rows_of(self.sizes, self.collectives)

    def transfers(self, groups: Iterable[Groups] = ()) -> tuple[Row, ...]:
        """Return rows of other collectives than those compared.

        Pipeline and expert parallel jobs move by send/recv and all-to-all, over all ranks and in
        `groups`, and what speeds rings up may slow them.
        """
        most = max(self.sizes)
        sizes = tuple(size for size in _TRANSFER_SIZES if size <= most) or (most,)
        collectives = [name for name in _TRANSFERS if name not in self.collectives]
        of_all = [name for name in _OF_ALL if name not in self.collectives]
        return (*rows_of(sizes, collectives, groups=((), *groups)), *rows_of(sizes[-2:], of_all))

    def further_rows(self, world: int, *, pairs: bool) -> tuple[Row, ...]:
        """Return rows of all collectives; with `pairs` of all pairs too."""
        size = min(_PAIRS_BYTES, max(self.sizes))
        of_pairs = rows_of((size,), groups=pairs_of(world)) if pairs else ()
        return *rows_of(self.few_sizes[:4], PROGRAMS.values()), *of_pairs

    def rows_in(self, groups: Iterable[Groups]) -> tuple[Row, ...]:
        """Return the collectives in smaller communicators, at some sizes."""
        return rows_of(self.few_sizes[:4], self.collectives, groups=groups)


def budget_of(backend: str | None) -> RunBudget:
    """Return the usual work of a comparison; a dry run on a laptop takes about a minute."""
    if backend != "host":
        return RunBudget()
    sizes = tuple(size for size in SIZES if size <= _LARGEST_DRY)
    return RunBudget(sizes=sizes, seconds=_DRY_SECONDS)


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of all rounds, without arms of which a job failed."""

    checked: Mapping[ChoiceName, Outcome]
    """Each arm's first job."""
    jobs: Sequence[tuple[ChoiceName, Outcome]]
    """In order, with their arms."""
    failures: Mapping[ChoiceName, str]
    at_once: int
    """The final number of concurrent jobs."""
    table: Table
    """The results."""

    def of(self, name: ChoiceName) -> list[Outcome]:
        """Return the jobs of an arm."""
        return [job for arm, job in self.jobs if arm == name]


def least_rounds(arms: int) -> int:
    """Return the rounds that are always run of so many arms."""
    # Six rounds have 32 flips of signs, too few for a verdict on each of two arms.
    return LEAST_ROUNDS if arms == 2 else LEAST_ROUNDS + 1


def run_rounds(
    launcher: Launcher,
    arms: Sequence[Arm],
    budget: RunBudget,
    rows: Sequence[Row],
    *,
    begun: float,
    interrupted: Callable[[Rounds | None], object] = lambda _: None,
) -> Rounds:
    """Check values in a first job of each arm, and time rows in rounds until verdicts are clear.

    An arm of which a job fails leaves the comparison with all its jobs. `interrupted` gets the
    complete rounds of an interruption, None if they are too few to compare. Raises
    MeasurementError: a job of default NCCL, the first arm and AGAIN, failed.
    """
    running, failures = list(arms), dict[ChoiceName, str]()
    defaults = [arm for arm in arms if arm is arms[0] or arm.name == AGAIN]

    def sound(ended: Iterable[Ended]) -> Iterator[tuple[ChoiceName, Outcome]]:
        for arm, outcome in ended:
            if not isinstance(outcome, MeasurementError):
                yield arm.name, outcome
            elif arm in defaults:
                raise outcome
            else:
                failures[arm.name] = str(outcome)
        running[:] = [arm for arm in arms if arm.name not in failures]

    launcher.watch("checking values" if budget.checks else "starting")
    groups = tuple(dict.fromkeys(row.groups for row in rows if row.groups))
    first = JobSpec(checks=budget.checks, check_groups=groups)
    checking = [arm for arm in arms if arm.name != AGAIN]
    checked: dict[ChoiceName, Outcome] = {}
    jobs = ConcurrentJobs(launcher, JobSpec(rows=tuple(rows)))
    outcomes: list[tuple[ChoiceName, Outcome]] = []
    table: Table = {}

    def complete() -> Rounds:
        ended = outcomes[: count * len(running)]
        return Rounds(checked=checked, jobs=ended, failures=failures, at_once=at_once, table=table)

    least = least_rounds(len(checking))
    most, at_once, count = min(MAX_ROUNDS, max(budget.rounds * _EXTRA, least)), 0, 0
    try:
        checked.update(sound(ConcurrentJobs(launcher, first).run(checking)))
        for ended in jobs.rounds(running, least, most) if len(running) > len(defaults) else ():
            outcomes += sound(ended)
            outcomes = [(name, job) for name, job in outcomes if name not in failures]
            at_once = min(jobs.at_once, len(ended))
            count = len(outcomes) // len(running)
            if count < least and len(running) > len(defaults):
                continue
            # Compare all rows of all arms at once; stop where more rounds add nothing.
            table = table_of(launcher, outcomes)
            late = time.monotonic() - begun > budget.seconds
            if late or len(running) == len(defaults) or _enough(budget, table, count):
                break
    except (KeyboardInterrupt, Terminated):
        interrupted(complete() if table else None)
        raise
    return complete()


def _enough(budget: RunBudget, table: Table, count: int) -> bool:
    """Return whether more rounds add nothing.

    Beyond the budget's rounds, only a lean to harm counts, and sizes from _NARROW on over all
    ranks. In all rounds it has to become clear whether an arm that gains is harmless.
    """
    for name, rows in table.items():
        harms = {timed.harm for timed in rows.values()}
        gains = any(
            timed.compared.low > 1 + SMALLEST_EFFECT
            for row, timed in rows.items()
            if row.over_all and row.bytes == max(budget.sizes) and not row.beside
        )
        if gains and "open" in harms and "loses" not in harms:
            return False
        for row, timed in rows.items() if name != AGAIN else ():
            narrow = row.bytes >= _NARROW and not row.groups
            counts = count < budget.rounds or narrow or timed.compared.high < 1
            judged = row.trains or (row.collective in budget.collectives and not row.beside)
            if timed.compared.open and counts and judged:
                return False
    return True
