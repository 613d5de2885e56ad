"""Means compared: rows by each of them in jobs of its own, and the best one by message size."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, permutations
from statistics import geometric_mean, median
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from tccl_py.errors import MeasurementError, require
from tccl_py.experiments.collectives import COLLECTIVE_WORDS, Collective
from tccl_py.experiments.comparison import row_seconds
from tccl_py.experiments.jobs import Arm, Launcher, Outcome, round_order
from tccl_py.experiments.means import HANGS, MEANS, NCCL, Means
from tccl_py.experiments.spec import GEMM, KIB, MIB, Groups, JobSpec, Row, RowTimes, rows_of
from tccl_py.experiments.target import Target
from tccl_py.experiments.trade_offs import at_size
from tccl_py.files import pick, says
from tccl_py.model.measurement import Backend
from tccl_py.plan.chains import sender_nodes
from tccl_py.plan.results import Kept, ProvenLinks
from tccl_py.plan.text import plan_name
from tccl_py.rank_processes.tasks import RanksError
from tccl_py.workloads.bundled import BUNDLED, load_bundled

ROUNDS = 3
DEADLINE_S = 60.0
"""Of a job: one of all rows takes 10 to 20 s, and one that hangs may not take much longer."""
AFTER_HANG_S = 3.0
AS_GOOD = 0.02
"""A means has to beat default NCCL by this share."""
_LARGEST_DRY = MIB

Span = tuple[float, float]


class MeansRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row by each means: many calls back to back."""

    collective: Collective
    bytes: int
    mode: Annotated[str, says("`graph` of a CUDA graph, or `eager`")]
    beside_gemm: bool
    groups: Annotated[Groups, says("ranks that send to each other; none for all")] = ()
    best: Annotated[str, says("the means to take: `nccl` unless another is faster beyond doubt")]
    default_us: Annotated[float | None, says("by default NCCL; null where it is out")]
    us: Annotated[dict[str, float], says("of a call, by means")]
    spread: Annotated[dict[str, Span], says("fastest and slowest job or, of one job, batch")]
    gemm: Annotated[dict[str, float], says("times as long as alone the GEMM takes, by means")]

    @property
    def best_us(self) -> float:
        """Return the time of a call by the means to take."""
        return self.us[self.best]

    @property
    def kind(self) -> str:
        """Return in words what rows of different sizes have in common."""
        mode = " in a CUDA graph" * (self.mode == "graph") + " beside a GEMM" * self.beside_gemm
        return COLLECTIVE_WORDS[self.collective] + mode


class MeansTable(Kept, frozen=True, kw_only=True):
    """Which means is best for which message size, as jobs measured it on a plan's host."""

    FILE = "means.json"
    machine: str
    gpus: tuple[int, ...]
    backend: Backend
    rows: tuple[MeansRow, ...]
    regrets: Annotated[
        dict[str, dict[str, tuple[float, float]]],
        says("share of time lost by one means for all sizes of a kind: on average, at worst"),
    ]
    workloads: Annotated[
        dict[str, tuple[float, float | None]],
        says("seconds of a bundled step by the best means of each size, and by default NCCL"),
    ]
    out: Annotated[dict[str, str], says("means that cannot run, hang or give wrong values: why")]
    environments: Annotated[dict[str, dict[str, str]], says("NCCL's variables of a means")]
    rounds: Annotated[int, says("jobs of each means")]
    versions: dict[str, str]
    devices: Annotated[tuple[str, ...], says("names in rank order")]
    seconds: float

    @property
    def dry_run(self) -> bool:
        """Return whether jobs ran over gloo."""
        return self.backend == "host"

    def fault(self) -> str:
        """Return what makes it no table of means: a row without the times of its best."""
        return "" if all(row.best in row.us for row in self.rows) else "lacks a time"


class _Contender(NamedTuple):
    name: str
    arm: Arm
    spec: JobSpec


def means_rows(world: int, sizes: Sequence[int] | None = None) -> tuple[Row, ...]:
    """Return the rows of all means, of these sizes alone if given.

    Neighbours send in pairs, as the stages of a pipeline.
    """
    pairs = tuple((first, first + 1) for first in range(0, world - 1, 2))

    def rows(first: int, count: int, name: Collective, groups: Groups = ()) -> Iterator[Row]:
        wanted = (first << shift for shift in range(0, 2 * count, 2))
        kept = [size for size in wanted if sizes is None or size in sizes]
        for row in rows_of(kept, (name,), "bfloat16", groups=(groups,)):
            yield replace(row, mode="eager")

    reduced, sent = [*rows(KIB, 9, "all_reduce")], [*rows(64 * KIB, 7, "send", pairs)]
    return (
        *(replace(row, mode="graph") for row in reduced),
        *reduced,
        *sent,
        *(replace(row, beside=(GEMM,)) for row in (*reduced[-1:], *sent)),
        *rows(64 * KIB, 7, "send_recv", pairs),
        *rows(64 * KIB, 6, "all_gather"),
    )


