"""`tccl env` and `tccl run`: a job's environment over GPUs of a plan, or on a host of a cluster."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

import typer

from tccl_py.cli import options
from tccl_py.cli.options import flag, gpus_argument, opt, refuse
from tccl_py.cli.process import ANSWER_IS_NO, flush_output, notice, print_json
from tccl_py.errors import InputError
from tccl_py.files import refused
from tccl_py.health.fitness import (
    ALIKE_VARIABLE,
    planned_or_installed,
    why_disabled,
    why_other_host,
)
from tccl_py.model.cluster import shown
from tccl_py.nccl.variables import env_conflicts, export_lines, job_environment
from tccl_py.plan.beside import check_plan_directory
from tccl_py.plan.files import GRAPH_FILE, host_graph_file, subset_file
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import CHOICES, Plan
from tccl_py.plan.plugin import plugin_variables, why_no_plugin
from tccl_py.plan.staging import check_files
from tccl_py.readers.hosts import NODE_NAME, names_of_this_host

Choice = Enum("Choice", {name: name for name in CHOICES})  # type: ignore[misc]


Gpus = Annotated[str | None, opt("LIST", "The job's GPUs (NVML), as 0,2,5 or 0-3.")]
HostName = Annotated[str | None, opt("NAME", "A cluster's host; this one if not given.")]
Version = Annotated[str | None, opt("VERSION", "The job's; if not given, as installed.")]
Chosen = Annotated[Choice | None, opt("|".join(CHOICES), "The recommended one if not given.")]
Plugin = Annotated[bool, flag("--plugin", "Load NCCL's plugin: any communicators.")]
Alike = Annotated[
    bool,
    typer.Option("--alike", metavar=" ", envvar=ALIKE_VARIABLE, help="GPUs' UUIDs may differ."),
]


class _Found(NamedTuple):
    """A job's variables, the GPUs or host, and whether what was asked for is not there."""

    plan: Plan
    subject: dict[str, Any]
    variables: Mapping[str, str]
    refused: bool


def env(
    directory: options.Directory,
    *,
    gpus: Gpus = None,
    host: HostName = None,
    nccl: Version = None,
    choice: Chosen = None,
    plugin: Plugin = False,
    alike: Alike = False,
    json: options.Json = False,
) -> None:
    """Print the environment for a job over these GPUs, as `export` lines to evaluate.

    The lines follow the plan's recommendation: nothing to set, variables alone, or a graph file
    with the settings needed beside. The exit code is 0 for each of these, and 1 only if the plan
    does not apply: to these GPUs, this machine or this NCCL.

    A graph file is named only for exactly these GPUs: any other would fail the job. If the plan has
    none, the variables of the second choice are printed, with exit code 1 after --choice graph.

    With --plugin the lines load the plan's plugin, for NCCL 2.28.7 and later: it gives each
    communicator of the job, over whatever GPUs, the graph file of exactly these, or none, and sets
    the variables of the recommended choice. `tccl show --sets` lists who gets what.

    If the GPUs, the driver's major version, the NUMA layout or NCCL's version differ from the
    plan's, a measured plan is disabled: only `unset NCCL_GRAPH_FILE` is printed, stderr says why,
    and the exit code is 1. With --alike (or TCCL_ALIKE=1) GPUs of the same kinds at the same places
    will do.

    The environment of a cluster's plan is that of a single host, for a job over all hosts and GPUs
    of the plan with ranks in its order (DIR/nccl/order). The exit code is 1 for a host outside of
    the plan, and for this host after a change of GPUs.

    Examples:

        eval "$(tccl env my-plan --gpus 0,2,5)"
        eval "$(tccl env my-plan --plugin)"
        eval "$(tccl env my-cluster --host gpu07)"
    """
    given: dict[str, Any] = {"gpus": gpus, "nccl": nccl, "host": host, "choice": choice}
    found = _environment(directory, plugin=plugin, alike=alike, **given)
    _print(found.plan, found.variables, found.subject, json=json)
    if found.refused:
        raise typer.Exit(ANSWER_IS_NO)


def run(
    directory: options.Directory,
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="The job and its arguments, after --.")
    ],
    *,
    gpus: Gpus = None,
    host: HostName = None,
    nccl: Version = None,
    choice: Chosen = None,
    plugin: Plugin = False,
    alike: Alike = False,
) -> None:
    """Run a job with the plan's recommended choice, in the environment of `tccl env`.

    The process becomes COMMAND, whose exit code counts. NCCL variables that you have set stay as
    they are. Where they contradict the plan, or the plan does not apply, COMMAND runs without the
    plan, and stderr says why.

    Examples:

        tccl run my-plan -- torchrun --nproc-per-node 8 train.py
        tccl run my-plan --plugin -- python train.py
    """
    given: dict[str, Any] = {"gpus": gpus, "nccl": nccl, "host": host, "choice": choice}
    found = _environment(directory, plugin=plugin, alike=alike, **given)
    settings = found.plan.choices[found.subject.get("choice", "default")].settings
    variables = found.variables
    against = () if plugin or not variables else env_conflicts(settings, os.environ)
    if against:
        notice(f"the plan is disabled, as your environment has another {', '.join(against)}")
        variables = {}
    program = shutil.which(command[0])
    if program is None:
        where = f"command {command[0][:60]!r}"
        raise InputError(where, "is no program here", "name a program after --")
    flush_output(0)
    # Python ignores it, and what is ignored is inherited.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with refused(Path(program), "cannot be run", "name a program after --"):
        os.execve(program, command, {**variables, **os.environ})


