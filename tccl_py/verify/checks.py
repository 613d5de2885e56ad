"""Every collective, its values compared with what a formula says they are.

The formula is computed in integers, by each rank for itself on its own device: nothing that was
communicated is used, and hundreds of cases take seconds. All values and sums are whole numbers
that even bfloat16 holds exactly up to 30 ranks, so a comparison needs no tolerance, and neighbours
differ, so that a shifted block shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tccl_py.verify.orders import Wrong
from tccl_py.verify.ranks import Ranks

COUNTS = (1, 3, 1027, 65_537, 1_048_583)
"""Elements a rank; odd, so that no block of any protocol is full, and from all its protocols."""
DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8")
_LARGE = 100_000
"""From this many elements on two dtypes are enough."""
_LARGE_DTYPES = ("float32", "bfloat16")
_ABSENT = ("not support", "not implemented", "unsupported", "not currently supported")
"""What torch says where a backend does not have a collective or a type."""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """How many cases were compared, which were wrong, and which the backend does not have."""

    checked: int
    wrong: tuple[Wrong, ...]
    left_out: tuple[str, ...]


class _Case(msgspec.Struct, frozen=True):
    """Types and size of one case, and whether it is waited for later."""

    dtype: str
    count: int
    later: bool

    def __str__(self) -> str:
        return f"{self.dtype} x {self.count}{', async' if self.later else ''}"


def run_checks(ranks: Ranks) -> Checked:
    """Run all cases of all collectives; a case that is wrong does not end the rest."""
    checked, wrong, left_out = 0, [], set()
    for name, check in COLLECTIVE_CHECKS.items():
        for case in _cases():
            try:
                what = check(ranks, case)
            except Exception as error:
                text = str(error) or type(error).__name__
                if any(one in text.lower() for one in _ABSENT):
                    left_out.add(f"{name} of {case.dtype}")
                    continue
                what = text.splitlines()[0][:300]
            checked += 1
            if what:
                wrong.append(Wrong(case=f"{name}, {case}", rank=ranks.rank, what=what))
    return Checked(checked=checked, wrong=tuple(wrong), left_out=tuple(sorted(left_out)))


def _cases() -> Iterator[_Case]:
    for count in COUNTS:
        for dtype in DTYPES if count < _LARGE else _LARGE_DTYPES:
            for later in (False, True):
                yield _Case(dtype, count, later)


def values(ranks: Ranks, rank: int, count: int, *, block: int = 0) -> Any:
    """What `rank` contributes, for the rank `block` where each gets another part: 0 to 7."""
    torch = ranks.torch
    index = torch.arange(count, dtype=torch.int64, device=ranks.device)
    index = index + (rank * 1_000_003 + block * 500_009)
    # The high bits of a product with an odd constant look random (Knuth, volume 3, 6.4).
    return ((index * 2_654_435_761) >> 13) & 7


class _Tensors:
    """Makes a case's tensors, runs its calls, and compares."""

    def __init__(self, ranks: Ranks, case: _Case) -> None:
        self._ranks, self._case = ranks, case
        self._dtype = getattr(ranks.torch, case.dtype)

    def own(self, *, block: int = 0) -> Any:
        return self.placed(self.of(self._ranks.rank, block=block))

    def of(self, rank: int, *, block: int = 0) -> Any:
        return values(self._ranks, rank, self._case.count, block=block)

    def placed(self, whole: Any) -> Any:
        return whole.to(self._dtype)

    def empty(self, parts: int = 1) -> Any:
        # A value that no collective gives: what was not written shows.
        return self._ranks.torch.full(
            (parts * self._case.count,), 99, dtype=self._dtype, device=self._ranks.device
        )

    def total(self, *, block: int = 0) -> Any:
        return sum(self.of(rank, block=block) for rank in range(self._ranks.world))

    def joined(self, parts: list[Any]) -> Any:
        return self._ranks.torch.cat(parts)

    def run(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> None:
        work = call(*arguments, async_op=self._case.later, **more)
        if self._case.later:
            work.wait()

    def compare(self, found: Any, expected: Any) -> str:
        """ "" if equal, else where it is not."""
        expected = expected.to(self._dtype)
        if self._ranks.torch.equal(found, expected):
            return ""
        differ = (found != expected).nonzero()
        first = int(differ[0])
        return (
            f"{len(differ)} of {len(expected)} values are wrong, the first at {first}: "
            f"{found[first].item()} instead of {expected[first].item()}"
        )


def _broadcast(ranks: Ranks, case: _Case) -> str:
    some, root = _Tensors(ranks, case), ranks.world - 1
    held = some.own() if ranks.rank == root else some.empty()
    some.run(ranks.dist.broadcast, held, src=root)
    return some.compare(held, some.of(root))


def _scatter(ranks: Ranks, case: _Case) -> str:
    some = _Tensors(ranks, case)
    got = some.empty()
    blocks = [some.own(block=one) for one in range(ranks.world)] if ranks.rank == 0 else None
    some.run(ranks.dist.scatter, got, blocks, src=0)
    return some.compare(got, some.of(0, block=ranks.rank))


def _reduce(ranks: Ranks, case: _Case) -> str:
    some, root = _Tensors(ranks, case), ranks.world - 1
    held = some.own()
    some.run(ranks.dist.reduce, held, dst=root)
    # What other ranks hold then is undefined.
    return some.compare(held, some.total()) if ranks.rank == root else ""


def _gather(ranks: Ranks, case: _Case) -> str:
    some = _Tensors(ranks, case)
    parts = [some.empty() for _ in range(ranks.world)] if ranks.rank == 0 else None
    some.run(ranks.dist.gather, some.own(), parts, dst=0)
    if parts is None:
        return ""
    expected = [some.of(rank) for rank in range(ranks.world)]
    return some.compare(some.joined(parts), some.joined(expected))


def _all_reduce(ranks: Ranks, case: _Case) -> str:
    some = _Tensors(ranks, case)
    summed = some.own()
    some.run(ranks.dist.all_reduce, summed)
    found = some.compare(summed, some.total())
    largest = some.own()
    some.run(ranks.dist.all_reduce, largest, op=ranks.dist.ReduceOp.MAX)
    all_values = ranks.torch.stack([some.of(rank) for rank in range(ranks.world)])
    return found or some.compare(largest, all_values.max(dim=0).values)


def _all_gather(ranks: Ranks, case: _Case) -> str:
    some = _Tensors(ranks, case)
    parts = [some.empty() for _ in range(ranks.world)]
    some.run(ranks.dist.all_gather, parts, some.own())
    expected = [some.of(rank) for rank in range(ranks.world)]
    return some.compare(some.joined(parts), some.joined(expected))


def _reduce_scatter(ranks: Ranks, case: _Case) -> str:
    some = _Tensors(ranks, case)
    got = some.empty()
    blocks = some.joined([some.own(block=one) for one in range(ranks.world)])
    some.run(ranks.dist.reduce_scatter_tensor, got, blocks)
    return some.compare(got, some.total(block=ranks.rank))


def _all_to_all(ranks: Ranks, case: _Case) -> str:
    some = _Tensors(ranks, case)
    got = some.empty(ranks.world)
    blocks = some.joined([some.own(block=one) for one in range(ranks.world)])
    some.run(ranks.dist.all_to_all_single, got, blocks)
    expected = [some.of(rank, block=ranks.rank) for rank in range(ranks.world)]
    return some.compare(got, some.joined(expected))


def _send_receive(ranks: Ranks, case: _Case) -> str:
    """Each rank to the next: blocking in turn, or all at once."""
    some, dist = _Tensors(ranks, case), ranks.dist
    after, before = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    own, got = some.own(), some.empty()
    if case.later:
        both = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    elif ranks.rank == 0:
        dist.send(own, after)
        dist.recv(got, before)
    else:
        dist.recv(got, before)
        dist.send(own, after)
    return some.compare(got, some.of(before))


COLLECTIVE_CHECKS: dict[str, Callable[[Ranks, _Case], str]] = {
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
