"""`tccl explain`: which transfers of a plan's rings, and of stock NCCL's, hurt which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from tccl_py.cli.arguments import JsonOption, notice, notice_each, print_json, results
from tccl_py.cli.cluster_kind import refuse_cluster
from tccl_py.cli.explain_text import print_explanation
from tccl_py.cli.hardware import BackendOption, DevicesOption, TargetOption
from tccl_py.cli.interrupts import interrupts_put_off
from tccl_py.cli.measure import simulation_header, simulation_noise
from tccl_py.cli.plan_source import Here, journal_contents, measured_source
from tccl_py.cli.refusals import Refusal, refuse
from tccl_py.errors import InputError, MeasurementError
from tccl_py.explain.explain import DEFAULT_BUDGET, MOST_FINDINGS
from tccl_py.explain.explain import explain as explanation_of
from tccl_py.explain.findings import Explanation, save_explanation
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import TransferSet
from tccl_py.plan.directory import JOURNAL_FILE, check_plan_directory, known_model
from tccl_py.plan.plan import Plan, load_plan
from tccl_py.search.problem import Budget
from tccl_py.simulator.source import Simulator
from tccl_py.sources.journal import JournalledSource, read_journal
from tccl_py.sources.memory import RememberingSource

_OTHERWISE = "explain it there, or add --no-measure"


def explain(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A plan's directory.")],
    *,
    max_sets: Annotated[
        int,
        typer.Option(metavar="N", help="Sets to measure at most that the journal does not hold."),
    ] = DEFAULT_BUDGET.sets or 200,
    max_causes: Annotated[
        int, typer.Option(metavar="N", help="Different slow sets to find at most, for all rings.")
    ] = MOST_FINDINGS,
    no_measure: Annotated[
        bool,
        typer.Option("--no-measure", help="Measure nothing: say what the plan's journal tells."),
    ] = False,
    backend: BackendOption = None,
    devices: DevicesOption = None,
    target: TargetOption = None,
    json: JsonOption = False,
) -> None:
    """Explain a plan: which transfers hurt which, in its rings and in stock NCCL's.

    For each slowdown the smallest set of transfers is named that shows it already, what they
    share, and what the same GPUs would get by writes, reads or bounces. Transfers are left out and
    the rest is measured again: by the model of a simulated plan, on the machine itself of a
    measured one. What the journal in DIR holds is not measured again. The result is kept in
    DIR/explanation.json.

    Examples:

        tccl explain my-plan
        tccl explain my-plan --no-measure
    """
    check_plan_directory(directory)
    if max_sets < 1:
        raise InputError("--max-sets", f"is {max_sets}", "one set at least, or --no-measure")
    if not 1 <= max_causes <= 100:
        raise InputError("--max-causes", f"is {max_causes}", "1 to 100")
    refuse_cluster(
        directory,
        "`tccl show --hops` lists its flows with rates; plan a machine alone to have it explained",
    )
    plan = load_plan(directory)
    options: dict[str, object] = {"--backend": backend, "--devices": devices, "--target": target}
    if plan.simulated or no_measure:
        why = "the plan is simulated" if plan.simulated else "nothing is measured"
        refuse(options, Refusal(what=f"is about hardware, but {why}"))
    budget = Budget(sets=0 if no_measure else max_sets)
    here = Here(backend=backend, devices=devices, target=target)
    with interrupts_put_off(), _source(plan, directory, here, no_measure=no_measure) as source:
        found = explanation_of(plan, source, budget=budget, most=max_causes)
    found = _saved(found, directory)
    if json:
        print_json(found)
    else:
        print_explanation(found, plan, results())


def _source(
    plan: Plan, directory: Path, here: Here, *, no_measure: bool
) -> AbstractContextManager[RememberingSource]:
    """What answers sets for this plan.

    Raises:
        InputError: the journal or the model is missing, damaged or another's, or this is not the
            machine that the plan was measured on.
    """
    journal = directory / JOURNAL_FILE
    if no_measure:
        return nullcontext(_journal_only(plan, journal))
    if plan.simulated:
        return _simulated(plan, directory, journal)
    return measured_source(plan, journal, here, otherwise=_OTHERWISE)


class _Nothing:
    """A source that has no answers: all there is to know is in the journal."""

    def __init__(self, *, simulated: bool) -> None:
        self.simulated = simulated

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Refuse.

        Raises:
            MeasurementError: always.
        """
        raise MeasurementError(f"{sets[0]} is not in the journal")


def _journal_only(plan: Plan, journal: Path) -> RememberingSource:
    contents = journal_contents(plan, journal)
    notice_each(contents.notices)
    return RememberingSource(_Nothing(simulated=plan.simulated), contents.measurements)


@contextmanager
def _simulated(plan: Plan, directory: Path, journal: Path) -> Iterator[RememberingSource]:
    """The model that was saved with the plan, at the noise that the plan was made with."""
    model = known_model(plan, directory, otherwise=", or add --no-measure")
    kept = read_journal(journal).header if journal.is_file() else None
    noise, seed = simulation_noise(kept) if kept is not None else (0.0, 0)
    header = simulation_header(model, noise=noise, seed=seed)
    if kept is not None and kept != header:
        raise InputError(
            str(journal),
            f"is not of the model of {model.name} as this program has it",
            "plan again, or add --no-measure",
        )
    source = Simulator(model, noise=noise, seed=seed)
    with JournalledSource(source, journal, header) as journalled:
        source.resume(journalled.times_of)
        notice_each(journalled.notices)
        yield journalled


def _saved(found: Explanation, directory: Path) -> Explanation:
    """Keep it for `tccl report`; a directory that cannot be written spoils nothing."""
    try:
        return save_explanation(found, directory)
    except InputError as error:
        notice(f"not kept: {error}")
        return found
