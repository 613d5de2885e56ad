"""Messages between two processes of the profiler."""

import fcntl
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_profiler import messages as channels
from tccl_profiler.messages import Connection, ConnectionClosed, ConnectionTimeout
from tccl_py.errors import MeasurementError


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    rank: int


class Data(msgspec.Struct, frozen=True, kw_only=True, tag="data"):
    body: bytes


class Stranger(msgspec.Struct, frozen=True, kw_only=True, tag="stranger"):
    rank: int


class Text(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    text: str
    deep: Any


Message = PeerInfo | Data


def open_fds():
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}


@pytest.fixture(autouse=True)
def no_descriptor_is_leaked():
    before = open_fds()
    yield
    assert open_fds() == before


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with (
        closing(Connection(left, receives=Message, peer="worker of G0")) as one,
        closing(Connection(right, receives=Message, peer="controller")) as two,
    ):
        yield one, two


@pytest.fixture
def raw():
    """A channel, and a bare socket that can say anything to it."""
    left, right = socket.socketpair()
    with left, closing(Connection(right, receives=Message, peer="worker of G0")) as channel:
        yield left, channel


def frame(message, fds=0):
    body = msgspec.msgpack.encode(message)
    return struct.pack("!IH", len(body), fds) + body


@pytest.fixture
def files():
    fds = [os.memfd_create(str(number)) for number in range(300)]
    for number, fd in enumerate(fds):
        os.write(fd, str(number).encode())
    yield fds
    for fd in fds:
        os.close(fd)


def test_messages_arrive_in_order_and_as_the_kind_they_were(pair):
    one, two = pair
    one.send(PeerInfo(rank=3))
    one.send(Data(body=b"abc"))
    assert two.receive(1) == (PeerInfo(rank=3), ())
    assert two.receive(None) == (Data(body=b"abc"), ())
    two.send(PeerInfo(rank=4))
    assert one.receive(0) == (PeerInfo(rank=4), ())


def test_a_message_larger_than_the_socket_buffer_arrives_whole(pair):
    one, two = pair
    body = os.urandom(5 << 20)
    sender = threading.Thread(target=one.send, args=(Data(body=body),))
    sender.start()
    message, _ = two.receive(5)
    sender.join()
    assert message.body == body


@pytest.mark.parametrize("count", [1, 250])
def test_descriptors_arrive_in_order_and_closed_on_exec(pair, files, count):
    one, two = pair
    one.send(Data(body=b"before"))
    one.send(PeerInfo(rank=1), files[:count])
    one.send(Data(body=b"after"))
    assert two.receive(1) == (Data(body=b"before"), ())
    message, fds = two.receive(1)
    try:
        assert message == PeerInfo(rank=1)
        assert [os.pread(fd, 9, 0) for fd in fds] == [str(n).encode() for n in range(count)]
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in fds)
    finally:
        for fd in fds:
            os.close(fd)
    assert two.receive(1) == (Data(body=b"after"), ())


def test_a_message_that_comes_byte_by_byte_is_put_together(raw, files):
    sock, channel = raw
    first, *most, last = (bytes([byte]) for byte in frame(PeerInfo(rank=9), fds=1))
    socket.send_fds(sock, [first], files[:1])
    for byte in most:
        sock.send(byte)
        with pytest.raises(ConnectionTimeout):
            channel.receive(0)
    sock.send(last)
    message, fds = channel.receive(0)
    assert message == PeerInfo(rank=9)
    assert os.pread(fds[0], 9, 0) == b"0"
    os.close(fds[0])


def test_a_timeout_says_who_did_not_send_and_comes_no_sooner_than_asked(pair):
    began = time.monotonic()
    with pytest.raises(ConnectionTimeout) as caught:
        pair[0].receive(0.05)
    assert "worker of G0 sent" in str(caught.value)
    assert isinstance(caught.value, MeasurementError)
    assert time.monotonic() - began >= 0.05


def test_a_peer_that_does_not_read_ends_the_send_in_time(pair):
    one, _ = pair
    with pytest.raises(ConnectionTimeout, match=r"worker of G0 did"):
        one.send(Data(body=bytes(8 << 20)), timeout_s=0.05)
    with pytest.raises(ConnectionClosed, match=r"the connection to worker"):
        one.send(PeerInfo(rank=1))
    with pytest.raises(ConnectionClosed, match=r"the connection to worker"):
        one.receive(1)


CHILD = """
import signal, socket, sys
sys.path.insert(0, sys.argv[2])
from test_profiler_channel import Connection, PeerInfo, Message
channel = Connection(socket.socket(fileno=int(sys.argv[1])), receives=Message)
message, (fd,) = channel.receive(5)
open(fd, "w").write(f"rank {message.rank}")
channel.send(PeerInfo(rank=message.rank + 1))
signal.pause()
"""


