"""What Linux tells of the PCI tree, NUMA nodes and network cards, read as NCCL reads it.

Source of the walk and of the link rates: ncclTopoGetXmlFromSys, NCCL 2.30 graph/xml.cc.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tccl_py.model.machine import NumaNode, PciBridge, PciLink, normal_bus_id

_SHORT_BUS_ID = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", re.ASCII)
"""What NCCL takes for a bus id in a path; longer domains look to it like the CPU."""
_SPEED = re.compile(r"([0-9.]{1,6}) GT/s", re.ASCII)
_UNKNOWN_WIDTHS = (0, 255)
_MAX_TEXT = 4096
_ARCHITECTURES = {"aarch64": "arm64", "ppc64le": "ppc64"}
"""What Python and the kernel call what NCCL calls otherwise."""


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """Where a PCI device hangs: the bridge above it ("" if none) and its system NUMA node."""

    bridge: str
    numa_id: int
    link: PciLink


@dataclass(frozen=True, kw_only=True)
class RawBridge:
    """A bridge with the bridge above it ("" if none) and the system NUMA node it belongs to."""

    bus_id: str
    above: str
    numa_id: int
    path: Path


@dataclass(kw_only=True)
class PciTree:
    """The part of the PCI tree that has been walked; grows with each `attach`."""

    sysfs: Path
    bridges: dict[str, RawBridge] = field(default_factory=dict)

    def attach(self, bus_id: str) -> Attachment:
        """Walk up from a device, noting the bridges above it.

        A device that sysfs does not show hangs from NUMA node -1, as NCCL has it.
        """
        path = self.device_path(bus_id)
        if path is None:
            return Attachment(bridge="", numa_id=-1, link=PciLink())
        above, numa_id = self._walk(path)
        return Attachment(bridge=above, numa_id=numa_id, link=read_link(path))

    def device_path(self, bus_id: str) -> Path | None:
        """The real path of a device below sysfs, or None."""
        link = self.sysfs / "bus" / "pci" / "devices" / bus_id
        return link.resolve() if link.exists() else None

    def _walk(self, path: Path) -> tuple[str, int]:
        """The bridge above `path` ("" at a root) and the NUMA node of the tree's top."""
        upper = bridge_above(path)
        if upper is None:
            return "", _numa_id(path)
        above, numa_id = self._walk(upper)
        bus_id = normal_bus_id(upper.name) or upper.name
        self.bridges[bus_id] = RawBridge(bus_id=bus_id, above=above, numa_id=numa_id, path=upper)
        return bus_id, numa_id

    def built(self, numa_names: dict[int, str]) -> tuple[PciBridge, ...]:
        """The bridges, those without one above hanging from the NUMA node of that name."""
        return tuple(
            PciBridge(
                bus_id=raw.bus_id,
                parent=raw.above or numa_names[raw.numa_id],
                link=read_link(raw.path),
                vendor=read_word(raw.path / "vendor"),
                device=read_word(raw.path / "device"),
                subsystem_vendor=read_word(raw.path / "subsystem_vendor"),
                subsystem_device=read_word(raw.path / "subsystem_device"),
            )
            for raw in sorted(self.bridges.values(), key=lambda raw: raw.bus_id)
        )


def bridge_above(path: Path) -> Path | None:
    """The bridge NCCL shows above a device: two levels up, or none if the root comes first.

    A switch is two bridges in sysfs, the port towards the device and the one towards the CPU; NCCL
    shows the second. A root port stands alone and is left out.
    """
    port = path.parent
    if _SHORT_BUS_ID.fullmatch(port.name) is None:
        return None
    upper = port.parent
    return upper if _SHORT_BUS_ID.fullmatch(upper.name) else None


def read_link(path: Path) -> PciLink:
    """The lesser of what a device and the port above it can do; None where either is silent."""
    speeds = []
    for end in (path, path.parent):
        match = _SPEED.match(read_word(end / "max_link_speed"))
        speeds.append(_positive(match[1]) if match else None)
    widths = [integer_in(end / "max_link_width") or 0 for end in (path, path.parent)]
    known = [speed for speed in speeds if speed is not None]
    # NCCL takes one end's speed if the other is silent, but no width unless both tell it.
    width = 0 if 0 in widths else min(widths)
    return PciLink(
        speed_gts=min(known, default=None),
        width=width if width not in _UNKNOWN_WIDTHS and 0 < width <= 32 else None,
    )


def _numa_id(path: Path) -> int:
    """A device's NUMA node; -1 if the system does not know it, which is also what it writes."""
    told = integer_in(path / "numa_node")
    return -1 if told is None or told < 0 else told


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value > 0 else None


def read_word(path: Path) -> str:
    """A small file's content without the newline; "" if it is missing or unreadable."""
    try:
        with path.open("rb") as handle:
            return handle.read(_MAX_TEXT).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def integer_in(path: Path) -> int | None:
    """The integer in a small file, or None."""
    text = read_word(path)
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text, re.ASCII) else None


def system_numa_ids(sysfs: Path) -> tuple[int, ...]:
    """The system's NUMA nodes that have CPUs (not those of GPU or CXL memory), in order."""
    found = []
    for node in (sysfs / "devices" / "system" / "node").glob("node[0-9]*"):
        number = node.name[len("node") :]
        if number.isdecimal() and read_word(node / "cpulist"):
            found.append(int(number))
    return tuple(sorted(found))


