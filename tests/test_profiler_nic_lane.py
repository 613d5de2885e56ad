"""A NIC's lane at one end of a socket, and whatever the test does at the other."""

import contextlib
import ctypes
import socket
import struct
import threading
import time

import numpy as np
import pytest

from tccl_profiler.host_device import HostEnd
from tccl_profiler.program import Address, End, Lane, Link
from tccl_profiler.protocol import LinkLost
from tccl_profiler.shared_memory import differing, write_pattern
from tccl_profiler.tcp import TcpLane
from tests.profiler_pools import until

LINK = Link("h0.N0", "h1.N0", 3)
SIZE, SLICES = 4096, 4
HEADER = struct.Struct("!IIQ")
MS = 1_000_000


class Wire:
    """A lane over memory of its own, as a FIFO or without counters, and the socket's other end."""

    def __init__(self, *, sends, fifo=True, repeat=0, check=False):
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.settimeout(10)
        self.memory = np.zeros(SIZE * SLICES, np.uint8)
        self.wait, self.post = ctypes.c_uint64(0), ctypes.c_uint64(0)
        address = self.memory.ctypes.data
        self.end = HostEnd(
            data=address,
            slices=SLICES,
            seed=7,
            ahead=0 if sends else SLICES,
            wait=self.wait if fifo else None,
            post=self.post if fifo else None,
        )
        side, other = ("incoming", "outgoing") if sends else ("outgoing", "incoming")
        place = End(data=Address("C0", 0), slices=SLICES, seed=7)
        self.lane = TcpLane(
            share=Lane(slice_bytes=SIZE, link=LINK, **{side: place}),
            link=LINK,
            sock=self.ours,
            repeat=repeat,
            check=check,
            **{side: self.end, other: HostEnd()},
        )

    def run(self, *, lasting_ms=30, patience_ms=200, warm_ms=0):
        now = time.monotonic_ns()
        stop_at = now + lasting_ms * MS
        for moved in self.lane.turns(now + warm_ms * MS, stop_at, stop_at + 2 * patience_ms * MS):
            if not moved:
                time.sleep(0.0001)

    @contextlib.contextmanager
    def running(self, **more):
        """The lane in a thread; what it raised, or None, is in `self.raised`."""
        self.raised = None

        def body():
            try:
                self.run(**more)
            except LinkLost as error:
                self.raised = error

        thread = threading.Thread(target=body)
        thread.start()
        try:
            yield
        finally:
            thread.join(20)
            assert not thread.is_alive()

    def received(self):
        """All slices up to the end of the repeat: their numbers and bytes."""
        found = []
        while True:
            repeat, size, number = HEADER.unpack(self._exactly(HEADER.size))
            if not size:
                return found, (repeat, number)
            found.append((number, self._exactly(size)))

    def _exactly(self, size):
        data = b""
        while len(data) < size:
            data += self.theirs.recv(size - len(data))
        return data

    def all_taken(self):
        """Whether the lane has what was sent to it, and so is amid it."""
        try:
            self.ours.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        return False

    def report(self):
        names = "resident start end in_first in_last in_count out_first out_last out_count"
        values = self.lane.report(9, 8)
        return dict(zip((*names.split(), "errors", "bytes", "finished"), values, strict=True))


@pytest.fixture
def wire():
    with contextlib.ExitStack() as stack:

        def make(**more):
            made = Wire(**more)
            stack.enter_context(made.ours)
            stack.enter_context(made.theirs)
            return made

        yield make


def test_what_was_put_in_is_sent_in_order_and_then_the_end(wire):
    one = wire(sends=True, repeat=5)
    one.memory[:] = np.repeat(np.arange(1, SLICES + 1, dtype=np.uint8), SIZE)
    one.wait.value = 3
    with one.running():
        found, end = one.received()
    assert one.raised is None
    assert [(number, set(data)) for number, data in found] == [(0, {1}), (1, {2}), (2, {3})]
    assert end == (5, 3)
    assert one.post.value == 3
    row = one.report()
    assert (row["in_count"], row["out_count"], row["bytes"]) == (2, 0, 3 * SIZE)
    assert 0 < row["in_first"] <= row["in_last"] == row["end"]


