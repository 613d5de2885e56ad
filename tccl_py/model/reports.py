"""Clusters put together from reports of their hosts, split, and cut down to some hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from tccl_py.errors import InputError, check_type, require
from tccl_py.files import check_value, pick
from tccl_py.model.cluster import (
    Cluster,
    Host,
    NodeClass,
    Rails,
    SwitchTree,
    cables_among,
    check_cluster,
    check_host_names,
    check_hosts_once,
    class_name,
)
from tccl_py.model.links import LinkFact
from tccl_py.model.machine import Gpu, Knowledge, Machine, Nic, PciBridge

_Linked = TypeVar("_Linked", PciBridge, Gpu, Nic)


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a host; `slots` None is as known hosts of its class, or all its GPUs."""

    host: str
    machine: Machine
    knowledge: Knowledge = Knowledge()
    slots: int | None = None


def cluster_of(
    reports: Sequence[HostReport],
    *,
    switches: SwitchTree | None = None,
    rails: Rails = "any",
    where: str = "cluster",
    known: Cluster | None = None,
) -> Cluster:
    """Return the cluster of a `known` cluster's hosts, and then of hosts that reported, in order.

    Equal machines share a class. Without switches those known are kept, and with them the rates of
    known uplinks that they do not tell.

    Raises InputError: as `check_cluster`, a known host with another machine, or a new host where
    only known switches are given.
    """
    for report in reports:
        check_type(report, "reports", HostReport)
        check_type(report.host, "host", str)
        check_type(report.machine, "machine", Machine)
    check_type(switches, "switches", SwitchTree, type(None))
    check_value(rails, Rails, where="`rails`")
    classes, hosts = (list(known.classes), list(known.hosts)) if known else ([], [])
    forms = [_form(node_class.machine, node_class.knowledge) for node_class in classes]
    numbers = {form: at for at, form in reversed(list(enumerate(forms)))}
    by_name = {host.name: host for host in hosts}
    slots_of = {host.node_class: host.slots for host in hosts}
    for report in reports:
        reported = msgspec.msgpack.encode((report.machine, report.knowledge))
        if reported not in numbers:
            form = _form(report.machine, report.knowledge)
            if form not in numbers:
                numbers[form] = len(classes)
                name = class_name(report.machine.name, {node_class.name for node_class in classes})
                new = NodeClass(name=name, machine=report.machine, knowledge=report.knowledge)
                classes.append(new)
                forms.append(form)
            numbers[reported] = numbers[form]
        number, old = numbers[reported], by_name.get(report.host)
        if old is None:
            usual = slots_of.get(number, len(report.machine.gpus))
            slots = usual if report.slots is None else report.slots
            hosts.append(Host(name=report.host, node_class=number, slots=slots))
        elif forms[old.node_class] != forms[number]:
            right = "plan all hosts anew (`force`)"
            raise InputError(f"host {report.host}", "has another machine than in the plan", right)
    if known is not None and known.switches is not None:
        switches = _join(known.switches, switches, [host.name for host in hosts], len(by_name))
    cluster = Cluster(
        hosts=tuple(hosts),
        classes=tuple(classes),
        switches=switches,
        rails=rails,
        cables=known.cables if known else (),
    )
    return check_cluster(cluster, where=where)


def _join(
    known: SwitchTree, tree: SwitchTree | None, hosts: Sequence[str], before: int
) -> SwitchTree:
    """Return the switches of hosts, of which so many were there before."""
    if tree is not None:
        rates = {switch.name: switch.uplink_gbps for switch in known.all_switches}
        return _with_uplinks(tree, rates)
    if len(hosts) > before:
        fault = f"is at no switch that is known: {hosts[-1]}"
        raise InputError("a new host", fault, "give switches (`switches`) with all hosts")
    return known


def _with_uplinks(tree: SwitchTree, uplinks: Mapping[str, float | None]) -> SwitchTree:
    uplink = uplinks.get(tree.name) if tree.uplink_gbps is None else tree.uplink_gbps
    below = tuple(_with_uplinks(switch, uplinks) for switch in tree.switches)
    return msgspec.structs.replace(tree, uplink_gbps=uplink, switches=below)


def part_of(cluster: Cluster, hosts: Iterable[str]) -> Cluster:
    """Return some hosts of a cluster in this order, with their classes and switches."""
    by_name = {host.name: host for host in cluster.hosts}
    chosen = [by_name[name] for name in hosts]
    numbers = list(dict.fromkeys(host.node_class for host in chosen))
    names, tree = [host.name for host in chosen], cluster.switches
    return Cluster(
        hosts=tuple(
            msgspec.structs.replace(host, node_class=numbers.index(host.node_class))
            for host in chosen
        ),
        classes=tuple(cluster.classes[number] for number in numbers),
        switches=None if tree is None else restrict(tree, names),
        rails=cluster.rails,
        cables=cables_among(cluster.cables, set(names)),
    )


