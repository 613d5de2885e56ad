"""`tccl uninstall`: take out what `tccl install` put in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tccl_py.cli.arguments import notice
from tccl_py.installation.blocks import Change
from tccl_py.installation.install import removal
from tccl_py.installation.install import uninstall as take_out


def uninstall(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Files to take it out of; all recorded if none."),
    ] = None,
    *,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", metavar=" ", help="Say what would change, and change nothing."),
    ] = False,
) -> None:
    """Take out what `tccl install` put in; files are as they were before, or gone if they were new.

    What others wrote into them since stays. Where something was installed stands in
    ~/.local/state/tccl (XDG_STATE_HOME), which goes with the last of it.

    Examples:

        tccl uninstall
        tccl uninstall /etc/slurm/task_prolog.sh
    """
    found = removal(files or ()) if dry_run else take_out(files or ())
    for change in found.changes:
        notice(_said(change, dry_run=dry_run))
    for path in found.untouched:
        notice(f"{path} has no lines of a plan")
    if not found.changes and not found.untouched:
        notice("nothing is installed")


def _said(change: Change, *, dry_run: bool) -> str:
    if change.after is None:
        return f"{'would remove' if dry_run else 'removed'} {change.path}, which was new"
    return f"{'would restore' if dry_run else 'restored'} {change.path}"
