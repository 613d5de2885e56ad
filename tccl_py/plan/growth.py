"""Hosts compared with the measured rates of their class, and clusters that hosts are added to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.cluster import Cluster, NodeClass, SwitchTree, class_name
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.reports import HostReport, canonical, cluster_of
from tccl_py.model.transfer import TransferSet, transfer_set
from tccl_py.nccl.network import Pairing
from tccl_py.plan.cluster_planner import make_cluster_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan, PlanChain
from tccl_py.plan.probe_hosts import PlacedSource, placements
from tccl_py.plan.tables import HostTable, read_tables
from tccl_py.plan.variants import TUNED_NOTE
from tccl_py.readers.hosts import HostSlots
from tccl_py.readers.switches import read_switches
from tccl_py.sources.journal import AnewSource, RememberingSource

MOST_SAMPLED = 16
"""Hosts of a class that are compared with it in a first plan."""
MOST_ODD = 8
"""Hosts that get classes of their own: each is measured like a class."""
_SETS = 3
"""Sets of a class that a new host is compared by."""
_LEAST_OFF, _DEVIATIONS = 0.1, 5.0
"""A host differs if a rate is off by more than this share, and by so many standard errors."""
_LEAST_NOISE = 1e-3
_95_PERCENT = 1.96


class Sample(msgspec.Struct, frozen=True):
    """A measured set of a class: flows, the rate of the slowest, GB/s, and its standard error."""

    transfers: TransferSet
    gbps: float
    error: float


def _sample(chains: Sequence[PlanChain], error: float) -> Sample:
    flows = transfer_set(hop.flow for chain in chains for hop in chain.hops)
    return Sample(flows, min(chain.rate for chain in chains), error / _95_PERCENT)


def samples_of_plan(plan: Plan) -> dict[int, list[Sample]]:
    """Return the sets by which a plan was decided, the chains of its paths, for each class."""
    found: dict[int, list[Sample]] = {}
    for path in plan.paths:
        found.setdefault(path.node_class, []).append(_sample(path.chains, plan.error))
    return found


def _samples_of_table(table: HostTable) -> list[Sample]:
    """Return the best sets of a class's search, each measured with other settings or NICs."""
    chosen = (table.chains_with(s, Pairing(best.pairs)) for s, best in table.choices)
    found = [_sample(one.chains, one.error) for one in chosen if one is not None]
    return list({one.transfers: one for one in found}.values())[:_SETS]


class KnownPlan(msgspec.Struct, frozen=True):
    """A cluster's plan with its tables."""

    plan: Plan
    tables: tuple[HostTable, ...]

    @property
    def task(self) -> dict[str, Any]:
        """The arguments of `make_cluster_plan` that hold for all hosts."""
        plan = self.plan
        gid, pinned = plan.settings.ib_gid_index, plan.pinned_env
        common = {"version": plan.settings.version, "strategy": plan.strategy}
        return {**common, "ib_gid_index": gid, "pinned_env": pinned}

    def samples(self) -> dict[int, list[Sample]]:
        """Return some measured sets of each class over all GPUs that are planned."""
        numbers = {one.name: n for n, one in enumerate(self.plan.cluster.classes)}
        of_class = {numbers[table.node_class.name]: table for table in self._whole}
        return {number: _samples_of_table(table) for number, table in of_class.items()}

    @property
    def _whole(self) -> list[HostTable]:
        names = [one.name for one in self.plan.cluster.classes]
        planned = dict(zip(names, self.plan.class_gpus, strict=True))
        return [table for table in self.tables if planned[table.node_class.name] == table.gpus]


def read_known_plan(directory: Path) -> KnownPlan:
    """Read a cluster's plan with all its tables.

    Raises:
        InputError: there is none, or files were changed.
    """
    plan = load_plan(directory)
    if not plan.is_cluster:
        right = "plan a new directory under mpirun or srun"
        raise InputError(str(directory), "holds the plan of one machine", right)
    return KnownPlan(plan, tuple(read_tables(directory, plan.cluster.classes)))


def extended_plan(
    known: KnownPlan,
    cluster: Cluster,
    sources: Mapping[str, BandwidthSource],
    notices: Iterable[str] = (),
    **task: Any,
) -> Plan:
    """Return a plan over an extended cluster, from tables; classes without tables are measured.

    `sources` are those of classes with a host at hand, by name; `task` is as `make_cluster_plan`
    takes it.

    Raises:
        InputError: a class has neither table nor source.
    """
    of_classes = [sources.get(one.name) for one in cluster.classes]
    made = make_cluster_plan(cluster, of_classes, kept=known.tables, **task)
    # The rings over all hosts are planned again, under settings that no job has tuned.
    before = (one for one in known.plan.notices if one != TUNED_NOTE)
    told = dict.fromkeys((*before, *made.notices, *notices))
    return msgspec.structs.replace(made, notices=tuple(told))


