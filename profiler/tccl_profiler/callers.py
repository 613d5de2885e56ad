"""Connections of expected callers, who send a token first, among those of strangers."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

from tccl_py.errors import limit_reached

BACKLOG = 4096  # connections that wait to be accepted; the kernel may allow less
TOKEN_BYTES = 16
_LOOK_S = 0.05
_MOST_STRANGERS = 64

Caller = TypeVar("Caller")


def tokens_for(callers: Iterable[Caller]) -> dict[bytes, Caller]:
    """Return callers by random tokens."""
    return {secrets.token_bytes(TOKEN_BYTES): caller for caller in callers}


@contextlib.contextmanager
def listening(addresses: Sequence[str]) -> Iterator[list[socket.socket]]:
    """Listen on these addresses of this host alone, on a free port of each."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(listen(address)) for address in dict.fromkeys(addresses)]


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of this address alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=BACKLOG)


def accept_callers(
    listeners: Sequence[socket.socket],
    expected: Mapping[bytes, Caller],
    limit_s: float,
    meanwhile: Callable[[], object] = lambda: None,
) -> Iterator[tuple[Caller, socket.socket]]:
    """Yield each caller that sends its token, with the connection, until all came or time is up.

    All connections are read as bytes come, so strangers cost no time. Of many the first are closed.
    """
    until, expected = time.monotonic() + limit_s, dict(expected)
    received: dict[socket.socket, bytes] = {}
    most = len(expected) + _MOST_STRANGERS
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        stack.callback(lambda: list(map(socket.socket.close, received)))
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        while expected and (left_s := until - time.monotonic()) > 0:
            meanwhile()
            for key, _ in selector.select(min(left_s, _LOOK_S)):
                sock = cast(socket.socket, key.fileobj)
                if sock in listeners:
                    for new in _next_of(sock):
                        selector.register(new, selectors.EVENT_READ)
                        received[new] = b""
                    continue
                data = _read(sock, TOKEN_BYTES - len(received[sock]))
                received[sock] += data
                if data and len(received[sock]) < TOKEN_BYTES:
                    continue
                selector.unregister(sock)
                caller = expected.pop(received.pop(sock), None)
                if caller is None:
                    sock.close()
                else:
                    yield caller, sock
            while len(received) > most:
                oldest = next(iter(received))
                selector.unregister(oldest)
                del received[oldest]
                oldest.close()


def _next_of(listener: socket.socket) -> list[socket.socket]:
    """Return the next connection, if it is still there when it is accepted."""
    try:
        sock, _ = listener.accept()
    except OSError as error:
        if limit_reached(error) is not None:
            raise
        return []
    sock.setblocking(False)
    return [sock]


def _read(sock: socket.socket, most: int) -> bytes:
    """Return what has come, nothing from a connection that has ended."""
    with contextlib.suppress(OSError):
        return sock.recv(most)
    return b""
