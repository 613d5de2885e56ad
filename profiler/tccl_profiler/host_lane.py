"""Lanes of the host backend, by memcpy between mapped spaces; see a block of pump.cu.

The core makes no sums: it forwards incoming data, and reads one stream less than a reduction.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tccl_profiler.linux import yield_core
from tccl_profiler.messages import Pace
from tccl_profiler.program import Lane
from tccl_profiler.shared_memory import ABORT, differing, write_pattern

CHUNK = 2  # slices of a chunk, as in pump.cu
_SPIN_NS = 50_000
"""Time without progress in which a thread yields the core, before it naps between rounds."""
_NAP_S, _LONG_NAP_S, _NAP_SHARE = 20e-6, 1e-3, 1 / 32
"""The first nap and the longest: a nap is a small share of the wait, and leaves cores to others."""
_NEVER = 1 << 63


@dataclass(slots=True, kw_only=True, eq=False)
class HostEnd:
    """One end of a lane in this process's addresses, with progress; `data` 0 is no end.

    `ahead` is how many slices the end may be beyond its counter: a FIFO's length for the writer, 0
    for the reader. x86 keeps a counter's store behind the slice's own stores; on aarch64 the
    interpreter's lock does, which is released and taken again around each memmove.
    """

    data: int = 0
    slices: int = 1
    seed: int = 0
    ahead: int = 0
    wait: ctypes.c_uint64 | None = None
    post: ctypes.c_uint64 | None = None
    done: int = field(default=0, init=False)
    seen: int = field(default=0, init=False)
    first: int = field(default=0, init=False)
    last: int = field(default=0, init=False)
    count: int = field(default=0, init=False)

    @property
    def waits(self) -> bool:
        """Whether another lane fills or empties it."""
        return self.wait is not None

    def ready(self) -> bool:
        """Return whether the next slice can be served, polling the counter only if needed."""
        wait = self.wait
        if wait is None:
            return self.data != 0
        if self.seen + self.ahead > self.done:
            return True
        self.seen = wait.value
        return self.seen + self.ahead > self.done

    def serve(self, warm_at: int) -> None:
        """Post a slice and count it; the first after the warm-up begins the window."""
        self.done += 1
        if self.post is not None:
            self.post.value = self.done
        at = time.monotonic_ns()
        if self.first:
            self.count += 1
        elif at >= warm_at:
            self.first = at
        self.last = at


@dataclass(eq=False, kw_only=True)
class RunningLane:
    """A lane of one repeat, or a copy, as the thread of a device runs it.

    `check` writes the pattern, or compares with it. A copy has stamps: queued, released, and one
    per group.
    """

    share: Lane
    incoming: HostEnd
    outgoing: HostEnd
    check: bool = False
    stamps: npt.NDArray[np.uint64] | None = None
    errors: int = field(default=0, init=False)
    moved: int = field(default=0, init=False)

    def turns(self, warm_at: int, stop_at: int, given_up_at: int) -> Iterator[bool]:
        """Yield at each turn whether there was progress; end with the lane."""
        raise NotImplementedError

    def stamp(self, number: int) -> None:
        """Write the time into a copy's stamp."""
        if self.stamps is not None:
            self.stamps[number] = time.monotonic_ns()

    def report(self, epoch: int, start: int) -> tuple[int, ...]:
        """Return the lane's record (`shared_memory.RECORD`), not finished yet."""
        incoming, outgoing = self.incoming, self.outgoing
        return (
            *(epoch, start, max(incoming.last, outgoing.last)),
            *(incoming.first, incoming.last, incoming.count),
            *(outgoing.first, outgoing.last, outgoing.count),
            *(self.errors, self.moved * self.share.slice_bytes, 0),
        )


