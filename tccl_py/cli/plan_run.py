"""How a run of `tccl plan` ends: with files, interrupted with the best so far, or with no plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console

from tccl_py.cli.interrupts import CTRL_C_AND_SIGTERM, INTERRUPTED, Terminated, interrupts_put_off
from tccl_py.cli.output import results
from tccl_py.cli.streams import notice, print_json
from tccl_py.plan.directory import holds_measurements
from tccl_py.plan.plan import Plan

_Plan = TypeVar("_Plan", Plan, Plan)


@contextmanager
def planning(journal: Path, output: Path) -> Iterator[None]:
    """Within the block a plan is searched; says what becomes of an end without one.

    SIGTERM ends it at once, and so does Ctrl-C where nothing was found yet.
    """
    try:
        with interrupts_put_off(CTRL_C_AND_SIGTERM):
            yield
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, Terminated)):
            notice("interrupted before there was a plan: none was written")
        if holds_measurements(journal):
            notice(f"what was measured is kept: the same command goes on from {output}")
        raise


def finish(
    made: _Plan,
    output: Path,
    as_json: Callable[[_Plan], dict[str, Any]],
    as_text: Callable[[_Plan, Console], None],
    *,
    json: bool,
) -> None:
    """Print a plan, and whether it was written.

    Raises:
        typer.Exit: it was interrupted, and so was not.
    """
    if made.cancelled:
        notice(f"interrupted: the best so far follows; the same command goes on from {output}")
    if json:
        print_json(as_json(made))
    else:
        as_text(made, results())
    if made.cancelled:
        raise typer.Exit(INTERRUPTED)
    notice(f"wrote {output}")
