"""Tuning by message size as text, JSON and drawings: rows by size, and the tuner's entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Annotated

import msgspec

from tccl_py.errors import size_text, spell
from tccl_py.experiments.record import Verification
from tccl_py.experiments.sizes import SizeRow, SizeTuning, covers
from tccl_py.experiments.spec import GIB, KIB, MIB, Row, TunerChoice
from tccl_py.files import fill, says
from tccl_py.nccl.tuner import TunerEntry
from tccl_py.plan.chains import ChoiceName
from tccl_py.report.tables import Column, Columns, lines
from tccl_py.statistics import Interval, median_interval, ratio_interval, ratios_of


def choice_text(choice: TunerChoice | TunerEntry) -> str:
    """Return a choice as text.

    >>> choice_text(TunerChoice(algorithm="ring", protocol="ll", channels=8))
    'ring ll 8'
    """
    return f"{choice.algorithm} {choice.protocol} {choice.channels or 'any'}"


def _about(size: int) -> str:
    """Return a number of bytes with three digits at least: ends half-way between sizes are odd."""
    unit = next((unit for unit in (GIB, MIB, KIB) if size >= unit), 1)
    return size_text(size) if size % unit == 0 else f"{size / unit:.1f} {size_text(unit)[2:]}"


def _gains(tuning: SizeTuning, entry: TunerEntry) -> str:
    """Return the least and the largest gain of an entry over the plan alone."""
    rows = (row for row in tuning.rows if row.kept and covers(entry, row))
    inside = [row.fresh.middle for row in rows if row.fresh is not None]
    return f"{min(inside):.2f} to {max(inside):.2f}" if inside else ""


ENTRIES: Columns = (
    Column("GPUs", lambda row: ",".join(map(str, row[0].gpus))),
    Column("collective", lambda row: row[1].collective),
    Column("sizes", lambda row: f"{_about(row[1].from_bytes)} to {_about(row[1].to_bytes)}"),
    Column("algorithm, protocol, channels", lambda row: choice_text(row[1])),
    Column("over plan", lambda row: _gains(*row)),
)
"""A row is a tuning, and an entry of its table."""


def entry_lines(tunings: Iterable[SizeTuning]) -> list[list[str]]:
    """Return the table of the tuner's entries."""
    return list(lines(ENTRIES, ((each, entry) for each in tunings for entry in each.entries)))


def _median_us(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e6:.1f}" if seconds else ""


def _ratio(ratio: Interval | None) -> str:
    return f"{ratio:.3f}" if ratio else ""


SIZES: Columns = (
    Column("collective", lambda row: f"{row.collective} {row.dtype}"),
    Column("size", lambda row: size_text(row.bytes)),
    Column("default us", lambda row: _median_us(row.seconds.get("default", ()))),
    Column("plan us", lambda row: _median_us(row.seconds.get(row.plan, ()))),
    Column("tuned us", lambda row: _median_us(row.tuned_seconds)),
    Column("over plan", lambda row: _ratio(row.fresh if row.kept else None)),
    Column("over default", lambda row: _ratio(row.over("default"))),
    Column("choice", lambda row: choice_text(row.choice) if row.kept and row.choice else ""),
)


def tuning_facts(tuning: SizeTuning) -> list[str]:
    """Return the share of right predictions, and the cost."""
    right, predicted = tuning.predictions
    ratios = [row.fresh.middle for row in tuning.by_plugin if row.fresh is not None]
    times = f"{min(ratios):.3f} to {max(ratios):.3f} times the plan" if ratios else "not timed"
    return [
        f"entries over {tuning.arm}: {len(tuning.entries)}, measured on GPUs "
        f"{','.join(map(str, tuning.gpus))}; other sizes are NCCL's own choice",
        f"predictions of gains found right by {spell(tuning.jobs, 'fresh job')}: "
        f"{right} of {predicted}",
        *[f"by the plugin, at and between the sizes of entries: {times}"] * bool(tuning.entries),
        f"ranks differ by {tuning.skew:.1%} at most; {tuning.seconds:.0f} s",
    ]


