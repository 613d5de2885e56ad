"""From a cause to a finding: its figures, exact, what its flows share, and a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.explain.causes import Cause, ContradictionError, find_causes, is_hurt
from tccl_py.explain.findings import (
    COLLAPSE,
    Finding,
    Instead,
    described,
    is_collapse,
    kind_of,
    single_sentence,
    together_sentence,
)
from tccl_py.explain.probing import Asker, Flows, Key
from tccl_py.explain.sharing import Shared, Sharing
from tccl_py.model.measurement import dealt
from tccl_py.model.transfer import Flow, bounce, direct_read, direct_write, parse_flow
from tccl_py.nccl.pinned_env import direct_pairs, kept_level
from tccl_py.plan.plan import Plan
from tccl_py.search.evaluator import BudgetSpentError

# The same GPU pairs by other mechanisms: write against read, direct against bounce.


_KINDS = ("direct write", "direct read", "bounce")


def instead(asker: Asker, plan: Plan, flows: Sequence[Flow]) -> tuple[Instead, ...]:
    """What the pairs of these flows get if all of them moved their bytes otherwise.

    What the budget or the hardware does not allow is left out.
    """
    found = []
    for kind, others in _variants(plan, flows):
        try:
            rate = asker.rate(others)
        except (BudgetSpentError, MeasurementError):
            continue
        found.append(Instead(kind=kind, gbps=rate.gbps))
    return tuple(found)


def _variants(plan: Plan, flows: Sequence[Flow]) -> Iterator[tuple[str, tuple[Flow, ...]]]:
    for kind in _KINDS:
        others = [flow if kind_of(flow) == kind else by(plan, flow, kind) for flow in flows]
        changed = [flow for flow in others if flow is not None]
        if len(changed) == len(flows) and changed != list(flows):
            yield kind, tuple(changed)


def by(plan: Plan, flow: Flow, kind: str) -> Flow | None:
    """The flow between the same GPUs by another mechanism; None if jobs have no such access."""
    source, target = flow.source.index, flow.destination.index
    if flow.source.kind != "G" or flow.destination.kind != "G":
        return None
    if kind == "bounce":
        node = plan.machine.numa_of(f"G{target}")
        return bounce(source, target, node, blocks=flow.blocks, fifo=flow.fifo)
    direct = direct_pairs(plan.machine, plan.knowledge, kept_level(plan.kept), gpus=plan.gpus)
    if direct is not None and (source, target) not in direct:
        return None
    reach = (source, target) if kind == "direct write" else (target, source)
    if not plan.knowledge.can_access(plan.machine, *reach):
        return None
    make = direct_write if kind == "direct write" else direct_read
    return make(source, target, blocks=flow.blocks, fifo=flow.fifo)


Kinds = tuple[str, ...]
_MOST_FLOWS = 6
_MOST_SLOWDOWN = 1000.0
"""What moves next to nothing is this many times slower; an infinity is no JSON."""


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A known set: its rate over its slowest flow's alone, and what its flows share."""

    share: float
    shared: frozenset[str]


def _kinds(flows: Flows) -> Kinds:
    return tuple(sorted(kind_of(flow) for flow in flows))


