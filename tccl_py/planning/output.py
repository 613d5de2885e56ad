"""The directory that takes a plan and its journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tccl_py.errors import InputError
from tccl_py.files import check_path, explain_errors, missing
from tccl_py.model.measurement import JOURNAL_FILE
from tccl_py.plan.load import load_plan
from tccl_py.plan.staging import FOLDERS, PLAN_FILE, lock_directory, make, unmake
from tccl_py.sources.journal import read_journal


@contextmanager
def output_directory(directory: Path, *, force: bool | None) -> Iterator[Path]:
    """Make `directory` ready to take a plan and a journal; yield the journal's path.

    A directory with a journal and no plan, or the plan of an interrupted search, is resumed. If an
    error ends the block, the directories made by this call are removed, unless the journal has
    measurements of hardware. Until the block ends no other run gets the directory: two would mix
    their lines in the journal. Raises InputError: a plan or other files are in it and `force` is
    not given, another run has it, or it cannot be made.
    """
    made: list[Path] = []
    unusable = "cannot be made", "name a writable place"
    with _taken_away(made), explain_errors(directory, *unusable):
        check_path(directory.absolute())
        if not directory.is_dir() and (directory.exists() or directory.is_symlink()):
            fault = missing(directory, "is no directory")
            raise InputError(str(directory), fault, "name a new or empty one")
        make(directory, made)
    # Not taken away if another run has it by now.
    journal = directory / JOURNAL_FILE
    with lock_directory(directory), _taken_away(made, journal):
        with explain_errors(directory, *unusable):
            _check_held(directory, force=force)
        yield journal


@contextmanager
def _taken_away(made: Sequence[Path], journal: Path | None = None) -> Iterator[None]:
    """Remove the directories made if an error, not an interruption, ends the block."""
    try:
        yield
    except Exception:
        if journal is None or not holds_measurements(journal):
            unmake(made)
        raise


def holds_measurements(journal: Path) -> bool:
    """Return whether a file is a journal with measurements of hardware."""
    with suppress(InputError, OSError):
        contents = read_journal(journal)
        return not contents.header.simulated and bool(contents.measurements)
    return False


def holds_whole_plan(directory: Path) -> bool:
    """Return whether a directory holds a plan that no interruption cut short."""
    with suppress(InputError):
        return (directory / PLAN_FILE).is_file() and not load_plan(directory).cancelled
    return False


def _check_held(directory: Path, *, force: bool | None) -> None:
    held = {entry.name for entry in directory.iterdir()}
    where = str(directory)
    if PLAN_FILE in held:
        # The search of an interrupted plan goes on.
        resumed = False
        with suppress(InputError):
            resumed = load_plan(directory).cancelled
        if not force and not resumed:
            right = "name a new directory" if force is None else "add `force` to replace it"
            raise InputError(where, "already holds a plan", right)
        return
    if held - {JOURNAL_FILE} and not force:
        right = "name a new directory"
        right += "" if force is None else ", or add `force` to use this one"
        raise InputError(where, "is not empty", right)
    # Without a plan beside them these are not ours to replace.
    for name in sorted(held & set(FOLDERS)):
        where = str(directory / name)
        raise InputError(where, "belongs to no plan", "name a directory without it")
