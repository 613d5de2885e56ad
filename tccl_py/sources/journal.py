"""The journal, from which an interrupted run resumes.

The journal is an append-only file of JSON lines: a header with the machine, driver and options of
the measurements, then a line with the raw samples of each measured set. Every line is flushed at
once; a torn last line is dropped with a notice, and other damage is refused by file and line.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from io import BufferedWriter
from pathlib import Path

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.files import (
    SPACE,
    check_version,
    decode_json,
    encode_line,
    explain_errors,
    lock,
    reading,
    replacement,
)
from tccl_py.model.measurement import (
    JOURNAL_FORMAT,
    JournalHeader,
    Measurement,
    NoRateError,
    faults,
)
from tccl_py.model.transfer import TransferSet

MAX_LINE_BYTES = 32 << 20
_HEADER_START = b'{"machine":'
_RIGHT = "give a file this program wrote"
_WITHOUT = "delete this line, and what is needed of it is measured again"
_HEADLESS = "has no header line", "name a journal this program wrote"
_UNWRITABLE = "cannot be written", SPACE


class JournalContents(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a journal file, with its length up to the last whole line."""

    header: JournalHeader
    measurements: Mapping[TransferSet, Sequence[Measurement]]
    notices: tuple[str, ...]
    whole_bytes: int