class Builder:
    """Makes findings of one plan.

    Args:
        plan: whose flows they are.
        asker: gives their figures.
        sharing: the machine's structure.
    """

    def __init__(self, plan: Plan, asker: Asker, sharing: Sharing) -> None:
        self.plan, self.asker, self.sharing = plan, asker, sharing
        self._suspects: dict[tuple[Flow, ...], tuple[Shared, ...]] = {}
        self._seen: dict[Kinds, list[_Seen]] = {}
        self._looked_at = 0

    @property
    def mark(self) -> str:
        """Where figures are from, in a word."""
        return "simulated" if self.asker.source.simulated else "measured"

    def finding(self, cause: Cause) -> Finding:
        """A set that is slow together.

        Raises:
            BudgetSpentError, MeasurementError: a figure is neither known nor can be measured.
        """
        flows = sorted(cause.flows, key=str)
        alone = [self.asker.best([flow]).gbps for flow in flows]
        together = self.asker.best(flows)
        raw = self._finding(flows, min(together.gbps, *alone), alone)
        whole = msgspec.structs.replace(
            raw,
            each_gbps=_each(flows, together.each, together.gbps),
            error=together.error,
            shares=tuple(one.words for one in self.suspects(flows)),
            instead=instead(self.asker, self.plan, flows),
            alike=cause.alike,
            minimal=cause.minimal,
        )
        return self._said(whole)

    def label(self, flows: Flows) -> object:
        """Sets with one label are slow in the same way: same mechanisms, same things shared."""
        return _kinds(flows), tuple(one.kind for one in self.sharing.shared(flows))

    def suspects(self, flows: Flows) -> tuple[Shared, ...]:
        """What the flows share, without what flows of the same mechanisms share unharmed.

        Raises:
            BudgetSpentError, MeasurementError: the flows were not measured.
        """
        key = tuple(flows)
        if key not in self._suspects:
            alone = min(self.asker.best([flow]).gbps for flow in flows)
            share = min(1.0, self.asker.best(flows).gbps / alone)
            innocent = self._innocent(_kinds(flows), share**0.5)
            shared = self.sharing.shared(flows)
            busy = self.sharing.busy(flows) if share < COLLAPSE else ()
            left = [one for one in (*busy, *shared) if one.kind not in innocent]
            self._suspects[key] = tuple(left) or shared
        return self._suspects[key]

    def _innocent(self, kinds: Kinds, above: float) -> set[str]:
        """What known sets of these mechanisms share and get this much of their own all the same."""
        for known in self.asker.known[self._looked_at :]:
            self._look_at(known.flows)
        self._looked_at = len(self.asker.known)
        return {
            kind
            for seen in self._seen.get(kinds, [])
            if seen.share >= above
            for kind in seen.shared
        }

    def _look_at(self, flows: Flows) -> None:
        if not 1 < len(flows) <= _MOST_FLOWS:
            return
        alone = [one for one in map(self.asker.if_known, ([flow] for flow in flows)) if one]
        if len(alone) < len(flows):
            return
        slowest = min(one.gbps for one in alone)
        shared = (*self.sharing.shared(flows), *self.sharing.busy(flows))
        seen = _Seen(
            share=self.asker.exact(flows).gbps / slowest if slowest else 0.0,
            shared=frozenset(one.kind for one in shared),
        )
        self._seen.setdefault(_kinds(flows), []).append(seen)

    def slowest(self, flows: Flows, gbps: float) -> Finding:
        """The hop that gets least alone, in rings whose slowest hop gets `gbps`."""
        rates = {flow: self.asker.rate([flow]).gbps for flow in flows}
        flow = min(rates, key=lambda one: (rates[one], str(one)))
        alone = self.asker.best([flow]).gbps
        raw = self._finding([flow], gbps, [alone])
        return msgspec.structs.replace(
            raw, each_gbps=(gbps,), instead=instead(self.asker, self.plan, [flow])
        )

    def single(self, flow: Flow, others: Sequence[Instead]) -> Finding:
        """A flow that other mechanisms between the same GPUs beat."""
        rate = self.asker.best([flow])
        raw = self._finding([flow], rate.gbps, [max(one.gbps for one in others)])
        whole = msgspec.structs.replace(raw, error=rate.error, instead=tuple(others))
        return self._said(whole)

    def _finding(self, flows: Flows, gbps: float, alone: Sequence[float]) -> Finding:
        return Finding(
            flows=tuple(str(flow) for flow in flows),
            gbps=gbps,
            alone_gbps=min(alone),
            slowdown=_slowdown(min(alone), gbps),
            each_gbps=(gbps,) * len(flows),
            each_alone_gbps=tuple(alone),
            error=0.0,
            shares=(),
            kinds=tuple(sorted({kind_of(flow) for flow in flows})),
        )

    def _said(self, finding: Finding) -> Finding:
        say = together_sentence if len(finding.flows) > 1 else single_sentence
        sentence = say(self.plan.machine, finding, mark=self.mark)
        return msgspec.structs.replace(finding, sentence=sentence)


def _slowdown(alone: float, gbps: float) -> float:
    return min(_MOST_SLOWDOWN, alone / gbps) if gbps > 0 else _MOST_SLOWDOWN


def _each(flows: Flows, each: Sequence[tuple[Flow, float]], slowest: float) -> tuple[float, ...]:
    """Each flow's rate; the slowest's for all where only an image was measured."""
    if sorted(flows) != sorted(flow for flow, _ in each):
        return (slowest,) * len(flows)
    waiting = dealt((flow for flow, _ in each), (rate for _, rate in each))
    return tuple(waiting[flow].pop(0) for flow in flows)


# Slow sets of other rings that the search met: what a plan avoids.


_LOST = COLLAPSE / 2
"""Two flows that get this share of their own are a collapse; those that get half just share."""
_CERTAIN = 0.25
"""Rates with a larger relative error are no ground for a warning."""
_TRIED = 40
"""Sets of the journal that are looked at closely."""


