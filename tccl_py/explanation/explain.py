"""Slowdowns among a plan's transfers, among default NCCL's, and writes that the plan avoids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Literal

import msgspec

from tccl_py.errors import (
    BudgetSpentError,
    MeasurementError,
    SearchError,
    check_type,
    require,
    size_text,
    spell,
)
from tccl_py.explanation.causes import (
    HURT,
    Cause,
    Causes,
    ContradictionError,
    Flows,
    Prober,
    SymmetryKeys,
    find_causes,
    is_hurt,
)
from tccl_py.explanation.findings import (
    COLLAPSE,
    Explanation,
    Finding,
    Instead,
    RingExplanation,
    describe_flows,
    finding_of,
    finding_sentence,
    instead_text,
    kind_of,
)
from tccl_py.explanation.paths import Paths, Shared, collapse_patterns
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import bounce, direct_read, direct_write, ring_like, ring_set
from tccl_py.model.symmetry import automorphisms
from tccl_py.model.transfer import Fifo, Flow, Transfer, TransferSet, transfer_set
from tccl_py.nccl.settings import pinned_level
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.view import direct_pairs, view
from tccl_py.plan.chains import condense, slowest_first
from tccl_py.plan.plan import Plan
from tccl_py.plan.text import has_stand_ins
from tccl_py.sources.bench import bench_for

MOST_SETS = 200
MOST_FINDINGS = 4
_NO_DEFAULT = (
    "default NCCL's rings are the plan's own, go over NICs, or fail: there is nothing more to say"
)
_MECHANISMS = ("direct write", "direct read", "bounce")
_MOST_FLOWS = 6
"""Larger known sets say little about a mechanism."""
_MUCH = 1.1
"""Transfers that lose less than a tenth slow each other only a little."""


class RingFlows(msgspec.Struct, frozen=True, kw_only=True):
    """Rings to explain, or their chains on hosts of a class: flows, and the number of rings."""

    name: Literal["plan", "default"]
    number: int = 0
    flows: tuple[Flow, ...]
    rings: int
    rate_gbps: float


def ring_flows(plan: Plan) -> Iterator[RingFlows]:
    """Yield the plan's rings on each class of hosts, and a machine's default rings if different."""
    yielded: set[tuple[int, TransferSet]] = set()
    for path in plan.paths:
        flows = tuple(hop.flow for chain in path.chains for hop in chain.hops)
        if (path.node_class, transfer_set(flows)) not in yielded:
            yielded.add((path.node_class, transfer_set(flows)))
            facts: dict[str, Any] = {"rings": plan.ring_count, "rate_gbps": plan.rate_gbps}
            yield RingFlows(name="plan", number=path.node_class, flows=flows, **facts)
    default = None if any(flow.is_network for flow in flows) else _default(plan)
    if default is not None and sorted(default.flows) != sorted(flows):
        yield default


def _default(plan: Plan) -> RingFlows | None:
    """Return default NCCL's rings; None if a hop of them goes over NICs."""
    orders = condense(plan.choices["default"].rings or ())
    topo = view(plan.machine, plan.knowledge, plan.choices["default"].settings, gpus=plan.gpus)
    space = hop_space(topo, rings_in_set=len(orders))
    try:
        rings = ring_set([ring_like(space, order) for order in orders])
    except SearchError:
        return None
    flows = tuple(hop.flow for ring in rings.rings for hop in ring.hops)
    # Rings that cannot be rated have a rate of 0.
    gbps = plan.choices["default"].rate_gbps or 0.0
    return RingFlows(name="default", flows=flows, rings=len(orders), rate_gbps=gbps)


