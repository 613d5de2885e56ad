"""What `tccl env` prints, of whichever plan: settings to evaluate, or that the plan is off."""

from __future__ import annotations

from collections.abc import Mapping

from tccl_py.cli.arguments import notice, print_json
from tccl_py.cluster_plan.plan import ClusterPlan
from tccl_py.nccl.conf import export_lines
from tccl_py.plan.plan import Plan

Subject = Mapping[str, object]
"""What the settings are for, as JSON has it: GPUs or a host."""


def print_settings(
    plan: Plan | ClusterPlan, subject: Subject, variables: Mapping[str, str], *, json: bool
) -> None:
    """Print the variables of a job; a graph file that they do not name is taken back."""
    if json:
        print_json({**subject, "environment": variables, "simulated": plan.simulated})
        return
    print(f"# tccl-py, rates {plan.provenance}")
    print(export_lines(variables), end="")
    if "NCCL_GRAPH_FILE" not in variables:
        print("unset NCCL_GRAPH_FILE")


def print_off(plan: Plan | ClusterPlan, subject: Subject, why: str, *, json: bool) -> None:
    """Print that a job has nothing from the plan, and say why."""
    if json:
        print_json({**subject, "environment": {}, "simulated": plan.simulated, "off": why})
    else:
        print("unset NCCL_GRAPH_FILE")
    notice(f"the plan is off, NCCL chooses its own rings: {why}")
