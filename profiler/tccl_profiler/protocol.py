"""The protocol of controller, host agents and workers: messages, requests, waits and deadlines.

A worker serves one device, an agent one host: both are at the other end of a connection, and serve
requests until they are told to stop. A request calls a method by its name. Answers carry the number
of the question, so that late ones are recognised. On the wire a message is a header (bytes of body,
number of descriptors), which carries the descriptors, and the body as msgpack.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np

from tccl_profiler.shared_memory import RECORD
from tccl_py.errors import InputError, MeasurementError, TcclError, limit_reached

HEARTBEAT_S = 1.0
SEND_S = 10.0  # how long a peer's socket may be full before the peer is given up
_LOOK_S = 0.2  # how often a wait looks whether its peers live


class WorkerLost(MeasurementError):  # noqa: N818 - says what happened
    """A worker died, hangs, or its device failed; the pool must be started anew."""


class LinkLost(MeasurementError):  # noqa: N818 - says what happened
    """A link could not be made or has broken; it can be made again."""


class ConnectionClosed(MeasurementError):  # noqa: N818 - an end, not always an error
    """The peer has closed the connection or has died, or this end is closed."""


class ConnectionTimeout(MeasurementError):  # noqa: N818 - as above
    """The peer did not send, or did not read, in time."""


class ControllerLost(Exception):  # noqa: N818 - says what happened
    """The controller is gone."""


class Aborted(Exception):  # noqa: N818 - says what happened
    """The controller gives up the current request."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long a controller waits, in seconds."""

    start_s: float = 120.0
    """For devices to be set up."""
    answer_s: float = 60.0
    """For an answer."""
    lanes_s: float = 10.0
    """For lanes to be resident, to be released, and to end after their window."""
    stop_s: float = 3.0
    """For workers to end."""
    silence_s: float = math.inf
    """For a sign of life."""


# Messages


class Call(msgspec.Struct, frozen=True, tag=True):
    """Call a method of the peer with these arguments; answered by Returned or Failed."""

    method: str
    arguments: msgspec.Raw


class Returned(msgspec.Struct, frozen=True, tag=True):
    """The method's result."""

    value: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request failed: bad input, `lost` workers, a broken link, or a refusal."""

    kind: Literal["input", "lost", "refused", "link"]
    what: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Describe an error; anything unforeseen counts as a lost worker."""
        reached = limit_reached(error)
        if isinstance(error, InputError):
            return cls(kind="input", what="\n".join((error.where, error.what, error.right)))
        if isinstance(error, LinkLost):
            return cls(kind="link", what=str(error))
        if isinstance(error, TcclError) or reached is not None:
            lost = reached is not None or isinstance(error, WorkerLost)
            return cls(kind="lost" if lost else "refused", what=str(reached or error))
        return cls(kind="lost", what=f"{type(error).__name__}: {' '.join(str(error).split())}")

    def error(self) -> Exception:
        """Return the error to raise."""
        if self.kind == "input":
            where, what, right = self.what.split("\n", 2)
            return InputError(where, what, right)
        kinds = {"lost": WorkerLost, "link": LinkLost, "refused": MeasurementError}
        return kinds[self.kind](self.what)


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Release the next repeat when this host's CLOCK_MONOTONIC is `at_ns`."""

    at_ns: int


class Sign(Enum):
    """A message without content."""

    DONE = "done"
    """The request was given up, or asked for nothing."""
    RESIDENT = "resident"
    """All lanes of the next repeat are resident; those of the repeat before have ended."""
    ABORT = "abort"
    """Give up what runs, if anything does; nobody waits for the answer."""
    STOP = "stop"
    """Give everything back and end."""
    LEAVING = "leaving"
    """This rank ends as it was told, by the controller or its launcher, and is not to blame."""
    HEARTBEAT = "heartbeat"
    """The sender lives."""


Kind = TypeVar("Kind")
Result = TypeVar("Result")
Message = Call | Returned | Failed | Release | Sign


