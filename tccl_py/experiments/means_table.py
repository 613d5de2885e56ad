"""Means compared: rows by each in jobs of its own, the best by message size, and advice by these.

Advice on a machine without a table is by published figures of others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, permutations
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from tccl_py.errors import MeasurementError, require, size_text
from tccl_py.experiments.comparison import row_seconds
from tccl_py.experiments.jobs import Arm, Launcher, Outcome, round_order
from tccl_py.experiments.means import HANGS, MEANS, NCCL, Means
from tccl_py.experiments.record import at_size
from tccl_py.experiments.spec import (
    COLLECTIVE_WORDS,
    GEMM,
    KIB,
    MIB,
    Collective,
    Groups,
    JobSpec,
    Row,
    rows_of,
)
from tccl_py.experiments.target import Target
from tccl_py.files import says
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.measurement import Backend
from tccl_py.plan.chains import sender_nodes
from tccl_py.plan.results import Kept, ProvenLinks
from tccl_py.plan.text import plan_name
from tccl_py.rank_processes.tasks import RanksError
from tccl_py.workloads.workload import BUNDLED, load_bundled

ROUNDS, DEADLINE_S, AFTER_HANG_S = 3, 60.0, 3.0
"""Of a means: jobs, seconds of each, which mostly takes 5 to 20, and those after another's hang."""
AS_GOOD = 0.02
"""A means has to beat default NCCL by this share."""
_LARGEST_DRY = MIB

Span = tuple[float, float]
_LARGEST = {"tensor-parallel-decode": ("all_reduce", 1 << 20), "pipeline": ("send", 256 << 20)}
"""What bundled workloads are about: a collective of 4 KiB up to so many bytes."""
Line = tuple[str, str]
_WORDS = {NCCL: "default NCCL"}


def _words(row: Row) -> str:
    """Return what a row does, without its size."""
    graph, beside = " in a CUDA graph" * (row.mode == "graph"), " beside a GEMM" * bool(row.beside)
    return COLLECTIVE_WORDS[row.collective] + graph + beside


CALLS: dict[str, str] = {
    name: _words(Row(collective=name, mode="graph" * (name == "all_reduce")))
    for name in MEANS[NCCL].collectives
}
"""Calls as a program makes them alone."""


class MeansRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row by each means: many calls back to back."""

    calls: Annotated[str, says("what was called, in words")]
    bytes: int
    best: Annotated[str, says("the means to take: `nccl` unless another is faster beyond doubt")]
    us: Annotated[dict[str, float], says("of a call, by means; `nccl` is default NCCL")]
    spread: Annotated[dict[str, Span], says("fastest and slowest job or, of one job, batch")]
    gemm: Annotated[dict[str, float], says("times as long as alone the GEMM takes, by means")]


class MeansTable(Kept, frozen=True, kw_only=True):
    """Which means is best for which message size, as jobs measured it on a plan's host."""

    FILE = "means.json"
    machine: str
    backend: Backend
    rows: tuple[MeansRow, ...]
    regrets: Annotated[
        dict[str, dict[str, Span]],
        says("share of time lost by one means for all sizes: on average, at worst"),
    ]
    workloads: Annotated[
        dict[str, dict[str, float]],
        says("seconds of a bundled step by the `best` means of each size, and by `nccl`"),
    ]
    out: Annotated[dict[str, str], says("means that cannot run, hang or give wrong values: why")]
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
    rows = means_rows(launcher.world, range(_LARGEST_DRY + 1) if dry and sizes is None else sizes)
    require(rows, "`sizes`", "has no size of a row", "leave it out")
    contenders = _contenders(target, known, rows, dry=dry)
    out = {} if dry else _without_p2p(target, launcher, known)
    jobs: dict[str, list[Outcome]] = {}
    launcher, hung = replace(launcher, timeout=min(launcher.timeout, DEADLINE_S)), False
    for number in range(ROUNDS):
        for name in round_order(list(contenders), number):
            if name in out or (number and time.monotonic() - begun > seconds):
                continue
            launcher.watch(f"round {number + 1} of {ROUNDS}: {name}")
            job = _run(launcher, *contenders[name], again=hung)
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
    return MeansTable(
        machine=plan_name(target.plan),
        backend=launcher.backend,
        rows=table,
        regrets=_regrets(table),
        workloads=dict(_workloads(table, launcher.world)),
        out=out,
        versions={"torch": ranks[0].torch, "nccl": ranks[0].nccl},
        devices=tuple(rank.device for rank in ranks),
        seconds=time.monotonic() - begun,
    )


