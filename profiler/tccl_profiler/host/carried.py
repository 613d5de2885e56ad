"""What NCCL, or what stands for it, carries between host memories: a thread for each copy.

A device of host memory has no streams: a thread waits for the flag, moves a group, stamps, goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tccl_profiler.control import Control
from tccl_profiler.host.waiting import flag_of, nap_exactly, released
from tccl_profiler.messages import Pace, Run
from tccl_profiler.nccl.communicators import Communicators
from tccl_profiler.program import Copy


class HostMemory:
    """Host memory as communicators use it; implements `nccl.communicators.Memory`.

    Args:
        sent: what is sent from.
        kept: what is kept in, as long.
    """

    def __init__(self, sent: npt.NDArray[np.uint8], kept: npt.NDArray[np.uint8]) -> None:
        self._arrays = {one.ctypes.data: one for one in (sent, kept)}
        self.sent, self.kept, self.size = sent.ctypes.data, kept.ctypes.data, len(sent)

    def enter(self) -> None:
        """Nothing: memory is every thread's."""

    def write(self, address: int, data: bytes) -> None:
        """Put bytes at the beginning of what is sent or kept."""
        self._arrays[address][: len(data)] = np.frombuffer(data, np.uint8)

    def read(self, address: int, size: int) -> bytes:
        """The first bytes of what is sent or kept."""
        return self._arrays[address][:size].tobytes()

    def stream(self) -> int:
        """None: what is asked for is done when the call returns."""
        return 0

    def settle(self) -> None:
        """Nothing is under way."""


class CarriedCopies:
    """The threads of one run.

    Args:
        run: the order.
        control: where copies are released.
        communicators: what moves bytes.
        stopping: whether all is to end.
    """

    def __init__(
        self,
        run: Run,
        control: Control,
        communicators: Communicators,
        stopping: Callable[[], bool],
    ) -> None:
        self._run, self._flag = run, flag_of(control)
        self._communicators, self._stopping = communicators, stopping
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def begin(self, copy: Copy, pace: Pace, stamps: Sequence[npt.NDArray[np.uint64]]) -> None:
        """Start a copy's thread; `stamps` are those of each repeat."""
        # A daemon: what it waits for may never come.
        thread = threading.Thread(
            target=self._carry, args=(copy, pace, stamps), name=f"{copy.link}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def ended(self) -> BaseException | None:
        """Wait for the end; what ended it early."""
        for thread in self._threads:
            thread.join()
        return self._failures[0] if self._failures else None

    def _carry(self, copy: Copy, pace: Pace, stamps: Sequence[npt.NDArray[np.uint64]]) -> None:
        try:
            nap_exactly()
            for repeat, row in enumerate(stamps):
                self._repeat(copy, pace, row, self._run.epoch + repeat)
        except BaseException as error:
            self._failures.append(error)

    def _repeat(self, copy: Copy, pace: Pace, row: npt.NDArray[np.uint64], epoch: int) -> None:
        assert copy.link is not None
        row[0] = time.monotonic_ns()
        if not released(self._flag, epoch, self._run.patience_ns, self._stopping):
            return
        row[1] = time.monotonic_ns()
        for group in range(pace.groups):
            size = pace.slices * copy.slice_bytes
            self._communicators.move(copy.link, size, 0, sends=copy.sends)
            row[2 + group] = time.monotonic_ns()
