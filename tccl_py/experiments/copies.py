"""Copies by copy engines between ranks of a host: to peers, or through pinned host memory.

Every buffer that a rank writes for another one has a state in shared memory, which streams wait for
and set: no CPU takes part in a transfer. On CPUs the same transfers run in program order.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

from tccl_py.delivery.placement import prefer_numa_node
from tccl_py.errors import MeasurementError
from tccl_py.rank_processes.rank import Communicator

_SLOTS, _MOST_PIECES, _LEAST_PIECE = 2, 16, 4 << 20
"""Buffers that are filled in turn, pieces of a message, and bytes of a piece: the host takes longer
to launch the copies of smaller ones than they take."""
_APART, _POSTED, _FULL = 64, 1, 2
"""Bytes between states: the reader says that a buffer may be written, the writer that it was."""

Ends = tuple[Sequence[int], Sequence[int]]
"""The ranks that this rank sends to, and those that it receives from."""


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
