"""Tables for NCCL's tuner: algorithm, protocol and channels by collective and message size.

NCCL asks a tuner plugin before each collective, with a number of bytes (getAlgoInfo in enqueue.cc,
2.28.7 to 2.30.7): the element size times `count` for all-reduce, broadcast and reduce, and times
`count` times the number of ranks for all-gather (the whole received buffer) and reduce-scatter (the
whole sent buffer). For all five collectives these are the bytes of a row of `tccl verify`. NCCL
adds up collectives of one group whose sizes differ by less than a factor of 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import comb, inf
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from tccl_py.errors import check_once, require
from tccl_py.files import check_types

TunedCollective = Literal["broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"]
Algorithm = Literal["tree", "ring"]
OtherAlgorithm = Literal["collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"]
"""Algorithms that tables do not name, and the cost model here does not have."""
Protocol = Literal["ll", "ll128", "simple"]
COLLECTIVES: tuple[TunedCollective, ...] = get_args(TunedCollective)
"""In the order of NCCL's ncclFunc_t."""
PARTED: tuple[TunedCollective, ...] = ("all_gather", "reduce_scatter")
"""Collectives whose message is in parts, one for each rank."""
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
"""In the order of NCCL's cost tables."""
PROTOCOL_BYTES: dict[Protocol, tuple[float, float]] = {
    "ll": (0, 16 << 20),
    "ll128": (0, inf),
    "simple": (8 << 10, inf),
}
"""The messages for which each is worth a try: LL moves twice the bytes, and Simple waits for memory
fences in each step."""
_THREADS: dict[Protocol, int] = {"ll": 512, "ll128": 640, "simple": 512}
_THREAD_BYTES: dict[Protocol, int] = {"ll": 8, "ll128": 8, "simple": 64}
"""Most threads of a channel, and the bytes that a thread is worth."""
_SLOW_RING_THREADS = 256
_Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
_Channels = Annotated[int, Meta(ge=0, le=64)]


def channels_kept_busy(
    algorithm: Algorithm,
    protocol: Protocol,
    size: int,
    channels: int,
    *,
    ranks: int,
    slow_rings: bool = False,
) -> int:
    """Return how many of a communicator's channels NCCL takes for a message."""
    kind, threads, worth = (algorithm, protocol), _THREADS[protocol], _THREAD_BYTES[protocol]
    if kind == ("ring", "simple") and slow_rings:
        threads = _SLOW_RING_THREADS
    if kind == ("ring", "ll"):
        worth *= ranks
    return max(1, min(channels, size // (threads * worth)))


class SizeChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NCCL's choice for a collective of so many bytes."""

    collective: TunedCollective
    bytes: _Bytes
    algorithm: Algorithm | OtherAlgorithm
    protocol: Protocol
    channels: _Channels


class TunerEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The choice for `from_bytes` to `to_bytes`, both included; `channels` 0: NCCL's number."""

    collective: TunedCollective
    from_bytes: _Bytes
    to_bytes: _Bytes
    algorithm: Algorithm
    protocol: Protocol
    channels: _Channels = 0


class TunerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Entries for communicators over exactly some GPUs of one host.

    They are in the order of COLLECTIVES, then of sizes; without one the choice is NCCL's own.
    """

    gpus: tuple[int, ...]
    """The plan's indices, ascending."""
    measured_on: tuple[int, ...]
    """The same GPUs, or those that a symmetry of the machine exchanges with them."""
    entries: Annotated[tuple[TunerEntry, ...], Meta(max_length=256)] = ()
    hosts: Literal[1] = 1


ONE_CHANNEL = (
    "take the example tuner of NCCL 2.30.3 or later, as earlier ones crash, and set its default of "
    "nChannels to 0 in pluginGetCollInfo: a call without a line gets one channel; "
    "from NCCL 2.31 on channels above NCCL's own number for the size have no effect"
)


def tune_lines(tables: Sequence[TunerTable]) -> dict[tuple[int, ...], list[str]]:
    """Return lines of the plugin's index for each set of GPUs."""
    return {
        table.gpus: [
            f"{entry.collective} {entry.from_bytes} {entry.to_bytes} "
            f"{entry.algorithm} {entry.protocol} {entry.channels}"
            for entry in table.entries
        ]
        for table in tables
    }


def tuner_csv(tables: Sequence[TunerTable], gpus: Sequence[int]) -> tuple[str, int]:
    """Return a configuration of NCCL's example tuner, and the number of entries left out.

    Its lines name a number of ranks and no GPUs: an entry needs all sets of that many of a plan's
    `gpus` to have it. Channels 0 leave the number to NCCL; the documented -1 makes it one.
    """
    fields = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels"
    lines = [f"# {ONE_CHANNEL}", f"# {fields},nNodes,nRanks,numPipeOps,regBuff"]
    left_out = sum(len(table.entries) for table in tables)
    for size in range(2, len(gpus) + 1):
        sets = [table.entries for table in tables if len(table.gpus) == size]
        if len(sets) < comb(len(gpus), size):
            continue
        shared = [entry for entry in sets[0] if all(entry in entries for entries in sets)]
        left_out -= len(shared) * len(sets)
        lines += [
            f"{entry.collective.replace('_', '')},{entry.from_bytes},{entry.to_bytes},"
            f"{entry.algorithm},{entry.protocol},{entry.channels},1,{size},1,-1"
            for entry in shared
        ]
    return "\n".join((*lines, "")), left_out


def check_tables(tables: Sequence[TunerTable], gpus: Sequence[int], *, where: str) -> None:
    """Check tables for a plan over some GPUs: sets, ranges, order and choices (InputError)."""
    check_once(where, "GPUs", (table.gpus for table in tables))
    for table in tables:
        place = f"{where}: GPUs {','.join(map(str, table.gpus))}"
        check_types(table, where=place)
        for group in (table.gpus, table.measured_on):
            fits = len(group) > 1 and list(group) == sorted(set(group)) and set(group) <= set(gpus)
            require(fits, place, f"names GPUs {group}", "two or more of the plan, ascending")
        equal_sizes = len(table.measured_on) == len(table.gpus)
        require(equal_sizes, place, f"was measured on GPUs {table.measured_on}", "as many GPUs")
        for entry in table.entries:
            has = entry.algorithm == "ring" or entry.collective == "all_reduce"
            fault = f"has {entry.algorithm} for {entry.collective}"
            require(has, place, fault, "NCCL has ring alone")
        ends = [
            (COLLECTIVES.index(entry.collective), size)
            for entry in table.entries
            for size in (entry.from_bytes - 0.5, entry.to_bytes)
        ]
        ascending = all(before < after for before, after in pairwise(ends))
        require(ascending, place, "has ranges out of order", "ascending, without overlap")
