"""`tccl env`: the settings for a job that uses some GPUs of a plan."""

from __future__ import annotations

import shlex
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from tccl_py.cli.arguments import (
    ANSWER_IS_NO,
    JsonOption,
    gpus_argument,
    notice,
    print_json,
)
from tccl_py.emitters.nccl_conf import job_environment
from tccl_py.emitters.plan_files import GRAPH_FILE, subset_file
from tccl_py.errors import InputError
from tccl_py.plan.plan import Plan, load_plan


def env(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A plan's directory.")],
    *,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="The job's GPUs (NVML indices), as 0,2,5 or 0-3."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print the environment for a job over these GPUs, as `export` lines to evaluate.

    A graph file is named only if the plan has one for exactly these GPUs: any other would fail
    the job. Without one the exit code is 1 and NCCL is left to choose its own rings, under the
    plan's settings. A job that makes communicators over fewer of its GPUs must not use the graph
    file for all of them.

    Example:

        eval "$(tccl env my-plan --gpus 0,2,5)"
    """
    if not directory.is_dir():
        raise InputError(str(directory), "is no directory", "name a directory of `tccl plan`")
    plan = load_plan(directory)
    chosen = tuple(sorted(gpus_argument(gpus, plan.machine) or plan.gpus))
    graph = graph_file(plan, directory, chosen)
    variables = job_environment(plan.settings, graph=graph)
    if json:
        print_json({"gpus": chosen, "environment": variables, "simulated": plan.simulated})
    else:
        print(f"# tccl-py, rates {plan.provenance}")
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
        if graph is None:
            print("unset NCCL_GRAPH_FILE")
    if graph is None:
        notice(f"no graph file for GPUs {','.join(map(str, chosen))}: NCCL chooses its own rings")
        raise typer.Exit(ANSWER_IS_NO)


def graph_file(plan: Plan, directory: Path, gpus: tuple[int, ...]) -> PurePosixPath | None:
    """The graph file for a communicator over exactly these GPUs, or None.

    Raises:
        InputError: the plan has rings for them, but the file is gone.
    """
    if plan.subset(gpus) is None:
        return None
    name = GRAPH_FILE if gpus == plan.gpus else subset_file(gpus)
    path = directory.resolve() / "nccl" / name
    if not path.is_file():
        raise InputError(str(path), "is missing", "plan again, or `tccl export` it")
    return PurePosixPath(path)
