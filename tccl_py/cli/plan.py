"""`tccl plan`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tccl_py.cli.interrupts import undisturbed
from tccl_py.cli.measure import measurement_options
from tccl_py.cli.nccl_here import graph_file_notices, rings_here, version_here
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
from tccl_py.cli.output import ProgressLine
from tccl_py.cli.plan_cluster import ClusterOptions, ClusterTask, SimulatedCluster
from tccl_py.cli.plan_kept import kept_here, not_kept_here
from tccl_py.cli.plan_nodes import Measuring, plan_cluster, plan_hosts
from tccl_py.cli.plan_run import finish, planning
from tccl_py.cli.plan_text import plan_json, print_plan
from tccl_py.cli.streams import notice_each
from tccl_py.cli.verify import check_tuning, tuned_plan
from tccl_py.errors import InputError
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import BandwidthSource
from tccl_py.nccl.asked import InstalledRings
from tccl_py.nccl.settings import MAX_GID_INDEX
from tccl_py.nccl.versions import LATEST, known_versions
from tccl_py.plan.directory import output_directory, write_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.planner import DEFAULT_BUDGET, make_plan
from tccl_py.search.problem import Budget
from tccl_py.search.strategies import STRATEGIES
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.model import MachineModel
from tccl_py.sources.hosts import in_job
from tccl_py.sources.opening import open_source
from tccl_py.sources.profiled import (
    SEARCH_REPEATS,
    MeasuredMachine,
    MeasurementOptions,
    measured_machine,
)

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
            "each class of hosts; tuning channels, subsets, and "
            "chains that all classes need together take some more.",
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
        bool,
        typer.Option("--tune", help="Verify the plan and tune its settings, as `tccl verify`."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a plan that is already in DIR.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Find the best rings for a machine or a cluster, and write the files that make NCCL use them.

    DIR then holds plan.json, the journal of measurements, the machines, and below nccl/ graph files
    for all GPUs and for subsets of them (of a cluster for every host), nccl.conf and env.sh. Rates
    are those of this machine's GPUs, which should have nothing else to do, or, with --simulate, of
    a model. Ctrl-C prints the best so far and keeps the journal; the same command again goes on
    from there, measures nothing twice, and writes the plan.

    A plan is for one version of NCCL. Without --nccl, where GPUs are measured, that is the one that
    torch here loads, else that of an nvidia-nccl package, else the system's libnccl.so.2, and under
    mpirun what all hosts have; with a model it is the newest known. stderr says which it was.

    Under mpirun or srun, with a rank or more on each host, the job's hosts are planned for
    together. NCCL joins nodes in the order of ranks, so that order is part of the plan: nccl/order
    has it for launchers.

    With --pin-env the plan is for hosts where every job sets NCCL_P2P_LEVEL or NCCL_P2P_DISABLE:
    so do all settings that are tried, and default NCCL, with which the plan is compared.

    Examples:

        tccl plan -o my-plan
        tccl plan -o my-plan --simulate asus-esc8000a-e13p
        tccl plan -o my-plan --simulate nvswitch-8gpu-8nic --nodes 16
        NCCL_P2P_DISABLE=1 tccl plan -o my-plan --pin-env NCCL_P2P_DISABLE
        mpirun -N 1 tccl plan -o my-plan --switches topology.conf
    """
    cluster = ClusterOptions(
        nodes=nodes,
        hosts=hosts,
        switches=switches,
        keep_order=keep_order,
        gid_index=gid_index,
        interfaces=interfaces,
        network=network,
    )
    if simulate is not None:
        hardware = {"--backend": backend, "--devices": devices, "--target": target}
        refuse({**hardware, **cluster.measured}, WITH_MODEL)
    else:
        refuse({"--noise": noise, "--seed": seed}, WITHOUT_MODEL)
    options = measurement_options(target=target, repeats=SEARCH_REPEATS)
    if gid_index is not None and not 0 <= gid_index <= MAX_GID_INDEX:
        raise InputError("--gid-index", f"is {gid_index}", f"0 to {MAX_GID_INDEX}")
    kept = kept_here(pin_env or ())
    counts = _ring_counts(rings)
    budget = _budget(max_sets, max_seconds)
    version = LATEST if nccl is None else nccl
    job = in_job()
    if not job:
        refuse(cluster.measured, OUTSIDE_JOB)
    if job or nodes not in (None, 1) or (simulate is not None and hosts is not None):
        refuse({"--gpus": gpus}, _BY_RANKS)
        wanted = ClusterTask(
            options=cluster,
            version=version,
            counts=counts,
            strategy=strategy,
            budget=budget,
            kept=kept,
        )
        if job:
            refuse({"--simulate": simulate, "--nodes": nodes}, _IN_JOB)
            measuring = Measuring(
                backend=backend,
                devices=devices,
                nccl=nccl,
                options=options,
                expected=hosts,
                tune=tune,
            )
            plan_hosts(wanted, measuring, output, force, json)
            return
        refuse({"--tune": tune}, _BY_HOSTS)
        if simulate is None:
            raise InputError(
                "--nodes",
                "is about models",
                "add --simulate MACHINE, or start the command under mpirun or srun",
            )
        model = load_machine(simulate)
        plan_cluster(
            SimulatedCluster(model, wanted, noise=noise or 0.0, seed=seed or 0), output, force, json
        )
        return
    refuse(cluster.given, _FOR_ONE)
    if tune:
        check_tuning()
    subject: _Subject
    if simulate is not None:
        subject = _Model(load_machine(simulate), noise=noise or 0.0, seed=seed or 0)
    else:
        subject = _Here(measured_machine(backend, devices), options)
        # No NCCL runs where the host's memory is measured.
        version = version if backend == "host" else version_here(nccl)
        if backend != "host":
            notice_each(not_kept_here(pin_env or ()))
    task = _Task(
        gpus=gpus_argument(gpus, subject.machine),
        version=version,
        counts=counts,
        strategy=strategy,
        budget=budget,
        kept=kept,
    )
    with output_directory(output, force=force) as journal:
        with planning(journal, output):
            made = subject.planned(task, journal, force=force)
        if not made.cancelled:
            with undisturbed():
                subject.write(made, output)
            made = tuned_plan(made, output) if tune else made
    finish(made, output, plan_json, print_plan, json=json)


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the options ask for, whatever is planned."""

    gpus: tuple[int, ...] | None
    version: str
    counts: tuple[int, ...] | None
    strategy: str
    budget: Budget
    kept: dict[str, str]

    def plan(
        self,
        machine: Machine,
        knowledge: Knowledge,
        source: BandwidthSource,
        line: ProgressLine,
        own_rings: InstalledRings | None = None,
    ) -> Plan:
        """The plan that this source's answers make."""
        return make_plan(
            machine,
            knowledge,
            source,
            gpus=self.gpus,
            version=self.version,
            ring_counts=self.counts,
            strategy=self.strategy,
            budget=self.budget,
            reporter=line,
            pinned_env=self.kept,
            own_rings=own_rings,
        )


