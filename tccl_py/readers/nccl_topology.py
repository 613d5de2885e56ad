"""NCCL's topology XML (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE) -> Machine.

Reads what NVIDIA's NCCL, AMD's RCCL and Azure's images write. Decisions follow NCCL 2.30's
graph/xml.cc and graph/topo.cc; where this reader is stricter, it refuses with a sentence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tccl_py.files import read_text
from tccl_py.model.machine import (
    MAX_GPUS,
    Gpu,
    Machine,
    Nic,
    NumaNode,
    PciBridge,
    PciLink,
    bus_order,
    check,
    normal_bus_id,
)
from tccl_py.readers.elements import Element, parse_elements
from tccl_py.readers.live import CLASS, FoundGpu, Place, nvlinks, nvswitches

_HEX = re.compile(r"(0[xX])?[0-9a-fA-F]{1,16}", re.ASCII)
_CPU_MASK = re.compile(r"[0-9a-fA-Fx,]{1,4096}", re.ASCII)
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) GT/s(?: PCIe)?", re.ASCII)
_UNKNOWN_SPEEDS = ("", "Unknown", "Unknown speed")
_UNKNOWN_WIDTHS = (0, 255)
"""NCCL writes 0 if sysfs says nothing; the kernel itself says 255."""
_GPU_VENDORS = ("", "0x10de", "0x1002")
_VERSIONS = ("1", "2")
"""NCCL writes 1, RCCL 2."""

_Kind = Literal["bridge", "gpu", "nic", "nothing"]


@dataclass(frozen=True, kw_only=True)
class _FoundNic:
    element: Element | None
    place: Place


@dataclass(kw_only=True)
class _Found:
    """What a walk over the file has met so far, in the file's order."""

    bridges: list[PciBridge] = field(default_factory=list)
    gpus: list[FoundGpu] = field(default_factory=list)
    bare_gpus: list[FoundGpu] = field(default_factory=list)
    nics: list[_FoundNic] = field(default_factory=list)
    bus_ids: set[str] = field(default_factory=set)


def read_nccl_topology(path: Path) -> Machine:
    """Read a topology file; the machine is named after it.

    Raises:
        InputError: as `parse_nccl_topology`, or the file cannot be read.
    """
    return parse_nccl_topology(read_text(path), where=str(path))


def parse_nccl_topology(text: str, *, where: str) -> Machine:
    """Turn topology XML into a Machine.

    GPUs and NICs that a file shows as bare `<pci>` (Azure's do) are numbered by bus id, as NVML
    and the IB plugin number them. All NVLink switches of a file are one `NvSwitch`.

    Args:
        text: the XML.
        where: file name for messages; its stem is the machine's name.

    Raises:
        InputError: no topology, or anything in it that is not understood; unknown attributes
            are ignored, as NCCL does.
    """
    root = parse_elements(text, where=where)
    _check_root(root)
    cpus = _cpus_in_order(root)
    found = _Found()
    nodes = []
    for index, cpu in enumerate(cpus):
        nodes.append(_numa_node(cpu, index))
        _walk_cpu(cpu, f"C{index}", found)
    devices = _numbered_gpus(found)
    links = nvlinks(devices)
    machine = Machine(
        name=Path(where).stem,
        numa_nodes=tuple(nodes),
        bridges=tuple(found.bridges),
        gpus=tuple(_gpu(index, gpu) for index, gpu in sorted(devices.items())),
        nics=_nics(found),
        nvswitches=nvswitches(links, devices),
        nvlinks=links,
    )
    return check(machine, where=where)


def _check_root(root: Element) -> None:
    if root.tag == "graphs":
        raise root.refused(
            "is an NCCL graph (rings), not a topology", "give what NCCL_TOPO_DUMP_FILE wrote"
        )
    if root.tag != "system":
        raise root.refused("is no NCCL topology", "the outermost element is <system>")
    version = root.text("version")
    if version not in _VERSIONS:
        raise root.refused(f"has version {version}", f"version {' or '.join(_VERSIONS)}")


def _cpus_in_order(root: Element) -> list[Element]:
    """The `<cpu>` elements by numaid, so that NUMA node 1 is C1 on a machine that has all."""
    cpus = list(root.only("cpu"))
    hosts = {cpu.attributes.get("host_hash", "") for cpu in cpus}
    if len(hosts) > 1:
        raise root.refused("describes several hosts", "give the file of one host")
    seen: set[int] = set()
    for cpu in cpus:
        numa = cpu.integer("numaid", least=-1)
        if numa in seen:
            raise cpu.refused(f"repeats numaid {numa}", "every NUMA node stands once")
        seen.add(numa)
    return sorted(cpus, key=lambda cpu: cpu.integer("numaid", least=-1))


