"""From what lanes and copies recorded to rates, start skew and overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_profiler.execution import Outcome, Timing
from tccl_profiler.program import Part, Program, is_nic
from tccl_profiler.window import LaneRate
from tccl_py.model.measurement import TOGETHER
from tccl_py.model.transfer import Flow, TransferSet, transfer_set

# The rate of a flow whose bytes are dealt out to its lanes in equal parts.


def equal_shares_gbps(rates: npt.NDArray[np.float64], most: float | None = None) -> float:
    """Bytes of all lanes over the time of the last, in the unit of `rates`.

    Args:
        rates: what each lane moves while all do, shape (lanes,). While fewer do, what all had
            together is divided among those left in the same proportions, and none has more than
            `most`; what that keeps from it, none has.
        most: what a lane moves where few others do. Less than the fastest of `rates`, or None, is
            that.

    Returns:
        float: at most the sum of the rates, which it is where they are equal; the sum as well
        where a lane has moved nothing, and so nothing is known of its share. It rises with `most`.

    >>> equal_shares_gbps(np.array([3.0, 3.0]))
    6.0
    >>> round(equal_shares_gbps(np.array([1.0, 3.0])), 6)  # after 1/3 s one has 2/3 left, at 3
    3.6
    >>> round(equal_shares_gbps(np.array([1.0, 3.0]), 3.5), 6)  # and at 3.5
    3.818182
    """
    total, count = float(rates.sum()), len(rates)
    if count < 2 or rates.min() <= 0 or rates.min() == rates.max():
        return total
    # The fastest first: with equal shares they are done in this order.
    working = np.sort(rates)[::-1]
    bound = max(float(working[0]), most or 0.0)
    left = np.ones(count)
    lasting = 0.0
    while len(working):
        speeds = np.minimum(working * (total / working.sum()), bound)
        step = float((left / speeds).min())
        lasting += step
        left = left - speeds * step
        done = int(np.count_nonzero(left < 1e-9))
        working, left = working[done:], left[done:]
    return count / lasting


# What a lane moves where few others do, for flows whose lanes share the links between two GPUs.


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
    return Flow(flow.transfers, FEW_LANES, flow.fifo, flow.buffer)


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


ToHost = Callable[[int], tuple[int, int]]
"""A device's stamp -> the host's time, and how far off that may be; nanoseconds."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one repeat of a set says.

    `gbps[i]` is flow i's rate over the window, between GPUs with equal shares for its lanes;
    `skew_us` the time between the first start and the last, give or take `skew_error_us`; `overlap`
    is (first end - last start) over (last end - first start); `wrong[i]` how many 16-byte packs of
    flow i arrived wrong, in a check. `ended_early` is whether a copy had nothing more to move
    before the window's end, so that others ran without it.
    """

    gbps: tuple[float, ...]
    lanes: tuple[LaneRate, ...]
    skew_us: float
    skew_error_us: float
    overlap: float
    wrong: tuple[int, ...]
    ended_early: bool = False


class _Span(msgspec.Struct, frozen=True):
    """First start, last start and last end of one part, in its device's nanoseconds."""

    first_start: int
    last_start: int
    end: int


