"""Several hosts that `tccl plan` plans for: simulated or named ones, or those of an MPI job.

A known plan's hosts come before them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tccl_py.errors import InputError, counted, require
from tccl_py.files import picked
from tccl_py.model.cluster import Cluster, cabled_nics, check_cluster, compress
from tccl_py.model.links import Proof
from tccl_py.model.reports import HostReport, cluster_of, split
from tccl_py.plan.plan import Plan
from tccl_py.plan.tables import KeptTable, table_files
from tccl_py.planning.grow import Growth, KnownPlan, grown_plan, plan_job, read_known_plan
from tccl_py.planning.installed_nccl import version_to_plan
from tccl_py.planning.plan_sources import addresses_of, heard_by, planned_models
from tccl_py.planning.request import PlanRequest
from tccl_py.planning.subject import UNDER_MPI, Say, Subject, simulated, with_proof
from tccl_py.readers.cables import (
    Addresses,
    Heard,
    cables_of,
    cables_of_lldp,
    cables_of_subnets,
    subnet_prefix,
)
from tccl_py.readers.hosts import HostSlots, listed_hosts
from tccl_py.readers.switches import read_switches
from tccl_py.search.problem import Reporter
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator
from tccl_py.sources.hosts import HostsSource, open_hosts

if TYPE_CHECKING:
    from tccl_py.sources.hosts import Job

MANY_NODES = 16_384
Models = Mapping[str, MachineModel | None]


def cluster_subject(request: PlanRequest, job: Job | None, stack: ExitStack, say: Say) -> Subject:
    """Open several hosts, those of a job if there is one; see `subject_of`."""
    known = None if request.extend is None else read_known_plan(request.extend)
    models: Models = {}
    if known is not None and request.extend is not None:
        mixed = job is not None if known.plan.simulated else request.simulate is not None
        fault = f"has {'simulated' if known.plan.simulated else 'measured'} rates"
        require(not mixed, str(request.extend), fault, "add hosts with such rates")
        named = request.hosts or (request.nodes is not None and request.simulate)
        right = f"{UNDER_MPI}, or name them by `hosts`"
        require(job is not None or named, "`extend`", "has no hosts to add", right)
        if job is None:
            listed = _listed(request.nodes, request.hosts, known)
            _say_known(known, [host.name for host in listed], say)
        models = planned_models(known.plan, request.extend)
    tables = list[KeptTable]()
    if job is not None:
        subject = _of_job(request, known, tables, job, stack, say=say)
    else:
        subject = _of_hosts(request, known, tables, models)
    subject.extends, subject.known_models = known is not None, models
    subject.table_files = partial(table_files, tables)
    return subject


def _say_known(known: KnownPlan | None, names: Sequence[str], say: Say) -> None:
    planned = {} if known is None else known.plan.cluster.host_classes
    if again := [name for name in names if name in planned]:
        say(f"{compress(again)}: in the plan already")


def _of_hosts(
    request: PlanRequest, known: KnownPlan | None, tables: list[KeptTable], models: Models
) -> Subject:
    """Open simulated hosts, or those that a known plan grows by without measuring."""
    model, source, by_name = None, None, dict[str, Simulator]()
    if request.simulate is not None:
        model, source = simulated(request, request.simulate)
        nodes, switches = request.nodes, request.switches
        cluster = simulated_cluster(model, nodes, request.hosts, switches, known)
        by_name = {name: Simulator(m) for name, m in models.items() if m is not None}
    else:
        assert known is not None and request.hosts is not None
        hosts = listed_hosts(request.hosts, where="`hosts`")
        cluster = named_cluster(known, hosts, request.switches)

    def search(reporter: Reporter | None) -> Plan:
        with source or nullcontext():
            return grown_plan(Growth(request, known, reporter, tables), cluster, source, by_name)

    return Subject(search=search, source=source, model=model)


def _of_job(
    request: PlanRequest,
    known: KnownPlan | None,
    tables: list[KeptTable],
    job: Job,
    stack: ExitStack,
    *,
    say: Say,
) -> Subject:
    """Find out what the hosts of an MPI job are."""
    listed = () if request.hosts is None else listed_hosts(request.hosts, where="`hosts`")
    opened = open_hosts(
        job,
        backend=request.backend,
        devices=request.devices,
        interfaces=request.interfaces,
        options=request.options,
        expected=[host.name for host in listed],
        gid_index=request.ib_gid_index,
    )
    source = stack.enter_context(opened)
    _say_known(known, [host.name for host in source.session.hosts], say)
    proofs: dict[str, Proof] = {}
    if request.backend != "host":
        say(f"{counted(len(source.session.hosts), 'host')} prove the links between their GPUs")
        proofs = source.session.proofs(force=request.prove)
        version = request.version or version_to_plan(say, source.session.hosts[0].nccl)
        request = msgspec.structs.replace(request, version=version)
        planned = version if known is None else known.plan.settings.version
        if planned != version:
            say(f"these hosts have NCCL {version}, and the plan is for {planned}")

    def say_each(texts: Iterable[str]) -> None:
        for text in texts:
            say(text)

    doubts = doubts_of_links(proofs)
    say_each(doubts)
    cluster = cluster_of_job(source, request.switches, known, proofs)
    bits = subnet_prefix(cluster.cables, addresses_of(source), where="this MPI job")
    request = msgspec.structs.replace(request, subnet_prefix=bits)

    def search(reporter: Reporter | None) -> Plan:
        try:
            growth = Growth(request, known, reporter, tables)
            made = plan_job(source, cluster, growth, say=say_each)
            return msgspec.structs.replace(made, notices=(*doubts, *made.notices))
        finally:
            source.close()

    return Subject(search=search, source=source)


def doubts_of_links(proofs: Mapping[str, Proof]) -> tuple[str, ...]:
    """Return a notice on hosts whose links are not sound, one for all that are so alike.

    Raises InputError: NCCL fails on hosts whatever their links.
    """
    failing = [host for host, proof in proofs.items() if proof.verdict == "host memory fails"]
    if failing:
        proof = proofs[failing[0]]
        right = "; ".join(("leave it out", *proof.causes[:1]))
        where = f"NCCL on host {compress(failing)}"
        raise InputError(where, f"fails, without P2P too: {proof.what}", right)
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
    model: MachineModel,
    nodes: int | None,
    hosts: str | None,
    switches: Path | None,
    known: KnownPlan | None = None,
) -> Cluster:
    """Return a cluster of equal nodes: those of a list, or as many as `nodes` says.

    Raises InputError: neither, too few or too many, or both and they differ.
    """
    equal = picked(model, "machine", "knowledge")
    reports = [
        HostReport(host=h.name, slots=h.slots, **equal) for h in _listed(nodes, hosts, known)
    ]
    return _cluster(reports, switches, known, where=hosts or "cluster")


def named_cluster(known: KnownPlan, hosts: Sequence[HostSlots], switches: Path | None) -> Cluster:
    """Return a plan's hosts and further ones of its only class.

    Raises InputError: the plan has several classes, or as `cluster_of`.
    """
    kind, *further = known.plan.cluster.classes
    if further:
        fault = f"are of one of {1 + len(further)} classes"
        raise InputError("`hosts`", fault, "start ranks on them: then their class is found out")
    equal = picked(kind, "machine", "knowledge")
    reports = [HostReport(host=host.name, slots=host.slots, **equal) for host in hosts]
    return _cluster(reports, switches, known, where="`hosts`")


def cluster_of_job(
    source: HostsSource,
    switches: Path | None,
    known: KnownPlan | None = None,
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
    known: KnownPlan | None,
    *,
    where: str,
    addresses: Addresses | None = None,
    heard: Heard | None = None,
) -> Cluster:
    """Return a cluster with the switches and rails of a file, if there is one, or with cables.

    Cables are a file's, or those that `addresses` of NICs by host tell, or else LLDP.
    """
    old = None if known is None else known.plan.cluster
    if switches is None:
        rails = "any" if old is None else old.rails
        cluster = cluster_of(reports, rails=rails, where=where, known=old)
        cables = () if old else cables_of_subnets(addresses or {}) or cables_of_lldp(heard or {})
    else:
        names = [*(old.names if old else ()), *(report.host for report in reports)]
        network = read_switches(switches, dict.fromkeys(names))
        tree, rails = network.switches, network.rails
        cluster = cluster_of(reports, switches=tree, rails=rails, where=where, known=old)
        machines = {host.name: cluster.classes[host.node_class].machine for host in cluster.hosts}
        cables = cables_of(network.ports, machines)
        subnet_prefix(cables, addresses or {}, where=str(switches))
    if not cables:
        return cluster
    # Hosts with cables at other NICs are of other classes.
    nics: dict[str, set[int]] = defaultdict(set)
    for host, nic, _ in cabled_nics(cables):
        nics[host].add(nic)
    groups: dict[tuple[int, frozenset[int]], list[str]] = defaultdict(list)
    for name, number in cluster.host_classes.items():
        groups[number, frozenset(nics[name])].append(name)
    cabled = msgspec.structs.replace(cluster, cables=tuple(cables))
    return split(check_cluster(cabled, where=where), groups.values())


def _listed(nodes: int | None, text: str | None, known: KnownPlan | None) -> tuple[HostSlots, ...]:
    if text is not None:
        hosts = listed_hosts(text, where="`hosts`")
        named = known is not None or nodes == 1 or [host.name for host in hosts] != [text]
        right = "name a file of hosts, or hosts, as in node[1-8]"
        require(named, f"`hosts` {text[:40]}", "is no file, and the name of one host", right)
        if nodes not in (None, len(hosts)):
            fault = f"is {nodes}, but `hosts` has {len(hosts)} hosts"
            raise InputError("`nodes`", fault, "give one of the two, or equal numbers")
        return hosts
    if nodes is None or not 1 <= nodes <= MANY_NODES:
        raise InputError("`nodes`", f"is {nodes}", f"1 to {MANY_NODES}")
    # Of a plan for 8 that grows to 16, node1 is not node01.
    planned = () if known is None else known.plan.cluster.names
    widths = (len(name[4:]) for name in planned if re.fullmatch("node[0-9]+", name, re.ASCII))
    width = min(widths, default=len(str(nodes)))
    return tuple(HostSlots(f"node{number + 1:0{width}d}") for number in range(nodes))
