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
    mover: Messages | Copies
    if spec.kind == "messages":
        join_group(dist, spec.backend, folder, rank=rank, world=spec.world, device=device)
        mover = Messages(torch, dist, spec, rank)
    else:
        mover = Copies(torch, spec)
    # A rank with messages opens no GPU but its own.
    places = [rank] if spec.kind == "messages" else range(spec.places)
    devices = [torch.device("cuda", place) for place in places]
    watch = CudaStopwatch(torch, devices) if cuda else ThreadStopwatch()
    timer = Timer(mover, watch, spec.repeats)
    sets = tuple(
        timer.time(mover.works(number), [mover.reports(pair) for pair in pairs])
        for number, pairs in enumerate(spec.sets)
    )
    products = tuple(_time_products(torch, device, timer, mover))
    result = OverlapResult(
        rank=rank,
        torch=str(torch.__version__),
        device=torch.cuda.get_device_name(device) if cuda else "",
        right=mover.right(),
        sets=sets,
        products=products,
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
        ends = [
            self._run(streams, work, begun)
            for streams, work in zip(self._streams, works, strict=False)
        ]
        self._wait()
        return tuple(begun.elapsed_time(end) for end in ends)

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
    """Transfers by torch.distributed; each pair has a group, and so a communicator, of its own.

    In one group two transfers would be queued one behind the other.
    """

    def __init__(self, torch: Any, dist: Any, spec: OverlapSpec, rank: int) -> None:
        self._torch, self._dist, self._spec, self._rank = torch, dist, spec, rank
        # Every rank makes every group, in the same order.
        self._groups = [
            [dist.new_group(sorted({pair.source, pair.target})) for pair in pairs]
            for pairs in spec.sets
        ]
        self._sent = _buffer(torch, spec, rank, rank + 1)
        self._got: dict[tuple[int, int], Any] = {}
        self._summed = _buffer(torch, spec, rank, 0).view(torch.float32)

    def align(self) -> None:
        """Wait for all ranks and their devices."""
        if self._spec.backend == "nccl":
            self._dist.barrier(device_ids=[self._rank])
            self._torch.cuda.synchronize()
        else:
            self._dist.barrier()

    def works(self, number: int) -> dict[int, Work]:
        """Return this rank's part of a set, by the pair's place in it."""
        return {
            place: self._transfer(number, place, pair)
            for place, pair in enumerate(self._spec.sets[number])
            if self._rank in (pair.source, pair.target)
        }

    def _transfer(self, number: int, place: int, pair: Pair) -> Work:
        group, count = self._groups[number][place], self._spec.messages
        if self._rank == pair.source:
            call, held, peer = self._dist.isend, self._sent, pair.target
        else:
            buffer = _buffer(self._torch, self._spec, self._rank, 0)
            held = self._got.setdefault((place, pair.source), buffer)
            call, peer = self._dist.irecv, pair.source

        def run() -> None:
            for _ in range(count):
                call(held, peer, group=group).wait()

        return run

    def reports(self, pair: Pair) -> bool:
        """Return whether this rank's time counts: the receiver's, who has all bytes."""
        return self._rank == pair.target

    def transfers(self) -> Iterator[tuple[Pair | None, Work | None]]:
        """Yield the transfers beside a GEMM; the work is None on a rank without a part."""
        yield self._spec.sets[0][0], self.works(0).get(0)
        yield None, self._all_reduce

    def _all_reduce(self) -> None:
        for _ in range(self._spec.messages):
            self._dist.all_reduce(self._summed, async_op=True).wait()

    def agreed(self, count: int) -> int:
        """Return rank 0's number on all ranks."""
        device = self._sent.device
        shared = self._torch.tensor([count], device=device)
        self._dist.broadcast(shared, src=0)
        return int(shared.item())

    def right(self) -> bool:
        """Return whether all received bytes equal the sent bytes."""
        return all(bool((held == source + 1).all()) for (_, source), held in self._got.items())


class Copies:
    """Transfers by one process that copies between devices, by their copy engines."""

    def __init__(self, torch: Any, spec: OverlapSpec) -> None:
        self._torch, self._spec = torch, spec
        self._from = [_buffer(torch, spec, place, place + 1) for place in range(spec.places)]
        self._to: dict[tuple[int, Pair], Any] = {}

    def align(self) -> None:
        """Wait for all devices."""
        if self._spec.backend == "nccl":
            for place in range(self._spec.places):
                self._torch.cuda.synchronize(place)

    def works(self, number: int) -> dict[int, Work]:
        """Return a set's copies, by the pair's place in it."""
        return {
            place: self._copy(place, pair) for place, pair in enumerate(self._spec.sets[number])
        }

    def _copy(self, place: int, pair: Pair) -> Work:
        source, count = self._from[pair.source], self._spec.messages
        if (place, pair) not in self._to:
            self._to[place, pair] = _buffer(self._torch, self._spec, pair.target, 0)
        held = self._to[place, pair]

        def run() -> None:
            for _ in range(count):
                held.copy_(source, non_blocking=True)

        return run

    def reports(self, pair: Pair) -> bool:  # noqa: ARG002 (as Messages has it)
        """Return true: the one process has all times."""
        return True

    def transfers(self) -> Iterator[tuple[Pair | None, Work | None]]:
        """Yield one copy beside a GEMM."""
        yield self._spec.sets[0][0], self.works(0)[0]

    def agreed(self, count: int) -> int:
        """Return the number."""
        return count

    def right(self) -> bool:
        """Return whether all received bytes equal the sent bytes."""
        return all(bool((to == pair.source + 1).all()) for (_, pair), to in self._to.items())


def _buffer(torch: Any, spec: OverlapSpec, place: int, value: int) -> Any:
    device = torch.device("cuda", place) if spec.backend == "nccl" else torch.device("cpu")
    return torch.full((spec.message_bytes,), value, dtype=torch.uint8, device=device)


class Timer:
    """Times works one after the other and together, in turn, so that drift favours neither."""

    def __init__(
        self, mover: Messages | Copies, watch: CudaStopwatch | ThreadStopwatch, repeats: int
    ) -> None:
        self._mover, self._watch, self._repeats = mover, watch, repeats

    def time(self, works: Mapping[int, Work], reported: Sequence[bool]) -> tuple[Timing, ...]:
        """Return timings by mode.

        Args:
            works: this rank's works by number; ranks without a work still wait for its ranks.
            reported: for each work of the job whether this rank reports its time.
        """
        samples: dict[Mode, list[tuple[dict[int, float], float]]] = {mode: [] for mode in MODES}
        for _ in range(_WARM_UPS + self._repeats):
            samples["sequential"].append(self._sequential(works, len(reported)))
            samples["concurrent"].append(self._concurrent(works))
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

    def _concurrent(self, works: Mapping[int, Work]) -> tuple[dict[int, float], float]:
        self._mover.align()
        times = self._watch.together(list(works.values()))
        return dict(zip(works, times, strict=True)), max(times, default=0.0)

    def _sequential(self, works: Mapping[int, Work], count: int) -> tuple[dict[int, float], float]:
        each = {number: self.single(works.get(number)) for number in range(count)}
        return each, sum(each.values())

    def single(self, work: Work | None) -> float:
        """Align the ranks, run a work, and return its ms; 0 on a rank without it."""
        self._mover.align()
        return max(self._watch.together([work] if work else []), default=0.0)


def _time_products(
    torch: Any, device: Any, timer: Timer, mover: Messages | Copies
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
