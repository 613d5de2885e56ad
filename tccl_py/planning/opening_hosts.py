"""Several hosts that `tccl plan` plans for: simulated or named ones, or those of an MPI job.

The hosts of a plan that the directory has come before them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError, check_range, require, spell
from tccl_py.files import pick
from tccl_py.model.cluster import Cluster, NodeClass, cabled_nics, check_cluster, compress
from tccl_py.model.links import Proof
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.reports import HostReport, cluster_of, part_of, split_classes, with_rails
from tccl_py.model.rings import join_flows, on_host
from tccl_py.model.transfer import TransferSet, transfer_set
from tccl_py.plan.chains import PlanChain
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.retuning import TUNED_NOTE
from tccl_py.plan.staging import PLAN_FILE
from tccl_py.plan.tables import ClassRates, KeptTable, kept_files, read_tables, table_files
from tccl_py.planning.cluster_planner import NO_TABLE
from tccl_py.planning.installed_nccl import version_to_plan
from tccl_py.planning.opening import UNDER_MPI, Say, Subject, open_model, with_proof
from tccl_py.planning.plan_sources import (
    MOST_ODD,
    MOST_SAMPLED,
    Sample,
    addresses_of,
    class_sources,
    difference,
    estimate_uplinks,
    heard_by,
    odd_hosts,
    pair_rates,
    planned_models,
)
from tccl_py.planning.planner import plan_hosts
from tccl_py.planning.request import PlanRequest, gpus_of_classes
from tccl_py.readers.cables import (
    Addresses,
    Heard,
    cables_of,
    cables_of_lldp,
    cables_of_subnets,
    check_no_cables,
    doubts_of_addresses,
    rails_by_name,
    rails_of_subnets,
    subnet_prefix,
    used_functions,
)
from tccl_py.readers.hosts import HostSlots, listed_hosts
from tccl_py.readers.switches import read_switches
from tccl_py.search.strategies import STRATEGIES
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator
from tccl_py.sources.hosts import HostsSource, open_hosts

if TYPE_CHECKING:
    from tccl_py.sources.hosts import Job

MANY_NODES = 16_384
_OF_PLAN = ("--nccl", "--gid-index", "--pin-env")
"""Options that a plan has already, in the order of their fields in `_asked_beside`."""
Models = dict[str, MachineModel | None]
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
    tables: list[KeptTable] | None = None
    """Takes the tables of all classes."""
    known: Cluster | None = None
    """Those hosts of the directory's plan that stay."""
    kept: tuple[ClassRates, ...] = ()
    """The tables of their classes."""
    notices: tuple[str, ...] = ()
    """The notices of that plan."""

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
        return replace(made, notices=tuple(texts))


def cluster_subject(
    request: PlanRequest,
    job: Job | None,
    stack: ExitStack,
    say: Say,
    directory: Path | None = None,
) -> Subject:
    """Open several hosts, those of a job if there is one, which are left with `stack`.

    New hosts join those of a whole plan in the directory. A list of hosts names the whole set: what
    it leaves out leaves the plan. Raises InputError: hosts that do not fit, or rates of another
    kind than in the directory's plan.
    """
    held = None if directory is None else _held_plan(directory)
    tables, models = list[KeptTable](), Models()
    asked = HostsRequest(request, tables)
    if directory is not None and held is not None:
        asked = _asked_beside(held, directory, request, tables, measured=job is not None)
        models = planned_models(held, directory)
    if job is not None:
        subject, cluster = _of_job(asked, job, stack, say=say)
    else:
        subject, cluster = _of_hosts(asked, models)
    if held is not None:
        same = cluster == held.cluster and request.gpus_per_job is None
        right = "start ranks on others, name others by `hosts`, or add `force` to plan anew"
        require(not same, str(directory), "already holds a plan of these hosts", right)
    subject.grows, subject.known_models = held is not None, models
    subject.table_files = partial(table_files, tables)
    return subject


