"""`tccl plan`: rings for a machine or a cluster, and the files that make NCCL use them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tccl_py.cli.interrupts import (
    CTRL_C_AND_SIGTERM,
    INTERRUPTED,
    Terminated,
    interrupts_put_off,
    undisturbed,
)
from tccl_py.cli.measure import controlled_job, measurement_options
from tccl_py.cli.nccl_here import graph_file_notices, rings_here, version_here, version_of_hosts
from tccl_py.cli.options import (
    MACHINE_HELP,
    OUTSIDE_JOB,
    WITH_MODEL,
    WITHOUT_MODEL,
    BackendOption,
    DevicesOption,
    InterfacesOption,
    JsonOption,
    NetworkOption,
    NoiseOption,
    SeedOption,
    TargetOption,
    gpus_argument,
    refuse,
)
from tccl_py.cli.output import ProgressLine, results
from tccl_py.cli.show import plan_json, print_plan
from tccl_py.cli.streams import notice, notice_each, print_json
from tccl_py.cli.verify import check_tuning, tuned_hosts, tuned_plan
from tccl_py.cluster_plan.job import cluster_of_job, plan_job, simulated_cluster
from tccl_py.cluster_plan.planner import make_cluster_plan
from tccl_py.errors import InputError
from tccl_py.model.cluster import Cluster
from tccl_py.model.knowledge import Fingerprint
from tccl_py.nccl.pinned_env import PINNABLE, check_pinnable, pinned_level, pinned_values
from tccl_py.nccl.settings import MAX_GID_INDEX
from tccl_py.nccl.versions import LATEST, known_versions
from tccl_py.plan.directory import holds_measurements, output_directory, write_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.planner import DEFAULT_BUDGET, make_plan
from tccl_py.readers.hosts import read_host_list
from tccl_py.search.problem import Budget
from tccl_py.search.strategies import STRATEGIES
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.model import MachineModel
from tccl_py.sources.hosts import HostsSource, in_job, open_hosts
from tccl_py.sources.opening import OpenedSource, open_source
from tccl_py.sources.profiled import (
    SEARCH_REPEATS,
    MeasuredMachine,
    MeasurementOptions,
    measured_machine,
)

if TYPE_CHECKING:
    from tccl_py.sources.hosts import Job

_MAX_RINGS = 16
_IN_JOB = ("under mpirun or srun", "needs no ranks", "start the command by itself")
_FOR_ONE = (
    "",
    "is about several nodes",
    "add --simulate MACHINE --nodes N, or start the command under mpirun or srun",
)
_BY_RANKS = (
    "for several nodes",
    "is about one machine",
    "leave it out: as many GPUs of a host are used as it has ranks (slots)",
)
_BY_HOSTS = (
    "for nodes that are simulated",
    "runs collectives on the hosts",
    "leave it out, or measure them: start the command by mpirun or srun",
)


def plan(
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="DIR", help="Where the plan's files go; a new one."),
    ],
    *,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE", help=f"Plan by a model's rates, not by measuring. {MACHINE_HELP}"
        ),
    ] = None,
    backend: BackendOption = None,
    devices: DevicesOption = None,
    target: TargetOption = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="GPUs to join, as 0,2,5 or 0-3; all if not given."),
    ] = None,
    nccl: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="The jobs' version of NCCL. If not given, it is the installed one where GPUs are "
            f"measured, else {LATEST}; {', '.join(known_versions())} were checked.",
        ),
    ] = None,
    rings: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="How many rings together, as 1,2,4; 1,2,4 by default."),
    ] = None,
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of {', '.join(STRATEGIES)}.")
    ] = "best-first",
    max_sets: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Sets to measure at most while settings and rings are searched, on a cluster for "
            "each class of hosts; tuning channels, subsets, and chains that all classes need "
            "together take some more.",
        ),
    ] = DEFAULT_BUDGET.sets or 1000,
    max_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds to spend at most on one search.")
    ] = None,
    noise: NoiseOption = None,
    seed: SeedOption = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="How many equal nodes to simulate.")
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The hosts there should be: a hostfile of Open MPI, MPICH or SLURM, or a list.",
        ),
    ] = None,
    switches: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Switches between the hosts: SLURM's topology.conf or topology.yaml, or our YAML.",
        ),
    ] = None,
    keep_order: Annotated[
        bool, typer.Option("--keep-order", help="Leave the hosts in the order they are given in.")
    ] = False,
    gid_index: Annotated[
        int | None,
        typer.Option(metavar="N", help="NCCL_IB_GID_INDEX of RoCE ports; NCCL's choice if not."),
    ] = None,
    interfaces: InterfacesOption = None,
    network: NetworkOption = None,
    pin_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NCCL_NAME",
            help="A variable of yours that all jobs have, with the plan or without: "
            "NCCL_P2P_DISABLE or NCCL_P2P_LEVEL; may be repeated.",
        ),
    ] = None,
    tune: Annotated[
        bool | None,
        typer.Option(
            "--tune/--no-tune",
            help="Verify the plan and tune its settings, as `tccl verify`. If not given, only "
            "between hosts that talk over sockets, where one thread serves a GPU's connections.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a plan that is already in DIR.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Find the best rings for a machine or a cluster, and write the files that make NCCL use them.

    DIR then holds plan.json, the journal of measurements, the machines, and below nccl/ graph files
    for all GPUs and for subsets of GPUs (of a cluster for every host), nccl.conf and env.sh. Rates
    are measured on this machine's GPUs, which should be idle otherwise, or, with --simulate, come
    from a model. Ctrl-C prints the best so far and keeps the journal; the same command resumes
    there, measures nothing twice, and writes the plan.

    A plan is for a single version of NCCL. Without --nccl, where GPUs are measured, it is the
    version loaded by torch here, else an nvidia-nccl package's, else the system's libnccl.so.2, and
    under mpirun the version on all hosts; with a model it is the newest known. stderr names it.

    Under mpirun or srun, with a rank or more on each host, the job's hosts are planned for
    together. NCCL joins nodes in the order of ranks, so the order is part of the plan: nccl/order
    has files for launchers.

    With --pin-env the plan is for hosts where every job sets NCCL_P2P_LEVEL or NCCL_P2P_DISABLE: so
    do all settings tried, and default NCCL in the comparison.

    Examples:

        tccl plan -o my-plan
        tccl plan -o my-plan --simulate asus-esc8000a-e13p
        tccl plan -o my-plan --simulate nvswitch-8gpu-8nic --nodes 16
        NCCL_P2P_DISABLE=1 tccl plan -o my-plan --pin-env NCCL_P2P_DISABLE
        mpirun -N 1 tccl plan -o my-plan --switches topology.conf
    """
    asked = _Asked(
        simulate=simulate,
        backend=backend,
        devices=devices,
        target=target,
        gpus=gpus,
        nccl=nccl,
        noise=noise,
        seed=seed,
        nodes=nodes,
        hosts=hosts,
        switches=switches,
        keep_order=keep_order,
        gid_index=gid_index,
        interfaces=interfaces,
        network=network,
        pin_env=tuple(pin_env or ()),
        tune=bool(tune),
        in_job=in_job(),
    )
    asked.check()
    task: dict[str, Any] = {
        "version": LATEST if nccl is None else nccl,
        "pinned_env": _pinned_here(asked.pin_env),
        "ring_counts": _ring_counts(rings),
        "strategy": strategy,
        "budget": _budget(max_sets, max_seconds),
    }
    with ExitStack() as stack:
        subject = _subject(asked, task, stack)
        with output_directory(output, force=force) as journal:
            with _planning(journal, output), ProgressLine() as line:
                subject.source.watch(line.measured)
                notice_each(subject.source.keep_in(journal, replace=force))
                made = subject.plan(line)
            if not made.cancelled:
                with undisturbed():
                    models, fingerprint = subject.models, subject.fingerprint
                    write_plan(made, output, models=models, fingerprint=fingerprint)
                if subject.is_tuned(made, tune):
                    made = subject.tuned(made, output)
    _finish(made, output, json=json)


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The options that say what is planned for, and how it is measured."""

    simulate: str | None
    backend: str | None
    devices: int | None
    target: float | None
    gpus: str | None
    nccl: str | None
    noise: float | None
    seed: int | None
    nodes: int | None
    hosts: Path | None
    switches: Path | None
    keep_order: bool
    gid_index: int | None
    interfaces: str | None
    network: str | None
    pin_env: tuple[str, ...]
    tune: bool
    in_job: bool

    @property
    def several(self) -> bool:
        """Whether several hosts are simulated."""
        listed = self.simulate is not None and self.hosts is not None
        return not self.in_job and (self.nodes not in (None, 1) or listed)

    @property
    def options(self) -> MeasurementOptions:
        """Options of measurements."""
        return measurement_options(target=self.target, repeats=SEARCH_REPEATS)

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            InputError: the first of them.
        """
        of_job = {"--interfaces": self.interfaces, "--network": self.network}
        if self.simulate is not None:
            hardware = {"--backend": self.backend, "--devices": self.devices}
            refuse({**hardware, "--target": self.target, **of_job}, WITH_MODEL)
        else:
            refuse({"--noise": self.noise, "--seed": self.seed}, WITHOUT_MODEL)
        # Its value is checked.
        _ = self.options
        if self.gid_index is not None and not 0 <= self.gid_index <= MAX_GID_INDEX:
            raise InputError("--gid-index", f"is {self.gid_index}", f"0 to {MAX_GID_INDEX}")
        if self.in_job or self.several:
            refuse({"--gpus": self.gpus}, _BY_RANKS)
        else:
            listed = {"--hosts": self.hosts, "--switches": self.switches}
            order = {"--keep-order": self.keep_order, "--gid-index": self.gid_index}
            refuse({**listed, **order}, _FOR_ONE)
        if self.in_job:
            refuse({"--simulate": self.simulate, "--nodes": self.nodes}, _IN_JOB)
            return
        refuse(of_job, OUTSIDE_JOB)
        if self.several:
            refuse({"--tune": self.tune}, _BY_HOSTS)
        if self.several and self.simulate is None:
            right = "add --simulate MACHINE, or start the command under mpirun or srun"
            raise InputError("--nodes", "is about models", right)


