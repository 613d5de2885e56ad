"""What is timed: pairs one after the other and together, and transfers beside a product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tccl_py.overlap.orders import ALL_REDUCE, MODES, Mode, Order, Pair, PairTimes, ProductTimes
from tccl_py.overlap.stopwatch import Stopwatch, Work

_WARM_UPS = 2
_MATRIX_ON_GPU, _MATRIX_ON_CPU = 4096, 256
_MOST_PRODUCTS = 10_000


@dataclass(frozen=True)
class Process:
    """One process of the job, with the torch that it has."""

    torch: Any
    order: Order
    rank: int
    device: Any
    watch: Stopwatch

    @property
    def cuda(self) -> bool:
        """Whether it has a GPU."""
        return self.order.backend == "nccl"

    def place(self, number: int) -> Any:
        """The device of a place; a rehearsal has one for all."""
        return self.torch.device("cuda", number) if self.cuda else self.torch.device("cpu")

    def buffer(self, number: int, value: int) -> Any:
        """A message's bytes at a place."""
        return self.torch.full(
            (self.order.message_bytes,),
            value,
            dtype=self.torch.uint8,
            device=self.place(number),
        )


class Messages:
    """Transfers by torch.distributed; each pair has a group, and so a communicator, of its own.

    In one group two transfers would be queued one behind the other.
    """

    def __init__(self, process: Process, dist: Any) -> None:
        self._process, self._dist = process, dist
        order = process.order
        # Every rank makes every group, also those that it is not in, in the same order.
        self._groups = [
            [dist.new_group(sorted({pair.source, pair.target})) for pair in pairs]
            for pairs in order.sets
        ]
        self._sent = process.buffer(process.rank, process.rank + 1)
        self._got: dict[tuple[int, int], Any] = {}
        self._summed = process.buffer(process.rank, 0).view(process.torch.float32)

    def meet(self) -> None:
        """Until all ranks are here, and their devices have nothing to do."""
        if self._process.cuda:
            self._dist.barrier(device_ids=[self._process.rank])
            self._process.torch.cuda.synchronize()
        else:
            self._dist.barrier()

    def works(self, number: int) -> dict[int, Work]:
        """This rank's part of a set, by the pair's place in it."""
        found: dict[int, Work] = {}
        for place, pair in enumerate(self._process.order.sets[number]):
            if self._process.rank in (pair.source, pair.target):
                found[place] = self._transfer(number, place, pair)
        return found

    def _transfer(self, number: int, place: int, pair: Pair) -> Work:
        group, count = self._groups[number][place], self._process.order.messages
        if self._process.rank == pair.source:
            call, held, peer = self._dist.isend, self._sent, pair.target
        else:
            held = self._got.setdefault(
                (place, pair.source), self._process.buffer(self._process.rank, 0)
            )
            call, peer = self._dist.irecv, pair.source

        def run() -> None:
            for _ in range(count):
                call(held, peer, group=group).wait()

        return run

    def tells(self, pair: Pair) -> bool:
        """Whether this rank's time of a pair counts: the receiver's, as only it has all bytes."""
        return self._process.rank == pair.target

    def beside(self) -> Iterator[tuple[str, Work | None]]:
        """Transfers to be run beside a product; None where this rank has no part."""
        pair = self._process.order.sets[0][0]
        mine = self._process.rank in (pair.source, pair.target)
        yield pair_text(pair), self._transfer(0, 0, pair) if mine else None
        yield ALL_REDUCE, self._all_reduce

    def _all_reduce(self) -> None:
        for _ in range(self._process.order.messages):
            self._dist.all_reduce(self._summed, async_op=True).wait()

    def agreed(self, count: int) -> int:
        """Rank 0's number, for all ranks."""
        shared = self._process.torch.tensor([count], device=self._process.device)
        self._dist.broadcast(shared, src=0)
        return int(shared.item())

    def right(self) -> bool:
        """Whether all that arrived is what was sent."""
        return all(bool((held == source + 1).all()) for (_, source), held in self._got.items())


class Copies:
    """Transfers by one process that copies between devices, by their copy engines."""

    def __init__(self, process: Process) -> None:
        self._process = process
        places = range(process.order.places)
        self._from = [process.buffer(place, place + 1) for place in places]
        self._to: dict[tuple[int, Pair], Any] = {}

    def meet(self) -> None:
        """Nobody to meet; until all devices have nothing to do."""
        if self._process.cuda:
            for place in range(self._process.order.places):
                self._process.torch.cuda.synchronize(place)

    def works(self, number: int) -> dict[int, Work]:
        """All of a set, by the pair's place in it."""
        pairs = self._process.order.sets[number]
        return {place: self._copy(place, pair) for place, pair in enumerate(pairs)}

    def _copy(self, place: int, pair: Pair) -> Work:
        source = self._from[pair.source]
        key = place, pair
        if key not in self._to:
            self._to[key] = self._process.buffer(pair.target, 0)
        held, count = self._to[key], self._process.order.messages

        def run() -> None:
            for _ in range(count):
                held.copy_(source, non_blocking=True)

        return run

    def tells(self, pair: Pair) -> bool:  # noqa: ARG002 (as Messages has it)
        """The one process knows all times."""
        return True

    def beside(self) -> Iterator[tuple[str, Work | None]]:
        """One copy to be run beside a product."""
        pair = self._process.order.sets[0][0]
        yield pair_text(pair), self._copy(0, pair)

    def agreed(self, count: int) -> int:
        """The number itself."""
        return count

    def right(self) -> bool:
        """Whether all that arrived is what was sent."""
        return all(bool((to == pair.source + 1).all()) for (_, pair), to in self._to.items())


