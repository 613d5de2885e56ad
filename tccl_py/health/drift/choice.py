"""Which sets of a journal a check measures again: few, and such that a change shows somewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from tccl_py.model.machine import Machine
from tccl_py.model.measurement import Measurement
from tccl_py.model.paths import path_type
from tccl_py.model.transfer import Flow, TransferSet, parse_flow, parse_set, transfer_set
from tccl_py.plan.plan import Plan

_TIMES_EACH_GPU = 3
"""Small sets that each GPU should be in, so that one slow GPU is told from one slow pair."""


def chosen_sets(
    plan: Plan, journal: Mapping[str, Sequence[Measurement]], *, most: int, seed: int
) -> tuple[TransferSet, ...]:
    """Sets of the journal, the most telling first, `most` at most.

    In this order: the plan's rings together and each alone, its slowest hop alone, one set of each
    class of links, small sets until every GPU is in several, and a random sample of the rest. What
    was measured often comes first: it is known better.
    """
    known = {text: parse_set(text) for text in journal}
    often = sorted(known, key=lambda text: (-len(journal[text]), len(known[text]), text))
    small = sorted(often, key=lambda text: len(known[text]))
    order = dict.fromkeys(
        text
        for part in (
            _of_the_plan(plan),
            _one_of_each_class(plan.machine, known, small),
            _each_gpu(plan, known, small),
            _sampled(often, seed),
        )
        for text in part
        if text in known
    )
    return tuple(known[text] for text in list(order)[:most])


def _of_the_plan(plan: Plan) -> Iterator[str]:
    rings = [[parse_flow(hop.flow) for hop in ring.hops] for ring in plan.rings]
    yield str(transfer_set(flow for ring in rings for flow in ring))
    yield from (str(transfer_set(ring)) for ring in rings)
    slowest = min((ring.bottleneck for ring in plan.rings), key=lambda hop: hop.gbps)
    yield str(transfer_set([parse_flow(slowest.flow)]))


def _one_of_each_class(
    machine: Machine, known: Mapping[str, TransferSet], small: Sequence[str]
) -> Iterator[str]:
    seen: set[str] = set()
    for text in small:
        classes = {link_class(machine, flow) for flow in known[text].flows}
        if not classes <= seen:
            seen |= classes
            yield text


def link_class(machine: Machine, flow: Flow) -> str:
    """How far a flow goes and by what means: `PIX write`, `SYS bounce`, `PHB read`."""
    ends = [str(place) for place in (flow.source, flow.destination)]
    means: str = "bounce" if flow.is_bounce else flow.transfers[0].operation
    if flow.transfers[0].uses_copy_engine:
        means += " by copy engine"
    return f"{path_type(machine, *ends).name} {means}"


def _each_gpu(plan: Plan, known: Mapping[str, TransferSet], small: Sequence[str]) -> Iterator[str]:
    times = dict.fromkeys(plan.gpus, 0)
    joined: set[frozenset[int]] = set()
    for text in small:
        gpus = frozenset(gpus_of(known[text]) & times.keys())
        few = any(times[gpu] < _TIMES_EACH_GPU for gpu in gpus)
        # The same GPUs by other means say nothing more of a GPU.
        if few and len(gpus) < len(times) and gpus not in joined:
            joined.add(gpus)
            for gpu in gpus:
                times[gpu] += 1
            yield text


def gpus_of(transfers: TransferSet) -> set[int]:
    """Indices of the GPUs at the ends of a set's flows."""
    ends = (place for flow in transfers.flows for place in (flow.source, flow.destination))
    return {place.index for place in ends if place.kind == "G"}


def _sampled(texts: Sequence[str], seed: int) -> list[str]:
    return random.Random(seed).sample(sorted(texts), len(texts))