def read_header(path: Path) -> JournalHeader:
    """Read the first line of a journal alone. Raises InputError: it is no header."""
    with reading(path) as file:
        line = file.readline(MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise InputError(str(path), *_HEADLESS)
    return _header(line, f"{path}:1")


def read_journal(path: Path) -> JournalContents:
    """Read a journal; a notice tells of a torn last line.

    Raises InputError: no header, another format version, or a damaged line before the last.
    """
    header: JournalHeader | None = None
    measurements: dict[TransferSet, list[Measurement]] = {}
    whole_bytes = 0
    torn = b""
    with reading(path) as file:
        lines = iter(functools.partial(file.readline, MAX_LINE_BYTES), b"")
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if not line.endswith(b"\n"):
                torn = line
                break
            if header is None:
                header = _header(line, where)
            else:
                measurement = _measurement(line, header, where)
                measurements.setdefault(measurement.transfers, []).append(measurement)
            whole_bytes += len(line)
    if header is None:
        raise InputError(str(path), *_HEADLESS)
    if len(torn) == MAX_LINE_BYTES:
        raise InputError(where, f"is longer than {MAX_LINE_BYTES} bytes", _RIGHT)
    notices = [_torn_notice(path, torn)] if torn else []
    return JournalContents(
        header=header, measurements=measurements, notices=tuple(notices), whole_bytes=whole_bytes
    )


def read_journal_of(header: JournalHeader, path: Path) -> JournalContents:
    """Read a journal that holds for a header. Raises InputError: as `read_journal`, or it does not.

    A journal of several hosts may have further ones.
    """
    contents = read_journal(path)
    if not contents.header.covers(header):
        raise InputError(
            str(path),
            f"belongs to {_describe(contents.header, header)}, not to "
            f"{_describe(header, contents.header)}",
            "use a new journal or output directory",
        )
    return contents


def _header(line: bytes, where: str) -> JournalHeader:
    header = decode_json(line, JournalHeader, where=where)
    check_version(header.format_version, JOURNAL_FORMAT, where)
    return header


def _measurement(line: bytes, header: JournalHeader, where: str) -> Measurement:
    try:
        measurement = decode_json(line, Measurement, where=where)
    except NoRateError as error:
        raise InputError(where, f"has a rate of {error.gbps:g} GB/s", _WITHOUT) from error
    except InputError as error:
        raise InputError(where, error.what, _WITHOUT) from error
    fault = next(faults(measurement), None)
    if fault is None and measurement.simulated != header.simulated:
        fault = "contradicts line 1 on whether it is simulated"
    if fault is None and not measurement.is_together:
        fault = "has flows that did not run together"
    if fault is not None:
        raise InputError(where, fault, _WITHOUT)
    return measurement


def _torn_notice(path: Path, torn: bytes) -> str:
    characters = len(torn.decode(errors="replace"))
    return f"{path}: dropped a torn last line of {characters} characters"


class RecordedSource:
    """A source without its machine: a journal's header, for a bench that answers by the journal."""

    def __init__(self, path: Path, header: JournalHeader) -> None:
        self._path, self.header = path, header
        self.simulated, self.dry_run = header.simulated, header.dry_run

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Raise a MeasurementError: the journal has no answer, and nothing is measured here."""
        machine = self.header.machine
        right = f"the machine of the plan is not here, so measure it on {machine}"
        if self.simulated:
            right = f"ask the model in its place: open_source({machine!r})"
        raise MeasurementError(f"{sets[0]} is not in {self._path}: {right}")


class JournalFile:
    """A journal open for appending, locked until it is closed, with `measurements` of earlier runs.

    With `replace` the journal of another machine, or a damaged file, is put aside as `PATH.old`.
    """

    def __init__(self, path: Path, header: JournalHeader, *, replace: bool = False) -> None:
        self._path = path
        self.notices: tuple[str, ...] = ()
        with explain_errors(path, *_UNWRITABLE):
            if replace and (why := _why_not_resumable(path, header)):
                old = path.replace(path.with_name(path.name + ".old"))
                self.notices = (f"{why}: it is now {old.name}, and all is measured again",)
            self._file = _open(path)
        try:
            self.measurements = self._resume(header)
        except BaseException:
            self.close()
            raise

    def _resume(self, header: JournalHeader) -> Mapping[TransferSet, Sequence[Measurement]]:
        first = b""
        if self._path.is_file():
            with reading(self._path) as file:
                first = file.readline(MAX_LINE_BYTES)
        # A torn header has nothing worth keeping.
        torn = not first.endswith(b"\n") and first.startswith(_HEADER_START[: len(first)])
        if not first or torn:
            if first:
                self.notices = (_torn_notice(self._path, first),)
                self._truncate(0)
            self._write(header)
            return {}
        contents = read_journal_of(header, self._path)
        self.notices = contents.notices
        # A torn last line is cut off.
        self._truncate(contents.whole_bytes)
        return contents.measurements

    def append(self, measurement: Measurement) -> None:
        """Append a measurement, which a bench has checked, and hand it to the system."""
        self._write(measurement)

    def _truncate(self, length: int) -> None:
        with explain_errors(self._path, *_UNWRITABLE):
            self._file.truncate(length)

    def _write(self, record: JournalHeader | Measurement) -> None:
        with explain_errors(self._path, *_UNWRITABLE):
            self._file.write(encode_line(record))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        # A full disk fails the flush inside close as well: that has been reported by then.
        with contextlib.suppress(OSError):
            self._file.close()


def widen_journal(path: Path, header: JournalHeader) -> None:
    """Put a header into a journal's file that holds for the hosts of another header as well.

    Raises:
        InputError: as `JournalHeader.join`, or the file cannot be read or written.
    """
    earlier = read_journal(path).header
    if earlier.covers(header):
        return
    with reading(path) as old, explain_errors(path, *_UNWRITABLE):
        old.readline(MAX_LINE_BYTES)
        with replacement(path, mode=stat.S_IMODE(path.stat().st_mode)) as new:
            new.write(encode_line(earlier.join(header)))
            shutil.copyfileobj(old, new)


def _open(path: Path) -> BufferedWriter:
    if path.is_fifo() or path.is_socket() or path.is_block_device():
        # To open a FIFO would wait for a reader.
        raise InputError(str(path), "is not a regular file", "name a file")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o644), "ab")
    try:
        if path.is_file():
            lock(file.fileno(), path)
    except InputError:
        file.close()
        raise
    return file


def _why_not_resumable(path: Path, header: JournalHeader) -> str:
    if not path.is_file() or path.stat().st_size == 0:
        return ""
    try:
        covers = read_journal(path).header.covers(header)
    except InputError as error:
        return str(error)
    return "" if covers else f"{path} held other measurements"


def _describe(header: JournalHeader, other: JournalHeader) -> str:
    """Return a journal's machine, and what measurements of the other journal are not valid for."""
    kinds = ("measured", "simulated")
    texts, others = (f"{one}; {kinds[one.simulated]}".split("; ") for one in (header, other))
    differing = "; ".join(text for text in texts if text not in others)
    return f"machine {header.machine}" + f" ({differing})" * bool(differing)
