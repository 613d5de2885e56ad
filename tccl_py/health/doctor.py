"""The doctor: checks of NCCL on a host, the table of all checks, a diagnosis."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec

from tccl_py.errors import InputError, MeasurementError, spell
from tccl_py.health.checks import (
    check_acs,
    check_bar1,
    check_container,
    check_errors,
    check_gpus,
    check_hardware,
    check_iommu,
    check_limits,
    check_links,
    check_numa,
    check_peers,
    check_shared_memory,
    check_virtual,
    error_counts,
)
from tccl_py.health.comparison import facts_of
from tccl_py.health.host import (
    ENVIRONMENT,
    SEVERITIES,
    Defect,
    DriverState,
    HostState,
    Results,
    Unseen,
    cut,
    defect,
    files_of_this_host,
    list_names,
    rules,
)
from tccl_py.health.nics import check_network, check_nics
from tccl_py.health.plugin import check_plugin
from tccl_py.health.variables import check_settings
from tccl_py.model.links import Proof, ProofVerdict
from tccl_py.nccl.asked import ring_words
from tccl_py.nccl.versions import release, say_unchecked
from tccl_py.nccl_library import installed_nccls
from tccl_py.readers.live import driver_facts
from tccl_py.sources.profiled import conditions_of


def this_host() -> HostState:
    """Return this host, with the answers of its driver and of the installed NCCL."""
    driver, free, log = DriverState(), None, b""
    with suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
    with suppress(OSError, subprocess.SubprocessError):
        log = subprocess.run(["dmesg"], capture_output=True, timeout=5, check=True).stdout
    try:
        facts = driver_facts()
        driver = DriverState(gpus=facts.gpus, peer_access=facts.peer_access)
        driver = replace(driver, conditions=tuple(conditions_of([gpu.index for gpu in facts.gpus])))
    except (InputError, MeasurementError) as error:
        unseen = error.what if isinstance(error, InputError) else str(error)
        driver = replace(driver, unseen=unseen)
    host = replace(
        files_of_this_host(),
        driver=driver,
        shm_free=free,
        nccl=tuple(installed_nccls()),
        by_root=os.geteuid() == 0,
        log=log,
    )
    return replace(host, earlier_errors=error_counts(host))


def check_driver(host: HostState) -> Results:
    """Report that no driver answers on this host; a copy of one has none to ask."""
    if host.driver.unseen and not host.driver.gpus and host.root == HostState.root:
        yield defect("no-driver", "this host", what=host.driver.unseen)


def check_nccl(host: HostState) -> Results:
    """Report the versions of NCCL that programs load here, torch's first."""
    if host.nccl == ():
        yield Unseen(what="the NCCL of jobs", why="none was found; `tccl plan --nccl` names one")
    if not host.nccl:
        return
    sms = {gpu.sm for gpu in host.driver.gpus}
    for nccl, (name, rule) in product(host.nccl, rules().items()):
        if rule.releases and rule.sm in (None, *sms):
            low, high = map(release, rule.releases)
            if low <= release(nccl.version) <= high:
                yield defect(name, nccl.source, measured=f"NCCL {nccl.version}")
    first, *further = host.nccl
    facts = filter(None, (f"NCCL {first.version} is installed", say_unchecked(first.version)))
    yield defect("version", first.source, what="; ".join(facts))
    named = host.environment.get("VLLM_NCCL_SO_PATH")
    if named and all(named not in nccl.source for nccl in host.nccl):
        yield defect("vllm-nccl", ENVIRONMENT, measured=cut(named))
    for second in further:
        if second.minor != first.minor:
            installed = f"NCCL {second.version} is installed as well"
            fix = f"tccl plan --nccl {second.minor}, for jobs with it"
            yield defect("second", second.source, what=installed, fix=fix)


