"""An explanation as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tccl_py.cli.arguments import provenance
from tccl_py.explain.findings import Explanation, Finding, RingExplanation
from tccl_py.plan.plan import Plan

_WHOSE = {"plan": "The plan", "stock": "Stock NCCL"}


def print_explanation(found: Explanation, plan: Plan, console: Console) -> None:
    """Print what is slow in each set of rings, the worst first, and what was avoided."""
    mark = provenance(simulated=found.simulated, assumed=found.assumed)
    gpus = ",".join(map(str, plan.gpus))
    console.print(f"What hurts on {found.machine}, GPUs {gpus}: {mark}")
    for ring in found.rings:
        _print_ring(ring, mark, console)
    if found.pitfalls:
        console.print()
        console.print("Worst of what the search met in other rings, for other reasons than above:")
        console.print(_listed(found.pitfalls))
    word = "simulated" if found.simulated else "measured"
    console.print()
    console.print(f"effort  {found.sets_measured} sets {word} for this beyond the plan's journal")
    for text in found.notices:
        console.print(f"note: {text}")


def _print_ring(ring: RingExplanation, mark: str, console: Console) -> None:
    many = f", {ring.rings} rings of {ring.rate_gbps / ring.rings:.2f}" if ring.rings > 1 else ""
    whose = _WHOSE[ring.name]
    console.print()
    console.print(f"{whose}: {ring.rate_gbps:.2f} GB/s ({mark}){many}")
    if ring.sentence:
        console.print(ring.sentence)
    if ring.findings:
        console.print(_listed(ring.findings))
    if ring.unexplained:
        console.print(f"Left open: {ring.unexplained}")


def _listed(findings: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    for number, finding in enumerate(findings, start=1):
        table.add_row(f"{number:>3}", finding.sentence)
    return table
