"""A GPU as a device: memory that peers reach, lanes as thread blocks, copies by copy engines."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from tccl_profiler.messages import Pinged, Run, Share, Start, Started
from tccl_profiler.nccl_links import Communicators, Memory
from tccl_profiler.program import (
    COUNTER_AREA_BYTES,
    COUNTER_BYTES,
    COUNTERS,
    MAX_COPIES,
    MAX_REPEATS,
    Address,
    End,
    Lane,
)
from tccl_profiler.shared_memory import (
    FLAG_AT,
    MAX_LANES,
    Control,
    Segment,
    answer_at,
    question_at,
    records_at,
    stamps_at,
)
from tccl_profiler.watch import gpu_share
from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import index_of
from tccl_py.nccl_library import check_cuda, cuda_driver

NAMES = ("pump", "pump_check", "echo", "stamp")
OPTIONS = ("-std=c++17",)
_WORKERS = 512
_THREADS = _WORKERS + 32  # NCCL's Simple protocol: 512 threads that copy, and a warp that posts
_LANE_WORDS = 2 * 5 + 6
_TIMING = np.dtype([("words", np.uint64, 6)])
_AFTER_RELEASE_NS = 15_000
"""Lanes start 20 us after they saw the flag (pump.cu); what follows a kernel takes 5 to begin."""
_PING_NS = 1_000_000_000
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_MAPPED = 2  # cudaHostRegisterMapped
_PORTABLE = 1  # cudaHostRegisterPortable
_TO_DEVICE, _BY_ADDRESS = 1, 4  # cudaMemcpyKind
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_TAKEN = (_OUT_OF_MEMORY, 46)  # cudaErrorDevicesUnavailable
_WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_MIB = 1 << 20


def kernel_source(blocks: int = 1) -> str:
    """Return the CUDA C++ source of all kernels, of which `blocks` fit on a multiprocessor."""
    return f"constexpr int kBlocks = {blocks};\n{source_text('memory.cu', 'pump.cu')}"


def source_text(*names: str) -> str:
    """Return the text of this package's files of CUDA C++, one after the other."""
    folder = resources.files(__package__)
    return "".join(folder.joinpath(name).read_text("utf-8") for name in names)


def load_kernels(cupy: Any, blocks: int) -> dict[str, Any]:
    """Return all kernels by name for the current GPU; cupy keeps the compilation on disk."""
    module = cupy.RawModule(code=kernel_source(blocks), options=OPTIONS)
    return {name: module.get_function(name) for name in NAMES}


