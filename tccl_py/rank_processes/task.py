"""A host's ranks of one job as data: what they run, and what they left."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from tccl_py.files import decode_json
from tccl_py.rank_processes.places import LOGS, answer_file, order_file, turns_file
from tccl_py.rank_processes.run import RankGroup, RanksError, ended_without_answer, run_ranks
from tccl_py.rank_processes.starting import Start, interpreter
from tccl_py.rank_processes.turns import write_turns
from tccl_py.temporary import temporary_folder

FOLDER = "{folder}"
"""Stands in the environment's values for the folder that the ranks get."""
MAX_LOG_CHARACTERS = 48 << 20
"""Of one host: more of NCCL's log would not go through a message."""

T = TypeVar("T")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a host's ranks run.

    `program` is the module that is a rank, `order` what all are told, as JSON, `ranks` their
    numbers, `surroundings` the whole environment of each, in which FOLDER stands for a folder of
    their own, and `files` are texts in that by name. All of it takes `timeout` seconds at most.
    `imports` are modules that take a rank long to import, for who runs many such jobs.
    """

    program: str
    order: str
    ranks: tuple[int, ...]
    surroundings: dict[str, str]
    timeout: float
    files: dict[str, str] = {}
    imports: tuple[str, ...] = ()


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks left: their answers as JSON, in order, and what NCCL logged in FOLDER."""

    answers: tuple[str, ...]
    log: str


def run_tasks(
    tasks: Sequence[Task],
    *,
    listeners: Sequence[socket.socket | None] = (),
    meanwhile: Callable[[], None] = lambda: None,
    start: Start = interpreter,
) -> tuple[Left, ...]:
    """Run a host's ranks of one job, or of several at once, to their end.

    Nothing of them is left, however that is. Jobs at once find in a file beside their folders whose
    turn it is; see `turns.py`.

    Args:
        tasks: what they run, one of each job; the longest timeout holds for all.
        listeners: for each job where all its ranks meet; the first of these gets it.
        meanwhile: called while they run; what it raises ends them.
        start: how a process is started; by default an interpreter of its own.

    Raises:
        RanksError: one failed, or the time was up.
    """
    with temporary_folder("tccl-ranks-") as whole:
        folders = [whole / f"job-{number}" for number in range(len(tasks))]
        write_turns(turns_file(folders[0]), sum(len(task.ranks) for task in tasks))
        sockets = listeners or [None] * len(tasks)
        groups = [
            _group(task, folder, listener)
            for task, folder, listener in zip(tasks, folders, sockets, strict=True)
        ]
        timeout = max(task.timeout for task in tasks)
        run_ranks(groups, timeout=timeout, meanwhile=meanwhile, start=start)
        return tuple(
            Left(
                answers=tuple(_answer(group.folder, rank) for rank in group.ranks),
                log=_log(group.folder),
            )
            for group in groups
        )


def _group(task: Task, folder: Path, listener: socket.socket | None) -> RankGroup:
    """A task's ranks, with what is written for them in their folder."""
    folder.mkdir()
    order_file(folder).write_text(task.order)
    for file, text in task.files.items():
        (folder / file).write_text(text)
    surroundings = {
        variable: text.replace(FOLDER, str(folder)) for variable, text in task.surroundings.items()
    }
    return RankGroup(task.program, folder, task.ranks, surroundings, listener)


def decoded(left: Left, ranks: tuple[int, ...], kind: type[T]) -> tuple[T, ...]:
    """The answers of ranks as what they are.

    Raises:
        InputError: one is something else.
    """
    return tuple(
        decode_json(text, kind, where=f"answer of rank {rank}")
        for rank, text in zip(ranks, left.answers, strict=True)
    )


def _answer(folder: Path, rank: int) -> str:
    try:
        return answer_file(folder, rank).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ended_without_answer(folder, rank) from None


def _log(folder: Path) -> str:
    texts = [path.read_bytes().decode(errors="replace") for path in sorted(folder.glob(LOGS))]
    return "\n".join(texts)[:MAX_LOG_CHARACTERS]


__all__ = ["FOLDER", "Left", "RanksError", "Task", "decoded", "run_tasks"]
