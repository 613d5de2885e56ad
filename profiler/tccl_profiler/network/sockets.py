"""The sockets behind links: made by three steps, kept for later sets, and looked at.

A NIC is an address and an interface: both ends are bound to their own, so that a link leaves by the
NIC that it names. Nobody else's connection is taken for a link: the first bytes are a token that
the listening side made up.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence

from tccl_profiler.links import Endpoint, LinkLost, names
from tccl_profiler.program import Link
from tccl_py.errors import MeasurementError

_TOKEN_BYTES = 16
_HELLO_S = 1.0
"""What somebody who has connected gets to say who it is."""
UNSENT_BYTES = 512 * 1024
"""What a socket holds beyond what is under way. The end of a repeat waits for all of it to arrive,
and by default that may be megabytes; with much less, a fast link would wait for the sender."""
TICK_S = 0.05
"""How long a call on a socket blocks before a lane looks whether it should stop."""


class Nic:
    """One NIC's sockets, by link.

    Args:
        device: its name in sentences.
        address: its IP address; this host must have it.
        interface: its name, as `ip link` shows it, or "". Where the kernel allows, traffic is held
            to it: by the address alone, a route may lead out of another NIC.

    Raises:
        MeasurementError: no such address or interface here.
    """

    def __init__(self, device: str, address: str, interface: str) -> None:
        self._device, self._address, self._interface = device, address, interface
        self._sockets: dict[Link, socket.socket] = {}
        self._expected: dict[bytes, Link] = {}
        self._listener: socket.socket | None = None
        if not address:
            raise MeasurementError(f"{device}: {interface or 'it'} has no IP address to send from")
        if interface:
            try:
                socket.if_nametoindex(interface)
            except OSError as error:
                raise MeasurementError(
                    f"{device}: this host has no interface {interface}"
                ) from error
        self._bound().close()

    @property
    def name(self) -> str:
        """What it is, in words."""
        return f"{self._interface} {self._address}".strip()

    def socket_of(self, link: Link) -> socket.socket:
        """The link's socket, which blocks for `TICK_S` at most.

        Raises:
            LinkLost: it was never made, or was lost.
        """
        sock = self._sockets.get(link)
        if sock is None:
            raise LinkLost(f"{link} is not connected")
        return sock

    def drop(self, link: Link) -> None:
        """Close a link that cannot be used again; the other end sees that."""
        sock = self._sockets.pop(link, None)
        if sock is not None:
            with contextlib.suppress(OSError):
                # Now, not when what was sent has been delivered.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

    def usable(self) -> tuple[Link, ...]:
        """The links whose other end is there, and on which nothing is left from before."""
        for link in [link for link, sock in self._sockets.items() if not _is_quiet(sock)]:
            self.drop(link)
        return tuple(sorted(self._sockets))

    def listen(self, links: Sequence[Link]) -> tuple[Endpoint, ...]:
        """Begin to wait for links; those that had their names are dropped.

        Raises:
            MeasurementError: no port is to be had.
        """
        for link in links:
            self.drop(link)
        again = set(links)
        self._expected = {t: link for t, link in self._expected.items() if link not in again}
        if self._listener is None:
            self._listener = self._bound()
        try:
            # Callers wait here until they are accepted; also those of earlier tries.
            self._listener.listen(len(self._expected) + 2 * len(links) + 16)
        except OSError as error:
            raise MeasurementError(f"{self._device}: cannot listen: {error.strerror}") from error
        port = self._listener.getsockname()[1]
        tokens = [secrets.token_bytes(_TOKEN_BYTES) for _ in links]
        self._expected.update(zip(tokens, links, strict=True))
        return tuple(Endpoint(address=self._address, port=port, token=one) for one in tokens)

    def accept(self, links: Sequence[Link], limit_s: float) -> None:
        """Wait until all these links have come.

        Raises:
            LinkLost: one did not in time; it is listened for no more.
        """
        deadline = time.monotonic() + limit_s
        missing = set(links) - set(self._sockets)
        unknown = missing - set(self._expected.values())
        if unknown:
            raise LinkLost(f"{names(sorted(unknown))}: not listened for")
        try:
            while missing:
                missing.discard(self._accepted(deadline, missing))
        finally:
            self._expected = {
                token: link for token, link in self._expected.items() if link not in missing
            }
            if not self._expected and self._listener is not None:
                self._listener.close()
                self._listener = None

    def _accepted(self, deadline: float, missing: Iterable[Link]) -> Link | None:
        """The next link that has come; None if it was somebody else."""
        assert self._listener is not None
        left_s = deadline - time.monotonic()
        try:
            self._listener.settimeout(max(0.001, left_s))
            sock, _ = self._listener.accept()
        except TimeoutError as error:
            late = sorted(missing)
            raise LinkLost(
                f"{names(late)}: {late[0].sender} did not come to {self._address} in time; look at "
                "firewalls and routes between the two"
            ) from error
        except OSError as error:
            raise LinkLost(f"{names(sorted(missing))}: {error.strerror}") from error
        link = None
        try:
            sock.settimeout(_HELLO_S)
            link = self._expected.pop(sock.recv(_TOKEN_BYTES, socket.MSG_WAITALL), None)
        except OSError:
            pass
        if link is None:
            sock.close()
            return None
        self._keep(link, sock)
        return link

    def connect(self, ends: Mapping[Link, Endpoint], limit_s: float) -> None:
        """Make links to where they are waited for; those that had their names are dropped.

        Raises:
            LinkLost: one could not be made.
        """
        deadline = time.monotonic() + limit_s
        for link in ends:
            self.drop(link)
        for link, end in ends.items():
            sock = self._bound()
            try:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock.connect(_resolved(end.address, end.port)[1])
                sock.sendall(end.token)
            except OSError as error:
                sock.close()
                why = error.strerror or "no answer in time"
                raise LinkLost(
                    f"{link}: {end.address} port {end.port} cannot be reached from {self.name}: "
                    f"{why}"
                ) from error
            self._keep(link, sock)

    def _keep(self, link: Link, sock: socket.socket) -> None:
        self.drop(link)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        tick = struct.pack("ll", 0, round(TICK_S * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        self._sockets[link] = sock

    def _bound(self) -> socket.socket:
        """A socket that is bound to this NIC."""
        try:
            family, where = _resolved(self._address, 0)
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise MeasurementError(f"{self._device}: {self.name}: {error.strerror}") from error
        try:
            if self._interface:
                # Needs CAP_NET_RAW before Linux 5.7.
                with contextlib.suppress(PermissionError):
                    name = os.fsencode(self._interface) + b"\0"
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
            sock.bind(where)
        except OSError as error:
            sock.close()
            raise MeasurementError(
                f"{self._device}: {self.name} cannot be used: {error.strerror}"
            ) from error
        return sock

    def close(self) -> None:
        """Close all."""
        for link in list(self._sockets):
            self.drop(link)
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _resolved(address: str, port: int) -> tuple[int, tuple[str, int] | tuple[str, int, int, int]]:
    """The family of an IP address and what `bind` and `connect` take."""
    found = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    )
    family, _, _, _, where = found[0]
    return family, where  # type: ignore[return-value] # bytes come with AF_UNIX and the like only


def _is_quiet(sock: socket.socket) -> bool:
    """Whether the other end is there and has sent nothing that nobody took."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
