"""Jobs of real collectives: one fresh process per rank, on this host or over several hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tccl_py.errors import MeasurementError, TcclError
from tccl_py.files import encode_json
from tccl_py.nccl.settings import HOST_VARIABLES, Settings
from tccl_py.plan.files import GRAPH_FILE
from tccl_py.plan.plan import ChoiceName
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.rank import JobSlot, Rendezvous
from tccl_py.rank_processes.tasks import (
    FOLDER,
    TORCH,
    TRAINING,
    RankOutput,
    Task,
    decoded,
    run_tasks,
    torch_environment,
)
from tccl_py.verify.spec import Backend, JobResult, JobSpec

RANK_PROGRAM = "tccl_py.verify.rank"
DEFAULT_TIMEOUT = 180.0
THIS_HOST = ""
"""Name of the host of a job on one machine."""
GRAPH_VARIABLE = "NCCL_GRAPH_FILE"
_RANK_VARIABLES = {
    "NCCL_CONF_FILE": "/dev/null",
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,P2P,SHM,NET",
}
_CONCURRENT = 4
_CONCURRENT_BYTES = 4 << 30
"""Limit of the buffers of concurrent jobs on a device, which may have few GiB."""

Say = Callable[[str], None]
"""Receives a line for the user."""


class JobError(TcclError):
    """A job failed; names the rank and its last output."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """An A/B arm: a choice of the plan and its NCCL variables.

    `graphs` are the texts of graph files by host: each host's ranks get their own, whatever path
    NCCL_GRAPH_FILE of `variables` names. `predicted_gbps` is None where the plan has no rate.
    """

    name: ChoiceName
    variables: dict[str, str]
    settings: Settings
    predicted_gbps: float | None = None
    graphs: dict[str, str] = {}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a job's ranks, in order, and NCCL's log."""

    results: tuple[JobResult, ...]
    log: str


class Runner(Protocol):
    """Starts ranks on hosts by name."""

    def rendezvous(self, host: str, count: int) -> Sequence[Rendezvous | None]:
        """Open the rendezvous of the next jobs at the first ranks' host."""

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> Mapping[str, Sequence[RankOutput]]:
        """Run each host's ranks, of one job or of several at once."""


class LocalRunner(NamedTuple):
    """Runs ranks on this host."""

    server: ForkServer | None = None

    def rendezvous(self, host: str, count: int) -> Sequence[Rendezvous | None]:  # noqa: ARG002
        """Return none: ranks of one host meet in a file."""
        return [None] * count

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> Mapping[str, Sequence[RankOutput]]:
        """Run the ranks; see `Runner`."""
        ((host, own),) = tasks.items()
        return {host: run_tasks(own, server=self.server)}


class HostRanks(msgspec.Struct, frozen=True, kw_only=True):
    """A host of a job: its ranks, their GPUs in order, and the caller's environment there."""

    name: str = THIS_HOST
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]
    environment: dict[str, str]


class Launcher(msgspec.Struct, frozen=True, kw_only=True):
    """Runs jobs on its hosts, rank 0's first, `most_at_once` at the same time.

    `keep` are caller's variables that jobs get. `say` receives notices for the user, `watch` a line
    on the current work.
    """

    backend: Backend
    hosts: tuple[HostRanks, ...]
    runner: Runner = LocalRunner()
    most_at_once: int = _CONCURRENT
    keep: tuple[str, ...] = ()
    timeout: float = DEFAULT_TIMEOUT
    program: str = RANK_PROGRAM
    say: Say = lambda _: None
    watch: Say = lambda _: None

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return sum(len(host.ranks) for host in self.hosts)

    def over(self, gpus: tuple[int, ...]) -> Launcher:
        """Return a launcher over these GPUs of a single host."""
        host = msgspec.structs.replace(self.hosts[0], ranks=tuple(range(len(gpus))), gpus=gpus)
        return msgspec.structs.replace(self, hosts=(host,))

    def run(self, arms: Sequence[Arm], spec: JobSpec) -> tuple[Outcome, ...]:
        """Run a job of each arm, all at once, with their timed batches interleaved."""
        rendezvous = self.runner.rendezvous(self.hosts[0].name, len(arms))
        specs = [
            msgspec.structs.replace(
                spec, backend=self.backend, world=self.world, rendezvous=meeting
            )
            for meeting in rendezvous
        ]
        tasks = {
            host.name: tuple(
                self._task(host, arm, own, JobSlot(number=n, jobs=len(arms), ranks=len(host.ranks)))
                for n, (arm, own) in enumerate(zip(arms, specs, strict=True))
            )
            for host in self.hosts
        }
        try:
            outputs = self.runner.run(tasks)
        except MeasurementError as error:
            raise JobError(str(error)) from error
        return tuple(
            Outcome(
                results=tuple(
                    result
                    for host in self.hosts
                    for result in decoded(outputs[host.name][number], host.ranks, JobResult)
                ),
                log="\n".join(outputs[host.name][number].log for host in self.hosts),
            )
            for number in range(len(arms))
        )

    def variables(self, arm: Arm) -> dict[str, str]:
        """Return all NCCL variables of an arm's jobs."""
        caller, names = self.hosts[0].environment, sorted({*HOST_VARIABLES, *self.keep})
        return {name: caller[name] for name in names if name in caller} | arm.variables

    def _task(self, host: HostRanks, arm: Arm, spec: JobSpec, slot: JobSlot) -> Task:
        variables, files = dict(arm.variables), {}
        if GRAPH_VARIABLE in variables:
            variables[GRAPH_VARIABLE] = f"{FOLDER}/{GRAPH_FILE}"
            files[GRAPH_FILE] = arm.graphs[host.name]
        gpus = host.gpus if self.backend == "cuda" else None
        environment = rank_environment(host.environment, gpus, variables, self.keep)
        own = msgspec.structs.replace(spec, first_rank=host.ranks[0], slot=slot)
        return Task(
            program=self.program,
            spec=encode_json(own),
            ranks=host.ranks,
            environment={**environment, "NCCL_DEBUG_FILE": f"{FOLDER}/log-%p"},
            timeout=self.timeout,
            files=files,
            imports=TRAINING if spec.training else TORCH,
        )


class ConcurrentJobs:
    """Runs jobs of arms, `at_once` at the same time.

    The number follows from the room for buffers of `sizes` on a device. It drops to 1 when several
    jobs fail together, because each may be able to run alone.
    """

    def __init__(self, launcher: Launcher, sizes: Sequence[int]) -> None:
        self._launcher = launcher
        most = max(len(host.ranks) for host in launcher.hosts)
        largest = max(sizes, default=1) * (most if launcher.backend == "host" else 1)
        self.at_once = max(1, min(launcher.most_at_once, _CONCURRENT_BYTES // largest))

    def run(self, arms: Sequence[Arm], spec: JobSpec) -> list[Outcome | JobError]:
        """Return each arm's outcome, or the error of a job that fails alone."""
        found: list[Outcome | JobError] = []
        while len(found) < len(arms):
            batch = arms[len(found) :][: self.at_once]
            try:
                found += self._launcher.run(batch, spec)
            except JobError as error:
                found += [error] * (self.at_once == 1)
                self.at_once = 1
        return found


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
    kept = {*HOST_VARIABLES, *keep}
    own = {
        name: value
        for name, value in caller.items()
        if name in kept or not name.startswith(("NCCL_", "TORCH_NCCL_"))
    }
    # CUDA graphs stand for single calls, for which NCCL registers no buffers.
    nccl = {} if gpus is None else _RANK_VARIABLES
    return {**torch_environment(own, gpus), **nccl, **variables}
