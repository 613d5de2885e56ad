"""A host's files; the PCI tree, NUMA nodes and network cards of sysfs, as NCCL reads them; LLDP.

Source of the walk and of the link rates: ncclTopoGetXmlFromSys, NCCL 2.30 graph/xml.cc. Of what
systemd-networkd has saved of LLDP: link_lldp_save (networkd-lldp-rx.c of systemd 255), a frame
after its size in 8 bytes; IEEE 802.1AB, a frame's fields, each after 7 bits of kind and 9 of
length.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Literal

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import reading
from tccl_py.model.machine import Nic, NumaNode, PciBridge, PciLink

_BUS_ID = re.compile(
    r"([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-9a-fA-F])", re.ASCII
)
_SHORT_BUS_ID = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", re.ASCII)
"""NCCL's bus ids in a path; longer domains look to it like the CPU."""
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9]{0,3})?) GT/s", re.ASCII)
_GIGABITS = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,3})?) Gb/sec", re.ASCII)
_MAX_BYTES = 64 * 1024
_MAX_ENTRIES = 10_000
_ARCHITECTURES = {"aarch64": "arm64", "ppc64le": "ppc64"}  # Kernel's -> NCCL's
_DMA_BUF_SINCE = (5, 12)
PREFIX_VARIABLE = "NCCL_IB_SUBNET_PREFIX_LEN"
PREFIX_BITS = 24
"""The bits by which NCCL compares addresses, whatever an interface's mask is."""
_MAX_GIDS = 256
_RDMA = "sys/class/infiniband"
DEVICES = "sys/bus/pci/devices"
_NODES = "sys/devices/system/node"


def normal_bus_id(text: str) -> str | None:
    """Return the canonical spelling of a bus id (domains of any width); None for other text."""
    match = _BUS_ID.fullmatch(text)
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


def bus_order(bus_id: str) -> tuple[int, ...]:
    """Return the sort key of a bus id: NVML counts GPUs in this order."""
    return tuple(int(part, 16) for part in re.split(r"[:.]", bus_id))


