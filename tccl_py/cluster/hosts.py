"""A cluster as data: hosts in rank order, the classes of their machines, and the switches between.

NCCL joins nodes in the order in which ranks first name them, so the order of hosts is the order of
nodes in every ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from tccl_py.cluster.classes import canonical
from tccl_py.cluster.expressions import MAX_HOSTS
from tccl_py.cluster.names import check_host_name, check_host_names, class_name, shown
from tccl_py.cluster.switches import Rails
from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json
from tccl_py.merge.switches import SwitchTree
from tccl_py.topology.knowledge import Knowledge, check_knowledge
from tccl_py.topology.machine import Machine, check

FORMAT_VERSION = 1


class NodeClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machines that one plan is right for; the name is fit for file names."""

    name: str
    machine: Machine
    knowledge: Knowledge = Knowledge()


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host; `node_class` is the position of its class, `slots` how many ranks it has."""

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

    @cached_property
    def first_ranks(self) -> dict[str, int]:
        """The first rank of each host by name."""
        ranks, first = {}, 0
        for host in self.hosts:
            ranks[host.name] = first
            first += host.slots
        return ranks

    @property
    def ranks(self) -> int:
        """How many there are on all hosts."""
        return sum(host.slots for host in self.hosts)

    def class_of(self, host: Host) -> NodeClass:
        """The class of a host."""
        return self.classes[host.node_class]


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one host says of itself; `slots` None is a rank for each of its GPUs."""

    host: str
    machine: Machine
    knowledge: Knowledge = Knowledge()
    slots: int | None = None


def check_cluster(cluster: Cluster, *, where: str) -> Cluster:
    """Return `cluster` if its parts fit together.

    Raises:
        InputError: no host or too many, a name that is unfit or doubled, an unknown class, a class
            without GPU or with a name that is unfit or doubled, more or fewer ranks than a host can
            have, a host that is at no switch, or a host at a switch that is not in the cluster.
    """
    if cluster.format_version != FORMAT_VERSION:
        what = f"has format version {cluster.format_version}"
        raise InputError(where, what, f"this program reads version {FORMAT_VERSION}")
    if not 0 < len(cluster.hosts) <= MAX_HOSTS:
        raise InputError(where, f"has {len(cluster.hosts)} hosts", f"1 to {MAX_HOSTS} are possible")
    check_host_names((host.name for host in cluster.hosts), where=where)
    _check_classes(cluster, where)
    for host in cluster.hosts:
        _check_host(host, cluster, where)
    if cluster.switches is not None:
        _check_switches(cluster, cluster.switches, where)
    return cluster


def classes_of(reports: Sequence[HostReport]) -> tuple[tuple[NodeClass, ...], tuple[int, ...]]:
    """The classes of these hosts' machines, in the order of their first hosts; each host's class.

    A class has the machine of its first host, and a name made from that machine's name.

    >>> from tccl_py.topology.machine import toy_machine
    >>> one, other = toy_machine(gpus=2), toy_machine(gpus=4)
    >>> reports = [HostReport(host=name, machine=m) for name, m in zip("abc", (one, other, one))]
    >>> classes, numbers = classes_of(reports)
    >>> [one.name for one in classes], numbers
    (['toy', 'toy-2'], (0, 1, 0))
    """
    numbers: dict[bytes, int] = {}  # of machines as reported, and in the form that is compared
    classes: list[NodeClass] = []
    members: list[int] = []
    for report in reports:
        reported = msgspec.msgpack.encode((report.machine, report.knowledge))
        if reported not in numbers:
            form = msgspec.json.encode(canonical(report.machine, report.knowledge))
            if form not in numbers:
                numbers[form] = len(classes)
                name = class_name(report.machine.name, {one.name for one in classes})
                one = NodeClass(name=name, machine=report.machine, knowledge=report.knowledge)
                classes.append(one)
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
    """The cluster of hosts that reported in rank order.

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


def in_order(cluster: Cluster, names: Sequence[str], *, where: str = "host order") -> Cluster:
    """The cluster with its hosts in another order.

    Raises:
        InputError: the names are not those of its hosts, each once.
    """
    hosts = {host.name: host for host in cluster.hosts}
    given = set(check_host_names(names, where=where))
    for name in names:
        if name not in hosts:
            raise InputError(where, f"host {name} is not in the cluster", "name its hosts")
    for name in hosts:
        if name not in given:
            raise InputError(where, f"host {name} is missing", "name every host of the cluster")
    return msgspec.structs.replace(cluster, hosts=tuple(hosts[name] for name in names))


def cluster_to_json(cluster: Cluster) -> str:
    """Encode; `cluster_from_json` gives an equal Cluster back."""
    return encode_json(cluster)


def cluster_from_json(text: str, *, where: str) -> Cluster:
    """Decode and check a Cluster.

    Raises:
        InputError: not JSON, unknown or missing fields, or parts that do not fit together.
    """
    return check_cluster(decode_json(text, Cluster, where=where), where=where)


def _check_classes(cluster: Cluster, where: str) -> None:
    taken: set[str] = set()
    for one in cluster.classes:
        place = f"{where}: node class {shown(one.name)}"
        check_host_name(one.name, where=place)
        if one.name in taken:
            raise InputError(place, "is there twice", "classes have different names")
        taken.add(one.name)
        if one.machine.gpus:  # without, a host of the class is named
            check(one.machine, where=place)
            check_knowledge(one.knowledge, one.machine, where=place)


def _check_host(host: Host, cluster: Cluster, where: str) -> None:
    if not 0 <= host.node_class < len(cluster.classes):
        right = f"there are {len(cluster.classes)} classes, counted from 0"
        raise InputError(where, f"host {host.name} is of class {host.node_class}", right)
    one = cluster.class_of(host)
    gpus = len(one.machine.gpus)
    if not gpus:
        what = f"host {host.name} is of class {one.name}, which has no GPU"
        raise InputError(where, what, "leave it out: only GPUs are planned for")
    if not 0 < host.slots <= gpus:
        what = f"host {host.name} has {host.slots} ranks"
        raise InputError(where, what, f"1 to {gpus} are possible, as many as it has GPUs")


def _check_switches(cluster: Cluster, tree: SwitchTree, where: str) -> None:
    named = [switch.name for switch in tree.all_switches if switch.name or switch is not tree]
    check_host_names(named, where=where, kind="switch")
    there: set[str] = set()
    for name in tree.all_hosts:
        if name not in cluster.host_classes:
            right = "cut the tree down to the cluster's hosts"
            raise InputError(where, f"host {shown(name)} of the switches is unknown", right)
        if name in there:
            raise InputError(where, f"host {name} is at two switches", "a host is at one, once")
        there.add(name)
    for name in cluster.names:
        if name not in there:
            right = "every host is at one of the switches"
            raise InputError(where, f"host {name} is at no switch", right)
