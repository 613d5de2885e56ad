"""Access Control Services of PCI bridges, and the IOMMU: what turns direct traffic into detours."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from tccl_py.health.doctor.findings import Finding, Severity, Unseen, listed
from tccl_py.health.doctor.host import Host

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
