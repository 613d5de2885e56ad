"""`tccl show`, `report` and `explain`: plans as text, as JSON with stable keys, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from rich.console import Console

from tccl_py.cli import options
from tccl_py.cli.measure import job_of_plan
from tccl_py.cli.options import flag, in_range, opt
from tccl_py.cli.output import GOOD, ProgressLine, grid, print_table, results
from tccl_py.cli.process import notice, notice_each, print_json, write_result
from tccl_py.errors import InputError, counted, interrupts_put_off
from tccl_py.explanation.explain import MOST_FINDINGS, MOST_SETS
from tccl_py.explanation.explain import explain as explanation_of
from tccl_py.explanation.findings import Explanation
from tccl_py.model.measurement import BandwidthSource
from tccl_py.plan.again import class_sources, hosts_again, source_again
from tccl_py.plan.beside import plan_in
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import JOURNAL_FILE
from tccl_py.plan.words import (
    MOST_PATHS,
    assumptions,
    class_table,
    hop_table,
    plan_json,
    ring_table,
    set_table,
    summary,
    used_paths,
)
from tccl_py.report.sizes import ENTRY_COLUMNS, entry_cells, tuning_json
from tccl_py.sources.journal import read_journal
from tccl_py.sources.opening import OpenedSource
from tccl_py.verify.record import Verification
from tccl_py.verify.sizes import load_sizes

_DRY_SETS = 20


def show(
    directory: Path = options.PLAN_PATH,
    *,
    hops: bool = flag("--hops", "List every hop with its rate."),
    sets: bool = flag("--sets", "List what communicators get by the plugin."),
    json: bool = options.JSON,
) -> None:
    """Show a plan: rings, rates, the slowest hop, the bound, settings, and default NCCL.

    Of a cluster's plan: the order of hosts, and of each class of hosts the NICs by which rings come
    and go, and the GPUs between. Of a plan tuned by `tccl verify --tune`: the choices of algorithm,
    protocol and channels that the plugin makes by message size. With --json the rings are lists of
    global ranks, a list for each channel.

    Example:

        tccl show my-plan --hops
    """
    plan = load_plan(directory)
    if json:
        print_plan_json(plan, directory)
        return
    console = results()
    print_plan(plan, console)
    with suppress(InputError):
        verified = Verification.load(directory)
        for text in verified.transfer_notices if verified is not None else ():
            console.print(f"note: {text}")
    entries = [cells for tuning in load_sizes(directory) for cells in entry_cells(tuning)]
    title = "algorithm, protocol and channels by message size"
    print_table(console, [ENTRY_COLUMNS, *entries], title=title)
    if hops:
        print_table(console, hop_table(plan))
    if sets:
        rows = list(set_table(plan))
        print_table(console, rows)
        if len(rows) == 1:
            console.print("sets: none has a graph file of its own; see the line plugin above")


def print_plan_json(plan: Plan, directory: Path) -> None:
    """Print a plan as JSON, with the choices by message size that tuning found."""
    by_size = [tuning_json(tuning) for tuning in load_sizes(directory)]
    print_json(plan_json(plan) | {"by_size": by_size})


def print_plan(plan: Plan, console: Console) -> None:
    """Print rings, rates, bound, settings and the comparison with default NCCL."""
    if plan.is_cluster:
        counted = f"{len(plan.hosts)} hosts with {plan.cluster.ranks} GPUs"
        console.print(f"Plan for a cluster of {counted}: {plan.provenance}")
        print_table(console, class_table(plan))
    else:
        gpus = ",".join(map(str, plan.gpus))
        console.print(f"Plan for {plan.machine.name}, GPUs {gpus}: {plan.provenance}")
        console.print(plan.advice, style=GOOD)
    print_table(console, ring_table(plan))
    left = len(used_paths(plan)) - MOST_PATHS
    if left > 0:
        console.print(f"and {left} more host paths; `tccl show --hops` lists all")
    console.print(grid(summary(plan)))
    stopped = ("the search was interrupted: this is the best until then",) * plan.cancelled
    for text in assumptions(plan):
        console.print(f"assumed: {text}")
    for text in (*stopped, *plan.notices):
        console.print(f"note: {text}")


def report(
    directory: Path = options.DIRECTORY,
    *,
    output: Path | None = options.OUTPUT,
    force: bool = flag("--force", "Replace FILE even if it is no report."),
) -> None:
    """Write a plan as one HTML page: machine, rings, rates, settings, and how to use them.

    The page, DIR/report.html if not named, needs no network and no other file. Rates of single hops
    and of pairs come from the journal in DIR; a saved result of `tccl explain` is shown. An earlier
    report is replaced, any other file only with --force.

    Example:

        tccl report my-plan
    """
    # Templates take long to load; no other command needs them.
    from tccl_py.report.contents import read_contents  # noqa: PLC0415
    from tccl_py.report.page import REPORT_FILE, check_replaceable, report_html  # noqa: PLC0415

    contents = read_contents(directory)
    target = directory / REPORT_FILE if output is None else output
    check_replaceable(target, directory, force=force)
    write_result(report_html(contents), target)
    notice(f"wrote {target}")


# `tccl explain`


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

    For each slowdown: the smallest set of transfers that shows it already, the shared links and
    memory, and the bandwidth of the same GPUs by writes, reads or bounces. Transfers are left out
    and the rest is measured again: by the model of a simulated plan, on the machine itself of a
    measured plan, or in an MPI job of its hosts. Sets of the journal in DIR are not measured again.
    Where GPUs share a PCIe switch, writes to several root ports, which collapse on some machines,
    are measured as well. The result goes to DIR/explanation.json.

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
        source: OpenedSource
        sources: Sequence[BandwidthSource]
        if plan.is_cluster and not plan.simulated:
            header = read_journal(journal).header
            hosts = stack.enter_context(hosts_again(plan, header, job_of_plan(plan, stack)))
            source, sources = hosts, class_sources(hosts, plan.cluster)
            told = source.keep_in(journal, optional=True)
        else:
            source, told = source_again(plan, directory)
            stack.enter_context(source)
            sources = [source] * len(plan.cluster.classes)
        source.watch(line.measured)
        notice_each(told)
        most = max_sets or (_DRY_SETS if source.dry_run else MOST_SETS)
        found = explanation_of(plan, sources, max_sets=most, most=max_causes)
    notice_each(source.notices)
    found = found.keep(directory, notice)
    if json:
        print_json(found)
    else:
        _print_explanation(found, plan, results())


def _print_explanation(found: Explanation, plan: Plan, console: Console) -> None:
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
