"""The proof of this host's links: evidence, the verdict on it, and the conditions of its validity.

A verdict says what does not work, which part it is, and what the host shows that fits.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations, permutations
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from tccl_py.errors import InputError, spell
from tccl_py.health.checks import (
    check_acs,
    check_bar1,
    check_container,
    check_hardware,
    check_limits,
    check_links,
    check_shared_memory,
    device_errors,
    driver_options,
    redirecting_ports,
    translating,
)
from tccl_py.health.doctor import this_host
from tccl_py.health.host import Defect, HostState, files_of_this_host, list_names
from tccl_py.model.links import (
    BAD_VERDICTS,
    JobProof,
    LinkFact,
    LinkVerdict,
    PairProof,
    Proof,
    ProofVerdict,
    joined_clauses,
)
from tccl_py.model.machine import Knowledge, Machine, PeerAccess
from tccl_py.nccl.asked import AskedJob
from tccl_py.nccl.settings import settings_from_environment, shell_text
from tccl_py.nccl.transport import TRANSPORTS, pair_mechanism
from tccl_py.nccl.versions import ASSUMED, Level
from tccl_py.nccl.view import view
from tccl_py.nccl_library import installed_nccl
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import ProvenLinks
from tccl_py.planning.installed_nccl import gather_evidence
from tccl_py.sources.profiled import MeasuredMachine, measured_machine
from tccl_py.statistics import median_interval

Pair = tuple[int, int]
"""Two GPUs, the smaller index first."""
_BAD: tuple[LinkVerdict, ...] = ("hangs", "wrong values", "fails")
_LEAST_REPEATS = 4
"""Rates of a job that can show it slower: of 4 against 4 all lie below by chance once in 70."""
_WORDS = {"hangs": "hangs", "wrong values": "gets wrong values", "fails": "fails"}
_NO_CAUSE = "nothing that the host shows explains it"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A job of the proof."""

    proof: JobProof
    level: Level | None
    """Its NCCL_P2P_LEVEL, LOC for the control."""
    uses: frozenset[Pair]
    """The pairs that it joins by P2P."""
    bad: str
    """A clause on what is wrong, "" for none."""


def judge_links(
    pairs: Sequence[PairProof],
    jobs: Sequence[JobProof],
    machine: Machine,
    *,
    host: HostState | None,
    unable: str = "",
    withheld: Sequence[tuple[int, int]] = (),
) -> Proof:
    """Return the verdict on the links of a machine by the evidence of pairs and of NCCL's jobs.

    `unable` says why something was not tried, as who uses the GPUs. `withheld` are the pairs with
    P2P that were not tried, since trying may do harm.
    """
    tried = sorted(
        _list_tried(pairs, jobs, machine, host, withheld), key=lambda job: job.level or ""
    )
    control = [job for job in tried if job.level == "LOC"]
    others = [job for job in tried if job.level != "LOC"]
    default = [job for job in others if job.level is None]
    working = {pair for job in others if job.proof.verdict == "sound" for pair in job.uses}
    # 1. Faults: pairs that were shown to be broken, then jobs that these do not explain.
    reasons = _broken_pairs(pairs)
    broken = {pair: _join(clauses) for pair, clauses in reasons.items()}
    faults = [_join(chain.from_iterable(reasons.values()))] if reasons else []
    if broken and default and not any(job.uses & broken.keys() for job in default):
        faults.append("default NCCL does not use these links")
    doubts = [unable] if unable else []
    for job in others:
        if not job.bad or job.uses & broken.keys():
            continue
        suspects = job.uses - working or (job.uses if job in default else frozenset())
        if not any(one.proof.verdict == "sound" for one in control):
            doubts.append(f"{job.bad}, and no job without P2P is right")
        elif not suspects and job not in default:
            doubts.append(f"{job.bad}, though it uses no other P2P than default NCCL")
        else:
            which = "all P2P" if job in default else f"all P2P that only {job.level} allows"
            under = f"no pair alone is, so that {which} is under suspicion"
            faults.append(f"{job.bad}, and not without P2P: {under if suspects else 'it has none'}")
            broken |= dict.fromkeys(suspects, job.bad)
    # 2. What was not tried.
    harm = pcie_p2p_may_harm(host) if host is not None else ""
    untried = {_pair(*pair) for pair in withheld} - broken.keys()
    if untried:
        doubts.append(harm or "P2P of some pairs was not tried, since that may do harm")
    tries: list[PairProof | JobProof] = [*pairs, *jobs]
    unproven = [one for one in tries if one.verdict == "not proven"]
    doubts += [f"{_name(one)} was not proven: {one.what}" for one in unproven]
    if not default and len(machine.gpus) > 1:
        doubts.append("no job of default NCCL ran")
    # 3. The verdict.
    verdict, what = _verdict(control, others, pairs, faults, doubts)
    proven = {_pair(one.source, one.target) for one in pairs if one.verdict != "not proven"}
    # No job uses what was not tried.
    proven |= working | broken.keys()
    seen = [job.proof.verdict for job in others if job.bad] or [pair.verdict for pair in pairs]
    worst = next((bad for bad in _BAD if bad in seen), _BAD[-1])
    facts = [
        LinkFact(one=one, other=other, state="broken", what=what, verdict=worst)
        for (one, other), what in broken.items()
    ]
    facts += [LinkFact(one=a, other=b, state="not proven", what=harm) for a, b in untried]
    return Proof(
        verdict=verdict,
        pairs=tuple(pairs),
        common=_common(machine, frozenset(broken), proven),
        causes=tuple(_causes(verdict, frozenset(broken), proven, machine, host)),
        by_nccl=tuple(jobs),
        what=what,
        facts=tuple(sorted(facts, key=lambda fact: (fact.one, fact.other))),
    )