class _KnownSet(msgspec.Struct, frozen=True, kw_only=True):
    """A set of the journal; `share` is its rate over that of its slowest flow alone."""

    flows: tuple[Flow, ...]
    share: float


def avoided(builder: Builder, told: Sequence[Finding], *, most: int) -> tuple[Finding, ...]:
    """The worst sets that the journal holds, each for another reason than those told already.

    Small sets come first: what is slow for the reason of a smaller one is not told again.
    """
    reasons = [_reason(builder, finding) for finding in told]
    found: list[Finding] = []
    slow = sorted(_slow_sets(builder.asker), key=lambda one: (len(one.flows), one.share))
    for finding in chain(_slow_ways(builder), _explained(builder, slow, reasons)):
        reason = _reason(builder, finding)
        if not any(known.explains(reason) for known in reasons):
            reasons.append(reason)
            found.append(finding)
    return tuple(sorted(found, key=lambda one: -one.slowdown)[:most])


class _Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a set is slow, as far as names of devices do not matter."""

    kinds: frozenset[str]
    shared: frozenset[str]

    def explains(self, other: _Reason) -> bool:
        """Whether the other has this reason, and perhaps more."""
        return self.kinds == other.kinds and self.shared <= other.shared


def _reason(builder: Builder, finding: Finding) -> _Reason:
    flows = [parse_flow(text) for text in finding.flows]
    if len(flows) == 1:
        # Of a single flow it is where it goes, whichever NUMA node that is.
        where = re.sub("[0-9]+", "", described(builder.plan.machine, flows))
        return _Reason(kinds=frozenset(finding.kinds), shared=frozenset([where]))
    shared = frozenset(one.kind for one in builder.suspects(flows))
    return _Reason(kinds=frozenset(finding.kinds), shared=shared)


def _slow_sets(asker: Asker) -> Iterator[_KnownSet]:
    """Sets of a few flows that are much slower than each flow alone; costs no measurement."""
    keys: set[Key] = set()
    for known in asker.known:
        flows = known.flows
        if not 1 < len(flows) <= _MOST_FLOWS:
            continue
        alone = [asker.if_known([flow]) for flow in flows]
        slowest = min((rate.gbps if rate is not None else 0.0 for rate in alone), default=0.0)
        together = asker.exact(flows)
        share = together.gbps / slowest if slowest else 1.0
        if share >= _LOST or together.error > _CERTAIN or not is_hurt(asker, flows):
            continue
        key = asker.likeness.key(flows)
        if key not in keys:
            keys.add(key)
            yield _KnownSet(flows=flows, share=share)


def _explained(
    builder: Builder, slow: Sequence[_KnownSet], reasons: Sequence[_Reason]
) -> Iterator[Finding]:
    """The smallest part of each; `reasons` grows meanwhile."""
    related, tried = builder.sharing.related, 0
    for seen in slow:
        try:
            raw = _Reason(
                kinds=frozenset(kind_of(flow) for flow in seen.flows),
                shared=frozenset(one.kind for one in builder.suspects(seen.flows)),
            )
            if tried >= _TRIED or any(known.explains(raw) for known in reasons):
                continue
            tried += 1
            causes = find_causes(builder.asker, seen.flows, most=1, related=related)
            found = [builder.finding(cause) for cause in causes.found]
            yield from (one for one in found if is_collapse(one) and one.error < _CERTAIN)
        except (BudgetSpentError, MeasurementError, ContradictionError):
            continue


def _slow_ways(builder: Builder) -> Iterator[Finding]:
    """Single flows that another mechanism between the same GPUs beats by far, as known."""
    flows = [known.flows[0] for known in builder.asker.known if len(known) == 1]
    by_pair: dict[tuple[object, ...], list[Flow]] = {}
    for flow in flows:
        key = (flow.source, flow.destination, flow.blocks)
        by_pair.setdefault(key, []).append(flow)
    for ways in by_pair.values():
        rates = {flow: builder.asker.exact([flow]).gbps for flow in ways}
        worst = min(rates, key=lambda one: rates[one])
        others = _best_of_kinds(rates, kind_of(worst))
        if others and rates[worst] < COLLAPSE * max(one.gbps for one in others):
            found = builder.single(worst, others)
            if found.error < _CERTAIN:
                yield found


def _best_of_kinds(rates: dict[Flow, float], without: str) -> tuple[Instead, ...]:
    best: dict[str, float] = {}
    for flow, gbps in rates.items():
        best[kind_of(flow)] = max(gbps, best.get(kind_of(flow), 0.0))
    return tuple(
        Instead(kind=kind, gbps=gbps) for kind, gbps in sorted(best.items()) if kind != without
    )
