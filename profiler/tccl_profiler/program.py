"""The program of a transfer set: each device's lanes and copies, and their addresses.

A lane is one thread block, and takes slices from one FIFO, puts slices into another, or both. A
FIFO is bytes and two counters: slices written and slices read. A copy is a lane of a copy engine. A
NIC's lane moves slices between a FIFO and a link. Devices have the names of places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from tccl_py.model.transfer import TransferSet, place_named

T = TypeVar("T")

COUNTER_BYTES = 128  # a counter has its own cache line and the line that is prefetched with it
MAX_REPEATS = 12  # repeats that are queued together
COUNTERS = 4096  # counters of one space for one repeat
COUNTER_AREA_BYTES = COUNTERS * COUNTER_BYTES * MAX_REPEATS
"""Offset of a space's first FIFO: the counters come first."""
MAX_COPIES = 16
"""Concurrent copies of a device; each has a stream, and a GPU's streams share 32 queues."""


class Address(msgspec.Struct, frozen=True, order=True):
    """An offset in a space that several processes map: `C0` host memory, `G1` GPU 1's arena."""

    space: str
    offset: int


class Carrier(msgspec.Struct, frozen=True, order=True):
    """An NCCL path between GPUs of two hosts: NICs, channels, FIFO size, GPUDirect at each end."""

    nic_out: int
    nic_in: int
    channels: int
    fifo_bytes: int
    direct_out: bool
    direct_in: bool

    def __str__(self) -> str:
        return f"NCCL over N{self.nic_out} and N{self.nic_in}"


class Link(msgspec.Struct, frozen=True, order=True):
    """A connection between two NICs or, with a carrier, between two GPUs, by full device names.

    `number` counts the links of one pair from 0, so that a later set reuses earlier links.
    """

    sender: str
    receiver: str
    number: int
    carrier: Carrier | None = None

    def __str__(self) -> str:
        by = f" by {self.carrier}" if self.carrier else ""
        return f"link {self.number} from {self.sender} to {self.receiver}{by}"


class End(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a FIFO, or of plain memory if it has no counters.

    The end polls `wait` before a slice and writes `post` after it; `seed` is the check pattern's.
    """

    data: Address
    slices: int
    seed: int
    wait: Address | None = None
    post: Address | None = None


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one block or copy engine: slices from `incoming` to `outgoing`, in order.

    The missing end of a copy is the device's own memory. `cycle` is an all-reduce's chunk count,
    2 (n - 1) for n GPUs. A NIC's lane has one end and a `link`; so has a copy whose slices NCCL
    moves.
    """

    incoming: End | None = None
    outgoing: End | None = None
    slice_bytes: int
    coupled: bool = False
    cycle: int = 0
    link: Link | None = None


class DeviceProgram(msgspec.Struct, frozen=True, kw_only=True):
    """One device's share of a set: lanes of a kernel, and copies, each on a stream."""

    lanes: tuple[Lane, ...] = ()
    copies: tuple[Lane, ...] = ()


def on_host(values: Mapping[str, T], host: str) -> dict[str, T]:
    """Return what belongs to a host's devices or spaces, under their local names."""
    places = ((place_named(name), value) for name, value in values.items())
    return {place.device: value for place, value in places if place.host == host}


class FlowEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a flow on one device, which counts the slices; `ends[b]` is of block b.

    `incoming`: the device takes slices from the ends. `numbers` are of the device's lanes or, of an
    `engine`, copies. A `piped` endpoint goes through FIFOs, and so waits for the flow's opposite
    endpoint. A NIC has a link for each block; a flow that NCCL carries has one link.
    """

    flow: int
    device: str
    incoming: bool
    ends: tuple[End, ...]
    slice_bytes: int
    engine: bool = False
    piped: bool = True
    links: tuple[Link, ...] = ()
    numbers: tuple[int, ...] = ()


class HostProgram(msgspec.Struct, frozen=True, kw_only=True):
    """Device programs, the bytes of each space (counters included), and the links they use."""

    devices: Mapping[str, DeviceProgram]
    space_bytes: Mapping[str, int]
    links: tuple[Link, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the devices, sorted; "" for devices without host."""
        return tuple(sorted({place_named(device).host for device in self.devices}))

    def on(self, host: str) -> HostProgram:
        """Return one host's share under local names; links keep full names at both ends."""
        return HostProgram(
            devices={
                name: _localized(share) for name, share in on_host(self.devices, host).items()
            },
            space_bytes=on_host(self.space_bytes, host),
            links=tuple(
                link
                for link in self.links
                if any(place_named(end).host == host for end in (link.sender, link.receiver))
            ),
        )


class Program(HostProgram, frozen=True, kw_only=True):
    """A compiled set: `counted[i]` and `other[i]` are the endpoints of the set's flow i.

    A flow's rate is counted at `counted`, where its bytes arrive; `other` gives start and end only.
    """

    transfers: TransferSet
    counted: tuple[FlowEndpoint, ...]
    other: tuple[tuple[FlowEndpoint, ...], ...]


def _localized(value: Any) -> Any:
    if isinstance(value, Address):
        return Address(place_named(value.space).device, value.offset)
    if isinstance(value, tuple):
        return tuple(map(_localized, value))
    if isinstance(value, DeviceProgram | Lane | End):
        fields = {name: _localized(getattr(value, name)) for name in value.__struct_fields__}
        return type(value)(**fields)
    return value
