"""`tccl show` and `report`: plans as text, as JSON with stable keys, and as a page."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console

from tccl_py.cli import options
from tccl_py.cli.measure import job_of_plan
from tccl_py.cli.options import advanced, arg, flag, opt
from tccl_py.cli.output import DOUBT, GOOD, ProgressLine, grid, print_table, results
from tccl_py.cli.process import (
    ANSWER_IS_NO,
    Speech,
    Verbosity,
    check_result_file,
    notice,
    notice_each,
    print_json,
    write_result,
)
from tccl_py.errors import InputError, TcclError, check_range, interrupts_put_off, spell
from tccl_py.experiments.record import Verification
from tccl_py.experiments.sizes import load_sizes
from tccl_py.explanation.explain import MOST_FINDINGS, MOST_SETS, explain
from tccl_py.explanation.findings import Explanation
from tccl_py.files import says
from tccl_py.model.measurement import JOURNAL_FILE, BandwidthSource
from tccl_py.plan.chains import WORLD, PlanChain
from tccl_py.plan.load import is_directory, load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import ProvenLinks, plan_in
from tccl_py.plan.size_choices import size_basis, size_notes, size_table, why_no_sizes
from tccl_py.plan.text import (
    advice,
    assumptions,
    diff,
    notices,
    planned_gpus,
    show_plan,
    summary,
)
from tccl_py.planning.hardware import limit_sentences
from tccl_py.planning.plan_sources import (
    class_sources,
    header_of,
    hosts_again,
    known_model,
    source_again,
)
from tccl_py.report.bundle import CONTENTS, write_bundle
from tccl_py.report.page import REPORT_FILE, check_replaceable, read_contents, report_html
from tccl_py.report.plan import report_plan
from tccl_py.report.sizes import entry_lines
from tccl_py.report.tables import Column, lines
from tccl_py.report.verification import trade_off_lines
from tccl_py.sources.bench import Bench
from tccl_py.sources.opening import open_source

_DRY_SETS = 20
"""That `--why` measures in a dry run."""
_EQUAL = 1e-3
"""Hops whose rates differ less are alike, relative."""
_MOST_RINGS, _MOST_NOTES = 8, 3
"""The rows of rings, and the notes, that the first screen has room for."""
_Cells = tuple[str, ...]
_UNKNOWN = (
    "whether small messages, send/recv and all-to-all lose by what is recommended for large "
    "all-reduces, until `tccl verify` has run jobs"
)


def show(
    directory: Path = options.PLAN_PATH,
    other: Path | None = arg("OTHER", "Another plan, to say in what the two differ.", None),
    *,
    hops: bool = flag("--hops", "List every hop with its rate."),
    sets: bool = flag("--sets", "List what communicators get by the plugin."),
    sizes: bool = flag("--sizes", "List algorithm, protocol and channels by message size."),
    why: bool = flag("--why", "Say which transfers slow each other down."),
    max_sets: int | None = advanced("N", "With --why: sets to measure at most."),
    max_causes: int | None = advanced("N", "With --why: slow sets to find at most."),
    json: bool = options.JSON,
) -> None:
    """Show a plan: rings, rates, the slowest hop, the bound, settings, and default NCCL.

    A cluster's plan has the order of hosts, and the paths of rings from NIC to NIC.

    --why measures on the plan's hosts, or asks a simulated plan's model, and writes
    DIR/explanation.json.

    Exit codes: 0 done, 1 two plans differ, 2 wrong use.

    Examples:

        tccl show my-plan --hops
        tccl show my-plan --why
        tccl show my-plan plan-of-last-week
    """
    if other is not None:
        _show_differences(directory, other, json=json)
        return
    if why:
        _show_causes(directory, max_sets, max_causes, json=json)
        return
    plan = load_plan(directory)
    if json:
        print_json(report_plan(plan, directory))
        return
    _show_plan(plan, directory)
    if sizes:
        _show_sizes(plan, directory)
    if hops:
        print_table(results(), _hop_table(plan))
    if sets:
        shown = show_plan(plan).communicators or ()
        print_table(results(), lines(_SETS, shown))
        if not shown:
            results().print("sets: none has a graph file of its own; see the line plugin above")


def _show_sizes(plan: Plan, directory: Path) -> None:

    console = results()
    if why := why_no_sizes(plan):
        console.print(f"NCCL's choices by message size are not known {why}")
    print_table(console, size_table(plan), title=f"by message size, {size_basis(plan)}")
    title = "by the tuner, from `tccl verify --tune`"
    print_table(console, entry_lines(load_sizes(directory)), title=title)


def _show_plan(plan: Plan, directory: Path) -> None:

    console, notes = results(), list[str]()
    _print_plan(plan, console)
    if is_directory(directory) and (links := ProvenLinks.load(directory)) is not None:
        proof = links.proof
        console.print(f"links: {'; '.join(filter(None, (proof.verdict, proof.what)))}")
    try:
        verified = Verification.load(directory)
    except InputError as error:
        notice(f"{Verification.FILE} is left out: {error}")
    else:
        # A dry run says nothing about a plan for GPUs.
        if verified is not None and verified.dry_run <= plan.dry_run:
            notes += (f"by jobs, {text}" for text in verified.objections(verified.judged))
            notes += trade_off_lines(verified)
    _print_notes(plan, directory, notes, console)


def _print_plan(plan: Plan, console: Console) -> None:
    """Print rings, rates, bound, settings and the comparison with default NCCL."""
    for text in limit_sentences(plan):
        console.print(f"First: {text}", style=DOUBT)
    console.print(f"Plan for {planned_gpus(plan)}: {plan.provenance}")
    console.print(advice(plan), style=GOOD)
    if len(plan.cluster.classes) > 1:
        print_table(console, _class_table(plan))
    title = "" if plan.recommended == "graph" else "rings of the graph file"
    rings = [*_ring_table(plan)]
    print_table(console, rings[: _MOST_RINGS + 1], title=title)
    if hidden := len(rings[_MOST_RINGS + 1 :]):
        console.print(f"and {spell(hidden, 'more row')} of rings; `tccl show --hops` lists all")
    console.print(grid(summary(plan)))
    for text in assumptions(plan):
        console.print(f"assumed: {text}")
    if plan.winner is None and plan.recommended != "default" and not plan.dry_run:
        console.print(f"unknown: {_UNKNOWN}")


def _print_notes(plan: Plan, directory: Path, more: Iterable[str], console: Console) -> None:
    """Print a plan's notes, the first few unless all are asked for."""

    stopped = ("the search was interrupted: this is the best until then",) * plan.cancelled
    notes = [*stopped, *more, *notices(plan), *size_notes(plan)]
    shown = notes if Speech.verbosity is Verbosity.VERBOSE else notes[:_MOST_NOTES]
    for text in shown:
        console.print(f"note: {text}")
    if hidden := len(notes) - len(shown):
        console.print(f"{spell(hidden, 'more note')}: tccl show {directory} -v")


