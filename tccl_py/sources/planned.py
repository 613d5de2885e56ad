"""Sources for more measurements of a plan: its model, its machine, or its journal alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tccl_py.errors import InputError, MeasurementError, SourceLostError
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import TransferSet
from tccl_py.simulator.model import MachineModel
from tccl_py.sources.journal import JournalContents, JournalHeader, read_journal
from tccl_py.sources.memory import RememberingSource
from tccl_py.sources.opening import OpenedSource, open_source, simulation_noise
from tccl_py.sources.profiled import (
    DEFAULT_TARGET,
    SEARCH_REPEATS,
    MeasuredMachine,
    MeasurementOptions,
    is_dry_run,
    measured_machine,
)


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
    journal: Path, machine: Machine, *, simulated: bool, elsewhere: ElsewhereError | None = None
) -> tuple[RememberingSource, tuple[str, ...]]:
    """Return a source that has the measurements of a plan's journal, and notices on the file.

    Args:
        journal: the file.
        machine: the plan's.
        simulated: whether the plan is.
        elsewhere: why nothing can be measured; a set that is missing ends the work then.

    Raises:
        InputError: the journal is missing, damaged, or of another machine.
    """
    contents = journal_of(journal, machine, simulated=simulated)
    source = _NoSource(simulated=simulated, elsewhere=elsewhere)
    return RememberingSource(source, contents.measurements), contents.notices


def journal_source(contents: JournalContents) -> RememberingSource:
    """Return a source with the measurements of a journal, which fails for every other set."""
    none = _NoSource(simulated=contents.header.simulated, elsewhere=None)
    return RememberingSource(none, contents.measurements)


def journal_of(journal: Path, machine: Machine, *, simulated: bool) -> JournalContents:
    """Read the journal of a plan of a machine.

    Raises:
        InputError: it is missing, damaged, or of another machine.
    """
    if not journal.is_file():
        raise InputError(str(journal), "does not exist", "plan again: it has the measurements")
    contents = read_journal(journal)
    header = contents.header
    if (header.machine, header.simulated) != (machine.name, simulated):
        kind = "simulated" if header.simulated else "measured"
        what = f"is of machine {header.machine}, {kind}, and not of this plan"
        raise InputError(str(journal), what, f"the journal of {machine.name}")
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
    journal: Path,
    machine: Machine,
    gpus: Sequence[int],
    *,
    otherwise: str,
    backend: str | None = None,
    devices: int | None = None,
    target: float | None = None,
) -> tuple[OpenedSource, tuple[str, ...]]:
    """Return a source over this host, if the plan was measured on it, and notices on its journal.

    Args:
        journal: a measured plan's.
        machine, gpus: the plan's.
        otherwise: the remedy if this is another machine.
        backend, devices: as in `open_source`; None is as the plan was measured.
        target: of the measurements.

    Raises:
        ElsewhereError: this is another machine.
        InputError: the journal is missing, damaged, or another machine's.
    """
    header = journal_of(journal, machine, simulated=False).header
    place = _same_backend(machine, header, backend, devices, otherwise)
    target = DEFAULT_TARGET if target is None else target
    options = MeasurementOptions(repeats=SEARCH_REPEATS, target=target)
    source = open_source(place, gpus=gpus, options=options)
    if source.header != header:
        there = f"this is {place.machine.name} ({source.header.identity})"
        raise _elsewhere(machine, header, there, otherwise)
    return source, source.keep_in(journal)


def _same_backend(
    machine: Machine,
    header: JournalHeader,
    backend: str | None,
    devices: int | None,
    otherwise: str,
) -> MeasuredMachine:
    """Return this host's machine, by the backend of the journal unless options name another."""
    if is_dry_run(header) and backend is None:
        backend, devices = "host", len(machine.gpus) if devices is None else devices
    try:
        return measured_machine(backend, devices)
    except InputError as error:
        if backend is not None or devices is not None:
            raise
        raise _elsewhere(machine, header, f"{error.where} {error.what}", otherwise) from error


def _elsewhere(
    machine: Machine, header: JournalHeader, here: str, otherwise: str
) -> ElsewhereError:
    return ElsewhereError(
        f"the plan of {machine.name}",
        f"was measured on other GPUs or with other software ({header.identity}) than there are "
        f"here: {here}",
        otherwise,
    )
