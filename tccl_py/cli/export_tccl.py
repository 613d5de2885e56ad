"""`tccl export --runtime tccl`: the TCCL fork's file, and what answers the sets it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tccl_py.cli.arguments import notice, notice_each, parse_gpus, write_result
from tccl_py.cli.interrupts import interrupts_put_off
from tccl_py.cli.plan_source import ElsewhereError, Here, journal_contents, measured_source
from tccl_py.cli.progress import ProgressLine
from tccl_py.cluster_plan.plan import is_cluster_plan, load_cluster_plan
from tccl_py.errors import InputError, SourceLostError
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import TransferSet
from tccl_py.plan.directory import JOURNAL_FILE, known_model
from tccl_py.plan.plan import Plan, load_plan
from tccl_py.search.problem import Reporter, SilentReporter
from tccl_py.simulator.source import Simulator
from tccl_py.sources.memory import RememberingSource
from tccl_py.tccl_fork.alike import alike_nodes, alike_notes, class_model
from tccl_py.tccl_fork.build import Export, MadeDatabase, make_database
from tccl_py.tccl_fork.xml import tccl_xml


def export_tccl(directory: Path, output: Path | None, wanted: Export) -> None:
    """Write the file of the TCCL fork's runtime to the new file `output`, or print it.

    Raises:
        InputError: no plan or place, a plan of unequal nodes, or options that do not fit the plan.
        SourceLostError: a set is needed that nobody here can measure.
    """
    if output is not None and (output.is_file() or output.is_dir()):
        raise InputError(str(output), "already exists", "name a new file")
    place = directory if directory.is_dir() else directory.parent
    with interrupts_put_off():
        if is_cluster_plan(directory):
            made, notes = _of_cluster(directory, place, wanted)
        else:
            made = _of_machine(directory, place, wanted)
            notes = made.notes
    write_result(tccl_xml(made.database, notes=notes), output)
    notice_each(notes)
    if output is not None:
        rings = len(made.database.intra)
        chains = sum(len(part.chains) for part in made.database.inter)
        told = f"{rings} ring{'s' * (rings != 1)} and {chains} chain{'s' * (chains != 1)}"
        notice(f"wrote {told} to {output}")


def _of_machine(directory: Path, place: Path, wanted: Export) -> MadeDatabase:
    plan = load_plan(directory)
    with _answers(plan, place) as (source, reporter):
        return make_database(plan, source, export=wanted, reporter=reporter)


def _of_cluster(
    directory: Path, place: Path, wanted: Export
) -> tuple[MadeDatabase, tuple[str, ...]]:
    plan = load_cluster_plan(directory)
    nodes = alike_nodes(plan, where=str(directory))
    model = class_model(plan, place)
    with ProgressLine() as line:
        made = make_database(nodes, Simulator(model), export=wanted, reporter=line)
    return made, (*made.notes, *alike_notes(plan, made.database))


def gpu_sets(text: str | None) -> tuple[tuple[int, ...], ...] | None:
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
    return RememberingSource(Simulator(known_model(plan, directory)))