def _numbers(values: Iterable[int], separator: str = " ") -> str:
    return separator.join(map(str, values))


def _class_table(plan: Plan) -> Iterator[_Cells]:
    """Yield the headers and cells of a table of a cluster's classes of hosts."""
    yield "class", "hosts", "GPUs", "NICs"
    counts = Counter(plan.cluster.host_classes.values())
    for number, node_class in enumerate(plan.cluster.classes):
        nics = " ".join(f"{nic.id} {nic.name}" for nic in node_class.machine.nics)
        yield node_class.name, str(counts[number]), _numbers(plan.class_gpus[number], ","), nics


def _ring_table(plan: Plan) -> Iterator[_Cells]:
    """Return the headers and cells of a table of rings, on the first of different host paths."""
    head = ("path", "hosts", "ring", "in", "GPU order", "out", "GB/s", "slowest hop")
    rows: list[_Cells] = [head]
    for number, count in _used_paths(plan).items():
        for ring, chain in enumerate(plan.paths[number].chains):
            name = _path_name(plan, number) if ring == 0 else ""
            hosts, (entry, exit_) = str(count) if name else "", _nic_names(chain)
            gbps, slowest = f"{chain.rate_gbps:.2f}", chain.bottleneck.flow.words
            order = _numbers(chain.gpus)
            rows.append((name, hosts, str(ring), entry, order, exit_, gbps, slowest))
    return _drop_empty(rows)


def _hop_table(plan: Plan) -> Iterator[_Cells]:
    """Return the headers and cells of a table of every hop, with its rate beside all others."""
    rows: list[_Cells] = [("path", "ring", "from", "to", "GB/s", "flow")]
    for number in _used_paths(plan):
        for ring, chain in enumerate(plan.paths[number].chains):
            slow = [
                hop
                for hop in chain.hops
                if math.isclose(hop.rate_gbps, chain.rate_gbps, rel_tol=_EQUAL)
            ]
            for hop in chain.hops:
                # No hop is marked where all are alike.
                marked = hop in slow and len(slow) < len(chain.hops)
                ends = zip(hop.ends, _nic_names(chain), strict=True)
                names = (nic if gpu == WORLD else f"G{gpu}" for gpu, nic in ends)
                flow = f"{hop.flow}{' (slowest)' * marked}"
                name = _path_name(plan, number)
                rows.append((name, str(ring), *names, f"{hop.rate_gbps:.2f}", flow))
    return _drop_empty(rows)


def _nic_names(chain: PlanChain) -> tuple[str, ...]:
    """Return the NICs by which a chain enters and leaves a host; "" for a ring that closes."""
    return tuple("" if nic is None else f"N{nic}" for nic in (chain.entry_nic, chain.exit_nic))


def _drop_empty(rows: Sequence[_Cells]) -> Iterator[_Cells]:
    """Return rows without the columns that are empty below their header."""
    filled = [any(cells) for cells in zip(*rows[1:], strict=True)]
    return (tuple(itertools.compress(row, filled)) for row in rows)


