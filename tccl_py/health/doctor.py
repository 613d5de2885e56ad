"""The doctor: checks of NCCL on a host, the table of all checks, a diagnosis."""

from __future__ import annotations

import os
import re
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
from tccl_py.health.checks import HOST_CHECKS
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
    in_force,
    lines_of,
    list_names,
    rules,
)
from tccl_py.health.network import check_network, unfit_interfaces, unfit_nics
from tccl_py.health.nics import check_nics, unfit_network, unfit_network_plugin
from tccl_py.health.pci import error_counts
from tccl_py.health.plugin import check_plugin
from tccl_py.model.links import Proof, ProofVerdict
from tccl_py.nccl.asked import ring_words
from tccl_py.nccl.settings import GRAPH_VARIABLE, settings_from_environment
from tccl_py.nccl.variables import similar_name
from tccl_py.nccl.versions import release, say_unchecked, version_facts
from tccl_py.nccl_conf import ConfLine
from tccl_py.nccl_library import installed_nccls
from tccl_py.readers.live import driver_facts
from tccl_py.readers.sysfs import normal_bus_id
from tccl_py.sources.profiled import conditions_of

_NAME = re.compile(r"NCCL_[A-Z0-9_]{1,60}", re.ASCII)
_JOB_FIX = "set it only in jobs that use exactly those GPUs: `tccl env DIR --gpus LIST`"
_CONDITION = "only if nobody set it against hangs or wrong values, which `tccl verify` looks for: "
_MAX_TOPOLOGY = 1 << 22
_BUS_IDS = re.compile(r'busid="([0-9A-Fa-f:.]{1,20})"', re.ASCII)
_HOST_FIX = "remove the line; `tccl env DIR --gpus LIST` sets it for one job"


def this_host() -> HostState:
    """Return this host, with the answers of its driver and of the installed NCCL."""
    free = None
    with suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
    driver = DriverState()
    try:
        facts = driver_facts()
        driver = DriverState(gpus=facts.gpus, peer_access=facts.peer_access)
        driver = replace(driver, conditions=tuple(conditions_of([gpu.index for gpu in facts.gpus])))
    except (InputError, MeasurementError) as error:
        unseen = error.what if isinstance(error, InputError) else str(error)
        driver = replace(driver, unseen=unseen)
    earlier = error_counts(replace(files_of_this_host(), driver=driver))
    return replace(
        files_of_this_host(),
        driver=driver,
        shm_free=free,
        nccl=tuple(installed_nccls()),
        by_root=os.geteuid() == 0,
        log=_kernel_log(),
        earlier_errors=earlier,
    )


def _kernel_log() -> bytes:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["dmesg"], capture_output=True, timeout=5, check=True).stdout
    return b""


# Checks of NCCL: variables in force, lines of nccl.conf that NCCL misreads, version and rings.
def check_settings(host: HostState) -> Results:
    """Report variables in force and misread lines of NCCL's files."""
    for line in lines_of(host):
        yield from _report_misread(line)
    variables = {name: line for name, line in in_force(host).items() if _NAME.fullmatch(name)}
    for name, line in variables.items():
        if meant := similar_name(name):
            yield defect("misread", line.where, what=f"NCCL has no {name}", fix=f"write {meant}")
    for name, check in _CHECKED_VALUES.items():
        if name in variables and (fields := check(host, variables[name].value)):
            line, rule = variables.pop(name), fields.pop("rule")
            fault = f"{name}={cut(line.value)} {fields.pop('what')}"
            fix = _CONDITION * rules()[rule].workaround + _undo(line)
            yield defect(rule, line.where, what=fault, fix=fix, **fields)
    yield from _pinned_functions(host, variables)
    graph = variables.get(GRAPH_VARIABLE)
    if graph is not None and graph.value:
        fault, where = f"NCCL_GRAPH_FILE={cut(graph.value)} is set", graph.where
        if where == ENVIRONMENT:
            yield defect("graph", where, severity="note", what=fault, fix=_JOB_FIX)
        else:
            yield defect("graph", where, what=f"{fault} for all jobs of this host", fix=_HOST_FIX)
    effective = {name: line for name, line in variables.items() if not line.installed}
    for name, rule in rules().items():
        speaks = not rule.rdma or host.rdma_nics()
        if speaks and name in effective and effective[name].value != rule.harmless:
            line = effective[name]
            effect = "; it holds for every job that does not set it itself"
            effect = "; it overrides a plan's setting" if line.where == ENVIRONMENT else effect
            fault = f"{name}={cut(line.value)} is set"
            fix = _CONDITION * rule.workaround + _undo(line)
            yield defect(name, line.where, what=fault, effect=effect, fix=fix)


