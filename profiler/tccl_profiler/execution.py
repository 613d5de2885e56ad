"""A program that runs on this host's devices, stage by stage: a caller that drives several hosts
waits until a repeat is there on each, and has all release it at one time.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_profiler.host.lane import nap_exactly
from tccl_profiler.messages import Pace, Pinged, Run
from tccl_profiler.program import (
    COUNTER_BYTES,
    COUNTERS,
    DeviceProgram,
    Program,
    Work,
    host_of,
    local,
)
from tccl_profiler.shared_memory import MAX_STAMPS, Control, Segment, create_segment
from tccl_profiler.workers import WorkerLost, WorkerProcess
from tccl_py.errors import MeasurementError

# What is asked of a run of a program, and what comes back from it.


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How a program is run: repeats, their warm-up and window, and whether data are checked.

    `paces` says for each device how much its copies move.
    """

    repeats: int
    warm_us: float
    window_us: float
    check: bool = False
    paces: Mapping[str, tuple[Pace, ...]] = msgspec.field(default_factory=dict)

    def on(self, host: str) -> Timing:
        """The same for one host's devices, by their names there."""
        paces = {local(name): pace for name, pace in self.paces.items() if host_of(name) == host}
        return msgspec.structs.replace(self, paces=paces)

    @property
    def lasting_s(self) -> float:
        """Warm-up and window of one repeat, in seconds."""
        return (self.warm_us + self.window_us) / 1e6


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One repeat: by device its records (`control.RECORD`), lanes first, and its copies'
    stamps: when released, then when each group was done."""

    records: Mapping[str, npt.NDArray[np.void]]
    stamps: Mapping[str, tuple[npt.NDArray[np.uint64], ...]]


class Runner(Protocol):
    """What runs programs for a profiler: the pool of one host, or pools of several."""

    @property
    def lanes(self) -> Mapping[str, int]:
        """How many blocks each device runs at once, by its name."""

    def run(self, program: Program, timing: Timing) -> Sequence[Outcome]:
        """Run a program's repeats."""

    def ping(self, count: int = ...) -> Mapping[str, Pinged]:
        """Each device's clock against the clock that all are compared on."""

    def restart(self) -> None:
        """Start all workers anew."""


def joined(outcomes: Mapping[str, Outcome]) -> Outcome:
    """One repeat's outcome over several hosts, from each one's own, by host."""

    def name(host: str, device: str) -> str:
        return f"{host}.{device}" if host else device

    return Outcome(
        records={
            name(host, device): rows
            for host, outcome in outcomes.items()
            for device, rows in outcome.records.items()
        },
        stamps={
            name(host, device): rows
            for host, outcome in outcomes.items()
            for device, rows in outcome.stamps.items()
        },
    )


def order_of(
    device: str, share: DeviceProgram, timing: Timing, *, epoch: int, patience_s: float
) -> Run:
    """The order for a device: its share of a program, from this epoch on.

    Raises:
        MeasurementError: its copies have no paces that fit.
    """
    paces = timing.paces.get(device, ())
    stamps = sum(pace.groups + 2 for pace in paces)
    if len(paces) != len(share.copies) or stamps > MAX_STAMPS:
        raise MeasurementError(
            f"{device}: {len(paces)} paces with {stamps} stamps for {len(share.copies)} copies; "
            f"one each and {MAX_STAMPS} stamps at most are right"
        )
    return Run(
        program=share,
        epoch=epoch,
        repeats=timing.repeats,
        warm_ns=round(timing.warm_us * 1e3),
        window_ns=round(timing.window_us * 1e3),
        patience_ns=round(patience_s * 1e9),
        paces=paces,
        check=timing.check,
    )


