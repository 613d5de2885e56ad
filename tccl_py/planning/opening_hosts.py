"""Several hosts that `tccl plan` plans for: simulated or named ones, or those of an MPI job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.cluster import compress
from tccl_py.plan.plan import Plan
from tccl_py.plan.tables import KeptTable, table_files
from tccl_py.planning.grow import (
    KnownPlan,
    addresses_of,
    cluster_of_job,
    grown_plan,
    named_cluster,
    plan_job,
    read_known_plan,
    simulated_cluster,
)
from tccl_py.planning.installed_nccl import version_to_plan
from tccl_py.planning.opening import UNDER_MPI, Say, Subject, simulated
from tccl_py.planning.plan_sources import planned_models
from tccl_py.planning.request import PlanRequest
from tccl_py.readers.cables import subnet_prefix
from tccl_py.readers.hosts import listed_hosts
from tccl_py.search.problem import Reporter
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator
from tccl_py.sources.hosts import open_hosts

if TYPE_CHECKING:
    from tccl_py.sources.hosts import Job

Models = Mapping[str, MachineModel | None]


def cluster_subject(request: PlanRequest, job: Job | None, stack: ExitStack, say: Say) -> Subject:
    """Open several hosts, those of a job if there is one; see `subject_of`."""
    known = None if request.extend is None else read_known_plan(request.extend)
    models: Models = {}
    if known is not None and request.extend is not None:
        mixed = job is not None if known.plan.simulated else request.simulate is not None
        if mixed:
            fault = f"has {'simulated' if known.plan.simulated else 'measured'} rates"
            raise InputError(str(request.extend), fault, "add hosts with such rates")
        listed = () if request.hosts is None else listed_hosts(request.hosts, where="`hosts`")
        names = known.plan.cluster.host_classes
        if again := [host.name for host in listed if host.name in names]:
            say(f"{compress(again)}: in the plan already")
        named = request.hosts or (request.nodes and request.simulate)
        if job is None and not named:
            right = f"{UNDER_MPI}, or name them by `hosts`"
            raise InputError("`extend`", "has no hosts to add", right)
        models = planned_models(known.plan, request.extend)
    if job is not None:
        return _of_job(request, known, models, job, stack, say=say)
    return _of_hosts(request, known, models)


def _of_hosts(request: PlanRequest, known: KnownPlan | None, models: Models) -> Subject:
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
    tables = list[KeptTable]()

    def search(reporter: Reporter | None) -> Plan:
        with source or nullcontext():
            facts = known, cluster, source, by_name
            return grown_plan(*facts, request, reporter=reporter, tables=tables)

    return Subject(
        search=search,
        source=source,
        model=model,
        extends=known is not None,
        known_models=models,
        table_files=partial(table_files, tables),
    )


def _of_job(
    request: PlanRequest,
    known: KnownPlan | None,
    models: Models,
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
    if request.backend != "host":
        version = request.version or version_to_plan(say, source.session.hosts[0].nccl)
        request = msgspec.structs.replace(request, version=version)
        planned = version if known is None else known.plan.settings.version
        if planned != version:
            say(f"these hosts have NCCL {version}, and the plan is for {planned}")
    cluster = cluster_of_job(source, request.switches, known)
    bits = subnet_prefix(cluster.cables, addresses_of(source), where="this MPI job")
    request = msgspec.structs.replace(request, subnet_prefix=bits)
    tables = list[KeptTable]()

    def say_each(texts: Iterable[str]) -> None:
        for text in texts:
            say(text)

    def search(reporter: Reporter | None) -> Plan:
        try:
            return plan_job(
                source,
                cluster,
                request,
                known=known,
                reporter=reporter,
                tables=tables,
                say=say_each,
            )
        finally:
            source.close()

    return Subject(
        search=search,
        source=source,
        extends=known is not None,
        known_models=models,
        table_files=partial(table_files, tables),
    )
