"""Arms x rows x rounds -> table: the work, its rounds until what they say is clear, the verdicts.

The jobs of a round are interleaved, or run in an order that is reversed and rotated from round to
round, so that slow drift touches all arms alike. If two arms are equal, the logarithms of their
ratios, one per round, are symmetric about 0 whatever the noise: a test by flipped signs is exact.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from tccl_py.decision import Harm, harm
from tccl_py.errors import MeasurementError
from tccl_py.experiments.jobs import AGAIN, Arm, Ended, Launcher, Outcome, round_order
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
from tccl_py.health.drift import chances, common_spread
from tccl_py.plan.chains import ChoiceName
from tccl_py.statistics import Interval, ratio_interval, sign_flip_p
from tccl_py.workloads.workload import Workload

Verdict = Literal["better", "same", "worse"]

SMALLEST_EFFECT = 0.01
"""Ratios closer to 1 count as the same."""
FALSE_RATE = 0.05
"""Largest chance that any row of any arm gets a verdict though all arms are equal."""
LEAST_ROUNDS = 6
"""Fewer rounds have no 95 % interval."""
MAX_ROUNDS = 40
FEW_SIZES = (16 << 10, 256 << 10, 1 << 20, 64 << 20, 256 << 20)
"""Sizes of the sweep's jobs and, except the largest, of smaller communicators."""
_TRANSFERS: tuple[Collective, ...] = ("send_recv", "all_to_all")
_OF_ALL: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
_TRANSFER_SIZES = (64 << 10, 1 << 20, 64 << 20)
"""Sizes of transfers between pairs: small FIFOs slow them alike from 16 MiB up."""
_PAIRS_BYTES = 64 << 20
_LARGEST_DRY, _DRY_SECONDS = 4 << 20, 30.0
"""The largest size of a dry run: 1 GiB takes a second a call there; and its seconds."""
_CONCURRENT = 4
_CONCURRENT_BYTES = 4 << 30
"""Limit of the buffers of concurrent jobs on a device, which may have few GiB."""
_EXTRA = 4
"""Factor on the number of rounds where a verdict is open and time is left."""
_NARROW = 1 << 20
"""From this size on ratios have to be known to 1 %; smaller calls take microseconds."""


