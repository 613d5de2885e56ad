"""Cores of this host as devices of a machine: shared memory as device memory, copies as lanes.

A worker is one device, pinned to its core; one thread runs all lanes in turn, a slice at a time.
FIFOs, counters, the flag, clocks and records are those of pump.cu. A lane moves slices by memcpy
between mapped spaces, as a block of pump.cu does; the core makes no sums: it forwards incoming
data, and reads one stream less than a reduction.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from tccl_profiler import linux
from tccl_profiler.messages import Pace, Pinged, Run, Share, Start, Started
from tccl_profiler.nccl_links import Communicators, Memory
from tccl_profiler.program import COUNTER_AREA_BYTES, COUNTER_BYTES, COUNTERS, Address, End, Lane
from tccl_profiler.shared_memory import (
    ABORT,
    Control,
    Segment,
    create_segment,
    differing,
    write_pattern,
)
from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import index_of

LANES = 64  # NCCL has no more channels than this; a thread runs any number in turn
CHUNK = 2  # slices of a chunk, as in pump.cu
_SPIN_NS = 50_000
"""Time without progress in which a thread yields the core, before it naps between rounds."""
_NAP_S, _LONG_NAP_S, _NAP_SHARE = 20e-6, 1e-3, 1 / 32
"""The first nap and the longest: a nap is a small share of the wait, and leaves cores to others."""
_NEVER = 1 << 63

Stamps = npt.NDArray[np.uint64]


# Lanes


@dataclass(slots=True, kw_only=True, eq=False)
class HostEnd:
    """One end of a lane in this process's addresses, with progress; `data` 0 is no end.

    `ahead` is how many slices the end may be beyond its counter: a FIFO's length for the writer, 0
    for the reader. x86 keeps a counter's store behind the slice's own stores; on aarch64 the
    interpreter's lock does, which is released and taken again around each memmove.
    """

    data: int = 0
    slices: int = 1
    seed: int = 0
    ahead: int = 0
    wait: ctypes.c_uint64 | None = None
    post: ctypes.c_uint64 | None = None
    done: int = field(default=0, init=False)
    seen: int = field(default=0, init=False)
    first: int = field(default=0, init=False)
    last: int = field(default=0, init=False)
    count: int = field(default=0, init=False)

    @property
    def waits(self) -> bool:
        """Whether another lane fills or empties it."""
        return self.wait is not None

    def ready(self) -> bool:
        """Return whether the next slice can be served, polling the counter only if needed."""
        wait = self.wait
        if wait is None:
            return self.data != 0
        if self.seen + self.ahead > self.done:
            return True
        self.seen = wait.value
        return self.seen + self.ahead > self.done

    def serve(self, warm_at: int) -> None:
        """Post a slice and count it; the first after the warm-up begins the window."""
        self.done += 1
        if self.post is not None:
            self.post.value = self.done
        at = time.monotonic_ns()
        if self.first:
            self.count += 1
        elif at >= warm_at:
            self.first = at
        self.last = at


@dataclass(eq=False, kw_only=True)
class RunningLane:
    """A lane of one repeat, or a copy, as the thread of a device runs it.

    `check` writes the pattern, or compares with it. A copy has stamps: queued, released, and one
    per group.
    """

    share: Lane
    incoming: HostEnd
    outgoing: HostEnd
    check: bool = False
    stamps: Stamps | None = None
    errors: int = field(default=0, init=False)
    moved: int = field(default=0, init=False)

    def turns(self, warm_at: int, stop_at: int, given_up_at: int) -> Iterator[bool]:
        """Yield at each turn whether there was progress; end with the lane."""
        raise NotImplementedError

    def stamp(self, number: int) -> None:
        """Write the time into a copy's stamp."""
        if self.stamps is not None:
            self.stamps[number] = time.monotonic_ns()

    def report(self, epoch: int, start: int) -> tuple[int, ...]:
        """Return the lane's record (`shared_memory.RECORD`), not finished yet."""
        incoming, outgoing = self.incoming, self.outgoing
        return (
            *(epoch, start, max(incoming.last, outgoing.last)),
            *(incoming.first, incoming.last, incoming.count),
            *(outgoing.first, outgoing.last, outgoing.count),
            *(self.errors, self.moved * self.share.slice_bytes, 0),
        )