class Predictions(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions of a sweep that fresh jobs judged."""

    right: int
    asked: int


class TunedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message size of a tuning."""

    collective: str
    dtype: str
    bytes: int
    us: Annotated[dict[str, float], says("the median time by arm")]
    choice: TunerChoice | None
    swept: Annotated[Interval, says("the sweep's ratio")]
    fresh: Annotated[Interval | None, says("the same of fresh jobs")]
    over_default: Annotated[Interval | None, says("the same over default NCCL")]
    predicted_gain: bool
    kept: Annotated[bool, says("whether the table has an entry for the row")]


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The tuning of a set of GPUs by message size."""

    gpus: tuple[int, ...]
    arm: ChoiceName
    rows: tuple[TunedRow, ...]
    entries: tuple[TunerEntry, ...]
    predictions: Predictions
    by_plugin: Annotated[tuple[TunedRow, ...], says("rows under the plugin's own table")]
    seconds: float


def report_tuning(tuning: SizeTuning) -> Tuned:
    """Return the part of `--json` on message sizes."""
    right, asked = tuning.predictions
    return fill(
        Tuned,
        tuning,
        rows=tuple(map(_tuned_row, tuning.rows)),
        predictions=Predictions(right=right, asked=asked),
        by_plugin=tuple(map(_tuned_row, tuning.by_plugin)),
    )


def _tuned_row(row: SizeRow) -> TunedRow:
    us = {name: median(values) * 1e6 for name, values in row.seconds.items() if values}
    over = row.over("default")
    return fill(TunedRow, row, us=us, over_default=over, predicted_gain=row.gains)


# Latency and bus bandwidth by size, as drawings with logarithmic axes.
_WIDTH, _HEIGHT = 560.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 12.0, 10.0, 34.0
_MOST_TICKS = 10
SERIES = {
    "default": "default NCCL",
    "large-buffers": "large buffers",
    "variables": "variables",
    "graph": "graph file",
    "plan": "the plan",
    "tuned": "tuned",
}


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a chart, and the band of its 95 % intervals, as SVG paths."""

    kind: str
    name: str
    line: str
    band: str


class SizeChart(msgspec.Struct, frozen=True, kw_only=True):
    """Values by message size, both axes logarithmic; ticks are places and labels."""

    id: str
    title: str
    description: str
    series: tuple[Series, ...]
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]
    width: float = _WIDTH
    height: float = _HEIGHT
    left: float = _LEFT
    right: float = _WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = _HEIGHT - _BOTTOM


Spans = dict[str, Interval]
"""Intervals by kind of series."""
_TITLES = ("Speed over default NCCL", "Latency in us", "Bus bandwidth in GB/s")


def size_charts(tunings: Sequence[SizeTuning]) -> Iterator[SizeChart]:
    """Yield charts of speed, latency and bus bandwidth for each set of GPUs and collective."""
    for number, tuning in enumerate(tunings):
        gpus = ",".join(map(str, tuning.gpus))
        points_of: dict[tuple[str, int], dict[int, Spans]] = {}
        for row in sorted(tuning.rows, key=lambda row: row.bytes):
            if row.dtype == "bfloat16" and row.tuned_seconds:
                for at, spans in enumerate(_spans(row, len(tuning.gpus))):
                    points_of.setdefault((row.collective, at), {})[row.bytes] = spans
        for (collective, at), points in points_of.items():
            if any(points.values()):
                title = f"{_TITLES[at]}: {collective.replace('_', '-')}, bfloat16, GPUs {gpus}"
                yield _chart(f"size-{number}-{collective}-{at}", title, points)


