"""Clusters put together from reports of their hosts, and switch trees cut down to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.cluster import (
    Cluster,
    Host,
    NodeClass,
    Rails,
    SwitchTree,
    check_cluster,
    check_host_names,
    check_hosts_once,
    class_name,
)
from tccl_py.model.machine import Gpu, Knowledge, Machine, Nic, PciBridge

_Linked = TypeVar("_Linked", PciBridge, Gpu, Nic)


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a host; `slots` None is a rank for each GPU."""

    host: str
    machine: Machine
    knowledge: Knowledge = Knowledge()
    slots: int | None = None


def classes_of(reports: Sequence[HostReport]) -> tuple[tuple[NodeClass, ...], tuple[int, ...]]:
    """Return the classes of these machines, by first hosts, and the position of each host's."""
    numbers: dict[bytes, int] = {}  # of machines as reported, and in the form that is compared
    classes: list[NodeClass] = []
    members: list[int] = []
    for report in reports:
        reported = msgspec.msgpack.encode((report.machine, report.knowledge))
        if reported not in numbers:
            form = msgspec.json.encode(canonical(report.machine, report.knowledge))
            if form not in numbers:
                numbers[form] = len(classes)
                name = class_name(report.machine.name, {known.name for known in classes})
                new = NodeClass(name=name, machine=report.machine, knowledge=report.knowledge)
                classes.append(new)
            numbers[reported] = numbers[form]
        members.append(numbers[reported])
    return tuple(classes), tuple(members)


def cluster_of(
    reports: Sequence[HostReport],
    *,
    switches: SwitchTree | None = None,
    rails: Rails = "any",
    where: str = "cluster",
) -> Cluster:
    """Return the cluster of hosts that reported in rank order.

    Raises InputError: as `check_cluster`.
    """
    classes, numbers = classes_of(reports)
    hosts = tuple(
        Host(
            name=report.host,
            node_class=number,
            slots=len(report.machine.gpus) if report.slots is None else report.slots,
        )
        for report, number in zip(reports, numbers, strict=True)
    )
    cluster = Cluster(hosts=hosts, classes=classes, switches=switches, rails=rails)
    return check_cluster(cluster, where=where)


def canonical(machine: Machine, knowledge: Knowledge) -> tuple[Machine, Knowledge]:
    """Return the form in which two machines are equal if they can share a plan."""
    names = _bridge_names(machine)

    def moved(device: _Linked, **fields: str) -> _Linked:
        parent = names.get(device.parent, device.parent)
        return msgspec.structs.replace(device, parent=parent, **fields)

    bridges = [bridge for bridge in machine.bridges if bridge.id in names]
    form = Machine(
        name="",
        numa_nodes=tuple(msgspec.structs.replace(node, affinity="") for node in machine.numa_nodes),
        gpus=tuple(moved(gpu, bus_id="") for gpu in sorted(machine.gpus, key=lambda g: g.index)),
        bridges=tuple(
            moved(bridge, bus_id=names[bridge.id])
            for bridge in sorted(bridges, key=lambda bridge: names[bridge.id])
        ),
        nics=tuple(
            moved(n, bus_id="", guid="") for n in sorted(machine.nics, key=lambda n: n.index)
        ),
        nvswitches=tuple(msgspec.structs.replace(s, bus_id="") for s in machine.nvswitches),
        nvlinks=tuple(sorted(machine.nvlinks, key=lambda x: (x.source, x.target, x.kind))),
    )
    return form, _canonical_knowledge(machine, knowledge, names)


def _bridge_names(machine: Machine) -> dict[str, str]:
    """Return a name for each bridge above a GPU or NIC: steps from the root, devices below."""
    below: dict[str, set[str]] = {}
    steps: dict[str, int] = {}
    for device in [gpu.id for gpu in machine.gpus] + [nic.id for nic in machine.nics]:
        way = [parent for parent in machine.ancestors(device) if parent in machine.parents]
        for step, bridge in enumerate(reversed(way)):
            below.setdefault(bridge, set()).add(device)
            steps[bridge] = step
    return {bridge: f"B{steps[bridge]}:{'+'.join(sorted(ids))}" for bridge, ids in below.items()}


def _canonical_knowledge(
    machine: Machine, knowledge: Knowledge, names: dict[str, str]
) -> Knowledge:
    bridges = {bridge.bus_id for bridge in machine.bridges}
    links = []
    for link in knowledge.hidden_links:
        ends = [names.get(end, "" if end in bridges else end) for end in (link.one, link.other)]
        if all(ends):
            one, other = sorted(ends)
            links.append(msgspec.structs.replace(link, one=one, other=other, note=""))
    return msgspec.structs.replace(
        knowledge,
        peer_access=tuple(sorted(knowledge.peer_access, key=lambda f: (f.source, f.target))),
        hidden_links=tuple(sorted(links, key=lambda link: (link.one, link.other))),
    )


def restricted(tree: SwitchTree, hosts: Iterable[str], *, where: str = "switch tree") -> SwitchTree:
    """Return the tree with these hosts only, and without switches that lead to no host.

    InputError: a host outside the tree, at two switches, or named twice; or no host at all.
    """
    names = check_host_names(hosts, where="hosts of the job")
    if not names:
        raise InputError("hosts of the job", "there are none", "name one at least")
    there = set(tree.all_hosts)
    for name in names:
        if name not in there:
            right = "every host of the job must be at one of the switches, named as the job does"
            raise InputError(where, f"host {name} is at no switch", right)
    check_hosts_once(tree, set(names), where)
    kept = _kept(tree, set(names))
    if kept.name == "" and not kept.hosts and len(kept.switches) == 1:
        return kept.switches[0]
    return kept


def _kept(switch: SwitchTree, wanted: set[str]) -> SwitchTree:
    below = (_kept(child, wanted) for child in switch.switches)
    return msgspec.structs.replace(
        switch,
        hosts=tuple(host for host in switch.hosts if host in wanted),
        switches=tuple(child for child in below if child.hosts or child.switches),
    )
