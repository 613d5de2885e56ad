"""What an explanation says: findings, one list for each set of rings; and its file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tccl_py.model.machine import Machine
from tccl_py.model.transfer import Flow, Place, parse_flow
from tccl_py.plan.directory import keep_beside_plan, read_beside_plan

FORMAT_VERSION = 1
EXPLANATION_FILE = "explanation.json"


class Instead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same GPU pairs by another mechanism (`direct write`, `direct read`, `bounce`)."""

    kind: str
    gbps: float


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Transfers that are slow together, none of which can be left out.

    `gbps` is the slowest flow's rate with all of them running, `alone_gbps` the slowest's with each
    alone; `slowdown` is how many times lower the first is. A single flow that is slow for the way
    it moves bytes has the best other way's rate as `alone_gbps`. `each_gbps` and `each_alone_gbps`
    are of each flow, `error` the relative standard error of `gbps`. `shares` names what the flows
    share, `kinds` how they move bytes. `alike` more sets of the same rings are slow in the same
    way, as measured or by the machine's symmetry. `minimal` is false if it was not measured that
    none can be left out.
    """

    flows: tuple[str, ...]
    gbps: float
    alone_gbps: float
    slowdown: float
    each_gbps: tuple[float, ...]
    each_alone_gbps: tuple[float, ...]
    error: float
    shares: tuple[str, ...]
    kinds: tuple[str, ...]
    instead: tuple[Instead, ...] = ()
    alike: int = 0
    minimal: bool = True
    sentence: str = ""

    @property
    def total_gbps(self) -> float:
        """All flows of the finding together."""
        return sum(self.each_gbps)


class RingExplanation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why rings are as fast as they are.

    `rate_gbps` is their score; `slowest` the hop that gets least by itself, or None if that is not
    known: without findings it is what limits the rings. `findings` are the worst first.
    `unexplained` says what is left open, or is empty.
    """

    name: Literal["plan", "stock"]
    rings: int
    rate_gbps: float
    slowest: Finding | None
    findings: tuple[Finding, ...]
    unexplained: str
    sentence: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which transfers hurt which on a plan's machine.

    `avoided` are slow sets of other rings that the plan's journal holds. `plan_digest` is that of
    the plan.json it speaks of, where it was read from a directory.
    """

    machine: str
    simulated: bool
    assumed: bool
    rings: tuple[RingExplanation, ...]
    avoided: tuple[Finding, ...]
    sets_measured: int
    notices: tuple[str, ...] = ()
    plan_digest: str = ""
    format_version: int = FORMAT_VERSION


def save_explanation(explanation: Explanation, directory: Path) -> Explanation:
    """Write `explanation.json` beside the plan that it is of; returns what was written.

    Raises:
        InputError: the place cannot be written.
    """
    return keep_beside_plan(explanation, directory / EXPLANATION_FILE)


def load_explanation(directory: Path) -> Explanation | None:
    """The explanation of the plan that is in `directory` now; None if there is none of it.

    Raises:
        InputError: the file is damaged or of another format version.
    """
    path = directory / EXPLANATION_FILE
    if not path.is_file():
        return None
    return read_beside_plan(path, Explanation, version=FORMAT_VERSION)


# Findings as plain sentences for administrators.


_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_SHOWN = 4
"""More flows than this are not all named in a sentence."""
_EQUAL = 0.02
"""Rates that differ less (relative) are one figure in a sentence."""
COLLAPSE = 0.75
"""Flows that get less than this share together of what one gets alone do not just share."""
_OTHERWISE = 0.1
"""Other mechanisms are named if their rates differ more (relative)."""


def kind_of(flow: Flow) -> str:
    """How a flow moves its bytes.

    >>> kind_of(parse_flow("G0->G4->G4"))
    'direct read'
    """
    engine = " by copy engine" if any(one.uses_copy_engine for one in flow.transfers) else ""
    if flow.is_bounce:
        return f"bounce{engine}"
    (one,) = flow.transfers
    ends = {one.source.kind, one.destination.kind}
    return f"{'direct' if ends == {'G'} else 'host'} {one.operation}{engine}"


def short(flow: Flow) -> str:
    """A flow without its options, which are the same for all of a ring set.

    >>> short(parse_flow("G0->G0->G4{blocks=2}"))
    'G0->G0->G4'
    """
    return str(flow).partition("{")[0]


def counted(number: int, noun: str) -> str:
    """A number and a noun, as `one bounce` or `two bounces`."""
    amount = _NUMBERS[number] if number < len(_NUMBERS) else str(number)
    return f"{amount} {noun if number == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    head, by, tail = noun.partition(" by ")
    return f"{head}s{by}{tail}"


def together_sentence(machine: Machine, finding: Finding, *, mark: str) -> str:
    """Several flows that are slow together; `mark` says where the figures are from."""
    flows = [parse_flow(text) for text in finding.flows]
    share = finding.gbps / finding.alone_gbps
    than_alone = f"{100 * share:.0f} % of what {_slowest_alone(finding)}"
    text = (
        f"{_names(flows)} ({described(machine, flows)}) get {_rates(finding.each_gbps)}"
        f"{_error(finding.error)} ({mark}), {than_alone}: {_shared(finding.shares)}. "
        f"{_total(finding)}"
    )
    if not finding.minimal:
        text += " Perhaps fewer of them are as slow: that was not measured."
    if finding.alike:
        more, verb = counted(finding.alike, "more set"), "are" if finding.alike > 1 else "is"
        text += f" {more.capitalize()} of these rings {verb} slow in the same way."
    return text + in_place(finding.gbps, finding.instead, each=len(flows) > 1)


def single_sentence(machine: Machine, finding: Finding, *, mark: str) -> str:
    """One flow that is slow for the way it moves its bytes."""
    flows = [parse_flow(text) for text in finding.flows]
    return (
        f"{_names(flows)} ({described(machine, flows)}) gets {finding.gbps:.2f} GB/s even alone"
        f"{_error(finding.error)} ({mark})." + in_place(finding.gbps, finding.instead, each=False)
    )


def described(machine: Machine, flows: Sequence[Flow]) -> str:
    """How flows move bytes, from where and to where, as far as they have that in common."""
    kinds = Counter(kind_of(flow) for flow in flows)
    parts = [" and ".join(counted(count, kind) for kind, count in sorted(kinds.items()))]
    hosts = {one.destination for flow in flows if flow.is_bounce for one in flow.transfers[:1]}
    if len(hosts) == 1 and len(kinds) == 1:
        parts.append(f"through the memory of NUMA node {next(iter(hosts)).index}")
    parts += [_origin(machine, flows), _target(machine, flows)]
    return " ".join(part for part in parts if part)


def _origin(machine: Machine, flows: Sequence[Flow]) -> str:
    sources = {flow.source for flow in flows}
    if len(flows) > 1 and len(sources) == 1:
        return f"out of GPU {next(iter(sources)).index}"
    ports = {_port(machine, source) for source in sources}
    if len(flows) > 1 and len(ports) == 1 and not next(iter(ports)).startswith("G"):
        return f"from below switch {next(iter(ports))}"
    return ""


def _target(machine: Machine, flows: Sequence[Flow]) -> str:
    """The crossing is that of the GPUs; a bounce crosses in one of its halves."""
    targets = {flow.destination for flow in flows}
    where = {_crossing(machine, flow) for flow in flows}
    far = where.pop() if len(where) == 1 else ""
    if len(flows) > 1 and len(targets) == 1:
        return f"into GPU {next(iter(targets)).index}{far}"
    ports = {_port(machine, target) for target in targets}
    below_switches = not any(port.startswith("G") for port in ports)
    pairs = [(_port(machine, flow.source), _port(machine, flow.destination)) for flow in flows]
    leaving = all(one != other for one, other in pairs)
    if len(flows) > 1 and len(ports) > 1 and below_switches and leaving:
        return f"to {counted(len(ports), 'root port')}{far}"
    # The executor of a read stands at its end, and reaches to where the bytes come from.
    reads = all(not flow.is_bounce and flow.transfers[0].operation == "read" for flow in flows)
    ends = "a GPU" if len(flows) == 1 else "GPUs"
    return f"{'from' if reads else 'to'} {ends}{far}" if far else ""


def _port(machine: Machine, place: Place) -> str:
    """The device at the root port above a GPU: the highest switch, or the GPU itself."""
    above = (str(place), *machine.ancestors(str(place)))
    return above[-2]


def _crossing(machine: Machine, flow: Flow) -> str:
    nodes = {node.index: node.socket for node in machine.numa_nodes}
    one, other = (machine.numa_of(str(end)) for end in (flow.source, flow.destination))
    if one == other:
        return ""
    if nodes[one] is not None and nodes[one] == nodes[other]:
        return " of another NUMA node"
    return " of the other socket" if len(set(nodes.values())) == 2 else " of another socket"


def _names(flows: Sequence[Flow]) -> str:
    texts = [
        short(flow) if count == 1 else f"{short(flow)} ({count} times)"
        for flow, count in Counter(flows).items()
    ]
    if len(texts) > _SHOWN:
        texts = [*texts[: _SHOWN - 1], f"{len(texts) - _SHOWN + 1} others"]
    return listed(texts)


def listed(texts: Sequence[str]) -> str:
    """Texts with commas and an "and".

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _rates(rates: Sequence[float]) -> str:
    low, high = min(rates), max(rates)
    if high - low <= _EQUAL * high:
        return f"{low:.2f} GB/s each"
    return f"{low:.2f} to {high:.2f} GB/s"


