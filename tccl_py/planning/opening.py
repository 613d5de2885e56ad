"""What a request names, opened: a source with the search by it, and a directory for the plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tccl_py.errors import InputError, require
from tccl_py.model.cluster import single_host
from tccl_py.model.links import Proof
from tccl_py.nccl.settings import environment
from tccl_py.plan.chains import Choice, Failure
from tccl_py.plan.plan import Plan
from tccl_py.planning.planner import plan_hosts
from tccl_py.planning.request import PlanRequest, chosen_gpus, not_pinned, of_transports
from tccl_py.planning.subject import Prove, Say, Subject, open_model, with_proof
from tccl_py.search.problem import Reporter
from tccl_py.simulator.model import MachineModel

if TYPE_CHECKING:
    from tccl_py.nccl.asked import AskedJob
    from tccl_py.sources.hosts import Job
    from tccl_py.sources.profiled import MeasuredMachine

_MAX_RINGS = 16
_NO_PAIRS = Failure(verdict="fails")


def subject_of(
    request: PlanRequest,
    job: Job | None,
    stack: ExitStack,
    say: Say,
    *,
    prove: Prove | None = None,
    directory: Path | None = None,
) -> Subject:
    """Open what is planned for. The hosts of a job are left with `stack`.

    Args:
        prove: proves the links of this machine, if it is measured.
        directory: hosts join the whole plan of hosts that it holds, if any; None plans anew.

    Raises InputError: an unknown machine, hosts that do not fit, or rates of another kind than in
    the directory's plan.
    """
    if job is None and not request.names_hosts:
        return machine_subject(request, say, prove)
    from tccl_py.planning.opening_hosts import cluster_subject  # noqa: PLC0415 (for hosts alone)

    return cluster_subject(request, job, stack, say, directory)


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

    def search(reporter: Reporter | None) -> Plan:
        with source:
            watched = msgspec.structs.replace(request, reporter=reporter)
            return plan_hosts(watched, cluster, [source], gpus=gpus)

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

    def search(reporter: Reporter | None) -> Plan:
        with source:
            gpus = named or chosen_gpus(place.machine, None)
            rings = installed_nccl.rings_here(place, named, asked)
            cluster = single_host(place.machine, place.knowledge, gpus)
            watched = msgspec.structs.replace(request, reporter=reporter)
            made = plan_hosts(watched, cluster, [source], gpus=gpus, own_rings=rings)
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
