"""A trial of the plugin with an NCCL newer than those known: communicators on this host's GPUs.

The plugin relies on some things that NCCL does not promise, and finds most failures at run time. A
trial sees them before a job does, in NCCL's log: over a set of GPUs that the plan gives something,
over one that it does not, over the largest set, and over the first one again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from tccl_py.errors import MeasurementError
from tccl_py.files import read_text
from tccl_py.nccl.asked import rank_environment, read_answer, run_questions, verdict_on
from tccl_py.nccl.communicators import CommunicatorLog, Question
from tccl_py.nccl.plugin.index import INDEX_VARIABLE, Indexed, read_index
from tccl_py.nccl.versions import NEWER_VARIABLE
from tccl_py.planning.installed_nccl import why_not_asked

_READ = re.compile(r"(NCCL_[A-Z0-9_]{1,59}) set by environment to (\S{1,200}?)\.?$", re.MULTILINE)


def try_plugin(variables: Mapping[str, str], nccl: str) -> str:
    """Try the plugin that these variables load, with the installed NCCL; return its version.

    Raises MeasurementError: a check fails, or the trial cannot be made here.
    """
    if INDEX_VARIABLE not in variables:
        raise MeasurementError("a job over several hosts cannot be tried on one")
    index = read_index(Path(variables[INDEX_VARIABLE]))
    if not index.sets or (why := why_not_asked(index.gpus)):
        raise MeasurementError(why if index.sets else "the plan gives no set of GPUs anything")
    questions = [Question(gpus=gpus) for gpus in communicators(index)]
    environment = rank_environment({**variables, NEWER_VARIABLE: nccl}, connect=False)
    version, logs = run_questions(environment, questions)
    for question, of_ranks in zip(questions, logs, strict=True):
        for why in complaints(index, question, of_ranks, version):
            gpus = ",".join(map(str, question.gpus))
            raise MeasurementError(f"in a communicator over GPUs {gpus} {why}")
    return version


def communicators(index: Indexed) -> list[tuple[int, ...]]:
    """Return the GPUs of the communicators of a trial, in order."""
    by_size = sorted(index.sets, key=len)
    others = (pair for pair in combinations(index.gpus, 2) if pair not in index.sets)
    return [by_size[0], *list(others)[:1], by_size[-1], by_size[0]]


def complaints(
    index: Indexed, question: Question, logs: Sequence[CommunicatorLog], version: str
) -> Iterator[str]:
    """Yield what a communicator got otherwise than planned, as clauses."""
    gpus, file = question.gpus, index.sets.get(question.gpus, "")
    named = {"": "default NCCL: ", "-": "variables of "}.get(file, f"graph file {file} of ")
    given = index.given if file else {}
    for rank, log in enumerate(log.log for log in logs):
        if f"tccl: rank {rank} of {len(gpus)}: {named}" not in log:
            said = re.search(r"tccl: .{1,200}", log)
            yield f"the plugin says '{said[0] if said else ''}', and not '{named.rstrip(': ')}'"
        read = {name: value for name, value in _READ.findall(log) if name in index.given}
        if read != given:
            yield f"NCCL reads {read or 'no variables'}, and not {given or 'none'}"
        if (": tuned by " in log) != (gpus in index.tuned):
            yield f"NCCL asks {'the' if gpus not in index.tuned else 'no'} tuner"
    answer = read_answer(question, logs, version)
    if file not in ("", "-"):
        verdict = verdict_on(answer, read_text(index.folder / file), where=file)
        if verdict.verdict != "used":
            yield verdict.reason
