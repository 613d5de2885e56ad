"""The doctor: checks of NCCL and of its plugin on a host, the table of all checks, a diagnosis."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tccl_py.delivery.plugin import PLUGIN_VARIABLE, why_not_trusted
from tccl_py.errors import InputError, MeasurementError
from tccl_py.health.checks import HOST_CHECKS
from tccl_py.health.host import (
    SEVERITIES,
    Defect,
    DriverState,
    HostState,
    Results,
    Unseen,
    cut,
    defect,
    listed,
    rules,
)
from tccl_py.health.network import check_functions, unfit_interfaces, unfit_nics
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
from tccl_py.nccl.versions import (
    NEWER_VARIABLE,
    unchecked,
    version_facts,
    why_no_plugin,
)
from tccl_py.nccl_library import (
    CONF_VARIABLE,
    HOST_FILE,
    ConfLine,
    conf_lines,
    home,
    installed_nccls,
)
from tccl_py.plan.staging import MANIFEST_FILE
from tccl_py.planning.installed_nccl import asked_here
from tccl_py.readers.live import driver_facts
from tccl_py.readers.sysfs import normal_bus_id
from tccl_py.sources.profiled import conditions_of

# The NCCL plugin on a host: the variables that load it, and what keeps jobs from their plan.
ENVIRONMENT = "the environment"
_CONFLICTING = {
    "NCCL_NET_PLUGIN": "if NCCL takes its network, later communicators get default NCCL",
    "NCCL_TUNER_PLUGIN": "its tuner decides on algorithms and channels, whatever the plan has",
}
_AGAIN = "tccl install DIR, after `tccl plan --force` where the machine or tccl-py has changed"
_NEWER = "tccl install --newer-nccl DIR, which tries a later NCCL here, or --no-plugin"
_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-f-]{36})\s", re.ASCII)


def lines_of(host: HostState) -> list[ConfLine]:
    """Return the lines of NCCL's files, the user's first."""
    paths = (host.environment.get(CONF_VARIABLE) or f"{host.home}/.nccl.conf", str(HOST_FILE))
    return [line for path in paths for line in conf_lines(host.data(path) or b"", where=path)]


def in_force(host: HostState) -> dict[str, ConfLine]:
    """Return the variables of jobs by name: the environment's, then the first of the files."""
    settings = host.environment.items()
    variables = {
        name: ConfLine(name=name, value=text, where=ENVIRONMENT) for name, text in settings
    }
    for line in lines_of(host):
        variables.setdefault(line.name, line)
    return variables


def check_plugin(host: HostState) -> Results:
    """Report a plugin that is installed and does not work, or not for every NCCL here."""
    variables, files = in_force(host), lines_of(host)
    installed = [line for line in files if line.name in (PLUGIN_VARIABLE, INDEX_VARIABLE)]
    named, index = variables.get(PLUGIN_VARIABLE), variables.get(INDEX_VARIABLE)
    ours = any(Path(line.value).name == LIBRARY for line in (*installed, *filter(None, [named])))
    if not ours and index is None:
        return
    place = named or index or installed[0]
    for fault, fix in _plugin_faults(host):
        yield defect("plugin", place.where, what=fault, fix=fix)
    for name, effect in _CONFLICTING.items():
        line = variables.get(name)
        if line is not None and line.value not in ("", "none"):
            fault = f"{name}={line.value[:60]} is set beside the plugin"
            yield defect("plugin", line.where, severity="note", what=fault, why=effect, fix="")
    newest = variables.get(NEWER_VARIABLE, ConfLine(name=NEWER_VARIABLE, value="", where=""))
    for nccl in host.nccl or ():
        try:
            why = why_no_plugin(nccl.version, newest=newest.value)
        except InputError as error:
            why = why_no_plugin(nccl.version)
            fault = f"{error.where} {error.what}"
            yield defect("plugin", newest.where, what=fault, fix=error.right)
        if why:
            yield defect("plugin", nccl.source, severity="note", what=why, fix=_NEWER)


def plugin_complaints() -> list[str]:
    """Return what keeps an installed plugin from its plan on this host, as sentences."""
    host = HostState(home=str(home()), environment=dict(os.environ))
    results = [result for result in check_plugin(host) if isinstance(result, Defect)]
    return [f"{bad.where}: {bad.what}" for bad in results if bad.severity != "note"]


