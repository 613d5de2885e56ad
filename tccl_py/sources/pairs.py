"""Bandwidth of every ordered pair of GPUs, each alone."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.files import says
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.model.measurement import BandwidthSource, deal_out
from tccl_py.model.rings import bounce, direct_write
from tccl_py.model.transfer import Fifo, Flow, TransferSet, transfer_set

PING = Fifo(bytes=16, slots=1)
"""A FIFO of one slot: the sender waits until the receiver has emptied the slot."""


class Pair(msgspec.Struct, frozen=True, kw_only=True, rename={"source": "from", "target": "to"}):
    """A GPU writing to another."""

    source: int
    target: int
    gbps: Annotated[
        float | None, says("GB/s with all the channels that it takes; null where it failed")
    ] = None
    latency_us: Annotated[
        float | None,
        says("half the time until 16 bytes arrived and their slot is free; null of models"),
    ] = None
    via: Annotated[str, says("`direct`, or the NUMA node of the host memory between")]
    simulated: Annotated[bool, says("by a model")]
    dry_run: Annotated[bool, says("of host memory")] = False


def pair_flow(
    machine: Machine, knowledge: Knowledge, source: int, target: int, *, via_host: bool = False
) -> Flow:
    """Return a write between two GPUs, or a bounce where NCCL, or the caller, takes host memory.

    Host memory is on the receiver's NUMA node, as NCCL's is.
    """
    if via_host or not knowledge.can_access(machine, source, target):
        return bounce(source, target, machine.numa_of(f"G{target}"))
    return direct_write(source, target)


def pair_sets(flows: Sequence[Flow], *, bidirectional: bool = False) -> list[TransferSet]:
    """Return the sets by which pairs are measured: one flow each, or both directions together."""
    if not bidirectional:
        return [transfer_set([flow]) for flow in flows]
    ends = {(flow.source, flow.destination): flow for flow in flows}
    reversed_flows = ((flow, ends[b, a]) for (a, b), flow in ends.items() if a < b)
    return [transfer_set(flows) for flows in reversed_flows]


def all_pairs(
    machine: Machine,
    knowledge: Knowledge,
    source: BandwidthSource,
    gpus: Sequence[int],
    *,
    via_host: bool = False,
    bidirectional: bool = False,
    watch: Callable[[int, int], None] = lambda *_: None,
) -> tuple[list[Pair], bool, list[str]]:
    """Measure all ordered pairs of these GPUs.

    Return them, whether assumed values count, and why some pairs have no bandwidth.

    With `bidirectional` each bandwidth is measured beside the opposite direction. Models have no
    latencies. `watch` is told how many sets are measured, of how many.
    """
    if len(gpus) < 2:
        raise InputError("`gpus`", f"has {len(gpus)} GPU to measure", "a pair has two")
    ends = itertools.permutations(sorted(gpus), 2)
    flows = [pair_flow(machine, knowledge, *pair, via_host=via_host) for pair in ends]
    sets = pair_sets(flows, bidirectional=bidirectional)
    pings = {} if source.simulated else {flow: Flow(flow.transfers, 1, PING) for flow in flows}
    wanted = [*sets, *pair_sets(list(pings.values()))]
    rates: dict[Flow, float] = {}
    failures: list[str] = []
    assumed = False
    for count, transfers in enumerate(wanted):
        watch(count, len(wanted))
        try:
            (measurement,) = source.measure([transfers])
        except MeasurementError as error:
            failures.append(str(error))
            continue
        assumed |= measurement.assumed
        rates |= {
            flow: gbps for flow, (gbps, *_) in deal_out(transfers.flows, measurement.gbps).items()
        }
    pairs = [
        Pair(
            source=flow.source.index,
            target=flow.destination.index,
            gbps=rates.get(flow),
            latency_us=_latency_us(rates.get(pings.get(flow, flow)) if pings else None),
            via=str(flow.places[2]) if flow.is_bounce else "direct",
            simulated=source.simulated,
            dry_run=getattr(source, "dry_run", False),
        )
        for flow in flows
    ]
    return pairs, assumed, failures


def _latency_us(gbps: float | None) -> float | None:
    """Return half the time of a ping; 1 GB/s is 1000 bytes a microsecond."""
    return PING.bytes / gbps / 1000.0 / 2 if gbps else None


def pairs_csv(pairs: Sequence[Pair]) -> str:
    """Return pairs as CSV with a header line.

    >>> pair = Pair(source=0, target=1, gbps=25.0, via="direct", simulated=True)
    >>> print(pairs_csv([pair]), end="")
    from,to,gbps,latency_us,via,simulated,dry_run
    0,1,25.0,,direct,True,False
    """
    text = io.StringIO()
    rows = csv.DictWriter(text, Pair.__struct_encode_fields__, lineterminator="\n")
    rows.writeheader()
    rows.writerows(map(msgspec.to_builtins, pairs))
    return text.getvalue()


def matrix(pairs: Sequence[Pair], field: str) -> Iterator[tuple[int, list[float | None]]]:
    """Yield the row of each sending GPU: a field by receiving GPU, None where there is none."""
    gpus = sorted({pair.source for pair in pairs})
    values = {(pair.source, pair.target): getattr(pair, field) for pair in pairs}
    for row in gpus:
        yield row, [values.get((row, column)) for column in gpus]