def _held_plan(directory: Path) -> Plan | None:
    """Read the whole plan with tables of hosts that a directory holds; None without one.

    Raises InputError: files are damaged or were changed.
    """
    if not (directory / PLAN_FILE).is_file():
        return None
    plan = load_plan(directory)
    return plan if kept_files(directory) and not plan.cancelled else None


def _asked_beside(
    held: Plan, directory: Path, request: PlanRequest, new: list[KeptTable], *, measured: bool
) -> HostsRequest:
    """Return what is asked of hosts beside a directory's plan, with what holds for all its hosts.

    Raises InputError: rates of another kind, or another version or variables.
    """
    where, anew = str(directory), "add `force` to plan all hosts anew"
    mixed = measured if held.simulated else request.simulate is not None
    fault = f"has {'simulated' if held.simulated else 'measured'} rates"
    require(not mixed, where, fault, f"add hosts with such rates, or {anew}")
    of_plan = {
        "version": held.settings.version,
        "ib_gid_index": held.settings.ib_gid_index,
        "pinned_env": held.pinned_env,
    }
    for (name, value), option in zip(of_plan.items(), _OF_PLAN, strict=True):
        given = getattr(request, name)
        right = f"leave it out, or {anew}"
        require(not given or given == value, option, f"is not the plan's, {value or 'none'}", right)
    names = held.cluster.names
    if request.hosts is not None:
        listed = {host.name for host in listed_hosts(request.hosts, where="`hosts`")}
        names = tuple(name for name in names if name in listed)
    known = part_of(held.cluster, names) if names else None
    tables = read_tables(directory, known.classes if known else ())
    request = replace(
        request,
        **of_plan,
        # A function of Python is not known by its name.
        strategy=held.strategy if held.strategy in STRATEGIES else request.strategy,
        subnet_prefix=held.settings.subnet_prefix,
    )
    return HostsRequest(request, new, known, tuple(tables), held.notices)


def _of_hosts(asked: HostsRequest, models: Models) -> tuple[Subject, Cluster]:
    """Open simulated hosts, or those that a plan grows by without measuring."""
    model, source, by_name = None, None, dict[str, Simulator]()
    request, known = asked.request, asked.known
    kind: MachineModel | NodeClass
    if request.simulate is not None:
        kind, source = open_model(request, request.simulate)
        model = kind
        by_name = {name: Simulator(m) for name, m in models.items() if m is not None}
    elif known is None:
        right = f"add --simulate MACHINE, or {UNDER_MPI}"
        raise InputError("`hosts`", "names no host of a plan in the directory", right)
    elif len(known.classes) > 1:
        fault = f"are of one of {len(known.classes)} classes"
        raise InputError("`hosts`", fault, f"{UNDER_MPI}: then their class is found out")
    else:
        (kind,) = known.classes
    cluster = simulated_cluster(kind, request.nodes, request.hosts, request.switches, known)

    def search() -> Plan:
        with source or nullcontext():
            return plan_unmeasured(asked, cluster, source, by_name)

    return Subject(search=search, source=source, model=model), cluster


def _of_job(
    asked: HostsRequest, job: Job, stack: ExitStack, *, say: Say
) -> tuple[Subject, Cluster]:
    """Find out what the hosts of an MPI job are."""
    request, known = asked.request, asked.known
    listed = () if request.hosts is None else listed_hosts(request.hosts, where="`hosts`")
    # Known hosts need not run.
    absent = set(known.names) - set(job.hosts) if known else set[str]()
    opened = open_hosts(
        job,
        backend=request.backend,
        devices=request.devices,
        interfaces=request.interfaces,
        options=request.options,
        expected=[host.name for host in listed if host.name not in absent],
        gid_index=request.ib_gid_index,
    )
    source = stack.enter_context(opened)
    proofs: dict[str, Proof] = {}
    if request.backend != "host":
        say(f"{spell(len(source.session.hosts), 'host')} prove the links between their GPUs")
        proofs = source.session.proofs(force=request.prove)
        asked_version = None if known else request.version
        version = asked_version or version_to_plan(say, source.session.hosts[0].nccl)
        if known and version != request.version:
            say(f"these hosts have NCCL {version}, and the plan is for {request.version}")
        request = replace(request, version=request.version or version)
    cluster = cluster_of_job(source, request.switches, known, proofs)
    addressed = doubts_of_addresses(addresses_of(source)) if cluster.cables else ()
    doubts = (*doubts_of_links(proofs), *addressed)
    for text in doubts:
        say(text)
    bits = subnet_prefix(cluster.cables, addresses_of(source), where="this MPI job")
    request = replace(request, subnet_prefix=bits or request.subnet_prefix)
    asked = replace(asked, request=request)

    def search() -> Plan:
        try:
            made = plan_job(source, cluster, asked, say=say)
            return replace(made, notices=(*doubts, *made.notices))
        finally:
            source.close()

    return Subject(search=search, source=source), cluster


