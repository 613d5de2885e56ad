"""Rank program of a verification job: checks, timings and training; its result is a file.

usage: python -m tccl_py.experiments.rank SPEC.json RANK

Batches of collectives and training steps are timed by the device's or host's clock. Training is of
a small GPT, data parallel, or tensor parallel over neighbouring ranks: every arm has to find the
same loss and gradients.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, lru_cache

from msgspec.structs import replace

from tccl_py.experiments.calls import (
    Call,
    capture_graph,
    row_call,
    run_checks,
    timed_batch,
    warm_up,
)
from tccl_py.experiments.contests import time_contest
from tccl_py.experiments.means import NCCL, time_means
from tccl_py.experiments.spec import (
    BATCHES,
    PARALLEL,
    Contest,
    Groups,
    JobResult,
    JobSpec,
    Row,
    RowTimes,
    batches,
)
from tccl_py.nccl.settings import GRAPH_VARIABLE
from tccl_py.nccl_library import loaded_nccl
from tccl_py.rank_processes.rank import (
    Communicator,
    TimeSlot,
    join,
    read_spec,
    slots_file,
    time_slots,
    write_result,
)
from tccl_py.rank_processes.training import TrainingStep

TRAINING_SLOTS, TRAINING_STEPS = 4, 5
_WARM_STEPS = 12
"""DistributedDataParallel rebuilds its buckets early, and a CUDA graph needs 11 steps before it."""


def main() -> None:
    """Run the specification of the command line as rank RANK."""
    spec, rank, folder = read_spec(JobSpec)
    local_rank = rank - spec.first_rank
    communicator = join(
        "nccl" if spec.backend == "cuda" and spec.means in ("", NCCL) else "gloo",
        spec.rendezvous or folder,
        rank=rank,
        world=spec.world,
        local_rank=local_rank,
        gpu=spec.backend == "cuda",
    )
    torch = communicator.torch
    result = JobResult(
        rank=rank,
        torch=str(torch.__version__),
        nccl=loaded_nccl(torch) if communicator.cuda else "",
        device=communicator.device_name,
    )

    @cache
    def over(groups: Groups) -> Communicator:
        return communicator.split(groups) if groups else communicator

    for groups in ((), *spec.check_groups) if spec.checks else ():
        if not groups or (_splits() and over(groups).world > 1):
            result = run_checks(over(groups), result)
    if spec.rows:
        warm_up(communicator)
        gc.freeze()  # torch may collect garbage before each capture
        slot = time_slots(slots_file(folder), spec.slot, local_rank)
        means = time_means(communicator, spec) if spec.means else None
        result = replace(result, times=tuple(means or _times(spec, communicator, over, slot)))
    write_result(folder, rank, result)
    # No rank leaves while another one communicates. Nothing is destroyed: with overlapping groups
    # of four GPUs and more torch 2.11 hangs then.
    communicator.wait()
    communicator.dist.barrier()
    communicator.wait()


def _times(
    spec: JobSpec,
    communicator: Communicator,
    over: Callable[[Groups], Communicator],
    slot: TimeSlot,
) -> Iterator[RowTimes]:
    """Yield the times of each row that begins before the limit."""
    begun, train = time.monotonic(), trainer(communicator, slot)
    for row in spec.rows:
        spent = time.monotonic() - begun
        if spec.limit is not None and communicator.maximum(spent) > spec.limit:
            return
        contest = row.contest
        if isinstance(contest, Contest):
            yield time_contest(communicator, slot, row, contest)
        elif row.trains:
            yield train(row)
        elif row.groups and not _splits():
            _leave_slots(slot, 1 + BATCHES)
            yield batches(row, ())
        else:
            yield batches(row, _time_batches(over, row, spec.seconds, slot))


def _splits() -> bool:
    """Return whether ranks may form groups: a graph file fails communicators over fewer GPUs."""
    return GRAPH_VARIABLE not in os.environ


def _leave_slots(slot: TimeSlot, count: int) -> None:
    """Let the other jobs have time slots of a row that this one has no part in."""
    for _ in range(count):
        with slot():
            pass


def _time_batches(
    over: Callable[[Groups], Communicator], row: Row, seconds: float, slot: TimeSlot
) -> tuple[float, ...]:
    """Return the seconds per call of BATCHES batches that together take about `seconds`.

    The set-up and every batch have a time slot each. Ranks outside a row's communicator join the
    barriers of the whole job, and have no times.
    """
    with ExitStack() as stack:
        with slot():
            group = over(row.groups)
            call = row_call(group, row)
            batch = timed_batch(group, call, row.bytes, seconds / BATCHES, stack)
        times = []
        for _ in range(BATCHES):
            with slot():
                times.append(batch())
    return tuple(times) if group.world > 1 else ()


def trainer(communicator: Communicator, slot: TimeSlot) -> Callable[[Row], RowTimes]:
    """Return a function that times a training step, eager or as a CUDA graph.

    Times come with loss and gradients after a few steps. Rows of a model follow each other.
    """
    # Work that a graph replays must be made on another stream than the default one.
    stream = communicator.torch.cuda.Stream() if communicator.cuda else None
    world = communicator.world

    @lru_cache(maxsize=1)
    def step_of(parts: int) -> tuple[TrainingStep, tuple[float, ...]]:
        # All jobs make their models at the same time, which takes longer than the steps: an
        # empty slot before and after it keeps that away from timed work.
        _leave_slots(slot, 1)
        groups = [range(first, first + parts) for first in range(0, world, parts) if parts > 1]
        step = TrainingStep(communicator, communicator.split(groups))
        for _ in range(_WARM_STEPS):
            step()
        values = step.values(step)
        communicator.wait()
        _leave_slots(slot, 1)
        return step, values

    def train(row: Row) -> RowTimes:
        name, _, form = row.mode.partition("-")
        parts = PARALLEL[name]
        if not _splits() and parts not in (1, world):
            _leave_slots(slot, TRAINING_SLOTS + (1 if form == "graph" else 2))
            return batches(row, ())
        with ExitStack() as stack, communicator.torch.cuda.stream(stream):
            step, values = step_of(parts)
            call: Call = step
            if form == "graph":
                with slot():
                    communicator.wait()
                    call = stack.enter_context(capture_graph(communicator, step, stream=stream))
                    values = step.values(call)
            return batches(row, _time_steps(communicator, call, slot), values)

    return train


def _time_steps(communicator: Communicator, step: Call, slot: TimeSlot) -> tuple[float, ...]:
    seconds = []
    for _ in range(TRAINING_SLOTS):
        with slot():
            # An uncounted step aligns the ranks and refills this job's caches.
            step()
            communicator.wait()
            for _ in range(TRAINING_STEPS):
                begun = time.perf_counter()
                step()
                communicator.wait()
                seconds.append(time.perf_counter() - begun)
    return tuple(seconds)


if __name__ == "__main__":
    main()
