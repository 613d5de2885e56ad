"""What answers sets for a measured plan: its journal, and this machine if it is the plan's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tccl_py.cli.arguments import notice_each
from tccl_py.cli.hardware import (
    SEARCH_REPEATS,
    Hardware,
    MeasuredMachine,
    care,
    is_rehearsal,
    measured_machine,
)
from tccl_py.cli.progress import ProgressLine
from tccl_py.errors import InputError
from tccl_py.plan.plan import Plan
from tccl_py.sources.journal import JournalContents, JournalHeader, JournalledSource, read_journal
from tccl_py.sources.memory import RememberingSource


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """How this machine is to be measured, as the options say."""

    backend: str | None = None
    devices: int | None = None
    target: float | None = None


class ElsewhereError(InputError):
    """The plan was measured on another machine than this one."""


def journal_contents(plan: Plan, journal: Path) -> JournalContents:
    """The journal's measurements; it must be of the plan's machine.

    Raises:
        InputError: it is missing, damaged, or another machine's.
    """
    if not journal.is_file():
        raise InputError(str(journal), "does not exist", "plan again: it has what was measured")
    contents = read_journal(journal)
    header = contents.header
    if (header.machine, header.simulated) != (plan.machine.name, plan.simulated):
        kind = "simulated" if header.simulated else "measured"
        raise InputError(
            str(journal),
            f"is of machine {header.machine}, {kind}, not the plan's",
            f"the journal of {plan.machine.name}, {plan.provenance}",
        )
    return contents


@contextmanager
def measured_source(
    plan: Plan, journal: Path, here: Here, *, otherwise: str
) -> Iterator[RememberingSource]:
    """This machine, if it is the one that the plan was measured on; the plan's journal grows.

    Args:
        plan: a measured one.
        journal: its journal.
        here: how to measure.
        otherwise: what a message asks for if this is another machine.

    Raises:
        ElsewhereError: this is another machine.
        InputError: the journal is missing, damaged, or another machine's.
    """
    header = journal_contents(plan, journal).header
    place = _place(plan, header, here, otherwise)
    careful = care(target=here.target, repeats=SEARCH_REPEATS)
    with (
        ProgressLine() as line,
        Hardware(place, gpus=plan.gpus, care=careful) as source,
    ):
        if source.header != header:
            there = f"this is {place.machine.name} ({source.header.identity})"
            raise _elsewhere(plan, header, there, otherwise)
        with JournalledSource(source, journal, header) as journalled:
            source.on_set = line.measured
            notice_each(journalled.notices)
            try:
                yield journalled
            finally:
                notice_each(source.notices)


def _place(plan: Plan, header: JournalHeader, here: Here, otherwise: str) -> MeasuredMachine:
    """The machine to measure: by the backend that the journal names, if no option does."""
    rehearsed = is_rehearsal(header) and here.backend is None
    backend = "host" if rehearsed else here.backend
    devices = len(plan.machine.gpus) if rehearsed and here.devices is None else here.devices
    if backend is not None or devices is not None:
        return measured_machine(backend, devices)
    try:
        return measured_machine(None, None)
    except InputError as error:
        raise _elsewhere(plan, header, f"{error.where} {error.what}", otherwise) from error


def _elsewhere(plan: Plan, header: JournalHeader, here: str, otherwise: str) -> ElsewhereError:
    return ElsewhereError(
        f"the plan of {plan.machine.name}",
        f"was measured on other GPUs or with other software ({header.identity}) than there are "
        f"here: {here}",
        otherwise,
    )
