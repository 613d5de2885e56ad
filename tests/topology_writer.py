"""Topology XML (NCCL_TOPO_FILE) in the form of NCCL's own lexer.

NCCL completes a file from NVML and sysfs, and believes its values (ncclTopoGetXmlFromSys,
ncclTopoGetXmlFromGpu and ncclTopoFillNet in graph/xml.cc of 2.30.7). The writer states known facts
only: an unknown gdr, guid, port speed or compute capability is left to NCCL, while a link's speed
and width are always written, because NCCL fails without them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tccl_py.errors import InputError
from tccl_py.model.machine import Gpu, Machine, Nic, NumaNode, PciBridge, PciLink

_GPU_CLASS, _BRIDGE_CLASS, _NIC_CLASS = "0x030200", "0x060400", "0x020000"
_SWITCH_CLASS = "0x068000"
_HIDDEN_SWITCH = "fffffff:ff:ff.0"
"""How NCCL writes an NVLink switch whose bus id a virtual machine hides."""
_LONGEST = 254
"""NCCL's lexer takes no longer value (MAX_STR_LEN in xml.h)."""
_PLAIN = re.compile(r'[^<>"&\x00-\x1f\x7f-\U0010ffff]*')
_Attributes: TypeAlias = "dict[str, str | int | None]"
_VENDORS = ("vendor", "device", "subsystem_vendor", "subsystem_device")


def topology_xml(machine: Machine, *, comment: Sequence[str] = ()) -> str:
    """Return the text of a topology file for `machine`, devices in the order of bus ids.

    C2C links are left out: a Machine has only their number, and NCCL asks NVML for missing C2C
    links. NVLinks cannot be left out: NCCL would ask NVML again.

    Args:
        machine: the machine to describe.
        comment: lines for a reader, one comment each, above the system.

    Raises:
        InputError: an NVLink in one direction only (NCCL fails at init), a link of another vendor's
            GPUs, or a name that NCCL's lexer cannot read.
    """
    _check_links(machine)
    lines = [f"<!-- {_said(line)} -->" for line in comment]
    lines.append('<system version="1">')
    for node in machine.numa_nodes:
        lines += _cpu(machine, node)
    lines.append("</system>")
    return "\n".join(lines) + "\n"


def _said(line: str) -> str:
    """Return a comment's text: some lexers end a comment at the first `>`."""
    text = " ".join(line.split()).replace("--", "-").replace("<", "(").replace(">", ")")
    return text.removesuffix("-")


def _check_links(machine: Machine) -> None:
    ways = {(link.source, link.target) for link in machine.nvlinks if link.kind == "nvlink"}
    gpus = {gpu.id for gpu in machine.gpus}
    for link in machine.nvlinks:
        where = f"topology file of {machine.name}"
        if link.kind == "xgmi":
            raise InputError(where, "has XGMI links", "NCCL joins GPUs by NVLink")
        if {link.source, link.target} <= gpus and (link.target, link.source) not in ways:
            raise InputError(
                where,
                f"an NVLink goes from {link.source} to {link.target} but not back",
                "NCCL fails at init unless both directions are described",
            )


def _tag(name: str, attributes: Mapping[str, str | int | None], *, closed: bool = False) -> str:
    """Return one tag on one line with single spaces for the lexer; None is left out."""
    parts = [name]
    for key, value in attributes.items():
        if value is None:
            continue
        text = str(value)
        if len(text) > _LONGEST or _PLAIN.fullmatch(text) is None:
            raise InputError(
                f"{key} of <{name}>",
                f"is {text[:40]!r}",
                f"NCCL's lexer reads up to {_LONGEST} plain characters without quotes",
            )
        parts.append(f'{key}="{text}"')
    return f"<{' '.join(parts)}{'/' if closed else ''}>"


def _cpu(machine: Machine, node: NumaNode) -> list[str]:
    # What nobody knows of a CPU is left out: NCCL then looks it up itself.
    head: _Attributes = {
        "numaid": node.numa_id,
        "affinity": node.affinity or None,
        "arch": node.arch or None,
        "vendor": node.vendor or None,
        "familyid": node.family,
        "modelid": node.model,
    }
    return [f"  {_tag('cpu', head)}", *_below(machine, node.id, 2), "  </cpu>"]


