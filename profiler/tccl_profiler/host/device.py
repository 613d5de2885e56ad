"""A core of this host as a device: its memory is shared memory, its lanes are copies by the core.

A worker process is one device, pinned to its core; one thread runs all its lanes in turn, a slice
at a time. FIFOs, counters, the flag, clocks and records are those of cuda/pump.cu, so that
everything above the device is exercised and what is measured is real: this host's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt

from tccl_profiler import linux as numa
from tccl_profiler.host.lane import (
    HostLane,
    MappedSpaces,
    flag_of,
    lanes_failed,
    nap_exactly,
    own_clock,
    pause,
    released,
)
from tccl_profiler.host.machine import cpu_model
from tccl_profiler.messages import Pace, Peer, Pinged, Run, Start, Started
from tccl_profiler.nccl_links import Communicators, LinkedByNccl
from tccl_profiler.program import COUNTER_AREA_BYTES, Copy, Lane
from tccl_profiler.shared_memory import ABORT, MAX_LANES, Control, Segment, create_segment
from tccl_py.errors import MeasurementError

# What NCCL, or what stands for it, carries between host memories: a thread for each copy.


class HostMemory:
    """Host memory as communicators use it; implements `nccl.communicators.Memory`.

    Args:
        sent: what is sent from.
        kept: what is kept in, as long.
    """

    def __init__(self, sent: npt.NDArray[np.uint8], kept: npt.NDArray[np.uint8]) -> None:
        self._arrays = {one.ctypes.data: one for one in (sent, kept)}
        self.sent, self.kept, self.size = sent.ctypes.data, kept.ctypes.data, len(sent)

    def enter(self) -> None:
        """Nothing: memory is every thread's."""

    def write(self, address: int, data: bytes) -> None:
        """Put bytes at the beginning of what is sent or kept."""
        self._arrays[address][: len(data)] = np.frombuffer(data, np.uint8)

    def read(self, address: int, size: int) -> bytes:
        """The first bytes of what is sent or kept."""
        return self._arrays[address][:size].tobytes()

    def stream(self) -> int:
        """None: what is asked for is done when the call returns."""
        return 0

    def settle(self) -> None:
        """Nothing is under way."""


