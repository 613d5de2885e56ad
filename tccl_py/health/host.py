"""A host as files below a root, which for the host one is on is `/`, and what no file tells.

Nothing that lies there can hurt: only regular files are read, so much of each and no more, and no
link leads out of the root.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from tccl_py.model.knowledge import PeerAccess
from tccl_py.model.machine import bus_order, normal_bus_id
from tccl_py.nccl.asked import NcclAnswer
from tccl_py.readers.installed_nccl import InstalledNccl

_MAX_BYTES = 64 * 1024
_MAX_ENTRIES = 10_000
_NVIDIA = "0x10de"
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_DRIVER = re.compile(r"Kernel Module\b.*?\s([0-9]{3,4}(?:\.[0-9]{1,4}){1,2})\b")


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """What the driver says of a GPU at rest; `complaints` are sentences on what spoils rates.

    `clock_mhz` is the clock that a setting holds it to, None if none does.
    """

    index: int
    bus_id: str
    name: str = ""
    persistence: bool | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DriverState:
    """What the driver (NVML) says of all GPUs; `unseen` says why, if it says nothing."""

    gpus: tuple[GpuState, ...] = ()
    peer_access: tuple[PeerAccess, ...] = ()
    unseen: str = ""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host to look at.

    Args:
        root: the directory that has its `sys`, `proc`, `etc` and `dev`.
        home: the user's home directory, as a path of that host.
        environment: the user's variables.
        driver: what NVML says, where it was asked.
        shm_free: free bytes of /dev/shm; None if nobody asked.
        nccl: the versions of NCCL that are installed, torch's first; None if nobody asked.
        own_rings: what NCCL does by default over all GPUs, or why it was not asked; "" where there
            are no two GPUs.
    """

    root: Path = Path("/")
    home: str = "/root"
    environment: Mapping[str, str] = field(default_factory=dict)
    driver: DriverState = DriverState(unseen="the driver was not asked")
    shm_free: int | None = None
    nccl: tuple[InstalledNccl, ...] | None = None
    own_rings: NcclAnswer | str = ""

    def path(self, name: str) -> Path:
        """Where a path of the host lies."""
        return self.root / name.lstrip("/")

    def real(self, name: str) -> Path | None:
        """The path behind links, or None if there is none or it lies outside of the root."""
        try:
            found = self.path(name).resolve(strict=True)
            root = self.root.resolve()
        except (OSError, RuntimeError, ValueError):
            return None
        return found if found.is_relative_to(root) else None

    def data(self, name: str, *, limit: int = _MAX_BYTES) -> bytes | None:
        """The first bytes of a regular file; None if there is none, or it cannot be read."""
        path = self.real(name)
        if path is None:
            return None
        try:
            # Opening a FIFO would wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            with os.fdopen(descriptor, "rb", closefd=False) as handle:
                return handle.read(limit)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def text(self, name: str) -> str:
        """A file's text without white space around it; "" if it cannot be read."""
        return (self.data(name) or b"").decode("utf-8", "replace").strip()

    def number(self, name: str) -> int | None:
        """The whole number in a file, or None."""
        text = self.text(name)
        return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII) else None

    def entries(self, name: str) -> tuple[str, ...]:
        """Names in a directory, in order; none if it cannot be read."""
        path = self.real(name)
        try:
            found = sorted(entry.name for entry in path.iterdir()) if path is not None else []
        except OSError:
            return ()
        return tuple(found[:_MAX_ENTRIES])

    def has(self, name: str) -> bool:
        """Whether there is such a file or directory."""
        return self.real(name) is not None

    # What several checks ask.

    def pci(self, bus_id: str, name: str) -> str:
        """An attribute of a PCI device."""
        return self.text(f"sys/bus/pci/devices/{bus_id}/{name}")

    def gpus(self) -> tuple[str, ...]:
        """Bus ids of NVIDIA's GPUs, in the order in which NVML counts them."""
        return self._gpus

    @cached_property
    def _gpus(self) -> tuple[str, ...]:
        found = {
            bus_id
            for name in self.entries("sys/bus/pci/devices")
            if (bus_id := normal_bus_id(name)) == name
            and self.pci(name, "vendor") == _NVIDIA
            and self.pci(name, "class").startswith(("0x0300", "0x0302"))
        }
        found |= {gpu.bus_id for gpu in self.driver.gpus}
        return tuple(sorted(found, key=bus_order))

    def gpu_name(self, bus_id: str) -> str:
        """`GPU 2 (0000:81:00.0)`."""
        return f"GPU {self.gpus().index(bus_id)} ({bus_id})"

    def ports_above(self, bus_id: str) -> tuple[str, ...]:
        """PCI bridges above a device, the root port first."""
        path = self.real(f"sys/bus/pci/devices/{bus_id}")
        return tuple(part for part in path.parts[:-1] if _BUS_ID.fullmatch(part)) if path else ()

    def numa_nodes(self) -> tuple[int, ...]:
        """NUMA nodes that have CPUs."""
        base = "sys/devices/system/node"
        numbers = [name[4:] for name in self.entries(base) if re.fullmatch("node[0-9]{1,5}", name)]
        return tuple(sorted(int(n) for n in numbers if self.text(f"{base}/node{n}/cpulist")))

    def rdma_cards(self) -> tuple[str, ...]:
        """Names of RDMA cards."""
        return self.entries("sys/class/infiniband")

    def driver_version(self) -> str:
        """The NVIDIA kernel module's version, or ""."""
        found = _DRIVER.search(self.text("proc/driver/nvidia/version"))
        return found[1] if found else ""

    @property
    def virtual(self) -> bool:
        """Whether this is a virtual machine."""
        flags = re.search(r"^flags\s*:(.*)$", self.text("proc/cpuinfo"), re.MULTILINE)
        return bool(flags and "hypervisor" in flags[1].split())

    @property
    def container(self) -> bool:
        """Whether this is inside a container."""
        if self.has(".dockerenv") or self.has("run/.containerenv"):
            return True
        return any(word in self.text("proc/1/cgroup") for word in ("docker", "kubepods", "lxc"))

    def kernel_options(self) -> tuple[str, ...]:
        """The kernel's command line, a word each."""
        return tuple(self.text("proc/cmdline").split())


# What the doctor says: findings, and what it could not see.


Severity = Literal["hang", "slow", "note"]
SEVERITIES: tuple[Severity, ...] = ("hang", "slow", "note")
"""From bad to harmless. `hang`: NCCL hangs or fails; `slow`: it or a measurement is spoilt."""
_SHOWN = 6


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be.

    `why` says what it does and `source` who says so; `mend` is what mends it, to be typed or done
    by a person, "" if nothing does.
    """

    severity: Severity
    check: str
    what: str
    where: str
    why: str
    source: str
    mend: str = ""


class Unseen(msgspec.Struct, frozen=True, kw_only=True):
    """Something that could not be looked at, and what would let the doctor see it."""

    check: str
    what: str
    why: str


def listed(names: list[str]) -> str:
    """Names in a row, the first few of many.

    >>> listed(["GPU 0", "GPU 1"])
    'GPU 0, GPU 1'
    """
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
