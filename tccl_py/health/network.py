"""Checks of RDMA functions over Ethernet on hosts with a subnet for each, as cables need it, and of
variables that name NICs and interfaces."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tccl_py.health.host import Defect, HostState, Results, cut, defect, in_force, list_names
from tccl_py.readers.lldp import neighbours
from tccl_py.readers.sysfs import PREFIX_BITS, PREFIX_VARIABLE, RdmaPort, rdma_ports

_MTU = 9000
_PORT = re.compile(r"np?([0-9]+)$", re.ASCII)
"""The port of a card in the name of its interface, as systemd names it: enp1s0f0np0."""
_FIREWALLS = {
    "ufw": ("etc/ufw/ufw.conf", "ENABLED=yes"),
    "firewalld": ("etc/systemd/system/multi-user.target.wants/firewalld.service", ""),
}
"""The file of each firewall that says that it is enabled, and a line of it."""
_ALONG_CABLES = {
    "NCCL_IB_MERGE_NICS": ("1", "a merged NIC has ports in several subnets"),
    "NCCL_IB_SUBNET_AWARE_ROUTING": ("0", "connections leave by NICs that no cable joins"),
    "NCCL_RUNTIME_CONNECT": ("0", "NCCL connects trees too, whose hosts no cable may join"),
    "NCCL_CUMEM_ENABLE": ("0", "NCCL connects all at once; SGLang sets it by itself, unless "
                          "--enable-symm-mem"),
    "NCCL_IB_GID_INDEX": ("", "the index of an address differs between functions, and drifts"),
}  # fmt: skip
"""Variables with the value ("" is any) that rings along cables cannot have, and why."""


def check_network(host: HostState) -> Results:
    """Report what keeps rings from RDMA functions with a subnet of their own.

    Hosts with one RDMA function, or with all of them in one subnet, are at a switch. So may be
    hosts of several GPUs, for which all is a note.
    """
    variables = {name: line.value for name, line in in_force(host).items()}
    for finding in _findings(host, variables):
        several = len(host.gpus) > 1
        yield msgspec.structs.replace(finding, severity="note") if several else finding


def _findings(host: HostState, variables: Mapping[str, str]) -> Iterator[Defect]:
    functions = [port for port in rdma_ports(host) if port.ethernet and port.number == 1]
    addressed = [function for function in functions if function.addresses]
    text = variables.get(PREFIX_VARIABLE, "")
    bits = int(text) if text.isdecimal() and 1 <= int(text) <= 32 else PREFIX_BITS
    users: dict[str, list[str]] = defaultdict(list)
    for function in addressed:
        for subnet in function.subnets(bits):
            users[subnet].append(function.name)
    if len(users) < 2:
        return
    for function in functions:
        yield from _of_function(host, function)
    for subnet, names in sorted(users.items()):
        if len(names) > 1:
            yield defect("subnet-twice", f"{list_names(names)} in {subnet}")
    if left_out := [function.name for function in addressed if not _is_chosen(function, variables)]:
        value = variables["NCCL_IB_HCA"]
        yield defect("left-out", list_names(left_out), measured=f"NCCL_IB_HCA={value[:60]}")
    for name, (bad, effect) in _ALONG_CABLES.items():
        if name in variables and bad in ("", variables[name]):
            what = f"{name}={cut(variables[name])} is set"
            yield defect("along-cables", in_force(host)[name].where, what=what, effect=effect)
    for name, (path, line) in _FIREWALLS.items():
        if host.has(path) and line in host.text(path):
            fix = "let all traffic in from the neighbours' addresses in each of these subnets"
            yield defect("firewall", f"{name}, subnets {list_names(sorted(users))}", fix=fix)


def _of_function(host: HostState, function: RdmaPort) -> Iterator[Defect]:
    where = f"{function.name} ({function.interface or 'no interface'})"
    if not function.active:
        yield defect("function-down", where)
    elif not function.addresses:
        yield defect("no-address", where)
    elif function.mtu is not None and function.mtu < _MTU:
        fix = f"ip link set {function.interface} mtu {_MTU} (as root, on both ends of the cable)"
        yield defect("small-mtu", where, measured=str(function.mtu), expected=str(_MTU), fix=fix)
    for other in neighbours(host, function.interface):
        ports = _PORT.search(function.interface), _PORT.search(other.port)
        if ports[0] and ports[1] and ports[0][1] == ports[1][1]:
            yield defect("like-ports", f"{where} and {other.port} of {other.system[:60]}")


def _is_chosen(function: RdmaPort, variables: Mapping[str, str]) -> bool:
    """Return whether NCCL_IB_HCA leaves NCCL this function."""
    text = variables.get("NCCL_IB_HCA", "")
    excludes, exact = text.startswith("^"), text.lstrip("^").startswith("=")
    names = [name.partition(":")[0] for name in text.lstrip("^=").split(",") if name]
    fits = str.__eq__ if exact else str.startswith
    return not names or any(fits(function.name, name) for name in names) != excludes


def unfit_nics(host: HostState, value: str) -> dict[str, Any]:
    """Return a finding's fields where NCCL_IB_HCA names NICs that are not here."""
    nics = host.rdma_nics()
    names, lost = _find_named(value, nics)
    if not lost:
        return {}
    fault = (
        f"names {cut(list_names(lost))}, and the RDMA NICs here are {list_names(nics) or 'none'}"
    )
    fields = {"rule": "foreign", "what": fault}
    if len(lost) < len(names) or not nics:
        return fields | {"severity": "note", "why": "NCCL passes them over"}
    return fields | {"why": "NCCL uses none of the NICs here, but sockets"}


def unfit_interfaces(host: HostState, value: str) -> dict[str, Any]:
    """Return a finding's fields where NCCL_SOCKET_IFNAME names none here, or leaves loopback."""
    if value.startswith("^"):
        names = value.removeprefix("^").removeprefix("=").split(",")
        fits = str.__eq__ if value.startswith("^=") else str.startswith
        leaves = not any(name and fits("lo", name) for name in names)
        what = f"leaves NCCL `lo`: {cut(value)},lo does not"
        return {"rule": "loopback", "what": what} if leaves else {}
    interfaces = host.entries("sys/class/net")
    names, lost = _find_named(value, interfaces)
    if not interfaces or not lost:
        return {}
    fault = f"names {cut(list_names(lost))}, and the interfaces here are {list_names(interfaces)}"
    fields = {"rule": "foreign", "what": fault, "source": "NCCL user guide, NCCL_SOCKET_IFNAME"}
    if len(lost) < len(names):
        return fields | {"severity": "note", "why": "NCCL takes the others"}
    why = "every communicator fails at its start: NCCL finds no interface for its sockets"
    return fields | {"severity": "hang", "why": why}


def _find_named(value: str, present: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names or prefixes in a list of NCCL's, and those that fit nothing here."""
    if value.startswith("^"):
        return [], []
    fits = str.__eq__ if value.startswith("=") else str.startswith
    names = [name.partition(":")[0] for name in value.removeprefix("=").split(",") if name]
    return names, [name for name in names if not any(fits(each, name) for each in present)]
