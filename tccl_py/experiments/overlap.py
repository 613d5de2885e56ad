"""`tccl overlap` as rows: sets of transfers, and transfers beside a GEMM."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError, require
from tccl_py.experiments.jobs import Arm, HostRanks, Launcher, LocalRunner, Outcome
from tccl_py.experiments.spec import Contest, JobSpec, Row
from tccl_py.model.rings import direct_write
from tccl_py.model.transfer import flow_texts, parse_flow
from tccl_py.nccl.settings import Settings
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.tasks import RanksError

Backend = Literal["nccl", "gloo"]
Pair = tuple[int, int]
"""A transfer between two of the job's GPUs, numbered from 0."""
Pairs = tuple[Pair, ...]
GEMM = Row(mode="gemm")
_PAIR = re.compile(r"^G([0-9]{1,4})->G([0-9]{1,4})$", re.ASCII)
_MOST_PAIRS = 8


def default_sets(places: int) -> tuple[Pairs, ...]:
    """Return sets of two pairs: both ways, one way twice; from 3 GPUs on out, in and through one.

    >>> [len(default_sets(places)) for places in (2, 3, 4)]
    [2, 5, 6]
    """
    chosen: list[Pairs] = [((0, 1), (1, 0)), ((0, 1), (0, 1))]
    if places > 2:
        chosen += [((0, 1), (0, 2)), ((1, 0), (2, 0)), ((1, 0), (0, 2))]
    if places > 3:
        chosen.append(((0, 1), (2, 3)))
    return tuple(chosen)


def parse_sets(texts: Sequence[str], gpus: Sequence[int]) -> tuple[Pairs, ...]:
    """Return sets such as `G0->G2 G0->G3`, by places in `gpus`.

    >>> parse_sets(["G4->G6"], (4, 6))
    (((0, 1),),)
    """
    parsed = []
    for text in texts:
        where, words = f"set {text[:60]!r}", flow_texts(text)
        right = f"1 to {_MOST_PAIRS}, as 'G0->G1 G2->G3'"
        require(1 <= len(words) <= _MOST_PAIRS, where, f"has {len(words)} pairs", right)
        parsed.append(tuple(_parse_pair(word, gpus, where) for word in words))
    return tuple(parsed)


def _parse_pair(word: str, gpus: Sequence[int], where: str) -> Pair:
    flow = parse_flow(_PAIR.sub(r"\1:\2", word))
    source, target = flow.source.index, flow.destination.index
    if str(flow) != str(direct_write(source, target)):
        raise InputError(where, f"has {word[:30]!r}", "write pairs of GPUs, as G0->G1 or 0:1")
    if unknown := [gpu for gpu in (source, target) if gpu not in gpus]:
        right = f"the job has {', '.join(map(str, gpus))}"
        raise InputError(where, f"names GPU {unknown[0]}", right)
    return gpus.index(source), gpus.index(target)


def rows_of_sets(
    sets: Sequence[Pairs], *, copies: bool, message_bytes: int, messages: int, repeats: int
) -> tuple[Row, ...]:
    """Return rows beside each other: each set of pairs, the first pair and a GEMM, an all-reduce.

    Pairs are messages between ranks or, by one process between all GPUs, `copies`.
    """
    mode = "copy" if copies else ""
    pair_row = Row(collective="send", dtype="uint8", bytes=message_bytes, mode=mode)
    rows = [[replace(pair_row, groups=(pair,)) for pair in pairs] for pairs in sets]
    rows += [[rows[0][0], GEMM]]
    rows += [] if copies else [[Row(bytes=message_bytes), GEMM]]
    contest = Contest(rounds=repeats, calls=messages)
    return tuple(replace(row, beside=tuple(beside), contest=contest) for row, *beside in rows)


def time_overlap(
    backend: Backend, gpus: Sequence[int], sets: tuple[Pairs, ...], *, timeout: float, **counts: int
) -> dict[str, Outcome]:
    """Run a job of messages and one of copies here; return both by what moved bytes.

    `counts` are as in `rows_of_sets`. Raises MeasurementError: a rank fails, or gets wrong bytes.
    """
    host = HostRanks(ranks=tuple(range(len(gpus))), gpus=tuple(gpus), environment=dict(os.environ))
    # NCCL's variables, and its file, are the caller's.
    keep = tuple(name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_")))
    variables = {"NCCL_CONF_FILE": os.environ.get("NCCL_CONF_FILE", "")}
    arm = Arm(name="default", variables=variables, settings=Settings())
    outcomes = dict[str, Outcome]()
    with ForkServer() as server:
        for by, ranks in ((backend, host.ranks), ("memcpy", (0,))):
            launcher = Launcher(
                backend="cuda" if backend == "nccl" else "host",
                hosts=(replace(host, ranks=ranks),),
                runner=LocalRunner(server),
                keep=keep,
                timeout=timeout,
            )
            spec = JobSpec(rows=rows_of_sets(sets, copies=by == "memcpy", **counts))
            try:
                (outcome,) = launcher.run([arm], spec)
            except RanksError as error:
                if error.late:
                    raise MeasurementError(f"{error}; raise `timeout`") from error
                raise
            wrong = [r.rank for r in outcome.results if any(times.fault for times in r.times)]
            if wrong:
                fault = f"gave rank {', '.join(map(str, wrong))} wrong bytes: times are void"
                raise MeasurementError(f"transfers by {by}: {fault}")
            outcomes[by] = outcome
    return outcomes
