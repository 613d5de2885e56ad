"""Network interfaces of this host: which are up, their addresses, and whose they are."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.machine import Machine, Nic
from tccl_py.readers.sysfs import network_ports

SYSFS = Path("/sys")
PROC = Path("/proc")
_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913  # include/uapi/linux/sockios.h
_IFF_UP, _IFF_RUNNING = 0x1, 0x40  # include/uapi/linux/if.h
_GLOBAL_SCOPE = "00"
_LONGEST = 15
"""IFNAMSIZ less the zero byte."""


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """An interface: its address, "" if it has none, and whether it is up and has a carrier."""

    name: str
    address: str
    up: bool
    speed_mbps: int = 0


def interface(name: str, *, sysfs: Path = SYSFS, proc: Path = PROC) -> Interface | None:
    """What the kernel says of an interface of this network namespace; None if there is none.

    An IPv4 address goes before an IPv6 one; addresses that only hold on one link do not count.
    """
    if not 1 <= len(name.encode()) <= _LONGEST or name not in _names():
        return None
    flags = _asked(_SIOCGIFFLAGS, name)
    state = struct.unpack_from("H", flags)[0] if flags else 0
    answer = _asked(_SIOCGIFADDR, name)
    address = socket.inet_ntoa(answer[4:8]) if answer else _address6(name, proc)
    speed = 0
    # The kernel refuses to tell the speed of what is down.
    with contextlib.suppress(OSError, ValueError):
        speed = int((sysfs / "class" / "net" / name / "speed").read_text())
    return Interface(
        name=name,
        address=address,
        up=bool(state & _IFF_UP and state & _IFF_RUNNING),
        speed_mbps=max(speed, 0),
    )


def addresses() -> tuple[str, ...]:
    """By what addresses other hosts may reach this one, those of devices first."""
    found = []
    for name in _names():
        seen = interface(name)
        if seen is not None and seen.up and seen.address and name != "lo":
            found.append((not (SYSFS / "class" / "net" / name / "device").exists(), seen.address))
    return tuple(address for _, address in sorted(found, key=lambda one: one[0]))


def listening() -> socket.socket:
    """A socket that waits on all addresses of this host, IPv6 too where there is any."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=4096)


def _names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _asked(question: int, name: str) -> bytes:
    """The 16 bytes of the answer to an ioctl about an interface; none where there is none."""
    request = array.array("B", struct.pack("40s", name.encode()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            fcntl.ioctl(sock.fileno(), question, request)
        except OSError:
            return b""
    return bytes(request[16:32])


def _address6(name: str, proc: Path) -> str:
    """The first global IPv6 address of an interface, "" if it has none."""
    with contextlib.suppress(OSError):
        for line in (proc / "net" / "if_inet6").read_text().splitlines():
            digits, _, _, scope, _, owner = line.split()
            if owner == name and scope == _GLOBAL_SCOPE:
                return str(ipaddress.IPv6Address(int(digits, 16)))
    return ""


def with_interfaces(
    machine: Machine, names: tuple[str, ...], *, host: str, sysfs: Path = SYSFS
) -> Machine:
    """The machine with those of these interfaces as its NICs that are there, in this order.

    Those that the machine has as NICs keep their place in it; others (virtual ones, and all of a
    stand-in machine's) hang from the first NUMA node.

    Raises:
        InputError: none is there.
    """
    nics: list[Nic] = []
    for name in dict.fromkeys(names):
        found = interface(name, sysfs=sysfs)
        if found is None:
            continue
        index = len(nics)
        known_nic = next(
            (nic for nic in machine.nics if name in (nic.name, interface_of(nic, sysfs))), None
        )
        if known_nic is not None:
            nics.append(msgspec.structs.replace(known_nic, index=index))
        else:
            parent = machine.numa_nodes[0].id
            nics.append(Nic(index=index, name=name, parent=parent, speed_mbps=found.speed_mbps))
    if not nics:
        known = ", ".join(one for one in _names() if one != "lo") or "none"
        wanted = ", ".join(name[:40] for name in names)
        raise InputError(f"host {host}", f"has no interface {wanted}", f"it has {known}")
    return msgspec.structs.replace(machine, nics=tuple(nics))


def with_own_nics(machine: Machine, *, sysfs: Path = SYSFS) -> Machine:
    """A stand-in machine with the NICs of this host, which hang from their NUMA nodes."""
    nodes = {node.numa_id: node.id for node in machine.numa_nodes}
    first = machine.numa_nodes[0].id
    nics: list[Nic] = []
    for port in network_ports(sysfs):
        nic = Nic(index=len(nics), name=port.name, parent=first, port=port.port)
        name = interface_of(nic, sysfs)
        found = interface(name, sysfs=sysfs)
        if found is not None and found.up and found.address:
            node = _text(sysfs / "class" / "net" / name / "device" / "numa_node")
            parent = nodes.get(int(node), first) if node.isdecimal() else first
            nics.append(msgspec.structs.replace(nic, parent=parent, speed_mbps=port.speed_mbps))
    return msgspec.structs.replace(machine, nics=tuple(nics))


def unused_interfaces(*, sysfs: Path = SYSFS) -> tuple[str, ...]:
    """Interfaces of devices that are down, or have no carrier."""
    found = []
    for name in _names():
        if (sysfs / "class" / "net" / name / "device").exists():
            seen = interface(name, sysfs=sysfs)
            if seen is not None and not seen.up:
                found.append(name)
    return tuple(sorted(found))


def interface_of(nic: Nic, sysfs: Path = SYSFS) -> str:
    """The interface of a NIC: itself, or that of the card behind an RDMA port; "" if none is."""
    if (sysfs / "class" / "net" / nic.name).exists() or nic.name in _names():
        return nic.name
    behind = sysfs / "class" / "infiniband" / nic.name / "device" / "net"
    try:
        found = sorted(entry.name for entry in behind.iterdir())
    except OSError:
        return ""
    ports = {name: _text(behind / name / "dev_port") for name in found}
    wanted = str(max(nic.port - 1, 0))
    return next((name for name in found if ports[name] == wanted), found[0] if found else "")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