def pcie_p2p_may_harm(host: HostState) -> str:
    """Return why P2P over PCIe must not be tried unasked on a host, as a sentence; "" if it may."""
    if not translating(host):
        return ""
    ports, _ = redirecting_ports(host)
    acs = f"ACS of {list_names(list(ports))} sends traffic between GPUs to an IOMMU that translates"
    why = acs if ports else "the IOMMU translates the addresses of GPUs"
    return f"{why}: P2P over PCIe may write to foreign memory or take a GPU off the bus"


def _pair(source: int, target: int) -> Pair:
    return min(source, target), max(source, target)


def _name(proof: PairProof | JobProof) -> str:
    if isinstance(proof, PairProof):
        return f"P2P from GPU {proof.source} to {proof.target}"
    return f"NCCL with {shell_text(proof.environment)}" if proof.environment else "default NCCL"


def _list_tried(
    pairs: Sequence[PairProof],
    jobs: Sequence[JobProof],
    machine: Machine,
    host: HostState | None,
    withheld: Sequence[tuple[int, int]],
) -> Iterator[_Job]:
    # Pairs that were tried or withheld have P2P; without any the driver's answer counts.
    ends = {(p.source, p.target) for p in pairs} | {*withheld}
    granted = ends | {end[::-1] for end in ends}
    access = tuple(PeerAccess(source=source, target=target, supported=True, provenance="reported")
                   for source, target in sorted(granted))  # fmt: skip
    if host is not None and not access:
        access = host.driver.peer_access
    knowledge = Knowledge(peer_access=access, peer_access_default=not access)
    version = host.nccl[0].version if host is not None and host.nccl else ASSUMED
    for job in jobs:
        settings = settings_from_environment(job.environment, version=version)
        topo = view(machine, knowledge, settings)
        ways = {pair: pair_mechanism(topo, *pair) for pair in combinations(topo.gpus, 2)}
        words = f"{_name(job)} {_WORDS.get(job.verdict, '')}" + f" ({job.what})" * bool(job.what)
        yield _Job(
            proof=job,
            level=settings.p2p_level,
            uses=frozenset(pair for pair, way in ways.items() if TRANSPORTS[way] == "P2P"),
            bad=words if job.verdict in _BAD else "",
        )


def _broken_pairs(pairs: Sequence[PairProof]) -> dict[Pair, list[str]]:
    """Return the pairs that are broken in a direction, with the reasons.

    A way to map memory that is refused breaks no pair for which another one works.
    """
    works = {(p.source, p.target) for p in pairs if p.verdict == "sound"}
    broken: dict[Pair, list[str]] = {}
    for proof in pairs:
        refused = proof.verdict == "fails" and (proof.source, proof.target) in works
        if proof.verdict in _BAD and not refused:
            clause = proof.what or f"{_name(proof)} {_WORDS[proof.verdict]}"
            broken.setdefault(_pair(proof.source, proof.target), []).append(clause)
    return broken


def _join(clauses: Iterable[str]) -> str:
    """Return the two commonest clauses."""
    distinct = joined_clauses(clause for clause, _ in Counter(clauses).most_common())
    more = f"; and {len(distinct) - 2} more" if len(distinct) > 2 else ""
    return "; ".join(distinct[:2]) + more


