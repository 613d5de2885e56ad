"""From a transfer set to its program: who moves what, through which memory, beside what else.

Every flow becomes pieces, one at each GPU that moves it; pieces that meet at a GPU share lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from tccl_profiler.endpoints import Layout, Network, Piece, device_of, is_carried, pieces_of
from tccl_profiler.program import (
    MAX_COPIES,
    Copy,
    DeviceProgram,
    Lane,
    Part,
    Program,
    host_of,
    is_nic,
    local,
)
from tccl_py.errors import MeasurementError
from tccl_py.model.transfer import Fifo, Flow, Place, Transfer, TransferSet, transfer_set

Meeting = Literal["pass-on", "independent"]
"""Flows that meet at a GPU: what comes in goes out, as in a ring, or each at its own pace."""

FREE_BLOCKS = 32
"""Thread blocks of a flow that names no number of them: enough for NVLink, cheap for PCIe."""
FEW_BLOCKS = 4
"""Blocks that check a path, and FIFOs that a copy engine goes through, if a flow names none."""
NETWORK_BLOCKS = 2
"""Lanes of a flow over the network that names no number of them; NCCL has two channels at least."""
CARRIED_GROUP_US = 5_000.0
"""A collective of NCCL begins when the one before has ended, tens of microseconds later."""
COPIED_GROUP_US = 500.0
"""A stamp is a kernel between copies and costs them some ten microseconds."""
LEAST_COUPLED_SLICES = 3
"""A closed ring needs room beside the chunk of two slices that each lane begins with."""


def program_for(
    transfers: TransferSet,
    *,
    lanes: Mapping[str, int],
    meeting: Meeting = "pass-on",
    network: Network = "tcp",
) -> Program:
    """Work out who does what for a set, on however many hosts.

    Args:
        transfers: the set.
        lanes: how many blocks each device can run at once, by its name: `G0`, `h1.N0`.
        meeting: what flows that meet at a GPU do.
        network: what moves flows from host to host.

    Raises:
        MeasurementError: a place that is not among them, or too many blocks.
    """
    _refuse(transfers, lanes, network)
    layout = Layout()
    shares = _free_blocks(transfers, lanes, network)
    pieces = [
        piece
        for number, flow in enumerate(transfers.flows)
        for piece in pieces_of(layout, number, flow, flow.blocks or shares[number], network)
    ]
    devices, parts = _assigned(pieces, meeting)
    for device, program in devices.items():
        if len(program.lanes) > lanes[device]:
            what = "lanes" if is_nic(device) else "blocks"
            raise MeasurementError(
                f"{device} would run {len(program.lanes)} {what} at once, it can run "
                f"{lanes[device]}: give the flows fewer blocks"
            )
        if len(program.copies) > MAX_COPIES:
            raise MeasurementError(
                f"the copy engines of {device} would go through {len(program.copies)} FIFOs at "
                f"once, at most {MAX_COPIES} are right: give the flows fewer blocks"
            )
    by_flow = [[part for part, piece in parts if piece.flow == i] for i in range(len(transfers))]
    return Program(
        transfers=transfers,
        devices=devices,
        # The last piece is the one that the bytes arrive by.
        counted=tuple(found[-1] for found in by_flow),
        other=tuple(tuple(found[:-1]) for found in by_flow),
        space_bytes=layout.sizes(),
        links=layout.links(),
    )


def checkable(transfers: TransferSet) -> TransferSet:
    """Flows over the same paths by kernels, with a reader for every writer, so that what arrives
    can be compared: a copy engine's work is a kernel's, and host memory is read back.

    >>> from tccl_py.model.transfer import parse_set
    >>> str(checkable(parse_set("G0->G0->C0 G0->D1->G1")))
    'G0->G0->C0->G0->G0{blocks=4} G0->G1->G1{blocks=4}'
    """
    return transfer_set(_checkable(flow) for flow in transfers.flows)


def _checkable(flow: Flow) -> Flow:
    if flow.is_network:
        # Kernels compare at its ends already, and where there are none, NICs do.
        return flow
    halves = tuple(
        Transfer(one.source, Place("G", one.executor.index, one.executor.host), one.destination)
        for one in flow.transfers
    )
    ends = {flow.source.kind, flow.destination.kind}
    if ends != {"G"}:
        (half,) = halves
        gpu, host = half.executor, _host_end(flow)
        halves = (Transfer(gpu, gpu, host), Transfer(host, gpu, gpu))
    return Flow(
        halves, flow.blocks or FEW_BLOCKS, flow.fifo or (Fifo() if len(halves) > 1 else None)
    )


def _host_end(flow: Flow) -> Place:
    return flow.source if flow.source.kind == "C" else flow.destination


def _refuse(transfers: TransferSet, lanes: Mapping[str, int], network: Network) -> None:
    for flow in transfers.flows:
        # NCCL's NICs are no devices of ours.
        others = "CN" if is_carried(flow, network) else "C"
        for place in (p for one in flow.transfers for p in _places(one)):
            if place.kind not in others and device_of(place) not in lanes:
                raise MeasurementError(
                    f"{flow}: {place} is not measured here; {_known(place.host, lanes)}"
                )
        if "N" in (flow.source.kind, flow.destination.kind):
            raise MeasurementError(
                f"{flow}: only one end of it is named; name the other host's too, as "
                "h0.G0->h0.N0->h1.N1->h1.N1->h1.G0"
            )
        if len(flow.hosts) > 1 and not flow.is_network:
            raise MeasurementError(f"{flow}: goes from host to host without a NIC")


def _known(host: str, lanes: Mapping[str, int]) -> str:
    """The devices that a host has, or that it has none."""
    mine = [device for device in lanes if host_of(device) == host]
    if mine:
        ordered = sorted(mine, key=lambda one: (local(one)[0], int(local(one)[1:])))
        return f"there are {', '.join(ordered)}"
    if host:
        return f"no device of host {host} is"
    return f"name its host, of {', '.join(sorted({host_of(device) for device in lanes}))}"


def _places(transfer: Transfer) -> tuple[Place, ...]:
    return (transfer.source, transfer.executor, transfer.destination)


def _free_blocks(transfers: TransferSet, lanes: Mapping[str, int], network: Network) -> list[int]:
    """Blocks of each flow that names none: an equal share of what its busiest device has left."""
    left, sharers = dict(lanes), dict.fromkeys(lanes, 0)
    used = [_executors(flow, network) for flow in transfers.flows]
    for flow, devices in zip(transfers.flows, used, strict=True):
        for device in devices:
            left[device] -= flow.blocks or 0
            sharers[device] += not flow.blocks
    return [
        max(1, min([_most(flow), *(left[i] // sharers[i] for i in devices if sharers[i])]))
        if not any(one.uses_copy_engine for one in flow.transfers)
        else FEW_BLOCKS
        for flow, devices in zip(transfers.flows, used, strict=True)
    ]


def _most(flow: Flow) -> int:
    return NETWORK_BLOCKS if flow.is_network else FREE_BLOCKS


def _executors(flow: Flow, network: Network) -> set[str]:
    """The devices whose blocks, or lanes, move a flow: of one that a NIC takes from a GPU's memory,
    the GPU's too."""
    if is_carried(flow, network):
        return {str(flow.source), str(flow.destination)}
    if flow.is_network:
        places = {place for one in flow.transfers for place in _places(one)}
        return {device_of(place) for place in places if place.kind != "C"}
    return {device_of(one.executor) for one in flow.transfers if not one.uses_copy_engine}


