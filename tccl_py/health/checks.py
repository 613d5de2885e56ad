"""Checks of hardware and system: PCIe links, ACS, IOMMU, P2P, GPUs, memory, limits, NUMA nodes."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import product

from tccl_py.health.host import Defect, HostState, Results, Unseen, defect, listed
from tccl_py.model.machine import Fingerprint, Machine, PciLink
from tccl_py.readers.sysfs import normal_bus_id

_UNPRIVILEGED, _EXTENDED, _LENGTH = 0x40, 0x100, 4096
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


def redirecting_ports(host: HostState) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Return the ACS bits of bridges that redirect GPUs' traffic, and by reason those not seen."""
    redirecting: dict[str, int] = {}
    hidden: dict[str, list[str]] = {}
    for port in dict.fromkeys(port for gpu in host.gpus for port in host.ports_above(gpu)):
        config = host.data(f"sys/bus/pci/devices/{port}/config", limit=_LENGTH)
        control = acs_control(config or b"")
        if control is None:
            why = "this system does not show all"
            if config is not None and len(config) == _UNPRIVILEGED:
                # Linux shows users without CAP_SYS_ADMIN, as root in a container, 64 bytes.
                why = "only root may read all"
                if host.by_root:
                    why = "this container or virtual machine shows root 64 bytes"
            hidden.setdefault(f"{why} of a bridge's configuration", []).append(port)
        elif control & sum(_REDIRECTS):
            redirecting[port] = control
    return redirecting, hidden


def check_acs(host: HostState) -> Results:
    """Find bridges above GPUs that redirect peer traffic to the CPU."""
    redirecting, hidden = redirecting_ports(host)
    for why, of in hidden.items():
        yield Unseen(what=f"ACS of the bridges {listed(of)}", why=why)
    if redirecting and len(host.gpus) + len(host.rdma_nics()) > 1:
        hangs = translating(host) is not False
        stops = ", and any two of them through its IOMMU, which may hang them" if hangs else ""
        present = [
            name for bit, name in _REDIRECTS.items() if any(c & bit for c in redirecting.values())
        ]
        yield defect(
            "redirecting",
            f"bridges {listed(list(redirecting))}",
            severity="hang" if hangs else None,
            measured=", ".join(present),
            expected="no redirection",
            effect=stops,
            fix="; ".join(f"setpci -s {port} ECAP_ACS+0x6.w=0000" for port in redirecting)
            + " (as root, after each boot; not on a hypervisor, whose guests need ACS)",
        )


def translating(host: HostState) -> bool | None:
    """Return whether an IOMMU translates GPUs' addresses; None if unknown."""
    if types := [kind for gpu in host.gpus if (kind := _group_type(host, gpu))]:
        return any(kind.startswith("DMA") for kind in types)
    if not host.entries("sys/class/iommu"):
        return False if host.has("sys/bus/pci/devices") else None
    return None


def _group_type(host: HostState, bus_id: str) -> str:
    link = host.real(f"sys/bus/pci/devices/{bus_id}/iommu_group")
    return host.text(f"sys/kernel/iommu_groups/{link.name}/type") if link else ""


def check_iommu(host: HostState) -> Results:
    """Find an IOMMU that translates GPUs' addresses."""
    state = translating(host)
    if state:
        gpus = [gpu for gpu in host.gpus if _group_type(host, gpu).startswith("DMA")]
        yield defect("translating", listed([host.gpu_name(gpu) for gpu in gpus]))
    elif state is None and host.gpus and "iommu=pt" not in host.text("proc/cmdline").split():
        why = "/sys/kernel/iommu_groups does not tell; `dmesg | grep -i iommu` does"
        yield Unseen(what="whether the IOMMU translates the addresses of GPUs", why=why)


