"""`tccl report`: a plan's directory as one HTML page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from tccl_py.cli.options import DirectoryArgument, OutputOption, flag
from tccl_py.cli.streams import notice, write_result
from tccl_py.errors import InputError

REPORT_FILE = "report.html"
_HEAD_BYTES = 2000


def report(
    directory: DirectoryArgument,
    *,
    output: OutputOption = None,
    force: Annotated[bool, flag("--force", "Replace FILE even if it is no report.")] = False,
) -> None:
    """Write a plan as one HTML page: machine, rings, rates, settings, and how to use them.

    The page, DIR/report.html if not named, needs no network and no other file. Rates of single hops
    and of pairs come from the journal in DIR; a saved result of `tccl explain` is shown. An earlier
    report is replaced, any other file only with --force.

    Example:

        tccl report my-plan
    """
    # Templates take long to load; no other command needs them.
    from tccl_py.report.contents import read_contents  # noqa: PLC0415
    from tccl_py.report.page import GENERATOR, report_html  # noqa: PLC0415

    contents = read_contents(directory)
    target = directory / REPORT_FILE if output is None else output
    # Unlike Path.resolve, it bears links that lead in circles.
    inside = Path(os.path.realpath(target)).is_relative_to(os.path.realpath(directory))
    if inside or not force:
        _check_replaceable(target, GENERATOR, inside=inside)
    write_result(report_html(contents), target)
    notice(f"wrote {target}")


def _check_replaceable(target: Path, mark: str, *, inside: bool) -> None:
    """Check that a file may be replaced: it is empty, or a report."""
    try:
        if not target.is_file():
            return
        with target.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(str(target), f"cannot be read ({reason})", "name another file") from error
    if head and mark.encode() not in head:
        right = "name another file" if inside else "name another file, or add --force to replace it"
        raise InputError(str(target), "is no report of tccl", right)