def explain(
    plan: Plan,
    source: BandwidthSource | Sequence[BandwidthSource],
    *,
    max_sets: int = MOST_SETS,
    most: int = MOST_FINDINGS,
) -> Explanation:
    """Find the smallest sets of transfers that show each slowdown of a plan's and default's rings.

    `source` answers sets, or one source for each class of hosts, whose flows over the network are
    those of one host; a Bench's known sets are not measured again. At most `max_sets`
    are measured beyond these, and `most` findings made for each set of rings. Raises
    MeasurementError: the source cannot measure the rings themselves.

    >>> import tccl_py
    >>> model = tccl_py.load_machine("amd-v100")
    >>> source = tccl_py.open_source(model)
    >>> plan = tccl_py.make_plan(model.machine, model.knowledge, source)
    >>> explain(plan, source).rings[1].findings[0].kinds
    ('bounce',)
    """
    check_type(plan, "plan", Plan)
    check_type(max_sets, "max_sets", int)
    check_type(most, "most", int)
    sources = source if isinstance(source, Sequence) else [source]
    classes, right = len(plan.cluster.classes), "give one for each class of hosts"
    require(len(sources) == classes, "`source`", f"is {spell(len(sources), 'source')}", right)
    share = max_sets // classes
    hosts = [
        _ClassExplainer(plan, number, answers, share) for number, answers in enumerate(sources)
    ]
    chosen = list(ring_flows(plan))
    rings: list[RingExplanation] = []
    pitfalls: list[Finding] = []
    for number, host in enumerate(hosts):
        # Each class has a budget of its own, with a share left for pitfalls.
        of_host = [subject for subject in chosen if subject.number == number]
        explanations = []
        for place, subject in enumerate(of_host):
            host.prober.allowance.allot(parts=len(of_host) - place + 1)
            explanations.append(host.ring(subject, most))
        host.prober.allowance.allot(parts=1)
        pitfalls += host.pitfalls([finding for ring in explanations for finding in ring.findings])
        rings += explanations
    explains_default = any(subject.name == "default" for subject in chosen)
    notices = _other_channels(*chosen[:2]) if explains_default else (_NO_DEFAULT,)
    return Explanation(
        machine=", ".join(part.machine.name for part in plan.cluster.classes),
        simulated=hosts[0].prober.source.simulated,
        dry_run=plan.dry_run,
        assumed=plan.assumed or any(host.prober.assumed for host in hosts),
        rings=tuple(rings),
        pitfalls=tuple(sorted(pitfalls, key=lambda finding: -finding.slowdown)[:most]),
        sets_measured=sum(host.prober.allowance.spent for host in hosts),
        notices=tuple(notices),
    )


def _other_channels(planned: RingFlows, default: RingFlows) -> Iterator[str]:
    """Yield what a plan changes where its rings are default NCCL's: channels and buffers."""
    if _transfers(planned) == _transfers(default):
        ours, usual = planned.flows[0], default.flows[0]
        yield (
            f"the plan's rings are default NCCL's, with {ours.blocks} channels of {_buffer(ours)} "
            f"in place of {usual.blocks} of {_buffer(usual)}"
        )


def _buffer(flow: Flow) -> str:
    return size_text((flow.fifo or Fifo()).bytes)