def _below(machine: Machine, parent: str, depth: int) -> list[str]:
    """Return the lines below `parent`, by bus id; ports without a bus id stand last."""
    lines: list[str] = []
    pad = "  " * depth
    bridges = {b.bus_id.lower(): b for b in machine.bridges if b.parent == parent}
    gpus = {g.bus_id.lower(): g for g in machine.gpus if g.parent == parent}
    nics = [nic for nic in machine.nics if nic.parent == parent]
    cards = {nic.bus_id.lower() for nic in nics if nic.bus_id}
    for bus_id in sorted({*bridges, *gpus, *cards}):
        ports = [nic for nic in nics if nic.bus_id.lower() == bus_id]
        if bus_id in bridges:
            bridge = bridges[bus_id]
            lines.append(pad + _pci(bridge, _BRIDGE_CLASS))
            lines += [*_below(machine, bridge.id, depth + 1), f"{pad}</pci>"]
        elif bus_id in gpus:
            lines.append(pad + _pci(gpus[bus_id], _GPU_CLASS))
            lines += [*_gpu(machine, gpus[bus_id], depth + 1), f"{pad}</pci>"]
        else:
            lines.append(pad + _pci(ports[0], _NIC_CLASS))
            lines += [*_ports(ports, depth + 1), f"{pad}</pci>"]
    bare = [nic for nic in nics if not nic.bus_id]
    return lines + _ports(bare, depth)


def _pci(device: PciBridge | Gpu | Nic, code: str) -> str:
    head: _Attributes = {"busid": device.bus_id, "class": code}
    if isinstance(device, PciBridge):
        # By these NCCL knows the switches whose two levels it takes for one.
        head.update({name: getattr(device, name) or None for name in _VENDORS})
    return _tag("pci", head | _link(device.link))


def _link(link: PciLink) -> _Attributes:
    """Return a link as NCCL dumps it: unknown speed is empty, unknown width is 0."""
    speed = "" if link.speed_gts is None else f"{link.speed_gts:.1f} GT/s PCIe"
    return {"link_speed": speed, "link_width": link.width or 0}


def _gpu(machine: Machine, gpu: Gpu, depth: int) -> list[str]:
    # gdr="0" would forbid what NCCL may find possible; only a 1 is known.
    head: _Attributes = {"dev": gpu.index, "sm": gpu.sm, "gdr": 1 if gpu.gdr else None}
    pad = "  " * depth
    links = [nvl for nvl in machine.nvlinks if (nvl.source, nvl.kind) == (gpu.id, "nvlink")]
    if not links:
        return [pad + _tag("gpu", head, closed=True)]
    buses = {peer.id: peer.bus_id for peer in machine.gpus}
    switches = {switch.id: switch.bus_id or _HIDDEN_SWITCH for switch in machine.nvswitches}
    lines = [pad + _tag("gpu", head)]
    for link in links:
        switch = link.target in switches
        target = switches[link.target] if switch else buses[link.target]
        code = _SWITCH_CLASS if switch else _GPU_CLASS
        body: _Attributes = {"target": target, "count": link.count, "tclass": code}
        lines.append(f"{pad}  {_tag('nvlink', body, closed=True)}")
    return [*lines, f"{pad}</gpu>"]


def _ports(nics: Sequence[Nic], depth: int) -> list[str]:
    """Return the ports of one card; none for a card of which only the place is known."""
    known = [nic for nic in nics if nic.name != nic.bus_id or nic.speed_mbps or nic.guid]
    if not known:
        return []
    pad = "  " * depth
    lines = [f"{pad}<nic>"]
    for nic in known:
        body: _Attributes = {
            "name": nic.name,
            "dev": nic.index,
            "speed": nic.speed_mbps or None,
            "port": nic.port,
            "guid": nic.guid or None,
            "gdr": 1 if nic.gdr else None,
        }
        lines.append(f"{pad}  {_tag('net', body, closed=True)}")
    return [*lines, f"{pad}</nic>"]
