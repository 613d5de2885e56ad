"""Timing on a rank: calls of a collective, batches of calls, and CUDA graphs of calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from tccl_py.rank_processes.rank import Communicator
from tccl_py.verify.spec import ELEMENT_BYTES, MIB, TimedRow

MAX_CALLS = 200
"""Largest number of calls per batch; more calls add no information."""
GRAPH_CALLS = 50
"""Largest number of calls in a CUDA graph: during a longer one the host feeds the GPU, which is
timed then. On two H200 a call of 1 KiB took 17 to 29 us from batch to batch of one job in graphs of
200 calls, and in graphs of 50 the same within 2 %."""
GRAPHED_BYTES = 16 * MIB
"""Up to this size GPUs replay a CUDA graph of the calls: over NVLink a Python call takes longer
than the collective, and the comparison would be one of busy hosts."""
_REPLAYS = 2
"""Of a graph that serves one batch. Two graphs of the same small calls differ for as long as they
live: on two H200 without P2P all-reduces of 16 KiB took 15 to 23 us in graphs of one job, and from
batch to batch of a graph the same within 2 %."""
_WAKE_S = 0.5
_PROBED = 3

_WHOLE = {
    "all_reduce": ("all_reduce", ""),
    "broadcast": ("broadcast", "src"),
    "reduce": ("reduce", "dst"),
}
"""Collectives over a single buffer: the names of the function and of the root's argument."""

Call = Callable[[], Any]


def warm_up(communicator: Communicator) -> None:
    """Keep the GPU busy until its clocks are up: an idle GPU runs at a fraction of them."""
    if not communicator.cuda:
        return
    square = communicator.torch.ones((4096, 4096), device=communicator.device)
    until = time.monotonic() + _WAKE_S
    while time.monotonic() < until:
        communicator.torch.mm(square, square)
        communicator.wait()


def timed_batch(
    communicator: Communicator, call: Call, size: int, seconds: float, stack: ExitStack | None
) -> Callable[[], float]:
    """Return a function that runs a batch of about `seconds` and returns the seconds per call.

    CUDA graphs that it replays are freed with the stack. Without a stack each batch captures a
    graph of its own.
    """
    # 1. Connect the ranks by a first call.
    call()
    # 2. Time single calls if both of two take longer than a batch; the barrier alone aligns ranks.
    single = partial(time_calls, communicator, lambda: None, call)
    if all(communicator.maximum(single()) > seconds for _ in range(2)):
        return single
    # 3. Choose the number of calls from a probe.
    probed = communicator.maximum(time_calls(communicator, call, _times(call, _PROBED))) / _PROBED
    calls = max(1, min(MAX_CALLS, int(seconds / max(probed, 1e-7))))
    if not communicator.cuda or size > GRAPHED_BYTES:
        several = _times(call, calls)
        return lambda: time_calls(communicator, call, several) / calls
    # 4. Replay CUDA graphs of small calls; the first replay covers the launch of the timed ones.
    calls = min(calls, GRAPH_CALLS)
    if stack is None:
        return partial(_graphed_batch, communicator, call, calls)
    replay = stack.enter_context(graphed(communicator, _times(call, calls)))
    probed = communicator.maximum(time_calls(communicator, replay, replay))
    replays = max(1, int(seconds / max(probed, 1e-7)))
    again = _times(replay, replays)
    return lambda: time_calls(communicator, replay, again) / (calls * replays)


def _graphed_batch(communicator: Communicator, call: Call, calls: int) -> float:
    """Return the seconds per call in a new CUDA graph."""
    with graphed(communicator, _times(call, calls)) as replay:
        again = _times(replay, _REPLAYS)
        return time_calls(communicator, replay, again) / (calls * _REPLAYS)


def row_call(communicator: Communicator, row: TimedRow) -> Call:
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


def time_calls(communicator: Communicator, lead: Call, timed: Call) -> float:
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
