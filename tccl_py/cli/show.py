"""`tccl show`: rings, bottleneck and bound of a saved plan, of a machine or of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tccl_py.cli.arguments import JsonOption, print_json, results
from tccl_py.cli.cluster_text import cluster_json, flows_table, print_cluster
from tccl_py.cli.plan_text import plan_json, print_plan
from tccl_py.cluster_plan.plan import is_cluster_plan, load_cluster_plan
from tccl_py.plan.plan import Plan, load_plan


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
        _show_cluster(directory, hops=hops, json=json)
        return
    plan = load_plan(directory)
    if json:
        print_json(plan_json(plan))
        return
    console = results()
    print_plan(plan, console)
    if hops:
        console.print(_hops(plan))


def _show_cluster(directory: Path, *, hops: bool, json: bool) -> None:
    plan = load_cluster_plan(directory)
    if json:
        print_json(cluster_json(plan))
        return
    console = results()
    print_cluster(plan, console)
    if hops:
        console.print(flows_table(plan))


def _hops(plan: Plan) -> Table:
    table = Table("ring", "from", "to", "GB/s", "flow")
    for number, ring in enumerate(plan.rings):
        for hop in ring.hops:
            mark = " (slowest)" if hop == ring.bottleneck else ""
            rate = f"{hop.gbps:.2f}{mark}"
            table.add_row(str(number), f"G{hop.source}", f"G{hop.target}", rate, hop.flow)
    return table
