"""The NVLinks, XGMI and C2C links of an NCCL topology file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tccl_py.topology.machine import NvLink, NvSwitch, PciLink
from tccl_py.topology.readers.busid import normal_bus_id
from tccl_py.topology.readers.elements import Element

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
