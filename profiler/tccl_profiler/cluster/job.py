"""A job of several ranks: rendezvous, the controller, the host agents, and the end of all.

Rank 0 is the controller. The lowest rank of each host is its agent; on the controller's host the
agent is a separate process. MPI carries only the rendezvous: when a rank dies, MPI ends all ranks
within MPI calls, and no rank is left to name the host. A TCP connection ends visibly.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from tccl_profiler.callers import accept_callers, listening, tokens_for
from tccl_profiler.cluster.agent import Agent, set_agent_signals
from tccl_profiler.cluster.facts import addresses
from tccl_profiler.messages import Endpoint
from tccl_profiler.protocol import (
    Connection,
    ControllerLost,
    Sign,
    heartbeats,
    wait_for,
)
from tccl_py.children import child_environment, child_with_socket, search_path
from tccl_py.errors import InputError, MeasurementError, SourceLostError, Terminated, raise_limit
from tccl_py.launchers import rank_of
from tccl_py.model.cluster import check_host_name

CONTROLLER = 0
JOIN_S = 60.0  # time for ranks to arrive: the first has waited for the last to load its libraries
NOT_USABLE = 2
CONNECT_S = 20.0
_SPARE_DESCRIPTORS = 256
_TAG = 4211
_FINALIZE_S = 30.0  # time for MPI to end: it waits for all ranks, and one may be missing
_PROC = Path("/proc")
_GOODBYE_S = 10.0  # time for agents to end their workers
_LAST_WORDS_S = 0.1
"""A launcher that ends a job may wait for less than half a second before it kills the rest."""


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's host name, and an id that tells machines of one name apart."""

    host: str
    machine: str


def own_info() -> PeerInfo:
    """Return this rank's info: gethostname(2) is per UTS namespace, machines per network one."""
    machine = ""
    with contextlib.suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot}/{(_PROC / 'self/ns/net').stat().st_ino}"
    return PeerInfo(host=socket.gethostname(), machine=machine)


class MpiBootstrap:
    """Carries bytes between all ranks of a job during the rendezvous."""

    def __init__(self, library: Any) -> None:
        self._mpi, self._world = library, library.COMM_WORLD
        self._leaving: list[Any] = []
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()

    def send(self, rank: int, data: bytes) -> None:
        """Begin to send."""
        self._leaving.append(self._world.isend(data, rank, _TAG))

    def poll(self, rank: int) -> bytes | None:
        """Return the next message from a rank, if there is one."""
        message = self._world.improbe(rank, _TAG)
        # A message this small arrives as a whole.
        return None if message is None else bytes(message.recv())

    def finish(self) -> None:
        """End MPI; all ranks do."""
        with limit_time(_FINALIZE_S, "MPI_Finalize"):
            self._mpi.Request.waitall(self._leaving)
            self._mpi.Finalize()


@contextlib.contextmanager
def limit_time(limit_s: float, call: str) -> Iterator[None]:
    """End this process if MPI does not come back: every other wait here has a limit."""

    def give_up() -> None:
        if rank_of(os.environ) == "0":
            text = f"tccl: this MPI job: {call} takes longer than {limit_s:g} s; see whether all "
            os.write(2, f"{text}hosts are well, and start one tccl command on each\n".encode())
        os._exit(NOT_USABLE)

    guard = threading.Timer(limit_s, give_up)
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()


def rendezvous(bootstrap: MpiBootstrap, *, join_s: float = JOIN_S) -> Job:
    """Connect all ranks to the controller, return this rank's part; InputError for lost ranks."""
    if bootstrap.rank == CONTROLLER:
        job = _gather(bootstrap, join_s)
    else:
        bootstrap.send(CONTROLLER, msgspec.msgpack.encode(own_info()))
        data = _wait(bootstrap, CONTROLLER, time.monotonic() + 2 * join_s)
        if data is None:
            raise MeasurementError(f"the controller has said nothing for {2 * join_s:g} s")
        sock = _connect(msgspec.msgpack.decode(data, type=Endpoint))
        job = Job(bootstrap.rank, {}, {CONTROLLER: _connection(sock, "the controller")})
    bootstrap.finish()
    return job