_SETS = (
    Column("GPUs", lambda one: _numbers(one.gpus, ",")),
    Column("GB/s", lambda one: f"{one.rate_gbps:.2f}"),
    Column("rings", lambda one: ", ".join(map(_numbers, one.rings))),
    Column("graph file", lambda one: one.graph_file),
)
"""The sets of GPUs that get a graph file."""


def _used_paths(plan: Plan) -> Counter[int]:
    """Return the paths that hosts have, in the order of the ring, and how many have each."""
    return Counter(host.path for host in plan.hosts)


def _path_name(plan: Plan, path: int) -> str:
    """Return the class of a host path, if classes differ, and its number; "" for a single one."""
    if len(plan.paths) == 1:
        return ""
    classes = plan.cluster.classes
    name = classes[plan.paths[path].node_class].name
    return f"{name} ({path})" if len(classes) > 1 else str(path)


def _show_causes(
    directory: Path, max_sets: int | None, max_causes: int | None, *, json: bool
) -> None:
    check_range("--max-sets", 1 if max_sets is None else max_sets, 1, 1e6)
    check_range("--max-causes", 1 if max_causes is None else max_causes, 1, 100)
    plan = plan_in(directory)
    explanation = find_causes(plan, directory, max_sets=max_sets, max_causes=max_causes)
    if json:
        print_json(explanation)
    else:
        _print_causes(explanation, plan, results())


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
        sets = max_sets or (_DRY_SETS if source.dry_run else MOST_SETS)
        explanation = explain(plan, sources, max_sets=sets, most=max_causes or MOST_FINDINGS)
    notice_each(source.notices)
    return explanation.keep(directory, notice)


def _print_causes(explanation: Explanation, plan: Plan, console: Console) -> None:
    """Print the findings of each set of rings, the worst first, and what the plan avoided."""
    console.print(f"What hurts on {planned_gpus(plan)}: {explanation.provenance}")
    for number, text in explanation.lines():
        console.print(grid([(f"{number:>3}", text)]) if number else text)
    word = "simulated" if explanation.simulated else "measured"
    console.print()
    console.print(
        f"cost  {spell(explanation.sets_measured, 'set')} {word} for this beyond the plan's journal"
    )
    for text in explanation.notices:
        console.print(f"note: {text}")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A fact in which two plans differ, as `tccl show DIR OTHER --json` prints it."""

    what: str
    values: Annotated[tuple[Any, Any], says("of the first plan and of the second")]


def _show_differences(one: Path, other: Path, *, json: bool) -> None:
    differences = diff(load_plan(one), load_plan(other))
    if json:
        print_json([Difference(what=name, values=both) for name, both in differences.items()])
    else:
        rows = [(name, *map(_words, both)) for name, both in differences.items()]
        print_table(results(), [("", str(one), str(other)), *rows])
    if differences:
        raise typer.Exit(ANSWER_IS_NO)
    if not json:
        results().print("no difference")


def _words(value: object) -> str:
    """Return a value of two plans' differences as people write it: lists in lists by semicolons."""
    if isinstance(value, dict):
        return " ".join(f"{name}={part}" for name, part in value.items()) or "none"
    if isinstance(value, tuple):
        nested = any(isinstance(part, tuple) for part in value)
        return ("; " if nested else " ").join(map(_words, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def report(
    directory: Path = options.DIRECTORY,
    *,
    output: Path | None = options.OUTPUT,
    bundle: Path | None = opt("FILE", "Write an archive to send to others, without their names."),
    force: bool = flag("--force", "Replace FILE even if it is no report."),
) -> None:
    """Write a plan as one HTML page: machine, rings, rates, settings, and how to use them.

    The page needs no network and no other file. An earlier report is replaced, any other file only
    with --force. Before, `tccl show --why` runs, if it can here.

    --bundle writes a zip archive instead: topology, proof, plan, verification and versions,
    without names of hosts, serial numbers, addresses and paths.

    Examples:

        tccl report my-plan
        tccl report my-plan --bundle my-plan.zip
    """
    if bundle is not None:
        _write_bundle(directory, bundle)
        return

    check_result_file("--output", output)
    contents = read_contents(directory)
    target = directory / REPORT_FILE if output is None else output
    check_replaceable(target, directory, force=force)
    if contents.explanation is None:
        try:
            explanation = find_causes(contents.plan, directory)
        except TcclError as error:
            notice(f"without causes of slow transfers: {error}")
        else:
            # Sets that were measured for it are in the journal.
            contents = replace(read_contents(directory), explanation=explanation)
    write_result(report_html(contents), target)
    notice(f"wrote {target}")


def _write_bundle(directory: Path, bundle: Path) -> None:

    check_result_file("--bundle", bundle)
    archive = write_bundle(directory, bundle)
    for name, text in CONTENTS.items():
        absent = " (none here)" * (not fnmatch.filter(archive, name))
        results().print(f"{name.ljust(16)}  {text}{absent}")
    results().print("Left out: names of hosts, serial numbers, addresses, paths.")
    notice(f"wrote {bundle}: look into it before you send it")
