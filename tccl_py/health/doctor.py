"""The doctor: checks of NCCL and of its plugin on a host, the table of all checks, a diagnosis."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.health.checks import HOST_CHECKS
from tccl_py.health.host import (
    SEVERITIES,
    DriverState,
    Finding,
    Found,
    Host,
    Unseen,
    defect,
    listed,
    rules,
)
from tccl_py.model.machine import normal_bus_id
from tccl_py.nccl.asked import ring_words
from tccl_py.nccl.plugin import LIBRARY
from tccl_py.nccl.plugin.index import (
    INDEX_HEAD,
    INDEX_VARIABLE,
    MAX_GRAPH_BYTES,
    MAX_INDEX_BYTES,
    digest,
)
from tccl_py.nccl.variables import similar_name
from tccl_py.nccl.versions import NEWER_VARIABLE, unchecked, why_no_plugin
from tccl_py.nccl_library import (
    CONF_VARIABLE,
    HOST_FILE,
    ConfLine,
    conf_lines,
    home,
    installed_nccls,
)
from tccl_py.plan.beside import PLUGIN_VARIABLE, why_not_trusted
from tccl_py.plan.nccl_here import asked_here
from tccl_py.plan.staging import MANIFEST_FILE
from tccl_py.readers.live import driver_facts
from tccl_py.sources.profiled import conditions_of

# The NCCL plugin on a host: the variables that load it, and what keeps jobs from their plan.


ENVIRONMENT = "the environment"
_OTHERS = {
    "NCCL_NET_PLUGIN": "if NCCL takes its network, later communicators get default NCCL",
    "NCCL_TUNER_PLUGIN": "its tuner decides on algorithms and channels, whatever the plan has",
}
_AGAIN = "tccl install DIR, after `tccl plan --force` where the machine or tccl-py has changed"
_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-f-]{36})\s", re.ASCII)


def lines_of(host: Host) -> list[ConfLine]:
    """Return the lines of NCCL's files, the user's first."""
    own = host.environment.get(CONF_VARIABLE) or f"{host.home}/.nccl.conf"
    paths = (own, str(HOST_FILE))
    return [line for path in paths for line in conf_lines(host.data(path) or b"", where=path)]


def in_force(host: Host) -> dict[str, ConfLine]:
    """Return the variables of jobs by name: the environment's, then the first of the files."""
    found: dict[str, ConfLine] = {}
    for name, value in host.environment.items():
        found[name] = ConfLine(name=name, value=value, where=ENVIRONMENT)
    for line in lines_of(host):
        found.setdefault(line.name, line)
    return found


def check_plugin(host: Host) -> Found:
    """Report a plugin that is installed and does not work, or not for every NCCL here."""
    variables, files = in_force(host), lines_of(host)
    installed = [line for line in files if line.name in (PLUGIN_VARIABLE, INDEX_VARIABLE)]
    named, index = variables.get(PLUGIN_VARIABLE), variables.get(INDEX_VARIABLE)
    ours = any(Path(line.value).name == LIBRARY for line in (*installed, *filter(None, [named])))
    if not ours and index is None:
        return
    place = named or index or installed[0]
    for what, fix in _wrong(host, named, index):
        yield defect("plugin", place.where, what=what, fix=fix)
    for name, effect in _OTHERS.items():
        other = variables.get(name)
        if other is not None and other.value not in ("", "none"):
            what = f"{name}={other.value[:60]} is set beside the plugin"
            yield defect("plugin", other.where, severity="note", what=what, why=effect, fix="")
    for nccl in host.nccl or ():
        if why := why_no_plugin(nccl.version, newer=NEWER_VARIABLE in variables):
            fix = "tccl install --no-plugin DIR, for programs that load this NCCL"
            yield defect("plugin", nccl.source, severity="note", what=why, fix=fix)


def plugin_complaints() -> list[str]:
    """Return what keeps an installed plugin from its plan on this host, as sentences."""
    host = Host(home=str(home()), environment=dict(os.environ))
    found = [result for result in check_plugin(host) if isinstance(result, Finding)]
    return [f"{one.where}: {one.what}" for one in found if one.severity != "note"]


def _wrong(host: Host, named: ConfLine | None, index: ConfLine | None) -> Iterator[tuple[str, str]]:
    """Yield what keeps the plugin from working, and the remedy."""
    if named is None or Path(named.value).name != LIBRARY:
        said = "is not set" if named is None else f"names another plugin, {named.value[:60]}"
        fix = f"unset it; TCCL_ENV_PLUGIN_NEXT=PATH loads another plugin behind {LIBRARY}"
        yield f"{PLUGIN_VARIABLE} {said}: the plan is not used", fix
    elif not host.has(named.value):
        yield f"the plugin's library {named.value} is missing", _AGAIN
    elif host.root == Path("/") and (why := _why_not_loadable(named.value)):
        yield f"the plugin's library does not load: {why}", _AGAIN
    if index is None:
        yield f"{INDEX_VARIABLE} is not set: the plugin has no plan", _AGAIN
    elif why := _why_unusable(host, Path(index.value)):
        yield f"the plugin does not use {index.value}: {why}", _AGAIN
    else:
        variables = in_force(host)
        for name, value in _needed(host.data(index.value, limit=MAX_INDEX_BYTES) or b""):
            line = variables.get(name)
            if line is None or line.value.lower() != value.lower():
                state = "is not set" if line is None else f"is {line.value[:60]}"
                yield f"{name} {state}, so that all jobs get default NCCL", f"set {name}={value}"


