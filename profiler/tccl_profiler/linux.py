"""What the kernel is asked about NUMA nodes: which there are, binding to one, where pages lie.

System calls go through ctypes, so that libnuma need not be installed. A call without a number
here, or refused by a container's seccomp profile, raises OSError (ENOSYS, EPERM); callers decide.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from tccl_py.errors import MeasurementError

NODES = Path("/sys/devices/system/node")
NUMA_MAPS = Path("/proc/self/numa_maps")
MEMINFO = Path("/proc/meminfo")

NO_NODE = -1  # a page that is in no node's memory: not faulted in, or swapped out
MOST_PAGES_ASKED = 4096  # per query; a wrong binding moves far more than one page in 4096

# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux.
SYSCALLS = {
    "x86_64": {"mbind": 237, "move_pages": 279},
    "aarch64": {"mbind": 235, "move_pages": 239},
}
MPOL_BIND = 2  # include/uapi/linux/mempolicy.h
MADV_POPULATE_WRITE = 23  # include/uapi/asm-generic/mman-common.h; since Linux 5.14

_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read the kernel's list format, of CPUs or of nodes; an empty list is allowed.

    >>> parse_cpu_list("0-3,8\\n")
    (0, 1, 2, 3, 8)
    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise MeasurementError(f"{text.strip()!r} is no CPU list; one looks like '0-3,8'")
        first, last = int(match[1]), int(match[2] or match[1])
        numbers += range(first, last + 1)
    return tuple(numbers)


def online_nodes(nodes: Path = NODES) -> tuple[int, ...]:
    """Nodes of this machine; a kernel built without NUMA has no such file and counts as node 0."""
    try:
        return parse_cpu_list((nodes / "online").read_text())
    except FileNotFoundError:
        return (0,)


def cpus_of_node(node: int, nodes: Path = NODES) -> tuple[int, ...]:
    """CPUs of a node; none if it is memory only.

    Raises:
        MeasurementError: there is no such node.
    """
    path = nodes / f"node{node}" / "cpulist"
    try:
        return parse_cpu_list(path.read_text())
    except OSError as error:
        raise MeasurementError(
            f"{path}: {error.strerror}; a node that is online is right"
        ) from error


def pin_to_cpus(cpus: Iterable[int]) -> frozenset[int]:
    """Let the calling thread run on these CPUs only, and return those it might run on before.

    Raises:
        MeasurementError: none of them is open to this process.
    """
    before, wanted = frozenset(os.sched_getaffinity(0)), frozenset(cpus)
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        asked = ",".join(map(str, sorted(wanted))) or "none"
        raise MeasurementError(
            f"cannot run on CPUs {asked}: {error.strerror}; this process may use some of "
            f"{','.join(map(str, sorted(before)))}, or what its cpuset allows"
        ) from error
    return before


def leave_binding() -> tuple[int, int]:
    """Let the calling thread, and what it starts, run wherever its cpuset allows.

    mpirun binds ranks to a core each, and with them the threads by which NCCL moves data.

    Returns:
        tuple[int, int]: on how many CPUs it might run before, and how many it may now.
    """
    before = len(os.sched_getaffinity(0))
    # The kernel takes those that there are and that the cpuset has.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    return before, len(os.sched_getaffinity(0))


def available_bytes(node: int | None, nodes: Path = NODES, meminfo: Path = MEMINFO) -> int | None:
    """Memory that can be had without swapping, of one node or of the machine; None if not told.

    A node's file has no MemAvailable, so free memory and what can be dropped are added up.
    """
    path = meminfo if node is None else nodes / f"node{node}" / "meminfo"
    try:
        text = path.read_text()
    except OSError:
        return None
    lines = re.findall(r"^(?:Node \d+ )?([\w()]+):\s+(\d+)", text, re.MULTILINE)
    kib = {name: int(amount) for name, amount in lines}
    if "MemAvailable" in kib:
        return 1024 * kib["MemAvailable"]
    parts = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return 1024 * sum(kib.get(part, 0) for part in parts) if "MemFree" in kib else None


def bind(address: int, size: int, node: int) -> None:
    """Have pages of this mapping that are still to be faulted in come from the node only: mbind(2).

    Raises:
        OSError: EPERM or ENOSYS where the call is refused, EINVAL for a node not allowed here.
    """
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << (node % _WORD_BITS)
    bits = words * _WORD_BITS + 1  # the kernel takes one off before it reads the mask
    arguments = (
        ctypes.c_void_p(address),
        ctypes.c_ulong(size),
        ctypes.c_int(MPOL_BIND),
        mask,
        ctypes.c_ulong(bits),
        ctypes.c_uint(0),
    )
    _syscall("mbind", *arguments)


def populate(address: int, size: int) -> None:
    """Fault every page of a mapping in, ready to be written; contents stay.

    Unlike `mmap.madvise`, it lets other threads run meanwhile (seconds with gigabytes).

    Raises:
        OSError: EINVAL before Linux 5.14; ENOMEM or EFAULT where there is not enough memory.
    """
    advice = ctypes.c_int(MADV_POPULATE_WRITE)
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "madvise")


def pages_by_node(address: int, size: int, numa_maps: Path = NUMA_MAPS) -> dict[int, int]:
    """How many pages of a mapping, of those asked about, lie on each node (NO_NODE: on none).

    move_pages(2) is asked about at most MOST_PAGES_ASKED pages; where it is refused,
    /proc/self/numa_maps about all of the mapping.

    Raises:
        MeasurementError: neither can tell.
    """
    try:
        return dict(Counter(_nodes_by_move_pages(sampled_pages(address, size))))
    except OSError as error:
        refusal = f"move_pages: {error.strerror}"
    try:
        return pages_in_numa_maps(numa_maps.read_text(), address, size)
    except OSError as error:
        refusal += f", {numa_maps}: {error.strerror}"
    except LookupError as error:
        refusal += f", {numa_maps}: {error.args[0]}"
    raise MeasurementError(
        f"nothing here tells which NUMA node pages lie on ({refusal}); "
        "allow move_pages (docker run --cap-add SYS_NICE)"
    )


def sampled_pages(address: int, size: int) -> list[int]:
    """Addresses of the pages to ask about: all, or evenly spaced ones with the first and last.

    >>> len(sampled_pages(0, 1 << 30))
    4096
    """
    pages = -(-size // mmap.PAGESIZE)
    numbers = np.linspace(0, pages - 1, min(pages, MOST_PAGES_ASKED)).round().astype(np.int64)
    return [address + int(number) * mmap.PAGESIZE for number in numbers]


def pages_in_numa_maps(text: str, address: int, size: int) -> dict[int, int]:
    """Pages by node that numa_maps gives for the mapping that contains an address.

    Lines have no end address, so the mapping is the last that begins at or below it.

    Raises:
        LookupError: the text does not tell.
    """
    lines = [line.split() for line in text.splitlines() if line]
    below = [fields for fields in lines if int(fields[0], 16) <= address]
    if not below:
        raise LookupError(f"no mapping contains {address:#x}")
    fields = max(below, key=lambda fields: int(fields[0], 16))
    # The counts are behind the file's name, which is free text without blanks (escaped as \040).
    counts = [re.fullmatch(r"N(\d+)=(\d+)", field) for field in fields[2:]]
    found = {int(match[1]): int(match[2]) for match in counts if match}
    if not found:
        raise LookupError(f"no page counts for the mapping at {address:#x}")
    missing = -(-size // mmap.PAGESIZE) - sum(found.values())
    return found | {NO_NODE: missing} if missing > 0 else found


def _nodes_by_move_pages(addresses: list[int]) -> list[int]:
    """Node of each page, NO_NODE for one that is in no memory.

    Raises:
        OSError: the call is refused.
    """
    count = len(addresses)
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)()
    # No target nodes: nothing is moved, `status` says where pages are, or minus an errno.
    arguments = (ctypes.c_int(0), ctypes.c_ulong(count), pages, None, status, ctypes.c_int(0))
    _syscall("move_pages", *arguments)
    return [node if node >= 0 else NO_NODE for node in status]


def _syscall(name: str, *arguments: object) -> None:
    """Make a system call by name; OSError says which one failed and why."""
    number = SYSCALLS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), name)
    if _libc.syscall(ctypes.c_long(number), *arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


# Processes that must not wait for a core while they wait for a release.


AGENT, LANES = 1, 2
"""Real-time priorities. Lanes nap, and go before the agent that stores their flag."""
_PROC = Path("/proc")


def threads_of(pids: Iterable[int]) -> list[int]:
    """All threads of some processes that this one has started and that have not ended.

    The number of one that has ended may be another process's by now.
    """
    found, own = [], str(os.getpid())
    for pid in pids:
        with contextlib.suppress(OSError):
            stat = (_PROC / str(pid) / "stat").read_text()
            # State and parent follow the name, which may hold anything: proc(5).
            if stat.rpartition(")")[2].split()[1] == own:
                found += [int(entry.name) for entry in (_PROC / str(pid) / "task").iterdir()]
    return found


def hasten(threads: Iterable[int], priority: int) -> None:
    """Let threads (0 is the calling one) go before others; without the right to, nothing."""
    policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, policy, os.sched_param(priority))


def calm(threads: Iterable[int]) -> None:
    """Let threads wait for their turn as usual."""
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


@contextlib.contextmanager
def urgent(lanes: Iterable[int] = ()) -> Iterator[None]:
    """The calling thread, and those of lanes, go before others while the context lasts."""
    threads = tuple(lanes)
    hasten(threads, LANES)
    hasten((0,), AGENT)
    try:
        yield
    finally:
        calm((0, *threads))
