"""Plans for several hosts by simulation, and by measuring the hosts of an MPI job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.cluster import Cluster
from tccl_py.model.measurement import BandwidthSource, Measurement
from tccl_py.model.reports import HostReport, cluster_of
from tccl_py.model.transfer import TransferSet, transfer_set
from tccl_py.plan.again import journal_source
from tccl_py.plan.cluster_planner import make_cluster_plan
from tccl_py.plan.growth import (
    MOST_ODD,
    MOST_SAMPLED,
    KnownPlan,
    Sampler,
    extended_plan,
    joined,
    part_of,
    samples_of_plan,
    split,
)
from tccl_py.plan.plan import Plan
from tccl_py.plan.probe_hosts import PlacedSource, estimate_uplinks, placements, whole_ring
from tccl_py.readers.hosts import HostSlots, read_host_list
from tccl_py.readers.switches import read_switches
from tccl_py.simulator.model import MachineModel
from tccl_py.sources.journal import JournalContents, JournalHeader, RememberingSource
from tccl_py.sources.opening import HostsSource, open_hosts
from tccl_py.sources.pairs import links_check
from tccl_py.sources.profiled import SEARCH_REPEATS, MeasurementOptions, is_dry_run

if TYPE_CHECKING:
    from tccl_py.sources.opening import Job

Say = Callable[[Iterable[str]], None]
MANY_NODES = 16_384
SPOT_CHECKS = 16
"""Pairs of hosts measured beside one for each kind, to find hosts that differ from their class."""
WHOLE_RING_HOSTS = 64
"""On more hosts the rings are not measured all at once."""
_MOST_TIMES = 64
"""Measurements of a set that are taken from a journal, at most."""
_ASSUMED = {
    "tcp": "what NICs move to and from GPU memory was not measured, but assumed to run at their "
    "ports' speed; all else was measured (NCCL measures it: leave out --network tcp)",
    "nccl": "what GPUs send by another GPU's memory was not measured, but assumed to run at the "
    "speed of the NICs' ports; all else was measured",
}


def simulated_cluster(
    model: MachineModel, nodes: int | None, hosts: Path | None, switches: Path | None
) -> Cluster:
    """Return a cluster of equal nodes: the hosts of a file, or as many as `nodes` says.

    Raises InputError: neither, too few or too many, both and they differ, or uneven ranks.
    """
    listed = _listed(nodes, hosts)
    _check_even(listed, len(model.machine.gpus), where=str(hosts))
    machine, known = model.machine, model.knowledge
    reports = [
        HostReport(host=host.name, machine=machine, knowledge=known, slots=host.slots)
        for host in listed
    ]
    return _cluster(reports, switches, where=str(hosts) if hosts is not None else "cluster")


def _cluster(reports: Sequence[HostReport], switches: Path | None, *, where: str) -> Cluster:
    """Return a cluster with the switches and rails of a file, if there is one."""
    if switches is None:
        return cluster_of(reports, where=where)
    network = read_switches(switches, [report.host for report in reports])
    return cluster_of(reports, switches=network.switches, rails=network.rails, where=where)


def _listed(nodes: int | None, path: Path | None) -> tuple[HostSlots, ...]:
    if path is not None:
        hosts = read_host_list(path)
        if nodes not in (None, len(hosts)):
            what = f"is {nodes}, but {path} has {len(hosts)} hosts"
            raise InputError("--nodes", what, "give one of the two, or equal numbers")
        return hosts
    if nodes is None or not 2 <= nodes <= MANY_NODES:
        raise InputError("--nodes", f"is {nodes}", f"2 to {MANY_NODES} nodes")
    width = len(str(nodes))
    return tuple(HostSlots(f"node{number + 1:0{width}d}") for number in range(nodes))


def _check_even(hosts: Sequence[HostSlots], gpus: int, *, where: str) -> None:
    """Check that equal machines have equal numbers of ranks, also those listed repeatedly."""
    ranks = {host.name: gpus if host.slots is None else host.slots for host in hosts}
    for host in hosts:
        uneven = next((name for name, count in ranks.items() if count != ranks[host.name]), None)
        if host.times > 1 and uneven is not None:
            what = f"names {host.name} {host.times} times, which makes {ranks[host.name]} ranks"
            right = f"a host that is named once has {gpus}: name each once, or all as often"
            raise InputError(where, f"{what}, and {uneven} has {ranks[uneven]}", right)


def cluster_of_job(source: HostsSource, switches: Path | None) -> Cluster:
    """Return the cluster of a job's hosts, with the switches of a file."""
    reports = [
        HostReport(
            host=host.name,
            machine=host.machine,
            knowledge=host.knowledge,
            # One rank on a host is its agent; more are the ranks of a job.
            slots=len(host.ranks) if len(host.ranks) > 1 else None,
        )
        for host in source.session.hosts
    ]
    return _cluster(reports, switches, where="this MPI job")


