"""Host memory that FIFOs lie in: a segment for each NUMA node, made on demand and reused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tccl_profiler.program import COUNTER_BYTES, COUNTERS
from tccl_profiler.shared_memory import Segment, create_segment
from tccl_py.errors import MeasurementError

_SMALLEST = 64 << 20
_COUNTERS_BYTES = COUNTERS * COUNTER_BYTES
"""The counters of one repeat."""


class HostSpaces:
    """Segments by space (`C0`), each on its node.

    Args:
        numa_ids: by space the system's number of its NUMA node, None if it has one.
    """

    def __init__(self, numa_ids: Mapping[str, int | None]) -> None:
        self._numa_ids = dict(numa_ids)
        self._segments: dict[str, Segment] = {}

    @property
    def size(self) -> int:
        """Bytes of all together."""
        return sum(segment.size for segment in self._segments.values())

    def ensure(self, space: str, size: int, share: Callable[[str, Segment], None]) -> None:
        """Have `size` bytes in a space; `share` tells the workers of memory that is new.

        Raises:
            MeasurementError: no such node, or not that much memory on it.
        """
        old = self._segments.get(space)
        if old is not None and old.size >= size:
            return
        if space not in self._numa_ids:
            known = ", ".join(self._numa_ids)
            raise MeasurementError(f"{space} is no NUMA node of this machine; there are {known}")
        wanted = max(_SMALLEST, 1 << (size - 1).bit_length())
        new = create_segment(wanted, numa_id=self._numa_ids[space], label=space)
        try:
            share(space, new)
        except BaseException:
            new.close()
            raise
        self._segments[space] = new
        if old is not None:
            old.close()

    def clear(self, space: str, repeats: int) -> None:
        """Set the counters of a space's first repeats to 0."""
        count = _COUNTERS_BYTES // 8 * repeats
        self._segments[space].array(np.uint64, 0, count)[:] = 0

    def let_go(self, repeat: int) -> None:
        """Set all counters of a repeat so high that nobody waits for them any more."""
        for segment in self._segments.values():
            counters = segment.array(np.uint64, repeat * _COUNTERS_BYTES, _COUNTERS_BYTES // 8)
            counters[:] = 1 << 62

    def close(self) -> None:
        """Give all memory back."""
        for segment in self._segments.values():
            segment.close()
        self._segments = {}
