"""An evaluation as text for people, as JSON, and as a heat map by collective and size."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import geometric_mean
from typing import Any

import msgspec

from tccl_py.files import picked
from tccl_py.plan.plan import ChoiceName
from tccl_py.plan.words import CHOICE_WORDS, mark
from tccl_py.verify.evaluation import Cell, Evaluation, Summary
from tccl_py.verify.spec import size_text


class RatioMap(msgspec.Struct, frozen=True, kw_only=True):
    """Ratios of an arm to default NCCL, a row for each collective, None where there is none."""

    arm: ChoiceName
    title: str
    mark: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]
    largest: float
    summary: str


def evaluation_json(found: Evaluation) -> dict[str, Any]:
    """Return what `evaluate --json` prints."""
    return {
        **picked(found, "machine", "simulated", "recommended"),
        "arms": found.summaries,
        **picked(found, "cells", "wrong", "failures", "left_out", "seconds"),
    }


def evaluation_lines(found: Evaluation) -> Iterator[str]:
    """Yield a line for each arm but default NCCL, and for each collective in it."""
    yield f"{found.machine}, {_kind(found)}: ratios of bus bandwidth to default NCCL"
    for arm in found.summaries:
        asked = ", recommended" if arm.arm == found.recommended else ""
        yield f"{CHOICE_WORDS[arm.arm]}{asked}: {_words(arm)}"
        for collective in dict.fromkeys(cell.collective for cell in found.cells):
            if one := found.summary(arm.arm, collective):
                yield f"  {collective}: {_words(one)}"
    if found.recommended == "default":
        yield "default NCCL is recommended: its ratio is 1"


def _kind(found: Evaluation) -> str:
    if not found.simulated and found.backend != "cuda":
        return "a dry run over gloo, which says nothing about GPUs or NCCL"
    return mark(simulated=found.simulated, assumed=found.assumed)


def _words(one: Summary) -> str:
    return f"{one.mean:.3f} ({one.least:.3f} to {one.most:.3f}) in {one.cells} comparisons"


def ratio_maps(found: Evaluation) -> list[RatioMap]:
    """Return the map of each arm but default NCCL: means over sets of GPUs, by size.

    Without sizes the columns are numbers of GPUs.
    """
    return [_ratio_map(found, arm) for arm in found.summaries]


def _ratio_map(found: Evaluation, arm: Summary) -> RatioMap:
    cells = [cell for cell in found.cells if cell.arm == arm.arm and cell.ratio]
    places = sorted({_place(cell) for cell in cells})
    means: dict[tuple[str, tuple[int, int]], list[float]] = {}
    for cell in cells:
        means.setdefault((cell.collective, _place(cell)), []).append(cell.ratio or 1.0)
    return RatioMap(
        arm=arm.arm,
        title=f"{CHOICE_WORDS[arm.arm]} over default NCCL",
        mark=_kind(found),
        columns=tuple(size_text(size) if size else f"{gpus} GPUs" for size, gpus in places),
        rows={
            collective: tuple(
                geometric_mean(means[collective, place]) if (collective, place) in means else None
                for place in places
            )
            for collective in dict.fromkeys(cell.collective for cell in cells)
        },
        largest=max(*map(geometric_mean, means.values()), 1.0),
        summary=_words(arm),
    )


def _place(cell: Cell) -> tuple[int, int]:
    """Return the column of a cell: its size, or of no certain size its number of GPUs."""
    return (cell.bytes, 0) if cell.bytes else (0, len(cell.gpus) * max(1, len(cell.hosts)))
