"""Which transfers hurt which: of a plan's rings, of stock NCCL's, and of what the plan avoids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.explain.build import Builder, avoided
from tccl_py.explain.causes import (
    HURT,
    Causes,
    ContradictionError,
    alone_rate,
    find_causes,
    is_hurt,
)
from tccl_py.explain.findings import (
    Explanation,
    Finding,
    RingExplanation,
    described,
    in_place,
    is_collapse,
    listed,
    short,
)
from tccl_py.explain.probing import Asker, Likeness
from tccl_py.explain.sharing import Sharing
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import ring_from_order, ring_set
from tccl_py.model.symmetry import automorphisms
from tccl_py.model.transfer import Flow, parse_flow
from tccl_py.nccl.transport import hop_space
from tccl_py.plan.plan import Plan
from tccl_py.plan.tasks import condensed
from tccl_py.search.evaluator import BudgetSpentError
from tccl_py.search.problem import Budget
from tccl_py.sources.memory import RememberingSource

# The flows of a plan's rings and of stock NCCL's, each hop by the mechanism it has.


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Rings to explain: their flows, ring after ring, and how many rings they are."""

    name: Literal["plan", "stock"]
    flows: tuple[Flow, ...]
    rings: int


def subjects(plan: Plan) -> Iterator[Subject]:
    """The plan's rings, and stock's where they are not the same."""
    flows = tuple(parse_flow(hop.flow) for ring in plan.rings for hop in ring.hops)
    yield Subject(name="plan", flows=flows, rings=len(plan.rings))
    stock = _stock(plan)
    if stock is not None and sorted(map(str, stock.flows)) != sorted(map(str, flows)):
        yield stock


def _stock(plan: Plan) -> Subject | None:
    """Return default NCCL's rings; None if it would move a hop of them over NICs."""
    orders = condensed(plan.stock.rings)
    space = hop_space(
        plan.machine,
        plan.knowledge,
        plan.stock.settings,
        gpus=plan.gpus,
        rings_in_set=len(orders),
    )
    try:
        rings = ring_set([ring_from_order(space, order) for order in orders])
    except SearchError:
        return None
    flows = tuple(hop.flow for ring in rings.rings for hop in ring.hops)
    return Subject(name="stock", flows=flows, rings=len(orders))


DEFAULT_BUDGET = Budget(sets=200)
MOST_FINDINGS = 4
_NO_STOCK = "stock NCCL's rings are the plan's own, or go over NICs: there is nothing more to say"
_MUCH = 1.1
"""Transfers that lose less than a tenth hurt each other only a little."""


def explain(
    plan: Plan,
    source: BandwidthSource,
    *,
    budget: Budget = DEFAULT_BUDGET,
    most: int = MOST_FINDINGS,
) -> Explanation:
    """Find the smallest sets of transfers that already show each slowdown.

    Args:
        plan: whose rings, and whose stock NCCL's, are explained.
        source: answers sets; what a RememberingSource knows is not measured again.
        budget: `sets` to measure beyond that, and `seconds`.
        most: findings at most for each set of rings.

    Raises:
        MeasurementError: the source cannot measure the rings themselves.
    """
    remembering = source if isinstance(source, RememberingSource) else RememberingSource(source)
    symmetry = automorphisms(plan.machine, plan.knowledge, gpus=plan.gpus)
    asker = Asker(remembering, Likeness(symmetry), budget=budget)
    builder = Builder(plan, asker, Sharing(plan.machine, plan.knowledge))
    told: list[RingExplanation] = []
    chosen = list(subjects(plan))
    for number, subject in enumerate(chosen):
        asker.share_out(len(chosen) - number + 1)
        told.append(_ring(builder, subject, most))
    asker.share_out(1)
    findings = [finding for one in told for finding in one.findings]
    return Explanation(
        machine=plan.machine.name,
        simulated=remembering.simulated,
        assumed=plan.assumed or asker.assumed,
        rings=tuple(told),
        avoided=avoided(builder, findings, most=most),
        sets_measured=asker.sets_measured,
        notices=() if len(chosen) > 1 else (_NO_STOCK,),
    )


