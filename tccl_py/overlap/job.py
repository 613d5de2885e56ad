"""Running a job of `tccl overlap`: fresh processes that are all gone when it has ended."""

from __future__ import annotations

from collections.abc import Mapping

from tccl_py.errors import MeasurementError
from tccl_py.files import encode_json
from tccl_py.overlap.orders import Answer, Order
from tccl_py.rank_processes.tasks import RanksError, Task, decoded, run_tasks

RANK_PROGRAM = "tccl_py.overlap.rank"


def run_job(
    order: Order,
    surroundings: Mapping[str, str],
    *,
    timeout: float,
    program: str = RANK_PROGRAM,
) -> tuple[Answer, ...]:
    """Run an order's ranks; their answers, in order.

    Args:
        order: what they do.
        surroundings: the whole environment of each.
        timeout: seconds for all of it.
        program: the module that is a rank.

    Raises:
        MeasurementError: a rank failed, or the time was up.
    """
    ranks = tuple(range(order.world))
    task = Task(
        program=program,
        spec=encode_json(order),
        ranks=ranks,
        environment=dict(surroundings),
        timeout=timeout,
    )
    try:
        (left,) = run_tasks([task])
        return decoded(left, ranks, Answer)
    except RanksError as error:
        raise MeasurementError(_sentence(error)) from error


def _sentence(error: RanksError) -> str:
    why = "raise --timeout" if error.late else error.said or "it said nothing"
    return f"rank {', '.join(map(str, error.ranks))} of the job: {error.what}; {why}"
