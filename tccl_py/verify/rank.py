"""Rank program of a verification job: checks, timings and training; its result is a file.

usage: python -m tccl_py.verify.rank SPEC.json RANK

Batches of collectives and training steps are timed by the device's or host's clock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec

from tccl_py.rank_processes.rank import (
    Communicator,
    TimeSlot,
    join,
    read_spec,
    slots_file,
    time_slots,
    write_result,
)
from tccl_py.verify.collectives import row_call, run_checks, timed_batch, warm_up
from tccl_py.verify.contests import run_contests
from tccl_py.verify.spec import Groups, JobResult, JobSpec
from tccl_py.verify.training import time_training

BATCHES = 9
_WIDTH_CUDA, _WIDTH_HOST = 4096, 128
_LAYERS = 8


def main() -> None:
    """Run the specification of the command line as rank RANK."""
    spec, rank, folder = read_spec(JobSpec)
    local_rank = rank - spec.first_rank
    communicator = join(
        "nccl" if spec.backend == "cuda" else "gloo",
        spec.rendezvous or folder,
        rank=rank,
        world=spec.world,
        local_rank=local_rank,
    )
    slot = time_slots(slots_file(folder), spec.slot, local_rank)
    torch = communicator.torch
    result = JobResult(
        rank=rank,
        torch=str(torch.__version__),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if communicator.cuda else "",
        device=communicator.device_name,
    )
    if spec.checks:
        result = run_checks(communicator, result)
    if spec.rows:
        warm_up(communicator)
        timings = tuple(_timings(spec, communicator, slot))
        result = msgspec.structs.replace(result, timings=timings)
    if spec.contests:
        warm_up(communicator)
        times = run_contests(spec.contests, communicator, slot, seconds=spec.contest_seconds)
        result = msgspec.structs.replace(result, contests=tuple(times))
    if spec.training:
        steps = list(time_training(communicator, slot))
        result = msgspec.structs.replace(
            result,
            training={mode: seconds for mode, seconds, _ in steps},
            trained={mode: values for mode, _, values in steps},
        )
    communicator.dist.destroy_process_group()
    write_result(folder, rank, result)


def _timings(
    spec: JobSpec, communicator: Communicator, slot: TimeSlot
) -> Iterator[tuple[float, ...]]:
    """Yield each row's seconds per call of BATCHES batches that together take about `seconds`.

    The set-up and every batch have a time slot each. Ranks outside a row's communicator join the
    barriers of the whole job, and have no times.
    """
    made: dict[Groups, Communicator] = {(): communicator}
    for row in spec.rows:
        if row.groups not in made:
            # A graph file fails every communicator over fewer GPUs.
            groups = () if "NCCL_GRAPH_FILE" in os.environ else row.groups
            with slot():
                made[row.groups] = communicator.split(groups)
        group, found = made[row.groups], []
        with ExitStack() as stack:
            with slot():
                call = row_call(group, row)
                batch = timed_batch(group, call, row.bytes, spec.seconds / BATCHES, stack)
            for _ in range(BATCHES):
                with slot():
                    found.append(batch())
        yield tuple(found) if group.world > 1 else ()


if __name__ == "__main__":
    main()
