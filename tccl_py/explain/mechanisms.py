"""The same GPU pairs by other mechanisms: write against read, direct against bounce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tccl_py.errors import MeasurementError
from tccl_py.explain.asking import Asker
from tccl_py.explain.findings import Instead
from tccl_py.explain.sentences import kind_of
from tccl_py.model.transfer import Flow, bounce, direct_read, direct_write
from tccl_py.nccl.pinned_env import direct_pairs, kept_level
from tccl_py.plan.plan import Plan
from tccl_py.search.evaluator import BudgetSpentError

_KINDS = ("direct write", "direct read", "bounce")


def instead(asker: Asker, plan: Plan, flows: Sequence[Flow]) -> tuple[Instead, ...]:
    """What the pairs of these flows get if all of them moved their bytes otherwise.

    What the budget or the hardware does not allow is left out.
    """
    found = []
    for kind, others in _variants(plan, flows):
        try:
            rate = asker.rate(others)
        except (BudgetSpentError, MeasurementError):
            continue
        found.append(Instead(kind=kind, gbps=rate.gbps))
    return tuple(found)


def _variants(plan: Plan, flows: Sequence[Flow]) -> Iterator[tuple[str, tuple[Flow, ...]]]:
    for kind in _KINDS:
        others = [flow if kind_of(flow) == kind else by(plan, flow, kind) for flow in flows]
        changed = [flow for flow in others if flow is not None]
        if len(changed) == len(flows) and changed != list(flows):
            yield kind, tuple(changed)


def by(plan: Plan, flow: Flow, kind: str) -> Flow | None:
    """The flow between the same GPUs by another mechanism; None if jobs have no such access."""
    source, target = flow.source.index, flow.destination.index
    if flow.source.kind != "G" or flow.destination.kind != "G":
        return None
    if kind == "bounce":
        node = plan.machine.numa_of(f"G{target}")
        return bounce(source, target, node, blocks=flow.blocks, fifo=flow.fifo)
    direct = direct_pairs(plan.machine, plan.knowledge, kept_level(plan.kept), gpus=plan.gpus)
    if direct is not None and (source, target) not in direct:
        return None
    reach = (source, target) if kind == "direct write" else (target, source)
    if not plan.knowledge.can_access(plan.machine, *reach):
        return None
    make = direct_write if kind == "direct write" else direct_read
    return make(source, target, blocks=flow.blocks, fifo=flow.fifo)
