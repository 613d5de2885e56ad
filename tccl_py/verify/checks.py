"""Checks of every collective's values against a formula.

Each rank computes the formula in integers on its own device: no communicated value is used, and
hundreds of cases take seconds. All values and sums are whole numbers that even bfloat16 holds
exactly up to 30 ranks, so comparisons need no tolerance. Neighbours differ, so a shifted block
shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tccl_py.rank_processes.rank import Communicator
from tccl_py.verify.spec import JobResult, WrongValue

COUNTS = (1, 3, 1027, 65_537, 1_048_583)
"""Elements per rank; odd, so that no protocol's block is full, and in the range of every one."""
DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8")
_LARGE = 100_000
"""From this many elements on, two dtypes suffice."""
_LARGE_DTYPES = ("float32", "bfloat16")
_ABSENT = ("not support", "not implemented", "unsupported", "not currently supported")
"""Words of torch's errors for a collective or dtype that the backend lacks."""
_Pairs = Sequence[tuple[Any, Any]]


def run_checks(communicator: Communicator, result: JobResult) -> JobResult:
    """Run all cases of all collectives, and add the findings to this rank's result.

    A wrong case does not end the rest.
    """
    checked, wrong, left_out = 0, [], set()
    cases = [
        (dtype, count, asynchronous)
        for count in COUNTS
        for dtype in (DTYPES if count < _LARGE else _LARGE_DTYPES)
        for asynchronous in (False, True)
    ]
    for (name, check), case in itertools.product(COLLECTIVE_CHECKS.items(), cases):
        dtype, count, asynchronous = case
        try:
            tensors = _Tensors(communicator, *case)
            what = next(filter(None, itertools.starmap(tensors.compare, check(tensors))), "")
        except Exception as error:
            text = str(error) or type(error).__name__
            if any(words in text.lower() for words in _ABSENT):
                left_out.add(f"{name} of {dtype}")
                continue
            what = text.splitlines()[0][:300]
        checked += 1
        if what:
            named = f"{name}, {dtype} x {count}{', async' if asynchronous else ''}"
            wrong.append(WrongValue(case=named, rank=communicator.rank, what=what))
    return msgspec.structs.replace(
        result, checked=checked, wrong=tuple(wrong), left_out=tuple(sorted(left_out))
    )


