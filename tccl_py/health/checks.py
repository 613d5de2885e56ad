"""Checks of a host: PCI tree (ACS, IOMMU, links, BAR1, errors), P2P, GPUs, memory, limits, NUMA."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator
from itertools import product

from tccl_py.health.host import (
    Defect,
    HostState,
    Results,
    Severity,
    Unseen,
    defect,
    list_names,
    mib,
    rules,
)
from tccl_py.model.machine import Fingerprint, Knowledge, Machine, PciLink
from tccl_py.planning.hardware import CHIPSET, hardware_limits
from tccl_py.readers.live import DriverFacts, GpuFacts, machine_of
from tccl_py.readers.sysfs import normal_bus_id, rdma_ports

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
    """Return the ACS bits of bridges that redirect traffic between GPUs, and GPUs and RDMA NICs.

    Beside them by reason the bridges whose bits are not seen.
    """
    redirecting: dict[str, int] = {}
    hidden: dict[str, list[str]] = {}
    nics = [port.bus_id for port in rdma_ports(host) if port.bus_id] if host.gpus else []
    devices = (*host.gpus, *nics)
    for port in dict.fromkeys(port for device in devices for port in host.ports_above(device)):
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
    """Find bridges above GPUs and RDMA NICs that redirect peer traffic to the CPU."""
    redirecting, hidden = redirecting_ports(host)
    for why, of in hidden.items():
        yield Unseen(what=f"ACS of the bridges {list_names(of)}", why=why)
    if redirecting and len(host.gpus) + len(host.rdma_nics()) > 1:
        hangs = translating(host) is not False
        stops = ", and any two of them through its IOMMU, which may hang them" if hangs else ""
        present = [
            name for bit, name in _REDIRECTS.items() if any(c & bit for c in redirecting.values())
        ]
        yield defect(
            "redirecting",
            f"bridges {list_names(list(redirecting))}",
            severity="hang" if hangs else None,
            measured=", ".join(present),
            expected="no redirection",
            effect=stops,
            fix="; ".join(f"setpci -s {port} ECAP_ACS+0x6.w=0000" for port in redirecting)
            + " (as root, after each boot; not on a hypervisor, whose guests need ACS)",
        )


def translating(host: HostState) -> bool | None:
    """Return whether an IOMMU translates GPUs' addresses; None if unknown."""
    if types := [kind for gpu in host.gpus if (kind := host.iommu_type(gpu))]:
        return any(kind.startswith("DMA") for kind in types)
    if not host.entries("sys/class/iommu"):
        return False if host.has("sys/bus/pci/devices") else None
    return None


def _p2p_over_pcie(host: HostState) -> bool:
    """Return whether GPUs may access each other over PCIe; as the driver says, if it was asked."""
    if host.driver.unseen:
        return len(host.gpus) > 1
    # The end "" is a switch, which joins all.
    ends = {gpu.index: {gpu.bus_id, *gpu.links} for gpu in host.driver.gpus}
    return any(
        fact.supported and not {"", host.driver.gpus[fact.target].bus_id} & ends[fact.source]
        for fact in host.driver.peer_access
    )


def check_iommu(host: HostState) -> Results:
    """Find an IOMMU that translates GPUs' addresses."""
    state = translating(host)
    if state:
        gpus = [gpu for gpu in host.gpus if host.iommu_type(gpu).startswith("DMA")]
        hangs, effect = _p2p_over_pcie(host), ""
        if hangs:
            effect = "; where it maps no such addresses, P2P over PCIe hangs or damages data"
        where = list_names([host.gpu_name(gpu) for gpu in gpus])
        yield defect("translating", where, severity="hang" if hangs else None, effect=effect)
    elif state is None and host.gpus and "iommu=pt" not in host.text("proc/cmdline").split():
        why = "/sys/kernel/iommu_groups does not tell; `dmesg | grep -i iommu` does"
        yield Unseen(what="whether the IOMMU translates the addresses of GPUs", why=why)


