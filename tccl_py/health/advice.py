"""Advice in ten lines: a machine, default NCCL on it, what to try first, the gain, how sure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import permutations

import msgspec

from tccl_py.errors import spell
from tccl_py.health.doctor import Diagnosis
from tccl_py.health.pasted import Findings, findings_lines
from tccl_py.model.cards import link_words
from tccl_py.model.links import Proof
from tccl_py.model.machine import CPU_VENDORS, Knowledge, Machine, PciLink
from tccl_py.model.rings import neighbours
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.transport import TRANSPORTS, pair_mechanism
from tccl_py.nccl.versions import say_unchecked
from tccl_py.nccl.view import view
from tccl_py.plan.plan import Plan
from tccl_py.plan.size_choices import BySize, list_by_size, size_notes
from tccl_py.plan.text import advice, assumptions, doctor_first, p2p_note, unrated_text
from tccl_py.planning.hardware import limit_sentences
from tccl_py.planning.opening import Say, Subject, machine_subject
from tccl_py.planning.request import DEFAULT_BUDGET, PlanRequest
from tccl_py.simulator.descriptions import usual_gts
from tccl_py.simulator.model import MachineModel, gpu_names

SECONDS = 40.0
"""Seconds after which a search gives its best: an answer within a minute."""
_PROBLEMS = 2
_MECHANISMS = {"NET": "over the network", "SHM": "through host memory"}
_PLAN_FIRST = "tccl plan my-plan && tccl verify my-plan"


class CpuAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What NCCL does and what to try on CPUs of one vendor; rates are GB/s."""

    default: str
    default_gbps: float | None
    recommended: str
    advice: str


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; rates are GB/s."""

    limits: tuple[str, ...]
    machine: str
    default: str
    default_gbps: float | None
    recommended: str
    advice: str
    environment: dict[str, str]
    rate_gbps: float | None
    gain: float | None
    """Relative to default NCCL; None where not known."""
    bound_gbps: float | None
    simulated: bool
    sure: str
    by_size: tuple[BySize, ...]
    poor: tuple[str, ...]
    """Why some of NCCL's choices by message size are poor."""
    assumptions: tuple[str, ...]
    problems: tuple[str, ...]
    following: str
    links: Proof | msgspec.UnsetType = msgspec.UNSET
    """The proof of this machine's links, if one was made."""
    findings: Findings | msgspec.UnsetType = msgspec.UNSET
    """What pasted files say beside the machine."""
    by_cpu: dict[str, CpuAnswer] | msgspec.UnsetType = msgspec.UNSET
    """The answers by vendor of the CPU, where it is not known and decides what NCCL does."""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield a name and a text for each line, twelve at most with pasted files."""
        found = self.findings or None
        if found is None or not found.tell:
            yield from self._own_lines()
            if found is not None:
                yield from findings_lines(found)
            return
        limits = (("Hardware", one) for one in self.limits[:1])
        yield from findings_lines(found, [*limits, ("By model", f"{self.default}. {self.advice}")])

    def _own_lines(self) -> Iterator[tuple[str, str]]:
        hangs = [text for text in self.problems if text.startswith("HANG")]
        # Where something hangs nothing else is tried before.
        for text in hangs[:_PROBLEMS]:
            yield "Fix first", text
        for text in self.limits:
            yield "Hardware", text
        yield "Machine", self.machine
        if not self.by_cpu:
            yield "NCCL now", self.default
        for vendor, answer in (self.by_cpu or {}).items():
            yield f"On {vendor}", f"{answer.default}. {answer.advice}"
        if not self.by_cpu:
            yield "Then try" if hangs or self.limits else "Try first", self.advice
        else:
            yield "Try first", "say which CPU it has: --cpu amd or --cpu intel (`lscpu` tells)"
        known = not self.by_cpu
        if known and self.gain is not None and self.rate_gbps is not None and self.gain != 1:
            best = (
                "" if self.bound_gbps is None else f"; at best {self.bound_gbps:.1f} by any rings"
            )
            yield "Gain", f"{self.default_gbps or 0:.1f} -> {self.rate_gbps:.1f} GB/s{best}"
        yield "How sure", self.sure
        more = f"; and {len(self.assumptions) - 1} more (--json)" * (len(self.assumptions) > 1)
        for text in self.assumptions[:1]:
            yield "Assumed", text + more
        for text in self.problems[len(hangs) : _PROBLEMS]:
            yield "Fix first", text
        yield "Next", self.following


def advice_request(
    machine: str | None, *, p2p: bool | None = None, cpu: str | None = None
) -> PlanRequest:
    """Return what is planned for advice: a model or this machine, in time, all GPUs only."""
    budget = msgspec.structs.replace(DEFAULT_BUDGET, seconds=SECONDS)
    return PlanRequest(simulate=machine, p2p=p2p, cpu=cpu, budget=budget, subsets=False)


def answers_by_cpu(
    request: PlanRequest, model: MachineModel, say: Say
) -> dict[str, CpuAnswer] | msgspec.UnsetType:
    """Return the answers for both vendors of CPUs; unset where it is known, or is of no effect."""
    if request.cpu is not None or not model.machine.cpu_unknown:
        return msgspec.UNSET
    kinds = [
        default_mechanisms(model.machine.with_cpu(name), model.knowledge, version=request.version)
        for name in CPU_VENDORS
    ]
    if kinds[0] == kinds[1]:
        return msgspec.UNSET
    answers = {}
    for name, words in (("amd", "AMD"), ("intel", "others")):
        asked = msgspec.structs.replace(request, cpu=name)
        subject = machine_subject(asked, say, model=model)
        advice = advice_by(subject.search(), subject)
        fields = {field: getattr(advice, field) for field in CpuAnswer.__struct_fields__}
        answers[words] = CpuAnswer(**fields)
    return answers


def default_mechanisms(
    machine: Machine, knowledge: Knowledge, *, version: str | None = None
) -> dict[tuple[int, int], str]:
    """Return how default NCCL moves bytes between each pair of a machine's GPUs."""
    topo = view(machine, knowledge, Settings(version=version) if version else None)
    return {pair: pair_mechanism(topo, *pair) for pair in permutations(machine.gpu_indices, 2)}


