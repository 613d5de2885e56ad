"""`tccl discover` and `validate`: descriptions of machines, and verdicts by them."""

from __future__ import annotations

from pathlib import Path

import typer
from msgspec.structs import replace

from tccl_py.cli import options
from tccl_py.cli.options import (
    MACHINE_HELP,
    arg,
    flag,
    gpus_argument,
    opt,
    p2p_argument,
)
from tccl_py.cli.output import BAD, GOOD, grid, print_table, results
from tccl_py.cli.process import ANSWER_IS_NO, notice, notice_each, print_json, write_result
from tccl_py.errors import InputError, spell
from tccl_py.files import fill, pick, read_bytes, read_text
from tccl_py.model.cards import assume_p2p
from tccl_py.model.cluster import parse_gpus
from tccl_py.model.machine import Machine, description_to_json
from tccl_py.nccl import validator
from tccl_py.nccl.variables import given_variables, list_unfollowed, notices
from tccl_py.nccl.versions import ASSUMED, asked_version, known_versions, say_unchecked
from tccl_py.plan.text import ring_lines
from tccl_py.planning.installed_nccl import verdict_here
from tccl_py.readers.live import discover_machine, gpu_count
from tccl_py.readers.nccl_topology import read_nccl_topology
from tccl_py.readers.nvidia_smi import read_nvidia_smi
from tccl_py.simulator.descriptions import bundled_names, load_bundled, load_machine
from tccl_py.simulator.model import MachineModel, device_table, facts, model_cells, summarize


def discover(
    name: str | None = arg("MACHINE", "A machine to show: a bundled model, or a file.", None),
    *,
    nccl_topology: Path | None = opt("FILE", "Read an NCCL topology XML."),
    nvidia_smi: Path | None = opt("FILE", "Read output of `nvidia-smi topo -m`, and of -L."),
    p2p: str | None = opt("yes|no", "Whether GPUs without NVLink have P2P, if FILE does not say."),
    output: Path | None = options.OUTPUT,
    json: bool = flag("--json", "Print what is shown or listed as JSON."),
) -> None:
    """Describe a machine's GPUs, NUMA nodes, PCI tree, NVLinks and NICs as JSON.

    Without a file to read, this machine is asked: the NVIDIA driver and sysfs. Every command takes
    the JSON as its MACHINE. A named MACHINE is shown as a table. Without GPUs here the bundled
    models are listed, with the parameters that were measured, published, or assumed.

    Examples:

        tccl discover -o box.json
        tccl discover supermicro-h12dsg-8x3090
        tccl validate graph.xml --machine box.json
        (nvidia-smi topo -m; nvidia-smi topo -p2p r; nvidia-smi -L) > box.txt
        tccl discover --nvidia-smi box.txt -o box.json
    """
    if name is not None:
        _show(load_machine(name), json=json)
        return
    fingerprint = None
    if nccl_topology is not None:
        machine = read_nccl_topology(nccl_topology)
        knowledge = assume_p2p(machine)
    elif nvidia_smi is not None:
        machine, knowledge = read_nvidia_smi(nvidia_smi)
    else:
        try:
            gpu_count()
        except InputError as error:
            if output is not None:
                raise
            notice(f"{error}; these are the bundled models")
            _list_models(json=json)
            return
        machine, knowledge, fingerprint = discover_machine()
    knowledge = knowledge.with_p2p(machine, p2p_argument(p2p))
    notice_each(f"assumed: {text}" for text in knowledge.assumptions(machine))
    write_result(description_to_json(machine, knowledge, fingerprint), output)
    if output is not None:
        gpus = spell(len(machine.gpus), "GPU")
        notice(f"wrote {output}: {machine.name} with {gpus}")


def _list_models(*, json: bool) -> None:
    models = [load_bundled(bundled) for bundled in bundled_names()]
    if json:
        print_json([summarize(model) for model in models])
    else:
        headers = ("Name", "GPUs", "NUMA nodes", "NICs", "Parameters", "Note")
        print_table(results(), [headers, *map(model_cells, models)])


def _show(model: MachineModel, *, json: bool) -> None:
    if json:
        print_json(replace(summarize(model), **pick(model, "machine", "knowledge")))
        return
    out = results()
    out.print(grid(facts(model)))
    print_table(out, device_table(model.machine))


def validate(
    graph: Path = arg("GRAPH.xml", "The file meant for NCCL_GRAPH_FILE."),
    *,
    machine: str | None = opt(
        "MACHINE", f"What every node is; if not given, NCCL here is asked. {MACHINE_HELP}"
    ),
    gpus: str | None = opt("LIST", "The job's GPUs on every node, in rank order."),
    nodes: int | None = opt("N", "How many equal nodes; one if not given."),
    nccl: str | None = opt(
        "VERSION", f"{ASSUMED} if not given; {', '.join(known_versions())} were checked."
    ),
    env: list[str] | None = opt("NAME=VALUE", "Variables of the job."),
    json: bool = options.JSON,
) -> None:
    """Say what NCCL will do with a graph file: use, ignore, clip or reject it, or crash.

    Without --machine the installed NCCL starts with the file on this machine's idle GPUs, in
    seconds. With --machine the verdict follows from NCCL's rules, for any machine and version.

    Exit codes: 0 NCCL uses the file as written, 1 the contrary, 2 no verdict.

    Examples:

        tccl validate graph.xml
        tccl validate graph.xml --machine h200x4-vm --env NCCL_P2P_LEVEL=SYS
    """
    variables = given_variables(env or ())
    notice_each(notices(variables))
    if machine is None:
        chosen = None if gpus is None else parse_gpus(gpus, "--gpus")
        verdict = verdict_here(read_text(graph), chosen, variables, where=str(graph))
    else:
        notice_each(list_unfollowed(variables))
        model, version = load_machine(machine), ASSUMED if nccl is None else asked_version(nccl)
        if doubt := say_unchecked(version):
            notice(doubt)
        verdict = validator.validate(
            # NCCL reads bytes, whatever they are in a comment.
            read_bytes(graph).decode("utf-8", "surrogateescape"),
            _as_told(model.machine, variables.get("NCCL_TOPO_FILE", "")),
            model.knowledge,
            gpus=gpus_argument(gpus, model.machine),
            nodes=1 if nodes is None else nodes,
            version=version,
            environment=variables,
            where=str(graph),
        )
    if json:
        print_json(fill(validator.GraphVerdict, verdict))
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
    topology = read_nccl_topology(Path(path))
    if topology.gpu_indices != machine.gpu_indices:
        raise InputError(path, f"has other GPUs than {machine.name}", "name a file of that machine")
    notice(f"NCCL takes the machine for what {path} says (NCCL_TOPO_FILE)")
    return topology
