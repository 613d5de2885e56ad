"""Arms x rows x rounds -> table: the seconds of jobs, and what they say of each arm and row.

If two arms are equal, the logarithms of their ratios, one per round, are symmetric about 0 whatever
the noise: a test by flipped signs is exact.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from tccl_py.decision import Harm, harm
from tccl_py.experiments.jobs import AGAIN, Launcher, Outcome
from tccl_py.experiments.spec import Row
from tccl_py.files import pick
from tccl_py.health.drift_statistics import chance, common_spread
from tccl_py.plan.chains import ChoiceName
from tccl_py.statistics import Interval, holm, ratio_interval, sign_flip_p

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
