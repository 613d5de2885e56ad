"""`tccl export`: a plan's files for a runtime, elsewhere or for another version."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from tccl_py.cli import options
from tccl_py.cli.options import in_range, one_of, opt, parse_gpus, refuse
from tccl_py.cli.output import ProgressLine
from tccl_py.cli.process import notice, notice_each, write_result
from tccl_py.errors import InputError
from tccl_py.interrupts import interrupts_put_off
from tccl_py.plan.again import (
    ElsewhereError,
    journal_of,
    journal_source,
    known_model,
    measured_again,
)
from tccl_py.plan.directory import write_nccl_files
from tccl_py.plan.files import GRAPH_FILE, nccl_files
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.variants import for_version
from tccl_py.search.problem import Reporter
from tccl_py.sources.memory import RememberingSource
from tccl_py.sources.opening import open_source
from tccl_py.tccl_fork.database import MadeDatabase, make_database, tccl_xml
from tccl_py.tccl_fork.search import DEFAULT_MAX_SETS, Export, check_plan_for_fork

RUNTIMES = ("nccl", "tccl")


def export(
    directory: options.PlanPath,
    *,
    runtime: Annotated[str, opt("nccl|tccl", "Unmodified NCCL, or TCCL's fork of 2.18.")] = "nccl",
    output: Annotated[
        Path | None, opt("DIR|FILE", "A new directory, for tccl a new file.", "-o", "--output")
    ] = None,
    nccl: Annotated[str | None, opt("VERSION", "The jobs' NCCL; the plan's if not given.")] = None,
    subsets: Annotated[str | None, opt("LISTS", "For tccl: sets of GPUs, as '0-3 0,4'.")] = None,
    nic: Annotated[int | None, opt("N", "For tccl: the NIC between nodes, as N0 is 0.")] = None,
    max_sets: Annotated[int | None, opt("N", "For tccl: sets to measure at most.")] = None,
) -> None:
    """Write the files that a runtime reads, or print the main one.

    For nccl these are the graph files, nccl.conf and env.sh; for a cluster's plan a graph file for
    each host, and the order of hosts for launchers.

    For tccl: the XML file of the TCCL fork (TCCL_XML_FILE, with NCCL_ALGO=TCCL,RING), whose runtime
    moves every hop by the mechanism in the file. Rings are searched for every set of GPUs (above 8
    GPUs for all together, and for those of --subsets), and chains over every set for jobs of
    several equal nodes: by the model of a simulated plan, on the machine itself of a measured plan.
    A cluster's plan needs equal nodes and a model. Parts of the plan that the file cannot express
    are named in notices, and in a comment of the file.

    Examples:

        tccl export my-plan --runtime nccl -o /etc/tccl
        tccl export my-plan --runtime tccl -o my-plan.xml
    """
    one_of("--runtime", runtime, RUNTIMES)
    of_tccl = {"--subsets": subsets, "--nic": nic, "--max-sets": max_sets}
    other = "tccl" if runtime == "nccl" else "nccl"
    right = f"add --runtime {other}, or leave it out"
    refuse(
        of_tccl if runtime == "nccl" else {"--nccl": nccl},
        ("", f"is for another runtime, {other}", right),
    )
    if runtime == "tccl":
        if max_sets is not None:
            in_range("--max-sets", max_sets, 1_000_000)
        wanted = Export(
            subsets=_gpu_sets(subsets),
            nic=nic,
            max_sets=DEFAULT_MAX_SETS if max_sets is None else max_sets,
        )
        _export_tccl(directory, output, wanted)
        return
    plan = load_plan(directory)
    plan = plan if nccl is None else for_version(plan, nccl)
    if output is not None:
        notice(f"wrote {write_nccl_files(plan, output)} files to {output}")
        return
    plan.check_single(directory, "there is a file for each host: name a new directory by --output")
    print(nccl_files(plan, directory)[GRAPH_FILE], end="")


def _gpu_sets(text: str | None) -> tuple[tuple[int, ...], ...] | None:
    """Parse sets of GPUs, as `0-3 4-7 0,4`; None stays None."""
    if text is None:
        return None
    lists = text.split()
    if not lists:
        raise InputError("--subsets", "names no set of GPUs", "write lists, as '0-3 4-7 0,4'")
    return tuple(tuple(sorted(parse_gpus(part))) for part in lists)


def _export_tccl(directory: Path, output: Path | None, wanted: Export) -> None:
    """Write the file of the TCCL fork's runtime to the new file `output`, or print it."""
    if output is not None and (output.is_file() or output.is_dir()):
        raise InputError(str(output), "already exists", "name a new file")
    place = directory if directory.is_dir() else directory.parent
    with interrupts_put_off():
        plan = load_plan(directory)
        check_plan_for_fork(plan, where=str(directory))
        made = _made(plan, place, wanted)
    write_result(tccl_xml(made.database, notes=made.notes), output)
    notice_each(made.notes)
    if output is not None:
        rings = len(made.database.intra)
        chains = sum(len(part.chains) for part in made.database.inter)
        said = f"{rings} ring{'s' * (rings != 1)} and {chains} chain{'s' * (chains != 1)}"
        notice(f"wrote {said} to {output}")


def _made(plan: Plan, directory: Path, wanted: Export) -> MadeDatabase:
    """Make the database by the plan's model, by its machine, or by its journal alone."""
    notices: tuple[str, ...] = ()
    source: RememberingSource
    with ExitStack() as stack:
        line = stack.enter_context(ProgressLine())
        # A source that measures reports by itself.
        reporter: Reporter | None = line if plan.simulated else None
        if plan.simulated:
            source = open_source(known_model(plan, directory))
        else:
            try:
                source, notices = measured_again(plan, directory, otherwise="export it there")
                source.watch(line.measured)
            except ElsewhereError as why:
                contents = journal_of(plan, directory)
                source, notices = journal_source(contents, elsewhere=why), contents.notices
        notice_each(notices)
        with source:
            made = make_database(plan, source, export=wanted, reporter=reporter)
        notice_each(source.notices)
    return made
