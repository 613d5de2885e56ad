"""This host by Linux: NUMA nodes, CPUs, priorities, and cores as a machine's devices.

Calls go through ctypes, so that libnuma need not be installed. A call without a number here, or
refused by a container's seccomp profile, raises OSError (ENOSYS, EPERM); callers decide.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tccl_py.errors import MeasurementError, require, spell
from tccl_py.model.machine import MAX_GPUS, Fingerprint, Gpu, Machine, NumaNode, check
from tccl_py.readers.sysfs import HostFiles

HOST = HostFiles()
_NODES = "sys/devices/system/node"
NUMA_MAPS = Path("/proc/self/numa_maps")
_PROC = Path("/proc")

NO_NODE = -1  # a page that is in no node's memory: not faulted in, or swapped out

# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux.
MBIND = {"x86_64": 237, "aarch64": 235}
MPOL_BIND = 2  # include/uapi/linux/mempolicy.h
MADV_POPULATE_WRITE = 23  # include/uapi/asm-generic/mman-common.h; since Linux 5.14
_PR_SET_TIMERSLACK = 29  # include/uapi/linux/prctl.h
_SCHED_ATTR = {"x86_64": (315, 314), "aarch64": (275, 274)}  # sched_getattr, sched_setattr
_SLICE_NS = 100_000  # the shortest that Linux grants

AGENT_PRIORITY, LANES_PRIORITY = 1, 2
"""Real-time priorities. Lanes nap, and go before the agent that stores their flag."""

_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read the kernel's list format, of CPUs or of nodes; an empty list is allowed.

    >>> parse_cpu_list("0-3,8\\n")
    (0, 1, 2, 3, 8)
    """
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return tuple(n for first, last in ranges for n in range(int(first), int(last or first) + 1))


def online_nodes(files: HostFiles = HOST) -> tuple[int, ...]:
    """Return the nodes of this machine; a kernel without NUMA counts as node 0."""
    return parse_cpu_list(files.text(f"{_NODES}/online")) or (0,)


def cpus_of_node(node: int, files: HostFiles = HOST) -> tuple[int, ...]:
    """Return the CPUs of a node, none if it is memory only."""
    path = f"{_NODES}/node{node}/cpulist"
    if not files.has(path):
        raise MeasurementError(f"/{path}: is missing; a node that is online is right")
    return parse_cpu_list(files.text(path))


def pin_to_cpus(cpus: Iterable[int]) -> frozenset[int]:
    """Pin the calling thread to these CPUs, and return its CPUs before."""
    before, allowed = frozenset(os.sched_getaffinity(0)), frozenset(cpus)
    try:
        os.sched_setaffinity(0, allowed)
    except OSError as error:
        listed = ",".join(map(str, sorted(allowed))) or "none"
        raise MeasurementError(
            f"cannot run on CPUs {listed}: {error.strerror}; this process may use some of "
            f"{','.join(map(str, sorted(before)))}, or what its cpuset allows"
        ) from error
    return before


def leave_binding() -> tuple[int, int]:
    """Let the calling thread and its children use the whole cpuset; return CPUs before and now.

    mpirun binds ranks to a core each, and with them the threads by which NCCL moves data.
    """
    before = len(os.sched_getaffinity(0))
    # The kernel takes the CPUs that exist and that the cpuset has.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    return before, len(os.sched_getaffinity(0))


def available_bytes(node: int | None, files: HostFiles = HOST) -> int | None:
    """Return memory that is free without swapping, of a node or the machine; None if unknown.

    A node's file has no MemAvailable: free and reclaimable memory are added up.
    """
    text = files.text("proc/meminfo" if node is None else f"{_NODES}/node{node}/meminfo")
    lines = re.findall(r"^(?:Node \d+ )?([\w()]+):\s+(\d+)", text, re.MULTILINE)
    kib = {name: int(amount) for name, amount in lines}
    if "MemAvailable" in kib:
        return 1024 * kib["MemAvailable"]
    parts = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return 1024 * sum(kib.get(part, 0) for part in parts) if "MemFree" in kib else None


