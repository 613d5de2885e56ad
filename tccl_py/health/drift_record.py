"""Forms of a check: a line of `checks.jsonl`, and metrics for Prometheus."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import encode_line, lock
from tccl_py.health.drift import Drift
from tccl_py.model.measurement import Measurement
from tccl_py.plan.staging import refused
from tccl_py.sources.journal import JournalHeader

FILE = "checks.jsonl"
FORMAT_VERSION = 1


class CheckRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A check with its measurements; `ended` in seconds since 1970, `header` names the machine."""

    ended: float
    header: JournalHeader
    drifted: bool
    measurements: tuple[Measurement, ...]
    format_version: int = FORMAT_VERSION


def keep_check(drift: Drift, directory: Path, header: JournalHeader, *, ended: float) -> Path:
    """Append a check to a plan's directory, whole or not at all; return the file."""
    record = CheckRecord(
        ended=ended, header=header, drifted=drift.drifted, measurements=drift.measurements
    )
    path = directory / FILE
    with refused(path, "cannot be written", "choose a writable place with free space"):
        if path.exists() and not path.is_file():
            raise InputError(str(path), "is not a regular file", "move it away")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            lock(descriptor, path)
            _append(descriptor, encode_line(record))
        finally:
            os.close(descriptor)
    return path


def _append(descriptor: int, data: bytes) -> None:
    before = os.fstat(descriptor).st_size
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, before)
        raise


def prometheus_text(drift: Drift, *, machine: str, simulated: bool, now: float) -> str:
    """Return a check in Prometheus' text format; `now` is its end, in seconds since 1970.

    The node exporter's textfile collector takes it. Source of the format:
    prometheus.io/docs/instrumenting/exposition_formats.
    """
    own = {"machine": machine, "simulated": str(simulated).lower()}
    changed = {row.transfers for row in drift.changes} | drift.lost.keys()
    sets = {one: {**own, "set": str(one)} for one in (*drift.sets, *drift.lost)}
    totals = (
        ("drifted", "Whether rates differ from the plan's (1) or not (0).", drift.drifted),
        ("sets_compared", "Transfer sets that were compared.", len(drift.sets)),
        ("sets_lost", "Transfer sets that cannot be measured any more.", len(drift.lost)),
        ("false_alarm_rate", "Chance of an alarm on an unchanged machine, at most.",
         drift.false_alarm_rate),
        ("duration_seconds", "Duration of the check.", drift.seconds),
        ("timestamp_seconds", "End of the check, in seconds since 1970.", now),
    )  # fmt: skip
    ratios = [(sets[one], row.ratio) for one, row in drift.sets.items()]
    flags = [(labels, one in changed) for one, labels in sets.items()]
    return "".join(
        (
            *(_metric(name, text, [(own, value)]) for name, text, value in totals),
            _metric("set_rate_ratio", "Rate of the flow that fell most, now over then.", ratios),
            _metric("set_changed", "Whether the set changed beyond noise (1) or not (0).", flags),
        )
    )


def _metric(name: str, words: str, values: Iterable[tuple[Mapping[str, str], float]]) -> str:
    lines = [f"tccl_check_{name}{_labels(labels)} {value:.10g}" for labels, value in values]
    if not lines:
        return ""
    head = f"# HELP tccl_check_{name} {words}\n# TYPE tccl_check_{name} gauge\n"
    return head + "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(char if char.isprintable() else "?" for char in plain)
