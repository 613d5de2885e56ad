"""`tccl show` and `tccl report`: plans as text, as JSON, whose keys are stable, and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Column, Table

from tccl_py.cli import options
from tccl_py.cli.options import flag
from tccl_py.cli.output import GOOD, grid, results
from tccl_py.cli.process import notice, print_json, write_result
from tccl_py.errors import InputError
from tccl_py.nccl.settings import environment_text
from tccl_py.nccl.variables import pinned_env_text
from tccl_py.plan.bounded_jobs import BoundedJob, read_bounded_job
from tccl_py.plan.files import graph_files
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import ChoiceName, Plan, PlanChoice
from tccl_py.plan.words import CHOICE_WORDS, plan_json, subset_files
from tccl_py.readers.hosts import compress
from tccl_py.report.sizes import ENTRY_COLUMNS, entry_cells, tuning_json
from tccl_py.verify.record import load_verification
from tccl_py.verify.size_plans import load_sizes

_MOST_PATHS = 16
"""Of a cluster whose hosts differ there can be hundreds; `--hops` lists them all."""
_MOST_ORDER = 1000
"""Characters of the hosts' order that a terminal has room for."""


def show(
    directory: options.PlanPath,
    *,
    hops: Annotated[bool, flag("--hops", "List every hop with its rate.")] = False,
    sets: Annotated[bool, flag("--sets", "List what communicators get by the plugin.")] = False,
    json: options.Json = False,
) -> None:
    """Show a plan: rings, rates, the slowest hop, the bound, settings, and default NCCL.

    Of a cluster's plan: the order of hosts, and of each class of hosts the NICs by which rings come
    and go, and the GPUs between. Of a plan tuned by `tccl verify --tune`: the choices of algorithm,
    protocol and channels that the plugin makes by message size. With --json the rings are lists of
    global ranks, a list for each channel.

    Example:

        tccl show my-plan --hops
    """
    if (job := read_bounded_job(directory)) is not None:
        _print_bounded(job, json=json)
        return
    plan = load_plan(directory)
    if json:
        print_plan_json(plan, directory)
        return
    console = results()
    print_plan(plan, console)
    with suppress(InputError):
        verified = load_verification(directory)
        for text in verified.transfer_notices if verified is not None else ():
            console.print(f"note: {text}")
    entries = [cells for tuning in load_sizes(directory) for cells in entry_cells(tuning)]
    if entries:
        table = Table(*ENTRY_COLUMNS, title="algorithm, protocol and channels by message size")
        for cells in entries:
            table.add_row(*cells)
        console.print(table)
    if hops:
        console.print(_flows_table(plan) if plan.is_cluster else _hops_table(plan))
    if sets and graph_files(plan):
        console.print(_sets_table(plan))


def _print_bounded(job: BoundedJob, *, json: bool) -> None:
    if json:
        print_json(job.to_json())
        return
    console = results()
    count = sum(len(host.gpus) for host in job.hosts)
    console.print(f"Job of {len(job.hosts)} hosts with {count} GPUs, which was not measured")
    console.print(job.advice, style=GOOD)
    rows = [("host order", f"as given: {compress([host.name for host in job.hosts])}")]
    rows += [("rate", job.rate_text), ("NCCL", job.settings.version)]
    console.print(grid(rows))
    for text in job.notices:
        console.print(f"note: {text}")


def print_plan_json(plan: Plan, directory: Path) -> None:
    """Print a plan as JSON, with the choices by message size that tuning found."""
    by_size = [tuning_json(tuning) for tuning in load_sizes(directory)]
    print_json(plan_json(plan) | {"by_size": by_size})


