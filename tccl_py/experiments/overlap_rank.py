"""Rank program of `tccl overlap`: times concurrent transfers, and transfers beside a GEMM.

usage: python -m tccl_py.experiments.overlap_rank SPEC.json RANK
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tccl_py.experiments.calls import gemms
from tccl_py.experiments.overlap import OverlapResult, OverlapSpec, Pair, Timings, Works
from tccl_py.rank_processes.rank import Communicator, join, read_spec, write_result

_WARM_UPS = 2
_MOST_PRODUCTS = 10_000

Work = Callable[[], None]


def main() -> None:
    """Run the specification of the command line as rank RANK."""
    spec, rank, folder = read_spec(OverlapSpec)
    joined = join(spec.backend, folder, rank=rank, world=spec.world, local_rank=rank)
    mover = Messages(joined, spec) if spec.kind == "messages" else Copies(joined, spec)
    watch = CudaStopwatch(joined.torch, mover.devices) if joined.cuda else ThreadStopwatch()
    timer = Timer(joined.dist.barrier, watch, spec.repeats)
    result = OverlapResult(
        rank=rank,
        torch=str(joined.torch.__version__),
        device=joined.device_name,
        sets=tuple(
            timer.time(mover.works(number), [pair.target in mover.devices for pair in pairs])
            for number, pairs in enumerate(spec.sets)
        ),
        products=tuple(_time_products(joined, timer, mover)),
        right=mover.right(),
    )
    joined.dist.destroy_process_group()
    write_result(folder, rank, result)


class CudaStopwatch:
    """Stopwatch with streams for each work, on every device, and the first device's clock.

    Launched operations must use, or wait for, the current streams, as torch's do. torch queues a
    copy between devices on both: on shared streams two opposite copies would wait for each other.
    """

    def __init__(self, torch: Any, devices: Sequence[int]) -> None:
        self._torch, self._devices = torch, devices
        self._streams: list[list[Any]] = []

    def together(self, works: Sequence[Work]) -> tuple[float, ...]:
        """Begin all works at the same time; return the ms of each when all are done."""
        cuda = self._torch.cuda
        while len(self._streams) < len(works):
            self._streams.append([cuda.Stream(device) for device in self._devices])
        self._wait()
        begun = cuda.Event(enable_timing=True)
        begun.record(cuda.current_stream(self._devices[0]))
        ends = []
        for streams, work in zip(self._streams, works, strict=False):
            with contextlib.ExitStack() as current:
                # Entered last, so that the first device is the current one.
                for stream in reversed(streams):
                    stream.wait_event(begun)
                    current.enter_context(cuda.stream(stream))
                work()
            first, *further = streams
            for stream in further:
                first.wait_stream(stream)
            ends.append(cuda.Event(enable_timing=True))
            ends[-1].record(first)
        self._wait()
        return tuple(begun.elapsed_time(end) for end in ends)

    def _wait(self) -> None:
        for device in self._devices:
            self._torch.cuda.synchronize(device)


class ThreadStopwatch:
    """Stopwatch with a thread for each work; copies, GEMMs and sockets release Python's lock."""

    def together(self, works: Sequence[Work]) -> tuple[float, ...]:
        """Begin all works at the same time; return the ms of each when all are done."""
        gate = threading.Barrier(len(works) + 1)

        def run(work: Work) -> float:
            gate.wait()
            work()
            return time.perf_counter()

        with ThreadPoolExecutor(max_workers=max(1, len(works))) as pool:
            ends = [pool.submit(run, work) for work in works]
            # Before the gate opens: the thread that opens it may get the processor back last.
            begun = time.perf_counter()
            gate.wait()
            return tuple((end.result() - begun) * 1e3 for end in ends)