def _verdict(
    control: Sequence[_Job],
    others: Sequence[_Job],
    pairs: Sequence[PairProof],
    faults: Sequence[str],
    doubts: Sequence[str],
) -> tuple[ProofVerdict, str]:
    """Return the verdict, and the fault or the doubts in a clause."""
    without = next((f"without P2P too: {job.bad}" for job in control if job.bad), "")
    if without and not any(job.proof.verdict == "sound" for job in others):
        return "host memory fails", "; ".join([without, *faults])
    if faults:
        # What jobs met comes before what pairs show; NCCL's own errors count as hangs.
        bad = [job.proof.verdict for job in others if job.bad]
        bad = bad or [one.verdict for one in pairs if one.verdict in _BAD]
        return "wrong values" if set(bad) == {"wrong values"} else "hangs", "; ".join(faults)
    if doubts:
        return "inconclusive", "; ".join(dict.fromkeys(doubts))
    default = [job for job in others if job.level is None and job.uses]
    rates = [[g for job in jobs for g in job.proof.gbps] for jobs in (default, control)]
    if min(map(len, rates)) >= _LEAST_REPEATS:
        own, other = map(median_interval, rates)
        if own.high < other.low:
            text = f"default NCCL has {own:.2f} GB/s by P2P, and {other:.2f} through host memory"
            return "slower than host memory", text
    return "sound", without


# What broken pairs have in common.


def _common(machine: Machine, broken: frozenset[Pair], proven: set[Pair]) -> str:
    """Return the smallest part all of whose proven pairs are broken, and no others."""
    if len(broken) == 1:
        return "the pair of GPUs {} and {}".format(*next(iter(broken)))
    if not broken:
        return ""
    part = next((name for name, over in _parts(machine, proven) if over == broken), "")
    if part:
        return part
    # Several GPUs: those without a sound pair, less those whose pairs the others have too.
    of = {gpu: {pair for pair in proven if gpu in pair} for gpu in machine.gpu_indices}
    faulty = {gpu for gpu in of if of[gpu] and of[gpu] <= broken}
    for gpu in sorted(faulty, key=lambda gpu: (len(of[gpu]), -gpu)):
        if all(faulty - {gpu} & {*pair} for pair in broken):
            faulty.discard(gpu)
    if all(faulty & {*pair} for pair in broken):
        return f"GPUs {list_names(list(map(str, sorted(faulty))))}"
    return f"pairs {list_names([f'{one}-{other}' for one, other in sorted(broken)])}"


def _parts(machine: Machine, pairs: set[Pair]) -> Iterator[tuple[str, set[Pair]]]:
    """Yield the parts of a machine, the smallest first, with the pairs that use each."""
    pci = {pair for pair in pairs if not machine.has_nvlink(*pair)}
    for use, some in (("", pairs), (" over PCIe", pci)):
        for gpu in machine.gpu_indices:
            yield f"GPU {gpu}{use}", {pair for pair in some if gpu in pair}
    yield "all P2P", pairs
    above = {gpu: machine.ancestors(f"G{gpu}") for gpu in machine.gpu_indices}
    ways = {pair: _way(*(above[gpu] for gpu in pair)) for pair in pci}
    names = {bridge.id: f"the PCI switch {bridge.id}" for bridge in machine.bridges}
    names |= {node.id: f"NUMA node {node.numa_id}" for node in machine.numa_nodes}
    below = {part: {gpu for gpu in above if part in above[gpu]} for part in names}
    for bridge in machine.bridges:
        yield names[bridge.id], {pair for pair in pci if bridge.id in ways[pair]}
    for one, other in combinations(names, 2):
        between = {p for p in pci if below[one] & {*p} and below[other] & {*p}}
        if not below[one] & below[other]:
            yield f"all pairs between {names[one]} and {names[other]}", between
    for part, name in names.items():
        if part[0] == "C":
            yield f"all pairs through the CPU of {name}", {p for p in pci if part in ways[p]}
        out = {pair for pair in pci if len(below[part] & {*pair}) == 1}
        yield f"the link from {name} to the CPUs", out
    nodes = {node.id for node in machine.numa_nodes}
    yield "all pairs between NUMA nodes", {pair for pair in pci if len(ways[pair] & nodes) > 1}
    yield "all pairs through a CPU", {pair for pair in pci if ways[pair] & nodes}
    yield "all P2P over PCIe", pci
    yield "all P2P over NVLink", pairs - pci


