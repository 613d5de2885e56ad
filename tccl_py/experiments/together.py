"""Rows beside matrix multiplications (GEMM) on a rank."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tccl_py.experiments.calls import Call, gemms, repeat
from tccl_py.experiments.spec import BATCHES
from tccl_py.rank_processes.rank import Communicator, TimeSlot

_WARM_UPS = 2
_MOST_GEMMS = 10_000

Together = Callable[[Sequence[Call]], tuple[float, ...]]
"""Begins calls at the same time, and returns the seconds of each."""


class CudaStopwatch:
    """Stopwatch with streams for each call, on every device, and the first device's clock.

    Launched operations must use, or wait for, the current streams, as torch's do. torch queues a
    copy between devices on both: on shared streams two opposite copies would wait for each other.
    """

    def __init__(self, torch: Any, devices: Sequence[int]) -> None:
        self._torch, self._devices = torch, devices
        self._streams: list[list[Any]] = []

    def together(self, calls: Sequence[Call]) -> tuple[float, ...]:
        """Begin all calls at the same time; return the seconds of each when all are done."""
        cuda = self._torch.cuda
        while len(self._streams) < len(calls):
            self._streams.append([cuda.Stream(device) for device in self._devices])
        self._wait()
        begun = cuda.Event(enable_timing=True)
        begun.record(cuda.current_stream(self._devices[0]))
        ends = []
        for streams, call in zip(self._streams, calls, strict=False):
            with contextlib.ExitStack() as current:
                # Entered last, so that the first device is the current one.
                for stream in reversed(streams):
                    stream.wait_event(begun)
                    current.enter_context(cuda.stream(stream))
                call()
            first, *further = streams
            for stream in further:
                first.wait_stream(stream)
            ends.append(cuda.Event(enable_timing=True))
            ends[-1].record(first)
        self._wait()
        return tuple(begun.elapsed_time(end) / 1e3 for end in ends)

    def _wait(self) -> None:
        for device in self._devices:
            self._torch.cuda.synchronize(device)


class ThreadStopwatch:
    """Stopwatch with a thread for each call; copies, GEMMs and sockets release Python's lock."""

    def together(self, calls: Sequence[Call]) -> tuple[float, ...]:
        """Begin all calls at the same time; return the seconds of each when all are done."""
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


def run_beside(
    communicator: Communicator, slot: TimeSlot, call: Call, refill: Call = lambda: None
) -> Iterator[tuple[float, float]]:
    """Yield the seconds of `call` beside GEMM, and how many times as long GEMM takes beside it.

    There is a round in each time slot, after which a caller may look at what the call gave.
    `refill` runs before each.
    """
    with slot():
        begin = stopwatch(communicator, [communicator.device.index])
        near = repeat(gemms_beside(communicator, begin, call), 2)
    for number in range(_WARM_UPS + BATCHES):
        with slot():
            (alone,) = begin([near])
            refill()
            # GEMM is launched first.
            beside, seconds = begin([near, call])
        if number >= _WARM_UPS:
            yield seconds, beside / alone


def stopwatch(communicator: Communicator, devices: Sequence[int]) -> Together:
    """Return a function that begins calls at the same time on all ranks, and times each."""
    cuda = communicator.cuda
    watch = CudaStopwatch(communicator.torch, devices) if cuda else ThreadStopwatch()

    def begin(calls: Sequence[Call]) -> tuple[float, ...]:
        communicator.dist.barrier()  # A stopwatch waits for its devices first.
        return watch.together(calls)

    return begin


def gemms_beside(communicator: Communicator, begin: Together, other: Call | None) -> Call:
    """Return matrix multiplications that take about as long as another call, on all ranks alike."""
    multiply = gemms(communicator, 4096 if communicator.cuda else 256)
    for _ in range(_WARM_UPS + 1):
        seconds, of_one = max(begin([other] if other else []), default=0.0), begin([multiply])[0]
    count = max(1, min(_MOST_GEMMS, round(seconds / max(of_one, 1e-6))))
    return partial(multiply, int(communicator.maximum(count)))
