"""The machine this process runs on -> Machine, Knowledge and Fingerprint.

GPUs, NVLinks and peer access come from the driver (NVML), the PCI tree, NUMA nodes and network
cards from sysfs, so that the result is what NCCL would find here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tccl_py.model.knowledge import Fingerprint, HiddenLink, Knowledge, check_knowledge
from tccl_py.model.machine import (
    Gpu,
    Machine,
    Nic,
    NvLink,
    NvSwitch,
    PciBridge,
    PciLink,
    check,
    normal_bus_id,
)
from tccl_py.readers.elements import Element
from tccl_py.readers.nvml import DriverFacts, GpuFacts, driver_facts
from tccl_py.readers.sysfs import (
    Attachment,
    PciTree,
    Port,
    network_ports,
    numa_nodes,
    read_word,
    system_numa_ids,
)

_WITHOUT_GPU_DIRECT = ("GeForce", "TITAN")
"""Product lines without GPUDirect RDMA, says docs.nvidia.com/cuda/gpudirect-rdma."""
_DMA_BUF_SINCE = (5, 12)
_HERE = "this machine"


def discover_machine(
    *, sysfs: Path = Path("/sys"), proc: Path = Path("/proc"), nvml: Any = None
) -> tuple[Machine, Knowledge, Fingerprint]:
    """Discover this machine.

    GPUs and NICs that report no NUMA node (virtual machines) hang from one with `numa_id` -1, as
    NCCL has it. `Gpu.gdr` follows the product line and `Nic.gdr` the loaded kernel modules: both
    say what is offered, not what was tried.

    Args:
        sysfs: where sysfs is mounted.
        proc: where procfs is mounted.
        nvml: the `pynvml` module, or what stands for it.

    Raises:
        InputError: no NVIDIA driver answers, or it answers what no machine has.
    """
    facts = driver_facts(nvml)
    machine = check(_machine(facts, sysfs, proc), where=_HERE)
    knowledge = Knowledge(
        peer_access=facts.peer_access, hidden_links=_virtual_switch_links(machine.bridges, sysfs)
    )
    return (
        machine,
        check_knowledge(knowledge, machine, where=_HERE),
        fingerprint_of(facts, sysfs=sysfs, proc=proc),
    )


def _machine(facts: DriverFacts, sysfs: Path, proc: Path) -> Machine:
    # 1. Where everything hangs; this tells which bridges and NUMA nodes there are.
    tree, ports = PciTree(sysfs=sysfs), network_ports(sysfs)
    gpu_places = [tree.attach(gpu.bus_id) for gpu in facts.gpus]
    port_places = [tree.attach(port.bus_id) if port.bus_id else None for port in ports]
    used = [place.numa_id for place in (*gpu_places, *port_places) if place is not None]
    nodes = numa_nodes(used, sysfs=sysfs, proc=proc)
    names = {node.numa_id: node.id for node in nodes}
    # 2. The devices, by those names.
    links = _nvlinks(facts.gpus, [names[place.numa_id] for place in gpu_places])
    gdr = _gpu_direct_modules(sysfs, proc)
    nics = enumerate(zip(ports, port_places, strict=True))
    return Machine(
        name=_name(facts),
        numa_nodes=nodes,
        bridges=tree.built(names),
        gpus=tuple(_gpu(g, p, names) for g, p in zip(facts.gpus, gpu_places, strict=True)),
        nics=tuple(_nic(index, port, place, names, gdr=gdr) for index, (port, place) in nics),
        nvswitches=(NvSwitch(index=0),) if any(link.target == "S0" for link in links) else (),
        nvlinks=links,
    )


def _name(facts: DriverFacts) -> str:
    """A name that equal machines share: `4x-nvidia-h200`."""
    kinds = list(dict.fromkeys(gpu.name for gpu in facts.gpus))
    model = re.sub(r"[^a-z0-9]+", "-", kinds[0].lower()).strip("-") or "gpu"
    return f"{len(facts.gpus)}x-{model}" + ("-and-others" if len(kinds) > 1 else "")


def _gpu(gpu: GpuFacts, place: Attachment, names: dict[int, str]) -> Gpu:
    return Gpu(
        index=gpu.index,
        bus_id=gpu.bus_id,
        parent=place.bridge or names[place.numa_id],
        link=place.link,
        sm=gpu.sm,
        name=gpu.name,
        gdr=not any(line in gpu.name for line in _WITHOUT_GPU_DIRECT),
    )


def _nic(
    index: int, port: Port, place: Attachment | None, names: dict[int, str], *, gdr: bool
) -> Nic:
    if place is None:
        # Not on PCI (virtio): NCCL hangs it from the first CPU it knows.
        first = next(iter(names.values()))
        return Nic(index=index, name=port.name, parent=first, speed_mbps=port.speed_mbps)
    return Nic(
        index=index,
        name=port.name,
        parent=place.bridge or names[place.numa_id],
        bus_id=port.bus_id,
        link=place.link,
        speed_mbps=port.speed_mbps,
        gdr=gdr and port.rdma,
        guid=port.guid,
        port=port.port,
    )


def _nvlinks(gpus: Iterable[GpuFacts], cpus: list[str]) -> tuple[NvLink, ...]:
    """NVLinks by GPU; ends that are no GPU of this host are the switch, as NCCL concludes."""
    known = {gpu.bus_id: f"G{gpu.index}" for gpu in gpus}
    links = []
    for gpu, cpu in zip(gpus, cpus, strict=True):
        counts: dict[tuple[str, Literal["nvlink", "c2c"]], int] = {}
        for bus_id, count in gpu.links.items():
            target = known.get(bus_id, "S0")
            counts[target, "nvlink"] = counts.get((target, "nvlink"), 0) + count
        if gpu.c2c_links:
            counts[cpu, "c2c"] = gpu.c2c_links
        links += [
            NvLink(source=f"G{gpu.index}", target=target, count=count, kind=kind)
            for (target, kind), count in sorted(counts.items())
        ]
    return tuple(links)


def _virtual_switch_links(bridges: Iterable[PciBridge], sysfs: Path) -> tuple[HiddenLink, ...]:
    """Broadcom's virtual switches that share a chip; its driver names each one's peers."""
    known = {bridge.id for bridge in bridges}
    links = []
    for one in sorted(known):
        peers = sysfs / "kernel" / "pci_switch_link" / "virtual_switch_links" / one
        for entry in sorted(peers.iterdir()) if peers.is_dir() else ():
            other = normal_bus_id(entry.name)
            if other in known and one < other:
                links.append(
                    HiddenLink(
                        one=one, other=other, provenance="reported", note="one PCIe switch chip"
                    )
                )
    return tuple(links)


def _gpu_direct_modules(sysfs: Path, proc: Path) -> bool:
    """Whether the kernel offers RDMA cards GPU memory: nvidia-peermem, or DMA-BUF.

    DMA-BUF needs the open driver and Linux 5.12.
    """
    if any((sysfs / "module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")):
        return True
    opened = "Open Kernel Module" in read_word(proc / "driver" / "nvidia" / "version")
    release = re.match(r"([0-9]{1,3})\.([0-9]{1,3})", _kernel(proc))
    return opened and release is not None and ((int(release[1]), int(release[2])) >= _DMA_BUF_SINCE)


def _kernel(proc: Path) -> str:
    return read_word(proc / "sys" / "kernel" / "osrelease")


def fingerprint_of(
    facts: DriverFacts, *, sysfs: Path = Path("/sys"), proc: Path = Path("/proc")
) -> Fingerprint:
    """Whose measurements on this host are, by what the driver says of it."""
    return Fingerprint(
        gpu_uuids=tuple(gpu.uuid for gpu in facts.gpus),
        driver=facts.driver,
        numa_count=len(system_numa_ids(sysfs)),
        kernel=_kernel(proc),
    )


# The NVLinks, XGMI and C2C links of an NCCL topology file.


CLASS = re.compile(r"0x[0-9a-fA-F]{2,8}", re.ASCII)
"""How a PCI class is written."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a device hangs: its bus id ("" if it has none), parent, link and NUMA node."""

    bus_id: str
    parent: str
    link: PciLink
    numa: str


