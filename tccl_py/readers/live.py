"""The machine this process runs on -> Machine, Knowledge and Fingerprint; GPUs visible to a job.

GPUs, NVLinks and peer access come from the driver (NVML), the PCI tree, NUMA nodes and network
cards from sysfs, so that the result is the same as NCCL's view.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import permutations, product
from typing import Any

import msgspec

from tccl_py.errors import InputError, require
from tccl_py.files import pick
from tccl_py.model.cards import assume_p2p, has_gpu_direct
from tccl_py.model.machine import (
    Fingerprint,
    Gpu,
    HiddenLink,
    Knowledge,
    Machine,
    NvLink,
    NvSwitch,
    PciBridge,
    PciLink,
    PeerAccess,
    check,
    check_knowledge,
)
from tccl_py.readers.sysfs import HostFiles, PciTree, network_ports, normal_bus_id, numa_nodes

_HERE = "this machine"
HOST = HostFiles()
VARIABLE = "CUDA_VISIBLE_DEVICES"
_NOT_ANSWERED = (2, 3, 4, 6, 13, 22, 26)
"""NVML_ERROR_ INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND,
VGPU_ECC_NOT_SUPPORTED, DEPRECATED: the question does not apply to this GPU, driver or container.
Any other error is a fault."""
_MAX_LINKS = 18
_NVLINK_ERRORS = 1, 3  # NVML_NVLINK_ERROR_DL_RECOVERY and _CRC_DATA
_REMOTE_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_CAPABILITY_P2P = 0
_P2P_READ, _P2P_WRITE = 0, 1  # Written out because pynvml has NVML_P2P_CAPS_INDEX_READ as a tuple
_C2C_LINK_COUNT = 170  # NVML_FI_DEV_C2C_LINK_COUNT
_INSTEAD = (
    "`tccl discover --nccl-topology FILE` and `tccl discover --nvidia-smi FILE` describe a machine "
    "from files of it"
)


def discover_machine(
    files: HostFiles = HOST, *, nvml: Any = None
) -> tuple[Machine, Knowledge, Fingerprint]:
    """Discover this machine.

    GPUs and NICs without a NUMA node (virtual machines) hang from NUMA node -1, as in NCCL.
    `Gpu.gdr` follows the product line and `Nic.gdr` the loaded kernel modules; neither is tried.
    Raises InputError: no NVIDIA driver answers, or the answers fit no machine.
    """
    facts = driver_facts(nvml)
    machine = check(machine_of(facts, files), where=_HERE)
    links = tuple(_virtual_switch_links(machine.bridges, files))
    knowledge = msgspec.structs.replace(assume_p2p(machine, facts.peer_access), hidden_links=links)
    check_knowledge(knowledge, machine, where=_HERE)
    return machine, knowledge, fingerprint_of(facts, files)


def machine_of(facts: DriverFacts, files: HostFiles) -> Machine:
    """Return the machine of a host's files with GPUs of the driver, unchecked."""
    # 1. Where everything hangs; this tells which bridges and NUMA nodes there are.
    tree, ports = PciTree(files=files), network_ports(files)
    gpu_places = [tree.attach(gpu.bus_id) for gpu in facts.gpus]
    port_places = [tree.attach(port.bus_id) if port.bus_id else None for port in ports]
    used = [place.numa_id for place in (*gpu_places, *port_places) if place is not None]
    nodes = numa_nodes(used, files)
    names = {node.numa_id: node.id for node in nodes}
    # 2. The devices, by those names.
    links = tuple(_nvlinks(facts.gpus, [names[place.numa_id] for place in gpu_places]))
    gdr = files.offers_gpu_memory()
    # 3. A name that equal machines share: `4x-nvidia-h200`.
    kinds = list(dict.fromkeys(gpu.name for gpu in facts.gpus))
    model = re.sub(r"[^a-z0-9]+", "-", kinds[0].lower()).strip("-") or "gpu"
    return Machine(
        name=f"{len(facts.gpus)}x-{model}" + ("-and-others" if len(kinds) > 1 else ""),
        numa_nodes=nodes,
        bridges=tree.build(names),
        gpus=tuple(
            Gpu(
                **pick(gpu, "index", "bus_id", "sm", "name"),
                parent=place.bridge or names[place.numa_id],
                link=place.link,
                gdr=has_gpu_direct(gpu.name),
            )
            for gpu, place in zip(facts.gpus, gpu_places, strict=True)
        ),
        nics=tuple(
            msgspec.structs.replace(
                port,
                # Not on PCI (virtio): NCCL hangs it from the first CPU it knows.
                parent=(place.bridge or names[place.numa_id]) if place else nodes[0].id,
                link=place.link if place else PciLink(),
                gdr=gdr and port.gdr,
            )
            for port, place in zip(ports, port_places, strict=True)
        ),
        nvswitches=(NvSwitch(index=0),) if any(link.target == "S0" for link in links) else (),
        nvlinks=links,
    )