@dataclass(eq=False, kw_only=True)
class HostLane(RunningLane):
    """A lane between FIFOs of memory; or a copy, with one end here and perhaps a pace.

    `user_slices` slices are sent, from address `sent`, and as many kept at `kept`. A pace is a
    number of slices (None: the clock stops the lane).
    """

    sent: int
    kept: int
    user_slices: int
    pace: Pace | None = None

    def __post_init__(self) -> None:
        self._coupled = self.share.coupled and self.incoming.data != 0 and self.outgoing.data != 0

    def turns(self, warm_at: int, stop_at: int, given_up_at: int) -> Iterator[bool]:
        """Move a slice at each turn if possible, and yield whether; end by the clock.

        A lane with a pace ends with the last slice, or if still waiting at `given_up_at`: the peer
        stops by the clock, and then the controller releases the lane.
        """
        now, incoming, outgoing, pace = time.monotonic_ns, self.incoming, self.outgoing, self.pace
        until = _NEVER if pace else stop_at
        most = pace.groups * pace.slices if pace else _NEVER
        while now() < until and self.moved < most:
            # 1. The ends that the next pass should serve, and those that it can.
            in_wanted, out_wanted = self._list_wanted()
            takes, puts = in_wanted and incoming.ready(), out_wanted and outgoing.ready()
            if not (takes or puts) or (
                self._coupled and (takes is not in_wanted or puts is not out_wanted)
            ):
                if now() >= given_up_at:
                    return
                yield False
                continue
            # 2. The slice, and then the counters that tell of it.
            self._move(takes, puts)
            if takes:
                incoming.serve(warm_at)
            if puts:
                outgoing.serve(warm_at)
            self.moved = incoming.done + outgoing.done
            if pace and self.moved % pace.slices == 0:
                self.stamp(1 + self.moved // pace.slices)
            yield True

    def _list_wanted(self) -> tuple[bool, bool]:
        """Return the ends of the next pass, as in pump.cu: the first chunk goes out unasked."""
        if not self._coupled:
            return self.incoming.data != 0, self.outgoing.data != 0
        done = self.incoming.done
        if self.share.cycle and done // CHUNK % self.share.cycle == self.share.cycle - 1:
            return True, False
        return self.outgoing.done - done >= CHUNK, True

    def _move(self, takes: bool, puts: bool) -> None:
        incoming, outgoing, size = self.incoming, self.outgoing, self.share.slice_bytes
        source = incoming.data + incoming.done % incoming.slices * size
        target = outgoing.data + outgoing.done % outgoing.slices * size
        user = (outgoing.done if puts else incoming.done) % self.user_slices * size
        # Plain memory that no lane fills has no pattern.
        if takes and self.check and incoming.waits:
            self.errors += differing(source, size, incoming.seed, incoming.done)
        if takes and (not puts or self._keeps()):
            ctypes.memmove(self.kept + user, source, size)
        if puts and self.check:
            write_pattern(target, size, outgoing.seed, outgoing.done)
        elif puts:
            ctypes.memmove(target, source if takes else self.sent + user, size)

    def _keeps(self) -> bool:
        """Return whether a forwarded slice is a whole sum, which an all-reduce also keeps."""
        step, cycle = self.incoming.done // CHUNK, self.share.cycle
        return step % cycle >= cycle // 2 - 1 if cycle else step % 2 == 1


def pause(since_ns: int, longest_s: float = _LONG_NAP_S) -> None:
    """Let others run, longer and longer since there was progress: time counts, not rounds."""
    waited_ns = time.monotonic_ns() - since_ns
    if waited_ns < _SPIN_NS:
        yield_core()
    else:
        time.sleep(min(longest_s, max(_NAP_S, _NAP_SHARE * waited_ns / 1e9)))


def wait_release(flag: ctypes.c_uint64, epoch: int, patience_ns: int) -> int:
    """Wait for the flag, and return the time; 0 if it does not come in time or says stop."""
    begun = time.monotonic_ns()
    while flag.value < epoch:
        if time.monotonic_ns() > begun + patience_ns:
            return 0
        pause(begun, longest_s=5 * _NAP_S)
    return 0 if flag.value == ABORT else time.monotonic_ns()