def doubts_of_links(proofs: Mapping[str, Proof]) -> tuple[str, ...]:
    """Return a notice on hosts whose links are not sound, one for all that are so alike.

    Raises InputError: NCCL fails on hosts whatever their links.
    """
    failing = [host for host, proof in proofs.items() if proof.verdict == "host memory fails"]
    if failing:
        proof = proofs[failing[0]]
        right = "; ".join(("leave it out", *proof.causes[:1]))
        where = f"NCCL on host {compress(failing)}"
        raise InputError(where, f"fails {proof.what}", right)
    alike: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for host, proof in proofs.items():
        verdict = "not proven" if proof.verdict == "inconclusive" else proof.verdict
        common = f" ({proof.common})" if proof.common else ""
        if verdict != "sound":
            words = f"links: {verdict}{common}: {proof.what}"
            alike[words, bool(proof.facts)].append(host)
    return tuple(
        f"host {compress(names)}: {words}"
        + "; all hosts run without this P2P" * avoided
        + ", unless it is left out" * (avoided and len(names) < len(proofs))
        for (words, avoided), names in alike.items()
    )


def simulated_cluster(
    kind: MachineModel | NodeClass,
    nodes: int | None,
    hosts: str | None,
    switches: Path | None,
    known: Cluster | None = None,
) -> Cluster:
    """Return a cluster of known hosts and equal ones: those of a list, or as many as `nodes` says.

    Raises InputError: neither, too few or too many, or both and they differ.
    """
    old, machine = known.host_classes if known else {}, pick(kind, "machine", "knowledge")
    new = (host for host in _list(nodes, hosts, known) if host.name not in old)
    reports = [HostReport(host=host.name, slots=host.slots, **machine) for host in new]
    return _cluster(reports, switches, known, where=hosts or "cluster")


def cluster_of_job(
    source: HostsSource,
    switches: Path | None,
    known: Cluster | None = None,
    proofs: Mapping[str, Proof] = {},
) -> Cluster:
    """Return the cluster of a job's hosts, with the switches of a file.

    Hosts by whose `proofs` other links may not be used are of other classes.
    """
    reports = [
        HostReport(
            host=host.name,
            machine=host.machine,
            knowledge=with_proof(host.knowledge, proofs.get(host.name)),
            # One rank on a host is its agent; more are the ranks of a job.
            slots=len(host.ranks) if len(host.ranks) > 1 else None,
        )
        for host in source.session.hosts
    ]
    told: dict[str, Any] = {"addresses": addresses_of(source), "heard": heard_by(source)}
    return _cluster(reports, switches, known, where="this MPI job", **told)


