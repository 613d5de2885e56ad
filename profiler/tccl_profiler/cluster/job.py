"""A job of several ranks: who controls, who is the agent of which host, and how all of them end.

Rank 0 is the controller. The lowest rank of each host is that host's agent, the others wait; on
the controller's own host the agent is a process of its own, so that the controller's work does not
disturb what it measures. Hosts are told apart by what gethostname(2) says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

import msgspec

from tccl_profiler.channel import Channel
from tccl_profiler.cluster.agent import Agent, ControllerGone, Told, quietly
from tccl_profiler.cluster.agents import has_died
from tccl_profiler.cluster.meeting import CONTROLLER, Hello, Meeting
from tccl_profiler.cluster.messages import Beat, End, Ended, Envelope
from tccl_profiler.cluster.messenger import ChannelMessenger, Heart, Naps, PeerGone
from tccl_py.children import child_command, child_environment, search_path
from tccl_py.errors import InputError, SourceLostError, TcclError
from tccl_py.model.cluster import check_host_name

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
