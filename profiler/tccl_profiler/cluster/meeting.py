"""How the ranks of a job meet: by what launched them they learn the controller's address, then each
connects to it. From then on they need no launcher's library.

MPI carries the few messages of the meeting, and no more: when a rank dies, an MPI library ends the
others inside its own calls (Open MPI's TCP transport with "Socket closed"), and nobody is left to
say which host it was. A TCP connection tells its end, and to wait for one takes no core.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from tccl_profiler.channel import Channel
from tccl_profiler.cluster.interfaces import addresses, listening
from tccl_profiler.cluster.messages import Envelope
from tccl_py.errors import InputError, MeasurementError

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
