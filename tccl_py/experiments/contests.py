"""Contests of a rank: NCCL's own choice of algorithm, protocol and channels against others.

NCCL asks its tuner when a call is enqueued, or captured in a CUDA graph, on the calling thread. So
one communicator serves all choices of a contest, and batches of all of them are interleaved: a
difference between two processes (2 of 17 us for 1 KiB on two H200) cannot count as a difference of
choices. Each batch of small calls has a CUDA graph of its own, as two graphs of the same calls
differ.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from tccl_py.experiments.calls import Call, repeat, row_call, timed_batch
from tccl_py.experiments.collectives import COLLECTIVES
from tccl_py.experiments.spec import (
    FINAL_ROUNDS,
    KIB,
    MIB,
    Contest,
    Row,
    RowTimes,
    TunerChoice,
    Variant,
)
from tccl_py.experiments.together import gemms_beside, stopwatch
from tccl_py.nccl.tuner import (
    ALGORITHMS,
    PROTOCOL_BYTES,
    PROTOCOLS,
    Algorithm,
    Protocol,
    channels_kept_busy,
)
from tccl_py.nccl.versions import version_facts
from tccl_py.nccl_library import loaded_nccl
from tccl_py.rank_processes.rank import Communicator, TimeSlot

BATCH_S = 0.003
"""Of calls of one choice, at least one call: a CUDA graph of small ones takes about 1 ms."""
BESIDE_BYTES = (MIB, 64 * MIB)
"""Sizes that are also timed beside matrix multiplications, as training steps have them."""
_BESIDE_ROUNDS, _BESIDE_S, _MOST_BESIDE = 12, 0.003, 50
_TUNER, _PLUGIN = "NCCL_TUNER_PLUGIN", "NCCL_ENV_PLUGIN"
_CHANNELS = re.compile(r" ([0-9]{1,2}) coll channels")
_TABLE, _NO_TABLE = -1, -2
"""What the tuner is told for no choice: its table, if any, or NCCL's own choice."""
FINALISTS = 4
_STAGE_ROUNDS = 2
_LEAST_SHARE, _MOST_SHARE = 2 * KIB, 2 * MIB
"""Bytes for each channel, from which the numbers of channels follow that are worth a try."""

Own = Callable[[Algorithm, Protocol, int], int]
Orders = Sequence[Sequence[int]]
Measure = Callable[[Orders], Sequence[Sequence[float]]]
"""Times rounds: each is an order of variants, and gives a value for each of them."""


class Tuner:
    """The plugin's tuner in this process; without it NCCL chooses for every call."""

    def __init__(self) -> None:
        path = os.environ.get(_TUNER) or os.environ.get(_PLUGIN)
        self._asked = bool(path)
        # Algorithm, protocol, channels, and the number of calls that followed.
        words = ctypes.c_int * 4
        self._told = words.in_dll(ctypes.CDLL(path), "tccl_told") if path else words()

    @contextmanager
    def follow(self, choice: TunerChoice | None) -> Iterator[None]:
        """Let calls of the `with` block follow a choice, None for NCCL's own."""
        if choice is None:
            self._told[0] = _NO_TABLE
        else:
            self._told[1] = PROTOCOLS.index(choice.protocol)
            self._told[2] = choice.channels
            self._told[0] = ALGORITHMS.index(choice.algorithm)
        try:
            yield
        finally:
            self._told[0] = _TABLE

    def follows(self, call: Call, choice: TunerChoice) -> bool:
        """Call, and return whether NCCL allows the choice."""
        self._told[3] = 0
        self.call(choice, call)
        return bool(self._told[3]) or not self._asked

    def call(self, choice: TunerChoice | None, call: Call) -> None:
        """Call, following a choice."""
        with self.follow(choice):
            call()


def time_contest(
    communicator: Communicator, slot: TimeSlot, row: Row, contest: Contest
) -> RowTimes:
    """Return the times of a contest, on all ranks alike."""
    tuner, tried = Tuner(), contest.choices
    if tried is None:
        tried = _choices_here(communicator, row)
    # 1. Leave out what NCCL does not allow here: all ranks agree.
    with slot():
        call = row_call(communicator, row)
        refused = [float(not tuner.follows(call, choice)) for choice in tried]
        refused = communicator.maxima(refused) if refused else []
        choices = [None, *(choice for choice, no in zip(tried, refused, strict=True) if not no)]
        calls: list[Call] = [partial(tuner.call, choice, call) for choice in choices]
        if contest.table:
            choices, calls = [*choices, None], [*calls, call]
        timed = [timed_batch(communicator, follow, row.bytes, BATCH_S, None) for follow in calls]
    # 2. Time the choices, then the finalists beside matrix multiplications.
    rounds = _Rounds(communicator, slot)
    times_of = halve(len(calls) - 1, partial(rounds.run, timed), rounds=contest.rounds)
    gemm_seconds: list[list[float]] = [[] for _ in times_of]
    if contest.choices is None and BESIDE_BYTES[0] <= row.bytes <= BESIDE_BYTES[1]:
        finalists = [at for at, times in enumerate(times_of) if len(times) == len(times_of[0])]
        with slot():
            steps = _steps(communicator, calls)
        add_rounds(gemm_seconds, finalists, _BESIDE_ROUNDS, partial(rounds.run, steps))
    variants = tuple(
        Variant(choice=choice, seconds=tuple(seconds), beside=tuple(near))
        for choice, seconds, near in zip(choices, times_of, gemm_seconds, strict=True)
    )
    return RowTimes(row=row.plain, variants=variants, final=contest.rounds, skew=rounds.skew)


