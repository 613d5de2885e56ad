"""Contests of a row: NCCL's own choice of algorithm, protocol and channels against others.

All choices of a contest are timed in one job, over one communicator, interleaved: a difference
between two processes (2 of 17 us for 1 KiB on two H200) cannot count as a difference of choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from tccl_py.nccl.tuner import Algorithm, Protocol
from tccl_py.verify.spec import FINAL_ROUNDS, KIB, MIB, Choice, TimedRow

FINALISTS = 4
_STAGE_ROUNDS = 2
_LONGEST_LL, _SHORTEST_SIMPLE = 16 * MIB, 8 * KIB
"""LL moves twice the bytes; Simple waits for memory fences in each step."""
_LEAST_SHARE, _MOST_SHARE = 2 * KIB, 2 * MIB
"""Bytes for each channel, from which the numbers of channels follow that are worth a try."""


Orders = Sequence[Sequence[int]]
Measure = Callable[[Orders], Sequence[Sequence[float]]]
"""Times rounds: each is an order of variants, and gives a value for each of them."""


def all_choices(row: TimedRow, channels: int) -> tuple[Choice, ...]:
    """Return the choices that are worth a try over a communicator of so many channels.

    >>> row = TimedRow(collective="broadcast", bytes=4096)
    >>> [(one.protocol, one.channels) for one in all_choices(row, 16)]
    [('ll', 1), ('ll', 2), ('ll128', 1), ('ll128', 2)]
    """
    powers = [1 << shift for shift in range(channels.bit_length())]
    least = min(row.bytes // _MOST_SHARE, channels // 4)
    most = max(1, row.bytes // _LEAST_SHARE)
    counts = [n for n in sorted({*powers, channels}) if least <= n <= most] if channels else [0]
    protocols: list[Protocol] = ["ll"] if row.bytes <= _LONGEST_LL else []
    protocols += ["ll128"]
    protocols += ["simple"] if row.bytes >= _SHORTEST_SIMPLE else []
    algorithms: list[Algorithm] = ["ring"]
    algorithms += ["tree"] if row.collective == "all_reduce" else []
    return tuple(
        Choice(algorithm=algorithm, protocol=protocol, channels=count)
        for algorithm in algorithms
        for protocol in protocols
        for count in counts
    )


def halve(count: int, measure: Measure, *, rounds: int = FINAL_ROUNDS) -> list[list[float]]:
    """Return the times of NCCL's own choice and of `count` others, the slower ones' fewer.

    While there are more than FINALISTS, the slower half is dropped after each stage. All others
    have the last `rounds` rounds.
    """
    times: list[list[float]] = [[] for _ in range(count + 1)]
    running = list(range(1, count + 1))

    def run(number: int) -> None:
        # Each round begins with another variant: what comes after a slow one may be slower.
        variants = [0, *running]
        firsts = [(len(times[0]) + n) % len(variants) for n in range(number)]
        orders = [[*variants[first:], *variants[:first]] for first in firsts]
        for order, seconds in zip(orders, measure(orders), strict=True):
            for variant, value in zip(order, seconds, strict=True):
                times[variant].append(value)

    while len(running) > FINALISTS:
        run(_STAGE_ROUNDS)
        running.sort(key=lambda variant: median(times[variant]))
        running = sorted(running[: max(FINALISTS, len(running) // 2)])
    run(rounds)
    return times
