"""`tccl measure`: rates of transfer sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict
from rich.table import Table

from tccl_py.cli import options
from tccl_py.cli.options import arg, check_quoted, flag, gpus_argument, opt
from tccl_py.cli.output import ProgressLine, heat, results
from tccl_py.cli.process import notice, notice_each, print_json
from tccl_py.errors import InputError, TcclError, check_choice
from tccl_py.files import fill, pick, says
from tccl_py.launchers import in_job
from tccl_py.model.measurement import IN_DRY_RUN, Measurement
from tccl_py.model.measurement import mark as provenance
from tccl_py.model.transfer import TransferSet, flow_texts, parse_flow, parse_set
from tccl_py.plan.plan import Plan
from tccl_py.planning.plan_sources import header_of
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.model import MachineModel
from tccl_py.sources.bench import Bench
from tccl_py.sources.hosts import join_job, open_hosts
from tccl_py.sources.opening import open_source
from tccl_py.sources.pairs import Pair, matrix, pairs_csv
from tccl_py.sources.pairs import all_pairs as all_pairs_of
from tccl_py.sources.profiled import (
    MeasuredMachine,
    MeasurementOptions,
    gpus_of,
    measured_machine,
    overlap_notices,
    relative_intervals,
)

if TYPE_CHECKING:
    from tccl_py.sources.hosts import Job

Texts = Sequence[str]
"""The flows of a set as the user gave them: a TransferSet has an order of its own."""
_MANY = 0.2
"""A share of outliers (of all repeats) above this gets a notice."""


def measure(
    sets: list[str] | None = arg(
        "[SET]...",
        "Flows that run at the same time, as 0:4+4:0, or apart by spaces in quotes.",
        None,
    ),
    *,
    all_pairs: bool = flag("--all-pairs", "Measure every pair of GPUs alone, as without SETs."),
    bidirectional: bool = flag("--bidirectional", "All pairs: both directions together."),
    via: str | None = opt("host", "All pairs: through host memory."),
    gpus: str | None = opt("LIST", "All pairs: of these GPUs, as 0,2,5 or 0-3."),
    csv: bool = flag("--csv", "All pairs: print CSV."),
    simulate: str | None = options.SIMULATE,
    backend: str | None = options.BACKEND,
    devices: int | None = options.DEVICES,
    target: float | None = options.TARGET,
    meeting: str | None = opt("pass-on|independent", "Pace of flows that meet at a GPU."),
    check: bool = flag("--check", "Compare data in every set, not once for each flow."),
    interfaces: str | None = options.INTERFACES,
    noise: float | None = options.NOISE,
    seed: int | None = options.SEED,
    journal: Path | None = opt("FILE", "Keep measurements; none is repeated."),
    json: bool = options.JSON,
) -> None:
    """Measure how fast transfers are that run at the same time, in GB/s for each flow.

    `0:4` is GPU 0 writing to GPU 4, `"0<4"` GPU 0 reading from GPU 4, and `0:C1:4` a bounce through
    NUMA node 1. Flows joined by `+`, or by spaces in quotes, run at the same time. Without sets
    each GPU writes to each other GPU. Under mpirun or srun sets may span hosts.

    Examples:

        tccl measure 0:1 0:1,blocks=16+1:0,blocks=16
        tccl measure --csv
        tccl measure 0:4+1:5 --simulate asus-esc8000a-e13p
        tccl measure 0:C0:1 --backend host --devices 2
        mpirun -N 1 tccl measure "h0.C0->h0.N0->h1.N0->h1.N0->h1.C0"
    """
    asked = SimpleNamespace(**locals())
    with ExitStack() as stack:
        # Joined before anything can go wrong: of a job's ranks, the controller alone reports.
        job = stack.enter_context(controlled_job()) if simulate is None and in_job() else None
        options.check_job({"--interfaces": interfaces}, in_job=job is not None)
        asked.how = measurement_options(target=target, meeting=meeting, check=check)
        asked.model = {"noise": noise or 0.0, "seed": seed or 0}
        if sets:
            _measure_sets(asked, sets, job, stack)
            return
        options.refuse({"--all-pairs": job}, "is about one host", "name sets of the hosts")
        _measure_pairs(asked)


def _measure_sets(
    asked: SimpleNamespace, sets: Sequence[str], job: Job | None, stack: ExitStack
) -> None:
    """Measure sets and print them."""
    check_quoted(sets, "G0->G0->G1")
    transfer_sets = [parse_set(text) for text in sets]
    if asked.simulate is not None:
        model = load_machine(asked.simulate)
        source: Bench = open_source(model, **asked.model)
        # Sets that the machine cannot run are refused before the journal is touched.
        source.check(transfer_sets)
        title = model.name
    elif job is None:
        place = measured_machine(asked.backend, asked.devices)
        source = open_source(place, gpus=gpus_of(place.machine, transfer_sets), options=asked.how)
        title = place.machine.name
    else:
        named = ("backend", "devices", "interfaces")
        hosts = open_hosts(job, options=asked.how, **{name: vars(asked)[name] for name in named})
        source = stack.enter_context(hosts)
        title = f"hosts {', '.join(source.use_only(transfer_sets))}"
    with source:
        measurements = _measure(source, transfer_sets, asked.journal)
        conditions = source.conditions
    texts = map(flow_texts, sets)
    rows = [
        _measured_row(*one, dry_run=source.dry_run) for one in zip(texts, measurements, strict=True)
    ]
    if asked.json:
        print_json(rows)
    else:
        _print_table(title, conditions, rows)
    # When it is closed, the source has looked at the GPUs once more.
    notice_each(source.notices)
    for row, measurement in zip(rows, measurements, strict=True):
        if not measurement.simulated:
            notice_each(_doubts(row.set, measurement))


def _measure_pairs(asked: SimpleNamespace) -> None:
    """Measure all pairs of GPUs and print them."""
    if asked.via is not None:
        check_choice("--via", asked.via, ("host",))
    place: MachineModel | MeasuredMachine
    given: dict[str, Any]
    if asked.simulate is None:
        place = measured_machine(asked.backend, asked.devices)
        given = {"options": asked.how}
    else:
        place, given = load_machine(asked.simulate), asked.model
    machine = place.machine
    gpus = gpus_argument(asked.gpus, machine)
    if gpus is None:
        gpus = place.gpus if isinstance(place, MeasuredMachine) else machine.gpu_indices
    source = open_source(place, gpus=gpus, **given)
    choice = {"via_host": asked.via is not None, "bidirectional": asked.bidirectional}
    with source, ProgressLine() as line:
        notice_each(() if asked.journal is None else source.keep_in(asked.journal))
        facts = machine, place.knowledge, source, gpus
        pairs, assumed, failures = all_pairs_of(*facts, **choice, watch=line.count_sets)
        conditions = source.conditions
    notice_each((*source.notices, *failures))
    if asked.json:
        print_json(pairs)
    elif asked.csv:
        print(pairs_csv(pairs), end="")
    else:
        basis = {"simulated": source.simulated, "dry_run": source.dry_run}
        mark = provenance(assumed=assumed, **basis)
        beside = ", beside the other direction" if asked.bidirectional else ""
        _print_pairs(pairs, f"{machine.name}, {mark}{beside}", conditions)


def _print_pairs(pairs: Sequence[Pair], title: str, conditions: str) -> None:
    """Print a matrix of bandwidths and one of latencies, coloured by value."""
    console = results()
    for field, words in (("gbps", "GB/s"), ("latency_us", "Latency, us")):
        rows = list(matrix(pairs, field))
        largest = max((value for _, cells in rows for value in cells if value), default=0.0)
        if not largest:
            continue
        table = Table.grid(padding=(0, 1))
        table.add_row("", *(f"G{gpu}" for gpu, _ in rows), style="bold")
        for gpu, cells in rows:
            table.add_row(f"G{gpu}", *(heat(value, largest) for value in cells))
        for column in table.columns:
            column.justify = "right"
        console.width = max(console.width, 8 * len(rows) + 8)
        console.print(f"{words} from row to column: {title}", soft_wrap=True)
        console.print(table)
    hosted = sorted({pair.via for pair in pairs} - {"direct"})
    if hosted:
        some = "" if all(pair.via != "direct" for pair in pairs) else "some pairs "
        console.print(f"{some}through host memory: {', '.join(hosted)}")
    if conditions:
        console.print(conditions)


@contextmanager
def controlled_job() -> Iterator[Job]:
    """Join this MPI job; on all ranks but the controller, serve it and leave."""
    with join_job() as job:
        if not job.is_controller:
            raise typer.Exit(job.serve())
        yield job


def job_of_plan(plan: Plan, directory: Path, stack: ExitStack) -> Job | None:
    """Join this MPI job, with the hosts that a plan was measured on, until `stack` is left.

    Return None where the plan's journal is of one host, or of models.
    """

    if plan.simulated or not header_of(plan, directory).hosts:
        return None
    if not in_job():
        right = "start the command by mpirun or srun, with a rank on each host"
        where = f"the plan of {len(plan.hosts)} hosts"
        raise InputError(where, "needs the hosts for measurements", right)
    return stack.enter_context(controlled_job())


def measurement_options(**given: Any) -> MeasurementOptions:
    """Return the options of measurements; None is the default."""
    return MeasurementOptions(**{name: value for name, value in given.items() if value is not None})


def _measure(
    source: Bench, sets: Sequence[TransferSet], journal: Path | None
) -> Sequence[Measurement]:
    if journal is not None:
        notice_each(source.keep_in(journal))
    with ProgressLine() as line:
        source.watch(lambda count: line.count_sets(count, len(sets)))
        try:
            return source.measure(sets)
        except (KeyboardInterrupt, TcclError):
            # The last set that was measured may not be in the journal: the disk may be full.
            if journal is not None and source.times_measured:
                count = f"{source.times_measured} of {len(sets)}"
                notice(f"sets measured and kept in {journal}: {count}")
            raise


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A set of `tccl measure --json`; the keys from `skew_us` on only of measured ones."""

    set: str
    gbps: Annotated[tuple[float, ...], says("of each flow")]
    total_gbps: float
    simulated: bool
    assumed: bool
    dry_run: bool
    skew_us: float | UnsetType | None = UNSET
    skew_error_us: float | UnsetType | None = UNSET
    overlap: float | UnsetType | None = UNSET
    overlap_at_least: bool | UnsetType = UNSET
    spread: Annotated[tuple[float | None, ...] | UnsetType, says("width of the 95 % interval")] = (
        UNSET
    )
    repeats: int | UnsetType = UNSET
    settled: bool | UnsetType = UNSET
    outliers: Any = UNSET


