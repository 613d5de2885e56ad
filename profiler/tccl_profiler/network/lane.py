"""A NIC's lane for one repeat: slices from a FIFO to a socket, or from a socket to a FIFO.

On the wire each slice follows a header that says of which repeat it is, its number and its length;
a header of length 0 ends a repeat. The two ends stop by their own clocks, but not amid a slice: the
sender completes the one that it is at and then says that this was the last, the receiver throws
away what it gets after its time, up to there. So the link is clean for the next repeat, and neither
waits for the other once the other has stopped.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable

from tccl_profiler.host.lane import HostEnd
from tccl_profiler.host.waiting import pause
from tccl_profiler.links import LinkLost
from tccl_profiler.pattern import differing, write_pattern
from tccl_profiler.program import Link

_HEADER = struct.Struct("!IIQ")
"""Repeat, bytes of the slice (0: there is no more), number of the slice."""


class Stopped(Exception):  # noqa: N818 - no error: the controller said so
    """All lanes are to stop; what is on the way over the link stays there."""


class NicLane:
    """A lane of one repeat over one link.

    Args:
        link: its name.
        sock: blocks for a moment at most.
        end: the FIFO or memory beside this NIC.
        slots: the slices of that, in order.
        sends: whether slices go out.
        repeat: its number, the same at the other end.
        check: at memory that is nobody's FIFO, send the pattern or compare with it.
        stopping: whether all lanes are to stop.
    """

    def __init__(
        self,
        link: Link,
        sock: socket.socket,
        *,
        end: HostEnd,
        slots: tuple[memoryview, ...],
        sends: bool,
        repeat: int,
        check: bool,
        stopping: Callable[[], bool],
    ) -> None:
        self._link, self._socket = link, sock
        self._end, self._slots, self._sends = end, slots, sends
        self._slice_bytes = len(slots[0])
        self._repeat, self._check = repeat, check
        self._stopping = stopping
        self._errors = self._moved = 0

    @property
    def link(self) -> Link:
        """Its link."""
        return self._link

    def run(self, warm_at: int, stop_at: int, given_up_at: int) -> None:
        """Move slices until the clock says stop, and leave the link clean.

        Args:
            warm_at: end of the warm-up, in ns of CLOCK_MONOTONIC, as the others.
            stop_at: when no further slice is begun.
            given_up_at: when the other end is taken for lost.

        Raises:
            LinkLost: the other end has gone, does not go on, or is not in step.
            Stopped: in the midst of it.
        """
        if self._sends:
            self._send(warm_at, stop_at, given_up_at)
        else:
            self._receive(warm_at, stop_at, given_up_at)

    def report(self, epoch: int, start: int) -> tuple[int, ...]:
        """The lane's record (`control.RECORD`), not finished yet."""
        end = self._end
        counted, nothing = (end.first, end.last, end.count), (0, 0, 0)
        sides = (*counted, *nothing) if self._sends else (*nothing, *counted)
        return (epoch, start, end.last, *sides, self._errors, self._moved, 0)

    def _send(self, warm_at: int, stop_at: int, given_up_at: int) -> None:
        end, size, number = self._end, self._slice_bytes, 0
        while self._ready(stop_at):
            if self._check and not end.waits:
                address = end.data + number % end.slices * size
                write_pattern(address, size, end.seed, number)
            header = _HEADER.pack(self._repeat, size, number)
            self._push((memoryview(header), self._slots[number % end.slices]), given_up_at)
            self._moved += size
            number += 1
            # What went out later went out beside others that had stopped.
            if time.monotonic_ns() >= stop_at:
                break
            end.served(warm_at)
        self._push((memoryview(_HEADER.pack(self._repeat, 0, number)),), given_up_at)

    def _receive(self, warm_at: int, stop_at: int, given_up_at: int) -> None:
        end, size, number = self._end, self._slice_bytes, 0
        while self._ready(stop_at):
            if not self._announced(number, given_up_at):
                return
            self._pull(self._slots[number % end.slices], given_up_at)
            self._moved += size
            number += 1
            if time.monotonic_ns() >= stop_at:
                break
            if self._check and not end.waits:
                address = end.data + end.done % end.slices * size
                self._errors += differing(address, size, end.seed, end.done)
            end.served(warm_at)
        spare = memoryview(bytearray(size))
        while self._announced(number, given_up_at):
            self._pull(spare, given_up_at)
            number += 1

    def _ready(self, stop_at: int) -> bool:
        """Wait for a slice to send or room to receive one; False when the time is over."""
        rounds = 0
        while time.monotonic_ns() < stop_at:
            if self._end.ready():
                return True
            if self._stopping():
                raise Stopped
            pause(rounds)
            rounds += 1
        return False

    def _announced(self, number: int, given_up_at: int) -> bool:
        """Whether another slice comes, and not the end of the repeat.

        Raises:
            LinkLost: what comes is not what should.
        """
        header = bytearray(_HEADER.size)
        self._pull(memoryview(header), given_up_at)
        repeat, size, said = _HEADER.unpack(header)
        if repeat != self._repeat or size not in (0, self._slice_bytes) or said != number:
            raise LinkLost(
                f"{self._link}: out of step: slice {said} of {size} bytes of repeat {repeat} came "
                f"for slice {number} of {self._slice_bytes} bytes of repeat {self._repeat}"
            )
        return bool(size)

    def _push(self, parts: tuple[memoryview, ...], given_up_at: int) -> None:
        """Send all bytes; they are the socket's then."""
        left = list(parts)
        while left:
            try:
                sent = self._socket.sendmsg(left)
            except OSError as error:
                self._go_on(error, "has taken nothing", given_up_at)
                continue
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]
                self._go_on(None, "does not take all", given_up_at)

    def _pull(self, memory: memoryview, given_up_at: int) -> None:
        """Receive until `memory` is full."""
        while memory:
            try:
                got = self._socket.recv_into(memory, len(memory), socket.MSG_WAITALL)
            except OSError as error:
                self._go_on(error, "has sent nothing", given_up_at)
                continue
            if not got:
                raise LinkLost(f"{self._link} was lost: the other end closed it")
            memory = memory[got:]
            if memory:
                self._go_on(None, "does not send all", given_up_at)

    def _go_on(self, error: OSError | None, what: str, given_up_at: int) -> None:
        """After a call that did not do all: go on, unless it is over."""
        if self._stopping():
            raise Stopped
        if error is not None and not isinstance(error, BlockingIOError):
            raise LinkLost(f"{self._link} was lost: {error.strerror}") from error
        if time.monotonic_ns() > given_up_at:
            other = self._link.receiver if self._sends else self._link.sender
            raise LinkLost(f"{self._link} was lost: {other} {what} for too long")