class _Tensors:
    """Tensors and calls of a case on one rank: its type, number of elements, and kind of call."""

    def __init__(
        self, communicator: Communicator, dtype: str, count: int, asynchronous: bool
    ) -> None:
        self.torch, self.dist = communicator.torch, communicator.dist
        self.rank, self.world = communicator.rank, communicator.world
        self.asynchronous, self._count = asynchronous, count
        self._device = communicator.device
        self._dtype = getattr(communicator.torch, dtype)

    def of(self, rank: int, *, block: int = 0) -> Any:
        """Return the contribution of `rank`, for rank `block` where blocks differ: 0 to 7."""
        index = self.torch.arange(self._count, dtype=self.torch.int64, device=self._device)
        index = index + (rank * 1_000_003 + block * 500_009)
        # The high bits of a product with an odd constant look random (Knuth, volume 3, 6.4).
        return ((index * 2_654_435_761) >> 13) & 7

    def own(self, *, block: int = 0) -> Any:
        """Return this rank's contribution in the case's dtype."""
        return self.of(self.rank, block=block).to(self._dtype)

    def own_blocks(self) -> list[Any]:
        """Return this rank's block for every rank."""
        return [self.own(block=rank) for rank in range(self.world)]

    def of_all(self, *, block: int = 0) -> list[Any]:
        """Return every rank's contribution."""
        return [self.of(rank, block=block) for rank in range(self.world)]

    def empty(self, parts: int = 1) -> Any:
        """Return a buffer of a value that no collective gives, so unwritten elements show."""
        shape = (parts * self._count,)
        return self.torch.full(shape, 99, dtype=self._dtype, device=self._device)

    def run(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> None:
        """Run a collective, and wait for it."""
        work = call(*arguments, async_op=self.asynchronous, **more)
        if self.asynchronous:
            work.wait()

    def compare(self, found: Any, expected: Any) -> str:
        """Return "" if equal, else the first difference."""
        expected = expected.to(self._dtype)
        if self.torch.equal(found, expected):
            return ""
        differ = (found != expected).nonzero()
        first = int(differ[0])
        return (
            f"{len(differ)} of {len(expected)} values are wrong, the first at {first}: "
            f"{found[first].item()} instead of {expected[first].item()}"
        )


# Each check runs a collective, and returns what it gave and what it has to give.


def _broadcast(tensors: _Tensors) -> _Pairs:
    root = tensors.world - 1
    held = tensors.own() if tensors.rank == root else tensors.empty()
    tensors.run(tensors.dist.broadcast, held, src=root)
    return [(held, tensors.of(root))]


def _scatter(tensors: _Tensors) -> _Pairs:
    got = tensors.empty()
    blocks = tensors.own_blocks() if tensors.rank == 0 else None
    tensors.run(tensors.dist.scatter, got, blocks, src=0)
    return [(got, tensors.of(0, block=tensors.rank))]


def _reduce(tensors: _Tensors) -> _Pairs:
    root, held = tensors.world - 1, tensors.own()
    tensors.run(tensors.dist.reduce, held, dst=root)
    # The other ranks' buffers are undefined then.
    return [(held, sum(tensors.of_all()))] if tensors.rank == root else []


def _gather(tensors: _Tensors) -> _Pairs:
    parts = [tensors.empty() for _ in range(tensors.world)] if tensors.rank == 0 else None
    tensors.run(tensors.dist.gather, tensors.own(), parts, dst=0)
    return list(zip(parts or (), tensors.of_all(), strict=False))


def _all_reduce(tensors: _Tensors) -> _Pairs:
    summed, largest = tensors.own(), tensors.own()
    tensors.run(tensors.dist.all_reduce, summed)
    tensors.run(tensors.dist.all_reduce, largest, op=tensors.dist.ReduceOp.MAX)
    maximum = tensors.torch.stack(tensors.of_all()).max(dim=0).values
    return [(summed, sum(tensors.of_all())), (largest, maximum)]


def _all_gather(tensors: _Tensors) -> _Pairs:
    parts = [tensors.empty() for _ in range(tensors.world)]
    tensors.run(tensors.dist.all_gather, parts, tensors.own())
    return list(zip(parts, tensors.of_all(), strict=True))


def _reduce_scatter(tensors: _Tensors) -> _Pairs:
    got, blocks = tensors.empty(), tensors.torch.cat(tensors.own_blocks())
    tensors.run(tensors.dist.reduce_scatter_tensor, got, blocks)
    return [(got, sum(tensors.of_all(block=tensors.rank)))]


def _all_to_all(tensors: _Tensors) -> _Pairs:
    got, blocks = tensors.empty(tensors.world), tensors.torch.cat(tensors.own_blocks())
    tensors.run(tensors.dist.all_to_all_single, got, blocks)
    return [(got, tensors.torch.cat(tensors.of_all(block=tensors.rank)))]


def _send_receive(tensors: _Tensors) -> _Pairs:
    """Send from each rank to the next: blocking in turn, or all at once."""
    dist, rank = tensors.dist, tensors.rank
    after, before = (rank + 1) % tensors.world, (rank - 1) % tensors.world
    own, got = tensors.own(), tensors.empty()
    if tensors.asynchronous:
        both = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    elif rank == 0:
        dist.send(own, after)
        dist.recv(got, before)
    else:
        dist.recv(got, before)
        dist.send(own, after)
    return [(got, tensors.of(before))]


COLLECTIVE_CHECKS: dict[str, Callable[[_Tensors], _Pairs]] = {
    "broadcast": _broadcast,
    "scatter": _scatter,
    "reduce": _reduce,
    "gather": _gather,
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "send/recv": _send_receive,
}
