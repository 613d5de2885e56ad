"""Plans for several hosts: by simulation, or by measuring a job's hosts.

Hosts that a directory's plan has are answered by its tables, and new ones alone are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.model.cluster import Cluster
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.reports import part_of, split_classes
from tccl_py.model.rings import join_flows, on_host
from tccl_py.model.transfer import TransferSet, transfer_set
from tccl_py.plan.chains import PlanChain
from tccl_py.plan.plan import Plan
from tccl_py.plan.retuning import TUNED_NOTE
from tccl_py.plan.tables import ClassRates, KeptTable
from tccl_py.planning.cluster_planner import NO_TABLE
from tccl_py.planning.plan_sources import class_sources
from tccl_py.planning.planner import plan_hosts
from tccl_py.planning.probes import (
    MOST_ODD,
    MOST_SAMPLED,
    Sample,
    difference,
    estimate_uplinks,
    odd_hosts,
    pair_rates,
)
from tccl_py.planning.request import PlanRequest, gpus_of_classes
from tccl_py.search.problem import Reporter
from tccl_py.sources.hosts import HostsSource

Say = Callable[[Iterable[str]], None]
_SETS = 3
"""Sets of a class that a new host is compared by."""
_95_PERCENT = 1.96
WHOLE_RING_HOSTS = 64
"""On more hosts the rings are not measured all at once."""
_NICS_NOT_PROVEN = (
    "GPUs and NICs (GPU Direct RDMA): not proven on all hosts, for the bytes of the rings over all "
    "were not compared"
)


class HostsRequest(msgspec.Struct, frozen=True):
    """What is asked of hosts, and the hosts and tables of the directory's plan, if it has one."""

    request: PlanRequest
    known: Cluster | None = None
    """Those hosts of the directory's plan that stay."""
    kept: tuple[ClassRates, ...] = ()
    """The tables of their classes."""
    notices: tuple[str, ...] = ()
    """The notices of that plan."""
    tables: list[KeptTable] | None = None
    """Takes the tables of all classes."""

    def report_to(self, reporter: Reporter | None) -> HostsRequest:
        """Return the same with a reporter of the search."""
        replace = msgspec.structs.replace
        return replace(self, request=replace(self.request, reporter=reporter))

    def known_hosts(self) -> tuple[dict[str, int], dict[int, list[Sample]]]:
        """Return the classes of known hosts, and the best sets of each class by its number.

        The sets are over all GPUs that are planned.
        """
        samples: dict[int, list[Sample]] = {}
        if self.known is None:
            return {}, samples
        gpus = gpus_of_classes(self.known)
        numbers = {kind.name: number for number, kind in enumerate(self.known.classes)}
        for table in self.kept:
            number = numbers[table.node_class.name]
            if table.gpus == gpus[number]:
                answers = (table.between(settings, best.pairs) for settings, best in table.choices)
                sets = [_sample(table.plan_chains(c), c.error) for c in answers if c is not None]
                samples[number] = list({s.transfers: s for s in sets}.values())[:_SETS]
        return self.known.host_classes, samples

    def plan(
        self, cluster: Cluster, sources: Mapping[str, BandwidthSource], notices: Iterable[str] = ()
    ) -> Plan:
        """Return a plan over all hosts, from tables; classes without tables are measured.

        `sources` are those of classes with a host at hand, by name. Raises InputError: a class has
        neither table nor source.
        """
        # The rings over all hosts are planned again, under settings that no job has tuned, and
        # tables that are still missing are said to be again.
        before = (n for n in self.notices if n != TUNED_NOTE and NO_TABLE not in n)
        of_classes = [sources.get(node_class.name) for node_class in cluster.classes]
        made = plan_hosts(self.request, cluster, of_classes, kept=self.kept, tables=self.tables)
        texts = dict.fromkeys((*before, *made.notices, *notices))
        return msgspec.structs.replace(made, notices=tuple(texts))


def plan_job(
    source: HostsSource, cluster: Cluster, asked: HostsRequest, *, say: Say = lambda _: None
) -> Plan:
    """Plan for the hosts of a job by measuring them; the plan has the notices of measuring.

    Kept tables answer for the classes that they have. New hosts are compared with their
    class, and those that differ get classes of their own. `say` is told at once how hosts differ.

    Raises InputError: hosts do not fit the known ones. SourceLostError: a host is gone.
    """
    notices: tuple[str, ...] = ()
    old, samples = asked.known_hosts()
    if asked.known is None:
        cluster, notices = _with_uplinks(source, cluster)
        say(notices)

    def plan_again(cluster: Cluster) -> Plan:
        present = part_of(cluster, [host.name for host in source.session.hosts])
        by_class = zip(present.classes, class_sources(source, present), strict=True)
        return asked.plan(cluster, {node_class.name: by for node_class, by in by_class})

    made = plan_again(cluster)
    outliers = {} if made.cancelled else _odd_in_classes(source, made, old, samples)
    if outliers:
        cluster, named = _split_odd(cluster, outliers)
        say(named)
        notices += named
        # The other classes are answered from memory.
        if asked.tables is not None:
            asked.tables.clear()
        made = plan_again(cluster)
    equal = [name for name, n in cluster.host_classes.items() if name not in old and n in samples]
    notices += _tell("added as equal to their class, by samples", equal)
    return _finish(made, source, notices)


