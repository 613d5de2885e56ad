"""Jobs of real collectives: one fresh process per rank, here or over hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec
from msgspec.structs import replace

from tccl_py.errors import MeasurementError
from tccl_py.experiments.spec import JobResult, JobSpec, RowTimes, WrongValue
from tccl_py.files import encode_json
from tccl_py.model.measurement import Backend
from tccl_py.nccl.settings import GRAPH_VARIABLE
from tccl_py.nccl.variables import HOST_VARIABLES
from tccl_py.plan.chains import Choice, ChoiceName
from tccl_py.plan.machine_files import GRAPH_FILE
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.rank import JobSlot, Rendezvous
from tccl_py.rank_processes.tasks import (
    FOLDER,
    TORCH,
    TRAINING,
    RankOutput,
    Task,
    decode_results,
    run_tasks,
    torch_environment,
)

RANK_PROGRAM, _NCCL_TESTS = "tccl_py.experiments.rank", "tccl_py.experiments.nccl_tests"
DEFAULT_TIMEOUT = 180.0
THIS_HOST = ""
"""Name of the host of a job on one machine."""
RANK_VARIABLES = {
    "NCCL_CONF_FILE": "/dev/null",
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,P2P,SHM,NET",
}
"""What all ranks on GPUs get, whatever the caller has."""

T = TypeVar("T")
Say = Callable[[str], None]
"""Receives a line for the user."""
AGAIN = cast("ChoiceName", "again")
"""Name of the second arm of default NCCL in the rounds of a comparison, which is no choice."""


class Arm(Choice, frozen=True, kw_only=True):
    """An A/B arm: a choice of the plan with its job."""

    variables: dict[str, str]
    """The job's NCCL variables."""
    graphs: dict[str, str] = msgspec.field(default_factory=dict)
    """The texts of graph files by host: each host's ranks get their own, whatever path
    NCCL_GRAPH_FILE of `variables` names."""
    of_hosts: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    """Variables that a host's ranks have of their own, by host."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a job's ranks, in order, and NCCL's log."""

    results: tuple[JobResult, ...]
    log: str

    @property
    def rows(self) -> Iterator[tuple[RowTimes, ...]]:
        """Yield the times of each row on all ranks."""
        yield from zip(*(rank.times for rank in self.results), strict=True)

    @property
    def wrong(self) -> tuple[WrongValue, ...]:
        """Return the wrong values of all ranks."""
        return tuple(value for rank in self.results for value in rank.wrong)


Ended = tuple[Arm, Outcome | MeasurementError]
"""An arm, and the outcome of its job, or the error of a job that failed alone."""


class Runner(Protocol):
    """Starts ranks on hosts by name."""

    def rendezvous(self, host: str, count: int) -> Sequence[Rendezvous | None]:  # noqa: ARG002
        """Open the rendezvous of the next jobs at the first ranks' host; ranks of one need none."""
        return [None] * count

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> Mapping[str, Sequence[RankOutput]]:
        """Run each host's ranks, of one job or of several at once."""


@dataclass(frozen=True)
class LocalRunner(Runner):
    """Runs ranks on this host."""

    server: ForkServer | None = None

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> Mapping[str, Sequence[RankOutput]]:
        """Run the ranks; see `Runner`."""
        ((host, ranks),) = tasks.items()
        return {host: run_tasks(ranks, server=self.server)}


class HostRanks(msgspec.Struct, frozen=True, kw_only=True):
    """A host of a job: its ranks, their GPUs in order, and the caller's environment there."""

    name: str = THIS_HOST
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]
    environment: dict[str, str]


