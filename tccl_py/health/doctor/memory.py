"""Memory that NCCL needs: /dev/shm, and the limits of a process."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tccl_py.health.doctor.findings import Finding, Unseen, listed
from tccl_py.health.doctor.host import Host

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