def test_what_is_received_is_put_in_only_where_there_is_room(wire):
    one = wire(sends=False, repeat=2)
    with one.running(lasting_ms=20_000):
        for number in range(6):
            one.theirs.sendall(HEADER.pack(2, SIZE, number) + bytes([number + 1]) * SIZE)
        for taken in (0, 1):
            one.wait.value = taken
            until(lambda taken=taken: one.post.value == SLICES + taken)
            time.sleep(0.02)
            assert one.post.value == SLICES + taken
        assert list(one.memory[::SIZE]) == [5, 2, 3, 4]
        one.wait.value = SLICES
        one.theirs.sendall(HEADER.pack(2, 0, 6))
    assert one.raised is None
    assert one.report()["out_count"] == 5


def test_what_comes_after_the_time_is_thrown_away_up_to_the_end(wire):
    one = wire(sends=False)
    with one.running(lasting_ms=20, patience_ms=5000):
        one.theirs.sendall(HEADER.pack(0, SIZE, 0) + b"a" * (SIZE // 2))
        until(one.all_taken)
        time.sleep(0.1)
        one.theirs.sendall(b"b" * (SIZE // 2) + HEADER.pack(0, SIZE, 1) + b"c" * SIZE)
        one.theirs.sendall(HEADER.pack(0, 0, 2) + b"the next repeat's")
    assert one.raised is None
    assert one.post.value == 0
    assert one.ours.recv(100) == b"the next repeat's"
    assert one.report()["end"] == 0


@pytest.mark.parametrize("sends", [True, False])
def test_without_a_fifo_the_pattern_is_sent_and_compared(wire, sends):
    one = wire(sends=sends, fifo=False, check=True)
    if sends:
        with one.running(lasting_ms=5, patience_ms=5000):
            found, _ = one.received()
        assert found
        for number, data in found[:10]:
            arrived = np.frombuffer(data, np.uint8)
            assert differing(arrived.ctypes.data, SIZE, 7, number) == 0
        return
    slices = np.zeros((2, SIZE), np.uint8)
    with one.running(lasting_ms=1000):
        for number, data in enumerate(slices):
            write_pattern(data.ctypes.data, SIZE, 7, number)
        slices[1, 100] ^= 1
        for number, data in enumerate(slices):
            one.theirs.sendall(HEADER.pack(0, SIZE, number) + bytes(data))
        one.theirs.sendall(HEADER.pack(0, 0, 2))
    assert one.report()["errors"] == 1


@pytest.mark.parametrize(
    "header", [(1, SIZE, 0), (0, SIZE, 1), (0, SIZE + 16, 0), (0, 0, 1), (0, 2**31, 0)]
)
def test_what_is_not_the_next_slice_of_this_repeat_is_out_of_step(wire, header):
    one = wire(sends=False)
    one.theirs.sendall(HEADER.pack(*header))
    with pytest.raises(LinkLost, match=r"^link 3 from h0\.N0"):
        one.run()


def test_an_end_that_is_closed_amid_a_slice_is_told(wire):
    one = wire(sends=False)
    one.theirs.sendall(HEADER.pack(0, SIZE, 0) + b"half")
    one.theirs.close()
    with pytest.raises(LinkLost, match=r"was lost: the other"):
        one.run()


def test_an_end_that_takes_no_more_is_told(wire):
    one = wire(sends=True, fifo=False)
    one.theirs.close()
    with pytest.raises(LinkLost, match=r"^link 3 from .*"):
        one.run()


@pytest.mark.parametrize(
    ("sends", "sentence"),
    [(True, r"h1\.N0 takes nothing"), (False, r"h0\.N0 sends nothing")],
)
def test_an_end_that_does_nothing_is_given_up_in_time(wire, sends, sentence):
    one = wire(sends=sends, fifo=False)
    begun = time.monotonic()
    with pytest.raises(LinkLost, match=rf"was lost: {sentence} for too long$"):
        one.run(lasting_ms=10, patience_ms=100)
    assert 0.1 < time.monotonic() - begun < 60