def _numa_node(cpu: Element, index: int) -> NumaNode:
    def number(name: str) -> int | None:
        return cpu.integer(name) if name in cpu.attributes else None

    return NumaNode(
        index=index,
        numa_id=cpu.integer("numaid", least=-1),
        arch=cpu.text("arch", default="x86_64"),
        vendor=cpu.text("vendor", default=""),
        family=number("familyid"),
        model=number("modelid"),
        affinity=cpu.matching("affinity", _CPU_MASK, "a hexadecimal mask such as 0000ffff"),
    )


def _walk_cpu(cpu: Element, numa: str, found: _Found) -> None:
    place = Place(bus_id="", parent=numa, link=PciLink(), numa=numa)
    for child in cpu.only("pci", "nic"):
        if child.tag == "pci":
            _walk_pci(child, place, found)
        else:
            _walk_nic(child, place, found)


def _walk_pci(pci: Element, above: Place, found: _Found) -> None:
    """Note one `<pci>` and what is below it; `above.bus_id` or the NUMA node is its parent."""
    kind = _kind(pci)
    place = Place(
        bus_id=_bus_id(pci, found), parent=above.bus_id or above.numa, link=_link(pci),
        numa=above.numa,
    )  # fmt: skip
    if kind == "bridge":
        found.bridges.append(_bridge(pci, place))
        for child in pci.only("pci", "pcilink"):
            # A <pcilink> joins two virtual switches of one chip; it is Knowledge, not structure.
            if child.tag == "pci":
                _walk_pci(child, place, found)
    elif kind == "gpu":
        _walk_gpu(pci, place, found)
    elif kind == "nic":
        if not pci.children:
            found.nics.append(_FoundNic(element=None, place=place))
        for nic in pci.only("nic"):
            _walk_nic(nic, place, found)


def _kind(pci: Element) -> _Kind:
    """What a `<pci>` is: by what it holds, else by class, as ncclTopoAddPci decides."""
    tags = {child.tag for child in pci.children}
    code = pci.matching("class", CLASS, "a PCI class such as 0x060400").lower()
    if "gpu" in tags:
        return "gpu"
    if "nic" in tags:
        return "nic"
    if code.startswith("0x03"):
        return "gpu"
    if code.startswith("0x02"):
        return "nic"
    if not code and not tags:
        raise pci.refused("has neither class nor content", "a PCI class such as 0x060400")
    if code.startswith("0x0680") or (not tags and not code.startswith("0x0604")):
        # NVLink switches and strangers: NCCL makes no device of the one and trims the other.
        list(pci.only())
        return "nothing"
    return "bridge"


def _bus_id(pci: Element, found: _Found) -> str:
    text = pci.text("busid")
    bus_id = normal_bus_id(text)
    if bus_id is None:
        raise pci.refused(f'has busid="{text[:40]}"', "a bus id such as 0000:1a:00.0")
    if bus_id in found.bus_ids:
        raise pci.refused(f"repeats bus id {bus_id}", "every bus id stands once")
    found.bus_ids.add(bus_id)
    return bus_id


def _link(pci: Element) -> PciLink:
    speed = pci.text("link_speed", default="").strip()
    match = _SPEED.fullmatch(speed)
    if match is None and speed not in _UNKNOWN_SPEEDS:
        raise pci.refused(f'has link_speed="{speed[:40]}"', 'a rate such as "16.0 GT/s PCIe"')
    if match is not None and float(match[1]) == 0:
        raise pci.refused(f'has link_speed="{speed}"', 'a rate above 0, or "" if unknown')
    width = 0
    if pci.attributes.get("link_width"):
        width = pci.integer("link_width", most=255)
    if width not in _UNKNOWN_WIDTHS and width > 32:
        raise pci.refused(f'has link_width="{width}"', "1 to 32 lanes, or 0 if unknown")
    return PciLink(
        speed_gts=float(match[1]) if match else None,
        width=None if width in _UNKNOWN_WIDTHS else width,
    )


