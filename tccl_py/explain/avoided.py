"""Slow sets of other rings that the search met: what a plan avoids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.explain.asking import Asker
from tccl_py.explain.build import Builder
from tccl_py.explain.causes import ContradictionError, find_causes, is_hurt
from tccl_py.explain.findings import Finding, Instead
from tccl_py.explain.likeness import Key
from tccl_py.explain.sentences import COLLAPSE, described, is_collapse, kind_of
from tccl_py.model.transfer import Flow, parse_flow, parse_set
from tccl_py.search.evaluator import BudgetSpentError

_LOST = COLLAPSE / 2
"""Two flows that get this share of their own are a collapse; those that get half just share."""
_MOST_FLOWS = 6
_CERTAIN = 0.25
"""Rates with a larger relative error are no ground for a warning."""
_TRIED = 40
"""Sets of the journal that are looked at closely."""


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
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


def _slow_sets(asker: Asker) -> Iterator[_Seen]:
    """Sets of a few flows that are much slower than each flow alone; costs no measurement."""
    keys: set[Key] = set()
    for text in asker.known:
        if not 1 < text.count(" ") + 1 <= _MOST_FLOWS:
            continue
        flows = parse_set(text).flows
        alone = [asker.if_known([flow]) for flow in flows]
        slowest = min((rate.gbps if rate is not None else 0.0 for rate in alone), default=0.0)
        together = asker.exact(flows)
        share = together.gbps / slowest if slowest else 1.0
        if share >= _LOST or together.error > _CERTAIN or not is_hurt(asker, flows):
            continue
        key = asker.likeness.key(flows)
        if key not in keys:
            keys.add(key)
            yield _Seen(flows=flows, share=share)


def _explained(
    builder: Builder, slow: Sequence[_Seen], reasons: Sequence[_Reason]
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
    singles = [text for text in builder.asker.known if " " not in text]
    flows = [flow for text in singles for flow in parse_set(text).flows]
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
