"""Checks of a plan that its types cannot make: its file may have been edited by anybody."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tccl_py.errors import InputError
from tccl_py.model.knowledge import check_knowledge
from tccl_py.model.machine import check
from tccl_py.model.paths import PathType
from tccl_py.model.transfer import parse_flow
from tccl_py.nccl.pinned_env import check_kept
from tccl_py.nccl.settings import check_settings

if TYPE_CHECKING:
    from tccl_py.plan.plan import Plan, PlanHop

MAX_GBPS = 1e6
_AGAIN = "plan it again"


def check_plan(plan: Plan, *, where: str) -> Plan:
    """Return `plan` if its parts fit together.

    Raises:
        InputError: a machine, knowledge or settings that do not hold together, rings that do not
            visit their GPUs once, flows of other GPUs, or rates out of range.
    """
    check(plan.machine, where=where)
    check_knowledge(plan.knowledge, plan.machine, where=where)
    _check_settings(plan, where)
    _check_gpus(plan.gpus, plan.machine.gpu_indices, where)
    _check_rings(plan, where)
    for subset in plan.subsets:
        _check_gpus(subset.gpus, plan.gpus, where)
        for ring in subset.rings:
            _check_order(ring, subset.gpus, where)
        _check_count(len(subset.rings), plan.settings.channels, where)
    for choice in (plan.stock, plan.variables):
        for ring in choice.rings:
            _check_order(ring, plan.gpus, where)
    _check_rates(plan, where)
    return plan


def _check_settings(plan: Plan, where: str) -> None:
    alternatives = [other.settings for other in plan.alternatives]
    for settings in (plan.settings, plan.stock.settings, plan.variables.settings, *alternatives):
        try:
            check_settings(settings)
        except InputError as error:
            raise InputError(f"{where} {error.where}", error.what, error.right) from error
    check_kept(plan.kept, (plan.settings, plan.variables.settings, *alternatives), where)
    if plan.type_intra not in PathType.__members__:
        names = ", ".join(PathType.__members__)
        raise InputError(where, f"has path type {plan.type_intra[:20]!r}", f"one of {names}")


def _check_gpus(gpus: Sequence[int], known: Sequence[int], where: str) -> None:
    if len(gpus) < 2 or list(gpus) != sorted(set(gpus)) or not set(gpus) <= set(known):
        raise InputError(
            where,
            f"is for GPUs {_few(gpus)}",
            f"two or more of {_few(known)}, each once and in ascending order",
        )


def _check_rings(plan: Plan, where: str) -> None:
    _check_count(len(plan.rings), plan.settings.channels, where)
    for ring in plan.rings:
        _check_order(ring.gpus, plan.gpus, where)
        targets = tuple(hop.target for hop in ring.hops)
        if targets != (*ring.gpus[1:], ring.gpus[0]):
            raise InputError(where, f"the hops of ring {_few(ring.gpus)} do not meet", _AGAIN)
        for hop in ring.hops:
            _check_hop(hop, where)


def _check_count(rings: int, channels: int, where: str) -> None:
    if rings < 1 or channels % rings:
        raise InputError(
            where,
            f"has {rings} rings for {channels} channels",
            "every ring has as many channels as any other",
        )


def _check_order(order: Sequence[int], gpus: Sequence[int], where: str) -> None:
    if sorted(order) != sorted(gpus):
        raise InputError(where, f"ring {_few(order)} does not visit {_few(gpus)} once", _AGAIN)


def _check_hop(hop: PlanHop, where: str) -> None:
    try:
        flow = parse_flow(hop.flow)
    except InputError as error:
        raise InputError(f"{where} {error.where}", error.what, error.right) from error
    ends = (str(flow.source), str(flow.destination))
    if ends != (f"G{hop.source}", f"G{hop.target}"):
        raise InputError(
            where,
            f"the hop from GPU {hop.source} to GPU {hop.target} has flow {hop.flow[:60]!r}",
            _AGAIN,
        )


def _check_rates(plan: Plan, where: str) -> None:
    hops = [hop.gbps for ring in plan.rings for hop in ring.hops]
    subsets = [subset.rate_gbps for subset in plan.subsets]
    others = [plan.limit_gbps] if plan.limit_gbps is not None else []
    choices = [one.rate_gbps for one in plan.choices.values() if one.rate_gbps is not None]
    for rate in (*hops, *subsets, *others, *choices):
        # The comparison is written so that NaN fails it.
        if not 0 < rate < MAX_GBPS:
            raise InputError(where, f"has a rate of {rate} GB/s", "rates are above 0, and finite")
    if plan.bound_gbps is not None and not plan.rate_gbps <= plan.bound_gbps < MAX_GBPS:
        raise InputError(
            where,
            f"has rate {plan.rate_gbps} above its bound {plan.bound_gbps}",
            "a bound is never below what was found",
        )


def _few(numbers: Iterable[int]) -> str:
    shown = list(numbers)
    more = ", ..." if len(shown) > 64 else ""
    return f"[{', '.join(str(one)[:20] for one in shown[:64])}{more}]"
