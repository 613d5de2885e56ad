"""Machines described otherwise than they are, so that NCCL believes what was measured.

NCCL's search knows links with a bandwidth each and nothing else. Of a topology file it believes
the speed and width of PCI links, what the CPU is (from which follows what CPUs carry between
each other), bridges that are not there, and the order in which devices stand.

Source: ncclTopoAddPci, ncclTopoGetInterCpuBw and ncclTopoGetSystemFromXml (topo.cc of NCCL 2.30.7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import msgspec

from tccl_py.runtimes.nccl.bandwidths import between_cpus_gbps, pci_gbps
from tccl_py.topology.machine import Gpu, Machine, NumaNode, PciBridge, PciLink

Pair = tuple[int, int]
Order = tuple[int, ...]

_STAND_IN = "fffe:{:02x}:00.0"
"""Bus ids of bridges that are not there: in a domain that no host uses, in order of their place."""
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


def beliefs(
    machine: Machine, orders: Sequence[Order], carried: Mapping[str, float]
) -> tuple[Belief, ...]:
    """What a topology file could say, the machine as it is first, then the least changed.

    Args:
        machine: as it is; its CPUs are known.
        orders: ring orders over its GPUs that should come first in NCCL's search.
        carried: id of a PCI device -> what was measured over its link up, GB/s.
    """
    ways = [Belief(machine=machine), *_ordered(machine, orders)]
    links: list[Mapping[str, float]] = [{}, carried] if carried else [{}]
    cpus: list[Cpu | None] = [None]
    if len(machine.numa_nodes) > 1:
        own = {between_cpus_gbps(node) for node in machine.numa_nodes}
        cpus += [cpu for cpu in _CPUS if {_between(cpu)} != own]
    found = [
        _with_cpu(_with_links(way, rates), cpu)
        for way, rates, cpu in product(ways, links, cpus)
        # Each of them costs hundreds of searches: other orders are tried with true links only.
        if not (way.changes and rates)
    ]
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


def _ordered(machine: Machine, orders: Sequence[Order]) -> list[Belief]:
    found = []
    for order in dict.fromkeys(orders):
        other = in_order(machine, order)
        if other is not None and other != machine:
            text = (
                f"bridges that are not there put the GPUs in the order {' '.join(map(str, order))}"
            )
            found.append(Belief(machine=other, changes=(text,)))
    return found


def in_order(machine: Machine, ring: Order) -> Machine | None:
    """The machine with its devices put into the order of a ring, which NCCL tries first.

    Devices keep their bus ids, by which they stand in a file; so those that should stand otherwise
    each get a bridge above them that is not there, as fast as their own link. None if the ring does
    not go through the tree one branch after the other, or not over all GPUs.
    """
    if {*ring} != {*machine.gpu_indices}:
        return None
    for start, _ in enumerate(ring):
        turned = ring[start:] + ring[:start]
        for order in (turned, turned[:1] + turned[:0:-1]):
            if _walk(machine, order) == order:
                return _behind_bridges(machine, order)
    return None


def _places(machine: Machine, order: Order) -> dict[str, int]:
    """Each device -> where its first GPU stands in the order."""
    places: dict[str, int] = {}
    for place, gpu in enumerate(order):
        for device in (f"G{gpu}", *machine.ancestors(f"G{gpu}")):
            places.setdefault(device, place)
    return places


def _walk(machine: Machine, order: Order) -> Order:
    """The GPUs as a walk down the tree meets them if branches stand in this order."""
    places = _places(machine, order)
    numa = {node.id: number for number, node in enumerate(machine.numa_nodes)}

    def key(gpu: str) -> tuple[int, ...]:
        *bridges, root = machine.ancestors(gpu)
        return (numa[root], *(places[one] for one in (*reversed(bridges), gpu)))

    return tuple(int(gpu[1:]) for gpu in sorted((f"G{one}" for one in order), key=key))


def _behind_bridges(machine: Machine, order: Order) -> Machine:
    places = _places(machine, order)
    buses = {one.id: one.bus_id for one in machine.gpus}
    buses.update((one.id, one.bus_id) for one in machine.bridges)
    siblings: dict[str, list[str]] = {}
    for device in sorted((one for one in places if one in buses), key=lambda one: places[one]):
        siblings.setdefault(machine.parents[device], []).append(device)
    above: dict[str, str] = {}
    for group in siblings.values():
        if group != sorted(group, key=lambda one: buses[one]):
            for device in group:
                above[device] = _STAND_IN.format(len(above) + 1)
    extra = tuple(
        PciBridge(bus_id=bus_id, parent=machine.parents[device], link=machine.links[device])
        for device, bus_id in above.items()
    )

    def moved(device: Gpu | PciBridge) -> str:
        return above.get(device.id, device.parent)

    return msgspec.structs.replace(
        machine,
        gpus=tuple(msgspec.structs.replace(one, parent=moved(one)) for one in machine.gpus),
        bridges=(
            *(msgspec.structs.replace(one, parent=moved(one)) for one in machine.bridges),
            *extra,
        ),
    )
