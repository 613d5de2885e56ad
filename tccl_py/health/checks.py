"""Checks of a host: P2P, GPUs, memory, limits, NUMA nodes."""

from __future__ import annotations

import re

from tccl_py.health.host import HostState, Results, Severity, Unseen, defect, list_names, mib
from tccl_py.health.pci import driver_options

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