def _measured_row(texts: Texts, measurement: Measurement, *, dry_run: bool) -> Measured:
    """Return a measurement, rates in the order of its flows' texts."""
    flows = list(map(parse_flow, texts))
    rates = measurement.in_order(flows)
    row: dict[str, Any] = {"set": " ".join(texts), "gbps": rates, "total_gbps": sum(rates)}
    row["dry_run"] = dry_run
    if measurement.simulated:
        return Measured(**row, **pick(measurement, "simulated", "assumed"))
    widths = measurement.in_order(flows, relative_intervals(measurement))
    repeats = len(measurement.samples_gbps[0])
    return fill(Measured, measurement, **row, spread=widths, repeats=repeats)


def _doubts(name: str, measurement: Measurement) -> Iterator[str]:
    """Warn of what makes a measurement doubtful."""
    repeats, far = len(measurement.samples_gbps[0]), len(measurement.outliers)
    if not measurement.settled:
        width = _half_width(max(relative_intervals(measurement)))
        yield (
            f"{name}: rates vary: after {repeats} repeats the 95 % interval is still {width} wide; "
            "other work, clocks or heat may disturb it; a larger target accepts it"
        )
    if far > repeats * _MANY:
        yield f"{name}: repeats far from the others: {far} of {repeats}; they count as well"
    yield from overlap_notices(name, measurement)


