"""A NIC of this host as a device: each of its lanes sends or receives slices over a TCP connection.

NCCL's socket transport does the same: a proxy thread takes what a kernel put into a FIFO in host
memory and sends it, another puts what it receives where a kernel takes it. Here each lane is a
thread, so that the copies of several, which the kernel of the system makes, run side by side.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from tccl_profiler import linux as numa
from tccl_profiler.host.lane import (
    HostEnd,
    MappedSpaces,
    flag_of,
    lanes_failed,
    nap_exactly,
    own_clock,
    pause,
    released,
)
from tccl_profiler.messages import Endpoint, LinkLost, Peer, Pinged, Run, Start, Started, names
from tccl_profiler.program import Lane, Link
from tccl_profiler.shared_memory import ABORT, MAX_LANES, Control, Segment, differing, write_pattern
from tccl_py.errors import MeasurementError

# The sockets behind links: made by three steps, kept for later sets, and looked at.


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


# A NIC's lane for one repeat: slices from a FIFO to a socket, or from a socket to a FIFO.


_HEADER = struct.Struct("!IIQ")
"""Repeat, bytes of the slice (0: there is no more), number of the slice."""


class Stopped(Exception):  # noqa: N818 - no error: the controller said so
    """All lanes are to stop; what is on the way over the link stays there."""


class NicLane:
    """A lane of one repeat over one link.

    Args:
        link: its name.
        sock: blocks for a moment at most.
        end: the FIFO or memory beside this NIC.
        slots: the slices of that, in order.
        sends: whether slices go out.
        repeat: its number, the same at the other end.
        check: at memory that is nobody's FIFO, send the pattern or compare with it.
        stopping: whether all lanes are to stop.
    """

    def __init__(
        self,
        link: Link,
        sock: socket.socket,
        *,
        end: HostEnd,
        slots: tuple[memoryview, ...],
        sends: bool,
        repeat: int,
        check: bool,
        stopping: Callable[[], bool],
    ) -> None:
        self._link, self._socket = link, sock
        self._end, self._slots, self._sends = end, slots, sends
        self._slice_bytes = len(slots[0])
        self._repeat, self._check = repeat, check
        self._stopping = stopping
        self._errors = self._moved = 0

    @property
    def link(self) -> Link:
        """Its link."""
        return self._link

    def run(self, warm_at: int, stop_at: int, given_up_at: int) -> None:
        """Move slices until the clock says stop, and leave the link clean.

        Args:
            warm_at: end of the warm-up, in ns of CLOCK_MONOTONIC, as the others.
            stop_at: when no further slice is begun.
            given_up_at: when the other end is taken for lost.

        Raises:
            LinkLost: the other end has gone, does not go on, or is not in step.
            Stopped: in the midst of it.
        """
        if self._sends:
            self._send(warm_at, stop_at, given_up_at)
        else:
            self._receive(warm_at, stop_at, given_up_at)

    def report(self, epoch: int, start: int) -> tuple[int, ...]:
        """The lane's record (`control.RECORD`), not finished yet."""
        end = self._end
        counted, nothing = (end.first, end.last, end.count), (0, 0, 0)
        sides = (*counted, *nothing) if self._sends else (*nothing, *counted)
        return (epoch, start, end.last, *sides, self._errors, self._moved, 0)

    def _send(self, warm_at: int, stop_at: int, given_up_at: int) -> None:
        end, size, number = self._end, self._slice_bytes, 0
        while self._ready(stop_at):
            if self._check and not end.waits:
                address = end.data + number % end.slices * size
                write_pattern(address, size, end.seed, number)
            header = _HEADER.pack(self._repeat, size, number)
            self._push((memoryview(header), self._slots[number % end.slices]), given_up_at)
            self._moved += size
            number += 1
            # What went out later went out beside others that had stopped.
            if time.monotonic_ns() >= stop_at:
                break
            end.served(warm_at)
        self._push((memoryview(_HEADER.pack(self._repeat, 0, number)),), given_up_at)

    def _receive(self, warm_at: int, stop_at: int, given_up_at: int) -> None:
        end, size, number = self._end, self._slice_bytes, 0
        while self._ready(stop_at):
            if not self._announced(number, given_up_at):
                return
            self._pull(self._slots[number % end.slices], given_up_at)
            self._moved += size
            number += 1
            if time.monotonic_ns() >= stop_at:
                break
            if self._check and not end.waits:
                address = end.data + end.done % end.slices * size
                self._errors += differing(address, size, end.seed, end.done)
            end.served(warm_at)
        spare = memoryview(bytearray(size))
        while self._announced(number, given_up_at):
            self._pull(spare, given_up_at)
            number += 1

    def _ready(self, stop_at: int) -> bool:
        """Wait for a slice to send or room to receive one; False when the time is over."""
        rounds = 0
        while time.monotonic_ns() < stop_at:
            if self._end.ready():
                return True
            if self._stopping():
                raise Stopped
            pause(rounds)
            rounds += 1
        return False

    def _announced(self, number: int, given_up_at: int) -> bool:
        """Whether another slice comes, and not the end of the repeat.

        Raises:
            LinkLost: what comes is not what should.
        """
        header = bytearray(_HEADER.size)
        self._pull(memoryview(header), given_up_at)
        repeat, size, said = _HEADER.unpack(header)
        if repeat != self._repeat or size not in (0, self._slice_bytes) or said != number:
            raise LinkLost(
                f"{self._link}: out of step: slice {said} of {size} bytes of repeat {repeat} came "
                f"for slice {number} of {self._slice_bytes} bytes of repeat {self._repeat}"
            )
        return bool(size)

    def _push(self, parts: tuple[memoryview, ...], given_up_at: int) -> None:
        """Send all bytes; they are the socket's then."""
        left = list(parts)
        while left:
            try:
                sent = self._socket.sendmsg(left)
            except OSError as error:
                self._go_on(error, "has taken nothing", given_up_at)
                continue
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]
                self._go_on(None, "does not take all", given_up_at)

    def _pull(self, memory: memoryview, given_up_at: int) -> None:
        """Receive until `memory` is full."""
        while memory:
            try:
                got = self._socket.recv_into(memory, len(memory), socket.MSG_WAITALL)
            except OSError as error:
                self._go_on(error, "has sent nothing", given_up_at)
                continue
            if not got:
                raise LinkLost(f"{self._link} was lost: the other end closed it")
            memory = memory[got:]
            if memory:
                self._go_on(None, "does not send all", given_up_at)

    def _go_on(self, error: OSError | None, what: str, given_up_at: int) -> None:
        """After a call that did not do all: go on, unless it is over."""
        if self._stopping():
            raise Stopped
        if error is not None and not isinstance(error, BlockingIOError):
            raise LinkLost(f"{self._link} was lost: {error.strerror}") from error
        if time.monotonic_ns() > given_up_at:
            other = self._link.receiver if self._sends else self._link.sender
            raise LinkLost(f"{self._link} was lost: {other} {what} for too long")


