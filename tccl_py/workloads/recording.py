"""Calls of a job's ranks as a log or trace has them, and the workload that they make.

1. A reader adds ranks, communicators and events: a call, or a group of sends and receives that is
   one all-to-all, one exchange with neighbours, or several sends.
2. Ranks are numbered as in the first communicator that has all of them.
3. The blocks of an all-to-all differ between ranks: its bytes are those of the largest rank.
4. Each rank's steady steps are found by repetition, and calls of a step are counted.
5. Equal calls of disjoint groups are one row.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from tccl_py.errors import InputError, counted, require
from tccl_py.workloads.steps import steady_run
from tccl_py.workloads.workload import (
    MAX_RANKS,
    MAX_ROWS,
    Workload,
    WorkloadCollective,
    WorkloadDtype,
    WorkloadRow,
)

MAX_CALLS = 20_000_000
"""Of all ranks together: four bytes each are held."""
MAX_EVENTS = 1_000_000
"""Events that differ, by sizes above all."""
COPIED: WorkloadDtype = "int8"
"""The dtype of calls that add nothing up: NCCL sees bytes, and its logs and traces differ in it."""
REDUCED = frozenset({"all_reduce", "reduce_scatter", "reduce"})
GRAPHS = (
    "Calls captured in a CUDA graph are recorded once, however often the graph was replayed: NCCL "
    "logs no replays."
)


class Op(NamedTuple):
    """A call on a communicator by its number; `peer` is the destination of a send, by its rank.

    Of `recv` the sender's call counts.
    """

    communicator: int
    collective: WorkloadCollective | str
    dtype: str
    bytes: int
    stream: int
    peer: int = -1


Event = tuple[Op, ...]
Transfer = tuple[int, int]
"""Peer and bytes of a send or a receive."""


class RecordedRank:
    """A rank: its calls in order, as numbers of events, and `place` to sort it by.

    `number` is the job's rank where the source names it.
    """

    def __init__(self, place: tuple[object, ...], number: int | None = None) -> None:
        self.place = place
        self.number = number
        self.events = array("I")
        self.streams: dict[object, int] = {}

    def stream(self, name: object) -> int:
        """Return the number of a stream, in the order of their first calls."""
        return self.streams.setdefault(name, len(self.streams))


class RecordedCommunicator(NamedTuple):
    """A communicator of `size` ranks, and those that the recording has, by rank in it."""

    number: int
    size: int
    members: dict[int, RecordedRank]


class Recording:
    """What a reader has found so far."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.ranks: dict[object, RecordedRank] = {}
        self.communicators: dict[object, RecordedCommunicator] = {}
        self.notices: list[str] = []
        self.left_out: Counter[str] = Counter()
        self.steps = 0
        """Steps that the source marks; 0: they are found by repetition."""
        self._numbers: dict[Event, int] = {}
        self._calls = 0

    def rank(
        self, key: object, place: tuple[object, ...], number: int | None = None
    ) -> RecordedRank:
        """Return the rank with this key, a new one if there is none."""
        if key not in self.ranks:
            self.ranks[key] = RecordedRank(place, number)
        return self.ranks[key]

    def join(self, key: object, size: int, place: int, rank: RecordedRank) -> RecordedCommunicator:
        """Return the communicator with this key, with a rank at its place in it."""
        fits = 0 <= place < size <= MAX_RANKS
        require(fits, self.where, f"has rank {place} of {size}", "give the files of one job")
        number = len(self.communicators)
        made = self.communicators.setdefault(key, RecordedCommunicator(number, size, {}))
        if made.size != size or made.members.setdefault(place, rank) is not rank:
            fault = f"has a communicator whose rank {place} of {size} is there twice"
            raise InputError(self.where, fault, "give the files of one run of a job")
        return made

    def number(self, event: Event) -> int:
        """Return the number of an event."""
        number = self._numbers.setdefault(event, len(self._numbers))
        fault = f"has more than {MAX_EVENTS} calls that differ"
        require(number < MAX_EVENTS, self.where, fault, "record fewer steps")
        return number

    def add(self, rank: RecordedRank, event: Event) -> None:
        """Add the next event of a rank."""
        self._calls += 1
        fault = f"has more than {MAX_CALLS} calls"
        require(self._calls <= MAX_CALLS, self.where, fault, "record fewer steps")
        rank.events.append(self.number(event))

    @property
    def events(self) -> list[Event]:
        """Return all events by their numbers."""
        return list(self._numbers)


def call(
    on: RecordedCommunicator, collective: str, dtype: str, count_bytes: int, stream: int
) -> Event:
    """Return the event of a collective whose buffer has `count_bytes`; none over one rank."""
    reduced = dtype if collective in REDUCED else COPIED
    op = Op(on.number, collective, reduced, count_bytes, stream)
    return (op,) if on.size > 1 and count_bytes else ()


