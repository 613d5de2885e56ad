"""Rank program of a verification job: checks, timings, contests and training; its result is a file.

usage: python -m tccl_py.experiments.rank SPEC.json RANK

Batches of collectives and training steps are timed by the device's or host's clock. Training is of
a small GPT, data parallel, or tensor parallel over neighbouring ranks: every arm has to find the
same loss and gradients.

A contest is between NCCL's own choice of algorithm, protocol and channels and others. NCCL asks its
tuner when a call is enqueued, or captured in a CUDA graph, on the calling thread. So one
communicator serves all choices of a contest, and batches of all of them are interleaved: a
difference between two processes (2 of 17 us for 1 KiB on two H200) cannot count as a difference of
choices. Each batch of small calls has a CUDA graph of its own, as two graphs of the same calls
differ.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from tccl_py.experiments.calls import (
    Call,
    capture_graph,
    gemms_beside,
    repeat,
    row_call,
    run_checks,
    stopwatch,
    timed_batch,
    warm_up,
)
from tccl_py.experiments.means import NCCL, time_means
from tccl_py.experiments.spec import (
    BATCHES,
    COLLECTIVES,
    FINAL_ROUNDS,
    KIB,
    MIB,
    PARALLEL,
    Contest,
    Groups,
    JobResult,
    JobSpec,
    Row,
    RowTimes,
    TunerChoice,
    Variant,
    batches,
)
from tccl_py.nccl.settings import GRAPH_VARIABLE
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
from tccl_py.rank_processes.rank import (
    Communicator,
    TimeSlot,
    join,
    read_spec,
    slots_file,
    time_slots,
    write_result,
)
from tccl_py.rank_processes.training import TrainingStep

TRAINING_SLOTS, TRAINING_STEPS = 4, 5
_WARM_STEPS = 12
"""DistributedDataParallel rebuilds its buckets early, and a CUDA graph needs 11 steps before it."""
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


def main() -> None:
    """Run the specification of the command line as rank RANK."""
    spec, rank, folder = read_spec(JobSpec)
    local_rank = rank - spec.first_rank
    communicator = join(
        "nccl" if spec.backend == "cuda" and spec.means in ("", NCCL) else "gloo",
        spec.rendezvous or folder,
        rank=rank,
        world=spec.world,
        local_rank=local_rank,
        gpu=spec.backend == "cuda",
    )
    torch = communicator.torch
    result = JobResult(
        rank=rank,
        torch=str(torch.__version__),
        nccl=loaded_nccl(torch) if communicator.cuda else "",
        device=communicator.device_name,
    )

    @cache
    def over(groups: Groups) -> Communicator:
        return communicator.split(groups) if groups else communicator

    for groups in ((), *spec.check_groups) if spec.checks else ():
        if not groups or (_splits() and over(groups).world > 1):
            result = run_checks(over(groups), result)
    if spec.rows:
        warm_up(communicator)
        gc.freeze()  # torch may collect garbage before each capture
        slot = time_slots(slots_file(folder), spec.slot, local_rank)
        means = time_means(communicator, spec) if spec.means else None
        result = replace(result, times=tuple(means or _times(spec, communicator, over, slot)))
    write_result(folder, rank, result)
    # No rank leaves while another one communicates. Nothing is destroyed: with overlapping groups
    # of four GPUs and more torch 2.11 hangs then.
    communicator.wait()
    communicator.dist.barrier()
    communicator.wait()


def _times(
    spec: JobSpec,
    communicator: Communicator,
    over: Callable[[Groups], Communicator],
    slot: TimeSlot,
) -> Iterator[RowTimes]:
    """Yield the times of each row that begins before the limit."""
    begun, train = time.monotonic(), trainer(communicator, slot)
    for row in spec.rows:
        spent = time.monotonic() - begun
        if spec.limit is not None and communicator.maximum(spent) > spec.limit:
            return
        contest = row.contest
        if isinstance(contest, Contest):
            yield time_contest(communicator, slot, row, contest)
        elif row.trains:
            yield train(row)
        elif row.groups and not _splits():
            _leave_slots(slot, 1 + BATCHES)
            yield batches(row, ())
        else:
            yield batches(row, _time_batches(over, row, spec.seconds, slot))


def _splits() -> bool:
    """Return whether ranks may form groups: a graph file fails communicators over fewer GPUs."""
    return GRAPH_VARIABLE not in os.environ


def _leave_slots(slot: TimeSlot, count: int) -> None:
    """Let the other jobs have time slots of a row that this one has no part in."""
    for _ in range(count):
        with slot():
            pass


def _time_batches(
    over: Callable[[Groups], Communicator], row: Row, seconds: float, slot: TimeSlot
) -> tuple[float, ...]:
    """Return the seconds per call of BATCHES batches that together take about `seconds`.

    The set-up and every batch have a time slot each. Ranks outside a row's communicator join the
    barriers of the whole job, and have no times.
    """
    with ExitStack() as stack:
        with slot():
            group = over(row.groups)
            call = row_call(group, row)
            batch = timed_batch(group, call, row.bytes, seconds / BATCHES, stack)
        times = []
        for _ in range(BATCHES):
            with slot():
                times.append(batch())
    return tuple(times) if group.world > 1 else ()


def trainer(communicator: Communicator, slot: TimeSlot) -> Callable[[Row], RowTimes]:
    """Return a function that times a training step, eager or as a CUDA graph.

    Times come with loss and gradients after a few steps. Rows of a model follow each other.
    """
    # Work that a graph replays must be made on another stream than the default one.
    stream = communicator.torch.cuda.Stream() if communicator.cuda else None
    world = communicator.world

    @lru_cache(maxsize=1)
    def step_of(parts: int) -> tuple[TrainingStep, tuple[float, ...]]:
        # All jobs make their models at the same time, which takes longer than the steps: an
        # empty slot before and after it keeps that away from timed work.
        _leave_slots(slot, 1)
        groups = [range(first, first + parts) for first in range(0, world, parts) if parts > 1]
        step = TrainingStep(communicator, communicator.split(groups))
        for _ in range(_WARM_STEPS):
            step()
        values = step.values(step)
        communicator.wait()
        _leave_slots(slot, 1)
        return step, values

    def train(row: Row) -> RowTimes:
        name, _, form = row.mode.partition("-")
        parts = PARALLEL[name]
        if not _splits() and parts not in (1, world):
            _leave_slots(slot, TRAINING_SLOTS + (1 if form == "graph" else 2))
            return batches(row, ())
        with ExitStack() as stack, communicator.torch.cuda.stream(stream):
            step, values = step_of(parts)
            call: Call = step
            if form == "graph":
                with slot():
                    communicator.wait()
                    call = stack.enter_context(capture_graph(communicator, step, stream=stream))
                    values = step.values(call)
            return batches(row, _time_steps(communicator, call, slot), values)

    return train


def _time_steps(communicator: Communicator, step: Call, slot: TimeSlot) -> tuple[float, ...]:
    seconds = []
    for _ in range(TRAINING_SLOTS):
        with slot():
            # An uncounted step aligns the ranks and refills this job's caches.
            step()
            communicator.wait()
            for _ in range(TRAINING_STEPS):
                begun = time.perf_counter()
                step()
                communicator.wait()
                seconds.append(time.perf_counter() - begun)
    return tuple(seconds)


# Contests.


class Tuner:
    """The plugin's tuner in this process; without it NCCL chooses for every call."""

    def __init__(self) -> None:
        path = os.environ.get(_TUNER) or os.environ.get(_PLUGIN)
        self._asked = bool(path)
        # Algorithm, protocol, channels, and the number of calls that followed.
        words = ctypes.c_int * 4
        self._told = words.in_dll(ctypes.CDLL(path), "tccl_told") if path else words()

    def call(self, choice: TunerChoice | None, call: Call) -> None:
        """Call, following a choice, None for NCCL's own."""
        if choice is None:
            self._told[0] = _NO_TABLE
        else:
            self._told[1] = PROTOCOLS.index(choice.protocol)
            self._told[2] = choice.channels
            self._told[0] = ALGORITHMS.index(choice.algorithm)
        try:
            call()
        finally:
            self._told[0] = _TABLE

    def allows(self, call: Call, choice: TunerChoice) -> bool:
        """Call, and return whether NCCL follows the choice."""
        self._told[3] = 0
        self.call(choice, call)
        return bool(self._told[3]) or not self._asked


