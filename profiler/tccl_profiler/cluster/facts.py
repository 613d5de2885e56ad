"""The facts of a host, from its agent, and the checks of a cluster."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from tccl_profiler.linux import host_fingerprint, host_machine
from tccl_py.errors import InputError, require, spell
from tccl_py.files import pick
from tccl_py.model.machine import Fingerprint, Knowledge, Machine, Nic
from tccl_py.nccl_library import installed_nccl
from tccl_py.readers import live
from tccl_py.readers.sysfs import HostFiles, Neighbour, neighbours, network_ports

FILES = HostFiles()
PROC = Path("/proc")
# include/uapi/linux/sockios.h
_SIOCGIFADDR, _SIOCGIFNETMASK, _SIOCGIFFLAGS = 0x8915, 0x891B, 0x8913
_IFF_UP, _IFF_RUNNING = 0x1, 0x40  # include/uapi/linux/if.h
_GLOBAL_SCOPE = "00"
_OPTIMISTIC, _TENTATIVE = 0x04, 0x40  # include/uapi/linux/if_addr.h
_GPUS = "start ranks where GPUs are, or add `backend` host for a dry run on the hosts' memory"


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """An interface, its address or "", and whether it is up and has a carrier.

    `prefix` is the length of an IPv4 address's network, 0 for any other address; `heard` are the
    ports that LLDP tells of.
    """

    name: str
    address: str
    up: bool
    speed_mbps: int = 0
    prefix: int = 0
    heard: tuple[Neighbour, ...] = ()


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A host of the cluster; `addresses` are interfaces by the index of the NIC.

    Interfaces in `down` are not up; `tccl_py` and `nccl` are versions; "none" if not installed.
    """

    name: str
    machine: Machine
    knowledge: Knowledge
    fingerprint: Fingerprint
    tccl_py: str
    nccl: str
    addresses: Mapping[int, Interface]
    down: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that can be measured: GPUs, and NICs that have an address."""
        gpus = (f"G{index}" for index in self.machine.gpu_indices)
        return (*gpus, *(f"N{index}" for index in sorted(self.addresses)))


def host_facts(
    name: str, *, backend: str, devices: int | None, interfaces: tuple[str, ...]
) -> HostFacts:
    """Discover this host, with `devices` of the stand-in and, without `interfaces`, own NICs."""
    try:
        machine, knowledge, fingerprint = _discover(backend, devices)
    except InputError as error:
        raise InputError(f"host {name}: {error.where}", error.what, error.right) from error
    if interfaces:
        machine = with_interfaces(machine, interfaces, host=name)
    ports = interfaces_here()
    of_nic = {n.index: ports[key] for n in machine.nics if (key := _interface_of(n)) in ports}
    for port in of_nic.values() if interfaces else ():
        fault, right = f"interface {port.name} has no address", "give it one, or another"
        require(port.address or not port.up, f"host {name}", fault, right)
    # Discovery leaves out what is down; another host may have the same interface up.
    left_out = [] if interfaces else [port for port in ports.values() if _is_device(port.name)]
    down = dict.fromkeys(port.name for port in (*left_out, *of_nic.values()) if not port.up)
    installed, version = installed_nccl(), "not installed"  # where it runs from its source
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("tccl-py")
    return HostFacts(
        name=name,
        machine=machine,
        knowledge=knowledge,
        fingerprint=fingerprint,
        tccl_py=version,
        nccl="none" if installed is None else installed.version,
        addresses={index: port for index, port in of_nic.items() if port.up and port.address},
        down=tuple(down),
    )


def _discover(backend: str, devices: int | None) -> tuple[Machine, Knowledge, Fingerprint]:
    if backend == "host":
        machine = host_machine(devices, least=1)
        reached = Knowledge(peer_access_provenance="reported")
        return _with_own_nics(machine), reached, host_fingerprint(machine)
    try:
        machine, knowledge, fingerprint = live.discover_machine()
    except InputError as error:
        # What else can be read is no help to the hosts of a job.
        raise InputError(error.where, error.what, _GPUS) from error
    shown = live.visible_indices(machine, fingerprint.gpu_uuids, os.environ.get(live.VARIABLE))
    return (*live.only_gpus(machine, knowledge, shown), fingerprint)


def check_hosts(
    hosts: Sequence[HostFacts],
    *,
    expected: Sequence[str] = (),
    interfaces: Sequence[str] = (),
    addressed: bool = True,
) -> None:
    """Refuse hosts that are no cluster: `expected` are names, `addressed` NICs are for TCP."""
    names = [host.name for host in hosts]
    for name in expected:
        fault, right = "is in the list of hosts, and no rank runs there", "start a rank on it, or "
        require(name in names, f"host {name}", fault, f"{right}take it out of the list")
    for name in names if expected else ():
        fault, right = "runs a rank and is not in the list of hosts", "add it to the list, or start"
        require(name in expected, f"host {name}", fault, f"{right} no rank on it")
    fault = f"has {spell(len(hosts), 'host')} ({', '.join(names)})"
    right = "start ranks on 2 hosts at least, or leave mpirun out"
    require(len(hosts) > 1, "this MPI job", fault, right)
    _check_software(hosts)
    names_of_nics = {nic.name for host in hosts for nic in host.addresses.values()}
    for name in interfaces:
        if name not in names_of_nics and not any(name in host.down for host in hosts):
            listed = f"there are {', '.join(sorted(names_of_nics)) or 'none'}"
            raise InputError(f"interface {name[:40]}", "is on no host of this job", listed)
    _check_nics(hosts, named=bool(interfaces), addressed=addressed)


def _check_software(hosts: Sequence[HostFacts]) -> None:
    """Refuse different versions; Python may differ: processes exchange plain data."""
    first = hosts[0]
    for host in hosts[1:]:
        for software, first_version, host_version in (
            ("tccl-py", first.tccl_py, host.tccl_py),
            ("the NVIDIA driver", first.fingerprint.driver, host.fingerprint.driver),
            ("NCCL", first.nccl, host.nccl),
        ):
            versions = f"has {software} {host_version}, host {first.name} has {first_version}"
            equal, right = first_version == host_version, "install the same on all hosts"
            require(equal, f"host {host.name}", versions, right)


def _check_nics(hosts: Sequence[HostFacts], *, named: bool, addressed: bool) -> None:
    """Refuse a NIC that is down, if named by the user or up on another host."""
    up = {nic.name: host.name for host in hosts for nic in host.addresses.values()}
    for host in hosts:
        for name in host.down:
            if named or name in up:
                elsewhere = f", on host {up[name]} it is up" if name in up else ""
                fault = f"interface {name} is down{elsewhere}"
                right = "bring it up, or name the interfaces to use"
                raise InputError(f"host {host.name}", fault, right)
        place, joined = f"host {host.name}", addressed or host.machine.nics
        require(joined, place, "has no NIC", "leave it out of the job")
        fault = "has no NIC with an address that other hosts could reach"
        right = "bring one up, or name the interfaces to use, as `interfaces` eth0"
        require(host.addresses or not addressed, place, fault, right)


# Network interfaces of this network namespace


def interfaces_here() -> dict[str, Interface]:
    """Return the interfaces by name; an IPv4 address goes before a global IPv6 address."""
    interfaces, addresses6 = {}, _addresses6()
    for _, name in socket.if_nameindex():
        flags, answer = _ioctl(_SIOCGIFFLAGS, name), _ioctl(_SIOCGIFADDR, name)
        state = struct.unpack_from("H", flags)[0] if flags else 0
        mask = _ioctl(_SIOCGIFNETMASK, name) if answer else b""
        interfaces[name] = Interface(
            name=name,
            address=socket.inet_ntoa(answer[4:8]) if answer else addresses6.get(name, ""),
            up=bool(state & _IFF_UP and state & _IFF_RUNNING),
            # The kernel refuses to tell the speed of what is down.
            speed_mbps=max(FILES.number(f"sys/class/net/{name}/speed") or 0, 0),
            prefix=int.from_bytes(mask[4:8], "big").bit_count(),
            heard=neighbours(FILES, name),
        )
    return interfaces


def addresses() -> tuple[str, ...]:
    """Return the addresses of this host for other ranks, those of devices first."""
    ports = interfaces_here().values()
    usable = [port for port in ports if port.up and port.address and port.name != "lo"]
    ordered = sorted(usable, key=lambda port: not _is_device(port.name))
    return tuple(port.address for port in ordered) or ("127.0.0.1",)


def _is_device(name: str) -> bool:
    return FILES.has(f"sys/class/net/{name}/device")


def _ioctl(question: int, name: str) -> bytes:
    request = array.array("B", struct.pack("40s", name.encode()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            fcntl.ioctl(sock.fileno(), question, request)
        except OSError:
            return b""
    return bytes(request[16:32])


def _addresses6() -> dict[str, str]:
    """Return the first usable global IPv6 address of each interface that has one."""
    addresses: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (PROC / "net" / "if_inet6").read_text().splitlines():
            digits, _, _, scope, flags, owner = line.split()
            # To an address that another host may have, or has, no socket can be bound.
            usable = int(flags, 16) & (_OPTIMISTIC | _TENTATIVE) != _TENTATIVE
            if scope == _GLOBAL_SCOPE and usable:
                addresses.setdefault(owner, str(ipaddress.IPv6Address(int(digits, 16))))
    return addresses


def with_interfaces(machine: Machine, names: tuple[str, ...], *, host: str) -> Machine:
    """Return the machine with listed interfaces as NICs; strange ones hang from the first node."""
    interfaces, first = interfaces_here(), machine.numa_nodes[0].id
    own = {name: nic for nic in machine.nics for name in (_interface_of(nic), nic.name)}
    nics = [
        own.get(name)
        or Nic(index=0, name=name, parent=first, speed_mbps=interfaces[name].speed_mbps)
        for name in dict.fromkeys(names)
        if name in interfaces
    ]
    usable = ", ".join(name for name in interfaces if name != "lo") or "none"
    named = ", ".join(name[:40] for name in names)
    require(nics, f"host {host}", f"has no interface {named}", f"it has {usable}")
    return _with_nics(machine, nics)


def _with_own_nics(machine: Machine) -> Machine:
    """Return the stand-in's machine with the ports that are up and have an address."""
    interfaces, nodes = interfaces_here(), {node.numa_id: node.id for node in machine.numa_nodes}
    nics = []
    for port in network_ports(FILES):
        interface = interfaces.get(_interface_of(port))
        if interface is not None and interface.up and interface.address:
            node = FILES.number(f"sys/class/net/{interface.name}/device/numa_node")
            parent = nodes.get(-1 if node is None else node, machine.numa_nodes[0].id)
            fields = {"parent": parent, **pick(port, "name", "port", "speed_mbps")}
            nics.append(Nic(index=0, **fields))
    return _with_nics(machine, nics)


def _with_nics(machine: Machine, nics: Sequence[Nic]) -> Machine:
    numbered = (msgspec.structs.replace(nic, index=index) for index, nic in enumerate(nics))
    return msgspec.structs.replace(machine, nics=tuple(numbered))


def _interface_of(nic: Nic) -> str:
    """Return the interface of a NIC: itself, or the one behind an RDMA port, or ""."""
    if FILES.has(f"sys/class/net/{nic.name}") or nic.name in dict(socket.if_nameindex()).values():
        return nic.name
    behind = f"sys/class/infiniband/{nic.name}/device/net"
    entries = FILES.entries(behind)
    ports = {name: FILES.text(f"{behind}/{name}/dev_port") for name in entries}
    port_index = str(max(nic.port - 1, 0))
    return next(
        (name for name in entries if ports[name] == port_index), entries[0] if entries else ""
    )
