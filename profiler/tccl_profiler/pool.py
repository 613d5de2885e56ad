"""The pool: one worker process per device of this host runs all sets.

Lanes are released by one store into shared memory, where their records are read.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from tccl_profiler import messages
from tccl_profiler.execution import Execution, HostBuffers, RunResult, RunSpec, Timeouts
from tccl_profiler.messages import DeviceSpec
from tccl_profiler.program import COUNTER_AREA_BYTES, HostProgram
from tccl_profiler.shared_memory import MAX_DEVICES, MAX_LANES, Control
from tccl_profiler.worker_process import Answer, WorkerProcess, spawn_worker
from tccl_py.errors import MeasurementError

_BROKEN_STOP_S = 0.5  # time for workers that are given up to end by themselves
_KILL_S = 5.0  # a process within a driver's call may take a while to die


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
        self.host = HostBuffers(numa_ids)
        self._memory = memory or Memory()
        self._timeouts = timeouts or Timeouts()
        self.workers: list[WorkerProcess] = []
        self.started: dict[str, messages.Started] = {}
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
        if self.workers:
            return
        with self._closed_by_errors():
            self.control = Control.create(len(self._specs))
            for slot, spec in enumerate(self._specs):
                worker = spawn_worker(slot, spec, self._variables, self._timeouts.answer_s)
                self.workers.append(worker)
                self.pids.add(worker.process.pid)
                start = messages.Start(
                    backend=self._backend,
                    slot=slot,
                    arena_bytes=self._memory.arena_bytes + COUNTER_AREA_BYTES,
                    user_bytes=self._memory.user_bytes,
                    **msgspec.structs.asdict(spec),
                )
                worker.ask(start, (self.control.segment.fd,))

    def start(self) -> None:
        """Start the workers and set everything up."""
        if self._is_started:
            raise MeasurementError("the pool has been started already")
        self.prepare()
        self._is_started = True
        with self._closed_by_errors(), contextlib.ExitStack() as opened:
            deadline = time.monotonic() + self._timeouts.start_s
            arenas: dict[str, tuple[int, ...]] = {}
            for worker in self.workers:
                device, left_s = worker.spec.device, deadline - time.monotonic()
                self.started[device], arenas[device] = worker.receive(messages.Started, left_s)
                for fd in arenas[device]:
                    opened.callback(os.close, fd)
            self._broken = False
            for device, fds in arenas.items():
                started = self.started[device]
                if started.arena_bytes:
                    self._share(messages.Share(space=device, handle=started.handle), fds)

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
        for worker in self.workers:
            if hurry:
                # A worker ends when its connection does, whatever it does.
                worker.connection.close()
            else:
                with contextlib.suppress(MeasurementError):
                    worker.connection.send(messages.Stop(), (), 1.0)
        deadline = time.monotonic() + (_BROKEN_STOP_S if hurry else self._timeouts.stop_s)
        try:
            for worker in self.workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in self.workers:
                worker.process.kill()
            for worker in self.workers:
                worker.free(_KILL_S)
            self.workers = []
            self.host.close()
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
        execution = Execution(
            control,
            self.host,
            [worker for worker in self.workers if worker.spec.device in program.devices],
            spec=spec,
            epoch=self._epoch + 1,
            timeouts=self._timeouts,
            meanwhile=meanwhile,
        )
        self._epoch += spec.repeats
        try:
            execution.queue(program)
            yield execution
        except messages.WorkerLost:
            self._broken = True
            raise
        finally:
            if not self._broken and any(worker.owes_answer for worker in execution.workers):
                # Until all have answered: a second interruption must not leave them unheard.
                self._broken = True
                with contextlib.suppress(messages.WorkerLost):
                    execution.abort()
                    self._broken = False

    def _prepare(self, control: Control, program: HostProgram, repeats: int) -> None:
        for device, share in program.devices.items():
            if len(share.lanes) + len(share.copies) > MAX_LANES:
                raise MeasurementError(f"{device} would do more than {MAX_LANES} things at once")
        for space, size in program.space_bytes.items():
            if not space.startswith("C") and size > self._memory.arena_bytes + COUNTER_AREA_BYTES:
                # Rounded up, to be more than the arena. A flow without blocks has a large buffer.
                raise MeasurementError(
                    f"{space} would hold {-(-(size - COUNTER_AREA_BYTES) >> 20)} MiB of FIFOs and "
                    f"buffers, its arena has {self._memory.arena_bytes >> 20} MiB: name blocks, "
                    "fewer of them, or smaller FIFOs or buffers"
                )
        for space, size in program.space_bytes.items():
            if space.startswith("C"):
                self.host.ensure(space, size, self._share)
                self.host.clear(space, repeats)
        control.clear()

    def _share(self, share: messages.Share, fds: Sequence[int]) -> None:
        ready = [device for device in self.started if device != share.space]
        try:
            self.ask(dict.fromkeys(ready, share), messages.Done, fds=fds)
        except BaseException:
            # After a refusal only some workers have the memory.
            self._broken = True
            raise

    def ask(
        self,
        requests: Mapping[str, msgspec.Struct],
        kind: type[Answer],
        limit_s: float = 0.0,
        fds: Sequence[int] = (),
    ) -> dict[str, Answer]:
        """Ask workers, all at once, and hear all of them; `limit_s` is beyond the usual time."""
        self._ready()
        workers = [worker for worker in self.workers if worker.spec.device in requests]
        answers: dict[str, Answer] = {}
        refused: MeasurementError | None = None
        # After any exception an answer may be owed still.
        self._broken = True
        for worker in workers:
            worker.ask(requests[worker.spec.device], fds)
        for worker in workers:
            try:
                answer, _ = worker.receive(kind, limit_s + self._timeouts.answer_s)
                answers[worker.spec.device] = answer
            except messages.WorkerLost:
                raise
            except MeasurementError as error:
                refused = refused or error
        self._broken = False
        if refused is not None:
            raise refused
        return answers

    def ping(self, count: int = 16) -> Mapping[str, messages.Pinged]:
        """Compare each device's clock with CLOCK_MONOTONIC, one after the other."""
        answers: dict[str, messages.Pinged] = {}
        for device in self.started:
            answers |= self.ask({device: messages.Ping(count=count)}, messages.Pinged)
        return answers