def _environment(
    directory: Path,
    *,
    gpus: str | None,
    host: str | None,
    nccl: str | None,
    choice: Any,
    plugin: bool,
    alike: bool,
) -> _Found:
    """Return a job's variables; notices say why there are none."""
    check_plan_directory(directory)
    plan = load_plan(directory)
    named = {"--gpus": gpus, "--nccl": nccl, "--host": host, "--choice": choice}
    _check_options(plan, named, plugin=plugin)
    listed = check_files(directory).files
    loading = plugin_variables(directory, alike=alike) if plugin else {}
    if plan.is_cluster:
        name = planned_host(plan, host)
        subject: dict[str, Any] = {"host": name}
        disabled = ""
        if name is not None and host is None:
            disabled = why_other_host(plan, name, say=notice)
        file = "" if name is None else host_graph_file(name)
    else:
        chosen = tuple(sorted(gpus_argument(gpus, plan.machine) or plan.gpus))
        subject = {"gpus": chosen}
        disabled = f"it is for GPUs {','.join(map(str, plan.gpus))}"
        if set(chosen) <= set(plan.gpus):
            disabled = why_disabled(plan, directory, nccl, alike=alike, say=notice)
        if plugin and not disabled:
            disabled = why_no_plugin(nccl or planned_or_installed(plan))
        file = GRAPH_FILE if chosen == plan.gpus else subset_file(chosen)
    if disabled:
        notice(f"the plan is disabled, NCCL chooses its own rings: {disabled}")
        return _Found(plan, {**subject, "off": disabled}, {}, refused=True)
    taken = plan.recommended if choice is None else choice.value
    missing = f"nccl/{file}" not in listed and (taken == "graph" or not file) and not plugin
    if missing:
        notice(_lacking(host, subject))
    if missing and not plan.is_cluster:
        taken = "variables"
    graph = None
    if taken == "graph" and not missing:
        graph = PurePosixPath(directory.resolve() / "nccl" / file)
    variables = loading or job_environment(plan.choices[taken].settings, graph=graph)
    refused = missing and (plan.is_cluster or choice is not None)
    return _Found(plan, {**subject, "choice": taken}, variables, refused)


def _check_options(plan: Plan, given: Mapping[str, object], *, plugin: bool) -> None:
    """Refuse options that do not suit the plan, or are for jobs without the plugin."""
    if plugin:
        rest = {name: value for name, value in given.items() if name != "--nccl"}
        refuse(rest, ("", "is for jobs without the plugin", "leave it out"))
    if plan.is_cluster:
        refuse({name: given[name] for name in ("--gpus", "--nccl")}, options.OF_CLUSTER)
    else:
        refuse({"--host": given["--host"]}, ("", "is for the plan of a cluster", "leave it out"))


def _print(
    plan: Plan, variables: Mapping[str, str], subject: Mapping[str, object], *, json: bool
) -> None:
    """Print a job's variables; NCCL_GRAPH_FILE is unset unless they have it."""
    if json:
        print_json({**subject, "environment": variables, "simulated": plan.simulated})
        return
    if "off" not in subject:
        print(f"# tccl-py, rates {plan.provenance}")
        print(export_lines(variables), end="")
    if "NCCL_GRAPH_FILE" not in variables:
        print("unset NCCL_GRAPH_FILE")


def _lacking(host: str | None, subject: Mapping[str, Any]) -> str:
    """Return a notice on GPUs or a host without a graph file in the plan."""
    if "gpus" in subject:
        gpus = ",".join(map(str, subject["gpus"]))
        again = f"; to plan rings for them: `tccl plan -o DIR --gpus {gpus}`"
        more = again if len(subject["gpus"]) > 1 else ""
        return f"no graph file for GPUs {gpus}: variables alone{more}"
    asked = host if host is not None else socket.gethostname()
    node = os.environ.get(NODE_NAME, "") if host is None else ""
    also = f" (SLURM's {shown(node)})" if node not in ("", asked) else ""
    return f"no graph file for host {shown(asked)}{also}: NCCL chooses its own rings"


def planned_host(plan: Plan, host: str | None) -> str | None:
    """Return a cluster plan's name for a host (None: this); None if the plan lacks it."""
    names = names_of_this_host() if host is None else iter((host, host.partition(".")[0]))
    return plan.host_named(names)
