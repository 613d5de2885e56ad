"""A cluster as data: hosts in rank order, the classes of their machines, and the switches between.

NCCL joins nodes in rank order, so the order of hosts is the order of nodes in every ring.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from tccl_py.errors import InputError, check_once, require
from tccl_py.files import check_version
from tccl_py.model.machine import MAX_GPUS, Knowledge, Machine, check, check_knowledge

FORMAT_VERSION = 1
MAX_HOSTS = 65_536  # As many as SLURM takes in one range (MAX_RANGE)
MAX_NAME = 240  # a file name with .xml fits 255 bytes
MAX_CLASS_NAME = 64
Rails = Literal["any", "only"]  # only: NIC i reaches NIC i of another host

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_SHOWN = 40
_GPU_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<digits>[0-9]{1,18})?", re.ASCII)


def shown(text: str) -> str:
    """Return `text` in quotes, cut to fit a message and without control characters."""
    return ascii(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!a}..."


def check_host_name(name: str, *, where: str) -> str:
    """Return `name` if it can name a host or switch in files, file names and places."""
    fault = f"the name {shown(name)} has {len(name)} characters"
    require(len(name) <= MAX_NAME, where, fault, f"at most {MAX_NAME} are possible")
    if _NAME.fullmatch(name) is None:
        right = "letters, digits and _ . - are needed, the first one no dot or dash"
        raise InputError(where, f"{shown(name)} cannot be a name here", right)
    return name


def check_host_names(names: Iterable[str], *, where: str, kind: str = "host") -> tuple[str, ...]:
    """Return the names of hosts (or another `kind`) if each is fit and none is doubled."""
    checked = tuple(check_host_name(name, where=where) for name in names)
    check_once(where, kind, checked)
    return checked


def class_name(text: str, used: Container[str] = ()) -> str:
    """Return a name for a class described by `text`, fit for a file name and not yet taken.

    >>> class_name("2x NVIDIA/H200"), class_name("box", {"box", "box-2"})
    ('2x-NVIDIA-H200', 'box-3')
    """
    fit = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:MAX_CLASS_NAME].strip("-.") or "node"
    name, number = fit, 1
    while name in used:
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


class CableEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A port of a host: its functions, NICs of the host by index, in the order of both ends."""

    host: str
    nics: tuple[int, ...]


class Cable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cable between ports of two hosts: function n of one end reaches function n of the other."""

    ends: tuple[CableEnd, CableEnd]

    @classmethod
    def between(cls, a: str, nics: Sequence[int], b: str, others: Sequence[int]) -> Cable:
        """Return the cable from these NICs of host `a` to those of host `b`."""
        return cls((CableEnd(a, tuple(nics)), CableEnd(b, tuple(others))))


def cables_among(cables: Iterable[Cable], hosts: Container[str]) -> tuple[Cable, ...]:
    """Return the cables that join two of these hosts."""
    return tuple(cable for cable in cables if all(end.host in hosts for end in cable.ends))


def cabled_nics(cables: Iterable[Cable]) -> Iterator[tuple[str, int, tuple[str, int]]]:
    """Yield each host and NIC at a cable, and what it leads to."""
    for cable in cables:
        for near, far in (cable.ends, cable.ends[::-1]):
            for out, into in zip(near.nics, far.nics, strict=True):
                yield near.host, out, (far.host, into)


def check_hosts_once(tree: SwitchTree, hosts_to_check: set[str], where: str) -> None:
    """Check that none of some hosts is at two switches, or at a switch twice (InputError)."""
    switch_of: dict[str, str] = {}
    for switch in tree.all_switches:
        for host in switch.hosts:
            if host in switch_of and host in hosts_to_check:
                fault = f"host {host} is at the switches {shown(switch_of[host])} and "
                raise InputError(where, fault + shown(switch.name), "a host is at one switch, once")
            switch_of[host] = switch.name


class NodeClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machines with a common plan; the name is fit for file names."""

    name: str
    machine: Machine
    knowledge: Knowledge = Knowledge()
    rails: tuple[int, ...] = ()
    """The rail of each NIC, in order; none: NIC i is on rail i."""

    def rail(self, nic: int) -> int:
        """Return the rail of a NIC by its index."""
        return self.rails[nic] if self.rails else nic

    def nic_on(self, rail: int) -> int:
        """Return the NIC on a rail, which is one that `rail` returned."""
        return self.rails.index(rail) if self.rails else rail


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host; `node_class` is the position of a class, `slots` the number of ranks."""

    name: str
    node_class: int
    slots: int


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Hosts in rank order, each of a class, and the network between, or `cables` alone."""

    hosts: tuple[Host, ...]
    classes: tuple[NodeClass, ...]
    switches: SwitchTree | None = None
    rails: Rails = "any"
    cables: tuple[Cable, ...] = ()
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
    def switch_of(self) -> dict[str, str]:
        """The name of each host's switch; empty without switches."""
        switches = () if self.switches is None else self.switches.all_switches
        return {host: switch.name for switch in switches for host in switch.hosts}

    @property
    def closes(self) -> bool:
        """Whether chains close to rings inside the only host."""
        return len(self.hosts) == 1

    @property
    def ranks(self) -> int:
        """The number of ranks on all hosts."""
        return sum(host.slots for host in self.hosts)


