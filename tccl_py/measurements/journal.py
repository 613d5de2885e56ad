"""The journal: an append-only file of measurements that a broken run resumes from.

JSON lines: a header that says whose figures these are, then one measured set a line with its raw
samples. Every line is flushed as it is written; a torn last line is dropped with a notice.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, read_text
from tccl_py.measurements.measurement import BandwidthSource, Measurement
from tccl_py.measurements.memory import RememberingSource

FORMAT_VERSION = 1
MAX_JOURNAL_BYTES = 1 << 30


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
    text = read_text(path, limit=MAX_JOURNAL_BYTES)
    whole, _, torn = text.rpartition("\n")
    lines = whole.split("\n") if whole else []
    if not lines:
        raise InputError(str(path), "has no header line", "name a journal this program wrote")
    header = decode_json(lines[0], JournalHeader, where=f"{path}:1")
    if header.format_version != FORMAT_VERSION:
        raise InputError(
            f"{path}:1",
            f"has format version {header.format_version}",
            f"this program reads version {FORMAT_VERSION}",
        )
    measurements: dict[str, list[Measurement]] = {}
    for number, line in enumerate(lines[1:], start=2):
        measurement = decode_json(line, Measurement, where=f"{path}:{number}")
        measurements.setdefault(measurement.transfers, []).append(measurement)
    notices = (f"{path}: dropped a torn last line of {len(torn)} characters",) if torn else ()
    return JournalContents(
        header=header,
        measurements=measurements,
        notices=notices,
        whole_bytes=len(whole.encode()) + 1,
    )


class JournalledSource(RememberingSource):
    """A remembering source whose memory is a file, so that it outlives the process."""

    def __init__(self, source: BandwidthSource, path: Path, header: JournalHeader) -> None:
        resumed = path.exists() and path.stat().st_size > 0
        self._path = path
        self.notices: tuple[str, ...] = ()
        super().__init__(source, self._resume(header) if resumed else None)
        try:
            self._file = path.open("a" if resumed else "w", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error
        if not resumed:
            self._append(header)

    def _resume(self, header: JournalHeader) -> dict[str, list[Measurement]]:
        contents = read_journal(self._path)
        if contents.header != header:
            raise InputError(
                str(self._path),
                f"belongs to {_described(contents.header)}, not to {_described(header)}",
                "use a new output directory",
            )
        if contents.notices:
            os.truncate(self._path, contents.whole_bytes)
        self.notices = contents.notices
        return contents.measurements

    def _keep(self, measurement: Measurement) -> None:
        self._append(measurement)

    def _append(self, record: JournalHeader | Measurement) -> None:
        try:
            self._file.write(msgspec.json.encode(record).decode() + "\n")
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was measured is already in it."""
        # A full disk fails the flush inside close as well: that has been reported by then.
        with contextlib.suppress(OSError):
            self._file.close()


def _described(header: JournalHeader) -> str:
    kind = "simulated" if header.simulated else "measured"
    return f"machine {header.machine} ({header.identity}, {kind})"
