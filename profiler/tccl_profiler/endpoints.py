"""The endpoints of a flow on its devices, and the shared memory of endpoints.

A flow on a host has an endpoint at each GPU; see the session over hosts for flows between hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal, Protocol

import msgspec

from tccl_profiler.program import (
    COUNTER_AREA_BYTES,
    COUNTER_BYTES,
    COUNTERS,
    Address,
    Carrier,
    End,
    Link,
)
from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import Fifo, Flow, Place

SLICES = 4  # NCCL posts a FIFO of eight slots by two slots at a time
FREE_BYTES = 64 * 1024 * 1024  # memory that a flow without a FIFO cycles through
FREE_SLICE_BYTES = 256 * 1024
COPY_BYTES = 64 * 1024 * 1024  # one request to a copy engine, where no FIFO sets the size

Network = Literal["tcp", "nccl"]
"""The carrier between hosts: NICs over TCP, or NCCL where both ends are GPUs."""
Direction = Literal["incoming", "outgoing"]


class FlowEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a flow on one device; `ends[b]` is of block b.

    A NIC has a link for each block; a flow that NCCL carries has one link.
    """

    flow: int
    device: str
    kind: Direction
    ends: tuple[End, ...]
    slice_bytes: int
    engine: bool = False
    piped: bool = True
    links: tuple[Link, ...] = ()


class BufferLayout:
    """Allocates counters, then bytes, in each space, and numbers the links."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._buffers: dict[tuple[str, int], dict[bool, list[Address]]] = {}
        self._links: dict[tuple[str, str, Carrier | None], list[Link]] = {}
        self.sizes: dict[str, int] = {}

    def counter(self, space: str) -> Address:
        """Allocate a counter."""
        number = self._counters.get(space, 0)
        if number >= COUNTERS:
            raise MeasurementError(f"{space} would hold more than {COUNTERS} counters")
        self._counters[space] = number + 1
        self.sizes.setdefault(space, COUNTER_AREA_BYTES)
        return Address(space, number * COUNTER_BYTES)

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

    def link(self, sender: str, receiver: str, carrier: Carrier | None = None) -> Link:
        """Return the next link between two NICs, or between two GPUs by the same carrier."""
        known = self._links.setdefault((sender, receiver, carrier), [])
        known.append(Link(sender, receiver, len(known), carrier))
        return known[-1]

    def fifo(self, memory: End, *, filled: str, taken: str) -> tuple[End, End]:
        """Return the writer's and the reader's end of a FIFO with counters in these spaces."""
        tail, head = self.counter(filled), self.counter(taken)
        writer = msgspec.structs.replace(memory, wait=head, post=tail)
        return writer, msgspec.structs.replace(memory, wait=tail, post=head)

    def links(self) -> tuple[Link, ...]:
        """Return all links, sorted."""
        return tuple(sorted(link for known in self._links.values() for link in known))


def device_of(place: Place) -> str:
    """Return the device of a place: a copy engine belongs to its GPU.

    >>> device_of(Place("D", 2, "h1"))
    'h1.G2'
    """
    return str(Place("G", place.index, place.host)) if place.kind == "D" else str(place)


class NetworkFlows(Protocol):
    """The flows between hosts."""

    def carries(self, flow: Flow, /) -> bool:
        """Return whether NCCL carries a flow."""

    def endpoints(
        self, layout: BufferLayout, number: int, flow: Flow, blocks: int, /
    ) -> Iterator[FlowEndpoint]:
        """Yield the endpoints of a flow, in the order of the bytes."""


def endpoints_of(
    layout: BufferLayout, number: int, flow: Flow, blocks: int, network: NetworkFlows | None
) -> Iterator[FlowEndpoint]:
    """Yield the endpoints of flow `number` of a set, in the order of the bytes."""
    if flow.is_network:
        if network is None:
            raise MeasurementError(f"{flow}: only the hosts of a job measure their network")
        yield from network.endpoints(layout, number, flow, blocks)
    elif flow.is_bounce or (
        flow.blocks is not None
        and {flow.source.kind, flow.destination.kind} == {"G"}
        and not flow.transfers[0].uses_copy_engine
    ):
        yield from _piped(layout, number, flow, blocks)
    else:
        yield _free(layout, number, flow, blocks)


def _piped(
    layout: BufferLayout, number: int, flow: Flow, blocks: int
) -> tuple[FlowEndpoint, FlowEndpoint]:
    """Lay out a bounce, or a direct flow as NCCL's channels move it: FIFOs with counters.

    A bounce has FIFO and counters in host memory. The FIFO of a direct write lies with the
    receiver, of a direct read with the sender; each GPU polls a counter in its own memory.
    """
    source, target = flow.source, flow.destination
    first, last = flow.transfers[0], flow.transfers[-1]
    if flow.is_bounce:
        place = filled = taken = str(first.destination)
    else:
        place = str(target if first.operation == "write" else source)
        filled, taken = str(target), str(source)
    slices, slice_bytes = slicing(flow.fifo or Fifo())
    writers, readers = zip(
        *(
            layout.fifo(
                End(
                    data=layout.memory(place, slices * slice_bytes),
                    slices=slices,
                    seed=seed_of(number, block),
                ),
                filled=filled,
                taken=taken,
            )
            for block in range(blocks)
        ),
        strict=True,
    )

    endpoint = partial(FlowEndpoint, flow=number, slice_bytes=slice_bytes)
    engines = [flow.is_bounce and part.uses_copy_engine for part in (first, last)]
    return (
        endpoint(device=str(source), kind="outgoing", ends=writers, engine=engines[0]),
        endpoint(device=str(target), kind="incoming", ends=readers, engine=engines[1]),
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
        kind="outgoing" if writes else "incoming",
        ends=ends,
        slice_bytes=slice_bytes,
        engine=engine,
        piped=False,
    )


def seed_of(flow: int, block: int) -> int:
    """Return the check pattern's seed: never 0, different for every block of every flow."""
    return 1 + flow * 8191 + block * 127


def slicing(fifo: Fifo) -> tuple[int, int]:
    """Return the count and bytes of a FIFO's slices: two slots each, whole packs of 16 bytes."""
    slices = max(1, fifo.slots * SLICES // 8)
    return slices, max(16, fifo.bytes // slices // 16 * 16)
