"""The record of what was installed where, in the user's state directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import (
    decode_json,
    encode_json,
    lock,
    read_text,
    sweep_beside,
    write_atomically,
)
from tccl_py.installation.texts import Kind
from tccl_py.plan.staging import make, refused

FORMAT_VERSION = 1
RECORD_FILE = "installed.json"


class InstalledFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that has our part: where it is, what kind, and the plan's directory."""

    path: str
    kind: Kind
    plan: str


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All files that have our part, and the directories that were made for this record."""

    files: tuple[InstalledFile, ...] = ()
    made: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION

    def with_files(self, files: tuple[InstalledFile, ...]) -> Record:
        """The record with these too; one file stands in it once."""
        paths = {one.path for one in files}
        kept = tuple(one for one in self.files if one.path not in paths)
        return msgspec.structs.replace(self, files=(*kept, *files))

    def without(self, paths: set[str]) -> Record:
        """The record without these files."""
        kept = tuple(one for one in self.files if one.path not in paths)
        return msgspec.structs.replace(self, files=kept)


def state_directory() -> Path:
    """Where the record is: XDG_STATE_HOME, else ~/.local/state."""
    named = os.environ.get("XDG_STATE_HOME", "")
    base = Path(named) if named.startswith("/") else Path.home() / ".local" / "state"
    return base / "tccl"


def load_record(directory: Path) -> Record:
    """What was installed; nothing if there is no record.

    Raises:
        InputError: it is unreadable, of another version, or damaged.
    """
    path = directory / RECORD_FILE
    if not path.exists():
        return Record()
    found = decode_json(read_text(path), Record, where=str(path))
    if found.format_version != FORMAT_VERSION:
        what = f"has format version {found.format_version}"
        raise InputError(str(path), what, f"this program reads version {FORMAT_VERSION}")
    return found


@contextmanager
def opened_record(directory: Path) -> Iterator[Record]:
    """The record, held against other runs until the block ends; its directory is there then.

    If nothing was recorded in the end, directories made for it are taken away.

    Raises:
        InputError: another run has it, or it is unreadable.
    """
    made: list[Path] = []
    with refused(directory, "cannot be made", "name a writable place by XDG_STATE_HOME"):
        make(directory, made)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock(descriptor, directory)
        sweep_beside(directory / RECORD_FILE)
        record = load_record(directory)
        if not made and not any(directory.iterdir()):
            # Of a run that was killed before it recorded anything.
            made.append(directory)
        if made:
            record = msgspec.structs.replace(record, made=tuple(map(str, made)))
        yield record
    finally:
        if made and not (directory / RECORD_FILE).exists():
            _take_away(tuple(map(str, made)))
        os.close(descriptor)


def save_record(record: Record, directory: Path) -> None:
    """Write the record; one without files goes, and the directories that were made for it.

    Raises:
        InputError: it cannot be written.
    """
    if record.files:
        write_atomically(directory / RECORD_FILE, encode_json(record))
        return
    with refused(directory, "cannot be written", "make it writable"):
        (directory / RECORD_FILE).unlink(missing_ok=True)
    _take_away(record.made)


def _take_away(made: tuple[str, ...]) -> None:
    for folder in reversed(made):
        with suppress(OSError):
            Path(folder).rmdir()
