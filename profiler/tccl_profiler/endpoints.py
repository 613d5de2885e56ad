"""A flow's ends on the devices that move it, and where in memory they meet.

A direct flow or a bounce has an end at each GPU. One over the network has up to four: a kernel
fills a FIFO, a NIC takes slices out and sends them; at the other host a NIC receives slices into a
FIFO, a kernel empties it. Where NCCL carries it, it has an end at each GPU.
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
    Link,
)
from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import Fifo, Flow, Place

SLICES = 4
"""NCCL posts a FIFO of eight slots by two slots at a time."""
FREE_BYTES = 64 * 1024 * 1024
"""Memory that a flow without a FIFO goes through again and again."""
FREE_SLICE_BYTES = 256 * 1024
COPY_BYTES = 64 * 1024 * 1024
"""What a copy engine is given at once, where no FIFO sets the size."""
CARRIED_BYTES = 1024 * 1024
"""What NCCL carries is counted in these; how many it is given at once, its pace says."""

Network = Literal["tcp", "nccl"]
"""What moves a flow from host to host: NICs' lanes over TCP, or NCCL where both ends are GPUs."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a flow on one device, not yet paired with another: `ends[b]` is its block b's.

    A NIC's has a link for each of them, and so has one that NCCL carries.
    """

    flow: int
    device: str
    kind: Literal["incoming", "outgoing"]
    ends: tuple[End, ...]
    slice_bytes: int
    engine: bool = False
    piped: bool = True
    links: tuple[Link, ...] = ()


class Layout:
    """Deals out the memory of each space, counters from its beginning, bytes after them; and the
    links between NICs."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._buffers: dict[tuple[str, int], dict[bool, list[Address]]] = {}
        self._links: dict[tuple[str, str, Carrier | None], list[Link]] = {}

    def counter(self, space: str) -> Address:
        """The next counter of a space.

        Raises:
            MeasurementError: it has no more.
        """
        number = self._counters.get(space, 0)
        if number >= COUNTERS:
            raise MeasurementError(f"{space} would hold more than {COUNTERS} counters")
        self._counters[space] = number + 1
        self._bytes.setdefault(space, COUNTER_AREA_BYTES)
        return Address(space, number * COUNTER_BYTES)

    def memory(self, space: str, size: int) -> Address:
        """The next `size` bytes of a space."""
        offset = self._bytes.get(space, COUNTER_AREA_BYTES)
        # Whole pages, so that no two FIFOs share one.
        self._bytes[space] = offset + (size + 4095) // 4096 * 4096
        return Address(space, offset)

    def buffer(self, space: str, size: int, *, writes: bool) -> Address:
        """Return the buffer of a plain write or read, which a read or write of its size shares.

        As through a FIFO, what is read is then what was just written, perhaps still in a cache.
        """
        users = self._buffers.setdefault((space, size), {True: [], False: []})
        mine, others = users[writes], users[not writes]
        mine.append(others[len(mine)] if len(mine) < len(others) else self.memory(space, size))
        return mine[-1]

    def link(self, sender: str, receiver: str, carrier: Carrier | None = None) -> Link:
        """The next link between two NICs, or two GPUs by the same carrier."""
        known = self._links.setdefault((sender, receiver, carrier), [])
        known.append(Link(sender, receiver, len(known), carrier))
        return known[-1]

    def sizes(self) -> dict[str, int]:
        """What each space must hold, in bytes."""
        return dict(self._bytes)

    def links(self) -> tuple[Link, ...]:
        """All links dealt out."""
        return tuple(sorted(link for known in self._links.values() for link in known))


def device_of(place: Place) -> str:
    """The device that a place is of, or is: a copy engine's is its GPU.

    >>> device_of(Place("D", 2, "h1"))
    'h1.G2'
    """
    return str(Place("G", place.index, place.host)) if place.kind == "D" else str(place)


def is_carried(flow: Flow, network: Network) -> bool:
    """Whether NCCL carries a flow from host to host."""
    return (
        network == "nccl" and flow.is_network and flow.source.kind == flow.destination.kind == "G"
    )


def pieces_of(
    layout: Layout, number: int, flow: Flow, blocks: int, network: Network = "tcp"
) -> Iterator[Piece]:
    """The ends of flow `number` of a set, in the order of the bytes."""
    if is_carried(flow, network):
        yield from _carried(layout, number, flow, blocks)
    elif flow.is_network:
        yield from _network(layout, number, flow, blocks)
    elif flow.is_bounce or (
        flow.blocks is not None
        and {flow.source.kind, flow.destination.kind} == {"G"}
        and not flow.transfers[0].uses_copy_engine
    ):
        yield from _piped(layout, number, flow, blocks)
    else:
        yield _free(layout, number, flow, blocks)