def check_links(host: HostState) -> Results:
    """Find links of GPUs, and of switches above GPUs, with low width or speed."""
    for gpu in host.gpus:
        above = host.ports_above(gpu)
        if above:
            who = f"{host.gpu_name(gpu)}, below {above[-1]}"
            yield from _width(host, gpu, above[-1], who)
            gpu_speed, slot = (host.pci_link(end, "max").speed_gts for end in (gpu, above[-1]))
            if slot is not None and gpu_speed is not None and slot < gpu_speed:
                yield defect("slot", who, measured=f"{slot:g} GT/s", expected=f"{gpu_speed:g} GT/s")
    # A root port, then a switch's two ports each: the links above upstream ports are cables or
    # lanes, those between the two ports of one switch are inside the chip.
    chains = [host.ports_above(gpu) for gpu in host.gpus]
    uplinks = {chain[at]: chain[at - 1] for chain in chains for at in range(1, len(chain) - 1, 2)}
    for switch, port in uplinks.items():
        who = f"the switch at {switch}, below {port}"
        yield from _width(host, switch, port, who)
        speed = host.pci_link(switch, "current").speed_gts
        speeds = [host.pci_link(end, "max").speed_gts for end in (switch, port)]
        best = min(filter(None, speeds), default=0.0)
        if speed is not None and speed < best:
            yield defect("slow-uplink", who, measured=f"{speed:g} GT/s", expected=f"{best:g} GT/s")
    if any(host.pci(gpu, "current_link_speed") for gpu in host.gpus):
        yield Unseen(
            what="the PCIe generation of GPUs under load",
            why="idle GPUs lower it to save power; `tccl measure` says so if it stays low",
        )


def _width(host: HostState, device: str, above: str, who: str) -> Iterator[Defect]:
    width = host.pci_link(device, "current").width
    widths = [host.pci_link(end, "max").width for end in (device, above)]
    best = min(filter(None, widths), default=0)
    if width is not None and width < best:
        why = f"the link carries {width}/{best} of its best, in every ring"
        yield defect("narrow", who, measured=f"x{width}", expected=f"x{best}", why=why)


def links_now(machine: Machine, fingerprint: Fingerprint, host: HostState) -> dict[str, PciLink]:
    """Return the present PCIe links of a machine's devices; none on another host."""
    uuids = fingerprint.uuids(machine)
    for gpu in machine.gpus:
        text = host.text(f"proc/driver/nvidia/gpus/{gpu.bus_id}/information")
        if not uuids.get(gpu.index) or uuids[gpu.index] not in text:
            return {}
    links = {device.id: host.pci_link(device.bus_id, "current") for device in machine.pci_devices}
    return {device: link for device, link in links.items() if link.speed_gts and link.width}


def check_peers(host: HostState) -> Results:
    """Find pairs of GPUs without P2P, and RDMA NICs without GPUDirect."""
    if host.driver.unseen and len(host.gpus) > 1:
        yield Unseen(what="pairs of GPUs with P2P", why=host.driver.unseen)
    yield from driver_options(host)
    no_kaslr = "nokaslr" in host.text("proc/cmdline").split()
    if len(host.gpus) > 1 and host.text(_NO_HMM) == "N" and not no_kaslr:
        yield defect("hmm", f"/{_NO_HMM}", measured="N", expected="Y")
    without = [
        f"{fact.source}-{fact.target}"
        for fact in host.driver.peer_access
        if not fact.supported and fact.source < fact.target
    ]
    if without:
        geforce = any("GeForce" in gpu.name for gpu in host.driver.gpus)
        yield defect("geforce" if geforce else "no-p2p", f"pairs {listed(without)}")
    nics = host.rdma_nics()
    if nics and host.gpus and not host.offers_gpu_memory():
        yield defect("no-peermem", listed(nics))


_PARAMS = "proc/driver/nvidia/params"
_NO_HMM = "sys/module/nvidia_uvm/parameters/uvm_disable_hmm"
_REGISTRY = re.compile(r'^RegistryDwords: "(.*)"$', re.MULTILINE)
_P2P = re.compile("p2p|staticbar1|peermappingoverride")


