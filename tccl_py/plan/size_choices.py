"""NCCL's choices at each message size under default NCCL and the recommended choice of a plan.

A plan made on the machine has the installed NCCL's answers; else they follow from its cost model.
Where they are poor for a reason that has a name, a sentence names it with the variable that changes
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby

import msgspec
from msgspec.structs import replace

from tccl_py.errors import size_text, spell
from tccl_py.files import fill
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.rings import neighbours
from tccl_py.nccl.cost_model import CostModel, cost_model
from tccl_py.nccl.graph_search import FALLBACK_GBPS, SearchGraph
from tccl_py.nccl.settings import Settings, environment_text
from tccl_py.nccl.system import PathType
from tccl_py.nccl.tuner import COLLECTIVES, SizeChoice
from tccl_py.nccl.view import view
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.plan import Plan
from tccl_py.plan.text import CHOICE_WORDS

SIZES = tuple(4096 << doublings for doublings in range(0, 19, 2))
"""Bytes of the rows: 4 KiB to 1 GiB."""
_SMALL, _LOSS = 64 << 10, 1.1
_FIRST_NVLS = 90
Cells = tuple[str, ...]


def size_choices(plan: Plan) -> dict[ChoiceName, list[SizeChoice]]:
    """Return NCCL's choices for each collective and size; {} where they are not known."""
    if _was_asked(plan):
        return {name: list(plan.sizes[name].rows) for name in compared_choices(plan)}
    names = () if _why_none(plan) else compared_choices(plan)
    models = {name: size_model(plan, name) for name in names}
    return {
        name: [model.choice(collective, size) for collective in COLLECTIVES for size in SIZES]
        for name, model in models.items()
    }


def size_basis(plan: Plan) -> str:
    """Return what the choices follow from, as part of a sentence."""
    return "as NCCL ran it" if _was_asked(plan) else "by NCCL's cost model"


def _was_asked(plan: Plan) -> bool:
    answered = {name: answer.settings for name, answer in plan.sizes.items()}
    return all(answered.get(name) == plan.choices[name].settings for name in compared_choices(plan))


def compared_choices(plan: Plan) -> list[ChoiceName]:
    """Return the choices of the table that run: default NCCL and the recommended one."""
    names: tuple[ChoiceName, ...] = ("default", plan.recommended)
    return [name for name in dict.fromkeys(names) if name in plan.running]


