"""What every device does for one transfer set: its lanes and copies, and where their bytes lie.

A lane is one thread block: it takes slices out of one FIFO, puts slices into another, or both at
once. A FIFO is bytes and two counters of slices: how many its writer has put in, how many its
reader has taken out. A copy is a copy engine's share of the same work. A lane of a NIC takes slices
out of a FIFO and sends them over a link, or puts into one what comes by a link.

A flow over the network may be NCCL's to carry: then it is a copy at each of its two GPUs, which a
link joins, and no NIC has a lane of it.

Devices are named as places are: `G0`, `N0`; where a program is for several hosts, `h1.G0`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, overload

import msgspec

from tccl_py.model.transfer import TransferSet

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


def host_of(name: str) -> str:
    """The host of a device or a space, "" where none is named.

    >>> host_of("node-1.rack.G0"), host_of("G0")
    ('node-1.rack', '')
    """
    return name.rpartition(".")[0]


def local(name: str) -> str:
    """The name of a device or a space on its own host.

    >>> local("node-1.rack.G0"), local("G0")
    ('G0', 'G0')
    """
    return name.rpartition(".")[2]


def is_nic(device: str) -> bool:
    """Whether a device's name is a NIC's."""
    return local(device).startswith("N")


class Address(msgspec.Struct, frozen=True, order=True):
    """A place in a space that several processes map: `C0` host memory, `G1` GPU 1's arena."""

    space: str
    offset: int


class Carrier(msgspec.Struct, frozen=True, order=True):
    """How NCCL carries bytes from a GPU to one of another host: by which NIC out and into, on how
    many channels, through FIFOs of how many bytes, and which of the two NICs reach GPU memory."""

    nic_out: int
    nic_in: int
    channels: int
    fifo_bytes: int
    direct_out: bool
    direct_in: bool

    def __str__(self) -> str:
        return f"NCCL over N{self.nic_out} and N{self.nic_in}"


class Link(msgspec.Struct, frozen=True, order=True):
    """The connection from one NIC's lane to another's, by the names that the whole program uses;
    with a carrier, from one GPU to another.

    Those between the same two are told apart by `number`, from 0 on, so that a later set finds the
    links of an earlier one.
    """

    sender: str
    receiver: str
    number: int
    carrier: Carrier | None = None

    def __str__(self) -> str:
        by = f" by {self.carrier}" if self.carrier else ""
        return f"link {self.number} from {self.sender} to {self.receiver}{by}"


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
    """What one block does. `cycle` is an all-reduce's number of chunks, 2 (n - 1) for n GPUs.

    A NIC's lane has one end and a `link`: it sends what it takes, or puts what it receives.
    """

    incoming: End | None = None
    outgoing: End | None = None
    slice_bytes: int
    coupled: bool = False
    cycle: int = 0
    link: Link | None = None


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """What one copy engine does: slices from `source` to `destination`, in order.

    A side that is None is this device's own memory. With a `link` both are, and NCCL moves the
    slices to the other end of the link, or from there.
    """

    source: End | None
    destination: End | None
    slice_bytes: int
    link: Link | None = None
    sends: bool = False


class DeviceProgram(msgspec.Struct, frozen=True, kw_only=True):
    """One device's share of a set."""

    lanes: tuple[Lane, ...] = ()
    copies: tuple[Copy, ...] = ()


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Where a flow's slices are counted: at one end of some lanes of a device, or by copies.

    `piped` is whether they go through FIFOs, and so wait for the flow's other part. A copy's groups
    of slices last `group_us` at least, beside which what separates them counts for nothing.
    """

    device: str
    kind: Literal["incoming", "outgoing", "copy"]
    numbers: tuple[int, ...]
    slice_bytes: int
    slices: int
    piped: bool
    group_us: float = 500.0


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What devices do together, by their names; `space_bytes` is what each space must hold,
    counters included, and `links` are those that NICs' lanes, or NCCL, send and receive by.
    """

    devices: Mapping[str, DeviceProgram]
    space_bytes: Mapping[str, int]
    links: tuple[Link, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts whose devices take part, sorted; "" is the host that is meant anyway."""
        return tuple(sorted({host_of(device) for device in self.devices}))

    def on(self, host: str) -> Work:
        """One host's share, with devices and spaces as they are named there; links stay as they
        are, because they have an end elsewhere."""
        return Work(
            devices={
                local(device): DeviceProgram(
                    lanes=tuple(map(_lane_there, share.lanes)),
                    copies=tuple(map(_copy_there, share.copies)),
                )
                for device, share in self.devices.items()
                if host_of(device) == host
            },
            space_bytes={
                local(space): size
                for space, size in self.space_bytes.items()
                if host_of(space) == host
            },
            links=tuple(
                link
                for link in self.links
                if host in (host_of(link.sender), host_of(link.receiver))
            ),
        )


class Program(Work, frozen=True, kw_only=True):
    """A set's work by device; `counted[i]` and `other[i]` are the ends of the set's flow i.

    A flow's rate is what arrives, so a bounce is counted where it is read; `other` are its other
    ends, for start and end stamps.
    """

    transfers: TransferSet
    counted: tuple[Part, ...]
    other: tuple[tuple[Part, ...], ...]

    @property
    def fifo_bytes(self) -> int:
        """What all FIFOs take together."""
        return sum(self.space_bytes.values()) - COUNTER_AREA_BYTES * len(self.space_bytes)


def _lane_there(lane: Lane) -> Lane:
    return msgspec.structs.replace(
        lane, incoming=_end_there(lane.incoming), outgoing=_end_there(lane.outgoing)
    )


def _copy_there(copy: Copy) -> Copy:
    return msgspec.structs.replace(
        copy, source=_end_there(copy.source), destination=_end_there(copy.destination)
    )


def _end_there(end: End | None) -> End | None:
    if end is None:
        return None
    return msgspec.structs.replace(
        end, data=_there(end.data), wait=_there(end.wait), post=_there(end.post)
    )


@overload
def _there(address: Address) -> Address: ...
@overload
def _there(address: None) -> None: ...
def _there(address: Address | None) -> Address | None:
    return None if address is None else Address(local(address.space), address.offset)
