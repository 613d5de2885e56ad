"""NCCL's topology XML (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE) -> Machine.

Reads files by NVIDIA's NCCL, AMD's RCCL and Azure's images. Decisions follow NCCL 2.30's
graph/xml.cc and graph/topo.cc; where this reader is stricter, it refuses with a sentence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast, get_args
from xml.parsers import expat

from tccl_py.errors import InputError
from tccl_py.files import read_text
from tccl_py.model.cluster import shown
from tccl_py.model.machine import (
    Gpu,
    Machine,
    Nic,
    NumaNode,
    NvLink,
    NvSwitch,
    PciBridge,
    PciLink,
    check,
)
from tccl_py.readers.sysfs import bus_order, normal_bus_id

MAX_DEPTH = 64
MAX_ELEMENTS = 10_000  # NCCL itself stops at 256 elements in a topology and 4096 in a graph
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]{1,15}|0|[1-9][0-9]{0,17})", re.ASCII)
_CLASS = re.compile(r"0x[0-9a-fA-F]{2,8}", re.ASCII)
_HEX = re.compile(r"(0[xX])?[0-9a-fA-F]{1,16}", re.ASCII)
_CPU_MASK = re.compile(r"[0-9a-fA-Fx,]{1,4096}", re.ASCII)
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) GT/s(?: PCIe)?", re.ASCII)
_UNKNOWN_SPEEDS = ("", "Unknown", "Unknown speed")
_GPU_VENDORS = ("", "0x10de", "0x1002")
_GPU_CLASSES = ("0x03", "0x1200")  # Displays, and processing accelerators
_ZEN = (0x8F, 0x9F, 0xAF, 0xBF)  # 8 + 15 is 23 for the kernel, and for NCCL from 2.31 on
_VERSIONS = ("1", "2")  # NCCL writes 1, RCCL 2

_LinkKind = Literal["nvlink", "xgmi", "c2c"]


@dataclass(frozen=True, kw_only=True)
class _Device:
    """A GPU or NIC of the file: its place, and its element or the bare `<pci>`."""

    kind: Literal["gpu", "nic"] = "nic"
    bus_id: str = ""
    parent: str
    numa: str
    element: _Element
    link: PciLink = field(default_factory=PciLink)


def read_nccl_topology(path: Path) -> Machine:
    """Read a topology file; the machine is named after it."""
    return parse_nccl_topology(read_text(path), where=str(path))


def parse_nccl_topology(text: str, *, where: str) -> Machine:
    """Turn topology XML into a Machine; the stem of `where` is its name.

    GPUs and NICs without elements below `<pci>` (in Azure's files) are numbered by bus id, as in
    NVML and the IB plugin. All NVLink switches of a file are a single `NvSwitch`. InputError: no
    topology, or an unknown element or value; unknown attributes are ignored, as by NCCL.
    """
    cpus = _cpus_in_order(_parse_elements(text, where=where))
    parts = [part for i, cpu in enumerate(cpus) for part in _below(cpu, f"C{i}", f"C{i}")]
    devices = [part for part in parts if isinstance(part, _Device)]
    displays = [part for part in devices if part.kind == "gpu"]
    # Bare display devices beside real GPUs are none.
    real = [gpu for gpu in displays if gpu.element.tag == "gpu"] or displays
    gpus = _number(real, "every GPU has its own dev", most=255)
    nics = [part for part in devices if part.kind == "nic"]
    links, switches = _nvlinks(gpus)
    machine = Machine(
        name=Path(where).stem,
        numa_nodes=tuple(_numa_node(cpu, index) for index, cpu in enumerate(cpus)),
        bridges=tuple(part for part in parts if isinstance(part, PciBridge)),
        gpus=tuple(_gpu(index, gpu) for index, gpu in gpus.items()),
        nics=tuple(
            _nic(index, nic) for index, nic in _number(nics, "every net has its own dev").items()
        ),
        nvswitches=switches,
        nvlinks=links,
    )
    return check(machine, where=where)


def _cpus_in_order(root: _Element) -> list[_Element]:
    """Return the `<cpu>` elements by numaid: NUMA node 1 is C1 on a machine that has all."""
    if root.tag != "system":
        fault = "is an NCCL graph (rings), not" if root.tag == "graphs" else "is no NCCL"
        raise root.refusal(f"{fault} topology", "give what NCCL_TOPO_DUMP_FILE wrote: <system>")
    version = root.text("version")
    if version not in _VERSIONS:
        raise root.refusal(f"has version {version}", f"version {' or '.join(_VERSIONS)}")
    cpus = list(root.only("cpu"))
    if len({cpu.attributes.get("host_hash", "") for cpu in cpus}) > 1:
        raise root.refusal("describes several hosts", "give the file of one host")
    numbered: dict[int, _Element] = {}
    for cpu in cpus:
        number = cpu.integer("numaid", least=-1)
        if numbered.setdefault(number, cpu) is not cpu:
            raise cpu.refusal(f"repeats numaid {number}", "every NUMA node stands once")
    return [cpu for _, cpu in sorted(numbered.items())]


def _number(devices: Sequence[_Device], right: str, most: int = 2**31 - 1) -> dict[int, _Device]:
    """Return devices by `dev`; those without one take the free numbers in order of bus id."""
    numbered: dict[int, _Device] = {}
    others_left = []
    for device in devices:
        if "dev" not in device.element.attributes:
            others_left.append(device)
            continue
        number = device.element.integer("dev", most=most)
        first = numbered.setdefault(number, device)
        # NCCL's dump has an interface that is on no PCI bus below each CPU.
        names = [one.element.attributes.get("name") for one in (first, device)]
        again = not (first.bus_id or device.bus_id) and names[0] and names[0] == names[1]
        if first is not device and not again:
            raise device.element.refusal(f"repeats dev {number}", right)
    others_left.sort(key=lambda device: bus_order(device.bus_id) if device.bus_id else ())
    free = [index for index in range(len(devices)) if index not in numbered]
    numbered.update(zip(free, others_left, strict=False))
    return dict(sorted(numbered.items()))


def _numa_node(cpu: _Element, index: int) -> NumaNode:
    family = cpu.integer("familyid") if "familyid" in cpu.attributes else None
    if family in _ZEN:
        family = 15 + family // 16
    return NumaNode(
        index=index,
        numa_id=cpu.integer("numaid", least=-1),
        arch=cpu.text("arch", default="x86_64"),
        vendor=cpu.text("vendor", default=""),
        family=family,
        model=cpu.integer("modelid") if "modelid" in cpu.attributes else None,
        affinity=cpu.matching("affinity", _CPU_MASK, "a hexadecimal mask such as 0000ffff"),
    )


def _below(above: _Element, parent: str, numa: str) -> Iterator[PciBridge | _Device]:
    """Yield the bridges and devices below a `<cpu>` or a bridge."""
    for child in above.only("pci", "nic" if above.tag == "cpu" else "pcilink"):
        if child.tag == "pci":
            yield from _pci(child, parent, numa)
        elif child.tag == "nic":
            yield from _nets(child, _Device(parent=parent, numa=numa, element=child))
        # A <pcilink> joins two virtual switches of one chip; it is Knowledge, not structure.


def _pci(pci: _Element, parent: str, numa: str) -> Iterator[PciBridge | _Device]:
    """Yield the bridge or the devices of a `<pci>`, and what is below a bridge."""
    kind, bus_id, link = _kind(pci), normal_bus_id(pci.text("busid")), _link(pci)
    if bus_id is None:
        raise pci.refusal(f"has busid={shown(pci.text('busid'))}", "such as 0000:1a:00.0")
    if kind == "bridge":
        names = ("vendor", "device", "subsystem_vendor", "subsystem_device")
        ids = {n: pci.matching(n, _HEX, "hexadecimal such as 0x1000").lower() for n in names}
        yield PciBridge(bus_id=bus_id, parent=parent, link=link, **ids)
        yield from _below(pci, bus_id, numa)
    elif kind == "gpu":
        elements = list(pci.only("gpu"))
        if len(elements) > 1:
            raise elements[1].refusal("is a second GPU at one bus id", "one <gpu> per <pci>")
        if elements or pci.attributes.get("vendor", "").lower() in _GPU_VENDORS:
            element = elements[0] if elements else pci
            yield _Device(
                kind="gpu", bus_id=bus_id, parent=parent, link=link, numa=numa, element=element
            )
    elif kind == "nic":
        device = _Device(bus_id=bus_id, parent=parent, link=link, numa=numa, element=pci)
        if not pci.children:
            yield device
        for nic in pci.only("nic"):
            yield from _nets(nic, device)


def _kind(pci: _Element) -> Literal["bridge", "gpu", "nic", "nothing"]:
    """Return a `<pci>`'s kind: by its children, else by class, as ncclTopoAddPci decides."""
    tags = {child.tag for child in pci.children}
    code = pci.matching("class", _CLASS, "a PCI class such as 0x060400").lower()
    if "gpu" in tags or ("nic" not in tags and code.startswith(_GPU_CLASSES)):
        return "gpu"
    if "nic" in tags or code.startswith("0x02"):
        return "nic"
    if not code and not tags:
        right = "dump the full one by a job with NCCL_TOPO_DUMP_FILE=box.xml"
        raise pci.refusal("has no class: a partial file, which NCCL itself fills in", right)
    if code.startswith("0x0680") or (not tags and not code.startswith("0x0604")):
        # NVLink switches and strangers: NCCL makes no device of the one and trims the other.
        pci.only_none()
        return "nothing"
    return "bridge"


def _link(pci: _Element) -> PciLink:
    speed = pci.text("link_speed", default="").strip()
    match = _SPEED.fullmatch(speed)
    gts = float(match[1]) if match else None
    if gts == 0 or (gts is None and speed not in _UNKNOWN_SPEEDS):
        right = 'a rate such as "16.0 GT/s PCIe", or "" if unknown'
        raise pci.refusal(f'has link_speed="{speed[:40]}"', right)
    width = pci.integer("link_width", most=255) if pci.attributes.get("link_width") else 0
    return PciLink(speed_gts=gts, width=width or None)


def _nets(nic: _Element, device: _Device) -> Iterator[_Device]:
    for net in nic.only("net", "gin", "rma"):
        net.only_none()
        # gin and rma are further faces of a net; net="0" marks a port fused into another NIC.
        if net.tag == "net" and net.attributes.get("net") != "0":
            yield replace(device, element=net)


def _gpu(index: int, gpu: _Device) -> Gpu:
    gcn = gpu.element.attributes.get("gcn")
    # RCCL's sm counts compute units; only NCCL's is a compute capability.
    capability = gpu.element.integer("sm", most=1000) if "sm" in gpu.element.attributes else None
    return Gpu(
        index=index,
        bus_id=gpu.bus_id,
        parent=gpu.parent,
        link=gpu.link,
        sm=capability if gcn is None else None,
        name="" if gcn is None else f"gcn{gcn[:40]}",
        gdr=gpu.element.integer("gdr", default=0) > 0,
    )


def _nic(index: int, nic: _Device) -> Nic:
    net, bus_id = nic.element, nic.bus_id
    if net.tag != "net":
        return Nic(index=index, name=bus_id, parent=nic.parent, bus_id=bus_id, link=nic.link)
    return Nic(
        index=index,
        name=net.text("name"),
        parent=nic.parent,
        bus_id=bus_id,
        link=nic.link,
        # NCCL takes speed -1, which some cards report, for "unknown".
        speed_mbps=max(net.integer("speed", default=0, least=-1), 0),
        gdr=net.integer("gdr", default=0) > 0,
        guid=net.matching("guid", _HEX, "hexadecimal such as 0x1000"),
        port=net.integer("port", default=0),
    )


def _nvlinks(gpus: dict[int, _Device]) -> tuple[tuple[NvLink, ...], tuple[NvSwitch, ...]]:
    """Return the links of GPUs, the counts of links with the same ends summed, and the switch."""
    by_bus_id = {gpu.bus_id: f"G{index}" for index, gpu in gpus.items()}
    counts: Counter[tuple[str, str, _LinkKind]] = Counter()
    planes = set()
    for index, gpu in gpus.items():
        links = gpu.element.only(*get_args(_LinkKind)) if gpu.element.tag == "gpu" else ()
        for link in links:
            link.only_none()
            target = gpu.numa if link.tag == "c2c" else _target(link, gpu.numa, by_bus_id)
            count = link.integer("count", least=1, most=1024)
            if target == "S0" and link.attributes.get("tclass"):
                planes.add(normal_bus_id(link.text("target")) or "")
            # A link to the GPU itself (Azure writes them, to keep NCCL from asking NVML) forms no
            # path in NCCL, nor does a link to a GPU that is not in the file.
            if target not in (None, f"G{index}"):
                counts[f"G{index}", str(target), cast("_LinkKind", link.tag)] += count
    found = tuple(
        NvLink(source=source, target=target, count=count, kind=kind)
        for (source, target, kind), count in counts.items()
    )
    # The first plane stands for all; fffffff:ff:ff.0 is how a hidden switch is written.
    visible = sorted(plane for plane in planes if plane and not plane.startswith("fffffff:"))
    switch = NvSwitch(index=0, bus_id=visible[0] if visible else "")
    return found, (switch,) if any(link.target == "S0" for link in found) else ()


def _target(link: _Element, numa: str, by_bus_id: dict[str, str]) -> str | None:
    """Return the other end: a GPU, the NVLink switch S0, the CPU; None outside the file."""
    text = link.text("target")
    code = link.matching("tclass", _CLASS, "a PCI class such as 0x068000").lower()
    device = by_bus_id.get(normal_bus_id(text) or "")
    if not code:
        # NCCL takes an unknown target for a switch, as virtual machines hide theirs.
        return device or "S0"
    if code.startswith(_GPU_CLASSES):
        if normal_bus_id(text) is None:
            raise link.refusal(f'has target="{text[:40]}"', "a bus id such as 0000:1a:00.0")
        return device
    if code.startswith("0x0680"):
        return numa if code.startswith("0x068001") else "S0"
    raise link.refusal(f'has tclass="{code}"', "0x03.. (GPU), 0x068000 (switch) or 0x068001 (CPU)")


# XML as plain elements with line numbers: bounded, without entities, every fault a sentence.
@dataclass(kw_only=True)
class _Element:
    """An element with the line it starts on; `where` is `file:line <tag>` for messages."""

    tag: str
    attributes: dict[str, str]
    where: str
    children: list[_Element] = field(default_factory=list)

    def refusal(self, what: str, right: str) -> InputError:
        """Return the error that names this element."""
        return InputError(self.where, what, right)

    def text(self, name: str, *, default: str | None = None) -> str:
        """Return an attribute; without a default a missing attribute is an InputError."""
        value = self.attributes.get(name, default)
        if value is None:
            raise self.refusal(f"has no {name}", f'write {name}="..."')
        return value

    def integer(
        self, name: str, *, default: int | None = None, least: int = 0, most: int = 2**31 - 1
    ) -> int:
        """Return an attribute as an integer, decimal or 0x..; required without `default`."""
        if name not in self.attributes and default is not None:
            return default
        text = self.text(name)
        value = int(text, 0) if _INTEGER.fullmatch(text) else None
        if value is None or not least <= value <= most:
            right = f"an integer from {least} to {most}"
            raise self.refusal(f"has {name}={shown(text)}", right)
        return value

    def matching(self, name: str, pattern: re.Pattern[str], meaning: str) -> str:
        """Return an attribute of this pattern, `meaning` in messages; "" if missing or empty."""
        value = self.attributes.get(name, "")
        if value and not pattern.fullmatch(value):
            raise self.refusal(f"has {name}={shown(value)}", meaning)
        return value

    def only(self, *tags: str) -> Iterator[_Element]:
        """Yield the children, each with a tag among `tags`; any other element is an InputError."""
        for child in self.children:
            if child.tag not in tags:
                allowed = ", ".join(f"<{tag}>" for tag in tags) or "nothing"
                raise child.refusal(f"is unknown inside <{self.tag}>", f"{allowed} can stand there")
            yield child

    def only_none(self) -> None:
        """Refuse children."""
        list(self.only())


def _parse_elements(text: str, *, where: str) -> _Element:
    """Parse XML text into elements.

    InputError: not well-formed, a document type or entities, text between elements, deeper than
    `MAX_DEPTH`, or more elements than `MAX_ELEMENTS`.
    """
    parser = expat.ParserCreate()
    top = _Element(tag="", attributes={}, where=where)
    path, count = [top], 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        place = f"{where}:{parser.CurrentLineNumber} <{tag[:40]}>"
        element = _Element(tag=tag, attributes=attributes, where=place)
        if count > MAX_ELEMENTS:
            right = f"one machine has at most {MAX_ELEMENTS}"
            raise element.refusal(f"is element number {count}", right)
        if len(path) > MAX_DEPTH:
            raise element.refusal("is nested too deep", f"at most {MAX_DEPTH} levels")
        path[-1].children.append(element)
        path.append(element)

    def data(text: str) -> None:
        if text.strip():
            what = f"has the text {shown(' '.join(text.split()))} between its elements"
            raise path[-1].refusal(what, "everything is an attribute here")

    def refuse_type(*declared: object) -> None:  # noqa: ARG001
        # Entities can be declared in a document type only.
        fault = "has a document type or entities"
        raise InputError(f"{where}:{parser.CurrentLineNumber}", fault, "remove them")

    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = start, lambda _: path.pop()
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = data, refuse_type
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        what, right = f"is no XML ({expat.ErrorString(error.code)})", "give the file NCCL wrote"
        raise InputError(f"{where}:{error.lineno}", what, right) from error
    except (ValueError, LookupError) as error:
        raise InputError(where, f"is not XML text ({error})", "save it as UTF-8") from error
    return top.children[0]
