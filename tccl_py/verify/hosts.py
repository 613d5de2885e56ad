"""Where jobs over several hosts run: each host's ranks are started there, anew for each job."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.plan.files import GRAPH_FILE
from tccl_py.rank_processes.rank import Meeting
from tccl_py.rank_processes.task import FOLDER, Left, Task, decoded
from tccl_py.verify.arms import Arm
from tccl_py.verify.jobs import DEFAULT_TIMEOUT, JobError, Outcome, seated, task_of
from tccl_py.verify.orders import Answer, Backend, Order
from tccl_py.verify.surroundings import job_surroundings, kept_variables

_GRAPH = "NCCL_GRAPH_FILE"


class Runner(Protocol):
    """What starts ranks on hosts, by their names."""

    def surroundings(self) -> Mapping[str, Mapping[str, str]]:
        """The environment of programs that are started on each host."""

    def meetings(self, host: str, count: int) -> Sequence[Meeting]:
        """Where the ranks of the next jobs meet, whose first ranks are this host's first."""

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> Mapping[str, Sequence[Left]]:
        """Run each host's ranks, of one job or of several at once.

        Raises:
            MeasurementError: ranks failed, or the time was up; names the host.
        """


class HostPart(msgspec.Struct, frozen=True, kw_only=True):
    """A host of the job: its ranks, and its GPUs in their order.

    `variables` hold for this host alone, as the interface that gloo is to use.
    """

    name: str
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]
    variables: dict[str, str] = {}


class HostsPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of a job, the one of rank 0 first, and the environments that ranks come from."""

    backend: Backend
    hosts: tuple[HostPart, ...]
    callers: dict[str, dict[str, str]]
    runner: Runner
    keep: tuple[str, ...] = ()
    timeout: float = DEFAULT_TIMEOUT

    @property
    def ranks(self) -> int:
        """As AnyPlace."""
        return max(len(host.ranks) for host in self.hosts)

    def run(self, arms: Sequence[Arm], order: Order) -> tuple[Outcome, ...]:
        """As AnyPlace.

        Raises:
            JobError: one failed.
            SourceLostError: a host is gone.
        """
        begun = time.monotonic()
        world = sum(len(host.ranks) for host in self.hosts)
        meetings = self.runner.meetings(self.hosts[0].name, len(arms))
        told = msgspec.structs.replace(order, backend=self.backend, world=world)
        tasks = {host.name: self._tasks(host, arms, told, meetings) for host in self.hosts}
        try:
            left = self.runner.run(tasks)
        except MeasurementError as error:
            raise JobError(str(error)) from error
        seconds = time.monotonic() - begun
        return tuple(
            self._outcome({host: theirs[number] for host, theirs in left.items()}, seconds)
            for number in range(len(arms))
        )

    def _outcome(self, left: Mapping[str, Left], seconds: float) -> Outcome:
        answers = tuple(
            answer for host in self.hosts for answer in decoded(left[host.name], host.ranks, Answer)
        )
        log = "\n".join(left[host.name].log for host in self.hosts)
        return Outcome(answers=answers, log=log, seconds=seconds)

    def variables(self, arm: Arm) -> dict[str, str]:
        """All NCCL variables of an arm's jobs; each host names its own graph file."""
        caller = self.callers[self.hosts[0].name]
        return {**kept_variables(caller, self.keep), **arm.variables}

    def _tasks(
        self, host: HostPart, arms: Sequence[Arm], order: Order, meetings: Sequence[Meeting]
    ) -> tuple[Task, ...]:
        """What a host runs of each arm's job."""
        own = msgspec.structs.replace(order, first=host.ranks[0])
        return tuple(
            self._task(host, arm, msgspec.structs.replace(one, meeting=meeting))
            for arm, one, meeting in zip(
                arms, seated(own, len(arms), len(host.ranks)), meetings, strict=True
            )
        )

    def _task(self, host: HostPart, arm: Arm, order: Order) -> Task:
        variables = dict(arm.variables)
        files = {}
        if _GRAPH in variables:
            variables[_GRAPH] = f"{FOLDER}/{GRAPH_FILE}"
            files[GRAPH_FILE] = arm.graphs[host.name]
        surroundings = job_surroundings(
            {**self.callers[host.name], **host.variables},
            gpus=host.gpus if self.backend == "cuda" else None,
            variables=variables,
            keep=self.keep,
        )
        task = task_of(order, host.ranks, surroundings, timeout=self.timeout)
        return msgspec.structs.replace(task, files=files)