def _subject(asked: _Asked, task: dict[str, Any], stack: ExitStack) -> _Subject:
    """Open what is planned for: a job's hosts, a model, or this machine.

    Raises:
        InputError: there is no such machine, or another job than asked for.
    """
    of_cluster = {"keep_order": asked.keep_order, "ib_gid_index": asked.gid_index}
    if asked.in_job:
        return _job(asked, {**task, **of_cluster}, stack)
    if asked.tune:
        check_tuning()
    if asked.simulate is not None:
        model = load_machine(asked.simulate)
        source = open_source(model, noise=asked.noise or 0.0, seed=asked.seed or 0)
        if asked.several:
            cluster = simulated_cluster(model, asked.nodes, asked.hosts, asked.switches)
            return _Simulated(source, model, cluster, {**task, **of_cluster})
        gpus = gpus_argument(asked.gpus, model.machine)
        return _Simulated(source, model, None, {**task, "gpus": gpus})
    place = measured_machine(asked.backend, asked.devices)
    # No NCCL runs where the host's memory is measured.
    if asked.backend != "host":
        task = {**task, "version": version_here(asked.nccl)}
        notice_each(not_pinned(asked.pin_env))
    gpus = gpus_argument(asked.gpus, place.machine)
    source = open_source(place, gpus=gpus, options=asked.options)
    return _Here(source, place, {**task, "gpus": gpus})


