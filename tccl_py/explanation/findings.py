"""Findings of an explanation, sentences about them, and the file that keeps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from tccl_py.model.machine import Machine
from tccl_py.model.measurement import mark
from tccl_py.model.transfer import Flow
from tccl_py.plan.results import Kept

_WHOSE = {"plan": "The plan", "default": "Default NCCL"}
COLLAPSE = 0.75
"""Flows with less bandwidth together than this share of one alone do more than share."""
_SHOWN = 4
"""More flows than this are not all named in a sentence."""
_EQUAL = 0.02
"""Rates within this relative difference are shown as one."""
_OTHERWISE = 0.1
"""Other mechanisms are named if their rates differ more (relative)."""


class Instead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rate of the same GPU pairs by another mechanism, GB/s."""

    kind: str
    gbps: float


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A minimal set of transfers that slow each other, or one transfer with a slow mechanism."""

    flows: tuple[Flow, ...]
    gbps: float
    """The slowest flow's rate with all flows running."""
    alone_gbps: float
    """The slowest's with each alone; of a single flow the best other mechanism's."""
    slowdown: float
    """The ratio of the two."""
    each_gbps: tuple[float, ...]
    """The rate of each flow with all running."""
    each_alone_gbps: tuple[float, ...]
    """The rate of each flow alone."""
    error: float = 0.0
    """The relative standard error of `gbps`."""
    shares: tuple[str, ...] = ()
    """The shared links and memories."""
    kinds: tuple[str, ...]
    """The mechanisms."""
    instead: tuple[Instead, ...] = ()
    alike: int = 0
    """How many more sets of the same rings are equally slow, as measured or by symmetry."""
    minimal: bool = True
    """Whether all smaller sets were measured."""
    sentence: str = ""

    @property
    def total_gbps(self) -> float:
        """The rate of all flows together."""
        return sum(self.each_gbps)

    @property
    def is_collapse(self) -> bool:
        """True if all flows together get less than one of them alone."""
        return self.total_gbps < COLLAPSE * max(self.each_alone_gbps)


def finding_of(flows: Sequence[Flow], gbps: float, alone: Sequence[float], **more: Any) -> Finding:
    """Return a finding without its sentence; `alone` has each flow's rate alone."""
    return Finding(
        flows=tuple(flows),
        gbps=gbps,
        alone_gbps=min(alone),
        slowdown=min(alone) / gbps,
        each_alone_gbps=tuple(alone),
        kinds=tuple(sorted(set(map(kind_of, flows)))),
        **more,
    )


class RingExplanation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a set of rings, the worst first."""

    name: Literal["plan", "default"]
    node_class: str = ""
    """The hosts with these chains; "" of a single host."""
    rings: int
    rate_gbps: float
    """The bandwidth of all rings."""
    slowest: Finding | None
    """The hop that is slowest alone, the limit of rings without findings; None if unknown."""
    findings: tuple[Finding, ...]
    unexplained: str
    """An open question, or ""."""
    sentence: str


class Explanation(Kept, frozen=True, kw_only=True):
    """The slowdowns of a plan's rings, of default NCCL's, and of writes that the plan avoids.

    `pitfalls` are writes that collapse above a switch.
    """

    FILE = "explanation.json"
    machine: str
    simulated: bool
    assumed: bool
    dry_run: bool = False
    rings: tuple[RingExplanation, ...]
    pitfalls: tuple[Finding, ...] = msgspec.field(name="avoided")
    sets_measured: int
    notices: tuple[str, ...] = ()

    @property
    def provenance(self) -> str:
        """The basis of the rates, as `measured` or `simulated from assumed values`."""
        return mark(simulated=self.simulated, assumed=self.assumed, dry_run=self.dry_run)

    def fault(self) -> str:
        """Return what makes it no explanation: findings without a rate of each flow."""
        findings = [*self.pitfalls, *(one for ring in self.rings for one in ring.findings)]
        rates = ((one.flows, one.each_gbps, one.each_alone_gbps) for one in findings)
        fits = all(len(flows) == len(each) == len(alone) > 0 for flows, each, alone in rates)
        fits &= all(ring.rings > 0 for ring in self.rings)
        return "" if fits else "has a finding without a rate of each flow, or no ring"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield lines on each set of rings and on pitfalls, "" or the number of a finding first."""
        for ring in self.rings:
            whose = _WHOSE[ring.name] + (f" on {ring.node_class}" if ring.node_class else "")
            more = f", {ring.rings} rings of {ring.rate_gbps / ring.rings:.2f}"
            yield "", ""
            yield "", f"{whose}: {ring.rate_gbps:.2f} GB/s{more * (ring.rings > 1)}"
            yield from [("", ring.sentence)] * bool(ring.sentence)
            yield from _numbered_lines(ring.findings)
            yield from [("", f"Left open: {ring.unexplained}")] * bool(ring.unexplained)
        if self.pitfalls:
            yield "", ""
            yield "", "Avoided by these rings, for other reasons than above:"
            yield from _numbered_lines(self.pitfalls)

    def __repr__(self) -> str:
        """Describe the explanation in sentences: rings, the slowdowns of each, and pitfalls."""
        texts = [f"{'  ' * bool(number)}{text}" for number, text in self.lines() if text]
        return "\n".join([f"What hurts on {self.machine}: {self.provenance}", *texts])


