"""Rank program of a verification job: checks, timings and training; its result is a file.

usage: python -m tccl_py.verify.rank SPEC.json RANK

Only rank programs import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tccl_py.rank_processes.rank import (
    TimeSlot,
    join_group,
    rank_device,
    read_spec,
    slots_file,
    time_slots,
    write_result,
)
from tccl_py.verify.checks import run_checks
from tccl_py.verify.spec import Groups, JobResult, JobSpec
from tccl_py.verify.timing import Communicator, time_size, time_training, warm_up


def main() -> None:
    """Run the specification of the command line as rank RANK."""
    spec, rank, folder = read_spec(JobSpec)
    communicator = join(spec, rank, folder)
    slot = time_slots(slots_file(folder), spec.slot, rank - spec.first_rank)
    result = run_spec(spec, communicator, slot)
    communicator.dist.destroy_process_group()
    write_result(folder, rank, result)


def join(spec: JobSpec, rank: int, folder: Path) -> Communicator:
    """Join the job's process group and return it."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    backend = "nccl" if spec.backend == "cuda" else "gloo"
    device = rank_device(torch, backend, rank - spec.first_rank)
    where = spec.rendezvous or folder
    join_group(dist, backend, where, rank=rank, world=spec.world, device=device)
    return Communicator(torch=torch, dist=dist, rank=rank, world=spec.world, device=device)


def run_spec(spec: JobSpec, communicator: Communicator, slot: TimeSlot) -> JobResult:
    """Run a specification; timed work runs in time slots."""
    torch = communicator.torch
    cuda = spec.backend == "cuda"
    result = JobResult(
        rank=communicator.rank,
        torch=str(torch.__version__),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
        device=torch.cuda.get_device_name(communicator.device) if cuda else "",
    )
    if spec.checks:
        found = msgspec.structs.asdict(run_checks(communicator))
        result = msgspec.structs.replace(result, **found)
    if spec.rows:
        warm_up(communicator)
        timings = tuple(_timings(spec, communicator, slot))
        result = msgspec.structs.replace(result, timings=timings)
    if spec.training:
        result = msgspec.structs.replace(result, training=time_training(communicator, slot))
    return result


def _timings(
    spec: JobSpec, communicator: Communicator, slot: TimeSlot
) -> Iterator[tuple[float, ...]]:
    made: dict[Groups, Communicator] = {(): communicator}
    for row in spec.rows:
        if row.groups not in made:
            # A graph file fails every communicator over fewer GPUs.
            groups = () if "NCCL_GRAPH_FILE" in os.environ else row.groups
            with slot():
                made[row.groups] = communicator.split(groups)
        group = made[row.groups]
        found = time_size(group, spec.collective, row.bytes, spec.seconds, slot)
        yield found if group.world > 1 else ()


if __name__ == "__main__":
    main()
