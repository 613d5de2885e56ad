"""`tccl export`: a plan's files for a runtime, elsewhere or for another version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tccl_py.cli.arguments import notice
from tccl_py.emitters.plan_files import GRAPH_FILE
from tccl_py.errors import InputError
from tccl_py.files import write_atomically
from tccl_py.plan.directory import nccl_files
from tccl_py.plan.plan import load_plan
from tccl_py.runtimes.nccl.settings import check_settings
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
        version_facts(nccl)
        settings = check_settings(msgspec.structs.replace(plan.settings, version=nccl))
        plan = msgspec.structs.replace(plan, settings=settings)
    if output is None:
        print(nccl_files(plan, directory)[GRAPH_FILE], end="")
        return
    if output.exists():
        raise InputError(str(output), "already exists", "name a new directory")
    files = nccl_files(plan, output)
    try:
        for name, text in files.items():
            target = output / "nccl" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            str(output), f"cannot be written ({reason})", "choose a place with free space"
        ) from error
    notice(f"wrote {len(files)} files to {output}")
