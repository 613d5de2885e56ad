"""The program of a transfer set: each device's lanes and copies, addresses, and flows' endpoints.

A lane is one thread block, and takes slices from one FIFO, puts slices into another, or both. A
FIFO is bytes and two counters: slices written and slices read. A copy is a lane of a copy engine. A
NIC's lane moves slices between a FIFO and a link. Devices have the names of places.

A flow on a host has an endpoint at each GPU. Between hosts, NICs move a flow over TCP, with a
kernel wherever a GPU is at an end; or NCCL carries a flow from GPU to GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import Fifo, Flow, Place, Transfer, TransferSet, place_named

if TYPE_CHECKING:
    from tccl_py.model.measurement import NicTransport

COUNTER_BYTES = 128  # a counter has its own cache line and the line that is prefetched with it
MAX_REPEATS = 12  # repeats that are queued together
COUNTERS = 4096  # counters of one space for one repeat
COUNTER_AREA_BYTES = COUNTERS * COUNTER_BYTES * MAX_REPEATS
"""Offset of a space's first FIFO: the counters come first."""
MAX_COPIES = 16
"""Concurrent copies of a device; each has a stream, and a GPU's streams share 32 queues."""


SLICES = 4  # NCCL posts a FIFO of eight slots by two slots at a time
FREE_BYTES = 64 * 1024 * 1024  # memory that a flow without a FIFO cycles through
FREE_SLICE_BYTES = 256 * 1024
COPY_BYTES = 64 * 1024 * 1024  # one request to a copy engine, where no FIFO sets the size
CARRIED_BYTES = 1024 * 1024
"""The unit in which NCCL's bytes are counted; the pace sets how many NCCL is given at once."""


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
    """One end of a FIFO, or of memory: polls `wait` before a slice and writes `post` after it."""

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
        """Return one host's share."""

        def is_here(name: str) -> bool:
            return place_named(name).host == host

        return HostProgram(
            devices={name: share for name, share in self.devices.items() if is_here(name)},
            space_bytes={name: size for name, size in self.space_bytes.items() if is_here(name)},
            links=tuple(
                link for link in self.links if is_here(link.sender) or is_here(link.receiver)
            ),
        )


class Program(HostProgram, frozen=True, kw_only=True):
    """A compiled set: `counted[i]` and `other[i]` are the endpoints of the set's flow i.

    A flow's rate is counted at `counted`, where its bytes arrive; `other` gives start and end only.
    """

    transfers: TransferSet
    counted: tuple[FlowEndpoint, ...]
    other: tuple[tuple[FlowEndpoint, ...], ...]


# The endpoints of a flow on its devices, and their memory.


class BufferLayout:
    """Allocates counters, then bytes, in each space, and numbers the links."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._buffers: dict[tuple[str, int], dict[bool, list[Address]]] = {}
        self._links: dict[tuple[str, str, Carrier | None], list[Link]] = {}
        self.sizes: dict[str, int] = {}

    def memory(self, space: str, size: int) -> Address:
        """Allocate `size` bytes."""
        offset = self.sizes.get(space, COUNTER_AREA_BYTES)
        # Whole pages: no two FIFOs share a page.
        self.sizes[space] = offset + (size + 4095) // 4096 * 4096
        return Address(space, offset)

    def buffer(self, space: str, size: int, *, writes: bool) -> Address:
        """Return the buffer of a plain write or read; a read shares a write's of equal size."""
        users = self._buffers.setdefault((space, size), {True: [], False: []})
        own, shared = users[writes], users[not writes]
        own.append(shared[len(own)] if len(own) < len(shared) else self.memory(space, size))
        return own[-1]

    def counter(self, space: str) -> Address:
        """Allocate a counter."""
        number = self._counters.get(space, 0)
        if number >= COUNTERS:
            raise MeasurementError(f"{space} would hold more than {COUNTERS} counters")
        self._counters[space] = number + 1
        self.sizes.setdefault(space, COUNTER_AREA_BYTES)
        return Address(space, number * COUNTER_BYTES)

    def link(self, sender: str, receiver: str, carrier: Carrier | None = None) -> Link:
        """Return the next link between two NICs, or between two GPUs by the same carrier."""
        links = self._links.setdefault((sender, receiver, carrier), [])
        links.append(Link(sender, receiver, len(links), carrier))
        return links[-1]

    def links(self) -> tuple[Link, ...]:
        """Return all links, sorted."""
        return tuple(sorted(link for links in self._links.values() for link in links))


def device_of(place: Place) -> str:
    """Return the device of a place: a copy engine belongs to its GPU.

    >>> device_of(Place("D", 2, "h1"))
    'h1.G2'
    """
    return str(Place("G", place.index, place.host)) if place.kind == "D" else str(place)


