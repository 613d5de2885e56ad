"""Tuning by message size as text, JSON and drawings: rows by size, and the tuner's entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import msgspec

from tccl_py.nccl.tuner import TunerEntry
from tccl_py.statistics import Interval, median_interval
from tccl_py.verify.size_table import SizeRow
from tccl_py.verify.sizes import SizeTuning
from tccl_py.verify.spec import GIB, KIB, MIB, Choice, bus_gbps, size_text

ENTRY_COLUMNS = ("GPUs", "collective", "sizes", "algorithm, protocol, channels", "over plan")
COLUMNS = (
    "collective",
    "size",
    "default us",
    "plan us",
    "tuned us",
    "over plan",
    "over default",
    "choice",
)


def choice_text(choice: Choice | TunerEntry) -> str:
    """Return a choice as text.

    >>> choice_text(Choice(algorithm="ring", protocol="ll", channels=8))
    'ring ll 8'
    """
    return f"{choice.algorithm} {choice.protocol} {choice.channels or 'any'}"


def _about(size: int) -> str:
    """Return a number of bytes with three digits at least: ends half-way between sizes are odd."""
    unit = next((unit for unit in (GIB, MIB, KIB) if size >= unit), 1)
    return size_text(size) if size % unit == 0 else f"{size / unit:.1f} {size_text(unit)[2:]}"


def entry_cells(tuning: SizeTuning) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield GPUs, collective, sizes, choice and gains over the plan alone of each entry."""
    gpus = ",".join(map(str, tuning.gpus))
    for entry in tuning.entries:
        inside = [
            row.fresh.middle
            for row in tuning.rows
            if row.kept
            and row.fresh is not None
            and row.row.collective == entry.collective
            and entry.from_bytes <= row.row.bytes <= entry.to_bytes
        ]
        gains = f"{min(inside):.2f} to {max(inside):.2f}" if inside else ""
        ends = f"{_about(entry.from_bytes)} to {_about(entry.to_bytes)}"
        yield gpus, entry.collective, ends, choice_text(entry), gains


def size_cells(tuning: SizeTuning) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row, and the choice of a row that the table has an entry for."""
    for row in tuning.rows:
        name = f"{row.row.collective} {row.row.dtype}"
        seconds = [row.seconds.get("default", ()), row.seconds.get(row.plan, ()), row.tuned_seconds]
        times = (f"{median(values) * 1e6:.1f}" if values else "" for values in seconds)
        over_plan = row.fresh if row.kept else None
        ratios = (_ratio(over_plan), _ratio(row.over("default")))
        chosen = choice_text(row.choice) if row.kept and row.choice is not None else ""
        yield name, size_text(row.row.bytes), *times, *ratios, chosen


def tuning_facts(tuning: SizeTuning) -> list[str]:
    """Return the share of right predictions, and the cost."""
    right, asked = tuning.predictions
    ratios = [row.fresh.middle for row in tuning.by_plugin if row.fresh is not None]
    told = f"{min(ratios):.3f} to {max(ratios):.3f} times the plan" if ratios else "not timed"
    return [
        f"{len(tuning.entries)} entries over {tuning.arm}, measured on GPUs "
        f"{','.join(map(str, tuning.gpus))}; other sizes are NCCL's own choice",
        f"predictions of gains found right by {tuning.jobs} fresh jobs: {right} of {asked}",
        *[f"by the plugin, at and between the sizes of entries: {told}"] * bool(tuning.entries),
        f"ranks differ by {tuning.skew:.1%} at most; {tuning.seconds:.0f} s",
    ]


def tuning_json(tuning: SizeTuning) -> dict[str, Any]:
    """Return the part of `--json` on message sizes."""
    right, asked = tuning.predictions
    return {
        "gpus": tuning.gpus,
        "arm": tuning.arm,
        "rows": [_row_json(row) for row in tuning.rows],
        "entries": tuning.entries,
        "predictions": {"right": right, "asked": asked},
        "by_plugin": [_row_json(row) for row in tuning.by_plugin],
        "seconds": tuning.seconds,
    }


def _row_json(row: SizeRow) -> dict[str, Any]:
    us = {name: median(values) * 1e6 for name, values in row.seconds.items() if values}
    return {
        "collective": row.row.collective,
        "dtype": row.row.dtype,
        "bytes": row.row.bytes,
        "us": us,
        "choice": row.choice,
        "swept": row.swept,
        "fresh": row.fresh,
        "over_default": row.over("default"),
        "predicted_gain": row.gains,
        "kept": row.kept,
    }


def _ratio(found: Interval | None) -> str:
    return "" if found is None else f"{found.middle:.3f} ({found.low:.3f} to {found.high:.3f})"


# Latency and bus bandwidth by size, as drawings with logarithmic axes.


_WIDTH, _HEIGHT = 560.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 12.0, 10.0, 34.0
SERIES = {"default": "default NCCL", "variables": "variables", "plan": "the plan", "tuned": "tuned"}


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a chart, and the band of its 95 % intervals, as SVG paths."""

    kind: str
    name: str
    line: str
    band: str


