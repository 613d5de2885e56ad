"""`tccl explain`: transfers of a plan's and default NCCL's rings that slow each other down."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated

from rich.console import Console

from tccl_py.cli import options
from tccl_py.cli.measure import job_of_plan
from tccl_py.cli.options import flag, in_range, opt
from tccl_py.cli.output import ProgressLine, grid, results
from tccl_py.cli.process import notice, notice_each, print_json
from tccl_py.errors import counted, interrupts_put_off
from tccl_py.explanation.explain import DEFAULT_BUDGET, MOST_FINDINGS, sources_of_journal
from tccl_py.explanation.explain import explain as explanation_of
from tccl_py.explanation.findings import Explanation, save_explanation
from tccl_py.model.measurement import BandwidthSource
from tccl_py.plan.again import class_sources, hosts_again, source_again
from tccl_py.plan.beside import plan_in
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import JOURNAL_FILE
from tccl_py.search.problem import Budget
from tccl_py.sources.journal import read_journal
from tccl_py.sources.opening import OpenedSource


def explain(
    directory: options.Directory,
    *,
    max_sets: Annotated[
        int, opt("N", "Sets to measure at most that the journal does not hold.")
    ] = DEFAULT_BUDGET.sets or 200,
    max_causes: Annotated[int, opt("N", "Different slow sets to find at most.")] = MOST_FINDINGS,
    no_measure: Annotated[bool, flag("--no-measure", "Use the plan's journal alone.")] = False,
    json: options.Json = False,
) -> None:
    """Explain a plan: which transfers hurt which, in its rings and in default NCCL's.

    For each slowdown: the smallest set of transfers that shows it already, the shared links and
    memory, and the bandwidth of the same GPUs by writes, reads or bounces. Transfers are left out
    and the rest is measured again: by the model of a simulated plan, on the machine itself of a
    measured plan, or in an MPI job of its hosts. Sets of the journal in DIR are not measured again.
    The result goes to DIR/explanation.json.

    Examples:

        tccl explain my-plan
        tccl explain my-plan --no-measure
    """
    in_range("--max-sets", max_sets, 1_000_000)
    in_range("--max-causes", max_causes, 100)
    plan = plan_in(directory)
    budget = Budget(sets=0 if no_measure else max_sets)
    journal = directory / JOURNAL_FILE
    with interrupts_put_off(), ExitStack() as stack:
        line = stack.enter_context(ProgressLine())
        source: OpenedSource | None = None
        if no_measure:
            sources: Sequence[BandwidthSource]
            sources, notices = sources_of_journal(plan, directory)
            notice_each(notices)
        elif plan.is_cluster and not plan.simulated:
            header = read_journal(journal).header
            hosts = stack.enter_context(hosts_again(plan, header, job_of_plan(plan, stack)))
            hosts.watch(line.measured)
            notice_each(hosts.keep_in(journal, optional=True))
            source, sources = hosts, class_sources(hosts, plan.cluster)
        else:
            again, notices = source_again(
                plan, directory, verb="explain", also=", or add --no-measure"
            )
            again.watch(line.measured)
            notice_each(notices)
            source = stack.enter_context(again)
            sources = [source] * len(plan.cluster.classes)
        found = explanation_of(plan, sources, budget=budget, most=max_causes)
    notice_each(source.notices if source is not None else ())
    found = save_explanation(found, directory, notice)
    if json:
        print_json(found)
    else:
        _print(found, plan, results())


def _print(found: Explanation, plan: Plan, console: Console) -> None:
    """Print the findings of each set of rings, the worst first, and what the plan avoided."""
    where = f"{len(plan.hosts)} hosts of {found.machine}"
    if not plan.is_cluster:
        where = f"{found.machine}, GPUs {','.join(map(str, plan.gpus))}"
    console.print(f"What hurts on {where}: {found.provenance}")
    for part in found.told():
        numbered = enumerate(part, start=1) if not isinstance(part, str) else ()
        rows = [(f"{number:>3}", finding.sentence) for number, finding in numbered]
        console.print(grid(rows) if rows else part)
    word = "simulated" if found.simulated else "measured"
    console.print()
    console.print(
        f"cost  {counted(found.sets_measured, 'set')} {word} for this beyond the plan's journal"
    )
    for text in found.notices:
        console.print(f"note: {text}")
