"""A host agent: serves the controller's requests by a pool of workers of this host.

On the controller's host it is the process `tccl_profiler.cluster.agent DESCRIPTOR [NAME]`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from tccl_profiler import linux
from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.facts import HostFacts, addresses, host_facts, listening
from tccl_profiler.execution import RunResult
from tccl_profiler.messages import (
    ConnectionClosed,
    DeviceSpec,
    Done,
    Failed,
    LinkEnds,
    LinkStep,
    Ping,
    Stop,
)
from tccl_profiler.pool import Pool
from tccl_profiler.program import is_nic, local
from tccl_profiler.session import pool_of
from tccl_profiler.watch import warnings, watching
from tccl_py.children import search_path
from tccl_py.errors import MeasurementError, TcclError
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.rank import Rendezvous
from tccl_py.rank_processes.tasks import Task, run_tasks

SILENCE_S = 30.0  # the controller is lost after so long without a message
_RELEASE_S = 10.0  # lanes that wait to be released give up after as long; see Timeouts
_STARTED_S = 200e-6  # time from the release of lanes to their start
_LAST_S = 15.0  # how long an agent that has ended its workers waits for the end of the controller
_BOUND = (
    "the launcher bound this process to {before} of {now} CPUs; measured with all, "
    "for NCCL's threads need them: start jobs unbound as well (mpirun --bind-to none)"
)
_TERMINATED = 128 + signal.SIGTERM


class ControllerLost(Exception):  # noqa: N818 - says what happened
    """The controller is gone."""


class _Aborted(Exception):  # noqa: N818 - says what happened
    """The controller gives up the current run."""


class Terminated(BaseException):
    """The launcher tells this process to end."""


class Agent:
    """Serves one controller; it owns this host's pool. `name` None is gethostname(2)."""

    def __init__(
        self,
        messenger: say.Messenger,
        *,
        name: str | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._messenger = messenger
        self._name = socket.gethostname() if name is None else name
        self._now_ns = now_ns
        self._silence_s = silence_s
        self._backend = ""
        self._interfaces: tuple[str, ...] = ()
        self._facts: HostFacts | None = None
        self._pool: Pool | None = None
        self._ranks = RankTasks()
        self._stopping: say.Envelope | None = None
        self._backoff = say.Backoff()
        self._prioritised = False
        self._bound = (1, 1)
        # What each message asks for; a request without an answer of its own is Done.
        self._does: dict[type[say.Message], Callable[[Any], say.Message | None]] = {
            say.PingHost: lambda _: say.HostTime(at_ns=self._now_ns()),
            say.Describe: self._describe,
            say.Open: self._open,
            Ping: lambda ping: say.DevicesPinged(pinged=self._opened().ping(ping.count)),
            LinkStep: lambda step: take_step(self._opened(), step),
            say.AskEnvironment: lambda asked: self._ranks.environment(asked.modules),
            say.OpenRendezvous: lambda asked: self._ranks.open_rendezvous(asked.count),
            # The run that these are about has ended by itself.
            say.Abort: lambda _: None,
            say.Release: lambda _: None,
        }

    def serve(self) -> int:
        """Carry out requests until told to stop; return the exit code. Raises ControllerLost."""
        try:
            with say.heartbeats(lambda: self._messenger.send(0, say.Heartbeat())):
                while True:
                    envelope = self._next()
                    if isinstance(envelope.message, Stop):
                        self.close()
                        self._answer(0, say.Leaving())
                        self._last()
                        return envelope.message.code
                    self._answer(envelope.number, self._done(envelope))
        except MeasurementError as error:
            # Closed, or a message that cannot be read or sent: the next would make no sense.
            raise ControllerLost(str(error)) from error
        except Terminated:
            # First of all: the controller has a moment to find out who is not to blame.
            with contextlib.suppress(ConnectionClosed):
                self._answer(0, say.Leaving())
            raise
        finally:
            # From now on it ends by itself. (Threads, as in tests, have no signals.)
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.close()

    def _last(self) -> None:
        """Wait until the controller has ended: a launcher ends a job as soon as one rank exits
        with a code, and the controller has still to say why.
        """
        until = time.monotonic() + _LAST_S
        with contextlib.suppress(MeasurementError):
            while time.monotonic() < until:
                self._messenger.poll()
                self._backoff.nap()

    def close(self, *, hurry: bool = False) -> None:
        """End the workers; `hurry` kills workers that do not end at once."""
        self._ranks.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(hurry=hurry)

    def _polled(self) -> say.Envelope | None:
        envelope = self._messenger.poll()
        if envelope is None and time.monotonic() - self._messenger.heard_s > self._silence_s:
            raise ControllerLost(f"the controller has said nothing for {self._silence_s:g} s")
        return envelope

    def _next(self, limit_s: float | None = None) -> say.Envelope:
        if self._stopping is not None:
            return self._stopping
        until = None if limit_s is None else time.monotonic() + limit_s
        while (envelope := self._polled()) is None:
            if until is not None and time.monotonic() > until:
                raise MeasurementError(f"host {self._name}: not told to go on within {limit_s:g} s")
            self._backoff.nap()
        self._backoff.reset()
        # While pings follow each other, this thread has priority: its delays are errors.
        pinging = isinstance(envelope.message, say.PingHost) and envelope.message.more
        if pinging and not self._prioritised:
            linux.set_fifo_priority((0,), linux.AGENT_PRIORITY)
        elif self._prioritised and not pinging:
            linux.reset_priority((0,))
        self._prioritised = pinging
        return envelope

    def _answer(self, number: int, message: say.Message) -> None:
        self._backoff.reset()
        self._messenger.send(number, message)

    def _done(self, envelope: say.Envelope) -> say.Message:
        number, message = envelope.number, envelope.message
        try:
            if isinstance(message, say.Begin):
                return self._run(number, message)
            if isinstance(message, say.RunRanks):
                return self._ranks.run(message.tasks, lambda: self._look(number))
            does = self._does.get(type(message))
            if does is None:
                raise MeasurementError(f"host {self._name}: asked {type(message).__name__}")
            return does(message) or Done()
        except TcclError as error:
            return Failed.of(error)
        except _Aborted:
            return Done()

    def _describe(self, message: say.Describe) -> say.Message:
        self._backend, self._interfaces = message.backend, message.interfaces
        if message.backend == "cuda":
            # Cores stand for devices on the other backend, and the launcher deals them out.
            self._bound = linux.leave_binding()
        self._facts = host_facts(
            self._name,
            backend=message.backend,
            devices=message.devices,
            interfaces=message.interfaces,
        )
        return self._facts

    def _opened(self) -> Pool:
        if self._pool is None:
            raise MeasurementError(f"host {self._name}: its workers were not started")
        return self._pool

    def _open(self, message: say.Open) -> say.Message:
        self.close(hurry=bool(message.devices))
        if not message.devices:
            return say.Opened(lanes={})
        if self._facts is None:
            raise MeasurementError(f"host {self._name}: asked to start workers for nothing known")
        variables = dict(message.variables)
        if variables:
            # It tells hosts apart that share a kernel.
            variables["NCCL_HOSTID"] = self._name
            if self._interfaces:
                variables["NCCL_SOCKET_IFNAME"] = "=" + ",".join(self._interfaces)
        nics = {}
        for name in filter(is_nic, message.devices):
            nic = self._facts.addresses[int(name[1:])]
            nics[name] = DeviceSpec(device=name, address=nic.address, interface=nic.name)
        machine, names = self._facts.machine, message.devices
        pool = pool_of(machine, self._backend, names, nics=nics, variables=variables)
        pool.start()
        self._pool = pool
        return say.Opened(lanes=pool.lanes, warnings=self._warnings(names))

    def _warnings(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        gpus = [int(name[1:]) for name in devices if name.startswith("G")]
        if self._backend != "cuda" or not gpus:
            return ()
        with watching(gpus, self._opened().pids) as look:
            found = warnings(look(), loaded=False)
        before, now = self._bound
        return (*found, _BOUND.format(before=before, now=now)) if before < now else found

    # One run

    def _run(self, number: int, begin: say.Begin) -> say.Ran:
        results: list[RunResult] = []
        early: list[int] = []
        pool = self._opened()
        look = functools.partial(self._look, number)
        with pool.begin(begin.program, begin.spec, meanwhile=look) as execution:
            for repeat in range(begin.spec.repeats):
                execution.wait_resident(repeat)
                lanes = linux.threads_of(pool.pids)
                with linux.realtime():
                    self._answer(number, say.Resident(repeat=repeat))
                    release = self._release(number, repeat)
                    # Lanes not before: others' lanes have still to come, perhaps on these cores.
                    with linux.realtime(lanes):
                        early.append(release.at_ns - self._now_ns())
                        execution.release(repeat, at_ns=release.at_ns)
                        time.sleep(_STARTED_S)
                results.append(execution.collect(repeat))
            execution.finish()
        return say.Ran(results=tuple(results), early_ns=tuple(early))

    def _release(self, number: int, repeat: int) -> say.Release:
        while True:
            envelope = self._next(_RELEASE_S)
            self._heed(envelope, number)
            message, meant = envelope.message, envelope.number == number
            # A release may be of a run that was given up.
            if meant and isinstance(message, say.Release) and message.repeat == repeat:
                return message

    def _look(self, number: int) -> None:
        envelope = self._polled()
        if envelope is not None:
            self._heed(envelope, number)

    def _heed(self, envelope: say.Envelope, number: int) -> None:
        """Give a run up that is called off; the next request is then Stop, if that was it."""
        if isinstance(envelope.message, Stop):
            self._stopping = envelope
            raise _Aborted
        if isinstance(envelope.message, say.Abort) and envelope.number == number:
            raise _Aborted


def take_step(pool: Pool, step: LinkStep) -> LinkEnds:
    """Take one step for links with ends at devices of this host."""
    all_workers = step.step == "usable"
    shares = dict.fromkeys(pool.lanes, step) if all_workers else step.shares(local)
    return LinkEnds.joined(pool.ask(shares, LinkEnds, step.limit_s).values())


class RankTasks:
    """A host's part in jobs of fresh rank processes."""

    def __init__(self) -> None:
        self._listeners: tuple[socket.socket, ...] = ()
        self._fork_server = ForkServer()

    def environment(self, modules: Sequence[str] = ()) -> say.Environment:
        """Return the environment for rank processes, and required modules missing here."""
        return say.Environment(
            variables={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
            lacks=tuple(name for name in modules if importlib.util.find_spec(name) is None),
        )

    def open_rendezvous(self, count: int) -> say.RendezvousOpen:
        """Open listening sockets for the ranks of the next concurrent jobs."""
        self._close_listeners()
        self._listeners = tuple(listening() for _ in range(count))
        here, ports = addresses(), [listener.getsockname()[1] for listener in self._listeners]
        meetings = tuple(Rendezvous(addresses=here, port=port) for port in ports)
        return say.RendezvousOpen(meetings=meetings)

    def run(self, tasks: Sequence[Task], meanwhile: Callable[[], None]) -> say.RanksLeft:
        """Run fresh processes until they have ended; an exception of `meanwhile` ends them."""
        linux.leave_binding()
        try:
            left = run_tasks(
                tasks, listeners=self._listeners, meanwhile=meanwhile, server=self._fork_server
            )
            return say.RanksLeft(left=left)
        finally:
            self._close_listeners()

    def close(self) -> None:
        """Close the sockets, and end the fork server."""
        self._close_listeners()
        self._fork_server.close()

    def _close_listeners(self) -> None:
        listeners, self._listeners = self._listeners, ()
        for listener in listeners:
            listener.close()


def set_agent_signals() -> None:
    """Set an agent's signals: Ctrl-C is the controller's, SIGTERM raises Terminated."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (as handlers are)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def main() -> None:
    """Serve the controller at the socket whose descriptor is argument 1, as host argument 2."""
    messenger = say.Messenger(socket.socket(fileno=int(sys.argv[1])), peer="the controller")
    set_agent_signals()
    try:
        Agent(messenger, name=(*sys.argv[2:], None)[0]).serve()
    except (ControllerLost, Terminated):
        sys.exit(_TERMINATED)


if __name__ == "__main__":
    main()
