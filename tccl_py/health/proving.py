"""The proof of this host's links: evidence, verdict, and the conditions under which it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

from msgspec import structs

from tccl_py.errors import InputError, counted
from tccl_py.health.doctor import this_host
from tccl_py.health.host import HostState
from tccl_py.health.links import judge_links, pcie_p2p_may_harm
from tccl_py.model.links import Proof
from tccl_py.nccl.proof import AskedJob
from tccl_py.nccl_library import installed_nccl
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
) -> ProvenHost:
    """Prove the links between GPUs of this host, all in processes that are ended.

    Args:
        gpus: NVML's indices; None: all that jobs see.
        place: this host's machine; None: it is looked for.
        force: try P2P over PCIe also where the host shows that this may do harm.
        plans: a plan follows, which measures by kernels.
        say: gets a line before anything runs on the GPUs.

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
            if knowledge.can_access(machine, *pair) and not machine.nvlinked(*pair)
        ]
    nccl = installed_nccl()
    say(f"proving the links between {counted(len(chosen), 'GPU')}")
    version = nccl.minor if nccl else None
    evidence = gather_evidence(place, chosen, version, withheld, measures=plans)
    proof = judge_links(
        evidence.pairs,
        [job.proof for job in evidence.jobs if job.proof is not None],
        machine,
        host=host,
        unable=evidence.unable,
        withheld=withheld,
    )
    what = "; ".join(filter(None, (proof.what, *evidence.notices)))
    proof = structs.replace(proof, what=what, conditions=conditions_of_proof(host, place))
    answers = [job for job in evidence.jobs if not job.environment]
    rings = next((job.answer or job.why for job in answers), evidence.unable)
    return ProvenHost(replace(host, own_rings=rings, links=proof), proof, evidence.jobs)


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
