"""Table of docs/evaluation.md: bundled machines evaluated by simulation.

usage: scripts/evaluate-machines
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tccl_py import Simulator, bundled_names, make_plan
from tccl_py.experiments.collectives import COLLECTIVES
from tccl_py.experiments.evaluation import EVALUATED, Evaluation, Summary
from tccl_py.experiments.jobs import Launcher
from tccl_py.experiments.plans import evaluate_plan
from tccl_py.plan.directory import write_plan
from tccl_py.plan.text import CHOICE_WORDS
from tccl_py.simulator.descriptions import load_bundled

PAGE = Path("docs/evaluation.md")
BEGIN = "<!-- table by scripts/evaluate-machines -->"


def main() -> None:
    """Rewrite the tables below the mark in the page."""
    found = [evaluated(name) for name in bundled_names()]
    head, mark, _ = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{mark}\n\n{tables(found)}")


def evaluated(name: str) -> Evaluation:
    """Return the evaluation of a machine's plan, by its model."""
    model = load_bundled(name)
    plan = make_plan(model.machine, model.knowledge, Simulator(model))
    with tempfile.TemporaryDirectory() as folder:
        one = plan.cluster.classes[0].name
        write_plan(plan, Path(folder), models={one: model})
        return evaluate_plan(Path(folder), EVALUATED, Launcher(), by_model=True)


def tables(evaluations: list[Evaluation]) -> str:
    """Return the table of machines, and the table of collectives."""
    lines = [
        "| machine | choice | comparisons | mean | minimum | maximum |",
        "|---|---|---|---|---|---|",
    ]
    lines += map(machine_row, evaluations)
    lines += ["", f"| machine | {' | '.join(COLLECTIVES)} |", "|---" * (1 + len(COLLECTIVES)) + "|"]
    for found in evaluations:
        cells = [_cell(found.summary(found.recommended, one)) for one in COLLECTIVES]
        lines.append(f"| {found.machine} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def machine_row(found: Evaluation) -> str:
    """Return a machine's row: the recommended choice over default NCCL."""
    one = found.summary(found.recommended)
    if one is None:
        return f"| {found.machine} | {CHOICE_WORDS[found.recommended]} | 0 | | | |"
    numbers = f"{one.cells} | {one.mean:.3f} | {one.least:.3f} | {one.most:.3f}"
    return f"| {found.machine} | {CHOICE_WORDS[found.recommended]} | {numbers} |"


def _cell(one: Summary | None) -> str:
    return "" if one is None else f"{one.mean:.2f} ({one.least:.2f} to {one.most:.2f})"


if __name__ == "__main__":
    main()
