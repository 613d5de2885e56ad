"""What a check measured, kept as a line of `checks.jsonl`; the plan's journal stays as it is."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import lock
from tccl_py.health.drift.check import Drift
from tccl_py.model.measurement import Measurement
from tccl_py.sources.journal import JournalHeader

FILE = "checks.jsonl"
FORMAT_VERSION = 1
_SPACE = "choose a writable place with free space"


class CheckRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One check: when it ended (seconds since 1970), whose figures, and all of them."""

    ended: float
    header: JournalHeader
    drifted: bool
    measurements: tuple[Measurement, ...]
    format_version: int = FORMAT_VERSION


def keep_check(drift: Drift, directory: Path, header: JournalHeader, *, ended: float) -> Path:
    """Append a check to a plan's directory, whole or not at all; the file.

    Raises:
        InputError: the file is in use, no regular file, or cannot be written.
    """
    record = CheckRecord(
        ended=ended, header=header, drifted=drift.drifted, measurements=drift.measurements
    )
    path = directory / FILE
    try:
        if path.exists() and not path.is_file():
            raise InputError(str(path), "is not a regular file", "move it away")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            lock(descriptor, path)
            _append(descriptor, msgspec.json.encode(record) + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(str(path), f"cannot be written ({reason})", _SPACE) from error
    return path


def _append(descriptor: int, data: bytes) -> None:
    """Write all of `data`; what a full disk takes half of is taken back."""
    before = os.fstat(descriptor).st_size
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, before)
        raise
