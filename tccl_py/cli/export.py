"""`tccl export`: a plan's files for a runtime, elsewhere or for another version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tccl_py.cli.arguments import notice
from tccl_py.emitters.plan_files import GRAPH_FILE
from tccl_py.errors import InputError
from tccl_py.plan.directory import nccl_files, write_nccl_files
from tccl_py.plan.plan import Plan, load_plan
from tccl_py.runtimes.nccl.settings import check_settings
from tccl_py.runtimes.nccl.transport import hop_space
from tccl_py.runtimes.nccl.versions import version_facts

RUNTIMES = ("nccl",)


def export(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A plan's directory, or its plan.json.")
    ],
    *,
    runtime: Annotated[
        str, typer.Option(metavar="nccl", help="The runtime to write for; nccl is stock NCCL.")
    ] = "nccl",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="DIR", help="A new directory; the graph is printed without."
        ),
    ] = None,
    nccl: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Write for this version; the plan's if not given."),
    ] = None,
) -> None:
    """Write the files that NCCL reads, or print the graph file.

    Example:

        tccl export my-plan --runtime nccl -o /etc/tccl
    """
    if runtime not in RUNTIMES:
        raise InputError(
            f"--runtime {runtime[:20]!r}", "is not in this version", f"one of {', '.join(RUNTIMES)}"
        )
    plan = load_plan(directory)
    if nccl is not None:
        plan = for_version(plan, nccl)
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
        plan.machine, plan.knowledge, settings, gpus=plan.gpus, rings_in_set=len(plan.rings)
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
    return msgspec.structs.replace(
        plan, settings=settings, settings_verified=version_facts(version).verified
    )