class _ClassExplainer:
    """Explains rings on the hosts of a class, with at most `sets` measurements by `source`."""

    def __init__(self, plan: Plan, number: int, source: BandwidthSource, sets: int) -> None:
        self._plan, self._number, self._class = plan, number, plan.cluster.classes[number]
        self._machine = self._class.machine
        self._paths = Paths(self._machine, self._class.knowledge, stand_ins=has_stand_ins(plan))
        gpus = plan.class_gpus[number]
        keys = SymmetryKeys(automorphisms(self._machine, self._class.knowledge, gpus=gpus))
        self._network = any(hop.flow.is_network for ring in plan.rings for hop in ring.hops)
        bench = bench_for(source, self._machine.name)
        self.prober = Prober(bench, keys, max_sets=sets, network=self._network)
        self._mark = "simulated" if source.simulated else "measured"
        self._kinds_of_places = cache(self._uncached_kinds_of_places)

    def ring(self, subject: RingFlows, most: int) -> RingExplanation:
        """Explain a set of rings by up to `most` findings."""
        prober, flows = self.prober, subject.flows
        hosts = self._class.name if self._network else ""
        explained = partial(
            RingExplanation, name=subject.name, node_class=hosts, rings=subject.rings
        )
        try:
            together = prober.best(flows)
            slowest = self._slowest(flows, together.rate_gbps)
            hurt = is_hurt(prober, flows)
        except BudgetSpentError:
            return explained(
                rate_gbps=subject.rate_gbps,
                slowest=None,
                findings=(),
                unexplained="the hops of these rings were not all measured alone",
                sentence="",
            )
        trouble, findings, related = "", list[Finding](), self._paths.count_shared
        try:
            causes = find_causes(prober, flows, most=most, related=related, label=self._label)
            findings = [self._finding(cause) for cause in causes.causes]
            findings.sort(key=lambda finding: -finding.slowdown)
        except (ContradictionError, MeasurementError) as error:
            causes, trouble = Causes(causes=(), remaining=flows, spent=False), str(error)
        # Fewer flows at the same places are the rest of a worse finding.
        first: dict[object, Finding] = {}
        for finding in findings:
            first.setdefault((finding.kinds, finding.shares), finding)
        findings = list(first.values())
        return explained(
            rate_gbps=subject.rings * together.rate_gbps,
            slowest=slowest,
            findings=tuple(findings),
            unexplained=trouble or self._remaining(causes),
            sentence=self._hurting(slowest, findings) if hurt else self._as_alone(slowest),
        )

    def pitfalls(self, explained: Sequence[Finding]) -> Iterator[Finding]:
        """Yield writes above switches that collapse, for reasons other than `explained`."""
        labels = {self._label(finding.flows) for finding in explained}
        for transfers in collapse_patterns(self._plan, (), number=self._number):
            label = self._label(transfers.flows)
            if label not in labels:
                with suppress(MeasurementError):
                    finding = self._finding(Cause(flows=transfers.flows, minimal=True))
                    if finding.is_collapse:
                        labels.add(label)
                        yield finding

    def _finding(self, cause: Cause) -> Finding:
        """Return a finding about a set that is slow together."""
        flows = sorted(cause.flows)
        alone = [self.prober.best([flow]).rate_gbps for flow in flows]
        together = self.prober.best(flows)
        of_image = flows != sorted(together.transfers.flows)
        rates = (together.rate_gbps,) * len(flows) if of_image else together.in_order(flows)
        finding = finding_of(
            flows,
            min(together.rate_gbps, *alone),
            alone,
            each_gbps=rates,
            error=together.relative_error,
            shares=tuple(shared.words for shared in self._suspects(flows)),
            instead=self._instead(flows),
            alike=cause.alike,
            minimal=cause.minimal,
        )
        sentence = finding_sentence(self._machine, finding, mark=self._mark)
        return msgspec.structs.replace(finding, sentence=sentence)

    def _slowest(self, flows: Flows, gbps: float) -> Finding:
        """Return the hop that is slowest alone, in rings whose slowest hop gets `gbps`."""
        rates = {flow: self.prober.rate([flow]).rate_gbps for flow in flows}
        flow = min(rates, key=lambda flow: slowest_first(rates[flow], flow))
        alone = self.prober.best([flow]).rate_gbps
        more = {"each_gbps": (gbps,), "instead": self._instead([flow])}
        return finding_of([flow], gbps, [alone], **more)

    def _instead(self, flows: Flows) -> tuple[Instead, ...]:
        """Return the rates of the flows' GPU pairs by each mechanism within budget and hardware."""
        instead = []
        for kind in _MECHANISMS:
            variants = [by_mechanism(self._plan, f, kind, number=self._number) for f in flows]
            changed = [flow for flow in variants if flow is not None]
            if changed == variants != list(flows):
                with suppress(MeasurementError):
                    instead.append(Instead(kind=kind, gbps=self.prober.rate(changed).rate_gbps))
        return tuple(instead)

    def _label(self, flows: Flows) -> object:
        """Return equal labels for sets with the same mechanisms and kinds of shared places."""
        return _kinds(flows), tuple(shared.kind for shared in self._paths.find_shared(flows))

    def _suspects(self, flows: Flows) -> tuple[Shared, ...]:
        """Return the shared places, without those that equal mechanisms share unharmed."""
        alone = min(self.prober.best([flow]).rate_gbps for flow in flows)
        share = min(1.0, self.prober.best(flows).rate_gbps / alone)
        innocent = self._innocent(_kinds(flows), share**0.5)
        shared = self._paths.find_shared(flows)
        gpus = self._paths.busy(flows) if share < COLLAPSE else ()
        places = [place for place in (*gpus, *shared) if place.kind not in innocent]
        return tuple(places) or shared

    def _innocent(self, kinds: tuple[str, ...], above: float) -> set[str]:
        """Return the kinds of places of known sets with these mechanisms and so high a share.

        The share is the set's rate over the rate of its slowest flow alone.
        """
        kinds_of_places: set[str] = set()
        for flows in (transfers.flows for transfers in self.prober.known):
            if 1 < len(flows) <= _MOST_FLOWS and _kinds(flows) == kinds:
                alone = [self.prober.if_known([flow]) for flow in flows]
                rates = [rate.rate_gbps for rate in alone if rate is not None]
                known_alone = len(rates) == len(flows)
                if known_alone and self.prober.exact(flows).rate_gbps >= above * min(rates):
                    kinds_of_places |= self._kinds_of_places(flows)
        return kinds_of_places

    def _uncached_kinds_of_places(self, flows: tuple[Flow, ...]) -> frozenset[str]:
        places = (*self._paths.find_shared(flows), *self._paths.busy(flows))
        return frozenset(place.kind for place in places)

    def _remaining(self, causes: Causes) -> str:
        """Return the state of the flows outside all causes, if something slows them."""
        try:
            together = self.prober.rate(causes.remaining)
            alone = self.prober.slowest_alone(causes.remaining)
            hurt = is_hurt(self.prober, causes.remaining)
        except BudgetSpentError:
            return "the budget of measurements ended before all was explained"
        if not hurt:
            return ""
        why = "the budget of measurements ended first" if causes.spent else "there are more causes"
        return (
            f"the other {len(causes.remaining)} transfers together get {together.rate_gbps:.2f} "
            f"GB/s ({self._mark}), the slowest of them alone {alone.rate_gbps:.2f}: {why}"
        )

    def _hurting(self, slowest: Finding, findings: Sequence[Finding]) -> str:
        harm = "slow each other"
        if findings and not any(finding.is_collapse for finding in findings):
            little = slowest.slowdown <= _MUCH
            harm = "slow each other a little" if little else "share links, and lose no more"
        return (
            f"Transfers {harm}: the slowest hop gets {slowest.gbps:.2f} GB/s ({self._mark}), and "
            f"none gets less than {slowest.alone_gbps:.2f} alone."
        )

    def _as_alone(self, slowest: Finding) -> str:
        doubt = ", as far as such varying rates tell" if slowest.slowdown > 1 / HURT else ""
        return (
            f"Nothing hurts: the slowest hop is as fast as it is alone{doubt}. It is "
            f"{slowest.flows[0].words} ({describe_flows(self._machine, slowest.flows)}), "
            f"{slowest.gbps:.2f} GB/s ({self._mark})."
            f"{instead_text(slowest.gbps, slowest.instead, alone=True)}"
        )


