"""Calls of a job's ranks as a log or trace has them.

A reader adds ranks, communicators and events: a call, or a group of sends and receives that is one
all-to-all, one exchange with neighbours, or several sends.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tccl_py.errors import InputError, require
from tccl_py.workloads.workload import (
    MAX_RANKS,
    WorkloadCollective,
    WorkloadDtype,
)

MAX_CALLS = 20_000_000
"""Of all ranks together: four bytes each are held."""
MAX_EVENTS = 1_000_000
"""Events that differ, by sizes above all."""
COPIED: WorkloadDtype = "int8"
"""The dtype of calls that add nothing up: NCCL sees bytes, and its logs and traces differ in it."""
TRANSFERRED = frozenset({"all_to_all", "send_recv", "send", "recv"})
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
Side = Literal["send", "recv"]


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

    def __init__(self, paths: Sequence[Path]) -> None:
        self.where = f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else str(paths[0])
        self.ranks: dict[object, RecordedRank] = {}
        self.communicators: dict[object, RecordedCommunicator] = {}
        self.notices: list[str] = []
        self.left_out: Counter[str] = Counter()
        self.steps = 0
        """Steps that the source marks; 0: they are found by repetition."""
        self.in_order = True
        """Whether calls of different communicators stand in the order in which they were made."""
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
    grouped: bool = True,
) -> Event:
    """Return the event of sends and receives of the rank at `place`.

    An all-to-all names the rank itself, or all others; blocks without elements are left out of it.
    A source without groups (`grouped`) has no blocks of a rank for itself: they are as the others.
    """
    targets, origins = ({peer for peer, _ in side} for side in (sends, receives))
    to_itself = place in targets and place in origins
    if on.size > 1 and (
        to_itself or (len(targets | origins) == on.size - 1 > 1 and targets and origins)
    ):
        size = max(sum(count for _, count in side) for side in (sends, receives))
        size = size if grouped else size * on.size // (on.size - 1)
        return call(on, "all_to_all", COPIED, size, stream)
    after, before = (place + 1) % on.size, (place - 1) % on.size
    exchange = [(after, size) for _, size in sends], [(before, size) for _, size in sends]
    if grouped and len(sends) == 1 and exchange == (list(sends), list(receives)):
        return (Op(on.number, "send_recv", COPIED, sends[0][1], stream, after),)
    ops = [Op(on.number, "send", COPIED, size, stream, peer) for peer, size in sends]
    ops += [Op(on.number, "recv", COPIED, size, stream, peer) for peer, size in receives]
    return tuple(op for op in sorted(ops) if op.bytes and op.peer != place)


class TransferGroup:
    """Sends and receives of a rank on a communicator that are one event, at their first's place."""

    def __init__(
        self, recording: Recording, rank: RecordedRank, on: RecordedCommunicator, place: int
    ) -> None:
        self._recording, self._rank, self._on, self._place = recording, rank, on, place
        self._sides: dict[str, list[Transfer]] = {"send": [], "recv": []}
        self._key: object = None
        self._stream = self._at = 0

    def add(
        self, side: Literal["send", "recv"], transfer: Transfer, key: object, stream: int
    ) -> None:
        """Add to the group, or begin the next: with another key, or where a peer comes again."""
        again = any(peer == transfer[0] for peer, _ in self._sides[side])
        if again or (key, stream) != (self._key, self._stream):
            self.close()
        if not any(self._sides.values()):
            self._key, self._stream, self._at = key, stream, len(self._rank.events)
            self._recording.add(self._rank, ())
        self._sides[side].append(transfer)

    def close(self) -> None:
        """Give the group its event."""
        if any(self._sides.values()):
            sides, grouped = self._sides, self._recording.in_order
            event = transfers(
                self._on, self._place, sides["send"], sides["recv"], self._stream, grouped=grouped
            )
            self._rank.events[self._at] = self._recording.number(event)
            self._sides = {"send": [], "recv": []}
