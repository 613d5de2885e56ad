"""From causes to findings: exact rates, shared places, other mechanisms; and pitfalls of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.explanation.causes import (
    Cause,
    ContradictionError,
    Flows,
    Key,
    Prober,
    find_causes,
    is_hurt,
)
from tccl_py.explanation.findings import (
    COLLAPSE,
    Finding,
    Instead,
    described,
    finding_sentence,
    kind_of,
)
from tccl_py.explanation.paths import Paths, Shared
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import Flow, bounce, direct_read, direct_write
from tccl_py.nccl.settings import pinned_level
from tccl_py.nccl.view import direct_pairs
from tccl_py.plan.plan import Plan

Kinds = tuple[str, ...]
Reason = tuple[frozenset[str], frozenset[str]]
"""Mechanisms of a slow set, and kinds of shared parts, without names of devices."""
_MECHANISMS = ("direct write", "direct read", "bounce")
_MOST_FLOWS = 6
"""Larger known sets say little about a mechanism, and are no pitfalls."""
_LOST = COLLAPSE / 2
"""Two flows with this share of their own rates are a collapse; with half they just share."""
_CERTAIN = 0.25
"""Rates with a larger relative error are no ground for a warning."""
_TRIED = 40
"""Sets of the journal that are examined closely."""


def by_mechanism(plan: Plan, flow: Flow, kind: str, *, number: int = 0) -> Flow | None:
    """Return the flow between the same GPUs by another mechanism; None without such access.

    `number` is the class of hosts.
    """
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
    if not part.knowledge.can_access(part.machine, *reach):
        return None
    make = direct_write if kind == "direct write" else direct_read
    return make(source, target, blocks=flow.blocks, fifo=flow.fifo)


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    """A known set; `share` is its rate over the rate of its slowest flow alone."""

    flows: tuple[Flow, ...]
    rate: Measurement
    share: float
    kinds: Kinds
    shares: frozenset[str]


class Builder:
    """Makes findings about hosts of class `number`, with rates from `prober`."""

    def __init__(self, plan: Plan, number: int, prober: Prober) -> None:
        self.prober = prober
        self._plan, self._number = plan, number
        part = plan.cluster.classes[number]
        self.machine, self.paths = part.machine, Paths(part.machine, part.knowledge)
        self._known: tuple[object, list[_Known]] = (None, [])
        self._shares = cache(self._uncached_shares)

    @property
    def mark(self) -> str:
        """The origin of rates: `simulated` or `measured`."""
        return "simulated" if self.prober.source.simulated else "measured"

    def finding(self, cause: Cause) -> Finding:
        """Return a finding about a set that is slow together."""
        flows = sorted(cause.flows, key=str)
        alone = [self.prober.best([flow]).rate_gbps for flow in flows]
        together = self.prober.best(flows)
        return self._finding(
            flows,
            min(together.rate_gbps, *alone),
            alone,
            each_gbps=_each(flows, together),
            error=together.relative_error,
            shares=tuple(shared.words for shared in self.suspects(flows)),
            instead=self._instead(flows),
            alike=cause.alike,
            minimal=cause.minimal,
        )

    def slowest(self, flows: Flows, gbps: float) -> Finding:
        """Return the hop that is slowest alone, in rings whose slowest hop gets `gbps`."""
        rates = {flow: self.prober.rate([flow]).rate_gbps for flow in flows}
        flow = min(rates, key=lambda flow: (rates[flow], str(flow)))
        alone = self.prober.best([flow]).rate_gbps
        found = self._finding([flow], gbps, [alone], instead=self._instead([flow]))
        return msgspec.structs.replace(found, sentence="")

    def _finding(self, flows: Flows, gbps: float, alone: Sequence[float], **more: Any) -> Finding:
        found = Finding(
            flows=tuple(flows),
            gbps=gbps,
            alone_gbps=min(alone),
            slowdown=min(alone) / gbps,
            each_alone_gbps=tuple(alone),
            kinds=tuple(sorted(set(map(kind_of, flows)))),
            **{"each_gbps": (gbps,) * len(flows), **more},
        )
        sentence = finding_sentence(self.machine, found, mark=self.mark)
        return msgspec.structs.replace(found, sentence=sentence)

    def _instead(self, flows: Flows) -> tuple[Instead, ...]:
        """Return the rates of the flows' GPU pairs by each mechanism within budget and hardware."""
        found = []
        for kind in _MECHANISMS:
            variants = [
                flow
                if kind_of(flow) == kind
                else by_mechanism(self._plan, flow, kind, number=self._number)
                for flow in flows
            ]
            changed = [flow for flow in variants if flow is not None]
            if len(changed) < len(flows) or changed == list(flows):
                continue
            try:
                found.append(Instead(kind=kind, gbps=self.prober.rate(changed).rate_gbps))
            except MeasurementError:
                continue
        return tuple(found)

    def label(self, flows: Flows) -> object:
        """Return equal labels for sets with the same mechanisms and kinds of shared places."""
        return _kinds(flows), tuple(shared.kind for shared in self.paths.shared(flows))

    def suspects(self, flows: Flows) -> tuple[Shared, ...]:
        """Return the shared places, without those that equal mechanisms share unharmed. Raises
        MeasurementError: the flows were not measured.
        """
        alone = min(self.prober.best([flow]).rate_gbps for flow in flows)
        share = min(1.0, self.prober.best(flows).rate_gbps / alone)
        innocent = self._innocent(_kinds(flows), share**0.5)
        shared = self.paths.shared(flows)
        gpus = self.paths.busy(flows) if share < COLLAPSE else ()
        left = [place for place in (*gpus, *shared) if place.kind not in innocent]
        return tuple(left) or shared

    def _innocent(self, kinds: Kinds, above: float) -> set[str]:
        """Return the kinds of places of known sets with these mechanisms and so high a share."""
        sets = (known for known in self.known_sets() if known.share >= above)
        return set(chain.from_iterable(known.shares for known in sets if known.kinds == kinds))

    def known_sets(self) -> Sequence[_Known]:
        """Return known sets of a few flows whose rates alone are known too."""
        state = self.prober.state
        if self._known[0] != state:
            self._known = (state, [*self._known_sets()])
        return self._known[1]

    def _known_sets(self) -> Iterator[_Known]:
        for flows in (known.flows for known in self.prober.known):
            if not 1 < len(flows) <= _MOST_FLOWS:
                continue
            alone = [self.prober.if_known([flow]) for flow in flows]
            rates = [rate.rate_gbps for rate in alone if rate is not None]
            if len(rates) == len(flows):
                rate = self.prober.exact(flows)
                yield _Known(
                    flows=flows,
                    rate=rate,
                    share=rate.rate_gbps / min(rates),
                    kinds=_kinds(flows),
                    shares=self._shares(flows),
                )

    def _uncached_shares(self, flows: tuple[Flow, ...]) -> frozenset[str]:
        places = (*self.paths.shared(flows), *self.paths.busy(flows))
        return frozenset(place.kind for place in places)

    def pitfalls(self, told: Sequence[Finding], *, most: int) -> tuple[Finding, ...]:
        """Return the worst sets of the journal, each for another reason than `told` findings.

        Small sets come first: larger sets with the reason of a smaller one are left out.
        """
        reasons = [self._reason(finding.flows) for finding in told]
        found: list[Finding] = []
        for finding in chain(self._slow_mechanisms(), self._slow_sets(reasons)):
            reason = self._reason(finding.flows)
            if not _explained(reason, reasons):
                reasons.append(reason)
                found.append(finding)
        return tuple(sorted(found, key=lambda finding: -finding.slowdown)[:most])

    def _reason(self, flows: Flows) -> Reason:
        if len(flows) == 1:
            # A single flow's reason is its target, on whichever NUMA node.
            shared = frozenset([re.sub("[0-9]+", "", described(self.machine, flows))])
        else:
            shared = frozenset(place.kind for place in self.suspects(flows))
        return frozenset(map(kind_of, flows)), shared

    def _slow_sets(self, reasons: Sequence[Reason]) -> Iterator[Finding]:
        """Yield the smallest part of each much slowed set; `reasons` grows meanwhile."""
        slow: dict[Key, _Known] = {}
        for known in self.known_sets():
            clear = known.share < _LOST and known.rate.relative_error <= _CERTAIN
            if clear and is_hurt(self.prober, known.flows):
                slow.setdefault(self.prober.symmetry.key(known.flows), known)
        tried = 0
        for known in sorted(slow.values(), key=lambda known: (len(known.flows), known.share)):
            try:
                reason = self._reason(known.flows)
                if tried >= _TRIED or _explained(reason, reasons):
                    continue
                tried += 1
                related = self.paths.related
                causes = find_causes(self.prober, known.flows, most=1, related=related)
                found = [self.finding(cause) for cause in causes.found]
                yield from (one for one in found if one.is_collapse and one.error < _CERTAIN)
            except (MeasurementError, ContradictionError):
                continue

    def _slow_mechanisms(self) -> Iterator[Finding]:
        """Yield known single flows that are far slower than another mechanism of the same GPUs."""
        by_pair: dict[tuple[object, ...], dict[Flow, float]] = {}
        for known in self.prober.known:
            if len(known) == 1:
                (flow,) = known.flows
                pair = (flow.source, flow.destination, flow.blocks)
                by_pair.setdefault(pair, {})[flow] = self.prober.exact([flow]).rate_gbps
        for rates in by_pair.values():
            worst = min(rates, key=lambda flow: rates[flow])
            best: dict[str, float] = {}
            for flow, gbps in rates.items():
                if kind_of(flow) != kind_of(worst):
                    best[kind_of(flow)] = max(gbps, best.get(kind_of(flow), 0.0))
            if best and rates[worst] < COLLAPSE * max(best.values()):
                rate = self.prober.best([worst])
                others = tuple(Instead(kind=kind, gbps=best[kind]) for kind in sorted(best))
                alone = [max(best.values())]
                if rate.relative_error < _CERTAIN:
                    gbps, error = rate.rate_gbps, rate.relative_error
                    yield self._finding([worst], gbps, alone, error=error, instead=others)


def _explained(reason: Reason, reasons: Sequence[Reason]) -> bool:
    """Return whether one of `reasons` is part of a reason."""
    return any(kinds == reason[0] and shared <= reason[1] for kinds, shared in reasons)


def _kinds(flows: Flows) -> Kinds:
    return tuple(sorted(map(kind_of, flows)))


def _each(flows: Flows, rate: Measurement) -> tuple[float, ...]:
    if sorted(flows) != sorted(rate.transfers.flows):
        return (rate.rate_gbps,) * len(flows)
    return rate.in_order(flows)
