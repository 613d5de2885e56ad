"""Results of experiments as tables, whose columns are data.

A column is a header and the text of a row's cell. The tables of a verification and of tunings by
message size are lists of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from tccl_py.errors import size_text
from tccl_py.plan.text import CHOICE_WORDS, choice_words

if TYPE_CHECKING:
    from tccl_py.decision import StepTime
    from tccl_py.experiments.communication import Communication
    from tccl_py.experiments.comparison import Timed
    from tccl_py.experiments.means_table import MeansRow, MeansTable
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
    Column("tried by one job", lambda row: choice_words(row.name, row.settings)),
    Column(
        "GB/s", lambda row: f"failed: {row.failed}" if row.failed else f"{row.achieved_gbps:.2f}"
    ),
    Column("at its worst size", lambda row: _of_default(row, row.worst_ratio)),
    Column("transfers", lambda row: _of_default(row, row.transfer_ratio)),
)


def _of_default(row: Tried, ratio: float) -> str:
    """Return a candidate's speed over default NCCL's."""
    return "" if row.failed else f"{ratio:.3f}"


# Means.
def _gemms(row: MeansRow) -> str:
    gemms = (row.gemm.get(name) for name in (row.best, "nccl"))
    return ", ".join(f"{times:.2f}x" for times in gemms if times is not None)


MEANS: Columns = (
    Column("calls", lambda row: row.calls),
    Column("size", lambda row: size_text(row.bytes)),
    Column("best", lambda row: row.best),
    Column("us", lambda row: f"{row.us[row.best]:.1f}"),
    Column("default NCCL us", lambda row: f"{row.us['nccl']:.1f}" if "nccl" in row.us else ""),
    Column("GEMM by best, by NCCL", _gemms),
)


def means_facts(table: MeansTable) -> Iterator[str]:
    """Yield the regret of one means for all sizes, steps of workloads, and which means are out."""
    if table.dry_run:
        yield "a DRY RUN over gloo: its rates say nothing about GPUs or NCCL"
    for kind, each in table.regrets.items():
        lost = (f"{name} {mean:.0%} ({most:.0%} at worst)" for name, (mean, most) in each.items())
        yield f"one means for all sizes of {kind} loses: {', '.join(lost)}"
    for name, steps in table.workloads.items():
        times = _durations(*(steps[by] for by in ("nccl", "best") if by in steps))
        yield f"{name}: {times} a step by the best means of each size"
    for name, why in table.out.items():
        yield f"{name} {why}"


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
