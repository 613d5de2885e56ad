"""`tccl env` and `tccl run`: a job's environment over GPUs of a plan, or on a host of a cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from tccl_py.cli import options
from tccl_py.cli.options import arg, flag, gpus_argument, opt, refuse
from tccl_py.cli.process import ANSWER_IS_NO, complain, flush_output, notice, print_json
from tccl_py.delivery.fit import ALIKE_VARIABLE
from tccl_py.delivery.job import Delivery, JobRequest, deliver, gives_nothing
from tccl_py.delivery.placement import prefer_numa_node
from tccl_py.errors import InputError, check_choice, require
from tccl_py.files import pick, says
from tccl_py.model.cluster import shown
from tccl_py.nccl.settings import GRAPH_VARIABLE, env_conflicts, export_lines
from tccl_py.nccl.variables import CHOOSING_VARIABLES
from tccl_py.nccl_conf import settings_of_files
from tccl_py.plan.chains import CHOICES, ChoiceName
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import plan_in

GPUS = opt("LIST", "The job's GPUs (NVML), as 0,2,5 or 0-3; by default those visible.")
HOST = opt("NAME", "A cluster's host; this one if not given.")
VERSION = opt("VERSION", "The job's; if not given, as installed.")
CHOICE = opt("|".join(CHOICES), "The recommended one if not given.")
PLUGIN = flag("--plugin", "Load NCCL's plugin: any communicators.")
FORCE = flag("--force", "Also by the plan of a dry run.")
NO_EXECUTABLE, NO_PROGRAM = 126, 127
"""The exit codes of shells for a program that cannot be run, and for one that does not exist."""
EQUAL_HOSTS = flag("--alike", "GPUs' UUIDs may differ.", envvar=ALIKE_VARIABLE)


class Env(msgspec.Struct, frozen=True, kw_only=True):
    """`tccl env --json`."""

    gpus: tuple[int, ...] | UnsetType = UNSET
    host: Annotated[str | UnsetType | None, says("of several hosts alone")] = UNSET
    off: Annotated[str | UnsetType, says("why the plan is disabled")] = UNSET
    choice: Annotated[ChoiceName | UnsetType, says("the delivered choice")] = UNSET
    environment: dict[str, str]
    simulated: bool
    dry_run: bool


def env(
    directory: Path = options.DIRECTORY,
    *,
    gpus: str | None = GPUS,
    host: str | None = HOST,
    nccl: str | None = VERSION,
    choice: str | None = CHOICE,
    workload: str | None = options.FOR_WORKLOAD,
    plugin: bool = PLUGIN,
    equal_hosts: bool = EQUAL_HOSTS,
    force: bool = FORCE,
    json: bool = options.JSON,
) -> None:
    """Print the environment for a job over these GPUs, as `export` lines to evaluate.

    The lines follow the plan's recommendation: nothing to set, variables alone, or a graph file for
    exactly these GPUs. With --plugin they serve communicators over any GPUs.

    Exit codes: 0 also where nothing is to be set, 1 only if the plan does not apply to these GPUs,
    this machine or this NCCL; stderr says why.

    Examples:

        eval "$(tccl env my-plan --gpus 0,2,5)"
        eval "$(tccl env my-plan --plugin)"
        eval "$(tccl env my-plan --workload job.json)"
        eval "$(tccl env my-cluster --host gpu07)"
    """
    request = JobRequest(host=host, nccl=nccl, plugin=plugin, equal_hosts=equal_hosts, force=force)
    if workload is not None:
        choice = _choice_for(workload, directory)
    plan, delivery = _delivery(directory, request, gpus=gpus, choice=choice)
    _leave_own_graph_file(directory)
    if delivery.variables:
        # What is exported, or unset, replaces that of the environment.
        replaced = {*delivery.variables, GRAPH_VARIABLE}
        own = {name: value for name, value in os.environ.items() if name not in replaced}
        for name, value in delivery.variables.items():
            if os.environ.get(name, value) != value:
                mine = shown(os.environ[name])
                notice(f"{name}={value} replaces your {mine}: leave it out if jobs need yours")
        if conflicts := _conflicts(delivery, {**own, **delivery.variables}):
            notice(
                f"your environment has another {conflicts}, which contradicts the plan: remove it"
            )
    _warn_of_choices(plan, delivery)
    if json:
        print_json(
            Env(
                **delivery.job,
                off=delivery.disabled or UNSET,
                choice=UNSET if delivery.disabled else delivery.choice.name,
                environment=dict(delivery.variables),
                **pick(plan, "simulated", "dry_run"),
            )
        )
    elif plan.dry_run and not force:
        print(f"# tccl-py, {delivery.disabled}")
    else:
        if not delivery.disabled:
            print(f"# tccl-py, rates {delivery.provenance}")
            print(_remark(plan, directory, delivery, plugin=plugin, gpus=gpus), end="")
            print(export_lines(delivery.variables), end="")
        if GRAPH_VARIABLE not in delivery.variables:
            print(f"unset {GRAPH_VARIABLE}")
    if delivery.refused:
        raise typer.Exit(ANSWER_IS_NO)


def _remark(
    plan: Plan, directory: Path, delivery: Delivery, *, plugin: bool, gpus: str | None
) -> str:
    """Return a comment where a job gets nothing but default NCCL."""
    if plugin and gives_nothing(plan, directory, delivery):
        return "# default NCCL for every communicator: the plugin has nothing to give\n"
    of = f" for GPUs {','.join(map(str, delivery.job['gpus']))}" if gpus else ""
    nothing = f"# default NCCL{of}: nothing to set, start the job as usual\n"
    return "" if delivery.variables else nothing


def run(
    directory: str = arg("DIR", "A plan's directory, not needed with --record.", ""),
    command: list[str] | None = arg("COMMAND", "The job and its arguments, after --.", None),
    *,
    record: Path | None = opt("FILE", "Write what the job communicates in a step to FILE."),
    gpus: str | None = GPUS,
    host: str | None = HOST,
    nccl: str | None = VERSION,
    choice: str | None = CHOICE,
    workload: str | None = options.FOR_WORKLOAD,
    plugin: bool = PLUGIN,
    equal_hosts: bool = EQUAL_HOSTS,
    force: bool = FORCE,
) -> None:
    """Run a job with the plan's recommended choice, in the environment of `tccl env`.

    Your own NCCL variables win. Where they contradict the plan, or it does not apply, COMMAND runs
    without the plan, and stderr says why.

    With --record NCCL logs its calls, and FILE gets those of a step.

    Exit codes: those of COMMAND; 127 if there is no such program, 126 if it cannot be run.

    Examples:

        tccl run my-plan -- torchrun --nproc-per-node 8 train.py
        tccl run my-plan --plugin -- python train.py
        tccl run my-plan --workload job.json -- torchrun --nproc-per-node 8 train.py
        mpirun -n 8 tccl run my-plan -- python train.py
        tccl run --record job.json -- torchrun --nproc-per-node 8 train.py
    """
    words = command or []
    if record is not None and not (directory and (Path(directory) / "plan.json").is_file()):
        of_plan: dict[str, object] = {"--gpus": gpus, "--host": host, "--nccl": nccl}
        of_plan |= {"--choice": choice, "--workload": workload}
        of_plan |= {"--plugin": plugin, "--force": force}
        refuse(of_plan, "is about a plan", "name a plan's directory")
        require(directory, "COMMAND", "is missing", "name a program after --")
        _record([directory, *words], {}, record)
    require(directory, "DIR", "is missing", "name a plan's directory")
    right = "name a plan and a program, as in `tccl run my-plan -- python train.py`"
    require(words, "COMMAND", "is missing", right)
    request = JobRequest(
        host=host,
        nccl=nccl,
        plugin=plugin,
        equal_hosts=equal_hosts,
        force=force,
        command=tuple(words),
    )
    if workload is not None:
        try:
            choice = _choice_for(workload, Path(directory))
        except InputError as error:
            notice(f"by the plan's recommendation: {error}")
    plan, delivery = _delivery(Path(directory), request, gpus=gpus, choice=choice)
    variables, node = delivery.variables, delivery.numa_id
    _leave_own_graph_file(Path(directory))
    conflicts = _conflicts(delivery, os.environ) if variables else ""
    if conflicts and plugin:
        notice(f"the plugin leaves jobs to NCCL, as your environment has another {conflicts}")
    elif conflicts:
        notice(f"the plan is disabled, as your environment has another {conflicts}")
        variables = {}
    else:
        _warn_of_choices(plan, delivery)
        if node is not None:
            why = prefer_numa_node(node)
            done = f"all memory of this rank is on NUMA node {node} by preference"
            notice(f"NUMA node {node} cannot be preferred: {why}" if why else done)
    flush_output(0)
    if record is not None:
        _record(words, variables, record)
    # Python ignores it, and what is ignored is inherited.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with _startable(words):
        os.execvpe(words[0], words, {**variables, **os.environ})


def _leave_own_graph_file(directory: Path) -> None:
    """Unset a file of the plan: a shell that evaluated `tccl env` may have that of another host."""
    if Path(os.environ.get(GRAPH_VARIABLE, "")).is_relative_to(directory.resolve() / "nccl"):
        del os.environ[GRAPH_VARIABLE]


def _warn_of_choices(plan: Plan, delivery: Delivery) -> None:
    """Say which variables here choose for NCCL, as they did not when the plan was judged."""
    own = {*plan.pinned_env, *delivery.variables}
    names = [name for name in CHOOSING_VARIABLES if name in os.environ and name not in own]
    if names and delivery.variables:
        notice(
            f"your environment has {', '.join(names)}: jobs may run other algorithms, protocols "
            "or channels than the plan was judged by"
        )


def _conflicts(delivery: Delivery, environment: Mapping[str, str]) -> str:
    """Return what contradicts a job's part of a plan in its environment and in NCCL's files."""
    # Hosts may have other files, and all their ranks need the same variables.
    given = {**delivery.variables, **environment}
    planned = delivery.choice.settings.version
    lines = settings_of_files(given, planned=planned) if "gpus" in delivery.job else {}
    own = {**{name: line.value for name, line in lines.items()}, **environment}
    names = list(env_conflicts(delivery.choice.settings, own))
    if own.get(GRAPH_VARIABLE) and own[GRAPH_VARIABLE] != delivery.variables.get(GRAPH_VARIABLE):
        names.append(GRAPH_VARIABLE)
    places = {name: f" ({lines[name].where})" for name in names if name in lines}
    return ", ".join(name + places.get(name, "") for name in names)


def _record(command: list[str], variables: Mapping[str, str], output: Path) -> NoReturn:
    """Run a job whose calls NCCL logs, write what they are, and exit with the job's code."""
    from tccl_py.cli.workload import record_job  # noqa: PLC0415 (slow)

    with _startable(command):
        code = record_job(command, {**variables, **os.environ}, output)
    raise typer.Exit(code)


