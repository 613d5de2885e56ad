"""A NIC of this host as a device: each of its lanes sends or receives slices over a TCP connection.

NCCL's socket transport does the same: a proxy thread takes what a kernel put into a FIFO in host
memory and sends it, another puts what it receives where a kernel takes it. Here each lane is a
thread, so that the copies of several, which the kernel of the system makes, run side by side.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tccl_profiler import numa
from tccl_profiler.control import MAX_LANES, Control
from tccl_profiler.host.lane import HostEnd
from tccl_profiler.host.mapped import MappedSpaces, lanes_failed
from tccl_profiler.host.waiting import own_clock
from tccl_profiler.links import Endpoint
from tccl_profiler.messages import Peer, Pinged, Run, Start, Started
from tccl_profiler.network.crew import Crew
from tccl_profiler.network.lane import NicLane
from tccl_profiler.network.sockets import Nic
from tccl_profiler.program import Lane, Link
from tccl_profiler.shared_memory import Segment
from tccl_py.errors import MeasurementError

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
