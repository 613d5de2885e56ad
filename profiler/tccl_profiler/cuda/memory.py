"""A GPU's memory as NCCL's communicators use it; implements `nccl.communicators.Memory`."""

from __future__ import annotations

from typing import Any

import numpy as np

_TO_DEVICE, _TO_HOST = 1, 2


class CudaMemory:
    """What GPU `number` (CUDA's) sends from and keeps.

    Args:
        cupy: the module.
        number: CUDA's number of the GPU.
        sent: address of what is sent from.
        kept: address of what is kept in.
        size: how many bytes each has.
    """

    def __init__(self, cupy: Any, number: int, *, sent: int, kept: int, size: int) -> None:
        self._runtime, self._number = cupy.cuda.runtime, number
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.sent, self.kept, self.size = sent, kept, size

    def enter(self) -> None:
        """Make the GPU the calling thread's."""
        self._runtime.setDevice(self._number)

    def write(self, address: int, data: bytes) -> None:
        """Put bytes there."""
        source = np.frombuffer(data, np.uint8)
        self._runtime.memcpy(address, source.ctypes.data, len(data), _TO_DEVICE)

    def read(self, address: int, size: int) -> bytes:
        """The bytes that are there."""
        found = np.empty(size, np.uint8)
        self._runtime.memcpy(found.ctypes.data, address, size, _TO_HOST)
        return found.tobytes()

    def stream(self) -> int:
        """A stream of its own."""
        return int(self._stream.ptr)

    def settle(self) -> None:
        """Wait for that stream."""
        self._stream.synchronize()
