"""Rank program of `tccl overlap`: times concurrent transfers, and transfers beside a GEMM.

usage: python -m tccl_py.overlap.rank SPEC.json RANK

Only rank programs import torch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tccl_py.overlap.job import MODES, Mode, OverlapResult, OverlapSpec, Pair, Timing
from tccl_py.rank_processes.rank import join_group, rank_device, read_spec, write_result

_WARM_UPS = 2
_MATRIX_ON_GPU, _MATRIX_ON_CPU = 4096, 256
_MOST_PRODUCTS = 10_000

Work = Callable[[], None]


def main() -> None:
    """Run the specification of the command line as rank RANK."""
    spec, rank, folder = read_spec(OverlapSpec)
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    cuda = spec.backend == "nccl"
    device = rank_device(torch, spec.backend, rank)
    if spec.kind == "messages":
        join_group(dist, spec.backend, folder, rank=rank, world=spec.world, device=device)
        mover: Copies = Messages(torch, dist, spec, rank)
    else:
        mover = Copies(torch, spec)
    devices = [torch.device("cuda", place) for place in mover.places]
    watch = CudaStopwatch(torch, devices) if cuda else ThreadStopwatch()
    timer = Timer(mover, watch, spec.repeats)
    result = OverlapResult(
        rank=rank,
        torch=str(torch.__version__),
        device=torch.cuda.get_device_name(device) if cuda else "",
        sets=tuple(
            timer.time(mover.works(number), [mover.reports(pair) for pair in pairs])
            for number, pairs in enumerate(spec.sets)
        ),
        products=tuple(_time_products(torch, device, timer, mover)),
        right=mover.right(),
    )
    if spec.kind == "messages":
        dist.destroy_process_group()
    write_result(folder, rank, result)


class CudaStopwatch:
    """Stopwatch with streams for each work, on every device, and the first device's clock.

    Launched operations must use, or wait for, the current streams, as torch's do. torch queues a
    copy between devices on both: on shared streams two opposite copies would wait for each other.
    """

    def __init__(self, torch: Any, devices: Sequence[Any]) -> None:
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
            first, *others = streams
            for stream in others:
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
    """Transfers by one process that copies between devices, by their copy engines."""

    def __init__(self, torch: Any, spec: OverlapSpec) -> None:
        self._torch, self._spec = torch, spec
        self._sent = {place: self._buffer(place, place + 1) for place in self.places}
        self._got: dict[tuple[int, Pair], Any] = {}

    @property
    def places(self) -> Sequence[int]:
        """Return the GPUs that this process opens."""
        return range(self._spec.places)

    def align(self) -> None:
        """Wait for all devices, and all ranks."""
        if self._spec.backend == "nccl":
            for place in self.places:
                self._torch.cuda.synchronize(place)

    def works(self, number: int) -> dict[int, Work]:
        """Return this rank's part of a set, by the pair's place in it."""
        return {
            place: self._work(number, place, pair)
            for place, pair in enumerate(self._spec.sets[number])
            if {pair.source, pair.target} & set(self.places)
        }

    def _work(self, number: int, place: int, pair: Pair) -> Work:  # noqa: ARG002
        source, held, count = self._sent[pair.source], self._held(place, pair), self._spec.messages

        def run() -> None:
            for _ in range(count):
                held.copy_(source, non_blocking=True)

        return run

    def _held(self, place: int, pair: Pair) -> Any:
        if (place, pair) not in self._got:
            self._got[place, pair] = self._buffer(pair.target, 0)
        return self._got[place, pair]

    def _buffer(self, place: int, value: int) -> Any:
        torch = self._torch
        cuda = self._spec.backend == "nccl"
        device = torch.device("cuda", place) if cuda else torch.device("cpu")
        return torch.full((self._spec.message_bytes,), value, dtype=torch.uint8, device=device)

    def reports(self, pair: Pair) -> bool:
        """Return whether this rank's time counts: the receiver's, who has all bytes."""
        return pair.target in self.places

    def transfers(self) -> Iterator[tuple[Pair | None, Work | None]]:
        """Yield the transfers beside a GEMM; the work is None on a rank without a part."""
        yield self._spec.sets[0][0], self.works(0).get(0)

    def agreed(self, count: int) -> int:
        """Return rank 0's number on all ranks."""
        return count

    def right(self) -> bool:
        """Return whether all received bytes equal the sent bytes."""
        return all(bool((held == pair.source + 1).all()) for (_, pair), held in self._got.items())


