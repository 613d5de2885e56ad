"""`tccl export`: a plan's files for a runtime, elsewhere or for another version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tccl_py.cli.arguments import notice, notice_each, parse_gpus, write_result
from tccl_py.cli.cluster_files import export_cluster
from tccl_py.cli.cluster_kind import refuse_cluster
from tccl_py.cli.interrupts import interrupts_put_off
from tccl_py.cli.plan_source import ElsewhereError, Here, journal_contents, measured_source
from tccl_py.cli.progress import ProgressLine
from tccl_py.cluster_plan.plan import is_cluster_plan
from tccl_py.emitters.plan_files import GRAPH_FILE
from tccl_py.emitters.tccl_xml import tccl_xml
from tccl_py.errors import InputError, SourceLostError
from tccl_py.measurements.measurement import Measurement
from tccl_py.measurements.memory import RememberingSource
from tccl_py.plan.database import DEFAULT_MAX_SETS, Export, make_database
from tccl_py.plan.directory import (
    JOURNAL_FILE,
    machine_file,
    nccl_files,
    planned_model,
    write_nccl_files,
)
from tccl_py.plan.plan import Plan, load_plan
from tccl_py.runtimes.nccl.settings import check_settings
from tccl_py.runtimes.nccl.transport import hop_space
from tccl_py.runtimes.nccl.versions import version_facts
from tccl_py.search.problem import Reporter, SilentReporter
from tccl_py.simulator.source import Simulator
from tccl_py.transfers.transfer import TransferSet

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
    the model of a simulated plan, on the machine itself of a measured one. What the plan has and
    the file cannot have is said in notices, and in a comment of the file.

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
    refuse_cluster(
        directory,
        "plan a machine of it alone: the file made of that has chains for jobs of several nodes",
    )
    if max_sets is not None and max_sets < 1:
        raise InputError("--max-sets", f"is {max_sets}", "one set at least")
    wanted = Export(
        subsets=_subsets(subsets),
        nic=nic,
        max_sets=DEFAULT_MAX_SETS if max_sets is None else max_sets,
    )
    _export_tccl(directory, output, wanted)


def _refuse(options: dict[str, object], runtime: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(
                name,
                f"is for another runtime, {runtime}",
                f"add --runtime {runtime}, or leave it out",
            )


def _export_nccl(directory: Path, output: Path | None, version: str | None) -> None:
    plan = load_plan(directory)
    if version is not None:
        plan = for_version(plan, version)
    if output is None:
        print(nccl_files(plan, directory)[GRAPH_FILE], end="")
        return
    count = write_nccl_files(plan, output)
    notice(f"wrote {count} files to {output}")


def _export_tccl(directory: Path, output: Path | None, wanted: Export) -> None:
    plan = load_plan(directory)
    if output is not None and (output.is_file() or output.is_dir()):
        raise InputError(str(output), "already exists", "name a new file")
    place = directory if directory.is_dir() else directory.parent
    with interrupts_put_off(), _answers(plan, place) as (source, reporter):
        made = make_database(plan, source, export=wanted, reporter=reporter)
    text = tccl_xml(made.database, notes=made.notes)
    write_result(text, output)
    notice_each(made.notes)
    if output is not None:
        chains = sum(len(part.chains) for part in made.database.inter)
        notice(f"wrote {len(made.database.intra)} rings and {chains} chains to {output}")


def _subsets(text: str | None) -> tuple[tuple[int, ...], ...] | None:
    """The sets of GPUs in `0-3 4-7 0,4`; None stays None.

    Raises:
        InputError: none, or one of them is no list of GPUs.
    """
    if text is None:
        return None
    lists = text.split()
    if not lists:
        raise InputError("--subsets", "names no set of GPUs", "write lists, as '0-3 4-7 0,4'")
    return tuple(tuple(sorted(parse_gpus(one))) for one in lists)


class _JournalOnly:
    """A source without a machine: what the journal does not have, nobody can say."""

    simulated = False

    def __init__(self, why: ElsewhereError) -> None:
        self._why = why

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Refuse.

        Raises:
            SourceLostError: always; the set is named.
        """
        raise SourceLostError(
            f"{self._why.where}: {self._why.what}; its journal does not have {sets[0]}, so "
            f"{self._why.right}"
        )


@contextmanager
def _answers(plan: Plan, directory: Path) -> Iterator[tuple[RememberingSource, Reporter]]:
    """What answers sets, the plan's model or its journal and machine, and who watches."""
    with ExitStack() as stack:
        if plan.simulated:
            source = _simulated(plan, directory)
            yield source, stack.enter_context(ProgressLine())
            return
        journal = directory / JOURNAL_FILE
        try:
            opened = measured_source(plan, journal, Here(), otherwise="export it there")
            source = stack.enter_context(opened)
        except ElsewhereError as why:
            known = journal_contents(plan, journal).measurements
            source = RememberingSource(_JournalOnly(why), known)
        # What is measured has a line of its own.
        yield source, SilentReporter()


def _simulated(plan: Plan, directory: Path) -> RememberingSource:
    model = planned_model(plan, directory)
    if model is None:
        raise InputError(
            str(machine_file(plan, directory)),
            "holds no model to simulate by",
            "plan again with `tccl plan --simulate`",
        )
    return RememberingSource(Simulator(model))


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
