"""A progress line for searches; it goes to stderr, and only where somebody watches."""

from __future__ import annotations

from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from tccl_py.cli.arguments import notices
from tccl_py.search.problem import Progress


class ProgressLine:
    """A reporter that keeps one line on the terminal up to date."""

    def __init__(self) -> None:
        console = notices()
        self._bar = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._line = self._bar.add_task("starting", total=None)
        self._best = 0.0
        self._search = ""
        self._measured = ""

    def update(self, progress: Progress) -> None:
        """Show sets measured, the best so far and the bound of the search that runs."""
        self._best = max(self._best, progress.best_gbps)
        bound = progress.bound_gbps
        shown = f"{bound:.1f}" if 0 < bound < float("inf") else "?"
        self._search = (
            f"{progress.rings_in_set} ring(s): {progress.sets_measured} sets, "
            f"best {self._best:.1f} GB/s, bound {shown}"
        )
        self._show()

    def measured(self, count: int, total: int | None = None) -> None:
        """Show how many sets the hardware has measured, of how many."""
        self._measured = f"{count} of {total} sets" if total else f"{count} sets measured"
        self._show()

    def _show(self) -> None:
        parts = [part for part in (self._search, self._measured) if part]
        self._bar.update(self._line, description="; ".join(parts) or "starting")

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