class Compared(Interval, frozen=True, kw_only=True):
    """Speed of an arm over the baseline's, with its 95 % interval: above 1 the arm is faster."""

    middle: float = msgspec.field(name="ratio")
    """The Hodges-Lehmann estimate over rounds."""
    p: float
    """Adjusted for all rows compared."""

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
    """A row in an arm; its groups are of GPUs, or of ranks where there are several hosts."""

    seconds: tuple[float, ...] = ()
    """In each round."""
    gbps: float = 0.0
    """The median bus bandwidth, 0 of a training step."""
    compared: Compared = UNRATED
    verdict: Verdict = "same"
    harm: Harm | None = None
    """Whether it loses; None of default NCCL."""

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
    p_values = chances(logs, common_spread([before for before, _ in logs]), families=families)
    return tuple(
        msgspec.structs.replace(row, compared=single(row.gbps / before.gbps, p=p))
        for row, before, p in zip(rows, earlier, p_values, strict=True)
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


class Rounds:
    """Jobs of arms in rounds, and what they come to.

    An arm of which a job fails leaves with all its jobs; of a `needed` one the error is raised.
    """

    def __init__(
        self,
        launcher: Launcher,
        arms: Sequence[Arm],
        spec: JobSpec,
        *,
        needed: Collection[ChoiceName] = (),
    ) -> None:
        self.arms = list(arms)
        """Those of which no job failed."""
        self.checked: dict[ChoiceName, Outcome] = {}
        """Each arm's first job."""
        self.jobs: list[tuple[ChoiceName, Outcome]] = []
        """In order, with their arms."""
        self.failures: dict[ChoiceName, str] = {}
        self.table: Table = {}
        """The results of `count` rounds."""
        self.count = 0
        self._launcher, self._spec, self._needed = launcher, spec, needed
        largest = max((row.bytes for row in spec.rows), default=1)
        if launcher.backend == "host":
            largest *= max(len(host.ranks) for host in launcher.hosts)
        most = 1 if launcher.nccl_tests else _CONCURRENT
        self.at_once = max(1, min(most, _CONCURRENT_BYTES // largest))
        """The jobs that run at the same time, as devices have room for buffers."""

    def of(self, name: ChoiceName) -> list[Outcome]:
        """Return the jobs of an arm."""
        return [job for arm, job in self.jobs if arm == name]

    def run(self, arms: Sequence[Arm]) -> list[Ended]:
        """Run a job of each arm; one at a time from where several fail together on.

        Each may be able to run alone.
        """
        outcomes: list[Outcome | MeasurementError] = []
        while len(outcomes) < len(arms):
            batch = arms[len(outcomes) :][: self.at_once]
            try:
                outcomes += self._launcher.run(batch, self._spec)
            except MeasurementError as error:
                if len(batch) == 1:
                    outcomes.append(error)
                else:
                    self.at_once = 1
        return list(zip(arms, outcomes, strict=True))

    def check(self, spec: JobSpec) -> None:
        """Run a first job of each arm by another specification."""
        arms = [arm for arm in self.arms if arm.name != AGAIN]
        first = Rounds(self._launcher, arms, spec, needed=self._needed)
        first._add(first.run(arms))
        self.checked, self.failures = dict(first.jobs), first.failures
        self.arms = [arm for arm in self.arms if arm.name not in self.failures]

    def repeat(self, least: int, most: int) -> Iterator[int]:
        """Run rounds, as many whole ones at once as devices have room for; yield their number.

        `least`, from which on the caller may stop, is said.
        """
        done = 0
        while done < most:
            count = max(1, min(most - done, self.at_once // len(self.arms)))
            numbers = range(done, done + count)
            names = " and ".join(str(number + 1) for number in numbers)
            self._launcher.watch(f"round {names} (at least {least}, at most {most})")
            jobs = [arm for number in numbers for arm in round_order(self.arms, number)]
            self._add(self.run(jobs))
            self.at_once = min(self.at_once, len(jobs))
            done += count
            yield done

    def _add(self, ended: Iterable[Ended]) -> None:
        for arm, outcome in ended:
            if not isinstance(outcome, MeasurementError):
                self.jobs.append((arm.name, outcome))
            elif arm.name in self._needed:
                raise outcome
            else:
                self.failures[arm.name] = str(outcome)
        self.arms = [arm for arm in self.arms if arm.name not in self.failures]
        self.jobs = [(name, job) for name, job in self.jobs if name not in self.failures]

    def compare(self, budget: RunBudget, *, begun: float) -> None:
        """Run rounds until the verdicts of their table are clear, or no arm beside default NCCL is.

        None begins after the budget's seconds from `begun` on.
        """

        def alone() -> bool:
            return {arm.name for arm in self.arms} <= {"default", AGAIN}

        least = least_rounds(len(self.checked) + len(self.failures))
        most = min(MAX_ROUNDS, max(budget.rounds * _EXTRA, least))
        for count in self.repeat(least, most) if not alone() else ():
            # Compare all rows of all arms at once; stop where more rounds add nothing.
            if count >= least or alone():
                table = table_of(self._launcher, self.jobs)
                self.table, self.count = table, count
                late = time.monotonic() - begun > budget.seconds
                if late or alone() or _enough(budget, table, count):
                    break


def least_rounds(arms: int) -> int:
    """Return the rounds that are always run of so many arms."""
    # Six rounds have 32 flips of signs, too few for a verdict on each of two arms.
    return LEAST_ROUNDS if arms == 2 else LEAST_ROUNDS + 1


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
