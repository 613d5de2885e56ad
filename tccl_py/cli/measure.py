"""`tccl measure`: rates of transfer sets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tccl_py.cli.arguments import (
    MACHINE_HELP,
    JsonOption,
    notice,
    print_json,
    provenance,
    results,
)
from tccl_py.errors import InputError
from tccl_py.measurements.journal import JournalHeader, JournalledSource
from tccl_py.measurements.measurement import Measurement
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.library import model_to_json
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.parameters import bundled_parameters, parameters_to_json
from tccl_py.simulator.source import Simulator
from tccl_py.transfers.transfer import TransferSet, parse_flow, parse_set


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
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="cuda|host",
            help="Measure on this machine's hardware; this version can only simulate.",
        ),
    ] = None,
    noise: Annotated[
        float,
        typer.Option(
            metavar="F", help="Spread of simulated samples, 0 to 1; 0.05 is about 5 percent."
        ),
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the noise; the same gives the same samples.")
    ] = 0,
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
    `{blocks=8,fifo=512K}`. Figures from a model are marked as simulated.

    Example:

        tccl measure "G0->G0->G4 G1->G1->G5" --simulate asus-esc8000a-e13p
    """
    wanted = [parse_set(text) for text in sets]
    model = _simulated_machine(simulate, backend)
    found = _measured(model, wanted, noise=noise, seed=seed, journal=journal)
    texts = [" ".join(text.split()) for text in sets]
    rates = [in_given_order(text, one) for text, one in zip(texts, found, strict=True)]
    if json:
        print_json([_entry(*row) for row in zip(texts, rates, found, strict=True)])
    else:
        _print_table(model.name, list(zip(texts, rates, found, strict=True)))


def _simulated_machine(simulate: str | None, backend: str | None) -> MachineModel:
    if backend is not None:
        raise InputError(
            f"--backend {backend[:20]}", "is not in this version", "give --simulate MACHINE"
        )
    if simulate is None:
        raise InputError(
            "measure", "cannot measure hardware in this version", "give --simulate MACHINE"
        )
    return load_machine(simulate)


def _measured(
    model: MachineModel,
    sets: Sequence[TransferSet],
    *,
    noise: float,
    seed: int,
    journal: Path | None,
) -> Sequence[Measurement]:
    source = Simulator(model, noise=noise, seed=seed)
    if journal is None:
        return source.measure(sets)
    # Sets that the machine cannot run are refused before the journal is touched.
    Simulator(model).measure(sets)
    header = simulation_header(model, noise=noise, seed=seed)
    with JournalledSource(source, journal, header) as journalled:
        for text in journalled.notices:
            notice(text)
        return journalled.measure(sets)


def simulation_header(model: MachineModel, *, noise: float = 0.0, seed: int = 0) -> JournalHeader:
    """Whose a simulation's journal is: the model's and its parameters', at this noise."""
    content = model_to_json(model) + parameters_to_json(bundled_parameters())
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    noisy = f", noise {noise:g}, seed {seed}" if noise else ""
    return JournalHeader(machine=model.name, identity=f"model {digest}{noisy}", simulated=True)


def in_given_order(text: str, measurement: Measurement) -> tuple[float, ...]:
    """The rates of a set's flows in the order of `text`; the measurement has its own order.

    Flows that are alike were measured one after the other, and are given out so.
    """
    waiting: dict[str, list[float]] = {}
    for flow, rate in zip(measurement.transfers.split(), measurement.gbps, strict=True):
        waiting.setdefault(flow, []).append(rate)
    return tuple(waiting[str(parse_flow(part))].pop(0) for part in text.split())


def _entry(text: str, gbps: Sequence[float], measurement: Measurement) -> dict[str, Any]:
    return {
        "set": text,
        "gbps": gbps,
        "total_gbps": sum(gbps),
        "simulated": measurement.simulated,
        "assumed": measurement.assumed,
    }


def _print_table(machine: str, rows: Sequence[tuple[str, Sequence[float], Measurement]]) -> None:
    table = Table("Flow", "GB/s", "Figures", title=f"Transfer sets on {machine}")
    table.columns[0].overflow = "fold"
    table.columns[1].justify = "right"
    for text, gbps, measurement in rows:
        mark = provenance(simulated=measurement.simulated, assumed=measurement.assumed)
        for flow, rate in zip(text.split(), gbps, strict=True):
            table.add_row(flow, f"{rate:.2f}", mark)
        table.add_row("together", f"{sum(gbps):.2f}", mark, style="bold")
        table.add_section()
    results().print(table)