def _wait(bootstrap: MpiBootstrap, rank: int, until: float) -> bytes | None:
    while time.monotonic() < until:
        data = bootstrap.poll(rank)
        if data is not None:
            return data
        time.sleep(0.001)
    return None


def _gather(bootstrap: MpiBootstrap, join_s: float) -> Job:
    peers = {CONTROLLER: own_info()}
    until = time.monotonic() + join_s
    for rank in range(1, bootstrap.size):
        data = _wait(bootstrap, rank, max(until, time.monotonic() + 0.01))
        if data is None:
            fault = f"rank {rank} has said nothing for {join_s:g} s"
            right = "start one tccl command with the same arguments on all hosts"
            raise InputError("this MPI job", fault, right)
        peers[rank] = msgspec.msgpack.decode(data, type=PeerInfo)
    connections: dict[int, Connection] = {}
    if bootstrap.size > 1:
        raise_limit(resource.RLIMIT_NOFILE, 2 * bootstrap.size + _SPARE_DESCRIPTORS)
        local = addresses()
        with listening(local) as listeners:
            tokens = tokens_for(range(1, bootstrap.size))
            where = tuple(listener.getsockname()[:2] for listener in listeners)
            for token, rank in tokens.items():
                address = Endpoint(addresses=where, token=token)
                bootstrap.send(rank, msgspec.msgpack.encode(address))
            # Earlier messages may need this side's progress to arrive.
            arrive = functools.partial(bootstrap.poll, CONTROLLER)
            for rank, sock in accept_callers(listeners, tokens, CONNECT_S, arrive):
                connections[rank] = _connection(sock, f"rank {rank} on host {peers[rank].host}")
        for rank in range(1, bootstrap.size):
            if rank not in connections:
                fault = f"its rank {rank} could not connect to host {peers[CONTROLLER].host} at "
                right = "let the hosts of a job reach each other over TCP"
                raise InputError(f"host {peers[rank].host}", fault + ", ".join(local), right)
    return Job(CONTROLLER, peers, connections)


def _connect(address: Endpoint) -> socket.socket:
    for where in address.addresses:
        with contextlib.suppress(OSError):
            # Each address gets its turn before the controller gives up.
            limit_s = CONNECT_S / (2 + len(address.addresses))
            sock = socket.create_connection(where, limit_s)
            sock.sendall(address.token)
            return sock
    tried = ", ".join(host for host, _ in address.addresses)
    raise MeasurementError(f"the controller is not reached at {tried}")