@dataclass(frozen=True, kw_only=True)
class FoundGpu:
    """A GPU of the file: its `<gpu>`, or its `<pci>` if it has none, and where that hangs."""

    element: Element
    place: Place


def nvlinks(gpus: dict[int, FoundGpu]) -> tuple[NvLink, ...]:
    """All links that leave GPUs; those with the same ends are one link with their counts summed.

    Raises:
        InputError: an unknown element, class or count.
    """
    by_bus_id = {gpu.place.bus_id: f"G{index}" for index, gpu in gpus.items()}
    counts: dict[tuple[str, str, str], int] = {}
    for index, gpu in sorted(gpus.items()):
        if gpu.element.tag != "gpu":
            continue
        for link in gpu.element.only("nvlink", "xgmi", "c2c"):
            list(link.only())
            target = gpu.place.numa if link.tag == "c2c" else _target(link, gpu, by_bus_id)
            count = link.integer("count", least=1, most=1024)
            # A link to the GPU itself (Azure writes them, to keep NCCL from asking NVML) forms no
            # path in NCCL, nor does one to a GPU that is not in the file.
            if target not in (None, f"G{index}"):
                key = (f"G{index}", str(target), link.tag)
                counts[key] = counts.get(key, 0) + count
    return tuple(_nvlink(source, target, tag, n) for (source, target, tag), n in counts.items())


