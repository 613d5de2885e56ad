"""This host as a machine of the `host` backend: cores as devices, by NUMA node."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.machine import MAX_GPUS, Fingerprint, Gpu, Machine, NumaNode, check
from tccl_py.readers.sysfs import read_word

SYSFS = Path("/sys")
ROOT = Path("/")
DEVICES = 8  # default number of devices: the usual size of a node


def host_machine(
    devices: int | None = None,
    *,
    cpus: Iterable[int] | None = None,
    sysfs: Path = SYSFS,
    least: int = 2,
) -> Machine:
    """Return a stand-in for this host: `C` places are its NUMA nodes, `G` places are cores.

    Cores are picked evenly over the NUMA nodes; with more devices than cores, devices share cores.
    Bus ids are made up, with the core's number as domain. `devices` None is one per core, at least
    `least` (2 in a machine, 1 in a node of several) and at most 8; `cpus` None is all cores of this
    process.
    """
    nodes = sysfs / "devices" / "system" / "node"
    ids = online_nodes(nodes)
    usable = sorted(set(os.sched_getaffinity(0) if cpus is None else cpus))
    node_of = _nodes_of(usable, ids, nodes)
    usable.sort(key=lambda cpu: (node_of[cpu], cpu))
    count = max(least, min(len(usable), DEVICES)) if devices is None else devices
    if not least <= count <= MAX_GPUS:
        what = f"has {count} device{'s' * (count != 1)}"
        raise InputError("host machine", what, f"{least} to {MAX_GPUS} are right")
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


def cpus_of_devices(machine: Machine) -> dict[int, tuple[int, ...]]:
    """Return the cores that each device's worker is pinned to, by the device's index."""
    return {gpu.index: (int(gpu.bus_id.split(":")[0], 16),) for gpu in machine.gpus}


def shared_cores(machine: Machine) -> Iterator[str]:
    """Yield a warning if devices share cores."""
    devices, cores = len(machine.gpus), len(set(cpus_of_devices(machine).values()))
    if devices > cores:
        few = f"; --devices {cores} gives each a core" if cores > 1 else ""
        yield (
            f"{devices} devices of the host backend share {cores} core{'s' * (cores != 1)} and "
            f"wait for each other: their rates say little, and sets may fail{few}"
        )


def host_fingerprint(machine: Machine, *, root: Path = ROOT) -> Fingerprint:
    """Return the identity of this host: its machine id or, as in many containers, its boot id."""
    host = f"host:{cpu_model(root)}:{_host_id(root)}"
    cores = cpus_of_devices(machine)
    return Fingerprint(
        gpu_uuids=tuple(f"{host}:core{cores[index][0]}" for index in machine.gpu_indices),
        driver="none",
        numa_count=len(machine.numa_nodes),
        kernel=platform.release(),
    )


def cpu_model(root: Path = ROOT) -> str:
    """What the CPU calls itself; kernels of aarch64 do not say, and the architecture stands in."""
    match = re.search(
        r"^model name\s*:\s*(\S.*)$", read_word(root / "proc" / "cpuinfo"), re.MULTILINE
    )
    return match[1].strip() if match else platform.machine()


def _nodes_of(cpus: Iterable[int], ids: Iterable[int], nodes: Path) -> dict[int, int]:
    """Return the index (not the system's number) of each core's NUMA node."""
    try:
        on = {cpu: i for i, id_ in enumerate(ids) for cpu in cpus_of_node(id_, nodes)}
    except MeasurementError:
        # A kernel without NUMA: one node has all.
        on = dict.fromkeys(range(os.cpu_count() or 1), 0)
    found = {cpu: on[cpu] for cpu in cpus if cpu in on}
    for cpu in cpus:
        if cpu not in found:
            known = ",".join(map(str, sorted(on)))
            raise InputError("host machine", f"core {cpu} is not there", f"there are {known}")
    if not found:
        raise InputError("host machine", "has no cores", "name at least one")
    return found


def _host_id(root: Path) -> str:
    for path in ("etc/machine-id", "proc/sys/kernel/random/boot_id"):
        text = read_word(root / path)
        if text:
            # systemd asks not to show the machine id itself: machine-id(5).
            return hashlib.sha256(f"tccl {text}".encode()).hexdigest()[:12]
    return platform.node()