def _needed(index: bytes) -> Iterator[list[str]]:
    lines = (line.split() for line in index.decode("ascii", "replace").splitlines())
    yield from (words[1:] for words in lines if len(words) == 3 and words[0] == "need")


def _why_not_loadable(path: str) -> str:
    try:
        ctypes.CDLL(path)
    except OSError as error:
        return str(error)
    return ""


def _why_unusable(host: Host, path: Path) -> str:
    """Return why an index is damaged or stale, as a clause; "" if nothing speaks against it."""
    data = host.data(str(path), limit=MAX_INDEX_BYTES)
    if data is None:
        return "it is missing"
    head, _, body = data.partition(b"digest ")
    told, _, body = body.partition(b"\n")
    if head != INDEX_HEAD and head.startswith(b"tccl-index "):
        return "another version of tccl-py wrote it"
    if head != INDEX_HEAD or told.decode("ascii", "replace") != digest(body):
        return "it is damaged"
    if host.root == Path("/"):
        with suppress(OSError):
            if why := why_not_trusted(path):
                return why
    listed = None
    with suppress(ValueError, KeyError):
        manifest = json.loads(
            host.data(str(path.parent.parent / MANIFEST_FILE), limit=MAX_INDEX_BYTES) or b"{}"
        )
        listed = manifest["files"].get(f"nccl/{path.name}", "")
    if listed not in (None, hashlib.sha256(data).hexdigest()):
        return "it is not the index of the plan beside it"
    fields = [line.split(" ") for line in body.decode("ascii", "replace").splitlines()]
    return next((why for words in fields if (why := _why_not(host, path.parent, words))), "")


def _why_not(host: Host, folder: Path, words: list[str]) -> str:
    """Return why a line of an index does not hold on a host, as a clause."""
    kind, value = words[0], words[1] if len(words) > 1 else "-"
    driver = host.driver_version().partition(".")[0]
    if kind == "driver" and driver and value not in ("-", driver):
        return f"it is for driver {value}, and this is {driver}"
    if kind == "numa" and value not in ("-", str(len(host.numa_nodes()))):
        return f"it is for {value} NUMA nodes, and this host has {len(host.numa_nodes())}"
    if kind == "gpu":
        text = host.text(f"proc/driver/nvidia/gpus/{words[2]}/information") + "\n"
        now = _UUID.search(text)
        if now is not None and words[3] not in ("-", now[1]):
            return f"GPU {value} was {words[3]} and is {now[1]}"
        if host.gpus and words[2] not in host.gpus:
            return f"GPU {value} at {words[2]} is gone"
    if kind == "set":
        graph = host.data(str(folder / words[2]), limit=MAX_GRAPH_BYTES)
        if graph is None or digest(graph) != words[3]:
            return f"{words[2]} is missing or was changed"
    return ""


_SHM = "/dev/shm"
_SHOWN = 60
_NAME = re.compile(r"NCCL_[A-Z0-9_]{1,60}", re.ASCII)
_JOB_FIX = "set it only in jobs that use exactly those GPUs: `tccl env DIR --gpus LIST`"
_MAX_TOPOLOGY = 1 << 22
_BUS_IDS = re.compile(r'busid="([0-9A-Fa-f:.]{1,20})"', re.ASCII)
_HOST_FIX = "remove the line; `tccl env DIR --gpus LIST` sets it for one job"


def this_host() -> Host:
    """Return this host, with the answers of its driver and of the installed NCCL."""
    free = None
    with suppress(OSError):
        shm = os.statvfs(_SHM)
        free = shm.f_bavail * shm.f_frsize
    try:
        facts = driver_facts()
        seen = tuple(conditions_of([gpu.index for gpu in facts.gpus]))
        driver = DriverState(gpus=facts.gpus, peer_access=facts.peer_access, conditions=seen)
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


