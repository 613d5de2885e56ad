"""Rows of collectives, the jobs that time them, and the bandwidths that follow.

A collective is a row of one table: its call, values, bandwidth and program.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from tccl_py.files import pick
from tccl_py.model.measurement import Backend
from tccl_py.nccl.tuner import Algorithm, Protocol
from tccl_py.rank_processes.rank import JobSlot, Rendezvous
from tccl_py.workloads.workload import Workload, WorkloadCollective, WorkloadDtype

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


Dtype = WorkloadDtype

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = tuple(KIB << shift for shift in range(0, 21, 2))
"""1 KiB to 1 GiB in factors of four."""
_LARGE_BYTES = 64 * MIB
"""Predictions are compared with bus bandwidths from this size on, else with the largest size."""

BATCHES = 5
"""Batches of a row in a job. More add time alone, as processes differ more than their batches: on
four H200 the ratios of a row's rounds spread by 3.8 %, by medians of 5 batches as of 9."""

FINAL_ROUNDS = 16
"""Of NCCL's own choice and of a contest's finalists, besides rounds that chose the finalists."""

PARALLEL = {"ddp": 1, "tp2": 2, "tp4": 4}
"""Names of training steps: DistributedDataParallel, and tensor parallel by the number of ranks."""

Groups = tuple[tuple[int, ...], ...]
"""Disjoint communicators that run at once, by ranks or, of one host, GPUs; () is one over all."""


class TunerChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Algorithm, protocol and channels of a call; 0 channels leave the number to NCCL."""

    algorithm: Algorithm
    protocol: Protocol
    channels: int = 0


class Contest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rounds of a row under NCCL's own choice of algorithm, protocol and channels, and others."""

    choices: tuple[TunerChoice, ...] | None = None
    """None are `all_choices`: sizes of training steps are timed beside matrix multiplications then.
    """
    rounds: int = FINAL_ROUNDS
    table: bool = False
    """Whether the plugin's table is timed instead of choices."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row of an experiment: a collective of `bytes` over all ranks or in `groups`.

    Of another `mode` it is a training step, as "ddp-eager", or calls by a means, "eager" or in a
    CUDA "graph". Beside it may run GEMM. A job times it in batches, or in the rounds of a
    `contest`.
    """

    collective: Collective = "all_reduce"
    dtype: Dtype = "float32"
    bytes: int = 0
    groups: Groups = ()
    mode: str = ""
    beside: tuple[Row, ...] = ()
    contest: Contest | msgspec.UnsetType = msgspec.UNSET

    @property
    def plain(self) -> Row:
        """Return the row alone, as results are named by it."""
        return Row(**pick(self, "collective", "dtype", "bytes", "groups", "mode", "beside"))

    @property
    def over_all(self) -> bool:
        """Return whether it is a collective over all ranks."""
        return bool(self.bytes) and not self.groups

    @property
    def trains(self) -> bool:
        """Return whether it is a training step."""
        return self.mode.partition("-")[0] in PARALLEL

    def bus_gbps(self, world: int, seconds: float) -> float:
        """Return the bus bandwidth, GB/s, of a call in a job of `world` ranks; see `bus_gbps`."""
        ranks = max(map(len, self.groups), default=world)
        return bus_gbps(self.collective, ranks, self.bytes, seconds)


GEMM = Row(mode="gemm")
"""Matrix multiplications that take twice as long as the row that they are beside."""


def rows_of(
    sizes: Iterable[int],
    collectives: Iterable[Collective] = ("all_reduce",),
    dtype: Dtype = "float32",
    *,
    groups: Iterable[Groups] = ((),),
) -> tuple[Row, ...]:
    """Return rows of each collective, over all ranks or in each of `groups`, by size in bytes."""
    return tuple(
        Row(collective=collective, dtype=dtype, bytes=size, groups=members)
        for collective, members, size in itertools.product(collectives, groups, sizes)
    )


def calls_of(workload: Workload) -> dict[Row, float]:
    """Return the rows of a workload, each with the number of its calls in a step."""
    calls: dict[Row, float] = {}
    for row in workload.rows:
        groups = () if row.groups == (tuple(range(workload.ranks)),) else row.groups
        timed = Row(**pick(row, "collective", "dtype", "bytes"), groups=groups)
        calls[timed] = calls.get(timed, 0.0) + row.calls
    return calls


def training_rows(world: int, backend: Backend) -> tuple[Row, ...]:
    """Return the training steps of jobs of `world` ranks: eager and, on GPUs, as CUDA graphs.

    >>> [row.mode for row in training_rows(2, "host")]
    ['ddp-eager', 'tp2-eager']
    """
    forms = ("eager", "graph") if backend == "cuda" else ("eager",)
    names = (name for name, parts in PARALLEL.items() if world % parts == 0)
    return tuple(Row(mode=f"{name}-{form}") for name, form in itertools.product(names, forms))


