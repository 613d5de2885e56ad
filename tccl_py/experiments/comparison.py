"""Arms x rows x rounds -> table: the work, its rounds until what they say is clear, the verdicts.

The jobs of a round are interleaved, or run in an order that is reversed and rotated from round to
round, so that slow drift touches all arms alike. If two arms are equal, the logarithms of their
ratios, one per round, are symmetric about 0 whatever the noise: a test by flipped signs is exact.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from tccl_py.decision import Harm, harm
from tccl_py.errors import MeasurementError, Terminated
from tccl_py.experiments.jobs import AGAIN, Arm, ConcurrentJobs, Ended, Launcher, Outcome
from tccl_py.experiments.spec import (
    PROGRAMS,
    SIZES,
    Collective,
    Groups,
    JobSpec,
    Row,
    pairs_of,
    rows_of,
)
from tccl_py.files import pick
from tccl_py.health.drift_statistics import chance, common_spread
from tccl_py.plan.chains import ChoiceName
from tccl_py.statistics import Interval, holm, ratio_interval, sign_flip_p
from tccl_py.workloads.workload import Workload

Verdict = Literal["better", "same", "worse"]

SMALLEST_EFFECT = 0.01
"""Ratios closer to 1 count as the same."""
FALSE_RATE = 0.05
"""Largest chance that any row of any arm gets a verdict though all arms are equal."""
LEAST_ROUNDS = 6
"""Fewer rounds have no 95 % interval."""
MAX_ROUNDS = 40


class Compared(Interval, frozen=True, kw_only=True):
    """Speed of an arm over the baseline's: above 1 the arm is faster.

    It is the Hodges-Lehmann estimate over rounds, with its 95 % interval, and `p` is adjusted for
    all rows compared.
    """

    middle: float = msgspec.field(name="ratio")
    p: float

    @property
    def ratio(self) -> float:
        """Return the estimate by the name that it has in files."""
        return self.middle

    @property
    def verdict(self) -> Verdict:
        """Return better or worse only beyond chance, the interval and the smallest effect."""
        if self.p > FALSE_RATE:
            return "same"
        if self.low > 1 and self.ratio >= 1 + SMALLEST_EFFECT:
            return "better"
        return "worse" if self.loses else "same"

    @property
    def loses(self) -> bool:
        """Return whether the interval lies below 1 by the smallest effect, if only by chance."""
        return self.high < 1 and self.ratio <= 1 - SMALLEST_EFFECT

    @property
    def open(self) -> bool:
        """Return whether the interval excludes 1, or is wide, without a verdict."""
        edge = 1 + SMALLEST_EFFECT
        leaning = not self.low <= 1 <= self.high and not 1 / edge < self.ratio < edge
        wide = (self.high - self.low) / 2 / self.ratio > SMALLEST_EFFECT
        return self.verdict == "same" and (leaning or wide)


def single(ratio: float, *, p: float = 1.0) -> Compared:
    """Return a ratio without an interval."""
    return Compared(middle=ratio, low=ratio, high=ratio, p=p)


EQUAL = single(1.0)
"""The baseline over itself."""
UNRATED = single(0.0)
"""A row over a baseline that has no rate."""


def compare(
    arm: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]], *, arms: int = 1
) -> tuple[Compared, ...]:
    """Compare an arm's rows of seconds, one value a round, with the baseline's rows.

    p values are adjusted for all rows of so many `arms`. Raises ValueError: fewer than LEAST_ROUNDS
    rounds, more than MAX_ROUNDS, or unequal lengths.
    """
    ratios = [
        [b / a for a, b in zip(row, base, strict=True)]
        for row, base in zip(arm, baseline, strict=True)
    ]
    for row in ratios:
        if not LEAST_ROUNDS <= len(row) <= MAX_ROUNDS:
            raise ValueError(f"{len(row)} rounds: {LEAST_ROUNDS} to {MAX_ROUNDS} can be compared")
    adjusted = sign_flip_p([[math.log(ratio) for ratio in row] for row in ratios])
    spans = map(ratio_interval, ratios)
    return tuple(
        Compared(**msgspec.structs.asdict(span), p=min(1.0, arms * p))
        for span, p in zip(spans, adjusted, strict=True)
    )


class Timed(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row in an arm: seconds in each round, and the speed over the baseline's.

    Its groups are of GPUs, or of ranks where there are several hosts. `gbps` is the median bus
    bandwidth, 0 of a training step. `harm` is whether it loses; None without a second arm of
    default NCCL.
    """

    seconds: tuple[float, ...] = ()
    gbps: float = 0.0
    compared: Compared = UNRATED
    verdict: Verdict = "same"
    harm: Harm | None = None

    @property
    def us(self) -> float | None:
        """Return the median time of a call in us."""
        return statistics.median(self.seconds) * 1e6 if self.seconds else None

    @property
    def ratio(self) -> float | None:
        """Return the speed over the baseline's, None where that has no rate."""
        return self.compared.ratio or None

    @property
    def expected_gbps(self) -> float | None:
        """Return the baseline's bus bandwidth, GB/s."""
        return self.gbps / self.ratio if self.ratio else None

    @property
    def low(self) -> float:
        """Return the lower end of the ratio's interval."""
        return self.compared.low

    @property
    def high(self) -> float:
        """Return the upper end of the ratio's interval."""
        return self.compared.high


