"""A host agent: serves the controller's requests by a pool of workers of this host.

On the controller's host it is the process `tccl_profiler.cluster.agent DESCRIPTOR [NAME]`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

import msgspec

from tccl_profiler import linux
from tccl_profiler.callers import listen
from tccl_profiler.cluster.facts import HostFacts, host_facts
from tccl_profiler.messages import DeviceRequests, DeviceSpec, Endpoint, LinkStep, Pinged
from tccl_profiler.pool import Pool, RunResult, RunSpec
from tccl_profiler.program import HostProgram, Link
from tccl_profiler.protocol import (
    Aborted,
    Connection,
    ControllerLost,
    Envelope,
    Release,
    Server,
    Sign,
    heartbeats,
)
from tccl_profiler.session import pool_of
from tccl_profiler.watch import warnings, watching
from tccl_py.children import child_command, child_environment, search_path
from tccl_py.errors import MeasurementError, Terminated
from tccl_py.launchers import outside_job
from tccl_py.model.links import DoctorReport, Proof
from tccl_py.model.transfer import place_named
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.rank import Rendezvous
from tccl_py.rank_processes.tasks import RankOutput, Task, run_tasks
from tccl_py.readers.live import check_cupy

SILENCE_S = 30.0  # the controller is lost after so long without a message
PROOF_S = 300.0  # a proof of links takes less, whatever hangs
_LOOK_S, _END_S = 0.1, 10.0
_RELEASE_S = 10.0  # lanes that wait to be released give up after as long; see Timeouts
_STARTED_S = 200e-6  # time from the release of lanes to their start
_BOUND = (
    "the launcher bound this process to {before} of {now} CPUs; measured with all, "
    "for NCCL's threads need them: start jobs unbound as well (mpirun --bind-to none)"
)
_TERMINATED = 128 + signal.SIGTERM


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """All repeats' results, and how long before its time each Release was read."""

    results: tuple[RunResult, ...]
    early_ns: tuple[int, ...]


