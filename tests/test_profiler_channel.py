"""Messages between two processes of the profiler, and the server that answers them."""

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

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_profiler import protocol
from tccl_profiler.protocol import (
    Connection,
    ConnectionClosed,
    ConnectionTimeout,
    Envelope,
    Failed,
    Release,
    Sign,
    wait_for,
)
from tccl_py.errors import MeasurementError


def failed(text):
    return Failed(kind="lost", what=text)


def open_fds():
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}


def received(connection, within_s=9.0):
    """The next message, waited for."""
    until = time.monotonic() + within_s
    while (envelope := connection.poll()) is None:
        assert wait_for([connection], until - time.monotonic()), "nothing came"
    return envelope


@pytest.fixture(autouse=True)
def no_descriptor_is_leaked():
    before = open_fds()
    yield
    assert open_fds() == before


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with (
        closing(Connection(left, peer="worker of G0")) as one,
        closing(Connection(right, peer="controller")) as two,
    ):
        yield one, two


@pytest.fixture
def raw():
    """A connection, and a bare socket that can say anything to it."""
    left, right = socket.socketpair()
    with left, closing(Connection(right, peer="worker of G0")) as connection:
        yield left, connection


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
    assert two.poll() is None
    one.tell(3, Release(at_ns=5))
    one.tell(4, Sign.ABORT)
    assert received(two) == Envelope(3, Release(at_ns=5))
    assert received(two) == Envelope(4, Sign.ABORT)
    two.tell(4, failed("abc"))
    assert received(one) == Envelope(4, failed("abc"))


def test_a_sign_of_life_is_heard_and_not_handed_on_and_one_that_leaves_is_no_loss(pair):
    one, two = pair
    two.heard_s = 0.0
    one.tell(0, Sign.HEARTBEAT)
    assert wait_for([two], 9) and two.poll() is None
    assert two.heard_s > 0
    assert not two.has_ended()
    one.tell(0, Sign.LEAVING)
    one.close()
    assert two.has_ended() and not two.has_died()


def test_a_message_larger_than_the_socket_buffer_arrives_whole(pair):
    one, two = pair
    text = os.urandom(3 << 20).hex()
    sender = threading.Thread(target=one.tell, args=(1, failed(text)))
    sender.start()
    envelope = received(two)
    sender.join()
    assert envelope.message.what == text


@pytest.mark.parametrize("count", [1, 250])
def test_descriptors_arrive_in_order_closed_on_exec_and_are_closed_if_nobody_takes_them(
    pair, files, count
):
    one, two = pair
    for fds in ((), files[:count], files[:3], ()):
        one.tell(len(fds), Sign.DONE, fds)
    assert received(two).number == 0 and two.take_fds() == ()
    assert received(two).number == count
    fds = two.take_fds()
    try:
        assert [os.pread(fd, 9, 0) for fd in fds] == [str(n).encode() for n in range(count)]
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in fds)
    finally:
        for fd in fds:
            os.close(fd)
    before = open_fds()
    assert received(two).number == 3 and len(open_fds()) == len(before) + 3
    assert received(two).number == 0 and open_fds() == before


def test_a_message_that_comes_byte_by_byte_is_put_together(raw, files):
    sock, connection = raw
    first, *most = (bytes([byte]) for byte in frame(Envelope(9, Sign.DONE), fds=1))
    socket.send_fds(sock, [first], files[:1])
    for byte in most:
        assert connection.poll() is None
        sock.send(byte)
    assert received(connection).number == 9
    (fd,) = connection.take_fds()
    assert os.pread(fd, 9, 0) == b"0"
    os.close(fd)


def test_a_peer_that_does_not_read_ends_the_send_in_time(pair, monkeypatch):
    one, _ = pair
    monkeypatch.setattr(protocol, "SEND_S", 0.05)
    with pytest.raises(ConnectionTimeout, match=r"worker of G0 did"):
        one.tell(1, failed("x" * (8 << 20)))
    for use in (lambda: one.tell(2, Sign.DONE), one.poll):
        with pytest.raises(ConnectionClosed, match=r"the connection to worker"):
            use()
    assert wait_for([one], 9)


CHILD = """
import signal, socket, sys
sys.path.insert(0, sys.argv[2])
from test_profiler_channel import Connection, Sign, received
connection = Connection(socket.socket(fileno=int(sys.argv[1])), peer="controller")
number = received(connection).number
open(*connection.take_fds(), "w").write(f"rank {number}")
connection.tell(number + 1, Sign.DONE)
signal.pause()
"""


