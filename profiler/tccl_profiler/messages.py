"""The control protocol: messages between controller, host agents and workers, and their framing.

A worker serves one device, an agent one host, both with the same messages. The bytes of transfers
travel elsewhere. On the wire a message is a header (bytes of body, number of descriptors), which
carries the descriptors, and the body as msgpack.

Links are made in three steps, each at all hosts before the next: receivers listen and return an
endpoint, senders connect, receivers accept.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec

from tccl_profiler.program import DeviceProgram, Link
from tccl_py.errors import InputError, MeasurementError, TcclError, limit_reached

LINK_S = 10.0  # seconds for a link to be made
Making = Literal["listen", "connect", "accept"]
MAKING: tuple[Making, ...] = get_args(Making)


class WorkerLost(MeasurementError):  # noqa: N818 - says what happened
    """A worker died, hangs, or its device failed; the pool must be started anew."""


class LinkLost(MeasurementError):  # noqa: N818 - says what happened
    """A link could not be made or has broken; it can be made again."""


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A device by name, its worker's CPUs, a GPU's bus id, a NIC's address and `network`."""

    device: str
    bus_id: str = ""
    cpus: tuple[int, ...] = ()
    address: str = ""
    interface: str = ""
    network: str = ""


class Start(DeviceSpec, frozen=True, kw_only=True, tag=True):
    """The first message to a worker, with the control segment's descriptor; `slot` is there."""

    backend: str
    slot: int
    arena_bytes: int
    user_bytes: int


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A device is ready, runs so many lanes at once, and shares its arena by `handle`."""

    lanes: int
    arena_bytes: int = 0
    handle: bytes = b""
    memory_bytes: int = 0


class Share(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The memory of a space, in place of earlier memory: a descriptor, or a GPU arena's handle."""

    space: str
    handle: bytes = b""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of a copy: groups of slices, each followed by a stamp."""

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
    """Read the clock of the device, or of the host's devices, `count` times."""

    count: int


class Pinged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Host time before, device time, host time after; nanoseconds."""

    asked_ns: tuple[int, ...]
    device_ns: tuple[int, ...]
    seen_ns: tuple[int, ...]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of the host that awaits a connection, and the token that identifies the caller."""

    addresses: tuple[str, ...]
    port: int
    token: bytes


class LinkStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take one step for these links, within `limit_s`; answered by LinkEnds.

    `usable` takes no links and answers the existing, clean links. `listen` and `connect` replace
    namesakes; `connect` needs the endpoints that `listen` answered.
    """

    step: Making | Literal["usable"]
    ends: Mapping[Link, Endpoint | None] = {}
    limit_s: float = LINK_S

    def shares(self, part_of: Callable[[str], str]) -> dict[str, LinkStep]:
        """Split the step; `part_of` names the worker or host of a device, which is a link's end."""
        parts: dict[str, dict[Link, Endpoint | None]] = {}
        for link, end in self.ends.items():
            device = link.sender if self.step == "connect" else link.receiver
            parts.setdefault(part_of(device), {})[link] = end
        return {part: msgspec.structs.replace(self, ends=ends) for part, ends in parts.items()}


