"""The compiler from transfer sets to programs.

Every flow becomes endpoints on its devices; endpoints at one GPU share lanes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from tccl_profiler.endpoints import (
    BufferLayout,
    FlowEndpoint,
    NetworkFlows,
    device_of,
    endpoints_of,
)
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

FlowCoupling = Literal["pass-on", "independent"]
"""Flows through one GPU: forwarded from one to the next as in a ring, or each at its own pace."""

FREE_BLOCKS = 32  # thread blocks of a flow that names no number: enough for NVLink, cheap for PCIe
FEW_BLOCKS = 4  # blocks of a check, and FIFOs of a copy engine, if a flow names no number
NETWORK_BLOCKS = 2
"""Channels of a flow over the network that names no number; NCCL has at least two."""
CARRIED_GROUP_US = 5_000.0
"""An NCCL collective begins tens of microseconds after the previous one has ended."""
COPIED_GROUP_US = 500.0  # a stamp is a kernel between copies and costs them about ten microseconds
LEAST_COUPLED_SLICES = 3
"""A closed ring needs room beside the chunk of two slices that each lane begins with."""


def program_for(
    transfers: TransferSet,
    *,
    lanes: Mapping[str, int],
    meeting: FlowCoupling = "pass-on",
    network: NetworkFlows | None = None,
) -> Program:
    """Compile a set for its devices, on one host or several.

    `lanes`: how many blocks each device can run at once, by name (`G0`, `h1.N0`). Raises
    MeasurementError if the set names an unknown place, or needs too many blocks.
    """
    check_places(transfers, lanes=lanes, network=network)
    layout = BufferLayout()
    shares = _free_blocks(transfers, lanes, network)
    endpoints = [
        endpoint
        for number, flow in enumerate(transfers.flows)
        for endpoint in endpoints_of(layout, number, flow, flow.blocks or shares[number], network)
    ]
    devices, parts = _assigned(endpoints, meeting)
    for device, program in devices.items():
        _check_lanes(device, len(program.lanes), lanes)
        if len(program.copies) > MAX_COPIES:
            raise MeasurementError(
                f"the copy engines of {device} would go through {len(program.copies)} FIFOs at "
                f"once, at most {MAX_COPIES} are right: give the flows fewer blocks"
            )
    by_flow: list[list[Part]] = [[] for _ in transfers.flows]
    for part, endpoint in zip(parts, endpoints, strict=True):
        by_flow[endpoint.flow].append(part)
    return Program(
        transfers=transfers,
        devices=devices,
        # Bytes arrive at the last endpoint.
        counted=tuple(found[-1] for found in by_flow),
        other=tuple(tuple(found[:-1]) for found in by_flow),
        space_bytes=layout.sizes,
        links=layout.links(),
    )


def check_places(
    transfers: TransferSet, *, lanes: Mapping[str, int], network: NetworkFlows | None = None
) -> None:
    """Refuse a set whose places cannot be measured by these devices."""
    for flow in transfers.flows:
        # NCCL opens NICs itself.
        others = "CN" if _is_carried(flow, network) else "C"
        for place in _places(flow):
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
    # Flows into a GPU share blocks with flows out of it, but not with each other.
    load: Counter[tuple[str, bool]] = Counter()
    for flow in transfers.flows:
        for device in () if _is_carried(flow, network) else sorted(_executors(flow, network)):
            load[device, device == device_of(flow.source)] += flow.blocks or 1
    for (device, _), count in load.items():
        _check_lanes(device, count, lanes)


def _check_lanes(device: str, count: int, lanes: Mapping[str, int]) -> None:
    if count > lanes[device]:
        what = "lanes" if is_nic(device) else "blocks"
        raise MeasurementError(
            f"{device} would run {count} {what} at once, it can run {lanes[device]}: give the "
            "flows fewer blocks"
        )


def checkable(transfers: TransferSet) -> TransferSet:
    """Return a set over the same paths whose data can be compared on arrival.

    Each writer has a reader: kernels replace copy engines, and host memory is read back.

    >>> from tccl_py.model.transfer import parse_set
    >>> str(checkable(parse_set("G0->G0->C0 G0->D1->G1")))
    'G0->G0->C0->G0->G0{blocks=4} G0->G1->G1{blocks=4}'
    """
    return transfer_set(_checkable(flow) for flow in transfers.flows)


def _checkable(flow: Flow) -> Flow:
    if flow.is_network:
        # Kernels compare at its ends already; where there is no kernel, NICs do.
        return flow
    halves = tuple(
        Transfer(part.source, Place("G", part.executor.index, part.executor.host), part.destination)
        for part in flow.transfers
    )
    if {flow.source.kind, flow.destination.kind} != {"G"}:
        (half,) = halves
        gpu, host = half.executor, flow.source if flow.source.kind == "C" else flow.destination
        halves = (Transfer(gpu, gpu, host), Transfer(host, gpu, gpu))
    fifo = flow.fifo or (Fifo() if len(halves) > 1 else None)
    return Flow(halves, flow.blocks or FEW_BLOCKS, fifo)


def _known(host: str, lanes: Mapping[str, int]) -> str:
    own = [device for device in lanes if host_of(device) == host]
    if own:
        ordered = sorted(own, key=lambda device: (local(device)[0], int(local(device)[1:])))
        return f"there are {', '.join(ordered)}"
    if host:
        return f"no device of host {host} is"
    return f"name its host, of {', '.join(sorted({host_of(device) for device in lanes}))}"


def _places(flow: Flow) -> list[Place]:
    return [
        place for part in flow.transfers for place in (part.source, part.executor, part.destination)
    ]


def _free_blocks(
    transfers: TransferSet, lanes: Mapping[str, int], network: NetworkFlows | None
) -> list[int]:
    """Return the blocks of flows that name none: an equal share of the busiest device's rest."""
    left, sharers = dict(lanes), dict.fromkeys(lanes, 0)
    used = [_executors(flow, network) for flow in transfers.flows]
    for flow, devices in zip(transfers.flows, used, strict=True):
        for device in devices:
            left[device] -= flow.blocks or 0
            sharers[device] += not flow.blocks

    def blocks(flow: Flow, devices: set[str]) -> int:
        if any(part.uses_copy_engine for part in flow.transfers):
            return FEW_BLOCKS
        most = NETWORK_BLOCKS if flow.is_network else FREE_BLOCKS
        return max(1, min([most, *(left[i] // sharers[i] for i in devices if sharers[i])]))

    return [blocks(flow, devices) for flow, devices in zip(transfers.flows, used, strict=True)]


def _is_carried(flow: Flow, network: NetworkFlows | None) -> bool:
    return network is not None and network.carries(flow)


def _executors(flow: Flow, network: NetworkFlows | None) -> set[str]:
    if _is_carried(flow, network):
        return {str(flow.source), str(flow.destination)}
    if flow.is_network:
        return {device_of(place) for place in _places(flow) if place.kind != "C"}
    return {device_of(part.executor) for part in flow.transfers if not part.uses_copy_engine}


def _assigned(
    endpoints: Sequence[FlowEndpoint], meeting: FlowCoupling
) -> tuple[dict[str, DeviceProgram], list[Part]]:
    pairs = _pairs(endpoints)
    cycles = _cycles(endpoints, pairs)
    lanes: dict[str, list[Lane]] = {}
    copies: dict[str, list[Copy]] = {}
    where: dict[int, Part] = {}
    for i, endpoint in enumerate(endpoints):
        if i in where:
            continue
        if endpoint.engine:
            queued = copies.setdefault(endpoint.device, [])
            where[i] = _part(endpoint, "copy", len(queued))
            queued.extend(_copies(endpoint))
            continue
        own, pair = lanes.setdefault(endpoint.device, []), pairs.get(i)
        where[i] = _part(endpoint, endpoint.kind, len(own))
        if pair is not None:
            where[pair] = _part(endpoints[pair], endpoints[pair].kind, len(own))
        cycle = cycles[endpoint.device] if pair is not None else 0
        own.extend(_lanes(endpoint, None if pair is None else endpoints[pair], meeting, cycle))
    devices = {
        device: DeviceProgram(
            lanes=tuple(lanes.get(device, ())), copies=tuple(copies.get(device, ()))
        )
        for device in sorted({*lanes, *copies})
    }
    return devices, [where[i] for i in range(len(endpoints))]


def _lanes(
    endpoint: FlowEndpoint, pair: FlowEndpoint | None, meeting: FlowCoupling, cycle: int
) -> list[Lane]:
    """Return the lanes of an endpoint and of the one that shares its blocks."""
    empty = (None,) * len(endpoint.ends)
    partner = empty if pair is None else pair.ends
    lanes = []
    for end, second, link in zip(endpoint.ends, partner, endpoint.links or empty, strict=True):
        incoming, outgoing = (end, second) if endpoint.kind == "incoming" else (second, end)
        lane = Lane(
            incoming=incoming,
            outgoing=outgoing,
            slice_bytes=endpoint.slice_bytes,
            coupled=second is not None
            and meeting == "pass-on"
            and min(end.slices, second.slices) >= LEAST_COUPLED_SLICES,
            cycle=cycle,
            link=link,
        )
        lanes.append(lane)
    return lanes


def _part(
    endpoint: FlowEndpoint, kind: Literal["incoming", "outgoing", "copy"], first: int
) -> Part:
    """Return where an endpoint's ends went: from number `first` on."""
    return Part(
        device=endpoint.device,
        kind=kind,
        numbers=tuple(range(first, first + len(endpoint.ends))),
        slice_bytes=endpoint.slice_bytes,
        slices=endpoint.ends[0].slices,
        piped=endpoint.piped,
        group_us=CARRIED_GROUP_US if endpoint.links else COPIED_GROUP_US,
    )


def _copies(endpoint: FlowEndpoint) -> list[Copy]:
    size, incoming = endpoint.slice_bytes, endpoint.kind == "incoming"
    if endpoint.links:
        return [
            Copy(source=None, destination=None, slice_bytes=size, link=link, sends=not incoming)
            for link in endpoint.links
        ]
    return [
        Copy(
            source=end if incoming else None,
            destination=None if incoming else end,
            slice_bytes=size,
        )
        for end in endpoint.ends
    ]


def _pairs(endpoints: Sequence[FlowEndpoint]) -> dict[int, int]:
    """Pair a GPU's k-th incoming and k-th outgoing flow on shared blocks, if slices are alike."""
    pairs: dict[int, int] = {}
    waiting: dict[tuple[str, int, int], list[int]] = {}

    def shape(endpoint: FlowEndpoint) -> tuple[str, int, int]:
        return endpoint.device, endpoint.slice_bytes, len(endpoint.ends)

    kernels = [
        (i, end) for i, end in enumerate(endpoints) if end.piped and not (end.engine or end.links)
    ]
    for i, endpoint in kernels:
        if endpoint.kind == "outgoing":
            waiting.setdefault(shape(endpoint), []).append(i)
    for i, endpoint in kernels:
        found = waiting.get(shape(endpoint)) if endpoint.kind == "incoming" else None
        if found:
            j = found.pop(0)
            pairs[i], pairs[j] = j, i
    return pairs


def _cycles(endpoints: Sequence[FlowEndpoint], pairs: Mapping[int, int]) -> dict[str, int]:
    """Return 2 (n - 1) for each GPU, n being the GPUs that forward data to each other."""
    # Half of a worker's start would be this import, and workers need none of it.
    import networkx as nx  # noqa: PLC0415

    graph: nx.Graph[str] = nx.Graph()
    kernels = [endpoint for endpoint in endpoints if not endpoint.links]
    graph.add_nodes_from(endpoint.device for endpoint in kernels)
    ends: dict[int, list[str]] = {}
    for endpoint in kernels:
        ends.setdefault(endpoint.flow, []).append(endpoint.device)
    for i in pairs:
        first, *more = ends[endpoints[i].flow]
        graph.add_edges_from((first, device) for device in more)
    return {
        device: 2 * (len(group) - 1) for group in nx.connected_components(graph) for device in group
    }
