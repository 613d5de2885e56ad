"""Checks of GPUs and their PCIe links: ACS, IOMMU, width and speed, P2P, GPU conditions."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from tccl_py.health.host import Finding, Host, Rule, Unseen, listed

Found = Iterator[Finding | Unseen]

# Access Control Services and the IOMMU

_EXTENDED, _LENGTH = 0x100, 4096
_ACS = 0x000D
_REDIRECTS = {0x04: "request redirect", 0x08: "completion redirect", 0x20: "egress control"}
"""Bits of the ACS control register: PCI Express 5.0, 7.7.8.3."""
_MOST_CAPABILITIES = (_LENGTH - _EXTENDED) // 8
_NCCL = (
    "NCCL user guide, GPU troubleshooting: ACS and IO virtualization redirect all PCI "
    "point-to-point traffic to the CPU's root complex, which costs much or even hangs"
)
_REDIRECTING = Rule(
    "slow",
    "ACS sends traffic between GPUs up to the CPU",
    "GPUs below one switch communicate through the CPU instead of the switch",
    _NCCL,
)
_TRANSLATING = Rule(
    "slow",
    "the IOMMU translates the addresses of GPUs",
    "direct traffic between GPUs, and to NICs, goes up to the CPU and its tables",
    f"{_NCCL}; Linux, kernel-parameters: iommu=pt leaves devices untranslated",
    "add iommu=pt to the kernel's command line (GRUB_CMDLINE_LINUX in /etc/default/grub, "
    "then update-grub or grub2-mkconfig) and boot; or disable the IOMMU in the BIOS",
)


def acs_control(config: bytes) -> int | None:
    """Return the ACS control register in a configuration space; 0 without ACS.

    None if the extended part is missing, as for all users but root, or is damaged.
    """
    if len(config) <= _EXTENDED:
        # All 256 bytes and no more is a device on conventional PCI, as virtual machines have.
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


def check_acs(host: Host) -> Found:
    """Find bridges above GPUs that redirect peer traffic to the CPU."""
    ports = dict.fromkeys(port for gpu in host.gpus for port in host.ports_above(gpu))
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
        why = "only root may read all of a bridge's configuration; run it as root"
        yield Unseen(what=f"ACS of the bridges {listed(hidden)}", why=why)
    if redirecting and len(host.gpus) + len(host.rdma_nics()) > 1:
        hangs = translating(host) is not False
        stops = ", and any two of them through its IOMMU, which may hang them" if hangs else ""
        yield _REDIRECTING.at(
            f"bridges {listed(redirecting)}",
            severity="hang" if hangs else None,
            measured=", ".join(name for bit, name in _REDIRECTS.items() if bits & bit),
            expected="no redirection",
            why=_REDIRECTING.why + stops,
            fix="; ".join(f"setpci -s {port} ECAP_ACS+0x6.w=0000" for port in redirecting)
            + " (as root, after each boot; not on a hypervisor, whose guests need ACS)",
        )


def translating(host: Host) -> bool | None:
    """Return whether an IOMMU translates GPUs' addresses; None if unknown."""
    types = [kind for gpu in host.gpus if (kind := _group_type(host, gpu))]
    if types:
        return any(kind.startswith("DMA") for kind in types)
    if not host.entries("sys/class/iommu"):
        return False if host.has("sys/bus/pci/devices") else None
    return None


def _group_type(host: Host, bus_id: str) -> str:
    """Return the type of a device's IOMMU domain, `identity`, `DMA` or `DMA-FQ`; "" if none."""
    link = host.real(f"sys/bus/pci/devices/{bus_id}/iommu_group")
    return host.text(f"sys/kernel/iommu_groups/{link.name}/type") if link else ""


def check_iommu(host: Host) -> Found:
    """Find an IOMMU that translates GPUs' addresses."""
    state = translating(host)
    if state:
        gpus = [gpu for gpu in host.gpus if _group_type(host, gpu).startswith("DMA")]
        yield _TRANSLATING.at(listed([host.gpu_name(gpu) for gpu in gpus]))
    elif state is None and host.gpus and "iommu=pt" not in host.text("proc/cmdline").split():
        why = "/sys/kernel/iommu_groups does not tell; `dmesg | grep -i iommu` does"
        yield Unseen(what="whether the IOMMU translates the addresses of GPUs", why=why)