def split_classes(cluster: Cluster, groups: Iterable[Sequence[str]]) -> Cluster:
    """Return the cluster with groups of hosts in classes of their own, as far as others stay.

    >>> box = NodeClass(name="box", machine=Machine(name="box", numa_nodes=(), gpus=()))
    >>> hosts = tuple(Host(name=f"h{n}", node_class=0, slots=1) for n in range(3))
    >>> found = split_classes(Cluster(hosts=hosts, classes=(box,)), [["h0"]])
    >>> [one.name for one in found.classes], list(found.host_classes.values())
    (['box', 'box-h0'], [1, 0, 0])
    """
    classes, numbers = list(cluster.classes), dict(cluster.host_classes)
    for names in groups:
        old = numbers[names[0]]
        if sum(number == old for number in numbers.values()) > len(names):
            names_used = {node_class.name for node_class in classes}
            name = class_name(f"{classes[old].name}-{names[0]}", names_used)
            numbers |= dict.fromkeys(names, len(classes))
            classes.append(msgspec.structs.replace(classes[old], name=name))
    hosts = (msgspec.structs.replace(host, node_class=numbers[host.name]) for host in cluster.hosts)
    return msgspec.structs.replace(cluster, hosts=tuple(hosts), classes=tuple(classes))


def with_rails(cluster: Cluster, rails: Mapping[str, tuple[int, ...]]) -> Cluster:
    """Return the cluster with the rail of each NIC by host; hosts on other rails are of others."""
    groups: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, number in cluster.host_classes.items():
        groups.setdefault((number, rails[name]), []).append(name)
    split = split_classes(cluster, groups.values())
    of_class = {split.host_classes[names[0]]: on for (_, on), names in groups.items()}
    classes = [
        msgspec.structs.replace(one, rails=of_class.get(number, one.rails))
        for number, one in enumerate(split.classes)
    ]
    return msgspec.structs.replace(split, classes=tuple(classes))


def _form(machine: Machine, knowledge: Knowledge) -> bytes:
    return msgspec.json.encode(canonical(machine, knowledge))


def canonical(machine: Machine, knowledge: Knowledge) -> tuple[Machine, Knowledge]:
    """Return the form in which two machines are equal if they can share a plan."""
    names = _bridge_names(machine)

    def move(device: _Linked, **fields: str) -> _Linked:
        parent = names.get(device.parent, device.parent)
        return msgspec.structs.replace(device, parent=parent, **fields)

    bridges = [bridge for bridge in machine.bridges if bridge.id in names]
    form = Machine(
        name="",
        numa_nodes=tuple(msgspec.structs.replace(node, affinity="") for node in machine.numa_nodes),
        gpus=tuple(move(gpu, bus_id="") for gpu in sorted(machine.gpus, key=lambda g: g.index)),
        bridges=tuple(
            move(bridge, bus_id=names[bridge.id])
            for bridge in sorted(bridges, key=lambda bridge: names[bridge.id])
        ),
        nics=tuple(
            move(n, bus_id="", guid="") for n in sorted(machine.nics, key=lambda n: n.index)
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
    facts = [LinkFact(**pick(fact, "one", "other", "state")) for fact in knowledge.links or ()]
    return msgspec.structs.replace(
        knowledge,
        links=tuple(facts),
        peer_access=tuple(sorted(knowledge.peer_access, key=lambda f: (f.source, f.target))),
        hidden_links=tuple(sorted(links, key=lambda link: (link.one, link.other))),
    )


def restrict(tree: SwitchTree, hosts: Iterable[str], *, where: str = "switch tree") -> SwitchTree:
    """Return the tree with these hosts only, and without switches that lead to no host.

    InputError: a host outside the tree, at two switches, or named twice; or no host at all.
    """
    names = check_host_names(hosts, where="hosts of the job")
    require(names, "hosts of the job", "there are none", "name one at least")
    names_there = set(tree.all_hosts)
    for name in names:
        right = "every host of the job must be at one of the switches, named as the job does"
        require(name in names_there, where, f"host {name} is at no switch", right)
    check_hosts_once(tree, set(names), where)
    pruned = _prune(tree, set(names))
    if pruned.name == "" and not pruned.hosts and len(pruned.switches) == 1:
        return pruned.switches[0]
    return pruned


def _prune(switch: SwitchTree, hosts: set[str]) -> SwitchTree:
    below = (_prune(child, hosts) for child in switch.switches)
    return msgspec.structs.replace(
        switch,
        hosts=tuple(host for host in switch.hosts if host in hosts),
        switches=tuple(child for child in below if child.hosts or child.switches),
    )
