"""From a transfer set to its program: who moves what, through which memory, beside what else.

Every flow becomes pieces, one at each GPU that moves it; pieces that meet at a GPU share lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from tccl_profiler.program import (
    COUNTER_AREA_BYTES,
    COUNTER_BYTES,
    COUNTERS,
    MAX_COPIES,
    Address,
    Copy,
    DeviceProgram,
    End,
    Lane,
    Part,
    Program,
)
from tccl_py.errors import MeasurementError
from tccl_py.transfers.transfer import Fifo, Flow, Place, Transfer, TransferSet, transfer_set

Meeting = Literal["pass-on", "independent"]
"""Flows that meet at a GPU: what comes in goes out, as in a ring, or each at its own pace."""

SLICES = 4
"""NCCL posts a FIFO of eight slots by two slots at a time."""
FREE_BLOCKS = 32
"""Thread blocks of a flow that names no number of them: enough for NVLink, cheap for PCIe."""
FEW_BLOCKS = 4
"""Blocks that check a path, and FIFOs that a copy engine goes through, if a flow names none."""
LEAST_COUPLED_SLICES = 3
"""A closed ring needs room beside the chunk of two slices that each lane begins with."""
FREE_BYTES = 64 * 1024 * 1024
"""Memory that a flow without a FIFO goes through again and again."""
FREE_SLICE_BYTES = 256 * 1024
COPY_BYTES = 64 * 1024 * 1024
"""What a copy engine is given at once, where no FIFO sets the size."""


class _Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a flow on one device, not yet paired with another: `ends[b]` is its block b's."""

    flow: int
    device: int
    kind: Literal["incoming", "outgoing"]
    ends: tuple[End, ...]
    slice_bytes: int
    engine: bool
    piped: bool


def program_for(
    transfers: TransferSet, *, lanes: Mapping[int, int], meeting: Meeting = "pass-on"
) -> Program:
    """Work out who does what for a set.

    Args:
        transfers: the set.
        lanes: how many blocks each GPU can run at once, by its index.
        meeting: what flows that meet at a GPU do.

    Raises:
        MeasurementError: a place that is not here, a network transfer, or too many blocks.
    """
    _refuse(transfers, lanes)
    layout = _Layout()
    shares = _free_blocks(transfers, lanes)
    pieces = [
        piece
        for number, flow in enumerate(transfers.flows)
        for piece in _pieces(layout, number, flow, flow.blocks or shares[number])
    ]
    devices, parts = _assigned(pieces, meeting)
    for device, program in devices.items():
        if len(program.lanes) > lanes[device]:
            raise MeasurementError(
                f"G{device} would run {len(program.lanes)} blocks at once, it can run "
                f"{lanes[device]}: give the flows fewer blocks"
            )
        if len(program.copies) > MAX_COPIES:
            raise MeasurementError(
                f"D{device} would go through {len(program.copies)} FIFOs at once, at most "
                f"{MAX_COPIES} are right: give the flows fewer blocks"
            )
    by_flow = [[part for part, piece in parts if piece.flow == i] for i in range(len(transfers))]
    return Program(
        transfers=transfers,
        devices=devices,
        # The last piece is the one that the bytes arrive by.
        counted=tuple(found[-1] for found in by_flow),
        other=tuple(tuple(found[:-1]) for found in by_flow),
        space_bytes=layout.sizes(),
    )


def checkable(transfers: TransferSet) -> TransferSet:
    """Flows over the same paths by kernels, with a reader for every writer, so that what arrives
    can be compared: a copy engine's work is a kernel's, and host memory is read back.

    >>> from tccl_py.transfers.transfer import parse_set
    >>> str(checkable(parse_set("G0->G0->C0 G0->D1->G1")))
    'G0->G0->C0->G0->G0{blocks=4} G0->G1->G1{blocks=4}'
    """
    return transfer_set(_checkable(flow) for flow in transfers.flows)


def _checkable(flow: Flow) -> Flow:
    halves = tuple(
        Transfer(one.source, Place("G", one.executor.index), one.destination)
        for one in flow.transfers
    )
    ends = {flow.source.kind, flow.destination.kind}
    if ends != {"G"}:
        (half,) = halves
        gpu, host = half.executor, Place("C", _host_end(flow).index)
        halves = (Transfer(gpu, gpu, host), Transfer(host, gpu, gpu))
    return Flow(
        halves, flow.blocks or FEW_BLOCKS, flow.fifo or (Fifo() if len(halves) > 1 else None)
    )


def _host_end(flow: Flow) -> Place:
    return flow.source if flow.source.kind == "C" else flow.destination