def arm_charts(result: Verification) -> Iterator[SizeChart]:
    """Yield charts of a verification: speed, latency and bus bandwidth of every choice."""
    arms = [arm for arm in result.arms if arm.sizes]
    tables: tuple[dict[int, Spans], ...] = ({}, {}, {})
    for rows in zip(*(arm.sizes for arm in arms), strict=True):
        for arm, row in zip(arms, rows, strict=True):
            spans = (row.compared, *_times(row, len(result.devices), row.seconds))
            for table, span in zip(tables, spans, strict=True):
                if table is not tables[0] or arm.name != "default":
                    table.setdefault(row.bytes, {})[arm.name] = span
    for at, table in enumerate(tables):
        if len(table) > 1:
            title = f"{_TITLES[at]}: {result.collective.replace('_', '-')}"
            yield _chart(f"verified-{at}", title, dict(sorted(table.items())))


def _spans(row: SizeRow, ranks: int) -> tuple[Spans, Spans, Spans]:
    """Return the intervals of a row in each chart, in the order of `_TITLES`."""
    choices = ["default", *["variables"] * (row.plan != "variables")]
    seconds = {kind: row.seconds.get(kind, ()) for kind in choices}
    seconds |= {"plan": row.seconds.get(row.plan, ()), "tuned": row.tuned_seconds}
    timed = {kind: values for kind, values in seconds.items() if values}
    ratios = {kind: ratios_of(timed.get("default", ()), values) for kind, values in timed.items()}
    speed = {kind: ratio_interval(values) for kind, values in ratios.items() if values}
    speed.pop("default", None)
    times = {kind: _times(row, ranks, values) for kind, values in timed.items()}
    latency, bandwidth = ({kind: spans[at] for kind, spans in times.items()} for at in range(2))
    return speed, latency, bandwidth


def _times(row: Row, ranks: int, seconds: Sequence[float]) -> tuple[Interval, Interval]:
    """Return a row's latency in us and its bus bandwidth in a job of so many ranks."""
    rates = [row.bus_gbps(ranks, value) for value in seconds]
    return median_interval([1e6 * value for value in seconds]), median_interval(rates)


def _chart(name: str, title: str, points: Mapping[int, Spans]) -> SizeChart:
    ends = [
        end for spans in points.values() for span in spans.values() for end in (span.low, span.high)
    ]
    sizes, ticks = list(points), ticks_around(min(ends), max(ends))
    x = _scale(sizes[0], sizes[-1], _LEFT, _WIDTH - _RIGHT)
    y = _scale(ticks[0], ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    series = []
    for kind, words in SERIES.items():
        line = [(x(size), spans[kind]) for size, spans in points.items() if kind in spans]
        around = [(at, y(span.high)) for at, span in line]
        around += [(at, y(span.low)) for at, span in reversed(line)]
        if line:
            middle = _path((at, y(span.middle)) for at, span in line)
            series.append(Series(kind=kind, name=words, line=middle, band=_path(around) + "Z"))
    return SizeChart(
        id=name,
        title=title,
        description="Both axes are logarithmic; bands are 95 % intervals over jobs.",
        series=tuple(series),
        across=tuple((x(size), size_text(size)) for size in sizes[:: max(1, len(sizes) // 6)]),
        up=tuple((y(tick), f"{tick:g}") for tick in ticks),
    )


def ticks_around(low: float, high: float) -> list[float]:
    """Return two to ten round values around an interval: powers of 10 if it is wide.

    >>> ticks_around(3.0, 200.0), ticks_around(0.95, 1.12), ticks_around(20.0, 45.0)
    ([1.0, 10.0, 100.0, 1000.0], [0.9, 1.0, 1.1, 1.2], [20.0, 25.0, 30.0, 35.0, 40.0, 45.0])
    """
    if high / low < 4:
        decade = 10.0 ** math.floor(math.log10(high))
        steps = (decade * share for share in (0.1, 0.2, 0.5, 1.0))
        spans = ((step, math.floor(low / step), math.ceil(high / step)) for step in steps)
        step, first, last = next(span for span in spans if span[2] - span[1] < _MOST_TICKS)
        return [float(f"{at * step:g}") for at in range(first, max(last, first + 1) + 1)]
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    span = math.log(high / low) or 1.0
    return lambda value: first + (last - first) * math.log(value / low) / span


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{round(x, 1):g} {round(y, 1):g}" for x, y in points)