def plan_unmeasured(
    asked: HostsRequest,
    cluster: Cluster,
    source: BandwidthSource | None,
    others: Mapping[str, BandwidthSource],
) -> Plan:
    """Return a plan over known hosts, if any, and new ones of one class.

    `source` simulates these, and `others` the known classes. Hosts whose rates differ from those of
    their class get a class of their own. Without a source they are taken as equal to the class.
    """
    old, samples = asked.known_hosts()
    new, number = list(cluster.names[len(old) :]), cluster.hosts[-1].node_class
    sources, notes = dict(others), tuple[str, ...]()
    if source is None:
        name = cluster.classes[number].name
        notes = _tell(f"added as equal to {name}, without any sample", new)
    elif new:
        if why := difference(source, samples.get(number, ())):
            cluster = split_classes(cluster, [new])
            notes = (f"the new hosts: {why}; planned as a class of their own",)
        # Hosts with cables at other ports are of other classes.
        sources |= {cluster.classes[cluster.host_classes[host]].name: source for host in new}
    return asked.plan(cluster, sources, notes)


def _tell(text: str, hosts: Sequence[str]) -> tuple[str, ...]:
    return (f"{text}: {', '.join(hosts)}",) if hosts else ()


def _split_odd(cluster: Cluster, causes: Mapping[str, str]) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster with odd hosts in classes of their own, and a notice on each."""
    single, more = list(causes)[:MOST_ODD], list(causes)[MOST_ODD:]
    notes = tuple(f"host {name}: {causes[name]}; planned as a class of its own" for name in single)
    notes += _tell("more hosts differ from their class, and stay in it", more)
    return split_classes(cluster, [[name] for name in single]), notes


def _odd_in_classes(
    source: HostsSource, made: Plan, old: Collection[str], sets: Mapping[int, Sequence[Sample]]
) -> dict[str, str]:
    """Return how new hosts differ from the rates of their class, kept or of its first host."""
    cluster, transport = made.cluster, source.session.transport
    partners = [host.name for host in source.session.hosts if host.name in old]
    causes: dict[str, str] = {}
    for number, path in {path.node_class: path for path in reversed(made.paths)}.items():
        new = [h.name for h in cluster.hosts if h.node_class == number and h.name not in old]
        if number in sets:
            causes |= odd_hosts(source, cluster, new, sets[number], partners, transport=transport)
        elif new:
            first, compared = new[0], new[1 : 1 + MOST_SAMPLED]
            sample = _sample(path.chains, made.choices["graph"].error)
            slower = odd_hosts(source, cluster, compared, [sample], [first], transport=transport)
            if len(slower) > max(1, len(compared) / 2):
                why = next(iter(slower.values()))
                slower = {first: f"most hosts of its class differ from it: {why}"}
            causes |= slower
    return causes


def _sample(chains: Sequence[PlanChain], error: float) -> Sample:
    flows = transfer_set(hop.flow for chain in chains for hop in chain.hops)
    return Sample(flows, min(chain.rate_gbps for chain in chains), error / _95_PERCENT)


def _finish(made: Plan, source: HostsSource, notices_of_hosts: tuple[str, ...]) -> Plan:
    """Return a plan with the rate of all rings at once, its notices, and counts of sets."""
    transport = source.session.transport
    if made.assumed:
        notices_of_hosts += (transport.unmeasured,)
    elif not made.cancelled:
        made = _with_whole_ring(made, source)
    if transport.joins_gpus and made.whole_ring_gbps is None:
        notices_of_hosts += (_NICS_NOT_PROVEN,)
    # Answers of the journal were measured by an earlier run.
    answered, count = made.sets_measured + made.sets_remembered, source.sets_measured
    notices = (*made.notices, *notices_of_hosts, *source.summary(source.conditions))
    return msgspec.structs.replace(
        made,
        sets_measured=count,
        sets_remembered=max(0, answered - count),
        notices=tuple(dict.fromkeys(notices)),
    )


def _with_uplinks(source: HostsSource, cluster: Cluster) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster with measured rates of unknown uplinks, and a notice on each."""
    tree = cluster.switches
    if tree is None:
        return cluster, ()
    estimated = estimate_uplinks(tree, pair_rates(source, cluster, source.session.transport))
    notices = tuple(
        f"the uplink of switch {new.name} carries {new.uplink_gbps:.3g} GB/s each way, as "
        "pairs of hosts across it were measured"
        for old, new in zip(tree.all_switches, estimated.all_switches, strict=True)
        if new.uplink_gbps != old.uplink_gbps
    )
    return msgspec.structs.replace(cluster, switches=estimated), notices


def _with_whole_ring(made: Plan, source: HostsSource) -> Plan:
    """Add the bandwidth of all rings at once over all hosts, unless there are too many hosts."""
    present = {host.name for host in source.session.hosts}
    if len(made.hosts) > WHOLE_RING_HOSTS or not present.issuperset(made.host_order):
        return made
    try:
        (answer,) = source.measure([whole_ring(made)])
    except MeasurementError as error:
        text = f"the rings could not be measured all at once: {error}"
        return msgspec.structs.replace(made, notices=(*made.notices, text))
    return msgspec.structs.replace(made, whole_ring_gbps=made.ring_count * answer.rate_gbps)


def whole_ring(plan: Plan) -> TransferSet:
    """Return every flow of every ring of a plan on its own host, all at the same time.

    Raises InputError: the plan's flows do not fit together.
    """
    flows = []
    for host, following in zip(plan.hosts, (*plan.hosts[1:], plan.hosts[0]), strict=True):
        chains = plan.paths[host.path].chains
        onward = plan.paths[following.path].chains
        for chain, onto in zip(chains, onward, strict=True):
            flows += [on_host(hop.flow, host.name) for hop in chain.hops[1:-1]]
            out, into = chain.hops[-1].flow, onto.hops[0].flow
            flows.append(join_flows(out, into, sender=host.name, receiver=following.name))
    return transfer_set(flows)
