"""The files of a plan's directory, read and checked, and the sources of all rates in a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.explain.findings import EXPLANATION_FILE, Explanation, load_explanation
from tccl_py.plan.beside import check_plan_directory
from tccl_py.plan.directory import JOURNAL_FILE
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import ChoiceName, Plan
from tccl_py.plan.words import mark
from tccl_py.sources.journal import JournalContents, read_journal
from tccl_py.verify.record import VERIFICATION_FILE, load_verification


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's directory; None stands for a missing file.

    `achieved` is the bus bandwidth of each choice's jobs, GB/s. `notices` are sentences.
    """

    directory: Path
    plan: Plan
    journal: JournalContents | None
    explanation: Explanation | None
    achieved: dict[ChoiceName, float]
    notices: tuple[str, ...]


def read_contents(directory: Path) -> Contents:
    """Read the files of a report; only the plan must be there."""
    check_plan_directory(directory)
    plan = load_plan(directory)
    journal, notices = _journal(directory / JOURNAL_FILE, plan)
    explanation = load_explanation(directory)
    if explanation is None and (directory / EXPLANATION_FILE).exists():
        notices.append(f"{EXPLANATION_FILE} is left out: it is of an earlier plan")
    achieved, more = _achieved(directory)
    return Contents(
        directory=directory,
        plan=plan,
        journal=journal,
        explanation=explanation,
        achieved=achieved,
        notices=(*notices, *more),
    )


def _journal(path: Path, plan: Plan) -> tuple[JournalContents | None, list[str]]:
    """Return the journal beside the plan, and notices; None for another machine's journal."""
    if not path.exists():
        return None, [f"{path.name} is not there: rates of single hops and pairs are not known"]
    journal = read_journal(path)
    header = journal.header
    names = {part.machine.name for part in plan.cluster.classes}
    other = header.machine not in names and not plan.is_cluster
    if other or header.simulated != plan.simulated:
        kind = "simulated" if header.simulated else "measured"
        return None, [f"{path.name} is left out: it holds {kind} rates of {header.machine}"]
    return journal, list(journal.notices)


def _achieved(directory: Path) -> tuple[dict[ChoiceName, float], list[str]]:
    """Return the achieved rates of this plan's choices, and notices on what is left out."""
    path = directory / VERIFICATION_FILE
    try:
        found = load_verification(directory) if path.exists() else None
    except InputError as error:
        return {}, [f"{VERIFICATION_FILE} is left out: it {error.what}"]
    if found is None:
        earlier = f"{VERIFICATION_FILE} is left out: it is of an earlier plan"
        return {}, [earlier] if path.exists() else []
    if found.backend != "cuda":
        return {}, [f"{VERIFICATION_FILE} is left out: it is a dry run without GPUs"]
    failed = [arm for arm in found.arms if arm.failure]
    return (
        {arm.name: arm.gbps for arm in found.arms if arm.gbps is not None},
        [f"jobs of the choice {arm.name} failed: {arm.failure}" for arm in failed],
    )


def rate_sources(contents: Contents) -> Iterator[tuple[str, str, str]]:
    """Yield the kinds of rates and facts in the report: name, provenance, and note."""
    plan, found = contents.plan, contents.explanation
    done = "simulated" if plan.simulated else "measured"
    basis = "a prediction of NCCL's bus bandwidth"
    if plan.tuned:
        basis = "shares of the bandwidth of NCCL jobs when settings were tuned"
    cost = (
        f"{plan.sets_measured} sets {done}, {plan.sets_remembered} from memory or journal, "
        f"{plan.sets_by_symmetry} by symmetry; search {plan.strategy}"
    )
    yield "rates of rings and hops", plan.provenance, f"{basis}; {cost}"
    stock = mark(simulated=plan.simulated, assumed=plan.stock.assumed)
    yield "default NCCL", stock, plan.stock.note
    searched = "of all ring sets of the searched sizes under these settings"
    yield "bound", plan.provenance, searched if plan.bound_gbps else "not known"
    if plan.limit_gbps is not None:
        yield "limit", plan.provenance, "bare copies over the hops of the recommended choice"
    if found is not None:
        yield "explanation", mark(simulated=found.simulated, assumed=found.assumed), ""
    if contents.achieved:
        yield "achieved rates", "measured with NCCL (verify.json)", ""
    if contents.journal is not None:
        yield "maps and pairs", *_journal_source(contents.journal)
    for part in plan.cluster.classes:
        known = part.knowledge
        facts = Counter(fact.provenance for fact in known.peer_access)
        pairs = ", ".join(f"{count} pairs {kind}" for kind, count in facts.items())
        default = f"by default {'yes' if known.peer_access_default else 'no'}"
        access = f"{known.peer_access_provenance} ({default})"
        where = f" of {part.name}" if plan.is_cluster else ""
        yield f"direct access between GPUs{where}", access, pairs
        for link in known.hidden_links:
            yield f"hidden link {link.one} to {link.other}{where}", link.provenance, link.note


def _journal_source(journal: JournalContents) -> tuple[str, str]:
    measured = [one for found in journal.measurements.values() for one in found]
    kinds = Counter(mark(simulated=one.simulated, assumed=one.assumed) for one in measured)
    source = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing measured"
    note = f"{len(measured)} measurements of {journal.header.machine} ({journal.header.identity})"
    unsettled = sum(not one.settled for one in measured)
    return source, note + (f"; {unsettled} are less precise than asked" if unsettled else "")
