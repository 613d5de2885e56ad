"""Collectives on a rank: values checked by a formula; calls timed in batches, and beside GEMM.

Each rank computes the formula in integers on its own device: no communicated value is used, and
hundreds of cases take seconds. All values and sums are whole numbers that even bfloat16 holds
exactly up to 256 ranks, so comparisons need no tolerance. Neighbours differ, so a shifted block
shows.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec

from tccl_py.experiments.spec import (
    BATCHES,
    COLLECTIVE_WORDS,
    COLLECTIVES,
    MIB,
    P2P,
    Collective,
    JobResult,
    Row,
    WrongValue,
)
from tccl_py.rank_processes.rank import Communicator
from tccl_py.workloads.workload import ELEMENT_BYTES

COUNTS = (1, 3, 1027, 65_537, 1_048_583)
"""Elements per rank; odd, so that no protocol's block is full, and in the range of every one."""
DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8")
_LARGE = 100_000
"""From this many elements on, two dtypes suffice."""
_LARGE_DTYPES = ("float32", "bfloat16")
_COUNTS_OF_GROUPS = (3, 1027, 65_537)
_ABSENT = ("not support", "not implemented", "unsupported", "not currently supported")
"""Words of torch's errors for a collective or dtype that the backend lacks."""
_Pairs = Sequence[tuple[Any, Any]]
_HELD_AS = {
    "uint32": "int32", "uint64": "int64", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8",
}  # fmt: skip
"""Elements of the same size, in the place of those that torch does not add up."""
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

Call = Callable[..., Any]
_WARM_UPS = 2
_MOST_GEMMS = 10_000
Together = Callable[[Sequence[Call]], tuple[float, ...]]
"""Begins calls at the same time, and returns the seconds of each."""


def run_checks(communicator: Communicator, result: JobResult) -> JobResult:
    """Run all cases of all collectives, and add the findings to this rank's result.

    Groups of ranks have fewer cases. A wrong case does not end the rest.
    """
    checked, wrong, left_out = result.checked, list(result.wrong), set(result.left_out)
    over = "" if communicator.group is None else f" over ranks {communicator.members}"
    cases = [
        (dtype, count, asynchronous)
        for count in (_COUNTS_OF_GROUPS if over else COUNTS)
        for dtype in (DTYPES if count < _LARGE and not over else _LARGE_DTYPES)
        for asynchronous in (False, True)
    ]
    for (name, check), case in itertools.product(COLLECTIVE_CHECKS.items(), cases):
        dtype, count, asynchronous = case
        try:
            kind = getattr(communicator.torch, dtype)
            tensors = Tensors(communicator, kind, count, asynchronous)
            fault = next(filter(None, itertools.starmap(tensors.compare, check(tensors))), "")
        except Exception as error:
            text = str(error) or type(error).__name__
            if any(words in text.lower() for words in _ABSENT):
                left_out.add(f"{name} of {dtype}")
                continue
            fault = text.splitlines()[0][:300]
        checked += 1
        if fault:
            named = f"{name}, {dtype} x {count}{', async' if asynchronous else ''}{over}"
            wrong.append(WrongValue(case=named, rank=communicator.rank, what=fault))
    return msgspec.structs.replace(
        result, checked=checked, wrong=tuple(wrong), left_out=tuple(sorted(left_out))
    )


class Tensors(NamedTuple):
    """Tensors and calls of a case on one rank: its dtype, number of elements, and kind of call."""

    on: Communicator
    dtype: Any
    length: int
    asynchronous: bool

    def of(self, rank: int, *, block: int = 0) -> Any:
        """Return what member `rank` contributes, for member `block` where blocks differ: 0 to 7.

        Of many members it is less, so that bfloat16 holds the sum of all exactly.
        """
        torch, most = self.on.torch, next((m for m in (7, 3) if m * self.on.world <= 256), 1)
        index = torch.arange(self.length, dtype=torch.int64, device=self.on.device)
        index = index + (rank * 1_000_003 + block * 500_009)
        # The high bits of a product with an odd constant look random (Knuth, volume 3, 6.4).
        return ((index * 2_654_435_761) >> 13) & most

    @property
    def is_last(self) -> bool:
        """Return whether this rank is the last member, the root of checks."""
        return self.on.place == self.on.world - 1

    def own(self, *, block: int = 0) -> Any:
        """Return this rank's contribution in the case's dtype."""
        return self.of(self.on.place, block=block).to(self.dtype)

    def own_blocks(self) -> list[Any]:
        """Return this rank's block for every rank."""
        return [self.own(block=rank) for rank in range(self.on.world)]

    def of_all(self, *, block: int = 0) -> list[Any]:
        """Return every rank's contribution."""
        return [self.of(rank, block=block) for rank in range(self.on.world)]

    def empty(self, parts: int = 1) -> Any:
        """Return a buffer of a value that no collective gives, so unwritten elements show."""
        shape = (parts * self.length,)
        return self.on.torch.full(shape, 99, dtype=self.dtype, device=self.on.device)

    def run(self, call: Call) -> None:
        """Run a call of a collective, and wait for it."""
        work = call(async_op=self.asynchronous)
        if work is not None:
            work.wait()

    def compare(self, values: Any, expected: Any) -> str:
        """Return "" if equal, else the first difference."""
        expected = expected.to(self.dtype)
        if self.on.torch.equal(values, expected):
            return ""
        differ = (values != expected).nonzero()
        first = int(differ[0])
        return (
            f"{len(differ)} of {len(expected)} values are wrong, the first at {first}: "
            f"{values[first].item()} instead of {expected[first].item()}"
        )


