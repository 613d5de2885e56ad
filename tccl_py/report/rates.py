"""What a journal says of single hops and of pairs of hops, as tables by GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import Flow, parse_flow

_SLOWED = 0.99
"""What keeps more of its rate than this is not slowed: noise makes as much."""

Journal = Mapping[str, Sequence[Measurement]]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A flow between two GPUs and its rate, GB/s; `beside` is what ran with it, if anything."""

    flow: str
    gbps: float
    bounce: bool
    beside: str = ""
    alone_gbps: float | None = None

    @property
    def kept(self) -> float | None:
        """Which part of its rate alone it keeps; None if that was not measured."""
        return self.gbps / self.alone_gbps if self.alone_gbps else None


Readings = dict[tuple[int, int], Reading]
"""By GPU and GPU, or by NUMA node and GPU."""


def fastest_alone(journal: Journal) -> Readings:
    """Each ordered pair of GPUs -> the fastest flow between them that was measured alone."""
    found: Readings = {}
    for flow, gbps in _singles(journal):
        _keep_fastest(found, _pair(flow), flow, gbps)
    return found


def fastest_bounces(journal: Journal) -> Readings:
    """(NUMA node, GPU) -> the fastest bounce alone that the GPU sends through that node."""
    found: Readings = {}
    for flow, gbps in _singles(journal):
        if flow.is_bounce:
            host = flow.transfers[0].destination
            _keep_fastest(found, (host.index, flow.source.index), flow, gbps)
    return found


def slowest_together(journal: Journal) -> Readings:
    """Each ordered pair of GPUs -> its slowest flow beside one other flow between GPUs."""
    found: Readings = {}
    for flow, reading in _beside(journal):
        pair = _pair(flow)
        if pair not in found or reading.gbps < found[pair].gbps:
            found[pair] = reading
    return found


def worst_pairs(journal: Journal, count: int) -> list[Reading]:
    """The flows that one other flow slows most, worst first.

    Two flows stand once, with the blocks and FIFOs with which they slow each other most.
    """
    worst: dict[frozenset[str], Reading] = {}
    for _, reading in _beside(journal):
        ways = frozenset(_way(text) for text in (reading.flow, reading.beside))
        if ways not in worst or _kept(reading) < _kept(worst[ways]):
            worst[ways] = reading
    slowed = [one for one in worst.values() if _kept(one) < _SLOWED]
    return sorted(slowed, key=lambda one: (_kept(one), one.flow, one.beside))[:count]


def _way(flow: str) -> str:
    """A flow's text without its options."""
    return flow.partition("{")[0]


def _kept(reading: Reading) -> float:
    return 1.0 if reading.kept is None else reading.kept


def _keep_fastest(found: Readings, key: tuple[int, int], flow: Flow, gbps: float) -> None:
    if key not in found or gbps > found[key].gbps:
        found[key] = Reading(flow=str(flow), gbps=gbps, bounce=flow.is_bounce)


def _singles(journal: Journal) -> Iterator[tuple[Flow, float]]:
    for name, measured in journal.items():
        if " " not in name:
            flow = parse_flow(name)
            if _joins_gpus(flow):
                yield flow, _rates(measured)[0]


def _beside(journal: Journal) -> Iterator[tuple[Flow, Reading]]:
    """Each flow of each set of two, beside the other."""
    for name, measured in journal.items():
        if name.count(" ") != 1:
            continue
        flows = [parse_flow(text) for text in name.split()]
        if not all(_joins_gpus(flow) for flow in flows):
            continue
        rates = _rates(measured)
        for this, other in ((0, 1), (1, 0)):
            alone = journal.get(str(flows[this]))
            yield (
                flows[this],
                Reading(
                    flow=str(flows[this]),
                    gbps=rates[this],
                    bounce=flows[this].is_bounce,
                    beside=str(flows[other]),
                    alone_gbps=_rates(alone)[0] if alone else None,
                ),
            )


def _joins_gpus(flow: Flow) -> bool:
    ends = flow.source, flow.destination
    return all(place.kind == "G" and not place.host for place in ends) and ends[0] != ends[1]


def _pair(flow: Flow) -> tuple[int, int]:
    return flow.source.index, flow.destination.index


def _rates(measured: Sequence[Measurement]) -> list[float]:
    """Median rate of each flow over all repeats of all its measurements, GB/s."""
    rows = zip(*(one.samples_gbps for one in measured), strict=True)
    return [float(np.median([rate for row in pooled for rate in row])) for pooled in rows]
