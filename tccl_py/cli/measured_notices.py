"""What is said of measurements: of each, and of all that a plan comes from."""

from __future__ import annotations

from collections.abc import Iterator

from tccl_py.cli.hardware import Care, Hardware
from tccl_py.cli.jobs import ClusterHardware
from tccl_py.model.measurement import Measurement

_MANY = 0.1
"""More sets than this (of all measured) whose rates vary are worth a word."""
_FEW = 5
"""Sets that could not be measured, or whose overlap is not known, named in a plan."""


def measured_notices(
    source: Hardware | ClusterHardware, careful: Care, conditions: str
) -> tuple[str, ...]:
    """What was noticed while a source measured, each once.

    Args:
        source: what measured; closed by now, as it looks once more at the devices when it is.
        careful: how.
        conditions: the source's, from before it was closed.
    """
    notices = list(source.notices)
    if conditions:
        notices.append(f"while it was measured: {conditions}")
    if source.unsettled > source.count * _MANY:
        notices.append(
            f"rates vary: {source.unsettled} of {source.count} sets measured did not come as "
            f"close as --target {careful.target:g}; other work, clocks or heat may disturb them"
        )
    for measurement in source.apart[:_FEW]:
        notices += overlap_notices(measurement.transfers, measurement)
    failures = list(dict.fromkeys(source.failures))[:_FEW]
    notices += [f"left out, as it cannot be measured: {text}" for text in failures]
    return tuple(dict.fromkeys(notices))


def overlap_notices(text: object, measurement: Measurement) -> Iterator[str]:
    """Warn where the clock does not show that the flows of a set ran together."""
    if measurement.overlap_at_least:
        yield (
            f"{text}: its flows ran together for at least {measurement.overlap:.0%} of the time; "
            "the clock shows no more, as time stamps of copy engines wait for kernels of their "
            "GPU, and copies may be faster than was measured"
        )
