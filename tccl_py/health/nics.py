"""Checks of RDMA NICs and of NCCL's network: PCIe links, ports, addresses, variables."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from tccl_py.health.host import HostState, Results, Severity, defect, in_force, list_names
from tccl_py.health.pci import link_defects
from tccl_py.readers.sysfs import RdmaPort, rdma_ports

_BONDS = "sys/class/net/{}/bonding/slaves"
_CACHE, _CACHE_BYTES = "etc/ld.so.cache", 1 << 24
_FOLDERS = ("usr/lib", "usr/lib64", "lib64", "usr/local/lib", "usr/lib/x86_64-linux-gnu")
_INTERNAL = ("ib", "socket")
"""Networks of NCCL's own for NCCL_NET, which ignores case."""


def port_name(port: RdmaPort, ports: tuple[RdmaPort, ...]) -> str:
    """Return a port's name as NCCL_IB_HCA takes it; a NIC's only port goes without a number."""
    several = sum(other.name == port.name for other in ports) > 1
    return f"{port.name}:{port.number}" if several else port.name


def check_nics(host: HostState) -> Results:
    """Find NICs and ports below their cards or siblings, and addresses that NCCL cannot use."""
    ports = rdma_ports(host)
    for device in dict.fromkeys(port.bus_id for port in ports if port.bus_id):
        names = list_names([port_name(port, ports) for port in ports if port.bus_id == device])
        if above := host.ports_above(device):
            yield from link_defects(host, device, above[-1], f"{names}, below {above[-1]}")
    yield from _below_siblings(host, ports)
    for port in ports:
        yield from _bond(host, port)
        if port.active and port.ethernet:
            yield from _addresses(host, port, port_name(port, ports))
    if ports and host.entries("dev") and not host.entries("dev/infiniband"):
        yield defect("no-verbs", list_names([port_name(port, ports) for port in ports]))
    yield from _equal_routes(host)


def _below_siblings(host: HostState, ports: tuple[RdmaPort, ...]) -> Results:
    """Report what ports of equal cards have more of: state, rate, lanes of PCIe."""
    boards: dict[str, list[RdmaPort]] = defaultdict(list)
    for port in ports:
        boards[port.board].append(port)
    for siblings in boards.values():
        names = {port: port_name(port, ports) for port in siblings}
        active = [port for port in siblings if port.active]
        for port in siblings:
            if not port.active and port.state:
                waits = port.state in ("INIT", "ARMED")
                rule = "port-waits" if waits and not port.ethernet else "port-down"
                # Of cards with two ports people often cable one.
                alone = len(active) == len(siblings) - 1 and len(active) > 1
                severity: Severity = "slow" if waits or alone else "note"
                yield defect(rule, names[port], severity=severity, measured=port.state)
        best = max((port.mbps for port in active), default=0)
        for port in active:
            if 0 < port.mbps < best:
                slow, fast = (f"{mbps / 1000:g} Gbit/s" for mbps in (port.mbps, best))
                yield defect("port-slow", names[port], measured=slow, expected=fast)
        links = {port: host.pci_link(port.bus_id, "current") for port in active if port.bus_id}
        most = max((link.gbps or 0 for link in links.values()), default=0)
        for port, link in links.items():
            if link.gbps and link.gbps < most:
                slow, fast = (f"{gbps:.3g} GB/s" for gbps in (link.gbps, most))
                yield defect("nic-slot", names[port], measured=slow, expected=fast)


def _bond(host: HostState, port: RdmaPort) -> Results:
    """Report interfaces joined to one port: a queue pair uses one of them."""
    members = host.text(_BONDS.format(port.interface)).split() if port.interface else []
    members = members or host.text(_BONDS.format("bond0")).split() * ("bond" in port.name)
    if len(members) > 1:
        yield defect("bond", f"{port.name} of {list_names(members)}")


def _addresses(host: HostState, port: RdmaPort, name: str) -> Results:
    """Report that NCCL_IB_GID_INDEX names no address of a port that another host reaches."""
    line = in_force(host).get("NCCL_IB_GID_INDEX")
    if line is None or not line.value.isdecimal():
        return
    gids = {gid.index: gid for gid in port.gids}
    gid = gids.get(int(line.value))
    if gid is None or gid.address.is_link_local:
        fault = "has no address there" if gid is None else "has a link-local address there"
        routed = [
            str(gid.index)
            for gid in port.gids
            if gid.version != "RoCE v1" and not gid.address.is_link_local
        ]
        fix = (
            f"{name} has {list_names(routed)}"
            if routed
            else f"give {port.interface} an IPv4 address"
        )
        fix += "; from NCCL 2.21 on leave it unset"
        what = f"NCCL_IB_GID_INDEX={line.value} is set, and {name} {fault}"
        yield defect("gid-index", line.where, what=what, fix=fix)


def _equal_routes(host: HostState) -> Results:
    """Report interfaces with a route to the same subnet, of equal weight."""
    users: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for line in host.text("proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] != "00000000" and fields[2] == "00000000":
            users[fields[1], fields[7], fields[6]].add(fields[0])
    for (subnet, _, _), interfaces in sorted(users.items()):
        if len(interfaces) > 1 and re.fullmatch("[0-9A-F]{8}", subnet):
            address = ".".join(str(byte) for byte in bytes.fromhex(subnet)[::-1])
            yield defect("equal-routes", f"{list_names(sorted(interfaces))} to {address}")


# Values that do not fit this host: fields of the finding, or none.
def unfit_network(host: HostState, value: str) -> dict[str, Any]:
    """Return a finding's fields where NCCL_NET names a network whose library is not here."""
    if value.lower() in _INTERNAL or _plugin_is_here(host, value):
        return {}
    return {"rule": "no-net", "what": "names a network that no library here offers"}


def unfit_network_plugin(host: HostState, value: str) -> dict[str, Any]:
    """Return a finding's fields where NCCL_NET_PLUGIN names libraries of which none is here."""
    names = [name for name in value.split(",") if name]
    if not names or "none" in names or any(_plugin_is_here(host, name) for name in names):
        return {}
    why = "NCCL goes on with its own networks, RDMA or sockets"
    fields = {"rule": "no-net", "severity": "slow", "why": why}
    return fields | {"what": "names a library that is not here"}


def _plugin_is_here(host: HostState, name: str) -> bool:
    """Return whether a library of this name may be loaded, or whether that cannot be seen."""
    if name.startswith("/"):
        return host.has(name)
    folders = host.environment.get("LD_LIBRARY_PATH", "").split(":")
    files = {name, f"libnccl-net-{name}.so", f"lib{name}.so"}
    found = {file for folder in (*folders, *_FOLDERS) if folder for file in host.entries(folder)}
    cache = host.data(_CACHE, limit=_CACHE_BYTES) or b""
    if not found and not cache:
        return True
    return bool(files & found) or any(file.encode() + b"\0" in cache for file in files)
