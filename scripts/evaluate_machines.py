"""Table of docs/evaluation.md: bundled machines evaluated by simulation.

usage: scripts/evaluate-machines
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tccl_py import Simulator, make_plan
from tccl_py.experiments.collectives import PROGRAMS
from tccl_py.experiments.evaluation import EVALUATED, Evaluation, Summary
from tccl_py.experiments.jobs import Launcher
from tccl_py.experiments.plans import evaluate_plan
from tccl_py.plan.directory import write_plan
from tccl_py.plan.text import CHOICE_WORDS
from tccl_py.simulator.descriptions import load_bundled
from tests.planned import SEVERAL_GPUS

PAGE = Path("docs/evaluation.md")
BEGIN = "<!-- table by scripts/evaluate-machines -->"


def main() -> None:
    """Rewrite the tables below the mark in the page."""
    evaluations = [evaluated(name) for name in SEVERAL_GPUS]
    head, mark, _ = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{mark}\n\n{tables(evaluations)}")


def evaluated(name: str) -> Evaluation:
    """Return the evaluation of a machine's plan, by its model."""
    model = load_bundled(name)
    plan = make_plan(model.machine, model.knowledge, Simulator(model))
    with tempfile.TemporaryDirectory() as folder:
        class_name = plan.cluster.classes[0].name
        write_plan(plan, Path(folder), models={class_name: model})
        return evaluate_plan(Path(folder), EVALUATED, Launcher(), by_model=True)


def tables(evaluations: list[Evaluation]) -> str:
    """Return the table of machines, and the table of collectives."""
    lines = [
        "| machine | choice | comparisons | mean | minimum | maximum |",
        "|---|---|---|---|---|---|",
    ]
    lines += map(machine_row, evaluations)
    names = tuple(PROGRAMS.values())
    lines += ["", f"| machine | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for evaluation in evaluations:
        cells = [_cell(evaluation.summary(evaluation.recommended, name)) for name in names]
        lines.append(f"| {evaluation.machine} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def machine_row(evaluation: Evaluation) -> str:
    """Return a machine's row: the recommended choice over default NCCL."""
    summary = evaluation.summary(evaluation.recommended)
    if summary is None:
        return f"| {evaluation.machine} | {CHOICE_WORDS[evaluation.recommended]} | 0 | | | |"
    numbers = f"{summary.cells} | {summary.mean:.3f} | {summary.least:.3f} | {summary.most:.3f}"
    return f"| {evaluation.machine} | {CHOICE_WORDS[evaluation.recommended]} | {numbers} |"


def _cell(summary: Summary | None) -> str:
    if summary is None:
        return ""
    return f"{summary.mean:.2f} ({summary.least:.2f} to {summary.most:.2f})"


if __name__ == "__main__":
    main()