def _plugin_faults(host: HostState) -> Iterator[tuple[str, str]]:
    """Yield what keeps the plugin from working, and the remedy."""
    variables = in_force(host)
    named, index = variables.get(PLUGIN_VARIABLE), variables.get(INDEX_VARIABLE)
    if named is None or Path(named.value).name != LIBRARY:
        state = "is not set" if named is None else f"names another plugin, {named.value[:60]}"
        fix = f"unset it; TCCL_ENV_PLUGIN_NEXT=PATH loads another plugin behind {LIBRARY}"
        yield f"{PLUGIN_VARIABLE} {state}: the plan is not used", fix
    elif not host.has(named.value):
        yield f"the plugin's library {named.value} is missing", _AGAIN
    elif host.root == Path("/") and (why := _why_not_loadable(named.value)):
        yield f"the plugin's library does not load: {why}", _AGAIN
    if index is None:
        yield f"{INDEX_VARIABLE} is not set: the plugin has no plan", _AGAIN
    elif why := _why_unusable(host, Path(index.value)):
        yield f"the plugin does not use {index.value}: {why}", _AGAIN
    else:
        data = host.data(index.value, limit=MAX_INDEX_BYTES) or b""
        for name, value in re.findall(r"^need (\S+) (\S+)$", data.decode("ascii", "replace"), re.M):
            line = variables.get(name)
            if line is None or line.value.lower() != value.lower():
                state = "is not set" if line is None else f"is {line.value[:60]}"
                yield f"{name} {state}, so that all jobs get default NCCL", f"set {name}={value}"


def _why_not_loadable(path: str) -> str:
    try:
        ctypes.CDLL(path)
    except OSError as error:
        return str(error)
    return ""


def _why_unusable(host: HostState, path: Path) -> str:
    """Return why an index is damaged or stale, as a clause; "" if nothing speaks against it."""
    data = host.data(str(path), limit=MAX_INDEX_BYTES)
    if data is None:
        return "it is missing"
    head, _, body = data.partition(b"digest ")
    written_digest, _, body = body.partition(b"\n")
    if head != INDEX_HEAD and head.startswith(b"tccl-index "):
        return "another version of tccl-py wrote it"
    if head != INDEX_HEAD or written_digest.decode("ascii", "replace") != digest(body):
        return "it is damaged"
    if host.root == Path("/"):
        with suppress(OSError):
            if why := why_not_trusted(path):
                return why
    recorded = None
    manifest = host.data(str(path.parent.parent / MANIFEST_FILE), limit=MAX_INDEX_BYTES)
    with suppress(ValueError, KeyError):
        recorded = json.loads(manifest or b"{}")["files"].get(f"nccl/{path.name}", "")
    if recorded not in (None, hashlib.sha256(data).hexdigest()):
        return "it is not the index of the plan beside it"
    fields = [line.split(" ") for line in body.decode("ascii", "replace").splitlines()]
    return next((why for words in fields if (why := _why_not(host, path.parent, words))), "")


def _why_not(host: HostState, folder: Path, words: list[str]) -> str:
    """Return why a line of an index does not hold on a host, as a clause."""
    kind, value = words[0], words[1] if len(words) > 1 else "-"
    driver = host.driver_version().partition(".")[0]
    if kind == "driver" and driver and value not in ("-", driver):
        return f"it is for driver {value}, and this is {driver}"
    if kind == "numa" and value not in ("-", str(len(host.numa_nodes()))):
        return f"it is for {value} NUMA nodes, and this host has {len(host.numa_nodes())}"
    if kind == "gpu":
        uuid = _UUID.search(host.text(f"proc/driver/nvidia/gpus/{words[2]}/information") + "\n")
        if uuid is not None and words[3] not in ("-", uuid[1]):
            return f"GPU {value} was {words[3]} and is {uuid[1]}"
        if host.gpus and words[2] not in host.gpus:
            return f"GPU {value} at {words[2]} is gone"
    if kind == "set":
        graph = host.data(str(folder / words[2]), limit=MAX_GRAPH_BYTES)
        if graph is None or digest(graph) != words[3]:
            return f"{words[2]} is missing or was changed"
    return ""


_NAME = re.compile(r"NCCL_[A-Z0-9_]{1,60}", re.ASCII)
_JOB_FIX = "set it only in jobs that use exactly those GPUs: `tccl env DIR --gpus LIST`"
_MAX_TOPOLOGY = 1 << 22
_BUS_IDS = re.compile(r'busid="([0-9A-Fa-f:.]{1,20})"', re.ASCII)
_HOST_FIX = "remove the line; `tccl env DIR --gpus LIST` sets it for one job"


def this_host() -> HostState:
    """Return this host, with the answers of its driver and of the installed NCCL."""
    free = None
    with suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
    try:
        facts = driver_facts()
        conditions = tuple(conditions_of([gpu.index for gpu in facts.gpus]))
        driver = DriverState(gpus=facts.gpus, peer_access=facts.peer_access, conditions=conditions)
    except (InputError, MeasurementError) as error:
        driver = DriverState(unseen=error.what if isinstance(error, InputError) else str(error))
    gpus = [gpu.index for gpu in driver.gpus]
    return HostState(
        home=str(home()),
        environment=dict(os.environ),
        driver=driver,
        shm_free=free,
        nccl=tuple(installed_nccls()),
        own_rings=asked_here(gpus) if len(gpus) > 1 else "",
        by_root=os.geteuid() == 0,
    )