Table = Mapping[ChoiceName, Mapping[Row, Timed]]
"""Results by arm and row."""


def table_of(launcher: Launcher, jobs: Sequence[tuple[ChoiceName, Outcome]]) -> Table:
    """Return the rows of every arm's jobs, with the speed over the first arm's."""
    names = list(dict.fromkeys(name for name, _ in jobs))
    count = len([name for name in names[1:] if name != AGAIN])
    names = names if count else names[:1]
    times = {name: row_seconds(job for arm, job in jobs if arm == name) for name in names}
    baseline, again = times[names[0]], times.get(AGAIN, {})
    table = dict[ChoiceName, dict[Row, Timed]]()
    for name, rows in times.items():
        ratios: Sequence[Compared] = [EQUAL] * len(rows)
        if name != names[0]:
            ratios = compare(list(rows.values()), [baseline[row] for row in rows], arms=count)
        judged = again if name not in (names[0], AGAIN) else {}
        table[name] = {}
        for (row, seconds), ratio in zip(rows.items(), ratios, strict=True):
            loss = harm(seconds, baseline[row], again[row]) if row in judged else None
            table[name][row] = row_of_times(launcher, row, seconds, ratio, loss)
    return table


def row_of_times(
    launcher: Launcher,
    row: Row,
    seconds: tuple[float, ...],
    compared: Compared = UNRATED,
    harm: Harm | None = None,
) -> Timed:
    """Return a row of a launcher's jobs with these seconds, one value a job."""
    of = launcher.members
    return Timed(
        **pick(row, "collective", "dtype", "bytes", "mode", "beside"),
        groups=tuple(tuple(of[rank] for rank in group) for group in row.groups),
        seconds=seconds,
        gbps=row.bus_gbps(launcher.world, statistics.median(seconds)),
        compared=compared,
        verdict=compared.verdict,
        harm=harm,
    )


def over_earlier(
    rows: Sequence[Timed], earlier: Sequence[Timed], *, families: int = 1
) -> tuple[Timed, ...]:
    """Compare rows of one job with those of earlier rounds.

    p is adjusted for all rows, and for so many `families` of comparisons, this one and others.
    """
    logs = [
        [[-math.log(s) for s in of.seconds] for of in pair]
        for pair in zip(earlier, rows, strict=True)
    ]
    spread = common_spread([before for before, _ in logs])
    chances = holm([chance(before, after, spread) for before, after in logs])
    return tuple(
        msgspec.structs.replace(
            row, compared=single(row.gbps / before.gbps, p=min(1.0, families * p))
        )
        for row, before, p in zip(rows, earlier, chances, strict=True)
    )


def timed_rows(launcher: Launcher, jobs: Iterable[Outcome]) -> dict[Row, Timed]:
    """Return the rows of an arm's jobs, over no baseline."""
    return {row: row_of_times(launcher, row, seconds) for row, seconds in row_seconds(jobs).items()}


def row_seconds(jobs: Iterable[Outcome]) -> dict[Row, tuple[float, ...]]:
    """Return the seconds of each timed row, one value a job: the slowest rank's median.

    Ranks outside all groups, and jobs under a graph file, have no times of groups.
    """
    seconds: dict[Row, list[float]] = {}
    for job in jobs:
        for ranks in job.rows:
            medians = [statistics.median(times.seconds) for times in ranks if times.seconds]
            if medians:
                seconds.setdefault(ranks[0].row, []).append(max(medians))
    return {row: tuple(medians) for row, medians in seconds.items()}


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
