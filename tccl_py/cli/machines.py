"""`tccl machines`: the bundled machine models, and one of them in detail."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer
from rich.table import Table

from tccl_py.cli.arguments import JsonOption, print_json, results
from tccl_py.model.machine import Machine, PciDevice, PciLink
from tccl_py.simulator.descriptions import bundled_names, load_bundled, load_machine
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.parameters import figures_of


def machines(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MACHINE",
            help="A machine to show in detail; without it, a list.",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the bundled machine models, or show one machine in detail.

    The list says how many of a model's figures were measured on such a machine, how many are
    published ones, and how many are assumed from other machines or data sheets.

    Example:

        tccl machines supermicro-h12dsg-8x3090
    """
    models = [load_bundled(one) for one in bundled_names()] if name is None else []
    if name is not None:
        _show(load_machine(name), json=json)
    elif json:
        print_json([summary(model) for model in models])
    else:
        _print_list(models)


def summary(model: MachineModel) -> dict[str, Any]:
    """What the list says of a model; the keys are kept stable."""
    machine = model.machine
    return {
        "name": model.name,
        "gpus": len(machine.gpus),
        "gpu": _gpu_names(machine),
        "numa_nodes": len(machine.numa_nodes),
        "nics": len(machine.nics),
        "figures": _figures(model),
        "note": model.note,
        "source": model.source,
    }


def _gpu_names(machine: Machine) -> str:
    kinds = (gpu.name or (f"sm {gpu.sm}" if gpu.sm else "GPU") for gpu in machine.gpus)
    return ", ".join(dict.fromkeys(kinds))


def _figures(model: MachineModel) -> dict[str, int]:
    """How many figures come from where; a figure counts once wherever it is used."""
    counts = Counter(str(figure.provenance) for _, figure in figures_of(model))
    return {kind: counts[kind] for kind in ("measured", "published", "assumed")}


def _figures_text(model: MachineModel) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in _figures(model).items() if count)


def _print_list(models: list[MachineModel]) -> None:
    table = Table("Name", "GPUs", "NUMA nodes", "NICs", "Figures", "Note")
    for column in table.columns[1:4]:
        column.justify = "right"
    table.columns[0].no_wrap = True
    for model in models:
        machine = model.machine
        counts = (str(len(part)) for part in (machine.gpus, machine.numa_nodes, machine.nics))
        table.add_row(model.name, *counts, _figures_text(model), model.note)
    results().print(table)


def _show(model: MachineModel, *, json: bool) -> None:
    if json:
        print_json({**summary(model), "machine": model.machine, "knowledge": model.knowledge})
        return
    out = results()
    table = Table(show_header=False, box=None)
    for label, text in _lines(model):
        table.add_row(label, text)
    out.print(table)
    out.print(_devices(model.machine))


def _lines(model: MachineModel) -> list[tuple[str, str]]:
    machine = model.machine
    lines = [
        ("Name", model.name),
        ("Note", model.note),
        ("Source", model.source or "none: every figure is assumed"),
        ("Figures", _figures_text(model)),
        ("GPUs", f"{len(machine.gpus)}: {_gpu_names(machine)}"),
        ("NUMA nodes", ", ".join(node.id for node in machine.numa_nodes)),
        ("NVLinks", _nvlinks(machine)),
        ("Peer access", _peer_access(model)),
        ("Slow together", "; ".join(rule.name for rule in model.congestion) or "nothing known"),
    ]
    return [(label, text) for label, text in lines if text]


def _nvlinks(machine: Machine) -> str:
    links = (f"{link.source}-{link.target} x{link.count}" for link in machine.nvlinks)
    return ", ".join(links) or "none"


def _peer_access(model: MachineModel) -> str:
    knowledge, machine = model.knowledge, model.machine
    pairs = [(i, j) for i in machine.gpu_indices for j in machine.gpu_indices if i != j]
    direct = sum(knowledge.can_access(machine, *pair) for pair in pairs)
    return f"{direct} of {len(pairs)} ordered pairs of GPUs"


def _devices(machine: Machine) -> Table:
    table = Table("Device", "What", "NUMA node", "PCI link", "Below")
    devices: tuple[PciDevice, ...] = (*machine.gpus, *machine.nics)
    for device in devices:
        node = f"C{machine.numa_of(device.id)}"
        bridges = " < ".join(machine.ancestors(device.id)[:-1])
        what = getattr(device, "name", "")
        table.add_row(device.id, what, node, _link(device.link), bridges)
    return table


def _link(link: PciLink) -> str:
    speed = f"{link.speed_gts:g} GT/s" if link.speed_gts else "speed unknown"
    return speed + (f" x{link.width}" if link.width else "")
