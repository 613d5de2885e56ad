"""How long collectives take: batches of calls, by the device's clock or the host's."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tccl_py.rank_processes.turns import TakesTurn
from tccl_py.verify.orders import ELEMENT_BYTES, MIB, Collective
from tccl_py.verify.ranks import Ranks

BATCHES = 9
MAX_CALLS = 200
"""Calls of a batch at most: a batch of more does not say more."""
GRAPH_CALLS = 50
"""Calls of a graph at most: while a longer one runs the host feeds the GPU with it, and that is
what is timed. On two H200 a call of 1 KiB took 17 to 29 us from batch to batch of one job in graphs
of 200 calls, and in graphs of 50 the same within 2 %."""
GRAPHED_BYTES = 16 * MIB
"""Up to this size GPUs replay a CUDA graph of the calls: over NVLink a call of Python's takes
longer than the collective, and what would be compared is how busy the host is."""
_WAKING_S = 0.5
_PROBED = 3


def wake(ranks: Ranks) -> None:
    """Keep the GPU busy until its clocks are up: an idle one has a fraction of them, and the first
    sizes would be timed while they rise."""
    if not ranks.cuda:
        return
    square = ranks.torch.ones((4096, 4096), device=ranks.device)
    until = time.monotonic() + _WAKING_S
    while time.monotonic() < until:
        ranks.torch.mm(square, square)
        ranks.wait()


def time_size(
    ranks: Ranks, collective: Collective, size: int, seconds: float, turn: TakesTurn
) -> tuple[float, ...]:
    """Time a call in each of BATCHES batches, that together take about `seconds`.

    Ranks in no group take part in what brings all ranks of the job together.

    Args:
        ranks: the communicator.
        collective: what is timed.
        size: bytes of the whole buffer, rounded up to whole elements for each rank.
        seconds: for all batches; every batch has one call at least.
        turn: what takes a turn; every batch has its own, and so has what comes before.
    """
    with ExitStack() as stack:
        with turn():
            call = _call(ranks, collective, size)
            batch = _batch_of(ranks, call, size, seconds / BATCHES, stack)
        found = []
        for _ in range(BATCHES):
            with turn():
                found.append(batch())
        return tuple(found)


def _batch_of(
    ranks: Ranks, call: Callable[[], Any], size: int, seconds: float, stack: ExitStack
) -> Callable[[], float]:
    """What runs a batch of about this many seconds and gives those of a call; graphs that it
    replays are given back with the stack."""
    # The first call connects the ranks.
    call()
    # Once may be an accident.
    if all(ranks.agree(_batch(ranks, _nothing, call)) > seconds for _ in range(2)):
        return lambda: _batch(ranks, _nothing, call)
    probed = ranks.agree(_batch(ranks, call, _times(call, _PROBED))) / _PROBED
    calls = max(1, min(MAX_CALLS, int(seconds / max(probed, 1e-7))))
    if not ranks.cuda or size > GRAPHED_BYTES:
        several = _times(call, calls)
        return lambda: _batch(ranks, call, several) / calls
    calls = min(calls, GRAPH_CALLS)
    replay = stack.enter_context(ranks.graphed(_times(call, calls)))
    probed = ranks.agree(_batch(ranks, replay, replay))
    replays = max(1, int(seconds / max(probed, 1e-7)))
    # The first replay keeps the GPUs busy while the host launches those that are timed.
    again = _times(replay, replays)
    return lambda: _batch(ranks, replay, again) / (calls * replays)


def _nothing() -> None:
    """Leads where a call is so long that the barrier before it is as good as a lead."""


def _call(ranks: Ranks, collective: Collective, size: int) -> Callable[[], Any]:
    world, dist, group = ranks.world, ranks.dist, ranks.group
    part = -(-size // (ELEMENT_BYTES * world))

    def zeros(count: int) -> Any:
        # Sums of anything else would overflow after some calls.
        return ranks.torch.zeros(count, dtype=ranks.torch.float32, device=ranks.device)

    if world == 1:
        return zeros(1).zero_  # type: ignore[no-any-return]
    if collective in ("all_reduce", "broadcast"):
        whole = zeros(max(1, size // ELEMENT_BYTES))
        if collective == "broadcast":
            return lambda: dist.broadcast(whole, src=ranks.root, group=group)
        return lambda: dist.all_reduce(whole, group=group)
    if collective == "all_to_all":
        one, other = zeros(part * world), zeros(part * world)
        return lambda: dist.all_to_all_single(other, one, group=group)
    share, all_shares = zeros(part), zeros(part * world)
    if collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(all_shares, share, group=group)
    return lambda: dist.reduce_scatter_tensor(share, all_shares, group=group)


def _times(call: Callable[[], Any], count: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(count):
            call()

    return several


def _batch(ranks: Ranks, lead: Callable[[], Any], timed: Callable[[], Any]) -> float:
    """Seconds that `timed` takes; `lead`, before it and not counted, brings the ranks together."""
    ranks.wait()
    ranks.dist.barrier()
    lead()
    if not ranks.cuda:
        begun = time.perf_counter()
        timed()
        return time.perf_counter() - begun
    first, last = (ranks.torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    timed()
    last.record()
    ranks.wait()
    return float(first.elapsed_time(last)) / 1e3
