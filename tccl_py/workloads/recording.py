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
    MAX_BYTES,
    MAX_RANKS,
    MAX_STREAM,
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
_WITH_PEER = frozenset({"send_recv", "send", "recv"})
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
    collective: str
    dtype: str
    bytes: int
    stream: int
    peer: int = -1


Event = tuple[Op, ...]
Side = Literal["send", "recv"]
_SIDES: tuple[Side, ...] = get_args(Side)


class Transfer(NamedTuple):
    """A send to a peer, or a receive from it; `at` is the place of its event."""

    side: Side
    peer: int
    bytes: int
    at: int = 0


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
        return self.streams.setdefault(name, min(len(self.streams), MAX_STREAM))


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
        self._numbers: dict[Event, int] = {}
        self._sizes: list[int] = []
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
        if made.number == number:
            self._sizes.append(size)
        if made.size != size or made.members.setdefault(place, rank) is not rank:
            fault = f"has a communicator whose rank {place} of {size} is there twice"
            raise InputError(self.where, fault, "give the files of one run of a job")
        return made

    def number(self, event: Event) -> int:
        """Return the number of an event (InputError if it cannot be)."""
        number = self._numbers.get(event)
        if number is None:
            number = self._numbers[event] = len(self._numbers)
            fault = f"has more than {MAX_EVENTS} calls that differ"
            require(number < MAX_EVENTS, self.where, fault, "record fewer steps")
            for op in event:
                least = 0 if op.collective in _WITH_PEER else -1
                fits = 0 < op.bytes <= MAX_BYTES and least <= op.peer < self._sizes[op.communicator]
                size = max(-1, min(op.bytes, MAX_BYTES + 1))
                fault = f"has a call of {size} bytes, of rank {op.peer}"
                require(fits, self.where, fault, "give the files of one job, unchanged")
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


def list_rooted(
    on: RecordedCommunicator, place: int, root: int, count_bytes: int, stream: int, *, gather: bool
) -> Event:
    """Return the sends of the rank at `place` in a gather to a root, or a scatter from it."""
    peers = [root] if gather else range(on.size)
    sends = peers if gather or place == root else ()
    return tuple(
        Op(on.number, "send", COPIED, count_bytes, stream, peer)
        for peer in sends
        if peer != place and count_bytes
    )


def _is_all_to_all(on: RecordedCommunicator, place: int, made: Sequence[Transfer]) -> bool:
    """Return whether transfers name the rank itself, or all others, some in both directions."""
    targets, origins = ({part.peer for part in made if part.side == side} for side in _SIDES)
    all_others = len((targets | origins) - {place}) == on.size - 1
    return on.size > 1 and (
        place in targets & origins or (all_others and len(targets & origins) > 1)
    )


class Transfers:
    """Sends and receives of a rank on a communicator, as events.

    Which run together sources tell in part: within a host NCCL's count of operations stays. So an
    all-to-all is told by its peers, which come in their order, each once a side (blocks without
    elements are left out), and an exchange by a send to the next rank beside a receive from the
    one before. Others are events of their own.
    """

    def __init__(
        self, recording: Recording, rank: RecordedRank, on: RecordedCommunicator, place: int
    ) -> None:
        self._recording, self._rank, self._on, self._place = recording, rank, on, place
        self._made: list[Transfer] = []
        self._ends: dict[tuple[Side, int], int] = {}
        self._single: Transfer | None = None
        self._key: object = None
        self._stream = 0

    def add(self, transfer: Transfer, key: object, stream: int) -> None:
        """Add the next; those with another `key` do not run together with the ones before."""
        if (key, stream) != (self._key, self._stream):
            self.close()
            self._key, self._stream = key, stream
        end = transfer.side, transfer.peer
        if (first := self._ends.get(end)) is not None:
            # What comes before an all-to-all is no part of it.
            made, whole = self._made, _is_all_to_all(self._on, self._place, self._made)
            rest = [] if whole else made[first + 1 :]
            self._made = made[: len(made) - len(rest)]
            self._emit()
            self._made = rest
            self._ends = {(part.side, part.peer): at for at, part in enumerate(rest)}
        if self._made and transfer.peer < self._made[-1].peer:
            self._emit()
        self._ends[end] = len(self._made)
        self._made.append(transfer._replace(at=len(self._rank.events)))
        self._recording.add(self._rank, ())

    def close(self) -> None:
        """Give all that was added their events, at the places of their first calls."""
        self._emit()
        self._add_single(None)

    def _emit(self) -> None:
        made, self._made, self._ends = self._made, [], {}
        if not _is_all_to_all(self._on, self._place, made):
            for transfer in made:
                if transfer.bytes and transfer.peer != self._place:
                    self._add_single(transfer)
            return
        self._add_single(None)
        size = max(sum(part.bytes for part in made if part.side == side) for side in _SIDES)
        event = call(self._on, "all_to_all", COPIED, size, self._stream)
        self._rank.events[made[0].at] = self._recording.number(event)

    def _add_single(self, transfer: Transfer | None) -> None:
        """Add the single transfer before this one, or both as an exchange."""
        before, self._single = self._single, transfer
        if before is None:
            return
        size = self._on.size
        ring = {("send", (self._place + 1) % size), ("recv", (self._place - 1) % size)}
        collective: str = before.side
        peer = before.peer
        if (
            transfer is not None
            and {(part.side, part.peer) for part in (before, transfer)} == ring
            and before.bytes == transfer.bytes
        ):
            self._single = None
            collective, peer = "send_recv", (self._place + 1) % size
        op = Op(self._on.number, collective, COPIED, before.bytes, self._stream, peer)
        self._rank.events[before.at] = self._recording.number((op,))
