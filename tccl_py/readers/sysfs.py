"""The PCI tree, NUMA nodes and network cards of sysfs, read as NCCL reads them.

Source of the walk and of the link rates: ncclTopoGetXmlFromSys, NCCL 2.30 graph/xml.cc.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tccl_py.model.machine import Nic, NumaNode, PciBridge, PciLink, normal_bus_id

_SHORT_BUS_ID = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", re.ASCII)
"""NCCL's bus ids in a path; longer domains look to it like the CPU."""
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9]{0,3})?) GT/s", re.ASCII)
_GIGABITS = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,3})?) Gb/sec", re.ASCII)
_MAX_TEXT = 4096
_ARCHITECTURES = {"aarch64": "arm64", "ppc64le": "ppc64"}  # Kernel's -> NCCL's


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A PCI device's place: the bridge above ("" if none) and the system's NUMA node."""

    bridge: str
    numa_id: int
    link: PciLink


@dataclass(kw_only=True)
class PciTree:
    """The part of the PCI tree that has been walked; grows with each `attach`."""

    sysfs: Path
    bridges: dict[str, tuple[Attachment, Path]] = field(default_factory=dict)

    def attach(self, bus_id: str) -> Attachment:
        """Walk up from a device, noting the bridges above it; NUMA node -1 if not in sysfs."""
        link = self.sysfs / "bus" / "pci" / "devices" / bus_id
        if not link.exists():
            return Attachment(bridge="", numa_id=-1, link=PciLink())
        return self._walk(link.resolve())

    def _walk(self, path: Path) -> Attachment:
        upper = _bridge_above(path)
        if upper is None:
            told = integer_in(path / "numa_node")
            numa_id = -1 if told is None or told < 0 else told
            return Attachment(bridge="", numa_id=numa_id, link=_link(path))
        above = self._walk(upper)
        bus_id = normal_bus_id(upper.name) or upper.name
        self.bridges[bus_id] = (above, upper)
        return Attachment(bridge=bus_id, numa_id=above.numa_id, link=_link(path))

    def built(self, numa_names: dict[int, str]) -> tuple[PciBridge, ...]:
        """Return the bridges; the uppermost hang from the NUMA nodes of these names."""
        return tuple(
            PciBridge(
                bus_id=bus_id,
                parent=place.bridge or numa_names[place.numa_id],
                link=place.link,
                vendor=read_word(path / "vendor"),
                device=read_word(path / "device"),
                subsystem_vendor=read_word(path / "subsystem_vendor"),
                subsystem_device=read_word(path / "subsystem_device"),
            )
            for bus_id, (place, path) in sorted(self.bridges.items())
        )


def _bridge_above(path: Path) -> Path | None:
    """Return the bridge NCCL shows: a switch's port towards the CPU, never a root port."""
    port = path.parent
    shown = _SHORT_BUS_ID.fullmatch(port.name) and _SHORT_BUS_ID.fullmatch(port.parent.name)
    return port.parent if shown else None


def _link(path: Path) -> PciLink:
    """Return the lesser speed and width of a device and the port above; None if unknown."""
    ends = (path, path.parent)
    told = (_SPEED.match(read_word(end / "max_link_speed")) for end in ends)
    speeds = [float(match[1]) for match in told if match is not None and float(match[1]) > 0]
    # NCCL takes one end's speed if the other is silent, but no width unless both tell it. The
    # kernel writes 255 for an unknown width.
    width = min(integer_in(end / "max_link_width") or 0 for end in ends)
    return PciLink(speed_gts=min(speeds, default=None), width=width if 0 < width <= 32 else None)


def read_word(path: Path) -> str:
    """Return a small file's content without the newline; "" if it is missing or unreadable."""
    try:
        with path.open("rb") as handle:
            return handle.read(_MAX_TEXT).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def integer_in(path: Path) -> int | None:
    """Return the integer in a small file, or None."""
    return _integer(read_word(path))


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text, re.ASCII) else None


def system_numa_ids(sysfs: Path) -> tuple[int, ...]:
    """Return the system's NUMA nodes that have CPUs (not GPU or CXL memory), in order."""
    nodes = (sysfs / "devices" / "system" / "node").glob("node[0-9]*")
    numbers = (node.name[len("node") :] for node in nodes if read_word(node / "cpulist"))
    return tuple(sorted(int(number) for number in numbers if number.isdecimal()))


