"""Slowdowns among a plan's transfers, among default NCCL's, and among those the plan avoids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tccl_py.errors import BudgetSpentError, MeasurementError, SearchError
from tccl_py.explanation.build import Builder
from tccl_py.explanation.causes import (
    HURT,
    Causes,
    ContradictionError,
    Prober,
    SymmetryKeys,
    find_causes,
    is_hurt,
)
from tccl_py.explanation.findings import (
    Explanation,
    Finding,
    RingExplanation,
    described,
    instead_text,
    short,
)
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import ring_like, ring_set
from tccl_py.model.symmetry import automorphisms
from tccl_py.model.transfer import Flow, TransferSet, transfer_set
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.view import view
from tccl_py.plan.again import sources_of_journal
from tccl_py.plan.plan import Plan
from tccl_py.plan.tasks import condensed
from tccl_py.search.problem import Budget
from tccl_py.sources.remembering import remembering

Sources = Sequence[BandwidthSource]
DEFAULT_BUDGET = Budget(sets=200)
MOST_FINDINGS = 4
_NO_STOCK = "default NCCL's rings are the plan's own, or go over NICs: there is nothing more to say"
_NO_DEFAULT = "default NCCL is not explained: a cluster's plan keeps its rate, not its chains"
_MUCH = 1.1
"""Transfers that lose less than a tenth slow each other only a little."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Rings to explain, or their chains on hosts of a class: flows, and the number of rings."""

    name: Literal["plan", "stock"]
    number: int = 0
    flows: tuple[Flow, ...]
    rings: int


def subjects(plan: Plan) -> Iterator[Subject]:
    """Yield the plan's rings on each class of hosts, and a machine's default rings if different."""
    seen: set[tuple[int, TransferSet]] = set()
    for path in plan.paths:
        flows = tuple(hop.flow for chain in path.chains for hop in chain.hops)
        if (path.node_class, transfer_set(flows)) not in seen:
            seen.add((path.node_class, transfer_set(flows)))
            yield Subject(name="plan", number=path.node_class, flows=flows, rings=plan.ring_count)
    default = None if plan.is_cluster else _default(plan)
    if default is not None and sorted(default.flows) != sorted(flows):
        yield default


def _default(plan: Plan) -> Subject | None:
    """Return default NCCL's rings; None if a hop of them goes over NICs."""
    orders = condensed(plan.stock.rings)
    space = hop_space(
        view(plan.machine, plan.knowledge, plan.stock.settings, gpus=plan.gpus),
        rings_in_set=len(orders),
    )
    try:
        rings = ring_set([ring_like(space, order) for order in orders])
    except SearchError:
        return None
    flows = tuple(hop.flow for ring in rings.rings for hop in ring.hops)
    return Subject(name="stock", flows=flows, rings=len(orders))


def explain(
    plan: Plan,
    source: BandwidthSource | Sources | Path | str,
    *,
    budget: Budget = DEFAULT_BUDGET,
    most: int = MOST_FINDINGS,
) -> Explanation:
    """Find the smallest sets of transfers that show each slowdown of a plan's and default's rings.

    `source` answers sets, or one source for each class of hosts, whose flows over the network are
    those of one host; a RememberingSource's known sets are not measured again. The plan's directory
    as `source` answers by its journal alone. `budget` limits sets beyond these, `most` the findings
    for each set of rings. Raises MeasurementError: the source cannot measure the rings themselves.

    >>> import tccl_py
    >>> model = tccl_py.load_machine("amd-v100")
    >>> source = tccl_py.open_source(model)
    >>> plan = tccl_py.make_plan(model.machine, model.knowledge, source)
    >>> explain(plan, source).rings[1].findings[0].kinds
    ('bounce',)
    """
    told: tuple[str, ...] = ()
    given: Any = source
    if isinstance(given, (str, Path)):
        given, told = sources_of_journal(plan, Path(given))
        budget = msgspec.structs.replace(budget, sets=0)
    sources: Sources = given if isinstance(given, Sequence) else [given]
    builders = [_builder(plan, number, one, budget) for number, one in enumerate(sources)]
    chosen = list(subjects(plan))
    explained: list[RingExplanation] = []
    pitfalls: list[Finding] = []
    for number, builder in enumerate(builders):
        # Each class has a budget of its own, with a share left for pitfalls.
        own = [subject for subject in chosen if subject.number == number]
        rings = []
        for place, subject in enumerate(own):
            builder.prober.share_out(len(own) - place + 1)
            rings.append(_ring(builder, subject, most, plan))
        builder.prober.share_out(1)
        known = [finding for ring in rings for finding in ring.findings]
        pitfalls += builder.pitfalls(known, most=most)
        explained += rings
    if plan.is_cluster:
        told += (_NO_DEFAULT,)
    elif len(chosen) == 1:
        told += (_NO_STOCK,)
    return Explanation(
        machine=", ".join(part.machine.name for part in plan.cluster.classes),
        simulated=builders[0].prober.source.simulated,
        assumed=plan.assumed or any(builder.prober.assumed for builder in builders),
        rings=tuple(explained),
        pitfalls=tuple(sorted(pitfalls, key=lambda finding: -finding.slowdown)[:most]),
        sets_measured=sum(builder.prober.sets_measured for builder in builders),
        notices=told,
    )