@dataclass(frozen=True, kw_only=True)
class HostFiles:
    """Files of a host below `root`, which has its `sys`, `proc` and `etc`.

    Hostile files do no harm: only regular files are read, each up to a limit, and no link leads
    out of the root.
    """

    root: Path = Path("/")

    def real(self, name: str | Path) -> Path | None:
        """Return a path of the host with links resolved; None if missing or outside the root.

        A name is relative to the root; a Path is as returned here, or below such a path.
        """
        try:
            place = name if isinstance(name, Path) else self.root / name.lstrip("/")
            resolved = place.resolve(strict=True)
            root = self.root.resolve()
        except (OSError, RuntimeError, ValueError):
            return None
        return resolved if resolved.is_relative_to(root) else None

    def data(self, name: str | Path, *, limit: int = _MAX_BYTES) -> bytes | None:
        """Return the first bytes of a regular file; None if there is none or it is unreadable."""
        path = self.real(name)
        if path is None:
            return None
        try:
            with reading(path) as handle:
                return handle.read(limit)
        except InputError:
            return None

    def text(self, name: str | Path) -> str:
        """Return a file's text, stripped; "" if unreadable."""
        return (self.data(name) or b"").decode("utf-8", "replace").strip()

    def number(self, name: str | Path) -> int | None:
        """Return the whole number in a file, or None."""
        return _integer(self.text(name))

    def entries(self, name: str) -> tuple[str, ...]:
        """Return the sorted names in a directory; empty if unreadable."""
        path = self.real(name)
        try:
            names = sorted(entry.name for entry in path.iterdir()) if path is not None else []
        except OSError:
            return ()
        return tuple(names[:_MAX_ENTRIES])

    def has(self, name: str | Path) -> bool:
        """Return whether a file or directory exists."""
        return self.real(name) is not None

    def pci_link(self, device: str | Path, which: Literal["max", "current"]) -> PciLink:
        """Return a link as a device, by bus id or path, tells it; None where it tells nothing."""
        place = device if isinstance(device, Path) else self.real(f"{DEVICES}/{device}")
        if place is None:
            return PciLink()
        width = self.number(place / f"{which}_link_width") or 0
        return PciLink(
            speed_gts=self.link_speed(place, which),
            # The kernel writes 255 for an unknown width.
            width=width if 0 < width <= 32 else None,
        )

    def link_speed(self, place: Path, which: Literal["max", "current"]) -> float | None:
        """Return a link's speed in GT/s as the device at a path tells it, or None."""
        match = _SPEED.match(self.text(place / f"{which}_link_speed"))
        return float(match[1]) or None if match else None

    def numa_nodes(self) -> tuple[int, ...]:
        """Return the NUMA nodes that have CPUs (not GPU or CXL memory), in order."""
        names = (name for name in self.entries(_NODES) if re.fullmatch("node[0-9]{1,5}", name))
        used = (name for name in names if self.text(f"{_NODES}/{name}/cpulist"))
        return tuple(sorted(int(name[4:]) for name in used))

    def sockets_of(self, node: int) -> list[int]:
        """Return the sockets of a NUMA node, by the first CPU of each range."""
        ranges = self.text(f"{_NODES}/node{node}/cpulist")
        cpus = re.findall(r"(?:^|,)([0-9]{1,6})", ranges, re.ASCII)
        places = (f"sys/devices/system/cpu/cpu{cpu}/topology" for cpu in cpus)
        ids = (self.number(f"{place}/physical_package_id") for place in places)
        return [package for package in ids if package is not None and package >= 0]

    def kernel(self) -> str:
        """Return the kernel's release."""
        return self.text("proc/sys/kernel/osrelease")

    def offers_gpu_memory(self) -> bool:
        """Return whether a loaded module lets RDMA NICs reach GPU memory."""
        if any(self.has(f"sys/module/{name}") for name in ("nvidia_peermem", "nv_peer_mem")):
            return True
        opened = "Open Kernel Module" in self.text("proc/driver/nvidia/version")
        numbers = re.match(r"([0-9]{1,3})\.([0-9]{1,3})", self.kernel())
        release = tuple(map(int, numbers.groups())) if numbers else (0, 0)
        return opened and release >= _DMA_BUF_SINCE


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII) else None


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A PCI device's place: the bridge above ("" if none) and the system's NUMA node."""

    bridge: str
    numa_id: int
    link: PciLink


@dataclass(kw_only=True)
class PciTree:
    """The part of the PCI tree that has been walked; grows with each `attach`."""

    files: HostFiles
    bridges: dict[str, tuple[Attachment, Path]] = field(default_factory=dict)

    def attach(self, bus_id: str) -> Attachment:
        """Walk up from a device, noting the bridges above it; NUMA node -1 if not in sysfs."""
        path = self.files.real(f"{DEVICES}/{bus_id}")
        if path is None:
            return Attachment(bridge="", numa_id=-1, link=PciLink())
        return self._walk(path)

    def _walk(self, path: Path) -> Attachment:
        # The bridge NCCL shows is a switch's port towards the CPU, never a root port.
        upper, link = path.parent.parent, self._link(path)
        if not all(_SHORT_BUS_ID.fullmatch(port.name) for port in (path.parent, upper)):
            number = self.files.number(path / "numa_node")
            node = -1 if number is None else max(number, -1)
            return Attachment(bridge="", numa_id=node, link=link)
        above = self._walk(upper)
        bus_id = normal_bus_id(upper.name) or upper.name
        self.bridges[bus_id] = (above, upper)
        return Attachment(bridge=bus_id, numa_id=above.numa_id, link=link)

    def build(self, numa_names: dict[int, str]) -> tuple[PciBridge, ...]:
        """Return the bridges; the uppermost hang from the NUMA nodes of these names."""
        names = ("vendor", "device", "subsystem_vendor", "subsystem_device")
        return tuple(
            PciBridge(
                bus_id=bus_id,
                parent=place.bridge or numa_names[place.numa_id],
                link=place.link,
                **{name: self.files.text(path / name) for name in names},
            )
            for bus_id, (place, path) in sorted(self.bridges.items())
        )

    def _link(self, path: Path) -> PciLink:
        """Return the lesser speed and width of a device and the port above; None if unknown."""
        ends = (path, path.parent)
        speeds = filter(None, [self.files.link_speed(end, "max") for end in ends])
        # NCCL takes one end's speed if the other is silent, but no width unless both have one, and
        # the kernel's 255 for an unknown width as it stands.
        width = min(self.files.number(end / "max_link_width") or 0 for end in ends)
        width_or_none = width if 0 < width <= 255 else None
        return PciLink(speed_gts=min(speeds, default=None), width=width_or_none)


def numa_nodes(used: Iterable[int], files: HostFiles) -> tuple[NumaNode, ...]:
    """Return the system's NUMA nodes; -1 (if `used`) joins them, or replaces a single one."""
    system, indices = files.numa_nodes(), set(used)
    if -1 not in indices or len(system) > 1:
        indices.update(system)
    # The first processor's entries.
    first = files.text("proc/cpuinfo").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    cpu = {name.strip(): value.strip() for name, colon, value in pairs if colon}
    arch = platform.machine()
    only = system[0] if len(system) == 1 else -1
    return tuple(
        NumaNode(
            index=index,
            numa_id=numa_id,
            arch=_ARCHITECTURES.get(arch, arch),
            vendor=cpu.get("vendor_id", ""),
            family=_integer(cpu.get("cpu family", "")),
            model=_integer(cpu.get("model", "")),
            affinity=files.text(f"{_NODES}/node{numa_id}/cpumap"),
            socket=next(iter(files.sockets_of(only if numa_id == -1 else numa_id)), None),
        )
        for index, numa_id in enumerate(sorted(indices or {-1}))
    )


