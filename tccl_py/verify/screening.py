"""Candidates: settings of a choice, tried by a job each beside a job of default NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median

import msgspec

from tccl_py.nccl.settings import Settings
from tccl_py.plan.plan import ChoiceName
from tccl_py.verify.arms import AnyPlace, Jobs
from tccl_py.verify.jobs import JobError, Outcome
from tccl_py.verify.orders import Order, bus_gbps, large_gbps
from tccl_py.verify.record import Tried, Verification
from tccl_py.verify.rounds import Effort, Watcher, row_seconds
from tccl_py.verify.tunable import Tunable

Seconds = tuple[float, ...]
"""Of a call, by size."""


class Candidate(msgspec.Struct, frozen=True):
    """Settings of a choice."""

    name: ChoiceName
    settings: Settings


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate, its job's seconds, None if it failed, and those of default NCCL beside it."""

    candidate: Candidate
    seconds: Seconds | None
    default: Seconds
    failed: str = ""


class Screen:
    """Runs one job for each candidate beside one of default NCCL, and rates them.

    Args:
        plan: whose choices are tried.
        place: where jobs run.
        effort: of the comparison that follows; trials are of some of its sizes.
        first: what was found of `plan`: how slow a job of default NCCL may be.
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
        self._plan, self._effort, self._watch = plan, effort, watch
        self._slowest = {one.bytes: max(one.seconds) for one in first.arms[0].sizes}
        self._sizes = effort.few_sizes
        self._order = Order(
            backend="host", world=0, sizes=self._sizes, collective=effort.collective
        )
        self._world = 0
        self._default: Seconds = ()
        self._jobs = Jobs(place, self._sizes)

    @property
    def at_once(self) -> int:
        """How many candidates are tried at once; default NCCL's job runs beside them."""
        return max(1, self._jobs.at_once - 1)

    def tried(self, candidates: Sequence[Candidate]) -> list[Trial]:
        """Run a job of each candidate.

        Raises:
            JobError: default NCCL's job failed.
        """
        told = (f"{one.name} of {one.settings.buffsize >> 10} KiB" for one in candidates)
        self._watch(f"trying {', '.join(told)}")
        with ExitStack() as stack:
            subjects = [stack.enter_context(self._changed(one).elsewhere()) for one in candidates]
            arms = [one.arm(to.name) for one, to in zip(subjects, candidates, strict=True)]
            beside = self._jobs.at_once > 1 or not self._default
            outcomes = self._jobs.run([subjects[0].arms[0]] * beside + arms, self._order)
        if beside:
            default = outcomes.pop(0)
            if isinstance(default, JobError):
                raise default
            self._default = self._seconds(default)
        return [self._trial(*one) for one in zip(candidates, outcomes, strict=True)]

    def _trial(self, candidate: Candidate, outcome: Outcome | JobError) -> Trial:
        failed = isinstance(outcome, JobError)
        return Trial(
            candidate=candidate,
            seconds=None if isinstance(outcome, JobError) else self._seconds(outcome),
            default=self._default,
            failed=str(outcome) if failed else "",
        )

    def _changed(self, candidate: Candidate) -> Tunable:
        if candidate.settings == self._plan.choices[candidate.name]:
            return self._plan
        return self._plan.retuned({candidate.name: candidate.settings})

    def gbps(self, seconds: Seconds | None) -> float:
        """Return the bus bandwidth at the large sizes; 0 if the job failed."""
        if seconds is None:
            return 0.0
        rates = [
            (size, bus_gbps(self._effort.collective, self._world, size, one))
            for size, one in zip(self._sizes, seconds, strict=True)
        ]
        return large_gbps(rates) or 0.0

    def low(self, trial: Trial) -> float:
        """Return the worst ratio to default NCCL's slowest job at any size; 0 if the job failed."""
        if trial.seconds is None:
            return 0.0
        return min(
            max(default, self._slowest.get(size, 0.0)) / ours
            for size, ours, default in zip(self._sizes, trial.seconds, trial.default, strict=True)
        )

    def told(self, trials: Sequence[Trial]) -> tuple[Tried, ...]:
        """Return trials as verify.json has them, after default NCCL by the median of its jobs."""
        default = Tried(
            arm="default",
            settings=Settings(version=trials[0].candidate.settings.version),
            gbps=median(self.gbps(one.default) for one in trials),
            low=1.0,
        )
        others = (
            Tried(
                arm=one.candidate.name,
                settings=one.candidate.settings,
                gbps=self.gbps(one.seconds),
                low=self.low(one),
                failed=one.failed,
            )
            for one in trials
        )
        return (default, *others)

    def _seconds(self, outcome: Outcome) -> Seconds:
        self._world = len(outcome.answers)
        return tuple(seconds for (seconds,) in row_seconds(self._order, [outcome]).values())
