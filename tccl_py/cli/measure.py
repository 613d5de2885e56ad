"""`tccl measure`: rates of transfer sets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from tccl_py.cli.arguments import (
    MACHINE_HELP,
    JsonOption,
    check_quoted,
    notice,
    notice_each,
    print_json,
    provenance,
    results,
)
from tccl_py.cli.hardware import (
    BackendOption,
    DevicesOption,
    Hardware,
    TargetOption,
    care,
    check_sets,
    measured_machine,
)
from tccl_py.cli.jobs import (
    ClusterHardware,
    InterfacesOption,
    NetworkOption,
    in_job,
    job_of_ranks,
    open_cluster,
)
from tccl_py.cli.measured_notices import overlap_notices
from tccl_py.cli.progress import ProgressLine
from tccl_py.cli.refusals import OUTSIDE_JOB, WITH_MODEL, WITHOUT_MODEL, refuse
from tccl_py.errors import TcclError
from tccl_py.model.measurement import BandwidthSource, Measurement, dealt
from tccl_py.model.transfer import TransferSet, parse_flow, parse_set
from tccl_py.simulator.descriptions import load_machine, model_to_json
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.parameters import bundled_parameters, parameters_to_json
from tccl_py.simulator.source import Simulator
from tccl_py.sources.journal import JournalHeader, JournalledSource
from tccl_py.sources.memory import RememberingSource

_MANY = 0.2
"""More outliers than this (of all repeats) are worth a word."""
_NOISE = re.compile(
    r", noise ([0-9](?:\.[0-9]{1,12})?(?:e-[0-9]{1,3})?), seed (-?[0-9]{1,999})", re.ASCII
)
"""How the identity of a noisy simulation ends; a journal may be edited, so only numbers fit."""


def measure(
    sets: Annotated[
        list[str],
        typer.Argument(
            metavar="SET",
            help="Flows that run at the same time, apart by spaces, in one pair of quotes.",
            show_default=False,
        ),
    ],
    *,
    simulate: Annotated[
        str | None,
        typer.Option(metavar="MACHINE", help=f"Ask a model instead of hardware. {MACHINE_HELP}"),
    ] = None,
    backend: BackendOption = None,
    devices: DevicesOption = None,
    target: TargetOption = None,
    meeting: Annotated[
        str | None,
        typer.Option(
            metavar="pass-on|independent",
            help="What flows that meet at a GPU do: what comes in goes out, as in a ring (the "
            "default), or each goes at its own pace.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Compare the data that arrive in every set, not once for each flow."
        ),
    ] = False,
    interfaces: InterfacesOption = None,
    network: NetworkOption = None,
    noise: Annotated[
        float | None,
        typer.Option(
            metavar="F", help="Spread of simulated samples, 0 to 1; 0.05 is about 5 percent."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Seed of the noise; the same gives the same samples."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep measurements in FILE; sets that it holds are not repeated.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure how fast transfers are that run at the same time, in GB/s for each flow.

    `G0->G0->G4` is GPU 0 writing to GPU 4, `G0->G4->G4` GPU 4 reading from GPU 0, and
    `G0->G0->C1->G4->G4` a bounce through NUMA node 1's host memory. Options follow in braces:
    `{blocks=8,fifo=512K}`. Sets are measured in random order, each until its rates are certain.
    Figures from a model are marked as simulated.

    Under mpirun or srun, with a rank or more on each host, sets may span hosts: `h0` and `h1` are
    their names, `N0` is a NIC.

    Examples:

        tccl measure "G0->G0->G1{blocks=16} G1->G1->G0{blocks=16}"
        tccl measure "G0->G0->G4 G1->G1->G5" --simulate asus-esc8000a-e13p
        tccl measure "G0->G0->C0->G1->G1" --backend host --devices 2
        mpirun -N 1 tccl measure "h0.C0->h0.N0->h1.N0->h1.N0->h1.C0"
    """
    with ExitStack() as stack:
        # Before anything can go wrong: of a job's ranks, the controller alone says it.
        job = stack.enter_context(job_of_ranks()) if simulate is None and in_job() else None
        check_quoted(sets, "G0->G0->G1")
        wanted = [parse_set(text) for text in sets]
        if simulate is not None:
            hardware = {"--backend": backend, "--devices": devices, "--target": target}
            over_hosts = {"--interfaces": interfaces, "--network": network}
            refuse({**hardware, "--meeting": meeting, "--check": check, **over_hosts}, WITH_MODEL)
            model = load_machine(simulate)
            answers = _simulated(model, wanted, noise=noise or 0.0, seed=seed or 0, journal=journal)
        else:
            refuse({"--noise": noise, "--seed": seed}, WITHOUT_MODEL)
            careful = care(target=target, meeting=meeting, check=check)
            if job is None:
                refuse({"--interfaces": interfaces, "--network": network}, OUTSIDE_JOB)
                place = measured_machine(backend, devices)
                gpus = check_sets(place.machine, wanted)
                with Hardware(place, gpus=gpus, care=careful) as source:
                    answers = _measured(source, place.machine.name, wanted, journal=journal)
                # At its end it has looked once more at what the GPUs are like.
                answers = msgspec.structs.replace(answers, notices=source.notices)
            else:
                session = open_cluster(
                    job,
                    backend=backend,
                    devices=devices,
                    interfaces=interfaces,
                    network=network,
                    careful=careful,
                )
                stack.enter_context(session)
                session.only = session.check_sets(wanted)
                over = ClusterHardware(session, rehearsal=backend == "host")
                name = f"hosts {', '.join(session.only)}"
                answers = _measured(over, name, wanted, journal=journal)
        texts = [" ".join(text.split()) for text in sets]
        rows = list(zip(texts, answers.measurements, strict=True))
        if json:
            print_json([_entry(*row) for row in rows])
        else:
            _print_table(answers, rows)
        notice_each(answers.notices)
        for row in rows:
            notice_each(_doubts(*row))