def driver_options(host: HostState) -> Iterator[Defect]:
    """Find options of the driver's modules that decide on P2P."""
    if len(host.gpus) < 2:
        return
    match = _REGISTRY.search(host.text(_PARAMS))
    entries = [entry.strip() for entry in (match[1] if match else "").split(";")]
    names = [entry.partition("=")[0].lower() for entry in entries]
    options = [entry for entry, name in zip(entries, names, strict=True) if _P2P.search(name)]
    if options:
        name = "p2p-disabled" if any(map(_disables_p2p, options)) else "p2p-options"
        yield defect(name, f"/{_PARAMS}", measured="; ".join(options)[:200])


_AER = ("correctable", "nonfatal", "fatal")
_LOGGED = re.compile(
    r"NVRM: (?P<xid>Xid) \(PCI:(?P<gpu>[0-9a-fA-F:.]{7,16})\): (?P<code>[0-9]{1,3})\b"
    r"|(?P<fault>AMD-Vi|DMAR)\b.{1,80}?(?:device[= ]|\[)(?P<device>[0-9a-f:]{5,13}\.[0-7])\b",
    re.ASCII,
)
_FEW = 100
_XIDS = (48, 61, 62, 64, 74, 79, 95, 119, 120)
"""The GPU, its memory, its NVLinks or its place on the bus failed, and no program's fault."""


def device_errors(host: HostState) -> dict[str, str]:
    """Return what counters of AER and the kernel's log say of GPUs and the bridges above them."""
    ports = dict.fromkeys(port for gpu in host.gpus for port in (*host.ports_above(gpu), gpu))
    errors: dict[str, Counter[str]] = {port: Counter() for port in ports}
    for port, kind in product(ports, _AER):
        text = host.pci(port, f"aer_dev_{kind}")
        total = re.search(r"^TOTAL_ERR_\w+ ([0-9]{1,18})$", text, re.ASCII | re.MULTILINE)
        errors[port][f"{kind} errors of PCIe since boot"] = int(total[1]) if total else 0
    for match in _LOGGED.finditer(host.kernel_log()):
        # Domain 0 goes without saying; a line on a Xid has no function.
        text = match["gpu"] or match["device"]
        text = f"{text}.0" if match["xid"] and "." not in text else text
        bus_id = normal_bus_id(text if text.count(":") > 1 else f"0:{text}") or ""
        if bus_id in errors and match["fault"]:
            errors[bus_id][f"faults of the IOMMU ({match['fault']})"] += 1
        elif bus_id in errors and int(match["code"]) in _XIDS:
            errors[bus_id][f"Xid {match['code']}"] += 1
    # Correctable errors are repeated by the link itself, a few are no fault.
    return {
        port: listed([f"{name}: {count}" for name, count in counts.items() if count])
        for port, counts in errors.items()
        if any(count > (_FEW if "correctable" in name else 0) for name, count in counts.items())
    }


def check_errors(host: HostState) -> Results:
    """Find GPUs and bridges whose errors the kernel has counted or logged."""
    for device, text in device_errors(host).items():
        where = host.gpu_name(device) if device in host.gpus else f"the bridge {device}"
        yield defect("errors", where, measured=text)


def _disables_p2p(option: str) -> bool:
    """Return whether ForceP2P forbids reads (bits 0 and 1) or writes (bits 4 and 5)."""
    match = re.fullmatch(r"ForceP2P=(0x[0-9a-f]{1,8}|[0-9]{1,10})", option, re.I | re.ASCII)
    bits = int(match[1], 16 if "x" in match[1].lower() else 10) if match else 0x22
    return not bits & 0x03 or not bits & 0x30