class _Layout:
    """Deals out the memory of each space: counters from its beginning, bytes after them."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._bytes: dict[str, int] = {}

    def counter(self, space: str) -> Address:
        number = self._counters.get(space, 0)
        if number >= COUNTERS:
            raise MeasurementError(f"{space} would hold more than {COUNTERS} counters")
        self._counters[space] = number + 1
        self._bytes.setdefault(space, COUNTER_AREA_BYTES)
        return Address(space, number * COUNTER_BYTES)

    def memory(self, space: str, size: int) -> Address:
        offset = self._bytes.get(space, COUNTER_AREA_BYTES)
        # Whole pages, so that no two FIFOs share one.
        self._bytes[space] = offset + (size + 4095) // 4096 * 4096
        return Address(space, offset)

    def sizes(self) -> dict[str, int]:
        return dict(self._bytes)


def _refuse(transfers: TransferSet, lanes: Mapping[int, int]) -> None:
    for flow in transfers.flows:
        for place in (p for one in flow.transfers for p in _places(one)):
            if place.kind == "N" or place.host:
                raise MeasurementError(f"{flow}: {place} is not on this host's PCIe or NVLink")
            if place.kind in "GD" and place.index not in lanes:
                known = ", ".join(f"G{index}" for index in sorted(lanes))
                raise MeasurementError(f"{flow}: {place} is not measured here; there are {known}")


def _places(transfer: Transfer) -> tuple[Place, ...]:
    return (transfer.source, transfer.executor, transfer.destination)


def _free_blocks(transfers: TransferSet, lanes: Mapping[int, int]) -> list[int]:
    """Blocks of each flow that names none: an equal share of what its busiest GPU has left."""
    left, sharers = dict(lanes), dict.fromkeys(lanes, 0)
    for flow in transfers.flows:
        for gpu in _executors(flow):
            left[gpu] -= flow.blocks or 0
            sharers[gpu] += not flow.blocks
    return [
        max(1, min([FREE_BLOCKS, *(left[i] // sharers[i] for i in _executors(flow) if sharers[i])]))
        if not any(one.uses_copy_engine for one in flow.transfers)
        else FEW_BLOCKS
        for flow in transfers.flows
    ]


def _executors(flow: Flow) -> set[int]:
    """The GPUs whose blocks move a flow."""
    return {one.executor.index for one in flow.transfers if not one.uses_copy_engine}


def _pieces(layout: _Layout, number: int, flow: Flow, blocks: int) -> Iterator[_Piece]:
    """The ends of one flow, the sending one first."""
    piped = flow.is_bounce or (
        flow.blocks is not None
        and {flow.source.kind, flow.destination.kind} == {"G"}
        and not flow.transfers[0].uses_copy_engine
    )
    if piped:
        yield from _piped(layout, number, flow, blocks)
    else:
        yield _free(layout, number, flow, blocks)


def _piped(layout: _Layout, number: int, flow: Flow, blocks: int) -> Iterator[_Piece]:
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
        tail, head = layout.counter(filled), layout.counter(taken)
        data = layout.memory(place, slices * slice_bytes)
        seed = _seed(number, block)
        writers.append(End(data=data, slices=slices, seed=seed, wait=head, post=tail))
        readers.append(End(data=data, slices=slices, seed=seed, wait=tail, post=head))
    yield _Piece(
        flow=number,
        device=source.index,
        kind="outgoing",
        ends=tuple(writers),
        slice_bytes=slice_bytes,
        engine=flow.is_bounce and first.uses_copy_engine,
        piped=True,
    )
    yield _Piece(
        flow=number,
        device=target.index,
        kind="incoming",
        ends=tuple(readers),
        slice_bytes=slice_bytes,
        engine=flow.is_bounce and last.uses_copy_engine,
        piped=True,
    )


def _seed(flow: int, block: int) -> int:
    """Of the check pattern: never 0, and another for every block of every flow."""
    return 1 + flow * 8191 + block * 127


def _slicing(fifo: Fifo) -> tuple[int, int]:
    """How many slices a FIFO has and how long they are: two slots each, 16 bytes a thread."""
    slices = max(1, fifo.slots * SLICES // 8)
    return slices, max(16, fifo.bytes // slices // 16 * 16)


def _free(layout: _Layout, number: int, flow: Flow, blocks: int) -> _Piece:
    """A flow that nobody waits for: its blocks go through some memory of their own."""
    (transfer,) = flow.transfers
    engine = transfer.uses_copy_engine
    blocks = 1 if engine else blocks
    slice_bytes = COPY_BYTES if engine else FREE_SLICE_BYTES
    slices = max(1, FREE_BYTES // blocks // slice_bytes)
    device = transfer.executor.index
    writes = transfer.source.kind == "G" and transfer.source.index == device
    far = str(transfer.destination if writes else transfer.source)
    ends = tuple(
        End(
            data=layout.memory(far, slices * slice_bytes),
            slices=slices,
            seed=_seed(number, block),
        )
        for block in range(blocks)
    )
    return _Piece(
        flow=number,
        device=device,
        kind="outgoing" if writes else "incoming",
        ends=ends,
        slice_bytes=slice_bytes,
        engine=engine,
        piped=False,
    )


def _assigned(
    pieces: Sequence[_Piece], meeting: Meeting
) -> tuple[dict[int, DeviceProgram], list[tuple[Part, _Piece]]]:
    """Lanes and copies by device, and where each piece went, in the pieces' order."""
    pairs = _pairs(pieces)
    cycles = _cycles(pieces, pairs)
    lanes: dict[int, list[Lane]] = {}
    copies: dict[int, list[Copy]] = {}
    where: dict[int, Part] = {}
    for i, piece in enumerate(pieces):
        if i in where:
            continue
        if piece.engine:
            mine = copies.setdefault(piece.device, [])
            where[i] = _part(piece, "copy", len(mine))
            mine.extend(_copy(piece, end) for end in piece.ends)
            continue
        own = lanes.setdefault(piece.device, [])
        other = pairs.get(i)
        where[i] = _part(piece, piece.kind, len(own))
        if other is not None:
            where[other] = _part(pieces[other], pieces[other].kind, len(own))
        partner = pieces[other].ends if other is not None else (None,) * len(piece.ends)
        for end, second in zip(piece.ends, partner, strict=True):
            incoming, outgoing = (end, second) if piece.kind == "incoming" else (second, end)
            own.append(
                Lane(
                    incoming=incoming,
                    outgoing=outgoing,
                    slice_bytes=piece.slice_bytes,
                    coupled=second is not None
                    and meeting == "pass-on"
                    and min(end.slices, second.slices) >= LEAST_COUPLED_SLICES,
                    cycle=cycles[piece.device] if other is not None else 0,
                )
            )
    used = sorted({*lanes, *copies})
    devices = {
        device: DeviceProgram(
            lanes=tuple(lanes.get(device, ())), copies=tuple(copies.get(device, ()))
        )
        for device in used
    }
    return devices, [(where[i], piece) for i, piece in enumerate(pieces)]