def time_contest(
    communicator: Communicator, slot: TimeSlot, row: Row, contest: Contest
) -> RowTimes:
    """Return the times of a contest, on all ranks alike: the slowest rank's."""
    tuner, tried, skews = Tuner(), contest.choices, [0.0]
    if tried is None:
        tried = _choices_here(communicator, row)
    # 1. Leave out what NCCL does not allow here: all ranks agree.
    with slot():
        call = row_call(communicator, row)
        refused = [float(not tuner.allows(call, choice)) for choice in tried]
        refused = communicator.maxima(refused) if refused else []
        choices = [None, *(choice for choice, no in zip(tried, refused, strict=True) if not no)]
        calls: list[Call] = [partial(tuner.call, choice, call) for choice in choices]
        if contest.table:
            choices, calls = [*choices, None], [*calls, call]
        timed = [timed_batch(communicator, follow, row.bytes, BATCH_S, None) for follow in calls]

    def run(batches: Sequence[Callable[[], float]], orders: Orders) -> list[list[float]]:
        """Return the seconds of each round's batches, in order."""
        seconds: list[float] = []
        for order in orders:
            with slot():
                seconds += [batches[at]() for at in order]
        with slot():
            extremes = communicator.maxima([*seconds, *(-value for value in seconds)])
        slowest, fastest = extremes[: len(seconds)], extremes[len(seconds) :]
        shares = [1 + low / high for high, low in zip(slowest, fastest, strict=True) if high > 0]
        skews.append(median(shares or [0.0]))
        values = iter(slowest)
        return [[next(values) for _ in order] for order in orders]

    # 2. Time the choices, then the finalists beside matrix multiplications.
    times_of = halve(len(calls) - 1, partial(run, timed), rounds=contest.rounds)
    gemm_seconds: list[list[float]] = [[] for _ in times_of]
    if contest.choices is None and BESIDE_BYTES[0] <= row.bytes <= BESIDE_BYTES[1]:
        finalists = [at for at, times in enumerate(times_of) if len(times) == len(times_of[0])]
        with slot():
            steps = _steps(communicator, calls)
        add_rounds(gemm_seconds, finalists, _BESIDE_ROUNDS, partial(run, steps))
    variants = tuple(
        Variant(choice=choice, seconds=tuple(seconds), beside=tuple(near))
        for choice, seconds, near in zip(choices, times_of, gemm_seconds, strict=True)
    )
    return RowTimes(row=row.plain, variants=variants, final=contest.rounds, skew=max(skews))


def _choices_here(communicator: Communicator, row: Row) -> tuple[TunerChoice, ...]:
    """Return the choices that are worth a try over this communicator, by NCCL's log and version."""
    file = Path(os.environ.get("NCCL_DEBUG_FILE", "/").replace("%p", str(os.getpid())))
    text = file.read_text(errors="replace") if file.is_file() else ""
    # 0 where the log does not say it.
    channels = int((_CHANNELS.findall(text) or [0])[-1])
    nccl, own = loaded_nccl(communicator.torch) if communicator.cuda else "", None
    if nccl and version_facts(nccl).tuners_lower_channels:
        own = partial(channels_kept_busy, channels=channels, ranks=communicator.world)
    return all_choices(row, channels, own)


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


if __name__ == "__main__":
    main()
