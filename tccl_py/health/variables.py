"""Checks of NCCL's variables in force, and of lines of its files that it misreads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tccl_py.health.host import (
    ENVIRONMENT,
    HostState,
    Results,
    cut,
    defect,
    in_force,
    lines_of,
    list_names,
    rules,
)
from tccl_py.nccl.settings import GRAPH_VARIABLE, settings_from_environment
from tccl_py.nccl.variables import NameList, similar_name
from tccl_py.nccl.versions import version_facts
from tccl_py.nccl_conf import ConfLine
from tccl_py.readers.sysfs import normal_bus_id

_NAME = re.compile(r"NCCL_[A-Z0-9_]{1,60}", re.ASCII)
_JOB_FIX = "set it only in jobs that use exactly those GPUs: `tccl env DIR --gpus LIST`"
_CONDITION = "only if nobody set it against hangs or wrong values, which `tccl verify` looks for: "
_MAX_TOPOLOGY = 1 << 22
_BUS_IDS = re.compile(r'busid="([0-9A-Fa-f:.]{1,20})"', re.ASCII)
_HOST_FIX = "remove the line; `tccl env DIR --gpus LIST` sets it for one job"
_CACHE_BYTES = 1 << 24
_INTERNAL = ("ib", "socket")
"""Networks of NCCL's own for NCCL_NET, which ignores case."""


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


def _unfit_nics(host: HostState, value: str) -> dict[str, Any]:
    listed, nics = NameList(value), host.rdma_nics()
    if not (lost := listed.lost(nics)):
        return {}
    what = f"names {cut(list_names(lost))}, and the RDMA NICs here are {list_names(nics) or 'none'}"
    if len(lost) < len(listed.names) or not nics:
        why = "NCCL passes them over"
        return {"rule": "foreign", "what": what, "severity": "note", "why": why}
    why = "NCCL uses none of the NICs here, but sockets"
    return {"rule": "foreign", "what": what, "why": why}


def _unfit_interfaces(host: HostState, value: str) -> dict[str, Any]:
    listed, interfaces = NameList(value), host.entries("sys/class/net")
    if listed.excludes and not listed.has("lo"):
        return {"rule": "loopback", "what": f"leaves NCCL `lo`: {cut(value)},lo does not"}
    if not interfaces or not (lost := listed.lost(interfaces)):
        return {}
    what = f"names {cut(list_names(lost))}, and the interfaces here are {list_names(interfaces)}"
    fields = {"rule": "foreign", "what": what, "source": "NCCL user guide, NCCL_SOCKET_IFNAME"}
    if len(lost) < len(listed.names):
        return fields | {"severity": "note", "why": "NCCL takes the others"}
    why = "every communicator fails at its start: NCCL finds no interface for its sockets"
    return fields | {"severity": "hang", "why": why}


def _unfit_network(host: HostState, value: str) -> dict[str, Any]:
    if value.lower() in _INTERNAL or _plugin_is_here(host, value):
        return {}
    return {"rule": "no-net", "what": "names a network that no library here offers"}


def _unfit_network_plugin(host: HostState, value: str) -> dict[str, Any]:
    names = [name for name in value.split(",") if name]
    if not names or "none" in names or any(_plugin_is_here(host, name) for name in names):
        return {}
    why, what = (
        "NCCL goes on with its own networks, RDMA or sockets",
        "names a library that is not here",
    )
    return {"rule": "no-net", "severity": "slow", "why": why, "what": what}


def _plugin_is_here(host: HostState, name: str) -> bool:
    """Return whether a library of this name may be loaded, or whether that cannot be seen."""
    if name.startswith("/"):
        return host.has(name)
    files = (name, f"libnccl-net-{name}.so", f"lib{name}.so")
    cache = host.data("etc/ld.so.cache", limit=_CACHE_BYTES) or b""
    if not cache and not any(map(host.entries, host.library_folders)):
        return True
    return any(host.library(file) or file.encode() + b"\0" in cache for file in files)


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
    "NCCL_IB_HCA": _unfit_nics,
    "NCCL_NET": _unfit_network,
    "NCCL_NET_PLUGIN": _unfit_network_plugin,
    "NCCL_SOCKET_IFNAME": _unfit_interfaces,
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
