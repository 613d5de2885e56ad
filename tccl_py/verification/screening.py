"""Settings tried by a job each, beside one of stock with which they take turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from statistics import median

import msgspec

from tccl_py.runtimes.nccl.settings import Settings
from tccl_py.verification.jobs import JobError, Outcome
from tccl_py.verification.orders import Order, bus_gbps, large_gbps
from tccl_py.verification.pairs import Effort, Watcher, job_seconds, jobs_at_once
from tccl_py.verification.record import Tried, Verification
from tccl_py.verification.sides import AnyPlace, Side
from tccl_py.verification.subjects import Subject
from tccl_py.verification.tunable import Tunable

_SIZES = (16 << 10, 1 << 20, 64 << 20, 256 << 20)


Seconds = tuple[float, ...]
"""Of a call, by size."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, what their job took, None if it failed, and what stock's took beside it."""

    settings: Settings
    seconds: Seconds | None
    stock: Seconds
    failed: str = ""


class Screen:
    """One job for each choice of settings beside one of stock, and what they came to.

    Args:
        plan: whose rings they run.
        place: where jobs run.
        effort: of the comparison that follows; trials are of some of its sizes.
        first: what was found of `plan`: how slow a job of stock may be.
        watch: is told what runs.
    """

    def __init__(
        self,
        plan: Tunable,
        place: AnyPlace,
        effort: Effort,
        first: Verification,
        *,
        watch: Watcher,
    ) -> None:
        self._plan, self._place, self._effort = plan, place, effort
        self._slowest = {one.bytes: max(one.stock_seconds) for one in first.sizes}
        self._watch = watch
        largest = max(effort.sizes)
        self._sizes = tuple(size for size in _SIZES if size <= largest) or effort.sizes
        self._world = 0
        self._stock: Seconds = ()
        self._jobs = jobs_at_once(place, self._sizes)

    @property
    def at_once(self) -> int:
        """How many choices are tried at once; stock's job runs beside them."""
        return max(1, self._jobs - 1)

    def tried(self, choices: Sequence[Settings]) -> list[Trial]:
        """The plan's rings under each of these settings.

        Raises:
            JobError: stock's job failed.
        """
        told = ", ".join(f"{one.channels} x {one.buffsize >> 10} KiB" for one in choices)
        self._watch(f"trying channels of {told}")
        with ExitStack() as stack:
            subjects = [stack.enter_context(self._subject(one)) for one in choices]
            stock = subjects[0].stock
            if self._jobs > 1:
                with suppress(JobError):
                    sides = [stock, *(one.side for one in subjects)]
                    theirs, *ours = map(self._seconds, self._place.run(sides, self._order))
                    self._stock = theirs
                    return [
                        Trial(settings=settings, seconds=one, stock=theirs)
                        for settings, one in zip(choices, ours, strict=True)
                    ]
                # One that fails fails them all, or together they ask for too much.
                self._jobs = 1
            theirs = self._stock = self._stock or self._alone(stock)
            return [
                self._trial(settings, subject, theirs)
                for settings, subject in zip(choices, subjects, strict=True)
            ]

    def _trial(self, settings: Settings, subject: Subject, stock: Seconds) -> Trial:
        try:
            return Trial(settings=settings, seconds=self._alone(subject.side), stock=stock)
        except JobError as error:
            return Trial(settings=settings, seconds=None, stock=stock, failed=str(error))

    def _subject(self, settings: Settings) -> AbstractContextManager[Subject]:
        given = settings == self._plan.settings
        return (self._plan if given else self._plan.retuned(settings)).elsewhere()

    def _alone(self, side: Side) -> Seconds:
        (outcome,) = self._place.run([side], self._order)
        return self._seconds(outcome)

    def gbps(self, seconds: Seconds | None) -> float:
        """Bus bandwidth at the large sizes; 0 if the job failed."""
        if seconds is None:
            return 0.0
        rates = [
            (size, bus_gbps(self._effort.collective, self._world, size, one))
            for size, one in zip(self._sizes, seconds, strict=True)
        ]
        return large_gbps(rates) or 0.0

    def low(self, trial: Trial) -> float:
        """The worst ratio to the speed of stock's slowest job at any size; 0 if the job failed."""
        if trial.seconds is None:
            return 0.0
        return min(
            max(theirs, self._slowest.get(size, 0.0)) / ours
            for size, ours, theirs in zip(self._sizes, trial.seconds, trial.stock, strict=True)
        )

    def told(self, trial: Trial) -> Tried:
        """A trial as verify.json has it."""
        return Tried(
            settings=trial.settings,
            gbps=self.gbps(trial.seconds),
            low=self.low(trial),
            failed=trial.failed,
        )

    def told_stock(self, trials: Sequence[Trial]) -> Tried:
        """Stock beside them, by the median of its jobs."""
        return Tried(settings=None, gbps=median(self.gbps(one.stock) for one in trials), low=1.0)

    @property
    def _order(self) -> Order:
        return msgspec.structs.replace(self._effort.order, sizes=self._sizes, training=False)

    def _seconds(self, outcome: Outcome) -> Seconds:
        self._world = len(outcome.answers)
        return tuple(job_seconds(outcome, index) for index in range(len(self._sizes)))
