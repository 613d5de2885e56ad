"""Rows beside matrix multiplications (GEMM) on a rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tccl_py.experiments.calls import Call, gemms, repeat
from tccl_py.experiments.spec import BATCHES
from tccl_py.rank_processes.rank import Communicator

_WARM_UPS = 2
_MOST_GEMMS = 10_000

Together = Callable[[Sequence[Call]], tuple[float, ...]]
"""Begins calls at the same time, and returns the seconds of each."""


class CudaStopwatch:
    """Stopwatch with a stream for each call, and the device's clock.

    Launched operations must use, or wait for, the current stream, as torch's do.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._on, self._streams = communicator, list[Any]()

    def together(self, calls: Sequence[Call]) -> tuple[float, ...]:
        """Begin all calls at the same time; return the seconds of each when all are done."""
        cuda = self._on.torch.cuda
        while len(self._streams) < len(calls):
            self._streams.append(cuda.Stream())
        self._on.wait()
        begun, *ends = (cuda.Event(enable_timing=True) for _ in range(len(calls) + 1))
        begun.record()
        for stream, call, end in zip(self._streams, calls, ends, strict=False):
            stream.wait_event(begun)
            with cuda.stream(stream):
                call()
                end.record()
        self._on.wait()
        return tuple(begun.elapsed_time(end) / 1e3 for end in ends)


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
    """Return a function that begins calls at the same time on all ranks, and times each."""
    watch = CudaStopwatch(communicator) if communicator.cuda else ThreadStopwatch()

    def begin(calls: Sequence[Call]) -> tuple[float, ...]:
        communicator.dist.barrier()  # A stopwatch waits for its device first.
        return watch.together(calls)

    return begin


def gemms_beside(communicator: Communicator, begin: Together, other: Call) -> Call:
    """Return matrix multiplications that take about as long as another call, on all ranks alike."""
    multiply = gemms(communicator, 4096 if communicator.cuda else 256)
    for _ in range(_WARM_UPS + 1):
        (seconds,), (of_one,) = begin([other]), begin([multiply])
    count = max(1, min(_MOST_GEMMS, round(seconds / max(of_one, 1e-6))))
    return partial(multiply, int(communicator.maximum(count)))