def advice_by(plan: Plan, subject: Subject, diagnosis: Diagnosis | None = None) -> Advice:
    """Say what to try by the plan of a subject."""
    chosen = plan.choices[plan.recommended]
    findings = diagnosis.findings if diagnosis is not None else ()
    links = None if diagnosis is None else diagnosis.links
    # The plan's machine has them too.
    problems = [one for one in findings if one.severity != "note" and one.check != "hardware"]
    short = plan.cancelled or plan.cut_short
    cut = "; cut short: `tccl plan`, which measures all it needs, may find more" * short
    return Advice(
        limits=tuple(limit_sentences(plan)),
        machine=_machine_words(plan),
        default=_default_words(plan),
        default_gbps=plan.choices["default"].rate_gbps,
        recommended=plan.recommended,
        advice=advice(plan),
        environment=environment(chosen.settings),
        rate_gbps=chosen.rate_gbps,
        gain=plan.gain(plan.recommended),
        # A bound on links that nobody told would not be one.
        bound_gbps=None if assumed_links(plan) else plan.bound_gbps,
        simulated=plan.simulated,
        sure=subject.say_sure(plan) + cut,
        by_size=list_by_size(plan),
        poor=(*size_notes(plan), *filter(None, [p2p_note(plan)])),
        assumptions=(*assumptions(plan), *filter(None, [say_unchecked(plan.settings.version)])),
        problems=tuple(f"{bad.severity.upper()} {bad.what}; {bad.fix}" for bad in problems),
        following=f"{doctor_first(plan) or 'on the machine'}: {_PLAN_FIRST}"
        if plan.simulated
        else _PLAN_FIRST,
        links=links or msgspec.UNSET,
    )


def _machine_words(plan: Plan) -> str:
    machine = plan.machine
    pairs = list(permutations(machine.gpu_indices, 2))
    direct = sum(plan.knowledge.can_access(machine, *pair) for pair in pairs)
    nodes = spell(len(machine.numa_nodes), "NUMA node")
    gpus = spell(len(machine.gpus), "GPU")
    linked = "NVLink" if machine.nvlinks else "no NVLink"
    linked = ", ".join([linked, *assumed_links(plan)])
    return (
        f"{machine.name}: {gpus} ({gpu_names(machine)}), {nodes}, "
        f"{linked}; P2P between {direct} of {len(pairs)} ordered pairs"
    )


def assumed_links(plan: Plan) -> list[str]:
    """Return clauses on the PCIe links that a plan assumes; none where NVLinks join all GPUs."""
    machine, known = plan.machine, plan.knowledge.assumed_links or ()
    if all(machine.has_nvlink(*pair) for pair in permutations(machine.gpu_indices, 2)):
        return []
    links = dict.fromkeys(link_words(gpu.link) for gpu in machine.gpus if gpu.id in known)
    texts = [f"{' and '.join(links)} assumed by the cards' names"] * bool(links)
    if any(gpu.link.speed_gts is None for gpu in machine.gpus):
        texts.append(f"{link_words(PciLink(speed_gts=usual_gts(machine)))} assumed, links not told")
    return texts


def _assumed_words(plan: Plan) -> str:
    """Return what the rate of default NCCL rests on and nobody told; "" for nothing."""
    known, machine = plan.knowledge, plan.machine
    texts = assumed_links(plan)
    if known.assumed_p2p(machine):
        pairs = permutations(machine.gpu_indices, 2)
        have = {known.can_access(machine, *p) for p in pairs if not machine.has_nvlink(*p)}
        why = f" ({known.no_p2p_since})" if known.no_p2p_since else ""
        words = {True: "P2P assumed", False: f"no P2P assumed{why}"}
        texts.append(" and ".join(words[yes] for yes in sorted(have)))
    return "".join(f"; {text}" for text in texts)


def _default_words(plan: Plan) -> str:
    """Return what default NCCL does: rings, transports of their hops, and bandwidth."""
    default = plan.choices["default"]
    if not default.rings:
        return default.note or "not known"
    topo = view(plan.machine, plan.knowledge, default.settings, gpus=plan.gpus)
    rings = list(dict.fromkeys(default.rings))
    hops = {hop for ring in rings for hop in neighbours(ring)}
    kinds = Counter(TRANSPORTS[pair_mechanism(topo, *hop)] for hop in sorted(hops))
    ways = ", ".join(f"{n} {_MECHANISMS.get(kind, 'by P2P')}" for kind, n in kinds.items())
    gbps = default.rate_gbps
    rate = unrated_text(default) if gbps is None else f"{gbps:.1f} GB/s"
    order = " ".join(map(str, rings[0]))
    more = f" and {len(rings) - 1} more" if len(rings) > 1 else ""
    basis = plan.provenance_of("default") + _assumed_words(plan)
    return f"{rate} ({basis}): ring {order}{more}, hops {ways}"
