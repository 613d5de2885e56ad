"""Where jobs over several hosts run: each host's ranks are started there, anew for each job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from tccl_py.emitters.plan_files import GRAPH_FILE
from tccl_py.errors import MeasurementError
from tccl_py.rank_processes.rank import Meeting
from tccl_py.rank_processes.task import FOLDER, Left, Task, decoded
from tccl_py.verification.jobs import DEFAULT_TIMEOUT, JobError, Outcome, task_of
from tccl_py.verification.orders import Answer, Backend, Order
from tccl_py.verification.sides import Side
from tccl_py.verification.surroundings import job_surroundings, kept_variables

_GRAPH = "NCCL_GRAPH_FILE"


class Runner(Protocol):
    """What starts ranks on hosts, by their names."""

    def surroundings(self) -> Mapping[str, Mapping[str, str]]:
        """The environment of programs that are started on each host."""

    def meeting(self, host: str) -> Meeting:
        """Where the ranks of the next job meet, whose first rank is this host's first."""

    def run(self, tasks: Mapping[str, Task]) -> Mapping[str, Left]:
        """Run each host's ranks.

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

    def run(self, side: Side, order: Order) -> Outcome:
        """Run a job of one side.

        Raises:
            JobError: it failed.
            SourceLostError: a host is gone.
        """
        begun = time.monotonic()
        world = sum(len(host.ranks) for host in self.hosts)
        meeting = self.runner.meeting(self.hosts[0].name)
        told = msgspec.structs.replace(order, backend=self.backend, world=world, meeting=meeting)
        tasks = {host.name: self._task(host, side, told) for host in self.hosts}
        try:
            left = self.runner.run(tasks)
        except MeasurementError as error:
            raise JobError(str(error)) from error
        answers = tuple(
            answer for host in self.hosts for answer in decoded(left[host.name], host.ranks, Answer)
        )
        log = "\n".join(left[host.name].log for host in self.hosts)
        return Outcome(answers=answers, log=log, seconds=time.monotonic() - begun)

    def variables(self, side: Side) -> dict[str, str]:
        """All NCCL variables of a side's jobs; each host names its own graph file."""
        caller = self.callers[self.hosts[0].name]
        return {**kept_variables(caller, self.keep), **side.variables}

    def _task(self, host: HostPart, side: Side, order: Order) -> Task:
        variables = dict(side.variables)
        files = {}
        if _GRAPH in variables:
            variables[_GRAPH] = f"{FOLDER}/{GRAPH_FILE}"
            files[GRAPH_FILE] = side.graphs[host.name]
        surroundings = job_surroundings(
            {**self.callers[host.name], **host.variables},
            gpus=host.gpus if self.backend == "cuda" else None,
            variables=variables,
            keep=self.keep,
        )
        own = msgspec.structs.replace(order, first=host.ranks[0])
        task = task_of(own, host.ranks, surroundings, timeout=self.timeout)
        return msgspec.structs.replace(task, files=files)