def _nvlinks(gpus: Iterable[GpuFacts], cpus: list[str]) -> Iterator[NvLink]:
    """Yield NVLinks by GPU; ends outside this host's GPUs are the switch, as NCCL concludes."""
    by_bus_id = {gpu.bus_id: f"G{gpu.index}" for gpu in gpus}
    for gpu, cpu in zip(gpus, cpus, strict=True):
        source = f"G{gpu.index}"
        # C2C links end at a CPU, which comes before GPUs and switches.
        if gpu.c2c_links:
            yield NvLink(source=source, target=cpu, count=gpu.c2c_links, kind="c2c")
        counts: Counter[str] = Counter()
        for bus_id, count in gpu.links.items():
            counts[by_bus_id.get(bus_id, "S0")] += count
        for target, count in counts.items():
            yield NvLink(source=source, target=target, count=count)


def _virtual_switch_links(bridges: Iterable[PciBridge], files: HostFiles) -> Iterator[HiddenLink]:
    bridge_ids = {bridge.id for bridge in bridges}
    for bridge in sorted(bridge_ids):
        for entry in files.entries(f"sys/kernel/pci_switch_link/virtual_switch_links/{bridge}"):
            parent = normal_bus_id(entry)
            if parent in bridge_ids and bridge < parent:
                note = "one PCIe switch chip"
                yield HiddenLink(one=bridge, other=parent, provenance="reported", note=note)


def fingerprint_of(facts: DriverFacts, files: HostFiles = HOST) -> Fingerprint:
    """Return the identity of this host's GPUs, driver and kernel."""
    return Fingerprint(
        gpu_uuids=tuple(gpu.uuid for gpu in facts.gpus),
        driver=facts.driver,
        numa_count=len(files.numa_nodes()),
        kernel=files.kernel(),
    )


# The driver's answers (NVML).
@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """A GPU by NVML."""

    index: int
    bus_id: str
    uuid: str
    name: str
    sm: int
    links: Mapping[str, int]
    """The number of NVLinks by target bus id, "" for a switch."""
    c2c_links: int
    memory_bytes: int | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    """Those that the driver counted on its links."""


@dataclass(frozen=True, kw_only=True)
class DriverFacts:
    """A host's driver, GPUs, and peer access between GPUs."""

    driver: str
    gpus: tuple[GpuFacts, ...]
    peer_access: tuple[PeerAccess, ...]


def driver_facts(nvml: Any = None) -> DriverFacts:
    """Ask NVML (`pynvml`, or a substitute) for all GPUs, NVLinks, and peer access of GPU pairs."""
    with opened_nvml(nvml) as opened:
        handle_of = opened.nvmlDeviceGetHandleByIndex
        handles = [ask_nvml(opened, f"GPU {i}", handle_of, i) for i in range(_count(opened))]
        return DriverFacts(
            driver=_text(ask_nvml(opened, "the driver", opened.nvmlSystemGetDriverVersion)),
            gpus=tuple(_gpu(opened, index, handle) for index, handle in enumerate(handles)),
            peer_access=tuple(_peer_access(opened, handles)),
        )


def driver_version() -> str:
    """Return the NVIDIA driver's version, "" where no driver answers."""
    try:
        with opened_nvml() as nvml:
            return _text(ask_nvml(nvml, "the driver", nvml.nvmlSystemGetDriverVersion))
    except Exception:
        return ""


def check_cupy(host: str = "", *, nvml: Any = None) -> None:
    """Check that cupy, which runs the measuring kernels, is installed here, on a job's `host`.

    Raises InputError, with the package for the driver's CUDA version.
    """
    if find_spec("cupy") is not None:
        return
    with opened_nvml(nvml) as opened:
        cuda = int(ask_nvml(opened, "the driver", opened.nvmlSystemGetCudaDriverVersion)) // 1000
    extra = "cuda12" if cuda < 13 else "cuda13"
    where, fault = f"cupy-{extra}x", "is not installed, and measures GPUs"
    right = f"`pip install '.[{extra}]'`, as this driver is of CUDA {cuda}"
    raise InputError(f"host {host}: {where}" if host else where, fault, right)


def gpu_count() -> int:
    """Return the number of GPUs (InputError without any); NVML indices count from 0."""
    with opened_nvml() as opened:
        return _count(opened)


@contextmanager
def opened_nvml(nvml: Any = None) -> Iterator[Any]:
    """Open NVML (pynvml, or a substitute), and close it at the end."""
    if nvml is None:
        try:
            import pynvml  # noqa: PLC0415 (only live discovery needs it)
        except ImportError as error:
            fault = "no NVIDIA driver answers (pynvml is missing)"
            raise InputError(_HERE, fault, _INSTEAD) from error
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise InputError(_HERE, f"no NVIDIA driver answers ({error})", _INSTEAD) from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _count(nvml: Any) -> int:
    count = int(ask_nvml(nvml, "the driver", nvml.nvmlDeviceGetCount))
    require(count, _HERE, "has no NVIDIA GPU that this process may see", _INSTEAD)
    return count


