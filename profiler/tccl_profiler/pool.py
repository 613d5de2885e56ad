"""The pool: one worker process a device, started once, through which every set is run.

The controller and the workers talk over sockets only to set things up. Lanes are released by one
store into shared memory, and what they did is read from there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TypeVar

import msgspec

from tccl_profiler.execution import HostSpaces, Outcome, Patience, Running, Timing
from tccl_profiler.messages import (
    Accept,
    AskLinks,
    Connect,
    Endpoint,
    FromWorker,
    Linked,
    Listen,
    Listening,
    Meet,
    Peer,
    Ping,
    Pinged,
    Share,
    Start,
    Started,
    Stop,
)
from tccl_profiler.program import COUNTER_AREA_BYTES, MAX_REPEATS, Link, Work, is_nic, local
from tccl_profiler.shared_memory import MAX_DEVICES, MAX_LANES, Control, Segment, control_bytes
from tccl_profiler.workers import DeviceSpec, WorkerLost, WorkerProcess, spawned
from tccl_py.errors import MeasurementError

# What a pool asks of its workers, so that links to other hosts come to be.


Asked = tuple[WorkerProcess, msgspec.Struct]


class Linking:
    """Makes links over the workers of one pool.

    Args:
        workers: all of them.
        link_s: seconds that a link gets to be made.
        answer_s: seconds that a worker gets to answer, beyond those.
    """

    def __init__(self, workers: Sequence[WorkerProcess], *, link_s: float, answer_s: float) -> None:
        self._workers = {one.spec.device: one for one in workers}
        self._link_s, self._answer_s = link_s, answer_s

    def usable(self) -> frozenset[Link]:
        """The links that are there and clean."""
        answers = self._all([(worker, AskLinks()) for worker in self._workers.values()])
        found: set[Link] = set()
        for one in answers:
            assert isinstance(one, Linked)
            found.update(one.links)
        return frozenset(found)

    def listen(self, links: Sequence[Link]) -> dict[Link, Endpoint]:
        """Wait for links, and say where."""
        shares = self._shares(links, lambda link: link.receiver)
        answers = self._all([(worker, Listen(links=tuple(share))) for worker, share in shares])
        ends: dict[Link, Endpoint] = {}
        for (_, share), one in zip(shares, answers, strict=True):
            assert isinstance(one, Listening)
            ends.update(zip(share, one.endpoints, strict=True))
        return ends

    def connect(self, ends: Mapping[Link, Endpoint]) -> None:
        """Make links to where they are waited for."""
        self._all(
            [
                (
                    worker,
                    Connect(
                        links=tuple(share),
                        endpoints=tuple(ends[link] for link in share),
                        limit_s=self._link_s,
                    ),
                )
                for worker, share in self._shares(list(ends), lambda link: link.sender)
            ]
        )

    def accept(self, links: Sequence[Link]) -> None:
        """Take links that were listened for."""
        self._all(
            [
                (worker, Accept(links=tuple(share), limit_s=self._link_s))
                for worker, share in self._shares(links, lambda link: link.receiver)
            ]
        )

    def _shares(
        self, links: Sequence[Link], end: Callable[[Link], str]
    ) -> list[tuple[WorkerProcess, list[Link]]]:
        """Links by the NIC of this pool that has an end of them, or by the GPU that NCCL is on."""
        shares: dict[str, list[Link]] = {}
        for link in links:
            device = local(end(link))
            known = [one for one in self._workers if is_nic(one) != bool(link.carrier)]
            if device not in known:
                kind, others = "GPU" if link.carrier else "NIC", ", ".join(known) or "none"
                raise MeasurementError(
                    f"{link}: {device} is no {kind} of this pool; it has {others}"
                )
            shares.setdefault(device, []).append(link)
        return [(self._workers[device], share) for device, share in shares.items()]

    def _all(self, asked: Sequence[Asked]) -> list[FromWorker]:
        """Ask workers at once, and hear all of them, also where one refuses.

        Raises:
            WorkerLost: one died or hangs.
            LinkLost: a link could not be made.
            MeasurementError: one refuses.
        """
        for worker, message in asked:
            worker.ask(message, limit_s=self._answer_s)
        answers: list[FromWorker] = []
        refused: MeasurementError | None = None
        for worker, _ in asked:
            try:
                answers.append(worker.received(self._link_s + self._answer_s)[0])
            except WorkerLost:
                raise
            except MeasurementError as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return answers


Answer = TypeVar("Answer")

_BROKEN_STOP_S = 0.5
"""What workers that are given up get to end by themselves."""
_KILL_S = 5.0
"""A process that is inside a driver's call may take a while to die, or never do."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that each device gives: its arena, and twice what is sent and kept."""

    arena_bytes: int = 512 << 20
    user_bytes: int = 256 << 20


