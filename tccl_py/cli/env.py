"""`tccl env`: the environment of a job that uses some GPUs of a plan, or a host of a cluster's."""

from __future__ import annotations

from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from tccl_py.cli.arguments import (
    ANSWER_IS_NO,
    JsonOption,
    gpus_argument,
    notice,
)
from tccl_py.cli.cluster_files import env_cluster
from tccl_py.cli.env_text import print_off, print_settings
from tccl_py.cli.refusals import OF_CLUSTER, OF_MACHINE, refuse
from tccl_py.cluster_plan.plan import is_cluster_plan
from tccl_py.errors import InputError
from tccl_py.health.fitness import (
    ALIKE_VARIABLE,
    why_not_alike,
    why_not_here,
    why_not_with,
)
from tccl_py.nccl.conf import job_environment
from tccl_py.plan.directory import (
    check_plan_directory,
    planned_model,
    write_subset_graph,
)
from tccl_py.plan.files import GRAPH_FILE, subset_file
from tccl_py.plan.plan import CHOICES, Plan, load_plan
from tccl_py.plan.staging import Manifest, check_files
from tccl_py.plan.subsets import subset_on_demand
from tccl_py.readers.installed_nccl import installed_nccl
from tccl_py.readers.live import fingerprint_of
from tccl_py.readers.nvml import driver_facts
from tccl_py.simulator.source import Simulator

Choice = Enum("Choice", {name: name for name in CHOICES})  # type: ignore[misc]


def env(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A plan's directory.")],
    *,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="The job's GPUs (NVML indices), as 0,2,5 or 0-3."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of a cluster's plan: the host to print for; the one that this runs on if not "
            "given.",
        ),
    ] = None,
    nccl: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="The job's version of NCCL, if it is not the installed one; a measured plan for "
            "another one is off.",
        ),
    ] = None,
    choice: Annotated[
        Choice | None,
        typer.Option(
            metavar="NAME",
            help="default, variables or graph; the plan's recommended one if not given.",
        ),
    ] = None,
    alike: Annotated[
        bool,
        typer.Option(
            "--alike",
            metavar=" ",
            envvar=ALIKE_VARIABLE,
            help="Take the plan of another host that is like this one: the GPUs' UUIDs may differ.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Print the environment for a job over these GPUs, as `export` lines to evaluate.

    They follow the plan's recommendation: nothing to set, variables alone, or a graph file with the
    settings that it needs. The exit code is 0 for each of these, and 1 only if the plan does not
    apply: to these GPUs, this machine or this NCCL.

    A graph file is named only if there is one for exactly these GPUs: any other would fail the job.
    If the plan is simulated and has none, rings are planned now and the file is kept in DIR. Where
    there is none, the variables of the plan's second choice are printed; with --choice graph the
    exit code is 1 then. A job that makes communicators over fewer of its GPUs must not use the
    graph file for all of them; `tccl_py.torch` names each its own.

    A measured plan is off where its rates no longer hold: with other GPUs, another major version of
    the driver or other NUMA nodes than it was measured with, or another NCCL than it is for, which
    is the one that torch here loads, the system's without torch, or what --nccl names. Then
    nothing but `unset NCCL_GRAPH_FILE` is printed, stderr says why, and the exit code is 1.
    With --alike (or TCCL_ALIKE=1) other GPUs of the same kinds at the same places will do, for
    hosts that are equal and share a plan.

    Of a cluster's plan it is the environment of one host, for a job over all hosts and GPUs of the
    plan whose ranks are in its order (DIR/nccl/order). The exit code is 1 for a host that is not in
    the plan, and for this one if it has GPUs of other kinds by now.

    Examples:

        eval "$(tccl env my-plan --gpus 0,2,5)"
        eval "$(tccl env my-cluster --host gpu07)"
    """
    check_plan_directory(directory)
    if is_cluster_plan(directory):
        refuse({"--gpus": gpus, "--nccl": nccl, "--choice": choice}, OF_CLUSTER)
        env_cluster(directory, host, json=json)
        return
    refuse({"--host": host}, OF_MACHINE)
    plan = load_plan(directory)
    manifest = check_files(directory)
    chosen = tuple(sorted(gpus_argument(gpus, plan.machine) or plan.gpus))
    off = _why_off(plan, directory, nccl, alike=alike)
    if not set(chosen) <= set(plan.gpus):
        off = f"it is for GPUs {','.join(map(str, plan.gpus))}"
    if off:
        print_off(plan, {"gpus": chosen}, off, json=json)
        raise typer.Exit(ANSWER_IS_NO)
    taken = plan.recommended if choice is None else choice.value
    graph = graph_file(plan, directory, chosen, manifest) if taken == "graph" else None
    missing = taken == "graph" and graph is None
    if missing:
        notice(f"no graph file for GPUs {','.join(map(str, chosen))}: variables alone")
        if not plan.simulated and len(chosen) > 1:
            listed = ",".join(map(str, chosen))
            notice(f"to measure rings for them: `tccl plan -o DIR --gpus {listed}`")
        taken = "variables"
    variables = job_environment(plan.choices[taken].settings, graph=graph)
    print_settings(plan, {"gpus": chosen, "choice": taken}, variables, json=json)
    if missing and choice is not None:
        raise typer.Exit(ANSWER_IS_NO)


def _why_off(plan: Plan, directory: Path, nccl: str | None, *, alike: bool) -> str:
    """Why a plan is not for this host or version of NCCL, in a clause; "" if it is, or may be."""
    if plan.simulated:
        return "" if nccl is None else why_not_with(plan.settings, nccl)
    other = _why_not_with(plan, nccl)
    try:
        facts = driver_facts()
    except InputError as error:
        notice(f"whether this is the plan's machine was not checked: {error.what}")
        return other
    here = fingerprint_of(facts)
    elsewhere = (
        why_not_alike(plan, directory, here, facts.gpus)
        if alike
        else why_not_here(plan, directory, here)
    )
    return "; ".join(why for why in (elsewhere, other) if why)


def _why_not_with(plan: Plan, nccl: str | None) -> str:
    """Why a plan is not for the job's NCCL: the one named, or the one that is installed."""
    if nccl is not None:
        return why_not_with(plan.settings, nccl)
    found = installed_nccl()
    why = "" if found is None else why_not_with(plan.settings, found.version)
    if found is not None and why:
        notice(f"NCCL {found.version} is here, {found.source}; if the job has another, add --nccl")
    return why


def graph_file(
    plan: Plan, directory: Path, gpus: tuple[int, ...], manifest: Manifest
) -> PurePosixPath | None:
    """The graph file for a communicator over exactly these GPUs, or None.

    A file that is not in the manifest is none of the plan's, whatever its name is.

    Raises:
        InputError: the model is damaged.
    """
    name = f"nccl/{GRAPH_FILE if gpus == plan.gpus else subset_file(gpus)}"
    if name in manifest.digests or _plan_now(plan, directory, gpus, manifest):
        return PurePosixPath(directory.resolve() / name)
    return None


def _plan_now(plan: Plan, directory: Path, gpus: tuple[int, ...], manifest: Manifest) -> bool:
    """Write a graph file for some GPUs of a simulated plan; whether there is one now."""
    if len(gpus) < 2 or not set(gpus) < set(plan.gpus):
        return False
    model = planned_model(plan, directory)
    if model is None:
        return False
    subset = subset_on_demand(plan, Simulator(model), gpus)
    if subset is None:
        return False
    try:
        write_subset_graph(plan, subset, directory, manifest)
    except InputError as error:
        notice(str(error))
        return False
    return True
