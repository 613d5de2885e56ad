"""A cluster as data: hosts in rank order, the classes of their machines, and the switches between.

NCCL joins nodes in rank order, so the order of hosts is the order of nodes in every ring.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal, TypeVar

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.machine import Gpu, Knowledge, Machine, Nic, PciBridge, check, check_knowledge

FORMAT_VERSION = 1
MAX_HOSTS = 65_536  # As many as SLURM takes in one range (MAX_RANGE)
MAX_NAME = 240  # a file name with .xml fits 255 bytes
MAX_CLASS_NAME = 64
Rails = Literal["any", "only"]  # only: NIC i reaches NIC i of another host

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_SHOWN = 40

_Linked = TypeVar("_Linked", PciBridge, Gpu, Nic)


def shown(text: str) -> str:
    """Return `text` in quotes, cut to fit a message and without control characters."""
    return ascii(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!a}..."


def check_host_name(name: str, *, where: str) -> str:
    """Return `name` if it can name a host or switch in files, file names and places."""
    if len(name) > MAX_NAME:
        what = f"the name {shown(name)} has {len(name)} characters"
        raise InputError(where, what, f"at most {MAX_NAME} are possible")
    if _NAME.fullmatch(name) is None:
        right = "letters, digits and _ . - are needed, the first one no dot or dash"
        raise InputError(where, f"{shown(name)} cannot be a name here", right)
    return name


def check_host_names(names: Iterable[str], *, where: str, kind: str = "host") -> tuple[str, ...]:
    """Return the names of hosts (or another `kind`) if each is fit and none is doubled."""
    seen: dict[str, None] = {}
    for name in names:
        if check_host_name(name, where=where) in seen:
            raise InputError(where, f"{kind} {name} is named twice", "once is right")
        seen[name] = None
    return tuple(seen)


def class_name(text: str, taken: Container[str] = ()) -> str:
    """Return a name for a class described by `text`, fit for a file name and not yet taken.

    >>> class_name("2x NVIDIA/H200"), class_name("box", {"box", "box-2"})
    ('2x-NVIDIA-H200', 'box-3')
    """
    fit = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:MAX_CLASS_NAME].strip("-.") or "node"
    name, number = fit, 1
    while name in taken:
        number += 1
        name = f"{fit}-{number}"
    return name


class SwitchTree(msgspec.Struct, frozen=True, kw_only=True):
    """A switch, its hosts, and the switches below; `uplink_gbps` is of the link above, or None."""

    name: str
    hosts: tuple[str, ...] = ()
    switches: tuple[SwitchTree, ...] = ()
    uplink_gbps: float | None = None

    @property
    def all_hosts(self) -> Iterator[str]:
        """The hosts at the switch and below."""
        return (host for switch in self.all_switches for host in switch.hosts)

    @property
    def all_switches(self) -> Iterator[SwitchTree]:
        """The switch and all below it."""
        yield self
        for switch in self.switches:
            yield from switch.all_switches


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


def check_hosts_once(tree: SwitchTree, wanted: set[str], where: str) -> None:
    """Check that no wanted host is at two switches, or at a switch twice (InputError)."""
    found: dict[str, str] = {}
    for switch in tree.all_switches:
        for host in switch.hosts:
            if host in found and host in wanted:
                what = f"host {host} is at the switches {shown(found[host])} and "
                raise InputError(where, what + shown(switch.name), "a host is at one switch, once")
            found[host] = switch.name


def _kept(switch: SwitchTree, wanted: set[str]) -> SwitchTree:
    below = (_kept(child, wanted) for child in switch.switches)
    return msgspec.structs.replace(
        switch,
        hosts=tuple(host for host in switch.hosts if host in wanted),
        switches=tuple(child for child in below if child.hosts or child.switches),
    )


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


class NodeClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machines with a common plan; the name is fit for file names."""

    name: str
    machine: Machine
    knowledge: Knowledge = Knowledge()


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host; `node_class` is the position of a class, `slots` the number of ranks."""

    name: str
    node_class: int
    slots: int


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Hosts in rank order, each of a class, and the network between them."""

    hosts: tuple[Host, ...]
    classes: tuple[NodeClass, ...]
    switches: SwitchTree | None = None
    rails: Rails = "any"
    format_version: int = FORMAT_VERSION

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The hosts' names in rank order."""
        return tuple(host.name for host in self.hosts)

    @cached_property
    def host_classes(self) -> dict[str, int]:
        """The class of each host by name, in rank order."""
        return {host.name: host.node_class for host in self.hosts}

    @property
    def ranks(self) -> int:
        """The number of ranks on all hosts."""
        return sum(host.slots for host in self.hosts)


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

    Raises:
        InputError: as `check_cluster`.
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


def check_cluster(cluster: Cluster, *, where: str) -> Cluster:
    """Return `cluster` if its parts fit together (InputError)."""
    if cluster.format_version != FORMAT_VERSION:
        what = f"has format version {cluster.format_version}"
        raise InputError(where, what, f"this program reads version {FORMAT_VERSION}")
    if not 0 < len(cluster.hosts) <= MAX_HOSTS:
        raise InputError(where, f"has {len(cluster.hosts)} hosts", f"1 to {MAX_HOSTS} are possible")
    check_host_names(cluster.names, where=where)
    taken: set[str] = set()
    for known in cluster.classes:
        place = f"{where}: node class {shown(known.name)}"
        if check_host_name(known.name, where=place) in taken:
            raise InputError(place, "is there twice", "classes have different names")
        taken.add(known.name)
        if known.machine.gpus:  # without, a host of the class is named
            check(known.machine, where=place)
            check_knowledge(known.knowledge, known.machine, where=place)
    for host in cluster.hosts:
        _check_host(host, cluster, where)
    if cluster.switches is not None:
        _check_switches(cluster, cluster.switches, where)
    return cluster


def _check_host(host: Host, cluster: Cluster, where: str) -> None:
    if not 0 <= host.node_class < len(cluster.classes):
        right = f"there are {len(cluster.classes)} classes, counted from 0"
        raise InputError(where, f"host {host.name} is of class {host.node_class}", right)
    own = cluster.classes[host.node_class]
    gpus = len(own.machine.gpus)
    if not gpus:
        what = f"host {host.name} is of class {own.name}, which has no GPU"
        raise InputError(where, what, "leave it out: only GPUs are planned for")
    if not 0 < host.slots <= gpus:
        what = f"host {host.name} has {host.slots} ranks"
        raise InputError(where, what, f"1 to {gpus} are possible, as many as it has GPUs")


def _check_switches(cluster: Cluster, tree: SwitchTree, where: str) -> None:
    named = [switch.name for switch in tree.all_switches if switch.name or switch is not tree]
    check_host_names(named, where=where, kind="switch")
    there = set(tree.all_hosts)
    for name in there.difference(cluster.host_classes):
        right = "cut the tree down to the cluster's hosts"
        raise InputError(where, f"host {shown(name)} of the switches is unknown", right)
    check_hosts_once(tree, there, where)
    for name in cluster.names:
        if name not in there:
            right = "every host is at one of the switches"
            raise InputError(where, f"host {name} is at no switch", right)