class Agent(Server):
    """Serves a controller by this host's pool; `name` None: gethostname(2)."""

    def __init__(
        self,
        connection: Connection,
        *,
        name: str | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        silence_s: float = SILENCE_S,
    ) -> None:
        super().__init__(connection)
        self._name = socket.gethostname() if name is None else name
        self._now_ns = now_ns
        self.silence_s = silence_s
        self._backend = ""
        self._interfaces: tuple[str, ...] = ()
        self._facts: HostFacts | None = None
        self._pool: Pool | None = None
        self._listeners: list[socket.socket] = []
        self._fork_server = ForkServer()
        self._stopping: Envelope | None = None
        self._prioritised = False
        self._bound = (1, 1)

    def serve(self) -> None:
        """Carry out requests until told to stop. Raises ControllerLost."""
        try:
            with heartbeats(lambda: self._connection.tell(0, Sign.HEARTBEAT)):
                self.serve_requests()
                self.close()
                self._connection.tell(0, Sign.LEAVING)
        except MeasurementError as error:
            # Closed, or a message that cannot be read or sent: the next would make no sense.
            raise ControllerLost(str(error)) from error
        except Terminated:
            # First of all: the controller has a moment to find out who is not to blame.
            with contextlib.suppress(MeasurementError):
                self._connection.tell(0, Sign.LEAVING)
            raise
        finally:
            # From now on it ends by itself. (Threads, as in tests, have no signals.)
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.close()

    def close(self, *, hurry: bool = False) -> None:
        """End workers and ranks; `hurry` kills workers that do not end at once."""
        self._close_listeners()
        self._fork_server.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(hurry=hurry)

    def _next(self, limit_s: float = math.inf) -> Envelope:
        return self._stopping or super()._next(limit_s)

    def clock(self, more: bool) -> int:
        """Return CLOCK_MONOTONIC, in ns; with priority while there are `more` questions."""
        at_ns = self._now_ns()
        if more and not self._prioritised:
            linux.set_fifo_priority((0,), linux.AGENT_PRIORITY)
        elif self._prioritised and not more:
            linux.reset_priority((0,))
        self._prioritised = more
        return at_ns

    def describe(self, backend: str, devices: int | None, interfaces: tuple[str, ...]) -> HostFacts:
        """Discover this host, with these interfaces as NICs, or its own."""
        self._backend, self._interfaces = backend, interfaces
        if backend == "cuda":
            # Cores stand for devices on the other backend, and the launcher deals them out.
            self._bound = linux.leave_binding()
        self._facts = host_facts(
            self._name, backend=backend, devices=devices, interfaces=interfaces
        )
        return self._facts

    def examine(self, options: tuple[str, ...]) -> DoctorReport:
        """Have `tccl doctor` with these options examine this host and prove its links.

        A doctor that fails or is late proves nothing.
        """
        with subprocess.Popen(
            child_command("tccl_py", "doctor", "--json", *options),
            env=child_environment(outside_job(self.environment(())[0])),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as doctor:
            try:
                output, said = self._until_ended(doctor)
                report = msgspec.json.decode(output, type=DoctorReport)
                return msgspec.structs.replace(report, host=self._name)
            except TimeoutError:
                why = f"did not end within {PROOF_S:g} s"
            except msgspec.DecodeError:
                last = said.decode(errors="replace").strip().rpartition("\n")[2]
                why = f"ended with code {doctor.returncode}: {last or 'no output'}"
            finally:
                # With its own children and NCCL's files; else the kernel ends these with it.
                doctor.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    doctor.wait(_END_S)
                doctor.kill()
        unable = Proof(verdict="inconclusive", what=f"`tccl doctor` {why}")
        return DoctorReport(host=self._name, facts={}, links=unable)

    def _until_ended(self, child: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        """Return what a child wrote, unless the controller calls it off. Raises TimeoutError."""
        until = time.monotonic() + PROOF_S
        while time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.communicate(timeout=_LOOK_S)
            self._look()
        raise TimeoutError

    def _open(self) -> Pool:
        if self._pool is None:
            raise MeasurementError(f"host {self._name}: its workers were not started")
        return self._pool

    def open(
        self, devices: tuple[str, ...], variables: dict[str, str], network: str
    ) -> tuple[dict[str, int], tuple[str, ...]]:
        """End all workers, and start workers for these GPUs and NICs with variables of NCCL.

        `network` names the transport of the NICs.

        Return their lanes by device, and warnings about the devices.
        """
        self.close(hurry=bool(devices))
        if not devices:
            return {}, ()
        if self._facts is None:
            raise MeasurementError(f"host {self._name}: asked to start workers for nothing known")
        if self._backend == "cuda":
            check_cupy(self._name)
        if variables:
            # It tells hosts apart that share a kernel.
            variables["NCCL_HOSTID"] = self._name
            if self._interfaces:
                variables["NCCL_SOCKET_IFNAME"] = "=" + ",".join(self._interfaces)
        nics = {}
        for name, place in ((name, place_named(name)) for name in devices):
            if place.kind != "N":
                continue
            nic = self._facts.addresses[place.index]
            nics[name] = DeviceSpec(
                device=name, address=nic.address, interface=nic.name, network=network
            )
        machine = self._facts.machine
        pool = pool_of(
            machine, self._backend, devices, nics=nics, variables=variables, host=self._name
        )
        pool.start()
        self._pool = pool
        return dict(pool.lanes), self._warnings(devices)

    def ping(self, count: int) -> dict[str, Pinged]:
        """Compare each device's clock with this host's."""
        return dict(self._open().ping(count))

    def take(self, step: LinkStep) -> dict[Link, Endpoint | None]:
        """Take one step for links with ends at devices of this host."""
        return take_step(self._open(), step)

    def _warnings(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        gpus = [place.index for place in map(place_named, devices) if place.kind == "G"]
        if self._backend != "cuda" or not gpus:
            return ()
        with watching(gpus, self._open().pids) as look:
            warned = warnings(look(), loaded=False)
        before, after = self._bound
        return (*warned, _BOUND.format(before=before, now=after)) if before < after else warned

    # One run

    def run(self, program: HostProgram, spec: RunSpec) -> Ran:
        """Run this host's share of a program; Release follows for each repeat."""
        results: list[RunResult] = []
        early: list[int] = []
        pool = self._open()
        with pool.begin(program, spec, meanwhile=self._look) as execution:
            for repeat in range(spec.repeats):
                execution.wait_resident(repeat)
                lanes = linux.threads_of(pool.pids)
                with linux.realtime():
                    self._connection.tell(self._number, Sign.RESIDENT)
                    at_ns = self._release_ns()
                    # Lanes not before: others' lanes have still to come, perhaps on these cores.
                    with linux.realtime(lanes):
                        early.append(at_ns - self._now_ns())
                        execution.release(repeat, at_ns=at_ns)
                        time.sleep(_STARTED_S)
                results.append(execution.collect(repeat))
            execution.finish()
        return Ran(results=tuple(results), early_ns=tuple(early))

    def _release_ns(self) -> int:
        while True:
            envelope = self._next(_RELEASE_S)
            self._heed(envelope)
            if isinstance(envelope.message, Release):
                return envelope.message.at_ns

    def _look(self) -> None:
        envelope = self._poll()
        if envelope is not None:
            self._heed(envelope)

    def _heed(self, envelope: Envelope) -> None:
        """Give a run up that is called off; the next request is then Stop, if that was it."""
        if envelope.message is Sign.STOP:
            self._stopping = envelope
        if envelope.message in (Sign.STOP, Sign.ABORT):
            raise Aborted

    # Ranks

    def environment(self, modules: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the environment for rank processes, and required modules missing here."""
        lacks = tuple(name for name in modules if importlib.util.find_spec(name) is None)
        return {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}, lacks

    def open_rendezvous(self, count: int, address: str) -> tuple[Rendezvous, ...]:
        """Open sockets at this address alone, where ranks of the next concurrent jobs meet."""
        self._close_listeners()
        self._listeners = [listen(address) for _ in range(count)]
        ports = [listener.getsockname()[1] for listener in self._listeners]
        return tuple(
            Rendezvous(address=address, port=port, prefix=secrets.token_hex()) for port in ports
        )

    def _close_listeners(self) -> None:
        while self._listeners:
            self._listeners.pop().close()

    def run_ranks(self, tasks: tuple[Task, ...]) -> tuple[RankOutput, ...]:
        """Run ranks as fresh processes to their end, those of several jobs at once."""
        linux.leave_binding()
        try:
            return run_tasks(
                tasks, listeners=self._listeners, meanwhile=self._look, server=self._fork_server
            )
        finally:
            self._close_listeners()


Agent.called = (
    *(Agent.clock, Agent.describe, Agent.open, Agent.ping, Agent.take, Agent.run),
    *(Agent.examine, Agent.environment, Agent.open_rendezvous, Agent.run_ranks),
)


def take_step(pool: Pool, step: LinkStep) -> dict[Link, Endpoint | None]:
    """Take one step for links with ends at devices of this host."""
    all_workers = step.step == "usable"
    by_worker = step.shares(lambda name: name)
    shares = dict.fromkeys(pool.lanes, step) if all_workers else by_worker
    requests = {device: (share,) for device, share in shares.items()}
    answers = pool.ask(DeviceRequests.take, requests, step.limit_s)
    return {link: end for ends in answers.values() for link, end in ends.items()}


def set_agent_signals() -> None:
    """Set an agent's signals: Ctrl-C is the controller's, SIGTERM raises Terminated."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (as handlers are)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def main() -> None:
    """Serve the controller at the socket whose descriptor is argument 1, as host argument 2."""
    connection = Connection(socket.socket(fileno=int(sys.argv[1])), peer="the controller")
    set_agent_signals()
    try:
        Agent(connection, name=(*sys.argv[2:], None)[0]).serve()
    except (ControllerLost, Terminated):
        sys.exit(_TERMINATED)


if __name__ == "__main__":
    main()