def _contenders(
    target: Target, known: Mapping[str, Means], rows: Sequence[Row], *, dry: bool
) -> dict[str, tuple[Arm, JobSpec]]:
    """Return the jobs of default NCCL, of other means, and of the plan's choices of NCCL on GPUs.

    Each has the rows that its means can do.
    """
    plan, (default, *choices) = target.plan, target.arms
    named = {name: (default, name) for name in known}
    named |= {f"{NCCL}-{arm.name}": (arm, NCCL) for arm in choices if not dry}
    nodes, jobs = sender_nodes(plan.machine, plan.rings), dict[str, tuple[Arm, JobSpec]]()
    for name, (arm, means) in named.items():
        if own := tuple(row for row in rows if row.collective in known[means].collectives):
            jobs[name] = arm, JobSpec(rows=own, means=means, nodes=nodes)
    return jobs


def _without_p2p(target: Target, launcher: Launcher, known: Mapping[str, Means]) -> dict[str, str]:
    """Return the means that need P2P, where it is disabled or not proven, each with why."""
    plan, kept = target.plan, ProvenLinks.load(target.directory)
    pairs, why = permutations(plan.gpus, 2), ""
    if kept is None or kept.proof.verdict != "sound":
        found = "not proven" if kept is None else f"{kept.proof.verdict}: {kept.proof.what}"
        why = f"needs P2P, and the plan's links are: {found}"
    elif launcher.variables(target.arms[0]).get("NCCL_P2P_DISABLE") == "1":
        why = "NCCL_P2P_DISABLE=1 disables P2P"
    elif not all(plan.knowledge.can_access(plan.machine, *pair) for pair in pairs):
        why = "needs P2P between all GPUs"
    return {name: f"cannot run: {why}" for name in known if why and known[name].p2p}


def _run(launcher: Launcher, arm: Arm, spec: JobSpec, *, again: bool) -> Outcome | str:
    """Return a job of a means, or why the means is out.

    With `again` one that fails is run once more: what hung before it may still be on the GPUs.
    """
    try:
        (job,) = launcher.run([arm], spec)
    except RanksError as error:
        said = error.said.removeprefix("error: ")
        if error.late or said.startswith(HANGS):
            return f"{HANGS} {error.what}" if error.late else said
        if said != error.said:
            return f"cannot run: {said}"
        if not again:
            return f"fails: {error}"
        time.sleep(AFTER_HANG_S)
        return _run(launcher, arm, spec, again=False)
    faults = (times.fault for rank in job.results for times in rank.times)
    wrong = next(filter(None, faults), "")
    return f"wrong values: {wrong}" if wrong else job


def _rows_of_table(
    rows: Sequence[Row], jobs: Mapping[str, Sequence[Outcome]]
) -> Iterator[MeansRow]:
    """Yield the rows that any means timed, by size for each kind of calls."""
    seconds = {name: row_seconds(of) for name, of in jobs.items()}
    before: dict[str, str] = {}
    for row in rows:
        us: dict[str, float] = {}
        spread, gemm = dict[str, Span](), dict[str, float]()
        for name in [name for name in jobs if row in seconds[name]]:
            ranks = [one for job in jobs[name] for rank in job.results for one in rank.times]
            timed = [one for one in ranks if one.row == row and one.seconds]
            each = seconds[name][row]
            us[name] = 1e6 * median(each)
            if len(each) == 1:
                # Batches differ less than jobs do, and have to do.
                each = tuple(map(max, zip(*(one.seconds for one in timed), strict=True)))
            spread[name] = 1e6 * min(each), 1e6 * max(each)
            if gemms := [times for one in timed for times in one.gemms]:
                gemm[name] = median(gemms)
        if us:
            calls = _words(row)
            best = before[calls] = best_means(us, spread, before.get(calls, ""))
            yield MeansRow(calls=calls, bytes=row.bytes, best=best, us=us, spread=spread, gemm=gemm)


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


def _regrets(rows: Sequence[MeansRow]) -> dict[str, dict[str, Span]]:
    """Return what each means that has all sizes of some calls loses where it is taken for all."""
    regrets: dict[str, dict[str, Span]] = {}
    for row in rows:
        same = [each for each in rows if each.calls == row.calls]
        for name in row.us:
            if all(name in each.us for each in same):
                lost = [max(1.0, each.us[name] / each.us[each.best]) for each in same]
                of_calls = regrets.setdefault(row.calls, {})
                of_calls[name] = geometric_mean(lost) - 1, max(lost) - 1
    return regrets


