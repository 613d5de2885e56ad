"""What every device does for one transfer set: its lanes and copies, and where their bytes lie.

A lane is one thread block: it takes slices out of one FIFO, puts slices into another, or both at
once. A FIFO is bytes and two counters of slices: how many its writer has put in, how many its
reader has taken out. A copy is a copy engine's share of the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from tccl_py.transfers.transfer import TransferSet

COUNTER_BYTES = 128
"""A counter has a cache line of its own, and its neighbour's prefetch."""
MAX_REPEATS = 12
"""Repeats that are queued together."""
COUNTERS = 4096
"""Counters that each space has for one repeat."""
COUNTER_AREA_BYTES = COUNTERS * COUNTER_BYTES * MAX_REPEATS
"""Where the bytes of a space begin: its counters come first."""
MAX_COPIES = 16
"""Copies that a device can be asked for at once; each has a stream of its own, and the streams of a
GPU share 32 queues."""


class Address(msgspec.Struct, frozen=True, order=True):
    """A place in a space that several processes map: `C0` host memory, `G1` GPU 1's arena."""

    space: str
    offset: int


class End(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a FIFO; without counters, of memory that nobody else waits for.

    `wait` is looked at before a slice and `post` written after it; `seed` is of the check pattern.
    """

    data: Address
    slices: int
    seed: int
    wait: Address | None = None
    post: Address | None = None


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """What one block does. `cycle` is an all-reduce's number of chunks, 2 (n - 1) for n GPUs."""

    incoming: End | None = None
    outgoing: End | None = None
    slice_bytes: int
    coupled: bool = False
    cycle: int = 0


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """What one copy engine does: slices from `source` to `destination`, in order.

    A side that is None is this device's own memory.
    """

    source: End | None
    destination: End | None
    slice_bytes: int


class DeviceProgram(msgspec.Struct, frozen=True, kw_only=True):
    """One device's share of a set."""

    lanes: tuple[Lane, ...] = ()
    copies: tuple[Copy, ...] = ()


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Where a flow's slices are counted: at one end of some lanes of a device, or by copies.

    `piped` is whether they go through FIFOs, and so wait for the flow's other part.
    """

    device: int
    kind: Literal["incoming", "outgoing", "copy"]
    numbers: tuple[int, ...]
    slice_bytes: int
    slices: int
    piped: bool


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A set's work by device; `counted[i]` and `other[i]` are the ends of the set's flow i.

    A flow's rate is what arrives, so a bounce is counted where it is read; `other` are its other
    ends, for start and end stamps. `space_bytes` is what each space must hold, counters included.
    """

    transfers: TransferSet
    devices: Mapping[int, DeviceProgram]
    counted: tuple[Part, ...]
    other: tuple[tuple[Part, ...], ...]
    space_bytes: Mapping[str, int]

    @property
    def fifo_bytes(self) -> int:
        """What all FIFOs take together."""
        return sum(self.space_bytes.values()) - COUNTER_AREA_BYTES * len(self.space_bytes)
