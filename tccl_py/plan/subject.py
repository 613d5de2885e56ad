"""What `tccl plan` plans for: this machine, a model, the hosts of an MPI job, or further hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.machine import Fingerprint
from tccl_py.nccl.asked import InstalledRings
from tccl_py.nccl.versions import ASSUMED
from tccl_py.plan.again import planned_models
from tccl_py.plan.job import (
    KnownPlan,
    cluster_of_job,
    grown_plan,
    named_cluster,
    plan_job,
    read_known_plan,
    simulated_cluster,
)
from tccl_py.plan.nccl_here import graph_file_notices, not_pinned, rings_here, version_to_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.planner import chosen_gpus, make_plan
from tccl_py.plan.request import PlanRequest
from tccl_py.plan.tables import KeptTable
from tccl_py.readers.hosts import compress, listed_hosts
from tccl_py.search.problem import Reporter
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator
from tccl_py.sources.journal import read_journal, widen_journal
from tccl_py.sources.opening import OpenedSource, open_hosts, open_source
from tccl_py.sources.profiled import MeasuredMachine, measured_machine

if TYPE_CHECKING:
    from tccl_py.sources.opening import Job

Say = Callable[[str], None]
_MAX_RINGS = 16
UNDER_MPI = "start the command under mpirun or srun"


class Subject(msgspec.Struct, kw_only=True):
    """What is planned for: a source, and the search by it, which closes the source's journal.

    The search of a cluster fills `tables`.
    """

    search: Callable[[Reporter | None], Plan]
    source: OpenedSource | None = None
    model: MachineModel | None = None
    fingerprint: Fingerprint | None = None
    known: KnownPlan | None = None
    tables: Sequence[KeptTable] = ()

    def models(self, made: Plan, directory: Path) -> dict[str, MachineModel | None]:
        """Return the models behind a plan's rates by class; new classes have the new model."""
        found = dict.fromkeys((one.name for one in made.cluster.classes), self.model)
        return found | (planned_models(self.known.plan, directory) if self.known else {})

    def keep_in(self, journal: Path, *, replace: bool) -> tuple[str, ...]:
        """Keep what is measured, for an extended plan with all its hosts; return notices."""
        if self.source is None:
            return ()
        if self.known is not None and journal.is_file():
            if not self.source.simulated:
                widen_journal(journal, self.source.header)
            elif read_journal(journal).header != self.source.header:
                return ()  # Sets of another model have no names of hosts.
        return self.source.keep_in(journal, replace=replace)


def subject_of(request: PlanRequest, job: Job | None, stack: ExitStack, say: Say) -> Subject:
    """Open what is planned for. The hosts of a job are left with `stack`.

    Raises InputError: an unknown machine, hosts that do not fit, or rates of another kind than in
    the plan that is extended.
    """
    known = None if request.extend is None else read_known_plan(request.extend)
    if known is not None:
        mixed = job is not None if known.plan.simulated else request.simulate is not None
        if mixed:
            what = f"has {'simulated' if known.plan.simulated else 'measured'} rates"
            raise InputError(str(request.extend), what, "add hosts with such rates")
        listed = () if request.hosts is None else listed_hosts(request.hosts, where="`hosts`")
        names = known.plan.cluster.host_classes
        if again := [host.name for host in listed if host.name in names]:
            say(f"{compress(again)}: in the plan already")
        named = request.hosts or (request.nodes and request.simulate)
        if job is None and not named:
            right = f"{UNDER_MPI}, or name them by `hosts`"
            raise InputError("`extend`", "has no hosts to add", right)
    if job is not None:
        return _of_job(request, known, job, stack, say=say)
    if not request.names_hosts:
        return machine_subject(request, say)
    return _of_hosts(request, known)


def machine_subject(request: PlanRequest, say: Say) -> Subject:
    """Open one machine: a model, or this one.

    Raises InputError: an unknown machine, or no GPU here.
    """
    if request.simulate is None:
        return _here(request, say)
    model, source = _simulated(request, request.simulate)
    gpus = chosen_gpus(model.machine, request.gpus)

    def search(reporter: Reporter | None) -> Plan:
        with source:
            return _machine_plan(request, model, source, gpus=gpus, reporter=reporter)

    return Subject(search=search, source=source, model=model)


