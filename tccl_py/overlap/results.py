"""From the times of all ranks to the table: medians with their 95 % intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import comb
from statistics import median

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.overlap.orders import ALL_REDUCE, Answer, Mode, Order, Pair, PairTimes, ProductTimes
from tccl_py.overlap.timing import pair_text

_MISSED = 0.05


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A median and the interval that holds it with a chance of 95 %, ms.

    With fewer than 6 samples no interval is that certain; it is then from the least to the most.
    """

    median_ms: float
    low_ms: float
    high_ms: float


class PairRow(msgspec.Struct, frozen=True, kw_only=True):
    """One set in one mode: by pair the time of one message, and of all messages of all pairs."""

    by: str
    mode: Mode
    set: tuple[str, ...]
    message: tuple[Span, ...]
    total: Span


class ProductRow(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer and a product of matrices: the time of each, and until both were done."""

    by: str
    mode: Mode
    transfer: str
    transfer_time: Span
    product_time: Span
    total: Span


def span(samples: Iterable[float]) -> Span:
    """The median of some samples with its interval, from order statistics.

    The interval is from the k-th least to the k-th greatest, where the median lies outside with a
    chance of at most 5 % whatever the samples are distributed like.

    >>> span([4.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    Span(median_ms=5.0, low_ms=2.0, high_ms=8.0)
    """
    ordered = sorted(samples)
    count, outside, below = len(ordered), 0, 0.0
    for left in range((count - 1) // 2):
        below += comb(count, left) / 2**count
        if 2 * below > _MISSED:
            break
        outside = left
    return Span(
        median_ms=median(ordered), low_ms=ordered[outside], high_ms=ordered[count - 1 - outside]
    )


def rows_of(
    by: str, order: Order, answers: Sequence[Answer], names: Mapping[int, int]
) -> tuple[tuple[PairRow, ...], tuple[ProductRow, ...]]:
    """The rows of one job.

    Args:
        by: `nccl`, `gloo` or `memcpy`.
        order: what was done.
        answers: of all ranks.
        names: place -> the GPU's NVML index.

    Raises:
        MeasurementError: what arrived somewhere is not what was sent.
    """
    wrong = [str(one.rank) for one in answers if not one.right]
    if wrong:
        raise MeasurementError(
            f"transfers by {by}: gave rank {', '.join(wrong)} wrong bytes; their times mean nothing"
        )
    pairs = [
        _pair_row(by, order, list(rows), names)
        for rows in zip(*(one.pairs for one in answers), strict=True)
    ]
    products = [
        _product_row(by, list(rows), names)
        for rows in zip(*(one.products for one in answers), strict=True)
    ]
    return tuple(pairs), tuple(products)


def _named(pair: Pair, names: Mapping[int, int]) -> str:
    return pair_text(Pair(source=names[pair.source], target=names[pair.target]))


def _pair_row(
    by: str, order: Order, rows: Sequence[PairTimes], names: Mapping[int, int]
) -> PairRow:
    pairs, mode = order.sets[rows[0].number], rows[0].mode
    each = [next(row.pairs_ms[at] for row in rows if row.pairs_ms[at]) for at in range(len(pairs))]
    by_repeat = list(zip(*each, strict=True))
    totals = [sum(one) if mode == "sequential" else max(one) for one in by_repeat]
    return PairRow(
        by=by,
        mode=mode,
        set=tuple(_named(pair, names) for pair in pairs),
        message=tuple(span(time / order.messages for time in times) for times in each),
        total=span(totals),
    )


def _product_row(by: str, rows: Sequence[ProductTimes], names: Mapping[int, int]) -> ProductRow:
    transfer = rows[0].transfer
    if transfer != ALL_REDUCE:
        one, other = (int(end[1:]) for end in transfer.split("->"))
        transfer = _named(Pair(source=one, target=other), names)
    # All ranks do a product; only those that are part of a transfer make it slower or faster.
    part = [row for row in rows if any(row.transfer_ms)]
    return ProductRow(
        by=by,
        mode=rows[0].mode,
        transfer=transfer,
        transfer_time=span(map(max, zip(*(row.transfer_ms for row in part), strict=True))),
        product_time=span(map(max, zip(*(row.product_ms for row in part), strict=True))),
        total=span(map(max, zip(*(row.total_ms for row in part), strict=True))),
    )
