"""Transfers by copy engines between ranks of a host: to peers, or through pinned host memory.

Every buffer that a rank writes for another one has a state in shared memory, which streams wait for
and set: no CPU takes part in a transfer. On CPUs the same transfers run in program order.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

from tccl_py.delivery.placement import prefer_numa_node
from tccl_py.errors import MeasurementError
from tccl_py.rank_processes.rank import Communicator

SLOTS, MOST_PIECES, LEAST_PIECE = 2, 16, 4 << 20
"""Of a bounce: buffers that are filled in turn, pieces of a message, and bytes of a piece: the host
takes longer to launch the copies of smaller ones than they take."""
_APART = 64
_POSTED, _FULL = 1, 2
"""States of a buffer: the reader says that it may be written, the writer that it was."""
_MAPPED_PORTABLE, _EQUAL = 3, 1

Ends = tuple[Sequence[int], Sequence[int]]
"""The ranks that this rank sends to, and those that it receives from."""


class Copies:
    """Copies of this rank by copy engines, those that leave and those that arrive at once.

    Each rank has pinned host memory that all map: states, and slots of `size` bytes. It is on the
    rank's NUMA node, of `nodes`, and has no name, so nothing stays behind.
    """

    def __init__(self, on: Communicator, size: int, nodes: Sequence[int]) -> None:
        self._on, self._size, self._states = on, size, SLOTS * on.world * _APART
        self._driver = ctypes.CDLL("libcuda.so.1") if on.cuda else None
        # Of other priorities: streams that share a hardware queue would wait for each other.
        levels = (0, -1) if on.cuda else ()
        self._streams = [on.torch.cuda.Stream(priority=level) for level in levels]
        if nodes:
            # Where Linux refuses it, the memory is on the node of this rank's CPU.
            prefer_numa_node(nodes[on.rank])
        file, most = os.memfd_create("tccl-slots"), self._states + SLOTS * size
        os.ftruncate(file, most)
        path, paths = f"/proc/{os.getpid()}/fd/{file}", [""] * on.world
        mapped = partial(on.torch.from_file, shared=True, size=most, dtype=on.torch.uint8)
        mapped(path).zero_()
        on.dist.all_gather_object(paths, path)
        self._bytes = list(map(mapped, paths))
        self._devices = list(map(self._register, self._bytes))
        on.dist.barrier()
        os.close(file)

    def _register(self, memory: Any) -> int:
        """Pin memory; return its address for the device."""
        if self._driver is None:
            return 0
        runtime, address, device = (
            self._on.torch.cuda.cudart(),
            memory.data_ptr(),
            ctypes.c_uint64(),
        )
        _check(
            runtime.cudaHostRegister(address, memory.numel(), _MAPPED_PORTABLE), "cudaHostRegister"
        )
        place = ctypes.byref(device), ctypes.c_void_p(address), 0
        _check(self._driver.cuMemHostGetDevicePointer_v2(*place), "cuMemHostGetDevicePointer")
        return device.value

    def _slot(self, writer: int, number: int, like: Any) -> Any:
        """Return a slot of a writer's memory as a tensor like another one."""
        first = self._states + number * self._size
        held = self._bytes[writer][first : first + like.numel() * like.element_size()]
        return held.view(like.dtype)

    def _wait(self, writer: int, number: int, reader: int, state: int) -> None:
        """Wait in the current stream until a buffer has a state."""
        at = (number * self._on.world + reader) * _APART
        if self._driver is not None:
            self._operate("cuStreamWaitValue32_v2", writer, at, state, _EQUAL)
        while self._driver is None and self._bytes[writer][at] != state:
            time.sleep(0)

    def _set(self, writer: int, number: int, reader: int, state: int) -> None:
        """Set the state of a buffer in the current stream, after what the stream has written."""
        at = (number * self._on.world + reader) * _APART
        if self._driver is not None:
            self._operate("cuStreamWriteValue32_v2", writer, at, state, 0)
        else:
            self._bytes[writer][at] = state

    def _operate(self, name: str, writer: int, at: int, state: int, flags: int) -> None:
        stream = ctypes.c_void_p(self._on.torch.cuda.current_stream().cuda_stream)
        address = ctypes.c_uint64(self._devices[writer] + at)
        _check(getattr(self._driver, name)(stream, address, ctypes.c_uint32(state), flags), name)

    @contextmanager
    def _both(self) -> Iterator[tuple[Any, Any]]:
        """Yield contexts of what leaves and of what arrives, joined to the current stream."""
        cuda = self._on.torch.cuda
        for stream in self._streams:
            stream.wait_stream(cuda.current_stream())
        leaves, arrives = map(cuda.stream, self._streams) if self._streams else [nullcontext()] * 2
        yield leaves, arrives
        for stream in self._streams:
            cuda.current_stream().wait_stream(stream)

    def to_peers(self, ends: Ends, sent: Any, places: Sequence[Any]) -> None:
        """Copy `sent` to its places in the memory of the ranks that receive it."""
        self._move(ends, [sent], lambda *_: places, lambda *_: None)

    def through_host(self, ends: Ends, sent: Any, received: Callable[[int], Any]) -> None:
        """Copy `sent` to the host, and what others sent from there, in pieces through slots."""
        pieces = piece_count(sent.numel() * sent.element_size())
        parts = {writer: received(writer).chunk(pieces) for writer in ends[1]}

        def places(slot: int, piece: Any) -> Iterable[Any]:
            return [self._slot(self._on.rank, slot, piece)][: len(ends[0])]

        def take(writer: int, number: int) -> None:
            part = parts[writer][number]
            part.copy_(self._slot(writer, number % SLOTS, part), non_blocking=True)

        self._move(ends, sent.chunk(pieces), places, take)

    def _move(
        self,
        ends: Ends,
        pieces: Sequence[Any],
        places: Callable[[int, Any], Iterable[Any]],
        take: Callable[[int, int], None],
    ) -> None:
        """Copy pieces to their places in turn, and take those that others have copied."""
        (to, of), rank = ends, self._on.rank
        with self._both() as (leaves, arrives):
            with arrives:
                for writer, slot in product(of, range(min(SLOTS, len(pieces)))):
                    self._set(writer, slot, rank, _POSTED)
            for number, piece in enumerate(pieces):
                slot = number % SLOTS
                with leaves:
                    for reader in to:
                        self._wait(rank, slot, reader, _POSTED)
                    for place in places(slot, piece):
                        place.copy_(piece, non_blocking=True)
                    for reader in to:
                        self._set(rank, slot, reader, _FULL)
                with arrives:
                    for writer in of:
                        self._wait(writer, slot, rank, _FULL)
                        take(writer, number)
                        if number + SLOTS < len(pieces):
                            self._set(writer, slot, rank, _POSTED)


def _check(code: Any, what: str) -> None:
    if int(code):
        raise MeasurementError(f"{what} gives CUDA error {int(code)}")


def piece_count(size: int) -> int:
    """Return the pieces of a message of `size` bytes.

    >>> piece_count(256 << 20), piece_count(16 << 20), piece_count(4096)
    (16, 4, 1)
    """
    return max(1, min(MOST_PIECES, size // LEAST_PIECE))
