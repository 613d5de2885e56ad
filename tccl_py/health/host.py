"""A host as files, answers of its driver and variables in force; findings about a host."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from tccl_py.model.links import Proof
from tccl_py.model.machine import PeerAccess
from tccl_py.nccl.asked import NcclAnswer
from tccl_py.nccl_conf import CONF_VARIABLE, HOST_FILE, ConfLine, conf_lines, home
from tccl_py.nccl_library import InstalledNccl
from tccl_py.readers.live import GpuFacts
from tccl_py.readers.sysfs import DEVICES, HostFiles, bus_order, normal_bus_id

if TYPE_CHECKING:
    from tccl_py.sources.profiled import GpuState

_NVIDIA = "0x10de"
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_DRIVER = re.compile(r"Kernel Module\b.*?\s([0-9]{3,4}(?:\.[0-9]{1,4}){1,2})\b")
_SHOWN, _SHOWN_CHARACTERS = 6, 60
_LOGS = ("var/log/dmesg", "var/log/kern.log", "var/log/messages")
_LOG_BYTES = 1 << 20
_MACHINES = ("x86_64", "aarch64")
_LIBRARY_FOLDERS = (
    *(f"usr/lib/{machine}-linux-gnu" for machine in _MACHINES),
    *("usr/lib64", "lib64", "usr/lib", "usr/local/lib"),
)
ENVIRONMENT = "the environment"
"""Where a variable stands that is in no file."""

Severity = Literal["hang", "slow", "note"]
SEVERITIES: tuple[Severity, ...] = ("hang", "slow", "note")
"""From bad to harmless. `hang`: NCCL hangs or fails; `slow`: NCCL or a measurement is slowed."""


class Defect(msgspec.Struct, frozen=True, kw_only=True):
    """A defect of a host."""

    severity: Severity
    check: str = ""
    what: str
    where: str
    measured: str = ""
    """"" where words say all."""
    expected: str = ""
    why: str
    """The effect."""
    source: str
    """The reference."""
    fix: str = ""
    """A command or action for a person; "" if there is none."""


class Unseen(msgspec.Struct, frozen=True, kw_only=True):
    """A fact that could not be read, and why, or how to see it."""

    check: str = ""
    what: str
    why: str


Results = Iterator[Defect | Unseen]
"""The results of a check."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of defect, or a variable that changes a plan: the parts of every finding of it."""

    severity: Severity
    what: str = ""
    why: str = ""
    source: str
    fix: str = ""
    harmless: str = ""
    """The value of a variable without effect."""
    workaround: bool = False
    """Whether the variable works around a fault."""
    releases: tuple[str, str] | None = None
    """The first and the last release of NCCL with the defect."""
    sm: int | None = None
    """The GPUs with it; None is all."""
    rdma: bool = False
    """Whether it says nothing on a host without RDMA NICs."""
    container_fix: str = ""
    """The fix in a container, where it is another one."""
    facts: tuple[str, ...] = ()
    """The facts of hosts whose difference it is, by the first word or the whole of their names."""
    variables: dict[str, tuple[str, str]] = {}
    """Variables with the value ("" is any) that it is about, and why."""


