"""`tccl env`: the environment of a job over some GPUs of a plan, or of a host of a cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from tccl_py.cli.options import (
    OF_CLUSTER,
    DirectoryArgument,
    JsonOption,
    gpus_argument,
    opt,
    refuse,
)
from tccl_py.cli.streams import ANSWER_IS_NO, notice, print_json
from tccl_py.errors import InputError
from tccl_py.health.fitness import (
    ALIKE_VARIABLE,
    why_not_alike,
    why_not_here,
    why_not_of_class,
    why_not_with,
)
from tccl_py.model.cluster import shown
from tccl_py.nccl.variables import export_lines, job_environment
from tccl_py.nccl_library import installed_nccl
from tccl_py.plan.directory import check_plan_directory
from tccl_py.plan.files import GRAPH_FILE, host_graph_file, subset_file
from tccl_py.plan.load import is_cluster_plan, load_plan
from tccl_py.plan.plan import CHOICES, Plan
from tccl_py.plan.staging import Manifest, check_files
from tccl_py.readers.hosts import NODE_NAME, names_of_this_host
from tccl_py.readers.live import fingerprint_of
from tccl_py.readers.nvml import driver_facts

Choice = Enum("Choice", {name: name for name in CHOICES})  # type: ignore[misc]


def env(
    directory: DirectoryArgument,
    *,
    gpus: Annotated[
        str | None, opt("LIST", "The job's GPUs (NVML indices), as 0,2,5 or 0-3.")
    ] = None,
    host: Annotated[
        str | None, opt("NAME", "Of a cluster's plan: the host to print for; this one by default.")
    ] = None,
    nccl: Annotated[
        str | None, opt("VERSION", "The job's version of NCCL; the installed one if not given.")
    ] = None,
    choice: Annotated[
        Choice | None,
        opt("NAME", "default, variables or graph; the plan's recommended one if not given."),
    ] = None,
    alike: Annotated[
        bool,
        typer.Option(
            "--alike",
            metavar=" ",
            envvar=ALIKE_VARIABLE,
            help="Take the plan of another host that is like this one: GPUs' UUIDs may differ.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Print the environment for a job over these GPUs, as `export` lines to evaluate.

    The lines follow the plan's recommendation: nothing to set, variables alone, or a graph file
    with the settings needed beside. The exit code is 0 for each of these, and 1 only if the plan
    does not apply: to these GPUs, this machine or this NCCL.

    A graph file is named only for exactly these GPUs: any other would fail the job. If a simulated
    plan has none, rings are planned now and the file is kept in DIR. Otherwise the variables of the
    second choice are printed, with exit code 1 after --choice graph. `tccl_py.torch` gives
    communicators over fewer of the GPUs a graph file each.

    If the GPUs, the driver's major version, the NUMA layout or NCCL's version differ from the
    plan's, a measured plan is disabled: only `unset NCCL_GRAPH_FILE` is printed, stderr says why,
    and the exit code is 1. With --alike (or TCCL_ALIKE=1) GPUs of the same kinds at the same places
    will do.

    The environment of a cluster's plan is that of a single host, for a job over all hosts and GPUs
    of the plan with ranks in its order (DIR/nccl/order). The exit code is 1 for a host outside of
    the plan, and for this host after a change of GPUs.

    Examples:

        eval "$(tccl env my-plan --gpus 0,2,5)"
        eval "$(tccl env my-cluster --host gpu07)"
    """
    check_plan_directory(directory)
    if is_cluster_plan(directory):
        refuse({"--gpus": gpus, "--nccl": nccl}, OF_CLUSTER)
        _env_of_host(directory, host, choice, json=json)
        return
    refuse({"--host": host}, ("", "is for the plan of a cluster", "leave it out"))
    plan = load_plan(directory)
    manifest = check_files(directory)
    chosen = tuple(sorted(gpus_argument(gpus, plan.machine) or plan.gpus))
    listed = ",".join(map(str, chosen))
    if set(chosen) <= set(plan.gpus):
        disabled = _why_disabled(plan, directory, nccl, alike=alike)
    else:
        disabled = f"it is for GPUs {','.join(map(str, plan.gpus))}"
    _leave_disabled(plan, {"gpus": chosen}, disabled, json=json)
    taken = plan.recommended if choice is None else choice.value
    graph = _graph_file(plan, directory, chosen, manifest) if taken == "graph" else None
    missing = taken == "graph" and graph is None
    if missing:
        notice(f"no graph file for GPUs {listed}: variables alone")
        if not plan.simulated and len(chosen) > 1:
            notice(f"to measure rings for them: `tccl plan -o DIR --gpus {listed}`")
        taken = "variables"
    variables = job_environment(plan.choices[taken].settings, graph=graph)
    _print(plan, {"gpus": chosen, "choice": taken}, variables, json=json)
    if missing and choice is not None:
        raise typer.Exit(ANSWER_IS_NO)


