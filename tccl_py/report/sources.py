"""Where every figure of a report comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from tccl_py.report.contents import Contents


class FigureSource(msgspec.Struct, frozen=True, kw_only=True):
    """Which figures come from where, and what is to be known about them."""

    figures: str
    source: str
    note: str = ""


def mark(*, simulated: bool, assumed: bool) -> str:
    """The mark beside every block of figures.

    >>> mark(simulated=True, assumed=True)
    'simulated from assumed figures'
    """
    if not simulated:
        return "measured"
    return "simulated from assumed figures" if assumed else "simulated"


def figure_sources(contents: Contents) -> list[FigureSource]:
    """All figures of the report by kind."""
    return [*_of_plan(contents), *_of_journal(contents), *_of_machine(contents)]


def _of_plan(contents: Contents) -> Iterator[FigureSource]:
    plan = contents.plan
    done = "simulated" if plan.simulated else "measured"
    effort = (
        f"{plan.sets_measured} sets {done}, {plan.sets_remembered} from memory or journal, "
        f"{plan.sets_by_symmetry} by symmetry; search {plan.strategy}"
    )
    what = "a prediction of NCCL's bus bandwidth"
    if plan.tuned:
        what = "shares of what jobs of NCCL achieved when settings were tuned"
    note = f"{what}; {effort}"
    yield FigureSource(figures="rates of rings and hops", source=plan.provenance, note=note)
    stock = mark(simulated=plan.simulated, assumed=plan.stock.assumed)
    yield FigureSource(figures="stock NCCL", source=stock, note=plan.stock.note)
    yield FigureSource(
        figures="bound",
        source=plan.provenance,
        note="of all ring sets of the searched sizes under these settings"
        if plan.bound_gbps
        else "not known",
    )
    if plan.limit_gbps is not None:
        note = "bare copies over the hops of the recommended choice"
        yield FigureSource(figures="limit", source=plan.provenance, note=note)
    if contents.explanation is not None:
        found = contents.explanation
        yield FigureSource(
            figures="explanation", source=mark(simulated=found.simulated, assumed=found.assumed)
        )
    if contents.achieved:
        yield FigureSource(figures="achieved rates", source="measured with NCCL (verify.json)")


def _of_journal(contents: Contents) -> Iterator[FigureSource]:
    if contents.journal is None:
        return
    measured = [one for listed in contents.journal.measurements.values() for one in listed]
    header = contents.journal.header
    kinds = Counter(mark(simulated=one.simulated, assumed=one.assumed) for one in measured)
    unsettled = sum(not one.settled for one in measured)
    notes = [f"{len(measured)} measurements of {header.machine} ({header.identity})"]
    if unsettled:
        notes.append(f"{unsettled} did not come as close as asked")
    source = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing measured"
    yield FigureSource(figures="maps and pairs", source=source, note="; ".join(notes))


def _of_machine(contents: Contents) -> Iterator[FigureSource]:
    known = contents.plan.knowledge
    facts = Counter(fact.provenance for fact in known.peer_access)
    listed = ", ".join(f"{count} pairs {kind}" for kind, count in facts.items())
    default = f"by default {'yes' if known.peer_access_default else 'no'}"
    yield FigureSource(
        figures="which GPUs reach each other directly",
        source=f"{known.peer_access_provenance} ({default})",
        note=listed,
    )
    for link in known.hidden_links:
        hidden = f"hidden link {link.one} to {link.other}"
        yield FigureSource(figures=hidden, source=link.provenance, note=link.note)
