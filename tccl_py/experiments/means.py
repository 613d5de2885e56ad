"""Means to move bytes between GPUs, on a rank: NCCL, symmetric memory, copy engines, and others.

A means prepares calls of a row, each on buffers of its own, so every timed call can be compared
with a formula. FlashInfer and vLLM never ran where this was written: they did not fit there.

Copy engines copy to peers, or through pinned host memory. Every buffer that a rank writes for
another one has a state in shared memory, which streams wait for and set: no CPU takes part in a
transfer. On CPUs the same transfers run in program order.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple, NoReturn

from msgspec.structs import replace

from tccl_py.delivery.placement import prefer_numa_node
from tccl_py.errors import MeasurementError, size_text
from tccl_py.experiments.calls import (
    GRAPH_CALLS,
    Call,
    Tensors,
    call_of,
    capture_graph,
    run_beside,
    time_calls,
)
from tccl_py.experiments.spec import (
    BATCHES,
    COLLECTIVE_WORDS,
    COLLECTIVES,
    MIB,
    Collective,
    JobSpec,
    Row,
    RowTimes,
    batches,
)
from tccl_py.rank_processes.rank import Communicator
from tccl_py.workloads.workload import ELEMENT_BYTES

_SLOTS, _MOST_PIECES, _LEAST_PIECE = 2, 16, 4 << 20
"""Buffers that are filled in turn, pieces of a message, and bytes of a piece: the host takes longer
to launch the copies of smaller ones than they take."""
_APART, _POSTED, _FULL = 64, 1, 2
"""Bytes between states: the reader says that a buffer may be written, the writer that it was."""

Ends = tuple[Sequence[int], Sequence[int]]
"""The ranks that this rank sends to, and those that it receives from."""
NCCL = "nccl"
HANGS = "hangs:"
ROW_S = 20.0
"""Seconds after which a row hangs: its calls take a second at most."""
_MOST_CALLS, _MOST_BYTES = 200, 128 * MIB
"""Calls that follow each other in a batch, GRAPH_CALLS in a CUDA graph, and their bytes."""
_DRY_CALLS = 3
"""In a dry run, where each takes milliseconds."""
_WIDTH = 4096
_REDUCES: tuple[Collective, ...] = ("all_reduce",)
_MOVES: tuple[Collective, ...] = ("send", "send_recv", "all_gather")


class Copies:
    """Copies of this rank, those that leave and those that arrive at once.

    Each rank has pinned host memory that all map, without a name: states, and slots for pieces of
    messages of up to `size` bytes, on its NUMA node, of `nodes`.
    """

    def __init__(self, on: Communicator, size: int, nodes: Sequence[int]) -> None:
        self._on, self._states = on, _SLOTS * on.world * _APART
        self._slot_bytes = max(size // _MOST_PIECES // 4096 + 1, 2 * _LEAST_PIECE // 4096) * 4096
        # Of other priorities: streams that share a hardware queue would wait for each other.
        levels = (0, -1) if on.cuda else ()
        self._streams = [on.torch.cuda.Stream(priority=level) for level in levels]
        self._driver = ctypes.CDLL("libcuda.so.1") if on.cuda else None
        if nodes:
            # Where Linux refuses it, the memory is on the node of this rank's CPU.
            prefer_numa_node(nodes[on.rank])
        file, most = os.memfd_create("tccl-slots"), self._states + _SLOTS * self._slot_bytes
        os.ftruncate(file, most)
        path, paths = f"/proc/{os.getpid()}/fd/{file}", [""] * on.world
        mapped = partial(on.torch.from_file, shared=True, size=most, dtype=on.torch.uint8)
        mapped(path).zero_()
        on.dist.all_gather_object(paths, path)
        self._bytes = list(map(mapped, paths))
        self._addresses = [ctypes.c_uint64() for _ in self._bytes]
        for memory, address in zip(self._bytes, self._addresses, strict=True):
            if self._driver is not None:
                place = memory.data_ptr()
                _check(on.torch.cuda.cudart().cudaHostRegister(place, most, 3), "cudaHostRegister")
                ask = self._driver.cuMemHostGetDevicePointer_v2
                _check(ask(ctypes.byref(address), ctypes.c_void_p(place), 0), ask.__name__)
        on.dist.barrier()
        os.close(file)

    def to_peers(self, ends: Ends, sent: Any, places: Sequence[Any]) -> None:
        """Copy `sent` to its places in the memory of the ranks that receive it."""
        self._move(ends, [sent], lambda *_: places, lambda *_: None)

    def through_host(self, ends: Ends, sent: Any, received: Callable[[int], Any]) -> None:
        """Copy `sent` to the host, and what others sent from there, in pieces through slots."""
        size = sent.numel() * sent.element_size()
        pieces = max(1, min(_MOST_PIECES, size // _LEAST_PIECE))
        parts = {writer: received(writer).chunk(pieces) for writer in ends[1]}

        def slot_of(writer: int, number: int, like: Any) -> Any:
            first = self._states + number % _SLOTS * self._slot_bytes
            held = self._bytes[writer][first : first + like.numel() * like.element_size()]
            return held.view(like.dtype)

        def places(number: int, piece: Any) -> Iterable[Any]:
            return [slot_of(self._on.rank, number, piece)][: len(ends[0])]

        def take(writer: int, number: int) -> None:
            part = parts[writer][number]
            part.copy_(slot_of(writer, number, part), non_blocking=True)

        self._move(ends, sent.chunk(pieces), places, take)

    def _move(
        self,
        ends: Ends,
        pieces: Sequence[Any],
        places: Callable[[int, Any], Iterable[Any]],
        take: Callable[[int, int], None],
    ) -> None:
        """Copy pieces to their places in turn, and take those that others have copied."""
        (to, of), rank, cuda = ends, self._on.rank, self._on.torch.cuda
        for stream in self._streams:
            stream.wait_stream(cuda.current_stream())
        leaves, arrives = map(cuda.stream, self._streams) if self._streams else [nullcontext()] * 2
        with arrives:
            for writer, slot in product(of, range(min(_SLOTS, len(pieces)))):
                self._set(writer, slot, rank, _POSTED)
        for number, piece in enumerate(pieces):
            with leaves:
                for reader in to:
                    self._wait(rank, number, reader, _POSTED)
                for place in places(number, piece):
                    place.copy_(piece, non_blocking=True)
                for reader in to:
                    self._set(rank, number, reader, _FULL)
            with arrives:
                for writer in of:
                    self._wait(writer, number, rank, _FULL)
                    take(writer, number)
                    if number + _SLOTS < len(pieces):
                        self._set(writer, number, rank, _POSTED)
        for stream in self._streams:
            cuda.current_stream().wait_stream(stream)

    def _wait(self, writer: int, number: int, reader: int, state: int) -> None:
        """Wait in the current stream until a slot has a state."""
        at = (number % _SLOTS * self._on.world + reader) * _APART
        if self._driver is not None:
            # 1: until it is equal.
            self._operate("cuStreamWaitValue32_v2", writer, at, state, 1)
        while self._driver is None and self._bytes[writer][at] != state:
            time.sleep(0)

    def _set(self, writer: int, number: int, reader: int, state: int) -> None:
        """Set the state of a slot in the current stream, after what the stream has written."""
        at = (number % _SLOTS * self._on.world + reader) * _APART
        if self._driver is not None:
            self._operate("cuStreamWriteValue32_v2", writer, at, state, 0)
        else:
            self._bytes[writer][at] = state

    def _operate(self, name: str, writer: int, at: int, state: int, flags: int) -> None:
        stream = ctypes.c_void_p(self._on.torch.cuda.current_stream().cuda_stream)
        address = ctypes.c_uint64(self._addresses[writer].value + at)
        _check(getattr(self._driver, name)(stream, address, ctypes.c_uint32(state), flags), name)


def _check(code: Any, what: str) -> None:
    if int(code):
        raise MeasurementError(f"{what} gives CUDA error {int(code)}")


def calls_in_batch(row: Row) -> int:
    """Return the calls of a row that follow each other in a batch.

    >>> [calls_in_batch(Row(bytes=size * MIB)) for size in (1, 16, 256)]
    [128, 8, 1]
    """
    most = GRAPH_CALLS if row.mode == "graph" else _MOST_CALLS
    return max(1, min(most, _MOST_BYTES // row.bytes))


def refuse(why: str) -> NoReturn:
    """End this rank because the means cannot run here."""
    sys.exit(f"error: {why}")


class Job:
    """What the rows of a rank share, made when a row needs it."""

    def __init__(self, communicator: Communicator, spec: JobSpec) -> None:
        self.on, self.group = communicator, communicator.dist.group.WORLD
        self.rows, self._nodes = spec.rows, spec.nodes

    @cached_property
    def symmetric(self) -> tuple[Any, Any]:
        """A buffer in symmetric memory for all calls of a batch of any row, and its handle."""
        if not self.on.cuda:
            refuse("needs GPUs")
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        size = max(row.bytes * calls_in_batch(row) for row in self.rows)
        buffer = memory.empty(size // 2, dtype=self.on.torch.bfloat16, device=self.on.device)
        return buffer, memory.rendezvous(buffer, self.group)

    @cached_property
    def copies(self) -> Copies:
        """Copies by copy engines."""
        return Copies(self.on, max(row.bytes for row in self.rows), self._nodes)

    @cached_property
    def vllm(self) -> Any:
        """The custom all-reduce of vLLM."""
        module = _import_installed("vllm.distributed.device_communicators.custom_all_reduce")
        made = module.CustomAllreduce(self.group, self.on.device)
        getattr(made, "finalize_p2p", lambda: None)()
        return refuse("vLLM disables its custom all-reduce here") if made.disabled else made

    @cached_property
    def flashinfer(self) -> Call:
        """FlashInfer's all-reduce of tokens of _WIDTH elements."""
        module, backend = map(_import_installed, ("flashinfer.comm", "flashinfer.comm.mnnvl"))
        workspace = module.create_allreduce_fusion_workspace(
            backend="trtllm", world_size=self.on.world, rank=self.on.rank, hidden_dim=_WIDTH,
            max_token_num=max(row.bytes for row in self.rows) // (2 * _WIDTH) or 1,
            dtype=self.on.torch.bfloat16, group=self.group,
            comm_backend=backend.TorchDistBackend(group=self.group),
        )  # fmt: skip
        pattern = module.AllReduceFusionPattern.kAllReduce
        return partial(module.allreduce_fusion, workspace=workspace, pattern=pattern)


