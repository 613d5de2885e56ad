"""Machines described otherwise than they are, so that NCCL believes what was measured.

NCCL's search knows links with a bandwidth each and nothing else. Of a topology file it believes
the speed and width of PCI links and what the CPU is, from which follows what CPUs carry between
each other. The order in which devices stand in it is lost: NCCL orders them by the ranks' GPUs.

Source: ncclTopoAddPci, ncclTopoGetInterCpuBw and ncclTopoGetSystemFromXml (topo.cc of NCCL 2.30.7).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import msgspec

from tccl_py.model.machine import Gpu, Machine, NumaNode, PciBridge, PciLink
from tccl_py.nccl.versions import between_cpus_gbps, pci_gbps

_SPEEDS = (8.0, 16.0, 32.0, 2.5)
_WIDTHS = range(1, 17)


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """A CPU that a file can name, for what NCCL believes it carries to another."""

    vendor: str
    family: int
    model: int


_CPUS = (
    Cpu(vendor="GenuineIntel", family=6, model=0xCF),
    Cpu(vendor="GenuineIntel", family=6, model=0x8F),
    Cpu(vendor="AuthenticAMD", family=25, model=1),
    Cpu(vendor="GenuineIntel", family=6, model=0x55),
    Cpu(vendor="GenuineIntel", family=6, model=0x4F),
)
"""40, 22, 16, 10 and 6 GB/s. No other architecture: by that NCCL decides more than bandwidths."""


class Belief(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as a file would describe it, and what is told otherwise than it is, in words."""

    machine: Machine
    changes: tuple[str, ...] = ()


def beliefs(machine: Machine, carried: Mapping[str, float]) -> tuple[Belief, ...]:
    """What a topology file could say, the machine as it is first, then the least changed.

    Args:
        machine: as it is; its CPUs are known.
        carried: id of a PCI device -> what was measured over its link up, GB/s.
    """
    true = Belief(machine=machine)
    links: list[Mapping[str, float]] = [{}, carried] if carried else [{}]
    cpus: list[Cpu | None] = [None]
    if len(machine.numa_nodes) > 1:
        own = {between_cpus_gbps(node) for node in machine.numa_nodes}
        cpus += [cpu for cpu in _CPUS if {_between(cpu)} != own]
    found = [_with_cpu(_with_links(true, rates), cpu) for rates, cpu in product(links, cpus)]
    distinct = {one.machine: one for one in reversed(found)}
    return tuple(sorted(distinct.values(), key=lambda one: len(one.changes)))


def _between(cpu: Cpu) -> float:
    return between_cpus_gbps(
        NumaNode(index=0, numa_id=0, vendor=cpu.vendor, family=cpu.family, model=cpu.model)
    )


def _with_cpu(belief: Belief, cpu: Cpu | None) -> Belief:
    if cpu is None:
        return belief
    nodes = tuple(
        msgspec.structs.replace(
            node, arch="x86_64", vendor=cpu.vendor, family=cpu.family, model=cpu.model
        )
        for node in belief.machine.numa_nodes
    )
    text = f"CPUs are named {cpu.vendor} {cpu.family}/{cpu.model}: {_between(cpu):g} GB/s between"
    return Belief(
        machine=msgspec.structs.replace(belief.machine, numa_nodes=nodes),
        changes=(*belief.changes, text),
    )


def _with_links(belief: Belief, carried: Mapping[str, float]) -> Belief:
    """PCI links as fast as was measured over them, as near as NCCL's table comes to that."""
    changed: dict[str, PciLink] = {}
    told: dict[str, int] = {}
    for device, link in belief.machine.links.items():
        if device not in carried:
            continue
        nearest = nearest_link(link, carried[device])
        if pci_gbps(nearest) != pci_gbps(link):
            changed[device] = nearest
            text = f"links of {pci_gbps(link):g} GB/s are told as {pci_gbps(nearest):g}"
            told[text] = told.get(text, 0) + 1
    if not changed:
        return belief
    return Belief(
        machine=_relinked(belief.machine, changed),
        changes=(*belief.changes, *(f"{count} {text}" for text, count in told.items())),
    )


def nearest_link(link: PciLink, gbps: float) -> PciLink:
    """The link that NCCL takes for about this rate; with its own speed where that will do.

    >>> nearest_link(PciLink(speed_gts=32.0, width=16), 26.5)
    PciLink(speed_gts=32.0, width=9)
    """
    speeds = dict.fromkeys((*([link.speed_gts] if link.speed_gts else []), *_SPEEDS))
    choices = [
        PciLink(speed_gts=speed, width=width) for speed in speeds for width in reversed(_WIDTHS)
    ]
    return min(choices, key=lambda one: round(abs(pci_gbps(one) / gbps - 1), 2))


def _relinked(machine: Machine, links: Mapping[str, PciLink]) -> Machine:
    def new(device: Gpu | PciBridge) -> PciLink:
        return links.get(device.id, device.link)

    return msgspec.structs.replace(
        machine,
        gpus=tuple(msgspec.structs.replace(one, link=new(one)) for one in machine.gpus),
        bridges=tuple(msgspec.structs.replace(one, link=new(one)) for one in machine.bridges),
    )