@dataclass(eq=False, kw_only=True)
class HostLane(RunningLane):
    """A lane between FIFOs of memory; or a copy, with one end here and perhaps a pace.

    `user_slices` slices are sent, from address `sent`, and as many kept at `kept`. A pace is a
    number of slices (None: the clock stops the lane).
    """

    sent: int
    kept: int
    user_slices: int
    pace: Pace | None = None

    def __post_init__(self) -> None:
        self._coupled = self.share.coupled and self.incoming.data != 0 and self.outgoing.data != 0

    def turns(self, warm_at: int, stop_at: int, given_up_at: int) -> Iterator[bool]:
        """Move a slice at each turn if possible, and yield whether; end by the clock.

        A lane with a pace ends with the last slice, or if still waiting at `given_up_at`: the peer
        stops by the clock, and then the controller releases the lane.
        """
        now, incoming, outgoing, pace = time.monotonic_ns, self.incoming, self.outgoing, self.pace
        until = _NEVER if pace else stop_at
        most = pace.groups * pace.slices if pace else _NEVER
        while now() < until and self.moved < most:
            # 1. The ends that the next pass should serve, and those that it can.
            in_wanted, out_wanted = self._list_wanted()
            takes, puts = in_wanted and incoming.ready(), out_wanted and outgoing.ready()
            if not (takes or puts) or (
                self._coupled and (takes is not in_wanted or puts is not out_wanted)
            ):
                if now() >= given_up_at:
                    return
                yield False
                continue
            # 2. The slice, and then the counters that tell of it.
            self._move(takes, puts)
            if takes:
                incoming.serve(warm_at)
            if puts:
                outgoing.serve(warm_at)
            self.moved = incoming.done + outgoing.done
            if pace and self.moved % pace.slices == 0:
                self.stamp(1 + self.moved // pace.slices)
            yield True

    def _list_wanted(self) -> tuple[bool, bool]:
        """Return the ends of the next pass, as in pump.cu: the first chunk goes out unasked."""
        if not self._coupled:
            return self.incoming.data != 0, self.outgoing.data != 0
        done = self.incoming.done
        if self.share.cycle and done // CHUNK % self.share.cycle == self.share.cycle - 1:
            return True, False
        return self.outgoing.done - done >= CHUNK, True

    def _move(self, takes: bool, puts: bool) -> None:
        incoming, outgoing, size = self.incoming, self.outgoing, self.share.slice_bytes
        source = incoming.data + incoming.done % incoming.slices * size
        target = outgoing.data + outgoing.done % outgoing.slices * size
        user = (outgoing.done if puts else incoming.done) % self.user_slices * size
        # Plain memory that no lane fills has no pattern.
        if takes and self.check and incoming.waits:
            self.errors += differing(source, size, incoming.seed, incoming.done)
        if takes and (not puts or self._keeps()):
            ctypes.memmove(self.kept + user, source, size)
        if puts and self.check:
            write_pattern(target, size, outgoing.seed, outgoing.done)
        elif puts:
            ctypes.memmove(target, source if takes else self.sent + user, size)

    def _keeps(self) -> bool:
        """Return whether a forwarded slice is a whole sum, which an all-reduce also keeps."""
        step, cycle = self.incoming.done // CHUNK, self.share.cycle
        return step % cycle >= cycle // 2 - 1 if cycle else step % 2 == 1


def pause(since_ns: int, longest_s: float = _LONG_NAP_S) -> None:
    """Let others run, longer and longer since there was progress: time counts, not rounds."""
    waited_ns = time.monotonic_ns() - since_ns
    if waited_ns < _SPIN_NS:
        linux.yield_core()
    else:
        time.sleep(min(longest_s, max(_NAP_S, _NAP_SHARE * waited_ns / 1e9)))


def wait_release(flag: ctypes.c_uint64, epoch: int, patience_ns: int) -> int:
    """Wait for the flag, and return the time; 0 if it does not come in time or says stop."""
    begun = time.monotonic_ns()
    while flag.value < epoch:
        if time.monotonic_ns() > begun + patience_ns:
            return 0
        pause(begun, longest_s=5 * _NAP_S)
    return 0 if flag.value == ABORT else time.monotonic_ns()


# Devices


class ThreadedDevice:
    """A device whose lanes one thread runs in turn."""

    def __init__(self, start: Start, control: Control) -> None:
        """Pin the calling thread and its children."""
        if start.cpus:
            linux.pin_to_cpus(start.cpus)
        self._start, self._control = start, control
        self._spaces: dict[str, Segment] = {}
        self._links_open = contextlib.ExitStack()

    def share(self, share: Share, segment: Segment | None = None) -> None:
        """Take the memory of a space; a GPU's arena, without a segment, is refused at use."""
        if segment is not None:
            if share.space in self._spaces:
                self._spaces[share.space].close()
            self._spaces[share.space] = segment

    def run(self, run: Run) -> None:
        """Run the repeats, all prepared beforehand, in this thread."""
        repeats = [self._lanes(run, repeat) for repeat in range(run.repeats)]
        self._begin(run)
        well = False
        try:
            linux.wake_promptly()
            ended = [self._run_repeat(run, number, lanes) for number, lanes in enumerate(repeats)]
            well = all(ended)
        finally:
            if not well:
                self._clean_up(run)

    def _lanes(self, run: Run, repeat: int) -> Sequence[RunningLane]:
        raise NotImplementedError

    def _begin(self, run: Run) -> None:
        """Prepare for a run whose lanes fit."""

    def _clean_up(self, run: Run) -> None:
        """Clean up after a run that did not end well."""

    def ping(self, count: int) -> Pinged:
        """Read the clock three times a ping: the device's clock is the host's."""
        times = [[time.monotonic_ns() for _ in range(3)] for _ in range(count)]
        asked_ns, device, seen_ns = zip(*times, strict=True)
        return Pinged(asked_ns=asked_ns, device_ns=device, seen_ns=seen_ns)

    def close(self) -> None:
        """Give all memory back; the control segment is the caller's."""
        self._links_open.close()
        for segment in self._spaces.values():
            segment.close()

    def _ends(self, lane: Lane, repeat: int) -> tuple[HostEnd, HostEnd]:
        """Return a lane's ends at addresses of this process, with the repeat's own counters."""
        shift = repeat * COUNTERS * COUNTER_BYTES

        def counter(at: Address | None) -> ctypes.c_uint64 | None:
            if at is None:
                return None
            return ctypes.c_uint64.from_address(self._address(at) + shift)

        def there(end: End | None, *, fills: bool) -> HostEnd:
            if end is None:
                return HostEnd()
            return HostEnd(
                data=self._address(end.data),
                slices=end.slices,
                seed=end.seed,
                ahead=end.slices if fills else 0,
                wait=counter(end.wait),
                post=counter(end.post),
            )

        return there(lane.incoming, fills=False), there(lane.outgoing, fills=True)

    def _address(self, at: Address) -> int:
        segment = self._spaces.get(at.space)
        if segment is None:
            spaces = ", ".join(sorted(self._spaces)) or "nothing"
            raise MeasurementError(
                f"{self._start.device} cannot reach {at.space}: it has mapped {spaces}"
            )
        return segment.address + at.offset

    def _stamps(self, paces: Sequence[Pace], repeat: int) -> tuple[Stamps, ...]:
        return self._control.stamps(self._start.slot, repeat, paces)

    def _run_repeat(self, run: Run, repeat: int, lanes: Sequence[RunningLane]) -> bool:
        """Report that all lanes are resident, wait for the flag, run, report each lane's end."""
        if not lanes:
            return True
        epoch, flag = run.epoch + repeat, self._control.flag
        records = self._control.records(self._start.slot, repeat, len(lanes))

        def report(number: int) -> None:
            records[number] = lanes[number].report(epoch, begun)
            records["finished"][number] = epoch

        for lane in lanes:
            lane.stamp(0)
        records["resident"] = epoch
        begun = moved_ns = wait_release(flag, epoch, run.patience_ns)
        warm_at, stop_at = begun + run.warm_ns, begun + run.warm_ns + run.window_ns
        running: dict[int, Iterator[bool]] = {}
        for number, lane in enumerate(lanes):
            running[number] = lane.turns(warm_at, stop_at, stop_at + run.patience_ns)
            if begun:
                lane.stamp(1)
        while begun and running and flag.value != ABORT:
            states = {number: next(turns, None) for number, turns in running.items()}
            for number in [number for number, state in states.items() if state is None]:
                del running[number]
                report(number)
            if any(states.values()):
                moved_ns = time.monotonic_ns()
            else:
                # There may be more workers than cores.
                pause(moved_ns)
        for number in running:
            report(number)
        return bool(begun) and flag.value != ABORT


class HostDevice(ThreadedDevice):
    """Host memory and a core as a `Device`."""

    def open(self) -> tuple[Started, tuple[int, ...]]:
        """Take memory near this thread's core."""
        start = self._start
        arena = create_segment(start.arena_bytes, numa_id=None, label=start.device)
        self._spaces[start.device] = arena
        # Written, so that every page is there and on this core's node before anything is timed.
        self._user, self._keep = (np.full(start.user_bytes, 1, np.uint8) for _ in range(2))
        memory = Memory(self._user.ctypes.data, self._keep.ctypes.data, start.user_bytes)
        self.links = Communicators(start.device, index_of(start.device), memory)
        self._links_open.callback(self.links.close)
        started = Started(
            lanes=LANES,
            arena_bytes=start.arena_bytes,
        )
        return started, (arena.fd,)

    def run(self, run: Run) -> None:
        """Run the repeats, and beside them each copy that NCCL carries in a thread of its own."""
        super().run(run)
        for thread in self._carriers:
            # After a failure the rest may wait for a peer that never comes.
            if not self._failures:
                thread.join()
        if self._failures:
            raise self._failures[0]

    def _begin(self, run: Run) -> None:
        """Clear the arena's counters, and start a thread for each copy that NCCL carries."""
        arena, flag = self._spaces[self._start.device], self._control.flag
        ctypes.memset(arena.address, 0, min(COUNTER_AREA_BYTES, arena.size))
        self._failures: list[BaseException] = []
        # Daemons: the peer they wait for may never come.
        self._carriers = [
            threading.Thread(target=self._carry, args=(run, number, flag), daemon=True)
            for number, copy in enumerate(run.program.copies)
            if copy.link is not None
        ]
        for thread in self._carriers:
            thread.start()

    def _carry(self, run: Run, number: int, flag: ctypes.c_uint64) -> None:
        """Run a copy over a link: host memory has no streams, so a thread waits and stamps."""
        copy, pace = run.program.copies[number], run.paces[number]
        try:
            linux.wake_promptly()
            assert copy.link is not None
            for repeat in range(run.repeats):
                row = self._stamps(run.paces, repeat)[number]
                row[0] = time.monotonic_ns()
                if wait_release(flag, run.epoch + repeat, run.patience_ns):
                    row[1] = time.monotonic_ns()
                    for group in range(pace.groups):
                        size = pace.slices * copy.slice_bytes
                        self.links.move(copy.link, size, 0, sends=copy.outgoing is not None)
                        row[2 + group] = time.monotonic_ns()
        except BaseException as error:
            self._failures.append(error)

    def _lanes(self, run: Run, repeat: int) -> Sequence[RunningLane]:
        """Return one repeat's lanes, then its copies, which are lanes with one end here."""
        # The clock stops a lane; a copy may have a pace, and stamps.
        shares: list[tuple[Lane, Pace | None, Stamps | None]] = [
            (lane, None, None) for lane in run.program.lanes
        ]
        stamps = self._stamps(run.paces, repeat)
        copies = zip_longest(run.program.copies, run.paces, stamps)
        shares += [shared for shared in copies if shared[0].link is None]
        lanes = []
        for number, (share, pace, row) in enumerate(shares):
            offset, user_slices = self._memory(share.slice_bytes, number, len(shares))
            incoming, outgoing = self._ends(share, repeat)
            lane = HostLane(
                share=share,
                incoming=incoming,
                outgoing=outgoing,
                sent=self._user.ctypes.data + offset,
                kept=self._keep.ctypes.data + offset,
                user_slices=user_slices,
                check=run.check,
                pace=pace,
                stamps=row,
            )
            lanes.append(lane)
        return lanes

    def _memory(self, slice_bytes: int, number: int, lanes: int) -> tuple[int, int]:
        """Return the offset and number of a lane's slices, which lanes share where they are few."""
        size = self._start.user_bytes
        total = size // slice_bytes
        if total < 1:
            raise MeasurementError(
                f"{self._start.device}: slices of {slice_bytes} bytes do not fit the {size} bytes "
                "that it sends and keeps"
            )
        return number * total // lanes * slice_bytes, max(1, total // lanes)
