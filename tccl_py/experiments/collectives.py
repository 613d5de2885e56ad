"""The collectives that experiments run, a row for each: its call, values, bandwidth and program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from tccl_py.nccl.tuner import Algorithm
from tccl_py.workloads.workload import WorkloadCollective

Collective = WorkloadCollective
Pattern = Literal["ring", "from root", "to root", "to next", "to all"]
"""Transfers of a large message: around rings, around them from or to a root, or between ranks."""


P2P = "batch_isend_irecv"
"""The function of torch.distributed for transfers, which have no collective: `calls.transfers`."""


class CollectiveFacts(NamedTuple):
    """How a collective is called, checked and rated."""

    expected: Callable[[Any], Any]
    """Returns the values that a rank gets, if any, by `calls.Tensors`."""
    program: str = ""
    """That of nccl-tests, if any."""
    pattern: Pattern = "ring"
    times: int = 0
    """The slowest link carries the buffer without one rank's share so many times; 0 is the whole
    buffer once."""
    function: str = ""
    """Of torch.distributed; "" has the collective's name."""
    buffers: tuple[bool, ...] = (False,)
    """Its arguments, one or a received and a sent one; True for those with a block for every
    rank."""
    root: str = ""
    """The name of the root's argument."""
    in_place: bool = True
    """Whether the program times calls in place as well."""
    algorithms: tuple[Algorithm, ...] = ("ring",)
    """Those among which NCCL's tuner chooses."""


COLLECTIVES: dict[Collective, CollectiveFacts] = {
    "all_reduce": CollectiveFacts(
        program="all_reduce_perf",
        expected=lambda tensors: sum(tensors.of_all()),
        times=2,
        algorithms=("ring", "tree"),
    ),
    "all_gather": CollectiveFacts(
        program="all_gather_perf",
        expected=lambda tensors: tensors.on.torch.cat(tensors.of_all()),
        times=1,
        function="all_gather_into_tensor",
        buffers=(True, False),
    ),
    "reduce_scatter": CollectiveFacts(
        program="reduce_scatter_perf",
        expected=lambda tensors: sum(tensors.of_all(block=tensors.on.place)),
        times=1,
        function="reduce_scatter_tensor",
        buffers=(False, True),
    ),
    "broadcast": CollectiveFacts(
        program="broadcast_perf",
        expected=lambda tensors: tensors.of(tensors.on.world - 1),
        pattern="from root",
        root="src",
    ),
    "reduce": CollectiveFacts(
        program="reduce_perf",
        # The other ranks' buffers are undefined.
        expected=lambda tensors: sum(tensors.of_all()) if tensors.is_last else None,
        pattern="to root",
        root="dst",
    ),
    "all_to_all": CollectiveFacts(
        program="alltoall_perf",
        expected=lambda tensors: tensors.on.torch.cat(tensors.of_all(block=tensors.on.place)),
        pattern="to all",
        times=1,
        function="all_to_all_single",
        buffers=(True, True),
        in_place=False,
        algorithms=(),
    ),
    "send_recv": CollectiveFacts(
        program="sendrecv_perf",
        expected=lambda tensors: tensors.of((tensors.on.place - 1) % tensors.on.world),
        pattern="to next",
        function=P2P,
        buffers=(False, False),
        algorithms=(),
    ),
    "send": CollectiveFacts(
        expected=lambda tensors: tensors.of(0) if tensors.on.place == 1 else None,
        pattern="to next",
        function=P2P,
        buffers=(False, False),
        algorithms=(),
    ),
}
"""To add a collective, add its name to `WorkloadCollective` and its row here."""
COLLECTIVE_WORDS: dict[Collective, str] = {
    **{name: name.replace("_", "-") for name in COLLECTIVES},
    "send_recv": "send/recv",
}
"""Collectives in words."""
PROGRAMS: dict[str, Collective] = {
    facts.program: name for name, facts in COLLECTIVES.items() if facts.program
}
"""Collectives of all GPUs by their programs of nccl-tests."""


def bus_gbps(collective: Collective, world: int, size: int, seconds: float) -> float:
    """Return NCCL's bus bandwidth, GB/s, of a buffer of `size` bytes in `seconds`.

    >>> bus_gbps("all_reduce", 4, 10**9, 1.0)  # bytes over a ring's slowest hop
    1.5
    """
    times = COLLECTIVES[collective].times
    return size / seconds * (times * (world - 1) / world if times else 1.0) / 1e9