# Checks of NCCL: variables in force, lines of nccl.conf that NCCL misreads, version and rings.
def check_settings(host: Host) -> Found:
    """Report variables in force and misread lines of NCCL's files."""
    for line in lines_of(host):
        yield from _misread(line)
    found = {name: line for name, line in in_force(host).items() if _NAME.fullmatch(name)}
    for name, line in found.items():
        if meant := similar_name(name):
            yield defect("misread", line.where, what=f"NCCL has no {name}", fix=f"write {meant}")
    for name, check in _CHECKED_VALUES.items():
        if name in found and (fields := check(host, found[name].value)):
            line = found.pop(name)
            what = f"{name}={_cut(line.value)} {fields.pop('what')}"
            fix = f"unset {name}" if line.where == ENVIRONMENT else "remove the line"
            yield defect(fields.pop("rule"), line.where, what=what, fix=fix, **fields)
    graph = found.get("NCCL_GRAPH_FILE")
    if graph is not None and graph.value:
        what, where = f"NCCL_GRAPH_FILE={_cut(graph.value)} is set", graph.where
        if where == ENVIRONMENT:
            yield defect("graph", where, severity="note", what=what, fix=_JOB_FIX)
        else:
            yield defect("graph", where, what=f"{what} for all jobs of this host", fix=_HOST_FIX)
    for name, rule in rules().items():
        if name in found and found[name].value != rule.harmless and not found[name].installed:
            line = found[name]
            scope, fix = "it holds for every job that does not set it itself", "remove the line"
            if line.where == ENVIRONMENT:
                scope, fix = "it overrides a plan's setting", f"unset {name}"
            what = f"{name}={_cut(line.value)} is set"
            yield defect(name, line.where, what=what, effect=f"; {scope}", fix=fix)


# Values that do not fit this host, often from another one: fields of the finding, or none.
def _unfit_graph(host: Host, value: str) -> dict[str, Any]:
    if value and (not value.startswith("/") or host.has(value)):
        return {}
    what = "names a file that is not here" if value else "is set, with no file"
    return {"rule": "no-graph-file", "what": what}


def _unfit_topology(host: Host, value: str) -> dict[str, Any]:
    if not value.startswith("/"):
        return {}
    data = host.data(value, limit=_MAX_TOPOLOGY)
    if data is None:
        why = "NCCL reads the machine itself, and says so in its log only"
        what = "names a file that is not here"
        return {"rule": "foreign", "severity": "note", "what": what, "why": why}
    ids = {normal_bus_id(text) for text in _BUS_IDS.findall(data.decode("utf-8", "replace"))}
    lost = [host.gpu_name(gpu) for gpu in host.gpus if gpu not in ids]
    return {"rule": "foreign", "what": f"lacks {listed(lost)}"} if lost else {}


def _unfit_nics(host: Host, value: str) -> dict[str, Any]:
    exact, nics = value.startswith("="), host.rdma_nics()
    wanted = [name.partition(":")[0] for name in value.removeprefix("=").split(",") if name]
    found = [{nic for nic in nics if nic.startswith(name)} for name in wanted]
    hits = [name in nics if exact else bool(near) for name, near in zip(wanted, found, strict=True)]
    if value.startswith("^") or all(hits):
        return {}
    lost = [name for name, hit in zip(wanted, hits, strict=True) if not hit]
    what = f"names {_cut(listed(lost))}, and the RDMA NICs here are {listed(nics) or 'none'}"
    if any(hits) or not nics:
        return {"rule": "foreign", "severity": "note", "what": what, "why": "NCCL passes them over"}
    return {"rule": "foreign", "what": what, "why": "NCCL uses none of the NICs here, but sockets"}


def _unfit_protocol(host: Host, value: str) -> dict[str, Any]:
    lists = [part.rpartition(":")[2] for part in value.upper().split(";")]
    forced = any("LL128" in part.split(",") for part in lists if not part.startswith("^"))
    ids = {gpu.bus_id for gpu in host.driver.gpus}
    # The end "" is a switch.
    apart = any("" not in gpu.links and ids - {gpu.bus_id, *gpu.links} for gpu in host.driver.gpus)
    what = "forces LL128, and some GPUs here are not joined by NVLink"
    return {"rule": "forced-ll128", "what": what} if forced and apart else {}


_CHECKED_VALUES: Mapping[str, Callable[[Host, str], dict[str, Any]]] = {
    "NCCL_GRAPH_FILE": _unfit_graph,
    "NCCL_TOPO_FILE": _unfit_topology,
    "NCCL_IB_HCA": _unfit_nics,
    "NCCL_PROTO": _unfit_protocol,
}


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
    doubt = unchecked(first.version)
    what = f"NCCL {first.version} is installed" + (f"; {doubt}" if doubt else "")
    yield defect("version", first.source, what=what)
    for second in others:
        if second.minor != first.minor:
            what = f"NCCL {second.version} is installed as well"
            fix = f"tccl plan --nccl {second.minor}, for jobs with it"
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


_NCCL_CHECKS: Mapping[str, Callable[[Host], Found]] = {
    "settings": check_settings,
    "nccl": check_nccl,
    "plugin": check_plugin,
    "nccl-rings": check_own_rings,
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
        for name, check in (*HOST_CHECKS.items(), *_NCCL_CHECKS.items())
        for result in check(host)
    ]
    findings = [result for result in found if isinstance(result, Finding)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    unseen = tuple(result for result in found if isinstance(result, Unseen))
    return Diagnosis(findings=tuple(findings), unseen=unseen)
