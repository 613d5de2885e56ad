"""NICs as devices: one thread per NIC moves slices between host memory and TCP connections.

On the wire each slice follows a header with repeat, number and length; length 0 ends a repeat. Both
ends stop by their own clocks, but not within a slice: the sender completes the current slice and
sends the end; the receiver drops late slices. So the link is clean for the next repeat.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tccl_profiler.callers import BACKLOG, accept_callers, tokens_for
from tccl_profiler.host_device import LANES, RunningLane, ThreadedDevice
from tccl_profiler.messages import Endpoint, Run, Started
from tccl_profiler.program import Lane, Link
from tccl_profiler.protocol import LinkLost
from tccl_profiler.shared_memory import differing, write_pattern
from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import place_named

_HEADER = struct.Struct("!IIQ")  # repeat, bytes of the slice (0: the end), number of the slice
UNSENT_BYTES = 512 * 1024
"""Bytes that a socket holds beyond those under way. The end of a repeat waits for all of them to
arrive, and the default may be megabytes; with much less, a fast link would wait for the sender."""


class NicDevice(ThreadedDevice):
    """A NIC as a `Device`."""

    def open(self) -> tuple[Started, tuple[int, ...]]:
        """Find the NIC."""
        start = self._start
        self.links = NicLinks(start.device, start.address, start.interface)
        self._links_open.callback(self.links.close)
        return Started(lanes=LANES), ()

    def _lanes(self, run: Run, repeat: int) -> Sequence[RunningLane]:
        return [self._lane(run, repeat, lane) for lane in run.program.lanes]

    def _lane(self, run: Run, repeat: int, lane: Lane) -> TcpLane:
        end = lane.incoming or lane.outgoing
        assert end is not None and lane.link is not None
        space = end.data.space
        if place_named(space).kind == "G" and space not in self._spaces:
            raise MeasurementError(
                f"{self._start.device} cannot reach {space}'s memory: TCP sends from host memory "
                f"and receives into it; name that between the two, as {space}->{space}->C0->"
                f"{self._start.device}"
            )
        incoming, outgoing = self._ends(lane, repeat)
        return TcpLane(
            share=lane,
            incoming=incoming,
            outgoing=outgoing,
            check=run.check,
            link=lane.link,
            sock=self.links.socket_of(lane.link),
            repeat=repeat,
        )

    def _clean_up(self, run: Run) -> None:
        # Bytes may be under way: the other end must not take them for the next repeat's.
        for lane in run.program.lanes:
            if lane.link is not None:
                self.links.drop(lane.link)


@dataclass(eq=False, kw_only=True)
class TcpLane(RunningLane):
    """A lane over one link, of a `repeat` that is equal at both ends; plain memory is checked."""

    link: Link
    sock: socket.socket
    repeat: int

    def __post_init__(self) -> None:
        self._given_up_at = 0
        self._sends = self.share.incoming is not None
        self._end = end = self.incoming if self._sends else self.outgoing
        self._size = size = self.share.slice_bytes
        self._slots = [
            memoryview((ctypes.c_ubyte * size).from_address(end.data + i * size))
            for i in range(end.slices)
        ]
        self._checks = self.check and not end.waits

    def turns(self, warm_at: int, stop_at: int, given_up_at: int) -> Iterator[bool]:
        """Move bytes without blocking, and yield whether any moved; leave the link clean.

        The peer is taken for lost halfway to `given_up_at`: the controller could not name it.
        """
        self._given_up_at = (stop_at + given_up_at) // 2
        return self._send(warm_at, stop_at) if self._sends else self._receive(warm_at, stop_at)

    def _send(self, warm_at: int, stop_at: int) -> Iterator[bool]:
        end, size, number = self._end, self._size, 0
        while (yield from self._ready(stop_at)):
            if self._checks:
                write_pattern(end.data + number % end.slices * size, size, end.seed, number)
            header = _HEADER.pack(self.repeat, size, number)
            yield from self._push(memoryview(header), self._slots[number % end.slices])
            number += 1
            self.moved = number
            # Later bytes went out beside lanes that had stopped.
            if time.monotonic_ns() >= stop_at:
                break
            end.serve(warm_at)
        yield from self._push(memoryview(_HEADER.pack(self.repeat, 0, number)))

    def _receive(self, warm_at: int, stop_at: int) -> Iterator[bool]:
        end, size, number = self._end, self._size, 0
        while (yield from self._ready(stop_at)):
            if not (yield from self._announce(number)):
                return
            yield from self._pull(self._slots[number % end.slices])
            number += 1
            self.moved = number
            if time.monotonic_ns() >= stop_at:
                break
            if self._checks:
                address = end.data + end.done % end.slices * size
                self.errors += differing(address, size, end.seed, end.done)
            end.serve(warm_at)
        spare = memoryview(bytearray(size))
        while (yield from self._announce(number)):
            yield from self._pull(spare)
            number += 1

    def _ready(self, stop_at: int) -> Generator[bool, None, bool]:
        while time.monotonic_ns() < stop_at:
            if self._end.ready():
                return True
            yield False
        return False

    def _announce(self, number: int) -> Generator[bool, None, bool]:
        header = bytearray(_HEADER.size)
        yield from self._pull(memoryview(header))
        repeat, size, count = _HEADER.unpack(header)
        if repeat != self.repeat or size not in (0, self._size) or count != number:
            raise LinkLost(
                f"{self.link}: out of step: slice {count} of {size} bytes of repeat {repeat} came "
                f"for slice {number} of {self._size} bytes of repeat {self.repeat}"
            )
        return bool(size)

    def _push(self, *parts: memoryview) -> Iterator[bool]:
        unsent = list(parts)
        while unsent:
            try:
                sent = self.sock.sendmsg(unsent)
            except OSError as error:
                self._check(error, f"{self.link.receiver} takes nothing")
                sent = 0
            yield bool(sent)
            while unsent and sent >= len(unsent[0]):
                sent -= len(unsent.pop(0))
            if unsent:
                unsent[0] = unsent[0][sent:]

    def _pull(self, memory: memoryview) -> Iterator[bool]:
        """Receive until `memory` is full."""
        while memory:
            try:
                got = self.sock.recv_into(memory)
            except OSError as error:
                self._check(error, f"{self.link.sender} sends nothing")
                yield False
                continue
            if not got:
                raise LinkLost(f"{self.link} was lost: the other end closed it")
            memory = memory[got:]
            yield True

    def _check(self, error: OSError, what: str) -> None:
        if not isinstance(error, BlockingIOError):
            raise LinkLost(f"{self.link} was lost: {error.strerror}") from error
        if time.monotonic_ns() > self._given_up_at:
            raise LinkLost(f"{self.link} was lost: {what} for too long")


class NicLinks:
    """The TCP links of one NIC, kept for later sets. Methods raise LinkLost.

    Both ends are bound to the address of their NIC and, where permitted, to its interface. The
    first bytes are a random token of the listener: callers without a token are dropped.
    """

    def __init__(self, device: str, address: str, interface: str) -> None:
        self._device, self._address, self._interface = device, address, interface
        self.name = f"{interface} {address}".strip()
        self._sockets: dict[Link, socket.socket] = {}
        self._expected: dict[bytes, Link] = {}
        self._listener: socket.socket | None = None
        self._bound().close()

    def socket_of(self, link: Link) -> socket.socket:
        """Return the link's socket, which does not block."""
        sock = self._sockets.get(link)
        if sock is None:
            raise LinkLost(f"{link} is not connected")
        return sock

    def drop(self, link: Link) -> None:
        """Close a link for good; the peer notices."""
        sock = self._sockets.pop(link, None)
        if sock is not None:
            with contextlib.suppress(OSError):
                # Now, not when what was sent has been delivered.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

    def usable(self) -> tuple[Link, ...]:
        """Return the links with a live peer and nothing left from before."""
        for link in [link for link, sock in self._sockets.items() if not _is_quiet(sock)]:
            self.drop(link)
        return tuple(sorted(self._sockets))

    def listen(self, links: Sequence[Link]) -> tuple[Endpoint, ...]:
        """Begin to await these links alone, in place of namesakes."""
        for link in links:
            self.drop(link)
        self._stop_listening()
        self._listener = self._bound()
        try:
            # Callers wait here until they are accepted, among strangers.
            self._listener.listen(BACKLOG)
        except OSError as error:
            raise MeasurementError(f"{self._device}: cannot listen: {error.strerror}") from error
        self._expected = tokens_for(links)
        local = ((self._address, self._listener.getsockname()[1]),)
        return tuple(Endpoint(addresses=local, token=token) for token in self._expected)

    def accept(self, links: Sequence[Link], limit_s: float) -> None:
        """Wait until all awaited links have come."""
        assert self._listener is not None
        missing = sorted(set(links))
        try:
            for link, sock in accept_callers([self._listener], self._expected, limit_s):
                missing.remove(link)
                self._keep(link, sock)
        except OSError as error:
            raise LinkLost(f"{_link_names(missing)}: {error.strerror}") from error
        finally:
            self._stop_listening()
        if missing:
            raise LinkLost(
                f"{_link_names(missing)}: {missing[0].sender} did not come to {self._address} in "
                "time; look at firewalls and routes between the two"
            )

    def _stop_listening(self) -> None:
        self._expected = {}
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def connect(self, ends: Mapping[Link, Endpoint], limit_s: float) -> None:
        """Make awaited links, in place of namesakes."""
        deadline = time.monotonic() + limit_s
        for link in ends:
            self.drop(link)
        for link, end in ends.items():
            sock, (where,) = self._bound(), end.addresses
            try:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock.connect(_resolve(*where)[1])
                sock.sendall(end.token)
            except OSError as error:
                sock.close()
                why = error.strerror or "no answer in time"
                raise LinkLost(
                    f"{link}: {where[0]} port {where[1]} cannot be reached from {self.name}: {why}"
                ) from error
            self._keep(link, sock)

    def _keep(self, link: Link, sock: socket.socket) -> None:
        self.drop(link)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._sockets[link] = sock

    def _bound(self) -> socket.socket:
        """Return a socket that is bound to this NIC."""
        try:
            family, where = _resolve(self._address, 0)
            with contextlib.ExitStack() as undo:
                sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                if self._interface:
                    # Needs CAP_NET_RAW before Linux 5.7.
                    with contextlib.suppress(PermissionError):
                        name = os.fsencode(self._interface) + b"\0"
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
                sock.bind(where)
                undo.pop_all()
        except OSError as error:
            raise MeasurementError(
                f"{self._device}: {self.name} cannot be used: {error.strerror}"
            ) from error
        return sock

    def close(self) -> None:
        """Close all links."""
        for link in list(self._sockets):
            self.drop(link)
        self._stop_listening()


def _link_names(links: Sequence[Link]) -> str:
    shown = ", ".join(map(str, links[:3]))
    return f"{shown} and {len(links) - 3} more" if len(links) > 3 else shown


def _resolve(address: str, port: int) -> tuple[int, tuple[str, int] | tuple[str, int, int, int]]:
    resolved = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    )
    family, _, _, _, where = resolved[0]
    return family, where  # type: ignore[return-value] # bytes come with AF_UNIX and the like only


def _is_quiet(sock: socket.socket) -> bool:
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