class _Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What was found; `conditions` are those of the GPUs meanwhile, "" if none are known."""

    machine: str
    measurements: Sequence[Measurement]
    conditions: str = ""
    notices: tuple[str, ...] = ()


def _simulated(
    model: MachineModel,
    sets: Sequence[TransferSet],
    *,
    noise: float,
    seed: int,
    journal: Path | None,
) -> _Answers:
    source = Simulator(model, noise=noise, seed=seed)
    if journal is None:
        return _Answers(machine=model.name, measurements=source.measure(sets))
    # Sets that the machine cannot run are refused before the journal is touched.
    Simulator(model).measure(sets)
    header = simulation_header(model, noise=noise, seed=seed)
    with _journal(source, journal, header) as journalled:
        return _Answers(machine=model.name, measurements=journalled.measure(sets))


def _measured(
    source: Hardware | ClusterHardware,
    name: str,
    sets: Sequence[TransferSet],
    *,
    journal: Path | None,
) -> _Answers:
    with ProgressLine() as line, ExitStack() as stack:
        source.on_set = lambda count: line.measured(count, len(sets))
        asked = RememberingSource(source)
        if journal is not None:
            asked = stack.enter_context(_journal(source, journal, source.header))
        try:
            found = asked.measure(sets)
        except (KeyboardInterrupt, TcclError):
            # The last set that was measured may not have been kept: the disk may be full.
            if journal is not None and asked.sets_measured:
                notice(f"sets measured and kept in {journal}: {asked.sets_measured} of {len(sets)}")
            raise
        conditions = source.conditions
    return _Answers(machine=name, measurements=found, conditions=conditions, notices=source.notices)


@contextmanager
def _journal(
    source: BandwidthSource, path: Path, header: JournalHeader
) -> Iterator[JournalledSource]:
    with JournalledSource(source, path, header) as journalled:
        notice_each(journalled.notices)
        yield journalled


def simulation_header(model: MachineModel, *, noise: float = 0.0, seed: int = 0) -> JournalHeader:
    """Whose a simulation's journal is: the model's and its parameters', at this noise."""
    content = model_to_json(model) + parameters_to_json(bundled_parameters())
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    noisy = f", noise {noise:g}, seed {seed}" if noise else ""
    return JournalHeader(machine=model.name, identity=f"model {digest}{noisy}", simulated=True)


def simulation_noise(header: JournalHeader) -> tuple[float, int]:
    """The noise and seed of the simulation that a header is of; 0 and 0 without noise."""
    found = _NOISE.search(header.identity)
    if found is None or found.end() != len(header.identity):
        return (0.0, 0)
    return (float(found[1]), int(found[2]))