def _piped(layout: Layout, number: int, flow: Flow, blocks: int) -> Iterator[Piece]:
    """A bounce, or a direct flow as NCCL's channels move it: by FIFOs with counters.

    A bounce's FIFO and counters lie in host memory. A direct write's FIFO lies with the receiver, a
    direct read's with the sender, and each side polls a counter in its own memory.
    """
    fifo = flow.fifo or Fifo()
    source, target = flow.source, flow.destination
    first, last = flow.transfers[0], flow.transfers[-1]
    if flow.is_bounce:
        place = filled = taken = str(first.destination)
    else:
        place = str(target if first.operation == "write" else source)
        filled, taken = str(target), str(source)
    slices, slice_bytes = _slicing(fifo)
    writers, readers = [], []
    for block in range(blocks):
        data = layout.memory(place, slices * slice_bytes)
        memory = End(data=data, slices=slices, seed=_seed(number, block))
        writer, reader = _fifo(layout, memory, filled=filled, taken=taken)
        writers.append(writer)
        readers.append(reader)
    yield Piece(
        flow=number,
        device=str(source),
        kind="outgoing",
        ends=tuple(writers),
        slice_bytes=slice_bytes,
        engine=flow.is_bounce and first.uses_copy_engine,
    )
    yield Piece(
        flow=number,
        device=str(target),
        kind="incoming",
        ends=tuple(readers),
        slice_bytes=slice_bytes,
        engine=flow.is_bounce and last.uses_copy_engine,
    )


def _network(layout: Layout, number: int, flow: Flow, blocks: int) -> Iterator[Piece]:
    """A flow from host to host, by a NIC at each end and a kernel wherever a GPU is.

    What a NIC sends or receives goes through a FIFO in host memory or, where the NIC reaches that,
    in the GPU's: there too NCCL's kernels copy from what is sent into a FIFO. Host memory that a
    flow begins or ends in is nobody's FIFO: the NIC goes through it again and again.

    A slice has the same number and seed all the way, so that data are compared end to end.
    """
    at = next(i for i, one in enumerate(flow.transfers) if one.executor.kind == "N")
    over, into = flow.transfers[at : at + 2]
    sender, receiver = str(over.executor), str(into.executor)
    links = tuple(layout.link(sender, receiver) for _ in range(blocks))
    slicing = _slicing(flow.fifo or Fifo())
    seeds = [_seed(number, block) for block in range(blocks)]

    def piece(device: str, kind: Literal["incoming", "outgoing"], ends: list[End]) -> Piece:
        return Piece(
            flow=number,
            device=device,
            kind=kind,
            ends=tuple(ends),
            slice_bytes=slicing[1],
            piped=ends[0].wait is not None,
            links=links if device in (sender, receiver) else (),
        )

    filled, taken = _beside_nic(layout, over.source, flow.source, slicing, seeds)
    if flow.source.kind == "G":
        yield piece(str(flow.source), "outgoing", filled)
    yield piece(sender, "incoming", taken)
    filled, taken = _beside_nic(layout, into.destination, flow.destination, slicing, seeds)
    yield piece(receiver, "outgoing", filled)
    if flow.destination.kind == "G":
        yield piece(str(flow.destination), "incoming", taken)


def _carried(layout: Layout, number: int, flow: Flow, blocks: int) -> Iterator[Piece]:
    """A flow from host to host that is NCCL's from GPU to GPU, FIFOs and all.

    Raises:
        MeasurementError: it passes a second GPU, which a communicator of two has none of.
    """
    at = next(i for i, one in enumerate(flow.transfers) if one.executor.kind == "N")
    over, into = flow.transfers[at : at + 2]
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
        yield Piece(
            flow=number,
            device=str(place),
            kind="outgoing" if place == flow.source else "incoming",
            # NCCL has memory of its own.
            ends=(End(data=Address(str(place), 0), slices=1, seed=_seed(number, 0)),),
            slice_bytes=CARRIED_BYTES,
            engine=True,
            links=(link,),
        )


def _beside_nic(
    layout: Layout, memory: Place, end: Place, slicing: tuple[int, int], seeds: list[int]
) -> tuple[list[End], list[End]]:
    """Ends at the memory that a NIC uses, for who fills it and who empties it; `end` is the flow's
    own, and where that is no GPU nobody but the NIC is there."""
    (slices, slice_bytes), place = slicing, str(memory)
    filled, taken = [], []
    for seed in seeds:
        data = layout.memory(place, slices * slice_bytes)
        reader = writer = End(data=data, slices=slices, seed=seed)
        if end.kind == "G":
            writer, reader = _fifo(layout, writer, filled=place, taken=place)
        filled.append(writer)
        taken.append(reader)
    return filled, taken


def _fifo(layout: Layout, memory: End, *, filled: str, taken: str) -> tuple[End, End]:
    """The writer's and the reader's end of a FIFO, whose two counters lie in these spaces."""
    tail, head = layout.counter(filled), layout.counter(taken)
    writer = msgspec.structs.replace(memory, wait=head, post=tail)
    return writer, msgspec.structs.replace(memory, wait=tail, post=head)


def _seed(flow: int, block: int) -> int:
    """Of the check pattern: never 0, and another for every block of every flow."""
    return 1 + flow * 8191 + block * 127


def _slicing(fifo: Fifo) -> tuple[int, int]:
    """How many slices a FIFO has and how long they are: two slots each, 16 bytes a thread."""
    slices = max(1, fifo.slots * SLICES // 8)
    return slices, max(16, fifo.bytes // slices // 16 * 16)


def _free(layout: Layout, number: int, flow: Flow, blocks: int) -> Piece:
    """A flow that nobody waits for: its blocks go through some memory of their own."""
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
            seed=_seed(number, block),
        )
        for block in range(blocks)
    )
    return Piece(
        flow=number,
        device=device,
        kind="outgoing" if writes else "incoming",
        ends=ends,
        slice_bytes=slice_bytes,
        engine=engine,
        piped=False,
    )
