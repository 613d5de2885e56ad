"""The pool: one worker process a device, started once, through which every set is run.

The controller and the workers talk over sockets only to set things up. Lanes are released by one
store into shared memory, and what they did is read from there.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import TracebackType

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_profiler.channel import Channel, ChannelClosed, ChannelTimeout
from tccl_profiler.control import MAX_DEVICES, MAX_LANES, MAX_STAMPS, Control, control_bytes
from tccl_profiler.messages import (
    Done,
    Failed,
    FromWorker,
    Meet,
    Pace,
    Peer,
    Ping,
    Pinged,
    Run,
    Share,
    Start,
    Started,
    Stop,
)
from tccl_profiler.program import (
    COUNTER_AREA_BYTES,
    COUNTER_BYTES,
    COUNTERS,
    MAX_REPEATS,
    DeviceProgram,
    Program,
)
from tccl_profiler.shared_memory import Segment, create_segment
from tccl_py.errors import MeasurementError

_BROKEN_STOP_S = 0.5
"""What workers that are given up get to end by themselves."""
_KILL_S = 5.0
"""A process that is inside a driver's call may take a while to die, or never do."""
_LOOK_S = 0.02
"""How often a wait looks whether all workers are still there."""
_SMALLEST_SEGMENT = 64 << 20


