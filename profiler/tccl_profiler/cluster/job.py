"""A job of several ranks: who controls, who is the agent of which host, and how all of them end.

Rank 0 is the controller. The lowest rank of each host is that host's agent, the others wait; on
the controller's own host the agent is a process of its own, so that the controller's work does not
disturb what it measures. Hosts are told apart by what gethostname(2) says.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import msgspec

from tccl_profiler.cluster.agent import Agent, ControllerGone, Told, quietly
from tccl_profiler.cluster.facts import addresses, listening
from tccl_profiler.cluster.messages import (
    Beat,
    ChannelMessenger,
    End,
    Ended,
    Envelope,
    Heart,
    Naps,
    PeerGone,
    has_died,
)
from tccl_profiler.messages import Channel
from tccl_py.children import child_command, child_environment, search_path
from tccl_py.errors import InputError, MeasurementError, SourceLostError, TcclError
from tccl_py.model.cluster import check_host_name

# How the ranks of a job meet: by what launched them they learn the controller's address, then each
# connects to it. From then on they need no launcher's library.


CONTROLLER = 0
HELLO_S = 60.0
"""How long ranks may take to be there: the first has waited for the last to load its libraries."""
_CONNECT_S = 20.0
_TRY_S = 3.0
_SPARE_DESCRIPTORS = 256
_PROC = Path("/proc")


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Who a rank is: its host's name, and what tells machines of one name apart."""

    host: str
    machine: str


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the controller waits for connections, and the word that they begin with."""

    addresses: tuple[str, ...]
    port: int
    word: bytes


class Post(Protocol):
    """What carries bytes between ranks at the beginning: MPI, or what stands for it in tests."""

    rank: int
    size: int

    def send(self, rank: int, data: bytes) -> None:
        """Begin to send."""

    def poll(self, rank: int) -> bytes | None:
        """The next message from a rank, if one is there."""

    def finish(self) -> None:
        """End it; all ranks do."""


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that have met: who they are, and the connections to them; on other ranks than the
    controller's, the connection to it alone."""

    rank: int
    size: int
    hellos: Mapping[int, Hello]
    channels: Mapping[int, Channel[Envelope]]


def own_hello() -> Hello:
    """Who this rank is. The name is what gethostname(2) says, which a UTS namespace may have of its
    own; a network namespace is a machine here."""
    machine = ""
    with contextlib.suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot}/{(_PROC / 'self/ns/net').stat().st_ino}"
    return Hello(host=socket.gethostname(), machine=machine)


def met(post: Post, *, hello_s: float = HELLO_S) -> Meeting:
    """Meet the other ranks, and end what carried the messages.

    Raises:
        InputError: a rank is not there, or cannot connect; the controller names its host.
        MeasurementError: the controller cannot be reached from here.
    """
    if post.rank == CONTROLLER:
        meeting = _gathered(post, hello_s)
    else:
        post.send(CONTROLLER, msgspec.msgpack.encode(own_hello()))
        data = _waited(post, CONTROLLER, time.monotonic() + 2 * hello_s)
        if data is None:
            raise MeasurementError(f"the controller has said nothing for {2 * hello_s:g} s")
        sock = _connected(msgspec.msgpack.decode(data, type=Invitation), post.rank)
        channel: Channel[Envelope] = Channel(sock, receives=Envelope, peer="the controller")
        meeting = Meeting(rank=post.rank, size=post.size, hellos={}, channels={CONTROLLER: channel})
    post.finish()
    return meeting


def _waited(post: Post, rank: int, until: float) -> bytes | None:
    while time.monotonic() < until:
        data = post.poll(rank)
        if data is not None:
            return data
        time.sleep(0.001)
    return None


def _gathered(post: Post, hello_s: float) -> Meeting:
    """The controller's side: hear all, invite all, let all in."""
    hellos = {CONTROLLER: own_hello()}
    until = time.monotonic() + hello_s
    for rank in range(1, post.size):
        data = _waited(post, rank, max(until, time.monotonic() + 0.01))
        if data is None:
            raise InputError(
                "this MPI job",
                f"rank {rank} has said nothing for {hello_s:g} s",
                "start one tccl command with the same arguments on all hosts",
            )
        hellos[rank] = msgspec.msgpack.decode(data, type=Hello)
    channels: dict[int, Channel[Envelope]] = {}
    if post.size > 1:
        _allow_descriptors(post.size)
        with listening() as listener:
            invitation = Invitation(
                addresses=addresses(),
                port=listener.getsockname()[1],
                word=secrets.token_bytes(16),
            )
            for rank in range(1, post.size):
                post.send(rank, msgspec.msgpack.encode(invitation))
            channels = _let_in(listener, post, invitation, hellos)
    return Meeting(rank=CONTROLLER, size=post.size, hellos=hellos, channels=channels)


