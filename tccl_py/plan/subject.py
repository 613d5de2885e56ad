"""What `tccl plan` plans for: this machine, a model, the hosts of an MPI job, or further hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.machine import Fingerprint
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
from tccl_py.readers.hosts import compress, listed_hosts
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator
from tccl_py.sources.journal import read_journal, widen_journal
from tccl_py.sources.opening import OpenedSource, open_hosts, open_source
from tccl_py.sources.profiled import measured_machine, search_options

if TYPE_CHECKING:
    from tccl_py.sources.opening import Job

Say = Callable[[str], None]
_MAX_RINGS = 16
UNDER_MPI = "start the command under mpirun or srun"


class Subject(msgspec.Struct, kw_only=True):
    """What is planned for: a source, and the search by it, which closes the source's journal."""

    search: Callable[..., Plan]
    source: OpenedSource | None = None
    model: MachineModel | None = None
    fingerprint: Fingerprint | None = None
    known: KnownPlan | None = None

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


def subject_of(
    asked: SimpleNamespace, task: dict[str, Any], job: Job | None, stack: ExitStack, say: Say
) -> Subject:
    """Open what is planned for; `task` are arguments of planning, and gets further ones.

    `asked` has the options of `tccl plan` by name (None is not given), and as `several` whether
    nodes are simulated or named. The hosts of a job are left with `stack`.

    Raises InputError: an unknown machine, hosts that do not fit, or rates of another kind than in
    the plan that is extended.
    """
    known = read_known_plan(asked.output) if asked.extend else None
    if known is not None:
        task |= known.task
        mixed = job is not None if known.plan.simulated else asked.simulate is not None
        if mixed:
            what = f"has {'simulated' if known.plan.simulated else 'measured'} rates"
            raise InputError(str(asked.output), what, "add hosts with such rates")
        listed = () if asked.hosts is None else listed_hosts(asked.hosts, where="`hosts`")
        names = known.plan.cluster.host_classes
        if again := [host.name for host in listed if host.name in names]:
            say(f"{compress(again)}: in the plan already")
        named = asked.hosts or (asked.nodes and asked.simulate)
        if job is None and not named:
            right = f"{UNDER_MPI}, or name them by `hosts`"
            raise InputError("`extend`", "has no hosts to add", right)
    if job is not None:
        return _of_job(asked, task, known, job, stack, say=say)
    if asked.simulate is not None:
        return _of_model(asked, asked.simulate, task, known)
    return _here(asked, task, say) if known is None else _of_names(asked, task, known)


def plain_subject(machine: str | None, say: Say, *, p2p: bool | None = None) -> Subject:
    """Open what a plain `tccl plan` of one machine plans for: a model's, or None for this one.

    Raises InputError: an unknown machine, or no GPU here.
    """
    unset = ("backend", "devices", "gpus", "nccl", "noise", "seed")
    asked = SimpleNamespace(**dict.fromkeys(unset), several=False, pin_env=(), p2p=p2p)
    asked.options = search_options(asked.backend, None)
    task: dict[str, Any] = {}
    return _here(asked, task, say) if machine is None else _of_model(asked, machine, task, None)


def _of_names(asked: SimpleNamespace, task: Mapping[str, Any], known: KnownPlan) -> Subject:
    """Extend a plan by hosts that are only named."""
    hosts = listed_hosts(asked.hosts, where="`hosts`")
    cluster = named_cluster(known, hosts, asked.switches)
    return Subject(search=partial(grown_plan, known, cluster, None, {}, **task), known=known)


def _of_model(
    asked: SimpleNamespace, name: str, task: Mapping[str, Any], known: KnownPlan | None
) -> Subject:
    model = load_machine(name, p2p=asked.p2p)
    source = open_source(model, noise=asked.noise or 0.0, seed=asked.seed or 0)
    make: Callable[..., Plan]
    if asked.several:
        cluster = simulated_cluster(model, asked.nodes, asked.hosts, asked.switches, known)
        models = {} if known is None else planned_models(known.plan, asked.output)
        others = {name: Simulator(one) for name, one in models.items() if one is not None}
        make = partial(grown_plan, known, cluster, source, others, **task)
    else:
        gpus = chosen_gpus(model.machine, asked.gpus)
        make = partial(make_plan, model.machine, model.knowledge, source, gpus=gpus, **task)

    def search(**more: Any) -> Plan:
        with source:
            return make(**more)

    return Subject(search=search, source=source, model=model, known=known)


def _here(asked: SimpleNamespace, task: dict[str, Any], say: Say) -> Subject:
    """Open this machine; the plan has the notices of measuring."""
    place = measured_machine(asked.backend, asked.devices)
    # No NCCL runs where the host's memory is measured.
    if asked.backend != "host":
        task["version"] = asked.nccl or version_to_plan(say)
        for text in not_pinned(asked.pin_env):
            say(text)
    gpus = None if asked.gpus is None else chosen_gpus(place.machine, asked.gpus)
    source = open_source(place, gpus=gpus, options=asked.options)

    def search(**more: Any) -> Plan:
        with source:
            rings = rings_here(place, gpus)
            given = {**task, **more, "gpus": gpus, "own_rings": rings}
            made = make_plan(place.machine, place.knowledge, source, **given)
            conditions = source.conditions
        noticed = source.summary(conditions)
        if rings is not None:
            tried = () if made.cancelled else graph_file_notices(made, rings)
            noticed = (*rings.notices, *tried, *noticed)
        return msgspec.structs.replace(made, notices=(*made.notices, *noticed))

    return Subject(search=search, source=source, fingerprint=place.fingerprint)


def _of_job(
    asked: SimpleNamespace,
    task: dict[str, Any],
    known: KnownPlan | None,
    job: Job,
    stack: ExitStack,
    *,
    say: Say,
) -> Subject:
    """Find out what the hosts of an MPI job are."""
    listed = () if asked.hosts is None else listed_hosts(asked.hosts, where="`hosts`")
    named = ("backend", "devices", "interfaces", "network", "gid_index", "options")
    given = {name: getattr(asked, name) for name in named}
    opened = open_hosts(job, expected=[host.name for host in listed], **given)
    source = stack.enter_context(opened)
    if asked.backend != "host":
        told = source.session.hosts[0].nccl
        found = asked.nccl or version_to_plan(say, told)
        task["version"] = found if known is None else task["version"]
        if task["version"] != found:
            say(f"these hosts have NCCL {found}, and the plan is for {task['version']}")
    cluster = cluster_of_job(source, asked.switches, known)

    def say_each(texts: Iterable[str]) -> None:
        for text in texts:
            say(text)

    def search(**more: Any) -> Plan:
        try:
            return plan_job(source, cluster, known=known, say=say_each, **task, **more)
        finally:
            source.close()

    return Subject(search=search, source=source, known=known)


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