def _job(asked: _Asked, task: dict[str, Any], stack: ExitStack) -> _Job:
    """Join this MPI job, and find out what its hosts are."""
    listed = read_host_list(asked.hosts) if asked.hosts is not None else ()
    job = stack.enter_context(controlled_job())
    source = open_hosts(
        job,
        backend=asked.backend,
        devices=asked.devices,
        interfaces=asked.interfaces,
        network=asked.network,
        gid_index=asked.gid_index,
        options=asked.options,
        expected=[host.name for host in listed],
    )
    stack.enter_context(source)
    if asked.tune:
        check_tuning(job)
    if asked.backend != "host":
        installed = source.session.hosts[0].software.nccl
        task = {**task, "version": version_of_hosts(asked.nccl, installed)}
    return _Job(source, cluster_of_job(source, asked.switches), task, job)


class _Subject:
    """What is planned for: a source, and the task for the planner."""

    fingerprint: Fingerprint | None = None

    def __init__(self, source: OpenedSource, task: dict[str, Any]) -> None:
        self.source, self.task = source, task
        self.models: dict[str, MachineModel] = {}

    def plan(self, line: ProgressLine) -> Plan:
        """Plan by the source, which has its journal; the source is closed then."""
        raise NotImplementedError

    def is_tuned(self, made: Plan, asked: bool | None) -> bool:  # noqa: ARG002
        """Return whether to tune the plan; `asked` is None where the user did not say."""
        return bool(asked)

    def tuned(self, made: Plan, output: Path) -> Plan:
        """Verify the plan that was written to `output`, tune it, and return it."""
        return tuned_plan(made, output)


class _Simulated(_Subject):
    """A model of one machine, or of each host of a cluster."""

    def __init__(
        self,
        source: OpenedSource,
        model: MachineModel,
        cluster: Cluster | None,
        task: dict[str, Any],
    ) -> None:
        super().__init__(source, task)
        self._model, self._cluster = model, cluster

    def plan(self, line: ProgressLine) -> Plan:
        """Plan by simulation."""
        with self.source as source:
            if self._cluster is None:
                model = self._model
                made = make_plan(model.machine, model.knowledge, source, reporter=line, **self.task)
            else:
                made = make_cluster_plan(self._cluster, [source], reporter=line, **self.task)
        # Equal nodes have one model.
        self.models = {known.name: self._model for known in made.cluster.classes}
        return made


