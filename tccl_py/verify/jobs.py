"""Running one job: fresh processes, one a rank, that are all gone when it has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from tccl_py.errors import TcclError
from tccl_py.files import encode_json
from tccl_py.rank_processes.starting import TORCH, Start, interpreter
from tccl_py.rank_processes.task import FOLDER, RanksError, Task, decoded, run_tasks
from tccl_py.rank_processes.turns import Seat
from tccl_py.verify.orders import Answer, Order

RANK_PROGRAM = "tccl_py.verify.rank"
DEFAULT_TIMEOUT = 180.0


class JobError(TcclError):
    """A job did not end as it should; says which rank, and what it said last."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's ranks answered, in order, what NCCL wrote, and how long it took."""

    answers: tuple[Answer, ...]
    log: str
    seconds: float


def run_jobs(
    order: Order,
    surroundings: Sequence[Mapping[str, str]],
    *,
    timeout: float = DEFAULT_TIMEOUT,
    program: str = RANK_PROGRAM,
    start: Start = interpreter,
) -> tuple[Outcome, ...]:
    """Run an order's ranks on this host, as one job in each of these surroundings, all at once.

    Args:
        order: what the ranks do; several jobs take turns.
        surroundings: for each job the whole environment of its ranks.
        timeout: seconds for all of them.
        program: the module that is a rank.
        start: how each process is started.

    Raises:
        JobError: a rank failed, or the time was up.
    """
    begun = time.monotonic()
    ranks = tuple(range(order.world))
    orders = seated(order, len(surroundings), len(ranks))
    tasks = [
        task_of(one, ranks, told, timeout=timeout, program=program)
        for one, told in zip(orders, surroundings, strict=True)
    ]
    try:
        found = run_tasks(tasks, start=start)
    except RanksError as error:
        raise JobError(_sentence(error)) from error
    seconds = time.monotonic() - begun
    return tuple(
        Outcome(answers=decoded(left, ranks, Answer), log=left.log, seconds=seconds)
        for left in found
    )


def seated(order: Order, jobs: int, ranks: int) -> tuple[Order, ...]:
    """The order for each of several jobs at once, of which a host has as many ranks each."""
    return tuple(
        msgspec.structs.replace(order, seat=Seat(number=number, jobs=jobs, ranks=ranks))
        for number in range(jobs)
    )


def task_of(
    order: Order,
    ranks: tuple[int, ...],
    surroundings: Mapping[str, str],
    *,
    timeout: float = DEFAULT_TIMEOUT,
    program: str = RANK_PROGRAM,
) -> Task:
    """A host's part in a job: what these ranks of it run."""
    return Task(
        program=program,
        order=encode_json(order),
        ranks=ranks,
        surroundings={**surroundings, "NCCL_DEBUG_FILE": f"{FOLDER}/log-%p"},
        timeout=timeout,
        imports=TORCH,
    )


def _sentence(error: RanksError) -> str:
    which = "rank(s)" if error.late else "rank"
    cause = f": {error.said}" if error.said else ""
    return f"{which} {', '.join(map(str, error.ranks))} {error.what}{cause}"