def _builder(plan: Plan, number: int, source: BandwidthSource, budget: Budget) -> Builder:
    part, classes = plan.cluster.classes[number], len(plan.cluster.classes)
    group = automorphisms(part.machine, part.knowledge, gpus=plan.class_gpus[number])
    if budget.sets is not None:
        budget = msgspec.structs.replace(budget, sets=budget.sets // classes)
    known, symmetry = remembering(source), SymmetryKeys(group)
    return Builder(plan, number, Prober(known, symmetry, budget=budget, network=plan.is_cluster))


def _ring(builder: Builder, subject: Subject, most: int, plan: Plan) -> RingExplanation:
    prober, flows = builder.prober, subject.flows
    found = RingExplanation(
        name=subject.name,
        node_class=plan.cluster.classes[subject.number].name if plan.is_cluster else "",
        rings=subject.rings,
        # Rings that cannot be rated are no subject.
        rate_gbps=plan.rate_gbps if subject.name == "plan" else plan.stock.rate_gbps or 0.0,
        slowest=None,
        findings=(),
        unexplained="the hops of these rings were not all measured alone",
        sentence="",
    )
    try:
        whole = prober.best(flows)
        slowest = builder.slowest(flows, whole.rate_gbps)
        hurt = is_hurt(prober, flows)
    except BudgetSpentError:
        return found
    related, label, trouble = builder.paths.related, builder.label, ""
    try:
        causes = find_causes(prober, flows, most=most, related=related, label=label)
    except (ContradictionError, MeasurementError) as error:
        causes, trouble = Causes(found=(), rest=flows, spent=False), str(error)
    findings, open_question = _findings(builder, causes)
    return msgspec.structs.replace(
        found,
        rate_gbps=subject.rings * whole.rate_gbps,
        slowest=slowest,
        findings=findings,
        unexplained=trouble or open_question or _left(builder, causes),
        sentence=_hurting(builder, slowest, findings) if hurt else _as_alone(builder, slowest),
    )


def _findings(builder: Builder, causes: Causes) -> tuple[tuple[Finding, ...], str]:
    """Return a finding for each cause, the worst first, and a cause without rates, or ""."""
    found: list[Finding] = []
    unknown = ""
    for cause in causes.found:
        try:
            found.append(builder.finding(cause))
        except MeasurementError:
            names = ", ".join(map(short, cause.flows))
            unknown = f"{names} are slow together, but not all of them were measured alone"
            break
    # Fewer flows at the same places are the rest of a worse finding.
    first: dict[tuple[object, ...], Finding] = {}
    for finding in sorted(found, key=lambda finding: -finding.slowdown):
        first.setdefault((finding.kinds, finding.shares), finding)
    return tuple(first.values()), unknown


def _left(builder: Builder, causes: Causes) -> str:
    """Return the state of the flows outside all causes, if something slows them."""
    try:
        together = builder.prober.rate(causes.rest)
        alone = builder.prober.slowest_alone(causes.rest)
        hurt = is_hurt(builder.prober, causes.rest)
    except BudgetSpentError:
        return "the budget of measurements ended before all was explained"
    if not hurt:
        return ""
    why = "the budget of measurements ended first" if causes.spent else "there are more causes"
    return (
        f"the other {len(causes.rest)} transfers together get {together.rate_gbps:.2f} GB/s "
        f"({builder.mark}), the slowest of them alone {alone.rate_gbps:.2f}: {why}"
    )


def _hurting(builder: Builder, slowest: Finding, findings: Sequence[Finding]) -> str:
    what = "slow each other"
    if findings and not any(finding.is_collapse for finding in findings):
        little = slowest.slowdown <= _MUCH
        what = "slow each other a little" if little else "share links, and lose no more"
    return (
        f"Transfers {what}: the slowest hop gets {slowest.gbps:.2f} GB/s ({builder.mark}), and "
        f"none gets less than {slowest.alone_gbps:.2f} alone."
    )


def _as_alone(builder: Builder, slowest: Finding) -> str:
    doubt = ", as far as such varying rates tell" if slowest.slowdown > 1 / HURT else ""
    return (
        f"Nothing hurts: the slowest hop is as fast as it is alone{doubt}. It is "
        f"{short(slowest.flows[0])} ({described(builder.machine, slowest.flows)}), "
        f"{slowest.gbps:.2f} GB/s ({builder.mark})."
        f"{instead_text(slowest.gbps, slowest.instead)}"
    )