def bind(address: int, size: int, node: int) -> None:
    """Have pages of this mapping that are not faulted in yet come from the node only: mbind(2).

    Raises OSError: EPERM or ENOSYS where the call is refused, EINVAL for a node not allowed here.
    """
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << (node % _WORD_BITS)
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)  # the kernel takes 1 off before it reads the mask
    where = ctypes.c_void_p(address), ctypes.c_ulong(size)
    number = MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "mbind")
    policy = ctypes.c_int(MPOL_BIND), mask, bits, ctypes.c_uint(0)
    _check(_libc.syscall(ctypes.c_long(number), *where, *policy), "mbind")


def populate(address: int, size: int) -> None:
    """Fault every page of a mapping in, ready to be written; contents stay.

    Unlike `mmap.madvise`, it lets other threads run meanwhile (seconds with gigabytes). Raises
    OSError: EINVAL before Linux 5.14; ENOMEM or EFAULT where there is not enough memory.
    """
    advice = ctypes.c_int(MADV_POPULATE_WRITE)
    _check(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice), "madvise")


def _check(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), call)


def pages_by_node(address: int, size: int, numa_maps: Path = NUMA_MAPS) -> dict[int, int]:
    """Return how many pages of a mapping lie on each node (or NO_NODE); see proc_pid_numa_maps(5).

    Lines have no end address, so the mapping is the last that begins at or below the address.
    """
    try:
        lines = [line.split() for line in numa_maps.read_text().splitlines() if line]
    except OSError as error:
        raise MeasurementError(f"NUMA nodes of pages: {numa_maps}: {error.strerror}") from error
    below = [fields for fields in lines if int(fields[0], 16) <= address]
    fields = max(below, key=lambda fields: int(fields[0], 16), default=[])
    # The counts are behind the file's name, which is free text without blanks (escaped as \040).
    counts = [re.fullmatch(r"N(\d+)=(\d+)", field) for field in fields[2:]]
    pages = {int(match[1]): int(match[2]) for match in counts if match}
    if not pages:
        raise MeasurementError(f"{numa_maps} does not tell the NUMA nodes of pages at {address:#x}")
    missing = -(-size // mmap.PAGESIZE) - sum(pages.values())
    return pages | {NO_NODE: missing} if missing > 0 else pages


def wake_promptly() -> None:
    """Have the thread's sleeps end in time (20 us take 70 by default), and its turns come soon."""
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
    _ask_for_short_slices(0)


def _ask_for_short_slices(thread: int) -> None:
    """Let a thread (0 is the calling thread) go before threads with longer slices of time.

    On a busy core a thread that wakes up or has yielded waits for milliseconds otherwise. Before
    Linux 6.12 nothing changes.
    """
    # struct sched_attr: size and policy, flags, nice and priority, runtime, deadline, period.
    attributes = (ctypes.c_uint64 * 6)()
    size = ctypes.c_uint(ctypes.sizeof(attributes))
    read, write = map(ctypes.c_long, _SCHED_ATTR.get(platform.machine(), (-1, -1)))
    read_well = _libc.syscall(read, thread, attributes, size, ctypes.c_uint(0)) == 0
    if read_well and attributes[0] >> 32 == os.SCHED_OTHER:
        attributes[1] |= 1  # SCHED_FLAG_RESET_ON_FORK
        attributes[3] = _SLICE_NS
        _libc.syscall(write, thread, attributes, ctypes.c_uint(0))


def yield_core() -> None:
    """Yield the core without the interpreter's lock, which os.sched_yield keeps before 3.14."""
    _libc.sched_yield()


# Where others compute on the same cores, a process that wakes up waits for milliseconds until it is
# scheduled; a set whose hosts start so far apart is not measured together.
def threads_of(pids: Iterable[int]) -> list[int]:
    """Return all threads of live child processes; the pid of an ended child may be reused."""
    threads, own_pid = [], str(os.getpid())
    for pid in pids:
        with contextlib.suppress(OSError):
            stat = (_PROC / str(pid) / "stat").read_text()
            # State and parent follow the name, which may hold anything: proc(5).
            if stat.rpartition(")")[2].split()[1] == own_pid:
                threads += [int(entry.name) for entry in (_PROC / str(pid) / "task").iterdir()]
    return threads


def set_fifo_priority(threads: Iterable[int], priority: int) -> None:
    """Schedule threads (0 is the calling thread) by SCHED_FIFO, where that is permitted."""
    policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, policy, os.sched_param(priority))