def _numbered_lines(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    return ((str(number), one.sentence) for number, one in enumerate(findings, start=1))


def kind_of(flow: Flow) -> str:
    """Return a flow's mechanism.

    >>> from tccl_py.model.transfer import parse_flow
    >>> kind_of(parse_flow("G0->G4->G4")), kind_of(parse_flow("N0->N0->C0->G1->G1"))
    ('direct read', 'network receive')
    """
    if flow.is_network:
        return "network receive" if flow.source.kind == "N" else "network send"
    engine = " by copy engine" if any(part.uses_copy_engine for part in flow.transfers) else ""
    if flow.is_bounce:
        return f"bounce{engine}"
    (part,) = flow.transfers
    direct = {part.source.kind, part.destination.kind} == {"G"}
    return f"{'direct' if direct else 'host'} {part.operation}{engine}"


def finding_sentence(machine: Machine, finding: Finding, *, mark: str) -> str:
    """Return a finding as text; `mark` is `simulated` or `measured`."""
    alone, flows = finding.each_alone_gbps, finding.flows
    error = f" \u00b1 {1.96 * finding.error:.1%}" if finding.error else ""
    text = (
        f"{_names(flows)} ({describe_flows(machine, flows)}): {_rates(finding.each_gbps)}{error} "
    )
    if len(flows) == 1:
        others = instead_text(finding.gbps, finding.instead, alone=True)
        return f"{text}({mark}), even alone.{others}"
    whose = "each" if _equal(alone) else "the slowest"
    text += f"({mark}), {finding.gbps / finding.alone_gbps:.0%} of {whose} alone "
    shares = ", ".join(finding.shares) or "nothing that the machine's description shows"
    text += f"({finding.alone_gbps:.2f}). Shared: {shares}. In all {finding.total_gbps:.2f}"
    text += ", less than one of them alone: a collapse." if finding.is_collapse else "."
    if not finding.minimal:
        text += " Smaller sets were not measured."
    if finding.alike:
        text += f" Equally slow in these rings: {finding.alike} more."
    return text + instead_text(finding.gbps, finding.instead)


def describe_flows(machine: Machine, flows: Sequence[Flow]) -> str:
    """Return the mechanisms of flows, their common host memory, and the crossing between GPUs."""
    kinds = Counter(map(kind_of, flows))
    text = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
    if len(flows) == 1:
        text = kind_of(flows[0])
    hosts = {part.destination for flow in flows if flow.is_bounce for part in flow.transfers[:1]}
    if len(hosts) == 1 and len(kinds) == 1:
        text += f" through the memory of NUMA node {next(iter(hosts)).index}"
    crossings = {_crossing(machine, flow) for flow in flows}
    return text + crossings.pop() if len(crossings) == 1 else text


def _crossing(machine: Machine, flow: Flow) -> str:
    sockets = {node.index: node.socket for node in machine.numa_nodes}
    first, second = (machine.numa_of(str(end)) for end in (flow.source, flow.destination))
    if first == second:
        return ""
    same_socket = sockets[first] is not None and sockets[first] == sockets[second]
    return " between NUMA nodes" if same_socket else " between sockets"


def _names(flows: Sequence[Flow]) -> str:
    counts = Counter(flows)
    texts = [flow.words + (f" (x{count})" if count > 1 else "") for flow, count in counts.items()]
    if len(texts) > _SHOWN:
        texts = [*texts[: _SHOWN - 1], f"{len(texts) - _SHOWN + 1} others"]
    return ", ".join(texts)


def _equal(rates: Sequence[float]) -> bool:
    return max(rates) - min(rates) <= _EQUAL * max(rates)


def _rates(rates: Sequence[float]) -> str:
    if len(rates) == 1 or not _equal(rates):
        return " to ".join(f"{rate:.2f}" for rate in sorted({min(rates), max(rates)})) + " GB/s"
    return f"{min(rates):.2f} GB/s each"


def instead_text(gbps: float, alternatives: Sequence[Instead], *, alone: bool = False) -> str:
    """Return a following sentence on mechanisms with clearly other rates; "" without any."""
    by_rate: dict[str, list[str]] = {}
    for instead in alternatives:
        if abs(instead.gbps - gbps) > _OTHERWISE * gbps:
            by_rate.setdefault(f"{instead.gbps:.2f}", []).append(instead.kind)
    parts = [f"{rate} by {' or '.join(kinds)}" for rate, kinds in by_rate.items()]
    where = "Alone between" if alone else "Between"
    return f" {where} the same GPUs: {', '.join(parts)}." if parts else ""
