"""From what lanes and copies recorded to rates, start skew and overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_profiler.equal_shares import equal_shares_gbps
from tccl_profiler.lone import shares_links
from tccl_profiler.program import Part, Program, is_nic
from tccl_profiler.runs import Outcome, Timing
from tccl_profiler.window import LaneRate
from tccl_py.model.measurement import TOGETHER
from tccl_py.model.transfer import Flow

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
