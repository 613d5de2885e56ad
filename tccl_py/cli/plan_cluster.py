"""`tccl plan` for several nodes: a simulated cluster, or the hosts of an MPI job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from tccl_py.cli.arguments import notice, notice_each
from tccl_py.cli.hardware import Care
from tccl_py.cli.measure import simulation_header
from tccl_py.cli.progress import ProgressLine
from tccl_py.cluster.hostlist import HostSlots, read_host_list
from tccl_py.cluster.hosts import Cluster, HostReport, cluster_of
from tccl_py.cluster.switches import Network, read_switches
from tccl_py.cluster_plan.placed import PlacedSource, placements, whole_ring_rate
from tccl_py.cluster_plan.plan import ClusterPlan
from tccl_py.cluster_plan.planner import make_cluster_plan
from tccl_py.errors import InputError, MeasurementError
from tccl_py.measurements.measurement import BandwidthSource, Measurement
from tccl_py.plan.directory import open_journal
from tccl_py.search.problem import Budget
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator
from tccl_py.transfers.transfer import TransferSet

if TYPE_CHECKING:
    from tccl_profiler.cluster.job import Job
    from tccl_profiler.cluster.session import ClusterSession

MANY_NODES = 16_384
WHOLE_RING_HOSTS = 64
"""On more hosts the rings are not measured all at once."""


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the options of `tccl plan` say of a cluster; None is "not given"."""

    nodes: int | None = None
    hosts: Path | None = None
    switches: Path | None = None
    keep_order: bool = False
    gid_index: int | None = None
    interfaces: str | None = None

    @property
    def given(self) -> dict[str, object]:
        """The options by name that make sense for several nodes only."""
        return {
            "--hosts": self.hosts,
            "--switches": self.switches,
            "--keep-order": self.keep_order or None,
            "--gid-index": self.gid_index,
            "--interfaces": self.interfaces,
        }


