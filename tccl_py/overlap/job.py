"""Running a job of `tccl overlap`: fresh processes that are all gone when it has ended."""

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

from tccl_py.errors import MeasurementError
from tccl_py.files import decode_json, encode_json, read_text
from tccl_py.overlap.orders import Answer, Order

RANK_PROGRAM = "tccl_py.overlap.rank"
_LOOK_S = 0.02
_GRACE_S = 5.0
"""How long ranks may go on once one has failed: the first to end is often not the cause."""
_TAIL = 400
"""Characters of a failed rank's output that its error tells."""


def run_job(
    order: Order,
    surroundings: Mapping[str, str],
    *,
    timeout: float,
    program: str = RANK_PROGRAM,
) -> tuple[Answer, ...]:
    """Run an order's ranks; their answers, in order.

    Args:
        order: what they do; its `folder` is chosen here.
        surroundings: the whole environment of each.
        timeout: seconds for all of it.
        program: the module that is a rank.

    Raises:
        MeasurementError: a rank failed, or the time was up.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tccl-overlap-") as name:
        folder = Path(name)
        told = msgspec.structs.replace(order, folder=name)
        (folder / "order.json").write_text(encode_json(told))
        with _ranks(folder, order.world, surroundings, program) as ranks:
            _wait(ranks, folder, begun + timeout, timeout)
        return tuple(_answer(folder, rank) for rank in range(order.world))


@contextlib.contextmanager
def _ranks(
    folder: Path, world: int, surroundings: Mapping[str, str], program: str
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """The running ranks, in order; none of them runs after the block, however it ends.

    Each leads a session of its own: Ctrl-C reaches this program alone, which ends them. If this
    program is killed, their standard input ends, and with it they do.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            with (folder / f"output-{rank}").open("wb") as output:
                one = subprocess.Popen(
                    [sys.executable, "-m", program, str(folder / "order.json"), str(rank)],
                    env=dict(surroundings),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            ranks.append(one)
        yield ranks
    finally:
        for one in ranks:
            if one.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)
            one.wait()
            if one.stdin is not None:
                one.stdin.close()


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
        if failed_at is not None and (None not in codes or now > failed_at + _GRACE_S):
            raise _failure(folder, codes)
        if now > deadline:
            slow = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            raise MeasurementError(
                f"rank {slow} of the job: did not end within {timeout:g} s; raise --timeout"
            )
        time.sleep(_LOOK_S)


def _failure(folder: Path, codes: Sequence[int | None]) -> MeasurementError:
    """Why a job failed: of the ranks that did, the first that said something."""
    failed = [rank for rank, code in enumerate(codes) if code]
    told = next((rank for rank in failed if _said(folder, rank)), failed[0])
    code = codes[told] or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    said = _said(folder, told) or "it said nothing"
    return MeasurementError(f"rank {told} of the job: {how}; {said}")


def _said(folder: Path, rank: int) -> str:
    """The last line of a rank's output that names an error, or the last of all."""
    path = folder / f"output-{rank}"
    text = path.read_bytes()[-64_000:].decode(errors="replace") if path.exists() else ""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if "rror" in line]
    last = (causes or lines)[-1:]
    return last[0][-_TAIL:] if last else ""


def _answer(folder: Path, rank: int) -> Answer:
    path = folder / f"answer-{rank}.json"
    if not path.exists():
        said = _said(folder, rank) or "it said nothing"
        raise MeasurementError(f"rank {rank} of the job: ended without an answer; {said}")
    return decode_json(read_text(path), Answer, where=f"answer of rank {rank}")
