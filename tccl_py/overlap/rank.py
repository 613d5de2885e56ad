"""Rank program of `tccl overlap`: times concurrent transfers, and transfers beside a GEMM.

usage: python -m tccl_py.overlap.rank SPEC.json RANK
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tccl_py.overlap.job import OverlapResult, OverlapSpec, Pair, Timings
from tccl_py.rank_processes.rank import Communicator, join, read_spec, write_result

_WARM_UPS = 2
_MOST_PRODUCTS = 10_000

Work = Callable[[], None]


def main() -> None:
    """Run the specification of the command line as rank RANK."""
    spec, rank, folder = read_spec(OverlapSpec)
    joined = join(spec.backend, folder, rank=rank, world=spec.world, local_rank=rank)
    messages = Messages(joined, spec)
    timer = Timer(joined, CudaStopwatch(joined) if joined.cuda else ThreadStopwatch(), spec.repeats)
    result = OverlapResult(
        rank=rank,
        torch=str(joined.torch.__version__),
        device=joined.device_name,
        sets=tuple(
            timer.time(messages.works(number), [pair.target == rank for pair in pairs])
            for number, pairs in enumerate(spec.sets)
        ),
        products=tuple(_time_products(joined, timer, messages)),
        right=messages.right(),
    )
    joined.dist.destroy_process_group()
    write_result(folder, rank, result)


class CudaStopwatch:
    """Stopwatch with a stream for each work, and the device's clock.

    Launched operations must use, or wait for, the current stream, as torch's do.
    """

    def __init__(self, joined: Communicator) -> None:
        self._joined = joined
        self._streams: list[Any] = []

    def together(self, works: Sequence[Work]) -> tuple[float, ...]:
        """Begin all works at the same time; return the ms of each when all are done."""
        cuda = self._joined.torch.cuda
        while len(self._streams) < len(works):
            self._streams.append(cuda.Stream())
        self._joined.wait()
        begun = cuda.Event(enable_timing=True)
        begun.record()
        ends = [cuda.Event(enable_timing=True) for _ in works]
        for stream, work, end in zip(self._streams, works, ends, strict=False):
            stream.wait_event(begun)
            with cuda.stream(stream):
                work()
            end.record(stream)
        self._joined.wait()
        return tuple(begun.elapsed_time(end) for end in ends)


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


class Messages:
    """A rank's messages; each pair has a group, and so a communicator, of its own.

    In one group two transfers would be queued one behind the other.
    """

    def __init__(self, joined: Communicator, spec: OverlapSpec) -> None:
        self._joined, self._spec = joined, spec
        self._sent = self._buffer(joined.rank + 1)
        self._received: dict[tuple[int, Pair], Any] = {}
        # Every rank makes every group, in the same order.
        self._groups = [
            [joined.dist.new_group(sorted(set(pair))) for pair in pairs] for pairs in spec.sets
        ]

    def works(self, number: int) -> dict[int, Work]:
        """Return this rank's part of a set, by the pair's place in it."""
        return {
            place: self._work(number, place, pair)
            for place, pair in enumerate(self._spec.sets[number])
            if self._joined.rank in pair
        }

    def _work(self, number: int, place: int, pair: Pair) -> Work:
        group, count = self._groups[number][place], self._spec.messages
        call, held, peer = self._joined.dist.isend, self._sent, pair.target
        if self._joined.rank == pair.target:
            held = self._received.setdefault((place, pair), self._buffer(0))
            call, peer = self._joined.dist.irecv, pair.source

        def run() -> None:
            for _ in range(count):
                call(held, peer, group=group).wait()

        return run

    def _buffer(self, value: int) -> Any:
        torch, size = self._joined.torch, (self._spec.message_bytes,)
        return torch.full(size, value, dtype=torch.uint8, device=self._joined.device)

    def transfers(self) -> Iterator[tuple[Pair | None, Work | None]]:
        """Yield the transfers beside a GEMM, a message and an all-reduce.

        The work is None on a rank without a part.
        """
        yield self._spec.sets[0][0], self.works(0).get(0)
        summed = self._buffer(0).view(self._joined.torch.float32)

        def all_reduce() -> None:
            for _ in range(self._spec.messages):
                self._joined.dist.all_reduce(summed, async_op=True).wait()

        yield None, all_reduce

    def right(self) -> bool:
        """Return whether all received bytes equal the sent bytes."""
        found = self._received.items()
        return all(bool((held == pair.source + 1).all()) for (_, pair), held in found)


class Timer:
    """Times works one after the other and together, in turn, so that drift favours neither."""

    def __init__(
        self, joined: Communicator, watch: CudaStopwatch | ThreadStopwatch, repeats: int
    ) -> None:
        self._joined, self._watch, self._repeats = joined, watch, repeats

    def time(self, works: Mapping[int, Work], reported: Sequence[bool]) -> Timings:
        """Return timings by mode of this rank's works by number.

        Ranks without a work still wait for its ranks; `reported` tells for each work of the job
        whether this rank reports its time.
        """
        alone: list[list[float]] = []
        together: list[dict[int, float]] = []
        for _ in range(_WARM_UPS + self._repeats):
            alone.append([self.single(works.get(number)) for number in range(len(reported))])
            self._align()
            times = self._watch.together(list(works.values()))
            together.append(dict(zip(works, times, strict=True)))

        def timed(rows: Sequence[Any]) -> tuple[tuple[float, ...], ...]:
            counted = rows[_WARM_UPS:]
            return tuple(
                tuple(row[number] for row in counted) if counts else ()
                for number, counts in enumerate(reported)
            )

        return {"sequential": timed(alone), "concurrent": timed(together)}

    def single(self, work: Work | None) -> float:
        """Align the ranks, run a work, and return its ms; 0 on a rank without it."""
        self._align()
        return max(self._watch.together([work] if work else []), default=0.0)

    def _align(self) -> None:
        self._joined.dist.barrier()
        self._joined.wait()


def _time_products(
    joined: Communicator, timer: Timer, messages: Messages
) -> Iterator[tuple[Pair | None, Timings]]:
    """Time each transfer beside GEMMs that take about as long."""
    torch = joined.torch
    size, kind = (4096, torch.bfloat16) if joined.cuda else (256, torch.float32)
    left, right = (torch.ones(size, size, dtype=kind, device=joined.device) for _ in range(2))
    result = torch.empty_like(left)

    def multiply(count: int = 1) -> None:
        for _ in range(count):
            torch.mm(left, right, out=result)

    for pair, transfer in messages.transfers():
        transfer_ms = product_ms = 0.0
        for _ in range(_WARM_UPS + 1):
            transfer_ms, product_ms = timer.single(transfer), timer.single(multiply)
        wanted = round(transfer_ms / max(product_ms, 1e-3))
        count = int(joined.maximum(max(1, min(_MOST_PRODUCTS, wanted))))
        works: dict[int, Work] = {0: lambda count=count: multiply(count)}  # type: ignore[misc]
        if transfer is not None:
            works[1] = transfer
        yield pair, timer.time(works, [True, transfer is not None])


if __name__ == "__main__":
    main()
