"""Running one job: fresh processes, one a rank, that are all gone when it has ended."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tccl_py.errors import TcclError
from tccl_py.files import encode_json
from tccl_py.rank_processes.places import order_file
from tccl_py.rank_processes.run import RanksError, answer_of, run_ranks
from tccl_py.runtimes.nccl.log import MAX_LOG_CHARACTERS
from tccl_py.verification.orders import Answer, Order

RANK_PROGRAM = "tccl_py.verification.rank"
DEFAULT_TIMEOUT = 180.0


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
        order_file(folder).write_text(encode_json(told))
        environment = {**surroundings, "NCCL_DEBUG_FILE": f"{name}/nccl.%p"}
        try:
            run_ranks(program, folder, range(order.world), environment, timeout=timeout)
            answers = tuple(answer_of(folder, rank, Answer) for rank in range(order.world))
        except RanksError as error:
            raise JobError(_sentence(error)) from error
        return Outcome(answers=answers, log=_log(folder), seconds=time.monotonic() - begun)


def _sentence(error: RanksError) -> str:
    which = "rank(s)" if error.late else "rank"
    cause = f": {error.said}" if error.said else ""
    return f"{which} {', '.join(map(str, error.ranks))} {error.what}{cause}"


def _log(folder: Path) -> str:
    texts = [path.read_bytes().decode(errors="replace") for path in sorted(folder.glob("nccl.*"))]
    return "\n".join(texts)[:MAX_LOG_CHARACTERS]