def _assigned(
    pieces: Sequence[Piece], meeting: Meeting
) -> tuple[dict[str, DeviceProgram], list[tuple[Part, Piece]]]:
    """Lanes and copies by device, and where each piece went, in the pieces' order."""
    pairs = _pairs(pieces)
    cycles = _cycles(pieces, pairs)
    lanes: dict[str, list[Lane]] = {}
    copies: dict[str, list[Copy]] = {}
    where: dict[int, Part] = {}
    for i, piece in enumerate(pieces):
        if i in where:
            continue
        if piece.engine:
            mine = copies.setdefault(piece.device, [])
            where[i] = _part(piece, "copy", len(mine))
            mine.extend(_copies(piece))
            continue
        own = lanes.setdefault(piece.device, [])
        other = pairs.get(i)
        where[i] = _part(piece, piece.kind, len(own))
        if other is not None:
            where[other] = _part(pieces[other], pieces[other].kind, len(own))
        partner = pieces[other].ends if other is not None else (None,) * len(piece.ends)
        links = piece.links or (None,) * len(piece.ends)
        for end, second, link in zip(piece.ends, partner, links, strict=True):
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
                    link=link,
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


def _part(piece: Piece, kind: Literal["incoming", "outgoing", "copy"], first: int) -> Part:
    """Where a piece's ends went: from number `first` on, as many as it has (pairs have as many)."""
    return Part(
        device=piece.device,
        kind=kind,
        numbers=tuple(range(first, first + len(piece.ends))),
        slice_bytes=piece.slice_bytes,
        slices=piece.ends[0].slices,
        piped=piece.piped,
        group_us=CARRIED_GROUP_US if piece.links else COPIED_GROUP_US,
    )


def _copies(piece: Piece) -> Iterator[Copy]:
    size, incoming = piece.slice_bytes, piece.kind == "incoming"
    if piece.links:
        for link in piece.links:
            yield Copy(
                source=None, destination=None, slice_bytes=size, link=link, sends=not incoming
            )
        return
    for end in piece.ends:
        source, destination = (end, None) if incoming else (None, end)
        yield Copy(source=source, destination=destination, slice_bytes=size)


def _pairs(pieces: Sequence[Piece]) -> dict[int, int]:
    """A GPU's k-th incoming and k-th outgoing flow share blocks, where their slices are alike."""
    pairs: dict[int, int] = {}
    for device in {piece.device for piece in pieces}:
        mine = [
            i
            for i, one in enumerate(pieces)
            if one.device == device and one.piped and not (one.engine or one.links)
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


def _cycles(pieces: Sequence[Piece], pairs: Mapping[int, int]) -> dict[str, int]:
    """For each GPU 2 (n - 1), n being how many pass data on to each other; NICs add nothing."""
    # Half of a worker's start would be this import, and workers need none of it.
    import networkx as nx  # noqa: PLC0415

    graph: nx.Graph[str] = nx.Graph()
    kernels = [piece for piece in pieces if not piece.links]
    graph.add_nodes_from(piece.device for piece in kernels)
    ends: dict[int, list[str]] = {}
    for piece in kernels:
        ends.setdefault(piece.flow, []).append(piece.device)
    for i in pairs:
        one, *more = ends[pieces[i].flow]
        graph.add_edges_from((one, other) for other in more)
    return {
        device: 2 * (len(group) - 1) for group in nx.connected_components(graph) for device in group
    }