def measure_means(
    target: Target,
    launcher: Launcher,
    *,
    seconds: float,
    sizes: Sequence[int] | None = None,
    known: Mapping[str, Means] = MEANS,
) -> MeansTable:
    """Time rows by each means in jobs of its own, in rounds, and compare every value.

    No round but the first begins after `seconds`. `sizes` are bytes, None for those of all rows. A
    means that hangs, fails or gives a wrong value is out, with all its times. Raises InputError: no
    row has one of the sizes; MeasurementError: no means gave right values.
    """
    begun, dry = time.monotonic(), launcher.backend == "host"
    if dry and sizes is None:
        sizes = range(_LARGEST_DRY + 1)
    rows = means_rows(launcher.world, sizes)
    require(rows, "`sizes`", "has no size of a row", "leave it out")
    contenders = _contenders(target, known, rows)
    # Choices of NCCL are the same over gloo.
    contenders = [each for each in contenders if not dry or each.name in known]
    out = {} if dry else _without_p2p(target, launcher, known)
    jobs: dict[str, list[Outcome]] = {}
    launcher = replace(launcher, timeout=min(launcher.timeout, DEADLINE_S))
    hung = False
    for number in range(ROUNDS):
        if number and time.monotonic() - begun > seconds:
            break
        for contender in round_order(contenders, number):
            name = contender.name
            if name in out:
                continue
            launcher.watch(f"round {number + 1} of {ROUNDS}: {name}")
            job = _run(launcher, contender, again=hung)
            hung = isinstance(job, str) and job.startswith(HANGS)
            if isinstance(job, str):
                out[name] = job
            else:
                jobs.setdefault(name, []).append(job)
    sound = {name: jobs[name] for name in jobs if name not in out}
    if not sound:
        why = "; ".join(f"{name}: {text}" for name, text in out.items())
        raise MeasurementError(f"no means gave right values: {why}")
    table = tuple(_rows_of_table(rows, sound))
    ranks = next(iter(sound.values()))[0].results
    nccl = [each for each in contenders if each.spec.means == NCCL]
    return MeansTable(
        machine=plan_name(target.plan),
        gpus=target.gpus,
        backend=launcher.backend,
        rows=table,
        regrets=_regrets(table),
        workloads=dict(_workloads(table, launcher.world)),
        out=out,
        environments={each.name: launcher.variables(each.arm) for each in nccl},
        rounds=max(map(len, sound.values())),
        versions={"torch": ranks[0].torch, "nccl": ranks[0].nccl},
        devices=tuple(rank.device for rank in ranks),
        seconds=time.monotonic() - begun,
    )


def _contenders(
    target: Target, known: Mapping[str, Means], rows: Sequence[Row]
) -> list[_Contender]:
    """Return default NCCL, other means beside it, and the plan's choices of NCCL."""
    plan, (first, *choices) = target.plan, target.arms
    nodes = dict(zip(plan.gpus, sender_nodes(plan.machine, plan.rings), strict=True))

    def contender(name: str, means: str, arm: Arm) -> _Contender:
        able = tuple(row for row in rows if row.collective in known[means].collectives)
        return _Contender(name, arm, JobSpec(rows=able, means=means, nodes=tuple(nodes.values())))

    made = [contender(name, name, first) for name in known]
    made += [contender(f"{NCCL}-{arm.name}", NCCL, arm) for arm in choices]
    return [each for each in made if each.spec.rows]


def _without_p2p(target: Target, launcher: Launcher, known: Mapping[str, Means]) -> dict[str, str]:
    """Return the means that need P2P, where it is disabled or not proven, each with why."""
    plan, proof = target.plan, ProvenLinks.load(target.directory)
    pairs = permutations(plan.gpus, 2)
    lacking = [pair for pair in pairs if not plan.knowledge.can_access(plan.machine, *pair)]
    why = ""
    if proof is None or proof.proof.verdict != "sound":
        found = "not proven" if proof is None else f"{proof.proof.verdict}: {proof.proof.what}"
        why = f"needs P2P, and the plan's links are: {found}"
    elif launcher.variables(target.arms[0]).get("NCCL_P2P_DISABLE") == "1":
        why = "NCCL_P2P_DISABLE=1 disables P2P"
    elif lacking:
        why = "needs P2P, which GPUs {} and {} do not have".format(*lacking[0])
    return {name: f"cannot run: {why}" for name in known if why and known[name].p2p}