class Envelope(msgspec.Struct, frozen=True):
    """A message and the number of the question that it asks, belongs to, or answers."""

    number: int
    message: Message


@functools.cache
def _decoders(method: Callable[..., Any]) -> tuple[Any, Any]:
    """Return decoders of a method's arguments and of its result."""
    *kinds, result = get_type_hints(method).values()
    pair = (tuple.__class_getitem__(tuple(kinds)), result)
    arguments, returns = (msgspec.msgpack.Decoder(kind, dec_hook=_array) for kind in pair)
    return arguments, returns


def _array(kind: Any, data: bytes) -> Any:
    """Return an array, which crosses as bytes: records of lanes, or stamps."""
    (scalar,) = get_args(get_args(kind)[1])
    return np.frombuffer(data, RECORD if scalar is np.void else scalar)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=np.ndarray.tobytes))


def _decode(decoder: Any, data: msgspec.Raw, what: str) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise MeasurementError(f"{what} does not fit: {error}") from error


def call_of(method: Callable[..., Any], arguments: tuple[object, ...]) -> Call:
    """Return the call of a peer's method."""
    return Call(method.__name__, _raw(arguments))


def answer_call(methods: Iterable[Callable[..., Any]], owner: object, call: Call) -> Returned:
    """Call one of these methods of `owner`. Raises MeasurementError: another is asked for."""
    method = next((method for method in methods if method.__name__ == call.method), None)
    if method is None:
        raise MeasurementError(f"asked for {call.method[:40]}")
    arguments = _decode(_decoders(method)[0], call.arguments, f"a call of {call.method}")
    return Returned(_raw(getattr(owner, call.method)(*arguments)))


def result_of(method: Callable[..., Result], where: str, answer: Returned) -> Result:
    """Return a method's result from somewhere. Raises MeasurementError: it is of another kind."""
    what = f"{where}: its result of {method.__name__}"
    result: Result = _decode(_decoders(method)[1], answer.value, what)
    return result


# Connections

LARGEST_BODY = 64 << 20  # bytes
_HEADER = struct.Struct("!IH")
_READ_BYTES = 1 << 20
_FD_BYTES = array("i").itemsize
_FDS_SPACE = socket.CMSG_SPACE(253 * _FD_BYTES)  # SCM_MAX_FD of Linux