def _print_table(title: str, conditions: str, rows: Sequence[Measured]) -> None:
    simulated, dry_run = rows[0].simulated, rows[0].dry_run
    more = () if simulated else ("interval", "repeats")
    title = f"Transfer sets on {title}{IN_DRY_RUN * dry_run}"
    table = Table("Flow", "GB/s", *more, "Source", title=title, caption=conditions or None)
    table.columns[0].overflow = "fold"
    for row in map(asdict, rows):
        mark = provenance(simulated=simulated, assumed=row["assumed"], dry_run=dry_run)
        flows, repeats = row["set"].split(), f"{row['repeats']}"
        for at, (flow, rate) in enumerate(zip(flows, row["gbps"], strict=True)):
            precision = () if simulated else (_half_width(row["spread"][at]), repeats)
            table.add_row(flow, f"{rate:.2f}", *precision, mark)
        together = (mark,) if simulated else ("", repeats, mark + _timing(row))
        table.add_row("together", f"{row['total_gbps']:.2f}", *together, style="bold")
        table.add_section()
    results().print(table)


def _timing(row: Mapping[str, Any]) -> str:
    """Return the skew and overlap of a set's flows, after a comma; "" if not known."""
    if row["skew_us"] is None or row["overlap"] is None:
        return ""
    error = f" \u00b1 {row['skew_error_us']:.1f}" if row["skew_error_us"] else ""
    least = "at least " if row["overlap_at_least"] else ""
    return f", skew {row['skew_us']:.1f}{error} us, overlap {least}{row['overlap']:.0%}"


def _half_width(width: float) -> str:
    """Return a relative interval's width as text."""
    return f"\u00b1 {width / 2:.1%}" if width < float("inf") else "?"