class LinkEnds(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The usable links, or the links of a step; after `listen`, where each is awaited."""

    ends: Mapping[Link, Endpoint | None] = {}

    @classmethod
    def join(cls, answers: Iterable[LinkEnds]) -> LinkEnds:
        """Return the answer to a step from the answers to its shares."""
        return cls(ends=dict(item for answer in answers for item in answer.ends.items()))


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request has been carried out."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request failed: bad input, `lost` workers, a broken link, or a refusal."""

    kind: Literal["input", "lost", "refused", "link"]
    what: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Describe an error; anything unforeseen counts as a lost worker."""
        if isinstance(error, InputError):
            return cls(kind="input", what="\n".join((error.where, error.what, error.right)))
        if isinstance(error, TcclError) and not isinstance(error, WorkerLost):
            return cls(kind="link" if isinstance(error, LinkLost) else "refused", what=str(error))
        return cls.lost(error)

    @classmethod
    def lost(cls, error: Exception) -> Failed:
        """Describe an error after which a worker is of no more use."""
        reached = limit_reached(error)
        if isinstance(error, TcclError) or reached is not None:
            return cls(kind="lost", what=str(reached or error))
        return cls(kind="lost", what=f"{type(error).__name__}: {' '.join(str(error).split())}")

    def error(self, sentence: str) -> Exception:
        """Return the error to raise, with this sentence unless it is bad input."""
        if self.kind == "input":
            where, what, right = self.what.split("\n", 2)
            return InputError(where, what, right)
        kinds = {"lost": WorkerLost, "link": LinkLost, "refused": MeasurementError}
        return kinds[self.kind](sentence)


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give everything back and end."""


ToWorker = Start | Share | Run | Ping | LinkStep | Stop
FromWorker = Started | Done | Pinged | LinkEnds | Failed


# Framing

LARGEST_BODY = 64 << 20  # bytes
_HEADER = struct.Struct("!IH")
_READ_BYTES = 1 << 20
_FD_BYTES = array("i").itemsize
_FDS_SPACE = socket.CMSG_SPACE(253 * _FD_BYTES)  # SCM_MAX_FD of Linux

Received = TypeVar("Received")


class ConnectionClosed(MeasurementError):  # noqa: N818 - an end, not always an error
    """The peer has closed the connection or has died, or this end is closed."""


class ConnectionTimeout(MeasurementError):  # noqa: N818 - as above
    """The peer did not send, or did not read, in time."""


class Connection(Generic[Received]):
    """One end of a stream socket that carries messages; owns the socket.

    One thread may send while another receives. Each process must close unused ends: the death of a
    peer goes unnoticed while another process holds the peer's end. `receives` is a union of tagged
    msgspec Structs. Descriptors are sent by AF_UNIX only.
    """

    def __init__(
        self, sock: socket.socket, *, receives: Any, peer: str = "the other process"
    ) -> None:
        self.peer = peer
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(receives)
        # A duplicate for another timeout would not do: it shares O_NONBLOCK.
        self._socket = sock
        self._socket.setblocking(False)
        # Of the message that is arriving; kept over a timeout.
        self._bytes = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor to poll; nothing is read beyond the message returned."""
        return self._socket.fileno()

    def send(
        self, message: msgspec.Struct, fds: Sequence[int] = (), timeout_s: float | None = None
    ) -> None:
        """Send a message; the peer gets duplicates of the descriptors.

        Raises ConnectionClosed; ConnectionTimeout, after which this end is closed; MeasurementError
        if nothing was sent.
        """
        deadline = _deadline(timeout_s)
        body = msgspec.msgpack.encode(message)
        if len(body) > LARGEST_BODY:
            action = f"{len(body)} message bytes to {self.peer}"
            raise MeasurementError(f"{action}; at most {LARGEST_BODY} are right")
        data = memoryview(_HEADER.pack(len(body), len(fds)) + body)
        while data:
            try:
                if fds:
                    data = data[socket.send_fds(self._socket, [data], list(fds)) :]
                    fds = ()
                else:
                    data = data[self._socket.send(data) :]
            except BlockingIOError:
                try:
                    self._wait(select.POLLOUT, deadline)
                except ConnectionTimeout:
                    self.close()
                    raise
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ConnectionClosed(f"{self.peer} has gone") from error
            except OSError as error:
                raise self._break("send to", error) from error

    def receive(self, timeout_s: float | None) -> tuple[Received, tuple[int, ...]]:
        """Wait for the next message (None: for ever); the caller owns its descriptors.

        Raises ConnectionClosed after the last message, ConnectionTimeout (a later call goes on from
        here), and MeasurementError for an invalid message, which is dropped.
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
        arrived = len(self._fds)
        if arrived != count:
            self.close()
            raise MeasurementError(
                f"{self.peer} sent {count} file descriptors, {arrived} came; a higher limit of "
                "open files (ulimit -n) is right"
            )
        try:
            message = self._decoder.decode(memoryview(self._bytes)[_HEADER.size :])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            # ValueError: text that is not UTF-8.
            self._drop()
            raise MeasurementError(f"message of {self.peer} does not fit: {error}") from error
        fds, self._fds = tuple(self._fds), []
        self._drop()
        return message, fds

    def close(self) -> None:
        """Close this end, and descriptors of a message that was still arriving."""
        self._socket.close()
        self._drop()

    def _fill(self, size: int, deadline: float | None) -> None:
        """Read until `size` bytes of the message have come, with its descriptors."""
        while (missing := size - len(self._bytes)) > 0:
            data, ancillary = b"", list[tuple[int, int, bytes]]()
            try:
                # Close-on-exec from the start: another thread may be starting a process.
                # (socket.recv_fds has a parameter for flags, and ignores it.)
                data, ancillary, _, _ = self._socket.recvmsg(
                    min(missing, _READ_BYTES), _FDS_SPACE, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except ConnectionResetError:  # the peer left without reading all: gone as well
                pass
            except OSError as error:
                raise self._break("receive from", error) from error
            if not data:
                where = " in the middle of a message" if self._bytes else ""
                self._drop()
                raise ConnectionClosed(f"{self.peer} has gone{where}")
            self._bytes += data
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    complete = len(payload) - len(payload) % _FD_BYTES
                    self._fds += array("i", payload[:complete])

    def _wait(self, event: int, deadline: float | None) -> None:
        """Wait until the socket can go on; poll, because select ends at descriptor 1023."""
        poller = select.poll()
        poller.register(self._socket, event)
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not poller.poll(None if left_s is None else 1000 * left_s):
            verb = "sent no whole message" if event == select.POLLIN else "did not read"
            raise ConnectionTimeout(f"{self.peer} {verb} in time")

    def _break(self, verb: str, error: OSError) -> MeasurementError:
        """Close, because the next message could not be found, and return the error."""
        if self._socket.fileno() < 0:
            return ConnectionClosed(f"the connection to {self.peer} is closed")
        self.close()
        return MeasurementError(f"cannot {verb} {self.peer}: {error.strerror}")

    def _drop(self) -> None:
        fds, self._fds, self._bytes = self._fds, [], bytearray()
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