class Copies:
    """Transfers by one process that copies between devices, by their copy engines.

    `devices` are the GPUs that this process opens. The time of a transfer is its receiver's.
    """

    def __init__(self, joined: Communicator, spec: OverlapSpec) -> None:
        self._joined, self._spec = joined, spec
        alone = spec.kind == "messages"
        self.devices = (joined.rank,) if alone else tuple(range(spec.places))
        self._sent = {place: self._buffer(place, place + 1) for place in self.devices}
        self._received: dict[tuple[int, Pair], Any] = {}

    def works(self, number: int) -> dict[int, Work]:
        """Return this rank's part of a set, by the pair's place in it."""
        return {
            place: self._work(number, place, pair)
            for place, pair in enumerate(self._spec.sets[number])
            if {pair.source, pair.target} & set(self.devices)
        }

    def _work(self, number: int, place: int, pair: Pair) -> Work:  # noqa: ARG002
        source, held, count = self._sent[pair.source], self._held(place, pair), self._spec.messages

        def run() -> None:
            for _ in range(count):
                held.copy_(source, non_blocking=True)

        return run

    def _held(self, place: int, pair: Pair) -> Any:
        if (place, pair) not in self._received:
            self._received[place, pair] = self._buffer(pair.target, 0)
        return self._received[place, pair]

    def _buffer(self, place: int, value: int) -> Any:
        torch = self._joined.torch
        device = torch.device("cuda", place) if self._joined.cuda else self._joined.device
        return torch.full((self._spec.message_bytes,), value, dtype=torch.uint8, device=device)

    def beside_gemm(self) -> list[Work | None]:
        """Return the transfers beside a GEMM; None on a rank without a part."""
        return [self.works(0).get(0)]

    def right(self) -> bool:
        """Return whether all received bytes equal the sent bytes."""
        buffers = self._received.items()
        return all(bool((held == pair.source + 1).all()) for (_, pair), held in buffers)


class Messages(Copies):
    """Transfers by torch.distributed; each pair has a group, and so a communicator, of its own.

    In one group two transfers would be queued one behind the other.
    """

    def __init__(self, joined: Communicator, spec: OverlapSpec) -> None:
        super().__init__(joined, spec)
        # Every rank makes every group, in the same order.
        self._groups = [
            [joined.dist.new_group(sorted(set(pair))) for pair in pairs] for pairs in spec.sets
        ]

    def _work(self, number: int, place: int, pair: Pair) -> Work:
        group, count = self._groups[number][place], self._spec.messages
        call, peer = self._joined.dist.isend, pair.target
        held = self._sent[self._joined.rank]
        if self._joined.rank == pair.target:
            call, held, peer = self._joined.dist.irecv, self._held(place, pair), pair.source

        def run() -> None:
            for _ in range(count):
                call(held, peer, group=group).wait()

        return run

    def beside_gemm(self) -> list[Work | None]:
        """Return a message and an all-reduce."""
        summed = self._buffer(self._joined.rank, 0).view(self._joined.torch.float32)

        def all_reduce() -> None:
            for _ in range(self._spec.messages):
                self._joined.dist.all_reduce(summed, async_op=True).wait()

        return [*super().beside_gemm(), all_reduce]


class Timer:
    """Times works one after the other and together, in turn, so that drift favours neither."""

    def __init__(
        self, align: Callable[[], object], watch: CudaStopwatch | ThreadStopwatch, repeats: int
    ) -> None:
        # A stopwatch waits for its devices first.
        self._align, self._watch, self._repeats = align, watch, repeats

    def time(self, works: Mapping[int, Work], reported: Sequence[bool]) -> Timings:
        """Return timings by mode of this rank's works by number.

        Ranks without a work still wait for its ranks; `reported` tells for each work of the job
        whether this rank reports its time.
        """
        alone: list[dict[int, float]] = []
        together: list[dict[int, float]] = []
        for _ in range(_WARM_UPS + self._repeats):
            alone.append({at: self.single(works.get(at)) for at in range(len(reported))})
            self._align()
            times = self._watch.together(list(works.values()))
            together.append(dict(zip(works, times, strict=True)))

        def timed(repeats: Sequence[Mapping[int, float]]) -> Works:
            return tuple(
                tuple(times[at] for times in repeats[_WARM_UPS:]) if counts else ()
                for at, counts in enumerate(reported)
            )

        return {"sequential": timed(alone), "concurrent": timed(together)}

    def single(self, work: Work | None) -> float:
        """Align the ranks, run a work, and return its ms; 0 on a rank without it."""
        self._align()
        return max(self._watch.together([work] if work else []), default=0.0)


def _time_products(joined: Communicator, timer: Timer, mover: Copies) -> Iterator[Timings]:
    """Time each transfer beside GEMMs that take about as long; ranks with a part report both."""
    multiply = gemms(joined, 4096 if joined.cuda else 256)
    for transfer in mover.beside_gemm():
        transfer_ms = product_ms = 0.0
        for _ in range(_WARM_UPS + 1):
            transfer_ms, product_ms = timer.single(transfer), timer.single(multiply)
        count_alone = round(transfer_ms / max(product_ms, 1e-3))
        count = int(joined.maximum(max(1, min(_MOST_PRODUCTS, count_alone))))
        works: dict[int, Work] = {0: partial(multiply, count)}
        if transfer is not None:
            works[1] = transfer
        yield timer.time(works, [transfer is not None] * 2)


if __name__ == "__main__":
    main()
