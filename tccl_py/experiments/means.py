"""Means to move bytes between GPUs, on a rank: NCCL, symmetric memory, copy engines, and others.

A means prepares calls of a row, each on buffers of its own, so every timed call can be compared
with a formula. FlashInfer and vLLM never ran where this was written: they did not fit there.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn

from msgspec.structs import replace

from tccl_py.errors import size_text
from tccl_py.experiments.calls import (
    GRAPH_CALLS,
    Call,
    Tensors,
    call_of,
    capture_graph,
    time_calls,
)
from tccl_py.experiments.collectives import COLLECTIVE_WORDS, COLLECTIVES, Collective
from tccl_py.experiments.copies import Copies, Ends, piece_count
from tccl_py.experiments.spec import BATCHES, MIB, JobSpec, Row, RowTimes, batches
from tccl_py.experiments.together import run_beside
from tccl_py.rank_processes.rank import Communicator
from tccl_py.workloads.workload import ELEMENT_BYTES

NCCL = "nccl"
HANGS = "hangs:"
ROW_S = 20.0
"""Seconds after which a row hangs: its calls take a second at most."""
_MOST_CALLS, _MOST_BYTES = 200, 128 * MIB
"""Calls that follow each other in a batch, GRAPH_CALLS in a CUDA graph, and their bytes."""
_DRY_CALLS = 3
"""In a dry run, where each takes milliseconds."""


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


class Task(NamedTuple):
    """A row for a means: its ranks, the formula of its values, and buffers for each call."""

    row: Row
    on: Communicator
    """The ranks of the row's communicator or, of transfers, of the group of this rank."""
    tensors: Tensors
    sent: list[Any]
    received: list[Any]
    """A means may replace them by its own."""

    @property
    def ends(self) -> Ends:
        """Return the ranks that this rank sends to, and those that it receives from."""
        ranks, place = self.on.members, self.on.place
        others = [*ranks[place + 1 :], *ranks[:place]]
        if self.gathers:
            return others, others
        one_way = self.row.collective == "send"
        return others[: place == 0 or not one_way], others[-1:] * (place == 1 or not one_way)

    def block(self, received: Any, writer: int) -> Any:
        """Return where a received buffer has what a rank sends."""
        first, length = self.on.members.index(writer) * self.tensors.length, self.tensors.length
        return received[first : first + length] if self.gathers else received

    def each(self, call: Call) -> list[Call]:
        """Return a call of each sent and received buffer."""
        return [partial(call, *pair) for pair in zip(self.sent, self.received, strict=True)]

    @property
    def gathers(self) -> bool:
        """Return whether each rank has a block of what is received."""
        return self.row.collective == "all_gather"