class SizeChart(msgspec.Struct, frozen=True, kw_only=True):
    """A value by message size, both axes logarithmic; ticks are places and labels."""

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


def size_charts(tunings: Sequence[SizeTuning]) -> list[SizeChart]:
    """Return charts of latency and of bus bandwidth for each set of GPUs and collective."""
    found = []
    for number, tuning in enumerate(tunings):
        rows = [row for row in tuning.rows if row.row.dtype == "bfloat16" and row.tuned_seconds]
        for collective in dict.fromkeys(row.row.collective for row in rows):
            own = [row for row in rows if row.row.collective == collective]
            gpus = ",".join(map(str, tuning.gpus))
            of = f"{collective.replace('_', '-')}, bfloat16, GPUs {gpus}"

            def gbps(row: SizeRow, seconds: float, ranks: int = len(tuning.gpus)) -> float:
                return bus_gbps(row.row.collective, ranks, row.row.bytes, seconds)

            name = f"size-{number}-{collective}"
            found.append(_chart(f"{name}-us", f"Latency in us: {of}", own, lambda _, s: s * 1e6))
            found.append(_chart(f"{name}-gbps", f"Bus bandwidth in GB/s: {of}", own, gbps))
    return found


def _chart(
    name: str, title: str, rows: Sequence[SizeRow], value: Callable[[SizeRow, float], float]
) -> SizeChart:
    bands: dict[str, list[tuple[int, Interval]]] = {}
    for row in sorted(rows, key=lambda row: row.row.bytes):
        seconds = {kind: row.seconds.get(kind, ()) for kind in ("default", "variables")}
        seconds |= {"plan": row.seconds.get(row.plan, ()), "tuned": row.tuned_seconds}
        for kind, values in seconds.items():
            if values and not (kind == "variables" and row.plan == "variables"):
                span = median_interval([value(row, one) for one in values])
                bands.setdefault(kind, []).append((row.row.bytes, span))
    sizes = sorted({size for points in bands.values() for size, _ in points})
    ends = [v for points in bands.values() for _, span in points for v in (span.low, span.high)]
    low, high = 10 ** math.floor(math.log10(min(ends))), 10 ** math.ceil(math.log10(max(ends)))
    x = _scale(sizes[0], sizes[-1], _LEFT, _WIDTH - _RIGHT)
    y = _scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    return SizeChart(
        id=name,
        title=title,
        description="Both axes are logarithmic; bands are 95 % intervals of medians over jobs.",
        series=tuple(
            Series(
                kind=kind,
                name=SERIES[kind],
                line=_path((x(size), y(span.middle)) for size, span in bands[kind]),
                band=_path(
                    [
                        *((x(size), y(span.high)) for size, span in bands[kind]),
                        *((x(size), y(span.low)) for size, span in reversed(bands[kind])),
                    ]
                )
                + "Z",
            )
            for kind in SERIES
            if kind in bands
        ),
        across=tuple((x(size), size_text(size)) for size in sizes[:: max(1, len(sizes) // 6)]),
        up=tuple(
            (y(10.0**power), f"{10.0**power:g}")
            for power in range(round(math.log10(low)), round(math.log10(high)) + 1)
        ),
    )


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    span = math.log(high / low) or 1.0
    return lambda value: first + (last - first) * math.log(value / low) / span


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{round(x, 1):g} {round(y, 1):g}" for x, y in points)
