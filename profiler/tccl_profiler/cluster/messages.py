"""Messages between the controller and host agents, and the waits of both.

An answer carries the question's number, so that late answers are recognised. Neither sending nor
polling waits for a peer: waits are made of naps, with a limit, and watch all peers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np

from tccl_profiler import messages
from tccl_profiler.linux import wake_promptly
from tccl_profiler.shared_memory import RECORD
from tccl_py.errors import MeasurementError

HEARTBEAT_S = 1.0
_SEND_S = 5.0  # how long a peer's socket may be full before the peer is given up
_HOT_S, _WARM_S = 0.003, 0.5
_SHORT_NAP_S, _NAP_S, _LONG_NAP_S = 20e-6, 1e-3, 5e-3


class Call(msgspec.Struct, frozen=True, tag=True):
    """Call a method of the host's agent with these arguments; answered by Returned or Failed."""

    method: str
    arguments: msgspec.Raw


class Returned(msgspec.Struct, frozen=True, tag=True):
    """The method's result."""

    value: msgspec.Raw


class Resident(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All lanes of the next repeat are resident; those of the repeat before have ended."""


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Release the next repeat when this host's CLOCK_MONOTONIC is `at_ns`."""

    at_ns: int


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give up what runs, if anything does; nobody waits for the answer."""


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This rank ends as it was told, by the controller or its launcher, and is not to blame."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The sender lives."""


Kind = TypeVar("Kind", bound=msgspec.Struct)
Result = TypeVar("Result")
Outcome = Returned | messages.Done | messages.Failed
Message = Call | Resident | Release | Abort | Outcome | messages.Stop | Leaving | Heartbeat


@functools.cache
def _decoders(method: Callable[..., Any]) -> tuple[Any, Any]:
    """Return decoders of a method's arguments and of its result."""
    *kinds, result = get_type_hints(method).values()
    pair = (tuple.__class_getitem__(tuple(kinds)), result)
    arguments, returns = (msgspec.msgpack.Decoder(kind, dec_hook=_array) for kind in pair)
    return arguments, returns


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=np.ndarray.tobytes))


def call_of(method: Callable[..., Any], arguments: tuple[object, ...]) -> Call:
    """Return the call of an agent's method."""
    return Call(method.__name__, _raw(arguments))


def answer_call(methods: Mapping[str, Callable[..., Any]], owner: object, call: Call) -> Returned:
    """Call one of these methods of `owner`. Raises MeasurementError: another is asked for."""
    method = methods.get(call.method)
    if method is None:
        raise MeasurementError(f"asked for {call.method[:40]}")
    arguments = _decode(_decoders(method)[0], call.arguments, f"a call of {call.method}")
    return Returned(_raw(method(owner, *arguments)))


def result_of(method: Callable[..., Result], host: str, answer: Returned) -> Result:
    """Return a method's result on a host. Raises MeasurementError: it is of another kind."""
    where = f"host {host}: its result of {method.__name__}"
    result: Result = _decode(_decoders(method)[1], answer.value, where)
    return result


def _decode(decoder: Any, data: msgspec.Raw, what: str) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise MeasurementError(f"{what} does not fit: {error}") from error


def check_answers(answers: Mapping[str, Message], kind: type[Kind]) -> dict[str, Kind]:
    """Return the answers, all of this type, or raise the failure that says most, with its host."""
    failed = {
        host: answer for host, answer in answers.items() if isinstance(answer, messages.Failed)
    }
    for wanted in ("input", "lost", "refused", "link"):
        for host, failure in failed.items():
            if failure.kind == wanted:
                # By its places or as a host: a name as `node` or `h1` may be part of other words.
                name = re.escape(host)
                named = rf"host {name}(?![\w.-])|(?<![\w.-]){name}\.[GCDN]\d"
                what = failure.what
                if not re.search(named, what):
                    what = f"host {host}: {what}"
                raise msgspec.structs.replace(failure, what=what).error(what)
    kinds: dict[str, Kind] = {}
    for host, answer in answers.items():
        if not isinstance(answer, kind):
            raise messages.WorkerLost(f"host {host}: answered {type(answer).__name__} out of turn")
        kinds[host] = answer
    return kinds


class Envelope(msgspec.Struct, frozen=True):
    """A message and the number of the question that it asks, belongs to, or answers."""

    number: int
    message: Message


class Messenger:
    """One end of the connection between the controller and a rank's agent; owns the socket.

    `heard_s` is when anything last came; `leaving` that the peer was told to end; `ends` are the
    addresses of this end and the peer's, "" without a network.
    """

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        self._connection: messages.Connection[Envelope] = messages.Connection(
            sock, receives=Envelope, peer=peer
        )
        self._sending = threading.Lock()
        self.heard_s = time.monotonic()
        self.leaving = False
        self.ends = ("", "")
        with contextlib.suppress(OSError):  # the peer may be gone by now
            if sock.family != socket.AF_UNIX:
                self.ends = (sock.getsockname()[0], sock.getpeername()[0])

    def send(self, number: int, message: Message) -> None:
        """Send a message; safe beside another thread that sends. Raises ConnectionClosed."""
        try:
            with self._sending:
                self._connection.send(Envelope(number, message), (), _SEND_S)
        except messages.ConnectionTimeout as error:
            raise messages.ConnectionClosed(str(error)) from error

    def poll(self) -> Envelope | None:
        """Return the next message, if any, but Heartbeat and Leaving. Raises ConnectionClosed."""
        while True:
            try:
                envelope, _ = self._connection.receive(0)
            except messages.ConnectionTimeout:
                return None
            self.heard_s = time.monotonic()
            if isinstance(envelope.message, Leaving):
                self.leaving = True
            elif not isinstance(envelope.message, Heartbeat):
                return envelope

    def has_ended(self) -> bool:
        """Return whether the peer is gone or leaving; its last messages are dropped."""
        while True:
            try:
                if self.poll() is None:
                    return self.leaving
            except messages.ConnectionClosed:
                return True
            except MeasurementError:
                continue

    def has_died(self) -> bool:
        """Return whether the peer is gone without a word; its last messages are dropped."""
        return self.has_ended() and not self.leaving

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _array(kind: Any, data: bytes) -> Any:
    """Return an array, which crosses as bytes: records of lanes, or stamps."""
    (scalar,) = get_args(get_args(kind)[1])
    return np.frombuffer(data, RECORD if scalar is np.void else scalar)


class Backoff:
    """Naps between polls: none while messages follow each other, then longer and longer."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        wake_promptly()

    def reset(self) -> None:
        """Note the arrival of a message: the next may follow at once."""
        self._since_s = time.monotonic()

    def nap(self, longest_s: float = _LONG_NAP_S) -> None:
        """Let other processes run for a while."""
        waited_s = time.monotonic() - self._since_s
        if waited_s < _HOT_S:
            os.sched_yield()
            time.sleep(_SHORT_NAP_S)
        else:
            time.sleep(min(longest_s, _NAP_S) if waited_s < _WARM_S else longest_s)


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