def in_given_order(
    text: str, measurement: Measurement, values: Sequence[float] | None = None
) -> tuple[float, ...]:
    """The rates of a set's flows in the order of `text`; the measurement has its own order.

    Flows that are alike were measured one after the other, and are given out so. `values` are
    something else of each flow, in the measurement's order.
    """
    found = measurement.gbps if values is None else values
    waiting = dealt(measurement.transfers.flows, found)
    return tuple(waiting[parse_flow(part)].pop(0) for part in text.split())


def spread(measurement: Measurement) -> tuple[float, ...]:
    """For each flow how wide the 95 % interval of its rate is, relative to it; inf below 6 repeats.

    In the measurement's order.
    """
    from tccl_profiler.statistics import median_interval, relative_width  # noqa: PLC0415

    rows = zip(measurement.samples_gbps, measurement.gbps, strict=True)
    return tuple(relative_width(median_interval(row), middle) for row, middle in rows)


def _entry(text: str, measurement: Measurement) -> dict[str, Any]:
    gbps = in_given_order(text, measurement)
    entry: dict[str, Any] = {
        "set": text,
        "gbps": gbps,
        "total_gbps": sum(gbps),
        "simulated": measurement.simulated,
        "assumed": measurement.assumed,
    }
    if not measurement.simulated:
        entry |= {
            "skew_us": measurement.skew_us,
            "skew_error_us": measurement.skew_error_us,
            "overlap": measurement.overlap,
            "overlap_at_least": measurement.overlap_at_least,
            "spread": in_given_order(text, measurement, spread(measurement)),
            "repeats": len(measurement.samples_gbps[0]),
            "settled": measurement.settled,
            "outliers": measurement.outliers,
        }
    return entry


def _doubts(text: str, measurement: Measurement) -> Iterator[str]:
    """What makes a measurement doubtful, in plain words."""
    if measurement.simulated:
        return
    repeats, far = len(measurement.samples_gbps[0]), len(measurement.outliers)
    if not measurement.settled:
        yield (
            f"{text}: rates vary: after {repeats} repeats the 95 % interval is still "
            f"{_half(max(spread(measurement)))} wide; other work on this machine, clocks or heat "
            "may disturb it, and a larger --target accepts it"
        )
    if far > repeats * _MANY:
        yield f"{text}: repeats far from the others: {far} of {repeats}; they count as well"
    yield from overlap_notices(text, measurement)


def _half(width: float) -> str:
    return f"\u00b1 {width / 2:.1%}" if width < float("inf") else "?"


def _print_table(answers: _Answers, rows: Sequence[tuple[str, Measurement]]) -> None:
    measured = any(not measurement.simulated for _, measurement in rows)
    title = f"Transfer sets on {answers.machine}"
    more = ("interval", "repeats") if measured else ()
    table = Table("Flow", "GB/s", *more, "Figures", title=title, caption=answers.conditions or None)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:-1]:
        column.justify = "right"
    for text, measurement in rows:
        _add_rows(table, text, measurement)
    results().print(table)


def _add_rows(table: Table, text: str, measurement: Measurement) -> None:
    mark = provenance(simulated=measurement.simulated, assumed=measurement.assumed)
    gbps = in_given_order(text, measurement)
    together = [mark]
    beside: list[list[str]] = [[] for _ in gbps]
    if not measurement.simulated:
        repeats = str(len(measurement.samples_gbps[0]))
        widths = in_given_order(text, measurement, spread(measurement))
        beside = [[_half(width), repeats] for width in widths]
        together = ["", repeats, f"{mark}{_timing(measurement)}"]
    for flow, rate, more in zip(text.split(), gbps, beside, strict=True):
        table.add_row(flow, f"{rate:.2f}", *more, mark)
    table.add_row("together", f"{sum(gbps):.2f}", *together, style="bold")
    table.add_section()


def _timing(measurement: Measurement) -> str:
    if measurement.skew_us is None or measurement.overlap is None:
        return ""
    error = f" \u00b1 {measurement.skew_error_us:.1f}" if measurement.skew_error_us else ""
    least = "at least " if measurement.overlap_at_least else ""
    return f", skew {measurement.skew_us:.1f}{error} us, overlap {least}{measurement.overlap:.0%}"
