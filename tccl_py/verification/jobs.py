"""Running one job: fresh processes, one a rank, that are all gone when it has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tccl_py.errors import TcclError
from tccl_py.files import decode_json, encode_json, read_text
from tccl_py.runtimes.nccl.log import MAX_LOG_CHARACTERS
from tccl_py.verification.orders import Answer, Order

RANK_PROGRAM = "tccl_py.verification.rank"
DEFAULT_TIMEOUT = 180.0
_LOOK_S = 0.02
_GRACE_S = 5.0
"""How long ranks may go on once one has failed: the first to end is often not the cause."""
_TAIL = 600
"""Characters of a failed rank's output that its error tells."""
_CAUSE = ("error", "Error", "not found", "WARN")


class JobError(TcclError):
    """A job did not end as it should; says which rank, and what it said last."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's ranks answered, in order, what NCCL wrote, and how long it took."""

    answers: tuple[Answer, ...]
    log: str
    seconds: float


def run_job(
    order: Order,
    surroundings: Mapping[str, str],
    *,
    timeout: float = DEFAULT_TIMEOUT,
    program: str = RANK_PROGRAM,
) -> Outcome:
    """Run an order's ranks; `folder` of the order is chosen here.

    Args:
        order: what the ranks do.
        surroundings: the whole environment of each.
        timeout: seconds for all of it.
        program: the module that is a rank.

    Raises:
        JobError: a rank failed, or the time was up.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tccl-verify-") as name:
        folder = Path(name)
        told = msgspec.structs.replace(order, folder=name)
        (folder / "order.json").write_text(encode_json(told))
        environment = {**surroundings, "NCCL_DEBUG_FILE": f"{name}/nccl.%p"}
        with _ranks(folder, order.world, environment, program) as ranks:
            _wait(ranks, folder, begun + timeout, timeout)
        answers = tuple(_answer(folder, rank) for rank in range(order.world))
        return Outcome(answers=answers, log=_log(folder), seconds=time.monotonic() - begun)


@contextlib.contextmanager
def _ranks(
    folder: Path, world: int, environment: Mapping[str, str], program: str
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """The running ranks, in order; none of them runs after the block, however it ends.

    Each is the leader of its own session: Ctrl-C reaches this program alone, which ends them. If
    this program is killed, their standard input ends, and with it they do.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            with (folder / f"output-{rank}").open("wb") as output:
                one = subprocess.Popen(
                    [sys.executable, "-m", program, str(folder / "order.json"), str(rank)],
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            ranks.append(one)
        yield ranks
    finally:
        for one in ranks:
            _end(one)


def _end(rank: subprocess.Popen[bytes]) -> None:
    """Kill a rank and whatever it started; it holds nothing that it would have to put away."""
    if rank.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()
    if rank.stdin is not None:
        rank.stdin.close()


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], folder: Path, deadline: float, timeout: float
) -> None:
    failed_at = None
    while True:
        codes = [one.poll() for one in ranks]
        if all(code == 0 for code in codes):
            return
        now = time.monotonic()
        if any(codes) and failed_at is None:
            failed_at = now
        all_ended = None not in codes
        if failed_at is not None and (all_ended or now > failed_at + _GRACE_S):
            raise JobError(_failure(folder, codes))
        if now > deadline:
            slow = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            raise JobError(f"rank(s) {slow} did not end within {timeout:g} s{_said(folder, 0)}")
        time.sleep(_LOOK_S)


def _failure(folder: Path, codes: Sequence[int | None]) -> str:
    """Why a job failed: of the ranks that did, the one whose last words name a cause."""
    failed = [rank for rank, code in enumerate(codes) if code]
    told = next((rank for rank in failed if _causes(_lines(folder, rank))), failed[0])
    code = codes[told] or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"rank {told} {how}{_said(folder, told)}"


def _said(folder: Path, rank: int) -> str:
    """The last line of a rank's output that looks like a cause, as the end of a sentence."""
    lines = _lines(folder, rank)
    last = (_causes(lines) or lines)[-1:]
    return f": {last[0][-_TAIL:]}" if last else ""


def _lines(folder: Path, rank: int) -> list[str]:
    path = folder / f"output-{rank}"
    text = path.read_bytes()[-64_000:].decode(errors="replace") if path.exists() else ""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _causes(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if any(word in line for word in _CAUSE)]


def _answer(folder: Path, rank: int) -> Answer:
    path = folder / f"answer-{rank}.json"
    if not path.exists():
        raise JobError(f"rank {rank} ended without an answer{_said(folder, rank)}")
    return decode_json(read_text(path), Answer, where=f"answer of rank {rank}")


def _log(folder: Path) -> str:
    texts = [path.read_bytes().decode(errors="replace") for path in sorted(folder.glob("nccl.*"))]
    return "\n".join(texts)[:MAX_LOG_CHARACTERS]