class Connection:
    """One end of a stream socket between a controller and a worker or agent; owns the socket.

    One thread may poll while others tell. Each process must close unused ends: the death of a peer
    goes unnoticed while another process holds the peer's end. Descriptors are sent by AF_UNIX only.
    """

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        self.peer = peer
        self.heard_s = time.monotonic()
        """When anything last came."""
        self.leaving = False
        """Whether the peer was told to end."""
        self.ends = ("", "")
        """The addresses of this end and the peer's, "" without a network."""
        with contextlib.suppress(OSError):  # the peer may be gone by now
            if sock.family != socket.AF_UNIX:
                self.ends = (sock.getsockname()[0], sock.getpeername()[0])
        self._decoder = msgspec.msgpack.Decoder(Envelope)
        # A duplicate for another timeout would not do: it shares O_NONBLOCK.
        self._socket = sock
        self._socket.setblocking(False)
        self._sending = threading.Lock()
        # Of the message that is arriving, or that came last.
        self._bytes = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor to wait for; nothing is read beyond the message returned."""
        return self._socket.fileno()

    def tell(self, number: int, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message; the peer gets duplicates of the descriptors.

        Raises ConnectionClosed; ConnectionTimeout, after which this end is closed; MeasurementError
        if nothing was sent.
        """
        body = msgspec.msgpack.encode(Envelope(number, message))
        if len(body) > LARGEST_BODY:
            action = f"{len(body)} message bytes to {self.peer}"
            raise MeasurementError(f"{action}; at most {LARGEST_BODY} are right")
        data, deadline = memoryview(_HEADER.pack(len(body), len(fds)) + body), None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        with self._sending:
            while data:
                try:
                    data, rights = data[self._socket.sendmsg([data], rights) :], []
                except BlockingIOError:
                    deadline = deadline or time.monotonic() + SEND_S
                    if not wait_for([self], deadline - time.monotonic(), select.POLLOUT):
                        self.close()
                        raise ConnectionTimeout(f"{self.peer} did not read in time") from None
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise ConnectionClosed(f"{self.peer} has gone") from error
                except OSError as error:
                    raise self._break("send to", error) from error

    def poll(self) -> Envelope | None:
        """Return the next message that has come, but HEARTBEAT and LEAVING.

        Raises ConnectionClosed after the last message, and MeasurementError for an invalid message,
        which is dropped.
        """
        while (envelope := self._next()) is not None:
            self.heard_s = time.monotonic()
            if envelope.message is Sign.LEAVING:
                self.leaving = True
            elif envelope.message is not Sign.HEARTBEAT:
                return envelope
        return None

    def take_fds(self) -> tuple[int, ...]:
        """Return the descriptors that came with the last message; the caller owns them."""
        fds, self._fds = tuple(self._fds), []
        return fds

    def has_ended(self) -> bool:
        """Return whether the peer is gone or leaving; its last messages are dropped."""
        while True:
            try:
                if self.poll() is None:
                    return self.leaving
            except ConnectionClosed:
                return True
            except MeasurementError:
                continue

    def has_died(self) -> bool:
        """Return whether the peer is gone without a word; its last messages are dropped."""
        return self.has_ended() and not self.leaving

    def close(self) -> None:
        """Close this end, and the descriptors that nobody took."""
        self._socket.close()
        self._drop()

    def _next(self) -> Envelope | None:
        if not self._bytes:
            self._drop()
        if not self._fill(_HEADER.size):
            return None
        length, count = _HEADER.unpack_from(self._bytes)
        if length > LARGEST_BODY:
            self.close()
            what = f"{self.peer} announced a message of {length} bytes"
            raise MeasurementError(f"{what}; at most {LARGEST_BODY} are right")
        if not self._fill(_HEADER.size + length):
            return None
        if (arrived := len(self._fds)) != count:
            self.close()
            raise MeasurementError(
                f"{self.peer} sent {count} file descriptors, {arrived} came; a higher limit of "
                "open files (ulimit -n) is right"
            )
        body, self._bytes = self._bytes[_HEADER.size :], bytearray()
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            # ValueError: text that is not UTF-8.
            self._drop()
            raise MeasurementError(f"message of {self.peer} does not fit: {error}") from error

    def _fill(self, size: int) -> bool:
        """Read until `size` bytes of the message have come, with its descriptors, or no more."""
        while (missing := size - len(self._bytes)) > 0:
            data, ancillary = b"", list[tuple[int, int, bytes]]()
            try:
                # Close-on-exec from the start: another thread may be starting a process.
                # (socket.recv_fds has a parameter for flags, and ignores it.)
                data, ancillary, _, _ = self._socket.recvmsg(
                    min(missing, _READ_BYTES), _FDS_SPACE, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return False
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
        return True

    def _break(self, verb: str, error: OSError) -> MeasurementError:
        """Close, because the next message could not be found, and return the error."""
        if self._socket.fileno() < 0:
            return ConnectionClosed(f"the connection to {self.peer} is closed")
        self.close()
        return MeasurementError(f"cannot {verb} {self.peer}: {error.strerror}")

    def _drop(self) -> None:
        self._bytes = bytearray()
        for fd in self.take_fds():
            with contextlib.suppress(OSError):
                os.close(fd)


def wait_for(
    connections: Iterable[Connection], limit_s: float = math.inf, event: int = select.POLLIN
) -> bool:
    """Wait until one of them can go on, or has ended; poll, because select ends at 1023."""
    poller = select.poll()
    for connection in connections:
        if connection.fileno() < 0:
            return True  # closed by another thread
        poller.register(connection, event)
    return bool(poller.poll(None if limit_s == math.inf else 1000 * max(0.0, limit_s)))


@contextlib.contextmanager
def heartbeats(beat: Callable[[], object], every_s: float = HEARTBEAT_S) -> Iterator[None]:
    """Have a thread send heartbeats within the context; `beat` sends to all peers."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(every_s):
            # Whoever waits for a lost peer will notice.
            with contextlib.suppress(MeasurementError):
                beat()

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


# The two ends: who serves, and who asks.


class Server:
    """Serves its methods to a controller."""

    called: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """What may be asked for."""
    silence_s = math.inf
    """The controller is lost after so long without a message."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._number = 0
        self._fds: tuple[int, ...] = ()
        """Descriptors that go with the next answer."""

    def serve_requests(self) -> None:
        """Answer requests until told to stop. Raises ControllerLost, ConnectionClosed."""
        while (envelope := self._next()).message is not Sign.STOP:
            self._number = envelope.number
            answer = self._carry_out(envelope.message)
            self._connection.tell(envelope.number, answer, self._fds)
            self._fds = ()

    def _carry_out(self, message: Message) -> Message:
        try:
            if isinstance(message, Call):
                return answer_call(self.called, self, message)
        except Aborted:
            pass
        except ControllerLost:
            raise
        except Exception as error:
            return Failed.of(error)
        # Else it is about a run that has ended by itself: messages arrive in order.
        return Sign.DONE

    def _next(self, limit_s: float = math.inf) -> Envelope:
        """Wait for the next message. Raises ConnectionTimeout."""
        until = time.monotonic() + limit_s
        while (envelope := self._poll()) is None:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise ConnectionTimeout(f"not told to go on within {limit_s:g} s")
            wait_for([self._connection], min(left_s, self.silence_s))
        return envelope

    def _poll(self) -> Envelope | None:
        envelope = self._connection.poll()
        if envelope is None and time.monotonic() - self._connection.heard_s > self.silence_s:
            raise ControllerLost(f"the controller has said nothing for {self.silence_s:g} s")
        return envelope


class Question:
    """A question, the peers that have not answered it yet, and the answers of the rest."""

    def __init__(self, number: int, names: Iterable[str] = ()) -> None:
        self.number = number
        self.waiting = dict.fromkeys(names)
        self.answers: dict[str, Message] = {}


class Peers:
    """The workers of a host, or the agents of a job, as their controller sees them."""

    grace_s = 0.0
    """Seconds between a peer's failure and the end of what the rest do: they may know the cause."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self.connections: dict[str, Connection] = {}
        self._number = 0

    def lost(self, name: str, what: str = "") -> BaseException:
        """Return the error for a peer that is of no more use; without `what`, it is gone."""
        raise NotImplementedError

    def label(self, name: str) -> tuple[str, str]:
        """Return what a peer is called, and an expression of the words by which it is named."""
        raise NotImplementedError

    def number(self) -> int:
        """Return a number for a new question."""
        self._number += 1
        return self._number

    def tell(self, name: str, number: int, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message; raises as `lost`."""
        try:
            self.connections[name].tell(number, message, fds)
        except ConnectionTimeout as error:
            what = "does not read what it is sent: it stalls or is cut"
            raise self.lost(name, what) from error
        except ConnectionClosed as error:
            raise self.lost(name) from error

    def poll(self, name: str, number: int) -> Message | None:
        """Return a peer's next message of this number, if it has come; raises as `lost`."""
        try:
            while (envelope := self.connections[name].poll()) is not None:
                if envelope.number == number:
                    return envelope.message
        except ConnectionClosed as error:
            raise self.lost(name) from error
        except MeasurementError as error:
            raise self.lost(name, f"sent a message that cannot be read ({error})") from error
        return None

    def hear(self, question: Question) -> None:
        """Take the answers that have come."""
        for name in list(question.waiting):
            message = self.poll(name, question.number)
            if message is not None:
                question.answers[name] = message
                del question.waiting[name]

    def heard(self, question: Question, limit_s: float) -> dict[str, Message]:
        """Return the answers of all within a limit; fewer if one has failed (see `grace_s`)."""
        begun, ends = time.monotonic(), math.inf
        while True:
            self.hear(question)
            time_s = time.monotonic()
            if any(isinstance(answer, Failed) for answer in question.answers.values()):
                ends = min(ends, time_s + self.grace_s)
            if not question.waiting or time_s >= ends:
                return question.answers
            for name in question.waiting:
                silence_s = self.timeouts.silence_s
                if time_s - max(self.connections[name].heard_s, begun) > silence_s:
                    what = f"has said nothing for {silence_s:g} s: it stalls or is cut"
                    raise self.lost(name, what)
                if time_s - begun > limit_s:
                    raise self.lost(name, f"has not answered for {limit_s:g} s")
            left_s = min(_LOOK_S, ends - time_s, begun + limit_s - time_s)
            wait_for([self.connections[name] for name in question.waiting], left_s)

    def answers(
        self, question: Question, kind: type[Kind], limit_s: float | None = None
    ) -> dict[str, Kind]:
        """Return the answers of all, of this type; a failure has the rest give up."""
        names = [*question.waiting, *question.answers]
        answers = self.heard(question, self.timeouts.answer_s if limit_s is None else limit_s)
        if any(not isinstance(answer, kind) for answer in answers.values()):
            self.give_up(names)
        return self.check({name: answers[name] for name in names if name in answers}, kind)

    def check(self, answers: Mapping[str, Message], kind: type[Kind]) -> dict[str, Kind]:
        """Return the answers, all of this type, or raise the failure that says most, by name."""
        failed = [(name, one) for name, one in answers.items() if isinstance(one, Failed)]
        for wanted in ("input", "lost", "refused", "link"):
            for name, failure in failed:
                if failure.kind == wanted:
                    label, named = self.label(name)
                    said = failure.what if re.search(named, failure.what) else ""
                    what = said or f"{label}: {failure.what}"
                    raise msgspec.structs.replace(failure, what=what).error()
        kinds: dict[str, Kind] = {}
        for name, answer in answers.items():
            if not isinstance(answer, kind):
                raise self.lost(name, f"answered {answer} out of turn")
            kinds[name] = answer
        return kinds

    def give_up(self, names: Collection[str]) -> None:
        """Have peers give up what they run; their late answers have another number."""
        for name in names:
            self.tell(name, self.number(), Sign.ABORT)

    def begin(
        self,
        question: Question,
        method: Callable[..., object],
        given: Mapping[str, tuple[object, ...]],
        fds: Sequence[int] = (),
    ) -> None:
        """Call a method of peers, all at once, with arguments by name."""
        for name, arguments in given.items():
            # Before: an interruption just after it would leave an unexpected answer.
            question.waiting[name] = None
            self.tell(name, question.number, call_of(method, arguments), fds)

    def results(
        self, question: Question, method: Callable[..., Result], limit_s: float | None = None
    ) -> dict[str, Result]:
        """Return the results of a method that was called; raises as `answers`."""
        answers = self.answers(question, Returned, limit_s).items()
        return {name: result_of(method, self.label(name)[0], answer) for name, answer in answers}

    def ask(
        self,
        method: Callable[..., Result],
        given: Mapping[str, tuple[object, ...]],
        limit_s: float | None = None,
        fds: Sequence[int] = (),
    ) -> dict[str, Result]:
        """Call a method of peers, and return its results; raises as `answers`."""
        question = Question(self.number())
        self.begin(question, method, given, fds)
        return self.results(question, method, limit_s)