def reset_priority(threads: Iterable[int]) -> None:
    """Schedule threads as usual, with short slices again."""
    policy = os.SCHED_OTHER | os.SCHED_RESET_ON_FORK  # who set the flag may not take it back
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, policy, os.sched_param(0))
            _ask_for_short_slices(thread)


@contextlib.contextmanager
def realtime(lanes: Iterable[int] = ()) -> Iterator[None]:
    """Run the calling thread, and those of lanes, at real-time priority within the context."""
    threads = tuple(lanes)
    set_fifo_priority(threads, LANES_PRIORITY)
    set_fifo_priority((0,), AGENT_PRIORITY)
    try:
        yield
    finally:
        reset_priority((0, *threads))


# This host as a machine of the `host` backend, by NUMA node.
DEVICES = 8  # default number of devices: the usual size of a node


def host_machine(
    devices: int | None = None,
    *,
    cpus: Iterable[int] | None = None,
    files: HostFiles = HOST,
    least: int = 2,
) -> Machine:
    """Return a stand-in for this host: `C` places are its NUMA nodes, `G` places are cores.

    Cores are picked evenly over the NUMA nodes; with more devices than cores, devices share cores.
    Bus ids are made up, with the core's number as domain. `devices` None is one per core, at least
    `least` (2 in a machine, 1 in a node of several) and at most 8; `cpus` None is all cores of this
    process.
    """
    ids = online_nodes(files)
    usable = sorted(os.sched_getaffinity(0) if cpus is None else cpus)
    node_of = dict.fromkeys(usable, 0)
    with contextlib.suppress(MeasurementError):  # a kernel without NUMA: one node has all
        node_of |= {cpu: i for i, id_ in enumerate(ids) for cpu in cpus_of_node(id_, files)}
    usable.sort(key=lambda cpu: (node_of[cpu], cpu))
    count = max(least, min(len(usable), DEVICES)) if devices is None else devices
    fault = f"has {spell(count, 'device')}"
    require(least <= count <= MAX_GPUS, "host machine", fault, f"{least} to {MAX_GPUS} are right")
    name = cpu_model()
    picked = [usable[i * len(usable) // count] for i in range(count)]
    gpus = tuple(
        Gpu(index=i, bus_id=f"{core:04x}:{i + 1:02x}:00.0", parent=f"C{node_of[core]}", name=name)
        for i, core in enumerate(picked)
    )
    arch = platform.machine()
    numa_nodes = tuple(NumaNode(index=i, numa_id=id_, arch=arch) for i, id_ in enumerate(ids))
    machine = Machine(name=f"host-{count}", numa_nodes=numa_nodes, gpus=gpus)
    return check(machine, where="host machine")


def shared_cores(machine: Machine) -> Iterator[str]:
    """Yield a warning if devices share cores."""
    devices, cores = len(machine.gpus), len(set(cpus_of_devices(machine).values()))
    if devices > cores:
        few = f"; {cores} devices have a core each" if cores > 1 else ""
        yield (
            f"{devices} devices of the host backend share {spell(cores, 'core')} and "
            f"wait for each other: their rates say little, and sets may fail{few}"
        )


def host_fingerprint(machine: Machine, files: HostFiles = HOST) -> Fingerprint:
    """Return the identity of this host: its machine id or, as in many containers, its boot id."""
    ids = map(files.text, ("etc/machine-id", "proc/sys/kernel/random/boot_id"))
    # systemd asks not to show the machine id itself: machine-id(5).
    digests = [hashlib.sha256(f"tccl {text}".encode()).hexdigest()[:12] for text in ids if text]
    host = f"host:{cpu_model(files)}:{(*digests, platform.node())[0]}"
    cores = cpus_of_devices(machine)
    return Fingerprint(
        gpu_uuids=tuple(f"{host}:core{cores[index][0]}" for index in machine.gpu_indices),
        driver="none",
        numa_count=len(machine.numa_nodes),
        kernel=platform.release(),
    )


def cpu_model(files: HostFiles = HOST) -> str:
    """What the CPU calls itself; kernels of aarch64 do not say, and the architecture stands in."""
    match = re.search(r"^model name\s*:\s*(\S.*)$", files.text("proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def cpus_of_devices(machine: Machine) -> dict[int, tuple[int, ...]]:
    """Return the cores that each device's worker is pinned to, by the device's index."""
    return {gpu.index: (int(gpu.bus_id.split(":")[0], 16),) for gpu in machine.gpus}
