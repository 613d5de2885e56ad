"""An agent: on its host it does what the controller says, by a pool of workers of its own.

On the controller's host it is started as `tccl_profiler.cluster.agent DESCRIPTOR`, a connected Unix
socket; on other hosts it is what a rank of the job does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from tccl_profiler import linux as numa
from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.facts import HostFacts, addresses, host_facts, listening
from tccl_profiler.cluster.messages import (
    ChannelMessenger,
    Envelope,
    Heart,
    Message,
    Messenger,
    Naps,
    PeerGone,
    beat_to,
)
from tccl_profiler.execution import Outcome
from tccl_profiler.host.machine import cpus_of_devices
from tccl_profiler.linux import AGENT, calm, hasten, threads_of, urgent
from tccl_profiler.messages import Channel, LinkLost
from tccl_profiler.pool import Memory, Pool
from tccl_profiler.session import HOST_MEMORY
from tccl_profiler.watch import Watch, complaints
from tccl_profiler.workers import DeviceSpec, WorkerLost
from tccl_py.children import search_path
from tccl_py.errors import InputError, MeasurementError, TcclError
from tccl_py.model.machine import Machine
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.tasks import Task, run_tasks

# What an agent does for jobs of fresh rank processes: environment, meeting, and the run.


class RankTasks:
    """A host's part in such jobs."""

    def __init__(self) -> None:
        self._meetings: tuple[socket.socket, ...] = ()
        self._fork_server = ForkServer()

    def surroundings(self, modules: Sequence[str] = ()) -> say.Surroundings:
        """The environment in which programs find what this one does; modules that it lacks."""
        return say.Surroundings(
            variables={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
            lacks=tuple(one for one in modules if importlib.util.find_spec(one) is None),
        )

    def open_meetings(self, count: int) -> say.MeetingsOpen:
        """Sockets that wait for the ranks of the next jobs, which run at once."""
        self._leave_meetings()
        self._meetings = tuple(listening() for _ in range(count))
        ports = tuple(one.getsockname()[1] for one in self._meetings)
        return say.MeetingsOpen(addresses=addresses(), ports=ports)

    def run(self, tasks: Sequence[Task], meanwhile: Callable[[], None]) -> say.RanksLeft:
        """Run fresh processes until they have ended; what `meanwhile` raises ends them.

        Raises:
            RanksError: one failed, or the time was up.
        """
        numa.leave_binding()
        try:
            left = run_tasks(
                tasks,
                listeners=self._meetings,
                meanwhile=meanwhile,
                server=self._fork_server,
            )
            return say.RanksLeft(left=left)
        finally:
            self._leave_meetings()

    def close(self) -> None:
        """Give the socket back, and end what ranks are started from."""
        self._leave_meetings()
        self._fork_server.close()

    def _leave_meetings(self) -> None:
        meetings, self._meetings = self._meetings, ()
        for one in meetings:
            one.close()


SILENCE_S = 30.0
"""After so long without a word the controller is taken to be gone."""
_RELEASE_S = 10.0
"""Lanes that wait to be released give up after as long; see Patience."""
_STARTED_S = 200e-6
"""How long lanes may take from their release to their start."""
_LAST_S = 15.0
"""How long an agent that has ended its workers waits for the end of the controller."""
_BOUND = (
    "the launcher bound this process to {before} of {now} CPUs; measured with all, "
    "for NCCL's threads need them: start jobs unbound as well (mpirun --bind-to none)"
)
_TERMINATED = 128 + signal.SIGTERM


class ControllerGone(Exception):  # noqa: N818 - says what happened
    """Nobody is left to serve."""


class _Aborted(Exception):  # noqa: N818 - says what happened
    """The controller gives up what is being done."""


class Told(BaseException):
    """The launcher tells this process to end."""


class Agent:
    """Serves one controller; it owns this host's pool.

    Args:
        messenger: the connection to the controller.
        name: what this host is called; None is what gethostname(2) says.
        now_ns: CLOCK_MONOTONIC, or what stands for it in tests.
        silence_s: how long the controller may say nothing.
    """

    def __init__(
        self,
        messenger: Messenger,
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
        self._waiting: deque[Envelope] = deque()
        self._naps = Naps()
        self._hurries = False
        self._bound = (1, 1)
        # What each message asks for; what gives no answer of its own is done when it returns.
        self._does: dict[type[Message], Callable[[Any], Message | None]] = {
            say.Rest: lambda _: None,
            say.PingHost: lambda _: say.HostTime(at_ns=self._now_ns()),
            say.Describe: self._describe,
            say.Open: self._open,
            say.Restart: self._restart,
            say.PingDevices: lambda one: say.DevicesPinged(pinged=self._opened().ping(one.count)),
            say.AskLinks: lambda _: say.Links(links=tuple(self._opened().links())),
            say.Listen: self._listen,
            say.Connect: lambda one: self._opened().connect(dict(one.endpoints)),
            say.Accept: lambda one: self._opened().accept(one.links),
            say.AskSurroundings: lambda message: self._ranks.surroundings(message.modules),
            say.OpenMeetings: lambda asked: self._ranks.open_meetings(asked.count),
            # What they are about has ended by itself.
            say.Abort: lambda _: say.Aborted(),
            say.Release: lambda _: say.Aborted(),
        }

    def serve(self) -> int:
        """Do what is asked until told to end; the exit code to end with.

        Raises:
            ControllerGone: it closed its end, sends what cannot be read, or has not been heard of
                for long.
        """
        heart = Heart(lambda: beat_to(self._messenger))
        heart.start()
        try:
            while True:
                envelope = self._next()
                if isinstance(envelope.message, say.End):
                    self.close()
                    self._answer(envelope.number, say.Ended())
                    self._last()
                    return envelope.message.code
                self._answer(envelope.number, self._done(envelope))
        except MeasurementError as error:
            # PeerGone, or a message that cannot be read or sent: what comes next makes no sense.
            raise ControllerGone(str(error)) from error
        except Told:
            # First of all: the controller has a moment to find out who is not to blame.
            with contextlib.suppress(PeerGone):
                self._answer(0, say.Leaving())
            raise
        finally:
            # From now on it ends by itself. (Threads, as in tests, have no signals.)
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            heart.stop()
            self.close()

    def _last(self) -> None:
        """Wait until the controller has ended: a launcher ends a job as soon as one rank ends with
        an exit code, and the controller has still to say what that is about."""
        until = time.monotonic() + _LAST_S
        with contextlib.suppress(MeasurementError):
            while time.monotonic() < until:
                self._messenger.poll()
                self._naps.nap()

    def close(self) -> None:
        """End the workers."""
        self._ranks.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _next(self, limit_s: float | None = None) -> Envelope:
        """Wait for the next message.

        Raises:
            ControllerGone: no word came for long.
            MeasurementError: none came within a limit.
        """
        if self._waiting:
            return self._waiting.popleft()
        until = None if limit_s is None else time.monotonic() + limit_s
        while True:
            envelope = self._messenger.poll()
            if envelope is not None:
                self._naps.begin()
                self._hurry(envelope.message)
                return envelope
            now = time.monotonic()
            if now - self._messenger.heard_s > self._silence_s:
                raise ControllerGone(f"the controller has said nothing for {self._silence_s:g} s")
            if until is not None and now > until:
                raise MeasurementError(f"host {self._name}: not told to go on within {limit_s:g} s")
            self._naps.nap()

    def _hurry(self, message: Message) -> None:
        """While pings follow each other, this thread goes before others: its delays are errors."""
        pinged = isinstance(message, say.PingHost)
        if pinged != self._hurries:
            self._hurries = pinged
            if pinged:
                hasten((0,), AGENT)
            else:
                calm((0,))

    def _answer(self, number: int, message: Message) -> None:
        self._naps.begin()
        self._messenger.send(Envelope(number, message))

    def _done(self, envelope: Envelope) -> Message:
        """Do what a message asks; its answer."""
        try:
            return self._do(envelope)
        except InputError as error:
            return say.Failed(kind="input", what="\n".join((error.where, error.what, error.right)))
        except LinkLost as error:
            return say.Failed(kind="link", what=str(error))
        except WorkerLost as error:
            return say.Failed(kind="lost", what=str(error))
        except TcclError as error:
            return say.Failed(kind="refused", what=str(error))
        except _Aborted:
            return say.Aborted()

    def _do(self, envelope: Envelope) -> Message:
        message = envelope.message
        if isinstance(message, say.Begin):
            return self._run(envelope.number, message)
        if isinstance(message, say.RunRanks):
            return self._ranks.run(message.tasks, lambda: self._look(envelope.number))
        does = self._does.get(type(message))
        if does is None:
            raise MeasurementError(f"host {self._name}: asked {type(message).__name__}")
        return does(message) or say.Done()

    def _describe(self, message: say.Describe) -> Message:
        self._backend, self._interfaces = message.backend, message.interfaces
        if message.backend == "cuda":
            # Cores stand for devices on the other backend, and the launcher deals them out.
            self._bound = numa.leave_binding()
        self._facts = host_facts(
            self._name,
            backend=message.backend,
            devices=message.devices,
            interfaces=message.interfaces,
        )
        return say.Described(facts=self._facts)

    def _restart(self, message: say.Restart) -> Message:
        pool = self._opened()
        pool.restart({**message.variables, **self._own_variables()} if message.variables else None)
        return say.Opened(lanes=pool.lanes)

    def _own_variables(self) -> dict[str, str]:
        """What tells NCCL that this host is another than those that share a kernel with it, and
        which interfaces it is to use where they were named."""
        variables = {"NCCL_HOSTID": self._name}
        if self._interfaces:
            variables["NCCL_SOCKET_IFNAME"] = "=" + ",".join(self._interfaces)
        return variables

    def _listen(self, message: say.Listen) -> Message:
        return say.Listening(endpoints=tuple(self._opened().listen(message.links).items()))

    def _opened(self) -> Pool:
        if self._pool is None:
            raise MeasurementError(f"host {self._name}: its workers were not started")
        return self._pool

    def _open(self, message: say.Open) -> Message:
        """Start workers for the devices that are asked for, in the place of those before."""
        self.close()
        if not message.devices:
            return say.Opened(lanes={})
        if self._facts is None:
            raise MeasurementError(f"host {self._name}: asked to start workers for nothing known")
        self._pool = pool_of(self._facts, self._backend, message.devices, message.memory)
        try:
            self._pool.start()
        except BaseException:
            self.close()
            raise
        return say.Opened(lanes=self._pool.lanes, complaints=self._complaints(message.devices))

    def _complaints(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        """What spoils measurements by this host's GPUs, whose links sleep yet, or jobs there."""
        gpus = [int(name[1:]) for name in devices if name.startswith("G")]
        if self._backend != "cuda" or not gpus:
            return ()
        with Watch(gpus, self._opened().pids) as watch:
            found = complaints(watch.look(), loaded=False)
        before, now = self._bound
        if before < now:
            found = (*found, _BOUND.format(before=before, now=now))
        return found

    # One run

    def _run(self, number: int, begin: say.Begin) -> say.Ran:
        """Run a program's share, each repeat released when the controller says."""
        outcomes: list[Outcome] = []
        early: list[int] = []
        late: list[int] = []

        def meanwhile() -> None:
            self._look(number)

        pool = self._opened()
        with pool.begin(begin.work, begin.timing, meanwhile=meanwhile) as running:
            for repeat in range(begin.timing.repeats):
                running.wait_resident(repeat)
                lanes = threads_of(pool.pids)
                with urgent():
                    self._answer(number, say.Resident(repeat=repeat))
                    release = self._release(number, repeat)
                    # Lanes not before: others' lanes have still to come, perhaps on these cores.
                    with urgent(lanes):
                        early.append(release.at_ns - self._now_ns())
                        stored_ns = running.release(repeat, at_ns=release.at_ns)
                        late.append(stored_ns - release.at_ns)
                        time.sleep(_STARTED_S)
                outcomes.append(running.collect(repeat))
            running.finish()
        return say.Ran(
            outcomes=tuple(say.packed(one) for one in outcomes),
            early_ns=tuple(early),
            late_ns=tuple(late),
        )

    def _release(self, number: int, repeat: int) -> say.Release:
        """Wait to be told when to release a repeat.

        Raises:
            _Aborted: the run is given up.
        """
        while True:
            envelope = self._next(_RELEASE_S)
            if envelope.number != number:
                # Of a run that was given up, or what is to be done after this one.
                if isinstance(envelope.message, say.End):
                    self._waiting.appendleft(envelope)
                    raise _Aborted
                continue
            if isinstance(envelope.message, say.Abort):
                raise _Aborted
            if isinstance(envelope.message, say.Release) and envelope.message.repeat == repeat:
                return envelope.message

    def _look(self, number: int) -> None:
        """See whether the controller gives up a run.

        Raises:
            _Aborted: it does, or it ends altogether.
            ControllerGone: it is gone itself.
        """
        envelope = self._messenger.poll()
        if time.monotonic() - self._messenger.heard_s > self._silence_s:
            raise ControllerGone(f"the controller has said nothing for {self._silence_s:g} s")
        if envelope is None:
            return
        if isinstance(envelope.message, say.Abort) and envelope.number == number:
            raise _Aborted
        self._waiting.append(envelope)
        if isinstance(envelope.message, say.End):
            raise _Aborted


def pool_of(facts: HostFacts, backend: str, ids: tuple[str, ...], memory: Memory | None) -> Pool:
    """The pool for some of a host's devices, not started.

    Raises:
        MeasurementError: a device that it does not have, or a NIC without an address.
    """
    machine = facts.machine
    cores = cpus_of_devices(machine) if backend == "host" else {}
    specs = []
    for name in ids:
        if name not in facts.devices:
            known = ", ".join(facts.devices)
            raise MeasurementError(f"host {facts.name}: {name} cannot be measured; it has {known}")
        index = int(name[1:])
        if name.startswith("N"):
            nic = facts.addresses[index]
            specs.append(DeviceSpec(device=name, address=nic.address, interface=nic.interface))
            continue
        cpus = cores[index] if backend == "host" else _node_cpus(machine, name)
        specs.append(DeviceSpec(device=name, bus_id=machine.gpu(index).bus_id, cpus=cpus))
    usual = HOST_MEMORY if backend == "host" else None
    numa_ids = {n.id: n.numa_id if n.numa_id >= 0 else None for n in machine.numa_nodes}
    return Pool(backend, specs, numa_ids, memory=memory or usual)


def _node_cpus(machine: Machine, name: str) -> tuple[int, ...]:
    node = machine.numa_nodes[machine.numa_of(name)]
    return tuple(numa.cpus_of_node(node.numa_id)) if node.numa_id >= 0 else ()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """What an agent's process does about signals: Ctrl-C is the controller's, an end is told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _tell)
    yield


def _tell(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (as handlers are)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Told


def main() -> None:
    """Serve the controller at the other end of the socket whose descriptor is argument 1.

    Argument 2, where there is one, is what this host is called.
    """
    sock = socket.socket(fileno=int(sys.argv[1]))
    channel: Channel[Envelope] = Channel(sock, receives=Envelope, peer="the controller")
    with quietly():
        try:
            Agent(ChannelMessenger(channel), name=(*sys.argv[2:], None)[0]).serve()
        except (ControllerGone, Told):
            sys.exit(_TERMINATED)


if __name__ == "__main__":
    main()
