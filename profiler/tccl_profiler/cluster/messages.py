"""Messages between the controller and host agents, and the waits of both.

An answer carries the question's number, so that late answers are recognised. Neither sending nor
polling waits for a peer: waits are made of naps, with a limit, and watch all peers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

from tccl_profiler import messages
from tccl_profiler.cluster.facts import HostFacts
from tccl_profiler.execution import RunResult, RunSpec
from tccl_profiler.linux import precise_sleeps
from tccl_profiler.program import HostProgram
from tccl_profiler.shared_memory import RECORD
from tccl_py.errors import MeasurementError
from tccl_py.rank_processes.rank import Rendezvous
from tccl_py.rank_processes.tasks import RankOutput, Task

HEARTBEAT_S = 1.0
_SEND_S = 5.0  # how long a peer's socket may be full before the peer is given up
_HOT_S, _WARM_S = 0.003, 0.5
_SHORT_NAP_S, _NAP_S, _LONG_NAP_S = 20e-6, 1e-3, 5e-3


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Discover this host, with these interfaces as NICs, or its own; answered by HostFacts."""

    backend: str
    devices: int | None
    interfaces: tuple[str, ...]


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End all workers, and start workers for these GPUs and NICs with these variables of NCCL."""

    devices: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The workers are ready: lanes by device, and warnings about the devices."""

    lanes: Mapping[str, int]
    warnings: tuple[str, ...] = ()


class PingHost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read the host's clock; `more` says that another one follows."""

    more: bool


class HostTime(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The host's CLOCK_MONOTONIC, in nanoseconds."""

    at_ns: int


class DevicesPinged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Each device's clock against the host's."""

    pinged: Mapping[str, messages.Pinged]


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run this host's share of a program; Release follows for each repeat."""

    program: HostProgram
    spec: RunSpec


class Resident(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All lanes of a repeat are resident; those of the repeat before have ended."""

    repeat: int


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Release a repeat when this host's CLOCK_MONOTONIC is `at_ns`."""

    repeat: int
    at_ns: int


class Ran(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All repeats' results, and how long before its time each Release was read."""

    results: tuple[RunResult, ...]
    early_ns: tuple[int, ...]


class AskEnvironment(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Return the environment here, and which of these modules are not installed."""

    modules: tuple[str, ...] = ()


class Environment(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment of processes that are started here, and the modules they lack."""

    variables: Mapping[str, str]
    lacks: tuple[str, ...] = ()


class OpenRendezvous(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Open a listening socket for each of the next concurrent rank jobs."""

    count: int


class RendezvousOpen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The addresses and port of each of these sockets."""

    meetings: tuple[Rendezvous, ...]


class RunRanks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run ranks as fresh processes to their end, those of several jobs at once."""

    tasks: tuple[Task, ...]


class RanksLeft(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The ranks have ended well."""

    left: tuple[RankOutput, ...]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give up the run; answered by Done, or by an earlier answer under way."""


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This rank ends as it was told, by the controller or its launcher, and is not to blame."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The sender lives."""


Request = Describe | Open | PingHost | Begin | Release | Abort
Answer = HostFacts | Opened | HostTime | DevicesPinged | Resident | Ran
RankMessage = AskEnvironment | Environment | OpenRendezvous | RendezvousOpen | RunRanks | RanksLeft
WorkerMessage = messages.Ping | messages.LinkStep | messages.LinkEnds | messages.Stop
Outcome = messages.Done | messages.Failed
Kind = TypeVar("Kind", bound=msgspec.Struct)
Message = Request | Answer | RankMessage | WorkerMessage | Outcome | Leaving | Heartbeat


def checked(answers: Mapping[str, Message], kind: type[Kind]) -> dict[str, Kind]:
    """Return the answers, all of this type, or raise the failure that says most, with its host."""
    failed = {
        host: answer for host, answer in answers.items() if isinstance(answer, messages.Failed)
    }
    for wanted in ("input", "lost", "refused", "link"):
        for host, failure in failed.items():
            if failure.kind == wanted:
                named = host in failure.what
                raise failure.error(failure.what if named else f"host {host}: {failure.what}")
    found: dict[str, Kind] = {}
    for host, answer in answers.items():
        if not isinstance(answer, kind):
            raise messages.WorkerLost(f"host {host}: answered {type(answer).__name__} out of turn")
        found[host] = answer
    return found


class Envelope(msgspec.Struct, frozen=True):
    """A message and the number of the question that it asks, belongs to, or answers."""

    number: int
    message: Message


class Messenger:
    """One end of the connection between the controller and a rank's agent; owns the socket.

    `heard_s` is when anything last came; `leaving` that the peer was told to end.
    """

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        self._connection: messages.Connection[Envelope] = messages.Connection(
            sock, receives=Envelope, peer=peer, decoded=_array
        )
        self._sending = threading.Lock()
        self.heard_s = time.monotonic()
        self.leaving = False

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
    """Return an array of a RunResult, which crosses as bytes: records, or stamps."""
    (scalar,) = get_args(get_args(kind)[1])
    return np.frombuffer(data, RECORD if scalar is np.void else scalar)


class Backoff:
    """Naps between polls: none while messages follow each other, then longer and longer."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        precise_sleeps()

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