def _way(one: tuple[str, ...], other: tuple[str, ...]) -> set[str]:
    """Return the parts on the way between two devices by the parts above each."""
    return {*one} ^ {*other} | {*[part for part in one if part in other][:1]}


# What fits on the host.


def _causes(
    verdict: ProofVerdict,
    broken: frozenset[Pair],
    proven: set[Pair],
    machine: Machine,
    host: HostState | None,
) -> Iterator[str]:
    """Yield what the host shows that fits: first what concerns the broken pairs and no others."""
    if host is None or verdict in ("sound", "inconclusive"):
        return
    if not broken:
        own = check_shared_memory, check_limits, check_container
        slow = verdict == "slower than host memory"
        results = [one for check in ((check_links, check_hardware, check_acs) if slow else own)
                   for one in check(host)]  # fmt: skip
        bad = [one for one in results if isinstance(one, Defect) and one.severity != "note"]
        yield from [f"{one.where}: {one.what}; {one.fix}" for one in bad] or [_NO_CAUSE]
        return
    evidence = [one for one in _evidence(host, machine, proven) if broken <= one[1]]
    evidence.sort(key=lambda one: len(one[1]))
    if not evidence or evidence[0][1] > broken:
        yield _NO_CAUSE
    for text, over in evidence:
        others = len(over - broken)
        yield f"{text}; but {others} pairs that this concerns too are sound" if others else text


def _evidence(
    host: HostState, machine: Machine, pairs: set[Pair]
) -> Iterator[tuple[str, set[Pair]]]:
    """Yield what may break P2P here, as a sentence, and the pairs that it concerns."""
    pci = {pair for pair in pairs if not machine.has_nvlink(*pair)}
    ways = {gpu.index: {gpu.bus_id, *host.ports_above(gpu.bus_id)} for gpu in machine.gpus}
    for device, text in device_errors(host).items():
        over = {(one, other) for one, other in pairs if device in ways[one] | ways[other]}
        yield f"{host.device_name(device)} has errors: {text}", over
    ports, _ = redirecting_ports(host)
    harm = pcie_p2p_may_harm(host)
    if ports or harm:
        over = {(one, other) for one, other in pci if ports.keys() & (ways[one] | ways[other])}
        acs = f"ACS of {list_names(list(ports))} sends traffic between GPUs to the CPU"
        yield harm or acs, over if ports else pci
    for bad in check_bar1(host):
        if isinstance(bad, Defect):
            yield f"{bad.where}: {bad.what} ({bad.measured}), and {bad.why}; {bad.fix}", pci
    for option in driver_options(host):
        yield f"{option.measured} in {option.where}: {option.what}, and {option.why}", pci
    if any("GeForce" in gpu.name for gpu in host.driver.gpus):
        yield "the driver grants P2P between GeForce cards, as only patched ones do", pci
    if host.virtual:
        yield "a virtual machine hides ACS and IOMMU of its host, which may stop P2P", pci


# The proof of this host.


_DMI = "sys/class/dmi/id/"


class ProvenHost(NamedTuple):
    """This host as doctors see it, its proof, and what NCCL did in the proof's jobs."""

    host: HostState
    links: Proof | None
    """None where fewer than two GPUs are here."""
    jobs: tuple[AskedJob, ...] = ()