def numa_nodes(used: Iterable[int], *, sysfs: Path, proc: Path) -> tuple[NumaNode, ...]:
    """Return the system's NUMA nodes; -1 (if `used`) joins them, or replaces a single one."""
    system, wanted = system_numa_ids(sysfs), set(used)
    if -1 not in wanted or len(system) > 1:
        wanted.update(system)
    # The first processor's entries.
    first = read_word(proc / "cpuinfo").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    cpu = {name.strip(): value.strip() for name, colon, value in pairs if colon}
    arch = platform.machine()
    return tuple(
        NumaNode(
            index=index,
            numa_id=numa_id,
            arch=_ARCHITECTURES.get(arch, arch),
            vendor=cpu.get("vendor_id", ""),
            family=_integer(cpu.get("cpu family", "")),
            model=_integer(cpu.get("model", "")),
            affinity=read_word(_node_path(sysfs, numa_id) / "cpumap"),
            socket=_socket(sysfs, numa_id, system),
        )
        for index, numa_id in enumerate(sorted(wanted or {-1}))
    )


def _node_path(sysfs: Path, numa_id: int) -> Path:
    return sysfs / "devices" / "system" / "node" / f"node{numa_id}"


def _socket(sysfs: Path, numa_id: int, system: tuple[int, ...]) -> int | None:
    if numa_id == -1 and len(system) == 1:
        numa_id = system[0]
    first = re.match(r"[0-9]+", read_word(_node_path(sysfs, numa_id) / "cpulist"))
    if first is None:
        return None
    cpu = sysfs / "devices" / "system" / "cpu" / f"cpu{first[0]}"
    package = integer_in(cpu / "topology" / "physical_package_id")
    return package if package is not None and package >= 0 else None


def network_ports(sysfs: Path) -> tuple[Nic, ...]:
    """Return RDMA ports, then Ethernet interfaces of other cards; each group in natural order.

    Inactive ports are left out, as by NCCL, and virtual interfaces (bridges, tunnels, `lo`). NCCL
    uses a single transport, so the first group has NCCL's device numbers on a host with RDMA. NICs
    have no parent yet; `gdr` of RDMA ports depends on the host's modules too.
    """
    rdma = list(_rdma_ports(sysfs / "class" / "infiniband"))
    cards = {_card(port) for port in rdma if port.bus_id}
    others = _interfaces(sysfs / "class" / "net")
    ports = rdma + [port for port in others if not port.bus_id or _card(port) not in cards]
    return tuple(msgspec.structs.replace(port, index=i) for i, port in enumerate(ports))


def _card(port: Nic) -> str:
    return port.bus_id.rpartition(".")[0]


def _entries(directory: Path) -> list[Path]:
    def natural(path: Path) -> list[tuple[int, str]]:
        pieces = re.findall(r"[0-9]+|[^0-9]+", path.name)
        return [(int(p), "") if p.isdecimal() else (-1, p) for p in pieces]

    try:
        return sorted(directory.iterdir(), key=natural)
    except OSError:
        return []


def _bus_id(entry: Path) -> str:
    device = entry / "device"
    return (normal_bus_id(device.resolve().name) or "") if device.exists() else ""


def _rdma_ports(directory: Path) -> Iterator[Nic]:
    for entry in _entries(directory):
        for place in _entries(entry / "ports"):
            if "ACTIVE" not in read_word(place / "state") or not place.name.isdecimal():
                continue
            rate = _GIGABITS.match(read_word(place / "rate"))
            guid = read_word(entry / "node_guid").replace(":", "")
            yield Nic(
                index=0,
                name=entry.name,
                parent="",
                bus_id=_bus_id(entry),
                speed_mbps=int(float(rate[1]) * 1000) if rate else 0,
                port=int(place.name),
                guid=f"0x{guid}" if guid else "",
                gdr=True,
            )


def _interfaces(directory: Path) -> Iterator[Nic]:
    for entry in _entries(directory):
        physical = entry.name != "lo" and (entry / "device").exists()
        if physical and read_word(entry / "operstate") != "down":
            speed = max(integer_in(entry / "speed") or 0, 0)
            yield Nic(index=0, name=entry.name, parent="", bus_id=_bus_id(entry), speed_mbps=speed)