def test_a_killed_process_is_noticed_after_its_last_words(tmp_path):
    ours, theirs = socket.socketpair()
    note = (tmp_path / "note").open("w+")
    arguments = [str(theirs.fileno()), str(Path(__file__).parent)]
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], pass_fds=[theirs.fileno()])
    theirs.close()
    with note, closing(Connection(ours, peer="worker of G0")) as connection:
        connection.tell(1, Sign.DONE, [note.fileno()])
        assert received(connection, 60) == Envelope(2, Sign.DONE)
        assert os.pread(note.fileno(), 9, 0) == b"rank 1"
        child.send_signal(signal.SIGKILL)
        for use in (lambda: received(connection), lambda: connection.tell(3, Sign.DONE)):
            with pytest.raises(ConnectionClosed, match=r"^worker of G0 has gone$"):
                use()
        assert connection.has_died()
        assert child.wait() == -signal.SIGKILL


def test_last_words_of_a_peer_that_left_can_be_received_after_a_send_failed(pair):
    one, two = pair
    one.tell(1, Sign.DONE)  # never read: the socket is reset, not only closed
    two.tell(1, failed("no memory"))
    two.close()
    with pytest.raises(ConnectionClosed):
        one.tell(2, Sign.DONE)
    assert received(one).message == failed("no memory")
    with pytest.raises(ConnectionClosed):
        one.poll()


@pytest.mark.parametrize("part", [3, 10])
def test_a_peer_that_goes_in_the_middle_of_a_message_is_told_apart(raw, part):
    sock, connection = raw
    sock.sendall(frame(Envelope(1, Sign.DONE))[:part])
    sock.close()
    with pytest.raises(ConnectionClosed, match=r"worker of G0 has gone in the middle"):
        connection.poll()


def test_a_message_that_does_not_fit_is_dropped_and_the_next_one_received(raw, files):
    sock, connection = raw
    socket.send_fds(sock, [frame((1, {"type": "Stranger"}), fds=2)], files[:2])
    bad = b"\xc1\xc1\xc1", b"\x92\x01\x82\xa4type\xa6Failed\xa4what\xa3\xff\xfe\xfd"
    for body in bad:
        sock.sendall(struct.pack("!IH", len(body), 0) + body)
    sock.sendall(frame(Envelope(2, Sign.DONE)))
    before = open_fds()
    for _ in (files, *bad):
        with pytest.raises(MeasurementError, match=r"message of worker of"):
            received(connection)
    assert received(connection) == Envelope(2, Sign.DONE)
    assert open_fds() == before


@given(st.binary(max_size=40), st.integers(0, 40))
def test_any_bytes_are_a_message_or_one_that_does_not_fit(noise, at):
    body = msgspec.msgpack.encode(Envelope(1, failed("words of a device")))
    at = min(at, len(body))
    ours, theirs = socket.socketpair()
    with ours, closing(Connection(theirs, peer="worker of G0")) as connection:
        for one in (noise, body[:at] + noise + body[at + len(noise) :]):
            ours.sendall(struct.pack("!IH", len(one), 0) + one)
            try:
                connection.poll()
            except ConnectionClosed:
                raise
            except MeasurementError as error:
                assert str(error).startswith("message of worker of G0 does not fit: ")


def test_an_oversized_message_closes_the_connection_before_it_is_read(raw):
    sock, connection = raw
    sock.sendall(struct.pack("!IH", (64 << 20) + 1, 0))
    with pytest.raises(MeasurementError, match="worker of G0 announced"):
        connection.poll()
    with pytest.raises(ConnectionClosed, match="is closed"):
        connection.poll()


def test_what_cannot_be_sent_is_refused_before_the_first_byte(pair, monkeypatch):
    one, two = pair
    monkeypatch.setattr(protocol, "LARGEST_BODY", 100)
    with pytest.raises(MeasurementError, match=r"to worker of G0"):
        one.tell(1, failed("x" * 100))
    one.tell(2, Sign.DONE)
    assert received(two).number == 2


def test_too_few_open_files_allowed_is_an_error_and_leaks_none(pair, files):
    one, two = pair
    one.tell(1, Sign.DONE, files[:20])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before) + 5, hard))
    try:
        with pytest.raises(MeasurementError, match="controller sent 20 file descriptors") as caught:
            received(two)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "a higher limit of" in str(caught.value)
    assert len(open_fds()) == len(before) - 1


def test_two_threads_send_while_another_receives(pair):
    one, two = pair

    def send():
        for number in range(500):
            one.tell(number, Sign.DONE)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    numbers = [received(two).number for _ in range(1000)]
    for thread in threads:
        thread.join()
    assert sorted(numbers) == sorted([*range(500)] * 2)
