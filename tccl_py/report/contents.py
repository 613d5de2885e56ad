"""What a report is made of: the files of a plan's directory, read and checked."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.explain.findings import EXPLANATION_FILE, Explanation, load_explanation
from tccl_py.plan.directory import JOURNAL_FILE, check_plan_directory
from tccl_py.plan.plan import ChoiceName, Plan, load_plan
from tccl_py.sources.journal import JournalContents, read_journal
from tccl_py.verify.record import VERIFICATION_FILE, load_verification


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's directory; None is a file that is not there.

    `achieved` is the bus bandwidth that jobs of each choice got, GB/s. `notices` are sentences.
    """

    directory: Path
    plan: Plan
    journal: JournalContents | None
    explanation: Explanation | None
    achieved: dict[ChoiceName, float]
    notices: tuple[str, ...]


def read_contents(directory: Path) -> Contents:
    """Read what a report needs; only the plan must be there.

    Raises:
        InputError: no directory, no plan in it, or a file in it is damaged.
    """
    check_plan_directory(directory)
    plan = load_plan(directory)
    journal, of_journal = _journal(directory / JOURNAL_FILE, plan)
    explanation, of_explanation = _explanation(directory)
    achieved, of_achieved = _achieved(directory)
    return Contents(
        directory=directory,
        plan=plan,
        journal=journal,
        explanation=explanation,
        achieved=achieved,
        notices=(*of_journal, *of_explanation, *of_achieved),
    )


def _journal(path: Path, plan: Plan) -> tuple[JournalContents | None, tuple[str, ...]]:
    """The journal beside the plan; one of another machine or kind is left out, with a notice."""
    if not path.exists():
        return None, (f"{path.name} is not there: rates of single hops and pairs are not known",)
    journal = read_journal(path)
    header = journal.header
    if header.machine != plan.machine.name or header.simulated != plan.simulated:
        kind = "simulated" if header.simulated else "measured"
        return None, (f"{path.name} is left out: it holds {kind} rates of {header.machine}",)
    return journal, journal.notices


def _explanation(directory: Path) -> tuple[Explanation | None, tuple[str, ...]]:
    """What `tccl explain` found of this plan; what it found of an earlier one is left out."""
    found = load_explanation(directory)
    if found is None and (directory / EXPLANATION_FILE).exists():
        return None, (f"{EXPLANATION_FILE} is left out: it is of an earlier plan",)
    return found, ()


def _achieved(directory: Path) -> tuple[dict[ChoiceName, float], tuple[str, ...]]:
    """What was verified of this plan; a file that says nothing of it is left out, with a notice."""
    if not (directory / VERIFICATION_FILE).exists():
        return {}, ()
    try:
        found = load_verification(directory)
    except InputError as error:
        return {}, (f"{VERIFICATION_FILE} is left out: it {error.what}",)
    if found is None:
        return {}, (f"{VERIFICATION_FILE} is left out: it is of an earlier plan",)
    if found.backend != "cuda":
        return {}, (f"{VERIFICATION_FILE} is left out: it is a rehearsal without GPUs",)
    failed = [one for one in found.arms if one.failure]
    return (
        {one.name: one.gbps for one in found.arms if one.gbps is not None},
        tuple(f"jobs of the choice {one.name} failed: {one.failure}" for one in failed),
    )