def check_gpus(host: HostState) -> Results:
    """Find GPUs without persistence mode, with fixed clocks, or with complaints from NVML."""
    state = host.driver
    if not host.gpus:
        yield Unseen(what="GPUs", why="this host has, or shows, no NVIDIA GPU")
        return
    if state.unseen:
        facts = "clocks, heat, persistence mode and other processes of the GPUs"
        yield Unseen(what=facts, why=state.unseen)
        return
    if disabled := [f"GPU {gpu.gpu}" for gpu, _ in state.conditions if gpu.persistence is False]:
        yield defect("no-persistence", listed(disabled))
    for gpu, complaints in state.conditions:
        where = f"GPU {gpu.gpu}"
        if 0 < (gpu.sm_set_mhz or 0) < (gpu.sm_max_mhz or 0):
            yield defect(
                "fixed-clock",
                where,
                measured=f"{gpu.sm_set_mhz} MHz",
                expected=f"up to {gpu.sm_max_mhz} MHz",
                fix=f"nvidia-smi -i {gpu.gpu} -rac (as root)",
            )
        for text in complaints:
            sentence, _, fix = text.partition("; ")
            yield defect("complaint", where, what=sentence.removeprefix(f"{where}: "), fix=fix)


# /dev/shm and the limits of a process

_BUFFERS = 9_637_888
"""Bytes of one hop of one channel by default (NVIDIA/nccl issue 342)."""
_CHANNELS = 4
_PATTERNS = 2
"""Rings and trees have separate connections."""
_SIZE = re.compile(r"size=([0-9]{1,18})([kmg%]?)", re.IGNORECASE | re.ASCII)
_UNIT = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
_LIMITS = "proc/self/limits"


def _mib(count: int) -> str:
    return f"{count / 1024**2:,.6g} MiB"


def check_shared_memory(host: HostState) -> Results:
    """Check the size and the free space of /dev/shm."""
    size = shared_memory_size(host)
    if size is None:
        yield Unseen(what="the size of /dev/shm", why="/proc/mounts does not tell")
        return
    gpus = max(len(host.gpus), 2)
    needed = gpus * _CHANNELS * _PATTERNS * _BUFFERS
    why = (
        f"a communicator over {gpus} GPUs needs up to {_mib(needed)} for hops through host memory, "
        "or NCCL fails to start"
    )
    expected = f"at least {_mib(needed)}"
    if size < needed:
        fix = "mount -o remount,size=50% /dev/shm (as root)"
        if host.container:
            fix = "docker run --shm-size=1g ... (Kubernetes: an emptyDir of medium Memory)"
        yield defect(
            "small-shm", "/dev/shm", measured=_mib(size), expected=expected, why=why, fix=fix
        )
    elif host.shm_free is not None and host.shm_free < needed:
        measured = f"{_mib(host.shm_free)} of {_mib(size)} free"
        yield defect("full-shm", "/dev/shm", measured=measured, expected=expected, why=why)


def shared_memory_size(host: HostState) -> int | None:
    """Return the bytes that /dev/shm may hold, by default half of the memory; None if no mount."""
    mounts = [line.split() for line in host.text("proc/mounts").splitlines()]
    options = [fields[3] for fields in mounts if len(fields) > 3 and fields[1] == "/dev/shm"]
    if not options:
        return None
    size = _SIZE.search(options[-1])
    if size and size[2] != "%":
        return int(size[1]) * _UNIT[size[2].lower()]
    memory = re.search(r"^MemTotal:\s+([0-9]{1,15}) kB", host.text("proc/meminfo"), re.MULTILINE)
    percent = int(size[1]) if size else 50
    return int(memory[1]) * 1024 * percent // 100 if memory else None


def check_limits(host: HostState) -> Results:
    """Check the limits of locked and of virtual memory."""
    limits = host.text(_LIMITS)
    if not limits:
        yield Unseen(what="this user's limits", why=f"no /{_LIMITS}")
        return
    locked = _limit(limits, "Max locked memory")
    if locked is not None:
        nics = host.rdma_nics()
        changes = {"measured": _mib(locked), "expected": "unlimited"}
        if nics:
            changes["why"] = f"NCCL fails to start: the NICs {listed(nics)} need locked memory"
        if host.container:
            changes["fix"] = "docker run --ulimit memlock=-1 ..."
        where = "ulimit -l of this user"
        yield defect("locked", where, severity="hang" if nics else None, **changes)
    mapped = _limit(limits, "Max address space")
    if mapped is not None:
        yield defect(
            "mapped", "ulimit -v of this user", measured=_mib(mapped), expected="unlimited"
        )


