"""The execution of a program on this host's devices, stage by stage, and its specification."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_profiler.linux import wake_promptly
from tccl_profiler.messages import Done, Pace, Pinged, Run, Share, WorkerLost
from tccl_profiler.program import (
    COUNTER_BYTES,
    COUNTERS,
    DeviceProgram,
    HostProgram,
    Program,
    on_host,
)
from tccl_profiler.shared_memory import MAX_STAMPS, Control, Segment, create_segment
from tccl_profiler.worker_process import WorkerProcess
from tccl_py.errors import MeasurementError

_LOOK_S = 0.02  # how often a wait checks that all workers live
_SPIN_NS = 100_000  # time before a release during which the core is kept: a sleep may end that late
_EARLY_S = 0.0005  # time before its lanes should end at which a repeat is polled
_CLOCKS_DIFFER_S = 0.001  # by how much a device's window may be longer than this host's
_SMALLEST = 64 << 20
_COUNTERS_BYTES = COUNTERS * COUNTER_BYTES  # the counters of one repeat

Stamps = npt.NDArray[np.uint64]


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a program runs: repeats, warm-up, window, data checks, and the paces of copies."""

    repeats: int
    warm_us: float
    window_us: float
    check: bool = False
    paces: Mapping[str, tuple[Pace, ...]] = msgspec.field(default_factory=dict)

    def on(self, host: str) -> RunSpec:
        """Return the same for one host's devices, under local names."""
        return msgspec.structs.replace(self, paces=on_host(self.paces, host))

    @property
    def lasting_s(self) -> float:
        """Warm-up and window of one repeat, in seconds."""
        return (self.warm_us + self.window_us) / 1e6


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """A repeat, by device: records of lanes, and stamps of copies, at release and after groups."""

    records: Mapping[str, npt.NDArray[np.void]]
    stamps: Mapping[str, tuple[Stamps, ...]]

    @classmethod
    def join(cls, results: Mapping[str, RunResult]) -> RunResult:
        """Return one repeat's result over several hosts, from each host's own."""
        items = results.items()
        return cls(
            records={f"{host}.{name}": x for host, run in items for name, x in run.records.items()},
            stamps={f"{host}.{name}": x for host, run in items for name, x in run.stamps.items()},
        )


class Runner(Protocol):
    """The pool of one host, or the pools of several, as a profiler uses them."""

    @property
    def lanes(self) -> Mapping[str, int]:
        """How many blocks each device runs at once, by name."""

    def run(self, program: Program, spec: RunSpec) -> Sequence[RunResult]:
        """Run a program's repeats."""

    def ping(self, count: int = ...) -> Mapping[str, Pinged]:
        """Compare each device's clock with the clock of this host."""

    def restart(self) -> None:
        """Start all workers anew."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long the pool waits, in seconds.

    `start_s` is for devices to be set up; `answer_s` for an answer; `lanes_s` for lanes to be
    resident, to be released, and to end after their window; `stop_s` for workers to end.
    """

    start_s: float = 120.0
    answer_s: float = 60.0
    lanes_s: float = 10.0
    stop_s: float = 3.0