def _nvlink(source: str, target: str, tag: str, count: int) -> NvLink:
    kinds: dict[str, Literal["nvlink", "xgmi", "c2c"]] = {"xgmi": "xgmi", "c2c": "c2c"}
    return NvLink(source=source, target=target, count=count, kind=kinds.get(tag, "nvlink"))


def _target(link: Element, gpu: FoundGpu, by_bus_id: dict[str, str]) -> str | None:
    """The other end: a GPU, the NVLink switch S0, the CPU, or None for no GPU of this file."""
    text = link.text("target")
    code = link.matching("tclass", CLASS, "a PCI class such as 0x068000").lower()
    known = by_bus_id.get(normal_bus_id(text) or "")
    if not code:
        # NCCL takes what it cannot look up for a switch, as virtual machines hide theirs.
        return known or "S0"
    if code.startswith("0x03"):
        if normal_bus_id(text) is None:
            raise link.refused(f'has target="{text[:40]}"', "a bus id such as 0000:1a:00.0")
        return known
    if code.startswith("0x068001"):
        return gpu.place.numa
    if code.startswith("0x0680"):
        return "S0"
    raise link.refused(
        f'has tclass="{code}"', "0x03.... (a GPU), 0x068000 (a switch) or 0x068001 (a CPU)"
    )


def nvswitches(links: Iterable[NvLink], gpus: dict[int, FoundGpu]) -> tuple[NvSwitch, ...]:
    """The one switch of a file, if links lead to it."""
    if not any(link.target == "S0" for link in links):
        return ()
    targets = {
        normal_bus_id(link.attributes.get("target", "")) or ""
        for gpu in gpus.values()
        for link in gpu.element.children
        if link.attributes.get("tclass", "").startswith("0x0680")
    }
    # The first plane stands for all; fffffff:ff:ff.0 is how a hidden switch is written.
    visible = sorted(target for target in targets if target and not target.startswith("fffffff:"))
    return (NvSwitch(index=0, bus_id=visible[0] if visible else ""),)
