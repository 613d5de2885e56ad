"""Tables and progress, by rich."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from tccl_py.cli.process import Speech, Verbosity, notice
from tccl_py.errors import spell, visible

if TYPE_CHECKING:
    from tccl_py.search.problem import Progress

GOOD, BAD, DOUBT = "bold green", "bold red", "bold yellow"
"""Styles of verdicts; rich leaves colours out with NO_COLOR and where no terminal is."""
_PIPED_WIDTH = 120
_INTERVAL_S = 10.0
_NARROW, _LEAST_WIDTH = 60, 40
"""In fewer columns tables may leave out words; nothing gets narrower than the second."""
_NUMBER = re.compile(
    r"[-?]?|(< |\u00b1 )?[-+]?\d+(\.\d+)?(e-?\d+)?( ?(%|x|[mu]?s|GB/s|[KMG]?i?B))?( \([\d. to]+\))?"
)
"""A cell of a column of numbers: a number with its unit and interval, or none."""


class _SafeConsole(Console):
    """A console that shows control characters instead of sending them to the terminal.

    Every string comes through here, a table's cells too; names in them come from files.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a Text of `text`, as rich does."""
        return super().render_str(visible(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, tables as they fit; piped lines do not end in spaces."""
        fitting = [self._fitting(shown) for shown in objects]
        if self.is_terminal:
            super().print(*fitting, **options)
            return
        with self.capture() as printed:
            super().print(*fitting, **options)
        text = re.sub(" +$", "", printed.get(), flags=re.MULTILINE)
        super().print(Text(text), end="", soft_wrap=True)

    def _fitting(self, shown: Any) -> Any:
        """Return a framed table with its numbers to the right, or narrow, with a line a cell."""
        if not isinstance(shown, Table) or shown.box is None:
            return shown
        for column in shown.columns:
            if all(_NUMBER.fullmatch(f"{cell}") for cell in column.cells):
                column.justify = "right"
        if self.width >= _NARROW:
            return shown
        if Measurement.get(self, self.options.update_width(_NARROW), shown).minimum <= self.width:
            return shown
        names = [f"{column.header}" for column in shown.columns]
        cells = zip(*(column.cells for column in shown.columns), strict=True)
        return grid(line for row in cells for line in (*zip(names, row, strict=True), ("", "")))


def results(*, stderr: bool = False) -> Console:
    """Return a console on stdout, wide enough for tables where it is no terminal; or on stderr."""
    stream = sys.stderr if stderr else sys.stdout
    piped = stream is None or not stream.isatty()
    return _SafeConsole(
        stderr=stderr,
        width=max(_columns(), _LEAST_WIDTH) if _columns() else _PIPED_WIDTH if piped else None,
        highlight=False,
        markup=False,
        emoji=False,
        # rich fails at a COLUMNS that is no number.
        _environ={name: text for name, text in os.environ.items() if name != "COLUMNS"},
    )


def _columns() -> int:
    """Return the number in COLUMNS, or 0."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def grid(rows: Any) -> Table:
    """Return rows of cells without lines, the last column folded."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    if table.columns:
        table.columns[-1].overflow = "fold"
    return table


def print_table(console: Console, lines: Iterable[Iterable[str]], *, title: str = "") -> None:
    """Print a table with its headers as the first line, if any line follows; long words fold."""
    headers, *rows = lines
    table = Table(*(Column(header, overflow="fold") for header in headers), title=title or None)
    for cells in rows:
        table.add_row(*cells)
    if rows:
        console.print(table)


def heat(value: float | None, largest: float) -> Text:
    """Return a cell of a heat map."""
    from tccl_py.report.drawing import cell_colours, cell_text  # noqa: PLC0415 (slow)

    if value is None:
        return Text("-")
    return Text(cell_text(value), "{1} on {0}".format(*cell_colours(value, largest)))


class ProgressLine:
    """The state of a command that takes long: a line on a terminal, elsewhere one every 10 s.

    `most` is the number of sets that a search may measure, `seconds` the time it may take.
    """

    def __init__(self, most: int | None = None, seconds: float | None = None) -> None:
        console = results(stderr=True)
        self._most, self._seconds = most, math.inf if seconds is None else seconds
        self._lines = not console.is_terminal or Speech.verbosity is Verbosity.VERBOSE
        self._bar = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=self._lines or Speech.verbosity is Verbosity.QUIET,
        )
        self._line = self._bar.add_task("starting", total=None)
        self._best = self._begun = self._shown = 0.0
        self._search = ""
        self._measured = ""
        self._first: tuple[int, float] | None = None

    def __call__(self, progress: Progress) -> None:
        """Show sets measured, the best so far and the bound of the search that runs."""
        self._best = max(self._best, progress.best_gbps)
        # A bound of this search alone can be below the best of an earlier one.
        bound = progress.bound_gbps
        shown = f"{bound:.1f}" if self._best <= bound < math.inf else "?"
        self._search = (
            f"{spell(progress.rings_in_set, 'ring')}: {spell(progress.sets_measured, 'set')}, "
            f"best so far {self._best:.1f} GB/s, bound of this search {shown}"
        )
        self._show()

    def count_sets(self, count: int, total: int | None = None) -> None:
        """Show how many sets were measured, of how many, and the time left."""
        most, words = (total, "") if total else (self._most, "at most ")
        self._measured = f"{spell(count, 'set')} measured"
        if most is not None and 0 < count < most:
            clock = time.monotonic()
            # What passed before the first set is no part of the pace.
            self._first = self._first or (count, clock)
            earlier, begun = self._first
            pace = (clock - begun) / (count - earlier) * (most - count) if count > earlier else None
            limit, remaining = self._seconds - (clock - self._begun), ""
            if pace is not None and limit > pace:
                remaining = f", {words}{_time_text(pace)} left at this pace"
            elif 0 < limit < math.inf:
                remaining = f", at most {_time_text(limit)} left"
            self._measured = f"{count} of {words}{spell(most, 'set')}{remaining}"
        self._show()

    def say(self, text: str) -> None:
        """Show what runs now."""
        self._search = text
        self._show()

    def _show(self) -> None:
        text = "; ".join(part for part in (self._search, self._measured) if part) or "starting"
        self._bar.update(self._line, description=text)
        clock = time.monotonic()
        interval = 1.0 if Speech.verbosity is Verbosity.VERBOSE else _INTERVAL_S
        if self._lines and clock - self._shown >= interval:
            self._shown = clock
            notice(f"{_time_text(clock - self._begun)}: {text}")

    def __enter__(self) -> ProgressLine:
        self._begun = self._shown = time.monotonic()
        self._bar.reset(self._line)
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        # What was disabled, rich before 15 ends with an empty line.
        if not self._bar.disable:
            self._bar.stop()


def _time_text(seconds: float) -> str:
    minutes, remaining = divmod(round(seconds), 60)
    return f"{minutes}:{remaining:02}" if minutes else f"{remaining} s"
