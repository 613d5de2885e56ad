"""Times of things that run at the same time on one device, GPU or CPU; torch comes from outside."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

Work = Callable[[], None]


class Times(msgspec.Struct, frozen=True):
    """How long each piece of work took since all were begun, and the longest, ms."""

    each: tuple[float, ...]

    @property
    def total(self) -> float:
        """Until all were done."""
        return max(self.each, default=0.0)


class Stopwatch(Protocol):
    """Runs pieces of work together and says how long each took."""

    def together(self, works: Sequence[Work]) -> Times:
        """Begin all at the same time; returns when all are done."""
        ...


class CudaStopwatch:
    """Each piece has streams of its own, one on every device; the first device's clock times it.

    What work launches must wait for, or run on, the current streams, as torch's operations and
    `Work.wait` of torch.distributed do. torch queues a copy between devices on both of them: on
    shared streams two copies in opposite directions would wait for each other.
    """

    def __init__(self, torch: Any, devices: Sequence[Any]) -> None:
        self._torch, self._devices = torch, devices
        self._streams: list[list[Any]] = []

    def together(self, works: Sequence[Work]) -> Times:
        """Begin all at the same time; returns when all are done."""
        cuda = self._torch.cuda
        while len(self._streams) < len(works):
            self._streams.append([cuda.Stream(device) for device in self._devices])
        self._wait()
        begun = cuda.Event(enable_timing=True)
        begun.record(cuda.current_stream(self._devices[0]))
        ends = [
            self._run(streams, work, begun)
            for streams, work in zip(self._streams, works, strict=False)
        ]
        self._wait()
        return Times(tuple(begun.elapsed_time(end) for end in ends))

    def _run(self, streams: Sequence[Any], work: Work, begun: Any) -> Any:
        cuda = self._torch.cuda
        with contextlib.ExitStack() as current:
            # Entered last, so that the first device is the current one.
            for stream in reversed(streams):
                stream.wait_event(begun)
                current.enter_context(cuda.stream(stream))
            work()
        first, *others = streams
        for stream in others:
            first.wait_stream(stream)
        end = cuda.Event(enable_timing=True)
        end.record(first)
        return end

    def _wait(self) -> None:
        for device in self._devices:
            self._torch.cuda.synchronize(device)


class ThreadStopwatch:
    """Each piece has a thread of its own; copies, products and sockets let the others run."""

    def together(self, works: Sequence[Work]) -> Times:
        """Begin all at the same time; returns when all are done.

        Raises:
            Exception: the first that a piece of work raised.
        """
        gate = threading.Barrier(len(works) + 1)
        ends = [0.0] * len(works)
        errors: list[BaseException] = []

        def run(number: int, work: Work) -> None:
            gate.wait()
            try:
                work()
            except BaseException as error:
                errors.append(error)
            ends[number] = time.perf_counter()

        threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(works)]
        for thread in threads:
            thread.start()
        # Taken before the gate opens: whoever opens it may get the processor back last.
        begun = time.perf_counter()
        gate.wait()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return Times(tuple((end - begun) * 1e3 for end in ends))