def _ring(builder: Builder, subject: Subject, most: int) -> RingExplanation:
    asker, flows = builder.asker, subject.flows
    try:
        whole = asker.best(flows)
        slowest = builder.slowest(flows, whole.gbps)
        hurt = is_hurt(asker, flows)
    except BudgetSpentError:
        return _unknown(builder.plan, subject)
    causes, trouble = _causes(builder, subject, most)
    found, open_questions = _findings(builder, causes)
    findings = _told_once(sorted(found, key=lambda one: -one.slowdown))
    return RingExplanation(
        name=subject.name,
        rings=subject.rings,
        rate_gbps=subject.rings * whole.gbps,
        slowest=slowest,
        findings=findings,
        unexplained=trouble or open_questions or _left(builder, causes),
        sentence=_hurting(builder, slowest, findings) if hurt else _as_alone(builder, slowest),
    )


def _unknown(plan: Plan, subject: Subject) -> RingExplanation:
    """Where not even the rings themselves are known, and nothing may be measured."""
    # Rings that cannot be rated are no subject.
    rate = plan.rate_gbps if subject.name == "plan" else plan.stock.rate_gbps or 0.0
    return RingExplanation(
        name=subject.name,
        rings=subject.rings,
        rate_gbps=rate,
        slowest=None,
        findings=(),
        unexplained="the hops of these rings were not all measured alone",
        sentence="",
    )


def _causes(builder: Builder, subject: Subject, most: int) -> tuple[Causes, str]:
    """The causes, and what went wrong, or an empty text."""
    related, label = builder.sharing.related, builder.label
    try:
        found = find_causes(builder.asker, subject.flows, most=most, related=related, label=label)
    except (ContradictionError, MeasurementError) as error:
        return Causes(found=(), rest=subject.flows, spent=False), str(error)
    return found, ""


def _findings(builder: Builder, causes: Causes) -> tuple[list[Finding], str]:
    """What can be said of each cause, and what could not be."""
    found: list[Finding] = []
    for cause in causes.found:
        try:
            found.append(builder.finding(cause))
        except (BudgetSpentError, MeasurementError):
            names = listed([short(flow) for flow in cause.flows])
            return found, f"{names} are slow together, but not all of them were measured alone"
    return found, ""


def _told_once(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Without those that are the rest of a worse one: fewer flows at the same place."""
    told: list[Finding] = []
    for finding in findings:
        places = [(one.kinds, one.shares) for one in told]
        if (finding.kinds, finding.shares) not in places:
            told.append(finding)
    return tuple(told)


def _left(builder: Builder, causes: Causes) -> str:
    """What hurts the flows that no cause is whole in, as far as it is known."""
    try:
        together = builder.asker.rate(causes.rest)
        alone = alone_rate(builder.asker, causes.rest)
        hurt = is_hurt(builder.asker, causes.rest)
    except BudgetSpentError:
        return "the budget of measurements ended before all was explained"
    if not hurt:
        return ""
    why = "the budget of measurements ended first" if causes.spent else "there are more causes"
    return (
        f"the other {len(causes.rest)} transfers together get {together.gbps:.2f} GB/s "
        f"({builder.mark}), the slowest of them alone {alone.gbps:.2f}: {why}"
    )


def _hurting(builder: Builder, slowest: Finding, findings: Sequence[Finding]) -> str:
    if findings and not any(is_collapse(one) for one in findings):
        little = slowest.slowdown <= _MUCH
        what = "slow each other a little" if little else "share what they pass, and lose no more"
    else:
        what = "hurt each other"
    return (
        f"Transfers {what}: the slowest hop gets {slowest.gbps:.2f} GB/s ({builder.mark}), and "
        f"none gets less than {slowest.alone_gbps:.2f} alone."
    )


def _as_alone(builder: Builder, slowest: Finding) -> str:
    (flow,) = (parse_flow(text) for text in slowest.flows)
    doubt = slowest.slowdown > 1 / HURT
    told = ", as far as rates that vary so much tell" if doubt else ""
    return (
        f"Nothing hurts: the slowest hop is as fast as it is alone{told}. It is {short(flow)} "
        f"({described(builder.plan.machine, [flow])}), {slowest.gbps:.2f} GB/s ({builder.mark})."
        f"{in_place(slowest.gbps, slowest.instead, each=False)}"
    )
