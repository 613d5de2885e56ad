"""The installed NCCL: its version, and its rings on this machine's GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError
from tccl_py.nccl.asked import (
    InstalledRings,
    NcclAnswer,
    RefusedError,
    ask_each,
    ask_nccl,
    judged,
    verdict_on,
)
from tccl_py.nccl.communicators import Question
from tccl_py.nccl.settings import environment
from tccl_py.nccl.validator import Verdict
from tccl_py.nccl.versions import ASSUMED
from tccl_py.nccl_library import InstalledNccl, installed_nccl
from tccl_py.plan.chains import ChoiceName, SizeAnswer
from tccl_py.plan.directory import graph_files, nccl_files
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


def rings_here(place: MeasuredMachine, gpus: Sequence[int] | None) -> InstalledRings | None:
    """Return the reader of the installed NCCL's own rings; None where no NCCL runs."""
    if place.backend != "cuda":
        return None
    chosen = place.machine.gpu_indices if gpus is None else tuple(sorted(gpus))
    rings = InstalledRings(place.machine, place.knowledge, chosen)
    why = why_not_asked(chosen)
    if why:
        rings.unable(why)
    return rings


def graph_file_notices(plan: Plan, rings: InstalledRings) -> tuple[str, ...]:
    """Load the graph files that jobs get in the NCCL here, if it can be asked; return notices.

    Raises MeasurementError: NCCL does not start with a graph file.
    """
    if not rings.able or plan.recommended != "graph":
        return ()
    files = graph_files(plan)
    if len(files) > MOST_FILES:
        files = {gpus: files[gpus] for gpus in {len(gpus): gpus for gpus in files}.values()}
    texts = nccl_files(plan, Path())
    questions = [Question(gpus=gpus, graph=texts[name]) for gpus, name in files.items()]
    variables = environment(plan.settings)
    try:
        answers = ask_each(variables, questions, connect=False)
    except RefusedError as error:
        name = list(files.values())[error.question]
        raise MeasurementError(
            f"nccl/{name}: NCCL here does not start with it ({error.how}); no plan was written"
        ) from error
    except MeasurementError as error:
        return (f"the graph files were not tried in the NCCL here: {error}",)
    notices = []
    for name, answer in zip(files.values(), answers, strict=True):
        verdict = verdict_on(answer, texts[name], where=f"nccl/{name}")
        if verdict.verdict != "used":
            notices.append(f"nccl/{name}: {verdict.verdict} by the NCCL here: {verdict.reason}")
    return tuple(notices)


def with_sizes(plan: Plan, rings: InstalledRings) -> Plan:
    """Return a plan with the choices by message size of the NCCL here, if it can be asked."""
    if not rings.able:
        return plan
    sizes: dict[ChoiceName, SizeAnswer] = {}
    for name in compared_choices(plan):
        graph = nccl_files(plan, Path())["graph.xml"] if name == "graph" else None
        question = Question(gpus=plan.gpus, graph=graph, sizes=SIZES)
        settings = plan.choices[name].settings
        try:
            (answer,) = ask_each(environment(settings), [question], connect=False)
        except MeasurementError as error:
            notice = f"NCCL's choices by message size are computed, as the NCCL here fails: {error}"
            return replace(plan, notices=(*plan.notices, notice))
        sizes[name] = SizeAnswer(settings=settings, rows=answer.choices)
    return replace(plan, sizes=sizes)


def asked_here(gpus: Sequence[int]) -> NcclAnswer | str:
    """Return default NCCL's rings over GPUs of this machine, or why it was not asked."""
    try:
        return why_not_asked(gpus) or ask_nccl({}, gpus)
    except MeasurementError as error:
        return str(error)


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
            return judged(variables, chosen, text, where=where)
    except MeasurementError as error:
        why = str(error)
    raise InputError("the NCCL here", f"cannot be asked: {why}", _DESCRIBED)
