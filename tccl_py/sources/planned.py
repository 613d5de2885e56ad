"""Sources for more measurements of a plan: its model, its machine, or its journal alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tccl_py.errors import InputError, MeasurementError, SourceLostError
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import TransferSet
from tccl_py.simulator.model import MachineModel
from tccl_py.sources.journal import JournalContents, JournalHeader, read_journal
from tccl_py.sources.memory import RememberingSource
from tccl_py.sources.opening import OpenedSource, open_source, simulation_noise
from tccl_py.sources.profiled import (
    SEARCH_REPEATS,
    MeasuredMachine,
    MeasurementOptions,
    is_dry_run,
    measured_machine,
)


class Planned(Protocol):
    """A plan, as far as its sources need it."""

    @property
    def machine(self) -> Machine:
        """The planned machine."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """Indices of the planned GPUs."""

    @property
    def simulated(self) -> bool:
        """Whether its rates are simulated."""

    @property
    def provenance(self) -> str:
        """How its rates were found, in words."""


class ElsewhereError(InputError):
    """A plan was measured on another machine than this host."""


class _NoSource:
    """Fails for every set: only a journal has answers."""

    def __init__(self, *, simulated: bool, elsewhere: ElsewhereError | None) -> None:
        self.simulated = simulated
        self._why = elsewhere

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Fail.

        Raises:
            MeasurementError: the journal does not have the set, and need not.
            SourceLostError: only another machine can measure it.
        """
        if self._why is None:
            raise MeasurementError(f"{sets[0]} is not in the journal")
        raise SourceLostError(
            f"{self._why.where}: {self._why.what}; its journal does not have {sets[0]}, so "
            f"{self._why.right}"
        )


def journal_alone(
    plan: Planned, journal: Path, *, elsewhere: ElsewhereError | None = None
) -> tuple[RememberingSource, tuple[str, ...]]:
    """Return a source that has the measurements of a plan's journal, and notices on the file.

    Args:
        plan: the journal's.
        journal: the file.
        elsewhere: why nothing can be measured; a set that is missing ends the work then.

    Raises:
        InputError: the journal is missing, damaged, or of another machine.
    """
    contents = journal_of(plan, journal)
    source = _NoSource(simulated=plan.simulated, elsewhere=elsewhere)
    return RememberingSource(source, contents.measurements), contents.notices


def journal_of(plan: Planned, journal: Path) -> JournalContents:
    """Read a plan's journal.

    Raises:
        InputError: it is missing, damaged, or of another machine.
    """
    if not journal.is_file():
        raise InputError(str(journal), "does not exist", "plan again: it has the measurements")
    contents = read_journal(journal)
    header = contents.header
    if (header.machine, header.simulated) != (plan.machine.name, plan.simulated):
        kind = "simulated" if header.simulated else "measured"
        raise InputError(
            str(journal),
            f"is of machine {header.machine}, {kind}, and not of this plan",
            f"the journal of {plan.machine.name}, {plan.provenance}",
        )
    return contents


def simulated_again(
    model: MachineModel, journal: Path, *, otherwise: str = ""
) -> tuple[OpenedSource, tuple[str, ...]]:
    """Return a simulated plan's source with its journal, and notices on the file.

    Args:
        model: saved with the plan.
        journal: the plan's; its header has the noise and the seed. A missing file is made.
        otherwise: another remedy than planning again, for messages.

    Raises:
        InputError: the journal is of another model or of other parameters.
    """
    header = read_journal(journal).header if journal.is_file() else None
    noise, seed = (0.0, 0) if header is None else simulation_noise(header)
    source = open_source(model, noise=noise, seed=seed)
    if header not in (None, source.header):
        what = f"is not of the model of {model.name} as this program has it"
        raise InputError(str(journal), what, f"plan again{otherwise}")
    return source, source.keep_in(journal)


def measured_again(
    plan: Planned,
    journal: Path,
    *,
    otherwise: str,
    backend: str | None = None,
    devices: int | None = None,
    target: float | None = None,
) -> tuple[OpenedSource, tuple[str, ...]]:
    """Return a source over this host, if the plan was measured on it, and notices on its journal.

    Args:
        plan: a measured one.
        journal: the plan's.
        otherwise: the remedy if this is another machine.
        backend, devices: as in `open_source`; None is as the plan was measured.
        target: of the measurements.

    Raises:
        ElsewhereError: this is another machine.
        InputError: the journal is missing, damaged, or another machine's.
    """
    header = journal_of(plan, journal).header
    place = _same_backend(plan, header, backend, devices, otherwise)
    options = MeasurementOptions(repeats=SEARCH_REPEATS)
    if target is not None:
        options = MeasurementOptions(repeats=SEARCH_REPEATS, target=target)
    source = open_source(place, gpus=plan.gpus, options=options)
    if source.header != header:
        there = f"this is {place.machine.name} ({source.header.identity})"
        raise _elsewhere(plan, header, there, otherwise)
    return source, source.keep_in(journal)


def _same_backend(
    plan: Planned,
    header: JournalHeader,
    backend: str | None,
    devices: int | None,
    otherwise: str,
) -> MeasuredMachine:
    """Return this host's machine, by the backend of the journal unless options name another."""
    if is_dry_run(header) and backend is None:
        backend, devices = "host", len(plan.machine.gpus) if devices is None else devices
    try:
        return measured_machine(backend, devices)
    except InputError as error:
        if backend is not None or devices is not None:
            raise
        raise _elsewhere(plan, header, f"{error.where} {error.what}", otherwise) from error


def _elsewhere(plan: Planned, header: JournalHeader, here: str, otherwise: str) -> ElsewhereError:
    return ElsewhereError(
        f"the plan of {plan.machine.name}",
        f"was measured on other GPUs or with other software ({header.identity}) than there are "
        f"here: {here}",
        otherwise,
    )
