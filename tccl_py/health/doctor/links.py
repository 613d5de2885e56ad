"""PCIe links that run below what both of their ends can do."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tccl_py.health.doctor.findings import Finding, Unseen, listed
from tccl_py.health.doctor.host import Host

_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) GT/s", re.ASCII)
_UNKNOWN_WIDTHS = (0, 255)
_SYSFS = "Linux, ABI/testing/sysfs-bus-pci: current_link_speed, current_link_width"
_RESEAT = "reseat the card, look at its riser or cable, and at how the board shares lanes"


def check_links(host: Host) -> Iterator[Finding | Unseen]:
    """Links of GPUs, and of the switches above them, by width and generation."""
    gpus = host.gpus()
    for gpu in gpus:
        above = host.ports_above(gpu)
        if above:
            yield from _width(host, gpu, above[-1], host.gpu_name(gpu))
            yield from _slot(host, gpu, above[-1])
    uplinks = {switch: port for gpu in gpus for port, switch in _uplinks(host, gpu)}
    for switch, port in uplinks.items():
        yield from _width(host, switch, port, f"the switch at {switch}")
        yield from _uplink_speed(host, switch, port)
    if any(host.pci(gpu, "current_link_speed") for gpu in gpus):
        yield Unseen(
            check="links",
            what="the PCIe generation that GPUs run at under load",
            why="at rest they lower it to save power; `tccl measure` says so if it stays low",
        )


def _uplinks(host: Host, gpu: str) -> Iterator[tuple[str, str]]:
    """(port above, switch) for each link between a switch and what is above it."""
    ports = host.ports_above(gpu)
    # A root port, then a switch's two ports each: the links above upstream ports are cables or
    # lanes, those between the two ports of one switch are inside the chip.
    for place in range(1, len(ports) - 1, 2):
        yield ports[place - 1], ports[place]


def _width(host: Host, device: str, above: str, who: str) -> Iterator[Finding]:
    now = _lanes(host, device, "current_link_width")
    best = min(
        (w for end in (device, above) if (w := _lanes(host, end, "max_link_width"))), default=0
    )
    if 0 < now < best:
        yield Finding(
            severity="slow",
            check="links",
            what=f"a PCIe link runs on {now} lanes, and both ends have {best}",
            where=f"{who}, below {above}",
            why=f"it carries {now}/{best} of what it could, in every ring",
            source=_SYSFS,
            mend=_RESEAT,
        )


def _slot(host: Host, gpu: str, above: str) -> Iterator[Finding]:
    own, slot = (_speed(host, end, "max_link_speed") for end in (gpu, above))
    if 0 < slot < own:
        yield Finding(
            severity="note",
            check="links",
            what=f"the slot does {slot:g} GT/s, the GPU {own:g}",
            where=f"{host.gpu_name(gpu)}, below {above}",
            why="the slower end counts; a lower setting in the BIOS can be the reason",
            source=_SYSFS,
            mend="set the slot's link speed to Auto in the BIOS, if the board can do more",
        )


def _uplink_speed(host: Host, switch: str, above: str) -> Iterator[Finding]:
    now = _speed(host, switch, "current_link_speed")
    best = min(
        (s for end in (switch, above) if (s := _speed(host, end, "max_link_speed"))), default=0
    )
    if 0 < now < best:
        yield Finding(
            severity="slow",
            check="links",
            what=f"a PCIe link runs at {now:g} GT/s, and both ends do {best:g}",
            where=f"the switch at {switch}, below {above}",
            why="all GPUs below the switch share it; unlike a GPU's own it does not slow at rest",
            source=_SYSFS,
            mend=_RESEAT + "; then look at the link speed that the BIOS sets",
        )


def _lanes(host: Host, device: str, name: str) -> int:
    text = host.pci(device, name)
    width = int(text) if re.fullmatch("[0-9]{1,3}", text, re.ASCII) else 0
    return 0 if width in _UNKNOWN_WIDTHS else width


def _speed(host: Host, device: str, name: str) -> float:
    found = _SPEED.match(host.pci(device, name))
    return float(found[1]) if found else 0.0


def check_peers(host: Host) -> Iterator[Finding | Unseen]:
    """Pairs of GPUs that the driver calls incapable of direct access; and GPU-direct for NICs."""
    yield from _peer_access(host)
    cards = host.rdma_cards()
    if cards and host.gpus() and not _offers_gpu_memory(host):
        yield Finding(
            severity="slow",
            check="peers",
            what="RDMA cards cannot reach GPU memory: nvidia-peermem is not loaded",
            where=listed(list(cards)),
            why="what goes between nodes takes a detour over host memory",
            source="NCCL user guide, GPU troubleshooting: GPU-to-NIC communication needs it",
            mend="modprobe nvidia-peermem (as root, at each boot: a line nvidia-peermem in "
            "/etc/modules-load.d/nvidia-peermem.conf)",
        )


def _peer_access(host: Host) -> Iterator[Finding | Unseen]:
    if host.driver.unseen:
        if len(host.gpus()) > 1:
            what = "which pairs of GPUs can do P2P"
            yield Unseen(check="peers", what=what, why=host.driver.unseen)
        return
    without = [
        f"{fact.source}-{fact.target}"
        for fact in host.driver.peer_access
        if not fact.supported and fact.source < fact.target
    ]
    if not without:
        return
    geforce = any("GeForce" in gpu.name for gpu in host.driver.gpus)
    yield Finding(
        severity="note" if geforce else "slow",
        check="peers",
        what="the driver allows no P2P between some GPUs",
        where=f"pairs {listed(without)}",
        why="NCCL moves their data through host memory" + ", as on all GeForce cards" * geforce,
        source="NVML, P2P status (nvidia-smi topo -p2p w); NCCL asks it for each pair",
        mend="" if geforce else "look for ACS and IOMMU above, and for P2P in the driver's options",
    )


def _offers_gpu_memory(host: Host) -> bool:
    """By nvidia-peermem, or by DMA-BUF: the open driver and Linux 5.12."""
    if any(host.has(f"sys/module/{name}") for name in ("nvidia_peermem", "nv_peer_mem")):
        return True
    opened = "Open Kernel Module" in host.text("proc/driver/nvidia/version")
    release = re.match(r"([0-9]{1,3})\.([0-9]{1,3})", host.text("proc/sys/kernel/osrelease"))
    return opened and release is not None and (int(release[1]), int(release[2])) >= (5, 12)
