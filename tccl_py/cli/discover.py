"""`tccl discover`: a machine's structure as JSON, from the machine or from what others printed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tccl_py.cli.arguments import notice, write_result
from tccl_py.errors import InputError
from tccl_py.model.knowledge import Fingerprint, Knowledge
from tccl_py.model.machine import Machine
from tccl_py.readers.live import discover_machine
from tccl_py.readers.nccl_topology import read_nccl_topology
from tccl_py.readers.nvidia_smi import read_nvidia_smi
from tccl_py.simulator.descriptions import description_to_json

_Found = tuple[Machine, Knowledge | None, Fingerprint | None]


def discover(
    *,
    nccl_topology: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Read an NCCL topology XML, as NCCL_TOPO_DUMP_FILE writes it."
        ),
    ] = None,
    nvidia_smi: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read what `nvidia-smi topo -m` printed."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write to FILE, whole or not at all."),
    ] = None,
) -> None:
    """Describe a machine's GPUs, NUMA nodes, PCI tree, NVLinks and NICs as JSON.

    Without a file to read, this machine is asked: the NVIDIA driver and sysfs. Then the JSON also
    has `knowledge` (which GPUs reach each other directly) and `fingerprint` (GPU UUIDs, driver).
    Every command takes the JSON as its MACHINE.

    Example:

        tccl discover -o box.json
        tccl validate graph.xml --machine box.json
    """
    machine, knowledge, fingerprint = _found(nccl_topology, nvidia_smi)
    write_result(description_to_json(machine, knowledge, fingerprint), output)
    if output is not None:
        notice(f"wrote {output}: {machine.name} with {len(machine.gpus)} GPUs")


def _found(nccl_topology: Path | None, nvidia_smi: Path | None) -> _Found:
    if nccl_topology is not None and nvidia_smi is not None:
        raise InputError(
            "discover", "has both --nccl-topology and --nvidia-smi", "give one file to read"
        )
    if nccl_topology is not None:
        return read_nccl_topology(nccl_topology), None, None
    if nvidia_smi is not None:
        return read_nvidia_smi(nvidia_smi), None, None
    return discover_machine()
