"""A host as files below a root directory and answers of its driver; findings about a host.

Hostile files do no harm: only regular files are read, each up to a limit, and no link leads out of
the root.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import reading
from tccl_py.model.machine import PeerAccess, bus_order, normal_bus_id
from tccl_py.nccl.asked import NcclAnswer
from tccl_py.nccl_library import InstalledNccl

_MAX_BYTES = 64 * 1024
_MAX_ENTRIES = 10_000
_NVIDIA = "0x10de"
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_DRIVER = re.compile(r"Kernel Module\b.*?\s([0-9]{3,4}(?:\.[0-9]{1,4}){1,2})\b")
_SHOWN = 6

Severity = Literal["hang", "slow", "note"]
SEVERITIES: tuple[Severity, ...] = ("hang", "slow", "note")
"""From bad to harmless. `hang`: NCCL hangs or fails; `slow`: NCCL or a measurement is slowed."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A defect of a host.

    `measured` and `expected` are "" where words say all; `why` is the effect, `source` the
    reference, `fix` a command or action for a person, "" if there is none.
    """

    severity: Severity
    check: str = ""
    what: str
    where: str
    measured: str = ""
    expected: str = ""
    why: str
    source: str
    fix: str = ""


class Unseen(msgspec.Struct, frozen=True, kw_only=True):
    """A fact that could not be read, and why, or how to see it."""

    check: str = ""
    what: str
    why: str


Found = Iterator[Finding | Unseen]
"""The results of a check."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of defect, or a variable that changes a plan: the parts of every finding of it.

    `harmless` is the value of a variable without effect.
    """

    severity: Severity
    what: str = ""
    why: str = ""
    source: str
    fix: str = ""
    harmless: str = ""


@functools.cache
def rules() -> dict[str, Rule]:
    """Return the rules of `rules.json` by name."""
    data = (resources.files("tccl_py.health") / "rules.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, Rule])


def defect(
    rule: str, where: str, *, severity: Severity | None = None, effect: str = "", **fields: str
) -> Finding:
    """Return a finding by a rule of `rules.json`.

    `effect` is added to the rule's `why`; `fields` replace or add fields of the finding.
    """
    found = rules()[rule]
    parts = {"what": found.what, "why": found.why + effect, "source": found.source}
    parts |= {"fix": found.fix, **fields}
    return Finding(severity=severity or found.severity, where=where, **parts)


def listed(names: Sequence[str]) -> str:
    """Join names with commas, the first few of many."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """The driver's facts about an idle GPU; `complaints` are sentences on what lowers rates.

    `clock_mhz` is the highest clock by the settings, `clock_max_mhz` the GPU's.
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
    """The facts from NVML about all GPUs; `unseen` is the reason if there are none."""

    gpus: tuple[GpuState, ...] = ()
    peer_access: tuple[PeerAccess, ...] = ()
    unseen: str = ""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host to examine: `root` has its `sys`, `proc`, `etc` and `dev`; `home` is a path of it.

    `environment` is the user's, `driver` the facts from NVML, `shm_free` the free bytes of
    /dev/shm, `nccl` the installed versions, torch's first, each None if not asked. `own_rings` are
    default NCCL's over all GPUs, or why it was not asked; "" for fewer than two GPUs.
    """

    root: Path = Path("/")
    home: str = "/root"
    environment: Mapping[str, str] = field(default_factory=dict)
    driver: DriverState = DriverState(unseen="the driver was not asked")
    shm_free: int | None = None
    nccl: tuple[InstalledNccl, ...] | None = None
    own_rings: NcclAnswer | str = ""

    def real(self, name: str) -> Path | None:
        """Return a path of the host with links resolved; None if missing or outside the root."""
        try:
            found = (self.root / name.lstrip("/")).resolve(strict=True)
            root = self.root.resolve()
        except (OSError, RuntimeError, ValueError):
            return None
        return found if found.is_relative_to(root) else None

    def data(self, name: str, *, limit: int = _MAX_BYTES) -> bytes | None:
        """Return the first bytes of a regular file; None if there is none or it is unreadable."""
        path = self.real(name)
        if path is None:
            return None
        try:
            with reading(path) as handle:
                return handle.read(limit)
        except InputError:
            return None

    def text(self, name: str) -> str:
        """Return a file's text, stripped; "" if unreadable."""
        return (self.data(name) or b"").decode("utf-8", "replace").strip()

    def number(self, name: str) -> int | None:
        """Return the whole number in a file, or None."""
        text = self.text(name)
        return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII) else None

    def entries(self, name: str) -> tuple[str, ...]:
        """Return the sorted names in a directory; empty if unreadable."""
        path = self.real(name)
        try:
            found = sorted(entry.name for entry in path.iterdir()) if path is not None else []
        except OSError:
            return ()
        return tuple(found[:_MAX_ENTRIES])

    def has(self, name: str) -> bool:
        """Return whether a file or directory exists."""
        return self.real(name) is not None

    def pci(self, bus_id: str, name: str) -> str:
        """Return an attribute of a PCI device."""
        return self.text(f"sys/bus/pci/devices/{bus_id}/{name}")

    @cached_property
    def gpus(self) -> tuple[str, ...]:
        """Bus ids of NVIDIA's GPUs, in NVML's order."""
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
        """Return a GPU's name, as `GPU 2 (0000:81:00.0)`."""
        return f"GPU {self.gpus.index(bus_id)} ({bus_id})"

    def ports_above(self, bus_id: str) -> tuple[str, ...]:
        """Return the PCI bridges above a device, the root port first."""
        path = self.real(f"sys/bus/pci/devices/{bus_id}")
        return tuple(part for part in path.parts[:-1] if _BUS_ID.fullmatch(part)) if path else ()

    def numa_nodes(self) -> tuple[int, ...]:
        """Return the NUMA nodes with CPUs."""
        base = "sys/devices/system/node"
        numbers = [name[4:] for name in self.entries(base) if re.fullmatch("node[0-9]{1,5}", name)]
        return tuple(sorted(int(n) for n in numbers if self.text(f"{base}/node{n}/cpulist")))

    def rdma_nics(self) -> tuple[str, ...]:
        """Return the names of RDMA NICs."""
        return self.entries("sys/class/infiniband")

    def driver_version(self) -> str:
        """Return the NVIDIA kernel module's version, or ""."""
        found = _DRIVER.search(self.text("proc/driver/nvidia/version"))
        return found[1] if found else ""

    @property
    def virtual(self) -> bool:
        """True if the host is a virtual machine."""
        flags = re.search(r"^flags\s*:(.*)$", self.text("proc/cpuinfo"), re.MULTILINE)
        return bool(flags and "hypervisor" in flags[1].split())

    @property
    def container(self) -> bool:
        """True if the host is a container."""
        if self.has(".dockerenv") or self.has("run/.containerenv"):
            return True
        return any(word in self.text("proc/1/cgroup") for word in ("docker", "kubepods", "lxc"))
