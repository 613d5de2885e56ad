"""Running a job of `tccl overlap`: fresh processes that are all gone when it has ended."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.files import encode_json
from tccl_py.overlap.orders import Answer, Order
from tccl_py.rank_processes.places import order_file
from tccl_py.rank_processes.run import RanksError, answer_of, run_ranks

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
        order: what they do; its `folder` is chosen here.
        surroundings: the whole environment of each.
        timeout: seconds for all of it.
        program: the module that is a rank.

    Raises:
        MeasurementError: a rank failed, or the time was up.
    """
    with tempfile.TemporaryDirectory(prefix="tccl-overlap-") as name:
        folder = Path(name)
        told = msgspec.structs.replace(order, folder=name)
        order_file(folder).write_text(encode_json(told))
        try:
            run_ranks(program, folder, range(order.world), surroundings, timeout=timeout)
            return tuple(answer_of(folder, rank, Answer) for rank in range(order.world))
        except RanksError as error:
            raise MeasurementError(_sentence(error)) from error


def _sentence(error: RanksError) -> str:
    why = "raise --timeout" if error.late else error.said or "it said nothing"
    return f"rank {', '.join(map(str, error.ranks))} of the job: {error.what}; {why}"
