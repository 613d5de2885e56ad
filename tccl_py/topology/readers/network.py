"""The host's network ports as NCCL's InfiniBand and socket transports would see them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tccl_py.topology.readers.busid import normal_bus_id
from tccl_py.topology.readers.sysfs import integer_in, read_word

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
