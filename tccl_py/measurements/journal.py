"""The journal: an append-only file of measurements that a broken run resumes from.

JSON lines: a header that says whose figures these are, then one measured set a line with its raw
samples. Every line is flushed as it is written; a torn last line is dropped with a notice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, read_text
from tccl_py.measurements.measurement import BandwidthSource, Measurement
from tccl_py.transfers.transfer import TransferSet

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


class JournalledSource:
    """A source that answers from its journal first and writes down what it had to measure."""

    def __init__(self, source: BandwidthSource, path: Path, header: JournalHeader) -> None:
        self._source = source
        self._known: dict[str, list[Measurement]] = {}
        self.notices: tuple[str, ...] = ()
        self.answered_from_journal = 0
        if path.exists() and path.stat().st_size:
            self._resume(path, header)
            self._file = path.open("a", encoding="utf-8")
        else:
            self._file = path.open("w", encoding="utf-8")
            self._append(header)

    def _resume(self, path: Path, header: JournalHeader) -> None:
        contents = read_journal(path)
        if contents.header != header:
            was = contents.header
            raise InputError(
                str(path),
                f"belongs to machine {was.machine} ({was.identity}, "
                f"{'simulated' if was.simulated else 'measured'}), not to {header.machine} "
                f"({header.identity}, {'simulated' if header.simulated else 'measured'})",
                "use a new output directory",
            )
        if contents.notices:
            os.truncate(path, contents.whole_bytes)
        self._known = contents.measurements
        self.notices = contents.notices

    def _append(self, record: JournalHeader | Measurement) -> None:
        self._file.write(msgspec.json.encode(record).decode() + "\n")
        self._file.flush()

    @property
    def simulated(self) -> bool:
        """As the source behind the journal."""
        return self._source.simulated

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Answer each set from the journal or, once, by the source.

        A set that is listed twice in one call is wanted twice: it gets two measurements.

        Raises:
            MeasurementError: as the source behind it.
        """
        answers, wanted = [], Counter[str]()
        for one in sets:
            key = str(one)
            known = self._known.setdefault(key, [])
            if wanted[key] < len(known):
                self.answered_from_journal += 1
            else:
                (measurement,) = self._source.measure([one])
                known.append(measurement)
                self._append(measurement)
            answers.append(known[wanted[key]])
            wanted[key] += 1
        return answers

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
        self._file.close()
