"""Running ranks as fresh processes that are all gone when the run has ended, however it ended."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def run_ranks(
    program: str,
    folder: Path,
    ranks: Sequence[int],
    surroundings: Mapping[str, str],
    *,
    timeout: float,
    listener: socket.socket | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    start: Start = interpreter,
) -> None:
    """Run `python -m PROGRAM FOLDER/order.json RANK` for each rank, until all have ended well.

    Args:
        program: the module that is a rank.
        folder: has the order, and gets each rank's output.
        ranks: their numbers.
        surroundings: the whole environment of each.
        timeout: seconds for all of it.
        listener: a socket that the first of them inherits; LISTENER names its descriptor.
        meanwhile: called while they run; what it raises ends them.
        start: how a process is started.

    Raises:
        RanksError: one failed, or the time was up.
    """
    deadline = time.monotonic() + timeout
    with _running(program, folder, ranks, surroundings, listener=listener, start=start) as started:
        _wait(started, folder, deadline, timeout, meanwhile)


def ended_without_answer(folder: Path, rank: int) -> RanksError:
    """What to raise of a rank that ended well and left nothing."""
    return RanksError([rank], "ended without an answer", _said(folder, rank))


@contextlib.contextmanager
def _running(
    program: str,
    folder: Path,
    ranks: Sequence[int],
    surroundings: Mapping[str, str],
    *,
    listener: socket.socket | None,
    start: Start,
) -> Iterator[Mapping[int, Running]]:
    """The running ranks by number; none of them runs after the block, however it ends."""
    started: dict[int, Running] = {}
    try:
        for rank in ranks:
            inherits = {LISTENER: listener} if listener is not None and not started else {}
            started[rank] = start(
                Program(
                    module=program,
                    arguments=(str(order_file(folder)), str(rank)),
                    environment=dict(surroundings),
                    output=str(_output(folder, rank)),
                ),
                inherits,
            )
        yield started
    finally:
        for one in started.values():
            one.end()


def _wait(
    started: Mapping[int, Running],
    folder: Path,
    deadline: float,
    timeout: float,
    meanwhile: Callable[[], None],
) -> None:
    failed_at = None
    while True:
        codes = {rank: one.poll() for rank, one in started.items()}
        if not any(code is None or code for code in codes.values()):
            return
        now = time.monotonic()
        if any(codes.values()) and failed_at is None:
            failed_at = now
        all_ended = None not in codes.values()
        if failed_at is not None and (all_ended or now > failed_at + _GRACE_S):
            raise _failure(folder, codes)
        if now > deadline:
            slow = [rank for rank, code in codes.items() if code is None]
            what = f"did not end within {timeout:g} s"
            raise RanksError(slow, what, _said(folder, slow[0]), late=True)
        meanwhile()
        time.sleep(_LOOK_S)


def _failure(folder: Path, codes: Mapping[int, int | None]) -> RanksError:
    """Of the ranks that failed, the one whose last words name a cause, or the first with any."""
    failed = [rank for rank, code in codes.items() if code]
    told = next(
        (rank for usual in (_causes, list) for rank in failed if usual(_lines(folder, rank))),
        failed[0],
    )
    code = codes[told] or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return RanksError([told], how, _said(folder, told))


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
