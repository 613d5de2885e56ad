"""What the doctor says: findings, and what it could not see."""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["hang", "slow", "note"]
SEVERITIES: tuple[Severity, ...] = ("hang", "slow", "note")
"""From bad to harmless. `hang`: NCCL hangs or fails; `slow`: it or a measurement is spoilt."""
_SHOWN = 6


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be.

    `why` says what it does and `source` who says so; `mend` is what mends it, to be typed or done
    by a person, "" if nothing does.
    """

    severity: Severity
    check: str
    what: str
    where: str
    why: str
    source: str
    mend: str = ""


class Unseen(msgspec.Struct, frozen=True, kw_only=True):
    """Something that could not be looked at, and what would let the doctor see it."""

    check: str
    what: str
    why: str


def listed(names: list[str]) -> str:
    """Names in a row, the first few of many.

    >>> listed(["GPU 0", "GPU 1"])
    'GPU 0, GPU 1'
    """
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
