"""What a check measured, kept as a line of `checks.jsonl`; the plan's journal stays as it is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import encode_line, lock
from tccl_py.health.drift import Drift
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
            _append(descriptor, encode_line(record))
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


# A check as text for Prometheus: the node exporter's textfile collector takes it.


Labels = Mapping[str, str]


def prometheus_text(drift: Drift, *, machine: str, simulated: bool, now: float) -> str:
    """All figures of a check; `now` is when it ended, in seconds since 1970."""
    own = {"machine": machine, "simulated": str(simulated).lower()}
    changed = {row.transfers for row in drift.changes} | drift.lost.keys()
    sets = {text: {**own, "set": str(text)} for text in (*drift.sets, *drift.lost)}
    ratios = [(sets[text], row.ratio) for text, row in drift.sets.items()]
    return "".join(
        (
            _metric("drifted", "Whether rates differ from the plan's (1) or not (0).",
                    [(own, float(drift.drifted))]),
            _metric("sets_compared", "Transfer sets that were compared.",
                    [(own, float(len(drift.sets)))]),
            _metric("sets_lost", "Transfer sets that cannot be measured any more.",
                    [(own, float(len(drift.lost)))]),
            _metric("false_alarm_rate", "Chance of an alarm on an unchanged machine, at most.",
                    [(own, drift.false_alarm_rate)]),
            _metric("duration_seconds", "How long the check took.", [(own, drift.seconds)]),
            _metric("timestamp_seconds", "When the check ended, in seconds since 1970.",
                    [(own, now)]),
            _metric("set_rate_ratio", "Rate of the flow that fell most, now over then.", ratios),
            _metric("set_changed", "Whether the set changed beyond noise (1) or not (0).",
                    [(labels, float(text in changed)) for text, labels in sets.items()]),
        )
    )  # fmt: skip


def _metric(name: str, words: str, values: Iterable[tuple[Labels, float]]) -> str:
    lines = [f"tccl_check_{name}{_labels(labels)} {value:.10g}" for labels, value in values]
    if not lines:
        return ""
    head = f"# HELP tccl_check_{name} {words}\n# TYPE tccl_check_{name} gauge\n"
    return head + "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    """Labels with what the format has a meaning for escaped, and nothing a terminal acts on.

    >>> _labels({"machine": "box", "set": "G0->G0->G1"})
    '{machine="box",set="G0->G0->G1"}'
    """
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(one if one.isprintable() else "?" for one in plain)