# The threads of one run of a NIC: one for each lane, and one that waits for the flag for all.


class Crew:
    """Runs the repeats of a NIC's lanes, all lanes of a repeat at once.

    A lane that waits sleeps until it is woken: were all of them to look at the flag again and
    again, they would keep the cores, and the interpreter's lock, from each other.

    Args:
        start: whose they are.
        control: where they are released and report.
        nic: whose links are dropped if the run does not end well.
        run: the order.
    """

    def __init__(self, start: Start, control: Control, nic: Nic, run: Run) -> None:
        self._start, self._control, self._nic, self._run = start, control, nic, run
        self._flag = flag_of(control)
        self._stop = False
        self._failures: list[BaseException] = []
        self._thread: threading.Thread | None = None

    def begin(self, lanes: Sequence[Sequence[NicLane]]) -> None:
        """Start the threads; `lanes[i][r]` is lane i's repeat r."""
        # Daemons: a worker that is told to end must not wait for its lanes.
        self._thread = threading.Thread(
            target=self._lead, args=(lanes,), name=f"lanes of {self._start.device}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Have all lanes stop soon."""
        self._stop = True

    def stopping(self) -> bool:
        """Whether lanes are to stop."""
        return self._stop or self._flag.value == ABORT

    def ended(self) -> BaseException | None:
        """Wait for the end; what ended it early."""
        if self._thread is not None:
            self._thread.join()
        return self._failures[0] if self._failures else None

    def _lead(self, lanes: Sequence[Sequence[NicLane]]) -> None:
        """The body of the thread that waits for the flag."""
        nap_exactly()
        releases: list[SimpleQueue[int]] = [SimpleQueue() for _ in lanes]
        done: SimpleQueue[bool] = SimpleQueue()
        threads = [
            threading.Thread(
                target=self._follow,
                args=(number, repeats, releases[number], done),
                name=f"lane {number} of {self._start.device}",
                daemon=True,
            )
            for number, repeats in enumerate(lanes)
        ]
        well = False
        try:
            for thread in threads:
                thread.start()
            well = all(self._repeat(repeat, releases, done) for repeat in range(self._run.repeats))
        except BaseException as error:
            self._failures.append(error)
            self._stop = True
        finally:
            for one in releases:
                one.put(0)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            if not well:
                # Something may be under way: the other end must not take it for the next repeat's.
                for repeats in lanes:
                    self._nic.drop(repeats[0].link)

    def _repeat(
        self, repeat: int, releases: Sequence[SimpleQueue[int]], done: SimpleQueue[bool]
    ) -> bool:
        """Say that all lanes are there, wait for the flag, wake them; whether all went well."""
        epoch, run = self._run.epoch + repeat, self._run
        records = self._control.records(self._start.slot, repeat, len(releases))
        records["resident"] = epoch
        released_at = released(self._flag, epoch, run.patience_ns, self.stopping)
        if not released_at:
            records["start"] = 0
            records["finished"] = epoch
            return False
        for one in releases:
            one.put(released_at)
        ends = [done.get() for _ in releases]
        return all(ends)

    def _follow(
        self,
        number: int,
        repeats: Sequence[NicLane],
        releases: SimpleQueue[int],
        done: SimpleQueue[bool],
    ) -> None:
        """The body of a lane's thread."""
        nap_exactly()
        for repeat, lane in enumerate(repeats):
            released_at = releases.get()
            if not released_at:
                return
            well = False
            try:
                self._move(number, repeat, lane, released_at)
                well = True
            except Stopped:
                pass
            except BaseException as error:
                self._failures.append(error)
                # The other lanes' links are of no use to this run any more; nor is this one's, and
                # its other end should know at once.
                self._stop = True
                self._nic.drop(lane.link)
            finally:
                done.put(well)

    def _move(self, number: int, repeat: int, lane: NicLane, released_at: int) -> None:
        """Run a lane's repeat, by the clock of its release, and report it."""
        run, epoch, start = self._run, self._run.epoch + repeat, time.monotonic_ns()
        warm_at = released_at + run.warm_ns
        stop_at = warm_at + run.window_ns
        # Sooner than the controller gives up, who could only say which NIC is late.
        lane.run(warm_at, stop_at, stop_at + run.patience_ns // 2)
        records = self._control.records(self._start.slot, repeat, number + 1)
        records[number] = lane.report(epoch, start)
        records["finished"][number] = epoch


LANES = 64
"""NCCL has no more channels than this."""


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What `open` made."""

    start: Start
    control: Control
    nic: Nic


class NicDevice:
    """A NIC that answers to `LinkedDevice`."""

    def __init__(self) -> None:
        self._opened: _Opened | None = None
        self._spaces = MappedSpaces("a NIC that is not open")
        self._crew: Crew | None = None

    def open(self, start: Start, control: Control) -> tuple[Started, tuple[int, ...]]:
        """Pin the calling thread and those it starts; find the NIC.

        Raises:
            MeasurementError: the CPUs are not open to this process, or there is no such NIC.
        """
        if start.cpus:
            numa.pin_to_cpus(start.cpus)
        nic = Nic(start.device, start.address, start.interface)
        self._spaces = MappedSpaces(start.device)
        self._opened = _Opened(start=start, control=control, nic=nic)
        started = Started(
            pid=os.getpid(), name=nic.name, lanes=LANES, arena_bytes=0, handle=b"", memory_bytes=0
        )
        return started, ()

    def meet(self, peers: Mapping[str, tuple[Peer, int | None]]) -> None:
        """Map the arenas that are this host's memory; the others a NIC does not reach."""
        self._spaces.meet(peers)

    def share(self, space: str, segment: Segment) -> None:
        """Take a segment as the memory of a space, in place of the one before."""
        self._spaces.put(space, segment)

    def listen(self, links: Sequence[Link]) -> tuple[Endpoint, ...]:
        """Begin to wait for links, and say where.

        Raises:
            MeasurementError: no port is to be had.
        """
        return self._open().nic.listen(links)

    def connect(self, ends: Mapping[Link, Endpoint], limit_s: float) -> None:
        """Make links to where they are waited for.

        Raises:
            LinkLost: one could not be made.
        """
        self._open().nic.connect(ends, limit_s)

    def accept(self, links: Sequence[Link], limit_s: float) -> None:
        """Wait until links that are listened for have come.

        Raises:
            LinkLost: one did not in time.
        """
        self._open().nic.accept(links, limit_s)

    def usable(self) -> tuple[Link, ...]:
        """The links that a run can use."""
        return self._open().nic.usable()

    def queue(self, run: Run) -> None:
        """Start a thread for each lane, which runs its repeats in turn.

        Raises:
            LinkLost: a lane's link is not there.
            MeasurementError: another run is queued, or the program does not fit this device.
        """
        opened = self._open()
        name, lanes = opened.start.device, run.program.lanes
        if self._crew is not None:
            raise MeasurementError(f"{name} still runs a program: finish it first")
        if run.program.copies or len(lanes) > MAX_LANES:
            raise MeasurementError(
                f"{name} is a NIC: at most {MAX_LANES} lanes and no copies are right"
            )
        crew = Crew(opened.start, opened.control, opened.nic, run)
        crew.begin([self._repeats_of(opened, run, lane, crew) for lane in lanes])
        self._crew = crew

    def finish(self) -> None:
        """Wait until everything queued has run.

        Raises:
            LinkLost: a link broke.
            MeasurementError: what else ended it early.
        """
        crew, self._crew = self._crew, None
        if crew is None:
            return
        failure = crew.ended()
        if isinstance(failure, MeasurementError):
            raise failure
        if failure is not None:
            raise lanes_failed(failure) from failure

    def ping(self, count: int) -> Pinged:
        """Read the clock three times a ping: a NIC's lanes go by the host's."""
        return own_clock(count)

    def close(self) -> None:
        """Stop what runs, close all links, give all memory back."""
        if self._crew is not None:
            self._crew.stop()
        with contextlib.suppress(MeasurementError):
            self.finish()
        if self._opened is not None:
            self._opened.nic.close()
        self._spaces.close()
        self._opened = None

    def _open(self) -> _Opened:
        if self._opened is None:
            raise MeasurementError("this device is not open")
        return self._opened

    def _repeats_of(self, opened: _Opened, run: Run, lane: Lane, crew: Crew) -> list[NicLane]:
        """A lane's repeats, each with counters of its own at the same memory."""
        shape = lane.incoming or lane.outgoing
        if shape is None or lane.link is None or (lane.incoming and lane.outgoing):
            raise MeasurementError("a NIC's lane has a link, and an end beside it")
        if shape.data.space.startswith("G") and not self._spaces.has(shape.data.space):
            raise MeasurementError(
                f"{opened.start.device} cannot reach {shape.data.space}'s memory: TCP sends from "
                "host memory and receives into it; name that between the two, as "
                f"{shape.data.space}->{shape.data.space}->C0->{opened.start.device}"
            )
        sock = opened.nic.socket_of(lane.link)
        size, sends = lane.slice_bytes, lane.incoming is not None
        repeats = []
        for repeat in range(run.repeats):
            end = self._spaces.end(shape, size, repeat=repeat, fills=not sends)
            repeats.append(
                NicLane(
                    lane.link,
                    sock,
                    end=end,
                    slots=_slots(end, size),
                    sends=sends,
                    repeat=repeat,
                    check=run.check,
                    stopping=crew.stopping,
                )
            )
        return repeats


def _slots(end: HostEnd, size: int) -> tuple[memoryview, ...]:
    """The slices of a FIFO, as what a socket sends from and receives into."""
    return tuple(
        memoryview((ctypes.c_ubyte * size).from_address(end.data + i * size)).cast("B")
        for i in range(end.slices)
    )