class BySize(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's choice for a message size."""

    choice: ChoiceName
    collective: str
    bytes: int
    algorithm: str
    protocol: str
    channels: int


def list_by_size(plan: Plan) -> tuple[BySize, ...]:
    """Return the rows of `by_size` of `--json`."""
    rows = size_choices(plan).items()
    return tuple(fill(BySize, row, choice=name) for name, of in rows for row in of)


def size_table(plan: Plan) -> Iterator[Cells]:
    """Yield the headers and cells of a table, with a row for sizes of equal choices."""
    choices = size_choices(plan)
    yield "collective", "sizes", *(CHOICE_WORDS[name] for name in choices)
    for (collective, *_), group in groupby(zip(*choices.values(), strict=True), key=_kinds):
        equal = list(group)
        cells = map(_words, zip(*equal, strict=True))
        yield collective, _span(size_text(row[0].bytes) for row in equal), *cells


def _kinds(rows: Sequence[SizeChoice]) -> tuple[str, ...]:
    return (rows[0].collective, *(f"{row.algorithm} {row.protocol}" for row in rows))


def _words(rows: Sequence[SizeChoice]) -> str:
    first = rows[0]
    channels = _span(str(row.channels) for row in rows)
    noun = "channel" if channels == "1" else "channels"
    return f"{first.algorithm} {first.protocol}, {channels} {noun}"


def _span(values: Iterable[str]) -> str:
    first, *further = dict.fromkeys(values)
    return f"{first} to {further[-1]}" if further else first


def why_no_sizes(plan: Plan) -> str:
    """Return why NCCL's choices are not known, as the end of a sentence; "" if they are."""
    return "" if _was_asked(plan) else _why_none(plan)


def size_notes(plan: Plan) -> Iterator[str]:
    """Yield why default NCCL's choices are poor, and the variable that changes it."""
    if _why_none(plan) or "default" not in compared_choices(plan):
        return
    model, better = size_model(plan, "default"), size_model(plan, "variables")
    rows = [row for row in size_choices(plan)["default"] if row.collective == "all_reduce"]
    # Elsewhere NCCL has another choice than is computed.
    agreed = {
        row.bytes
        for row in rows
        if _kinds([row]) == _kinds([model.choice("all_reduce", row.bytes)])
    }
    variables = environment_text(plan.choices["variables"].settings)
    if model.fallback:
        file = "a graph file (NCCL_GRAPH_FILE, `tccl env DIR --choice graph`)"
        remedy = file if better.fallback else variables
        if _SMALL in agreed:
            yield f"{_failed_search(model, rows)}; {remedy} changes that"
        return
    rate = plan.choices["default"].rate_gbps or model.ring_gbps
    loss, size, chosen, best = _worst_choice(model, rate)
    if loss <= _LOSS or size not in agreed:
        return
    remedy = "`tccl verify DIR --tune`, by the tuner of NCCL's plugin,"
    if _worst_choice(better, plan.choices["variables"].rate_gbps or rate)[0] <= _LOSS:
        remedy = variables
    yield (
        f"NCCL counts {model.ring_gbps:.1f} GB/s for its rings, which get {rate:.1f} "
        f"({plan.provenance_of('default')}), so {size_text(size)} of all-reduce take "
        f"{chosen}, {loss:.2f}x the time of {best} by its own cost model; {remedy} changes that"
    )


def _failed_search(model: CostModel, rows: Sequence[SizeChoice]) -> str:
    """Return what follows from a failed search, as a clause."""
    small = model.choice("all_reduce", _SMALL)
    failed = "graph search" if model.ring.fallback else "search for trees"
    rings, trees = len(model.ring.orders), len(model.tree.orders)
    cut = f", {trees} of {rings} rings is used" if trees < rings else ""
    never = "" if "tree" in {row.algorithm for row in rows} else ", tree is never taken"
    return (
        f"NCCL's {failed} fails and takes its simple order, with a bandwidth of "
        f"{FALLBACK_GBPS} GB/s (so it expects far too long times){never}{cut}, and "
        f"{size_text(_SMALL)} of all-reduce take "
        f"{spell(small.channels, 'channel')} of {small.algorithm} {small.protocol}"
    )


def _worst_choice(model: CostModel, rate: float) -> tuple[float, int, str, str]:
    """Return what NCCL loses at most by counting another rate for its rings than theirs.

    That is a factor of time, the size, its choice there and the right one.
    """
    losses, right = [], model.with_rate(rate)
    for size in SIZES:
        chosen, times = next(iter(model.times("all_reduce", size))), right.times("all_reduce", size)
        best, least = next(iter(times.items()))
        losses.append((times[chosen] / least, size, " ".join(chosen), " ".join(best)))
    return max(losses)


def _why_none(plan: Plan) -> str:
    """Return where NCCL's cost model has no answer here, as the end of a sentence."""
    if not plan.cluster.closes:
        return "over several hosts"
    default = plan.choices["default"]
    host_view = view(plan.machine, plan.knowledge, default.settings, gpus=plan.gpus)
    hopper = min(host_view.system.sm.values()) >= _FIRST_NVLS
    reasons = {
        "in a dry run, without GPUs": plan.dry_run,
        "where default NCCL's rings are not": not default.rings,
        f"of NCCL {default.settings.version}": not host_view.system.rules.has_cost_model,
        "where NCCL may cut the node in parts, as GPUs meet by the network": host_view.by_network,
        "where NCCL may take NVLS: a plan made on the machine asks NCCL": host_view.system.nvs
        and hopper,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def size_model(plan: Plan, name: ChoiceName) -> CostModel:
    """Return the cost model under a choice of the plan."""
    if name == "graph":
        return _from_file(plan)
    settings = plan.choices[name].settings
    return _model(plan.machine, plan.knowledge, settings, plan.gpus)


@lru_cache(maxsize=16)  # a plan's table, line and JSON ask for the same
def _model(
    machine: Machine, knowledge: Knowledge, settings: Settings, gpus: tuple[int, ...]
) -> CostModel:
    return cost_model(view(machine, knowledge, settings, gpus=gpus))


def _from_file(plan: Plan) -> CostModel:
    """Return the model of the plan's graph file, whose ring and tree have the same orders."""
    host_view = view(plan.machine, plan.knowledge, plan.settings, gpus=plan.gpus)
    orders = plan.channel_rings
    farthest = host_view.farthest({pair for ring in orders for pair in neighbours(ring)})
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
    return cost_model(host_view, (ring, replace(ring, pattern="balanced tree")))
