"""How long collectives take: batches of calls, by the device's clock or the host's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tccl_py.verification.orders import ELEMENT_BYTES, Collective
from tccl_py.verification.ranks import Ranks

BATCHES = 9
MAX_CALLS = 200
"""Calls of a batch at most: a batch of more does not say more."""
_WARM = 3
_PROBED = 3


def time_size(ranks: Ranks, collective: Collective, size: int, seconds: float) -> tuple[float, ...]:
    """Seconds a call for each of BATCHES batches, that together take about `seconds`.

    Args:
        ranks: the process group.
        collective: what is timed.
        size: bytes of the whole buffer, rounded up to whole elements for each rank.
        seconds: for all batches; every batch has one call at least.
    """
    call = _call(ranks, collective, size)
    for _ in range(_WARM):
        call()
    ranks.wait()
    probed = ranks.agree(_batch(ranks, call, _PROBED))
    calls = max(1, min(MAX_CALLS, int(seconds / BATCHES / max(probed, 1e-7))))
    return tuple(_batch(ranks, call, calls) for _ in range(BATCHES))


def _call(ranks: Ranks, collective: Collective, size: int) -> Callable[[], Any]:
    world, dist = ranks.world, ranks.dist
    part = -(-size // (ELEMENT_BYTES * world))

    def zeros(count: int) -> Any:
        # Sums of anything else would overflow after some calls.
        return ranks.torch.zeros(count, dtype=ranks.torch.float32, device=ranks.device)

    if collective in ("all_reduce", "broadcast"):
        whole = zeros(max(1, size // ELEMENT_BYTES))
        if collective == "broadcast":
            return lambda: dist.broadcast(whole, src=0)
        return lambda: dist.all_reduce(whole)
    if collective == "all_to_all":
        one, other = zeros(part * world), zeros(part * world)
        return lambda: dist.all_to_all_single(other, one)
    share, all_shares = zeros(part), zeros(part * world)
    if collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(all_shares, share)
    return lambda: dist.reduce_scatter_tensor(share, all_shares)


def _batch(ranks: Ranks, call: Callable[[], Any], calls: int) -> float:
    """Seconds a call of one batch; a call before it, untimed, brings the ranks together."""
    ranks.wait()
    ranks.dist.barrier()
    call()
    if not ranks.cuda:
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begun) / calls
    first, last = (ranks.torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        call()
    last.record()
    ranks.wait()
    return float(first.elapsed_time(last)) / 1e3 / calls
