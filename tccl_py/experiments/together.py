"""Rows beside each other on a rank, alone and at once: transfers, copies, collectives, GEMMs.

Each row has a communicator of its own: in one, NCCL would queue transfers one behind the other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from tccl_py.experiments.calls import Call, gemms, repeated, row_call, transfers
from tccl_py.experiments.spec import Contest, Row, RowTimes, Variant
from tccl_py.rank_processes.rank import Communicator

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


class Part(NamedTuple):
    """This rank's part of a row: its calls, whether their time counts, and how they are wrong."""

    call: Call
    counts: bool = True
    fault: Callable[[], str] = str


def time_beside(communicator: Communicator, row: Row, contest: Contest) -> RowTimes:
    """Return the times on this rank of a row and of those beside it, alone and at once in turn."""
    rows = (row, *row.beside)
    devices = [place for each in rows if each.mode == "copy" for place in each.groups[0]]
    devices = list(dict.fromkeys(devices)) or [communicator.device.index]
    begin = stopwatch(communicator, devices)
    parts = [_part(communicator, each, contest.calls) for each in rows if each.mode != "gemm"]
    with_gemms = len(parts) < len(rows)
    if with_gemms:  # These are launched first.
        (other,) = parts
        multiply = gemms_beside(communicator, begin, other and other.call, devices[0])
        parts.insert(0, Part(multiply, counts=other is not None))
    calls = [[part.call] if part else [] for part in parts]
    alone, at_once = list[list[float]](), list[list[float]]()
    for _ in range(_WARM_UPS + contest.rounds):
        alone.append([max(begin(call), default=0.0) for call in calls])
        times = iter(begin(list(chain(*calls))))
        at_once.append([next(times) if part else 0.0 for part in parts])
    columns = (zip(*rounds[_WARM_UPS:], strict=True) for rounds in (alone, at_once))
    variants = [
        Variant(seconds=seconds, beside=beside) if part and part.counts else Variant()
        for part, seconds, beside in zip(parts, *columns, strict=True)
    ]
    fault = next((fault for part in parts if part and (fault := part.fault())), "")
    in_order = (*variants[with_gemms:], *variants[:with_gemms])
    return RowTimes(row=row, variants=in_order, fault=fault)


def stopwatch(communicator: Communicator, devices: Sequence[int]) -> Together:
    """Return a function that begins calls at the same time on all ranks, and times each."""
    cuda = communicator.cuda
    watch = CudaStopwatch(communicator.torch, devices) if cuda else ThreadStopwatch()

    def begin(calls: Sequence[Call]) -> tuple[float, ...]:
        communicator.dist.barrier()  # A stopwatch waits for its devices first.
        return watch.together(calls)

    return begin


def gemms_beside(
    communicator: Communicator, begin: Together, other: Call | None, device: int | None = None
) -> Call:
    """Return matrix multiplications that take about as long as another call, on all ranks alike.

    Their `device` may be another one than the communicator's own, which agrees on their number.
    """
    busy, cuda = communicator, communicator.cuda
    if cuda and device is not None:
        busy = replace(communicator, device=communicator.torch.device("cuda", device))
    multiply = gemms(busy, 4096 if cuda else 256)
    for _ in range(_WARM_UPS + 1):
        seconds, of_one = max(begin([other] if other else []), default=0.0), begin([multiply])[0]
    count = max(1, min(_MOST_GEMMS, round(seconds / max(of_one, 1e-6))))
    return partial(multiply, int(communicator.maximum(count)))


def _part(communicator: Communicator, row: Row, calls: int) -> Part | None:
    """Return this rank's part of a row but a GEMM; None if it has none.

    A transfer's time is its receiver's. Bytes are checked: each is the number of the source.
    """
    group = communicator
    if row.groups and row.mode != "copy":
        group = communicator.split(row.groups)
        if group.world == 1:
            return None
    if row.mode != "copy" and row.collective != "send":
        return Part(repeated(row_call(group, row), calls))
    torch, ((source, target),) = communicator.torch, row.groups

    def filled(place: int, value: int) -> Any:
        across = communicator.cuda and row.mode == "copy"
        device = torch.device("cuda", place) if across else communicator.device
        return torch.full((row.bytes,), value, dtype=torch.uint8, device=device)

    def fault() -> str:
        right = bool((received == source + 1).all())
        return "" if right else f"received other bytes than place {source} sent"

    sent, received = filled(source, source + 1), filled(target, 0)
    if row.mode == "copy":
        return Part(repeated(partial(received.copy_, sent, non_blocking=True), calls), fault=fault)
    call = repeated(transfers(group, row.collective, (source, target), received, sent), calls)
    return Part(call, fault=fault) if communicator.rank == target else Part(call, counts=False)