def network_ports(files: HostFiles) -> tuple[Nic, ...]:
    """Return RDMA ports, then Ethernet interfaces of other cards; each group in natural order.

    Inactive ports are left out, as by NCCL, and virtual interfaces (bridges, tunnels, `lo`). NCCL
    uses a single transport, so the first group has NCCL's device numbers on a host with RDMA. NICs
    have no parent yet; `gdr` of RDMA ports depends on the host's modules too.
    """
    rdma = list(_rdma_ports(files))
    cards = {_card(port) for port in rdma if port.bus_id}
    interfaces = _interfaces(files)
    ports = rdma + [port for port in interfaces if not port.bus_id or _card(port) not in cards]
    return tuple(msgspec.structs.replace(port, index=i) for i, port in enumerate(ports))


def _card(port: Nic) -> str:
    return port.bus_id.rpartition(".")[0]


def _in_order(names: Iterable[str]) -> list[str]:
    def natural(name: str) -> list[tuple[int, str]]:
        pieces = re.findall(r"[0-9]+|[^0-9]+", name)
        return [(int(p), "") if p.isdecimal() else (-1, p) for p in pieces]

    return sorted(names, key=natural)


def _bus_id(files: HostFiles, entry: str) -> str:
    device = files.real(f"{entry}/device")
    return (normal_bus_id(device.name) or "") if device is not None else ""


def _rdma_ports(files: HostFiles) -> Iterator[Nic]:
    for port in rdma_ports(files):
        if port.active:
            guid = files.text(f"{_RDMA}/{port.name}/node_guid").replace(":", "")
            yield Nic(
                index=0,
                name=port.name,
                parent="",
                bus_id=port.bus_id,
                speed_mbps=port.mbps,
                port=port.number,
                guid=f"0x{guid}" if guid else "",
                gdr=True,
            )


def _interfaces(files: HostFiles) -> Iterator[Nic]:
    base = "sys/class/net"
    for name in _in_order(files.entries(base)):
        entry = f"{base}/{name}"
        physical = name != "lo" and files.has(f"{entry}/device")
        if physical and files.text(f"{entry}/operstate") != "down":
            speed = max(files.number(f"{entry}/speed") or 0, 0)
            bus_id = _bus_id(files, entry)
            yield Nic(index=0, name=name, parent="", bus_id=bus_id, speed_mbps=speed)


class Gid(msgspec.Struct, frozen=True, kw_only=True):
    """An address of an RDMA port that is not all zeros."""

    index: int
    """Its place in the port's table, as NCCL_IB_GID_INDEX names it."""
    version: str
    """`RoCE v1`, `RoCE v2`, or "" for InfiniBand or where the kernel does not tell."""
    address: IPv6Address


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an RDMA NIC, active or not."""

    name: str
    number: int
    bus_id: str
    """"" for a virtual one."""
    board: str
    """What ports of equal cards share: the type and the board's id."""
    interface: str
    """The network interface, or ""."""
    ethernet: bool
    state: str
    """`ACTIVE`, `DOWN`, `INIT` or `ARMED`; "" if unknown."""
    mbps: int
    """The present rate in Mbit/s, 0 if unknown."""
    mtu: int | None
    """The interface's, in bytes."""
    gids: tuple[Gid, ...]

    @property
    def active(self) -> bool:
        """True if NCCL may use it."""
        return self.state == "ACTIVE"

    @property
    def addresses(self) -> tuple[int, ...]:
        """The IPv4 addresses of RoCE: an address has a GID for each version."""
        mapped = (gid.address.ipv4_mapped for gid in self.gids)
        return tuple(dict.fromkeys(int(address) for address in mapped if address))

    def subnets(self, bits: int = PREFIX_BITS) -> frozenset[str]:
        """Return the subnets of the addresses, as NCCL compares them."""
        shift = 32 - bits
        return frozenset(f"{IPv4Address(at >> shift << shift)}/{bits}" for at in self.addresses)