def test_a_killed_process_is_noticed_after_its_last_words(tmp_path):
    ours, theirs = socket.socketpair()
    note = (tmp_path / "note").open("w+")
    arguments = [str(theirs.fileno()), str(Path(__file__).parent)]
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], pass_fds=[theirs.fileno()])
    theirs.close()
    with note, closing(Connection(ours, receives=Message, peer="worker of G0")) as channel:
        channel.send(PeerInfo(rank=1), [note.fileno()])
        assert channel.receive(9) == (PeerInfo(rank=2), ())
        assert os.pread(note.fileno(), 9, 0) == b"rank 1"
        killer = threading.Timer(0.05, child.send_signal, [signal.SIGKILL])
        killer.start()
        with pytest.raises(ConnectionClosed, match=r"^worker of G0 has gone$"):
            channel.receive(9)
        with pytest.raises(ConnectionClosed, match=r"^worker of G0 has gone$"):
            channel.send(PeerInfo(rank=3))
        assert child.wait() == -signal.SIGKILL
        killer.join()


def test_last_words_of_a_peer_that_left_can_be_received_after_a_send_failed(pair):
    one, two = pair
    one.send(PeerInfo(rank=1))  # never read: the socket is reset, not only closed
    two.send(Data(body=b"no memory"))
    two.close()
    with pytest.raises(ConnectionClosed):
        one.send(PeerInfo(rank=2))
    assert one.receive(1) == (Data(body=b"no memory"), ())
    with pytest.raises(ConnectionClosed):
        one.receive(1)


@pytest.mark.parametrize("part", [3, 10])
def test_a_peer_that_goes_in_the_middle_of_a_message_is_told_apart(raw, part):
    sock, channel = raw
    sock.sendall(frame(PeerInfo(rank=1))[:part])
    sock.close()
    with pytest.raises(ConnectionClosed, match=r"worker of G0 has"):
        channel.receive(1)


def test_a_message_that_does_not_fit_is_dropped_and_the_next_one_received(raw, files):
    sock, channel = raw
    socket.send_fds(sock, [frame(Stranger(rank=1), fds=2)], files[:2])
    sock.sendall(struct.pack("!IH", 3, 0) + b"\xc1\xc1\xc1" + frame(PeerInfo(rank=2)))
    before = open_fds()
    with pytest.raises(MeasurementError, match=r"message of worker of"):
        channel.receive(1)
    with pytest.raises(MeasurementError, match=r"message of worker of"):
        channel.receive(1)
    assert channel.receive(1) == (PeerInfo(rank=2), ())
    assert open_fds() == before


@given(st.binary(max_size=40), st.integers(0, 40))
def test_any_bytes_are_a_message_or_one_that_does_not_fit(noise, at):
    body = msgspec.msgpack.encode({"type": "text", "text": "words of a device", "deep": [[1]]})
    at = min(at, len(body))
    ours, theirs = socket.socketpair()
    with ours, closing(Connection(theirs, receives=Text, peer="worker of G0")) as channel:
        for one in (noise, body[:at] + noise + body[at + len(noise) :]):
            ours.sendall(struct.pack("!IH", len(one), 0) + one)
            try:
                channel.receive(1)
            except ConnectionClosed:
                raise
            except MeasurementError as error:
                assert str(error).startswith("message of worker of G0 does not fit: ")


def test_text_that_is_not_utf8_does_not_fit(raw):
    sock, channel = raw
    for body in (b"\x82\xa4type\xa5hello\xa4rank\xa1\xff", b"\x81\xa4type\xa2\xff\xfe"):
        sock.sendall(struct.pack("!IH", len(body), 0) + body)
        with pytest.raises(MeasurementError, match=r"message of worker of"):
            channel.receive(1)


def test_an_oversized_message_closes_the_channel_before_it_is_read(raw):
    sock, channel = raw
    sock.sendall(struct.pack("!IH", (64 << 20) + 1, 0))
    with pytest.raises(MeasurementError) as caught:
        channel.receive(1)
    assert "worker of G0 announced" in str(caught.value)
    with pytest.raises(ConnectionClosed, match="is closed"):
        channel.receive(1)


def test_what_cannot_be_sent_is_refused_before_the_first_byte(pair, monkeypatch):
    one, two = pair
    monkeypatch.setattr(channels, "LARGEST_BODY", 100)
    with pytest.raises(MeasurementError, match=r"to worker of G0"):
        one.send(Data(body=bytes(100)))
    one.send(PeerInfo(rank=2))
    assert two.receive(1) == (PeerInfo(rank=2), ())


def test_too_few_open_files_allowed_is_an_error_and_leaks_none(pair, files):
    one, two = pair
    one.send(PeerInfo(rank=1), files[:20])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before) + 5, hard))
    try:
        with pytest.raises(MeasurementError, match=r"controller|worker") as caught:
            two.receive(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "controller sent 20 file descriptors" in str(caught.value)
    assert "a higher limit of" in str(caught.value)
    assert len(open_fds()) == len(before) - 1


def test_one_thread_sends_while_another_receives(pair):
    one, two = pair
    echo = threading.Thread(target=lambda: [two.send(two.receive(5)[0]) for _ in range(500)])
    send = threading.Thread(target=lambda: [one.send(PeerInfo(rank=r)) for r in range(500)])
    echo.start()
    send.start()
    assert [one.receive(5)[0].rank for _ in range(500)] == list(range(500))
    echo.join()
    send.join()


def test_a_closed_channel_says_so_and_closes_twice(pair):
    one, _ = pair
    one.close()
    one.close()
    with pytest.raises(ConnectionClosed, match=r"the connection to worker"):
        one.receive(0)
    assert one.fileno() == -1
