"""`tccl discover` and `tccl machines`: descriptions of machines, found and bundled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tccl_py.cli import options
from tccl_py.cli.options import opt
from tccl_py.cli.output import grid, results
from tccl_py.cli.process import notice, print_json, write_result
from tccl_py.errors import InputError
from tccl_py.model.machine import Machine, PciDevice, description_to_json
from tccl_py.readers.live import discover_machine
from tccl_py.readers.nccl_topology import read_nccl_topology
from tccl_py.readers.nvidia_smi import read_nvidia_smi
from tccl_py.simulator.descriptions import bundled_names, load_bundled, load_machine
from tccl_py.simulator.model import MachineModel, gpu_names, provenances, summary


def discover(
    *,
    nccl_topology: Annotated[Path | None, opt("FILE", "Read an NCCL topology XML.")] = None,
    nvidia_smi: Annotated[Path | None, opt("FILE", "Read output of `nvidia-smi topo -m`.")] = None,
    output: options.Output = None,
) -> None:
    """Describe a machine's GPUs, NUMA nodes, PCI tree, NVLinks and NICs as JSON.

    Without a file to read, this machine is asked: the NVIDIA driver and sysfs. Then the JSON also
    has `knowledge` (which GPUs reach each other directly) and `fingerprint` (GPU UUIDs, driver).
    Every command takes the JSON as its MACHINE.

    Example:

        tccl discover -o box.json
        tccl validate graph.xml --machine box.json
    """
    if nccl_topology is not None and nvidia_smi is not None:
        what = "has both --nccl-topology and --nvidia-smi"
        raise InputError("discover", what, "give one file to read")
    knowledge = fingerprint = None
    if nccl_topology is not None:
        machine = read_nccl_topology(nccl_topology)
    elif nvidia_smi is not None:
        machine = read_nvidia_smi(nvidia_smi)
    else:
        machine, knowledge, fingerprint = discover_machine()
    write_result(description_to_json(machine, knowledge, fingerprint), output)
    if output is not None:
        notice(f"wrote {output}: {machine.name} with {len(machine.gpus)} GPUs")


def machines(
    name: Annotated[
        str | None,
        typer.Argument(metavar="MACHINE", help="A machine to show in detail; without it, a list."),
    ] = None,
    json: options.Json = False,
) -> None:
    """List the bundled machine models, or show one machine in detail.

    The list says how many of a model's parameters were measured on such a machine, how many are
    published, and how many are assumed from similar machines or data sheets.

    Example:

        tccl machines supermicro-h12dsg-8x3090
    """
    if name is not None:
        _show(load_machine(name), json=json)
        return
    models = [load_bundled(bundled) for bundled in bundled_names()]
    if json:
        print_json([summary(model) for model in models])
    else:
        _print_list(models)


def _provenances_text(model: MachineModel) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in provenances(model).items() if count)


def _print_list(models: list[MachineModel]) -> None:
    table = Table("Name", "GPUs", "NUMA nodes", "NICs", "Parameters", "Note")
    for column in table.columns[1:4]:
        column.justify = "right"
    table.columns[0].no_wrap = True
    for model in models:
        machine = model.machine
        counts = (str(len(part)) for part in (machine.gpus, machine.numa_nodes, machine.nics))
        table.add_row(model.name, *counts, _provenances_text(model), model.note)
    results().print(table)


def _show(model: MachineModel, *, json: bool) -> None:
    if json:
        print_json({**summary(model), "machine": model.machine, "knowledge": model.knowledge})
        return
    machine = model.machine
    links = (f"{link.source}-{link.target} x{link.count}" for link in machine.nvlinks)
    pairs = [(i, j) for i in machine.gpu_indices for j in machine.gpu_indices if i != j]
    direct = sum(model.knowledge.can_access(machine, *pair) for pair in pairs)
    lines = [
        ("Name", model.name),
        ("Note", model.note),
        ("Source", model.source or "none: every parameter is assumed"),
        ("Parameters", _provenances_text(model)),
        ("GPUs", f"{len(machine.gpus)}: {gpu_names(machine)}"),
        ("NUMA nodes", ", ".join(node.id for node in machine.numa_nodes)),
        ("NVLinks", ", ".join(links) or "none"),
        ("Peer access", f"{direct} of {len(pairs)} ordered pairs of GPUs"),
        ("Contention", "; ".join(rule.name for rule in model.congestion) or "none known"),
    ]
    out = results()
    out.print(grid(line for line in lines if line[1]))
    out.print(_devices(machine))


def _devices(machine: Machine) -> Table:
    table = Table("Device", "Name", "NUMA node", "PCI link", "Below")
    devices: tuple[PciDevice, ...] = (*machine.gpus, *machine.nics)
    for device in devices:
        node = f"C{machine.numa_of(device.id)}"
        bridges = " < ".join(machine.ancestors(device.id)[:-1])
        link = f"{device.link.speed_gts:g} GT/s" if device.link.speed_gts else "speed unknown"
        link += f" x{device.link.width}" if device.link.width else ""
        table.add_row(device.id, getattr(device, "name", ""), node, link, bridges)
    return table