class Messages(Copies):
    """Transfers by torch.distributed; each pair has a group, and so a communicator, of its own.

    In one group two transfers would be queued one behind the other.
    """

    def __init__(self, torch: Any, dist: Any, spec: OverlapSpec, rank: int) -> None:
        self._dist, self._rank = dist, rank
        # Every rank makes every group, in the same order.
        self._groups = [
            [dist.new_group(sorted(set(pair))) for pair in pairs] for pairs in spec.sets
        ]
        super().__init__(torch, spec)
        self._summed = self._buffer(rank, 0).view(torch.float32)

    @property
    def places(self) -> Sequence[int]:
        """Return this rank's GPU."""
        return [self._rank]

    def align(self) -> None:
        """Wait for all ranks and their devices."""
        cuda = self._spec.backend == "nccl"
        self._dist.barrier(**({"device_ids": [self._rank]} if cuda else {}))
        super().align()

    def _work(self, number: int, place: int, pair: Pair) -> Work:
        group, count = self._groups[number][place], self._spec.messages
        call, held, peer = self._dist.isend, self._sent[self._rank], pair.target
        if self._rank == pair.target:
            call, held, peer = self._dist.irecv, self._held(place, pair), pair.source

        def run() -> None:
            for _ in range(count):
                call(held, peer, group=group).wait()

        return run

    def transfers(self) -> Iterator[tuple[Pair | None, Work | None]]:
        """Yield a message and an all-reduce."""
        yield from super().transfers()
        yield None, self._all_reduce

    def _all_reduce(self) -> None:
        for _ in range(self._spec.messages):
            self._dist.all_reduce(self._summed, async_op=True).wait()

    def agreed(self, count: int) -> int:
        """Return rank 0's number on all ranks."""
        shared = self._torch.tensor([count], device=self._sent[self._rank].device)
        self._dist.broadcast(shared, src=0)
        return int(shared.item())


class Timer:
    """Times works one after the other and together, in turn, so that drift favours neither."""

    def __init__(self, mover: Copies, watch: CudaStopwatch | ThreadStopwatch, repeats: int) -> None:
        self._mover, self._watch, self._repeats = mover, watch, repeats

    def time(self, works: Mapping[int, Work], reported: Sequence[bool]) -> tuple[Timing, ...]:
        """Return timings by mode of this rank's works by number.

        Ranks without a work still wait for its ranks; `reported` tells for each work of the job
        whether this rank reports its time.
        """
        samples: dict[Mode, list[tuple[dict[int, float], float]]] = {mode: [] for mode in MODES}
        for _ in range(_WARM_UPS + self._repeats):
            each = {number: self.single(works.get(number)) for number in range(len(reported))}
            samples["sequential"].append((each, sum(each.values())))
            self._mover.align()
            times = self._watch.together(list(works.values()))
            both = dict(zip(works, times, strict=True)), max(times, default=0.0)
            samples["concurrent"].append(both)
        return tuple(
            Timing(
                mode=mode,
                works_ms=tuple(
                    tuple(each[number] for each, _ in rows[_WARM_UPS:]) if counts else ()
                    for number, counts in enumerate(reported)
                ),
                total_ms=tuple(total for _, total in rows[_WARM_UPS:]),
            )
            for mode, rows in samples.items()
        )

    def single(self, work: Work | None) -> float:
        """Align the ranks, run a work, and return its ms; 0 on a rank without it."""
        self._mover.align()
        return max(self._watch.together([work] if work else []), default=0.0)


def _time_products(
    torch: Any, device: Any, timer: Timer, mover: Copies
) -> Iterator[tuple[Pair | None, tuple[Timing, ...]]]:
    """Time each transfer beside GEMMs that take about as long."""
    cuda = device.type == "cuda"
    size, kind = (_MATRIX_ON_GPU, torch.bfloat16) if cuda else (_MATRIX_ON_CPU, torch.float32)
    left, right = (torch.ones(size, size, dtype=kind, device=device) for _ in range(2))
    result = torch.empty_like(left)

    def multiply(count: int = 1) -> None:
        for _ in range(count):
            torch.mm(left, right, out=result)

    for pair, transfer in mover.transfers():
        transfer_ms = product_ms = 0.0
        for _ in range(_WARM_UPS + 1):
            transfer_ms, product_ms = timer.single(transfer), timer.single(multiply)
        wanted = round(transfer_ms / max(product_ms, 1e-3))
        count = mover.agreed(max(1, min(_MOST_PRODUCTS, wanted)))
        works: dict[int, Work] = {0: lambda count=count: multiply(count)}  # type: ignore[misc]
        if transfer is not None:
            works[1] = transfer
        yield pair, timer.time(works, [True, transfer is not None])


if __name__ == "__main__":
    main()
