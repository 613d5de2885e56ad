"""`tccl show`: rings, bottleneck and bound of a saved plan, of a machine or of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from tccl_py.cli.cluster_text import cluster_json, flows_table, print_cluster
from tccl_py.cli.options import JsonOption
from tccl_py.cli.output import results
from tccl_py.cli.plan_text import hops_table, plan_json, print_plan
from tccl_py.cli.streams import print_json
from tccl_py.plan.load import is_cluster_plan, load_plan
from tccl_py.plan.plan import Plan

_Plan = TypeVar("_Plan", Plan, Plan)


def show(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A plan's directory, or its plan.json.")
    ],
    *,
    hops: Annotated[bool, typer.Option("--hops", help="List every hop with its rate.")] = False,
    json: JsonOption = False,
) -> None:
    """Show a plan: rings, rates, the slowest hop, the bound, settings, and stock NCCL beside it.

    Of a cluster's plan this is the order of its hosts and what rings do on the hosts of each class:
    the NICs by which they come and go, and the GPUs between. With --json its rings are lists of
    global ranks, one list for each channel.

    Example:

        tccl show my-plan --hops
    """
    if is_cluster_plan(directory):
        cluster = load_plan(directory)
        _show(cluster, cluster_json, print_cluster, flows_table if hops else None, json=json)
    else:
        plan = load_plan(directory)
        _show(plan, plan_json, print_plan, hops_table if hops else None, json=json)


def _show(
    plan: _Plan,
    as_json: Callable[[_Plan], object],
    as_text: Callable[[_Plan, Console], None],
    table: Callable[[_Plan], Table] | None,
    *,
    json: bool,
) -> None:
    if json:
        print_json(as_json(plan))
        return
    console = results()
    as_text(plan, console)
    if table is not None:
        console.print(table(plan))