@functools.cache
def rules() -> dict[str, Rule]:
    """Return the rules of `rules.json` by name."""
    data = (resources.files("tccl_py.health") / "rules.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, Rule])


def defect(
    rule: str,
    where: str,
    *,
    severity: Severity | None = None,
    effect: str = "",
    container: bool = False,
    **fields: str,
) -> Defect:
    """Return a finding by a rule of `rules.json`.

    `effect` is added to the rule's `why`; `fields` replace or add fields of the finding.
    """
    base = rules()[rule]
    fix = (container and base.container_fix) or base.fix
    parts = {"what": base.what, "why": base.why + effect, "source": base.source, "fix": fix}
    parts |= fields
    parts = {name: valid_text(text) for name, text in parts.items()}
    return Defect(severity=severity or base.severity, where=valid_text(where), **parts)


def list_names(names: Sequence[str]) -> str:
    """Join names with commas, the first few of many."""
    hidden = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")


def mib(count: int) -> str:
    """Return a number of bytes in MiB."""
    return f"{count / 1024**2:,.6g} MiB"


def valid_text(text: str) -> str:
    """Return a text from outside as valid UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def cut(text: str) -> str:
    """Return the begin of a text from outside, as valid UTF-8."""
    text = valid_text(text)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


@dataclass(frozen=True, kw_only=True)
class DriverState:
    """The facts from NVML about all GPUs."""

    gpus: tuple[GpuFacts, ...] = ()
    peer_access: tuple[PeerAccess, ...] = ()
    conditions: tuple[GpuState, ...] = ()
    """Of each GPU, now idle, with sentences on what lowers rates."""
    unseen: str = ""
    """Why there are no facts."""


@dataclass(frozen=True, kw_only=True)
class HostState(HostFiles):
    """A host to examine."""

    home: str = "/root"
    """A path of its files."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The user's."""
    driver: DriverState = DriverState(unseen="the driver was not asked")
    """The facts from NVML."""
    shm_free: int | None = None
    """The free bytes of /dev/shm; None was not asked."""
    nccl: tuple[InstalledNccl, ...] | None = None
    """The installed versions, torch's first; None was not asked."""
    own_rings: NcclAnswer | str = ""
    """Default NCCL's over all GPUs, or why it was not asked; "" for fewer than two GPUs."""
    by_root: bool = False
    """Whether root looks at it."""
    log: bytes = b""
    """The running kernel's, as far as it may be read."""
    earlier_errors: Mapping[str, Counter[str]] = field(default_factory=dict)
    """What its devices had counted before."""
    links: Proof | None = None
    """The proof of the links between GPUs; None where none was made."""

    @property
    def name(self) -> str:
        """The host's name; that of the directory for a copy that does not tell it."""
        paths = "proc/sys/kernel/hostname", "etc/hostname"
        return next(filter(None, map(self.text, paths)), self.root.resolve().name)

    def pci(self, bus_id: str, name: str) -> str:
        """Return an attribute of a PCI device."""
        return self.text(f"{DEVICES}/{bus_id}/{name}")

    @cached_property
    def gpus(self) -> tuple[str, ...]:
        """Bus ids of NVIDIA's GPUs, in NVML's order; a container may be given some of them."""
        bus_ids = {
            bus_id
            for name in self.entries(DEVICES)
            if (bus_id := normal_bus_id(name)) == name
            and self.pci(name, "vendor") == _NVIDIA
            and self.pci(name, "class").startswith(("0x0300", "0x0302"))
        }
        bus_ids |= {gpu.bus_id for gpu in self.driver.gpus}
        return tuple(sorted(bus_ids, key=bus_order))

    def gpu_name(self, bus_id: str) -> str:
        """Return a GPU's name with NVML's number, as `GPU 2 (0000:81:00.0)`."""
        numbered = [gpu.bus_id for gpu in self.driver.gpus] or self.gpus
        if bus_id not in numbered:
            return f"a GPU that NVML does not show ({bus_id})"
        return f"GPU {numbered.index(bus_id)} ({bus_id})"

    def device_name(self, bus_id: str) -> str:
        """Return a GPU's name, or that of a bridge."""
        return self.gpu_name(bus_id) if bus_id in self.gpus else f"the bridge {bus_id}"

    def iommu_type(self, bus_id: str) -> str:
        """Return how the IOMMU takes the addresses of a device, as `identity` or `DMA-FQ`."""
        group = self.real(f"{DEVICES}/{bus_id}/iommu_group")
        return self.text(f"sys/kernel/iommu_groups/{group.name}/type") if group else ""

    def ports_above(self, bus_id: str) -> tuple[str, ...]:
        """Return the PCI bridges above a device, the root port first."""
        path = self.real(f"{DEVICES}/{bus_id}")
        return tuple(part for part in path.parts[:-1] if _BUS_ID.fullmatch(part)) if path else ()

    @property
    def library_folders(self) -> list[str]:
        """The folders of libraries: those of LD_LIBRARY_PATH, then the system's."""
        named = self.environment.get("LD_LIBRARY_PATH", "").split(":")
        return [*filter(None, named), *_LIBRARY_FOLDERS]

    def library(self, name: str) -> Path | None:
        """Return the library that a job loads by a name; None where no folder has it."""
        places = (self.real(f"{folder}/{name}") for folder in self.library_folders)
        return next(filter(None, places), None)

    def rdma_nics(self) -> tuple[str, ...]:
        """Return the names of RDMA NICs."""
        return self.entries("sys/class/infiniband")

    def driver_version(self) -> str:
        """Return the NVIDIA kernel module's version, or ""."""
        match = _DRIVER.search(self.text("proc/driver/nvidia/version"))
        return match[1] if match else ""

    def kernel_log(self) -> str:
        """Return the end of the kernel's log: of the running kernel, else of a file."""
        path = next(filter(self.has, _LOGS), "")
        data = self.log or (path and self.data(path, limit=1 << 26)) or b""
        return data[-_LOG_BYTES:].decode("utf-8", "replace")

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


def files_of_this_host() -> HostState:
    """Return this host without questions to its driver or NCCL."""
    return HostState(home=str(home()), environment=dict(os.environ))


def lines_of(host: HostState) -> list[ConfLine]:
    """Return the lines of NCCL's files, the user's first."""
    paths = (host.environment.get(CONF_VARIABLE) or f"{host.home}/.nccl.conf", str(HOST_FILE))
    return [line for path in paths for line in conf_lines(host.data(path) or b"", where=path)]


def in_force(host: HostState) -> dict[str, ConfLine]:
    """Return the variables of jobs by name: the environment's, then the first of the files."""
    settings = host.environment.items()
    variables = {
        name: ConfLine(name=name, value=text, where=ENVIRONMENT) for name, text in settings
    }
    for line in lines_of(host):
        variables.setdefault(line.name, line)
    return variables
