"""What the controller and its workers say to each other; bytes of transfers go another way."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from tccl_profiler.program import DeviceProgram, Link
from tccl_py.errors import MeasurementError

# Links between NICs: where one can be reached, and what a pool's workers are asked to make.


class LinkLost(MeasurementError):  # noqa: N818 - says what happened
    """A link could not be made or has broken; both its NICs are named. Make it again."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a NIC waits for a link, and what tells the link from other callers."""

    address: str
    port: int
    token: bytes


class Listen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Wait for these links, in place of those that had their names; answered by Listening."""

    links: tuple[Link, ...]


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where, in the order asked."""

    endpoints: tuple[Endpoint, ...]


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make these links, in place of those that had their names, within so many seconds."""

    links: tuple[Link, ...]
    endpoints: tuple[Endpoint, ...]
    limit_s: float


class Accept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take these links, which were listened for, within so many seconds."""

    links: tuple[Link, ...]
    limit_s: float


class AskLinks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say which links can be used; answered by Linked."""


class Linked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The links that are there and clean."""

    links: tuple[Link, ...]


def names(links: Sequence[Link]) -> str:
    """Links in a sentence, the first few by name.

    >>> names([Link("h0.N0", "h1.N0", 0), Link("h0.N0", "h1.N0", 1)])
    'link 0 from h0.N0 to h1.N0, link 1 from h0.N0 to h1.N0'
    """
    shown = ", ".join(map(str, links[:3]))
    return f"{shown} and {len(links) - 3} more" if len(links) > 3 else shown


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message, with two descriptors: the control segment and the lifeline.

    `slot` is the device's place in the control segment, `device` its name in the machine: `G0`. The
    lifeline is a pipe that ends with the controller, however that ends; so does the worker then.
    A NIC has an IP address and the name of an interface.
    """

    backend: str
    slot: int
    device: str
    bus_id: str
    cpus: tuple[int, ...]
    control_bytes: int
    arena_bytes: int
    user_bytes: int
    address: str = ""
    interface: str = ""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A device that is ready: how many lanes it runs at once, and how others reach its arena."""

    pid: int
    name: str
    lanes: int
    arena_bytes: int
    handle: bytes
    memory_bytes: int


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Another device's arena; `descriptor` counts the message's descriptors, -1 is none."""

    space: str
    handle: bytes
    size: int
    bus_id: str
    descriptor: int = -1


class Meet(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The other devices' arenas."""

    peers: tuple[Peer, ...]


