"""The pool: one worker process per device of this host runs all sets.

Lanes are released by one store into shared memory, where their records are read.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_profiler.linux import wake_promptly
from tccl_profiler.messages import (
    DeviceRequests,
    DeviceSpec,
    Pace,
    Pinged,
    Run,
    Share,
    Start,
    Started,
)
from tccl_profiler.program import (
    COUNTER_AREA_BYTES,
    COUNTER_BYTES,
    COUNTERS,
    DeviceProgram,
    HostProgram,
    Program,
)
from tccl_profiler.protocol import (
    Connection,
    Peers,
    Question,
    Result,
    Returned,
    Sign,
    Timeouts,
    WorkerLost,
)
from tccl_profiler.shared_memory import (
    MAX_DEVICES,
    Control,
    Segment,
    create_segment,
)
from tccl_py.children import child_environment, child_with_socket, search_path
from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import index_of, place_named

_BROKEN_STOP_S = 0.5  # time for workers that are given up to end by themselves
_KILL_S = 5.0  # a process within a driver's call may take a while to die
_LOOK_S = 0.02  # how often a wait checks that all workers live
_SPIN_NS = 100_000  # time before a release during which the core is kept: a sleep may end that late
_EARLY_S = 0.0005  # time before its lanes should end at which a repeat is polled
_CLOCKS_DIFFER_S = 0.001  # by how much a device's window may be longer than this host's
_SMALLEST = 64 << 20
_COUNTERS_BYTES = COUNTERS * COUNTER_BYTES  # the counters of one repeat
_DROPPED = ("NCCL_GRAPH_FILE", "NCCL_IB_HCA", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS")
"""A graph file's NICs are counted among those that NCCL uses: it must use all."""

