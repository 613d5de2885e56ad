"""What a lane moves where few others do, for flows whose lanes share the links between two GPUs.

How fast a slow lane goes on when fast ones are done cannot be seen while all are at work: where
many lanes share links, even the fastest is slowed by the others. So the same set is run with few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from tccl_profiler.program import Program
from tccl_profiler.window import LaneRate
from tccl_py.model.transfer import Flow, TransferSet, transfer_set

FEW_LANES = 4
"""Of a flow: even of eight between two H200 each had 20.6 GB/s or more, the fastest of 24 18.8."""


def shares_links(flow: Flow) -> bool:
    """Whether lanes that stand for NCCL's channels share the links between two GPUs.

    Through host memory lanes are served alike: sums were what NCCL got there.
    """
    return (
        len(flow.transfers) == 1
        and not flow.transfers[0].uses_copy_engine
        and flow.blocks is not None
        and flow.source.kind == flow.destination.kind == "G"
    )


def with_few_lanes(transfers: TransferSet) -> TransferSet | None:
    """The set with few lanes in each flow whose lanes share links, all else the same; None if no
    flow has more than that.

    >>> from tccl_py.model.transfer import parse_set
    >>> str(with_few_lanes(parse_set("G0->G0->G1{blocks=24} G1->G1->C0->G0->G0{blocks=8}")))
    'G0->G0->G1{blocks=4} G1->G1->C0->G0->G0{blocks=8}'
    """
    few = transfer_set(few_of(flow) for flow in transfers.flows)
    return None if str(few) == str(transfers) else few


def few_of(flow: Flow) -> Flow:
    """The flow with few lanes, if its lanes share links; else the flow itself."""
    if not shares_links(flow) or flow.blocks is None or flow.blocks <= FEW_LANES:
        return flow
    return msgspec.structs.replace(flow, blocks=FEW_LANES)


def lone_rates(program: Program, lanes: Sequence[LaneRate]) -> Mapping[Flow, float]:
    """The median lane of each flow whose lanes share links, in GB/s, by flow.

    Args:
        program: of a set with few lanes.
        lanes: what they did, in the order of `Reading.lanes`.
    """
    rates = iter([lane.gbps for lane in lanes])
    found: dict[Flow, list[float]] = {}
    for flow, part in zip(program.transfers.flows, program.counted, strict=True):
        # A flow listed twice is one and the same to whoever asks.
        found.setdefault(flow, []).extend(next(rates) for _ in part.numbers)
    return {flow: float(np.median(some)) for flow, some in found.items() if shares_links(flow)}