class HostBuffers:
    """Host memory for FIFOs: a segment per space, made on demand on its node (`numa_ids`)."""

    def __init__(self, numa_ids: Mapping[str, int | None]) -> None:
        self._numa_ids = dict(numa_ids)
        self._segments: dict[str, Segment] = {}

    def ensure(self, space: str, size: int, share: Callable[[Share, Sequence[int]], None]) -> None:
        """Have `size` bytes in a space; `share` tells the workers of new memory."""
        old = self._segments.get(space)
        if old is not None and old.size >= size:
            return
        if space not in self._numa_ids:
            nodes = ", ".join(self._numa_ids)
            raise MeasurementError(f"{space} is no NUMA node of this machine; there are {nodes}")
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        new = create_segment(capacity, numa_id=self._numa_ids[space], label=space)
        try:
            share(Share(space=space), (new.fd,))
        except BaseException:
            new.close()
            raise
        self._segments[space] = new
        if old is not None:
            old.close()

    def clear(self, space: str, repeats: int) -> None:
        """Set the counters of a space's first repeats to 0."""
        self._segments[space].array(np.uint64, 0, _COUNTERS_BYTES // 8 * repeats)[:] = 0

    def release_waiters(self, repeat: int) -> None:
        """Set all counters of a repeat so high that no copy waits for them any more."""
        for segment in self._segments.values():
            counters = segment.array(np.uint64, repeat * _COUNTERS_BYTES, _COUNTERS_BYTES // 8)
            counters[:] = 1 << 62

    def close(self) -> None:
        """Give all memory back."""
        for segment in self._segments.values():
            segment.close()
        self._segments = {}


@dataclass(eq=False)
class Execution:
    """The repeats of a program, queued on this host's devices; `Pool.begin` makes it.

    Call for each repeat `wait_resident`, `release`, `collect`; then `finish`. Stages raise
    WorkerLost and MeasurementError. `meanwhile` is called now and then during waits; an exception
    ends the wait.
    """

    control: Control
    host: HostBuffers
    workers: Sequence[WorkerProcess]
    spec: RunSpec
    epoch: int
    timeouts: Timeouts
    meanwhile: Callable[[], None] | None = None
    _released_at: int = field(default=0, init=False)

    def queue(self, program: HostProgram) -> None:
        """Send each worker its share, after clearing the stamps."""
        wake_promptly()
        for worker in self.workers:
            share = program.devices[worker.spec.device]
            run = self._run_of(worker.spec.device, share)
            for repeat in range(self.spec.repeats):
                for row in self._stamps_of(worker, repeat):
                    row[:] = 0
            worker.lanes_asked = len(share.lanes)
            worker.ask(run)

    def _run_of(self, device: str, share: DeviceProgram) -> Run:
        spec, paces = self.spec, self.spec.paces.get(device, ())
        stamps = sum(pace.groups + 2 for pace in paces)
        if len(paces) != len(share.copies) or stamps > MAX_STAMPS:
            raise MeasurementError(
                f"{device}: {len(paces)} paces with {stamps} stamps for {len(share.copies)} "
                f"copies; one each and {MAX_STAMPS} stamps at most are right"
            )
        return Run(
            program=share,
            epoch=self.epoch,
            repeats=spec.repeats,
            warm_ns=round(spec.warm_us * 1e3),
            window_ns=round(spec.window_us * 1e3),
            patience_ns=round(self.timeouts.lanes_s * 1e9),
            paces=paces,
            check=spec.check,
        )

    def wait_resident(self, repeat: int) -> None:
        """Wait until all lanes and copies of a repeat wait for their release."""
        number = self.epoch + repeat
        views, stamps = self._records(repeat), self._stamps(repeat)

        def resident(worker: WorkerProcess) -> bool:
            device = worker.spec.device
            there = (views[device]["resident"] == number).all()
            return bool(there and all(row[0] for row in stamps[device]))

        def count_started(worker: WorkerProcess) -> str:
            blocks = views[worker.spec.device]["resident"] == number
            return f" ({blocks.sum()} of {len(blocks)})"

        failure = "did not start all blocks of a set"
        self._until(resident, self.timeouts.lanes_s, failure, count_started)

    def release(self, repeat: int, at_ns: int | None = None) -> int:
        """Release a repeat at `at_ns` of CLOCK_MONOTONIC or now; return the time after."""
        if at_ns is not None:
            ahead_s = (at_ns - time.monotonic_ns()) / 1e9
            if ahead_s > self.timeouts.lanes_s:
                raise MeasurementError(
                    f"a release in {ahead_s:.1f} s: lanes wait {self.timeouts.lanes_s:g} s"
                )
            self._sleep_until(at_ns - _SPIN_NS)
            while time.monotonic_ns() < at_ns:
                pass
        self.control.release(self.epoch + repeat)
        self._released_at = time.monotonic_ns()
        return self._released_at

    def collect(self, repeat: int) -> RunResult:
        """Wait for the end of a repeat that has been released, and return its records."""
        number, patience_s = self.epoch + repeat, self.timeouts.lanes_s
        views, stamps = self._records(repeat), self._stamps(repeat)

        def has_finished(worker: WorkerProcess) -> bool:
            return bool((views[worker.spec.device]["finished"] == number).all())

        # Every copy's window ends this long after the copies have been seen to run.
        self._until(
            lambda worker: all(row[1] for row in stamps[worker.spec.device]),
            patience_s,
            "did not begin its copies",
        )
        windows_over = time.monotonic() + self.spec.lasting_s + _CLOCKS_DIFFER_S
        # This process leaves the cores to the lanes: there may be no more cores than lanes.
        self._sleep_until(self._released_at + round((self.spec.lasting_s - _EARLY_S) * 1e9))
        self._until(has_finished, patience_s, "did not finish a set")
        for worker in self.workers:
            if not views[worker.spec.device]["start"].all():
                raise WorkerLost(
                    f"{worker.who} was not released within {patience_s:g} s: this process was "
                    "stopped or kept from running meanwhile"
                )
        if any(stamps.values()):
            self._finish_copies(stamps, repeat, windows_over)
        return RunResult(
            records={device: view.copy() for device, view in views.items()},
            stamps={
                device: tuple(row[1:].copy() for row in rows) for device, rows in stamps.items()
            },
        )

    def finish(self) -> None:
        """Hear from every worker that all repeats have run."""
        for worker in self.workers:
            if worker.owes_answer:
                worker.receive(Done, self.timeouts.answer_s)

    def abort(self) -> None:
        """Stop all lanes, and hear the answers still owed; raises WorkerLost."""
        self.control.abort()
        for worker in self.workers:
            if worker.owes_answer:
                try:
                    worker.receive(Done, self.timeouts.stop_s)
                except WorkerLost:
                    raise
                except MeasurementError:
                    continue
        self.control.clear()

    def _records(self, repeat: int) -> Mapping[str, npt.NDArray[np.void]]:
        return {
            worker.spec.device: self.control.records(worker.slot, repeat, worker.lanes_asked)
            for worker in self.workers
        }

    def _stamps(self, repeat: int) -> Mapping[str, tuple[Stamps, ...]]:
        return {worker.spec.device: self._stamps_of(worker, repeat) for worker in self.workers}

    def _stamps_of(self, worker: WorkerProcess, repeat: int) -> tuple[Stamps, ...]:
        paces = self.spec.paces.get(worker.spec.device, ())
        return self.control.stamps(worker.slot, repeat, paces)

    def _finish_copies(
        self, stamps: Mapping[str, Sequence[Stamps]], repeat: int, windows_over: float
    ) -> None:
        """Wait for copies; after their windows, release copies that wait for a stopped lane."""

        def done(worker: WorkerProcess) -> bool:
            return all(row[-1] for row in stamps[worker.spec.device])

        failure, patience_s = "did not finish its copies", self.timeouts.lanes_s
        limit_s = self.spec.lasting_s + patience_s
        self._until(
            lambda worker: time.monotonic() > windows_over or done(worker), limit_s, failure
        )
        self.host.release_waiters(repeat)
        self._until(done, patience_s, failure)

    def _until(
        self,
        satisfied: Callable[[WorkerProcess], bool],
        limit_s: float,
        failure: str,
        state: Callable[[WorkerProcess], str] = lambda _: "",
    ) -> None:
        """Wait until all workers satisfy a condition, checking now and then for deaths."""
        begun = looked = time.monotonic()
        while not all(map(satisfied, self.workers)):
            time_s = time.monotonic()
            if time_s - looked > _LOOK_S:
                self._look()
                looked = time_s
            if time_s - begun > limit_s:
                late = [worker for worker in self.workers if not satisfied(worker)]
                names = (worker.spec.device + state(worker) for worker in late or self.workers)
                raise WorkerLost(f"{', '.join(names)} {failure} within {limit_s:.1f} s")
            if time_s - begun > 0.00005:
                # A worker may need this core, the more so the longer it takes.
                time.sleep(0.00002 if time_s - begun < 0.002 else 0.0001)

    def _sleep_until(self, at_ns: int) -> None:
        while (left_ns := at_ns - time.monotonic_ns()) > 0:
            time.sleep(min(left_ns / 1e9, _LOOK_S))
            if left_ns > _LOOK_S * 1e9:
                self._look()

    def _look(self) -> None:
        if self.meanwhile is not None:
            self.meanwhile()
        poller = select.poll()
        for worker in self.workers:
            poller.register(worker.connection, select.POLLIN)
        readable = {fd for fd, _ in poller.poll(0)}
        for worker in self.workers:
            if worker.connection.fileno() in readable:
                worker.receive(Done, self.timeouts.answer_s)
