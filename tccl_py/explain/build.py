"""From a cause to a finding: its figures, exact, what its flows share, and a sentence."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tccl_py.explain.asking import Asker, Flows
from tccl_py.explain.causes import Cause
from tccl_py.explain.findings import Finding, Instead
from tccl_py.explain.mechanisms import instead
from tccl_py.explain.sentences import COLLAPSE, kind_of, single_sentence, together_sentence
from tccl_py.explain.sharing import Shared, Sharing
from tccl_py.model.measurement import dealt
from tccl_py.model.transfer import Flow, parse_set
from tccl_py.plan.plan import Plan

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
        self._suspects: dict[str, tuple[Shared, ...]] = {}
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
        text = " ".join(str(flow) for flow in flows)
        if text not in self._suspects:
            alone = min(self.asker.best([flow]).gbps for flow in flows)
            share = min(1.0, self.asker.best(flows).gbps / alone)
            innocent = self._innocent(_kinds(flows), share**0.5)
            shared = self.sharing.shared(flows)
            busy = self.sharing.busy(flows) if share < COLLAPSE else ()
            left = [one for one in (*busy, *shared) if one.kind not in innocent]
            self._suspects[text] = tuple(left) or shared
        return self._suspects[text]

    def _innocent(self, kinds: Kinds, above: float) -> set[str]:
        """What known sets of these mechanisms share and get this much of their own all the same."""
        for text in self.asker.known[self._looked_at :]:
            self._look_at(text)
        self._looked_at = len(self.asker.known)
        return {
            kind
            for seen in self._seen.get(kinds, [])
            if seen.share >= above
            for kind in seen.shared
        }

    def _look_at(self, text: str) -> None:
        if not 1 < text.count(" ") + 1 <= _MOST_FLOWS:
            return
        flows = parse_set(text).flows
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


def _each(flows: Flows, each: Sequence[tuple[str, float]], slowest: float) -> tuple[float, ...]:
    """Each flow's rate; the slowest's for all where only an image was measured."""
    texts = [str(flow) for flow in flows]
    if sorted(texts) != sorted(text for text, _ in each):
        return (slowest,) * len(texts)
    waiting = dealt((text for text, _ in each), (rate for _, rate in each))
    return tuple(waiting[text].pop(0) for text in texts)