def _pinned_functions(host: HostState, variables: Mapping[str, ConfLine]) -> Results:
    """Report algorithms for some collectives alone beside protocols for all."""
    algorithm, protocol = variables.get("NCCL_ALGO"), variables.get("NCCL_PROTO")
    if algorithm is None or protocol is None:
        return
    some = all(":" in part for part in algorithm.value.split(";"))
    every = any(":" not in part for part in protocol.value.split(";"))
    fails = any(version_facts(nccl.version).algorithms_exclude for nccl in host.nccl or ())
    if some and every and (fails or not host.nccl):
        fault = f"NCCL_ALGO={cut(algorithm.value)} beside NCCL_PROTO={cut(protocol.value)}"
        yield defect("functions", algorithm.where, what=fault, fix=_undo(algorithm))


def _undo(line: ConfLine) -> str:
    return f"unset {line.name}" if line.where == ENVIRONMENT else "remove the line"


# Values that do not fit this host, often from another one: fields of the finding, or none.
def _unfit_graph(host: HostState, value: str) -> dict[str, Any]:
    if value and (not value.startswith("/") or host.has(value)):
        return {}
    fault = "names a file that is not here" if value else "is set, with no file"
    return {"rule": "no-graph-file", "what": fault}


def _unfit_topology(host: HostState, value: str) -> dict[str, Any]:
    if not value.startswith("/"):
        return {}
    data = host.data(value, limit=_MAX_TOPOLOGY)
    if data is None:
        why = "NCCL reads the machine itself, and says so in its log only"
        fault = "names a file that is not here"
        return {"rule": "foreign", "severity": "note", "what": fault, "why": why}
    ids = {normal_bus_id(text) for text in _BUS_IDS.findall(data.decode("utf-8", "replace"))}
    lost = [host.gpu_name(gpu) for gpu in host.gpus if gpu not in ids]
    return {"rule": "foreign", "what": f"lacks {list_names(lost)}"} if lost else {}


def _unfit_protocol(host: HostState, value: str) -> dict[str, Any]:
    lists = [part.rpartition(":")[2] for part in value.upper().split(";")]
    forced = any("LL128" in part.split(",") for part in lists if not part.startswith("^"))
    ids = {gpu.bus_id for gpu in host.driver.gpus}
    # The end "" is a switch.
    links = [{gpu.bus_id, *gpu.links} for gpu in host.driver.gpus]
    separate = any("" not in ends and ids - ends for ends in links)
    fault = "forces LL128, and some GPUs here are not joined by NVLink"
    return {"rule": "forced-ll128", "what": fault} if forced and separate else {}


def _no_p2p(_: HostState, value: str) -> dict[str, Any]:
    disables = settings_from_environment({"NCCL_P2P_LEVEL": value}).p2p_level == "LOC"
    return {"rule": "NCCL_P2P_DISABLE", "what": "disables P2P"} if disables else {}


_CHECKED_VALUES: Mapping[str, Callable[[HostState, str], dict[str, Any]]] = {
    GRAPH_VARIABLE: _unfit_graph,
    "NCCL_TOPO_FILE": _unfit_topology,
    "NCCL_IB_HCA": unfit_nics,
    "NCCL_NET": unfit_network,
    "NCCL_NET_PLUGIN": unfit_network_plugin,
    "NCCL_SOCKET_IFNAME": unfit_interfaces,
    "NCCL_PROTO": _unfit_protocol,
    "NCCL_P2P_LEVEL": _no_p2p,
}


def _report_misread(line: ConfLine) -> Results:
    """Report a line whose name or value NCCL takes otherwise than intended."""
    if "NCCL_" not in line.name:
        return
    if _NAME.fullmatch(line.name) is None:
        fault = f"NCCL takes '{cut(line.name)}' for the name, which it does not know"
        fix = "write NAME=VALUE without blanks or export"
    elif line.value != line.value.strip() or re.search(r"""^["']|["']$|\s#""", line.value):
        fault = f"NCCL takes '{cut(line.value)}' for the value of {line.name}"
        fix = "write no quotes, no blanks, no comment behind it, Unix line ends"
    elif line.cut:
        fault = f"NCCL cuts the value of {line.name} after {len(line.value)} characters"
        fix = "write a shorter value"
    else:
        return
    yield defect("misread", line.where, what=fault, fix=fix)


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


_NCCL_CHECKS: Mapping[str, Callable[[HostState], Results]] = {
    "driver": check_driver,
    "NICs": check_nics,
    "network": check_network,
    "settings": check_settings,
    "nccl": check_nccl,
    "plugin": check_plugin,
    "nccl-rings": check_own_rings,
}


_CHECKS = {"proof": check_proof, **HOST_CHECKS, **_NCCL_CHECKS}


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
