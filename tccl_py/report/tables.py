"""Results of experiments as tables, whose columns are data.

A column is a header and the text of a row's cell. The tables of a verification, of tunings by
message size and of overlap are lists of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import structs

from tccl_py.errors import size_text
from tccl_py.experiments.overlap import GEMM
from tccl_py.plan.text import CHOICE_WORDS, choice_words
from tccl_py.statistics import Interval, median_interval

if TYPE_CHECKING:
    from tccl_py.decision import StepTime
    from tccl_py.experiments.communication import Communication
    from tccl_py.experiments.comparison import Timed
    from tccl_py.experiments.jobs import Outcome
    from tccl_py.experiments.record import ArmResult, Tried


class Column(NamedTuple):
    """A column of a table: its header, and the text of a row's cell."""

    header: str
    cell: Callable[[Any], str]


Columns = Sequence[Column]


def lines(columns: Columns, rows: Iterable[Any]) -> Iterator[list[str]]:
    """Yield the lines of a table, the headers first."""
    yield [column.header for column in columns]
    for row in rows:
        yield [column.cell(row) for column in columns]


# Verification: a row is the same row in every arm.
def verdict_text(row: Timed) -> str:
    """Return the speed over the baseline's with its interval, and the verdict if there is one."""
    return f"{row.compared:.3f}" + (f" {row.verdict}" if row.verdict != "same" else "")


def size_lines(arms: Sequence[ArmResult]) -> Iterator[list[str]]:
    """Yield the table of sizes: time and bandwidth in each arm, from the second on its ratio."""

    def columns_of(at: int, arm: ArmResult) -> list[Column]:
        times = Column(f"{arm.name} us", lambda row: f"{row[at].us:.1f}")
        rates = Column("GB/s", lambda row: f"{row[at].gbps:.2f}")
        ratios = Column("ratio (95 %)", lambda row: verdict_text(row[at]))
        return [times, rates, ratios] if at else [times, rates]

    size = Column("size", lambda row: size_text(row[0].bytes))
    columns = [size, *chain.from_iterable(map(columns_of, count(), arms))]
    return lines(columns, zip(*(arm.sizes for arm in arms), strict=True))


TRIED: Columns = (
    Column("tried by one job", lambda row: choice_words(row.arm, row.settings)),
    Column("GB/s", lambda row: f"failed: {row.failed}" if row.failed else f"{row.gbps:.2f}"),
    Column("at its worst size", lambda row: _of_default(row, row.worst_ratio)),
    Column("transfers", lambda row: _of_default(row, row.transfer_ratio)),
)


def _of_default(row: Tried, ratio: float) -> str:
    """Return a candidate's speed over default NCCL's."""
    return "" if row.failed else f"{ratio:.3f}"


# Overlap: a row is a set of transfers, or a transfer beside a GEMM, in one of two modes.
class Span(Interval, frozen=True, kw_only=True):
    """A median and the 95 % interval, ms; the whole range of fewer than 6 samples."""

    middle: float = msgspec.field(name="median_ms")
    low: float = msgspec.field(name="low_ms")
    high: float = msgspec.field(name="high_ms")


Line = dict[str, Any]
"""A row of a table, with the keys of `--json`."""
_MODES = (("sequential", "seconds", sum), ("concurrent", "beside", max))
"""Names, fields of the times, and how those of all rows add up."""


def _span(name: str) -> Callable[[Line], str]:
    return lambda row: f"{row[name]:.2f}"


PAIRS: Columns = (
    Column("by", lambda row: row["by"]),
    Column("set", lambda row: " ".join(row["set"])),
    Column("mode", lambda row: row["mode"]),
    Column("one message of each pair", lambda r: "  ".join(f"{each:.2f}" for each in r["message"])),
    Column("all of them", _span("total")),
)
GEMMS: Columns = (
    Column("by", lambda row: row["by"]),
    Column("transfer", lambda row: row["transfer"]),
    Column("mode", lambda row: row["mode"]),
    Column("transfer's time", _span("transfer_time")),
    Column("GEMM's time", _span("product_time")),
    Column("both done", _span("total")),
)


def span(seconds: Iterable[float]) -> Span:
    """Return the median of times in ms, and the interval."""
    return Span(**structs.asdict(median_interval([1e3 * value for value in seconds])))


def overlap_lines(
    by: str, outcome: Outcome, gpus: Sequence[int], *, messages: int
) -> Iterator[Line]:
    """Yield a job's lines of pairs, and of transfers beside a GEMM.

    `by` is `nccl`, `gloo` or `memcpy`, `gpus` the index of each place, and `messages` the number of
    one transfer.
    """
    for ranks in outcome.rows:
        rows = (ranks[0].row, *ranks[0].row.beside)
        names = [
            "->".join(f"G{gpus[place]}" for place in row.groups[0]) if row.groups else "all-reduce"
            for row in rows
            if row != GEMM
        ]
        for mode, field, whole in _MODES:
            of_ranks = ([getattr(part, field) for part in times.variants] for times in ranks)
            # The slowest rank that reports a row counts.
            works = [
                list(map(max, zip(*filter(None, row), strict=True)))
                for row in zip(*of_ranks, strict=True)
            ]
            line: Line = {"by": by, "mode": mode}
            if rows[-1] == GEMM:
                line |= {"transfer": names[0]}
                line |= {"transfer_time": span(works[0]), "product_time": span(works[1])}
            else:
                message = [span(value / messages for value in work) for work in works]
                line |= {"set": names, "message": message}
            yield {**line, "total": span(map(whole, zip(*works, strict=True)))}


# A job's communication.
def communication_line(communication: Communication) -> str:
    """Return the time of a step before and after, by what choice, and what that slows."""
    steps, chosen = communication.choices, communication.chosen
    before = steps["default"].seconds
    if chosen == "default":
        others = [f"{CHOICE_WORDS[n]} {_speed(s)}" for n, s in steps.items() if n != "default"]
        rest = f": {', '.join(others)}" if others else ""
        line = f"{_durations(before)} a step by default NCCL, which no choice clearly beats{rest}"
    else:
        line = f"{_durations(before, steps[chosen].seconds)} a step ({_speed(steps[chosen])})"
        line += f" by {CHOICE_WORDS[chosen]}"
    parts = [
        f"{name}, {_share(share)} of it, is slower ({speed:.2f})"
        for name, (share, speed) in communication.losses.items()
    ]
    if communication.unknown > 0:
        parts.append(f"{_share(communication.unknown)} of its calls have no times")
    basis = f" ({communication.basis})" if communication.basis else ""
    return f"your job's communication{basis}: " + "; ".join([line, *parts])


def _share(share: float) -> str:
    return "under 1 %" if share < 0.005 else f"{100 * share:.0f} %"


def _speed(step: StepTime) -> str:
    middle, low, high = (f"{value:.2f}" for value in structs.astuple(step.speed))
    return middle if low == high else f"{middle}, {low} to {high}"


def _durations(*seconds: float) -> str:
    """Return durations in the unit of the first."""
    units = ((1.0, "s"), (1e3, "ms"), (1e6, "us"))
    factor, unit = next((each for each in units if seconds[0] * each[0] >= 1), units[-1])
    return " -> ".join(f"{s * factor:.{s * factor < 100:d}f}" for s in seconds) + f" {unit}"
