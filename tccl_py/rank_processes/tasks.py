"""A host's ranks of one or several jobs: started as fresh processes, awaited, and ended."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from tccl_py.children import child_environment
from tccl_py.errors import MeasurementError
from tccl_py.files import decode_json, temporary_folder
from tccl_py.rank_processes.forkserver import ForkServer, Rank
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
_LAST_BYTES = 64_000
_TAIL = 600
"""Characters of a failed rank's output in an error."""
_CAUSE = re.compile(r"error|Error|not found|WARN")
_NO_CAUSE = re.compile(r"\[W\d{4} |CUDA kernel errors might be ")
"""torch's warnings, and what it adds to an error of CUDA."""
_NCCL_WORDS = re.compile(r"\s*\nLast error:\s*")
"""Between NCCL's error in torch's message and its words, which may be missing."""

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
    """A host's part of a job: `PROGRAM FOLDER/spec.json RANK` for each rank."""

    program: str
    spec: str
    """The job specification as JSON."""
    ranks: tuple[int, ...]
    environment: dict[str, str]
    """The whole environment of each rank, with the placeholder FOLDER."""
    timeout: float
    """Seconds for everything."""
    files: dict[str, str] = {}
    """Texts to put into the folder, by name."""
    imports: tuple[str, ...] = ()
    """The modules that the fork server imports once (`ForkServer.run`)."""


class RankOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a host's ranks as JSON, in order, and NCCL's logs from the folder."""

    results: tuple[str, ...]
    log: str


def run_tasks(
    tasks: Sequence[Task],
    *,
    listeners: Sequence[socket.socket] = (),
    meanwhile: Callable[[], None] = lambda: None,
    server: ForkServer | None = None,
) -> tuple[RankOutput, ...]:
    """Run a host's ranks of a job, or of several at once; no process or file stays behind.

    Concurrent jobs share a file of time slots (`rank.time_slots`), and the longest timeout holds
    for all. `listeners` are each job's rendezvous socket, for the first rank here. `meanwhile` is
    called while ranks run; an exception from it ends them. Without `server` a temporary one starts
    the ranks. Raises RanksError: a rank failed, or the time was up.
    """
    with _ended_ranks(tasks, listeners, meanwhile, server, together=True) as ended:
        _check_codes([rank for ranks in ended for rank in ranks], max(t.timeout for t in tasks))
        return tuple(map(_output, ended))


def run_each(tasks: Sequence[Task]) -> tuple[RankOutput | RanksError, ...]:
    """Run a host's ranks of several jobs at once, of which each may fail by itself."""
    outputs: list[RankOutput | RanksError] = []
    with _ended_ranks(tasks, (), lambda: None, None, together=False) as ended:
        for ranks in ended:
            try:
                _check_codes(ranks, max(task.timeout for task in tasks))
                outputs.append(_output(ranks))
            except RanksError as error:
                outputs.append(error)
    return tuple(outputs)


_Ended = tuple[Rank, int | None]
"""A rank and its exit code; None of one that had to be ended."""


@contextmanager
def _ended_ranks(
    tasks: Sequence[Task],
    listeners: Sequence[socket.socket],
    meanwhile: Callable[[], None],
    server: ForkServer | None,
    *,
    together: bool,
) -> Iterator[list[list[_Ended]]]:
    """Run all ranks to their end; their folders last as long as the block."""
    timeout = max(task.timeout for task in tasks)
    with ExitStack() as stack:
        parent = stack.enter_context(temporary_folder("tccl-ranks-"))
        forks = stack.enter_context(ForkServer()) if server is None else server
        folders = [parent / f"job-{number}" for number in range(len(tasks))]
        write_slots(slots_file(folders[0]), sum(len(task.ranks) for task in tasks))
        ranks: list[Rank] = []
        for at, (task, folder) in enumerate(zip(tasks, folders, strict=True)):
            folder.mkdir()
            for name, text in {SPEC_FILE: task.spec, **task.files}.items():
                (folder / name).write_text(text)
            inside = {k: v.replace(FOLDER, str(folder)) for k, v in task.environment.items()}
            ranks += [
                Rank(
                    program=task.program,
                    number=number,
                    folder=str(folder),
                    environment=child_environment(inside),
                    listener=at if listeners and number == task.ranks[0] else None,
                )
                for number in task.ranks
            ]
        codes = forks.run(
            ranks,
            parent / "ranks.json",
            timeout=timeout,
            imports=tasks[0].imports,
            listeners=listeners,
            meanwhile=meanwhile,
            together=together,
        )
        ended = iter(zip(ranks, codes, strict=True))
        yield [list(islice(ended, len(task.ranks))) for task in tasks]


def _output(ended: Sequence[_Ended]) -> RankOutput:
    ranks = [rank for rank, _ in ended]
    log = nccl_log(Path(ranks[0].folder)) if ranks else ""
    return RankOutput(results=tuple(map(_result, ranks)), log=log)


def torch_environment(caller: Mapping[str, str], gpus: Sequence[int] | None) -> dict[str, str]:
    """Return the caller's environment for torch ranks over GPUs, without another launcher's."""
    variables = {
        name: value
        for name, value in caller.items()
        if not (name in _LAUNCHER or name.startswith(("MASTER_", "TORCHELASTIC_")))
    }
    variables["PYTHONWARNINGS"] = "ignore"
    if gpus is None:
        # The host's name may resolve to an address of no local interface.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # As torchrun: ranks share the cores, and idle threads of each would keep them busy.
        variables.setdefault("OMP_NUM_THREADS", "1")
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        # NVML's order, which the indices have.
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return variables


def decode_results(output: RankOutput, ranks: Sequence[int], kind: type[T]) -> tuple[T, ...]:
    """Return the ranks' results as objects. Raises InputError: a result is something else."""
    return tuple(
        decode_json(text, kind, where=f"result of rank {rank}")
        for rank, text in zip(ranks, output.results, strict=True)
    )


def _check_codes(ended: Sequence[_Ended], timeout: float) -> None:
    """Raise RanksError if a rank failed, or if the time was up."""
    if failed := [(rank, code) for rank, code in ended if code]:
        # Blame the rank whose last output names a cause, else the first with any output.
        rank, code = max(failed, key=lambda failure: _last_line(failure[0])[0])
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise RanksError([rank.number], how, _last_line(rank)[1])
    if late := [rank for rank, code in ended if code is None]:
        slow = [rank.number for rank in late if rank.folder == late[0].folder]
        fault = f"did not end within {timeout:g} s"
        raise RanksError(slow, fault, _last_line(late[0])[1], late=True)


def _last_line(rank: Rank) -> tuple[int, str]:
    """Return a rank's last line with a cause, and 2; else the last line, and 1; or "" and 0."""
    output = rank.output.read_bytes() if rank.output.exists() else b""
    text = _NCCL_WORDS.sub(" ", output[-_LAST_BYTES:].decode(errors="replace"))
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    causes = [s for s in lines if _CAUSE.search(s) and not _NO_CAUSE.search(s)]
    return bool(lines) + bool(causes), (causes or lines or [""])[-1][-_TAIL:]


def _result(rank: Rank) -> str:
    path = result_file(Path(rank.folder), rank.number)
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise RanksError([rank.number], "ended without a result", _last_line(rank)[1]) from None


def nccl_log(folder: Path) -> str:
    """Return NCCL's logs in a job's folder."""
    texts = [path.read_bytes().decode(errors="replace") for path in sorted(folder.glob(LOGS))]
    return "\n".join(texts)[:MAX_LOG_CHARACTERS]
