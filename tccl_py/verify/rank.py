"""Rank program of a verification job: checks, timings and training; its result is a file.

usage: python -m tccl_py.verify.rank SPEC.json RANK

Batches of collectives and training steps are timed by the device's or host's clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

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
from tccl_py.verify.spec import ELEMENT_BYTES, MIB, Groups, JobResult, JobSpec, TimedRow

BATCHES = 9
MAX_CALLS = 200
"""Largest number of calls per batch; more calls add no information."""
GRAPH_CALLS = 50
"""Largest number of calls in a CUDA graph: during a longer one the host feeds the GPU, which is
timed then. On two H200 a call of 1 KiB took 17 to 29 us from batch to batch of one job in graphs of
200 calls, and in graphs of 50 the same within 2 %."""
GRAPHED_BYTES = 16 * MIB
"""Up to this size GPUs replay a CUDA graph of the calls: over NVLink a Python call takes longer
than the collective, and the comparison would be one of busy hosts."""
_WAKE_S = 0.5
_PROBED = 3
TRAINING_SLOTS, TRAINING_STEPS = 4, 5
_WARM_STEPS = 12
"""DistributedDataParallel rebuilds its buckets early, and a CUDA graph needs 11 steps before it."""
_WIDTH_CUDA, _WIDTH_HOST = 4096, 128
_LAYERS = 8

_WHOLE = {
    "all_reduce": ("all_reduce", ""),
    "broadcast": ("broadcast", "src"),
    "reduce": ("reduce", "dst"),
}
"""Collectives over a single buffer: the names of the function and of the root's argument."""

Call = Callable[[], Any]


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
                call = _call(group, row)
                batch = _batch_of(group, call, row.bytes, spec.seconds / BATCHES, stack)
            for _ in range(BATCHES):
                with slot():
                    found.append(batch())
        yield tuple(found) if group.world > 1 else ()


def warm_up(communicator: Communicator) -> None:
    """Keep the GPU busy until its clocks are up: an idle GPU runs at a fraction of them."""
    if not communicator.cuda:
        return
    square = communicator.torch.ones((4096, 4096), device=communicator.device)
    until = time.monotonic() + _WAKE_S
    while time.monotonic() < until:
        communicator.torch.mm(square, square)
        communicator.wait()


def _batch_of(
    communicator: Communicator, call: Call, size: int, seconds: float, stack: ExitStack
) -> Callable[[], float]:
    """Return a function that runs a batch of about `seconds` and returns the seconds per call.

    CUDA graphs that it replays are freed with the stack.
    """
    # 1. Connect the ranks by a first call.
    call()
    # 2. Time single calls if both of two take longer than a batch; the barrier alone aligns ranks.
    single = partial(_time, communicator, lambda: None, call)
    if all(communicator.maximum(single()) > seconds for _ in range(2)):
        return single
    # 3. Choose the number of calls from a probe.
    probed = communicator.maximum(_time(communicator, call, _times(call, _PROBED))) / _PROBED
    calls = max(1, min(MAX_CALLS, int(seconds / max(probed, 1e-7))))
    if not communicator.cuda or size > GRAPHED_BYTES:
        several = _times(call, calls)
        return lambda: _time(communicator, call, several) / calls
    # 4. Replay CUDA graphs of small calls; the first replay covers the launch of the timed ones.
    calls = min(calls, GRAPH_CALLS)
    replay = stack.enter_context(graphed(communicator, _times(call, calls)))
    probed = communicator.maximum(_time(communicator, replay, replay))
    replays = max(1, int(seconds / max(probed, 1e-7)))
    again = _times(replay, replays)
    return lambda: _time(communicator, replay, again) / (calls * replays)


def _call(communicator: Communicator, row: TimedRow) -> Call:
    """Return a call of the row's collective on buffers of its own."""
    world, dist, group = communicator.world, communicator.dist, communicator.group
    count, part = (max(1, -(-row.bytes // (ELEMENT_BYTES[row.dtype] * n))) for n in (1, world))

    def zeros(count: int) -> Any:
        # Repeated sums of other values overflow.
        torch = communicator.torch
        return torch.zeros(count, dtype=getattr(torch, row.dtype), device=communicator.device)

    if world == 1:
        return zeros(1).zero_  # type: ignore[no-any-return]
    if row.collective in _WHOLE:
        named, root = _WHOLE[row.collective]
        more = {root: communicator.root} if root else {}
        return partial(getattr(dist, named), zeros(count), group=group, **more)
    if row.collective == "send_recv":
        return _send_to_next(communicator, zeros(count), zeros(count))
    share, all_shares = zeros(part), zeros(part * world)
    if row.collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(all_shares, share, group=group)
    if row.collective == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(share, all_shares, group=group)
    received = zeros(part * world)
    return lambda: dist.all_to_all_single(received, all_shares, group=group)


def _send_to_next(communicator: Communicator, sent: Any, received: Any) -> Call:
    """Return a call that sends to the next rank of the communicator and receives from the last."""
    dist, group = communicator.dist, communicator.group
    ranks = dist.get_process_group_ranks(group)
    at = ranks.index(communicator.rank)
    after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]

    def call() -> None:
        both = [
            dist.P2POp(dist.isend, sent, after, group),
            dist.P2POp(dist.irecv, received, before, group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return call


def _times(call: Call, count: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(count):
            call()

    return several


def _time(communicator: Communicator, lead: Call, timed: Call) -> float:
    """Return the seconds of `timed`; `lead` runs before it, uncounted, to align the ranks."""
    communicator.wait()
    communicator.dist.barrier()
    lead()
    if not communicator.cuda:
        begun = time.perf_counter()
        timed()
        return time.perf_counter() - begun
    first, last = (communicator.torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    timed()
    last.record()
    communicator.wait()
    return float(first.elapsed_time(last)) / 1e3


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


@contextmanager
def graphed(communicator: Communicator, calls: Call, *, stream: Any = None) -> Iterator[Call]:
    """Yield the replay of a CUDA graph of `calls`, captured on `stream` or one of its own."""
    graph = communicator.torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events meanwhile, which a global mode would forbid.
    with communicator.torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        calls()
    communicator.wait()
    communicator.dist.barrier()
    try:
        yield graph.replay
    finally:
        communicator.wait()
        # The group cannot be destroyed while a graph holds its work.
        graph.reset()


if __name__ == "__main__":
    main()