def _limit(limits: str, name: str) -> int | None:
    match = re.search(rf"^{name}\s+([0-9]{{1,19}})\s", limits, re.MULTILINE)
    return int(match[1]) if match else None


def check_numa(host: HostState) -> Results:
    """Check the NUMA nodes of each socket, GPUs without a node, and the moving of pages."""
    nodes = {node: set(host.sockets_of(node)) for node in host.numa_nodes()}
    if not nodes:
        yield Unseen(what="NUMA nodes", why="/sys/devices/system/node has none")
        return
    sockets = {package for packages in nodes.values() for package in packages}
    counts = [sum(packages == {socket} for packages in nodes.values()) for socket in sockets]
    most = max(counts, default=0)
    if most > 1:
        yield defect(
            "split",
            f"{len(sockets)} socket(s), {len(nodes)} NUMA nodes",
            measured=f"{most} nodes a socket",
            expected="1",
            why=f"a bounce buffer is on one node and has 1/{most} of its socket's memory "
            "channels; rings with bounces may be faster unsplit, which a plan can compare",
        )
    for node, packages in nodes.items():
        if len(packages) > 1:
            yield defect(
                "joined", f"NUMA node {node}", measured=f"{len(packages)} sockets", expected="1"
            )
    yield from _lost_gpus(host)
    if len(nodes) > 1 and host.number("proc/sys/kernel/numa_balancing"):
        yield defect("balancing", "/proc/sys/kernel/numa_balancing", measured="1", expected="0")


def _lost_gpus(host: HostState) -> Iterator[Defect]:
    lost = [host.gpu_name(gpu) for gpu in host.gpus if host.pci(gpu, "numa_node") == "-1"]
    if not lost:
        return
    changes = {}
    if host.virtual:
        changes = {
            "effect": ": the virtual machine hides it",
            "fix": "give it the host's NUMA topology (libvirt: numatune, pcie expander buses)",
        }
    harmless = host.virtual or len(host.numa_nodes()) == 1
    yield defect("lost-gpus", listed(lost), severity="note" if harmless else None, **changes)


_CUMEM_HOST_SINCE = 560
"""The driver branch of CUDA 12.6."""


def check_container(host: HostState) -> Results:
    """Report devices hidden by a container, and host buffers that need forbidden calls."""
    if not host.container:
        return
    if not host.has("sys/bus/pci/devices"):
        why = "this container has no /sys; mount the host's, or run it outside"
        yield Unseen(what="the PCI tree", why=why)
    branch = host.driver_version().partition(".")[0]
    newer = branch.isdecimal() and int(branch) >= _CUMEM_HOST_SINCE
    if newer and not host.environment.get("NCCL_CUMEM_HOST_ENABLE"):
        yield defect("cumem-host", f"a container with driver {host.driver_version()}")


def check_virtual(host: HostState) -> Results:
    """Report devices hidden by a virtual machine."""
    if host.virtual and host.gpus:
        facts = "PCI switches, ACS and the IOMMU of the physical machine"
        why = "a virtual machine shows its own; run it on the hypervisor as well"
        yield Unseen(what=facts, why=why)


HOST_CHECKS: Mapping[str, Callable[[HostState], Results]] = {
    "acs": check_acs,
    "iommu": check_iommu,
    "links": check_links,
    "peers": check_peers,
    "errors": check_errors,
    "gpus": check_gpus,
    "numa": check_numa,
    "shared memory": check_shared_memory,
    "limits": check_limits,
    "container": check_container,
    "virtual machine": check_virtual,
}
