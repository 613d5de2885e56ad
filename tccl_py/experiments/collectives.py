"""The collectives that experiments run, a row for each: its call, values, bandwidth and program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from tccl_py.nccl.tuner import Algorithm

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv"
]
"""Collectives that can be timed; `send_recv` sends from each rank to the next, all at once."""
Pattern = Literal["ring", "from root", "to root", "to next", "to all"]
"""Transfers of a large message: around rings, around them from or to a root, or between ranks."""


class CollectiveFacts(NamedTuple):
    """How a collective is called, checked and rated.

    `function` of torch.distributed has the buffers as arguments: one, or a received and a sent one,
    `buffers` True for those with a block for every rank; `root` is the name of the root's argument.
    `expected` returns the values that a rank gets, by `calls.Tensors`. `bus_share` returns, by the
    number of ranks, the bytes over the slowest link for a byte of the buffer. `program` is that of
    nccl-tests, and `in_place` whether it times calls in place as well. NCCL's tuner chooses among
    `algorithms`, if any.
    """

    function: str
    buffers: tuple[bool, ...]
    program: str
    pattern: Pattern
    expected: Callable[[Any], Any]
    root: str = ""
    bus_share: Callable[[int], float] = lambda _: 1.0
    in_place: bool = True
    algorithms: tuple[Algorithm, ...] = ()


COLLECTIVES: dict[Collective, CollectiveFacts] = {
    "all_reduce": CollectiveFacts(
        function="all_reduce",
        buffers=(False,),
        program="all_reduce_perf",
        pattern="ring",
        expected=lambda tensors: sum(tensors.of_all()),
        bus_share=lambda world: 2 * (world - 1) / world,
        algorithms=("ring", "tree"),
    ),
    "all_gather": CollectiveFacts(
        function="all_gather_into_tensor",
        buffers=(True, False),
        program="all_gather_perf",
        pattern="ring",
        expected=lambda tensors: tensors.joined(tensors.of_all()),
        bus_share=lambda world: (world - 1) / world,
        algorithms=("ring",),
    ),
    "reduce_scatter": CollectiveFacts(
        function="reduce_scatter_tensor",
        buffers=(False, True),
        program="reduce_scatter_perf",
        pattern="ring",
        expected=lambda tensors: sum(tensors.of_all(block=tensors.on.rank)),
        bus_share=lambda world: (world - 1) / world,
        algorithms=("ring",),
    ),
    "broadcast": CollectiveFacts(
        function="broadcast",
        buffers=(False,),
        program="broadcast_perf",
        pattern="from root",
        root="src",
        expected=lambda tensors: tensors.of(tensors.on.world - 1),
        algorithms=("ring",),
    ),
    "reduce": CollectiveFacts(
        function="reduce",
        buffers=(False,),
        program="reduce_perf",
        pattern="to root",
        root="dst",
        expected=lambda tensors: sum(tensors.of_all()),
        algorithms=("ring",),
    ),
    "all_to_all": CollectiveFacts(
        function="all_to_all_single",
        buffers=(True, True),
        program="alltoall_perf",
        pattern="to all",
        expected=lambda tensors: tensors.joined(tensors.of_all(block=tensors.on.rank)),
        bus_share=lambda world: (world - 1) / world,
        in_place=False,
    ),
    "send_recv": CollectiveFacts(
        # Not one call: `calls.send_to_next`.
        function="",
        buffers=(False, False),
        program="sendrecv_perf",
        pattern="to next",
        expected=lambda tensors: tensors.of((tensors.on.rank - 1) % tensors.on.world),
    ),
}
"""To add a collective, add its name above and its row here."""
PROGRAMS: dict[str, Collective] = {facts.program: name for name, facts in COLLECTIVES.items()}
"""Collectives by their programs of nccl-tests."""


def bus_gbps(collective: Collective, world: int, size: int, seconds: float) -> float:
    """Return NCCL's bus bandwidth, GB/s, of a buffer of `size` bytes in `seconds`.

    >>> bus_gbps("all_reduce", 4, 10**9, 1.0)  # bytes over a ring's slowest hop
    1.5
    """
    return size / seconds * COLLECTIVES[collective].bus_share(world) / 1e9