class WorkerLost(MeasurementError):  # noqa: N818 - says what happened
    """A worker died, hangs, or its device failed; the pool must be started anew."""


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A device to measure: its number in the machine, its bus id, and CPUs to pin its worker to."""

    index: int
    bus_id: str
    cpus: tuple[int, ...] = ()


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that each device gives: its arena, and twice what is sent and kept."""

    arena_bytes: int = 512 << 20
    user_bytes: int = 256 << 20


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long the pool waits, in seconds: for devices to be set up, of which a first compilation
    takes some; for an answer; for lanes to be there or, beyond their window, to be done, which is
    also how long lanes wait to be released; and for workers to end."""

    start_s: float = 120.0
    answer_s: float = 60.0
    lanes_s: float = 10.0
    stop_s: float = 3.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One repeat: by device index its records (`control.RECORD`), lanes first, and its copies'
    stamps: when released, then when each group was done."""

    records: Mapping[int, npt.NDArray[np.void]]
    stamps: Mapping[int, tuple[npt.NDArray[np.uint64], ...]]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How a program is run: repeats, their warm-up and window, and whether data are checked.

    `paces` says for each device how much its copies move.
    """

    repeats: int
    warm_us: float
    window_us: float
    check: bool = False
    paces: Mapping[int, tuple[Pace, ...]] = msgspec.field(default_factory=dict)


@dataclass
class _Worker:
    spec: DeviceSpec
    slot: int
    process: subprocess.Popen[bytes]
    channel: Channel[FromWorker]
    complaints: int
    started: Started | None = None
    arena_fd: int = -1
    owes_answer: bool = False
    lanes_asked: int = 0
    who: str = field(init=False)

    def __post_init__(self) -> None:
        self.who = f"the worker of G{self.spec.index}"


class Pool:
    """Worker processes for some devices of this host, and what is shared with them.

    Args:
        backend: `cuda` or `host`.
        devices: what to measure.
        numa_ids: by host space (`C0`) the system's number of its NUMA node, None if it has one.
        memory: what each device gives.
        patience: how long to wait for what.
    """

    def __init__(
        self,
        backend: str,
        devices: Sequence[DeviceSpec],
        numa_ids: Mapping[str, int | None],
        *,
        memory: Memory | None = None,
        patience: Patience | None = None,
    ) -> None:
        if not 1 <= len(devices) <= MAX_DEVICES:
            raise MeasurementError(f"{len(devices)} devices: 1 to {MAX_DEVICES} can be measured")
        self._backend = backend
        self._specs = tuple(devices)
        self._numa_ids = dict(numa_ids)
        self._memory = memory or Memory()
        self._patience = patience or Patience()
        self._workers: list[_Worker] = []
        self._started: dict[int, Started] = {}
        self._host: dict[str, Segment] = {}
        self._control: Control | None = None
        self._lifeline: tuple[int, int] | None = None
        self._epoch = 0
        self._broken = False
        self._pids: set[int] = set()

    @property
    def lanes(self) -> Mapping[int, int]:
        """How many blocks each device runs at once, by its index, as when it was last started."""
        return {index: one.lanes for index, one in self._started.items()}

    @property
    def pids(self) -> Set[int]:
        """Process ids of the workers, and of those that were before; the set grows on its own."""
        return self._pids

    @property
    def names(self) -> Mapping[int, str]:
        """What each device calls itself, by its index."""
        return {index: one.name for index, one in self._started.items()}

    @property
    def device_bytes(self) -> int:
        """Memory taken on each device, without what its driver takes for itself."""
        return max(one.memory_bytes for one in self._started.values())

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of all spaces together."""
        return sum(segment.size for segment in self._host.values())

    def __enter__(self) -> Pool:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the workers and set everything up.

        Raises:
            MeasurementError: a device cannot be used, by name; nothing is left running.
        """
        if self._control is not None:
            raise MeasurementError("the pool has been started already")
        try:
            self._control = Control.create(len(self._specs))
            self._lifeline = os.pipe()
            for slot, spec in enumerate(self._specs):
                self._spawn(slot, spec)
            deadline = time.monotonic() + self._patience.start_s
            for worker in self._workers:
                message, fds = self._received(worker, deadline - time.monotonic())
                if not isinstance(message, Started):
                    raise WorkerLost(f"{worker.who} did not start: {message}")
                worker.started, worker.arena_fd = message, fds[0] if fds else -1
                self._started[worker.spec.index] = message
            self._introduce()
            self._broken = False
        except BaseException:
            self._broken = True
            self._end()
            raise

    def _spawn(self, slot: int, spec: DeviceSpec) -> None:
        """Start a worker and tell it who it is; from then on it is among those that are ended."""
        assert self._lifeline is not None and self._control is not None
        # A queue for each stream: one that waits must not hold up another.
        environment = dict(
            os.environ,
            CUDA_DEVICE_ORDER="PCI_BUS_ID",
            CUDA_DEVICE_MAX_CONNECTIONS="32",
            # numpy would have a thread for every core, in every worker.
            OPENBLAS_NUM_THREADS="1",
        )
        # Devices are taken by bus id, and their peers must be visible too.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        # Where the controller found this package, its workers do too.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.enter_context(ours)
            complaints = os.memfd_create(f"tccl-stderr-{spec.index}")
            undo.callback(os.close, complaints)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tccl_profiler.worker", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=complaints,
                )
            worker = _Worker(
                spec=spec,
                slot=slot,
                process=process,
                complaints=complaints,
                channel=Channel(ours, receives=FromWorker, peer=f"the worker of G{spec.index}"),
            )
            self._workers.append(worker)
            undo.pop_all()
        self._pids.add(process.pid)
        start = Start(
            backend=self._backend,
            slot=slot,
            index=spec.index,
            bus_id=spec.bus_id,
            cpus=spec.cpus,
            control_bytes=control_bytes(len(self._specs)),
            arena_bytes=self._memory.arena_bytes + COUNTER_AREA_BYTES,
            user_bytes=self._memory.user_bytes,
        )
        self._ask(worker, start, (self._control.segment.fd, self._lifeline[0]))

    def _ask(self, worker: _Worker, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        # Before it is sent: an interruption just after would leave an answer that nobody expects.
        worker.owes_answer = True
        try:
            worker.channel.send(message, fds, self._patience.answer_s)
        except ChannelClosed as error:
            raise WorkerLost(f"{worker.who} {_death(worker)}") from error
        except ChannelTimeout as error:
            raise WorkerLost(
                f"{worker.who} has not listened for {self._patience.answer_s:g} s"
            ) from error

    def _introduce(self) -> None:
        """Tell every worker of the others' arenas."""
        for worker in self._workers:
            others = [one for one in self._workers if one is not worker]
            fds = [one.arena_fd for one in others if one.arena_fd >= 0]
            peers = []
            for other in others:
                assert other.started is not None
                peers.append(
                    Peer(
                        space=f"G{other.spec.index}",
                        handle=other.started.handle,
                        size=other.started.arena_bytes,
                        bus_id=other.spec.bus_id,
                        descriptor=fds.index(other.arena_fd) if other.arena_fd >= 0 else -1,
                    )
                )
            self._ask(worker, Meet(peers=tuple(peers)), fds)
        for worker in self._workers:
            self._done(worker, self._patience.start_s)

    def close(self) -> None:
        """End the workers and give all memory back; twice does nothing more."""
        try:
            self._end()
        finally:
            self._broken = False

    def _end(self) -> None:
        """End the workers, politely unless they are given up, and free what is shared with them."""
        if self._broken and self._control is not None:
            self._control.abort()
        for worker in self._workers:
            if not self._broken:
                with contextlib.suppress(MeasurementError):
                    worker.channel.send(Stop(), (), 1.0)
            # A worker ends when its channel does; what it is doing it does first.
            worker.channel.close()
        deadline = time.monotonic() + (_BROKEN_STOP_S if self._broken else self._patience.stop_s)
        try:
            for worker in self._workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self._free()

    def _free(self) -> None:
        """Kill the workers that are still there, and give back descriptors and memory."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_KILL_S)
            os.close(worker.complaints)
            if worker.arena_fd >= 0:
                os.close(worker.arena_fd)
        self._workers = []
        for segment in self._host.values():
            segment.close()
        self._host = {}
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._lifeline is not None:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None

    def restart(self) -> None:
        """Give up all workers and start new ones.

        Raises:
            MeasurementError: as `start`.
        """
        self._broken = True
        self._end()
        self.start()

    def _ready(self) -> Control:
        """Start anew if that is needed.

        Raises:
            MeasurementError: the pool is closed, or as `start`.
        """
        if self._broken:
            self.restart()
        if self._control is None:
            raise MeasurementError("the pool is closed; only between start and close it measures")
        return self._control

    def run(self, program: Program, timing: Timing) -> list[Outcome]:
        """Run a program's repeats, each released by one store when all its lanes are there.

        Raises:
            WorkerLost: a worker died or hangs: start anew.
            MeasurementError: the devices refuse the program.
        """
        control = self._ready()
        self._prepare(control, program, timing.repeats)
        workers = [one for one in self._workers if one.spec.index in program.devices]
        epoch, self._epoch = self._epoch + 1, self._epoch + timing.repeats
        try:
            for worker in workers:
                share = program.devices[worker.spec.index]
                order = _order(worker, share, epoch, timing, self._patience.lanes_s)
                for repeat in range(timing.repeats):
                    for row in _stamps(control, worker, timing, repeat):
                        row[:] = 0
                self._ask(worker, order)
            outcomes = [
                self._repeat(control, workers, timing, epoch, repeat)
                for repeat in range(timing.repeats)
            ]
            for worker in workers:
                if worker.owes_answer:
                    self._done(worker, self._patience.answer_s)
        except WorkerLost:
            self._broken = True
            raise
        except BaseException:
            self._calm(control, workers)
            raise
        return outcomes

    def _prepare(self, control: Control, program: Program, repeats: int) -> None:
        """Refuse what does not fit, and set counters and flag to what lanes begin with."""
        if not 1 <= repeats <= MAX_REPEATS:
            raise MeasurementError(f"{repeats} repeats at once: 1 to {MAX_REPEATS} are right")
        for space, size in program.space_bytes.items():
            if not space.startswith("C") and size > self._memory.arena_bytes + COUNTER_AREA_BYTES:
                raise MeasurementError(
                    f"{space} would hold {(size - COUNTER_AREA_BYTES) >> 20} MiB of FIFOs, its "
                    f"arena has {self._memory.arena_bytes >> 20} MiB: give fewer blocks or smaller "
                    "FIFOs"
                )
        for index, share in program.devices.items():
            if len(share.lanes) + len(share.copies) > MAX_LANES:
                raise MeasurementError(f"G{index} would do more than {MAX_LANES} things at once")
        for space, size in program.space_bytes.items():
            if space.startswith("C"):
                self._ensure(space, size)
                counters = COUNTERS * COUNTER_BYTES // 8 * repeats
                self._host[space].array(np.uint64, 0, counters)[:] = 0
        control.clear()

    def _ensure(self, space: str, size: int) -> None:
        """Host memory of this space for `size` bytes; what has been made is kept and reused."""
        segment = self._host.get(space)
        if segment is not None and segment.size >= size:
            return
        if space not in self._numa_ids:
            known = ", ".join(self._numa_ids)
            raise MeasurementError(f"{space} is no NUMA node of this machine; there are {known}")
        wanted = max(_SMALLEST_SEGMENT, 1 << (size - 1).bit_length())
        new = create_segment(wanted, numa_id=self._numa_ids[space], label=space)
        try:
            for worker in self._workers:
                self._ask(worker, Share(space=space, size=wanted), (new.fd,))
            for worker in self._workers:
                self._done(worker, self._patience.answer_s)
        except BaseException:
            new.close()
            # Some have the new memory and some the old.
            self._broken = True
            raise
        self._host[space] = new
        if segment is not None:
            segment.close()

    def _repeat(
        self,
        control: Control,
        workers: Sequence[_Worker],
        timing: Timing,
        epoch: int,
        repeat: int,
    ) -> Outcome:
        """Wait until all of one repeat are there, release them, wait for the last."""
        now, patience_s = epoch + repeat, self._patience.lanes_s
        views = {
            one.spec.index: control.records(one.slot, repeat, one.lanes_asked) for one in workers
        }
        stamps = {one.spec.index: _stamps(control, one, timing, repeat) for one in workers}

        def resident(one: _Worker) -> bool:
            index = one.spec.index
            there = (views[index]["resident"] == now).all()
            return bool(there and all(row[0] for row in stamps[index]))

        def finished(one: _Worker) -> bool:
            return bool((views[one.spec.index]["finished"] == now).all())

        self._until(resident, workers, patience_s, "did not get its part of a set running")
        control.release(now)
        lasting_s = (timing.warm_us + timing.window_us) / 1e6
        self._until(finished, workers, lasting_s + patience_s, "did not finish its part of a set")
        for one in workers:
            if not views[one.spec.index]["start"].all():
                raise WorkerLost(
                    f"{one.who} was not released within {patience_s:g} s: this process was stopped "
                    "or kept from running meanwhile"
                )
        if any(stamps.values()):
            self._finish_copies(stamps, repeat, lasting_s, workers)
        return Outcome(
            records={index: view.copy() for index, view in views.items()},
            stamps={i: tuple(row[1:].copy() for row in rows) for i, rows in stamps.items()},
        )

    def _finish_copies(
        self,
        stamps: Mapping[int, Sequence[npt.NDArray[np.uint64]]],
        repeat: int,
        lasting_s: float,
        workers: Sequence[_Worker],
    ) -> None:
        """Wait for copies; those that wait for a lane that has stopped are let go after a while."""
        until = time.monotonic() + 2 * lasting_s + 0.01

        def done(one: _Worker) -> bool:
            return all(row[-1] for row in stamps[one.spec.index])

        def done_or_late(one: _Worker) -> bool:
            return time.monotonic() > until or done(one)

        patience_s, failure = self._patience.lanes_s, "did not finish its copies"
        self._until(done_or_late, workers, 2 * lasting_s + patience_s, failure)
        for segment in self._host.values():
            size = COUNTERS * COUNTER_BYTES
            segment.array(np.uint64, repeat * size, size // 8)[:] = 1 << 62
        self._until(done, workers, patience_s, failure)

    def _until(
        self,
        satisfied: Callable[[_Worker], bool],
        workers: Sequence[_Worker],
        limit_s: float,
        failure: str,
    ) -> None:
        """Wait until all workers satisfy a condition, and look now and then whether they live.

        Raises:
            WorkerLost: one has died, or does not satisfy it in time.
            MeasurementError: one refuses.
        """
        begun = looked = time.monotonic()
        while not all(map(satisfied, workers)):
            now = time.monotonic()
            if now - looked > _LOOK_S:
                self._look(workers)
                looked = now
            if now - begun > limit_s:
                late = [one for one in workers if not satisfied(one)]
                raise WorkerLost(f"{_names(late or workers)} {failure} within {limit_s:.1f} s")
            if now - begun > 0.001:
                # Long waits leave the core to the workers; short ones must not oversleep.
                time.sleep(0.0001)

    def _look(self, workers: Sequence[_Worker]) -> None:
        """Raise if a worker has died or has said that it failed; one may be done before others."""
        poller = select.poll()
        for worker in workers:
            poller.register(worker.channel, select.POLLIN)
        readable = {fd for fd, _ in poller.poll(0)}
        for worker in workers:
            if worker.channel.fileno() in readable:
                self._done(worker, self._patience.answer_s)

    def _received(self, worker: _Worker, limit_s: float) -> tuple[FromWorker, tuple[int, ...]]:
        """The next message; a failure that it tells of is raised."""
        try:
            message, fds = worker.channel.receive(max(0.0, limit_s))
        except ChannelClosed as error:
            raise WorkerLost(f"{worker.who} {_death(worker)}") from error
        except ChannelTimeout as error:
            raise WorkerLost(f"{worker.who} has not answered for {limit_s:.1f} s") from error
        worker.owes_answer = False
        if isinstance(message, Failed):
            kind = WorkerLost if message.fatal else MeasurementError
            raise kind(_by_name(worker.spec.index, message.what))
        return message, fds

    def _done(self, worker: _Worker, limit_s: float) -> None:
        message, _ = self._received(worker, limit_s)
        if not isinstance(message, Done):
            raise WorkerLost(f"{worker.who} answered {type(message).__name__} out of turn")

    def _calm(self, control: Control, workers: Sequence[_Worker]) -> None:
        """After an interruption or a refusal: stop all lanes, and hear what is still to be said."""
        # Until all have answered: a second interruption must not leave them unheard.
        self._broken = True
        control.abort()
        for worker in workers:
            while worker.owes_answer:
                try:
                    self._received(worker, self._patience.stop_s)
                except WorkerLost:
                    return
                except MeasurementError:
                    continue
        control.clear()
        self._broken = False

    def ping(self, count: int = 16) -> Mapping[int, Pinged]:
        """Each device's clock against CLOCK_MONOTONIC, by its index, one after the other.

        Raises:
            WorkerLost: a worker died or hangs.
        """
        self._ready()
        answers = {}
        try:
            for worker in self._workers:
                self._ask(worker, Ping(count=count))
                message, _ = self._received(worker, self._patience.answer_s)
                if not isinstance(message, Pinged):
                    raise WorkerLost(f"{worker.who} answered {type(message).__name__} out of turn")
                answers[worker.spec.index] = message
        except BaseException:
            # Interrupted too: an answer may be under way.
            self._broken = True
            raise
        return answers


def _order(
    worker: _Worker, share: DeviceProgram, epoch: int, timing: Timing, patience_s: float
) -> Run:
    worker.lanes_asked = len(share.lanes)
    paces = timing.paces.get(worker.spec.index, ())
    stamps = sum(pace.groups + 2 for pace in paces)
    if len(paces) != len(share.copies) or stamps > MAX_STAMPS:
        raise MeasurementError(
            f"G{worker.spec.index}: {len(paces)} paces with {stamps} stamps for "
            f"{len(share.copies)} copies; one each and {MAX_STAMPS} stamps at most are right"
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


def _stamps(
    control: Control, worker: _Worker, timing: Timing, repeat: int
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Views of each copy's stamps: queued, released, and one for each group."""
    rows, first = [], 0
    paces = timing.paces.get(worker.spec.index, ())
    area = control.stamps(worker.slot, repeat, sum(pace.groups + 2 for pace in paces))
    for pace in paces:
        rows.append(area[first : first + pace.groups + 2])
        first += pace.groups + 2
    return tuple(rows)


def _names(workers: Sequence[_Worker]) -> str:
    return ", ".join(f"G{one.spec.index}" for one in workers)


def _by_name(index: int, what: str) -> str:
    """What a worker says, with its device's name if that is not in it."""
    return what if re.search(rf"\bG(PU )?{index}\b", what) else f"G{index}: {what}"


def _death(worker: _Worker) -> str:
    """How a worker ended, with the last it said on stderr."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(1.0)
    code = worker.process.returncode
    if code is None:
        return "closed its connection"
    end = os.fstat(worker.complaints).st_size
    said = os.pread(worker.complaints, 1 << 16, max(0, end - (1 << 16)))
    lines = said.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
    return f"{how} ({last[:300]})" if last else how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
