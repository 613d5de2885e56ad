"""The proof of this host's links: evidence, verdict, and the conditions under which it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from tccl_py.errors import InputError, spell
from tccl_py.health.doctor import this_host
from tccl_py.health.host import HostState, files_of_this_host
from tccl_py.health.links import judge_links, pcie_p2p_may_harm
from tccl_py.model.links import BAD_VERDICTS, LinkFact, Proof
from tccl_py.nccl.asked import AskedJob
from tccl_py.nccl.view import view
from tccl_py.nccl_library import installed_nccl
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import ProvenLinks
from tccl_py.planning.proof import gather_evidence
from tccl_py.sources.profiled import MeasuredMachine, measured_machine

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
