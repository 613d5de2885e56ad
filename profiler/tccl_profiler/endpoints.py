"""The endpoints of a flow on its devices, and the shared memory of endpoints.

A flow on a host has an endpoint at each GPU. Between hosts, NICs move a flow over TCP, with a
kernel wherever a GPU is at an end; or NCCL carries a flow from GPU to GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from tccl_profiler.program import (
    COUNTER_AREA_BYTES,
    COUNTER_BYTES,
    COUNTERS,
    Address,
    Carrier,
    End,
    FlowEndpoint,
    Link,
)
from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import Fifo, Flow, Place, Transfer

SLICES = 4  # NCCL posts a FIFO of eight slots by two slots at a time
FREE_BYTES = 64 * 1024 * 1024  # memory that a flow without a FIFO cycles through
FREE_SLICE_BYTES = 256 * 1024
COPY_BYTES = 64 * 1024 * 1024  # one request to a copy engine, where no FIFO sets the size
CARRIED_BYTES = 1024 * 1024
"""The unit in which NCCL's bytes are counted; the pace sets how many NCCL is given at once."""

Network = Literal["tcp", "nccl"]
"""The carrier between hosts: NICs over TCP, or NCCL where both ends are GPUs."""
Ends = tuple[End, ...]


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

    def fifos(
        self, number: int, flow: Flow, blocks: int, place: str, counters: tuple[str, str] | None
    ) -> tuple[Ends, Ends, int]:
        """Return the writer's and the reader's ends of each block, and the bytes of a slice.

        Counters lie in the spaces of reader and writer; without counters both cycle through memory.
        """
        fifo = flow.fifo or Fifo()
        # Two slots each, whole packs of 16 bytes.
        slices = max(1, fifo.slots * SLICES // 8)
        slice_bytes = max(16, fifo.bytes // slices // 16 * 16)
        writers, readers = [], []
        for block in range(blocks):
            data = self.memory(place, slices * slice_bytes)
            writer = reader = End(data=data, slices=slices, seed=seed_of(number, block))
            if counters is not None:
                tail, head = map(self._counter, counters)
                writer = msgspec.structs.replace(writer, wait=head, post=tail)
                reader = msgspec.structs.replace(reader, wait=tail, post=head)
            writers.append(writer)
            readers.append(reader)
        return tuple(writers), tuple(readers), slice_bytes

    def _counter(self, space: str) -> Address:
        number = self._counters.get(space, 0)
        if number >= COUNTERS:
            raise MeasurementError(f"{space} would hold more than {COUNTERS} counters")
        self._counters[space] = number + 1
        self.sizes.setdefault(space, COUNTER_AREA_BYTES)
        return Address(space, number * COUNTER_BYTES)

    def link(self, sender: str, receiver: str, carrier: Carrier | None = None) -> Link:
        """Return the next link between two NICs, or between two GPUs by the same carrier."""
        known = self._links.setdefault((sender, receiver, carrier), [])
        known.append(Link(sender, receiver, len(known), carrier))
        return known[-1]

    def links(self) -> tuple[Link, ...]:
        """Return all links, sorted."""
        return tuple(sorted(link for known in self._links.values() for link in known))


def device_of(place: Place) -> str:
    """Return the device of a place: a copy engine belongs to its GPU.

    >>> device_of(Place("D", 2, "h1"))
    'h1.G2'
    """
    return str(Place("G", place.index, place.host)) if place.kind == "D" else str(place)


def is_carried(flow: Flow, network: Network) -> bool:
    """Return whether NCCL carries a flow from host to host."""
    ends = {flow.source.kind, flow.destination.kind}
    return network == "nccl" and flow.is_network and ends == {"G"}


def endpoints_of(
    layout: BufferLayout, number: int, flow: Flow, blocks: int, network: Network
) -> Iterator[FlowEndpoint]:
    """Yield the endpoints of flow `number` of a set, in the order of the bytes."""
    if flow.is_network:
        yield from (_carried if is_carried(flow, network) else _over_nics)(
            layout, number, flow, blocks
        )
    elif flow.is_bounce or (
        flow.blocks is not None
        and {flow.source.kind, flow.destination.kind} == {"G"}
        and not flow.transfers[0].uses_copy_engine
    ):
        yield from _piped(layout, number, flow, blocks)
    else:
        yield _free(layout, number, flow, blocks)


def _piped(layout: BufferLayout, number: int, flow: Flow, blocks: int) -> Iterator[FlowEndpoint]:
    """Lay out a bounce, or a direct flow as NCCL's channels move it: FIFOs with counters.

    A bounce has FIFO and counters in host memory. The FIFO of a direct write lies with the
    receiver, of a direct read with the sender; each GPU polls a counter in its own memory.
    """
    source, target = str(flow.source), str(flow.destination)
    first, last = flow.transfers[0], flow.transfers[-1]
    place, counters = (target if first.operation == "write" else source), (target, source)
    if flow.is_bounce:
        place = str(first.destination)
        counters = place, place
    writers, readers, slice_bytes = layout.fifos(number, flow, blocks, place, counters)
    for incoming, device, ends, part in (
        (False, source, writers, first),
        (True, target, readers, last),
    ):
        yield FlowEndpoint(
            flow=number,
            device=device,
            incoming=incoming,
            ends=ends,
            slice_bytes=slice_bytes,
            engine=part.uses_copy_engine,
        )


def _free(layout: BufferLayout, number: int, flow: Flow, blocks: int) -> FlowEndpoint:
    """Lay out a flow without FIFO: each block cycles through memory of its own."""
    (transfer,) = flow.transfers
    engine = transfer.uses_copy_engine
    blocks = 1 if engine else blocks
    # Whole cache lines: no two blocks share one.
    share = max(128, (flow.buffer or FREE_BYTES) // blocks // 128 * 128)
    slice_bytes = min(share, COPY_BYTES if engine else FREE_SLICE_BYTES)
    slices = share // slice_bytes
    size = blocks * slices * slice_bytes
    device = device_of(transfer.executor)
    writes = str(transfer.source) == device
    far = str(transfer.destination if writes else transfer.source)
    if flow.buffer is None:
        first = layout.memory(far, size)
    else:
        first = layout.buffer(far, max(size, flow.buffer), writes=writes)
    ends = tuple(
        End(
            data=Address(far, first.offset + block * slices * slice_bytes),
            slices=slices,
            seed=seed_of(number, block),
        )
        for block in range(blocks)
    )
    return FlowEndpoint(
        flow=number,
        device=device,
        incoming=not writes,
        ends=ends,
        slice_bytes=slice_bytes,
        engine=engine,
        piped=False,
    )


def _over_nics(
    layout: BufferLayout, number: int, flow: Flow, blocks: int
) -> Iterator[FlowEndpoint]:
    """Lay out a flow from host to host: a NIC at each end, and a kernel wherever a GPU is.

    A NIC's FIFO lies in host memory or, if reachable, in GPU memory: NCCL's kernels copy into a
    FIFO there too. Host memory at a flow's end is no FIFO: the NIC cycles through the memory. A
    slice keeps number and seed all the way, so that checks compare end to end.
    """
    over, into = _network_transfers(flow)
    sender, receiver = str(over.executor), str(into.executor)
    links = tuple(layout.link(sender, receiver) for _ in range(blocks))
    for nic, memory, end in (
        (sender, over.source, flow.source),
        (receiver, into.destination, flow.destination),
    ):
        place, gpu = str(memory), str(end) if end.kind == "G" else None
        counters = (place, place) if gpu else None
        filled, taken, slice_bytes = layout.fifos(number, flow, blocks, place, counters)
        writer, reader = (gpu, nic) if nic == sender else (nic, gpu)
        for incoming, device, ends in ((False, writer, filled), (True, reader, taken)):
            if device is not None:
                yield FlowEndpoint(
                    flow=number,
                    device=device,
                    incoming=incoming,
                    ends=ends,
                    slice_bytes=slice_bytes,
                    piped=gpu is not None,
                    links=links if device == nic else (),
                )


def _network_transfers(flow: Flow) -> tuple[Transfer, Transfer]:
    at = next(i for i, part in enumerate(flow.transfers) if part.executor.kind == "N")
    over, into = flow.transfers[at : at + 2]
    return over, into


def _carried(layout: BufferLayout, number: int, flow: Flow, blocks: int) -> Iterator[FlowEndpoint]:
    """Lay out a flow that NCCL carries from GPU to GPU, through FIFOs of its own."""
    over, into = _network_transfers(flow)
    between = {over.source, into.destination} - {flow.source, flow.destination}
    if any(place.kind == "G" for place in between):
        raise MeasurementError(
            f"{flow}: NCCL's communicator of two GPUs cannot send through a third one's memory"
        )
    carrier = Carrier(
        nic_out=over.executor.index,
        nic_in=into.executor.index,
        channels=blocks,
        fifo_bytes=(flow.fifo or Fifo()).bytes,
        direct_out=over.source == flow.source,
        direct_in=into.destination == flow.destination,
    )
    link = layout.link(str(flow.source), str(flow.destination), carrier)
    for place in (flow.source, flow.destination):
        yield FlowEndpoint(
            flow=number,
            device=str(place),
            incoming=place == flow.destination,
            ends=(End(data=Address(str(place), 0), slices=1, seed=seed_of(number, 0)),),
            slice_bytes=CARRIED_BYTES,
            engine=True,
            links=(link,),
        )


def seed_of(flow: int, block: int) -> int:
    """Return the check pattern's seed: never 0, different for every block of every flow."""
    return 1 + flow * 8191 + block * 127
