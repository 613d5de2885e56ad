"""A program that runs on this host's devices, stage by stage: a caller that drives several hosts
waits until a repeat is there on each, and has all release it at one time.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_profiler.control import Control
from tccl_profiler.host.waiting import nap_exactly
from tccl_profiler.program import Work
from tccl_profiler.runs import Outcome, Timing, order_of, stamps_of
from tccl_profiler.spaces import HostSpaces
from tccl_profiler.workers import WorkerLost, WorkerProcess
from tccl_py.errors import MeasurementError

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