def _import_installed(name: str) -> Any:
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        refuse(f"{package} is not installed")
    return importlib.import_module(name)


class Task:
    """A row for a means: its ranks, the formula of its values, and buffers for each call.

    `on` are the ranks of the row's communicator or, of transfers, of this rank's group. A means may
    put other buffers into `sent` and `received`.
    """

    def __init__(self, job: Job, row: Row) -> None:
        mine = (group for group in row.groups if job.on.rank in group)
        members = next(mine, (job.on.rank,)) if row.groups else job.on.members
        self.on, self.row = dataclasses.replace(job.on, members=members), row
        self.gathers = row.collective == "all_gather"
        self.length = row.bytes // (ELEMENT_BYTES[row.dtype] * (len(members) ** self.gathers))
        self.tensors = Tensors(self.on, getattr(job.on.torch, row.dtype), self.length, False)
        count = range(calls_in_batch(row) if job.on.cuda else _DRY_CALLS)
        self.sent = [self.tensors.own() for _ in count]
        self.received = [self.tensors.empty(len(members) ** self.gathers) for _ in count]

    @property
    def ends(self) -> Ends:
        """Return the ranks that this rank sends to, and those that it receives from."""
        ranks, place, one_way = self.on.members, self.on.place, self.row.collective == "send"
        others = [*ranks[place + 1 :], *ranks[:place]]
        if self.gathers:
            return others, others
        return others[: place == 0 or not one_way], others[-1:] * (place == 1 or not one_way)

    def block(self, received: Any, writer: int) -> Any:
        """Return where a received buffer has what a rank sends."""
        first = self.on.members.index(writer) * self.length
        return received[first : first + self.length] if self.gathers else received

    def each(self, call: Call) -> list[Call]:
        """Return a call of each sent and received buffer."""
        return [partial(call, *pair) for pair in zip(self.sent, self.received, strict=True)]

    def each_new(self, call: Call) -> list[Call]:
        """Return a call of each sent buffer that returns what is received."""

        def keep(at: int) -> None:
            self.received[at] = call(self.sent[at])

        return [partial(keep, at) for at in range(len(self.sent))]