def _workloads(rows: Sequence[MeansRow], world: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the bundled workloads whose calls were timed, each with seconds of a step."""
    for name in BUNDLED:
        steps = {}
        for means in ("best", NCCL):
            curves: dict[str, list[tuple[int, float]]] = {}
            for row in rows:
                if us := row.us.get(row.best if means == "best" else NCCL):
                    curves.setdefault(row.calls, []).append((row.bytes, us / 1e6))
            calls = [(CALLS.get(one.collective, ""), one) for one in load_bundled(name, world).rows]
            if all(words in curves for words, _ in calls):
                each = (one.calls * at_size(curves[words], one.bytes) for words, one in calls)
                steps[means] = sum(each)
        if steps:
            yield name, steps


@cache
def _known() -> Any:
    """Return means.json: `published` rows of bytes and us by NCCL and by a means; texts by links.

    Of two texts the first is on vLLM, the second on SGLang: `serving` tells what is on by default,
    `flags` what takes a means.
    """
    return msgspec.json.decode((Path(__file__).parent / "means.json").read_bytes())


def links_of(machine: Machine, knowledge: Knowledge) -> str:
    """Return how all GPUs of a machine reach each other's memory: "nvlink", "pcie" or "none"."""
    pairs = list(permutations(machine.gpu_indices, 2))
    if all(machine.has_nvlink(*pair) for pair in pairs):
        return "nvlink"
    return "pcie" if all(knowledge.can_access(machine, *pair) for pair in pairs) else "none"


def means_lines(workload: str, links: str, table: MeansTable | None) -> Iterator[Line]:
    """Yield a name and a text for each line on the means for a bundled workload, if any.

    Without a `table` of the machine these are published figures of machines with such `links`.
    """
    if workload not in _LARGEST:
        return
    (collective, most), known = _LARGEST[workload], _known()
    rows = [
        row
        for row in (table.rows if table is not None else ())
        if row.calls == CALLS[collective] and 4 << 10 <= row.bytes <= most
    ]
    servers = dict(zip(("vLLM", "SGLang"), known["serving"][links], strict=True))
    if table is None or not rows:
        yield from _published_lines(collective, links)
        if collective == "all_reduce":
            yield from servers.items()
        yield "Measure", "`tccl plan DIR`, `tccl verify DIR --means`: which means is best here"
        return
    dry = " in a DRY RUN over gloo" * table.dry_run
    for best, group in groupby(rows, key=lambda row: row.best):
        same = list(group)
        names = [name for name in (best, NCCL) if all(name in row.us for row in same)]
        times = {_WORDS.get(name, name): [row.us[name] for row in same] for name in names}
        yield "By size", f"{_span([row.bytes for row in same], times)}, measured here{dry}"
    gains = {row.best: row.us.get(NCCL, 0) - row.us[row.best] for row in rows}
    chosen = max(gains, key=lambda name: gains[name])
    if collective == "all_reduce" and not table.dry_run:
        flags = known["flags"][NCCL if chosen.startswith(NCCL) else chosen]
        for (server, usual), flag in zip(servers.items(), flags, strict=True):
            yield server, f"{usual}; for {chosen}: {flag}"


def _published_lines(collective: str, links: str) -> Iterator[Line]:
    known = _known()
    for one in known["published"]:
        if (one["collective"], one["links"]) == (collective, links):
            parts = []
            for faster, group in groupby(one["rows"], key=lambda row: row[2] < row[1]):
                sizes, nccl, us = zip(*group, strict=True)
                both = [(one["means"], us), ("NCCL", nccl)]
                parts.append(_span(sizes, dict(both if faster else reversed(both))))
            yield "Published", f"{'; '.join(parts)} on {one['machine']} ({one['source']})"
    if note := known["notes"][collective][links]:
        yield "Note", note


def _span(sizes: Sequence[int], named: Mapping[str, Sequence[float]]) -> str:
    """Return the first and the last size, with the times of each means there."""
    times = []
    for name, us in named.items():
        texts = (f"{value:.{value < 100:d}f}" for value in (us[0], us[-1]))
        times.append(f"{name} {' to '.join(dict.fromkeys(texts))} us")
    ends = dict.fromkeys((size_text(sizes[0]), size_text(sizes[-1])))
    return f"{' to '.join(ends)}: {', '.join(times)}"
