"""The Fingerprint: what tells one host at one time from another, to see whether it has changed."""

from __future__ import annotations

import msgspec


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a host's GPUs, driver and kernel; measurements hold for equal ones only."""

    gpu_uuids: tuple[str, ...]
    driver: str
    numa_count: int
    kernel: str
