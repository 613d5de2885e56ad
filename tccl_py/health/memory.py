"""Memory that NCCL needs: /dev/shm, and the limits of a process."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tccl_py.health.host import Finding, Host, Unseen, listed

_BUFFERS = 9_637_888
"""Bytes that one hop of one channel takes by default (seen in NVIDIA/nccl issue 342)."""
_CHANNELS = 4
_PATTERNS = 2
"""Rings and trees are joined separately."""
_GRAPH_MB = 924
_MIB = 1024 * 1024
_SIZE = re.compile(r"size=([0-9]{1,18})([kmg%]?)", re.IGNORECASE | re.ASCII)
_UNIT = {"": 1, "k": 1024, "m": _MIB, "g": 1024 * _MIB}
_DOCS = (
    "NCCL user guide, Runtime and MPI issues: what shared and pinned memory containers and users "
    "get by default may not be enough"
)
_LIMITS = "proc/self/limits"


def shared_memory_needed(gpus: int) -> int:
    """Bytes of /dev/shm that one communicator takes if every hop goes through host memory."""
    return max(gpus, 2) * _CHANNELS * _PATTERNS * _BUFFERS


def in_words(count: int) -> str:
    """Bytes in the largest unit they fill.

    >>> in_words(65536)
    '64 KiB'
    """
    for unit, size in (("GiB", 1024 * _MIB), ("MiB", _MIB), ("KiB", 1024)):
        if count >= size:
            return f"{count // size} {unit}"
    return f"{count} bytes"


def check_shared_memory(host: Host) -> Iterator[Finding | Unseen]:
    """Size and free space of /dev/shm."""
    size = shared_memory_size(host)
    if size is None:
        yield Unseen(
            check="shared memory", what="the size of /dev/shm", why="/proc/mounts does not tell"
        )
        return
    gpus = max(len(host.gpus()), 2)
    needed = shared_memory_needed(gpus)
    why = (
        f"a communicator over {gpus} GPUs takes up to {in_words(needed)} of it, where hops go "
        "through host memory; without them NCCL fails to start"
    )
    if size < needed:
        yield Finding(
            severity="hang",
            check="shared memory",
            what=f"/dev/shm is small: {in_words(size)}",
            where="/dev/shm",
            why=why,
            source=_DOCS,
            mend="docker run --shm-size=1g ... (Kubernetes: an emptyDir of medium Memory)"
            if host.container
            else "mount -o remount,size=50% /dev/shm (as root)",
        )
    elif host.shm_free is not None and host.shm_free < needed:
        yield Finding(
            severity="hang",
            check="shared memory",
            what=f"/dev/shm is nearly full: {in_words(host.shm_free)} of {in_words(size)} are free",
            where="/dev/shm",
            why=why,
            source=_DOCS,
            mend="look for what killed jobs left: ls -l /dev/shm/nccl-* (and remove it if no job "
            "runs)",
        )


def shared_memory_size(host: Host) -> int | None:
    """Bytes that /dev/shm may hold: as mounted, or half of the memory; None if it is no mount."""
    mounts = [line.split() for line in host.text("proc/mounts").splitlines()]
    options = [fields[3] for fields in mounts if len(fields) > 3 and fields[1] == "/dev/shm"]
    if not options:
        return None
    found = _SIZE.search(options[-1])
    memory = re.search(r"^MemTotal:\s+([0-9]{1,15}) kB", host.text("proc/meminfo"), re.MULTILINE)
    total = int(memory[1]) * 1024 if memory else None
    if found is None:
        return None if total is None else total // 2
    if found[2] == "%":
        return None if total is None else total * int(found[1]) // 100
    return int(found[1]) * _UNIT[found[2].lower()]


def check_limits(host: Host) -> Iterator[Finding | Unseen]:
    """What a process may lock and map."""
    limits = host.text(_LIMITS)
    if not limits:
        yield Unseen(check="limits", what="this user's limits", why=f"no /{_LIMITS}")
        return
    locked = _limit(limits, "Max locked memory")
    cards = host.rdma_cards()
    if locked is not None:
        yield Finding(
            severity="hang" if cards else "note",
            check="limits",
            what=f"a process may lock {in_words(locked)} of memory only",
            where="ulimit -l of this user",
            why=f"the RDMA cards {listed(list(cards))} need locked memory: without it NCCL fails "
            "to start"
            if cards
            else "no RDMA card is here that would need more; jobs over several hosts would",
            source=_DOCS,
            mend="docker run --ulimit memlock=-1 ..."
            if host.container
            else "* - memlock unlimited (a line in /etc/security/limits.conf; for services and "
            "Slurm LimitMEMLOCK=infinity)",
        )
    mapped = _limit(limits, "Max address space")
    if mapped is not None:
        yield Finding(
            severity="hang",
            check="limits",
            what=f"a process may map {in_words(mapped)} of virtual memory only",
            where="ulimit -v of this user",
            why=f"each load of a graph file reserves {_GRAPH_MB} MB of it, used or not, and CUDA "
            "as much as all memories together; below that NCCL fails to start",
            source="seen with NCCL 2.30.7, whose tables for a graph file are that large",
            mend="ulimit -v unlimited",
        )


def _limit(limits: str, name: str) -> int | None:
    """The soft limit in bytes; None if there is none."""
    found = re.search(rf"^{name}\s+([0-9]{{1,19}})\s", limits, re.MULTILINE)
    return int(found[1]) if found else None


# NUMA nodes: how sockets are split, whether devices know theirs, and pages that move.


_BASE = "sys/devices/system"
_CUMEM_HOST_SINCE = 560
"""The branch of drivers that came with CUDA 12.6."""


def packages(host: Host) -> dict[int, set[int]]:
    """Sockets that the CPUs of each NUMA node are in."""
    found = {}
    for node in host.numa_nodes():
        cpus = _cpus(host.text(f"{_BASE}/node/node{node}/cpulist"))
        told = [host.number(f"{_BASE}/cpu/cpu{cpu}/topology/physical_package_id") for cpu in cpus]
        found[node] = {package for package in told if package is not None and package >= 0}
    return found


def _cpus(text: str) -> list[int]:
    """The first CPU of each range of a list, which is enough to see the sockets."""
    return [int(first) for first in re.findall(r"(?:^|,)([0-9]{1,6})", text, re.ASCII)]


def check_numa(host: Host) -> Iterator[Finding | Unseen]:
    """NUMA nodes of each socket, and GPUs without one."""
    nodes = packages(host)
    if not nodes:
        yield Unseen(check="numa", what="NUMA nodes", why="/sys/devices/system/node has none")
        return
    yield from _split(nodes)
    yield from _joined(nodes)
    yield from _lost_gpus(host)
    yield from _balancing(host, len(nodes))


def _split(nodes: dict[int, set[int]]) -> Iterator[Finding]:
    sockets = sorted({package for found in nodes.values() for package in found})
    most = max(
        (sum(found == {socket} for found in nodes.values()) for socket in sockets), default=0
    )
    if most > 1:
        yield Finding(
            severity="note",
            check="numa",
            what=f"sockets are split into {most} NUMA nodes each (NPS or SNC in the BIOS)",
            where=f"{len(sockets)} socket(s), {len(nodes)} NUMA nodes",
            why=f"a bounce buffer lies on one node and has 1/{most} of its socket's memory "
            "channels; rings that bounce may be faster unsplit, which a plan can compare",
            source="AMD 56338, NUMA topology: NPSn interleaves memory over 1/n of the channels",
            mend="BIOS: NUMA nodes per socket = NPS1 (Intel: SNC = Disabled), then plan again",
        )


def _joined(nodes: dict[int, set[int]]) -> Iterator[Finding]:
    for node, found in nodes.items():
        if len(found) > 1:
            yield Finding(
                severity="slow",
                check="numa",
                what=f"one NUMA node spans {len(found)} sockets (NPS0, or NUMA off in the BIOS)",
                where=f"NUMA node {node}",
                why="memory is interleaved over sockets: half of each bounce buffer lies behind "
                "the link between them, wherever the GPU is",
                source="AMD 56338, NUMA topology: NPS0 interleaves memory over both sockets",
                mend="BIOS: NUMA nodes per socket = NPS1, node interleaving off",
            )


def _lost_gpus(host: Host) -> Iterator[Finding]:
    lost = [host.gpu_name(gpu) for gpu in host.gpus() if host.pci(gpu, "numa_node") == "-1"]
    if not lost:
        return
    virtual = host.virtual
    yield Finding(
        severity="note" if virtual or len(host.numa_nodes()) == 1 else "slow",
        check="numa",
        what="GPUs do not tell their NUMA node",
        where=listed(lost),
        why="which memory is near a GPU cannot be seen, here or by NCCL"
        + (": the virtual machine hides it" if virtual else ""),
        source="Linux, ABI/testing/sysfs-bus-pci: numa_node is -1 where firmware does not say",
        mend="give the virtual machine the host's NUMA topology (libvirt: numatune, pcie expander "
        "buses)"
        if virtual
        else "update the BIOS; numactl --cpunodebind per rank works around it",
    )


def _balancing(host: Host, nodes: int) -> Iterator[Finding]:
    if nodes > 1 and host.number("proc/sys/kernel/numa_balancing"):
        yield Finding(
            severity="note",
            check="numa",
            what="the kernel moves pages between NUMA nodes by itself (numa_balancing)",
            where="/proc/sys/kernel/numa_balancing",
            why="it unmaps pages to see who uses them, which disturbs copies and measurements; "
            "buffers that CUDA has pinned stay where they are",
            source="Linux, admin-guide/sysctl/kernel: to be disabled where work is bound to nodes",
            mend="sysctl -w kernel.numa_balancing=0 (and in /etc/sysctl.d)",
        )


def check_virtual(host: Host) -> Iterator[Finding | Unseen]:
    """Containers and virtual machines: what they hide, and where NCCL puts host buffers."""
    if host.container:
        if not host.has("sys/bus/pci/devices"):
            yield Unseen(
                check="container",
                what="the PCI tree",
                why="this container has no /sys; mount the host's, or run it outside",
            )
        yield from _host_buffers(host)
    if host.virtual and host.gpus():
        yield Unseen(
            check="virtual machine",
            what="PCI switches, ACS and the IOMMU of the real machine",
            why="a virtual machine shows its own; run it on the hypervisor as well",
        )


def _host_buffers(host: Host) -> Iterator[Finding]:
    branch = host.driver_version().partition(".")[0]
    newer = branch.isdecimal() and int(branch) >= _CUMEM_HOST_SINCE
    if newer and not host.environment.get("NCCL_CUMEM_HOST_ENABLE"):
        yield Finding(
            severity="note",
            check="container",
            what="NCCL allocates host buffers through CUDA here, which needs NUMA calls",
            where=f"a container with driver {host.driver_version()}",
            why="containers forbid them by default: an old NCCL then fails to start, a newer one "
            "falls back to /dev/shm, where buffers may lie on another NUMA node",
            source="NCCL user guide, Runtime issues: cuMem host allocations",
            mend="docker run --cap-add SYS_NICE ..., or NCCL_CUMEM_HOST_ENABLE=0 for old versions",
        )