class Job:
    """What the rows of a rank share: memory that all ranks map, made when a row needs it."""

    def __init__(self, communicator: Communicator, spec: JobSpec) -> None:
        self.on, self.spec = communicator, spec

    @cached_property
    def symmetric(self) -> tuple[Any, Any]:
        """A buffer in symmetric memory for all calls of a batch of any row, and its handle."""
        if not self.on.cuda:
            refuse("needs GPUs")
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        size = max(row.bytes * calls_in_batch(row) for row in self.spec.rows)
        kind, device = self.on.torch.bfloat16, self.on.device
        buffer = memory.empty(size // 2, dtype=kind, device=device)
        return buffer, memory.rendezvous(buffer, self.on.dist.group.WORLD)

    @cached_property
    def copies(self) -> Copies:
        """Copies by copy engines, with host memory for the largest piece, in whole pages."""
        pieces = (-(-row.bytes // piece_count(row.bytes)) for row in self.spec.rows)
        return Copies(self.on, -(-max(pieces) // 4096) * 4096, self.spec.nodes)

    @cached_property
    def vllm(self) -> Any:
        """The custom all-reduce of vLLM."""
        module = _import_installed("vllm.distributed.device_communicators.custom_all_reduce")
        made = module.CustomAllreduce(self.on.dist.group.WORLD, self.on.device)
        getattr(made, "finalize_p2p", lambda: None)()
        return refuse("vLLM disables its custom all-reduce here") if made.disabled else made

    @cached_property
    def flashinfer(self) -> tuple[Any, Any]:
        """FlashInfer's module of all-reduces, and a workspace for the largest row."""
        module, backend = map(_import_installed, ("flashinfer.comm", "flashinfer.comm.mnnvl"))
        group, kind = self.on.dist.group.WORLD, self.on.torch.bfloat16
        most = max(row.bytes for row in self.spec.rows) // (2 * _WIDTH) or 1
        made = module.create_allreduce_fusion_workspace(
            backend="trtllm", world_size=self.on.world, rank=self.on.rank, max_token_num=most,
            hidden_dim=_WIDTH, dtype=kind, comm_backend=backend.TorchDistBackend(group=group),
            group=group,
        )  # fmt: skip
        return module, made


_WIDTH = 4096
"""Elements of a token, in which FlashInfer counts."""


def _import_installed(name: str) -> Any:
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        refuse(f"{package} is not installed")
    return importlib.import_module(name)


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
        held: list[list[Any]] = [[buffer] for buffer in task.sent]
    else:
        held = [list(pair) for pair in zip(task.received, task.sent, strict=True)]
    root = on.members[0]
    return [call_of(on, name, buffers, on.members, root=root) for buffers in held]


def _one_shot(job: Job, task: Task) -> Sequence[Call]:
    part, operations, group = _symmetric(job, task)

    def call(sent: Any, received: Any) -> None:
        operations.one_shot_all_reduce_copy_out(part, sent, "sum", group, received)

    return task.each(call)


def _symmetric(job: Job, task: Task) -> tuple[Any, Any, str]:
    """Return a row's part of symmetric memory, torch's operations on it, and its group."""
    part = job.symmetric[0][: task.tensors.length]
    return part, job.on.torch.ops.symm_mem, job.on.dist.group.WORLD.group_name


def _reduced_in_place(operation: str) -> Prepare:
    """Return how an operation is prepared whose buffer is copied into and out of, as vLLM does."""

    def prepare(job: Job, task: Task) -> Sequence[Call] | None:
        part, operations, group = _symmetric(job, task)
        if operation == "multimem_all_reduce_" and not job.symmetric[1].multicast_ptr:
            refuse("NVLink has no multicast here")
        if task.row.bytes % (16 * task.on.world):
            return None
        reduce = getattr(operations, operation)

        def call(sent: Any, received: Any) -> None:
            part.copy_(sent)
            reduce(part, "sum", group)
            received.copy_(part)

        return task.each(call)

    return prepare


def _peer_copies(job: Job, task: Task) -> Sequence[Call]:
    buffer, handle = job.symmetric
    size = task.received[0].numel()
    first = range(0, size * len(task.received), size)
    task.received[:] = [buffer[at : at + size] for at in first]

    ends, rank = task.ends, job.on.rank

    def call_at(at: int, sent: Any, received: Any) -> Call:
        others = [handle.get_buffer(reader, (size,), buffer.dtype, at) for reader in ends[0]]
        places = [task.block(other, rank) for other in others]
        places += [task.block(received, rank)] if task.gathers else []
        return lambda: job.copies.to_peers(ends, sent, places)

    return [call_at(*of) for of in zip(first, task.sent, task.received, strict=True)]


def _host_copies(job: Job, task: Task) -> Sequence[Call]:
    def call(sent: Any, received: Any) -> None:
        if task.gathers:
            task.block(received, job.on.rank).copy_(sent)
        job.copies.through_host(task.ends, sent, partial(task.block, received))

    return task.each(call)


def _vllm(job: Job, task: Task) -> Sequence[Call] | None:
    made = job.vllm
    if not made.should_custom_ar(task.sent[0]):
        return None

    def call(at: int) -> None:
        task.received[at] = made.custom_all_reduce(task.sent[at])

    return [partial(call, at) for at in range(len(task.sent))]


def _flashinfer(job: Job, task: Task) -> Sequence[Call] | None:
    module, workspace = job.flashinfer
    if task.tensors.length % _WIDTH:
        return None
    pattern = module.AllReduceFusionPattern.kAllReduce

    def call(at: int) -> None:
        held = task.sent[at].view(-1, _WIDTH)
        made = module.allreduce_fusion(input=held, workspace=workspace, pattern=pattern)
        task.received[at] = made.view(-1)

    return [partial(call, at) for at in range(len(task.sent))]


_REDUCES: tuple[Collective, ...] = ("all_reduce",)
_MOVES: tuple[Collective, ...] = ("send", "send_recv", "all_gather")
MEANS: dict[str, Means] = {
    NCCL: Means((*_REDUCES, *_MOVES), _nccl, p2p=False),
    "one-shot": Means(_REDUCES, _one_shot),
    "two-shot": Means(_REDUCES, _reduced_in_place("two_shot_all_reduce_")),
    "multimem": Means(_REDUCES, _reduced_in_place("multimem_all_reduce_")),
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
        yield _time_row(job, prepare, row)
        late.cancel()


def _end_late(row: Row) -> None:
    """End this rank, whose calls wait for ever."""
    what = f"{COLLECTIVE_WORDS[row.collective]} of {size_text(row.bytes)}"
    print(f"error: {HANGS} {what} did not end in {ROW_S:g} s", flush=True)
    os._exit(1)


def _time_row(job: Job, prepare: Prepare, row: Row) -> RowTimes:
    task = _task(job.on, row)
    calls, wait = prepare(job, task), job.on.wait
    if calls is None:
        return batches(row, ())
    expected = COLLECTIVES[row.collective].expected(task.tensors)
    own, faults = task.sent[0].clone(), dict[str, None]()

    def refill() -> None:
        for buffer in task.received:
            buffer.fill_(99)
        for buffer in task.sent:
            buffer.copy_(own)

    def compare() -> None:
        wait()
        for buffer in task.received if expected is not None else ():
            faults.update(dict.fromkeys(filter(None, [task.tensors.compare(buffer, expected)])))

    def every() -> None:
        for call in calls:
            call()

    seconds, gemms = list[float](), list[float]()
    with ExitStack() as stack:
        # The first calls connect the ranks, and are compared as well.
        every()
        compare()
        timed, fill = every, refill
        if row.mode == "graph" and job.on.cuda:
            # Both: while a GPU fills, the host launches what is timed.
            timed = stack.enter_context(capture_graph(job.on, every))
            fill = stack.enter_context(capture_graph(job.on, refill))

        def lead() -> None:
            timed()
            fill()

        if row.beside:
            for together, gemm in run_beside(job.on, timed, refill):
                seconds.append(together)
                gemms.append(gemm)
                compare()
        for _ in range(0 if row.beside else BATCHES):
            seconds.append(time_calls(job.on, lead, timed))
            compare()
        job.on.dist.barrier()
    if task.on.world == 1:
        return batches(row, ())
    times = batches(row, [each / len(calls) for each in seconds])
    return replace(times, fault=next(iter(faults), ""), gemms=tuple(gemms))


def _task(communicator: Communicator, row: Row) -> Task:
    """Return a row's task, each of its buffers filled."""
    mine = (group for group in row.groups if communicator.rank in group)
    members = next(mine, (communicator.rank,)) if row.groups else communicator.members
    on = dataclasses.replace(communicator, members=members)
    facts = COLLECTIVES[row.collective]
    parts = on.world if any(facts.buffers) else 1
    length = row.bytes // (ELEMENT_BYTES[row.dtype] * parts)
    tensors = Tensors(on, getattr(on.torch, row.dtype), length, False)
    count = calls_in_batch(row) if on.cuda else _DRY_CALLS
    sent = [tensors.own() for _ in range(count)]
    return Task(row, on, tensors, sent, [tensors.empty(parts) for _ in range(count)])
