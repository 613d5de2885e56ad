"""What a request names, opened: a source with the search by it, and a directory for the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tccl_py.errors import InputError, require
from tccl_py.files import check_path, missing, refused
from tccl_py.model.cluster import single_host
from tccl_py.model.links import Proof
from tccl_py.model.measurement import JOURNAL_FILE
from tccl_py.nccl.settings import Settings, environment
from tccl_py.plan.chains import Failure, PlanChoice
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import FOLDERS, PLAN_FILE, locked, make, unmake
from tccl_py.planning.planner import plan_hosts
from tccl_py.planning.request import PlanRequest, chosen_gpus, not_pinned, of_transports
from tccl_py.planning.subject import Say, Subject, simulated, with_proof
from tccl_py.search.problem import Reporter
from tccl_py.simulator.model import MachineModel
from tccl_py.sources.journal import read_journal

if TYPE_CHECKING:
    from tccl_py.nccl.proof import AskedJob
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
    asked: Sequence[AskedJob] = (),
    directory: Path | None = None,
) -> Subject:
    """Open what is planned for. The hosts of a job are left with `stack`.

    Args:
        asked: jobs of the installed NCCL that ran before on this machine.
        directory: hosts join the whole plan of hosts that it holds, if any; None plans anew.

    Raises InputError: an unknown machine, hosts that do not fit, or rates of another kind than in
    the directory's plan.
    """
    if job is None and not request.names_hosts:
        return machine_subject(request, say, asked)
    from tccl_py.planning.opening_hosts import cluster_subject  # noqa: PLC0415 (for hosts alone)

    return cluster_subject(request, job, stack, say, directory)


def machine_subject(
    request: PlanRequest,
    say: Say,
    asked: Sequence[AskedJob] = (),
    *,
    model: MachineModel | None = None,
) -> Subject:
    """Open one machine: a model, `model` itself if it is given, or this one.

    Raises InputError: an unknown machine, or no GPU here.
    """
    if request.simulate is None and model is None:
        return _here(request, say, asked)
    model, source = simulated(request, model or request.simulate or "")
    gpus = chosen_gpus(model.machine, request.gpus)
    cluster = single_host(model.machine, model.knowledge, gpus)

    def search(reporter: Reporter | None) -> Plan:
        with source:
            return plan_hosts(request, cluster, [source], gpus=gpus, reporter=reporter)

    return Subject(search=search, source=source, model=model)


def _here(request: PlanRequest, say: Say, asked: Sequence[AskedJob]) -> Subject:
    """Open this machine; the plan has the notices of measuring."""
    from tccl_py.planning import installed_nccl  # noqa: PLC0415 (asks the NCCL here)
    from tccl_py.sources.opening import open_source  # noqa: PLC0415 (loads the profiler)
    from tccl_py.sources.profiled import (  # noqa: PLC0415
        measured_machine,
        several_processes_may_use,
    )

    place = measured_machine(request.backend, request.devices)
    # No NCCL runs where the host's memory is measured.
    if request.backend != "host":
        version = request.version or installed_nccl.version_to_plan(say)
        request = msgspec.structs.replace(request, version=version)
        for text in not_pinned(request.pinned_env):
            say(text)
    proof = request.links
    place = msgspec.structs.replace(place, knowledge=with_proof(place.knowledge, proof))
    named = _named_gpus(request, place, say)
    source = open_source(place, gpus=named, options=request.options)

    def search(reporter: Reporter | None) -> Plan:
        with source:
            gpus = named or chosen_gpus(place.machine, None)
            rings = installed_nccl.rings_here(place, named, asked)
            if rings is not None and rings.able and several_processes_may_use(gpus):
                # Asking NCCL takes seconds, and so does the start of workers. They would be other
                # processes on the GPUs before.
                source.prepare()
            cluster = single_host(place.machine, place.knowledge, gpus)
            made = plan_hosts(
                request, cluster, [source], gpus=gpus, own_rings=rings, reporter=reporter
            )
            conditions = source.conditions
        made = made if proof is None else judged_by(made, proof)
        noticed = source.summary(conditions)
        if rings is not None:
            if not made.cancelled:
                made = installed_nccl.with_answers(made, rings)
            noticed = (*rings.notices, *noticed)
        return msgspec.structs.replace(made, notices=(*made.notices, *noticed))

    return Subject(search=search, source=source, fingerprint=place.fingerprint)


def judged_by(plan: Plan, proof: Proof) -> Plan:
    """Return a plan whose choices fail as NCCL's jobs of a proof did under the same transports."""
    failed = [job for job in proof.by_nccl if job.verdict in ("hangs", "wrong values", "fails")]
    jobs = {frozenset(job.environment.items()): job for job in failed}
    replace = msgspec.structs.replace

    def failure(settings: Settings, known: Failure | None) -> Failure | None:
        job = jobs.get(frozenset(environment(of_transports(settings)).items()))
        return known if job is None else replace(known or _NO_PAIRS, verdict=job.verdict)

    def judged(choice: PlanChoice) -> PlanChoice:
        fails = failure(choice.settings, choice.fails)
        note = choice.note or proof.what
        return replace(choice, rate_gbps=None, fails=fails, note=note) if fails else choice

    if proof.verdict == "inconclusive":
        return plan
    return replace(
        plan,
        stock=judged(plan.stock),
        large_buffers=plan.large_buffers and judged(plan.large_buffers),
        variables=judged(plan.variables),
        fails=failure(plan.settings, plan.fails),
    )


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


