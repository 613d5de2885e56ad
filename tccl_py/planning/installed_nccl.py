"""The installed NCCL: its version, and its rings on this machine's GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError
from tccl_py.nccl.asked import (
    AskedJob,
    InstalledRings,
    NcclAnswer,
    RefusedError,
    ask_each,
    ask_together,
    judge_file,
    verdict_on,
)
from tccl_py.nccl.communicators import Question
from tccl_py.nccl.settings import environment
from tccl_py.nccl.validator import Verdict
from tccl_py.nccl.versions import ASSUMED
from tccl_py.nccl_conf import HOST_FILE, why_no_default
from tccl_py.nccl_library import InstalledNccl, installed_nccl
from tccl_py.plan.chains import ChoiceName, SizeAnswer
from tccl_py.plan.directory import graph_files, nccl_files
from tccl_py.plan.machine_files import GRAPH_FILE
from tccl_py.plan.plan import Plan
from tccl_py.plan.size_choices import SIZES, compared_choices
from tccl_py.readers.live import gpu_count
from tccl_py.sources.profiled import MeasuredMachine, users_of

_DESCRIBED = "give `machine` for a verdict by NCCL's rules"
MOST_FILES = 8
"""Of more graph files one for each number of GPUs is loaded."""


def version_to_plan(say: Callable[[str], None], named: str | None = None) -> str:
    """Return the version of NCCL to plan for, and `say` why.

    `named` is the version on all hosts of a job, or "none"; without it, this machine's is found.
    """
    if named is None:
        nccl, where, none = installed_nccl(), "here, ", "none was found here"
    else:
        nccl = None if named == "none" else InstalledNccl(version=named, source="on all hosts")
        where, none = "", "the hosts have none that was found"
    version, why = ASSUMED, f", which current torch brings: {none}"
    if nccl is not None:
        version, why = nccl.minor, f": {nccl.version} is {where}{nccl.source}"
    say(f"planned for NCCL {version}{why}; `nccl` names another")
    return version


def why_not_asked(gpus: Sequence[int]) -> str:
    """Return why NCCL cannot be run on these GPUs now; "" if it can."""
    try:
        return users_of(gpus)
    except MeasurementError as error:
        return str(error)


def rings_here(
    place: MeasuredMachine, gpus: Sequence[int] | None, asked: Sequence[AskedJob] = ()
) -> InstalledRings | None:
    """Return the reader of the installed NCCL's own rings; None where no NCCL runs.

    `asked` are jobs over the same GPUs that ran before.
    """
    if place.backend != "cuda":
        return None
    chosen = place.machine.gpu_indices if gpus is None else tuple(sorted(gpus))
    rings = InstalledRings(place.machine, place.knowledge, chosen, sizes=SIZES)
    for job in asked:
        rings.learn(job.environment, job.answer)
    if HOST_FILE.exists():
        rings.notices.append(f"{HOST_FILE} holds for all NCCL jobs here, default NCCL as well")
    # What ran jobs has looked at who uses the GPUs: now those that measure may.
    if why := why_no_default() or ("" if asked else why_not_asked(chosen)):
        rings.unable(why)
    return rings


class _Asked(NamedTuple):
    """What NCCL is asked under a choice: about message sizes first, then the other graph files."""

    variables: dict[str, str]
    questions: list[Question]
    files: list[str]


def _asked_of(plan: Plan, name: ChoiceName) -> _Asked:
    """Return the questions about a choice; those that load graph files name them."""
    sizes = Question(gpus=plan.gpus, sizes=SIZES)
    variables = environment(plan.choices[name].settings)
    if name != "graph":
        return _Asked(variables, [sizes], [])
    texts, files = nccl_files(plan, Path()), graph_files(plan)
    if len(files) > MOST_FILES:
        files = {gpus: files[gpus] for gpus in {len(gpus): gpus for gpus in files}.values()}
    files = {plan.gpus: GRAPH_FILE, **files}
    asked = [Question(gpus=gpus, graph=texts[file]) for gpus, file in files.items()]
    return _Asked(variables, [replace(asked[0], sizes=SIZES), *asked[1:]], list(files.values()))


def with_answers(plan: Plan, rings: InstalledRings) -> Plan:
    """Return a plan with what the NCCL here says of it, if it can be asked.

    It tells its choices by message size, and whether it loads the graph files that jobs get.
    Raises MeasurementError: NCCL does not start with a graph file.
    """
    if not rings.able:
        return plan
    # Jobs of choices that fail may hang.
    asked = {name: _asked_of(plan, name) for name in compared_choices(plan)}
    answers: dict[ChoiceName, Sequence[NcclAnswer]] = {}
    for name, job in asked.items():
        if not job.files and (answer := rings.sized_answer(job.variables)):
            answers[name] = (answer,)
    open_jobs = {name: job for name, job in asked.items() if name not in answers}
    notices: list[str] = []
    try:
        jobs = [(job.variables, job.questions) for job in open_jobs.values()]
        if jobs:
            answers |= zip(open_jobs, ask_together(jobs, connect=False), strict=True)
    except MeasurementError:
        # One after another, so that the job and the file at fault are known.
        for name, job in open_jobs.items():
            try:
                answers[name] = ask_each(job.variables, job.questions, connect=False)
            except RefusedError as error:
                file = job.files[error.question]
                raise MeasurementError(
                    f"nccl/{file}: NCCL here does not start with it ({error.how}); no plan was "
                    "written"
                ) from error
            except MeasurementError as error:
                untried = any(of.files for choice, of in asked.items() if choice not in answers)
                tried = "; the graph files were not tried" if untried else ""
                notices.append(
                    "NCCL's choices by message size are computed, as the NCCL here fails: "
                    f"{error}{tried}"
                )
                break
    for name, found in answers.items():
        loaded = zip(asked[name].files, asked[name].questions, found, strict=False)
        for file, question, answer in loaded:
            verdict = verdict_on(answer, question.graph or "", where=f"nccl/{file}")
            if verdict.verdict != "used":
                words = f"{verdict.verdict} by the NCCL here: {verdict.reason}"
                notices.append(f"nccl/{file}: {words}")
    sizes = {
        name: SizeAnswer(settings=plan.choices[name].settings, rows=found[0].choices)
        for name, found in answers.items()
    }
    complete = sizes if sizes.keys() == asked.keys() else {}
    return replace(plan, sizes=complete, notices=(*plan.notices, *notices))


def verdict_here(
    text: str, gpus: Sequence[int] | None, variables: Mapping[str, str], *, where: str
) -> Verdict:
    """Return the verdict of the installed NCCL on a graph file over some GPUs (None: all).

    Raises InputError: no GPU, unknown ones, GPUs that others use, or no NCCL that starts.
    """
    try:
        count = gpu_count()
    except InputError as error:
        raise InputError("the NCCL here", f"cannot be asked: {error.what}", _DESCRIBED) from error
    chosen = tuple(range(count)) if gpus is None else tuple(gpus)
    if max(chosen) >= count:
        right = f"it has {', '.join(map(str, range(count)))}"
        raise InputError(f"GPU {max(chosen)}", "is not in this machine", right)
    try:
        why = why_not_asked(chosen)
        if not why:
            return judge_file(variables, chosen, text, where=where)
    except MeasurementError as error:
        why = str(error)
    raise InputError("the NCCL here", f"cannot be asked: {why}", _DESCRIBED)