def plan_job(
    source: HostsSource,
    cluster: Cluster,
    *,
    say: Say = lambda _: None,
    **task: Any,
) -> Plan:
    """Plan for the hosts of a job by measuring them; the plan has the notices of measuring.

    Hosts that differ from their class get classes of their own. `say` is told at once what is odd
    about hosts; `task` is as `make_cluster_plan` takes it. Raises SourceLostError: a host is gone.
    """
    cluster, odd = _sampled(source, cluster)
    say(odd)
    made = make_cluster_plan(cluster, class_sources(source, cluster), **task)
    found = {} if made.cancelled else _odd_in_classes(source, made)
    if found:
        cluster, named = _split(cluster, found)
        say(named)
        odd += named
        # The other classes are answered from memory.
        task.get("tables", []).clear()
        made = make_cluster_plan(cluster, class_sources(source, cluster), **task)
    return _finished(made, source, odd)


def extend_job(
    source: HostsSource,
    known: KnownPlan,
    switches: Path | None,
    *,
    say: Say = lambda _: None,
    **task: Any,
) -> Plan:
    """Return a plan over a plan's hosts and those of a job, from tables; new classes are measured.

    New hosts of a known class are compared with some of its measured sets. Hosts that differ get
    classes of their own. The arguments are as of `plan_job`.

    Raises:
        InputError: hosts do not fit the plan.
        SourceLostError: a host is gone.
    """
    here, old = cluster_of_job(source, None), known.plan.cluster
    cluster = joined(old, here, switches)
    new = [name for name in here.names if name not in old.host_classes]
    samples = known.samples()
    sampled = [name for name in new if cluster.host_classes[name] in samples]
    partners = [name for name in here.names if name in old.host_classes]
    sampler = Sampler(source, cluster, **_measurable(source))
    found = sampler.odd_hosts(sampled, samples, partners)
    cluster, odd = _split(cluster, found)
    alike = [name for name in sampled if name not in found]
    if alike:
        odd += (f"added as equal to their class, by samples: {', '.join(alike)}",)
    say(odd)
    at_hand = part_of(cluster, here.names)
    placed = zip(at_hand.classes, class_sources(source, at_hand), strict=True)
    made = extended_plan(known, cluster, {one.name: by for one, by in placed}, odd, **task)
    return _finished(made, source, ())


