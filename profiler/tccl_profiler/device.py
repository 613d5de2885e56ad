"""What a worker needs of a device; a GPU and host memory both answer to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tccl_profiler.control import Control
from tccl_profiler.links import Endpoint
from tccl_profiler.messages import Peer, Pinged, Run, Start, Started
from tccl_profiler.program import Link
from tccl_profiler.shared_memory import Segment


class Device(Protocol):
    """One device of one worker process. Every method may raise MeasurementError."""

    def open(self, start: Start, control: Control) -> tuple[Started, tuple[int, ...]]:
        """Set up memory and kernels; the second value are descriptors to send along."""

    def meet(self, peers: Mapping[str, tuple[Peer, int | None]]) -> None:
        """Map the other devices' arenas: by space, each with its descriptor or None.

        A peer that cannot be reached is refused when a program asks for it.
        """

    def share(self, space: str, segment: Segment) -> None:
        """Make host memory reachable for the device, in place of what had this name."""

    def queue(self, run: Run) -> None:
        """Clear the device's own counters and queue all repeats; returns before they have run."""

    def finish(self) -> None:
        """Wait until everything queued has run."""

    def ping(self, count: int) -> Pinged:
        """Compare the device's clock with CLOCK_MONOTONIC, `count` times; nothing else runs."""

    # Links to devices of other hosts, a NIC's or NCCL's: they stay from run to run.

    def listen(self, links: Sequence[Link]) -> tuple[Endpoint, ...]:
        """Begin to wait for links, and say where."""

    def connect(self, ends: Mapping[Link, Endpoint], limit_s: float) -> None:
        """Make links to where they are waited for."""

    def accept(self, links: Sequence[Link], limit_s: float) -> None:
        """Wait until links that are listened for have come."""

    def usable(self) -> tuple[Link, ...]:
        """The links that a run can use."""

    def close(self) -> None:
        """Give everything back."""
