"""Running ranks as fresh processes that are all gone when the run has ended, however it ended."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tccl_py.errors import TcclError
from tccl_py.rank_processes.nursery import Program
from tccl_py.rank_processes.places import order_file
from tccl_py.rank_processes.starting import Running, Start, interpreter

_LOOK_S = 0.02
_GRACE_S = 5.0
"""How long ranks may go on once one has failed: the first to end is often not the cause."""
_LAST_BYTES = 64_000
_TAIL = 600
"""Characters of a failed rank's output that are told."""
_CAUSE = ("error", "Error", "not found", "WARN")

LISTENER = "TCCL_MEETING_DESCRIPTOR"
"""The variable that tells a rank the descriptor of the socket where all ranks meet."""


class RanksError(TcclError):
    """Ranks did not end as they should; who runs them says so in a sentence of its own.

    Args:
        ranks: which ones.
        what: they did: "ended with code 1".
        said: the last line of their output that looks like a cause, or "".
        late: whether they were ended because the time was up.
    """

    def __init__(self, ranks: Sequence[int], what: str, said: str, *, late: bool = False) -> None:
        super().__init__(f"rank {', '.join(map(str, ranks))}: {what}; {said or 'it said nothing'}")
        self.ranks = tuple(ranks)
        self.what = what
        self.said = said
        self.late = late


@dataclass(frozen=True)
class RankGroup:
    """A job's ranks on this host: `PROGRAM FOLDER/order.json RANK` for each number.

    The folder has the order, and gets each rank's output. `surroundings` are the whole environment
    of each; the first inherits `listener`, whose descriptor LISTENER names.
    """

    program: str
    folder: Path
    ranks: tuple[int, ...]
    surroundings: Mapping[str, str]
    listener: socket.socket | None = None


_Rank = tuple[Path, int]
"""The folder of its job, and its number."""


def run_ranks(
    groups: Sequence[RankGroup],
    *,
    timeout: float,
    meanwhile: Callable[[], None] = lambda: None,
    start: Start = interpreter,
) -> None:
    """Run the ranks of one job, or of several at once, until all have ended well.

    Args:
        groups: one for each job.
        timeout: seconds for all of it.
        meanwhile: called while they run; what it raises ends them.
        start: how a process is started.

    Raises:
        RanksError: one failed, or the time was up; all are ended then.
    """
    deadline = time.monotonic() + timeout
    with _running(groups, start) as started:
        _wait(started, deadline, timeout, meanwhile)


def ended_without_answer(folder: Path, rank: int) -> RanksError:
    """What to raise of a rank that ended well and left nothing."""
    return RanksError([rank], "ended without an answer", _said(folder, rank))


@contextlib.contextmanager
def _running(
    groups: Sequence[RankGroup], start: Start
) -> Iterator[Sequence[tuple[_Rank, Running]]]:
    """The running ranks; none of them runs after the block, however it ends."""
    started: list[tuple[_Rank, Running]] = []
    try:
        for group in groups:
            for rank in group.ranks:
                program = Program(
                    module=group.program,
                    arguments=(str(order_file(group.folder)), str(rank)),
                    environment=dict(group.surroundings),
                    output=str(_output(group.folder, rank)),
                )
                inherits = {}
                if group.listener is not None and rank == group.ranks[0]:
                    inherits[LISTENER] = group.listener
                started.append(((group.folder, rank), start(program, inherits)))
        yield started
    finally:
        for _, one in started:
            one.end()


def _wait(
    started: Sequence[tuple[_Rank, Running]],
    deadline: float,
    timeout: float,
    meanwhile: Callable[[], None],
) -> None:
    failed_at = None
    while True:
        codes = [(rank, one.poll()) for rank, one in started]
        failed = [(rank, code) for rank, code in codes if code]
        running = [rank for rank, code in codes if code is None]
        if not failed and not running:
            return
        now = time.monotonic()
        if failed and failed_at is None:
            failed_at = now
        if failed_at is not None and (not running or now > failed_at + _GRACE_S):
            raise _failure(failed)
        if now > deadline:
            folder = running[0][0]
            slow = [rank for one, rank in running if one == folder]
            what = f"did not end within {timeout:g} s"
            raise RanksError(slow, what, _said(folder, slow[0]), late=True)
        meanwhile()
        time.sleep(_LOOK_S)


def _failure(failed: Sequence[tuple[_Rank, int]]) -> RanksError:
    """Of the ranks that failed, the one whose last words name a cause, or the first with any."""
    (folder, rank), code = next(
        (one for usual in (_causes, list) for one in failed if usual(_lines(*one[0]))),
        failed[0],
    )
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return RanksError([rank], how, _said(folder, rank))


def _said(folder: Path, rank: int) -> str:
    """The last line of a rank's output that looks like a cause, or the last of all."""
    lines = _lines(folder, rank)
    last = (_causes(lines) or lines)[-1:]
    return last[0][-_TAIL:] if last else ""


def _lines(folder: Path, rank: int) -> list[str]:
    path = _output(folder, rank)
    text = path.read_bytes()[-_LAST_BYTES:].decode(errors="replace") if path.exists() else ""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def _causes(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if any(word in line for word in _CAUSE)]


def _output(folder: Path, rank: int) -> Path:
    return folder / f"output-{rank}"
