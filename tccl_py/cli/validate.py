"""`tccl validate`: what NCCL will do with a graph file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tccl_py.cli import options
from tccl_py.cli.options import MACHINE_HELP, gpus_argument, opt, refuse
from tccl_py.cli.output import BAD, GOOD, results
from tccl_py.cli.process import ANSWER_IS_NO, notice, print_json
from tccl_py.errors import InputError
from tccl_py.files import picked, read_text
from tccl_py.model.machine import Machine, parse_gpus
from tccl_py.nccl import validator
from tccl_py.nccl.versions import LATEST, known_versions, version_facts
from tccl_py.plan.nccl_here import verdict_here
from tccl_py.readers.nccl_topology import read_nccl_topology
from tccl_py.simulator.descriptions import load_machine

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,99})=(.*)", re.ASCII | re.DOTALL)
_SHOWN_RANKS = 32
_OF_MACHINES = ("", "is about a described machine", "add --machine MACHINE")


def validate(
    graph: Annotated[
        Path, typer.Argument(metavar="GRAPH.xml", help="The file meant for NCCL_GRAPH_FILE.")
    ],
    *,
    machine: Annotated[
        str | None,
        opt("MACHINE", f"What every node is; if not given, NCCL here is asked. {MACHINE_HELP}"),
    ] = None,
    gpus: Annotated[str | None, opt("LIST", "The job's GPUs on every node, in rank order.")] = None,
    nodes: Annotated[int | None, opt("N", "How many equal nodes; one if not given.")] = None,
    nccl: Annotated[
        str | None,
        opt("VERSION", f"{LATEST} if not given; {', '.join(known_versions())} were checked."),
    ] = None,
    env: Annotated[list[str] | None, opt("NAME=VALUE", "Variables of the job.")] = None,
    json: options.Json = False,
) -> None:
    """Say what NCCL will do with a graph file: use, ignore, clip or reject it, or crash.

    Without --machine the installed NCCL starts on this machine's GPUs with the file, in seconds and
    with some 0.5 GiB of each GPU; GPUs in use are left alone. With --machine the verdict follows
    from NCCL's rules, for any machine, number of nodes and version.

    The rings shown are the final channels' rings, as ranks. Exit code 0 says that NCCL uses the
    file as written, 1 the contrary, 2 that no verdict is possible, as without NCCL or GPUs. With
    --env NCCL_TOPO_FILE=PATH the machine is the one in that file.

    Examples:

        tccl validate graph.xml
        tccl validate graph.xml --machine h200x4-vm --env NCCL_P2P_LEVEL=SYS
    """
    given = variables(env or ())
    if machine is None:
        refuse({"--nodes": nodes, "--nccl": nccl}, _OF_MACHINES)
        chosen = None if gpus is None else parse_gpus(gpus)
        verdict = verdict_here(read_text(graph), chosen, given, where=str(graph))
    else:
        model, version = load_machine(machine), LATEST if nccl is None else nccl
        if not version_facts(version).verified:
            nearest = version_facts(version).name
            notice(f"NCCL {version} was not checked; taken for {nearest}, the nearest")
        verdict = validator.validate(
            read_text(graph),
            _as_told(model.machine, given.get("NCCL_TOPO_FILE", "")),
            model.knowledge,
            gpus=gpus_argument(gpus, model.machine),
            nodes=1 if nodes is None else nodes,
            version=version,
            environment=given,
            where=str(graph),
        )
    if json:
        print_json(picked(verdict, "verdict", "reason", "rings"))
    else:
        out = results()
        style = GOOD if verdict.verdict == "used" else BAD
        out.print(f"{graph}: {verdict.verdict}", style=style, soft_wrap=True)
        for line in (verdict.reason, *ring_lines(verdict.rings)):
            out.print(line, soft_wrap=True)
    if verdict.verdict != "used":
        raise typer.Exit(ANSWER_IS_NO)


def _as_told(machine: Machine, path: str) -> Machine:
    """The machine as NCCL sees it by a topology file; as it is if `path` is ""."""
    if not path:
        return machine
    told = read_nccl_topology(Path(path))
    if told.gpu_indices != machine.gpu_indices:
        raise InputError(path, f"has other GPUs than {machine.name}", "name a file of that machine")
    notice(f"NCCL takes the machine for what {path} says (NCCL_TOPO_FILE)")
    return told


def variables(settings: Sequence[str]) -> dict[str, str]:
    """Environment variables from NAME=VALUE texts.

    >>> variables(["NCCL_ALGO=Ring"])
    {'NCCL_ALGO': 'Ring'}
    """
    found: dict[str, str] = {}
    for text in settings:
        match = _VARIABLE.fullmatch(text)
        where = f"--env {text[:60]!r}"
        if match is None:
            raise InputError(where, "sets no variable", "write NAME=VALUE, as NCCL_P2P_LEVEL=SYS")
        name, value = match.groups()
        if found.setdefault(name, value) != value:
            raise InputError(where, f"sets {name} a second time", "give it one value")
    return found


def ring_lines(rings: Sequence[tuple[int, ...]]) -> list[str]:
    """A line for each different ring with the channels that run it.

    >>> ring_lines([(0, 1, 2), (0, 2, 1), (0, 1, 2)])
    ['channels 0 2: 0 1 2', 'channel 1: 0 2 1']
    """
    channels: dict[tuple[int, ...], list[str]] = {}
    for channel, ring in enumerate(rings):
        channels.setdefault(ring, []).append(str(channel))
    lines = []
    for ring, numbers in channels.items():
        shown = " ".join(map(str, ring[:_SHOWN_RANKS]))
        more = f" ... ({len(ring)} ranks)" if len(ring) > _SHOWN_RANKS else ""
        lines.append(f"channel{'s' * (len(numbers) > 1)} {' '.join(numbers)}: {shown}{more}")
    return lines