# Each check runs a collective, and returns what it gave and what it has to give.


def _call(collective: Collective, tensors: Tensors) -> _Pairs:
    """Check a collective of the table; the last member is the root."""
    facts, on = COLLECTIVES[collective], tensors.on
    if len(facts.buffers) == 2:
        received, sent = facts.buffers
        held = [tensors.empty(on.world if received else 1)]
        held.append(on.torch.cat(tensors.own_blocks()) if sent else tensors.own())
    else:
        held = [tensors.own() if tensors.is_last or facts.root != "src" else tensors.empty()]
    tensors.run(call_of(on, collective, held, on.members, root=on.members[-1]))
    expected = facts.expected(tensors)
    return [] if expected is None else [(held[0], expected)]


def _scatter(tensors: Tensors) -> _Pairs:
    got, on = tensors.empty(), tensors.on
    blocks = None if on.place else tensors.own_blocks()
    tensors.run(partial(on.dist.scatter, got, blocks, src=on.members[0], group=on.group))
    return [(got, tensors.of(0, block=on.place))]


def _gather(tensors: Tensors) -> _Pairs:
    on = tensors.on
    parts = None if on.place else [tensors.empty() for _ in on.members]
    tensors.run(partial(on.dist.gather, tensors.own(), parts, dst=on.members[0], group=on.group))
    return list(zip(parts or (), tensors.of_all(), strict=False))


def _largest(tensors: Tensors) -> _Pairs:
    held, on = tensors.own(), tensors.on
    tensors.run(partial(on.dist.all_reduce, held, op=on.dist.ReduceOp.MAX, group=on.group))
    return [(held, on.torch.stack(tensors.of_all()).max(dim=0).values)]


COLLECTIVE_CHECKS: dict[str, Callable[[Tensors], _Pairs]] = {
    **{COLLECTIVE_WORDS[name]: partial(_call, name) for name in COLLECTIVES},
    "all-reduce of maxima": _largest,
    "scatter": _scatter,
    "gather": _gather,
}


# Timing: calls of a row, in batches.


def warm_up(communicator: Communicator) -> None:
    """Keep the GPU busy until its clocks are up: an idle GPU runs at a fraction of them."""
    if not communicator.cuda:
        return
    multiply, until = gemms(communicator, 4096), time.monotonic() + _WAKE_S
    while time.monotonic() < until:
        multiply()
        communicator.wait()


def gemms(communicator: Communicator, width: int) -> Callable[..., None]:
    """Return a function that multiplies square matrices on this rank's device, once or `count`."""
    torch = communicator.torch
    dtype = torch.bfloat16 if communicator.cuda else torch.float32
    square = torch.ones((width, width), dtype=dtype, device=communicator.device)
    result = torch.empty_like(square)

    def multiply(count: int = 1) -> None:
        for _ in range(count):
            torch.mm(square, square, out=result)

    return multiply


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
    probed = communicator.maximum(time_calls(communicator, call, repeat(call, _PROBED))) / _PROBED
    calls = max(1, min(MAX_CALLS, int(seconds / max(probed, 1e-7))))
    if not communicator.cuda or size > GRAPHED_BYTES:
        several = repeat(call, calls)
        return lambda: time_calls(communicator, call, several) / calls
    # 4. Replay CUDA graphs of small calls; the first replay covers the launch of the timed ones.
    calls = min(calls, GRAPH_CALLS)
    several = repeat(call, calls)

    def time_replays(replay: Call, count: int) -> float:
        return time_calls(communicator, replay, repeat(replay, count)) / (calls * count)

    def time_new_graph() -> float:
        with capture_graph(communicator, several) as replay:
            return time_replays(replay, _REPLAYS)

    if stack is None:
        return time_new_graph
    replay = stack.enter_context(capture_graph(communicator, several))
    probed = communicator.maximum(time_calls(communicator, replay, replay))
    return partial(time_replays, replay, max(1, int(seconds / max(probed, 1e-7))))