def _bridge(pci: Element, place: Place) -> PciBridge:
    def hexadecimal(name: str) -> str:
        return pci.matching(name, _HEX, "hexadecimal such as 0x1000").lower()

    return PciBridge(
        bus_id=place.bus_id,
        parent=place.parent,
        link=place.link,
        vendor=hexadecimal("vendor"),
        device=hexadecimal("device"),
        subsystem_vendor=hexadecimal("subsystem_vendor"),
        subsystem_device=hexadecimal("subsystem_device"),
    )


def _walk_gpu(pci: Element, place: Place, found: _Found) -> None:
    elements = list(pci.only("gpu"))
    if len(elements) > 1:
        raise elements[1].refused("is a second GPU at one bus id", "one <gpu> per <pci>")
    if elements:
        found.gpus.append(FoundGpu(element=elements[0], place=place))
    elif pci.attributes.get("vendor", "").lower() in _GPU_VENDORS:
        found.bare_gpus.append(FoundGpu(element=pci, place=place))


def _walk_nic(nic: Element, place: Place, found: _Found) -> None:
    """Note each `<net>`: the ports of a card are NICs of their own, with one bus id."""
    for net in nic.only("net", "gin", "rma"):
        list(net.only())
        # gin and rma are further faces of a net; net="0" marks a port fused into another NIC.
        if net.tag == "net" and net.attributes.get("net") != "0":
            found.nics.append(_FoundNic(element=net, place=place))


def _numbered_gpus(found: _Found) -> dict[int, FoundGpu]:
    """GPUs by `dev`, or by bus id if no GPU of the file has one.

    A bare display device beside real `<gpu>` elements is no GPU of the job: NCCL passes over it.
    """
    gpus = found.gpus or found.bare_gpus
    if len(gpus) > MAX_GPUS:
        raise gpus[MAX_GPUS].element.refused(
            f"is GPU number {len(gpus)}", f"at most {MAX_GPUS} fit a node"
        )
    if not any("dev" in gpu.element.attributes for gpu in gpus):
        return dict(enumerate(sorted(gpus, key=lambda gpu: bus_order(gpu.place.bus_id))))
    numbered: dict[int, FoundGpu] = {}
    for gpu in gpus:
        index = gpu.element.integer("dev", most=255)
        if index in numbered:
            raise gpu.element.refused(f"repeats dev {index}", "every GPU has its own dev")
        numbered[index] = gpu
    return numbered


def _gpu(index: int, found: FoundGpu) -> Gpu:
    element, place = found.element, found.place
    gcn = element.attributes.get("gcn")
    # RCCL's sm counts compute units; only NCCL's is a compute capability.
    capability = element.integer("sm", most=1000) if "sm" in element.attributes else None
    return Gpu(
        index=index,
        bus_id=place.bus_id,
        parent=place.parent,
        link=place.link,
        sm=capability if gcn is None else None,
        name="" if gcn is None else f"gcn{gcn[:40]}",
        gdr=element.integer("gdr", default=0) > 0,
    )


def _nics(found: _Found) -> tuple[Nic, ...]:
    """NICs by `dev`; those without one take the free numbers in order of bus id."""
    numbered: dict[int, _FoundNic] = {}
    rest = []
    for nic in found.nics:
        if nic.element is None or "dev" not in nic.element.attributes:
            rest.append(nic)
            continue
        index = nic.element.integer("dev")
        if index in numbered:
            raise nic.element.refused(f"repeats dev {index}", "every net has its own dev")
        numbered[index] = nic
    rest.sort(key=lambda nic: bus_order(nic.place.bus_id) if nic.place.bus_id else ())
    free = (index for index in range(len(found.nics)) if index not in numbered)
    numbered.update(zip(list(free), rest, strict=False))
    return tuple(_nic(index, nic) for index, nic in sorted(numbered.items()))


def _nic(index: int, found: _FoundNic) -> Nic:
    net, place = found.element, found.place
    parent, bus_id = place.parent, place.bus_id
    if net is None:
        return Nic(index=index, name=bus_id, parent=parent, bus_id=bus_id, link=place.link)
    # NCCL takes speed -1, which some cards report, for "unknown".
    speed = net.integer("speed", default=0, least=-1)
    return Nic(
        index=index,
        name=net.text("name"),
        parent=parent,
        bus_id=bus_id,
        link=place.link,
        speed_mbps=max(speed, 0),
        gdr=net.integer("gdr", default=0) > 0,
        guid=net.matching("guid", _HEX, "hexadecimal such as 0x1000"),
        port=net.integer("port", default=0),
    )
