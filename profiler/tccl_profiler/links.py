"""Links between NICs: where one can be reached, and what a pool's workers are asked to make.

A link is made in three steps, each on all hosts before the next: whoever receives listens and says
where, whoever sends connects, whoever receives accepts. Who carries what is said from host to host
is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tccl_profiler.program import Link
from tccl_py.errors import MeasurementError


class LinkLost(MeasurementError):  # noqa: N818 - says what happened
    """A link could not be made or has broken; both its NICs are named. Make it again."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a NIC waits for a link, and what tells the link from other callers."""

    address: str
    port: int
    token: bytes


class Listen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Wait for these links, in place of those that had their names; answered by Listening."""

    links: tuple[Link, ...]


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where, in the order asked."""

    endpoints: tuple[Endpoint, ...]


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make these links, in place of those that had their names, within so many seconds."""

    links: tuple[Link, ...]
    endpoints: tuple[Endpoint, ...]
    limit_s: float


class Accept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take these links, which were listened for, within so many seconds."""

    links: tuple[Link, ...]
    limit_s: float


class AskLinks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say which links can be used; answered by Linked."""


class Linked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The links that are there and clean."""

    links: tuple[Link, ...]


def names(links: Sequence[Link]) -> str:
    """Links in a sentence, the first few by name.

    >>> names([Link("h0.N0", "h1.N0", 0), Link("h0.N0", "h1.N0", 1)])
    'link 0 from h0.N0 to h1.N0, link 1 from h0.N0 to h1.N0'
    """
    shown = ", ".join(map(str, links[:3]))
    return f"{shown} and {len(links) - 3} more" if len(links) > 3 else shown
