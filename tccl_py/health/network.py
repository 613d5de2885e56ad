"""Checks of RDMA functions over Ethernet on hosts with a subnet for each, as cables need it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tccl_py.health.host import Defect, HostState, Results, defect, listed
from tccl_py.readers.roce import PREFIX_BITS, PREFIX_VARIABLE, Function, roce_functions

_MTU = 9000
_FIREWALLS = {
    "ufw": ("etc/ufw/ufw.conf", "ENABLED=yes"),
    "firewalld": ("etc/systemd/system/multi-user.target.wants/firewalld.service", ""),
}
"""The file of each firewall that says that it is enabled, and a line of it."""


def check_functions(host: HostState, variables: Mapping[str, str]) -> Results:
    """Report what keeps rings from functions with a subnet of their own, under these variables.

    Hosts with one RDMA function, or with all of them in one subnet, are at a switch. So may be
    hosts of several GPUs, for which all is a note.
    """
    for finding in _findings(host, variables):
        several = len(host.gpus) > 1
        yield msgspec.structs.replace(finding, severity="note") if several else finding


def _findings(host: HostState, variables: Mapping[str, str]) -> Iterator[Defect]:
    functions = roce_functions(host)
    bits = _prefix_bits(variables)
    addressed = [one for one in functions if one.addresses]
    if len({subnet for one in addressed for subnet in one.subnets(bits)}) < 2:
        return
    for one in functions:
        where = f"{one.name} ({one.interface or 'no interface'})"
        if not one.active:
            yield defect("function-down", where)
        elif not one.addresses:
            yield defect("no-address", where)
        elif one.mtu is not None and one.mtu < _MTU:
            fix = f"ip link set {one.interface} mtu {_MTU} (as root, on both ends of the cable)"
            yield defect("small-mtu", where, measured=str(one.mtu), expected=str(_MTU), fix=fix)
    yield from _shared_subnets(addressed, bits)
    if left_out := [one.name for one in addressed if not _chosen(one, variables)]:
        value = variables["NCCL_IB_HCA"]
        yield defect("left-out", listed(left_out), measured=f"NCCL_IB_HCA={value[:60]}")
    for name, (path, line) in _FIREWALLS.items():
        if host.has(path) and line in host.text(path):
            subnets = sorted({subnet for one in addressed for subnet in one.subnets(bits)})
            fix = "let all traffic in from the neighbours' addresses in each of these subnets"
            yield defect("firewall", f"{name}, subnets {listed(subnets)}", fix=fix)


def _prefix_bits(variables: Mapping[str, str]) -> int:
    text = variables.get(PREFIX_VARIABLE, "")
    return int(text) if text.isdecimal() and 1 <= int(text) <= 32 else PREFIX_BITS


def _shared_subnets(functions: Sequence[Function], bits: int) -> Iterator[Defect]:
    users: dict[str, list[str]] = {}
    for one in functions:
        for subnet in one.subnets(bits):
            users.setdefault(subnet, []).append(one.name)
    for subnet, names in sorted(users.items()):
        if len(names) > 1:
            yield defect("subnet-twice", f"{listed(names)} in {subnet}")


def _chosen(function: Function, variables: Mapping[str, str]) -> bool:
    """Return whether NCCL_IB_HCA leaves NCCL this function."""
    text = variables.get("NCCL_IB_HCA", "")
    excludes, exact = text.startswith("^"), text.lstrip("^").startswith("=")
    names = [name.partition(":")[0] for name in text.lstrip("^=").split(",") if name]
    fits = str.__eq__ if exact else str.startswith
    return not names or any(fits(function.name, name) for name in names) != excludes