def _allow_descriptors(ranks: int) -> None:
    """A connection to every rank, and some for the rest, as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ranks + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _let_in(
    listener: socket.socket, post: Post, invitation: Invitation, hellos: Mapping[int, Hello]
) -> dict[int, Channel[Envelope]]:
    """Accept a connection of every rank; one that does not know the word is dropped."""
    until, found = time.monotonic() + _CONNECT_S, dict[int, Channel[Envelope]]()
    while len(found) < post.size - 1:
        # What was sent may need this side's help to arrive.
        post.poll(CONTROLLER)
        listener.settimeout(0.05)
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            if time.monotonic() < until:
                continue
            rank = next(rank for rank in range(1, post.size) if rank not in found)
            raise InputError(
                f"host {hellos[rank].host}",
                f"its rank {rank} could not connect to host {hellos[CONTROLLER].host} at "
                f"{', '.join(invitation.addresses)}",
                "let the hosts of a job reach each other over TCP",
            ) from None
        caller = _introduced(sock, invitation.word)
        if caller is None or caller in found or not 1 <= caller < post.size:
            sock.close()
            continue
        found[caller] = Channel(
            _tuned(sock), receives=Envelope, peer=f"rank {caller} on host {hellos[caller].host}"
        )
    return found


def _introduced(sock: socket.socket, word: bytes) -> int | None:
    """The rank that a connection says it is of, if it knows the word."""
    sock.settimeout(_TRY_S)
    try:
        said = b""
        while len(said) < len(word) + 4:
            more = sock.recv(len(word) + 4 - len(said))
            if not more:
                return None
            said += more
    except OSError:
        return None
    if not secrets.compare_digest(said[: len(word)], word):
        return None
    return int.from_bytes(said[len(word) :], "big")


def _connected(invitation: Invitation, rank: int) -> socket.socket:
    """Connect to the first of the controller's addresses that answers.

    Raises:
        MeasurementError: none does.
    """
    for address in invitation.addresses:
        try:
            sock = socket.create_connection((address, invitation.port), _TRY_S)
            sock.sendall(invitation.word + rank.to_bytes(4, "big"))
        except OSError:
            continue
        return _tuned(sock)
    raise MeasurementError(f"the controller is not reached at {', '.join(invitation.addresses)}")


def _tuned(sock: socket.socket) -> socket.socket:
    """Small messages leave at once, and a host that has vanished is noticed."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


