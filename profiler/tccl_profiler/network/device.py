"""A NIC of this host as a device: each of its lanes sends or receives slices over a TCP connection.

NCCL's socket transport does the same: a proxy thread takes what a kernel put into a FIFO in host
memory and sends it, another puts what it receives where a kernel takes it. Here each lane is a
thread, so that the copies of several, which the kernel of the system makes, run side by side.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tccl_profiler import numa
from tccl_profiler.control import ABORT, MAX_LANES, Control
from tccl_profiler.host.lane import HostEnd
from tccl_profiler.host.mapped import MappedSpaces
from tccl_profiler.host.waiting import flag_of, nap_exactly, own_clock, released
from tccl_profiler.links import Endpoint
from tccl_profiler.messages import Peer, Pinged, Run, Start, Started
from tccl_profiler.network.lane import NicLane, Stopped
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
    flag: ctypes.c_uint64


class NicDevice:
    """A NIC that answers to `LinkedDevice`."""

    def __init__(self) -> None:
        self._opened: _Opened | None = None
        self._spaces = MappedSpaces("a NIC that is not open")
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self._stop = False

    def open(self, start: Start, control: Control) -> tuple[Started, tuple[int, ...]]:
        """Pin the calling thread and those it starts; find the NIC.

        Raises:
            MeasurementError: the CPUs are not open to this process, or there is no such NIC.
        """
        if start.cpus:
            numa.pin_to_cpus(start.cpus)
        nic = Nic(start.device, start.address, start.interface)
        self._spaces = MappedSpaces(start.device)
        self._opened = _Opened(start=start, control=control, nic=nic, flag=flag_of(control))
        started = Started(
            pid=os.getpid(), name=nic.name, lanes=LANES, arena_bytes=0, handle=b"", memory_bytes=0
        )
        return started, ()

    def meet(self, peers: Mapping[str, tuple[Peer, int | None]]) -> None:
        """Map the arenas that are this host's memory; the others a NIC does not reach."""
        for space, (peer, descriptor) in peers.items():
            if descriptor is not None:
                self.share(space, Segment.attach(descriptor, peer.size, space))

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
        if self._threads:
            raise MeasurementError(f"{name} still runs a program: finish it first")
        if run.program.copies or len(lanes) > MAX_LANES:
            raise MeasurementError(
                f"{name} is a NIC: at most {MAX_LANES} lanes and no copies are right"
            )
        self._failures, self._stop = [], False
        work = [self._repeats_of(opened, run, lane) for lane in lanes]
        # Daemons: a worker that is told to end must not wait for its lanes.
        self._threads = [
            threading.Thread(
                target=self._run_lane,
                args=(opened, run, number, link, repeats),
                name=f"lane {number} of {name}",
                daemon=True,
            )
            for number, (link, repeats) in enumerate(work)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until everything queued has run.

        Raises:
            LinkLost: a link broke.
            MeasurementError: what else ended it early.
        """
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._failures:
            failure = self._failures[0]
            if isinstance(failure, MeasurementError):
                raise failure
            raise MeasurementError(
                f"lanes failed: {type(failure).__name__}: {failure}"
            ) from failure

    def ping(self, count: int) -> Pinged:
        """Read the clock three times a ping: a NIC's lanes go by the host's."""
        return own_clock(count)

    def close(self) -> None:
        """Stop what runs, close all links, give all memory back."""
        self._stop = True
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

    def _stopping(self) -> bool:
        return self._stop or self._opened is None or self._opened.flag.value == ABORT

    def _repeats_of(self, opened: _Opened, run: Run, lane: Lane) -> tuple[Link, list[NicLane]]:
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
                    stopping=self._stopping,
                )
            )
        return lane.link, repeats

    def _run_lane(
        self, opened: _Opened, run: Run, number: int, link: Link, repeats: Sequence[NicLane]
    ) -> None:
        """A thread's body: one lane's repeats in order."""
        clean = False
        try:
            nap_exactly()
            for repeat, lane in enumerate(repeats):
                self._run_repeat(opened, run, number, repeat, lane)
            clean = True
        except Stopped:
            pass
        except BaseException as error:
            self._failures.append(error)
            # The other lanes' links are of no use to this run any more.
            self._stop = True
        finally:
            if not clean:
                # Something may be under way: the other end must not take it for the next repeat's.
                opened.nic.drop(link)

    def _run_repeat(
        self, opened: _Opened, run: Run, number: int, repeat: int, lane: NicLane
    ) -> None:
        """Say that the lane is there, wait for the flag, move, report."""
        epoch = run.epoch + repeat
        records = opened.control.records(opened.start.slot, repeat, len(run.program.lanes))
        records["resident"][number] = epoch
        start = released(opened.flag, epoch, run.patience_ns, self._stopping)
        if start:
            stop_at = start + run.warm_ns + run.window_ns
            lane.run(start + run.warm_ns, stop_at, stop_at + run.patience_ns)
        records[number] = lane.report(epoch, start)
        records["finished"][number] = epoch
        if not start:
            raise Stopped


def _slots(end: HostEnd, size: int) -> tuple[memoryview, ...]:
    """The slices of a FIFO, as what a socket sends from and receives into."""
    return tuple(
        memoryview((ctypes.c_ubyte * size).from_address(end.data + i * size)).cast("B")
        for i in range(end.slices)
    )