def _print(
    plan: Plan, subject: Mapping[str, object], variables: Mapping[str, str], *, json: bool
) -> None:
    """Print a job's variables; NCCL_GRAPH_FILE is unset unless they have it."""
    if json:
        print_json({**subject, "environment": variables, "simulated": plan.simulated})
        return
    print(f"# tccl-py, rates {plan.provenance}")
    print(export_lines(variables), end="")
    if "NCCL_GRAPH_FILE" not in variables:
        print("unset NCCL_GRAPH_FILE")


def _leave_disabled(plan: Plan, subject: Mapping[str, object], why: str, *, json: bool) -> None:
    """Say that a plan is disabled, and end; nothing if `why` is ""."""
    if not why:
        return
    if json:
        print_json({**subject, "environment": {}, "simulated": plan.simulated, "off": why})
    else:
        print("unset NCCL_GRAPH_FILE")
    notice(f"the plan is disabled, NCCL chooses its own rings: {why}")
    raise typer.Exit(ANSWER_IS_NO)


def _why_disabled(plan: Plan, directory: Path, nccl: str | None, *, alike: bool) -> str:
    """Return why a plan is not for this host or NCCL, as clauses; "" if nothing speaks against."""
    if plan.simulated:
        return "" if nccl is None else why_not_with(plan.settings, nccl)
    installed = installed_nccl() if nccl is None else None
    version = nccl if installed is None else installed.version
    other = "" if version is None else why_not_with(plan.settings, version)
    if other and installed is not None:
        found = f"NCCL {installed.version} is here, {installed.source}"
        notice(f"{found}; if the job has another, add --nccl")
    elsewhere = why_elsewhere(plan, directory, alike=alike)
    return "; ".join(why for why in (elsewhere, other) if why)


def why_elsewhere(plan: Plan, directory: Path, *, alike: bool) -> str:
    """Return why this is not the machine of a measured plan, as clauses; "" also without a driver.

    With `alike` equal GPUs with other UUIDs will do.
    """
    try:
        facts = driver_facts()
    except InputError as error:
        notice(f"whether this is the plan's machine was not checked: {error.what}")
        return ""
    here = fingerprint_of(facts)
    if alike:
        return why_not_alike(plan, directory, here, facts.gpus)
    return why_not_here(plan, directory, here)


def _graph_file(
    plan: Plan, directory: Path, gpus: tuple[int, ...], manifest: Manifest
) -> PurePosixPath | None:
    """Return the graph file of the manifest for a communicator over exactly these GPUs, or None."""
    name = f"nccl/{GRAPH_FILE if gpus == plan.gpus else subset_file(gpus)}"
    known = name in manifest.digests
    if known or (len(gpus) > 1 and plan.simulated and _plan_now(plan, directory, gpus, manifest)):
        return PurePosixPath(directory.resolve() / name)
    return None


def _plan_now(plan: Plan, directory: Path, gpus: tuple[int, ...], manifest: Manifest) -> bool:
    """Write a graph file for some GPUs of a simulated plan; return whether there is one now."""
    # Planning loads numerical libraries.
    from tccl_py.plan.directory import write_subset_graph  # noqa: PLC0415
    from tccl_py.plan.models import planned_model  # noqa: PLC0415
    from tccl_py.plan.subsets import subset_on_demand  # noqa: PLC0415
    from tccl_py.simulator.source import Simulator  # noqa: PLC0415

    model = planned_model(plan, directory)
    subset = None if model is None else subset_on_demand(plan, Simulator(model), gpus)
    if subset is None:
        return False
    try:
        write_subset_graph(plan, subset, directory, manifest)
    except InputError as error:
        notice(str(error))
        return False
    return True


def _env_of_host(directory: Path, host: str | None, choice: Choice | None, *, json: bool) -> None:
    """Print the settings of a host of a cluster's plan; None is this host."""
    plan = load_plan(directory)
    check_files(directory)
    name = planned_host(plan, host)
    if name is not None and host is None and not plan.simulated:
        try:
            disabled = why_not_of_class(plan, name, driver_facts().gpus)
        except InputError as error:
            disabled = ""
            notice(f"whether this host has the plan's GPUs was not checked: {error.what}")
        _leave_disabled(plan, {"host": name}, disabled, json=json)
    taken = plan.recommended if choice is None else choice.value
    graph = None
    if name is not None and taken == "graph":
        graph = PurePosixPath(directory.resolve() / "nccl" / host_graph_file(name))
    variables = job_environment(plan.choices[taken].settings, graph=graph)
    _print(plan, {"host": name, "choice": taken}, variables, json=json)
    if name is None:
        asked = host if host is not None else socket.gethostname()
        node = os.environ.get(NODE_NAME, "") if host is None else ""
        also = f" (SLURM's {shown(node)})" if node not in ("", asked) else ""
        notice(f"no graph file for host {shown(asked)}{also}: NCCL chooses its own rings")
        raise typer.Exit(ANSWER_IS_NO)


def planned_host(plan: Plan, host: str | None) -> str | None:
    """Return a cluster plan's name for a host (None: this); None if the plan lacks it."""
    names = names_of_this_host() if host is None else iter((host, host.partition(".")[0]))
    return next((name for name in names if name in plan.cluster.host_classes), None)
