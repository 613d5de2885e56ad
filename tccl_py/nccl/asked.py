"""The installed NCCL's rings and verdicts on this machine's GPUs, from a run with a rank a GPU.

NCCL takes seconds to make a communicator. Its log and its dump then show rings, channels, types and
transports, and whether it loads a graph file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import get_args

import msgspec

from tccl_py.errors import InputError, MeasurementError, spell
from tccl_py.files import encode_json
from tccl_py.model.links import JobProof, LinkVerdict
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.rings import neighbours
from tccl_py.nccl.communicators import (
    SIZES,
    CommunicatorLog,
    CommunicatorsSpec,
    Question,
    RankProof,
    RankResult,
    logged_choices,
    parse_log,
    same_rings,
    transport_of,
)
from tccl_py.nccl.graph_file import Graph, parse_graph_file
from tccl_py.nccl.graph_search import DefaultRings, default_rings
from tccl_py.nccl.settings import Settings, environment, environment_text, shell_text
from tccl_py.nccl.transport import TRANSPORTS, pair_mechanism
from tccl_py.nccl.tuner import SizeChoice
from tccl_py.nccl.validator import Verdict, VerdictKind
from tccl_py.nccl.variables import HOST_VARIABLES
from tccl_py.nccl.versions import RING
from tccl_py.nccl.view import NcclView, view
from tccl_py.rank_processes.forkserver import remove_unused_segments
from tccl_py.rank_processes.rank import JobSlot
from tccl_py.rank_processes.tasks import RankOutput, RanksError, Task, decode_results, run_tasks

PROGRAM = "tccl_py.nccl.communicators"
TIMEOUT_S, _EACH_S = 60.0, 10.0
"""Seconds for the first communicator, and for each further one."""
_LOGGED = "INIT,GRAPH,ENV,P2P,SHM,NET,TUNING"
_FALLBACK = re.compile(r"Could not find a path for pattern 4, falling back to simple order")
_NUMBERED = re.compile(r"(?:error: )?communicator (?P<number>\d{1,6})(?:: (?P<words>.*))?")
_SPEED = 0.01
_SHOWN = 3
MOST_RANKS = 32
"""Processes that ask NCCL at the same time at most: each takes memory of its GPU and host."""


class NcclAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One communicator of the installed NCCL."""

    version: str
    gpus: tuple[int, ...]
    rings: tuple[tuple[int, ...], ...]
    """Each final channel's GPU order."""
    graph: Graph
    """The ring graph searched or loaded, before channels are doubled."""
    via: Mapping[tuple[int, int], str]
    """NCCL's name (`P2P/CUMEM`) for each hop of the rings; nothing without connections."""
    fallback: bool
    """Whether NCCL took its simple order."""
    choices: tuple[SizeChoice, ...] = ()
    """Those of the collectives that ran."""


class RefusedError(MeasurementError):
    """NCCL does not start with the graph file of question number `question`, but without it.

    `how` is NCCL's message; `crash` is true if a process crashed or never ended.
    """

    def __init__(self, question: int, how: str, *, crash: bool) -> None:
        super().__init__(f"NCCL does not start with the graph file: {how}")
        self.question, self.how, self.crash = question, how, crash


def ask_nccl(
    variables: Mapping[str, str], gpus: Sequence[int], *, graph: str | None = None
) -> NcclAnswer:
    """Return the installed NCCL's answer for one communicator; see `ask_each`."""
    return ask_each(variables, [Question(gpus=tuple(gpus), graph=graph)])[0]


def ask_each(
    variables: Mapping[str, str], questions: Sequence[Question], *, connect: bool = True
) -> tuple[NcclAnswer, ...]:
    """Return the installed NCCL's answer for each communicator, made one after another.

    Each process takes some 0.5 GiB of its GPU, and the largest of its questions' sizes. `variables`
    replace the caller's; `connect` shows transports and takes longer. Raises RefusedError: a graph
    file keeps NCCL from starting. MeasurementError: NCCL cannot be asked: no library, no GPU, or it
    fails or hangs.
    """
    rank_variables = rank_environment(variables, connect=connect)
    try:
        (output,) = run_tasks([job_task(rank_variables, questions)])
        return _answers(output, questions)
    except RanksError as error:
        failed = _NUMBERED.match(error.said)
        how = failure_of(error)
        # After a crash without a number, any of several files may be at fault.
        number = int(failed["number"]) if failed is not None else len(questions) - 1
        unknown = failed is None and len(questions) > 1
        if unknown or questions[number].graph is None:
            raise MeasurementError(how) from error
        # The file is at fault only if NCCL starts without it.
        try:
            run_questions(rank_variables, [Question(gpus=questions[number].gpus)])
        except RanksError as again:
            raise MeasurementError(failure_of(again)) from again
        crash = error.late or "killed by signal" in error.what
        raise RefusedError(number, how, crash=crash) from error


