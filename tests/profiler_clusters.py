"""Hosts on one machine: agents of different names, joined to a controller by sockets."""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass

from tccl_profiler.cluster.agent import Agent
from tccl_profiler.cluster.job import agent_process
from tccl_profiler.protocol import (
    Connection,
    ConnectionClosed,
    ControllerLost,
    Sign,
    heartbeats,
)


@dataclass
class FakeJob:
    """What a session wants of a job."""

    connections: dict
    broken: bool = False

    @property
    def hosts(self):
        # No host has rank 0: all clocks are compared.
        return {host: [number + 1] for number, host in enumerate(self.connections)}

    def agent(self, host):
        return self.connections[host]


def pair(peer="the other"):
    """Two ends that are joined."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return [Connection(end, peer=peer) for end in ends]


@contextlib.contextmanager
def agents_in_processes(hosts):
    """A job whose agents are processes of this machine, one for each host."""
    with contextlib.ExitStack() as stack:
        found = {}
        for host in hosts:
            process, connection = agent_process(host)
            found[host] = connection
            stack.callback(_ended, process)
            stack.callback(connection.close)
        stack.enter_context(
            heartbeats(lambda: [one.tell(0, Sign.HEARTBEAT) for one in found.values()])
        )
        yield FakeJob(found)
        for connection in found.values():
            with contextlib.suppress(ConnectionClosed):
                connection.tell(0, Sign.STOP)


def _ended(process):
    try:
        process.wait(20)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def agent_in_thread(host, *, now_ns=time.monotonic_ns, silence_s=30.0):
    """A connection to an agent that is a thread; `now_ns` is its clock."""
    ours, theirs = pair()
    agent = Agent(theirs, name=host, now_ns=now_ns, silence_s=silence_s)

    def serve():
        with contextlib.suppress(ControllerLost, ConnectionClosed):
            agent.serve()
        theirs.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(20)
        assert not thread.is_alive()


class Checked:
    """A BandwidthSource over a session that refuses sets before workers start."""

    simulated = False

    def __init__(self, session):
        self.session = session

    def measure(self, sets):
        self.session.check_sets(sets)
        return self.session.profiler.measure(sets)