def _part(piece: _Piece, kind: Literal["incoming", "outgoing", "copy"], first: int) -> Part:
    """Where a piece's ends went: from number `first` on, as many as it has (pairs have as many)."""
    return Part(
        device=piece.device,
        kind=kind,
        numbers=tuple(range(first, first + len(piece.ends))),
        slice_bytes=piece.slice_bytes,
        slices=piece.ends[0].slices,
        piped=piece.piped,
    )


def _copy(piece: _Piece, end: End) -> Copy:
    source, destination = (end, None) if piece.kind == "incoming" else (None, end)
    return Copy(source=source, destination=destination, slice_bytes=piece.slice_bytes)


def _pairs(pieces: Sequence[_Piece]) -> dict[int, int]:
    """A GPU's k-th incoming and k-th outgoing flow share blocks, where their slices are alike."""
    pairs: dict[int, int] = {}
    for device in {piece.device for piece in pieces}:
        mine = [
            i
            for i, one in enumerate(pieces)
            if one.device == device and one.piped and not one.engine
        ]
        waiting = [i for i in mine if pieces[i].kind == "outgoing"]
        for i in (i for i in mine if pieces[i].kind == "incoming"):
            for j in waiting:
                if (pieces[i].slice_bytes, len(pieces[i].ends)) == (
                    pieces[j].slice_bytes,
                    len(pieces[j].ends),
                ):
                    pairs[i], pairs[j] = j, i
                    waiting.remove(j)
                    break
    return pairs


def _cycles(pieces: Sequence[_Piece], pairs: Mapping[int, int]) -> dict[int, int]:
    """For each device 2 (n - 1), n being how many devices pass data on to each other."""
    # Half of a worker's start would be this import, and workers need none of it.
    import networkx as nx  # noqa: PLC0415

    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(piece.device for piece in pieces)
    ends: dict[int, list[int]] = {}
    for piece in pieces:
        ends.setdefault(piece.flow, []).append(piece.device)
    for i in pairs:
        one, *more = ends[pieces[i].flow]
        graph.add_edges_from((one, other) for other in more)
    return {
        device: 2 * (len(group) - 1) for group in nx.connected_components(graph) for device in group
    }