def check_proof(host: HostState) -> Results:
    """Report what the proof of links found."""
    proof = host.links
    if host.gpus and (nics := host.rdma_nics()):
        what = f"whether GPUs and {list_names(nics)} carry data (GPU Direct RDMA)"
        yield Unseen(what=what, why="not proven: `tccl plan` over several hosts compares bytes")
    if proof is None:
        return
    if proof.verdict == "inconclusive":
        yield Unseen(what="whether the links between GPUs carry data", why=proof.what)
        return
    where = proof.common or "all GPUs"
    more = "".join(f"; {cause}" for cause in proof.causes)
    if proof.verdict == "sound":
        count = len({(pair.source, pair.target) for pair in proof.pairs})
        jobs = f"{spell(len(proof.by_nccl), 'job')} of NCCL"
        text = f"{spell(count, 'ordered pair')} of GPUs and {jobs} carry data, values compared"
        yield defect("links-sound", where, what=text)
    else:
        rule = _PROOF_RULES[proof.verdict]
        yield defect(rule, where, what=proof.what or proof.verdict, effect=more)


_PROOF_RULES: Mapping[ProofVerdict, str] = {
    "hangs": "links-hang",
    "wrong values": "links-damage",
    "slower than host memory": "links-slow",
    "host memory fails": "no-host-memory",
}


def check_own_rings(host: HostState) -> Results:
    """Report the rings, channels and transports that the installed NCCL takes by default."""
    answer = host.own_rings
    if isinstance(answer, str):
        if answer:
            yield Unseen(what="the rings of default NCCL", why=answer)
        return
    ways = ", ".join(f"{n} by {via}" for via, n in Counter(answer.via.values()).most_common())
    runs = ring_words(answer.rings, fallback=answer.fallback)
    text = f"NCCL {answer.version} runs {runs}; of its hops {ways}"
    where = f"a communicator over GPUs {', '.join(map(str, answer.gpus))}"
    fields: dict[str, Any] = {}
    if answer.fallback:
        why = "its search finds no rings and takes the order of the GPUs, whatever joins them"
        fields = {"severity": "slow", "why": why, "fix": "tccl plan my-plan"}
    yield defect("own-rings", where, what=text, **fields)


_CHECKS: Mapping[str, Callable[[HostState], Results]] = {
    "proof": check_proof,
    "acs": check_acs,
    "iommu": check_iommu,
    "links": check_links,
    "hardware": check_hardware,
    "BAR1": check_bar1,
    "peers": check_peers,
    "errors": check_errors,
    "gpus": check_gpus,
    "numa": check_numa,
    "shared memory": check_shared_memory,
    "limits": check_limits,
    "container": check_container,
    "virtual machine": check_virtual,
    "driver": check_driver,
    "NICs": check_nics,
    "network": check_network,
    "settings": check_settings,
    "nccl": check_nccl,
    "plugin": check_plugin,
    "nccl-rings": check_own_rings,
}


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Findings, the worst first, and facts that could not be read."""

    host: str = ""
    """The host's name."""
    findings: tuple[Defect, ...]
    unseen: tuple[Unseen, ...]
    links: Proof | None = None
    """The proof of the links between GPUs; None where none was made."""
    facts: dict[str, str] = {}
    """What should be equal on all hosts of a cluster, by name; `--compare` tells what is not."""

    @property
    def healthy(self) -> bool:
        """True if nothing hangs or slows NCCL."""
        return all(finding.severity == "note" for finding in self.findings)


def examine(host: HostState) -> Diagnosis:
    """Run all checks; nothing is changed."""
    results = [
        msgspec.structs.replace(result, check=name)
        for name, check in _CHECKS.items()
        for result in check(host)
    ]
    findings = [result for result in results if isinstance(result, Defect)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    unseen = tuple(result for result in results if isinstance(result, Unseen))
    return Diagnosis(
        host=host.name,
        findings=tuple(findings),
        unseen=unseen,
        links=host.links,
        facts=facts_of(host),
    )
