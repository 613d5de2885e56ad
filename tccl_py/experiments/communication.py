"""The communication of a step of a job by each choice: the rows timed, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Annotated

import msgspec
from msgspec import structs

from tccl_py.decision import StepTime, Times, best_for, over, step_times
from tccl_py.errors import InputError, require
from tccl_py.experiments.comparison import SMALLEST_EFFECT
from tccl_py.experiments.spec import COLLECTIVE_WORDS, Row, calls_of
from tccl_py.files import says
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.results import Kept
from tccl_py.statistics import Interval
from tccl_py.workloads.sources import open_workload
from tccl_py.workloads.workload import BUNDLED, Workload

MOST_ROWS = 40
"""Rows of a workload that are timed: those that take most of a step."""
_MOST_KEPT = 100
_CALL_S, _BYTES_PER_S = 2e-5, 2e10
"""Time of a call and its bytes by which rows are ordered before any is timed."""


class RowTime(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of a workload: its calls in a step, seconds of a call, and speed over default NCCL's.

    Its groups are of ranks. Choices without times of the row are missing.
    """

    calls: Annotated[float, says("in a step")]
    seconds: Annotated[dict[ChoiceName, float], says("of a call")]
    speed: dict[ChoiceName, Interval]


class Communication(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The communication of a workload in a step by each choice, one call after the other."""

    name: str
    digest: Annotated[str, says("of the workload's rows")]
    chosen: Annotated[ChoiceName, says("the choice whose time decides")]
    choices: Annotated[dict[ChoiceName, StepTime], says("those with times of all rows")]
    rows: tuple[RowTime, ...]
    unknown: Annotated[float, says("the share of calls whose time no choice has")] = 0.0
    basis: Annotated[
        str, says("of other times than those of jobs on GPUs: what the answer rests on")
    ] = ""

    @property
    def losses(self) -> dict[str, tuple[float, float]]:
        """Return what the chosen one slows: collectives, with their share of a step and speed."""
        slower = {}
        names: tuple[ChoiceName, ...] = ("default", self.chosen)
        for collective in dict.fromkeys(row.collective for row in self.rows):
            rows = [row for row in self.rows if row.collective == collective]
            before, after = (sum(row.calls * row.seconds[name] for row in rows) for name in names)
            if before < after * (1 - SMALLEST_EFFECT):
                share = before / self.choices["default"].seconds
                slower[COLLECTIVE_WORDS[collective]] = share, before / after
        return slower


class Communications(Kept, frozen=True, kw_only=True):
    """The choices that jobs found best for workloads on a plan's hosts."""

    FILE = "workloads.json"
    workloads: tuple[Communication, ...] = ()

    def fault(self) -> str:
        """Return what makes it no file of workloads: a choice without its times."""
        fits = all(
            {"default", each.chosen}
            <= set(each.choices).intersection(*(row.seconds for row in each.rows))
            for each in self.workloads
        )
        return "" if fits else "lacks the times of a choice"

    def find(self, workload: str) -> Communication | None:
        """Return what is known of a workload by its digest or name."""
        return next((each for each in self.workloads if workload in (each.digest, each.name)), None)


def verified_choice(directory: Path, text: str) -> Communication:
    """Return what jobs found best for a workload, by its file or the name that it has.

    Raises InputError: a plan that was not verified for just this workload, or without GPUs.
    """
    is_file = text not in BUNDLED and Path(text).exists()
    name = open_workload([text]).digest if is_file else text
    verified = (Communications.load(directory) or Communications()).find(name)
    if verified is None or verified.basis:
        fault = "was verified for it without GPUs" if verified else "was not verified for it"
        right = f"`tccl verify {quote(str(directory))} --workload FILE` first, or leave it out"
        raise InputError(f"workload {text!r}", f"{directory} {fault}", right)
    return verified


def timed_calls(workload: Workload, ranks: int) -> dict[Row, float]:
    """Return the rows of a workload that jobs time, those that take most, with calls in a step.

    Raises InputError: the workload is of another number of ranks, or has no rows.
    """
    where = f"workload {workload.name[:80]!r}"
    if workload.ranks != ranks:
        fault = f"is of a job of {workload.ranks} ranks, and jobs here have {ranks}"
        raise InputError(where, fault, f"record or make it for {ranks}")
    require(workload.rows, where, "communicates nothing", "name one with rows")
    calls = calls_of(workload)

    def seconds(row: Row) -> float:
        return calls[row] * (_CALL_S + row.bytes / _BYTES_PER_S)

    return {row: calls[row] for row in sorted(calls, key=seconds, reverse=True)[:MOST_ROWS]}


def communication_of(
    workload: Workload,
    calls: Mapping[Row, float],
    times: Mapping[ChoiceName, Times[Row]],
    *,
    basis: str = "",
) -> Communication:
    """Return a workload's communication by each choice from seconds of its rows in each round."""
    steps = step_times(calls, times)
    rows = tuple(
        RowTime(
            **structs.asdict(row),
            calls=count,
            seconds={name: median(times[name][row]) for name in steps},
            speed={name: over(times[name][row], times["default"][row]) for name in steps},
        )
        for row, count in calls.items()
    )
    return Communication(
        name=workload.name,
        digest=workload.digest,
        chosen=best_for(steps),
        choices=steps,
        rows=rows,
        unknown=max(0.0, 1 - sum(calls.values()) / sum(row.calls for row in workload.rows)),
        basis=basis,
    )


def keep_communication(communication: Communication, directory: Path) -> None:
    """Keep what is known of a workload beside a plan, in the place of what was before."""
    kept, made = Communications.load(directory) or Communications(), communication
    others = (w for w in kept.workloads if made.digest != w.digest and made.name != w.name)
    Communications(workloads=(made, *others)[:_MOST_KEPT]).keep(directory)
