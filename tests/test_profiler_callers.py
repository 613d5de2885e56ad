"""Callers of a listening socket: who is let in, and that strangers keep nobody waiting."""

import contextlib
import errno
import socket
import threading

import pytest

from tccl_profiler import callers
from tccl_profiler.callers import accept_callers, listening, tokens_for

HERE = ("127.0.0.1",)


def connected(listeners, data=b""):
    sock = socket.create_connection(listeners[0].getsockname())
    sock.sendall(data)
    return sock


@pytest.fixture
def listeners():
    with listening(HERE) as opened:
        yield opened


@pytest.fixture
def stack():
    with contextlib.ExitStack() as opened:
        yield opened


@pytest.mark.parametrize("data", [b"", b"x", b"GET / HTTP/1.1\r\n\r\n"], ids=len)
def test_callers_come_in_behind_hundreds_of_strangers(listeners, stack, data):
    tokens = tokens_for("ab")
    strangers = [stack.enter_context(connected(listeners, data)) for _ in range(300)]
    friends = {
        name: stack.enter_context(connected(listeners, token + b"more"))
        for token, name in tokens.items()
    }
    for name, sock in accept_callers(listeners, tokens, 60.0):
        with sock:
            assert sock.getpeername() == friends.pop(name).getsockname()
            assert sock.recv(9) == b"more"
    assert friends == {}
    for stranger in strangers:
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_strangers_are_dropped_before_descriptors_run_out(listeners, stack, monkeypatch):
    monkeypatch.setattr(callers, "_MOST_STRANGERS", 3)
    ((token, _),) = (tokens := tokens_for("a")).items()
    first, *others = [stack.enter_context(connected(listeners)) for _ in range(5)]

    def call_when_one_was_dropped():
        first.settimeout(10)
        assert first.recv(1) == b""
        others[-1].sendall(token)

    thread = threading.Thread(target=call_when_one_was_dropped)
    thread.start()
    ((_, sock),) = accept_callers(listeners, tokens, 60.0)
    thread.join()
    sock.close()


def test_a_token_may_come_byte_by_byte(listeners, stack):
    ((token, _),) = (tokens := tokens_for("a")).items()
    friend, rest = stack.enter_context(connected(listeners)), list(token)

    def send_one():
        if rest:
            friend.sendall(bytes([rest.pop(0)]))

    ((_, sock),) = accept_callers(listeners, tokens, 60.0, send_one)
    sock.close()


def test_the_time_is_up_while_strangers_still_come(listeners, stack):
    """One stranger is always waiting to be accepted, so there is no quiet moment."""
    stack.enter_context(connected(listeners))
    found = accept_callers(
        listeners,
        tokens_for("a"),
        0.2,
        lambda: stack.enter_context(connected(listeners)),
    )
    assert list(found) == []


def test_a_caller_is_let_in_once(listeners, stack):
    tokens = tokens_for("ab")
    token = next(iter(tokens))
    for _ in range(2):
        stack.enter_context(connected(listeners, token))
    arrived = list(accept_callers(listeners, tokens, 0.2))
    assert [name for name, _ in arrived] == ["a"]
    arrived[0][1].close()


def test_listening_is_on_the_named_addresses_alone():
    with listening(("127.0.0.2", "127.0.0.3", "127.0.0.2")) as opened:
        assert [one.getsockname()[0] for one in opened] == ["127.0.0.2", "127.0.0.3"]
        for host, port in (one.getsockname() for one in opened):
            socket.create_connection((host, port)).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))


def test_an_address_of_another_host_cannot_be_listened_on():
    with pytest.raises(OSError, match="assign") as caught, listening(("192.0.2.77",)):
        pass
    assert caught.value.errno == errno.EADDRNOTAVAIL