class Pool:
    """Worker processes for some devices of this host, and what is shared with them.

    Links to NICs of other hosts are kept from set to set. Before a program with NICs is begun, its
    links are made: `links` says which there are, and what an end lacks is made by `listen`,
    `connect` and `accept`, each on all hosts before the next.

    Args:
        backend: `cuda` or `host`, of the devices that are no NICs.
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
        self._host = HostSpaces(numa_ids)
        self._memory = memory or Memory()
        self._patience = patience or Patience()
        self._workers: list[WorkerProcess] = []
        self._started: dict[str, Started] = {}
        self._control: Control | None = None
        self._lifeline: tuple[int, int] | None = None
        self._epoch = 0
        self._broken = False
        self._running: Running | None = None
        self._pids: set[int] = set()
        self._variables: Mapping[str, str] = {}

    @property
    def lanes(self) -> Mapping[str, int]:
        """How many blocks each device runs at once, by its name, as when it was last started."""
        return {device: one.lanes for device, one in self._started.items()}

    @property
    def pids(self) -> Set[int]:
        """Process ids of the workers, and of those that were before; the set grows on its own."""
        return self._pids

    @property
    def names(self) -> Mapping[str, str]:
        """What each device calls itself, by its name here."""
        return {device: one.name for device, one in self._started.items()}

    @property
    def device_bytes(self) -> int:
        """Memory taken on each device, without what its driver takes for itself."""
        return max(one.memory_bytes for one in self._started.values())

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of all spaces together."""
        return self._host.size

    def __enter__(self) -> Pool:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
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
                message, fds = worker.received(deadline - time.monotonic())
                if not isinstance(message, Started):
                    raise WorkerLost(f"{worker.who} did not start: {message}")
                worker.started, worker.arena_fd = message, fds[0] if fds else -1
                self._started[worker.spec.device] = message
            self._introduce()
            self._broken = False
        except BaseException:
            self._broken = True
            self._end()
            raise

    def _spawn(self, slot: int, spec: DeviceSpec) -> None:
        """Start a worker and tell it who it is; from then on it is among those that are ended."""
        assert self._lifeline is not None and self._control is not None
        worker = spawned(slot, spec, self._variables)
        self._workers.append(worker)
        self._pids.add(worker.process.pid)
        start = Start(
            backend="network" if is_nic(spec.device) else self._backend,
            slot=slot,
            device=spec.device,
            bus_id=spec.bus_id,
            cpus=spec.cpus,
            control_bytes=control_bytes(len(self._specs)),
            arena_bytes=self._memory.arena_bytes + COUNTER_AREA_BYTES,
            user_bytes=self._memory.user_bytes,
            address=spec.address,
            interface=spec.interface,
        )
        self._ask(worker, start, (self._control.segment.fd, self._lifeline[0]))

    def _ask(self, worker: WorkerProcess, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        worker.ask(message, fds, limit_s=self._patience.answer_s)

    def _introduce(self) -> None:
        """Tell every worker of the others' arenas."""
        for worker in self._workers:
            # A NIC has no memory.
            others = [
                one for one in self._workers if one is not worker and not is_nic(one.spec.device)
            ]
            fds = [one.arena_fd for one in others if one.arena_fd >= 0]
            peers = []
            for other in others:
                assert other.started is not None
                peers.append(
                    Peer(
                        space=other.spec.device,
                        handle=other.started.handle,
                        size=other.started.arena_bytes,
                        bus_id=other.spec.bus_id,
                        descriptor=fds.index(other.arena_fd) if other.arena_fd >= 0 else -1,
                    )
                )
            self._ask(worker, Meet(peers=tuple(peers)), fds)
        for worker in self._workers:
            worker.done(self._patience.start_s)

    def close(self, *, hurry: bool = False) -> None:
        """End the workers and give all memory back; twice does nothing more.

        Args:
            hurry: kill what does not end at once, as where this process was told to end.
        """
        try:
            self._broken = self._broken or hurry
            self._end()
        finally:
            self._broken = False

    def _end(self) -> None:
        """End the workers, politely unless they are given up, and free what is shared with them."""
        running, self._running = self._running, None
        if running is not None and (running.lost or not running.over):
            self._broken = True
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
            worker.free(_KILL_S)
        self._workers = []
        self._host.close()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._lifeline is not None:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None

    def restart(self, variables: Mapping[str, str] | None = None) -> None:
        """Give up all workers and start new ones.

        Args:
            variables: what their environment has beside this process's; None is as before.

        Raises:
            MeasurementError: as `start`.
        """
        if variables is not None:
            self._variables = variables
        self._broken = True
        self._end()
        self.start()

    def _ready(self) -> Control:
        """Start anew if that is needed.

        Raises:
            MeasurementError: the pool is closed, or as `start`.
        """
        if self._running is not None:
            self._running.abort()
            self._broken = self._broken or self._running.lost
            self._running = None
        if self._broken:
            self.restart()
        if self._control is None:
            raise MeasurementError("the pool is closed; only between start and close it measures")
        return self._control

    def run(self, program: Work, timing: Timing) -> list[Outcome]:
        """Run a program's repeats, each released by one store when all its lanes are there.

        Raises:
            WorkerLost: a worker died or hangs: start anew.
            MeasurementError: the devices refuse the program.
        """
        with self.begin(program, timing) as running:
            outcomes = []
            for repeat in range(timing.repeats):
                running.wait_resident(repeat)
                running.release(repeat)
                outcomes.append(running.collect(repeat))
            running.finish()
        return outcomes

    def begin(
        self, work: Work, timing: Timing, *, meanwhile: Callable[[], None] | None = None
    ) -> Running:
        """Queue all repeats of this host's share; the caller goes on from stage to stage.

        What was begun before and never finished is stopped.

        Args:
            work: a program, or a host's share of one.
            timing: its repeats.
            meanwhile: called now and then while a stage waits; what it raises ends the wait.

        Raises:
            WorkerLost: a worker died or hangs: start anew.
            MeasurementError: the devices refuse the program.
        """
        control = self._ready()
        self._prepare(control, work, timing.repeats)
        running = Running(
            control,
            self._host,
            [one for one in self._workers if one.spec.device in work.devices],
            timing=timing,
            epoch=self._epoch + 1,
            patience=self._patience,
            meanwhile=meanwhile,
        )
        self._running, self._epoch = running, self._epoch + timing.repeats
        try:
            running.order(work)
        except BaseException:
            running.abort()
            raise
        return running

    def _prepare(self, control: Control, work: Work, repeats: int) -> None:
        """Refuse what does not fit, and set counters and flag to what lanes begin with."""
        if not 1 <= repeats <= MAX_REPEATS:
            raise MeasurementError(f"{repeats} repeats at once: 1 to {MAX_REPEATS} are right")
        for device in work.devices:
            if device not in self._started:
                raise MeasurementError(
                    f"{device} is no device of this pool; it has {', '.join(self._started)}"
                )
        for space, size in work.space_bytes.items():
            if not space.startswith("C") and size > self._memory.arena_bytes + COUNTER_AREA_BYTES:
                raise MeasurementError(
                    f"{space} would hold {(size - COUNTER_AREA_BYTES) >> 20} MiB of FIFOs, its "
                    f"arena has {self._memory.arena_bytes >> 20} MiB: give fewer blocks or smaller "
                    "FIFOs"
                )
        for device, share in work.devices.items():
            if len(share.lanes) + len(share.copies) > MAX_LANES:
                raise MeasurementError(f"{device} would do more than {MAX_LANES} things at once")
        for space, size in work.space_bytes.items():
            if space.startswith("C"):
                self._host.ensure(space, size, self._share)
                self._host.clear(space, repeats)
        control.clear()

    def _share(self, space: str, segment: Segment) -> None:
        """Have every worker map host memory in place of what had this name."""
        try:
            for worker in self._workers:
                self._ask(worker, Share(space=space, size=segment.size), (segment.fd,))
            for worker in self._workers:
                worker.done(self._patience.answer_s)
        except BaseException:
            # Some have the new memory and some the old.
            self._broken = True
            raise

    def links(self) -> frozenset[Link]:
        """The links that NICs here have, whose other end is there and on which nothing is left.

        Raises:
            WorkerLost: a worker died or hangs.
        """
        return self._linking(Linking.usable)

    def listen(self, links: Sequence[Link]) -> dict[Link, Endpoint]:
        """Have the receiving NICs wait for links, in place of those they had, and say where.

        Raises:
            WorkerLost: a worker died or hangs.
            MeasurementError: a NIC that is not here, or has no port left.
        """
        return self._linking(lambda linking: linking.listen(links))

    def connect(self, ends: Mapping[Link, Endpoint]) -> None:
        """Have the sending NICs make links to where they are waited for.

        Raises:
            WorkerLost: a worker died or hangs.
            LinkLost: a link cannot be made, by both names.
        """
        self._linking(lambda linking: linking.connect(ends))

    def accept(self, links: Sequence[Link]) -> None:
        """Wait until links that were listened for have come; who is late is given up.

        Raises:
            WorkerLost: a worker died or hangs.
            LinkLost: a link did not come in time, by both names.
        """
        self._linking(lambda linking: linking.accept(links))

    def _linking(self, act: Callable[[Linking], Answer]) -> Answer:
        self._ready()
        linking = Linking(
            self._workers, link_s=self._patience.link_s, answer_s=self._patience.answer_s
        )
        try:
            return act(linking)
        except BaseException as error:
            # Interrupted too: an answer may be under way.
            owed = any(one.owes_answer for one in self._workers)
            self._broken = owed or isinstance(error, WorkerLost)
            raise

    def ping(self, count: int = 16) -> Mapping[str, Pinged]:
        """Each device's clock against CLOCK_MONOTONIC, by its name, one after the other.

        Raises:
            WorkerLost: a worker died or hangs.
        """
        self._ready()
        answers = {}
        try:
            for worker in self._workers:
                self._ask(worker, Ping(count=count))
                message, _ = worker.received(self._patience.answer_s)
                if not isinstance(message, Pinged):
                    raise worker.out_of_turn(message)
                answers[worker.spec.device] = message
        except BaseException:
            # Interrupted too: an answer may be under way.
            self._broken = True
            raise
        return answers