Stamps = npt.NDArray[np.uint64]


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a program runs: repeats, warm-up, window, data checks, and the paces of copies."""

    repeats: int
    warm_us: float
    window_us: float
    check: bool = False
    paces: Mapping[str, tuple[Pace, ...]] = msgspec.field(default_factory=dict)

    @property
    def lasting_s(self) -> float:
        """Warm-up and window of one repeat, in seconds."""
        return (self.warm_us + self.window_us) / 1e6


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """A repeat, by device: records of lanes, and stamps of copies, at release and after groups."""

    records: Mapping[str, npt.NDArray[np.void]]
    stamps: Mapping[str, tuple[Stamps, ...]]

    @classmethod
    def join(cls, results: Sequence[RunResult]) -> RunResult:
        """Return one repeat's result over several hosts, from each host's own."""
        return cls(
            records={name: rows for one in results for name, rows in one.records.items()},
            stamps={name: rows for one in results for name, rows in one.stamps.items()},
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


# Workers' processes


@dataclass
class WorkerProcess:
    """A worker's process, and a memfd of its stderr."""

    process: subprocess.Popen[bytes]
    stderr_fd: int

    def describe_end(self) -> str:
        """Return how the process has ended, and what it said last."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        if code is None:
            return "closed its connection"
        end = os.fstat(self.stderr_fd).st_size
        text = os.pread(self.stderr_fd, 1 << 16, max(0, end - (1 << 16)))
        lines = text.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        names = {number.value: number.name for number in signal.Signals}  # none of real-time ones
        killed = f"was killed by {names.get(-code, f'signal {-code}')}"
        how = killed if code < 0 else f"ended with code {code}"
        return f"{how} ({last[:300]})" if last else how


class Workers(Peers):
    """The workers of a pool, by the names of their devices."""

    grace_s = math.inf

    def __init__(self, timeouts: Timeouts) -> None:
        super().__init__(timeouts)
        self.processes: dict[str, WorkerProcess] = {}

    def lost(self, name: str, what: str = "") -> WorkerLost:
        """Return the error for a worker that is of no more use; without `what`, it is gone."""
        return WorkerLost(f"the worker of {name} {what or self.processes[name].describe_end()}")

    def label(self, name: str) -> tuple[str, str]:
        """Return a device's name, and an expression of the words by which it is named."""
        return name, rf"\b({re.escape(name)}|GPU {index_of(name)})\b"

    def give_up(self, names: Collection[str]) -> None:
        """Do nothing: workers end by themselves what they were asked for."""

    def spawn(self, name: str, variables: Mapping[str, str]) -> int:
        """Start a device's worker with these variables, and return its pid."""
        stderr_fd = os.memfd_create(f"tccl-stderr-{name}")
        try:
            process, sock = child_with_socket(
                "tccl_profiler.worker", environment=_environment(variables), stderr=stderr_fd
            )
        except BaseException:
            os.close(stderr_fd)
            raise
        self.connections[name] = Connection(sock, peer=f"the worker of {name}")
        self.processes[name] = WorkerProcess(process, stderr_fd)
        return process.pid

    def end(self, limit_s: float) -> None:
        """Wait for the processes within a limit, kill what is left, and close everything."""
        processes = [worker.process for worker in self.processes.values()]
        try:
            _wait(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
            _wait(processes, _KILL_S)
            for name, worker in self.processes.items():
                self.connections[name].close()
                os.close(worker.stderr_fd)
            self.processes, self.connections = {}, {}


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def without_disturbance(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that contradict a worker's settings of NCCL."""
    return {name: value for name, value in environment.items() if name not in _DROPPED}


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    environment = dict(
        without_disturbance(os.environ),
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
        # A queue for each stream: a waiting stream must not hold up another.
        CUDA_DEVICE_MAX_CONNECTIONS="32",
        # numpy would start a thread for every core, in every worker.
        OPENBLAS_NUM_THREADS="1",
    )
    # Devices are taken by bus id, and their peers must be visible too.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    environment["PYTHONPATH"] = os.pathsep.join(search_path())
    return child_environment({**environment, **variables})


# The pool


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of each device: its arena, and twice what is sent and kept."""

    arena_bytes: int = 512 << 20
    user_bytes: int = 256 << 20


class Pool:
    """Worker processes for some devices of this host, and their shared memory.

    Methods raise WorkerLost if a worker died or hangs (the next use starts all anew), and
    MeasurementError if devices refuse. `backend` is that of all devices but NICs; `numa_ids` has,
    by host space (`C0`), the system's number of the NUMA node, or None. Workers get `variables`.
    """

    def __init__(
        self,
        backend: str,
        devices: Sequence[DeviceSpec],
        numa_ids: Mapping[str, int | None],
        *,
        memory: Memory | None = None,
        timeouts: Timeouts | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        if not 1 <= len(devices) <= MAX_DEVICES:
            raise MeasurementError(f"{len(devices)} devices: 1 to {MAX_DEVICES} can be measured")
        self._backend = backend
        self._specs = tuple(devices)
        self.slots = {spec.device: slot for slot, spec in enumerate(devices)}
        self._numa_ids = dict(numa_ids)
        self._segments: dict[str, Segment] = {}  # host memory for FIFOs, made on demand
        self._memory = memory or Memory()
        self.timeouts = timeouts or Timeouts()
        self.workers = Workers(self.timeouts)
        self._opening = Question(0)
        self.started: dict[str, Started] = {}
        self.control: Control | None = None
        self._epoch = 0
        self._broken = self._is_started = False
        # Process ids of all workers so far.
        self.pids: set[int] = set()
        self._variables = variables or {}

    @property
    def lanes(self) -> Mapping[str, int]:
        """How many blocks each device runs at once, by name, as of the last start."""
        return {device: started.lanes for device, started in self.started.items()}

    def __enter__(self) -> Pool:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def prepare(self) -> None:
        """Start the workers, which take seconds to take their devices; `start` waits for them."""
        if self.workers.processes:
            return
        with self._closed_by_errors():
            self.control = Control.create(len(self._specs))
            self._opening = Question(self.workers.number())
            for slot, spec in enumerate(self._specs):
                self.pids.add(self.workers.spawn(spec.device, self._variables))
                start = Start(
                    backend=self._backend,
                    slot=slot,
                    arena_bytes=self._memory.arena_bytes + COUNTER_AREA_BYTES,
                    user_bytes=self._memory.user_bytes,
                    **msgspec.structs.asdict(spec),
                )
                given = {spec.device: (start,)}
                fds = (self.control.segment.fd,)
                self.workers.begin(self._opening, DeviceRequests.open, given, fds)

    def start(self) -> None:
        """Start the workers and set everything up."""
        if self._is_started:
            raise MeasurementError("the pool has been started already")
        self.prepare()
        self._is_started = True
        with self._closed_by_errors(), contextlib.ExitStack() as opened:
            limit_s = self.timeouts.start_s
            self.started = self.workers.results(self._opening, DeviceRequests.open, limit_s)
            self._broken = False
            # A later answer would take their place.
            arenas = {name: one.take_fds() for name, one in self.workers.connections.items()}
            for fd in (fd for fds in arenas.values() for fd in fds):
                opened.callback(os.close, fd)
            for device, started in self.started.items():
                if started.arena_bytes:
                    self._share(Share(space=device, handle=started.handle), arenas[device])

    @contextlib.contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close(hurry=True)
            # The next use starts all anew.
            self._broken = True
            raise

    def close(self, *, hurry: bool = False) -> None:
        """End the workers and give all memory back; `hurry` kills what does not end at once."""
        # A worker that only prepares itself hears nothing until it has its device.
        hurry = hurry or self._broken or not self._is_started
        self._broken = self._is_started = False
        if hurry and self.control is not None:
            self.control.abort()
        for connection in self.workers.connections.values():
            if hurry:
                # A worker ends when its connection does, whatever it does.
                connection.close()
            else:
                with contextlib.suppress(MeasurementError):
                    connection.tell(0, Sign.STOP)
        try:
            self.workers.end(_BROKEN_STOP_S if hurry else self.timeouts.stop_s)
        finally:
            for segment in self._segments.values():
                segment.close()
            self._segments = {}
            if self.control is not None:
                self.control.close()
                self.control = None

    def restart(self) -> None:
        """Give up all workers and start new ones."""
        self.close(hurry=True)
        self.start()

    def _ready(self) -> Control:
        if self._broken:
            self.restart()
        if self.control is None:
            raise MeasurementError("the pool is closed; only between start and close it measures")
        return self.control

    def run(self, program: HostProgram, spec: RunSpec) -> list[RunResult]:
        """Run a program's repeats, each released by one store when all its lanes are there."""
        with self.begin(program, spec) as execution:
            results = []
            for repeat in range(spec.repeats):
                execution.wait_resident(repeat)
                execution.release(repeat)
                results.append(execution.collect(repeat))
            execution.finish()
        return results

    @contextlib.contextmanager
    def begin(
        self, program: HostProgram, spec: RunSpec, *, meanwhile: Callable[[], None] | None = None
    ) -> Iterator[Execution]:
        """Queue all repeats, stopped at the end of the context; `meanwhile` is called in waits."""
        control = self._ready()
        self._prepare(control, program, spec.repeats)
        epoch = self._epoch + 1
        execution = Execution(
            self, control, program.devices, spec=spec, epoch=epoch, meanwhile=meanwhile
        )
        self._epoch += spec.repeats
        try:
            execution.queue()
            yield execution
        except WorkerLost:
            self._broken = True
            raise
        finally:
            if not self._broken and execution.question.waiting:
                # Until all have answered: a second interruption must not leave them unheard.
                self._broken = True
                with contextlib.suppress(WorkerLost):
                    execution.abort()
                    self._broken = False

    def _prepare(self, control: Control, program: HostProgram, repeats: int) -> None:
        for space, size in program.space_bytes.items():
            kind = place_named(space).kind
            if kind != "C" and size > self._memory.arena_bytes + COUNTER_AREA_BYTES:
                # Rounded up, to be more than the arena. A flow without blocks has a large buffer.
                raise MeasurementError(
                    f"{space} would hold {-(-(size - COUNTER_AREA_BYTES) >> 20)} MiB of FIFOs and "
                    f"buffers, its arena has {self._memory.arena_bytes >> 20} MiB: name blocks, "
                    "fewer of them, or smaller FIFOs or buffers"
                )
        for space, size in program.space_bytes.items():
            if place_named(space).kind == "C":
                self._have_host_memory(space, size)
                words = _COUNTERS_BYTES // 8 * repeats
                self._segments[space].array(np.uint64, 0, words)[:] = 0
        control.clear()

    def _have_host_memory(self, space: str, size: int) -> None:
        """Have so many bytes of host memory on the NUMA node of a space."""
        old = self._segments.get(space)
        if old is not None and old.size >= size:
            return
        if space not in self._numa_ids:
            nodes = ", ".join(self._numa_ids)
            raise MeasurementError(f"{space} is no NUMA node of this machine; there are {nodes}")
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        new = create_segment(capacity, numa_id=self._numa_ids[space], label=space)
        try:
            self._share(Share(space=space), (new.fd,))
        except BaseException:
            new.close()
            raise
        self._segments[space] = new
        if old is not None:
            old.close()

    def release_waiters(self, repeat: int) -> None:
        """Set all counters of a repeat so high that no copy waits for them any more."""
        for segment in self._segments.values():
            counters = segment.array(np.uint64, repeat * _COUNTERS_BYTES, _COUNTERS_BYTES // 8)
            counters[:] = 1 << 62

    def _share(self, share: Share, fds: Sequence[int]) -> None:
        ready = [device for device in self.started if device != share.space]
        try:
            self.workers.ask(DeviceRequests.share, dict.fromkeys(ready, (share,)), fds=fds)
        except BaseException:
            # After a refusal only some workers have the memory.
            self._broken = True
            raise

    def ask(
        self,
        method: Callable[..., Result],
        given: Mapping[str, tuple[object, ...]],
        limit_s: float = 0.0,
    ) -> dict[str, Result]:
        """Ask workers, all at once, and hear all of them; `limit_s` is beyond the usual time."""
        self._ready()
        try:
            return self.workers.ask(method, given, limit_s + self.timeouts.answer_s)
        except WorkerLost:
            self._broken = True
            raise

    def ping(self, count: int = 16) -> Mapping[str, Pinged]:
        """Compare each device's clock with CLOCK_MONOTONIC, one after the other."""
        answers: dict[str, Pinged] = {}
        for device in self.started:
            answers |= self.ask(DeviceRequests.ping, {device: (count,)})
        return answers


class Execution:
    """The repeats of a program, queued on this host's devices; `Pool.begin` makes it.

    Call for each repeat `wait_resident`, `release`, `collect`; then `finish`. Stages raise
    WorkerLost and MeasurementError. `meanwhile` is called now and then during waits; an exception
    ends the wait.
    """

    def __init__(
        self,
        pool: Pool,
        control: Control,
        devices: Mapping[str, DeviceProgram],
        *,
        spec: RunSpec,
        epoch: int,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        self._pool, self._control, self._devices = pool, control, devices
        self._spec, self._epoch, self._meanwhile = spec, epoch, meanwhile
        self._workers, self._patience_s = pool.workers, pool.timeouts.lanes_s
        self.question = Question(pool.workers.number())
        self._released_at = 0

    def queue(self) -> None:
        """Send each worker its share, after clearing the stamps."""
        wake_promptly()
        runs = {device: (self._run_of(device, share),) for device, share in self._devices.items()}
        for repeat in range(self._spec.repeats):
            for row in (row for rows in self._stamps(repeat).values() for row in rows):
                row[:] = 0
        self._workers.begin(self.question, DeviceRequests.run, runs)

    def _run_of(self, device: str, share: DeviceProgram) -> Run:
        spec = self._spec
        return Run(
            program=share,
            epoch=self._epoch,
            repeats=spec.repeats,
            warm_ns=round(spec.warm_us * 1e3),
            window_ns=round(spec.window_us * 1e3),
            patience_ns=round(self._patience_s * 1e9),
            paces=spec.paces.get(device, ()),
            check=spec.check,
        )

    def wait_resident(self, repeat: int) -> None:
        """Wait until all lanes and copies of a repeat wait for their release."""
        number = self._epoch + repeat
        views, stamps = self._records(repeat), self._stamps(repeat)

        def resident(device: str) -> bool:
            there = (views[device]["resident"] == number).all()
            return bool(there and all(row[0] for row in stamps[device]))

        def count_started(device: str) -> str:
            blocks = views[device]["resident"] == number
            return f" ({blocks.sum()} of {len(blocks)})"

        failure = "did not start all blocks of a set"
        self._until(resident, self._patience_s, failure, count_started)

    def release(self, repeat: int, at_ns: int | None = None) -> int:
        """Release a repeat at `at_ns` of CLOCK_MONOTONIC or now; return the time after."""
        if at_ns is not None:
            ahead_s = (at_ns - time.monotonic_ns()) / 1e9
            if ahead_s > self._patience_s:
                raise MeasurementError(
                    f"a release in {ahead_s:.1f} s: lanes wait {self._patience_s:g} s"
                )
            self._sleep_until(at_ns - _SPIN_NS)
            while time.monotonic_ns() < at_ns:
                pass
        self._control.release(self._epoch + repeat)
        self._released_at = time.monotonic_ns()
        return self._released_at

    def collect(self, repeat: int) -> RunResult:
        """Wait for the end of a repeat that has been released, and return its records."""
        number, patience_s, lasting_s = self._epoch + repeat, self._patience_s, self._spec.lasting_s
        views, stamps = self._records(repeat), self._stamps(repeat)
        # 1. Every copy's window ends this long after the copies have been seen to run.
        self._until(
            lambda device: all(row[1] for row in stamps[device]),
            patience_s,
            "did not begin its copies",
        )
        windows_over = time.monotonic() + lasting_s + _CLOCKS_DIFFER_S
        # 2. This process leaves the cores to the lanes: there may be no more cores than lanes.
        self._sleep_until(self._released_at + round((lasting_s - _EARLY_S) * 1e9))
        self._until(
            lambda device: bool((views[device]["finished"] == number).all()),
            patience_s,
            "did not finish a set",
        )
        for device, records in views.items():
            if not records["start"].all():
                fault = f"was not released within {patience_s:g} s: this process was stopped or "
                raise self._workers.lost(device, f"{fault}kept from running meanwhile")
        # 3. After their windows, copies that wait for a stopped lane are released.
        if any(stamps.values()):

            def copied(device: str) -> bool:
                return all(row[-1] for row in stamps[device])

            def over(device: str) -> bool:
                return time.monotonic() > windows_over or copied(device)

            failure = "did not finish its copies"
            self._until(over, lasting_s + patience_s, failure)
            self._pool.release_waiters(repeat)
            self._until(copied, patience_s, failure)
        return RunResult(
            records={device: view.copy() for device, view in views.items()},
            stamps={
                device: tuple(row[1:].copy() for row in rows) for device, rows in stamps.items()
            },
        )

    def finish(self) -> None:
        """Hear from every worker that all repeats have run."""
        self._workers.answers(self.question, Returned)

    def abort(self) -> None:
        """Stop all lanes, and hear the answers still owed; raises WorkerLost."""
        self._control.abort()
        try:
            self._workers.answers(self.question, Returned, self._pool.timeouts.stop_s)
        except WorkerLost:
            raise
        except MeasurementError:
            # Refused: nothing runs.
            pass
        self._control.clear()

    def _records(self, repeat: int) -> Mapping[str, npt.NDArray[np.void]]:
        return {
            device: self._control.records(self._pool.slots[device], repeat, len(share.lanes))
            for device, share in self._devices.items()
        }

    def _stamps(self, repeat: int) -> Mapping[str, tuple[Stamps, ...]]:
        slots, paces = self._pool.slots, self._spec.paces
        return {
            device: self._control.stamps(slots[device], repeat, paces.get(device, ()))
            for device in self._devices
        }

    def _until(
        self,
        satisfied: Callable[[str], bool],
        limit_s: float,
        failure: str,
        state: Callable[[str], str] = lambda _: "",
    ) -> None:
        """Wait until all devices satisfy a condition, checking now and then for deaths."""
        begun = looked = time.monotonic()
        while not all(map(satisfied, self._devices)):
            time_s = time.monotonic()
            if time_s - looked > _LOOK_S:
                self._look()
                looked = time_s
            if time_s - begun > limit_s:
                late = [device for device in self._devices if not satisfied(device)]
                names = (device + state(device) for device in late or self._devices)
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
        if self._meanwhile is not None:
            self._meanwhile()
        self._workers.hear(self.question)
        self._workers.check(self.question.answers, Returned)
