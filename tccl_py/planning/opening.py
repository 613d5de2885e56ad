"""What a request names, opened: a source of rates, the search by it, and what they rest on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tccl_py.errors import InputError, require, spell
from tccl_py.model.cluster import single_host
from tccl_py.model.links import Proof
from tccl_py.model.machine import Fingerprint, Knowledge
from tccl_py.nccl.settings import environment
from tccl_py.plan.chains import Choice, Failure
from tccl_py.plan.plan import Plan
from tccl_py.planning.planner import plan_hosts
from tccl_py.planning.request import PlanRequest, chosen_gpus, not_pinned, of_transports
from tccl_py.simulator.descriptions import load_machine, settle_model
from tccl_py.simulator.model import MachineModel, provenances_text
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tccl_py.sources.journal import read_journal, widen_journal

if TYPE_CHECKING:
    from tccl_py.nccl.asked import AskedJob
    from tccl_py.sources.profiled import MeasuredMachine

Say = Callable[[str], None]
Prove = Callable[[Callable[[], None]], "tuple[Proof | None, Sequence[AskedJob]]"]
"""Proves the links of this machine: a proof, and what NCCL did for it. The function that it gets is
called once workers of this machine may start."""
UNDER_MPI = "start the command under mpirun or srun"


class Subject(msgspec.Struct, kw_only=True):
    """What is planned for: a source, and the search by it, which closes the source's journal."""

    search: Callable[[], Plan]
    source: Bench | None = None
    model: MachineModel | None = None
    """That of new hosts."""
    fingerprint: Fingerprint | None = None
    links: Proof | None = None
    """The proof by which this machine is planned."""
    grows: bool = False
    """Whether hosts join a plan."""
    known_models: Mapping[str, MachineModel | None] = {}
    """The models of that plan's classes."""
    table_files: Callable[[], Mapping[str, str]] = dict
    """Returns the files of a cluster's tables after the search."""

    def models(self, made: Plan) -> dict[str, MachineModel | None]:
        """Return the models behind a plan's rates by class; new classes have the new model."""
        models = dict.fromkeys((node_class.name for node_class in made.cluster.classes), self.model)
        return {**models, **self.known_models}

    def keep_in(
        self, journal: Path, on_set: Callable[[int], None], *, replace: bool
    ) -> tuple[str, ...]:
        """Keep what is measured, for a plan that grows with all its hosts; return notices.

        `on_set` is called with the number of sets that hardware measured, before and after each.
        """
        if self.source is None:
            return ()
        self.source.watch(on_set)
        if self.grows and journal.is_file():
            if not self.source.simulated:
                widen_journal(journal, self.source.header)
            elif read_journal(journal).header != self.source.header:
                return ()  # Sets of another model have no names of hosts.
        return self.source.keep_in(journal, replace=replace)

    def say_sure(self, plan: Plan) -> str:
        """Return how sure a plan is, by the model behind its rates, if there is one."""
        model = self.model
        if plan.dry_run:
            return "not at all: processes in host memory stood in for GPUs"
        if plan.jobs_ran:
            return "high: NCCL's jobs were timed here"
        if plan.simulated:
            level = "low" if plan.any_assumed else "medium"
            if model is None:
                return f"{level}: simulated"
            basis = "" if model.source else f", {model.note}"
            return f"{level}: by a model with {provenances_text(model)} parameters{basis}"
        interval = plan.choices["graph"].error
        error = f", 95 % interval ±{interval:.1%}" if interval else ""
        sets = spell(plan.sets_measured, "set")
        return f"medium: {sets} measured here{error}; no NCCL job was timed"


def open_model(request: PlanRequest, name: str | MachineModel) -> tuple[MachineModel, Bench]:
    """Open the model that a request names, or a model as the request has it."""
    loaded = name if isinstance(name, MachineModel) else load_machine(name)
    model = settle_model(loaded, p2p=request.p2p, cpu=request.cpu)
    return model, Bench(Simulator(model, noise=request.noise or 0.0, seed=request.seed or 0))


def with_proof(knowledge: Knowledge, proof: Proof | None) -> Knowledge:
    """Return knowledge of a machine with the links that its proof leaves to no plan."""
    if proof is None or not proof.facts:
        return knowledge
    return msgspec.structs.replace(knowledge, links=proof.facts)


_MAX_RINGS = 16
_NO_PAIRS = Failure(verdict="fails")