def transfers(
    on: RecordedCommunicator,
    place: int,
    sends: Sequence[Transfer],
    receives: Sequence[Transfer],
    stream: int,
    *,
    together: bool = True,
) -> Event:
    """Return the event of sends and receives of the rank at `place`, which run `together` or not.

    An all-to-all names the rank itself, or all others; blocks without elements are left out of it.
    """
    targets, origins = ({peer for peer, _ in side} for side in (sends, receives))
    to_itself = place in targets and place in origins
    if on.size > 1 and (
        to_itself or (len(targets | origins) == on.size - 1 > 1 and targets and origins)
    ):
        size = max(sum(count for _, count in side) for side in (sends, receives))
        return call(on, "all_to_all", COPIED, size, stream)
    after, before = (place + 1) % on.size, (place - 1) % on.size
    exchange = [(after, size) for _, size in sends], [(before, size) for _, size in sends]
    if together and len(sends) == 1 and exchange == (list(sends), list(receives)):
        return (Op(on.number, "send_recv", COPIED, sends[0][1], stream, after),)
    ops = [Op(on.number, "send", COPIED, size, stream, peer) for peer, size in sends]
    ops += [Op(on.number, "recv", COPIED, size, stream, peer) for peer, size in receives]
    return tuple(op for op in sorted(ops) if op.bytes and op.peer != place)


Ints = NDArray[np.uint32]
Calls = Mapping[Op, float]


def workload_of(recording: Recording, *, name: str, source: str) -> Workload:
    """Return the workload of a recording (InputError where it is none, or misses ranks)."""
    where = recording.where
    communicators = list(recording.communicators.values())
    used = {op.communicator for event in recording.events for op in event}
    require(used, where, "has no calls of collectives over two ranks or more", _HOW)
    for communicator in communicators:
        found, size = len(communicator.members), communicator.size
        if communicator.number in used and found < size:
            fault = f"has {found} of the {size} ranks of a communicator"
            raise InputError(where, fault, "give the files of all ranks, of all hosts")
    notices = [*recording.notices]
    ranks, assumed = _numbered(recording, communicators)
    notices += [assumed] * bool(assumed)
    calls = {number: np.frombuffer(rank.events, np.uint32) for number, rank in ranks.items()}
    numbers = {id(rank): number for number, rank in ranks.items()}
    _use_largest_rank(recording, communicators, calls, numbers)
    steps, by_rank = _calls_of_steps(recording, calls)
    rows, unequal = _rows(communicators, by_rank, numbers)
    if unequal:
        notices.append(f"Ranks of a communicator differ in {counted(unequal, 'row')}: cut logs?")
    if not steps:
        notices.append(f"No steps were told by repetition: a step is all that is here. {GRAPHS}")
    for left_out, count in recording.left_out.items():
        notices.append(f"{counted(count, 'call')} of {left_out} left out.")
    if len(rows) > MAX_ROWS:
        fault = f"has {len(rows)} different rows in a step"
        raise InputError(where, fault, f"at most {MAX_ROWS}: record steps of equal sizes")
    count = max(ranks) + 1
    return Workload(
        name=name, source=source, ranks=count, rows=rows, steps=steps, notices=tuple(notices)
    )


_HOW = "record with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,COLL, or by `tccl run --record`"


def _numbered(
    recording: Recording, communicators: Sequence[RecordedCommunicator]
) -> tuple[dict[int, RecordedRank], str]:
    """Return the ranks by their numbers in the job, and a notice if those are assumed."""
    everyone = list(recording.ranks.values())
    if all(rank.number is not None for rank in everyone):
        return {cast(int, rank.number): rank for rank in everyone}, ""
    everyone = [rank for rank in everyone if rank.events]
    for communicator in communicators:
        if (
            len(communicator.members) >= len(everyone)
            and len(communicator.members) == communicator.size
        ):
            members = {id(rank) for rank in communicator.members.values()}
            if all(id(rank) in members for rank in everyone):
                return dict(communicator.members), ""
    everyone.sort(key=lambda rank: rank.place)
    why = "No communicator has all ranks: they are numbered by host and bus id of the GPU."
    return dict(enumerate(everyone)), why