class ClusterTask(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for, whichever cluster it is."""

    options: ClusterOptions
    version: str
    counts: tuple[int, ...] | None
    strategy: str
    budget: Budget

    def plan(
        self, cluster: Cluster, sources: Sequence[BandwidthSource], line: ProgressLine
    ) -> ClusterPlan:
        """The plan that these sources' answers make."""
        return make_cluster_plan(
            cluster,
            sources,
            version=self.version,
            ring_counts=self.counts,
            strategy=self.strategy,
            budget=self.budget,
            keep_order=self.options.keep_order,
            ib_gid_index=self.options.gid_index,
            reporter=line,
        )

    def network(self, hosts: Sequence[str]) -> Network | None:
        """The switches between these hosts, if a file tells of them."""
        path = self.options.switches
        return read_switches(path, hosts) if path is not None else None


def refuse_for_one(options: ClusterOptions) -> None:
    """Refuse options of clusters for a plan of one machine.

    Raises:
        InputError: one was given.
    """
    for name, value in options.given.items():
        if value is not None:
            raise InputError(
                name,
                "is about several nodes",
                "add --simulate MACHINE --nodes N, or start the command under mpirun or srun",
            )


def refuse_with_nodes(options: dict[str, object]) -> None:
    """Refuse options of one machine for a plan of several nodes; None is "not given".

    Raises:
        InputError: one was given.
    """
    for name, value in options.items():
        if value is not None:
            raise InputError(
                f"{name} for several nodes",
                "is about one machine",
                "leave it out: as many GPUs of a host are used as it has ranks (slots)",
            )


def refuse_in_job(options: dict[str, object]) -> None:
    """Refuse options of simulation in an MPI job, where every rank would simulate.

    Raises:
        InputError: one was given.
    """
    for name, value in options.items():
        if value is not None:
            raise InputError(
                f"{name} under mpirun or srun", "needs no ranks", "start the command by itself"
            )


class SimulatedCluster:
    """Equal nodes, by a model."""

    def __init__(self, model: MachineModel, task: ClusterTask, *, noise: float, seed: int) -> None:
        options = task.options
        if options.interfaces is not None:
            raise InputError("--interfaces beside --simulate", "is about hardware", "leave it out")
        self._model = model
        self._task = task
        self._source = Simulator(model, noise=noise, seed=seed)
        self._header = simulation_header(model, noise=noise, seed=seed)
        hosts = _listed(options)
        network = task.network([host.name for host in hosts])
        reports = [
            HostReport(
                host=host.name,
                machine=model.machine,
                knowledge=model.knowledge,
                slots=host.slots,
            )
            for host in hosts
        ]
        self.cluster = cluster_of(
            reports,
            switches=network.switches if network is not None else None,
            rails=network.rails if network is not None else "any",
            where=str(options.hosts) if options.hosts is not None else "cluster",
        )

    def planned(self, journal: Path, *, force: bool) -> ClusterPlan:
        """The plan by simulation; one that a journal tells of is gone on with."""
        opened = open_journal(self._source, journal, self._header, force=force)
        with opened as journalled, ProgressLine() as line:
            self._source.resume(journalled.times_known)
            notice_each(journalled.notices)
            return self._task.plan(self.cluster, [journalled], line)

    @property
    def models(self) -> dict[str, MachineModel]:
        """The model of each class by its name."""
        return {one.name: self._model for one in self.cluster.classes}


def _listed(options: ClusterOptions) -> tuple[HostSlots, ...]:
    """The hosts that are simulated: those of a file, or as many as --nodes says.

    Raises:
        InputError: neither or too few, too many, or both and they differ.
    """
    if options.hosts is not None:
        hosts = read_host_list(options.hosts)
        if options.nodes not in (None, len(hosts)):
            what = f"is {options.nodes}, but {options.hosts} has {len(hosts)} hosts"
            raise InputError("--nodes", what, "give one of the two, or equal numbers")
        return hosts
    if options.nodes is None or not 2 <= options.nodes <= MANY_NODES:
        raise InputError("--nodes", f"is {options.nodes}", f"2 to {MANY_NODES} nodes")
    width = len(str(options.nodes))
    return tuple(HostSlots(f"node{number + 1:0{width}d}") for number in range(options.nodes))


class _Counted:
    """A source that counts what it measures, and tells the progress line."""

    def __init__(self, source: BandwidthSource, line: ProgressLine) -> None:
        self._source, self._line = source, line
        self.count = self.unsettled = 0
        self.failures: list[str] = []

    @property
    def simulated(self) -> bool:
        """As the source."""
        return self._source.simulated

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """As the source."""
        answers = []
        for one in sets:
            try:
                (answer,) = self._source.measure([one])
            except MeasurementError as error:
                self.failures.append(str(error))
                raise
            self.count += 1
            self.unsettled += not answer.settled
            self._line.measured(self.count)
            answers.append(answer)
        return answers


class MeasuredCluster:
    """The hosts of an MPI job, to plan by measuring them."""

    def __init__(self, session: ClusterSession, task: ClusterTask, careful: Care) -> None:
        self._session, self._task, self._care = session, task, careful
        names = [host.name for host in session.hosts]
        network = task.network(names)
        self.cluster = cluster_of(
            [
                HostReport(
                    host=host.name,
                    machine=host.machine,
                    knowledge=host.knowledge,
                    # One rank on a host is its agent; more are the ranks of a job.
                    slots=len(host.ranks) if len(host.ranks) > 1 else None,
                )
                for host in session.hosts
            ],
            switches=network.switches if network is not None else None,
            rails=network.rails if network is not None else "any",
            where="this MPI job",
        )
        self.models: dict[str, MachineModel] = {}

    def planned(self, journal: Path, *, force: bool) -> ClusterPlan:
        """The plan by measurements; what was noticed meanwhile stands in it."""
        session = self._session
        with ProgressLine() as line:
            counted = _Counted(session.source, line)
            opened = open_journal(counted, journal, session.header, force=force)
            with opened as journalled:
                notice_each(journalled.notices)
                sources = [PlacedSource(journalled, one) for one in placements(self.cluster)]
                made = self._task.plan(self.cluster, sources, line)
                if not made.cancelled:
                    made = _with_whole_ring(made, journalled)
        notices = [*made.notices, *session.notices]
        if session.is_open:
            notices.append(f"while it was measured: {session.conditions}")
        if counted.unsettled > counted.count / 10:
            notices.append(
                f"rates vary: {counted.unsettled} of {counted.count} sets measured did not come as "
                f"close as --target {self._care.target:g}"
            )
        failures = list(dict.fromkeys(counted.failures))[:5]
        notices += [f"left out, as it cannot be measured: {text}" for text in failures]
        return msgspec.structs.replace(made, notices=tuple(dict.fromkeys(notices)))


def _with_whole_ring(made: ClusterPlan, source: BandwidthSource) -> ClusterPlan:
    """The plan with what all its rings carry at once, where the hosts are not too many."""
    if len(made.hosts) > WHOLE_RING_HOSTS:
        return made
    try:
        rate = whole_ring_rate(made, source)
    except MeasurementError as error:
        text = f"the rings could not be measured all at once: {error}"
        return msgspec.structs.replace(made, notices=(*made.notices, text))
    return msgspec.structs.replace(made, whole_ring_gbps=rate)


def in_job() -> bool:
    """Whether this process is one of several ranks."""
    from tccl_profiler.cluster.mpi import in_mpi_job  # noqa: PLC0415

    return in_mpi_job()


@contextmanager
def job_of_ranks() -> Iterator[Job]:
    """This rank's part in the job; on all ranks but the controller the block does not run.

    Raises:
        InputError: mpi4py is not there, or the ranks cannot meet.
    """
    from tccl_profiler.cluster.mpi import mpi_job  # noqa: PLC0415

    with mpi_job() as job:
        if not job.is_controller:
            raise typer.Exit(job.serve())
        yield job


def open_cluster(
    job: Job, options: ClusterOptions, *, backend: str | None, devices: int | None, careful: Care
) -> ClusterSession:
    """The session over a job's hosts; it starts nothing before it is entered.

    Raises:
        InputError: an unknown backend, or a number of devices beside GPUs.
    """
    from tccl_profiler.cluster.session import LIMITS, ClusterSession  # noqa: PLC0415
    from tccl_profiler.profiler import Options  # noqa: PLC0415
    from tccl_profiler.statistics import Stopping  # noqa: PLC0415

    if backend not in (None, "cuda", "host"):
        raise InputError(f"--backend {str(backend)[:20]!r}", "is not known", "one of cuda, host")
    if devices is not None and backend != "host":
        raise InputError("--devices", "is of the host backend", "add --backend host")
    expected = read_host_list(options.hosts) if options.hosts is not None else ()
    return ClusterSession(
        job,
        backend="host" if backend == "host" else "cuda",
        devices=devices,
        interfaces=tuple(options.interfaces.split(",")) if options.interfaces else (),
        expected=tuple(host.name for host in expected),
        options=Options(
            stopping=Stopping(target=careful.target, limit=careful.repeats),
            limits=LIMITS,
            meeting=careful.meeting,
            check="every" if careful.check else "once",
        ),
    )


def tell_rehearsal(backend: str | None) -> None:
    """Say of the host backend what its rates are."""
    if backend == "host":
        notice("measured by the host backend: rates of hosts' memory and network, not of GPUs")