NOT_USABLE, INTERRUPTED = 2, 130
_GOODBYE_S = 10.0
"""How long agents may take to end their workers."""
_LAST_WORDS_S = 0.1
"""A launcher that ends a job may wait for less than half a second before it kills what is left."""


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A host of the job: its name and its ranks, the lowest first."""

    host: str
    ranks: tuple[int, ...]


class Job:
    """This rank's part in a job; a context manager, which ends the job where the controller leaves.

    Args:
        meeting: the ranks, met.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self._hellos = meeting.hellos
        self._ranks = {rank: ChannelMessenger(one) for rank, one in meeting.channels.items()}
        self._seats: tuple[Seat, ...] = ()
        self._local: tuple[subprocess.Popen[bytes], ChannelMessenger] | None = None
        self._heart = Heart(self._beat)
        self._usual: Any = signal.SIG_DFL
        self.broken = False

    @property
    def is_controller(self) -> bool:
        """Whether this rank is the one that measures by the others."""
        return self.rank == CONTROLLER

    def __enter__(self) -> Job:
        if self.is_controller:
            self._usual = signal.signal(signal.SIGTERM, self._told_to_end)
            self._heart.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        code = _code_of(error)
        try:
            if self.is_controller:
                self._end_all(code)
        finally:
            self._heart.stop()
            if self.is_controller:
                # A launcher that ends a broken job waits for what is being said.
                signal.signal(signal.SIGTERM, signal.SIG_IGN if self.broken else self._usual)
            # Other ranks end when their connection does, with a code that has the launcher end what
            # is left. Where something is to be said first, connections end with this process.
            if code == 0 or not self.is_controller:
                for messenger in self._ranks.values():
                    messenger.close()

    # The controller's side

    @property
    def seats(self) -> tuple[Seat, ...]:
        """The hosts, in the order of their lowest ranks; asked on the controller.

        Raises:
            InputError: a name that fits no file or place, or that two machines have.
        """
        if not self._seats:
            self._seats = _seats(self._hellos)
        return self._seats

    def messenger(self, host: str) -> ChannelMessenger:
        """The connection to a host's agent."""
        (rank,) = (seat.ranks[0] for seat in self.seats if seat.host == host)
        return self._local_agent() if rank == CONTROLLER else self._ranks[rank]

    def _local_agent(self) -> ChannelMessenger:
        """This host's agent, which is started by this."""
        if self._local is None:
            self._local = agent_process()
        return self._local[1]

    def _messengers(self) -> list[ChannelMessenger]:
        return [*self._ranks.values(), *([self._local[1]] if self._local else [])]

    def _beat(self) -> None:
        for messenger in self._messengers():
            with contextlib.suppress(PeerGone):
                messenger.send(Envelope(0, Beat()))

    def _end_all(self, code: int) -> None:
        """Tell all ranks to end, and wait until they have ended their workers."""
        waiting = self._messengers()
        for messenger in waiting:
            with contextlib.suppress(PeerGone):
                messenger.send(Envelope(0, End(code=code)))
        if self.broken:
            # The launcher is about to kill this process, which has something to say before. Agents
            # end by themselves: they were told, and their connection ends.
            return
        until, naps = time.monotonic() + _GOODBYE_S, Naps()
        while waiting and time.monotonic() < until:
            waiting = [one for one in waiting if not _has_ended(one)]
            naps.nap(1e-3)
        if self._local is not None:
            process, messenger = self._local
            messenger.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.kill()
            process.wait()

    def _told_to_end(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The launcher ends the job, because a rank has died or because it was told to itself.

        A rank that lives is told as well, and says so before its connection ends.

        Raises:
            SourceLostError: it names the hosts of ranks that have died.
            KeyboardInterrupt: none has.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.broken:
            # What happened is known, and is being said.
            return
        self.broken = True
        # A connection ends with its rank, and that was before the launcher heard of it.
        time.sleep(_LAST_WORDS_S)
        dead = [rank for rank, messenger in self._ranks.items() if has_died(messenger)]
        if not dead:
            raise KeyboardInterrupt
        raise SourceLostError(
            "; ".join(
                f"host {self._hellos[rank].host}: its rank {rank} has died, and the launcher ends "
                "the job"
                for rank in dead
            )
        )

    # The other ranks' side

    def serve(self) -> int:
        """Do what the controller says until it ends; the exit code that it ends with.

        Nothing is printed. If the controller is gone, so is this process soon.
        """
        with quietly():
            try:
                return Agent(self._ranks[CONTROLLER]).serve()
            except ControllerGone:
                return NOT_USABLE
            except Told:
                return 128 + signal.SIGTERM


def agent_process(name: str | None = None) -> tuple[subprocess.Popen[bytes], ChannelMessenger]:
    """Start an agent on this host, in a process of its own, and a connection to it.

    Args:
        name: what it is to call this host; None is what gethostname(2) says.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    arguments = [str(theirs.fileno()), *([] if name is None else [name])]
    with theirs:
        process = subprocess.Popen(
            child_command("tccl_profiler.cluster.agent", *arguments),
            pass_fds=(theirs.fileno(),),
            env=child_environment({**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    who = "this host's agent" if name is None else f"the agent of host {name}"
    channel: Channel[Envelope] = Channel(ours, receives=Envelope, peer=who)
    return process, ChannelMessenger(channel)


def _seats(hellos: Mapping[int, Hello]) -> tuple[Seat, ...]:
    """The hosts of the ranks.

    Raises:
        InputError: a name that is unfit, or that two machines have.
    """
    ranks: dict[str, list[int]] = {}
    machines: dict[str, str] = {}
    for rank, one in sorted(hellos.items()):
        check_host_name(one.host, where=f"host {one.host[:40]!r}, rank {rank}")
        if machines.setdefault(one.host, one.machine) != one.machine:
            raise InputError(
                f"host {one.host}",
                f"is the name of two machines, of ranks {ranks[one.host][0]} and {rank}",
                "give each a name of its own (hostnamectl)",
            )
        ranks.setdefault(one.host, []).append(rank)
    return tuple(Seat(host=host, ranks=tuple(found)) for host, found in ranks.items())


def _has_ended(messenger: ChannelMessenger) -> bool:
    """Whether an agent says that it has ended, or is gone."""
    try:
        envelope = messenger.poll()
    except TcclError:
        return True
    return envelope is not None and isinstance(envelope.message, Ended)


def _code_of(error: BaseException | None) -> int:
    """The exit code of the command that an exception passes through."""
    if error is None:
        return 0
    if isinstance(error, TcclError | OSError):
        return NOT_USABLE
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    code = getattr(error, "exit_code", getattr(error, "code", 1))
    return code if isinstance(code, int) else 1