def _use_largest_rank(
    recording: Recording,
    communicators: Iterable[RecordedCommunicator],
    calls: dict[int, Ints],
    numbers: Mapping[int, int],
) -> None:
    """Give each all-to-all the bytes of its largest rank; NCCL logs each rank's own."""
    events = recording.events
    of = [
        event[0].communicator if event and event[0].collective == "all_to_all" else -1
        for event in events
    ]
    owner, sizes = np.array(of), np.array([event[0].bytes if event else 0 for event in events])
    for communicator in communicators:
        if communicator.number not in of:
            continue
        members = [numbers[id(rank)] for rank in communicator.members.values()]
        places = [np.flatnonzero(owner[calls[number]] == communicator.number) for number in members]
        own = [sizes[calls[number][at]] for number, at in zip(members, places, strict=True)]
        if len({len(each) for each in own}) > 1:
            continue
        largest = np.maximum.reduce(own)
        for number, at, mine in zip(members, places, own, strict=True):
            if (mine != largest).any():
                changed = calls[number].copy()
                for place, size in zip(at[mine != largest], largest[mine != largest], strict=True):
                    (op,) = events[changed[place]]
                    changed[place] = recording.number((op._replace(bytes=int(size)),))
                calls[number] = changed


def _calls_of_steps(
    recording: Recording, calls: Mapping[int, Ints]
) -> tuple[int, dict[int, dict[Op, float]]]:
    """Return the number of steady steps, and each rank's calls of a step in their order.

    Where no step repeats exactly, one may whose sizes differ.
    """
    events = recording.events
    windows: dict[int, tuple[Ints, int]] = {}
    kinds: dict[Event, int] = {}
    coarse = np.array(
        [
            kinds.setdefault(tuple(op._replace(bytes=0) for op in event), len(kinds))
            for event in events
        ],
        np.uint32,
    )
    for number, own in calls.items():
        run = None
        if recording.steps:
            windows[number] = own, recording.steps
        elif len(own):
            run = steady_run(own) or steady_run(coarse[own], least_kinds=2)
        if run is not None:
            windows[number] = own[run.start : run.stop], run.steps
    steps = min((count for _, count in windows.values()), default=0)
    result: dict[int, dict[Op, float]] = {}
    for number, own in calls.items():
        window, count = windows.get(number, (own, max(1, steps)))
        # A rank whose step is the half of others' has twice as many.
        times = max(1, round(count / steps)) if steps else 1
        ops: dict[Op, float] = {}
        kind, first, occurs = np.unique(window, return_index=True, return_counts=True)
        for at in np.argsort(first):
            for op in events[kind[at]]:
                ops[op] = ops.get(op, 0) + int(occurs[at]) * times / count
        result[number] = ops
    return steps, result


Key = tuple[Any, ...]
"""Collective, dtype and bytes."""


def _rows(
    communicators: Sequence[RecordedCommunicator],
    by_rank: Mapping[int, Calls],
    numbers: Mapping[int, int],
) -> tuple[tuple[WorkloadRow, ...], int]:
    """Return the rows of all ranks' calls, and how many of them the ranks of a group differ in."""
    totals: dict[Key, float] = {}
    unequal = 0
    for communicator in communicators:
        members = [rank for _, rank in sorted(communicator.members.items())]
        group = tuple(numbers.get(id(rank), -1) for rank in members)
        own = [_on(by_rank.get(number, {}), communicator.number) for number in group]
        shared = [_by_key(ops) for ops in own]
        for place, ops in enumerate(own):
            for op, count in ops.items():
                key = op.collective, op.dtype, op.bytes
                equal = all(other.get(key) == shared[place][key] for other in shared)
                row: Key = ()
                if op.collective == "send" or (op.collective == "send_recv" and not equal):
                    row = "send", *key[1:], op.stream, (group[place], group[op.peer])
                elif op.collective != "recv" and place == 0:
                    row = *key, op.stream, group
                    unequal += not equal
                if row:
                    totals[row] = totals.get(row, 0) + count
    return _packed(totals), unequal


def _on(ops: Calls, communicator: int) -> dict[Op, float]:
    return {op: count for op, count in ops.items() if op.communicator == communicator}


def _by_key(ops: Calls) -> dict[Key, float]:
    """Return calls by collective, dtype and bytes: numbers of streams may differ by rank."""
    totals: dict[Key, float] = {}
    for op, count in ops.items():
        key = op.collective, op.dtype, op.bytes
        totals[key] = totals.get(key, 0) + count
    return totals


def _packed(totals: Mapping[Key, float]) -> tuple[WorkloadRow, ...]:
    """Return rows of equal calls, each of groups that share no rank."""
    packed: dict[Key, list[list[tuple[int, ...]]]] = {}
    for (*key, group), count in totals.items():
        rows = packed.setdefault((*key, count), [])
        fitting = (row for row in rows if set(group).isdisjoint(chain(*row)))
        row = next(fitting, None)
        if row is None:
            rows.append(row := [])
        row.append(group)
    streams = sorted({key[3] for key in packed})
    return tuple(
        WorkloadRow(
            collective=collective,
            dtype=dtype,
            bytes=size,
            groups=tuple(groups),
            calls=calls,
            stream=streams.index(stream),
        )
        for (collective, dtype, size, stream, calls), rows in packed.items()
        for groups in rows
    )