Prepare = Callable[[Job, Task], Sequence[Call] | None]
"""Returns a call for each buffer of a row; None where the means has none of this size."""


class Means(NamedTuple):
    """A means: the collectives that it can do, and whether it needs P2P between all GPUs."""

    collectives: tuple[Collective, ...]
    prepare: Prepare
    p2p: bool = True


def _nccl(_: Job, task: Task) -> Sequence[Call]:
    name, on = task.row.collective, task.on
    if on.world == 1:
        return [lambda: None]
    if name == "all_reduce":
        task.received[:] = task.sent
    count = len(COLLECTIVES[name].buffers)
    held = ([into, of][:count] for into, of in zip(task.received, task.sent, strict=True))
    return [call_of(on, name, each, on.members, root=on.members[0]) for each in held]


def _one_shot(job: Job, task: Task) -> Sequence[Call]:
    part, group = job.symmetric[0][: task.length], job.group.group_name
    reduce = job.on.torch.ops.symm_mem.one_shot_all_reduce_copy_out
    return task.each(lambda sent, received: reduce(part, sent, "sum", group, received))


def _in_place(operation: str, job: Job, task: Task) -> Sequence[Call] | None:
    """Prepare an operation whose buffer is copied into and out of, as vLLM does."""
    part, reduce = job.symmetric[0][: task.length], getattr(job.on.torch.ops.symm_mem, operation)
    if "multimem" in operation and not job.symmetric[1].multicast_ptr:
        refuse("NVLink has no multicast here")

    def call(sent: Any, received: Any) -> None:
        part.copy_(sent)
        reduce(part, "sum", job.group.group_name)
        received.copy_(part)

    return None if task.row.bytes % (16 * task.on.world) else task.each(call)