def _connection(sock: socket.socket, peer: str) -> Connection:
    """Return a connection that sends small messages at once and notices a host that vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(sock, peer=peer)


class Job:
    """This rank's part: the controller has all `peers` and connections, others have one to it."""

    def __init__(
        self, rank: int, peers: Mapping[int, PeerInfo], connections: Mapping[int, Connection]
    ) -> None:
        self.is_controller = rank == CONTROLLER
        self.peers = peers
        self.connections = connections
        self._local: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._heart = contextlib.ExitStack()
        self._usual: Any = signal.SIG_DFL
        self._launcher = os.getppid()
        self.broken = False

    def __enter__(self) -> Job:
        if self.is_controller:
            self._usual = signal.signal(signal.SIGTERM, self._handle_sigterm)
            self._heart.enter_context(heartbeats(self._beat))
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            if self.is_controller:
                self._end_all()
        finally:
            self._heart.close()
            if self.is_controller:
                # A launcher that ends a broken job waits for the controller's message.
                signal.signal(signal.SIGTERM, signal.SIG_IGN if self.broken else self._usual)
            # Other ranks end when their connection does. If something is to be said first,
            # connections end with this process.
            if exception[1] is None or not self.is_controller:
                for connection in self.connections.values():
                    connection.close()

    # The controller's side

    @functools.cached_property
    def hosts(self) -> dict[str, list[int]]:
        """Each host's ranks, hosts and ranks in the order of ranks; on the controller."""
        ranks: dict[str, list[int]] = {}
        machines: dict[str, str] = {}
        for rank, peer in sorted(self.peers.items()):
            check_host_name(peer.host, where=f"host {peer.host[:40]!r}, rank {rank}")
            if machines.setdefault(peer.host, peer.machine) != peer.machine:
                fault = f"is the name of two machines, of ranks {ranks[peer.host][0]} and {rank}"
                right = "give each a name of its own (hostnamectl)"
                raise InputError(f"host {peer.host}", fault, right)
            ranks.setdefault(peer.host, []).append(rank)
        return ranks

    def agent(self, host: str) -> Connection:
        """Return the connection to a host's agent, which is started on this host."""
        rank = self.hosts[host][0]
        if rank != CONTROLLER:
            return self.connections[rank]
        if self._local is None:
            self._local = agent_process()
        return self._local[1]

    def _all_connections(self) -> list[Connection]:
        return [*self.connections.values(), *([self._local[1]] if self._local else [])]

    def _beat(self) -> None:
        if os.getppid() != self._launcher:
            # A killed launcher tells nobody, and MPI has ended here.
            os.kill(os.getpid(), signal.SIGTERM)
        for connection in self._all_connections():
            with contextlib.suppress(MeasurementError):
                connection.tell(0, Sign.HEARTBEAT)

    def _end_all(self) -> None:
        waiting = self._all_connections()
        for connection in waiting:
            with contextlib.suppress(MeasurementError):
                connection.tell(0, Sign.STOP)
        if self.broken:
            # The launcher is about to kill this process, which has a message to print before.
            # Agents end by themselves: they were told, and their connection ends.
            return
        until = time.monotonic() + _GOODBYE_S
        while (
            waiting := [connection for connection in waiting if not connection.has_ended()]
        ) and time.monotonic() < until:
            wait_for(waiting, until - time.monotonic())
        if self._local is not None:
            process, connection = self._local
            connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.kill()
            process.wait()

    def _handle_sigterm(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle SIGTERM: the launcher ends the job, because a rank died or on request."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.broken:
            # The cause is known, and is being printed.
            return
        self.broken = True
        # A connection ends with its rank, before the launcher hears of it.
        time.sleep(_LAST_WORDS_S)
        dead = [rank for rank, connection in self.connections.items() if connection.has_died()]
        if not dead:
            raise KeyboardInterrupt
        died = [f"host {self.peers[rank].host}: its rank {rank} has died" for rank in dead]
        raise SourceLostError("; ".join(f"{text}, and the launcher ends the job" for text in died))

    # The other ranks' side

    def serve(self) -> int:
        """Serve the controller until it ends; return the exit code. Nothing is printed.

        Only the controller says by its code how the job ended: where several ranks end with another
        code than 0 at the same time, mpirun of Open MPI 5.0 may crash or hang.
        """
        set_agent_signals()
        try:
            Agent(self.connections[CONTROLLER]).serve()
            return 0
        except ControllerLost:
            return NOT_USABLE
        except Terminated:
            return 128 + signal.SIGTERM


def agent_process(name: str | None = None) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start an agent on this host, in a process of its own, and connect to it."""
    arguments = [] if name is None else [name]
    environment = child_environment({**os.environ, "PYTHONPATH": os.pathsep.join(search_path())})
    process, sock = child_with_socket(
        "tccl_profiler.cluster.agent", *arguments, environment=environment
    )
    who = "this host's agent" if name is None else f"the agent of host {name}"
    return process, Connection(sock, peer=who)