# PCIe links

_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) GT/s", re.ASCII)
_SYSFS = "Linux, ABI/testing/sysfs-bus-pci: current_link_speed, current_link_width"
_RESEAT = "reseat the card, look at its riser or cable, and at how the board shares lanes"
_NARROW = Rule("slow", "a PCIe link runs on fewer lanes than both ends have", "", _SYSFS, _RESEAT)
_SLOT = Rule(
    "note",
    "the slot is slower than the GPU",
    "the slower end counts; a lower setting in the BIOS can be the reason",
    _SYSFS,
    "set the slot's link speed to Auto in the BIOS, if the board can do more",
)
_SLOW_UPLINK = Rule(
    "slow",
    "a PCIe link runs at a lower speed than both ends have",
    "all GPUs below the switch share it; unlike a GPU's link it does not slow down when idle",
    _SYSFS,
    f"{_RESEAT}; then look at the link speed in the BIOS",
)


def check_links(host: Host) -> Found:
    """Find links of GPUs, and of switches above GPUs, with low width or speed."""
    for gpu in host.gpus:
        above = host.ports_above(gpu)
        if above:
            who = f"{host.gpu_name(gpu)}, below {above[-1]}"
            yield from _width(host, gpu, above[-1], who)
            own, slot = (_speed(host, end, "max_link_speed") for end in (gpu, above[-1]))
            if 0 < slot < own:
                yield _SLOT.at(who, measured=f"{slot:g} GT/s", expected=f"{own:g} GT/s")
    uplinks = {switch: port for gpu in host.gpus for port, switch in _uplinks(host, gpu)}
    for switch, port in uplinks.items():
        who = f"the switch at {switch}, below {port}"
        yield from _width(host, switch, port, who)
        now = _speed(host, switch, "current_link_speed")
        speeds = [_speed(host, end, "max_link_speed") for end in (switch, port)]
        best = min((speed for speed in speeds if speed), default=0)
        if 0 < now < best:
            yield _SLOW_UPLINK.at(who, measured=f"{now:g} GT/s", expected=f"{best:g} GT/s")
    if any(host.pci(gpu, "current_link_speed") for gpu in host.gpus):
        yield Unseen(
            what="the PCIe generation of GPUs under load",
            why="idle GPUs lower it to save power; `tccl measure` says so if it stays low",
        )


def _uplinks(host: Host, gpu: str) -> Iterator[tuple[str, str]]:
    """Yield (port above, switch) for each link between a switch and its parent."""
    ports = host.ports_above(gpu)
    # A root port, then a switch's two ports each: the links above upstream ports are cables or
    # lanes, those between the two ports of one switch are inside the chip.
    for place in range(1, len(ports) - 1, 2):
        yield ports[place - 1], ports[place]


def _width(host: Host, device: str, above: str, who: str) -> Iterator[Finding]:
    now = _lanes(host, device, "current_link_width")
    widths = [_lanes(host, end, "max_link_width") for end in (device, above)]
    best = min((width for width in widths if width), default=0)
    if 0 < now < best:
        why = f"the link carries {now}/{best} of its best, in every ring"
        yield _NARROW.at(who, measured=f"x{now}", expected=f"x{best}", why=why)


def _lanes(host: Host, device: str, name: str) -> int:
    text = host.pci(device, name)
    width = int(text) if re.fullmatch("[0-9]{1,3}", text, re.ASCII) else 0
    return 0 if width == 255 else width  # 255 stands for unknown


def _speed(host: Host, device: str, name: str) -> float:
    found = _SPEED.match(host.pci(device, name))
    return float(found[1]) if found else 0.0


# Peer access