def numa_nodes(used: Iterable[int], *, sysfs: Path, proc: Path) -> tuple[NumaNode, ...]:
    """The machine's NUMA nodes: the system's, and -1 if devices report that (`used`).

    On a system with one node, which virtual machines show, -1 stands for it and takes its place.
    """
    system, wanted = system_numa_ids(sysfs), set(used)
    if -1 not in wanted or len(system) > 1:
        wanted.update(system)
    vendor, family, model = _cpu_model(read_cpuinfo(proc))
    arch = platform.machine()
    return tuple(
        NumaNode(
            index=index,
            numa_id=numa_id,
            arch=_ARCHITECTURES.get(arch, arch),
            vendor=vendor,
            family=family,
            model=model,
            affinity=read_word(_node_path(sysfs, numa_id) / "cpumap"),
            socket=_socket(sysfs, numa_id, system),
        )
        for index, numa_id in enumerate(sorted(wanted or {-1}))
    )


def _node_path(sysfs: Path, numa_id: int) -> Path:
    return sysfs / "devices" / "system" / "node" / f"node{numa_id}"


def _socket(sysfs: Path, numa_id: int, system: tuple[int, ...]) -> int | None:
    """The physical package of a node's first CPU."""
    if numa_id == -1 and len(system) == 1:
        numa_id = system[0]
    first = re.match(r"[0-9]+", read_word(_node_path(sysfs, numa_id) / "cpulist"))
    if first is None:
        return None
    cpu = sysfs / "devices" / "system" / "cpu" / f"cpu{first[0]}"
    package = integer_in(cpu / "topology" / "physical_package_id")
    return package if package is not None and package >= 0 else None


def read_cpuinfo(proc: Path) -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo."""
    entries: dict[str, str] = {}
    for line in read_word(proc / "cpuinfo").splitlines():
        name, colon, value = line.partition(":")
        if not colon:
            break
        entries[name.strip()] = value.strip()
    return entries


def _cpu_model(entries: dict[str, str]) -> tuple[str, int | None, int | None]:
    def number(name: str) -> int | None:
        text = entries.get(name, "")
        return int(text) if re.fullmatch(r"[0-9]{1,6}", text, re.ASCII) else None

    return entries.get("vendor_id", ""), number("cpu family"), number("model")


# The host's network ports as NCCL's InfiniBand and socket transports would see them.


_GIGABITS = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,3})?) Gb/sec", re.ASCII)
_ACTIVE = "ACTIVE"
_SELF_LOOP = "lo"


@dataclass(frozen=True, kw_only=True)
class Port:
    """A network port; `bus_id` is "" for what is no PCI device (virtio, USB)."""

    name: str
    bus_id: str
    speed_mbps: int
    port: int = 0
    guid: str = ""
    rdma: bool = False


def network_ports(sysfs: Path) -> tuple[Port, ...]:
    """RDMA ports, then Ethernet interfaces of cards without one; each group in natural order.

    Ports that are not active and interfaces that are down are left out: NCCL does not count them.
    NCCL uses one transport, so on a host with RDMA ports its device numbers are those of the first
    group. Virtual interfaces (bridges, tunnels, `lo`) have no device and are left out.
    """
    rdma = _rdma_ports(sysfs / "class" / "infiniband")
    cards = {_card(port.bus_id) for port in rdma if port.bus_id}
    others = [
        port
        for port in _interfaces(sysfs / "class" / "net")
        if not port.bus_id or _card(port.bus_id) not in cards
    ]
    return (*rdma, *others)


def _card(bus_id: str) -> str:
    """A bus id without the function, which tells the ports of a card apart."""
    return bus_id.rpartition(".")[0]


def _natural(path: Path) -> list[tuple[int, str]]:
    pieces = re.findall(r"[0-9]+|[^0-9]+", path.name)
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in pieces]


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir(), key=_natural)
    except OSError:
        return []


def _bus_id(entry: Path) -> str:
    """The PCI device behind a class entry, or "" if it is none."""
    device = entry / "device"
    return (normal_bus_id(device.resolve().name) or "") if device.exists() else ""


def _rdma_ports(directory: Path) -> list[Port]:
    ports = []
    for entry in _entries(directory):
        for place in _entries(entry / "ports"):
            if _ACTIVE not in read_word(place / "state") or not place.name.isdecimal():
                continue
            rate = _GIGABITS.match(read_word(place / "rate"))
            guid = read_word(entry / "node_guid").replace(":", "")
            ports.append(
                Port(
                    name=entry.name,
                    bus_id=_bus_id(entry),
                    speed_mbps=int(float(rate[1]) * 1000) if rate else 0,
                    port=int(place.name),
                    guid=f"0x{guid}" if guid else "",
                    rdma=True,
                )
            )
    return ports


def _interfaces(directory: Path) -> list[Port]:
    ports = []
    for entry in _entries(directory):
        physical = entry.name != _SELF_LOOP and (entry / "device").exists()
        if not physical or read_word(entry / "operstate") == "down":
            continue
        speed = integer_in(entry / "speed") or 0
        ports.append(Port(name=entry.name, bus_id=_bus_id(entry), speed_mbps=max(speed, 0)))
    return ports
