"""The spaces that a process of this host has mapped, and ends of lanes at addresses in them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from tccl_profiler.host.lane import HostEnd
from tccl_profiler.messages import Peer
from tccl_profiler.program import COUNTER_BYTES, COUNTERS, Address, End
from tccl_profiler.shared_memory import Segment
from tccl_py.errors import MeasurementError


def lanes_failed(failure: BaseException) -> MeasurementError:
    """What to say where a thread that moves bytes ended by an exception."""
    return MeasurementError(f"lanes failed: {type(failure).__name__}: {failure}")


class MappedSpaces:
    """Segments by space; they are this object's own.

    Args:
        device: whose they are, for sentences.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._segments: dict[str, Segment] = {}

    def put(self, space: str, segment: Segment) -> None:
        """Take a segment as the memory of a space, in place of the one before."""
        before = self._segments.pop(space, None)
        if before is not None:
            before.close()
        self._segments[space] = segment

    def meet(self, peers: Mapping[str, tuple[Peer, int | None]]) -> None:
        """Map other devices' arenas; one without a descriptor is refused when it is used."""
        for space, (peer, descriptor) in peers.items():
            if descriptor is not None:
                self.put(space, Segment.attach(descriptor, peer.size, space))

    def has(self, space: str) -> bool:
        """Whether a space is mapped here."""
        return space in self._segments

    def segment(self, space: str) -> Segment:
        """The memory of a space.

        Raises:
            MeasurementError: it is not mapped here.
        """
        segment = self._segments.get(space)
        if segment is None:
            known = ", ".join(sorted(self._segments)) or "nothing"
            raise MeasurementError(f"{self._device} cannot reach {space}: it has mapped {known}")
        return segment

    def end(self, end: End | None, slice_bytes: int, *, repeat: int, fills: bool) -> HostEnd:
        """A lane's end at addresses of this process, with the repeat's own counters.

        Args:
            end: None is no end.
            slice_bytes: how long a slice is.
            repeat: whose counters.
            fills: whether slices are put there, and not taken.

        Raises:
            MeasurementError: it is not inside what is mapped.
        """
        if end is None:
            return HostEnd()
        return HostEnd(
            data=self._address(end.data, end.slices * slice_bytes),
            slices=end.slices,
            seed=end.seed,
            ahead=end.slices if fills else 0,
            wait=self._counter(end.wait, repeat),
            post=self._counter(end.post, repeat),
        )

    def _counter(self, at: Address | None, repeat: int) -> ctypes.c_uint64 | None:
        if at is None:
            return None
        place = Address(at.space, at.offset + repeat * COUNTERS * COUNTER_BYTES)
        return ctypes.c_uint64.from_address(self._address(place, COUNTER_BYTES))

    def _address(self, at: Address, size: int) -> int:
        segment = self.segment(at.space)
        if not 0 <= at.offset <= segment.size - size:
            raise MeasurementError(
                f"{self._device}: {size} bytes from byte {at.offset} of {at.space} are not inside "
                f"its {segment.size} bytes"
            )
        return segment.address + at.offset

    def close(self) -> None:
        """Give all memory back."""
        for segment in self._segments.values():
            segment.close()
        self._segments = {}
