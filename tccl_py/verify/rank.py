"""Rank program of a verification job: checks, timings and training; its result is a file.

usage: python -m tccl_py.verify.rank SPEC.json RANK

Batches of collectives and training steps are timed by the device's or host's clock.
"""

from __future__ import annotations

import os
import time
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
from tccl_py.verify.checks import run_checks
from tccl_py.verify.spec import Groups, JobResult, JobSpec
from tccl_py.verify.timing import Call, graphed, row_call, timed_batch, warm_up

BATCHES = 9
TRAINING_SLOTS, TRAINING_STEPS = 4, 5
_WARM_STEPS = 12
"""DistributedDataParallel rebuilds its buckets early, and a CUDA graph needs 11 steps before it."""
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
    if spec.training:
        result = msgspec.structs.replace(result, training=time_training(communicator, slot))
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


def time_training(communicator: Communicator, slot: TimeSlot) -> dict[str, tuple[float, ...]]:
    """Return seconds per training step of a small DistributedDataParallel model, by mode.

    Modes are `eager` and, on GPUs, `graph`: a CUDA graph of one step.
    """
    # Work that a graph replays must be made on another stream than the default one.
    stream = communicator.torch.cuda.Stream() if communicator.cuda else None
    with communicator.torch.cuda.stream(stream):
        # All jobs make their models at the same time, which takes longer than the steps: an empty
        # slot before and after it keeps that away from timed work.
        with slot():
            pass
        step = _training_step(communicator)
        with slot():
            pass
        found = {"eager": _time_steps(communicator, step, slot)}
    if stream is not None:
        with ExitStack() as stack:
            with slot():
                communicator.wait()
                replay = stack.enter_context(graphed(communicator, step, stream=stream))
            found["graph"] = _time_steps(communicator, replay, slot)
    return found


def _training_step(communicator: Communicator) -> Call:
    torch, device = communicator.torch, communicator.device
    nn = torch.nn
    torch.manual_seed(0)
    width = _WIDTH_CUDA if communicator.cuda else _WIDTH_HOST
    # On the device: a host needs seconds for this many random numbers.
    layers = [
        layer
        for _ in range(_LAYERS)
        for layer in (nn.Linear(width, width, device=device), nn.ReLU())
    ]
    devices = [device.index] if communicator.cuda else None
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), device_ids=devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.ones(32, width, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(_WARM_STEPS):
        step()
    communicator.wait()
    return step


def _time_steps(communicator: Communicator, step: Call, slot: TimeSlot) -> tuple[float, ...]:
    found = []
    for _ in range(TRAINING_SLOTS):
        with slot():
            # An uncounted step aligns the ranks and refills this job's caches.
            step()
            communicator.wait()
            for _ in range(TRAINING_STEPS):
                begun = time.perf_counter()
                step()
                communicator.wait()
                found.append(time.perf_counter() - begun)
    return tuple(found)


if __name__ == "__main__":
    main()