def _split(cluster: Cluster, odd: Mapping[str, str]) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster with odd hosts in classes of their own, and a notice on each."""
    apart = list(odd)[:MOST_ODD]
    told = [f"host {name}: {odd[name]}; planned as a class of its own" for name in apart]
    left = list(odd)[MOST_ODD:]
    if left:
        told.append(f"more hosts differ from their class, and stay in it: {', '.join(left)}")
    return split(cluster, apart), tuple(told)


def _odd_in_classes(source: HostsSource, made: Plan) -> dict[str, str]:
    """Return how hosts differ from the host that was measured for their class."""
    sampler = Sampler(source, made.cluster, **_measurable(source))
    odd: dict[str, str] = {}
    for number, samples in samples_of_plan(made).items():
        first, *others = (h.name for h in made.cluster.hosts if h.node_class == number)
        some = others[:MOST_SAMPLED]
        found = sampler.odd_hosts(some, {number: samples[:1]}, [first])
        if len(found) > max(1, len(some) / 2):
            found = {first: f"most hosts of its class differ from it: {next(iter(found.values()))}"}
        odd |= found
    return odd


def _finished(made: Plan, source: HostsSource, odd: tuple[str, ...]) -> Plan:
    """Return a plan with the rate of all rings at once, its notices, and counts of sets."""
    if made.assumed:
        odd += (_ASSUMED[source.session.network],)
    elif not made.cancelled:
        made = _with_whole_ring(made, source)
    # Answers of the journal were measured by an earlier run.
    asked, count = made.sets_measured + made.sets_remembered, source.profiled.count
    notices = (*made.notices, *odd, *source.profiled.summary(source.conditions))
    return msgspec.structs.replace(
        made,
        sets_measured=count,
        sets_remembered=max(0, asked - count),
        notices=tuple(dict.fromkeys(notices)),
    )


def class_sources(source: HostsSource, cluster: Cluster) -> list[PlacedSource]:
    """Return a source for each class of hosts, over one host of it and a partner."""
    return [PlacedSource(source, place) for place in placements(cluster, **_measurable(source))]


def _measurable(source: HostsSource) -> dict[str, Any]:
    """Return what can be measured between a job's hosts, as `placements` takes it."""
    session = source.session
    return {
        "addressed": {host.name: tuple(host.addresses) for host in session.hosts},
        "carried": session.network == "nccl",
        "over_sockets": session.over_sockets,
    }


@contextmanager
def hosts_again(plan: Plan, journal: JournalHeader, job: Job) -> Iterator[HostsSource]:
    """Open a source over the hosts of a job, on which a plan was measured with this journal.

    Raises InputError: the plan was measured on other hosts.
    """
    machine, dry_run = plan.cluster.classes[0].machine, dict[str, Any]()
    if is_dry_run(journal):
        nics = ",".join(nic.name for nic in machine.nics)
        dry_run = {"backend": "host", "devices": len(machine.gpus), "interfaces": nics}
    options = MeasurementOptions(repeats=SEARCH_REPEATS)
    with open_hosts(job, options=options, **dry_run) as source:
        missing = set(plan.cluster.names) - {host.name for host in source.session.hosts}
        if missing or not journal.covers(source.header):
            found = f"was measured on other hosts ({journal.identity}) than these"
            what, right = f"{found} ({source.header.identity})", "plan these hosts"
            raise InputError(f"the plan of {len(plan.hosts)} hosts", what, right)
        yield source


def journal_by_class(
    plan: Plan, journal: JournalContents
) -> list[dict[TransferSet, list[Measurement]]]:
    """Return the journal's measurements of the plan's hops and chains, for each class of hosts.

    A journal names hosts. These sets, hops alone, in pairs, and chains, are of one host.
    """
    base = journal_source(journal)
    # By NCCL, between GPUs by TCP, and between host memories by TCP.
    carriers = ((True, False), (False, False), (False, True))
    known: list[dict[TransferSet, list[Measurement]]] = [{} for _ in plan.cluster.classes]
    for carried, over_sockets in carriers:
        options: dict[str, Any] = {"carried": carried, "over_sockets": over_sockets}
        places = placements(plan.cluster, **options)
        for path in plan.paths:
            flows = [hop.flow for chain in path.chains for hop in chain.hops]
            wanted = [transfer_set(flows), *(transfer_set([flow]) for flow in flows)]
            wanted += [transfer_set(hop.flow for hop in chain.hops) for chain in path.chains]
            wanted += [transfer_set(pair) for pair in combinations(flows, 2)]
            found = known[path.node_class]
            further = _measured_pairs(plan.cluster, path.node_class, journal.header)
            others = (placements(pair, **options)[0] for pair in further)
            for place in chain([places[path.node_class]], others):
                source = PlacedSource(base, place)
                for transfers in dict.fromkeys(wanted):
                    if transfers not in found and (known_there := _repeated(source, transfers)):
                        found[transfers] = known_there
                if not found.keys().isdisjoint(wanted):
                    break
    return known