def check_links(host: HostState) -> Results:
    """Find links of GPUs, and of switches above GPUs, with low width or speed."""
    for gpu in host.gpus:
        if above := host.ports_above(gpu)[-1:]:
            who = f"{host.gpu_name(gpu)}, below {above[0]}"
            yield from link_defects(host, gpu, above[0], who, saves_power=True)
            own, slot = (host.pci_link(end, "max").speed_gts for end in (gpu, above[0]))
            if own and slot and slot < own:
                yield defect("slot", who, measured=f"{slot:g} GT/s", expected=f"{own:g} GT/s")
    # A root port, then a switch's two ports each: the links above upstream ports are cables or
    # lanes, those between the two ports of one switch are inside the chip.
    chains = [host.ports_above(gpu) for gpu in host.gpus]
    uplinks = {chain[at]: chain[at - 1] for chain in chains for at in range(1, len(chain) - 1, 2)}
    for switch, port in uplinks.items():
        yield from link_defects(host, switch, port, f"the switch at {switch}, below {port}")
    if any(host.pci(gpu, "current_link_speed") for gpu in host.gpus):
        yield Unseen(
            what="the PCIe generation of GPUs under load",
            why="idle GPUs lower it to save power; `tccl measure` says so if it stays low",
        )


def link_defects(
    host: HostState, device: str, above: str, who: str, *, saves_power: bool = False
) -> Iterator[Defect]:
    """Find a link of a device with low width, or low speed if it does not save power when idle."""
    now = host.pci_link(device, "current")
    ends = [host.pci_link(end, "max") for end in (device, above)]
    lanes = min(filter(None, (end.width for end in ends)), default=0)
    if now.width is not None and now.width < lanes:
        why = f"the link carries {now.width}/{lanes} of its best, in every ring"
        yield defect("narrow", who, measured=f"x{now.width}", expected=f"x{lanes}", why=why)
    gts = min(filter(None, (end.speed_gts for end in ends)), default=0.0)
    if not saves_power and now.speed_gts is not None and now.speed_gts < gts:
        measured, expected = f"{now.speed_gts:g} GT/s", f"{gts:g} GT/s"
        yield defect("slow-uplink", who, measured=measured, expected=expected)


def links_now(machine: Machine, fingerprint: Fingerprint, host: HostState) -> dict[str, PciLink]:
    """Return the present PCIe links of a machine's devices; none on another host."""
    uuids = fingerprint.uuids(machine)
    for gpu in machine.gpus:
        text = host.text(f"proc/driver/nvidia/gpus/{gpu.bus_id}/information")
        if not uuids.get(gpu.index) or uuids[gpu.index] not in text:
            return {}
    links = {device.id: host.pci_link(device.bus_id, "current") for device in machine.pci_devices}
    return {device: link for device, link in links.items() if link.speed_gts and link.width}


_PARAMS = "proc/driver/nvidia/params"
_REGISTRY = re.compile(r'^RegistryDwords: "(.*)"$', re.MULTILINE)
_P2P = re.compile("p2p|staticbar1|peermappingoverride")
_HEX = re.compile("0x[0-9a-f]{1,16}", re.ASCII)
_SMALL_BAR1 = 1 << 28
"""The BAR1 of a GPU without resizable BAR."""
_INTEL_CHIPSET = re.compile(r"0000:00:1[a-d]\.[0-7]")
"""Root ports of the platform controller hub."""


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
_REPEATED, _FEW = ("correctable", "replays"), 100
_XIDS = (48, 61, 62, 64, 74, 79, 95, 119, 120)
"""The GPU, its memory, its NVLinks or its place on the bus failed, and no program's fault."""


def error_counts(host: HostState) -> dict[str, Counter[str]]:
    """Return the errors since boot of GPUs and the bridges above them, by device and kind."""
    ports = dict.fromkeys(port for gpu in host.gpus for port in (*host.ports_above(gpu), gpu))
    errors: dict[str, Counter[str]] = {port: Counter() for port in ports}
    for gpu in host.driver.gpus:
        errors.setdefault(gpu.bus_id, Counter()).update(gpu.errors)
    for port, kind in product(ports, _AER):
        text = host.pci(port, f"aer_dev_{kind}")
        total = re.search(r"^TOTAL_ERR_\w+ ([0-9]{1,18})$", text, re.ASCII | re.MULTILINE)
        errors[port][f"{kind} errors of PCIe"] = int(total[1]) if total else 0
    return errors


