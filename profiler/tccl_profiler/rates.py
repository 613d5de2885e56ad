"""Bandwidth, start skew and overlap from the records of a run, and the clocks of devices.

NCCL gives every channel the same number of bytes, and a collective ends with its last channel. On
NVLink, channels of one kernel are served unequally: of 24 between two H200, the slowest seven had
10.5 GB/s each, the fastest 18.8. When those end, slow channels speed up to an uncontended channel's
rate at most, which the same set with few channels has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_profiler.pool import RunResult, RunSpec
from tccl_profiler.precision import ChannelRate
from tccl_profiler.program import FlowEndpoint, Program
from tccl_py.model.measurement import TOGETHER
from tccl_py.model.transfer import Flow, place_named

FEW_CHANNELS = 4
"""Channels of an uncontended flow: even of eight between two H200, each had 20.6 GB/s or more."""

ToHost = Callable[[int], tuple[int, int]]
"""A device's stamp -> the host's time and the error bound of that; nanoseconds."""
Floats = npt.NDArray[np.float64]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one repeat of a set.

    `gbps[i]` is flow i's bandwidth, `straggler_gbps` between GPUs; `overlap` is (first end - last
    start) over (last end - first start); `wrong[i]` counts flow i's damaged packs of 16 bytes in a
    check. `ended_early`: a copy ran out of bytes within the window.
    """

    gbps: tuple[float, ...]
    channels: tuple[ChannelRate, ...]
    skew_us: float
    skew_error_us: float
    overlap: float
    wrong: tuple[int, ...]
    ended_early: bool = False