@dataclass(frozen=True)
class FlowLayout:
    """Lays out flow `number` of a set."""

    layout: BufferLayout
    number: int
    flow: Flow
    blocks: int

    def endpoints(self, transport: NicTransport) -> Iterator[FlowEndpoint]:
        """Yield the flow's endpoints, in the order of the bytes."""
        flow = self.flow
        if flow.is_network:
            yield from self._carry() if transport.carries(flow) else self._over_nics()
        elif flow.is_bounce or (flow.blocks is not None and flow.kind == "direct"):
            yield from self._pipe()
        else:
            yield self._free()

    def _pipe(self) -> Iterator[FlowEndpoint]:
        """Lay out a bounce, or a direct flow as NCCL's channels move it: FIFOs with counters.

        A bounce has FIFO and counters in host memory. The FIFO of a direct write lies with the
        receiver, of a direct read with the sender; each GPU polls a counter in its own memory.
        """
        source, target = str(self.flow.source), str(self.flow.destination)
        first, last = self.flow.transfers[0], self.flow.transfers[-1]
        place, counters = (target if first.operation == "write" else source), (target, source)
        if self.flow.is_bounce:
            place = str(first.destination)
            counters = place, place
        ends = self._fifos(place, counters, source, target)
        for end, part in zip(ends, (first, last), strict=True):
            yield msgspec.structs.replace(end, engine=part.uses_copy_engine)

    def _fifos(
        self, place: str, counters: tuple[str, str] | None, writer: str | None, reader: str | None
    ) -> Iterator[FlowEndpoint]:
        """Yield the endpoints of writer and reader, where there are such, of a FIFO for each block.

        Counters lie in the spaces of reader and writer; without counters both cycle through memory.
        """
        fifo = self.flow.fifo or Fifo()
        # Two slots each, whole packs of 16 bytes.
        slices = max(1, fifo.slots * SLICES // 8)
        slice_bytes = max(16, fifo.bytes // slices // 16 * 16)
        writers, readers = [], []
        for block in range(self.blocks):
            data = self.layout.memory(place, slices * slice_bytes)
            end = End(data=data, slices=slices, seed=seed_of(self.number, block))
            tail, head = map(self.layout.counter, counters) if counters else (None, None)
            writers.append(msgspec.structs.replace(end, wait=head, post=tail))
            readers.append(msgspec.structs.replace(end, wait=tail, post=head))
        for incoming, device, ends in ((False, writer, writers), (True, reader, readers)):
            if device is not None:
                yield FlowEndpoint(
                    flow=self.number,
                    device=device,
                    incoming=incoming,
                    ends=tuple(ends),
                    slice_bytes=slice_bytes,
                    piped=counters is not None,
                )

    def _free(self) -> FlowEndpoint:
        """Lay out a flow without FIFO: each block cycles through memory of its own."""
        flow, (transfer,) = self.flow, self.flow.transfers
        engine = transfer.uses_copy_engine
        blocks = 1 if engine else self.blocks
        # Whole cache lines: no two blocks share one.
        share = max(128, (flow.buffer or FREE_BYTES) // blocks // 128 * 128)
        slice_bytes = min(share, COPY_BYTES if engine else FREE_SLICE_BYTES)
        size = share // slice_bytes * slice_bytes
        device = device_of(transfer.executor)
        writes = str(transfer.source) == device
        far = str(transfer.destination if writes else transfer.source)
        if flow.buffer is None:
            first = self.layout.memory(far, blocks * size)
        else:
            first = self.layout.buffer(far, max(blocks * size, flow.buffer), writes=writes)
        slices, places = share // slice_bytes, [first.offset + n * size for n in range(blocks)]
        ends = tuple(
            End(data=Address(far, at), slices=slices, seed=seed_of(self.number, block))
            for block, at in enumerate(places)
        )
        return FlowEndpoint(
            flow=self.number,
            device=device,
            incoming=not writes,
            ends=ends,
            slice_bytes=slice_bytes,
            engine=engine,
            piped=False,
        )

    def _over_nics(self) -> Iterator[FlowEndpoint]:
        """Lay out a flow from host to host: a NIC at each end, and a kernel wherever a GPU is.

        A NIC's FIFO lies in host memory or, if reachable, in GPU memory: NCCL's kernels copy into a
        FIFO there too. Host memory at a flow's end is no FIFO: the NIC cycles through the memory. A
        slice keeps number and seed all the way, so that checks compare end to end.
        """
        over, into = self._network_transfers()
        nics = str(over.executor), str(into.executor)
        links = tuple(self.layout.link(*nics) for _ in range(self.blocks))
        source, target = (
            str(end) if end.kind == "G" else None
            for end in (self.flow.source, self.flow.destination)
        )
        for memory, gpu, writer, reader in (
            (over.source, source, source, nics[0]),
            (into.destination, target, nics[1], target),
        ):
            counters = None
            if gpu is not None:
                # A GPU clears the counters in its own memory, and a relay may have no part.
                space = gpu if memory.kind == "G" else str(memory)
                counters = space, space
            for end in self._fifos(str(memory), counters, writer, reader):
                yield msgspec.structs.replace(end, links=links if end.device in nics else ())

    def _network_transfers(self) -> tuple[Transfer, Transfer]:
        parts = self.flow.transfers
        at = next(i for i, part in enumerate(parts) if part.executor.kind == "N")
        return parts[at], parts[at + 1]

    def _carry(self) -> Iterator[FlowEndpoint]:
        """Lay out a flow that NCCL carries from GPU to GPU, through FIFOs of its own."""
        flow, (over, into) = self.flow, self._network_transfers()
        relays = {over.source, into.destination} - {flow.source, flow.destination}
        if any(place.kind == "G" for place in relays):
            raise MeasurementError(
                f"{flow}: NCCL's communicator of two GPUs cannot send through a third one's memory"
            )
        carrier = Carrier(
            nic_out=over.executor.index,
            nic_in=into.executor.index,
            channels=self.blocks,
            fifo_bytes=(flow.fifo or Fifo()).bytes,
            direct_out=over.source == flow.source,
            direct_in=into.destination == flow.destination,
        )
        link = self.layout.link(str(flow.source), str(flow.destination), carrier)
        for place in (flow.source, flow.destination):
            end = End(data=Address(str(place), 0), slices=1, seed=seed_of(self.number, 0))
            yield FlowEndpoint(
                flow=self.number,
                device=str(place),
                incoming=place == flow.destination,
                ends=(end,),
                slice_bytes=CARRIED_BYTES,
                engine=True,
                links=(link,),
            )


def seed_of(flow: int, block: int) -> int:
    """Return the check pattern's seed: never 0, different for every block of every flow."""
    return 1 + flow * 8191 + block * 127