def device_errors(host: HostState) -> dict[str, str]:
    """Return what counters and the kernel's log say of GPUs and the bridges above them."""
    errors = error_counts(host)
    earlier = host.earlier_errors
    more = {port: (errors[port] - earlier[port]).total() for port in errors.keys() & earlier}
    for match in _LOGGED.finditer(host.kernel_log()):
        # Domain 0 goes without saying; a line on a Xid has no function.
        text = match["gpu"] or match["device"]
        text = f"{text}.0" if match["xid"] and "." not in text else text
        bus_id = normal_bus_id(text if text.count(":") > 1 else f"0:{text}") or ""
        if bus_id in errors and match["fault"]:
            errors[bus_id][f"faults of the IOMMU ({match['fault']})"] += 1
        elif bus_id in errors and int(match["code"]) in _XIDS:
            errors[bus_id][f"Xid {match['code']}"] += 1
    bad = {}
    for port, counts in errors.items():
        # What a link repeats by itself is a fault where it is much, or becomes more.
        few = {name: _FEW * name.startswith(_REPEATED) for name in counts}
        if more.get(port) or any(count > few[name] for name, count in counts.items()):
            bad[port] = list_names([f"{name}: {count}" for name, count in counts.items() if count])
            bad[port] += f"; {more[port]} more while this ran" if more.get(port) else ""
    return bad


def check_errors(host: HostState) -> Results:
    """Find GPUs and bridges whose errors the kernel has counted or logged."""
    for device, text in device_errors(host).items():
        yield defect("errors", host.device_name(device), measured=text)


def check_bar1(host: HostState) -> Results:
    """Find GPUs whose BAR1 is smaller than their memory, where P2P goes through it."""
    # Drivers that grant GeForce cards P2P, or are told to, map the peer's memory through BAR1.
    forced = [one for one in driver_options(host) if one.what != rules()["p2p-disabled"].what]
    geforce = any("GeForce" in gpu.name for gpu in host.driver.gpus) and _p2p_over_pcie(host)
    memories = {gpu.bus_id: gpu.memory_bytes for gpu in host.driver.gpus}
    for gpu in host.gpus if forced or geforce else ():
        lines = host.pci(gpu, "resource").splitlines()
        ends = [int(word, 16) for word in " ".join(lines[1:2]).split() if _HEX.fullmatch(word)]
        size = ends[1] - ends[0] + 1 if len(ends) > 1 and ends[1] > ends[0] else 0
        memory = memories.get(gpu) or 2 * _SMALL_BAR1
        if 0 < size < memory:
            expected = mib(memory) if memories.get(gpu) else "the GPU's memory"
            yield defect("small-bar1", host.gpu_name(gpu), measured=mib(size), expected=expected)


def check_hardware(host: HostState) -> Results:
    """Find GPUs and switches whose links are below those of their siblings."""
    gpus = host.driver.gpus or tuple(
        GpuFacts(index=i, bus_id=bus_id, uuid="", name="", sm=0, links={}, c2c_links=0)
        for i, bus_id in enumerate(host.gpus)
    )
    if not gpus:
        return
    access = host.driver.peer_access
    machine = machine_of(DriverFacts(driver="", gpus=gpus, peer_access=access), host)
    for limit in hardware_limits(machine, Knowledge(peer_access=access)):
        yield defect("hardware", limit.where, what=limit.what, fix=limit.fix)
    for gpu in host.gpus:
        root = host.ports_above(gpu)[:1]
        if root and _INTEL_CHIPSET.match(root[0]) and host.pci(root[0], "vendor") == "0x8086":
            yield defect("hardware", host.gpu_name(gpu), what=f"behind the chipset, {CHIPSET}")