def doubtful_uplinks(cluster: Cluster) -> Iterator[str]:
    """Yield a sentence on each uplink said to carry more than the NICs below it together."""
    speeds = [sum(nic.speed_mbps for nic in one.machine.nics) / 8000 for one in cluster.classes]
    known = [all(nic.speed_mbps for nic in one.machine.nics) for one in cluster.classes]
    for switch in cluster.switches.all_switches if cluster.switches else ():
        below = [cluster.host_classes[host] for host in switch.all_hosts]
        gbps, most = switch.uplink_gbps or 0.0, sum(speeds[number] for number in below)
        if gbps > 1.01 * most > 0 and all(known[number] for number in below):
            yield (
                f"the uplink of switch {switch.name} has {gbps:g} GB/s ({8 * gbps:g} Gbit/s), and "
                f"all NICs below it {most:g} GB/s ({8 * most:g} Gbit/s): uplink_gbps is in GB/s, "
                f"{gbps:g} Gbit/s are {gbps / 8:g}"
            )


def check_cluster(cluster: Cluster, *, where: str) -> Cluster:
    """Return `cluster` if its parts fit together (InputError)."""
    check_version(cluster.format_version, FORMAT_VERSION, where)
    if not 0 < len(cluster.hosts) <= MAX_HOSTS:
        raise InputError(where, f"has {len(cluster.hosts)} hosts", f"1 to {MAX_HOSTS} are possible")
    check_host_names(cluster.names, where=where)
    names = Counter(node_class.name for node_class in cluster.classes)
    for node_class in cluster.classes:
        place = f"{where}: node class {shown(node_class.name)}"
        once = names[check_host_name(node_class.name, where=place)] == 1
        require(once, place, "is there twice", "classes have different names")
        fits = not node_class.rails or (
            len(node_class.rails) == len(set(node_class.rails)) == len(node_class.machine.nics)
        )
        require(fits, place, f"has rails {node_class.rails}", "a rail for each NIC, once")
        if node_class.machine.gpus:  # without, a host of the class is named
            check(node_class.machine, where=place)
            check_knowledge(node_class.knowledge, node_class.machine, where=place)
    for host in cluster.hosts:
        _check_host(host, cluster, where)
    if cluster.switches is not None:
        _check_switches(cluster, cluster.switches, where)
    _check_cables(cluster, where)
    return cluster


def _check_host(host: Host, cluster: Cluster, where: str) -> None:
    number, who = host.node_class, f"host {host.name}"
    right = f"there are {len(cluster.classes)} classes, counted from 0"
    require(0 <= number < len(cluster.classes), where, f"{who} is of class {number}", right)
    gpus = len(cluster.classes[number].machine.gpus)
    fault = f"{who} is of class {cluster.classes[number].name}, which has no GPU"
    require(gpus, where, fault, "leave it out: only GPUs are planned for")
    right = f"1 to {gpus} are possible, as many as it has GPUs"
    require(0 < host.slots <= gpus, where, f"{who} has {host.slots} ranks", right)


