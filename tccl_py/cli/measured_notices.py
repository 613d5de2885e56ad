"""What a plan says of the measurements that it comes from."""

from __future__ import annotations

from tccl_py.cli.hardware import Care, Hardware
from tccl_py.cli.jobs import ClusterHardware

_MANY = 0.1
"""More sets than this (of all measured) whose rates vary are worth a word."""
_FEW = 5
"""Sets that could not be measured, named in a plan."""


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
    failures = list(dict.fromkeys(source.failures))[:_FEW]
    notices += [f"left out, as it cannot be measured: {text}" for text in failures]
    return tuple(dict.fromkeys(notices))