# A directory that takes a plan and its journal.


@contextmanager
def output_directory(directory: Path, *, force: bool | None) -> Iterator[Path]:
    """Make `directory` ready to take a plan and a journal; yield the journal's path.

    A directory with a journal and no plan, or the plan of an interrupted search, is resumed. If an
    error ends the block, the directories made by this call are removed, unless the journal has
    measurements of hardware. Until the block ends no other run gets the directory: two would mix
    their lines in the journal. Raises InputError: a plan or other files are in it and `force` is
    not given, another run has it, or it cannot be made.
    """
    made: list[Path] = []
    unusable = "cannot be made", "name a writable place"
    with _taken_away(made), refused(directory, *unusable):
        check_path(directory.absolute())
        if not directory.is_dir() and (directory.exists() or directory.is_symlink()):
            fault = missing(directory, "is no directory")
            raise InputError(str(directory), fault, "name a new or empty one")
        make(directory, made)
    # Not taken away if another run has it by now.
    journal = directory / JOURNAL_FILE
    with locked(directory), _taken_away(made, journal):
        with refused(directory, *unusable):
            _check_held(directory, force=force)
        yield journal


@contextmanager
def _taken_away(made: Sequence[Path], journal: Path | None = None) -> Iterator[None]:
    """Remove the directories made if an error, not an interruption, ends the block."""
    try:
        yield
    except Exception:
        if journal is None or not holds_measurements(journal):
            unmake(made)
        raise


def holds_measurements(journal: Path) -> bool:
    """Return whether a file is a journal with measurements of hardware."""
    with suppress(InputError, OSError):
        contents = read_journal(journal)
        return not contents.header.simulated and bool(contents.measurements)
    return False


def holds_whole_plan(directory: Path) -> bool:
    """Return whether a directory holds a plan that no interruption cut short."""
    with suppress(InputError):
        return (directory / PLAN_FILE).is_file() and not load_plan(directory).cancelled
    return False


def _check_held(directory: Path, *, force: bool | None) -> None:
    held = {entry.name for entry in directory.iterdir()}
    where = str(directory)
    if PLAN_FILE in held:
        # The search of an interrupted plan goes on.
        resumed = False
        with suppress(InputError):
            resumed = load_plan(directory).cancelled
        if not force and not resumed:
            right = "name a new directory" if force is None else "add `force` to replace it"
            raise InputError(where, "already holds a plan", right)
        return
    if held - {JOURNAL_FILE} and not force:
        right = "name a new directory"
        right += "" if force is None else ", or add `force` to use this one"
        raise InputError(where, "is not empty", right)
    # Without a plan beside them these are not ours to replace.
    for name in sorted(held & set(FOLDERS)):
        where = str(directory / name)
        raise InputError(where, "belongs to no plan", "name a directory without it")
