"""Jobs of the installed NCCL whose values are compared, and what NCCL does in each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.model.links import JobProof, LinkVerdict
from tccl_py.nccl.asked import (
    NcclAnswer,
    failure_of,
    job_task,
    rank_environment,
    rank_logs,
    read_answer,
)
from tccl_py.nccl.communicators import Question
from tccl_py.nccl.values import SIZES, RankProof
from tccl_py.rank_processes.forkserver import remove_unused_segments
from tccl_py.rank_processes.rank import JobSlot
from tccl_py.rank_processes.tasks import RankOutput, RanksError, Task


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
        slots = iter(range(len(environments)))
        count = sum(compares for _, compares in environments)
        self._environments = [dict(variables) for variables, _ in environments]
        self._questions = [
            Question(
                gpus=tuple(gpus),
                sizes=() if variables else sizes,
                proof=JobSlot(number=next(slots), jobs=count, ranks=len(gpus))
                if compares
                else None,
            )
            for variables, compares in environments
        ]

    @property
    def tasks(self) -> list[Task]:
        """The task of each job's ranks. They use the first time slots of those run together."""
        return [
            job_task(rank_environment(variables, connect=True), [question])
            for variables, question in zip(self._environments, self._questions, strict=True)
        ]

    def results(self, outputs: Sequence[RankOutput | RanksError], begun: float) -> list[AskedJob]:
        """Return what each job showed; remove what jobs that failed since `begun` left behind."""
        told = zip(self._environments, self._questions, outputs, strict=True)
        jobs = [_job(variables, question, output) for variables, question, output in told]
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
