"""The tuner's table from contests: predictions, fresh contests that decide, and ranges of sizes.

1. A sweep of one job leaves few choices of each row, and predicts the best, and whether the row
   gains by it. Of small messages, whose times depend on the process, jobs with the finalists alone
   predict that.
2. Fresh jobs time just NCCL's own choice and that one. A predicted gain stays if the lower end of
   its interval is above 1. So a choice that a sweep picked by luck is not believed twice.
3. Adjacent sizes with the same choice make a range. A range ends at a measured size, or half-way to
   the next one where the same choice was not slower there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from statistics import geometric_mean
from typing import cast

import msgspec
from msgspec.structs import asdict, replace

from tccl_py.experiments.spec import Dtype, Row, RowTimes, TunerChoice
from tccl_py.files import decode_json
from tccl_py.nccl.tuner import COLLECTIVES, TunedCollective, TunerEntry
from tccl_py.plan.chains import ChoiceName
from tccl_py.statistics import Interval, ratio_interval, ratios_of

LEAST_GAIN, MISSED_GAIN = 1.01, 1.02
"""A gain is predicted if its interval lies above the first, which fresh jobs have to reach as well,
as a table is an intervention, too. A prediction of none is wrong if the interval of fresh jobs lies
above the second."""
_SURE = 0.99
"""Level of the intervals of a sweep, which has many choices to be lucky with."""
NO_HARM = 0.99
"""Least ratio at neighbouring sizes, in the other dtype, and beside matrix multiplications."""
_CLOSE = 0.95
"""Share of the best ratio within which multiplications decide between numbers of channels."""
_ROUNDS = 6
SWEPT: Dtype = "bfloat16"
"""Elements of the sweep, whose predictions count."""

NOTHING = Interval(middle=1.0, low=1.0, high=1.0)


class SizeRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the sweep, with the speed of a choice over NCCL's own choice."""

    plan: ChoiceName = "default"
    """The arm whose jobs follow choices."""
    choice: TunerChoice | None = None
    swept: Interval = NOTHING
    """The sweep's ratio."""
    near: Interval | None = None
    """The sweep's ratio beside matrix multiplications."""
    harms: bool = False
    """Whether these are slower."""
    gains: bool = False
    """The prediction that follows from the sweep."""
    fresh: Interval | None = None
    """The ratio of the fresh jobs, one value a job; None where none ran."""
    seconds: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)
    """Seconds per call by arm, one value a fresh job."""
    kept: bool = False
    """Whether the table has an entry for the row."""

    @property
    def gained(self) -> bool:
        """Return whether fresh jobs gained."""
        return self.fresh is not None and self.fresh.low > 1 and self.fresh.middle >= LEAST_GAIN

    @property
    def tuned_seconds(self) -> tuple[float, ...]:
        """Return the seconds with the table: NCCL's own choice under `plan` without an entry."""
        return self.seconds.get("tuned" if self.kept else self.plan, ())

    def over(self, arm: str) -> Interval | None:
        """Return the speed with the table over an arm's, None without jobs."""
        slow, fast = self.seconds.get(arm, ()), self.tuned_seconds
        return ratio_interval(ratios_of(slow, fast)) if slow and fast else None

    @property
    def right(self) -> bool:
        """Return whether fresh jobs gained where the sweep predicted a gain, and not elsewhere."""
        if self.fresh is None:
            return False
        return self.fresh.low > 1 if self.gains else self.fresh.low <= MISSED_GAIN


class SizeTuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows of a set of GPUs, and the entries for the tuner that follow."""

    gpus: tuple[int, ...]
    arm: ChoiceName
    """The choice under which rows were timed."""
    backend: str
    nccl: str
    rows: tuple[SizeRow, ...]
    entries: tuple[TunerEntry, ...]
    jobs: int
    """Fresh jobs of each arm."""
    by_plugin: tuple[SizeRow, ...] = ()
    """Rows under the plugin's own table, whose `fresh` is the speed over NCCL's own choice."""
    skew: float = 0.0
    """The largest median difference between ranks in a sweep, as a share of the seconds."""
    seconds: float = 0.0

    @property
    def predictions(self) -> tuple[int, int]:
        """Return how many predictions fresh jobs found right, of how many."""
        judged = [row for row in self.rows if row.dtype == SWEPT and row.fresh is not None]
        return sum(row.right for row in judged), len(judged)


def read_tunings(text: str, where: str) -> tuple[SizeTuning, ...]:
    """Read tunings from JSON. Raises InputError: the text is something else."""
    return decode_json(text, tuple[SizeTuning, ...], where=where, name="tuning")


Jobs = Sequence[Sequence[RowTimes]]


def predict(sweep: Sequence[RowTimes], jobs: Jobs = ()) -> list[SizeRow]:
    """Return each row of a sweep with its predicted best choice.

    `jobs` have the finalists of some rows, whose sweep does not count then.
    """
    again = _by_row(jobs)
    return [_best(times.row, list(_scores(times, again.get(times.row, ())))) for times in sweep]


def _best(row: Row, scores: Sequence[SizeRow]) -> SizeRow:
    """Return the fastest choice that gains and does no harm, else the fastest."""
    usable = [score for score in scores if score.gains and not score.harms]
    best = max(usable or scores, key=lambda score: score.swept.middle, default=row_untried(row))
    # Channels take multiprocessors: multiplications beside the calls choose their number.
    near = [score for score in usable if score.swept.middle >= _CLOSE * best.swept.middle]
    close = [score for score in near if _kind(score) == _kind(best)]
    return max(
        close, key=lambda s: (s.near.middle if s.near else 0.0, s.swept.middle), default=best
    )


def row_untried(row: Row) -> SizeRow:
    """Return a row without a choice."""
    return SizeRow(**asdict(row.plain))


def _kind(score: SizeRow) -> tuple[str, str] | None:
    return (score.choice.algorithm, score.choice.protocol) if score.choice else None


def _scores(times: RowTimes, jobs: Sequence[RowTimes]) -> Iterator[SizeRow]:
    """Yield a row for each finalist, with ratios by rounds of the sweep or by jobs, if enough ran.

    A choice gains if it is faster beyond chance, and harms if multiplications beside the calls are
    slower beyond chance.
    """
    default = times.variants[0]
    for variant in times.finalists:
        ratios = ratios_of(default.seconds, variant.seconds)[-times.final :]
        if len(jobs) >= _ROUNDS:
            ratios = [_ratio(job, variant.choice) for job in jobs]
            if not all(ratios):
                continue  # NCCL did not allow it in every job.
        swept = ratio_interval(ratios, level=_SURE)
        near = ratio_interval(ratios_of(default.beside, variant.beside)) if variant.beside else None
        yield replace(
            row_untried(times.row),
            choice=variant.choice,
            swept=swept,
            near=near,
            harms=near is not None and near.middle < NO_HARM and near.high < 1,
            gains=swept.low >= LEAST_GAIN,
        )


def confirm(
    rows: Sequence[SizeRow], jobs: Mapping[ChoiceName, Jobs], *, plan: ChoiceName
) -> list[SizeRow]:
    """Return the rows with the ratios of fresh jobs, and with what stays in the table.

    Each job of an arm has the times of rows under NCCL's own choice and the predicted one, which
    only those of the arm `plan` follow. A row stays only if the same collective and size of another
    dtype is not slower.
    """
    timed = {name: _by_row(of_arm) for name, of_arm in jobs.items()}
    confirmed = [
        _fresh(row, {name: of.get(row.plain, ()) for name, of in timed.items()}, plan)
        for row in rows
    ]
    lost = (row for row in confirmed if row.fresh is not None and row.fresh.middle < NO_HARM)
    slower = {(row.collective, row.bytes) for row in lost}
    for at, row in enumerate(confirmed):
        sound = row.gained and (row.collective, row.bytes) not in slower
        confirmed[at] = replace(row, kept=sound and row.gains and not row.harms)
    return confirmed


def _by_row(jobs: Jobs) -> dict[Row, list[RowTimes]]:
    by_row: dict[Row, list[RowTimes]] = {}
    for times in chain.from_iterable(jobs):
        by_row.setdefault(times.row, []).append(times)
    return by_row


def _fresh(
    row: SizeRow, jobs: Mapping[ChoiceName, Sequence[RowTimes]], plan: ChoiceName
) -> SizeRow:
    seconds: dict[str, tuple[float, ...]] = {}
    for name, of_arm in jobs.items():
        # All calls of the arms beside the plan's are NCCL's own choice.
        pooled = (times.variants[: 1 if name == plan else None] for times in of_arm)
        seconds[name] = tuple(_middle(sum((v.seconds for v in of), ())) for of in pooled)
    chosen = [times for times in jobs[plan] if len(times.variants) > 1]
    fresh = None
    if len(chosen) >= _ROUNDS:
        seconds["tuned"] = tuple(_middle(times.variants[1].seconds) for times in chosen)
        fresh = ratio_interval([_ratio(times, times.variants[1].choice) for times in chosen])
    return replace(row, plan=plan, seconds=seconds, fresh=fresh)


def _ratio(times: RowTimes, choice: TunerChoice | None) -> float:
    """Return the speed of a choice, or of the plugin's table (None), over NCCL's own in a job."""
    baseline, *variants = times.variants
    rival = next((rival for rival in variants if rival.choice == choice), None)
    return _middle(ratios_of(baseline.seconds, rival.seconds)) if rival and rival.seconds else 0.0


def _middle(values: Sequence[float]) -> float:
    """Return the geometric mean without the smallest and the largest value, if there are three."""
    return geometric_mean(sorted(values)[1:-1] or values)


def entries(rows: Sequence[SizeRow], sweep: Sequence[RowTimes]) -> tuple[TunerEntry, ...]:
    """Return the entries of the rows of a sweep that stay, as ranges of sizes."""
    choices = {row.plain: row.choice for row in rows if row.kept}
    ranges = []
    for collective in dict.fromkeys(times.row.collective for times in sweep):
        series = [times for times in sweep if times.row.collective == collective]
        series.sort(key=lambda times: times.row.bytes)
        for choice, run in groupby(series, key=lambda times: choices.get(times.row)):
            if choice is not None:
                ranges.append(_entry(series, list(run), choice))
    return tuple(sorted(ranges, key=table_order))


def covers(entry: TunerEntry, row: Row) -> bool:
    """Return whether an entry of the tuner is for a row."""
    inside = entry.from_bytes <= row.bytes <= entry.to_bytes
    return inside and entry.collective == row.collective


def table_order(entry: TunerEntry) -> tuple[int, int]:
    """Return the place of an entry in its table, for sorting."""
    return COLLECTIVES.index(entry.collective), entry.from_bytes


def _entry(series: Sequence[RowTimes], run: Sequence[RowTimes], choice: TunerChoice) -> TunerEntry:
    """Return the entry of a run; it reaches half-way to the next sizes if it does no harm there."""
    ends = [run[0].row.bytes, run[-1].row.bytes]
    for end, at in enumerate((series.index(run[0]) - 1, series.index(run[-1]) + 1)):
        if 0 <= at < len(series) and _ratio(series[at], choice) >= NO_HARM:
            ends[end] = math.isqrt(series[at].row.bytes * ends[end]) + (end == 0)
    return TunerEntry(
        collective=cast(TunedCollective, run[0].row.collective),
        from_bytes=ends[0],
        to_bytes=ends[1],
        **asdict(choice),
    )
