"""A lane of the host backend: what a block of cuda/pump.cu does, a slice at a time, by memcpy.

What differs: there is no sum. Where a GPU adds what comes in to its own data and sends that, the
core copies what came in; it reads one stream less than a reduction does.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tccl_profiler.messages import Pace
from tccl_profiler.pattern import differing, write_pattern

CHUNK = 2
"""Slices of a chunk, as in pump.cu."""
_NEVER = 1 << 63


class HostEnd:
    """One end of a lane in this process's addresses, and what it has done; `data` 0 is no end.

    `ahead` is how many slices it may be beyond the counter it waits for: a FIFO's length for who
    fills it, 0 for who empties it.

    A counter is one aligned store of 8 bytes. x86 keeps it behind the slice's own stores. On
    aarch64 what keeps them in order is the interpreter's lock, given back and taken again around
    each memmove: two barriers that a store to the counter cannot pass.
    """

    __slots__ = (
        "_post",
        "_wait",
        "ahead",
        "count",
        "data",
        "done",
        "first",
        "last",
        "seed",
        "seen",
        "slices",
    )

    def __init__(
        self,
        *,
        data: int = 0,
        slices: int = 1,
        seed: int = 0,
        ahead: int = 0,
        wait: ctypes.c_uint64 | None = None,
        post: ctypes.c_uint64 | None = None,
    ) -> None:
        self.data, self.slices, self.seed, self.ahead = data, slices, seed, ahead
        self._wait, self._post = wait, post
        self.done = self.seen = self.first = self.last = self.count = 0

    @property
    def waits(self) -> bool:
        """Whether somebody else fills or empties it."""
        return self._wait is not None

    def ready(self) -> bool:
        """Whether the next slice can be served; looks at the counter only if it must."""
        wait = self._wait
        if wait is None:
            return self.data != 0
        if self.seen + self.ahead > self.done:
            return True
        self.seen = wait.value
        return self.seen + self.ahead > self.done

    def served(self, warm_at: int) -> None:
        """Post a slice and count it; the first after the warm-up begins the window."""
        self.done += 1
        if self._post is not None:
            self._post.value = self.done
        at = time.monotonic_ns()
        if self.first:
            self.count += 1
        elif at >= warm_at:
            self.first = at
        self.last = at


class HostLane:
    """A lane of one repeat, or a copy, which has one end here and perhaps a pace.

    Args:
        incoming: where slices are taken.
        outgoing: where they are put.
        slice_bytes: a multiple of 16.
        user: addresses of what is sent and of where arrivals are kept.
        user_slices: how many slices either holds.
        coupled: what comes in goes out.
        cycle: chunks of an all-reduce, 2 (n - 1) for n devices.
        check: write the pattern and compare with it.
        pace: how many slices it moves; None lets the clock stop it.
        stamps: of a lane with a pace: queued, released, and one for each group of slices.
    """

    def __init__(
        self,
        *,
        incoming: HostEnd,
        outgoing: HostEnd,
        slice_bytes: int,
        user: tuple[int, int],
        user_slices: int,
        coupled: bool = False,
        cycle: int = 0,
        check: bool = False,
        pace: Pace | None = None,
        stamps: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        self._in, self._out = incoming, outgoing
        self._slice_bytes = slice_bytes
        self._user, self._keep = user
        self._user_slices = user_slices
        self._coupled = coupled and incoming.data != 0 and outgoing.data != 0
        self._cycle, self._check = cycle, check
        self._pace, self._stamps = pace, stamps
        self._errors = 0

    def turns(self, warm_at: int, stop_at: int, given_up_at: int) -> Iterator[bool]:
        """Move a slice at each turn where one can be moved, and yield whether; end by the clock.

        A lane with a pace ends with the last of its slices, or if it still waits at `given_up_at`:
        its peer stops by the clock, and then the controller lets it go on.
        """
        now, incoming, outgoing, pace = time.monotonic_ns, self._in, self._out, self._pace
        until = _NEVER if pace else stop_at
        most = pace.groups * pace.slices if pace else _NEVER
        while now() < until and incoming.done + outgoing.done < most:
            # 1. The ends that the next pass should serve, and those that it can.
            in_wanted, out_wanted = self._wanted()
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
                incoming.served(warm_at)
            if puts:
                outgoing.served(warm_at)
            if pace and (incoming.done + outgoing.done) % pace.slices == 0:
                self.stamp(1 + (incoming.done + outgoing.done) // pace.slices)
            yield True

    def stamp(self, number: int) -> None:
        """Write the time into a copy's stamp."""
        if self._stamps is not None:
            self._stamps[number] = time.monotonic_ns()

    def report(self, epoch: int, start: int) -> tuple[int, ...]:
        """The lane's record (`control.RECORD`), not finished yet."""
        incoming, outgoing = self._in, self._out
        return (
            epoch,
            start,
            max(incoming.last, outgoing.last),
            incoming.first,
            incoming.last,
            incoming.count,
            outgoing.first,
            outgoing.last,
            outgoing.count,
            self._errors,
            (incoming.done + outgoing.done) * self._slice_bytes,
            0,
        )

    def _wanted(self) -> tuple[bool, bool]:
        """Ends of the next pass, as in pump.cu: a coupled lane's first chunk goes out unasked, and
        it keeps a cycle's last one."""
        if not self._coupled:
            return self._in.data != 0, self._out.data != 0
        done = self._in.done
        if self._cycle and done // CHUNK % self._cycle == self._cycle - 1:
            return True, False
        return self._out.done - done >= CHUNK, True

    def _move(self, takes: bool, puts: bool) -> None:
        """One pass: keep what came in, pass it on, or send one's own."""
        incoming, outgoing, size = self._in, self._out, self._slice_bytes
        source = incoming.data + incoming.done % incoming.slices * size
        target = outgoing.data + outgoing.done % outgoing.slices * size
        user = (outgoing.done if puts else incoming.done) % self._user_slices * size
        # Nobody writes a pattern into memory that nobody fills.
        if takes and self._check and incoming.waits:
            self._errors += differing(source, size, incoming.seed, incoming.done)
        if takes and (not puts or self._keeps()):
            ctypes.memmove(self._keep + user, source, size)
        if puts and self._check:
            write_pattern(target, size, outgoing.seed, outgoing.done)
        elif puts:
            ctypes.memmove(target, source if takes else self._user + user, size)

    def _keeps(self) -> bool:
        """Whether a slice that is passed on is a whole sum, which an all-reduce also keeps."""
        step, cycle = self._in.done // CHUNK, self._cycle
        return step % cycle >= cycle // 2 - 1 if cycle else step % 2 == 1