# Checks of NCCL: variables in force, lines of nccl.conf that NCCL misreads, version and rings.
def check_settings(host: HostState) -> Results:
    """Report variables in force and misread lines of NCCL's files."""
    for line in lines_of(host):
        yield from _misread(line)
    variables = {name: line for name, line in in_force(host).items() if _NAME.fullmatch(name)}
    for name, line in variables.items():
        if meant := similar_name(name):
            yield defect("misread", line.where, what=f"NCCL has no {name}", fix=f"write {meant}")
    for name, check in _CHECKED_VALUES.items():
        if name in variables and (fields := check(host, variables[name].value)):
            line = variables.pop(name)
            fault = f"{name}={cut(line.value)} {fields.pop('what')}"
            yield defect(fields.pop("rule"), line.where, what=fault, fix=_undo(line), **fields)
    yield from _pinned_functions(host, variables)
    graph = variables.get("NCCL_GRAPH_FILE")
    if graph is not None and graph.value:
        fault, where = f"NCCL_GRAPH_FILE={cut(graph.value)} is set", graph.where
        if where == ENVIRONMENT:
            yield defect("graph", where, severity="note", what=fault, fix=_JOB_FIX)
        else:
            yield defect("graph", where, what=f"{fault} for all jobs of this host", fix=_HOST_FIX)
    effective = {name: line for name, line in variables.items() if not line.installed}
    for name, rule in rules().items():
        if name in effective and effective[name].value != rule.harmless:
            line = effective[name]
            effect = "; it holds for every job that does not set it itself"
            effect = "; it overrides a plan's setting" if line.where == ENVIRONMENT else effect
            fault = f"{name}={cut(line.value)} is set"
            yield defect(name, line.where, what=fault, effect=effect, fix=_undo(line))


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
    return {"rule": "foreign", "what": f"lacks {listed(lost)}"} if lost else {}


def _unfit_protocol(host: HostState, value: str) -> dict[str, Any]:
    lists = [part.rpartition(":")[2] for part in value.upper().split(";")]
    forced = any("LL128" in part.split(",") for part in lists if not part.startswith("^"))
    ids = {gpu.bus_id for gpu in host.driver.gpus}
    # The end "" is a switch.
    links = [{gpu.bus_id, *gpu.links} for gpu in host.driver.gpus]
    separate = any("" not in ends and ids - ends for ends in links)
    fault = "forces LL128, and some GPUs here are not joined by NVLink"
    return {"rule": "forced-ll128", "what": fault} if forced and separate else {}


_CHECKED_VALUES: Mapping[str, Callable[[HostState, str], dict[str, Any]]] = {
    "NCCL_GRAPH_FILE": _unfit_graph,
    "NCCL_TOPO_FILE": _unfit_topology,
    "NCCL_IB_HCA": unfit_nics,
    "NCCL_SOCKET_IFNAME": unfit_interfaces,
    "NCCL_PROTO": _unfit_protocol,
}


def _misread(line: ConfLine) -> Results:
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


def check_nccl(host: HostState) -> Results:
    """Report the versions of NCCL that programs load here, torch's first."""
    if host.nccl == ():
        yield Unseen(what="the NCCL of jobs", why="none was found; `tccl plan --nccl` names one")
    if not host.nccl:
        return
    first, *further = host.nccl
    facts = filter(None, (f"NCCL {first.version} is installed", unchecked(first.version)))
    yield defect("version", first.source, what="; ".join(facts))
    for second in further:
        if second.minor != first.minor:
            installed = f"NCCL {second.version} is installed as well"
            fix = f"tccl plan --nccl {second.minor}, for jobs with it"
            yield defect("second", second.source, what=installed, fix=fix)


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
        fields = {"severity": "slow", "why": why, "fix": "tccl plan -o my-plan"}
    yield defect("own-rings", where, what=text, **fields)


def check_network(host: HostState) -> Results:
    """Report what keeps rings from RDMA functions with a subnet of their own."""
    return check_functions(host, {name: line.value for name, line in in_force(host).items()})


_NCCL_CHECKS: Mapping[str, Callable[[HostState], Results]] = {
    "network": check_network,
    "settings": check_settings,
    "nccl": check_nccl,
    "plugin": check_plugin,
    "nccl-rings": check_own_rings,
}


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Findings, the worst first, and facts that could not be read."""

    findings: tuple[Defect, ...]
    unseen: tuple[Unseen, ...]

    @property
    def healthy(self) -> bool:
        """True if nothing hangs or slows NCCL."""
        return all(finding.severity == "note" for finding in self.findings)


def examine(host: HostState) -> Diagnosis:
    """Run all checks; nothing is changed."""
    results = [
        msgspec.structs.replace(result, check=name)
        for name, check in (*HOST_CHECKS.items(), *_NCCL_CHECKS.items())
        for result in check(host)
    ]
    findings = [result for result in results if isinstance(result, Defect)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    unseen = tuple(result for result in results if isinstance(result, Unseen))
    return Diagnosis(findings=tuple(findings), unseen=unseen)