def _peer_copies(job: Job, task: Task) -> Sequence[Call]:
    buffer, handle = job.symmetric
    size, ends, rank = task.received[0].numel(), task.ends, job.on.rank
    first = range(0, size * len(task.received), size)
    task.received[:] = [buffer[at : at + size] for at in first]

    def call_at(at: int, sent: Any, received: Any) -> Call:
        others = [handle.get_buffer(reader, (size,), buffer.dtype, at) for reader in ends[0]]
        places = [task.block(one, rank) for one in (*others, *[received] * task.gathers)]
        return lambda: job.copies.to_peers(ends, sent, places)

    return [call_at(*of) for of in zip(first, task.sent, task.received, strict=True)]


def _host_copies(job: Job, task: Task) -> Sequence[Call]:
    def call(sent: Any, received: Any) -> None:
        if task.gathers:
            task.block(received, job.on.rank).copy_(sent)
        job.copies.through_host(task.ends, sent, partial(task.block, received))

    return task.each(call)


def _vllm(job: Job, task: Task) -> Sequence[Call] | None:
    fits = job.vllm.should_custom_ar(task.sent[0])
    return task.each_new(job.vllm.custom_all_reduce) if fits else None


def _flashinfer(job: Job, task: Task) -> Sequence[Call] | None:
    reduce = job.flashinfer
    made = task.each_new(lambda sent: reduce(input=sent.view(-1, _WIDTH)).view(-1))
    return None if task.length % _WIDTH else made


MEANS: dict[str, Means] = {
    NCCL: Means((*_REDUCES, *_MOVES), _nccl, p2p=False),
    "one-shot": Means(_REDUCES, _one_shot),
    "two-shot": Means(_REDUCES, partial(_in_place, "two_shot_all_reduce_")),
    "multimem": Means(_REDUCES, partial(_in_place, "multimem_all_reduce_")),
    "vllm": Means(_REDUCES, _vllm),
    "flashinfer": Means(_REDUCES, _flashinfer),
    "peer-copies": Means(_MOVES, _peer_copies),
    "host-copies": Means(_MOVES, _host_copies, p2p=False),
}
"""The means by name. To add one, add a function that prepares it, and its row here."""


def time_means(communicator: Communicator, spec: JobSpec) -> Iterator[RowTimes]:
    """Yield the times of each row of a job by its means; every result is compared."""
    job, prepare = Job(communicator, spec), MEANS[spec.means].prepare
    for row in spec.rows:
        late = threading.Timer(ROW_S, _end_late, [row])
        late.daemon = True
        late.start()
        yield _time_row(job, prepare, Task(job, row))
        late.cancel()


def _end_late(row: Row) -> None:
    """End this rank, whose calls wait for ever."""
    what = f"{COLLECTIVE_WORDS[row.collective]} of {size_text(row.bytes)}"
    print(f"error: {HANGS} {what} did not end in {ROW_S:g} s", flush=True)
    os._exit(1)


def _time_row(job: Job, prepare: Prepare, task: Task) -> RowTimes:
    row, calls, faults = task.row, prepare(job, task), dict[str, None]()
    if calls is None:
        return batches(row, ())
    expected, own = COLLECTIVES[row.collective].expected(task.tensors), task.sent[0].clone()

    def refill() -> None:
        for buffer in task.received:
            buffer.fill_(99)
        for buffer in task.sent:
            buffer.copy_(own)

    def compare() -> None:
        job.on.wait()
        for buffer in task.received if expected is not None else ():
            faults.update(dict.fromkeys(filter(None, [task.tensors.compare(buffer, expected)])))

    def every() -> None:
        for call in calls:
            call()

    measured = list[tuple[float, ...]]()
    with ExitStack() as stack:
        # The first calls connect the ranks, and are compared as well.
        every()
        compare()
        timed, fill = every, refill
        if row.mode == "graph" and job.on.cuda:
            # Both: while a GPU fills, the host launches what is timed.
            timed = stack.enter_context(capture_graph(job.on, every))
            fill = stack.enter_context(capture_graph(job.on, refill))
        alone = ((time_calls(job.on, lambda: (timed(), fill()), timed),) for _ in range(BATCHES))
        for each in run_beside(job.on, timed, refill) if row.beside else alone:
            measured.append(each)
            compare()
        job.on.dist.barrier()
    if task.on.world == 1:
        return batches(row, ())
    times = batches(row, [each[0] / len(calls) for each in measured])
    gemms = tuple(each[1] for each in measured if row.beside)
    return replace(times, fault=next(iter(faults), ""), gemms=gemms)