def stamps_of(
    control: Control, slot: int, device: str, timing: Timing, repeat: int
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Views of the stamps of each copy of a device: queued, released, and one for each group."""
    rows, first = [], 0
    paces = timing.paces.get(device, ())
    area = control.stamps(slot, repeat, sum(pace.groups + 2 for pace in paces))
    for pace in paces:
        rows.append(area[first : first + pace.groups + 2])
        first += pace.groups + 2
    return tuple(rows)


# Host memory that FIFOs lie in: a segment for each NUMA node, made on demand and reused.


_SMALLEST = 64 << 20
_COUNTERS_BYTES = COUNTERS * COUNTER_BYTES
"""The counters of one repeat."""


class HostSpaces:
    """Segments by space (`C0`), each on its node.

    Args:
        numa_ids: by space the system's number of its NUMA node, None if it has one.
    """

    def __init__(self, numa_ids: Mapping[str, int | None]) -> None:
        self._numa_ids = dict(numa_ids)
        self._segments: dict[str, Segment] = {}

    @property
    def size(self) -> int:
        """Bytes of all together."""
        return sum(segment.size for segment in self._segments.values())

    def ensure(self, space: str, size: int, share: Callable[[str, Segment], None]) -> None:
        """Have `size` bytes in a space; `share` tells the workers of memory that is new.

        Raises:
            MeasurementError: no such node, or not that much memory on it.
        """
        old = self._segments.get(space)
        if old is not None and old.size >= size:
            return
        if space not in self._numa_ids:
            known = ", ".join(self._numa_ids)
            raise MeasurementError(f"{space} is no NUMA node of this machine; there are {known}")
        wanted = max(_SMALLEST, 1 << (size - 1).bit_length())
        new = create_segment(wanted, numa_id=self._numa_ids[space], label=space)
        try:
            share(space, new)
        except BaseException:
            new.close()
            raise
        self._segments[space] = new
        if old is not None:
            old.close()

    def clear(self, space: str, repeats: int) -> None:
        """Set the counters of a space's first repeats to 0."""
        count = _COUNTERS_BYTES // 8 * repeats
        self._segments[space].array(np.uint64, 0, count)[:] = 0

    def let_go(self, repeat: int) -> None:
        """Set all counters of a repeat so high that nobody waits for them any more."""
        for segment in self._segments.values():
            counters = segment.array(np.uint64, repeat * _COUNTERS_BYTES, _COUNTERS_BYTES // 8)
            counters[:] = 1 << 62

    def close(self) -> None:
        """Give all memory back."""
        for segment in self._segments.values():
            segment.close()
        self._segments = {}


_LOOK_S = 0.02
"""How often a wait looks whether all workers are still there."""
_SPIN_NS = 100_000
"""How long before a release the core is kept: a sleep may end late by the rest."""
_EARLY_S = 0.0005
"""How long before its lanes should be done a repeat is looked at."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long the pool waits, in seconds: for devices to be set up, of which a first compilation
    takes some; for an answer; for links to be made; for lanes to be there or, beyond their window,
    to be done, which is also how long lanes wait to be released; and for workers to end."""

    start_s: float = 120.0
    answer_s: float = 60.0
    link_s: float = 10.0
    lanes_s: float = 10.0
    stop_s: float = 3.0


class Running:
    """The repeats of a program, queued on this host's devices; `Pool.begin` makes it.

    Stages are to be called in order, for each repeat `wait_resident`, `release`, `collect`, and at
    last `finish`. Left before, as a context manager or by `abort`, all lanes are stopped.

    `lost` says that workers must be started anew; the pool does so when it is next used.

    Args:
        control: where lanes are released and report.
        host: host memory, whose counters let copies go.
        workers: those that take part.
        timing: what is run.
        epoch: of the first repeat.
        patience: how long to wait for what.
        meanwhile: called now and then while something is waited for; what it raises ends the wait.
    """

    def __init__(
        self,
        control: Control,
        host: HostSpaces,
        workers: Sequence[WorkerProcess],
        *,
        timing: Timing,
        epoch: int,
        patience: Patience,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._control = control
        self._host = host
        self._workers = tuple(workers)
        self._timing = timing
        self._epoch = epoch
        self._patience = patience
        self._meanwhile = meanwhile or (lambda: None)
        self._released_at = 0
        self._over = False
        self.lost = False

    @property
    def over(self) -> bool:
        """Whether all has been heard, or given up."""
        return self._over or self.lost

    def order(self, work: Work) -> None:
        """Tell each worker its share; nothing it will report is left from before.

        Raises:
            WorkerLost: a worker died or does not listen.
            MeasurementError: copies have no paces that fit.
        """
        nap_exactly()
        timing = self._timing
        for worker in self._workers:
            device = worker.spec.device
            share = work.devices[device]
            order = order_of(
                device, share, timing, epoch=self._epoch, patience_s=self._patience.lanes_s
            )
            for repeat in range(timing.repeats):
                for row in stamps_of(self._control, worker.slot, device, timing, repeat):
                    row[:] = 0
            worker.lanes_asked = len(share.lanes)
            with self._noting_loss():
                worker.ask(order, limit_s=self._patience.answer_s)

    def wait_resident(self, repeat: int) -> None:
        """Wait until all lanes and copies of a repeat are there and wait for their release.

        Raises:
            WorkerLost: a worker died or hangs.
            MeasurementError: a device refuses its share.
        """
        now = self._epoch + repeat
        views, stamps = self._records(repeat), self._stamps(repeat)

        def resident(one: WorkerProcess) -> bool:
            device = one.spec.device
            there = (views[device]["resident"] == now).all()
            return bool(there and all(row[0] for row in stamps[device]))

        limit_s = self._patience.lanes_s
        self._until(resident, limit_s, "did not get its part of a set running")

    def release(self, repeat: int, at_ns: int | None = None) -> int:
        """Let a repeat start by one store, at `at_ns` of CLOCK_MONOTONIC or, by default, now.

        Returns:
            When the store was done; a process that was kept from running does it late.

        Raises:
            WorkerLost: a worker died meanwhile.
            MeasurementError: lanes would not wait that long.
        """
        if at_ns is not None:
            ahead_s = (at_ns - time.monotonic_ns()) / 1e9
            if ahead_s > self._patience.lanes_s:
                raise MeasurementError(
                    f"a release in {ahead_s:.1f} s: lanes wait {self._patience.lanes_s:g} s"
                )
            self._sleep_until(at_ns - _SPIN_NS)
            while time.monotonic_ns() < at_ns:
                pass
        self._control.release(self._epoch + repeat)
        self._released_at = time.monotonic_ns()
        return self._released_at

    def collect(self, repeat: int) -> Outcome:
        """Wait for the end of a repeat that has been released, and give what it recorded.

        Raises:
            WorkerLost: a worker died or hangs, or was released too late.
            MeasurementError: a device failed in the midst of it.
        """
        now, patience_s = self._epoch + repeat, self._patience.lanes_s
        views, stamps = self._records(repeat), self._stamps(repeat)

        def finished(one: WorkerProcess) -> bool:
            return bool((views[one.spec.device]["finished"] == now).all())

        # While lanes run, this process leaves the cores to them: there may be no more than lanes.
        self._sleep_until(self._released_at + round((self._timing.lasting_s - _EARLY_S) * 1e9))
        self._until(finished, patience_s, "did not finish its part of a set")
        for one in self._workers:
            if not views[one.spec.device]["start"].all():
                self.lost = True
                raise WorkerLost(
                    f"{one.who} was not released within {patience_s:g} s: this process was stopped "
                    "or kept from running meanwhile"
                )
        if any(stamps.values()):
            self._finish_copies(stamps, repeat)
        return Outcome(
            records={device: view.copy() for device, view in views.items()},
            stamps={
                device: tuple(row[1:].copy() for row in rows) for device, rows in stamps.items()
            },
        )

    def finish(self) -> None:
        """Hear from every worker that all repeats have run.

        Raises:
            WorkerLost: a worker died or hangs.
            MeasurementError: a device failed.
        """
        with self._noting_loss():
            for worker in self._workers:
                if worker.owes_answer:
                    worker.done(self._patience.answer_s)
        self._over = True

    def abort(self) -> None:
        """Stop all lanes, and hear what is still to be said; after the end it does nothing."""
        if self.over:
            return
        # Until all have answered: a second interruption must not leave them unheard.
        self.lost = True
        self._control.abort()
        for worker in self._workers:
            while worker.owes_answer:
                try:
                    worker.received(self._patience.stop_s)
                except WorkerLost:
                    return
                except MeasurementError:
                    continue
        self._control.clear()
        self.lost, self._over = False, True

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()

    def _records(self, repeat: int) -> Mapping[str, npt.NDArray[np.void]]:
        return {
            one.spec.device: self._control.records(one.slot, repeat, one.lanes_asked)
            for one in self._workers
        }

    def _stamps(self, repeat: int) -> Mapping[str, tuple[npt.NDArray[np.uint64], ...]]:
        return {
            one.spec.device: stamps_of(
                self._control, one.slot, one.spec.device, self._timing, repeat
            )
            for one in self._workers
        }

    def _finish_copies(
        self, stamps: Mapping[str, Sequence[npt.NDArray[np.uint64]]], repeat: int
    ) -> None:
        """Wait for copies; those that wait for a lane that has stopped are let go after a while."""
        lasting_s, patience_s = self._timing.lasting_s, self._patience.lanes_s
        until = time.monotonic() + 2 * lasting_s + 0.01

        def done(one: WorkerProcess) -> bool:
            return all(row[-1] for row in stamps[one.spec.device])

        def done_or_late(one: WorkerProcess) -> bool:
            return time.monotonic() > until or done(one)

        failure = "did not finish its copies"
        self._until(done_or_late, 2 * lasting_s + patience_s, failure)
        self._host.let_go(repeat)
        self._until(done, patience_s, failure)

    def _until(
        self, satisfied: Callable[[WorkerProcess], bool], limit_s: float, failure: str
    ) -> None:
        """Wait until all workers satisfy a condition, and look now and then whether they live.

        Raises:
            WorkerLost: one has died, or does not satisfy it in time.
            MeasurementError: one refuses.
        """
        begun = looked = time.monotonic()
        while not all(map(satisfied, self._workers)):
            now = time.monotonic()
            if now - looked > _LOOK_S:
                self._look()
                looked = now
            if now - begun > limit_s:
                late = [one for one in self._workers if not satisfied(one)]
                names = ", ".join(one.spec.device for one in late or self._workers)
                self.lost = True
                raise WorkerLost(f"{names} {failure} within {limit_s:.1f} s")
            if now - begun > 0.00005:
                # Who is waited for may need this core; and the longer it takes, the later it is.
                time.sleep(0.00002 if now - begun < 0.002 else 0.0001)

    def _sleep_until(self, at_ns: int) -> None:
        """Sleep, and look now and then whether all workers live; raises as `_look`."""
        while (left_ns := at_ns - time.monotonic_ns()) > 0:
            time.sleep(min(left_ns / 1e9, _LOOK_S))
            if left_ns > _LOOK_S * 1e9:
                self._look()

    def _look(self) -> None:
        """Raise if a worker has died or has said that it failed; one may be done before others."""
        self._meanwhile()
        poller = select.poll()
        for worker in self._workers:
            poller.register(worker.channel, select.POLLIN)
        readable = {fd for fd, _ in poller.poll(0)}
        with self._noting_loss():
            for worker in self._workers:
                if worker.channel.fileno() in readable:
                    worker.done(self._patience.answer_s)

    @contextlib.contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except WorkerLost:
            self.lost = True
            raise