def _simulated(request: PlanRequest, name: str) -> tuple[MachineModel, OpenedSource]:
    model = load_machine(name, p2p=request.p2p)
    return model, open_source(model, noise=request.noise or 0.0, seed=request.seed or 0)


def _machine_plan(
    request: PlanRequest,
    place: MachineModel | MeasuredMachine,
    source: OpenedSource,
    *,
    gpus: tuple[int, ...] | None,
    reporter: Reporter | None,
    own_rings: InstalledRings | None = None,
) -> Plan:
    return make_plan(
        place.machine,
        place.knowledge,
        source,
        gpus=gpus,
        version=request.version or ASSUMED,
        ring_counts=request.ring_counts,
        strategy=request.strategy,
        budget=request.budget,
        reporter=reporter,
        pinned_env=request.pinned_env,
        own_rings=own_rings,
        subsets=request.subsets,
    )


def _of_hosts(request: PlanRequest, known: KnownPlan | None) -> Subject:
    """Open simulated hosts, or those that a known plan grows by without measuring."""
    model, source, others = None, None, dict[str, Simulator]()
    if request.simulate is not None:
        model, source = _simulated(request, request.simulate)
        nodes, switches = request.nodes, request.switches
        cluster = simulated_cluster(model, nodes, request.hosts, switches, known)
        if known is not None and request.extend is not None:
            models = planned_models(known.plan, request.extend)
            others = {name: Simulator(one) for name, one in models.items() if one is not None}
    else:
        assert known is not None and request.hosts is not None
        hosts = listed_hosts(request.hosts, where="`hosts`")
        cluster = named_cluster(known, hosts, request.switches)
    tables = list[KeptTable]()

    def search(reporter: Reporter | None) -> Plan:
        with source or nullcontext():
            facts = known, cluster, source, others
            return grown_plan(*facts, request, reporter=reporter, tables=tables)

    return Subject(search=search, source=source, model=model, known=known, tables=tables)


def _here(request: PlanRequest, say: Say) -> Subject:
    """Open this machine; the plan has the notices of measuring."""
    place = measured_machine(request.backend, request.devices)
    # No NCCL runs where the host's memory is measured.
    if request.backend != "host":
        version = request.version or version_to_plan(say)
        request = msgspec.structs.replace(request, version=version)
        for text in not_pinned(request.pinned_env):
            say(text)
    gpus = None if request.gpus is None else chosen_gpus(place.machine, request.gpus)
    source = open_source(place, gpus=gpus, options=request.options)

    def search(reporter: Reporter | None) -> Plan:
        with source:
            rings = rings_here(place, gpus)
            made = _machine_plan(
                request, place, source, gpus=gpus, reporter=reporter, own_rings=rings
            )
            conditions = source.conditions
        noticed = source.summary(conditions)
        if rings is not None:
            tried = () if made.cancelled else graph_file_notices(made, rings)
            noticed = (*rings.notices, *tried, *noticed)
        return msgspec.structs.replace(made, notices=(*made.notices, *noticed))

    return Subject(search=search, source=source, fingerprint=place.fingerprint)


def _of_job(
    request: PlanRequest, known: KnownPlan | None, job: Job, stack: ExitStack, *, say: Say
) -> Subject:
    """Find out what the hosts of an MPI job are."""
    listed = () if request.hosts is None else listed_hosts(request.hosts, where="`hosts`")
    opened = open_hosts(
        job,
        backend=request.backend,
        devices=request.devices,
        interfaces=request.interfaces,
        network=request.network,
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

    return Subject(search=search, source=source, known=known, tables=tables)


def ring_counts_of(text: str | None) -> tuple[int, ...] | None:
    """Parse the numbers of rings of --rings; None stays None."""
    if text is None:
        return None
    where = f"`rings` {text[:40]!r}"
    if re.fullmatch(r"\s*\d{1,99}\s*(,\s*\d{1,99}\s*)*", text, re.ASCII) is None:
        raise InputError(where, "is no list of numbers", "write 1,2,4")
    counts = tuple(sorted(set(map(int, text.split(",")))))
    if counts[0] < 1 or counts[-1] > _MAX_RINGS:
        raise InputError(where, "is out of range", f"1 to {_MAX_RINGS} rings")
    return counts