def _slowest_alone(finding: Finding) -> str:
    low, high = min(finding.each_alone_gbps), max(finding.each_alone_gbps)
    if high - low <= _EQUAL * high:
        return f"each gets alone ({low:.2f})"
    return f"the slowest of them gets alone ({low:.2f})"


def _error(error: float) -> str:
    """The 95 % interval, where there is one."""
    return f" \u00b1 {1.96 * error:.1%}" if error else ""


def _shared(shares: Sequence[str]) -> str:
    if not shares:
        return "they share nothing that the machine's description shows"
    commas = [one for one in shares if "," in one]
    plain = [one for one in shares if "," not in one]
    return "they share " + ", and ".join([*commas, listed(plain)] if plain else commas)


def is_collapse(finding: Finding) -> bool:
    """Whether flows do not only share: all together they get less than one of them alone."""
    return finding.total_gbps < COLLAPSE * max(finding.each_alone_gbps)


def _total(finding: Finding) -> str:
    total = finding.total_gbps
    if is_collapse(finding):
        return f"Together they get {total:.2f}, less than one of them alone: a collapse."
    return f"Together they get {total:.2f}."


def in_place(gbps: float, others: Sequence[Instead], *, each: bool) -> str:
    """What other mechanisms get where it differs, as a sentence that follows another one."""
    told: dict[str, list[str]] = {}
    for one in others:
        if abs(one.gbps - gbps) > _OTHERWISE * gbps:
            way = _plural(one.kind) if each else f"a {one.kind}"
            told.setdefault(f"{one.gbps:.2f}", []).append(way)
    if not told:
        return ""
    parts = [f"{rate} by {' or '.join(ways)}" for rate, ways in told.items()]
    return f" The same GPU pair{'s' if each else ''} would get {listed(parts)}."