def _measured_pairs(cluster: Cluster, number: int, header: JournalHeader) -> Iterator[Cluster]:
    """Yield pairs of measured hosts, the first of a class: new classes were measured with others.

    Hosts that a plan was extended by had the partners at hand.
    """
    classes = cluster.host_classes
    measured = [name for name in header.machine.split(",") if name in classes]
    own = [name for name in measured if classes[name] == number][:MOST_ODD]
    for host, partner in product(own, measured[:MOST_SAMPLED]):
        if host != partner:
            yield part_of(cluster, (host, partner))


def _repeated(source: BandwidthSource, transfers: TransferSet) -> list[Measurement]:
    """Return all measurements of a set; the n-th time it is asked for gives the n-th."""
    found: list[Measurement] = []
    with suppress(MeasurementError):
        while len(found) < _MOST_TIMES:
            found += source.measure([transfers])
            if found[-1].assumed:
                break  # Assumed rates have no end.
    return found


def journal_sources(plan: Plan, journal: JournalContents) -> list[RememberingSource]:
    """Return a source for each class of hosts over `journal_by_class` alone."""
    known = journal_by_class(plan, journal)
    return [RememberingSource(journal_source(journal), found) for found in known]


def _sampled(source: HostsSource, cluster: Cluster) -> tuple[Cluster, tuple[str, ...]]:
    """Measure some pairs of hosts; return the cluster with rates of uplinks, and what is odd.

    Pairs across switches give the bandwidth of uplinks, where no file does.
    """
    session, tree = source.session, cluster.switches
    if session.network == "tcp" and not all(host.addresses for host in session.hosts):
        return cluster, ("hosts have NICs without an address for TCP: no network was sampled",)
    under = {
        host: switch.name
        for switch in (tree.all_switches if tree is not None else ())
        for host in switch.hosts
    }
    report = links_check(
        source,
        session.hosts,
        [cluster.host_classes[host.name] for host in session.hosts],
        switches=under,
        spot_checks=min(SPOT_CHECKS, len(cluster.hosts) // 2),
        network=session.network,
    )
    named = {one.host: str(one).removeprefix(f"host {one.host}: ") for one in report.odd}
    cluster, odd = _split(cluster, named)
    if tree is None:
        return cluster, odd
    pairs = [(pair.sender, pair.receiver, pair.gbps) for pair in report.pairs]
    known = estimate_uplinks(tree, pairs)
    odd += tuple(
        f"the uplink of switch {new.name} carries {new.uplink_gbps:.3g} GB/s each way, as "
        "pairs of hosts across it were measured"
        for old, new in zip(tree.all_switches, known.all_switches, strict=True)
        if new.uplink_gbps != old.uplink_gbps
    )
    return msgspec.structs.replace(cluster, switches=known), odd


def _with_whole_ring(made: Plan, source: HostsSource) -> Plan:
    """Add the bandwidth of all rings at once over all hosts, unless there are too many hosts."""
    here = {host.name for host in source.session.hosts}
    if len(made.hosts) > WHOLE_RING_HOSTS or not here.issuperset(made.host_order):
        return made
    try:
        (answer,) = source.measure([whole_ring(made)])
    except MeasurementError as error:
        text = f"the rings could not be measured all at once: {error}"
        return msgspec.structs.replace(made, notices=(*made.notices, text))
    return msgspec.structs.replace(made, whole_ring_gbps=made.ring_count * answer.rate_gbps)