def _check_switches(cluster: Cluster, tree: SwitchTree, where: str) -> None:
    named = [switch.name for switch in tree.all_switches if switch.name or switch is not tree]
    check_host_names(named, where=where, kind="switch")
    names = set(tree.all_hosts)
    for name in names.difference(cluster.host_classes):
        right = "cut the tree down to the cluster's hosts"
        raise InputError(where, f"host {shown(name)} of the switches is unknown", right)
    check_hosts_once(tree, names, where)
    for name in cluster.names:
        right = "every host is at one of the switches"
        require(name in names, where, f"host {name} is at no switch", right)


def _check_cables(cluster: Cluster, where: str) -> None:
    used: set[tuple[str, int]] = set()
    for number, cable in enumerate(cluster.cables):
        one, other = cable.ends
        place = f"{where}: cable {number}"
        alike = one.host != other.host and len(one.nics) == len(other.nics) > 0
        require(alike, place, "does not join two hosts", "functions of two hosts, as many of each")
        for end in cable.ends:
            number_of_class = cluster.host_classes.get(end.host)
            nics = () if number_of_class is None else cluster.classes[number_of_class].machine.nics
            free = {nic.index for nic in nics} - {nic for host, nic in used if host == end.host}
            right = "a NIC of the cluster's hosts, with one cable"
            fits = free.issuperset(end.nics)
            require(fits, place, f"is at NICs {end.nics} of {shown(end.host)}", right)
            used.update((end.host, nic) for nic in end.nics)


def single_host(machine: Machine, knowledge: Knowledge, gpus: Iterable[int]) -> Cluster:
    """Return a machine as a cluster of one host, named after it, with a rank for each GPU."""
    name = class_name(machine.name)
    host = Host(name=name, node_class=0, slots=len(tuple(gpus)))
    node_class = NodeClass(name=name, machine=machine, knowledge=knowledge)
    return check_cluster(Cluster(hosts=(host,), classes=(node_class,)), where="cluster")


def parse_gpus(text: str, where: str = "GPU list") -> tuple[int, ...]:
    """Parse a list of GPU indices and ranges of them.

    >>> parse_gpus("4,0-2")
    (4, 0, 1, 2)
    """
    where = f"{where} {text[:60]!r}"
    indices: list[int] = []
    for part in map(str.strip, text.split(",")):
        match = _GPU_RANGE.fullmatch(part)
        if match is None:
            raise InputError(where, f"{part[:20]!r} is no GPU", "write indices, as 0,2,5 or 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        require(last >= first, where, f"{part!r} goes down", f"write {last}-{first}")
        if last - first >= MAX_GPUS:
            raise InputError(where, f"{part!r} is too long", f"a node has at most {MAX_GPUS} GPUs")
        indices += range(first, last + 1)
    check_once(where, "GPU", indices)
    return tuple(indices)


def gpus_text(gpus: Sequence[int]) -> str:
    """Return GPUs as a part of a file name, and as an item of --gpus-per-job.

    >>> gpus_text((0, 1, 2, 3)), gpus_text((0, 2, 5)), gpus_text((4,))
    ('0-3', '0+2+5', '4')
    """
    if len(gpus) > 1 and tuple(gpus) == tuple(range(gpus[0], gpus[-1] + 1)):
        return f"{gpus[0]}-{gpus[-1]}"
    return "+".join(map(str, gpus))


def compress(names: Iterable[str]) -> str:
    """Return the expression of these names, in order: the inverse of `readers.hosts.expand`.

    >>> compress(["gpu08", "gpu09", "gpu10", "gpu12", "login"])
    'gpu[08-10,12],login'
    """
    matches = filter(None, map(_NUMBERED.fullmatch, names))
    split = ((match["prefix"], match["digits"] or "") for match in matches)
    # A name without a number is no part of a bracket: n,n0 are two.
    groups = itertools.groupby(split, lambda name: (name[0], bool(name[1])))
    return ",".join(_group_text(prefix, [d for _, d in group]) for (prefix, _), group in groups)


def _group_text(prefix: str, digits: Sequence[str]) -> str:
    if not digits[0]:
        return ",".join(prefix for _ in digits)
    runs: list[tuple[str, str]] = []
    for text in digits:
        first, last = runs[-1] if runs else ("", "")
        if runs and text == f"{int(last) + 1:0{len(first)}d}":
            runs[-1] = first, text
        else:
            runs.append((text, text))
    texts = ["-".join(dict.fromkeys(run)) for run in runs]
    return f"{prefix}[{','.join(texts)}]" if len(digits) > 1 else prefix + texts[0]