def row_call(communicator: Communicator, row: Row) -> Call:
    """Return a call of the row's collective on buffers of its own."""
    world, torch = communicator.world, communicator.torch
    facts = COLLECTIVES[row.collective]

    def zeros(parts: int, *, shares: int = 1) -> Any:
        # Repeated sums of other values overflow.
        count = max(1, -(-row.bytes // (ELEMENT_BYTES[row.dtype] * shares)))
        kind = getattr(torch, _HELD_AS.get(row.dtype, row.dtype))
        return torch.zeros(count * parts, dtype=kind, device=communicator.device)

    if world == 1:
        return zeros(1).zero_  # type: ignore[no-any-return]
    shares = world if any(facts.buffers) else 1
    held = [zeros(world if blocks else 1, shares=shares) for blocks in facts.buffers]
    # Transfers follow a group's own order of ranks.
    mine = (group for group in row.groups if communicator.rank in group)
    ranks = next(mine, communicator.members)
    return call_of(communicator, row.collective, held, ranks, root=communicator.members[0])


def call_of(
    on: Communicator, name: Collective, held: Sequence[Any], ranks: Sequence[int], *, root: int
) -> Call:
    """Return a call of a collective on these buffers."""
    facts = COLLECTIVES[name]
    if facts.function == P2P:
        return transfers(on, name, ranks, *held)
    more = {facts.root: root} if facts.root else {}
    function = getattr(on.dist, facts.function or name)
    return partial(function, *held, group=on.group, **more)


def transfers(
    on: Communicator, collective: Collective, ranks: Sequence[int], received: Any, sent: Any
) -> Call:
    """Return a call that sends to the next of `ranks` and receives from the one before.

    That is `send_recv`; by `send` just the first one sends, and the second receives.
    """
    dist, at = on.dist, ranks.index(on.rank)
    ends = (dist.isend, sent, ranks[(at + 1) % len(ranks)]), (dist.irecv, received, ranks[at - 1])
    parts = ends if collective == "send_recv" else ends[at : at + 1]

    def exchange(*, async_op: bool = False) -> None:  # noqa: ARG001
        operations = [dist.P2POp(*end, on.group) for end in parts]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    return exchange


def repeat(call: Call, count: int) -> Call:
    """Return a call that makes `count` calls."""

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
def capture_graph(communicator: Communicator, calls: Call, *, stream: Any = None) -> Iterator[Call]:
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


def run_beside(
    communicator: Communicator, call: Call, refill: Call
) -> Iterator[tuple[float, float]]:
    """Yield the seconds of `call` beside GEMM, and how many times as long GEMM takes beside it.

    `refill` runs before each round, after which a caller may look at what the call gave.
    """
    begin = stopwatch(communicator)
    near = repeat(gemms_beside(communicator, begin, call), 2)
    for number in range(_WARM_UPS + BATCHES):
        (alone,) = begin([near])
        refill()
        # GEMM is launched first.
        beside, seconds = begin([near, call])
        if number >= _WARM_UPS:
            yield seconds, beside / alone


def stopwatch(communicator: Communicator) -> Together:
    """Return a function that begins calls at the same time on all ranks, and times each.

    On a GPU each call has a stream, which its operations use or wait for, and the device's clock;
    elsewhere it has a thread.
    """
    streams: list[Any] = []

    def begin(calls: Sequence[Call]) -> tuple[float, ...]:
        communicator.dist.barrier()
        communicator.wait()
        if not communicator.cuda:
            return time_threads(calls)
        cuda = communicator.torch.cuda
        while len(streams) < len(calls):
            streams.append(cuda.Stream())
        begun, *ends = (cuda.Event(enable_timing=True) for _ in range(len(calls) + 1))
        begun.record()
        for stream, call, end in zip(streams, calls, ends, strict=False):
            stream.wait_event(begun)
            with cuda.stream(stream):
                call()
                end.record()
        communicator.wait()
        return tuple(begun.elapsed_time(end) / 1e3 for end in ends)

    return begin


def time_threads(calls: Sequence[Call]) -> tuple[float, ...]:
    """Begin calls at the same time in threads; return the seconds of each when all are done.

    Copies, GEMMs and sockets release Python's lock.
    """
    gate = threading.Barrier(len(calls) + 1)

    def run(call: Call) -> float:
        gate.wait()
        call()
        return time.perf_counter()

    with ThreadPoolExecutor(max_workers=max(1, len(calls))) as pool:
        ends = [pool.submit(run, call) for call in calls]
        # Before the gate opens: the thread that opens it may get the processor back last.
        begun = time.perf_counter()
        gate.wait()
        return tuple(end.result() - begun for end in ends)


def gemms_beside(communicator: Communicator, begin: Together, other: Call) -> Call:
    """Return matrix multiplications that take about as long as another call, on all ranks alike."""
    multiply = gemms(communicator, 4096 if communicator.cuda else 256)
    for _ in range(_WARM_UPS + 1):
        (seconds,), (of_one,) = begin([other]), begin([multiply])
    count = max(1, min(_MOST_GEMMS, round(seconds / max(of_one, 1e-6))))
    return partial(multiply, int(communicator.maximum(count)))
