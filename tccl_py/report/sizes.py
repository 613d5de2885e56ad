"""Tuning by message size as text: a row for each size, and the entries of the tuner's table."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from tccl_py.nccl.tuner import TunerEntry
from tccl_py.statistics import Interval
from tccl_py.verify.size_table import SizeRow
from tccl_py.verify.sizes import SizeTuning
from tccl_py.verify.spec import Choice, size_text

ENTRY_COLUMNS = ("GPUs", "collective", "sizes", "algorithm, protocol, channels", "over plan")
COLUMNS = (
    "collective",
    "size",
    "default us",
    "plan us",
    "tuned us",
    "over plan",
    "over default",
    "choice",
)


def choice_text(choice: Choice | TunerEntry) -> str:
    """Return a choice as text.

    >>> choice_text(Choice(algorithm="ring", protocol="ll", channels=8))
    'ring ll 8'
    """
    return f"{choice.algorithm} {choice.protocol} {choice.channels or 'any'}"


def entry_cells(tuning: SizeTuning) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield GPUs, collective, sizes, choice and gains over the plan alone of each entry."""
    gpus = ",".join(map(str, tuning.gpus))
    for entry in tuning.entries:
        inside = [
            row.fresh.middle
            for row in tuning.rows
            if row.kept
            and row.fresh is not None
            and row.row.collective == entry.collective
            and entry.from_bytes <= row.row.bytes <= entry.to_bytes
        ]
        gains = f"{min(inside):.2f} to {max(inside):.2f}" if inside else ""
        ends = f"{size_text(entry.from_bytes)} to {size_text(entry.to_bytes)}"
        yield gpus, entry.collective, ends, choice_text(entry), gains


def size_cells(tuning: SizeTuning) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row, and the choice of a row that the table has an entry for."""
    for row in tuning.rows:
        name = f"{row.row.collective} {row.row.dtype}"
        seconds = [row.seconds.get("default", ()), row.seconds.get(row.plan, ()), row.tuned_seconds]
        times = (f"{median(values) * 1e6:.1f}" if values else "" for values in seconds)
        over_plan = row.fresh if row.kept else None
        ratios = (_ratio(over_plan), _ratio(row.over("default")))
        chosen = choice_text(row.choice) if row.kept and row.choice is not None else ""
        yield name, size_text(row.row.bytes), *times, *ratios, chosen


def tuning_facts(tuning: SizeTuning) -> list[str]:
    """Return the share of right predictions, and the cost."""
    right, asked = tuning.predictions
    return [
        f"{len(tuning.entries)} entries over {tuning.arm}, measured on GPUs "
        f"{','.join(map(str, tuning.gpus))}; other sizes are NCCL's own choice",
        f"predictions of gains found right by {tuning.jobs} fresh jobs: {right} of {asked}",
        f"ranks differ by {tuning.skew:.1%} at most; {tuning.seconds:.0f} s",
    ]


def tuning_json(tuning: SizeTuning) -> dict[str, Any]:
    """Return the part of `--json` on message sizes."""
    right, asked = tuning.predictions
    return {
        "gpus": tuning.gpus,
        "arm": tuning.arm,
        "rows": [_row_json(row) for row in tuning.rows],
        "entries": tuning.entries,
        "predictions": {"right": right, "asked": asked},
        "seconds": tuning.seconds,
    }


def _row_json(row: SizeRow) -> dict[str, Any]:
    us = {name: median(values) * 1e6 for name, values in row.seconds.items() if values}
    return {
        "collective": row.row.collective,
        "dtype": row.row.dtype,
        "bytes": row.row.bytes,
        "us": us,
        "choice": row.choice,
        "swept": row.swept,
        "fresh": row.fresh,
        "over_default": row.over("default"),
        "predicted_gain": row.gains,
        "kept": row.kept,
    }


def _ratio(found: Interval | None) -> str:
    return "" if found is None else f"{found.middle:.3f} ({found.low:.3f} to {found.high:.3f})"
