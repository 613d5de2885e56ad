"""What the controller and the agents of hosts say to each other.

Every message travels in an Envelope. An answer carries the number of what it answers, so that one
that comes after its question was given up is told apart.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import numpy as np

from tccl_profiler.cluster.facts import HostFacts
from tccl_profiler.execution import Outcome, Timing
from tccl_profiler.messages import Channel, ChannelClosed, ChannelTimeout, Endpoint, Pinged
from tccl_profiler.pool import Memory
from tccl_profiler.program import Link, Work
from tccl_profiler.shared_memory import RECORD
from tccl_py.errors import MeasurementError
from tccl_py.rank_processes.tasks import RankOutput, Task


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say what this host is; `interfaces` are those to use, none are those that it has."""

    backend: str
    devices: int | None
    interfaces: tuple[str, ...]


class Described(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a host is."""

    facts: HostFacts


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start workers for these devices, GPUs and NICs, by id; for none just end those there are."""

    devices: tuple[str, ...]
    memory: Memory | None = None


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The workers are there: how many lanes each device runs, and what is to be said of them."""

    lanes: Mapping[str, int]
    complaints: tuple[str, ...] = ()


class Restart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start all workers anew, with these in their environment."""

    variables: Mapping[str, str]


class PingHost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for the host's time."""


class HostTime(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The host's CLOCK_MONOTONIC when it was asked, in nanoseconds."""

    at_ns: int


class PingDevices(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compare the clocks of the host's devices with its own, with so many pings each."""

    count: int


class DevicesPinged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Each device's clock against the host's, by id."""

    pinged: Mapping[str, Pinged]


class AskLinks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say which links are alive."""


class Links(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Links that are alive on this host."""

    links: tuple[Link, ...]


class Listen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Wait for senders of these links, at the NICs that receive."""

    links: tuple[Link, ...]


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where the senders of each link are waited for."""

    endpoints: tuple[tuple[Link, Endpoint], ...]


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Connect the sending NICs of these links."""

    endpoints: tuple[tuple[Link, Endpoint], ...]


class Accept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take in the senders of these links."""

    links: tuple[Link, ...]


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run this host's share of a program; Release follows for each repeat."""

    work: Work
    timing: Timing


class Resident(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All lanes of a repeat are there and wait; those of the repeat before are done."""

    repeat: int


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Release a repeat when this host's CLOCK_MONOTONIC is `at_ns`."""

    repeat: int
    at_ns: int


class PackedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """An Outcome as bytes: arrays of RECORD, and of stamps."""

    records: Mapping[str, bytes]
    stamps: Mapping[str, tuple[bytes, ...]]


class Ran(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What all repeats did; `early_ns` is how long before its time each Release was read, and
    `late_ns` how long after its time each flag was stored."""

    outcomes: tuple[PackedOutcome, ...]
    early_ns: tuple[int, ...]
    late_ns: tuple[int, ...]


class AskSurroundings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say what the environment is here, and which of some modules programs would not find."""

    modules: tuple[str, ...] = ()


class Surroundings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment of programs that are started here, and the modules that they lack."""

    variables: Mapping[str, str]
    lacks: tuple[str, ...] = ()


class OpenMeetings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Open sockets where the ranks of the next jobs meet, which will run at once; the first of this
    host's ranks of each gets its own."""

    count: int


class MeetingsOpen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """They are open at these ports of these addresses."""

    addresses: tuple[str, ...]
    ports: tuple[int, ...]


class RunRanks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run ranks as fresh processes to their end, those of several jobs at once."""

    tasks: tuple[Task, ...]


class RanksLeft(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """They have ended well."""

    left: tuple[RankOutput, ...]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give up what was begun; the answer is Aborted, or what crossed with this."""


class Aborted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It was given up."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was asked for has been done."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It could not be done. `kind` is `lost` (workers), `link`, `refused`, or `input`."""

    kind: str
    what: str


class End(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give everything back and end with this exit code."""

    code: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything was given back."""


class Rest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The pings are over."""


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This rank was told to end by its launcher, and is not to blame."""


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Somebody is there."""


Message = (
    Describe
    | Described
    | Open
    | Opened
    | Restart
    | PingHost
    | HostTime
    | PingDevices
    | DevicesPinged
    | AskLinks
    | Links
    | Listen
    | Listening
    | Connect
    | Accept
    | Begin
    | Resident
    | Release
    | Ran
    | AskSurroundings
    | Surroundings
    | OpenMeetings
    | MeetingsOpen
    | RunRanks
    | RanksLeft
    | Abort
    | Aborted
    | Done
    | Failed
    | End
    | Ended
    | Rest
    | Leaving
    | Beat
)


class Envelope(msgspec.Struct, frozen=True):
    """A message and the number of the question that it asks, belongs to, or answers."""

    number: int
    message: Message


def packed(outcome: Outcome) -> PackedOutcome:
    """An outcome's arrays as bytes."""
    return PackedOutcome(
        records={name: rows.tobytes() for name, rows in outcome.records.items()},
        stamps={name: tuple(r.tobytes() for r in rows) for name, rows in outcome.stamps.items()},
    )


def unpacked(outcome: PackedOutcome) -> Outcome:
    """The outcome that `packed` made bytes of."""
    return Outcome(
        records={name: np.frombuffer(rows, RECORD) for name, rows in outcome.records.items()},
        stamps={
            name: tuple(np.frombuffer(row, np.uint64) for row in rows)
            for name, rows in outcome.stamps.items()
        },
    )


# How the controller and one agent exchange messages, whatever carries them.


BEAT_S = 1.0
"""How often each side says that it is there."""
_SEND_S = 5.0
"""How long a peer's socket may be full before the peer is given up."""
_HOT_S, _WARM_S = 0.003, 0.5
_SHORT_NAP_S, _NAP_S, _LONG_NAP_S = 20e-6, 1e-3, 5e-3
_PR_SET_TIMERSLACK = 29


class PeerGone(MeasurementError):  # noqa: N818 - says what happened
    """The peer has closed its end or has died."""


class Messenger(Protocol):
    """One end of the connection between the controller and a rank's agent.

    `heard_s` is when anything last came from the peer, on this process's CLOCK_MONOTONIC; `leaving`
    whether it has said that its launcher tells it to end.
    """

    heard_s: float
    leaving: bool

    def send(self, envelope: Envelope) -> None:
        """Have a message carried; safe beside another thread that sends.

        Raises:
            PeerGone: nobody is there.
        """

    def poll(self) -> Envelope | None:
        """The next message if one is there; that the peer lives or leaves is heard and left out.

        Raises:
            PeerGone: nobody is there, and all that was sent has been received.
            MeasurementError: the message cannot be read, and is dropped.
        """

    def close(self) -> None:
        """Give the connection back."""


class ChannelMessenger:
    """A Messenger over a Unix socket: to another process of this host, or to a thread in tests."""

    def __init__(self, channel: Channel[Envelope]) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self.heard_s = time.monotonic()
        self.leaving = False

    def send(self, envelope: Envelope) -> None:
        """As Messenger."""
        try:
            with self._sending:
                self._channel.send(envelope, (), _SEND_S)
        except (ChannelClosed, ChannelTimeout) as error:
            raise PeerGone(str(error)) from error

    def poll(self) -> Envelope | None:
        """As Messenger."""
        while True:
            try:
                envelope, _ = self._channel.receive(0)
            except ChannelTimeout:
                return None
            except ChannelClosed as error:
                raise PeerGone(str(error)) from error
            self.heard_s = time.monotonic()
            if isinstance(envelope.message, Leaving):
                self.leaving = True
            elif not isinstance(envelope.message, Beat):
                return envelope

    def close(self) -> None:
        """As Messenger."""
        self._channel.close()


class Naps:
    """Naps between looks: none while messages follow each other, longer the longer none comes."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        # Naps of 20 us would take 70 us with the usual slack of timers.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)

    def begin(self) -> None:
        """Something came: the next may follow at once."""
        self._since_s = time.monotonic()

    def nap(self, longest_s: float = _LONG_NAP_S) -> None:
        """Let others run for a while."""
        waited_s = time.monotonic() - self._since_s
        if waited_s < _HOT_S:
            os.sched_yield()
            time.sleep(_SHORT_NAP_S)
        elif waited_s < _WARM_S:
            time.sleep(min(longest_s, _NAP_S))
        else:
            time.sleep(longest_s)


class Heart:
    """A thread that says now and then that this process is there, until it is stopped.

    Args:
        beat: says so to all who are to know; what it raises is no concern of this thread.
        every_s: how often.
    """

    def __init__(self, beat: Callable[[], None], every_s: float = BEAT_S) -> None:
        self._beat, self._every_s = beat, every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Beat no more; returns when the last one is over."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._beat()
            except MeasurementError:
                # Who waits for the peer will hear of it and say so.
                continue


def beat_to(messenger: Messenger) -> None:
    """Send one beat."""
    messenger.send(Envelope(0, Beat()))


def has_died(messenger: Messenger) -> bool:
    """Whether a peer is gone without a word; what it has still said is dropped."""
    while True:
        try:
            if messenger.poll() is None:
                return False
        except PeerGone:
            return not messenger.leaving
        except MeasurementError:
            # What cannot be read is dropped as well.
            continue
