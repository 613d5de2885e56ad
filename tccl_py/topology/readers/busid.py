"""PCI bus ids in one spelling: `0000:1a:00.0`, lower case, a domain of at least four digits."""

from __future__ import annotations

import re

_BUS_ID = re.compile(
    r"([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-9a-fA-F])", re.ASCII
)


def normal_bus_id(text: str) -> str | None:
    """The one spelling of a bus id; None if `text` is none.

    NVML writes domains with eight digits, the kernel with four or more.

    >>> normal_bus_id("00000000:1A:00.0")
    '0000:1a:00.0'
    """
    match = _BUS_ID.fullmatch(text)
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


def bus_order(bus_id: str) -> tuple[int, ...]:
    """Sort key: bus ids in the order NVML counts GPUs in."""
    return tuple(int(part, 16) for part in re.split(r"[:.]", bus_id))
