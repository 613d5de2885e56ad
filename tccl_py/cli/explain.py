"""`tccl explain`: which transfers of a plan slow each other down."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from tccl_py.cli import options
from tccl_py.cli.measure import job_of_plan
from tccl_py.cli.options import in_range, opt
from tccl_py.cli.output import ProgressLine, grid, results
from tccl_py.cli.process import notice, notice_each, print_json
from tccl_py.errors import counted, interrupts_put_off
from tccl_py.explanation.explain import MOST_FINDINGS, MOST_SETS
from tccl_py.explanation.explain import explain as explanation_of
from tccl_py.explanation.findings import Explanation
from tccl_py.model.measurement import JOURNAL_FILE, BandwidthSource
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import plan_in
from tccl_py.plan.text import planned_gpus
from tccl_py.planning.plan_sources import (
    class_sources,
    header_of,
    hosts_again,
    known_model,
    source_again,
)
from tccl_py.sources.bench import Bench
from tccl_py.sources.opening import open_source

_DRY_SETS = 20


def explain(
    directory: Path = options.DIRECTORY,
    *,
    max_sets: int | None = opt(
        "N",
        "Sets to measure at most that the journal does not hold; "
        f"{MOST_SETS} if not given, {_DRY_SETS} in a dry run.",
    ),
    max_causes: int = opt("N", "Different slow sets to find at most.", default=MOST_FINDINGS),
    json: bool = options.JSON,
) -> None:
    """Explain a plan: which transfers hurt which, in its rings and in default NCCL's.

    Each slowdown is reduced to the smallest set of transfers that shows it, by the model of a
    simulated plan, or by measuring on the plan's machine or in an MPI job of its hosts. The result
    goes to DIR/explanation.json.

    Example:

        tccl explain my-plan
    """
    if max_sets is not None:
        in_range("--max-sets", max_sets, 1_000_000)
    in_range("--max-causes", max_causes, 100)
    plan = plan_in(directory)
    journal = directory / JOURNAL_FILE
    with interrupts_put_off(), ExitStack() as stack:
        line = stack.enter_context(ProgressLine())
        source: Bench
        sources: Sequence[BandwidthSource]
        job = job_of_plan(plan, directory, stack)
        if job is not None:
            hosts = stack.enter_context(hosts_again(plan, header_of(plan, directory), job))
            source, sources = hosts, class_sources(hosts, plan.cluster)
            notices = source.keep_in(journal, optional=True)
        elif plan.simulated and len(plan.cluster.classes) > 1:
            # Their plans have no journal.
            models = (known_model(plan, directory, at) for at in range(len(plan.cluster.classes)))
            sources = benches = [open_source(model) for model in models]
            source, notices = benches[0], ()
        else:
            source, notices = source_again(plan, directory)
            sources = [stack.enter_context(source)]
        source.watch(line.measured)
        notice_each(notices)
        most = max_sets or (_DRY_SETS if source.dry_run else MOST_SETS)
        explanation = explanation_of(plan, sources, max_sets=most, most=max_causes)
    notice_each(source.notices)
    explanation = explanation.keep(directory, notice)
    if json:
        print_json(explanation)
    else:
        _print_explanation(explanation, plan, results())


def _print_explanation(explanation: Explanation, plan: Plan, console: Console) -> None:
    """Print the findings of each set of rings, the worst first, and what the plan avoided."""
    console.print(f"What hurts on {planned_gpus(plan)}: {explanation.provenance}")
    for part in explanation.paragraphs():
        numbered = enumerate(part, start=1) if not isinstance(part, str) else ()
        rows = [(f"{number:>3}", finding.sentence) for number, finding in numbered]
        console.print(grid(rows) if rows else part)
    word = "simulated" if explanation.simulated else "measured"
    console.print()
    console.print(
        f"cost  {counted(explanation.sets_measured, 'set')} {word} for this "
        "beyond the plan's journal"
    )
    for text in explanation.notices:
        console.print(f"note: {text}")
