"""Jobs at once take turns: while one times a batch of calls, the ranks of the others wait.

What disturbs a machine for seconds then touches all jobs alike, and starting several takes no
longer than starting one. A file that the ranks of a host map has the number of turns that each of
them has had. Over several hosts that is enough: a turn begins with a collective of its job, in
which every host's ranks are only when those of the job before are done there.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import msgspec

_WORD = 8
_LOOK_S = 2e-4

TakesTurn = Callable[[], AbstractContextManager[None]]
"""What is done in its block, no other job does meanwhile."""


class Seat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of the jobs at once one is, and how many ranks each of them has on this host."""

    number: int
    jobs: int
    ranks: int


def write_turns(file: Path, ranks: int) -> None:
    """The file of this many ranks, none of which has had a turn."""
    file.write_bytes(bytes(_WORD * ranks))


def turns(file: Path, seat: Seat | None, place: int) -> TakesTurn:
    """Turns of the rank at a place among those of its job here; without a seat nobody waits."""
    if seat is None or seat.jobs == 1:
        return nullcontext
    with file.open("r+b") as opened:
        # Words are written by one rank each, and whole.
        counts = memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
    own = seat.number * seat.ranks + place

    @contextmanager
    def turn() -> Iterator[None]:
        had = counts[own]
        # Whose turn is before this one, and how many turns have been theirs then.
        job, theirs_had = (seat.number - 1, had + 1) if seat.number else (seat.jobs - 1, had)
        first = job * seat.ranks
        while any(counts[one] < theirs_had for one in range(first, first + seat.ranks)):
            time.sleep(_LOOK_S)
        yield
        counts[own] = had + 1

    return turn
