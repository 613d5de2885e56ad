"""Checks of RDMA NICs: PCIe links, ports and addresses, and subnets as cables need them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from tccl_py.health.checks import link_defects
from tccl_py.health.host import (
    Defect,
    HostState,
    Results,
    Severity,
    cut,
    defect,
    in_force,
    list_names,
    rules,
)
from tccl_py.nccl.variables import NameList
from tccl_py.readers.sysfs import PREFIX_BITS, PREFIX_VARIABLE, RdmaPort, neighbours, rdma_ports

_MTU = 9000
_PORT = re.compile(r"np?([0-9]+)$", re.ASCII)
"""The port of a card in the name of its interface, as systemd names it: enp1s0f0np0."""
_FIREWALLS = {
    "ufw": ("etc/ufw/ufw.conf", "ENABLED=yes"),
    "firewalld": ("etc/systemd/system/multi-user.target.wants/firewalld.service", ""),
}
"""The file of each firewall that says that it is enabled, and a line of it."""
_BONDS = "sys/class/net/{}/bonding/slaves"


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
        # Of interfaces joined to one port a queue pair uses one.
        members = host.text(_BONDS.format(port.interface)).split() if port.interface else []
        members = members or host.text(_BONDS.format("bond0")).split() * ("bond" in port.name)
        if len(members) > 1:
            yield defect("bond", f"{port.name} of {list_names(members)}")
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
        rates = {port: port.mbps / 1000 for port in active}
        links = {port: host.pci_link(port.bus_id, "current") for port in active if port.bus_id}
        lanes = {port: link.gbps or 0.0 for port, link in links.items()}
        for rule, values, unit in (("port-slow", rates, "Gbit/s"), ("nic-slot", lanes, "GB/s")):
            best = max(values.values(), default=0.0)
            for port, value in values.items():
                if 0 < value < best:
                    slow, fast = (f"{round(number, 1):g} {unit}" for number in (value, best))
                    yield defect(rule, names[port], measured=slow, expected=fast)


def _addresses(host: HostState, port: RdmaPort, name: str) -> Results:
    """Report that NCCL_IB_GID_INDEX names no address of a port that another host reaches."""
    line = in_force(host).get("NCCL_IB_GID_INDEX")
    if line is None or not line.value.isdecimal():
        return
    gids = {gid.index: gid for gid in port.gids}
    gid = gids.pop(int(line.value), None)
    if gid is not None and not gid.address.is_link_local:
        return
    reached = (gid for gid in gids.values() if not gid.address.is_link_local)
    routed = [str(gid.index) for gid in reached if gid.version != "RoCE v1"]
    fault = "has no address there" if gid is None else "has a link-local address there"
    fix = f"{name} has {list_names(routed)}"
    fix = fix if routed else f"give {port.interface} an IPv4 address"
    what = f"NCCL_IB_GID_INDEX={line.value} is set, and {name} {fault}"
    yield defect("gid-index", line.where, what=what, fix=f"{fix}; from NCCL 2.21 on leave it unset")


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


def check_network(host: HostState) -> Results:
    """Report what keeps rings from RDMA functions with a subnet of their own.

    Hosts with one RDMA function, or with all of them in one subnet, are at a switch. So may be
    hosts of several GPUs, for which all is a note.
    """
    for finding in _findings(host):
        several = len(host.gpus) > 1
        yield msgspec.structs.replace(finding, severity="note") if several else finding


def _findings(host: HostState) -> Iterator[Defect]:
    variables = {name: line.value for name, line in in_force(host).items()}
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
    value = variables.get("NCCL_IB_HCA", "")
    chosen = NameList(value)
    if left_out := [one.name for one in addressed if not chosen.allows(one.name)]:
        yield defect("left-out", list_names(left_out), measured=f"NCCL_IB_HCA={value[:60]}")
    for name, (bad, effect) in rules()["along-cables"].variables.items():
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