def read_outcome(
    program: Program,
    outcome: Outcome,
    timing: Timing,
    to_host: Mapping[str, ToHost],
    *,
    lone: Mapping[Flow, float] | None = None,
) -> Reading:
    """Work out a repeat's rates; a flow that moved nothing in its window has rate 0.

    `lone` is what a lane of a flow moves where few others do, in GB/s, where that is known.
    """
    known = lone or {}
    gbps: list[float] = []
    lanes: list[LaneRate] = []
    wrong: list[int] = []
    for flow, part in zip(program.transfers.flows, program.counted, strict=True):
        rates = _rates(part, outcome, timing, bursts=flow.is_network)
        shared = shares_links(flow)
        gbps.append(equal_shares_gbps(rates, known.get(flow)) if shared else float(rates.sum()))
        for number, rate in zip(part.numbers, rates, strict=True):
            grain = _grain(part, number, timing)
            lanes.append(
                LaneRate(
                    slice_bytes=part.slice_bytes * grain,
                    gbps=float(rate),
                    fifo_slices=-(-part.slices // grain),
                )
            )
        wrong.append(_wrong(part, outcome))
    parts = [*program.counted, *(part for others in program.other for part in others)]
    spans = {(part.device, part.kind, part.numbers): _span(part, outcome, timing) for part in parts}
    skew_us, error_us, overlap = _together([(key[0], span) for key, span in spans.items()], to_host)
    return Reading(
        gbps=tuple(gbps),
        lanes=tuple(lanes),
        skew_us=skew_us,
        skew_error_us=error_us,
        overlap=overlap,
        wrong=tuple(wrong),
        ended_early=any(_ended_early(part, outcome, timing) for part in parts),
    )


def hides_overlap(program: Program) -> bool:
    """Whether copies and kernels share a device.

    A copy's time is stamped by small kernels, which wait for the writes of the others: stamps then
    bound from below how long the copy went on.
    """
    return any(share.lanes and share.copies for share in program.devices.values())


def why_uncounted(program: Program, reading: Reading) -> str:
    """Say why a repeat is no sample of its set; "" if it is one."""
    for flow, rate in zip(program.transfers.flows, reading.gbps, strict=True):
        if not rate > 0:
            return f"nothing arrived by {flow}"
    if reading.overlap < TOGETHER and not hides_overlap(program):
        share, skew_ms = f"{reading.overlap:.0%}", reading.skew_us / 1e3
        return f"its flows ran together for only {share} of the time (start skew {skew_ms:.3g} ms)"
    return ""


def _rates(
    part: Part, outcome: Outcome, timing: Timing, *, bursts: bool
) -> npt.NDArray[np.float64]:
    """GB/s (bytes a nanosecond) of each lane or copy, between slices that ended in the window.

    With `bursts` lanes may move slices in bursts, as those behind a network do, or threads that
    take turns on a core: they are not taken to be as quick as their bursts.
    """
    if part.kind == "copy":
        return np.array([_copy_rate(part, outcome, number, timing) for number in part.numbers])
    side = "in" if part.kind == "incoming" else "out"
    records = outcome.records[part.device][list(part.numbers)]
    lasting = (records[f"{side}_last"] - records[f"{side}_first"]).astype(np.float64)
    counted = records[f"{side}_count"].astype(np.float64) * part.slice_bytes
    moved = (records[f"{side}_count"] > 0) & (lasting > 0)
    rates: npt.NDArray[np.float64] = np.zeros(len(records))
    np.divide(counted, lasting, out=rates, where=moved)
    if bursts:
        # A steady lane that ends n slices in a window is slower than n + 1 in its length.
        most = (counted + 2 * part.slice_bytes) / (timing.window_us * 1e3)
        np.minimum(rates, most, out=rates)
    return rates


def _grain(part: Part, number: int, timing: Timing) -> int:
    """How many slices are counted at once: a copy's are stamped in groups."""
    return timing.paces[part.device][number].slices if part.kind == "copy" else 1


def _copy_rate(part: Part, outcome: Outcome, number: int, timing: Timing) -> float:
    done = _in_window(outcome.stamps[part.device][number], timing, piped=part.piped)
    if len(done) < 2 or done[-1] <= done[0]:
        return 0.0
    group_bytes = _grain(part, number, timing) * part.slice_bytes
    return float((len(done) - 1) * group_bytes / (done[-1] - done[0]))


def _in_window(
    stamps: npt.NDArray[np.uint64], timing: Timing, *, piped: bool
) -> npt.NDArray[np.int64]:
    """The stamps of groups that were done after the warm-up and before the window's end."""
    times = stamps[stamps > 0].astype(np.int64)
    since = times - times[0]
    warm_ns, end_ns = timing.warm_us * 1e3, (timing.warm_us + timing.window_us) * 1e3
    done, since = times[1:], since[1:]
    # A copy that was let go when its peer had stopped moves nothing that counts.
    counts = since <= end_ns if piped else np.ones(len(done), bool)
    inside: npt.NDArray[np.int64] = done[(since >= warm_ns) & (since <= end_ns)]
    # The few groups of a trial may be done before the warm-up is over, and still say something.
    return inside if len(inside) > 1 else done[counts]


def _ended_early(part: Part, outcome: Outcome, timing: Timing) -> bool:
    if part.kind != "copy":
        return False
    rows = [outcome.stamps[part.device][number] for number in part.numbers]
    lasting_ns = (timing.warm_us + timing.window_us) * 1e3
    return any(int(row[-1]) - int(row[0]) < lasting_ns for row in rows)


def _span(part: Part, outcome: Outcome, timing: Timing) -> _Span:
    if part.kind == "copy":
        rows = [outcome.stamps[part.device][number] for number in part.numbers]
        starts = [int(row[0]) for row in rows]
        ends = [end for row in rows for end in _in_window(row, timing, piped=part.piped).tolist()]
    else:
        records = outcome.records[part.device][list(part.numbers)]
        starts, ends = records["start"].tolist(), records["end"].tolist()
    # What moved nothing has no end.
    return _Span(min(starts), max(starts), max([*ends, *starts]))


def _together(
    spans: list[tuple[str, _Span]], to_host: Mapping[str, ToHost]
) -> tuple[float, float, float]:
    """Skew and its error in microseconds, and the overlap, on the host's clock."""
    first, last, ends, errors = [], [], [], []
    for device, span in spans:
        start_ns, error_ns = to_host[device](span.first_start)
        first.append(start_ns)
        # Within one device's microseconds its own clock is as good as the host's.
        last.append(start_ns + span.last_start - span.first_start)
        ends.append(start_ns + span.end - span.first_start)
        errors.append(error_ns)
    whole = max(ends) - min(first)
    overlap = max(0.0, (min(ends) - max(last)) / whole) if whole > 0 else 0.0
    error_us = 0.0 if len({device for device, _ in spans}) == 1 else 2 * max(errors) / 1e3
    return (max(last) - min(first)) / 1e3, error_us, overlap


def _wrong(part: Part, outcome: Outcome) -> int:
    # Who reads compares; so does a NIC that receives what nobody reads.
    if part.kind != "incoming" and not is_nic(part.device):
        return 0
    return int(outcome.records[part.device][list(part.numbers)]["errors"].sum())
