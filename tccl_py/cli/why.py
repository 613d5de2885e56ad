"""`tccl show --why`, also for `tccl report`: which transfers of a plan slow each other down."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from tccl_py.cli.measure import job_of_plan
from tccl_py.cli.output import ProgressLine, grid
from tccl_py.cli.process import notice, notice_each
from tccl_py.errors import interrupts_put_off, spell
from tccl_py.explanation.explain import MOST_FINDINGS, MOST_SETS, explain
from tccl_py.explanation.findings import Explanation
from tccl_py.model.measurement import JOURNAL_FILE, BandwidthSource
from tccl_py.plan.plan import Plan
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

DRY_SETS = 20


def find_causes(
    plan: Plan, directory: Path, *, max_sets: int | None = None, max_causes: int | None = None
) -> Explanation:
    """Explain a plan by its model, on its machine or in an MPI job of its hosts; keep the result.

    `max_sets` are measured at most that the journal does not hold, and at most `max_causes` slow
    sets are searched. Raises InputError: the plan is of another machine or of other hosts.
    """
    with interrupts_put_off(), ExitStack() as stack:
        line = stack.enter_context(ProgressLine())
        source: Bench
        sources: Sequence[BandwidthSource]
        job = job_of_plan(plan, directory, stack)
        if job is not None:
            hosts = stack.enter_context(hosts_again(plan, header_of(plan, directory), job))
            source, sources = hosts, class_sources(hosts, plan.cluster)
            notices = source.keep_in(directory / JOURNAL_FILE, optional=True)
        elif plan.simulated and len(plan.cluster.classes) > 1:
            # Their plans have no journal.
            models = (known_model(plan, directory, at) for at in range(len(plan.cluster.classes)))
            sources = benches = [open_source(model) for model in models]
            source, notices = benches[0], ()
        else:
            source, notices = source_again(plan, directory)
            sources = [stack.enter_context(source)]
        source.watch(line.count_sets)
        notice_each(notices)
        sets = max_sets or (DRY_SETS if source.dry_run else MOST_SETS)
        explanation = explain(plan, sources, max_sets=sets, most=max_causes or MOST_FINDINGS)
    notice_each(source.notices)
    return explanation.keep(directory, notice)


def print_causes(explanation: Explanation, plan: Plan, console: Console) -> None:
    """Print the findings of each set of rings, the worst first, and what the plan avoided."""
    console.print(f"What hurts on {planned_gpus(plan)}: {explanation.provenance}")
    for part in explanation.paragraphs():
        numbered = enumerate(part, start=1) if not isinstance(part, str) else ()
        rows = [(f"{number:>3}", finding.sentence) for number, finding in numbered]
        console.print(grid(rows) if rows else part)
    word = "simulated" if explanation.simulated else "measured"
    console.print()
    console.print(
        f"cost  {spell(explanation.sets_measured, 'set')} {word} for this beyond the plan's journal"
    )
    for text in explanation.notices:
        console.print(f"note: {text}")
