"""The retry policy: how many attempts each failure gets, before it counts as one."""

from __future__ import annotations

import msgspec


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts, the first included.

    A set is measured again with new workers where one was lost, and a run is repeated with new
    links where one broke, or where hosts were released late: of the last of these runs the overlap
    decides which repeats count. Another port is tried where one is taken at a later address.
    """

    lost_worker: int = 2
    broken_link: int = 2
    late_release: int = 3
    taken_port: int = 20


RETRIES = RetryPolicy()
