"""A plan as text for people, and as the JSON whose keys are kept stable."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tccl_py.nccl.pinned_env import pinned_env_text
from tccl_py.nccl.settings import Settings, environment
from tccl_py.plan.plan import ChoiceName, Plan, PlanChoice, proof_text
from tccl_py.report.words import CHOICE_WORDS


def plan_json(plan: Plan) -> dict[str, Any]:
    """What `plan --json` and `show --json` print; a ring is a list of GPU indices, per channel."""
    return {
        "machine": plan.machine.name,
        "gpus": plan.gpus,
        "rings": plan.channel_rings,
        "rate_gbps": plan.rate_gbps,
        "bound_gbps": plan.bound_gbps,
        "limit_gbps": plan.limit_gbps,
        "proven": plan.proven,
        "sets_measured": plan.sets_measured,
        "simulated": plan.simulated,
        "assumed": plan.assumed,
        "settings": msgspec.to_builtins(plan.settings),
        "environment": environment(plan.settings),
        "kept": plan.pinned_env,
        "recommended": plan.recommended,
        "choices": {name: choice_json(one) for name, one in plan.choices.items()},
        "stock": choice_json(plan.stock),
        "cancelled": plan.cancelled,
        "notices": plan.notices,
    }


def choice_json(choice: PlanChoice) -> dict[str, Any]:
    """Return one choice as JSON has it."""
    return {
        "rate_gbps": choice.rate_gbps,
        "settings": msgspec.to_builtins(choice.settings),
        "environment": environment(choice.settings),
        "rings": choice.rings,
        "achieved_gbps": choice.achieved_gbps,
        "note": choice.note,
    }


def print_plan(plan: Plan, console: Console) -> None:
    """Print rings, rates, bound, settings and what the plan is compared with."""
    console.print(f"Plan for {plan.machine.name}, GPUs {_list(plan.gpus)}: {plan.provenance}")
    console.print(plan.advice)
    console.print(_rings_table(plan))
    console.print(_summary(plan))
    for notice in plan.notices:
        console.print(f"note: {notice}")


def hops_table(plan: Plan) -> Table:
    """Every hop of every ring with its rate beside all others."""
    table = Table("ring", "from", "to", "GB/s", "flow")
    for number, ring in enumerate(plan.rings):
        for hop in ring.hops:
            rate = marked_rate(hop.gbps, slowest=hop == ring.bottleneck)
            table.add_row(str(number), f"G{hop.source}", f"G{hop.target}", rate, str(hop.flow))
    return table


def marked_rate(gbps: float, *, slowest: bool) -> str:
    """A rate in a table of flows.

    >>> marked_rate(12.345, slowest=True)
    '12.35 (slowest)'
    """
    return f"{gbps:.2f}{' (slowest)' if slowest else ''}"


def choice_text(plan: Plan, name: ChoiceName, choice: PlanChoice, mark: str) -> str:
    """Return a line on one way to run NCCL: bandwidth, gain, and what to set."""
    rate = "not rated" if choice.rate_gbps is None else f"{choice.rate_gbps:.2f} GB/s ({mark})"
    gain = plan.gain(name)
    times = f", {gain:.2f}x default" if gain is not None and name != "default" else ""
    variables = settings_words(choice.settings)
    how = {
        "default": "NCCL as it runs here",
        "variables": f"with {variables}" if variables else "no variable helps",
        "graph": f"with a graph file of {_channels(choice.settings.channels)}"
        + (f" and {variables}" if variables else ""),
    }[name]
    note = f"; {choice.note}" if choice.note else ""
    here = " <- recommended" if name == plan.recommended else ""
    return f"{rate}{times}: {how}{note}{here}"


def _channels(count: int) -> str:
    return f"{count} channel{'s' * (count != 1)}"


def _list(gpus: tuple[int, ...]) -> str:
    return ",".join(str(gpu) for gpu in gpus)


def _rings_table(plan: Plan) -> Table:
    table = Table("ring", "GPU order", "GB/s", "slowest hop")
    for number, ring in enumerate(plan.rings):
        order = " ".join(str(gpu) for gpu in ring.gpus)
        table.add_row(str(number), order, f"{ring.rate:.2f}", str(ring.bottleneck.flow))
    return table


def _summary(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2))
    mark = f"{plan.provenance}, when tuned" if plan.tuned else plan.provenance
    for name, choice in plan.choices.items():
        table.add_row(CHOICE_WORDS[name], choice_text(plan, name, choice, mark))
    table.add_row("bound", bound_text(plan, len(plan.rings)))
    if plan.limit_text:
        limit = f"{plan.limit_gbps:.2f} GB/s ({plan.provenance})"
        table.add_row("limit", f"{limit}: {plan.limit_text}")
    unchecked = "" if plan.settings_verified else " (this version was not checked)"
    table.add_row("NCCL", f"{plan.settings.version}{unchecked}")
    if plan.pinned_env:
        table.add_row("kept", pinned_env_text(plan.pinned_env))
    table.add_row("effort", effort_text(plan))
    return table


def bound_text(plan: Plan, rings: int) -> str:
    """Say what no set of as many rings exceeds, and whether the plan's is as good."""
    if plan.bound_gbps is None:
        return "not known"
    return f"{plan.bound_gbps:.2f} GB/s, {proof_text(rings, proven=plan.proven)}"


def settings_words(settings: Settings) -> str:
    """Return the variables that make these settings, "" for none."""
    return " ".join(f"{k}={v}" for k, v in environment(settings).items())


def settings_text(settings: Settings, *, checked: bool) -> str:
    """A version of NCCL and the variables that it is to have."""
    variables = settings_words(settings)
    note = "" if checked else " (this version was not checked)"
    return f"NCCL {settings.version}{note}: {variables or 'defaults'}"


def effort_text(plan: Plan) -> str:
    """How many sets a plan has cost."""
    done = "simulated" if plan.simulated else "measured"
    kept = f"{plan.sets_remembered} from memory or journal, {plan.sets_by_symmetry} by symmetry"
    return f"{plan.sets_measured} sets {done}, {kept}"
