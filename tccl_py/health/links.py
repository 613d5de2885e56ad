"""Checks of GPUs and their PCIe links: ACS, IOMMU, width and speed, P2P, GPU conditions."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from tccl_py.health.host import Finding, Found, Host, Unseen, defect, listed

# Access Control Services and the IOMMU

_EXTENDED, _LENGTH = 0x100, 4096
_ACS = 0x000D
_REDIRECTS = {0x04: "request redirect", 0x08: "completion redirect", 0x20: "egress control"}
"""Bits of the ACS control register: PCI Express 5.0, 7.7.8.3."""
_MOST_CAPABILITIES = (_LENGTH - _EXTENDED) // 8


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
        yield defect(
            "redirecting",
            f"bridges {listed(redirecting)}",
            severity="hang" if hangs else None,
            measured=", ".join(name for bit, name in _REDIRECTS.items() if bits & bit),
            expected="no redirection",
            effect=stops,
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
        yield defect("translating", listed([host.gpu_name(gpu) for gpu in gpus]))
    elif state is None and host.gpus and "iommu=pt" not in host.text("proc/cmdline").split():
        why = "/sys/kernel/iommu_groups does not tell; `dmesg | grep -i iommu` does"
        yield Unseen(what="whether the IOMMU translates the addresses of GPUs", why=why)


# PCIe links

_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) GT/s", re.ASCII)


def check_links(host: Host) -> Found:
    """Find links of GPUs, and of switches above GPUs, with low width or speed."""
    for gpu in host.gpus:
        above = host.ports_above(gpu)
        if above:
            who = f"{host.gpu_name(gpu)}, below {above[-1]}"
            yield from _width(host, gpu, above[-1], who)
            own, slot = (_speed(host, end, "max_link_speed") for end in (gpu, above[-1]))
            if 0 < slot < own:
                yield defect("slot", who, measured=f"{slot:g} GT/s", expected=f"{own:g} GT/s")
    uplinks = {switch: port for gpu in host.gpus for port, switch in _uplinks(host, gpu)}
    for switch, port in uplinks.items():
        who = f"the switch at {switch}, below {port}"
        yield from _width(host, switch, port, who)
        now = _speed(host, switch, "current_link_speed")
        speeds = [_speed(host, end, "max_link_speed") for end in (switch, port)]
        best = min((speed for speed in speeds if speed), default=0)
        if 0 < now < best:
            yield defect("slow-uplink", who, measured=f"{now:g} GT/s", expected=f"{best:g} GT/s")
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
        yield defect("narrow", who, measured=f"x{now}", expected=f"x{best}", why=why)


def _lanes(host: Host, device: str, name: str) -> int:
    text = host.pci(device, name)
    width = int(text) if re.fullmatch("[0-9]{1,3}", text, re.ASCII) else 0
    return 0 if width == 255 else width  # 255 stands for unknown


def _speed(host: Host, device: str, name: str) -> float:
    found = _SPEED.match(host.pci(device, name))
    return float(found[1]) if found else 0.0


# Peer access


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
        yield defect("geforce", f"pairs {listed(without)}")
    elif without:
        yield defect("no-p2p", f"pairs {listed(without)}")
    nics = host.rdma_nics()
    if nics and host.gpus and not _offers_gpu_memory(host):
        yield defect("no-peermem", listed(nics))


def _offers_gpu_memory(host: Host) -> bool:
    """Return whether NICs reach GPU memory: nvidia-peermem, or DMA-BUF since Linux 5.12."""
    if any(host.has(f"sys/module/{name}") for name in ("nvidia_peermem", "nv_peer_mem")):
        return True
    opened = "Open Kernel Module" in host.text("proc/driver/nvidia/version")
    release = re.match(r"([0-9]{1,3})\.([0-9]{1,3})", host.text("proc/sys/kernel/osrelease"))
    return opened and release is not None and (int(release[1]), int(release[2])) >= (5, 12)


# GPU conditions


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
        yield defect("no-persistence", listed(disabled))
    for gpu in state.gpus:
        where = f"GPU {gpu.index}"
        if gpu.clock_mhz is not None:
            yield defect(
                "fixed-clock",
                where,
                measured=f"{gpu.clock_mhz} MHz",
                expected=f"up to {gpu.clock_max_mhz} MHz",
                fix=f"nvidia-smi -i {gpu.index} -rac (as root)",
            )
        for text in gpu.complaints:
            what, _, fix = text.partition("; ")
            yield defect("complaint", where, what=what.removeprefix(f"{where}: "), fix=fix)
