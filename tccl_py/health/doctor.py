"""The doctor: checks of NCCL on a host, the table of all checks, and their diagnosis."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.health.checks import (
    check_acs,
    check_container,
    check_gpus,
    check_iommu,
    check_limits,
    check_links,
    check_numa,
    check_peers,
    check_shared_memory,
    check_virtual,
)
from tccl_py.health.host import (
    SEVERITIES,
    DriverState,
    Finding,
    Found,
    GpuState,
    Host,
    Unseen,
    defect,
    rules,
)
from tccl_py.health.plugin import ENVIRONMENT, check_plugin, in_force, lines_of
from tccl_py.nccl.asked import ring_words
from tccl_py.nccl.versions import version_facts
from tccl_py.nccl_library import ConfLine, home, installed_nccls
from tccl_py.plan.nccl_here import asked_here
from tccl_py.readers.live import DriverFacts, driver_facts
from tccl_py.sources.profiled import conditions_of

_SHM = "/dev/shm"
_SHOWN = 60
_NAME = re.compile(r"NCCL_[A-Z0-9_]{1,60}", re.ASCII)
_JOB_FIX = "set it only in jobs that use exactly those GPUs: `tccl env DIR --gpus LIST`"
_HOST_FIX = "remove the line; `tccl env DIR --gpus LIST` sets it for one job"


def this_host() -> Host:
    """Return this host, with the answers of its driver and of the installed NCCL."""
    free = None
    with suppress(OSError):
        shm = os.statvfs(_SHM)
        free = shm.f_bavail * shm.f_frsize
    try:
        facts = driver_facts()
        driver = DriverState(gpus=_states(facts), peer_access=facts.peer_access)
    except (InputError, MeasurementError) as error:
        driver = DriverState(unseen=error.what if isinstance(error, InputError) else str(error))
    gpus = [gpu.index for gpu in driver.gpus]
    return Host(
        home=str(home()),
        environment=dict(os.environ),
        driver=driver,
        shm_free=free,
        nccl=tuple(installed_nccls()),
        own_rings=asked_here(gpus) if len(gpus) > 1 else "",
    )


def _states(facts: DriverFacts) -> tuple[GpuState, ...]:
    seen = conditions_of([gpu.index for gpu in facts.gpus])
    return tuple(
        GpuState(
            index=gpu.index,
            bus_id=gpu.bus_id,
            name=gpu.name,
            persistence=now.persistence,
            clock_mhz=_limited(now.sm_set_mhz, now.sm_max_mhz),
            clock_max_mhz=now.sm_max_mhz,
            complaints=complaints,
        )
        for gpu, (now, complaints) in zip(facts.gpus, seen, strict=True)
    )


def _limited(clock_mhz: int | None, most_mhz: int | None) -> int | None:
    """Return the clock that a setting limits a GPU to; None without a limit."""
    if clock_mhz is None or most_mhz is None:
        return None
    return clock_mhz if 0 < clock_mhz < most_mhz else None


# Checks of NCCL: variables in force, lines of nccl.conf that NCCL misreads, version and rings.
def check_settings(host: Host) -> Found:
    """Report variables in force and misread lines of NCCL's files."""
    for line in lines_of(host):
        yield from _misread(line)
    found = {name: line for name, line in in_force(host).items() if _NAME.fullmatch(name)}
    graph = found.get("NCCL_GRAPH_FILE")
    if graph is not None and graph.value:
        what, where = f"NCCL_GRAPH_FILE={_cut(graph.value)} is set", graph.where
        if where == ENVIRONMENT:
            yield defect("graph", where, severity="note", what=what, fix=_JOB_FIX)
        else:
            yield defect("graph", where, what=f"{what} for all jobs of this host", fix=_HOST_FIX)
    for name, rule in rules().items():
        if name in found and found[name].value != rule.harmless:
            line = found[name]
            scope, fix = "it holds for every job that does not set it itself", "remove the line"
            if line.where == ENVIRONMENT:
                scope, fix = "it overrides a plan's setting", f"unset {name}"
            what = f"{name}={_cut(line.value)} is set"
            yield defect(name, line.where, what=what, effect=f"; {scope}", fix=fix)