def sample_of(
    program: Program,
    result: RunResult,
    spec: RunSpec,
    to_host: Mapping[str, ToHost],
    *,
    uncontended: Mapping[Flow, float] | None = None,
) -> Sample:
    """Work out a repeat's bandwidths; `uncontended` is GB/s of a flow's channel among few."""
    alone_gbps = uncontended or {}
    gbps: list[float] = []
    channels: list[ChannelRate] = []
    for flow, part in zip(program.transfers.flows, program.counted, strict=True):
        rates = _rates(part, result, spec, bursts=flow.is_network)
        shared = shares_links(flow)
        gbps.append(straggler_gbps(rates, alone_gbps.get(flow)) if shared else float(rates.sum()))
        for rate, grain in zip(rates, _grains(part, spec), strict=True):
            size, held = part.slice_bytes * grain, -(-part.ends[0].slices // grain)
            channels.append(ChannelRate(slice_bytes=size, gbps=float(rate), fifo_slices=held))
    parts = [*program.counted, *itertools.chain(*program.other)]
    skew_us, error_us, overlap = _overlap(parts, result, spec, to_host)
    rows = [row for part in parts if part.engine for row in _stamps(part, result)]
    return Sample(
        gbps=tuple(gbps),
        channels=tuple(channels),
        skew_us=skew_us,
        skew_error_us=error_us,
        overlap=overlap,
        wrong=tuple(_wrong(part, result) for part in program.counted),
        ended_early=any(int(row[-1]) - int(row[0]) < spec.lasting_s * 1e9 for row in rows),
    )


def hides_overlap(program: Program) -> bool:
    """Return whether copies share a device with kernels, so that stamps bound their end only."""
    return any(share.lanes and share.copies for share in program.devices.values())


def why_uncounted(program: Program, sample: Sample) -> str:
    """Return why a repeat is no valid sample of its set; "" for a valid one."""
    for flow, rate in zip(program.transfers.flows, sample.gbps, strict=True):
        if not rate > 0:
            return f"nothing arrived by {flow}"
    if sample.overlap < TOGETHER and not hides_overlap(program):
        share, skew_ms = f"{sample.overlap:.0%}", sample.skew_us / 1e3
        return f"its flows ran together for only {share} of the time (start skew {skew_ms:.3g} ms)"
    return ""


def straggler_gbps(rates: Floats, most: float | None = None) -> float:
    """Return the bandwidth of channels with equal bytes, limited by the last to end.

    Args:
        rates: of each channel while all run, shape (channels,). While fewer run, they share the sum
            in the same proportions, each up to `most`; the excess is lost.
        most: an uncontended channel's rate; at least the fastest of `rates` is taken.

    Returns:
        float: at most the sum of rates; exactly the sum if they are equal, or if a channel moved
        nothing (its share is then unknown).

    >>> straggler_gbps(np.array([3.0, 3.0]))
    6.0
    >>> round(straggler_gbps(np.array([1.0, 3.0])), 6)  # after 1/3 s, 2/3 are left, at 3
    3.6
    >>> round(straggler_gbps(np.array([1.0, 3.0]), 3.5), 6)  # and at 3.5
    3.818182
    """
    total, count = float(rates.sum()), len(rates)
    if count < 2 or rates.min() <= 0 or rates.min() == rates.max():
        return total
    # The fastest first: with equal bytes, channels end in this order.
    working = np.sort(rates)[::-1]
    bound = max(float(working[0]), most or 0.0)
    remaining = np.ones(count)
    lasting = 0.0
    while len(working):
        speeds = np.minimum(working * (total / working.sum()), bound)
        step = float((remaining / speeds).min())
        lasting += step
        remaining = remaining - speeds * step
        done = int(np.count_nonzero(remaining < 1e-9))
        working, remaining = working[done:], remaining[done:]
    return count / lasting


def shares_links(flow: Flow) -> bool:
    """Return whether a flow's channels share links; host memory serves channels alike."""
    return (
        len(flow.transfers) == 1
        and not flow.transfers[0].uses_copy_engine
        and flow.blocks is not None
        and flow.source.kind == flow.destination.kind == "G"
    )


def with_few_channels(flow: Flow) -> Flow:
    """Return the flow with few channels, if they share links; else the flow itself.

    >>> from tccl_py.model.transfer import parse_flow
    >>> str(with_few_channels(parse_flow("G0->G0->G1{blocks=24}")))
    'G0->G0->G1{blocks=4}'
    """
    if not shares_links(flow) or flow.blocks is None or flow.blocks <= FEW_CHANNELS:
        return flow
    return Flow(flow.transfers, FEW_CHANNELS, flow.fifo, flow.buffer)


def uncontended_gbps(program: Program, channels: Sequence[ChannelRate]) -> Mapping[Flow, float]:
    """Return the median channel's GB/s of each flow that shares links, from `Sample.channels`."""
    rates = iter([channel.gbps for channel in channels])
    by_flow: dict[Flow, list[float]] = {}
    for flow, part in zip(program.transfers.flows, program.counted, strict=True):
        # Equal flows are one key.
        by_flow.setdefault(flow, []).extend(next(rates) for _ in part.numbers)
    return {flow: float(np.median(row)) for flow, row in by_flow.items() if shares_links(flow)}


def median_channels(samples: Sequence[Sample]) -> tuple[ChannelRate, ...]:
    """Return each channel at its median rate over some repeats."""
    return tuple(
        msgspec.structs.replace(rates[0], gbps=float(np.median([rate.gbps for rate in rates])))
        for rates in zip(*(sample.channels for sample in samples), strict=True)
    )


def _rates(part: FlowEndpoint, result: RunResult, spec: RunSpec, *, bursts: bool) -> Floats:
    """Return GB/s (bytes per nanosecond) of each lane or copy, between slices in the window.

    With `bursts`, slices may come in bursts (behind a network, or from threads that share a core):
    a lane's rate is then bounded by its bytes over the whole window.
    """
    if part.engine:
        done = [_in_window(row, spec, piped=part.piped) for row in _stamps(part, result)]
        lasting = np.array([float(np.ptp(times)) if len(times) else 0.0 for times in done])
        slices = np.array([len(times) - 1 for times in done]) * np.array(_grains(part, spec))
    else:
        side = "in" if part.incoming else "out"
        records = result.records[part.device][list(part.numbers)]
        lasting = (records[f"{side}_last"] - records[f"{side}_first"]).astype(np.float64)
        slices = records[f"{side}_count"].astype(np.float64)
    counted = slices * part.slice_bytes
    rates: Floats = np.zeros(len(part.numbers))
    np.divide(counted, lasting, out=rates, where=(slices > 0) & (lasting > 0))
    if bursts and not part.engine:
        # A steady lane that ends n slices in a window is slower than n + 1 in its length.
        most = (counted + 2 * part.slice_bytes) / (spec.window_us * 1e3)
        np.minimum(rates, most, out=rates)
    return rates


def _grains(part: FlowEndpoint, spec: RunSpec) -> list[int]:
    """Return the slices that are counted at once: a copy is stamped in groups."""
    if not part.engine:
        return [1] * len(part.numbers)
    return [spec.paces[part.device][number].slices for number in part.numbers]


def _stamps(part: FlowEndpoint, result: RunResult) -> list[npt.NDArray[np.uint64]]:
    return [result.stamps[part.device][number] for number in part.numbers]


def _in_window(
    stamps: npt.NDArray[np.uint64], spec: RunSpec, *, piped: bool
) -> npt.NDArray[np.int64]:
    times = stamps[stamps > 0].astype(np.int64)
    done, since = times[1:], times[1:] - times[0]
    warm_ns, end_ns = spec.warm_us * 1e3, (spec.warm_us + spec.window_us) * 1e3
    # A copy that was released after its peer had stopped moves nothing that counts.
    counts = since <= end_ns if piped else np.ones(len(done), bool)
    inside: npt.NDArray[np.int64] = done[(since >= warm_ns) & (since <= end_ns)]
    # The few groups of a trial may end within the warm-up, and still say something.
    return inside if len(inside) > 1 else done[counts]


def _span(part: FlowEndpoint, result: RunResult, spec: RunSpec) -> tuple[int, int, int]:
    """Return the first and the last start, and the last end."""
    if part.engine:
        rows = _stamps(part, result)
        starts = [int(row[0]) for row in rows]
        ends = [end for row in rows for end in _in_window(row, spec, piped=part.piped).tolist()]
    else:
        records = result.records[part.device][list(part.numbers)]
        starts, ends = records["start"].tolist(), records["end"].tolist()
    # A part that moved nothing has no end.
    return min(starts), max(starts), max([*ends, *starts])


def _overlap(
    parts: Sequence[FlowEndpoint], result: RunResult, spec: RunSpec, to_host: Mapping[str, ToHost]
) -> tuple[float, float, float]:
    """Return skew and its error in microseconds, and the overlap, on the host's clock."""
    first, last, ends, errors = [], [], [], []
    for part in parts:
        begun, last_begun, end = _span(part, result, spec)
        start_ns, error_ns = to_host[part.device](begun)
        first.append(start_ns)
        # Within microseconds a device's own clock is as good as the host's.
        last.append(start_ns + last_begun - begun)
        ends.append(start_ns + end - begun)
        errors.append(error_ns)
    span = max(ends) - min(first)
    overlap = max(0.0, (min(ends) - max(last)) / span) if span > 0 else 0.0
    error_us = 0.0 if len({part.device for part in parts}) == 1 else 2 * max(errors) / 1e3
    return (max(last) - min(first)) / 1e3, error_us, overlap


def _wrong(part: FlowEndpoint, result: RunResult) -> int:
    """Return the wrong packs: the reading kernel compares, or a receiving NIC without a kernel."""
    if part.engine or not (part.incoming or place_named(part.device).kind == "N"):
        return 0
    return int(result.records[part.device][list(part.numbers)]["errors"].sum())
