"""`tccl overlap` as rows: sets of transfers, and transfers beside a GEMM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from tccl_py.errors import MeasurementError
from tccl_py.experiments.jobs import Arm, HostRanks, Launcher, LocalRunner, Outcome
from tccl_py.experiments.spec import Contest, JobSpec, Row
from tccl_py.nccl.settings import Settings
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.tasks import RanksError

Backend = Literal["nccl", "gloo"]
Pair = tuple[int, int]
"""A transfer between two of the job's GPUs, numbered from 0."""
Pairs = tuple[Pair, ...]
GEMM = Row(mode="gemm")


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
