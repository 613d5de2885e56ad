"""NCCL's choices at each message size under default NCCL and the recommended choice of a plan.

They follow from NCCL's cost model and are not measured. Where they are poor for a reason that has a
name, a sentence names it with the variable that changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from tccl_py.errors import counted, size_text
from tccl_py.files import picked
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.rings import neighbours
from tccl_py.nccl.channel_search import SearchGraph
from tccl_py.nccl.cost_model import CostModel, SizeChoice, cost_model
from tccl_py.nccl.graph_search import FALLBACK_GBPS
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.system import PathType
from tccl_py.nccl.tuner import COLLECTIVES
from tccl_py.nccl.view import view
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.plan import Plan
from tccl_py.plan.text import CHOICE_WORDS

SIZES = tuple(4096 << doublings for doublings in range(0, 19, 2))
"""Bytes of the rows: 4 KiB to 1 GiB."""
_SMALL = 64 << 10
_FORCED = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NTHREADS",
    "NCCL_LL128_NTHREADS",
    "NCCL_THREAD_THRESHOLDS",
    "NCCL_TUNER_PLUGIN",
)
"""Variables that replace parts of the cost model."""
_FIRST_NVLS = 90
Cells = tuple[str, ...]


def size_choices(plan: Plan) -> dict[ChoiceName, list[SizeChoice]]:
    """Return NCCL's choices for each collective and size; {} where no model is known."""
    return {
        name: [model.choice(collective, size) for collective in COLLECTIVES for size in SIZES]
        for name, model in _models(plan).items()
    }


def size_json(plan: Plan) -> list[dict[str, Any]]:
    """Return the rows of `by_size` of `--json`."""
    keys = ("collective", "bytes", "algorithm", "protocol", "channels", "estimated_us")
    return [
        {"choice": name, **picked(row, *keys)}
        for name, rows in size_choices(plan).items()
        for row in rows
    ]


def size_table(plan: Plan, collectives: Sequence[str] = COLLECTIVES) -> Iterator[Cells]:
    """Yield the headers and cells of a table, with a row for sizes of equal choices."""
    choices = size_choices(plan)
    yield "collective", "sizes", *(CHOICE_WORDS[name] for name in choices)
    rows = [row for row in zip(*choices.values(), strict=True) if row[0].collective in collectives]
    for (collective, *_), same in groupby(rows, key=_kinds):
        found = list(same)
        cells = map(_words, zip(*found, strict=True))
        yield collective, _span(size_text(row[0].bytes) for row in found), *cells


def size_lines(plan: Plan) -> dict[str, str]:
    """Return NCCL's choices for all-reduce in a line each; {} where no model is known."""
    lines: dict[str, str] = {}
    for name, choices in size_choices(plan).items():
        rows = [row for row in choices if row.collective == "all_reduce"]
        parts = [list(same) for _, same in groupby(rows, key=lambda row: _kinds([row]))]
        lines[name] = "; ".join(f"from {size_text(same[0].bytes)} {_words(same)}" for same in parts)
    return lines


def _kinds(rows: Sequence[SizeChoice]) -> tuple[str, ...]:
    return (rows[0].collective, *(f"{row.algorithm} {row.protocol}" for row in rows))


def _words(rows: Sequence[SizeChoice]) -> str:
    first = rows[0]
    channels = _span(str(row.channels) for row in rows)
    times = _span(f"{row.estimated_us:.0f}" for row in rows)
    noun = "channel" if channels == "1" else "channels"
    return f"{first.algorithm} {first.protocol}, {channels} {noun}, {times} us"


def _span(values: Iterable[str]) -> str:
    first, *rest = dict.fromkeys(values)
    return f"{first} to {rest[-1]}" if rest else first


def size_notes(plan: Plan) -> list[str]:
    """Return sentences on what the table rests on, and on poor choices with their reason."""
    models = _models(plan)
    if not models:
        return []
    default = models["default"]
    seen = view(plan.machine, plan.knowledge, plan.stock.settings, gpus=plan.gpus)
    notes = []
    if seen.system.nvs and default.sm[0] >= _FIRST_NVLS and not _without_nvls(plan):
        notes.append(
            "NVLS is not in the table by message size: where the driver offers multicast, NCCL "
            "takes it for large messages, unless NCCL_NVLS_ENABLE=0"
        )
    return notes + list(_poor(default))


def _poor(default: CostModel) -> Iterator[str]:
    """Yield why default NCCL's choices are poor, and the variable that changes it."""
    if not (default.ring.fallback or default.tree.fallback):
        return
    failed = "graph search" if default.ring.fallback else "search for trees"
    rings, trees = len(default.ring.orders), len(default.tree.orders)
    cut = f", {trees} of {rings} rings is used" if trees < rings else ""
    chosen = {default.choice("all_reduce", size).algorithm for size in SIZES}
    never = "" if "tree" in chosen else ", tree is never taken"
    small = default.choice("all_reduce", _SMALL)
    yield (
        f"NCCL's {failed} fails and takes its simple order, with a bandwidth of "
        f"{FALLBACK_GBPS} GB/s{never}{cut}, and {size_text(_SMALL)} of all-reduce take "
        f"{counted(small.channels, 'channel')} of {small.algorithm} {small.protocol}; a graph file "
        "(NCCL_GRAPH_FILE, `tccl env DIR --choice graph`) changes that"
    )


def _models(plan: Plan) -> dict[ChoiceName, CostModel]:
    """Return the models of default NCCL and of the recommended choice."""
    forced = any(name in plan.pinned_env for name in _FORCED)
    if plan.is_cluster or forced or not plan.stock.rings:
        return {}
    if view(plan.machine, plan.knowledge, plan.stock.settings, gpus=plan.gpus).by_network:
        return {}  # NCCL may cut the node in parts
    models: dict[ChoiceName, CostModel] = {"default": _searched(plan, plan.stock.settings)}
    if not models["default"].rules.has_cost_model:
        return {}
    if plan.recommended == "variables":
        models["variables"] = _searched(plan, plan.variables.settings)
    if plan.recommended == "graph":
        models["graph"] = _from_file(plan)
    return models


def _searched(plan: Plan, settings: Settings) -> CostModel:
    return _model(plan.machine, plan.knowledge, settings, plan.gpus)


@lru_cache(maxsize=16)  # a plan's table, line and JSON ask for the same
def _model(
    machine: Machine, knowledge: Knowledge, settings: Settings, gpus: tuple[int, ...]
) -> CostModel:
    return cost_model(view(machine, knowledge, settings, gpus=gpus))


def _from_file(plan: Plan) -> CostModel:
    """Return the model of the plan's graph file, whose ring and tree have the same orders."""
    seen = view(plan.machine, plan.knowledge, plan.settings, gpus=plan.gpus)
    orders = plan.channel_rings
    farthest = seen.farthest({pair for ring in orders for pair in neighbours(ring)})
    ring = SearchGraph(
        pattern="ring",
        min_channels=1,
        max_channels=len(orders),
        type_intra=PathType[farthest],
        rate_intra=plan.rate_gbps / len(orders),
        rate_inter=plan.rate_gbps / len(orders),
        same_channels=len(set(orders)) == 1,
        orders=orders,
    )
    return cost_model(seen, (ring, replace(ring, pattern="balanced tree")))


def _without_nvls(plan: Plan) -> bool:
    return plan.pinned_env.get("NCCL_NVLS_ENABLE") == "0"