@contextmanager
def _startable(command: list[str]) -> Iterator[None]:
    """Exit as a shell does where a command is no program."""
    try:
        yield
    except (OSError, ValueError) as error:
        # The empty name is a ValueError.
        missing = isinstance(error, FileNotFoundError | NotADirectoryError | ValueError)
        reason = error.strerror if isinstance(error, OSError) else error
        fault = "is no program here" if missing else f"cannot be run ({reason})"
        complain(f"command {command[0][:60]!r}: {fault}; name a program after --")
        raise typer.Exit(NO_PROGRAM if missing else NO_EXECUTABLE) from error


def _choice_for(workload: str, directory: Path) -> ChoiceName:
    """Return the choice that jobs found best for a workload."""
    from tccl_py.experiments.communication import verified_choice  # noqa: PLC0415 (slow)

    return verified_choice(directory, workload).chosen


def _delivery(
    directory: Path, request: JobRequest, *, gpus: str | None, choice: str | None
) -> tuple[Plan, Delivery]:
    """Return a plan and what a job gets from it; notices say why that is nothing."""
    if choice is not None:
        request = replace(request, choice=check_choice("--choice", choice, CHOICES))
    plan = plan_in(directory)
    if gpus is not None:
        machine = plan.cluster.classes[0].machine
        request = replace(request, gpus=gpus_argument(gpus, machine))
    return plan, deliver(plan, directory, request, say=notice)