def pair_text(pair: Pair) -> str:
    """A pair as it is written.

    >>> pair_text(Pair(source=0, target=2))
    'G0->G2'
    """
    return f"G{pair.source}->G{pair.target}"


def time_pairs(process: Process, mover: Messages | Copies) -> list[PairTimes]:
    """All sets, in both modes in turn, so that what drifts favours neither."""
    found = []
    for number, pairs in enumerate(process.order.sets):
        works = mover.works(number)
        rows: dict[Mode, list[tuple[dict[int, float], float]]] = {mode: [] for mode in MODES}
        for repeat in range(_WARM_UPS + process.order.repeats):
            for mode in MODES:
                taken = _run_set(process, mover, works, len(pairs), mode)
                if repeat >= _WARM_UPS:
                    rows[mode].append(taken)
        for mode, samples in rows.items():
            found.append(_pair_times(mover, number, pairs, mode, samples))
    return found


def _run_set(
    process: Process, mover: Messages | Copies, works: dict[int, Work], count: int, mode: Mode
) -> tuple[dict[int, float], float]:
    """Times of this process's pairs, ms, and until the last of them was done."""
    if mode == "concurrent":
        mover.meet()
        times = process.watch.together(list(works.values()))
        return dict(zip(works, times.each, strict=True)), times.total
    each: dict[int, float] = {}
    for place in range(count):
        mover.meet()
        if place in works:
            each[place] = process.watch.together([works[place]]).total
    return each, sum(each.values())


def _pair_times(
    mover: Messages | Copies,
    number: int,
    pairs: Sequence[Pair],
    mode: Mode,
    samples: Sequence[tuple[dict[int, float], float]],
) -> PairTimes:
    return PairTimes(
        number=number,
        mode=mode,
        pairs_ms=tuple(
            tuple(each[place] for each, _ in samples) if mover.tells(pair) else ()
            for place, pair in enumerate(pairs)
        ),
        total_ms=tuple(total for _, total in samples),
    )


def time_products(process: Process, mover: Messages | Copies) -> list[ProductTimes]:
    """Each transfer and a product of about its length, one after the other and together."""
    torch = process.torch
    size = _MATRIX_ON_GPU if process.cuda else _MATRIX_ON_CPU
    kind = torch.bfloat16 if process.cuda else torch.float32
    one, other = (torch.ones(size, size, dtype=kind, device=process.device) for _ in range(2))
    result = torch.empty_like(one)
    found = []
    for text, work in mover.beside():
        count = _as_long_as(process, mover, work, lambda: torch.mm(one, other, out=result))

        def product(count: int = count) -> None:
            for _ in range(count):
                torch.mm(one, other, out=result)

        found += _time_product(process, mover, text, work, product)
    return found


def _as_long_as(process: Process, mover: Messages | Copies, work: Work | None, step: Work) -> int:
    """How often to repeat `step` to take as long as the transfer; the same on all ranks."""
    transfer = single = 0.0
    for _ in range(_WARM_UPS + 1):
        mover.meet()
        transfer = process.watch.together([work] if work else []).total
        mover.meet()
        single = process.watch.together([step]).total
    wanted = max(1, min(_MOST_PRODUCTS, round(transfer / max(single, 1e-3))))
    return mover.agreed(wanted)


def _time_product(
    process: Process, mover: Messages | Copies, text: str, work: Work | None, product: Work
) -> list[ProductTimes]:
    works = [product, *([work] if work else [])]
    rows: dict[Mode, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
    for repeat in range(_WARM_UPS + process.order.repeats):
        for mode in MODES:
            if mode == "concurrent":
                mover.meet()
                each = process.watch.together(works).each
                total = max(each)
            else:
                parts = []
                for one in works:
                    mover.meet()
                    parts.append(process.watch.together([one]).total)
                # A rank without a transfer still has to meet those that have one.
                if work is None:
                    mover.meet()
                each, total = tuple(parts), sum(parts)
            if repeat >= _WARM_UPS:
                rows[mode].append((each[1] if work else 0.0, each[0], total))
    return [
        ProductTimes(
            transfer=text,
            mode=mode,
            transfer_ms=tuple(one[0] for one in samples),
            product_ms=tuple(one[1] for one in samples),
            total_ms=tuple(one[2] for one in samples),
        )
        for mode, samples in rows.items()
    ]