class CarriedCopies:
    """The threads of one run.

    Args:
        run: the order.
        control: where copies are released.
        communicators: what moves bytes.
        stopping: whether all is to end.
    """

    def __init__(
        self,
        run: Run,
        control: Control,
        communicators: Communicators,
        stopping: Callable[[], bool],
    ) -> None:
        self._run, self._flag = run, flag_of(control)
        self._communicators, self._stopping = communicators, stopping
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def begin(self, copy: Copy, pace: Pace, stamps: Sequence[npt.NDArray[np.uint64]]) -> None:
        """Start a copy's thread; `stamps` are those of each repeat."""
        # A daemon: what it waits for may never come.
        thread = threading.Thread(
            target=self._carry, args=(copy, pace, stamps), name=f"{copy.link}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def ended(self) -> BaseException | None:
        """Wait for the end; what ended it early."""
        for thread in self._threads:
            thread.join()
        return self._failures[0] if self._failures else None

    def _carry(self, copy: Copy, pace: Pace, stamps: Sequence[npt.NDArray[np.uint64]]) -> None:
        try:
            nap_exactly()
            for repeat, row in enumerate(stamps):
                self._repeat(copy, pace, row, self._run.epoch + repeat)
        except BaseException as error:
            self._failures.append(error)

    def _repeat(self, copy: Copy, pace: Pace, row: npt.NDArray[np.uint64], epoch: int) -> None:
        assert copy.link is not None
        row[0] = time.monotonic_ns()
        if not released(self._flag, epoch, self._run.patience_ns, self._stopping):
            return
        row[1] = time.monotonic_ns()
        for group in range(pace.groups):
            size = pace.slices * copy.slice_bytes
            self._communicators.move(copy.link, size, 0, sends=copy.sends)
            row[2 + group] = time.monotonic_ns()


LANES = 64
"""A thread runs any number in turn; NCCL has no more channels than this."""


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What `open` made; `user` is sent, `keep` is where arrivals go."""

    start: Start
    control: Control
    user: npt.NDArray[np.uint8]
    keep: npt.NDArray[np.uint8]


class HostDevice(LinkedByNccl):
    """Host memory that answers to `Device`."""

    def __init__(self) -> None:
        self._opened: _Opened | None = None
        self._spaces = MappedSpaces("a device that is not open")
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._carried: CarriedCopies | None = None
        self._stopping = False

    def open(self, start: Start, control: Control) -> tuple[Started, tuple[int, ...]]:
        """Pin the calling thread and those it starts, and take memory near it.

        Raises:
            MeasurementError: the CPUs are not open to this process, or memory is short.
        """
        if start.cpus:
            numa.pin_to_cpus(start.cpus)
        space = start.device
        arena = create_segment(start.arena_bytes, numa_id=None, label=space)
        self._spaces = MappedSpaces(space)
        self._spaces.put(space, arena)
        # Written, so that every page is there and on this core's node before anything is timed.
        user, keep = (np.full(start.user_bytes, 1, np.uint8) for _ in range(2))
        self._opened = _Opened(start=start, control=control, user=user, keep=keep)
        number = int(space[1:])
        self._communicators = Communicators(space, number, HostMemory(user, keep))
        started = Started(
            pid=os.getpid(),
            name=cpu_model(),
            lanes=LANES,
            arena_bytes=start.arena_bytes,
            handle=b"",
            memory_bytes=start.arena_bytes + 2 * start.user_bytes,
        )
        return started, (arena.fd,)

    def meet(self, peers: Mapping[str, tuple[Peer, int | None]]) -> None:
        """Map the other devices' arenas; one without a descriptor is refused when it is used."""
        self._spaces.meet(peers)

    def share(self, space: str, segment: Segment) -> None:
        """Take a segment as the memory of a space, in place of the one before."""
        self._spaces.put(space, segment)

    def queue(self, run: Run) -> None:
        """Clear the arena's counters and start a thread that runs the repeats.

        Raises:
            MeasurementError: another run is queued, or the program does not fit this device.
        """
        opened = self._open()
        if self._thread is not None:
            raise MeasurementError(f"{opened.start.device} still runs a program: finish it first")
        repeats = [self._lanes(opened, run, repeat) for repeat in range(run.repeats)]
        arena = self._spaces.segment(opened.start.device)
        ctypes.memset(arena.address, 0, min(COUNTER_AREA_BYTES, arena.size))
        self._failure, self._stopping = None, False
        self._carried = self._carry(opened, run)
        # A daemon: a worker that is told to end must not wait for its lanes.
        self._thread = threading.Thread(
            target=self._run_all,
            args=(opened, run, repeats),
            name=f"lanes of {opened.start.device}",
            daemon=True,
        )
        self._thread.start()

    def _carry(self, opened: _Opened, run: Run) -> CarriedCopies:
        """Begin what NCCL is to carry."""
        carried = CarriedCopies(run, opened.control, self.communicators, lambda: self._stopping)
        rows = [_stamps(opened, run.paces, repeat) for repeat in range(run.repeats)]
        for number, copy in enumerate(run.program.copies):
            if copy.link is not None:
                stamps = [row[number] for row in rows]
                carried.begin(copy, run.paces[number], [one for one in stamps if one is not None])
        return carried

    def finish(self) -> None:
        """Wait until everything queued has run.

        Raises:
            MeasurementError: what ended it early.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        carried, self._carried = self._carried, None
        failure = self._failure or (carried.ended() if carried is not None else None)
        self._failure = None
        if failure is not None:
            raise lanes_failed(failure) from failure

    def ping(self, count: int) -> Pinged:
        """Read the clock three times a ping: this device's clock is the host's."""
        return own_clock(count)

    def close(self) -> None:
        """Stop what runs and give all memory back; the control segment is the caller's."""
        self._stopping = True
        self.close_links()
        with contextlib.suppress(MeasurementError):
            self.finish()
        self._spaces.close()
        self._opened = None

    def _open(self) -> _Opened:
        if self._opened is None:
            raise MeasurementError("this device is not open")
        return self._opened

    def _lanes(self, opened: _Opened, run: Run, repeat: int) -> list[HostLane]:
        """One repeat's lanes, then its copies, which are lanes with one end here, save NCCL's."""
        name, program = opened.start.device, run.program
        own = [copy.link is None for copy in program.copies]
        shares = [*program.lanes, *(_as_lane(copy) for copy in compress(program.copies, own))]
        if len(shares) > MAX_LANES:
            raise MeasurementError(
                f"{name} would do {len(shares)} things at once, at most {MAX_LANES} are right"
            )
        # The clock stops a lane; a copy may have a pace, and stamps.
        theirs = run.paces or [None] * len(program.copies)
        paces: list[Pace | None] = [None] * len(program.lanes)
        stamps: list[npt.NDArray[np.uint64] | None] = [None] * len(program.lanes)
        paces += compress(theirs, own)
        stamps += compress(_stamps(opened, theirs, repeat), own)
        end = self._spaces.end
        lanes = []
        for number, (share, pace) in enumerate(zip(shares, paces, strict=True)):
            user, user_slices = _memory(opened, share.slice_bytes, number, len(shares))
            size = share.slice_bytes
            lane = HostLane(
                incoming=end(share.incoming, size, repeat=repeat, fills=False),
                outgoing=end(share.outgoing, size, repeat=repeat, fills=True),
                slice_bytes=size,
                user=user,
                user_slices=user_slices,
                coupled=share.coupled,
                cycle=share.cycle,
                check=run.check,
                pace=pace,
                stamps=stamps[number],
            )
            lanes.append(lane)
        return lanes

    def _run_all(self, opened: _Opened, run: Run, repeats: list[list[HostLane]]) -> None:
        """The thread's body: the repeats in order."""
        try:
            nap_exactly()
            for repeat, lanes in enumerate(repeats):
                if lanes:
                    self._run_repeat(opened, run, repeat, lanes)
        except BaseException as error:
            self._failure = error

    def _run_repeat(self, opened: _Opened, run: Run, repeat: int, lanes: list[HostLane]) -> None:
        """Say that all lanes are there, wait for the flag, move, report each lane at its end."""
        epoch = run.epoch + repeat
        records = opened.control.records(opened.start.slot, repeat, len(lanes))
        flag = flag_of(opened.control)
        for lane in lanes:
            lane.stamp(0)
        records["resident"] = epoch
        start = released(flag, epoch, run.patience_ns, lambda: self._stopping)
        warm_at = start + run.warm_ns
        turns: list[Iterator[bool]] = [iter(()) for _ in lanes]
        if start:
            stop_at = warm_at + run.window_ns
            turns = [lane.turns(warm_at, stop_at, stop_at + run.patience_ns) for lane in lanes]
            for lane in lanes:
                lane.stamp(1)
        for number in self._ends(turns, flag):
            records[number] = lanes[number].report(epoch, start)
            records["finished"][number] = epoch

    def _ends(self, turns: list[Iterator[bool]], flag: ctypes.c_uint64) -> Iterator[int]:
        """Give all lanes their turns; yield the number of each that ends, and all at a stop."""
        running, rounds = dict(enumerate(turns)), 0
        while running and flag.value != ABORT and not self._stopping:
            states = {number: next(turn, None) for number, turn in running.items()}
            rounds = 0 if any(states.values()) else rounds + 1
            for number, state in states.items():
                if state is None:
                    del running[number]
                    yield number
            if rounds:
                # There may be more workers than cores: who waits lets the others run.
                pause(rounds)
        yield from running


def _as_lane(copy: Copy) -> Lane:
    return Lane(incoming=copy.source, outgoing=copy.destination, slice_bytes=copy.slice_bytes)


def _memory(
    opened: _Opened, slice_bytes: int, number: int, lanes: int
) -> tuple[tuple[int, int], int]:
    """A lane's part of what is sent and what is kept: its addresses and how many slices they hold.

    Where there are fewer slices than lanes, some lanes have the same.

    Raises:
        MeasurementError: not one slice fits.
    """
    total = opened.start.user_bytes // slice_bytes
    if total < 1:
        raise MeasurementError(
            f"{opened.start.device}: slices of {slice_bytes} bytes do not fit the "
            f"{opened.start.user_bytes} bytes that it sends and keeps"
        )
    offset = number * total // lanes * slice_bytes
    addresses = opened.user.ctypes.data + offset, opened.keep.ctypes.data + offset
    return addresses, max(1, total // lanes)


def _stamps(
    opened: _Opened, paces: Sequence[Pace | None], repeat: int
) -> list[npt.NDArray[np.uint64] | None]:
    """Views of the stamps of each lane that has a pace: queued, released, one for each group."""
    views: list[npt.NDArray[np.uint64] | None] = []
    first = 0
    for pace in paces:
        if pace is None:
            views.append(None)
            continue
        end = first + pace.groups + 2
        views.append(opened.control.stamps(opened.start.slot, repeat, end)[first:])
        first = end
    return views