def _gpu(nvml: Any, index: int, handle: Any) -> GpuFacts:
    who = f"GPU {index}"
    ask = partial(ask_nvml, nvml, who)
    maybe = partial(ask, optional=True)
    text = _text(ask(nvml.nvmlDeviceGetPciInfo, handle).busId)
    bus_id = normal_bus_id(text)
    if bus_id is None:
        raise InputError(who, f"has bus id {text[:40]!r}", "a bus id such as 00000000:1A:00.0")
    major, minor = ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    c2c_count = getattr(nvml, "NVML_FI_DEV_C2C_LINK_COUNT", _C2C_LINK_COUNT)
    c2c = maybe(nvml.nvmlDeviceGetFieldValues, handle, [c2c_count])
    memory = maybe(nvml.nvmlDeviceGetMemoryInfo, handle)
    ends = product(range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _MAX_LINKS)), _NVLINK_ERRORS)
    errors = [maybe(nvml.nvmlDeviceGetNvLinkErrorCounter, handle, *end) for end in ends]
    return GpuFacts(
        index=index,
        bus_id=bus_id,
        uuid=_text(ask(nvml.nvmlDeviceGetUUID, handle)),
        name=_text(ask(nvml.nvmlDeviceGetName, handle)),
        sm=major * 10 + minor,
        links=_links(nvml, maybe, handle),
        c2c_links=int(c2c[0].value.uiVal) if c2c and c2c[0].nvmlReturn == 0 else 0,
        memory_bytes=int(memory.total) if memory is not None else None,
        errors={
            "replays of PCIe": maybe(nvml.nvmlDeviceGetPcieReplayCounter, handle) or 0,
            "errors of NVLinks": sum(filter(None, errors)),
        },
    )


def _links(nvml: Any, maybe: Callable[..., Any], handle: Any) -> Counter[str]:
    """Count active NVLinks with peer access by the far end's bus id: "" outside this host."""
    counts: Counter[str] = Counter()
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _MAX_LINKS)):
        capable = maybe(nvml.nvmlDeviceGetNvLinkCapability, handle, link, _CAPABILITY_P2P)
        if capable and maybe(nvml.nvmlDeviceGetNvLinkState, handle, link):
            pci = maybe(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            if pci is not None:
                kind = maybe(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
                bus_id = "" if kind == _REMOTE_SWITCH else normal_bus_id(_text(pci.busId))
                counts[bus_id or ""] += 1
    return counts


def _peer_access(nvml: Any, handles: list[Any]) -> Iterator[PeerAccess]:
    for source, target in permutations(range(len(handles)), 2):
        question = nvml.nvmlDeviceGetP2PStatus, handles[source], handles[target]
        who = f"GPUs {source} and {target}"
        answers = [
            ask_nvml(nvml, who, *question, way, optional=True) for way in (_P2P_READ, _P2P_WRITE)
        ]
        if None not in answers:
            yield PeerAccess(
                source=source, target=target, supported=not any(answers), provenance="reported"
            )


def ask_nvml(
    nvml: Any, who: str, question: Callable[..., Any], *arguments: Any, optional: bool = False
) -> Any:
    """Return NVML's answer; None for an `optional` question that does not apply."""
    try:
        return question(*arguments)
    except nvml.NVMLError as error:
        if optional and getattr(error, "value", None) in _NOT_ANSWERED:
            return None
        fault = f"does not answer {question.__name__} ({error})"
        raise InputError(who, fault, "see whether nvidia-smi shows all GPUs well") from error


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def visible_indices(machine: Machine, uuids: Sequence[str], text: str | None) -> tuple[int, ...]:
    """Return the NVML indices in CUDA_VISIBLE_DEVICES, ascending; all if the variable is not set.

    As in CUDA: indices or beginnings of UUIDs with commas between, up to the first entry of another
    form. InputError: no GPU is left.
    """
    if text is None:
        return machine.gpu_indices
    indices: set[int] = set()
    for part in (piece.strip() for piece in text.split(",")):
        if part.isascii() and part.isdigit() and len(part) < 6:
            named = [int(part)] if int(part) in machine.gpu_indices else []
        else:
            pairs = zip(machine.gpu_indices, uuids, strict=False)
            named = [index for index, uuid in pairs if len(part) > 4 and uuid.startswith(part)]
        if len(named) != 1:
            break
        indices.update(named)
    right = f"there are {', '.join(map(str, machine.gpu_indices))}"
    require(indices, VARIABLE, f"is {text[:40]!r}, which is no GPU here", right)
    return tuple(sorted(indices))


def only_gpus(
    machine: Machine, knowledge: Knowledge, gpus: Collection[int]
) -> tuple[Machine, Knowledge]:
    """Return machine and knowledge with these GPUs alone; indices stay."""
    gone = {gpu.id for gpu in machine.gpus if gpu.index not in gpus}
    smaller = msgspec.structs.replace(
        machine,
        gpus=tuple(gpu for gpu in machine.gpus if gpu.id not in gone),
        nvlinks=tuple(link for link in machine.nvlinks if not {link.source, link.target} & gone),
    )
    access, hidden = knowledge.peer_access, knowledge.hidden_links
    facts = msgspec.structs.replace(
        knowledge,
        peer_access=tuple(fact for fact in access if {fact.source, fact.target} <= set(gpus)),
        hidden_links=tuple(link for link in hidden if not {link.one, link.other} & gone),
    )
    return smaller, facts
