"""Checks of memory: /dev/shm, limits of a process, NUMA nodes, containers, virtual machines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tccl_py.health.host import Finding, Found, Host, Unseen, defect, listed

# /dev/shm and the limits of a process

_BUFFERS = 9_637_888
"""Bytes of one hop of one channel by default (NVIDIA/nccl issue 342)."""
_CHANNELS = 4
_PATTERNS = 2
"""Rings and trees have separate connections."""
_SIZE = re.compile(r"size=([0-9]{1,18})([kmg%]?)", re.IGNORECASE | re.ASCII)
_UNIT = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
_LIMITS = "proc/self/limits"


def shared_memory_needed(gpus: int) -> int:
    """Return the bytes of /dev/shm for one communicator with every hop through host memory."""
    return max(gpus, 2) * _CHANNELS * _PATTERNS * _BUFFERS


def _mib(count: int) -> str:
    """Return a number of bytes as text in MiB."""
    return f"{count / 1024**2:,.6g} MiB"


def check_shared_memory(host: Host) -> Found:
    """Check the size and the free space of /dev/shm."""
    size = shared_memory_size(host)
    if size is None:
        yield Unseen(what="the size of /dev/shm", why="/proc/mounts does not tell")
        return
    gpus = max(len(host.gpus), 2)
    needed = shared_memory_needed(gpus)
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


def shared_memory_size(host: Host) -> int | None:
    """Return the bytes that /dev/shm may hold, by default half of the memory; None if no mount."""
    mounts = [line.split() for line in host.text("proc/mounts").splitlines()]
    options = [fields[3] for fields in mounts if len(fields) > 3 and fields[1] == "/dev/shm"]
    if not options:
        return None
    found = _SIZE.search(options[-1])
    if found and found[2] != "%":
        return int(found[1]) * _UNIT[found[2].lower()]
    memory = re.search(r"^MemTotal:\s+([0-9]{1,15}) kB", host.text("proc/meminfo"), re.MULTILINE)
    percent = int(found[1]) if found else 50
    return int(memory[1]) * 1024 * percent // 100 if memory else None


def check_limits(host: Host) -> Found:
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
    """Return the soft limit in bytes; None if unlimited."""
    found = re.search(rf"^{name}\s+([0-9]{{1,19}})\s", limits, re.MULTILINE)
    return int(found[1]) if found else None


# NUMA nodes

_BASE = "sys/devices/system"


def sockets_of_nodes(host: Host) -> dict[int, set[int]]:
    """Return the sockets of each NUMA node's CPUs."""
    found = {}
    for node in host.numa_nodes():
        # The first CPU of each range is enough.
        listed_cpus = host.text(f"{_BASE}/node/node{node}/cpulist")
        cpus = re.findall(r"(?:^|,)([0-9]{1,6})", listed_cpus, re.ASCII)
        ids = [host.number(f"{_BASE}/cpu/cpu{cpu}/topology/physical_package_id") for cpu in cpus]
        found[node] = {package for package in ids if package is not None and package >= 0}
    return found


def check_numa(host: Host) -> Found:
    """Check the NUMA nodes of each socket, GPUs without a node, and the moving of pages."""
    nodes = sockets_of_nodes(host)
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


def _lost_gpus(host: Host) -> Iterator[Finding]:
    lost = [host.gpu_name(gpu) for gpu in host.gpus if host.pci(gpu, "numa_node") == "-1"]
    if not lost:
        return
    changes = {}
    if host.virtual:
        changes["effect"] = ": the virtual machine hides it"
        changes["fix"] = (
            "give the virtual machine the host's NUMA topology (libvirt: numatune, pcie expander "
            "buses)"
        )
    harmless = host.virtual or len(host.numa_nodes()) == 1
    yield defect("lost-gpus", listed(lost), severity="note" if harmless else None, **changes)


# Containers and virtual machines

_CUMEM_HOST_SINCE = 560
"""The driver branch of CUDA 12.6."""


def check_container(host: Host) -> Found:
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


def check_virtual(host: Host) -> Found:
    """Report devices hidden by a virtual machine."""
    if host.virtual and host.gpus:
        what = "PCI switches, ACS and the IOMMU of the physical machine"
        why = "a virtual machine shows its own; run it on the hypervisor as well"
        yield Unseen(what=what, why=why)
