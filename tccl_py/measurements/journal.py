"""The journal: an append-only file of measurements that a broken run resumes from.

JSON lines: a header that says whose figures these are, then one measured set a line with its raw
samples. Every line is flushed as it is written; a torn last line is dropped with a notice, and any
other damage is refused by file and line.
"""

from __future__ import annotations

import contextlib
from io import BufferedWriter
from pathlib import Path

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.files import decode_json, lock, read_bytes
from tccl_py.measurements.measurement import BandwidthSource, Measurement, faults
from tccl_py.measurements.memory import RememberingSource

FORMAT_VERSION = 1
MAX_JOURNAL_BYTES = 1 << 30
_HEADER_START = b'{"machine":'
_RIGHT = "give a file this program wrote"


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose measurements a journal holds; a journal of another is refused.

    `identity` distinguishes what may not be mixed: GPU UUIDs, driver, model revision, noise seed.
    """

    machine: str
    identity: str
    simulated: bool
    format_version: int = FORMAT_VERSION


class JournalContents(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal file holds; `notices` are sentences for the user.

    A set may have been measured several times; its list keeps the order.
    `whole_bytes` is the length of the file up to its last whole line.
    """

    header: JournalHeader
    measurements: dict[str, list[Measurement]]
    notices: tuple[str, ...]
    whole_bytes: int


def read_journal(path: Path) -> JournalContents:
    """Read a journal; a last line without its newline is dropped with a notice.

    Raises:
        InputError: no header, another format version, or a damaged line before the last.
    """
    return _contents(path, read_bytes(path, limit=MAX_JOURNAL_BYTES))


def _contents(path: Path, data: bytes) -> JournalContents:
    # What is torn may end inside a character, so it is cut off first.
    whole, newline, torn = data.rpartition(b"\n")
    if not newline:
        raise InputError(str(path), "has no header line", "name a journal this program wrote")
    first, *lines = _text(path, whole).split("\n")
    header = decode_json(first, JournalHeader, where=f"{path}:1")
    if header.format_version != FORMAT_VERSION:
        raise InputError(
            f"{path}:1",
            f"has format version {header.format_version}",
            f"this program reads version {FORMAT_VERSION}",
        )
    measurements: dict[str, list[Measurement]] = {}
    for number, line in enumerate(lines, start=2):
        measurement = _measurement(line, header, where=f"{path}:{number}")
        measurements.setdefault(measurement.transfers, []).append(measurement)
    return JournalContents(
        header=header,
        measurements=measurements,
        notices=(_torn_notice(path, torn),) if torn else (),
        whole_bytes=len(whole) + 1,
    )


def _text(path: Path, whole: bytes) -> str:
    try:
        return whole.decode()
    except UnicodeDecodeError as error:
        line = whole.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}", "is not UTF-8 text", _RIGHT) from error


def _measurement(line: str, header: JournalHeader, *, where: str) -> Measurement:
    measurement = decode_json(line, Measurement, where=where)
    fault = next(faults(measurement), None)
    if fault is not None:
        raise InputError(where, fault, _RIGHT)
    if measurement.simulated != header.simulated:
        raise InputError(where, "says otherwise than line 1 whether it is simulated", _RIGHT)
    return measurement


def _torn_notice(path: Path, torn: bytes) -> str:
    characters = len(torn.decode(errors="replace"))
    return f"{path}: dropped a torn last line of {characters} characters"


class JournalledSource(RememberingSource):
    """A remembering source whose memory is a file, so that it outlives the process.

    Until it is closed no other run gets the file.

    Raises:
        InputError: the file is in use, damaged, of another machine, or cannot be written.
    """

    def __init__(self, source: BandwidthSource, path: Path, header: JournalHeader) -> None:
        self._path = path
        self.notices: tuple[str, ...] = ()
        try:
            self._file = _opened(path)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            super().__init__(source, self._resume(header))
        except BaseException:
            self.close()
            raise

    def _resume(self, header: JournalHeader) -> dict[str, list[Measurement]]:
        data = read_bytes(self._path, limit=MAX_JOURNAL_BYTES) if self._path.is_file() else b""
        if not data or _is_torn_header(data):
            if data:
                self._drop(_torn_notice(self._path, data), keep=0)
            self._append(header)
            return {}
        contents = _contents(self._path, data)
        if contents.header != header:
            raise InputError(
                str(self._path),
                f"belongs to {_described(contents.header)}, not to {_described(header)}",
                "use a new journal or output directory",
            )
        for notice in contents.notices:
            self._drop(notice, keep=contents.whole_bytes)
        return contents.measurements

    def _drop(self, notice: str, *, keep: int) -> None:
        try:
            self._file.truncate(keep)
        except OSError as error:
            raise self._unwritable(error) from error
        self.notices = (notice,)

    def _keep(self, measurement: Measurement) -> None:
        # What could not be read back must not get into the file.
        fault = next(faults(measurement), None)
        if fault is not None:
            raise MeasurementError(f"{measurement.transfers}: its measurement {fault}")
        self._append(measurement)

    def _append(self, record: JournalHeader | Measurement) -> None:
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> InputError:
        reason = error.strerror or str(error)
        return InputError(
            str(self._path), f"cannot be written ({reason})", "choose a writable place with space"
        )

    def __enter__(self) -> JournalledSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was measured is already in it."""
        # A full disk fails the flush inside close as well: that has been reported by then.
        with contextlib.suppress(OSError):
            self._file.close()


def _opened(path: Path) -> BufferedWriter:
    if path.is_fifo() or path.is_socket() or path.is_block_device():
        # To open a FIFO would wait for a reader.
        raise InputError(str(path), "is not a regular file", "name a file")
    file = path.open("ab")
    try:
        if path.is_file():
            lock(file.fileno(), path)
    except InputError:
        file.close()
        raise
    return file


def _is_torn_header(data: bytes) -> bool:
    """Whether a file holds the beginning of a header and no whole line: nothing worth keeping."""
    return b"\n" not in data and data.startswith(_HEADER_START[: len(data)])


def _described(header: JournalHeader) -> str:
    kind = "simulated" if header.simulated else "measured"
    return f"machine {header.machine} ({header.identity}, {kind})"
