"""A host's ranks of one or several jobs: started as fresh processes, awaited, and ended."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.files import decode_json, temporary_folder
from tccl_py.rank_processes.forkserver import ForkedRank, ForkServer, Program
from tccl_py.rank_processes.rank import SPEC_FILE, result_file, slots_file, write_slots

TORCH = ("torch", "torch.distributed", "torch.nn.parallel")
"""Imports that take most of a torch rank's start."""
TRAINING = (*TORCH, "torch._dynamo")
"""The same where ranks train: torch's optimizers and DistributedDataParallel import it."""
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Variables by which a launcher describes another job."""
FOLDER = "{folder}"
"""Placeholder in environment values for the folder that the ranks get."""
LOGS = "log-*"
"""Files in the folder that NCCL_DEBUG_FILE has to name."""
MAX_LOG_CHARACTERS = 48 << 20
"""Of one host: a message between hosts holds no more of NCCL's log."""
_POLL_S = 0.02
_GRACE_S = 3.0
"""Time for other ranks to fail after the first failure, which is often not the cause."""
_LAST_BYTES = 64_000
_TAIL = 600
"""Characters of a failed rank's output in an error."""
_CAUSE = re.compile(r"error|Error|not found|WARN")
_TORCH_WARNING = re.compile(r"\[W\d{4} ")

T = TypeVar("T")


class RanksError(MeasurementError):
    """Ranks failed or ran out of time.

    `what` is the failure, as "ended with code 1", `said` the last line of output with a cause, or
    "", `late` whether the time was up.
    """

    def __init__(self, ranks: Sequence[int], what: str, said: str, *, late: bool = False) -> None:
        super().__init__(f"rank {', '.join(map(str, ranks))}: {what}; {said or 'no output'}")
        self.ranks = tuple(ranks)
        self.what = what
        self.said = said
        self.late = late


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A host's part of a job: `PROGRAM FOLDER/spec.json RANK` for each rank.

    `spec` is the job specification as JSON, `environment` the whole environment of each rank (with
    the placeholder FOLDER), `files` texts to put into the folder by name, `timeout` seconds for
    everything, and `imports` the modules that the fork server imports once.
    """

    program: str
    spec: str
    ranks: tuple[int, ...]
    environment: dict[str, str]
    timeout: float
    files: dict[str, str] = {}
    imports: tuple[str, ...] = ()


class RankOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a host's ranks as JSON, in order, and NCCL's logs from the folder."""

    results: tuple[str, ...]
    log: str


class _Rank(NamedTuple):
    folder: Path
    number: int
    process: ForkedRank


def run_tasks(
    tasks: Sequence[Task],
    *,
    listeners: Sequence[socket.socket | None] = (),
    meanwhile: Callable[[], None] = lambda: None,
    server: ForkServer | None = None,
) -> tuple[RankOutput, ...]:
    """Run a host's ranks of a job, or of several at once; no process or file stays behind.

    Concurrent jobs share a file of time slots (`rank.time_slots`), and the longest timeout holds
    for all. `listeners` are each job's rendezvous socket, for the first rank here. `meanwhile` is
    called while ranks run; an exception from it ends them. Without `server` a temporary one starts
    the ranks. Raises RanksError: a rank failed, or the time was up.
    """
    with ExitStack() as stack:
        whole = stack.enter_context(temporary_folder("tccl-ranks-"))
        forks = stack.enter_context(ForkServer()) if server is None else server
        folders = [whole / f"job-{number}" for number in range(len(tasks))]
        write_slots(slots_file(folders[0]), sum(len(task.ranks) for task in tasks))
        started: list[_Rank] = []
        sockets = listeners or [None] * len(tasks)
        for task, folder, listener in zip(tasks, folders, sockets, strict=True):
            folder.mkdir()
            for name, text in {SPEC_FILE: task.spec, **task.files}.items():
                (folder / name).write_text(text)
            for rank in task.ranks:
                inherited = listener if rank == task.ranks[0] else None
                process = forks.start(_program(task, folder, rank), inherited)
                stack.callback(process.end)
                started.append(_Rank(folder, rank, process))
        _wait(started, max(task.timeout for task in tasks), meanwhile)
        return tuple(
            RankOutput(results=tuple(_result(folder, n) for n in task.ranks), log=nccl_log(folder))
            for task, folder in zip(tasks, folders, strict=True)
        )


def _program(task: Task, folder: Path, rank: int) -> Program:
    return Program(
        module=task.program,
        arguments=(str(folder / SPEC_FILE), str(rank)),
        environment={k: v.replace(FOLDER, str(folder)) for k, v in task.environment.items()},
        output=str(_output(folder, rank)),
        imports=task.imports,
    )


def torch_environment(caller: Mapping[str, str], gpus: Sequence[int] | None) -> dict[str, str]:
    """Return the caller's environment for torch ranks over these GPUs (None: in host memory).

    Variables by which a launcher describes another job are left out.
    """
    found = {
        name: value
        for name, value in caller.items()
        if not (name in _LAUNCHER or name.startswith(("MASTER_", "TORCHELASTIC_")))
    }
    found["PYTHONWARNINGS"] = "ignore"
    if gpus is None:
        # The host's name may resolve to an address of no local interface.
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        # NVML's order, which the indices have.
        found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return found


def decoded(output: RankOutput, ranks: Sequence[int], kind: type[T]) -> tuple[T, ...]:
    """Return the ranks' results as objects. Raises InputError: a result is something else."""
    return tuple(
        decode_json(text, kind, where=f"result of rank {rank}")
        for rank, text in zip(ranks, output.results, strict=True)
    )


def _wait(started: Sequence[_Rank], timeout: float, meanwhile: Callable[[], None]) -> None:
    """Wait until all ranks ended well. Raises RanksError: one failed, or the time was up."""
    deadline = time.monotonic() + timeout
    failed_at = None
    while True:
        codes = [(rank, rank.process.poll()) for rank in started]
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
            folder = running[0].folder
            slow = [rank.number for rank in running if rank.folder == folder]
            what = f"did not end within {timeout:g} s"
            raise RanksError(slow, what, _said(folder, slow[0])[1], late=True)
        meanwhile()
        time.sleep(_POLL_S)


def _failure(failed: Sequence[tuple[_Rank, int]]) -> RanksError:
    """Blame the rank whose last output names a cause, else the first with any output."""
    said = [_said(rank.folder, rank.number) for rank, _ in failed]
    worst = max(range(len(said)), key=lambda at: said[at][0])
    rank, code = failed[worst]
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return RanksError([rank.number], how, said[worst][1])


def _said(folder: Path, rank: int) -> tuple[int, str]:
    """Return a rank's last line with a cause, and 2; else the last line, and 1; or "" and 0."""
    path = _output(folder, rank)
    text = path.read_bytes()[-_LAST_BYTES:].decode(errors="replace") if path.exists() else ""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    causes = [s for s in lines if _CAUSE.search(s) and not _TORCH_WARNING.search(s)]
    return bool(lines) + bool(causes), (causes or lines or [""])[-1][-_TAIL:]


def _output(folder: Path, rank: int) -> Path:
    return folder / f"output-{rank}"


def _result(folder: Path, rank: int) -> str:
    try:
        return result_file(folder, rank).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise RanksError([rank], "ended without a result", _said(folder, rank)[1]) from None


def nccl_log(folder: Path) -> str:
    """Return NCCL's logs in a job's folder."""
    texts = [path.read_bytes().decode(errors="replace") for path in sorted(folder.glob(LOGS))]
    return "\n".join(texts)[:MAX_LOG_CHARACTERS]