def _cluster(
    reports: Sequence[HostReport],
    switches: Path | None,
    known: Cluster | None,
    *,
    where: str,
    addresses: Addresses | None = None,
    heard: Heard | None = None,
) -> Cluster:
    """Return a cluster with the switches and rails of a file, if there is one, or with cables.

    Cables are a file's, or those that `addresses` of NICs by host tell, or else LLDP.
    """
    if switches is None:
        rails = "any" if known is None else known.rails
        cluster = cluster_of(reports, rails=rails, where=where, known=known)
        cables = () if known else cables_of_subnets(addresses or {}) or cables_of_lldp(heard or {})
        if not (cables or known):
            check_no_cables(addresses or {}, where=where)
    else:
        names = [*(known.names if known else ()), *(report.host for report in reports)]
        network = read_switches(switches, dict.fromkeys(names))
        tree, rails = network.switches, network.rails
        cluster = cluster_of(reports, switches=tree, rails=rails, where=where, known=known)
        machines = {host.name: cluster.classes[host.node_class].machine for host in cluster.hosts}
        on_rails = rails_of_subnets(addresses or {}, machines) if rails == "only" else {}
        if network.rail_nics:
            on_rails = rails_by_name(network.rail_nics, machines, where=str(switches))
        cluster = with_rails(cluster, on_rails) if on_rails else cluster
        cables = cables_of(network.ports, machines)
        subnet_prefix(cables, addresses or {}, where=str(switches))
    cables = used_functions(cables, addresses or {})
    if not cables:
        return cluster
    # Hosts with cables at other NICs are of other classes.
    nics: dict[str, set[int]] = defaultdict(set)
    for host, nic, _ in cabled_nics(cables):
        nics[host].add(nic)
    groups: dict[tuple[int, frozenset[int]], list[str]] = defaultdict(list)
    for name, number in cluster.host_classes.items():
        groups[number, frozenset(nics[name])].append(name)
    cabled = replace(cluster, cables=tuple(cables))
    return split_classes(check_cluster(cabled, where=where), groups.values())


def _list(nodes: int | None, text: str | None, known: Cluster | None) -> tuple[HostSlots, ...]:
    if text is not None:
        hosts = listed_hosts(text, where="`hosts`")
        named = known is not None or nodes == 1 or [host.name for host in hosts] != [text]
        right = "name a file of hosts, or hosts, as in node[1-8]"
        require(named, f"`hosts` {text[:40]}", "is no file, and the name of one host", right)
        if nodes not in (None, len(hosts)):
            fault = f"is {nodes}, but `hosts` has {len(hosts)} hosts"
            raise InputError("`nodes`", fault, "give one of the two, or equal numbers")
        return hosts
    nodes = nodes or 0
    check_range("`nodes`", nodes, 1, MANY_NODES)
    # Of a plan for 8 that grows to 16, node1 is not node01.
    planned = () if known is None else known.names
    widths = (len(name[4:]) for name in planned if re.fullmatch("node[0-9]+", name, re.ASCII))
    width = min(widths, default=len(str(nodes)))
    return tuple(HostSlots(f"node{number + 1:0{width}d}") for number in range(nodes))


# Plans, by simulation or by measuring the hosts of a job. Hosts that the plan in the directory has
# are answered by its tables, and new ones alone are measured.


def plan_job(
    source: HostsSource,
    cluster: Cluster,
    asked: HostsRequest,
    *,
    say: Say = lambda _: None,
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
    for text in notices:
        say(text)

    def plan_again(cluster: Cluster) -> Plan:
        present = part_of(cluster, [host.name for host in source.session.hosts])
        by_class = zip(present.classes, class_sources(source, present), strict=True)
        return asked.plan(cluster, {node_class.name: by for node_class, by in by_class})

    made = plan_again(cluster)
    outliers = {} if made.cancelled else _odd_in_classes(source, made, old, samples)
    if outliers:
        cluster, named = _split_odd(cluster, outliers)
        for text in named:
            say(text)
        notices += named
        # The other classes are answered from memory.
        del (asked.tables or [])[:]
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
    return replace(
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
    return replace(cluster, switches=estimated), notices


def _with_whole_ring(made: Plan, source: HostsSource) -> Plan:
    """Add the bandwidth of all rings at once over all hosts, unless there are too many hosts."""
    present = {host.name for host in source.session.hosts}
    if len(made.hosts) > WHOLE_RING_HOSTS or not present.issuperset(made.host_order):
        return made
    try:
        (answer,) = source.measure([whole_ring(made)])
    except MeasurementError as error:
        text = f"the rings could not be measured all at once: {error}"
        return replace(made, notices=(*made.notices, text))
    return replace(made, whole_ring_gbps=made.ring_count * answer.rate_gbps)


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
