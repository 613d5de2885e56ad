"""Calls of a job's ranks as a log or trace has them.

A reader adds ranks, communicators and events: a call, or a group of sends and receives that is one
all-to-all, one exchange with neighbours, or several sends.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from tccl_py.errors import InputError, require
from tccl_py.workloads.workload import (
    MAX_RANKS,
    WorkloadCollective,
    WorkloadDtype,
)

COLLECTIVES: dict[str, WorkloadCollective] = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AlltoAll": "all_to_all",
}
"""By NCCL's names."""
MAX_CALLS = 20_000_000
"""Of all ranks together: four bytes each are held."""
MAX_EVENTS = 1_000_000
"""Events that differ, by sizes above all."""
COPIED: WorkloadDtype = "int8"
"""The dtype of calls that add nothing up: NCCL sees bytes, and its logs and traces differ in it."""
TRANSFERRED = frozenset({"all_to_all", "send_recv", "send", "recv"})
REDUCED = frozenset({"all_reduce", "reduce_scatter", "reduce"})
GRAPHS = (
    "A call that a CUDA graph captured is in NCCL's log once, however often it was replayed: the "
    "log cannot tell it from others."
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
Side = Literal["send", "recv"]
_SIDES: tuple[Side, ...] = get_args(Side)


class Transfer(NamedTuple):
    """A send to a peer, or a receive from it."""

    side: Side
    peer: int
    bytes: int


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
    made: Sequence[Transfer],
    stream: int,
    *,
    grouped: bool = True,
) -> Event:
    """Return the event of sends and receives of the rank at `place`, in the order of their calls.

    An all-to-all names the rank itself, or all others; blocks without elements are left out of it.
    A source without groups (`grouped`) has no blocks of a rank for itself: they are as the others.
    """
    if _is_all_to_all(on, place, made):
        size = max(sum(part.bytes for part in made if part.side == side) for side in _SIDES)
        size = size if grouped else size * on.size // (on.size - 1)
        return call(on, "all_to_all", COPIED, size, stream)
    ring = {("send", (place + 1) % on.size), ("recv", (place - 1) % on.size)}
    ops: list[Op] = []
    rest = [part for part in made if part.bytes and part.peer != place]
    while rest:
        first, *others = rest
        pair = {(part.side, part.peer) for part in rest[:2]}
        exchange = grouped and pair == ring and first.bytes == others[0].bytes
        collective = "send_recv" if exchange else first.side
        peer = (place + 1) % on.size if exchange else first.peer
        ops.append(Op(on.number, collective, COPIED, first.bytes, stream, peer))
        rest = others[1:] if exchange else others
    return tuple(ops)


def rooted(gather: bool, root: int, ranks: int, place: int, size: int) -> list[Transfer]:
    """Return the sends of the rank at `place` in a gather to a root, or a scatter from it."""
    if gather:
        return [Transfer("send", root, size)] * (place != root)
    others = [Transfer("send", at, size) for at in range(ranks) if at != root]
    return others * (place == root)


def _is_all_to_all(on: RecordedCommunicator, place: int, made: Sequence[Transfer]) -> bool:
    targets, origins = ({part.peer for part in made if part.side == side} for side in _SIDES)
    all_others = len((targets | origins) - {place}) == on.size - 1
    return on.size > 1 and (
        place in targets & origins or (all_others and len(targets & origins) > 1)
    )


class TransferGroup:
    """Sends and receives of a rank on a communicator that are one event, at their first's place.

    Sources tell groups in part: within one host NCCL's count of operations stays. So a group also
    ends where a rank sends to a peer again.
    """

    def __init__(
        self, recording: Recording, rank: RecordedRank, on: RecordedCommunicator, place: int
    ) -> None:
        self._recording, self._rank, self._on, self._place = recording, rank, on, place
        self._made: list[Transfer] = []
        self._key: object = None
        self._stream = self._at = 0

    def add(self, transfer: Transfer, key: object, stream: int) -> None:
        """Add to the group, or begin the next: with another key, or where a peer comes again."""
        if (key, stream) != (self._key, self._stream):
            self.close()
        ends = [(part.side, part.peer) for part in self._made]
        if (transfer.side, transfer.peer) in ends:
            after = ends.index((transfer.side, transfer.peer)) + 1
            # Sends that an all-to-all follows in the group are no part of it.
            begun = len({peer for _, peer in ends[after:]}) > 2
            whole = _is_all_to_all(self._on, self._place, self._made) or not begun
            rest = [] if whole else self._made[after:]
            self._made = self._made[: len(self._made) - len(rest)]
            self.close()
            self._begin(key, stream, rest)
        elif not self._made:
            self._begin(key, stream, [])
        self._made.append(transfer)

    def _begin(self, key: object, stream: int, made: list[Transfer]) -> None:
        self._key, self._stream, self._made = key, stream, made
        self._at = len(self._rank.events)
        self._recording.add(self._rank, ())

    def close(self) -> None:
        """Give the group its event."""
        if self._made:
            grouped = self._recording.in_order
            event = transfers(self._on, self._place, self._made, self._stream, grouped=grouped)
            self._rank.events[self._at] = self._recording.number(event)
            self._made = []