def _choices_here(communicator: Communicator, row: Row) -> tuple[TunerChoice, ...]:
    """Return the choices that are worth a try over this communicator, by NCCL's log and version."""
    channels = _channels()
    own: Own | None = None
    nccl = loaded_nccl(communicator.torch) if communicator.cuda else ""
    if nccl and version_facts(nccl).tuners_lower_channels:
        own = partial(channels_kept_busy, channels=channels, ranks=communicator.world)
    return all_choices(row, channels, own)


class _Rounds:
    """Runs rounds of batches in time slots; ranks agree on the slowest rank's times."""

    def __init__(self, communicator: Communicator, slot: TimeSlot) -> None:
        self._communicator, self._slot = communicator, slot
        self.skew = 0.0

    def run(self, batches: Sequence[Callable[[], float]], orders: Orders) -> list[list[float]]:
        """Return the seconds of each round's batches, in order."""
        seconds: list[float] = []
        for order in orders:
            with self._slot():
                seconds += [batches[at]() for at in order]
        with self._slot():
            extremes = self._communicator.maxima([*seconds, *(-value for value in seconds)])
        slowest, fastest = extremes[: len(seconds)], extremes[len(seconds) :]
        shares = [1 + low / high for high, low in zip(slowest, fastest, strict=True) if high > 0]
        self.skew = max(self.skew, median(shares or [0.0]))
        values = iter(slowest)
        return [[next(values) for _ in order] for order in orders]


def _steps(communicator: Communicator, variants: Sequence[Call]) -> list[Callable[[], float]]:
    """Return functions that time each variant's calls beside matrix multiplications.

    Multiplications alone take about as long as the calls of the first variant alone.
    """
    begin = stopwatch(communicator)
    seconds = communicator.maximum(*begin([variants[0]]))
    calls = max(1, min(_MOST_BESIDE, int(_BESIDE_S / max(seconds, 1e-7))))
    multiply = gemms_beside(communicator, begin, repeat(variants[0], calls))

    def step(call: Call) -> float:
        return max(begin([multiply, repeat(call, calls)]))

    return [partial(step, call) for call in variants]


def all_choices(row: Row, channels: int, own: Own | None = None) -> tuple[TunerChoice, ...]:
    """Return the choices that are worth a try over a communicator of so many channels.

    `own` tells NCCL's own number, where a tuner's counts below that alone.

    >>> row = Row(collective="broadcast", bytes=4096)
    >>> [(one.protocol, one.channels) for one in all_choices(row, 16)]
    [('ll', 1), ('ll', 2), ('ll128', 1), ('ll128', 2)]
    """
    powers = [1 << shift for shift in range(channels.bit_length())]
    least = min(row.bytes // _MOST_SHARE, channels // 4)
    most = max(1, row.bytes // _LEAST_SHARE)
    counts = [n for n in sorted({*powers, channels}) if least <= n <= most] if channels else [0]
    ranges = PROTOCOL_BYTES.items()
    protocols = [protocol for protocol, (low, high) in ranges if low <= row.bytes <= high]
    return tuple(
        TunerChoice(algorithm=algorithm, protocol=protocol, channels=count)
        for algorithm in COLLECTIVES[row.collective].algorithms
        for protocol in protocols
        for limit in [own(algorithm, protocol, row.bytes) if own else channels]
        for count in [count for count in counts if count <= limit] or [0]
    )


def halve(count: int, measure: Measure, *, rounds: int = FINAL_ROUNDS) -> list[list[float]]:
    """Return the times of NCCL's own choice and of `count` others, the slower ones' fewer.

    While there are more than FINALISTS, the slower half is dropped after each stage. All others
    have the last `rounds` rounds.
    """
    times: list[list[float]] = [[] for _ in range(count + 1)]
    running = list(range(1, count + 1))
    while len(running) > FINALISTS:
        add_rounds(times, [0, *running], _STAGE_ROUNDS, measure)
        running.sort(key=lambda variant: median(times[variant]))
        running = sorted(running[: max(FINALISTS, len(running) // 2)])
    add_rounds(times, [0, *running], rounds, measure)
    return times


def add_rounds(
    times: Sequence[list[float]], variants: Sequence[int], rounds: int, measure: Measure
) -> None:
    """Add the times of rounds of these variants.

    Each round begins with another variant, as what comes after a slow one may be slower.
    """
    firsts = [(len(times[variants[0]]) + number) % len(variants) for number in range(rounds)]
    orders = [[*variants[first:], *variants[:first]] for first in firsts]
    for order, seconds in zip(orders, measure(orders), strict=True):
        for variant, value in zip(order, seconds, strict=True):
            times[variant].append(value)


def _channels() -> int:
    """Return the communicator's channels as NCCL's log of this process says; 0 if it does not."""
    file = Path(os.environ.get("NCCL_DEBUG_FILE", "/").replace("%p", str(os.getpid())))
    text = file.read_text(errors="replace") if file.is_file() else ""
    counts = _CHANNELS.findall(text)
    return int(counts[-1]) if counts else 0