def rank_environment(variables: Mapping[str, str], *, connect: bool) -> dict[str, str]:
    """Return the environment of the ranks: the caller's without its NCCL settings."""
    host = (n for n in os.environ if n in HOST_VARIABLES or not n.startswith("NCCL_"))
    inherited = {name: os.environ[name] for name in host}
    # /etc/nccl.conf holds for every job; a user's own file does not.
    inherited["NCCL_CONF_FILE"] = "/dev/null"
    inherited |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": _LOGGED}
    return {**inherited, **({"NCCL_RUNTIME_CONNECT": "0"} if connect else {}), **variables}


def ask_together(
    jobs: Sequence[tuple[Mapping[str, str], Sequence[Question]]],
    *,
    connect: bool = True,
) -> tuple[tuple[NcclAnswer, ...], ...]:
    """Return the installed NCCL's answers under several variables, in jobs at the same time.

    The job with most questions is parted where there is room for more processes. Raises
    MeasurementError: NCCL cannot be asked, or not by so many processes.
    """
    counts = [len(asked) for _, asked in jobs]
    sizes = [len(_gpus_of(asked)) for _, asked in jobs]
    if (ranks := sum(sizes)) > MOST_RANKS:
        raise MeasurementError(f"{ranks} processes at the same time are more than {MOST_RANKS}")
    longest = counts.index(max(counts))
    room = 1 + (MOST_RANKS - ranks) // sizes[longest]
    steps = [-(-n // room) if job == longest else n for job, n in enumerate(counts)]
    parts = [
        (job, jobs[job][1][at : at + step])
        for job, step in enumerate(steps)
        for at in range(0, counts[job], step)
    ]
    tasks = [job_task(rank_environment(jobs[job][0], connect=connect), part) for job, part in parts]
    # Jobs share the host's cores, and the longest timeout holds for all of them.
    longer = msgspec.structs.replace(tasks[0], timeout=TIMEOUT_S + _EACH_S * (sum(counts) - 1))
    answers: list[list[NcclAnswer]] = [[] for _ in jobs]
    outputs = run_tasks([longer, *tasks[1:]])
    for (job, part), output in zip(parts, outputs, strict=True):
        answers[job] += _answers(output, part)
    return tuple(map(tuple, answers))


def _gpus_of(questions: Sequence[Question]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(gpu for question in questions for gpu in question.gpus))


def job_task(environment: Mapping[str, str], questions: Sequence[Question]) -> Task:
    """Return the task of ranks that make communicators, in this whole environment."""
    spec = CommunicatorsSpec(gpus=_gpus_of(questions), questions=tuple(questions))
    return Task(
        program=PROGRAM,
        spec=encode_json(spec),
        ranks=tuple(range(len(spec.gpus))),
        environment=dict(environment),
        timeout=TIMEOUT_S + _EACH_S * (len(questions) - 1),
    )


def run_questions(
    environment: Mapping[str, str], questions: Sequence[Question]
) -> tuple[str, list[list[CommunicatorLog]]]:
    """Make the communicators; return NCCL's version, and each one's logs by rank.

    Raises RanksError: NCCL fails, or hangs.
    """
    (output,) = run_tasks([job_task(environment, questions)])
    return rank_logs(output, questions)


def rank_logs(
    output: RankOutput, questions: Sequence[Question]
) -> tuple[str, list[list[CommunicatorLog]]]:
    """Return NCCL's version, and of each question the logs of its ranks."""
    gpus = _gpus_of(questions)
    results = decode_results(output, range(len(gpus)), RankResult)
    logs = [
        [results[gpus.index(gpu)].logs[number] for gpu in question.gpus]
        for number, question in enumerate(questions)
    ]
    return results[0].version, logs


def _answers(output: RankOutput, questions: Sequence[Question]) -> tuple[NcclAnswer, ...]:
    version, logs = rank_logs(output, questions)
    return tuple(
        read_answer(question, of, version) for question, of in zip(questions, logs, strict=True)
    )


def read_answer(question: Question, logs: Sequence[CommunicatorLog], version: str) -> NcclAnswer:
    """Return an answer from the logs of ranks, rank 0's first; MeasurementError: incomplete."""
    gpus, text = question.gpus, "\n".join(rank.log for rank in logs)
    try:
        log = parse_log(text, where="NCCL's log")
        dump = parse_graph_file(logs[0].dump, where="NCCL's graph dump", version=version)
    except InputError as error:
        raise MeasurementError(f"NCCL cannot be asked: {error}") from error
    ranks, graph = log.rings_over(len(gpus)), dump.get(RING)
    if not ranks or graph is None:
        raise MeasurementError("NCCL cannot be asked: its log or graph dump shows no rings")
    rings = tuple(tuple(gpus[rank] for rank in ring) for ring in ranks)
    hops = {hop for ring in rings for hop in neighbours(ring)}
    via = {
        (gpus[link.source], gpus[link.target]): link.via
        for link in log.connections
        if max(link.source, link.target) < len(gpus)
    }
    return NcclAnswer(
        version=version,
        gpus=gpus,
        rings=rings,
        graph=graph,
        via={hop: via[hop] for hop in sorted(hops & via.keys())},
        fallback=_FALLBACK.search(text) is not None,
        choices=logged_choices(question, logs[0].log),
    )


def failure_of(error: RanksError) -> str:
    """Return NCCL's words of failed ranks, or what happened to them."""
    numbered = _NUMBERED.match(error.said)
    words = (numbered["words"] or "") if numbered else error.said.removeprefix("error: ")
    if words and error.what.endswith("code 1"):
        return words
    failure = f"rank {', '.join(map(str, error.ranks))} of NCCL {error.what}"
    return f"{failure}: {words}" if words else failure


# Jobs whose values are compared, each of which may fail by itself.
class AskedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of default NCCL or under variables: what its values showed, and NCCL's answer."""

    environment: dict[str, str]
    proof: JobProof | None = None
    """None where nothing was compared."""
    answer: NcclAnswer | None = None
    """None where it did not come to its end, or is not sound."""
    why: str = ""
    """Why there is no answer."""


class JobsProof:
    """Jobs of the installed NCCL over GPUs at the same time, each of which may fail by itself."""

    def __init__(
        self,
        gpus: Sequence[int],
        environments: Sequence[tuple[Mapping[str, str], bool]],
        *,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """Take the jobs.

        Args:
            gpus: in rank order.
            environments: NCCL's variables of each job, and whether its values are compared. Those
                with compared values take turns in this order, and the control comes first: others
                may hang.
            sizes: bytes of messages for which the job without variables tells NCCL's choices.
        """
        count = sum(compares for _, compares in environments)
        slots = (JobSlot(number=number, jobs=count, ranks=len(gpus)) for number in range(count))
        self._jobs = [
            (
                dict(variables),
                Question(
                    gpus=tuple(gpus),
                    sizes=() if variables else sizes,
                    proof=next(slots) if compares else None,
                ),
            )
            for variables, compares in environments
        ]

    @property
    def tasks(self) -> list[Task]:
        """The task of each job's ranks. They use the first time slots of those run together."""
        return [job_task(rank_environment(of, connect=True), [asked]) for of, asked in self._jobs]

    def results(self, outputs: Sequence[RankOutput | RanksError], begun: float) -> list[AskedJob]:
        """Return what each job showed; remove what jobs that failed since `begun` left behind."""
        jobs = [_job(*job, output) for job, output in zip(self._jobs, outputs, strict=True)]
        if any(job.proof is not None and job.proof.verdict == "fails" for job in jobs):
            remove_unused_segments(begun)
        return jobs


def _job(
    environment: dict[str, str], question: Question, output: RankOutput | RanksError
) -> AskedJob:
    if isinstance(output, RanksError):
        verdict: LinkVerdict = "hangs" if output.late else "fails"
        why = failure_of(output)
        failed = JobProof(environment=environment, verdict=verdict, seconds=0.0, what=why)
        seen = failed if question.proof is not None else None
        return AskedJob(environment=environment, proof=seen, why=why)
    version, (logs,) = rank_logs(output, [question])
    proof = _worst(environment, [log.proof for log in logs if log.proof is not None])
    if proof is not None and proof.verdict != "sound":
        return AskedJob(environment=environment, proof=proof, why=proof.what)
    try:
        answer = read_answer(question, logs, version)
    except MeasurementError as error:
        return AskedJob(environment=environment, proof=proof, why=str(error))
    return AskedJob(environment=environment, proof=proof, answer=answer)


def _worst(environment: dict[str, str], ranks: Sequence[RankProof]) -> JobProof | None:
    """Return what the ranks of a job saw: the worst verdict, and the rates of its slowest ranks."""
    if not ranks:
        return None
    order = ("hangs", "wrong values", "fails", *get_args(LinkVerdict))
    worst = min(ranks, key=lambda rank: order.index(rank.verdict))
    bus_bytes = 2 * (len(ranks) - 1) / len(ranks) * SIZES[-1]
    repeats = zip(*(rank.repeats for rank in ranks), strict=False)
    return JobProof(
        environment=environment,
        verdict=worst.verdict,
        what=worst.what,
        seconds=max(rank.seconds for rank in ranks),
        gbps=tuple(bus_bytes / max(times) / 1e9 for times in repeats),
    )


# Verdicts on graph files.
def judge_file(
    variables: Mapping[str, str], gpus: Sequence[int], text: str, *, where: str
) -> Verdict:
    """Return the installed NCCL's verdict on a file; MeasurementError: it cannot be asked."""
    try:
        answer = ask_nccl(variables, gpus, graph=text)
    except RefusedError as error:
        return Verdict(verdict="crash" if error.crash else "rejected", reason=error.how)
    return verdict_on(answer, text, where=where)


def verdict_on(answer: NcclAnswer, text: str, *, where: str) -> Verdict:
    """Return the verdict on a graph file with which NCCL started; rings are rank orders."""
    rings = tuple(tuple(answer.gpus.index(gpu) for gpu in ring) for ring in answer.rings)
    name, final = f"NCCL {answer.version}", len(answer.rings)

    def verdict(kind: VerdictKind, reason: str) -> Verdict:
        return Verdict(verdict=kind, reason=reason, rings=rings)

    file = parse_graph_file(text, where=where, version=answer.version).get(RING)
    if file is None or file.nchannels < 1:
        return verdict("ignored", f"the file has no channels of graph {RING}: {name} searches")
    count, orders, loaded = file.nchannels, file.orders, answer.graph
    loaded_as_written = (loaded.nchannels, loaded.orders, len(orders)) == (count, orders, count)
    if not loaded_as_written or abs(loaded.speedintra - file.speedintra) > _SPEED * file.speedintra:
        return verdict("ignored", f"{name} took other rings than the file's: it searched")
    as_written = all(same_rings(r, orders[n % count]) for n, r in enumerate(answer.rings))
    if not as_written or final < count:
        reason = f"{name} loads the file's {spell(count, 'channel')}, and runs {final} other ones"
        return verdict("clipped", reason)
    channels = f"{spell(count, 'channel')} of the file"
    return verdict("used", f"{channels}, {final} in {name}")


# Default NCCL's rings, by the installed NCCL or by its rules.
class InstalledRings:
    """Default NCCL's rings under settings: the emulation's choice, corrected by the installed NCCL.

    NCCL is asked once for each choice of settings. Under the first one, collectives of `sizes`
    bytes run as well, if that goes well. `notices` tell where the two differ, or why NCCL
    was not asked; `able` is whether it can be asked.
    """

    def __init__(
        self,
        machine: Machine,
        knowledge: Knowledge,
        gpus: Sequence[int],
        *,
        sizes: tuple[int, ...] = (),
    ) -> None:
        self.notices: list[str] = []
        self._machine, self._knowledge, self._gpus = machine, knowledge, tuple(gpus)
        self._sizes = sizes
        self.able = True
        self._rings: dict[Settings, DefaultRings] = {}
        # By the variables, as text; of jobs that failed None.
        self._answers: dict[str, NcclAnswer | None] = {}

    def learn(self, variables: Mapping[str, str], answer: NcclAnswer | None) -> None:
        """Take NCCL's answer of an earlier job under variables; None: it failed, ask no more."""
        self._answers[shell_text(variables)] = answer
        if answer is not None and answer.choices:
            self._sizes = ()

    def __call__(self, choices: Sequence[Settings]) -> list[DefaultRings]:
        """Return default NCCL's choice under each of several settings of transports."""
        new = [key for key in dict.fromkeys(choices) if key not in self._rings]
        self._ask_together([key for key in new if environment_text(key) not in self._answers])
        for settings in new:
            topo = view(self._machine, self._knowledge, settings, gpus=self._gpus)
            rings, answer = default_rings(topo), self._answer(settings) if self.able else None
            self._rings[settings] = self._correct(rings, answer, topo) if answer else rings
        return [self._rings[settings] for settings in choices]

    def _ask_together(self, choices: Sequence[Settings]) -> None:
        """Ask NCCL at the same time under several settings; those that fail are asked later."""
        most = max(1, MOST_RANKS // len(self._gpus))
        for at in range(0, len(choices), most):
            part = choices[at : at + most]
            # A single question can wait until it is needed, unless collectives run with it.
            if not self.able or (len(part) < 2 and not self._sizes):
                return
            jobs = [(environment(settings), [Question(gpus=self._gpus)]) for settings in part]
            jobs[0][1][0] = Question(gpus=self._gpus, sizes=self._sizes)
            self._sizes = ()
            try:
                answers = ask_together(jobs)
            except MeasurementError:
                return
            for (variables, _), (answer,) in zip(jobs, answers, strict=True):
                self.learn(variables, answer)

    def sized_answer(self, variables: Mapping[str, str]) -> NcclAnswer | None:
        """Return NCCL's answer under variables, if collectives ran there."""
        answer = self._answers.get(shell_text(variables))
        return answer if answer is not None and answer.choices else None

    def unable(self, why: str) -> None:
        """Stop asking, and add a notice with the reason."""
        self.able = False
        self.notices.append(
            "the NCCL here was asked neither for its own rings, which are computed by its rules, "
            f"nor to load a graph file: {why}"
        )

    def _answer(self, settings: Settings) -> NcclAnswer | None:
        key = environment_text(settings)
        if key not in self._answers:
            try:
                self._answers[key] = ask_nccl(environment(settings), self._gpus)
            except MeasurementError as error:
                self.unable(str(error))
                return None
        answer = self._answers[key]
        # The first two numbers decide NCCL's behaviour.
        if answer and answer.version.split(".")[:2] != settings.version.split(".")[:2]:
            self.unable(f"it is {answer.version}, and the plan is for {settings.version}")
            return None
        return answer

    def _correct(self, emulated: DefaultRings, answer: NcclAnswer, topo: NcclView) -> DefaultRings:
        named = environment_text(topo.settings) or "its defaults"
        under = f"NCCL {answer.version} with {named}"
        self._compare_transports(answer, topo, under)
        # Final channels are the searched channels twice, and no more than the tree has.
        rings = answer.rings[: max(1, len(answer.rings) // 2)]
        expected = emulated.rings[: max(1, emulated.channels // 2)]
        if (
            len(rings) == len(expected)
            and all(map(same_rings, rings, expected))
            and (len(answer.rings), answer.fallback) == (emulated.channels, emulated.fallback)
        ):
            return emulated
        runs = ring_words(answer.rings, fallback=answer.fallback)
        rules = ring_words(expected, fallback=emulated.fallback, channels=emulated.channels)
        self.notices.append(
            f"{under} runs {runs}, and its rules as tccl has them give {rules}: the plan takes "
            "what it runs"
        )
        return msgspec.structs.replace(
            emulated,
            rings=rings,
            channels=len(answer.rings),
            fallback=answer.fallback,
        )

    def _compare_transports(self, answer: NcclAnswer, topo: NcclView, under: str) -> None:
        different = [
            f"GPU {hop[0]} -> {hop[1]} by {via}, not {expected}"
            for hop, via in answer.via.items()
            if transport_of(via) != (expected := TRANSPORTS[pair_mechanism(topo, *hop)])
        ]
        if different:
            count = len(different)
            more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
            shown = ", ".join(different[:_SHOWN])
            self.notices.append(f"{under} connects {shown}{more}: rates are of the latter")


def ring_words(
    rings: Sequence[tuple[int, ...]], *, fallback: bool, channels: int | None = None
) -> str:
    """Return final channels (None: as many as rings) and distinct rings as text."""
    distinct: list[tuple[int, ...]] = []
    for ring in rings:
        if not any(same_rings(ring, earlier) for earlier in distinct):
            distinct.append(ring)
    shown = ", ".join(" ".join(map(str, ring)) for ring in distinct[:_SHOWN])
    more = ", ..." if len(distinct) > _SHOWN else ""
    order = " in its simple order" if fallback else ""
    return f"{spell(channels or len(rings), 'channel')} over {shown}{more}{order}"
