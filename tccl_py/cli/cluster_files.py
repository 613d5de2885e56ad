"""A cluster's plan in `tccl export` and `tccl env`: files elsewhere, and one host's settings."""

from __future__ import annotations

import os
import socket
from pathlib import Path, PurePosixPath

import typer

from tccl_py.cli.arguments import ANSWER_IS_NO, notice
from tccl_py.cli.env_text import print_off, print_settings
from tccl_py.cluster_plan.directory import write_cluster_files
from tccl_py.cluster_plan.plan import ClusterPlan, load_cluster_plan
from tccl_py.cluster_plan.versions import for_version
from tccl_py.errors import InputError
from tccl_py.health.fitness import why_not_of_class
from tccl_py.model.cluster import shown
from tccl_py.nccl.conf import job_environment
from tccl_py.plan.files import host_graph_file
from tccl_py.plan.staging import check_files
from tccl_py.readers.hosts import NODE_NAME, names_of_this_host
from tccl_py.readers.nvml import driver_facts


def export_cluster(directory: Path, output: Path | None, version: str | None) -> None:
    """Write what NCCL and launchers read of a cluster's plan to the new directory `output`.

    Raises:
        InputError: no plan or place, or a version of NCCL that would do something else.
    """
    plan = load_cluster_plan(directory)
    if version is not None:
        plan = for_version(plan, version)
    if output is None:
        right = "a cluster's plan has a file for each host: name a new directory"
        raise InputError("--output", "is missing", right)
    notice(f"wrote {write_cluster_files(plan, output)} files to {output}")


def env_cluster(directory: Path, host: str | None, *, json: bool) -> None:
    """Print one host's settings as `tccl env` does; None is the host that this runs on.

    Raises:
        InputError: no plan, or a file of it is gone or was changed.
        typer.Exit: the plan has no such host, or this one has other GPUs now.
    """
    plan = load_cluster_plan(directory)
    check_files(directory)
    name = planned_host(plan, host)
    off = "" if name is None or host is not None else _why_off(plan, name)
    if off:
        print_off(plan, {"host": name}, off, json=json)
        raise typer.Exit(ANSWER_IS_NO)
    place = directory.resolve() / "nccl"
    graph = None if name is None else PurePosixPath(place / host_graph_file(name))
    variables = job_environment(plan.settings, graph=graph)
    print_settings(plan, {"host": name}, variables, json=json)
    if name is None:
        asked = host if host is not None else socket.gethostname()
        node = os.environ.get(NODE_NAME, "") if host is None else ""
        also = f" (SLURM's {shown(node)})" if node not in ("", asked) else ""
        notice(f"no graph file for host {shown(asked)}{also}: NCCL chooses its own rings")
        raise typer.Exit(ANSWER_IS_NO)


def _why_off(plan: ClusterPlan, name: str) -> str:
    """Why a plan is not for this host, in a clause; "" if it is, or may be."""
    if plan.simulated:
        return ""
    try:
        return why_not_of_class(plan, name, driver_facts().gpus)
    except InputError as error:
        notice(f"whether this host has the plan's GPUs was not checked: {error.what}")
        return ""


def planned_host(plan: ClusterPlan, host: str | None) -> str | None:
    """The plan's name for a host, with or without its domain; None if it has none.

    Without `host` it is that of the host that this runs on.
    """
    names = names_of_this_host() if host is None else iter((host, host.partition(".")[0]))
    return next((name for name in names if name in plan.cluster.host_classes), None)
