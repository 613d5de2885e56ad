"""Where a job's files lie in its folder: the ranks' order, their meeting, their answers, logs."""

from __future__ import annotations

from pathlib import Path

LOGS = "log-*"
"""What NCCL_DEBUG_FILE has to name in the folder."""


def order_file(folder: Path) -> Path:
    """What all ranks are told."""
    return folder / "order.json"


def meeting_file(folder: Path) -> Path:
    """Where ranks of one host meet."""
    return folder / "meeting"


def turns_file(folder: Path) -> Path:
    """How many turns each rank has had, of all jobs at once: beside their folders."""
    return folder.parent / "turns"


def answer_file(folder: Path, rank: int) -> Path:
    """What a rank found."""
    return folder / f"answer-{rank}.json"