class CudaDevice:
    """One GPU as a `Device`; CUDA takes 0.5 GiB beside what is allocated."""

    def __init__(self, start: Start, control: Control) -> None:
        import cupy  # noqa: PLC0415 (only where there are GPUs)

        self._start, self._control = start, control
        self._who = f"GPU {index_of(start.device)}"
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._error = self._runtime.CUDARuntimeError
        self._bases: dict[str, int] = {}
        self._segments: dict[str, Segment] = {}
        self._opened: list[int] = []
        self._allocated: list[int] = []
        self._unreachable: dict[str, str] = {}
        self._closing = contextlib.ExitStack()

    def open(self) -> tuple[Started, tuple[int, ...]]:
        """Take the GPU by its bus id, allocate, compile, and launch every kernel once."""
        start = self._start
        try:
            number = self._runtime.deviceGetByPCIBusId(start.bus_id)
            self._runtime.setDevice(number)
            properties = self._runtime.getDeviceProperties(number)
            self._arena = self._allocate(start.arena_bytes, "arena")
            self._user = self._allocate(start.user_bytes, "data to send")
            self._keep = self._allocate(start.user_bytes, "data to keep")
            self._lanes = self._allocate(MAX_LANES * _LANE_WORDS * 8, "lanes")
            self._gates = self._allocate(MAX_REPEATS * 8, "gates")
        except self._error as error:
            advice = "; end what else uses it" if error.status in _TAKEN else ""
            raise MeasurementError(f"{self._who}: {error}{advice}") from error
        beside = self._cupy.cuda.Stream(non_blocking=True)
        memory = Memory(
            *(self._user, self._keep, start.user_bytes),
            copy=lambda to, of, size: self._runtime.memcpy(to, of, size, _BY_ADDRESS),
            enter=lambda: self._runtime.setDevice(number),
            stream=int(beside.ptr),
            settle=beside.synchronize,
        )
        self.links = Communicators(start.device, index_of(start.device), memory)
        self._closing.callback(self.links.close)
        self._bases[start.device] = self._arena
        self._flag = self._register(self._control.segment) + FLAG_AT
        self._control_base = self._flag - FLAG_AT
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        # All at once, because making one waits for the others, which may wait for the flag.
        self._copy_streams = [self._cupy.cuda.Stream(non_blocking=True) for _ in range(MAX_COPIES)]
        # MPS may give programs the same multiprocessors, whose blocks would wait for each other.
        most = int(properties["maxThreadsPerMultiProcessor"]) // _THREADS
        blocks = min(2 if gpu_share() else 1, most)
        self._load(blocks)
        started = Started(
            lanes=min(MAX_LANES, blocks * int(properties["multiProcessorCount"])),
            arena_bytes=start.arena_bytes,
            handle=bytes(self._runtime.ipcGetMemHandle(self._arena)),
        )
        return started, ()

    def _allocate(self, size: int, what: str) -> int:
        try:
            pointer = int(self._runtime.malloc(size))
        except self._error as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            free, total = self._runtime.memGetInfo()
            raise MeasurementError(
                f"{self._who} has no {size // _MIB} MiB for the {what}: {free // _MIB} of "
                f"{total // _MIB} MiB are free; end what else uses it"
            ) from error
        self._allocated.append(pointer)
        self._runtime.memset(pointer, 0, size)
        return pointer

    def _load(self, blocks: int) -> None:
        """Launch each kernel once: the first launch loads it, and would hang behind a wait."""
        self._kernels = load_kernels(self._cupy, blocks)
        scratch = self._lanes
        timing = np.zeros(1, _TIMING)
        timing["words"][0, -1] = self._gates
        for name in ("pump", "pump_check"):
            # No patience: a lane that is not released writes its record and ends.
            self._kernels[name]((1,), (_THREADS,), (scratch, scratch, self._flag, timing[0]))
        self._kernels["echo"]((1,), (1,), (scratch, scratch, 0, 0, 0))
        self._kernels["stamp"]((1,), (1,), (np.uint64(scratch), np.uint64(0)))
        self._runtime.memset(scratch, 0, MAX_LANES * _LANE_WORDS * 8)
        self._runtime.memset(self._gates, 0, MAX_REPEATS * 8)
        self._runtime.deviceSynchronize()

    def _register(self, segment: Segment) -> int:
        try:
            self._runtime.hostRegister(segment.address, segment.size, _MAPPED | _PORTABLE)
            return int(self._runtime.pointerGetAttributes(segment.address).devicePointer)
        except self._error as error:
            raise MeasurementError(
                f"{self._who}: {segment.size // _MIB} MiB of host memory ({segment.label}) cannot "
                f"be pinned ({error}); raise `ulimit -l`"
            ) from error

    def share(self, share: Share, segment: Segment | None = None) -> None:
        """Pin host memory for this GPU, or open a peer's arena (refused at use if unreachable)."""
        space = share.space
        if segment is not None:
            self._forget(space)
            self._bases[space] = self._register(segment)
            self._segments[space] = segment
            return
        try:
            base = int(self._runtime.ipcOpenMemHandle(share.handle, _LAZY_PEER_ACCESS))
        except self._error as error:
            self._unreachable[space] = str(error)
            return
        self._opened.append(base)
        self._bases[space] = base

    def _forget(self, space: str) -> None:
        segment = self._segments.pop(space, None)
        if segment is not None:
            self._runtime.hostUnregister(segment.address)
            segment.close()

    def run(self, run: Run) -> None:
        """Upload the lanes, launch all repeats, which wait for the flag in order, and wait."""
        lanes = run.program.lanes
        rows = [self._words(lane, len(lanes), i) for i, lane in enumerate(lanes)]
        words = np.array(rows, np.uint64)
        for copy in run.program.copies:
            # Refuses memory out of reach before anything is queued, which would wait for ever.
            self._end_words(copy.incoming or copy.outgoing)
        try:
            self._runtime.memset(self._arena, 0, COUNTER_AREA_BYTES)
            self._runtime.memset(self._gates, 0, MAX_REPEATS * 8)
            if lanes:
                self._runtime.memcpy(self._lanes, words.ctypes.data, words.nbytes, _TO_DEVICE)
            self._runtime.deviceSynchronize()
            for repeat in range(run.repeats):
                if lanes:
                    self._launch(run, repeat)
                self._queue_copies(run, repeat)
        except self._error as error:
            raise RuntimeError(f"{self._who}: {error}") from error
        self.finish()

    def _launch(self, run: Run, repeat: int) -> None:
        timing = np.zeros(1, _TIMING)
        timing["words"][0] = (
            *(run.epoch + repeat, run.warm_ns, run.window_ns, run.patience_ns),
            *(repeat * COUNTERS * COUNTER_BYTES, self._gates + repeat * 8),
        )
        records = self._control_base + records_at(self._start.slot, repeat)
        kernel = self._kernels["pump_check" if run.check else "pump"]
        arguments = (self._lanes, records, self._flag, timing[0])
        kernel((len(run.program.lanes),), (_THREADS,), arguments, stream=self._stream)

    def _words(self, lane: Lane, lanes: int, number: int) -> Sequence[int]:
        slices = max(1, self._start.user_bytes // lanes // lane.slice_bytes)
        if lane.slice_bytes > self._start.user_bytes:
            raise MeasurementError(
                f"{self._who}: a slice of {lane.slice_bytes} bytes is more than the "
                f"{self._start.user_bytes} that are sent from"
            )
        # Lanes share what is sent where their slices are too large for each to have its own.
        spare = self._start.user_bytes - slices * lane.slice_bytes
        at = number * slices * lane.slice_bytes % (spare + 16) // 16 * 16
        return (
            *self._end_words(lane.incoming),
            *self._end_words(lane.outgoing),
            *(self._user + at, self._keep + at, slices),
            *(lane.slice_bytes, int(lane.coupled), lane.cycle),
        )

    def _end_words(self, end: End | None) -> Sequence[int]:
        if end is None:
            return (0, 0, 0, 0, 0)
        addresses = [self._address(at) if at else 0 for at in (end.data, end.wait, end.post)]
        return (*addresses, end.slices, end.seed)

    def _address(self, address: Address) -> int:
        base = self._bases.get(address.space)
        if base is None:
            reason = self._unreachable.get(address.space, "it was never mapped")
            raise MeasurementError(
                f"{self._who} cannot reach {address.space}'s memory directly ({reason})"
            )
        return base + address.offset

    def _queue_copies(self, run: Run, repeat: int) -> None:
        """Queue each copy on its own stream: released by the flag, stamped after every group.

        All beginnings are queued first, then the groups in turn: a stream that is full holds up the
        caller, and its flag comes only when every stream has begun.
        """
        area = self._control_base + stamps_at(self._start.slot, repeat)
        shift = repeat * COUNTERS * COUNTER_BYTES
        queued = []
        for copy, pace, stream in zip(
            run.program.copies, run.paces, self._copy_streams, strict=False
        ):
            queued.append((copy, pace, stream, area))
            self._stamp(area, stream)
            stream_waits(stream.ptr, self._flag, run.epoch + repeat)
            self._stamp(area + 8, stream, delay_ns=_AFTER_RELEASE_NS)
            area += (pace.groups + 2) * 8
        for group in range(max((pace.groups for pace in run.paces), default=0)):
            for copy, pace, stream, stamps in queued:
                if group < pace.groups:
                    if copy.link:
                        size, sends = pace.slices * copy.slice_bytes, copy.outgoing is not None
                        self.links.move(copy.link, size, stream.ptr, sends=sends)
                    for i in range(pace.slices) if not copy.link else ():
                        self._queue_slice(copy, stream, group * pace.slices + i, shift)
                    self._stamp(stamps + 16 + 8 * group, stream)

    def _queue_slice(self, copy: Lane, stream: Any, i: int, shift: int) -> None:
        end = copy.incoming or copy.outgoing
        assert end is not None
        if end.wait:
            # A reader waits until slice i is there, a writer until slice i - slices is gone.
            value = i + 1 if copy.incoming else i + 1 - end.slices
            if value > 0:
                stream_waits(stream.ptr, self._address(end.wait) + shift, value)
        far = self._address(end.data) + i % end.slices * copy.slice_bytes
        near = self._user if copy.outgoing else self._keep
        near += i % max(1, self._start.user_bytes // copy.slice_bytes) * copy.slice_bytes
        to, of = (far, near) if copy.outgoing else (near, far)
        self._runtime.memcpyAsync(to, of, copy.slice_bytes, _BY_ADDRESS, stream.ptr)
        if end.post:
            stream_writes(stream.ptr, self._address(end.post) + shift, i + 1)

    def _stamp(self, address: int, stream: Any, *, delay_ns: int = 0) -> None:
        words = (np.uint64(address), np.uint64(delay_ns))
        self._kernels["stamp"]((1,), (1,), words, stream=stream)

    def finish(self) -> None:
        """Wait for all streams; a CUDA error ends the worker, because it spoils the context."""
        try:
            for stream in (self._stream, *self._copy_streams):
                stream.synchronize()
        except self._error as error:
            raise RuntimeError(f"{self._who}: {error}") from error

    def ping(self, count: int) -> Pinged:
        """Have a kernel answer `count` stores with the GPU's time."""
        words, slot = self._control.segment, self._start.slot
        question = words.array(np.uint64, question_at(slot), 1)
        answer = words.array(np.uint64, answer_at(slot), 1)
        first = int(question[0]) + 1
        at = self._control_base + question_at(slot), self._control_base + answer_at(slot)
        arguments = tuple(map(np.uint64, (*at, first, count, _PING_NS)))
        self._kernels["echo"]((1,), (1,), arguments, stream=self._stream)
        asked_ns, seen_ns, device = [], [], []
        for i in range(count):
            before = int(answer[0])
            asked_ns.append(time.monotonic_ns())
            question[0] = first + i
            deadline = asked_ns[-1] + 2 * _PING_NS
            while (stamp := int(answer[0])) == before:
                if time.monotonic_ns() > deadline:
                    raise RuntimeError(f"{self._who} does not answer when asked for its time")
            seen_ns.append(time.monotonic_ns())
            device.append(stamp)
        self.finish()
        return Pinged(asked_ns=tuple(asked_ns), device_ns=tuple(device), seen_ns=tuple(seen_ns))

    def close(self) -> None:
        """Unmap, unpin and free everything."""
        self._closing.close()
        for space in list(self._segments):
            self._forget(space)
        for base in self._opened:
            self._runtime.ipcCloseMemHandle(base)
        for pointer in self._allocated:
            self._runtime.free(pointer)
        self._opened, self._allocated = [], []


# Stream memory operations, which cupy does not offer: through libcuda.
def stream_waits(stream: int, address: int, value: int) -> None:
    """Hold the stream's next work until the 64-bit word is `value` or more."""
    _call("cuStreamWaitValue64", stream, address, value, _WAIT_UNTIL_AT_LEAST)


def stream_writes(stream: int, address: int, value: int) -> None:
    """Write a 64-bit word when all earlier work of the stream has been done."""
    _call("cuStreamWriteValue64", stream, address, value, 0)


def _call(name: str, stream: int, address: int, value: int, flags: int) -> None:
    library = cuda_driver()
    function = getattr(library, f"{name}_v2", None) or getattr(library, name)
    words = ctypes.c_uint64(address), ctypes.c_uint64(value)
    check_cuda(name, function(ctypes.c_void_p(stream), *words, ctypes.c_uint(flags)))