def extended_by_names(
    known: KnownPlan, hosts: Sequence[HostSlots], switches: Path | None, **task: Any
) -> Plan:
    """Return a plan over a plan's hosts and further ones of its only class, none of them measured.

    Raises:
        InputError: the plan has several classes, or as `joined`.
    """
    old = known.plan.cluster
    if len(old.classes) > 1:
        what = f"are of one of {len(old.classes)} classes"
        raise InputError("--hosts", what, "start ranks on them: then their class is found out")
    reports = [
        HostReport(
            host=host.name,
            machine=old.classes[0].machine,
            knowledge=old.classes[0].knowledge,
            slots=len(known.plan.class_gpus[0]) if host.slots is None else host.slots,
        )
        for host in hosts
    ]
    cluster = joined(old, cluster_of(reports, where="--hosts"), switches)
    new = ", ".join(host.name for host in hosts if host.name not in old.host_classes)
    noticed = [f"added as equal to {old.classes[0].name}, without any sample: {new}"] * bool(new)
    return extended_plan(known, cluster, {}, noticed, **task)


def extended_by_model(
    known: KnownPlan,
    new: Cluster,
    switches: Path | None,
    source: BandwidthSource,
    others: Mapping[str, BandwidthSource],
    **task: Any,
) -> Plan:
    """Return a plan over a plan's hosts and simulated ones of one class; `others` are its classes'.

    Raises:
        InputError: as `joined`.
    """
    old, samples = known.plan.cluster, known.samples()
    cluster, noticed = joined(old, new, switches), tuple[str, ...]()
    number = cluster.host_classes[new.names[0]]
    if number in samples and (why := difference(source, samples[number])):
        cluster = joined(old, new, switches, apart=True)
        number = cluster.host_classes[new.names[0]]
        noticed = (f"the new hosts: {why}; planned as a class of their own",)
    sources = {**others, cluster.classes[number].name: source}
    return extended_plan(known, cluster, sources, noticed, **task)


class Sampler:
    """Compares hosts of a job with the measured sets of their classes.

    `measurable` are as of `probe_hosts.placements`. Sets are measured anew, whatever the journal
    has: a host may have changed since.
    """

    def __init__(self, source: RememberingSource, cluster: Cluster, **measurable: Any) -> None:
        self._source, self._cluster, self._measurable = AnewSource(source), cluster, measurable
        tree = cluster.switches
        switches = () if tree is None else tree.all_switches
        self._switch = {host: switch.name for switch in switches for host in switch.hosts}

    def odd_hosts(
        self, hosts: Sequence[str], samples: Mapping[int, Sequence[Sample]], known: Sequence[str]
    ) -> dict[str, str]:
        """Return how hosts differ from their class, by the names of those that do.

        A host differs if it does with two partners, or twice with the only partner. Partners are
        `known` hosts, then hosts found alike; without any below its switch no host differs.
        """
        odd: dict[str, str] = {}
        alike = list(known)
        for host in hosts:
            number, why = self._cluster.host_classes[host], ""
            for source in self._sources(host, [*alike, *hosts], odd):
                why = difference(source, samples.get(number, ()))
                if not why:
                    alike.append(host)
                    break
            if why:
                odd[host] = why
        return odd

    def _sources(
        self, host: str, others: Sequence[str], odd: Mapping[str, str]
    ) -> list[PlacedSource]:
        """Return sources that measure a host with the two best partners, or one of them twice."""
        classes, switch = self._cluster.host_classes, self._switch
        near = [n for n in dict.fromkeys(others) if n != host and switch.get(n) == switch.get(host)]
        near.sort(key=lambda name: (name in odd, classes[name] != classes[host]))
        found = [self._placed(host, partner) for partner in near[:2]]
        return found if len(found) != 1 else found * 2

    def _placed(self, host: str, partner: str) -> PlacedSource:
        pair = part_of(self._cluster, (host, partner))
        return PlacedSource(self._source, placements(pair, **self._measurable)[0])


def difference(source: BandwidthSource, samples: Sequence[Sample]) -> str:
    """Return how a host differs from measured sets of its class; "" if it is alike."""
    for sample in samples:
        (found,) = source.measure([sample.transfers])
        off = abs(found.rate_gbps / sample.gbps - 1)
        noise = max(_LEAST_NOISE, math.hypot(sample.error, found.relative_error))
        if off > max(_LEAST_OFF, _DEVIATIONS * noise):
            more = "slower" if found.rate_gbps < sample.gbps else "faster"
            return (
                f"{off:.0%} {more} than its class, {found.rate_gbps:.3g} instead of "
                f"{sample.gbps:.3g} GB/s in {sample.transfers}"
            )
    return ""


# Clusters, changed.