def machine_subject(
    request: PlanRequest,
    say: Say,
    prove: Prove | None = None,
    *,
    model: MachineModel | None = None,
) -> Subject:
    """Open one machine: a model, `model` itself if it is given, or this one.

    Raises InputError: an unknown machine, or no GPU here.
    """
    if request.simulate is None and model is None:
        return _here(request, say, prove)
    model, source = open_model(request, model or request.simulate or "")
    gpus = chosen_gpus(model.machine, request.gpus)
    cluster = single_host(model.machine, model.knowledge, gpus)

    def search() -> Plan:
        with source:
            return plan_hosts(request, cluster, [source], gpus=gpus)

    return Subject(search=search, source=source, model=model)


def _here(request: PlanRequest, say: Say, prove: Prove | None) -> Subject:
    """Open this machine; the plan has the notices of measuring."""
    from tccl_py.planning import installed_nccl  # noqa: PLC0415 (asks the NCCL here)
    from tccl_py.sources.opening import open_source  # noqa: PLC0415 (loads the profiler)
    from tccl_py.sources.profiled import measured_machine  # noqa: PLC0415

    place = measured_machine(request.backend, request.devices)
    # No NCCL runs where the host's memory is measured.
    if request.backend != "host":
        version = request.version or installed_nccl.version_to_plan(say)
        request = msgspec.structs.replace(request, version=version)
        for text in not_pinned(request.pinned_env):
            say(text)
    named = _named_gpus(request, place, say)
    source = open_source(place, gpus=named, options=request.options)
    proof: Proof | None = None
    asked: Sequence[AskedJob] = ()
    if prove is not None:
        # Processes on GPUs take seconds to start: those that measure start while links are proven.
        with ExitStack() as opened:
            opened.push(source)
            proof, asked = prove(source.prepare)
            # Jobs that hang and are killed may take them along, as under MPS: then they start anew.
            if proof is None or proof.verdict == "sound":
                opened.pop_all()
    place = msgspec.structs.replace(place, knowledge=with_proof(place.knowledge, proof))

    def search() -> Plan:
        with source:
            gpus = named or chosen_gpus(place.machine, None)
            rings = installed_nccl.rings_here(place, named, asked)
            cluster = single_host(place.machine, place.knowledge, gpus)
            made = plan_hosts(request, cluster, [source], gpus=gpus, own_rings=rings)
            conditions = source.conditions
        made = made if proof is None else judged_by(made, proof)
        noticed = source.summary(conditions)
        if rings is not None:
            if not made.cancelled:
                made = installed_nccl.with_answers(made, rings)
            noticed = (*rings.notices, *noticed)
        return msgspec.structs.replace(made, notices=(*made.notices, *noticed))

    return Subject(search=search, source=source, fingerprint=place.fingerprint, links=proof)


def judged_by(plan: Plan, proof: Proof) -> Plan:
    """Return a plan whose choices fail as NCCL's jobs of a proof did under the same transports."""
    failed = [job for job in proof.by_nccl if job.verdict in ("hangs", "wrong values", "fails")]
    jobs = {frozenset(job.environment.items()): job for job in failed}
    replace = msgspec.structs.replace

    def judge(choice: Choice) -> Choice:
        job = jobs.get(frozenset(environment(of_transports(choice.settings)).items()))
        if job is None:
            return choice
        fails = replace(choice.fails or _NO_PAIRS, verdict=job.verdict)
        if choice.name == "graph":
            return replace(choice, fails=fails)
        return replace(choice, predicted_gbps=None, fails=fails, note=choice.note or proof.what)

    if proof.verdict == "inconclusive":
        return plan
    return replace(plan, choices={name: judge(way) for name, way in plan.choices.items()})


def _named_gpus(request: PlanRequest, place: MeasuredMachine, say: Say) -> tuple[int, ...] | None:
    """Return the GPUs that a request or CUDA_VISIBLE_DEVICES names; None is all."""
    if request.gpus is not None:
        return chosen_gpus(place.machine, request.gpus)
    if place.gpus == place.machine.gpu_indices:
        return None
    from tccl_py.readers.live import VARIABLE  # noqa: PLC0415 (loads NVML)

    named, total = ",".join(map(str, place.gpus)), len(place.machine.gpus)
    what = f"shows GPU {named} alone, and a ring joins 2 or more"
    require(len(place.gpus) > 1, VARIABLE, what, "unset it, or name others by `gpus`")
    say(f"{VARIABLE} shows GPUs {named} of {total}, which are planned for; unset it for all")
    return place.gpus


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