def _run(launcher: Launcher, contender: _Contender, *, again: bool) -> Outcome | str:
    """Return a job of a means, or why the means is out.

    With `again` one that fails is run once more: what hung before it may still be on the GPUs.
    """
    try:
        (job,) = launcher.run([contender.arm], contender.spec)
    except RanksError as error:
        said = error.said.removeprefix("error: ")
        if error.late or said.startswith(HANGS):
            return f"{HANGS} {error.what}" if error.late else said
        if said != error.said:
            return f"cannot run: {said}"
        if not again:
            return f"fails: {error}"
        time.sleep(AFTER_HANG_S)
        return _run(launcher, contender, again=False)
    faults = (times.fault for rank in job.results for times in rank.times)
    wrong = next(filter(None, faults), "")
    return f"wrong values: {wrong}" if wrong else job


def _rows_of_table(
    rows: Sequence[Row], jobs: Mapping[str, Sequence[Outcome]]
) -> Iterator[MeansRow]:
    """Yield the rows that any means timed, by size in each kind."""
    seconds = {name: row_seconds(of) for name, of in jobs.items()}
    times: dict[tuple[str, Row], list[RowTimes]] = {}
    for name, of in jobs.items():
        for one in chain.from_iterable(rank.times for job in of for rank in job.results):
            times.setdefault((name, one.row), []).append(one)
    before: dict[str, str] = {}
    for row in rows:
        us = {name: 1e6 * median(of[row]) for name, of in seconds.items() if row in of}
        spread = {}
        for name in us:
            each = seconds[name][row]
            if len(each) == 1:
                # Batches differ less than jobs do, and have to do.
                ranks = (one.seconds for one in times[name, row] if one.seconds)
                each = tuple(map(max, zip(*ranks, strict=True)))
            spread[name] = min(each) * 1e6, max(each) * 1e6
        gemms = {name: [g for one in times[name, row] for g in one.gemms] for name in us}
        made = MeansRow(
            **pick(row, "collective", "bytes", "mode", "groups"),
            beside_gemm=bool(row.beside),
            best=NCCL,
            default_us=us.get(NCCL),
            us=us,
            spread=spread,
            gemm={name: median(of) for name, of in gemms.items() if of},
        )
        if us:
            before[made.kind] = best_means(us, spread, before.get(made.kind, ""))
            yield replace(made, best=before[made.kind])


def best_means(us: Mapping[str, float], spread: Mapping[str, Span], before: str) -> str:
    """Return the means to take: default NCCL, unless another one is faster beyond all doubt.

    Of those that are alike it is the one that is best `before`, for the next smaller size.
    """
    default = spread[NCCL][0] if NCCL in spread else math.inf
    faster = [name for name in us if spread[name][1] * (1 + AS_GOOD) < default]
    if not faster:
        return NCCL
    fastest = min(faster, key=lambda name: us[name])
    alike = [name for name in faster if spread[name][0] <= spread[fastest][1]]
    return before if before in alike else fastest


def _regrets(rows: Sequence[MeansRow]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return what each means that has all sizes of a kind loses where it is taken for all."""
    regrets: dict[str, dict[str, tuple[float, float]]] = {}
    for kind in dict.fromkeys(row.kind for row in rows):
        same = [row for row in rows if row.kind == kind]
        for name in same[0].us:
            if all(name in row.us for row in same):
                lost = [max(1.0, row.us[name] / row.best_us) for row in same]
                of_kind = regrets.setdefault(kind, {})
                of_kind[name] = geometric_mean(lost) - 1, max(lost) - 1
    return regrets


def _workloads(
    rows: Sequence[MeansRow], world: int
) -> Iterator[tuple[str, tuple[float, float | None]]]:
    """Yield the bundled workloads whose calls were timed, with a step by the best and by NCCL."""
    best, nccl = dict[Collective, list[tuple[int, float]]](), dict[Collective, Any]()
    for row in rows:
        if not row.beside_gemm and (row.mode == "graph" or row.collective != "all_reduce"):
            best.setdefault(row.collective, []).append((row.bytes, row.best_us))
            nccl.setdefault(row.collective, []).append((row.bytes, row.default_us or math.nan))
    for name in BUNDLED:
        calls = load_bundled(name, world).rows
        if all(call.collective in best for call in calls):
            first, second = (
                sum(call.calls * at_size(of[call.collective], call.bytes) for call in calls) / 1e6
                for of in (best, nccl)
            )
            yield name, (first, None if math.isnan(second) else second)