class _Here(_Subject):
    """This machine."""

    def __init__(self, source: OpenedSource, place: MeasuredMachine, task: dict[str, Any]) -> None:
        super().__init__(source, task)
        self._place = place
        self.fingerprint = place.fingerprint

    def plan(self, line: ProgressLine) -> Plan:
        """Plan by measurements; the plan has the notices of measuring."""
        place = self._place
        with self.source as source:
            rings = rings_here(place, self.task["gpus"])
            made = make_plan(
                place.machine, place.knowledge, source, reporter=line, own_rings=rings, **self.task
            )
            conditions = source.conditions
        noticed = source.profiled.summary(conditions) if source.profiled is not None else ()
        if rings is not None:
            tried = () if made.cancelled else graph_file_notices(made, rings)
            noticed = (*rings.notices, *tried, *noticed)
        return msgspec.structs.replace(made, notices=(*made.notices, *noticed))


class _Job(_Subject):
    """The hosts of an MPI job."""

    def __init__(
        self, source: HostsSource, cluster: Cluster, task: dict[str, Any], job: Job
    ) -> None:
        super().__init__(source, task)
        self._hosts, self._cluster, self._job = source, cluster, job

    def plan(self, line: ProgressLine) -> Plan:
        """Plan by measurements on the hosts."""
        try:
            return plan_job(self._hosts, self._cluster, say=notice_each, reporter=line, **self.task)
        finally:
            self._hosts.close()

    def is_tuned(self, made: Plan, asked: bool | None) -> bool:
        """Return whether to tune the plan: between sockets jobs alone tell the bandwidth."""
        if asked is not None or self._hosts.dry_run or not made.settings.socket_ifname:
            return bool(asked)
        try:
            check_tuning(self._job)
        except InputError as error:
            notice(f"predicted bandwidth over sockets may be too high: no job checked it ({error})")
            return False
        return True

    def tuned(self, made: Plan, output: Path) -> Plan:  # noqa: ARG002 (it is read from `output`)
        """Tune the plan by jobs of the hosts, whose workers end first."""
        self._hosts.session.end_workers()
        return tuned_hosts(output, self._job, "host" if self._hosts.dry_run else "cuda")


@contextmanager
def _planning(journal: Path, output: Path) -> Iterator[None]:
    """Within the block a plan is searched; an end without one is explained.

    SIGTERM ends it at once, and so does Ctrl-C where nothing was found yet.
    """
    try:
        with interrupts_put_off(CTRL_C_AND_SIGTERM):
            yield
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, Terminated)):
            notice("interrupted before there was a plan: none was written")
        if holds_measurements(journal):
            notice(f"measurements are kept: the same command resumes from {output}")
        raise


def _finish(made: Plan, output: Path, *, json: bool) -> None:
    """Print a plan, and whether it was written.

    Raises:
        typer.Exit: it was interrupted, and so was not.
    """
    if made.cancelled:
        notice(f"interrupted: the best so far follows; the same command resumes from {output}")
    if json:
        print_json(plan_json(made))
    else:
        print_plan(made, results())
    if made.cancelled:
        raise typer.Exit(INTERRUPTED)
    notice(f"wrote {output}")


def _pinned_here(names: Sequence[str]) -> dict[str, str]:
    """Return the variables of these names as they are set here, and as NCCL reads them.

    Raises:
        InputError: plans cannot be made under one, or it is not set, or says nothing to NCCL.
    """
    for name in names:
        check_pinnable(name, where="--pin-env")
        if name not in os.environ:
            right = f"set it as all jobs have it, as in `{name}=... tccl plan`"
            raise InputError(f"--pin-env {name}", "is not set here", right)
    return pinned_values({name: os.environ[name] for name in names}, where="--pin-env")


def not_pinned(names: Sequence[str]) -> tuple[str, ...]:
    """Return notices on variables that are set here, and are not among the pinned `names`."""
    return tuple(
        f"{name}={os.environ[name][:20]} is set here and is not planned for: if all jobs have it, "
        f"add --pin-env {name}"
        for name in PINNABLE
        if name not in names and pinned_level({name: os.environ.get(name, "")}) is not None
    )


def _ring_counts(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise InputError(f"--rings {text[:40]!r}", "is no list of numbers", "write 1,2,4")
    counts = tuple(sorted({int(part) for part in parts if len(part) < 6}))
    if not counts or counts[0] < 1 or counts[-1] > _MAX_RINGS:
        raise InputError(f"--rings {text[:40]!r}", "is out of range", f"1 to {_MAX_RINGS} rings")
    return counts


def _budget(sets: int, seconds: float | None) -> Budget:
    if sets < 1:
        raise InputError("--max-sets", f"is {sets}", "measure at least one set")
    # The comparison is written so that NaN fails it.
    if seconds is not None and not 0 < seconds < float("inf"):
        raise InputError("--max-seconds", f"is {seconds}", "a number of seconds above 0")
    return Budget(sets=sets, seconds=seconds, idle_sets=DEFAULT_BUDGET.idle_sets)