class Share(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Host memory that replaces what was mapped under this name, with its descriptor."""

    space: str
    size: int


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How much a copy moves: groups of slices; a stamp follows each group."""

    groups: int
    slices: int = 1


class Run(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Queue `repeats` repeats of a program; repeat r waits for the flag to be `epoch` + r."""

    program: DeviceProgram
    epoch: int
    repeats: int
    warm_ns: int
    window_ns: int
    patience_ns: int
    paces: tuple[Pace, ...] = ()
    check: bool = False


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask the device for its time so many times."""

    count: int


class Pinged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """When the host asked, what the device's time was, when the host saw it; nanoseconds."""

    asked_ns: tuple[int, ...]
    device_ns: tuple[int, ...]
    seen_ns: tuple[int, ...]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was asked for has been done."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It could not be done; `fatal` if the worker is of no more use, `link` if a link is lost."""

    what: str
    fatal: bool = True
    link: bool = False


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give everything back and end."""


ToWorker = Start | Meet | Share | Run | Ping | Listen | Connect | Accept | AskLinks | Stop
FromWorker = Started | Done | Pinged | Listening | Linked | Failed

# Messages between two processes over a Unix socket, with file descriptors beside them.


LARGEST_BODY = 64 << 20  # bytes
MOST_FDS = 0xFFFF  # what the header can say
FDS_A_BATCH = 250  # Linux takes 253 (SCM_MAX_FD in include/net/scm.h)

_HEADER = struct.Struct("!IH")
_READ_BYTES = 1 << 20
_FD_BYTES = array("i").itemsize

Received = TypeVar("Received")


class ChannelClosed(MeasurementError):  # noqa: N818 - an end, not always an error
    """The other process has closed its end or has died, or this end is closed."""


class ChannelTimeout(MeasurementError):  # noqa: N818 - as above
    """The other process did not send, or did not read, in time."""


class Channel(Generic[Received]):
    """One end of a Unix stream socket that carries messages; it owns the socket.

    One thread may send while another receives. Each process must close the ends it does not use:
    the death of a peer goes unnoticed while anybody else holds its end.

    Args:
        sock: a connected SOCK_STREAM socket of AF_UNIX.
        receives: type of the messages that arrive, a union of tagged msgspec Structs.
        peer: name of the other process, for errors.
    """

    def __init__(
        self, sock: socket.socket, *, receives: Any, peer: str = "the other process"
    ) -> None:
        self.peer = peer
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(receives)
        self._socket = sock
        self._socket.setblocking(False)
        # Of the message that is arriving; it stays here over a timeout.
        self._bytes = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        """Descriptor to wait on with others; nothing is read ahead of the message returned."""
        return self._socket.fileno()

    def send(
        self, message: msgspec.Struct, fds: Sequence[int] = (), timeout_s: float | None = None
    ) -> None:
        """Send a message; the descriptors stay the sender's, the other process gets duplicates.

        Raises:
            ChannelClosed: nobody is there; what the peer sent before can still be received.
            ChannelTimeout: the peer does not read. Half a message may be out: the channel closes.
            MeasurementError: the message is too large or a descriptor is not open; nothing is sent.
        """
        deadline = _deadline(timeout_s)
        body = msgspec.msgpack.encode(message)
        self._refuse_unsendable(body, fds)
        try:
            data = memoryview(_HEADER.pack(len(body), len(fds)) + body)
            while data:
                data = data[self._send_some(data, (), deadline) :]
            for start in range(0, len(fds), FDS_A_BATCH):
                self._send_some(b"\0", fds[start : start + FDS_A_BATCH], deadline)
        except ChannelTimeout:
            self.close()
            raise

    def receive(self, timeout_s: float | None) -> tuple[Received, tuple[int, ...]]:
        """Wait for the next message (None: for ever); its descriptors belong to the caller.

        Raises:
            ChannelClosed: the peer is gone and all it sent has been received.
            ChannelTimeout: no whole message came; a later call goes on where this one stopped.
            MeasurementError: the message does not fit, and is dropped with its descriptors. The
                channel closes if the next message cannot be found.
        """
        deadline = _deadline(timeout_s)
        self._fill(_HEADER.size, deadline)
        length, count = _HEADER.unpack_from(self._bytes)
        if length > LARGEST_BODY:
            self.close()
            raise MeasurementError(
                f"{self.peer} announced a message of {length} bytes; "
                f"at most {LARGEST_BODY} are right"
            )
        self._fill(_HEADER.size + length, deadline)
        while len(self._fds) < count:
            self._receive_batch(min(FDS_A_BATCH, count - len(self._fds)), deadline)
        return self._take()

    def close(self) -> None:
        """Close this end, and descriptors of a message that was still arriving."""
        self._socket.close()
        self._drop()

    def __enter__(self) -> Channel[Received]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _refuse_unsendable(self, body: bytes, fds: Sequence[int]) -> None:
        """Find before the first byte is out what would break off in the middle of a message."""
        if len(body) > LARGEST_BODY:
            raise MeasurementError(
                f"message of {len(body)} bytes to {self.peer}; at most {LARGEST_BODY} are right"
            )
        if len(fds) > MOST_FDS:
            raise MeasurementError(
                f"{len(fds)} file descriptors to {self.peer}; at most {MOST_FDS} are right"
            )
        for fd in fds:
            try:
                os.fstat(fd)
            except OSError as error:
                raise MeasurementError(
                    f"file descriptor {fd} to {self.peer}: {error.strerror}"
                ) from error

    def _send_some(
        self, data: bytes | memoryview, fds: Sequence[int], deadline: float | None
    ) -> int:
        """Send as many bytes as go at once, and how many they were."""
        while True:
            try:
                if fds:
                    return socket.send_fds(self._socket, [data], list(fds))
                return self._socket.send(data)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ChannelClosed(f"{self.peer} has gone") from error
            except OSError as error:
                raise self._broken("send to", error) from error

    def _fill(self, size: int, deadline: float | None) -> None:
        """Read until `size` bytes of the message are here, never beyond them."""
        while len(self._bytes) < size:
            wanted = min(size - len(self._bytes), _READ_BYTES)
            self._bytes += self._read(wanted, 0, deadline)[0]

    def _receive_batch(self, expected: int, deadline: float | None) -> None:
        """Read the byte that a batch of descriptors travels with."""
        _, fds = self._read(1, expected, deadline)
        self._fds += fds
        if len(fds) != expected:
            arrived = len(self._fds)
            self.close()
            raise MeasurementError(
                f"{self.peer} sent {expected} file descriptors at once, {len(fds)} came after "
                f"{arrived - len(fds)} others; a higher limit of open files (ulimit -n) is right"
            )

    def _read(self, size: int, fds: int, deadline: float | None) -> tuple[bytes, array[int]]:
        """Read at most `size` bytes, and the descriptors with them."""
        space = socket.CMSG_LEN(fds * _FD_BYTES) if fds else 0
        data = b""
        ancillary: list[tuple[int, int, bytes]] = []
        while True:
            try:
                # Close-on-exec from the start: another thread may be starting a process.
                # (socket.recv_fds has a parameter for flags, and ignores it.)
                data, ancillary, _, _ = self._socket.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
            except ConnectionResetError:  # the peer left without reading all: gone as well
                break
            except OSError as error:
                raise self._broken("receive from", error) from error
        if not data:
            where = " in the middle of a message" if self._bytes else ""
            self._drop()
            raise ChannelClosed(f"{self.peer} has gone{where}")
        return data, _descriptors(ancillary)

    def _wait(self, event: int, deadline: float | None) -> None:
        """Wait until the socket can go on; poll, because select ends at descriptor 1023."""
        poller = select.poll()
        poller.register(self._socket, event)
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not poller.poll(None if left_s is None else 1000 * left_s):
            verb = "sent no whole message" if event == select.POLLIN else "did not read"
            raise ChannelTimeout(f"{self.peer} {verb} in time")

    def _broken(self, verb: str, error: OSError) -> MeasurementError:
        """Close, because the next message could not be found, and say why."""
        if self._socket.fileno() < 0:
            return ChannelClosed(f"the channel to {self.peer} is closed")
        self.close()
        return MeasurementError(f"cannot {verb} {self.peer}: {error.strerror}")

    def _take(self) -> tuple[Received, tuple[int, ...]]:
        """Hand out the message that is here."""
        try:
            message = self._decoder.decode(memoryview(self._bytes)[_HEADER.size :])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            # ValueError: text that is not UTF-8.
            self._drop()
            raise MeasurementError(f"message of {self.peer} does not fit: {error}") from error
        fds, self._fds = tuple(self._fds), []
        self._drop()
        return message, fds

    def _drop(self) -> None:
        """Forget the message that is arriving, and close its descriptors."""
        fds, self._fds, self._bytes = self._fds, [], bytearray()
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> array[int]:
    fds = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return fds
