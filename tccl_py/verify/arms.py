"""The arms of a comparison: default NCCL, and each of the plan's other choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from tccl_py.nccl.settings import Settings
from tccl_py.plan.plan import ChoiceName
from tccl_py.verify.jobs import JobError, Outcome, run_jobs
from tccl_py.verify.orders import Backend, Order
from tccl_py.verify.surroundings import job_surroundings, kept_variables

Runner = Callable[[Order, Sequence[Mapping[str, str]]], tuple[Outcome, ...]]
"""What runs jobs at once: `run_jobs`, or a stand-in."""
_AT_ONCE = 4
_AT_ONCE_BYTES = 4 << 30
"""Of the buffers of jobs at once on a device, which may have few GiB."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run NCCL: the choice of a plan, and the variables that its jobs get.

    `graphs` are the texts of graph files by host, for a job over several: each gets its own.
    `predicted_gbps` is None where the plan could not rate the choice.
    """

    name: ChoiceName
    variables: dict[str, str]
    settings: Settings
    predicted_gbps: float | None = None
    graphs: dict[str, str] = {}


class AnyPlace(Protocol):
    """Where jobs run: on this machine or over hosts."""

    @property
    def backend(self) -> Backend:
        """GPUs and NCCL, or gloo."""

    @property
    def ranks(self) -> int:
        """How many ranks of a job one host has at most."""

    def run(self, arms: Sequence[Arm], order: Order) -> tuple[Outcome, ...]:
        """Run a job of each arm, all at once, with their timed batches interleaved.

        Raises:
            JobError: one failed; which, is only known of one alone.
        """

    def variables(self, arm: Arm) -> dict[str, str]:
        """Return all NCCL variables of an arm's jobs."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """This machine: which backend and GPUs, and the environment that jobs come from."""

    backend: Backend
    gpus: tuple[int, ...]
    caller: dict[str, str]
    keep: tuple[str, ...] = ()
    runner: Runner = run_jobs

    @property
    def ranks(self) -> int:
        """As AnyPlace."""
        return len(self.gpus)

    def run(self, arms: Sequence[Arm], order: Order) -> tuple[Outcome, ...]:
        """As AnyPlace."""
        surroundings = [
            job_surroundings(
                self.caller,
                gpus=self.gpus if self.backend == "cuda" else None,
                variables=arm.variables,
                keep=self.keep,
            )
            for arm in arms
        ]
        told = msgspec.structs.replace(order, backend=self.backend, world=len(self.gpus))
        return self.runner(told, surroundings)

    def variables(self, arm: Arm) -> dict[str, str]:
        """As AnyPlace."""
        return {**kept_variables(self.caller, self.keep), **arm.variables}


class Jobs:
    """Runs jobs of arms, `at_once` of them at the same time.

    As many run at once as devices have room for with buffers of these sizes; from then on one after
    the other where several fail, for which each may have been right.
    """

    def __init__(self, place: AnyPlace, sizes: Sequence[int]) -> None:
        self._place = place
        sharing = place.ranks if place.backend == "host" else 1
        largest = max(sizes, default=1) * sharing
        self.at_once = max(1, min(_AT_ONCE, _AT_ONCE_BYTES // largest))

    def run(self, arms: Sequence[Arm], order: Order) -> list[Outcome | JobError]:
        """Run a job of each arm; a job that fails alone is answered by its error."""
        found: list[Outcome | JobError] = []
        while len(found) < len(arms):
            some = arms[len(found) :][: self.at_once]
            try:
                found += self._place.run(some, order)
            except JobError as error:
                found += [error] * (self.at_once == 1)
                self.at_once = 1
        return found
