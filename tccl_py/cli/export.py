"""`tccl export`: a plan's files for a runtime, elsewhere or for another version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tccl_py.cli.arguments import notice
from tccl_py.cli.cluster_files import export_cluster
from tccl_py.cli.export_tccl import export_tccl, gpu_sets
from tccl_py.cli.refusals import Refusal, refuse
from tccl_py.cluster_plan.plan import is_cluster_plan
from tccl_py.errors import InputError
from tccl_py.nccl.settings import check_settings
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.versions import version_facts
from tccl_py.nccl.view import view
from tccl_py.plan.directory import nccl_files, write_nccl_files
from tccl_py.plan.files import GRAPH_FILE
from tccl_py.plan.plan import Plan, load_plan
from tccl_py.tccl_fork.build import DEFAULT_MAX_SETS, Export

RUNTIMES = ("nccl", "tccl")


def export(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A plan's directory, or its plan.json.")
    ],
    *,
    runtime: Annotated[
        str,
        typer.Option(
            metavar="nccl|tccl",
            help="The runtime to write for: stock NCCL, or the fork of NCCL 2.18 that TCCL's "
            "authors made.",
        ),
    ] = "nccl",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR|FILE",
            help="A new directory for nccl, a new file for tccl; without it the graph, or that "
            "file, is printed.",
        ),
    ] = None,
    nccl: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Write for this version of NCCL; the plan's if not given."
        ),
    ] = None,
    subsets: Annotated[
        str | None,
        typer.Option(
            metavar="LISTS",
            help="For tccl: the sets of GPUs that jobs use besides all of them, apart by spaces, "
            "as '0-3 4-7 0,4'. All sets if not given, and above 8 GPUs none.",
        ),
    ] = None,
    nic: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="For tccl: the NIC that nodes are joined by, as N0 is 0; the fastest if not "
            "given.",
        ),
    ] = None,
    max_sets: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"For tccl: sets to measure at most before searches are cut short; "
            f"{DEFAULT_MAX_SETS} if not given.",
        ),
    ] = None,
) -> None:
    """Write the files that a runtime reads, or print the one that matters.

    For nccl these are the graph files, nccl.conf and env.sh; of a cluster's plan a graph file for
    each host, and the order of hosts for launchers.

    For tccl it is the XML file of the TCCL fork (TCCL_XML_FILE, with NCCL_ALGO=TCCL,RING), whose
    runtime moves every hop by the mechanism that the file names. Rings are searched for every set
    of GPUs, and chains over every set for jobs of several nodes, which are taken to be alike: by
    the model of a simulated plan, on the machine itself of a measured one. Of a cluster's plan that
    needs equal nodes and a model. What the plan has and the file cannot have is said in notices,
    and in a comment of the file.

    Examples:

        tccl export my-plan --runtime nccl -o /etc/tccl
        tccl export my-plan --runtime tccl -o my-plan.xml
    """
    if runtime not in RUNTIMES:
        raise InputError(
            f"--runtime {runtime[:20]!r}", "is not in this version", f"one of {', '.join(RUNTIMES)}"
        )
    if runtime == "nccl":
        _refuse({"--subsets": subsets, "--nic": nic, "--max-sets": max_sets}, "tccl")
        if is_cluster_plan(directory):
            export_cluster(directory, output, nccl)
        else:
            _export_nccl(directory, output, nccl)
        return
    _refuse({"--nccl": nccl}, "nccl")
    if max_sets is not None and max_sets < 1:
        raise InputError("--max-sets", f"is {max_sets}", "one set at least")
    wanted = Export(
        subsets=gpu_sets(subsets),
        nic=nic,
        max_sets=DEFAULT_MAX_SETS if max_sets is None else max_sets,
    )
    export_tccl(directory, output, wanted)


def _refuse(options: dict[str, object], runtime: str) -> None:
    right = f"add --runtime {runtime}, or leave it out"
    refuse(options, Refusal(what=f"is for another runtime, {runtime}", right=right))


def _export_nccl(directory: Path, output: Path | None, version: str | None) -> None:
    plan = load_plan(directory)
    if version is not None:
        plan = for_version(plan, version)
    if output is None:
        print(nccl_files(plan, directory)[GRAPH_FILE], end="")
        return
    count = write_nccl_files(plan, output)
    notice(f"wrote {count} files to {output}")


def for_version(plan: Plan, version: str) -> Plan:
    """The plan for another version of NCCL, if that moves the rings' hops in the same way.

    Raises:
        InputError: it cannot be given these settings, or would move a hop otherwise.
    """
    settings = check_settings(msgspec.structs.replace(plan.settings, version=version))
    space = hop_space(
        view(plan.machine, plan.knowledge, settings, gpus=plan.gpus), rings_in_set=len(plan.rings)
    )
    for hop in (hop for ring in plan.rings for hop in ring.hops):
        flows = [str(other.flow) for other in space.between(hop.source, hop.target)]
        if hop.flow not in flows:
            raise InputError(
                f"--nccl {version[:20]}",
                f"moves {hop.source} to {hop.target} by {' '.join(flows) or 'its network'}, "
                f"where the plan has {hop.flow}",
                f"make a plan for it: tccl plan --nccl {version[:20]}",
            )
    facts = version_facts(version)
    return msgspec.structs.replace(
        plan,
        settings=settings,
        settings_verified=facts.verified,
    )