_NO_PEERMEM = Rule(
    "slow",
    "RDMA NICs cannot reach GPU memory: nvidia-peermem is not loaded",
    "traffic between nodes takes a detour over host memory",
    "NCCL user guide, GPU troubleshooting: GPU-to-NIC communication needs it",
    "modprobe nvidia-peermem (as root, at each boot: a line nvidia-peermem in "
    "/etc/modules-load.d/nvidia-peermem.conf)",
)
_NO_P2P = Rule(
    "slow",
    "the driver allows no P2P between some GPUs",
    "NCCL moves their data through host memory",
    "NVML, P2P status (nvidia-smi topo -p2p w); NCCL asks it for each pair",
    "look for ACS and IOMMU above, and for P2P in the driver's options",
)


def check_peers(host: Host) -> Found:
    """Find pairs of GPUs without P2P, and RDMA NICs without GPUDirect."""
    if host.driver.unseen and len(host.gpus) > 1:
        yield Unseen(what="pairs of GPUs with P2P", why=host.driver.unseen)
    facts = host.driver.peer_access
    without = [
        f"{fact.source}-{fact.target}"
        for fact in facts
        if not fact.supported and fact.source < fact.target
    ]
    if without and any("GeForce" in gpu.name for gpu in host.driver.gpus):
        why = f"{_NO_P2P.why}, as on all GeForce cards"
        yield _NO_P2P.at(f"pairs {listed(without)}", severity="note", why=why, fix="")
    elif without:
        yield _NO_P2P.at(f"pairs {listed(without)}")
    nics = host.rdma_nics()
    if nics and host.gpus and not _offers_gpu_memory(host):
        yield _NO_PEERMEM.at(listed(nics))


def _offers_gpu_memory(host: Host) -> bool:
    """Return whether NICs reach GPU memory: nvidia-peermem, or DMA-BUF since Linux 5.12."""
    if any(host.has(f"sys/module/{name}") for name in ("nvidia_peermem", "nv_peer_mem")):
        return True
    opened = "Open Kernel Module" in host.text("proc/driver/nvidia/version")
    release = re.match(r"([0-9]{1,3})\.([0-9]{1,3})", host.text("proc/sys/kernel/osrelease"))
    return opened and release is not None and (int(release[1]), int(release[2])) >= (5, 12)


# GPU conditions

_NO_PERSISTENCE = Rule(
    "note",
    "persistence mode is disabled",
    "the driver unloads an unused GPU: jobs start slower, and settings such as clocks and power "
    "limits are lost",
    "NVIDIA, Driver Persistence",
    "systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1, as root)",
)
_FIXED_CLOCK = Rule(
    "note",
    "a setting fixes the clock",
    "steady for measurements, but a plan then holds for this clock only",
    "NVML (nvidia-smi -q -d CLOCK, Applications Clocks)",
)
_COMPLAINT = Rule(
    "slow",
    "",
    "measurements and jobs are slower than the GPU can be",
    "NVML (nvidia-smi -q -d PERFORMANCE,CLOCK)",
)


def check_gpus(host: Host) -> Found:
    """Find GPUs without persistence mode, with fixed clocks, or with complaints from NVML."""
    state = host.driver
    if not host.gpus:
        yield Unseen(what="GPUs", why="this host has, or shows, no NVIDIA GPU")
        return
    if state.unseen:
        what = "clocks, heat, persistence mode and other processes of the GPUs"
        yield Unseen(what=what, why=state.unseen)
        return
    disabled = [f"GPU {gpu.index}" for gpu in state.gpus if gpu.persistence is False]
    if disabled:
        yield _NO_PERSISTENCE.at(listed(disabled))
    for gpu in state.gpus:
        where = f"GPU {gpu.index}"
        if gpu.clock_mhz is not None:
            yield _FIXED_CLOCK.at(
                where,
                measured=f"{gpu.clock_mhz} MHz",
                expected=f"up to {gpu.clock_max_mhz} MHz",
                fix=f"nvidia-smi -i {gpu.index} -rac (as root)",
            )
        for text in gpu.complaints:
            what, _, fix = text.partition("; ")
            yield _COMPLAINT.at(where, what=what.removeprefix(f"{where}: "), fix=fix)
