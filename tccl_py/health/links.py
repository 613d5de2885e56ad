"""PCIe links that run below what both of their ends can do."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from tccl_py.health.host import Finding, GpuState, Host, Severity, Unseen, listed

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


# Access Control Services of PCI bridges, and the IOMMU: what turns direct traffic into detours.


_EXTENDED, _LENGTH = 0x100, 4096
_ACS = 0x000D
_REDIRECTS = {0x04: "request redirect", 0x08: "completion redirect", 0x20: "egress control"}
"""Bits of the ACS control register: PCI Express 5.0, 7.7.8.3."""
_MOST_CAPABILITIES = (_LENGTH - _EXTENDED) // 8
_NCCL = (
    "NCCL user guide, GPU troubleshooting: ACS and IO virtualization redirect all PCI "
    "point-to-point traffic to the CPU's root complex, which costs much or even hangs"
)
_ROOT_ONLY = "only root may read all of a bridge's configuration; run it as root"


def acs_control(config: bytes) -> int | None:
    """The ACS control register in a configuration space; 0 where there is no ACS.

    None if the extended part is missing, as for all but root, or makes no sense.
    """
    if len(config) <= _EXTENDED:
        # All 256 bytes and no more is a device on conventional PCI, as virtual machines have them.
        return 0 if len(config) == _EXTENDED else None
    at = _EXTENDED
    for _ in range(_MOST_CAPABILITIES):
        if at + 8 > len(config):
            return None
        header, _, control = struct.unpack_from("<IHH", config, at)
        if header == 0xFFFFFFFF:
            return None
        if header & 0xFFFF == _ACS:
            return int(control)
        # Offsets are multiples of four; 0, here or in an empty list, ends it.
        at = header >> 20 & 0xFFC
        if at < _EXTENDED:
            return 0
    return None


def check_acs(host: Host) -> Iterator[Finding | Unseen]:
    """Bridges above GPUs that send traffic between devices up to the CPU."""
    ports = dict.fromkeys(port for gpu in host.gpus() for port in host.ports_above(gpu))
    hidden, redirecting = [], []
    bits = 0
    for port in ports:
        config = host.data(f"sys/bus/pci/devices/{port}/config", limit=_LENGTH)
        control = acs_control(config or b"")
        if control is None:
            hidden.append(port)
        elif control & sum(_REDIRECTS):
            redirecting.append(port)
            bits |= control
    if hidden:
        yield Unseen(check="acs", what=f"ACS of the bridges {listed(hidden)}", why=_ROOT_ONLY)
    if redirecting and len(host.gpus()) + len(host.rdma_cards()) > 1:
        names = [name for bit, name in _REDIRECTS.items() if bits & bit]
        yield _redirecting(host, redirecting, names)


def _redirecting(host: Host, ports: list[str], names: list[str]) -> Finding:
    severity: Severity = "hang" if translating(host) is not False else "slow"
    return Finding(
        severity=severity,
        check="acs",
        what=f"ACS sends traffic between GPUs up to the CPU ({', '.join(names)})",
        where=f"bridges {listed(ports)}",
        why="GPUs below one switch no longer talk through it but through the CPU"
        + (", and any two of them through its IOMMU, which may stop them for good")
        * (severity == "hang"),
        source=_NCCL,
        mend="; ".join(f"setpci -s {port} ECAP_ACS+0x6.w=0000" for port in ports)
        + " (as root, after each boot; not on a hypervisor, whose guests need ACS)",
    )


def translating(host: Host) -> bool | None:
    """Whether an IOMMU translates what GPUs send; None if that cannot be seen."""
    types = [kind for gpu in host.gpus() if (kind := _group_type(host, gpu))]
    if types:
        return any(kind.startswith("DMA") for kind in types)
    if not host.entries("sys/class/iommu"):
        return False if host.has("sys/bus/pci/devices") else None
    return None


def _group_type(host: Host, bus_id: str) -> str:
    """`identity`, `DMA` or `DMA-FQ`, the domain that a device is in; "" if it is in none."""
    link = host.real(f"sys/bus/pci/devices/{bus_id}/iommu_group")
    return host.text(f"sys/kernel/iommu_groups/{link.name}/type") if link else ""


def check_iommu(host: Host) -> Iterator[Finding | Unseen]:
    """An IOMMU that translates addresses of GPUs."""
    state = translating(host)
    if state:
        gpus = [
            host.gpu_name(gpu) for gpu in host.gpus() if _group_type(host, gpu).startswith("DMA")
        ]
        yield _iommu("slow", "the IOMMU translates what GPUs send", listed(gpus))
    elif state is None and host.gpus() and "iommu=pt" not in host.kernel_options():
        yield Unseen(
            check="iommu",
            what="whether the IOMMU translates what GPUs send",
            why="/sys/kernel/iommu_groups does not tell; `dmesg | grep -i iommu` does",
        )


def _iommu(severity: Severity, what: str, where: str) -> Finding:
    return Finding(
        severity=severity,
        check="iommu",
        what=what,
        where=where,
        why="direct traffic between GPUs, and to NICs, goes up to the CPU and its tables",
        source=_NCCL + "; Linux, kernel-parameters: iommu=pt leaves devices untranslated",
        mend="add iommu=pt to the kernel's command line (GRUB_CMDLINE_LINUX in /etc/default/grub, "
        "then update-grub or grub2-mkconfig) and boot; or turn the IOMMU off in the BIOS",
    )


# GPUs as the driver sees them at rest: persistence mode, clocks, heat, other processes.


def check_gpus(host: Host) -> Iterator[Finding | Unseen]:
    """What NVML complains of, and GPUs whose driver is unloaded between jobs."""
    state = host.driver
    if not host.gpus():
        yield Unseen(check="gpus", what="GPUs", why="no NVIDIA GPU is here, or none is shown")
        return
    if state.unseen:
        what = "clocks, heat, persistence mode and other processes of the GPUs"
        yield Unseen(check="gpus", what=what, why=state.unseen)
        return
    off = [f"GPU {gpu.index}" for gpu in state.gpus if gpu.persistence is False]
    if off:
        yield Finding(
            severity="note",
            check="gpus",
            what="persistence mode is off",
            where=listed(off),
            why="the driver lets go of a GPU that nobody uses: jobs start slower, and settings "
            "such as clocks and power limits are lost",
            source="NVIDIA, Driver Persistence",
            mend="systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1, as root)",
        )
    for gpu in state.gpus:
        if gpu.clock_mhz is not None:
            yield _held(gpu)
        for text in gpu.complaints:
            yield _complaint(gpu.index, text)


def _held(gpu: GpuState) -> Finding:
    return Finding(
        severity="note",
        check="gpus",
        what=f"its clock is held at {gpu.clock_mhz} of {gpu.clock_max_mhz} MHz by a setting",
        where=f"GPU {gpu.index}",
        why="steady for measurements, but a plan then holds for this clock only",
        source="NVML (nvidia-smi -q -d CLOCK, Applications Clocks)",
        mend=f"nvidia-smi -i {gpu.index} -rac (as root)",
    )


def _complaint(index: int, text: str) -> Finding:
    what, _, mend = text.partition("; ")
    prefix = f"GPU {index}: "
    return Finding(
        severity="slow",
        check="gpus",
        what=what.removeprefix(prefix),
        where=f"GPU {index}",
        why="rates measured now, or jobs run now, are slower than the GPU can be",
        source="NVML (nvidia-smi -q -d PERFORMANCE,CLOCK)",
        mend=mend,
    )