def _transfers(rings: RingFlows) -> list[tuple[Transfer, ...]]:
    return sorted(flow.transfers for flow in rings.flows)


def _kinds(flows: Flows) -> tuple[str, ...]:
    return tuple(sorted(map(kind_of, flows)))


def by_mechanism(plan: Plan, flow: Flow, kind: str, *, number: int = 0) -> Flow | None:
    """Return the flow between the same GPUs by a mechanism; None without such access.

    `number` is the class of hosts.
    """
    if kind_of(flow) == kind:
        return flow
    part, gpus = plan.cluster.classes[number], plan.class_gpus[number]
    source, target = flow.source.index, flow.destination.index
    if flow.source.kind != "G" or flow.destination.kind != "G":
        return None
    if kind == "bounce":
        numa = part.machine.numa_of(f"G{target}")
        return bounce(source, target, numa, blocks=flow.blocks, fifo=flow.fifo)
    level = pinned_level(plan.pinned_env)
    direct = direct_pairs(part.machine, part.knowledge, level, gpus=gpus)
    if direct is not None and (source, target) not in direct:
        return None
    reach = (source, target) if kind == "direct write" else (target, source)
    if not part.knowledge.may_use(part.machine, *reach):
        return None
    make = direct_write if kind == "direct write" else direct_read
    return make(source, target, blocks=flow.blocks, fifo=flow.fifo)