def part_of(cluster: Cluster, hosts: Iterable[str]) -> Cluster:
    """Return some hosts in this order, with their classes and without switches."""
    known = {host.name: host for host in cluster.hosts}
    chosen = [known[name] for name in hosts]
    numbers = list(dict.fromkeys(host.node_class for host in chosen))
    return Cluster(
        hosts=tuple(
            msgspec.structs.replace(host, node_class=numbers.index(host.node_class))
            for host in chosen
        ),
        classes=tuple(cluster.classes[number] for number in numbers),
        rails=cluster.rails,
    )


def split(cluster: Cluster, odd: Iterable[str]) -> Cluster:
    """Return the cluster with odd hosts in classes of their own, as far as others stay in theirs.

    >>> from tccl_py.model.cluster import Host
    >>> from tccl_py.model.machine import Machine
    >>> box = NodeClass(name="box", machine=Machine(name="box", numa_nodes=(), gpus=()))
    >>> hosts = tuple(Host(name=f"h{n}", node_class=0, slots=1) for n in range(3))
    >>> found = split(Cluster(hosts=hosts, classes=(box,)), ["h0"])
    >>> [one.name for one in found.classes], list(found.host_classes.values())
    (['box', 'box-h0'], [1, 0, 0])
    """
    replace, hosts, classes = msgspec.structs.replace, list(cluster.hosts), list(cluster.classes)
    places = {host.name: at for at, host in enumerate(hosts)}
    for name in odd:
        host = hosts[places[name]]
        if sum(one.node_class == host.node_class for one in hosts) < 2:
            continue
        old = classes[host.node_class]
        new = class_name(f"{old.name}-{name}", {one.name for one in classes})
        hosts[places[name]] = replace(host, node_class=len(classes))
        classes.append(replace(old, name=new))
    return replace(cluster, hosts=tuple(hosts), classes=tuple(classes))


def joined(
    cluster: Cluster, new: Cluster, switches: Path | None, *, apart: bool = False
) -> Cluster:
    """Return a cluster with further hosts after its own; equal machines share its classes.

    With `apart` they do not. Known switches keep the rates of their uplinks.

    Raises:
        InputError: a host with another machine or other ranks than in the cluster, hosts of a class
            with unequal ranks, or a new host at no switch.
    """
    known_forms = {_form(one): at for at, one in reversed(list(enumerate(cluster.classes)))}
    forms = {} if apart else known_forms
    classes, numbers = list(cluster.classes), list[int]()
    for one in new.classes:
        number = forms.setdefault(_form(one), len(classes))
        if number == len(classes):
            name = class_name(one.name, {known.name for known in classes})
            classes.append(msgspec.structs.replace(one, name=name))
        numbers.append(number)
    slots = {host.node_class: host.slots for host in cluster.hosts}
    known = {host.name: host for host in cluster.hosts}
    hosts = list(cluster.hosts)
    for host in new.hosts:
        number = numbers[host.node_class]
        old = known.get(host.name)
        if old is not None and _form(classes[old.node_class]) != _form(classes[number]):
            right = "plan all hosts again, into a new directory"
            raise InputError(f"host {host.name}", "has another machine than in the plan", right)
        number = number if old is None else old.node_class
        if slots.setdefault(number, host.slots) != host.slots:
            what = f"has {host.slots} ranks, and {slots[number]} GPUs of its class are planned"
            raise InputError(f"host {host.name}", what, "start as many ranks on it")
        if old is None:
            hosts.append(msgspec.structs.replace(host, node_class=number))
    tree, rails = cluster.switches, cluster.rails
    if switches is not None:
        network = read_switches(switches, [host.name for host in hosts])
        tree, rails = network.switches, network.rails
        if cluster.switches is not None:
            tree = _with_uplinks(tree, {s.name: s for s in cluster.switches.all_switches})
    elif tree is not None and len(hosts) > len(cluster.hosts):
        what = f"is at no switch that is known: {hosts[-1].name}"
        raise InputError("a new host", what, "add --switches FILE, with all hosts")
    replaced = {"hosts": tuple(hosts), "classes": tuple(classes), "switches": tree, "rails": rails}
    return msgspec.structs.replace(cluster, **replaced)


def _form(one: NodeClass) -> bytes:
    return msgspec.json.encode(canonical(one.machine, one.knowledge))


def _with_uplinks(tree: SwitchTree, known: Mapping[str, SwitchTree]) -> SwitchTree:
    """Return a tree whose switches have the uplinks of known ones, where it tells none."""
    old = known.get(tree.name)
    uplink = tree.uplink_gbps if old is None or tree.uplink_gbps is not None else old.uplink_gbps
    below = tuple(_with_uplinks(one, known) for one in tree.switches)
    return msgspec.structs.replace(tree, uplink_gbps=uplink, switches=below)