class _Model:
    """A model to plan by."""

    def __init__(self, model: MachineModel, *, noise: float, seed: int) -> None:
        self.machine = model.machine
        self._model = model
        self._source = open_source(model, noise=noise, seed=seed)

    def planned(self, task: _Task, journal: Path, *, force: bool) -> Plan:
        """Plan by simulation; a plan that a journal tells of is resumed."""
        with ProgressLine() as line, self._source as source:
            notice_each(source.keep_in(journal, replace=force))
            return task.plan(self.machine, self._model.knowledge, source, line)

    def write(self, made: Plan, output: Path) -> None:
        """Write a plan with the model that its rates come from."""
        write_plan(made, output, model=self._model)


class _Here:
    """This machine, to plan by measuring it."""

    def __init__(self, place: MeasuredMachine, options: MeasurementOptions) -> None:
        self.machine = place.machine
        self._place, self._options = place, options

    def planned(self, task: _Task, journal: Path, *, force: bool) -> Plan:
        """Plan by measurements; the plan has the notices of measuring."""
        with (
            ProgressLine() as line,
            open_source(self._place, gpus=task.gpus, options=self._options) as source,
        ):
            source.watch(line.measured)
            notice_each(source.keep_in(journal, replace=force))
            rings = rings_here(self._place, task.gpus)
            made = task.plan(self.machine, self._place.knowledge, source, line, rings)
            conditions = source.conditions
        noticed = () if source.profiled is None else source.profiled.summary(conditions)
        if rings is not None:
            tried = () if made.cancelled else graph_file_notices(made, rings)
            noticed = (*rings.notices, *tried, *noticed)
        return msgspec.structs.replace(made, notices=(*made.notices, *noticed))

    def write(self, made: Plan, output: Path) -> None:
        """Write a plan with the machine, its peer access and its fingerprint."""
        write_plan(made, output, fingerprint=self._place.fingerprint)


_Subject = _Model | _Here


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
