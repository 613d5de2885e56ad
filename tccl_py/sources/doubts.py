"""A measurement as JSON and text, with what makes it doubtful."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tccl_py.files import picked
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import flow_texts, parse_flow

_MANY = 0.2
"""A share of outliers (of all repeats) above this gets a notice."""


def overlap_notices(text: str, measurement: Measurement) -> Iterator[str]:
    """Warn where the clock does not show that the flows of a set ran together."""
    if measurement.overlap_at_least:
        yield (
            f"{text}: its flows ran together for at least {measurement.overlap:.0%} of the time; "
            "the clock shows no more, as time stamps of copy engines wait for kernels of their "
            "GPU, and copies may be faster than was measured"
        )


def in_given_order(
    text: str, measurement: Measurement, values: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return rates, or `values`, in the order of `text`; measurements have their own order."""
    return measurement.in_order(map(parse_flow, flow_texts(text)), values)


def measurement_json(text: str, measurement: Measurement, *, dry_run: bool) -> dict[str, Any]:
    """Return the JSON of a measurement of the set `text`, rates in its order."""
    gbps = in_given_order(text, measurement)
    entry = {"set": text, "gbps": gbps, "total_gbps": sum(gbps)}
    entry |= picked(measurement, "simulated", "assumed") | {"dry_run": dry_run}
    if not measurement.simulated:
        entry |= picked(measurement, "skew_us", "skew_error_us", "overlap", "overlap_at_least")
        entry["spread"] = in_given_order(text, measurement, relative_intervals(measurement))
        entry["repeats"] = len(measurement.samples_gbps[0])
        entry |= picked(measurement, "settled", "outliers")
    return entry


def doubts(text: str, measurement: Measurement) -> Iterator[str]:
    """Warn of what makes a measurement of the set `text` doubtful."""
    if measurement.simulated:
        return
    repeats, far = len(measurement.samples_gbps[0]), len(measurement.outliers)
    if not measurement.settled:
        width = half_width(max(relative_intervals(measurement)))
        yield (
            f"{text}: rates vary: after {repeats} repeats the 95 % interval is still {width} wide; "
            "other work, clocks or heat may disturb it; a larger target accepts it"
        )
    if far > repeats * _MANY:
        yield f"{text}: repeats far from the others: {far} of {repeats}; they count as well"
    yield from overlap_notices(text, measurement)


def timing_text(measurement: Measurement) -> str:
    """Return the skew and overlap of a set's flows, after a comma; "" if not known."""
    if measurement.skew_us is None or measurement.overlap is None:
        return ""
    error = f" \u00b1 {measurement.skew_error_us:.1f}" if measurement.skew_error_us else ""
    least = "at least " if measurement.overlap_at_least else ""
    return f", skew {measurement.skew_us:.1f}{error} us, overlap {least}{measurement.overlap:.0%}"


def half_width(width: float) -> str:
    """Return a relative interval's width as text."""
    return f"\u00b1 {width / 2:.1%}" if width < float("inf") else "?"


def relative_intervals(measurement: Measurement) -> tuple[float, ...]:
    """Return the width of each rate's 95 % interval, relative to it; inf below 6 repeats.

    In the measurement's order of flows.
    """
    from tccl_profiler.precision import relative_width  # noqa: PLC0415

    return tuple(map(relative_width, measurement.samples_gbps))
