"""The installed NCCL: its version, and its rings on this machine's GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.links import PairProof
from tccl_py.nccl.asked import (
    MOST_RANKS,
    AskedJob,
    InstalledRings,
    JobsProof,
    NcclAnswer,
    RefusedError,
    ask_each,
    ask_together,
    judge_file,
    verdict_on,
)
from tccl_py.nccl.communicators import Question
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.transport import TRANSPORTS, candidates, pair_mechanism
from tccl_py.nccl.validator import Verdict
from tccl_py.nccl.versions import ASSUMED
from tccl_py.nccl.view import view
from tccl_py.nccl_conf import HOST_FILE, why_no_default
from tccl_py.nccl_library import InstalledNccl, installed_nccl
from tccl_py.plan.chains import ChoiceName, SizeAnswer
from tccl_py.plan.directory import graph_files, nccl_files
from tccl_py.plan.machine_files import GRAPH_FILE
from tccl_py.plan.plan import Plan
from tccl_py.plan.size_choices import SIZES, compared_choices
from tccl_py.planning.request import of_transports
from tccl_py.rank_processes.tasks import run_each
from tccl_py.readers.live import check_cupy, gpu_count
from tccl_py.sources.links import LinksProof, why_no_kernels
from tccl_py.sources.profiled import MeasuredMachine, several_processes_may_use, users_of

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


CONTROL: dict[str, str] = {"NCCL_P2P_DISABLE": "1"}


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of links, before it is judged."""

    pairs: tuple[PairProof, ...] = ()
    jobs: tuple[AskedJob, ...] = ()
    unable: str = ""
    """Why nothing can be proven, as who uses the GPUs; "" if something was."""
    notices: tuple[str, ...] = ()
    """What else failed, a sentence each."""


def gather_evidence(
    place: MeasuredMachine,
    gpus: Sequence[int],
    version: str | None,
    withheld: Collection[tuple[int, int]] = (),
    *,
    measures: bool = False,
    alone: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> Evidence:
    """Prove the links between GPUs of this host, each part in processes that are ended.

    Args:
        place: this host's machine.
        gpus: those whose links are proven, two or more.
        version: of the NCCL here as rules have it; None: there is none.
        withheld: ordered pairs that are not tried, nor any job of NCCL that would use them.
        measures: whether kernels are needed afterwards, too (InputError: cupy is missing).
        alone: once more, and no job of NCCL runs beside the kernels, which may slow it.
        ready: is called when other processes on the GPUs may start, unless it was before.

    Kernels prove each granted pair by itself. Jobs of NCCL compare values: the control without P2P
    first, then what the farthest level adds, then default NCCL. The same jobs, and one for each
    further way in which settings join the GPUs, tell what NCCL does there.
    """
    if measures:
        check_cupy()
    if not alone and (why := why_not_asked(gpus)):
        return Evidence(unable=why)
    machine, knowledge = place.machine, place.knowledge
    granted = [
        pair
        for pair in permutations(gpus, 2)
        if knowledge.can_access(machine, *pair) and pair not in withheld
    ]
    notices = []
    kernels: LinksProof | None = None
    if granted and (why := why_no_kernels()):
        notices.append(f"pairs of GPUs were not proven by kernels: {why}")
    elif granted:
        kernels = LinksProof(machine, gpus, granted)
    jobs: list[JobsProof] = []
    shared = several_processes_may_use(gpus)
    if why := "none was found here" if version is None else why_no_default():
        notices.append(f"NCCL was not run: {why}")
    else:
        wanted = _environments(place, gpus, version or "", withheld)
        # Beside the kernels' ranks.
        most = max(1, MOST_RANKS // len(gpus) - 1) if shared else 1
        parts = [wanted[at : at + most] for at in range(0, len(wanted), most)]
        jobs = [JobsProof(gpus, part, sizes=SIZES) for part in parts]
    if jobs and shared and not alone:
        ready()
    # 1. Kernels prove pairs while NCCL starts, where several processes may use a GPU.
    pairs: tuple[PairProof, ...] = ()
    answers: list[AskedJob] = []
    begun = time.time()
    if kernels is not None:
        beside = jobs[:1] if shared and not alone else []
        tasks = [task for part in beside for task in part.tasks]
        *outputs, output = run_each([*tasks, kernels.task])
        pairs, error = kernels.results(output)
        if error:
            notices.append(f"the proof by kernels ended early: {error}")
        answers += [job for part in beside for job in part.results(outputs, begun)]
        jobs = jobs[len(beside) :]
    # 2. The other jobs of NCCL.
    for part in jobs:
        answers += part.results(run_each(part.tasks), begun)
    return Evidence(pairs=pairs, jobs=tuple(answers), notices=tuple(notices))


def _environments(
    place: MeasuredMachine,
    gpus: Sequence[int],
    version: str,
    withheld: Collection[tuple[int, int]],
) -> list[tuple[Mapping[str, str], bool]]:
    """Return the variables of the jobs, and whether each compares values."""
    kinds = candidates(place.machine, place.knowledge, version, gpus=gpus)
    plain = Settings(version=version)
    wanted: dict[tuple[tuple[str, str], ...], frozenset[tuple[int, int]]] = {}
    for settings in (plain, *map(of_transports, kinds)):
        topo = view(place.machine, place.knowledge, settings, gpus=gpus)
        uses = frozenset(
            pair
            for pair in permutations(gpus, 2)
            if TRANSPORTS[pair_mechanism(topo, *pair)] == "P2P"
        )
        if not uses & set(withheld):
            wanted[tuple(environment(settings).items())] = uses
    default = wanted.get((), frozenset())
    compared = [CONTROL]
    # What plans recommend where default NCCL takes P2P for nearer pairs alone.
    farthest = max(wanted, key=lambda items: len(wanted[items]), default=())
    if len(wanted.get(farthest, ())) > len(default):
        compared.append(dict(farthest))
    if () in wanted:
        compared.append({})
    others = [dict(items) for items in wanted if dict(items) not in compared]
    return [*((of, True) for of in compared), *((of, False) for of in others)]