def _disables_p2p(option: str) -> bool:
    """Return whether ForceP2P forbids reads (bits 0 and 1) or writes (bits 4 and 5)."""
    match = re.fullmatch(r"ForceP2P=(0x[0-9a-f]{1,8}|[0-9]{1,10})", option, re.I | re.ASCII)
    bits = int(match[1], 16 if "x" in match[1].lower() else 10) if match else 0x22
    return not bits & 0x03 or not bits & 0x30


_NO_HMM = "sys/module/nvidia_uvm/parameters/uvm_disable_hmm"


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
        yield defect("geforce" if geforce else "no-p2p", f"pairs {list_names(without)}")
    nics = host.rdma_nics()
    if nics and host.gpus and not host.offers_gpu_memory():
        yield defect("no-peermem", list_names(nics))


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
        yield defect("no-persistence", list_names(disabled))
    for gpu, complaints in state.conditions:
        where = f"GPU {gpu.gpu}"
        if 0 < (gpu.sm_set_mhz or 0) < (gpu.sm_max_mhz or 0):
            measured, expected = f"{gpu.sm_set_mhz} MHz", f"up to {gpu.sm_max_mhz} MHz"
            fix = f"nvidia-smi -i {gpu.gpu} -rac (as root)"
            yield defect("fixed-clock", where, measured=measured, expected=expected, fix=fix)
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


def check_shared_memory(host: HostState) -> Results:
    """Check the size and the free space of /dev/shm."""
    size = shared_memory_size(host)
    if size is None:
        yield Unseen(what="the size of /dev/shm", why="/proc/mounts does not tell")
        return
    gpus = max(len(host.gpus), 2)
    needed = gpus * _CHANNELS * _PATTERNS * _BUFFERS
    why = (
        f"a communicator over {gpus} GPUs needs up to {mib(needed)} for hops through host memory, "
        "or NCCL fails to start"
    )
    rule, measured = "small-shm", mib(size)
    if size >= needed:
        if host.shm_free is None or host.shm_free >= needed:
            return
        rule, measured = "full-shm", f"{mib(host.shm_free)} of {mib(size)} free"
    yield defect(
        rule,
        "/dev/shm",
        container=host.container,
        measured=measured,
        expected=f"at least {mib(needed)}",
        why=why,
    )


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
    locked = limit_of(limits, "Max locked memory")
    if locked is not None:
        nics = host.rdma_nics()
        changes = {"measured": mib(locked), "expected": "unlimited"}
        if nics:
            changes["why"] = f"NCCL fails to start: the NICs {list_names(nics)} need locked memory"
        severity: Severity | None = "hang" if nics else None
        where = "ulimit -l of this user"
        yield defect("locked", where, severity=severity, container=host.container, **changes)
    mapped = limit_of(limits, "Max address space")
    if mapped is not None:
        yield defect("mapped", "ulimit -v of this user", measured=mib(mapped), expected="unlimited")


def limit_of(limits: str, name: str) -> int | None:
    """Return a limit of /proc/PID/limits by its name; None where there is none."""
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
        where, measured = (
            f"{len(sockets)} socket(s), {len(nodes)} NUMA nodes",
            f"{most} nodes a socket",
        )
        why = (
            f"a bounce buffer is on one node and has 1/{most} of its socket's memory channels; "
            "rings with bounces may be faster unsplit, which a plan can compare"
        )
        yield defect("split", where, measured=measured, expected="1", why=why)
    for node, packages in nodes.items():
        if (count := len(packages)) > 1:
            where = f"NUMA node {node}"
            yield defect("joined", where, measured=f"{count} sockets", expected="1")
    if lost := [host.gpu_name(gpu) for gpu in host.gpus if host.pci(gpu, "numa_node") == "-1"]:
        severity: Severity | None = "note" if len(nodes) == 1 else None
        rule = "hidden-gpus" if host.virtual else "lost-gpus"
        yield defect(rule, list_names(lost), severity=severity)
    if len(nodes) > 1 and host.number("proc/sys/kernel/numa_balancing"):
        yield defect("balancing", "/proc/sys/kernel/numa_balancing", measured="1", expected="0")


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