class Variant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds per call of a choice, one value a batch or a round."""

    choice: TunerChoice | None = None
    """None is NCCL's own."""
    seconds: tuple[float, ...] = ()
    beside: tuple[float, ...] = ()
    """The same beside matrix multiplications, if timed."""


class RowTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of a row on a rank, or of a contest on the slowest one."""

    row: Row
    variants: tuple[Variant, ...] = ()
    """Of a contest NCCL's own choice first, then each choice, or the plugin's table; none of a row
    that other ranks run."""
    final: int = 0
    """The last rounds, in which finalists are alone: which choices became finalists does not depend
    on their times."""
    skew: float = 0.0
    """The largest median difference between ranks, as a share."""
    fault: str = ""
    """How a means gave wrong values."""
    gemms: tuple[float, ...] = ()
    """How many times as long GEMMs took beside the row as alone, by batch."""
    trained: tuple[float | None, ...] = ()
    """Loss and norms of gradients after a few training steps; None where they are no numbers."""

    @property
    def seconds(self) -> tuple[float, ...]:
        """Return the seconds of the first variant."""
        return self.variants[0].seconds if self.variants else ()

    @property
    def finalists(self) -> tuple[Variant, ...]:
        """Return the choices that were not dropped."""
        rounds = len(self.seconds)
        return tuple(each for each in self.variants[1:] if len(each.seconds) == rounds)


def batches(row: Row, seconds: Iterable[float], trained: Iterable[float] = ()) -> RowTimes:
    """Return the times of a row by batch; without any, of a rank that has no part in it."""
    times = tuple(seconds)
    variants = (Variant(seconds=times),) if times else ()
    return RowTimes(row=row, variants=variants, trained=tuple(trained))


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work of a job's ranks: checks, then rows.

    Under a graph file, which fails communicators over fewer GPUs, groups have no checks, and no
    times but those of contests.
    """

    backend: Backend = "host"
    world: int = 0
    first_rank: int = 0
    """The host's."""
    rendezvous: Rendezvous | None = None
    """Where all meet over several hosts."""
    slot: JobSlot | None = None
    """That of one of concurrent jobs."""
    checks: bool = False
    """Whether values are checked, over all ranks."""
    check_groups: tuple[Groups, ...] = ()
    """Groups in which they are checked as well."""
    rows: tuple[Row, ...] = ()
    """In this order."""
    seconds: float = 0.045
    """For about so long a row without a contest is timed."""
    limit: float | None = None
    """Seconds after which no row begins; a job with a limit runs alone."""
    nccl_tests: str = ""
    """The path of a program of nccl-tests that does the work."""
    means: str = ""
    nodes: tuple[int, ...] = ()


class WrongValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A collective that gave wrong values, or raised an error, on a rank."""

    case: str
    rank: int
    what: str


class JobResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of one rank."""

    rank: int
    torch: str
    nccl: str = ""
    device: str = ""
    checked: int = 0
    """Compared cases."""
    wrong: tuple[WrongValue, ...] = ()
    left_out: tuple[str, ...] = ()
    """Collectives that the backend lacks."""
    times: tuple[RowTimes, ...] = ()
    """Those of the rows that began."""


def is_large(size: int) -> bool:
    """Return whether predictions are compared with bus bandwidths of this size."""
    return size >= _LARGE_BYTES


def large_gbps(rates: Sequence[tuple[int, float]]) -> float | None:
    """Return the median of the large sizes' rates, else the largest size's; None without any."""
    large = [gbps for size, gbps in rates if is_large(size)]
    return statistics.median(large or [max(rates)[1]]) if rates else None


def pairs_of(world: int) -> tuple[Groups, ...]:
    """Return all pairs of ranks, disjoint ones together (a round-robin tournament).

    >>> pairs_of(4)
    (((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    >>> pairs_of(2), len(pairs_of(5))
    ((), 5)
    """
    if world < 3:
        return ()
    first, *others = range(world + world % 2)
    rounds = []
    for _ in others:
        order = [first, *others]
        ends = zip(order, reversed(order), strict=True)
        pairs = [tuple(sorted(pair)) for pair in itertools.islice(ends, len(order) // 2)]
        rounds.append(tuple(sorted(pair for pair in pairs if pair[1] < world)))
        others = [others[-1], *others[:-1]]
    return tuple(rounds)


def groups_of(world: int) -> tuple[Groups, ...]:
    """Return the ranks in pairs and in halves, as smaller communicators divide a job.

    >>> groups_of(8)
    (((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7)))
    >>> groups_of(3), groups_of(2)
    ((((0, 1),),), ())
    """
    if world < 3:
        return ()
    ranks = tuple(range(world))
    return tuple(
        tuple(ranks[at : at + count] for at in range(0, world - 1, count))
        for count in sorted({2, (world + 1) // 2})
    )