def rdma_ports(files: HostFiles) -> tuple[RdmaPort, ...]:
    """Return all ports of RDMA NICs, in natural order."""
    return tuple(
        _rdma_port(files, name, port)
        for name in _in_order(files.entries(_RDMA))
        for port in _in_order(files.entries(f"{_RDMA}/{name}/ports"))
        if re.fullmatch("[0-9]{1,5}", port, re.ASCII)
    )


def _rdma_port(files: HostFiles, name: str, port: str) -> RdmaPort:
    place = f"{_RDMA}/{name}/ports/{port}"
    interfaces = files.entries(f"{_RDMA}/{name}/device/net")
    # Cards with several ports in one function tell which is whose.
    own = [
        one for one in interfaces if files.number(f"sys/class/net/{one}/dev_port") == int(port) - 1
    ]
    interface = next(iter(own or interfaces), "")
    rate = _GIGABITS.match(files.text(f"{place}/rate"))
    board = (files.text(f"{_RDMA}/{name}/{fact}") for fact in ("hca_type", "board_id"))
    return RdmaPort(
        name=name,
        number=int(port),
        bus_id=_bus_id(files, f"{_RDMA}/{name}"),
        board=" ".join(filter(None, board)),
        interface=interface,
        ethernet=files.text(f"{place}/link_layer") == "Ethernet",
        state=files.text(f"{place}/state").rpartition(" ")[2],
        mbps=int(float(rate[1]) * 1000) if rate else 0,
        mtu=files.number(f"sys/class/net/{interface}/mtu") if interface else None,
        gids=tuple(_gids(files, place)),
    )


def _gids(files: HostFiles, place: str) -> Iterator[Gid]:
    for name in _in_order(files.entries(f"{place}/gids"))[:_MAX_GIDS]:
        version = files.text(f"{place}/gid_attrs/types/{name}").removeprefix("IB/")
        with suppress(ValueError):
            address = IPv6Address(files.text(f"{place}/gids/{name}"))
            if int(address):
                yield Gid(index=int(name), version=version, address=address)


# The other ends of interfaces' cables, by LLDP.


_FOLDER = "run/systemd/netif/lldp"
_SIZE, _ETHERNET = 8, 14
_PORT, _PORT_DESCRIPTION, _SYSTEM = 2, 4, 5
_MAC = 3
"""The kind of a port's name that is an address."""


class Neighbour(msgspec.Struct, frozen=True):
    """A port of another system; "" is unknown."""

    system: str
    port: str


def neighbours(files: HostFiles, interface: str) -> tuple[Neighbour, ...]:
    """Return the ports that an interface hears; none without systemd-networkd's LLDP."""
    index = files.number(f"sys/class/net/{interface}/ifindex")
    data = (files.data(f"{_FOLDER}/{index}") or b"") if index is not None else b""
    heard, at = list[Neighbour](), 0
    while len(data) > at + _SIZE:
        end = at + _SIZE + int.from_bytes(data[at : at + _SIZE], "little")
        fields = dict(_fields(data[at + _SIZE + _ETHERNET : end]))
        named = fields.get(_PORT, b"")
        port = fields.get(_PORT_DESCRIPTION, b"") if named[:1] == bytes([_MAC]) else named[1:]
        heard.append(Neighbour(_text(fields.get(_SYSTEM, b"")), _text(port)))
        at = end
    return tuple(heard)


def _fields(frame: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while len(frame) >= at + 2 and frame[at] >> 1:
        length = (frame[at] & 1) << 8 | frame[at + 1]
        yield frame[at] >> 1, frame[at + 2 : at + 2 + length]
        at += 2 + length


def _text(name: bytes) -> str:
    text = name.decode("utf-8", "replace").strip("\0 ")
    return text if text.isprintable() else ""