class Launcher(msgspec.Struct, frozen=True, kw_only=True):
    """Runs jobs on its hosts, here or on those of an MPI job."""

    backend: Backend = "cuda"
    hosts: tuple[HostRanks, ...] = ()
    """Rank 0's first."""
    job: Any = None
    """The MPI job, if it is one."""
    runner: Runner = LocalRunner()
    nccl_tests: Path | None = None
    """A program of nccl-tests that does the work of jobs."""
    keep: tuple[str, ...] = ()
    """Caller's variables that jobs get."""
    alike: bool = False
    """Whether this host may have other GPUs than the plan's, of the same kinds at the same
    places."""
    timeout: float = DEFAULT_TIMEOUT
    program: str = RANK_PROGRAM
    say: Say = lambda _: None
    """Receives notices for the user."""
    watch: Say = lambda _: None
    """Receives a line on the current work."""

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return sum(len(host.ranks) for host in self.hosts)

    @property
    def members(self) -> tuple[int, ...]:
        """Return what names each rank: its GPU on a host without a name, else the rank itself."""
        return tuple(chain.from_iterable(h.ranks if h.name else h.gpus for h in self.hosts))

    def over(self, gpus: tuple[int, ...]) -> Launcher:
        """Return a launcher over these GPUs of a single host."""
        host = replace(self.hosts[0], ranks=tuple(range(len(gpus))), gpus=gpus)
        return replace(self, hosts=(host,))

    def run(self, arms: Sequence[Arm], spec: JobSpec) -> tuple[Outcome, ...]:
        """Run a job of each arm, all at once, with their timed batches interleaved."""
        meetings = self.runner.rendezvous(self.hosts[0].name, len(arms))
        tasks = {}
        for host in self.hosts:
            slot = partial(JobSlot, jobs=len(arms), ranks=len(host.ranks))
            tasks[host.name] = tuple(
                self._task(host, arm, replace(spec, rendezvous=meeting, slot=slot(number=number)))
                for number, (arm, meeting) in enumerate(zip(arms, meetings, strict=True))
            )
        outputs = self.runner.run(tasks)
        outcomes = []
        for number in range(len(arms)):
            parts = [(host.ranks, outputs[host.name][number]) for host in self.hosts]
            results = [decode_results(output, ranks, JobResult) for ranks, output in parts]
            log = "\n".join(output.log for _, output in parts)
            outcomes.append(Outcome(results=tuple(chain(*results)), log=log))
        return tuple(outcomes)

    def variables(self, arm: Arm) -> dict[str, str]:
        """Return all NCCL variables of an arm's jobs."""
        caller, names = self.hosts[0].environment, sorted({*HOST_VARIABLES, *self.keep})
        return {name: caller[name] for name in names if name in caller} | arm.variables

    def _task(self, host: HostRanks, arm: Arm, spec: JobSpec) -> Task:
        variables, files = arm.variables | arm.of_hosts.get(host.name, {}), {}
        if GRAPH_VARIABLE in variables:
            variables[GRAPH_VARIABLE] = f"{FOLDER}/{GRAPH_FILE}"
            files[GRAPH_FILE] = arm.graphs[host.name]
        gpus = host.gpus if self.backend == "cuda" else None
        environment = rank_environment(host.environment, gpus, variables, self.keep)
        job = replace(
            spec,
            backend=self.backend,
            world=self.world,
            first_rank=host.ranks[0],
            nccl_tests=str(self.nccl_tests or ""),
        )
        imports = TRAINING if any(row.trains for row in spec.rows) else TORCH
        return Task(
            program=_NCCL_TESTS if self.nccl_tests else self.program,
            spec=encode_json(job),
            ranks=host.ranks,
            environment={**environment, "NCCL_DEBUG_FILE": f"{FOLDER}/log-%p"},
            timeout=self.timeout,
            files=files,
            imports=() if self.nccl_tests else imports,
        )


def round_order(arms: Sequence[T], number: int) -> list[T]:
    """Return the order of jobs in a round: A B C, C B A, B C A, A C B, ..."""
    first = number // 2 % len(arms)
    rotated = [*arms[first:], *arms[:first]]
    return rotated[::-1] if number % 2 else rotated


def rank_environment(
    caller: Mapping[str, str],
    gpus: Sequence[int] | None,
    variables: Mapping[str, str],
    keep: Iterable[str] = (),
) -> dict[str, str]:
    """Return the environment of ranks over these GPUs (None: in host memory) with `variables`.

    Of the caller's NCCL variables, HOST_VARIABLES and `keep` stay unless `variables` sets them. The
    user's own nccl.conf is not read; /etc/nccl.conf is.
    """
    names = {*HOST_VARIABLES, *keep}
    environment = {
        name: value
        for name, value in caller.items()
        if name in names or not name.startswith(("NCCL_", "TORCH_NCCL_"))
    }
    # CUDA graphs stand for single calls, for which NCCL registers no buffers.
    nccl = {} if gpus is None else RANK_VARIABLES
    return {**torch_environment(environment, gpus), **nccl, **variables}
