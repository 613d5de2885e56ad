"""The file of the TCCL fork's runtime, for `tccl export --runtime tccl`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tccl_py.cli.output import ProgressLine
from tccl_py.cli.process import notice, notice_each, write_result
from tccl_py.errors import InputError
from tccl_py.interrupts import interrupts_put_off
from tccl_py.plan.again import (
    ElsewhereError,
    journal_of,
    journal_source,
    known_model,
    measured_again,
)
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.search.problem import Reporter
from tccl_py.sources.memory import RememberingSource
from tccl_py.sources.opening import open_source
from tccl_py.tccl_fork.database import MadeDatabase, make_database, tccl_xml
from tccl_py.tccl_fork.search import Export, check_plan_for_fork


def export_fork(directory: Path, output: Path | None, wanted: Export) -> None:
    """Write the file of the TCCL fork's runtime to the new file `output`, or print it."""
    if output is not None and (output.is_file() or output.is_dir()):
        raise InputError(str(output), "already exists", "name a new file")
    place = directory if directory.is_dir() else directory.parent
    with interrupts_put_off():
        plan = load_plan(directory)
        check_plan_for_fork(plan, where=str(directory))
        made = _made(plan, place, wanted)
    write_result(tccl_xml(made.database, notes=made.notes), output)
    notice_each(made.notes)
    if output is not None:
        rings = len(made.database.intra)
        chains = sum(len(part.chains) for part in made.database.inter)
        said = f"{rings} ring{'s' * (rings != 1)} and {chains} chain{'s' * (chains != 1)}"
        notice(f"wrote {said} to {output}")


def _made(plan: Plan, directory: Path, wanted: Export) -> MadeDatabase:
    """Make the database by the plan's model, by its machine, or by its journal alone."""
    notices: tuple[str, ...] = ()
    source: RememberingSource
    with ExitStack() as stack:
        line = stack.enter_context(ProgressLine())
        # A source that measures reports by itself.
        reporter: Reporter | None = line if plan.simulated else None
        if plan.simulated:
            source = open_source(known_model(plan, directory))
        else:
            try:
                source, notices = measured_again(plan, directory, otherwise="export it there")
                source.watch(line.measured)
            except ElsewhereError as why:
                contents = journal_of(plan, directory)
                source, notices = journal_source(contents, elsewhere=why), contents.notices
        notice_each(notices)
        with source:
            made = make_database(plan, source, export=wanted, reporter=reporter)
        notice_each(source.notices)
    return made