def prove_host(
    gpus: Sequence[int] | None = None,
    *,
    place: MeasuredMachine | None = None,
    force: bool = False,
    plans: bool = False,
    say: Callable[[str], None] = lambda _: None,
    ready: Callable[[], None] = lambda: None,
) -> ProvenHost:
    """Prove the links between GPUs of this host, all in processes that are ended.

    Args:
        gpus: NVML's indices; None: all that jobs see.
        place: this host's machine; None: it is looked for.
        force: try P2P over PCIe also where the host shows that this may do harm.
        plans: a plan follows, which measures by kernels.
        say: gets a line before anything runs on the GPUs.
        ready: is called when other processes of a plan may start on the GPUs.

    Raises InputError: cupy is missing, and a plan follows.
    """
    host = this_host()
    try:
        place = place or measured_machine()
        chosen = tuple(place.gpus if gpus is None else gpus)
    except InputError:
        return ProvenHost(host, None)
    if len(chosen) < 2:
        return ProvenHost(host, None)
    machine, knowledge = place.machine, place.knowledge
    withheld = []
    if not force and pcie_p2p_may_harm(host):
        withheld = [
            pair
            for pair in permutations(chosen, 2)
            if knowledge.can_access(machine, *pair) and not machine.has_nvlink(*pair)
        ]
    nccl = installed_nccl()
    say(f"proving the links between {spell(len(chosen), 'GPU')}")
    version = nccl.minor if nccl else None
    # What looks slower beside the kernels of the proof is looked at once more without them.
    for alone in (False, True):
        evidence = gather_evidence(
            place, chosen, version, withheld, measures=plans, alone=alone, ready=ready
        )
        proof = judge_links(
            evidence.pairs,
            [job.proof for job in evidence.jobs if job.proof is not None],
            machine,
            host=host,
            unable=evidence.unable,
            withheld=withheld,
        )
        if proof.verdict != "slower than host memory":
            break
    if proof.verdict == "inconclusive":
        # No choice that enables P2P beyond default NCCL's own.
        proof = structs.replace(proof, facts=(*proof.facts, *_beyond_default(place, chosen, proof)))
    what = "; ".join(filter(None, (proof.what, *evidence.notices)))
    proof = structs.replace(proof, what=what, conditions=conditions_of_proof(host, place))
    answers = [job for job in evidence.jobs if not job.environment]
    rings = next((job.answer or job.why for job in answers), evidence.unable)
    return ProvenHost(replace(host, own_rings=rings, links=proof), proof, evidence.jobs)


def _beyond_default(
    place: MeasuredMachine, gpus: Sequence[int], proof: Proof
) -> Iterator[LinkFact]:
    """Yield the pairs that default NCCL joins otherwise than by P2P, though they have it."""
    machine, knowledge = place.machine, place.knowledge
    known = {(fact.one, fact.other) for fact in proof.facts}
    used = view(machine, knowledge, gpus=gpus).p2p | known
    for one, other in combinations(sorted(gpus), 2):
        granted = knowledge.can_access(machine, one, other)
        if granted and (one, other) not in used:
            yield LinkFact(one=one, other=other, state="not proven", what=proof.what)


def conditions_of_proof(host: HostState, place: MeasuredMachine) -> dict[str, str]:
    """Return what a proof holds for: after a change of any of these it is made again."""
    bios = (host.text(_DMI + name).strip() for name in ("bios_vendor", "bios_version", "bios_date"))
    return {
        "driver": place.fingerprint.driver,
        "GPUs": " ".join(place.fingerprint.gpu_uuids),
        "BIOS": " ".join(filter(None, bios)),
        "kernel": os.uname().release,
        "kernel command line": host.text("proc/cmdline").strip(),
    }


def prove_again(
    plan: Plan, directory: Path, say: Callable[[str], None]
) -> tuple[Proof | None, str]:
    """Prove the links of a measured plan's host; return the proof, and what its plan does not know.

    The proof is None where no GPU is here, or the plan is of several hosts or was not measured on
    GPUs; the other is "" where the links are as they were planned.
    """
    if not plan.cluster.closes or plan.simulated or plan.dry_run:
        return None, ""
    proof = prove_host(plan.gpus, say=say).links
    if proof is None:
        return None, ""
    stored = ProvenLinks.load(directory)
    known = {(fact.one, fact.other) for fact in plan.knowledge.links or ()}
    broken = {(fact.one, fact.other) for fact in proof.facts if fact.state == "broken"}
    same = stored is not None and stored.proof.verdict == proof.verdict
    if broken - known or (proof.verdict in BAD_VERDICTS and not same):
        return proof, f"{proof.verdict}: {proof.what}"
    return proof, ""


def check_proof_holds(
    plan: Plan, directory: Path, *, force: bool, say: Callable[[str], None]
) -> None:
    """Check that the links of a measured plan's host are proven as they are now; prove them if not.

    Raises InputError, without `force`: they are not as they were planned, or cannot be proven now.
    """
    stored = ProvenLinks.load(directory)
    with suppress(InputError):
        now = conditions_of_proof(files_of_this_host(), measured_machine())
        if stored is not None and stored.proof.conditions == now:
            return
    proof, fault = prove_again(plan, directory, say)
    if proof is None:
        return
    if not fault and proof.verdict != "inconclusive":
        ProvenLinks(proof=proof).keep(directory)
        return
    what = f"was planned for other links than are here: {fault}"
    what = what if fault else f"has links that cannot be proven now: {proof.what}"
    if not force:
        right = "plan again" if fault else "end what uses the GPUs, or add `force`"
        raise InputError(str(directory), what, right)
    say(f"{directory} {what}: accepted because of `force`")