def _misread(line: ConfLine) -> Found:
    """Report a line whose name or value NCCL takes otherwise than intended."""
    if "NCCL_" not in line.name:
        return
    if _NAME.fullmatch(line.name) is None:
        what = f"NCCL takes '{_cut(line.name)}' for the name, which it does not know"
        fix = "write NAME=VALUE without blanks or export"
        yield defect("misread", line.where, what=what, fix=fix)
    elif line.value != line.value.strip() or re.search(r"""^["']|["']$|\s#""", line.value):
        what = f"NCCL takes '{_cut(line.value)}' for the value of {line.name}"
        fix = "write no quotes, no blanks, no comment behind it, Unix line ends"
        yield defect("misread", line.where, what=what, fix=fix)
    elif line.cut:
        what = f"NCCL cuts the value of {line.name} after {len(line.value)} characters"
        yield defect("misread", line.where, what=what, fix="write a shorter value")


def _cut(text: str) -> str:
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_nccl(host: Host) -> Found:
    """Report the versions of NCCL that programs load here, torch's first."""
    if host.nccl is None:
        return
    if not host.nccl:
        yield Unseen(what="the NCCL of jobs", why="none was found; `tccl plan --nccl` names one")
        return
    first, *others = host.nccl
    facts = version_facts(first.version)
    unchecked = "" if facts.verified else f", not checked and treated as {facts.name}"
    yield defect("version", first.source, what=f"NCCL {first.version} is installed{unchecked}")
    for second in others:
        if second.minor != first.minor:
            what = f"NCCL {second.version} is installed as well"
            fix = f"plan with --nccl {second.minor} for jobs with it"
            yield defect("second", second.source, what=what, fix=fix)


def check_own_rings(host: Host) -> Found:
    """Report the rings, channels and transports that the installed NCCL takes by default."""
    found = host.own_rings
    if isinstance(found, str):
        if found:
            yield Unseen(what="the rings of default NCCL", why=found)
        return
    counts = Counter(found.via.values())
    ways = ", ".join(f"{count} by {via}" for via, count in counts.most_common())
    runs = ring_words(found.rings, fallback=found.fallback)
    what = f"NCCL {found.version} runs {runs}; of its hops {ways}"
    where = f"a communicator over GPUs {', '.join(map(str, found.gpus))}"
    if found.fallback:
        why = "its search finds no rings and takes the order of the GPUs, whatever joins them"
        fix = "tccl plan -o my-plan"
        yield defect("own-rings", where, severity="slow", what=what, why=why, fix=fix)
    else:
        yield defect("own-rings", where, what=what)


CHECKS: Mapping[str, Callable[[Host], Iterator[Finding | Unseen]]] = {
    "acs": check_acs,
    "iommu": check_iommu,
    "links": check_links,
    "peers": check_peers,
    "gpus": check_gpus,
    "numa": check_numa,
    "shared memory": check_shared_memory,
    "limits": check_limits,
    "settings": check_settings,
    "nccl": check_nccl,
    "plugin": check_plugin,
    "nccl-rings": check_own_rings,
    "container": check_container,
    "virtual machine": check_virtual,
}


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Findings, the worst first, and facts that could not be read."""

    findings: tuple[Finding, ...]
    unseen: tuple[Unseen, ...]

    @property
    def healthy(self) -> bool:
        """True if nothing hangs or slows NCCL."""
        return all(finding.severity == "note" for finding in self.findings)


def examine(host: Host) -> Diagnosis:
    """Run all checks; nothing is changed."""
    found = [
        msgspec.structs.replace(result, check=name)
        for name, check in CHECKS.items()
        for result in check(host)
    ]
    findings = [result for result in found if isinstance(result, Finding)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    unseen = tuple(result for result in found if isinstance(result, Unseen))
    return Diagnosis(findings=tuple(findings), unseen=unseen)