def print_plan(plan: Plan, console: Console) -> None:
    """Print rings, rates, bound, settings and the comparison with default NCCL."""
    if plan.is_cluster:
        counted = f"{len(plan.hosts)} hosts with {plan.cluster.ranks} GPUs"
        console.print(f"Plan for a cluster of {counted}: {plan.provenance}")
        console.print(_classes_table(plan))
        console.print(_paths_table(plan))
        left = len(_used(plan)) - _MOST_PATHS
        if left > 0:
            console.print(f"and {left} more host paths; `tccl show --hops` lists all")
    else:
        gpus = _numbers(plan.gpus, ",")
        console.print(f"Plan for {plan.machine.name}, GPUs {gpus}: {plan.provenance}")
        console.print(plan.advice, style=GOOD)
        table = Table("ring", "GPU order", "GB/s", "slowest hop")
        for number, ring in enumerate(plan.rings):
            slowest = str(ring.bottleneck.flow)
            table.add_row(str(number), _numbers(ring.gpus), f"{ring.rate:.2f}", slowest)
        console.print(table)
    console.print(grid(_summary(plan)))
    stopped = ("the search was interrupted: this is the best until then",) * plan.cancelled
    for text in (*stopped, *plan.notices):
        console.print(f"note: {text}")


def _summary(plan: Plan) -> Iterator[tuple[str, str]]:
    mark = plan.provenance
    if plan.is_cluster:
        changed = "another order than given" if plan.order_changed else "as given"
        order = compress(plan.host_order)
        if len(order) > _MOST_ORDER:
            begin = order[:_MOST_ORDER].rpartition(",")[0]
            order = f"{begin}, ... (nccl/order/hosts.txt has all)"
        yield "host order", f"{changed}: {order}"
        count = plan.ring_count
        counted = f"{count} ring{'s' * (count != 1)} over {_channels(plan.settings.channels)}"
        yield "rate", f"{plan.rate_gbps:.2f} GB/s ({mark}), {counted}"
        name, hop = plan.bottleneck
        yield "slowest flow", f"{hop.gbps:.2f} GB/s: {hop.flow} on {name}"
        if plan.whole_ring_gbps is not None:
            yield "whole rings", f"{plan.whole_ring_gbps:.2f} GB/s with all hosts at once ({mark})"
    for choice_name, choice in plan.choices.items():
        yield CHOICE_WORDS[choice_name], _choice_text(plan, choice_name, choice, mark)
    bound = "not known"
    if plan.bound_gbps is not None:
        bound = f"{plan.bound_gbps:.2f} GB/s, {plan.proof}"
    yield "bound", bound
    if plan.limit_text:
        yield "limit", f"{plan.limit_gbps:.2f} GB/s ({mark}): {plan.limit_text}"
    yield "plugin", _plugin_text(plan)
    unchecked = "" if plan.settings_verified else " (this version was not checked)"
    variables = environment_text(plan.settings) or "defaults"
    more = f": {variables}" if plan.is_cluster else ""
    yield "NCCL", f"{plan.settings.version}{unchecked}{more}"
    if plan.pinned_env:
        yield "pinned", pinned_env_text(plan.pinned_env)
    done = "simulated" if plan.simulated else "measured"
    known = f"{plan.sets_remembered} from memory or journal, {plan.sets_by_symmetry} by symmetry"
    yield "cost", f"{plan.sets_measured} sets {done}, {known}"


def _sets_table(plan: Plan) -> Table:
    table = _folded("GPUs", "GB/s", "rings", "graph file")
    for gpus, name, found in subset_files(plan):
        rings = ", ".join(map(_numbers, found.rings))
        table.add_row(_numbers(gpus, ","), f"{found.rate_gbps:.2f}", rings, f"nccl/{name}")
    return table


def _plugin_text(plan: Plan) -> str:
    """Return what communicators get by the plugin."""
    if plan.is_cluster:
        return "none for several hosts; launch with the files of nccl/order"
    variables = environment_text(plan.job_settings)
    rest = f"default NCCL with {variables}" if variables else "default NCCL"
    count = len(graph_files(plan))
    if not count:
        return f"{rest} for every communicator"
    rates = [found.rate_gbps for _, _, found in subset_files(plan)]
    return (
        f"a graph file for communicators over {count} set{'s' * (count != 1)} of GPUs, "
        f"{min(rates):.2f} to {max(rates):.2f} GB/s (`tccl show --sets`); {rest} for others"
    )


def _choice_text(plan: Plan, name: ChoiceName, choice: PlanChoice, mark: str) -> str:
    """Return a line on one way to run NCCL: bandwidth, gain, and what to set."""
    rate = "not rated" if choice.rate_gbps is None else f"{choice.rate_gbps:.2f} GB/s ({mark})"
    if choice.achieved_gbps is not None:
        rate += f", {choice.achieved_gbps:.2f} achieved"
    gain = plan.gain(name)
    times = f", {gain:.2f}x default" if gain is not None and name != "default" else ""
    variables = environment_text(choice.settings)
    how = {
        "default": "NCCL as it runs here",
        "variables": f"with {variables}" if variables else "no variable helps",
        "graph": f"with a graph file of {_channels(choice.settings.channels)}"
        + (f" and {variables}" if variables else "")
        + (" with placed bounce buffers" if choice.settings.shm_placement else ""),
    }[name]
    note = f"; {choice.note}" if choice.note else ""
    here = " <- recommended" if name == plan.recommended else ""
    return f"{rate}{times}: {how}{note}{here}"


def _channels(count: int) -> str:
    return f"{count} channel{'s' * (count != 1)}"


def _numbers(values: tuple[int, ...], between: str = " ") -> str:
    return between.join(map(str, values))


def _hops_table(plan: Plan) -> Table:
    """Return a table of every hop of every ring with its rate beside all others."""
    table = Table("ring", "from", "to", "GB/s", "flow")
    for number, ring in enumerate(plan.rings):
        for hop in ring.hops:
            rate = _marked(hop.gbps, slowest=hop == ring.bottleneck)
            table.add_row(str(number), f"G{hop.source}", f"G{hop.target}", rate, str(hop.flow))
    return table


def _marked(gbps: float, *, slowest: bool) -> str:
    return f"{gbps:.2f}{' (slowest)' if slowest else ''}"


def _folded(*headers: str) -> Table:
    """Return a table whose long words go on in the next line."""
    return Table(*(Column(header, overflow="fold") for header in headers))


def _flows_table(plan: Plan) -> Table:
    """Return a table of every flow of every host path with its rate beside all others."""
    table = _folded("class", "path", "ring", "GB/s", "flow")
    for number in _used(plan):
        path = plan.paths[number]
        name = plan.cluster.classes[path.node_class].name
        slowest = min(chain.rate for chain in path.chains)
        for ring, chain in enumerate(path.chains):
            for hop in chain.hops:
                marked = _marked(hop.gbps, slowest=hop.gbps == slowest)
                table.add_row(name, str(number), str(ring), marked, str(hop.flow))
    return table


def _classes_table(plan: Plan) -> Table:
    table = _folded("class", "hosts", "GPUs", "NICs")
    counts = Counter(plan.cluster.host_classes.values())
    for number, known in enumerate(plan.cluster.classes):
        nics = " ".join(f"{nic.id} {nic.name}" for nic in known.machine.nics)
        gpus = _numbers(plan.class_gpus[number], ",")
        table.add_row(known.name, str(counts[number]), gpus, nics)
    return table


def _used(plan: Plan) -> Counter[int]:
    """Return the paths that hosts have, in the order of the ring, and how many have each."""
    return Counter(host.path for host in plan.hosts)


def _paths_table(plan: Plan) -> Table:
    table = _folded("path of", "hosts", "ring", "in", "GPU order", "out", "GB/s", "slowest flow")
    for number, hosts in list(_used(plan).items())[:_MOST_PATHS]:
        path = plan.paths[number]
        name = plan.cluster.classes[path.node_class].name
        for ring, chain in enumerate(path.chains):
            first = (f"{name} ({number})", str(hosts)) if ring == 0 else ("", "")
            way = f"N{chain.entry_nic}", _numbers(chain.gpus), f"N{chain.exit_nic}"
            slowest = f"{chain.rate:.2f}", str(chain.bottleneck.flow)
            table.add_row(*first, str(ring), *way, *slowest)
        table.add_section()
    return table


def report(
    directory: options.Directory,
    *,
    output: options.Output = None,
    force: Annotated[bool, flag("--force", "Replace FILE even if it is no report.")] = False,
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
