"""The compiler from transfer sets to programs.

Every flow becomes endpoints on its devices; endpoints at one GPU share lanes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from tccl_profiler.program import (
    MAX_COPIES,
    BufferLayout,
    DeviceProgram,
    FlowEndpoint,
    FlowLayout,
    Lane,
    Link,
    Program,
    device_of,
)
from tccl_profiler.shared_memory import MAX_LANES
from tccl_py.errors import MeasurementError
from tccl_py.model.measurement import NIC_TRANSPORTS, FlowCoupling, NicTransport
from tccl_py.model.transfer import (
    Fifo,
    Flow,
    Place,
    Transfer,
    TransferSet,
    place_named,
    transfer_set,
)

FREE_BLOCKS = 32  # thread blocks of a flow that names no number: enough for NVLink, cheap for PCIe
FEW_BLOCKS = 4  # blocks of a check, and FIFOs of a copy engine, if a flow names no number
NETWORK_BLOCKS = 2
"""Channels of a flow over the network that names no number; NCCL has at least two."""
LEAST_COUPLED_SLICES = 3
"""A closed ring needs room beside the chunk of two slices that each lane begins with."""


def program_for(
    transfers: TransferSet,
    *,
    lanes: Mapping[str, int],
    meeting: FlowCoupling = "pass-on",
    network: str = "tcp",
) -> Program:
    """Compile a set for its devices, on one host or several.

    `lanes`: how many blocks each device can run at once, by name (`G0`, `h1.N0`). Raises
    MeasurementError if the set names an unknown place, or needs too many blocks.
    """
    transport = NIC_TRANSPORTS[network]
    _check_places(transfers, lanes, transport)
    layout, blocks = BufferLayout(), _blocks(transfers, lanes, transport)
    endpoints = [
        endpoint
        for number, (flow, count) in enumerate(zip(transfers.flows, blocks, strict=True))
        for endpoint in FlowLayout(layout, number, flow, count).endpoints(transport)
    ]
    devices, endpoints = _assign(endpoints, meeting)
    for device, program in devices.items():
        # NCCL's blocks wait for a free multiprocessor, and copies beside them for their data.
        carriers = [lane.link.carrier for lane in program.copies if lane.link is not None]
        count = len(program.lanes) + sum(c.channels for c in carriers if c is not None)
        if count > lanes[device]:
            unit = "lanes" if place_named(device).kind == "N" else "blocks"
            raise MeasurementError(
                f"{device} would run {count} {unit} at once, it can run {lanes[device]}: "
                "give the flows fewer blocks"
            )
        if len(program.copies) > MAX_COPIES:
            raise MeasurementError(
                f"the copy engines of {device} would go through {len(program.copies)} FIFOs at "
                f"once, at most {MAX_COPIES} are right: give the flows fewer blocks"
            )
    by_flow = [tuple(ends) for _, ends in groupby(endpoints, lambda endpoint: endpoint.flow)]
    return Program(
        transfers=transfers,
        devices=devices,
        # Bytes arrive at the last endpoint.
        counted=tuple(ends[-1] for ends in by_flow),
        other=tuple(ends[:-1] for ends in by_flow),
        space_bytes=layout.sizes,
        links=layout.links(),
    )


def devices_used(
    sets: Iterable[TransferSet],
    *,
    devices: Iterable[str],
    others: Collection[str],
    network: str = "tcp",
) -> dict[str, frozenset[str]]:
    """Return devices that sets use, by host; `others` are memory, and NICs that NCCL may open."""
    used: dict[str, set[str]] = {}
    # How many blocks a device runs at once is known when it is open; this is the limit for all.
    lanes = dict.fromkeys(devices, MAX_LANES)
    for transfers in sets:
        program_for(transfers, lanes=lanes, network=network)
        for flow in transfers.flows:
            for place, device in _places(flow, NIC_TRANSPORTS[network]):
                if device is not None:
                    # Memory that is used has a worker, though another device may move the bytes.
                    used.setdefault(place.host, set()).add(place_named(device).device)
                elif str(place) not in others:
                    listed = ", ".join(sorted(others))
                    raise MeasurementError(
                        f"{flow}: {place} is not measured here; there are {listed}"
                    )
    return {host: frozenset(names) for host, names in used.items()}


def links_of(sets: Iterable[TransferSet], devices: Iterable[str], network: str) -> tuple[Link, ...]:
    """Return the links of sets on devices that are not open yet."""
    lanes = dict.fromkeys(devices, MAX_LANES)
    programs = (program_for(transfers, lanes=lanes, network=network) for transfers in sets)
    return tuple(link for program in programs for link in program.links)


def _places(flow: Flow, transport: NicTransport) -> Iterator[tuple[Place, str | None]]:
    """Yield a flow's places with their devices, None for host memory, and NICs that NCCL opens."""
    free = "CN" if transport.carries(flow) else "C"
    for place in flow.places:
        yield place, None if place.kind in free else device_of(place)


def _check_places(
    transfers: TransferSet, lanes: Mapping[str, int], transport: NicTransport
) -> None:
    """Refuse a set whose places cannot be measured by these devices."""
    for flow in transfers.flows:
        for place, device in _places(flow, transport):
            if device is not None and device not in lanes:
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
    devices = sorted(map(place_named, lanes))
    if any(device.host == host for device in devices):
        return f"there are {', '.join(str(device) for device in devices if device.host == host)}"
    if host:
        return f"no device of host {host} is"
    return f"name its host, of {', '.join(sorted({device.host for device in devices}))}"


def _blocks(transfers: TransferSet, lanes: Mapping[str, int], transport: NicTransport) -> list[int]:
    """Return each flow's blocks, by default an equal share of the busiest device's rest."""
    free, sharers = dict(lanes), dict.fromkeys(lanes, 0)
    used = [_executors(flow, transport) for flow in transfers.flows]
    for flow, devices in zip(transfers.flows, used, strict=True):
        for device in devices:
            free[device] -= flow.blocks or 0
            sharers[device] += not flow.blocks

    def free_blocks(flow: Flow, devices: set[str]) -> int:
        if any(part.uses_copy_engine for part in flow.transfers):
            return FEW_BLOCKS
        most = NETWORK_BLOCKS if flow.is_network else FREE_BLOCKS
        return max(1, min([most, *(free[i] // sharers[i] for i in devices)]))

    return [
        flow.blocks or free_blocks(flow, devices)
        for flow, devices in zip(transfers.flows, used, strict=True)
    ]


def _executors(flow: Flow, transport: NicTransport) -> set[str]:
    """Return the devices that run blocks of a flow, NCCL's own included."""
    ends = FlowLayout(BufferLayout(), 0, flow, blocks=1).endpoints(transport)
    return {end.device for end in ends if end.links or not end.engine}


def _assign(
    endpoints: Sequence[FlowEndpoint], meeting: FlowCoupling
) -> tuple[dict[str, DeviceProgram], list[FlowEndpoint]]:
    """Give each endpoint, with the one that shares its blocks, lanes or copies of its device."""
    pairs = _pairs(endpoints)
    cycles = _cycles(endpoints, pairs)
    lanes: defaultdict[str, list[Lane]] = defaultdict(list)
    copies: defaultdict[str, list[Lane]] = defaultdict(list)
    numbered = dict(enumerate(endpoints))
    for i, endpoint in enumerate(endpoints):
        if numbered[i].numbers:
            continue
        queue = (copies if endpoint.engine else lanes)[endpoint.device]
        numbers = tuple(range(len(queue), len(queue) + len(endpoint.ends)))
        sharing = [endpoints[j] for j in dict.fromkeys((i, pairs.get(i, i)))]
        for j in {i, pairs.get(i, i)}:
            numbered[j] = msgspec.structs.replace(endpoints[j], numbers=numbers)
        ends = {end.incoming: end.ends for end in sharing}
        roomy = min(end.ends[0].slices for end in sharing) >= LEAST_COUPLED_SLICES
        queue += [
            Lane(
                incoming=ends[True][block] if True in ends else None,
                outgoing=ends[False][block] if False in ends else None,
                slice_bytes=endpoint.slice_bytes,
                coupled=len(ends) == 2 and meeting == "pass-on" and roomy,
                cycle=cycles.get(endpoint.device, 0) if len(ends) == 2 else 0,
                link=endpoint.links[block] if endpoint.links else None,
            )
            for block in range(len(numbers))
        ]
    devices = {
        device: DeviceProgram(lanes=tuple(lanes[device]), copies=tuple(copies[device]))
        for device in sorted({*lanes, *copies})
    }
    return devices, list(numbered.values())


def _pairs(endpoints: Sequence[FlowEndpoint]) -> dict[int, int]:
    """Pair a GPU's k-th incoming and k-th outgoing flow on shared blocks, if slices are alike."""
    by_lane: defaultdict[tuple[str, int, int], tuple[list[int], list[int]]]
    by_lane = defaultdict(lambda: ([], []))
    for i, end in enumerate(endpoints):
        if end.piped and not end.engine and not end.links:
            by_lane[end.device, end.slice_bytes, len(end.ends)][end.incoming].append(i)
    pairs: dict[int, int] = {}
    for outgoing, incoming in by_lane.values():
        for i, j in zip(outgoing, incoming, strict=False):
            pairs |= {i: j, j: i}
    return pairs


def _cycles(endpoints: Sequence[FlowEndpoint], pairs: Mapping[int, int]) -> dict[str, int]:
    """Return 2 (n - 1) for each GPU, n being the GPUs that forward data to each other."""
    if not pairs:
        return {}
    # Slow to import, and few processes need it.
    from tccl_py.model.symmetry import joined_groups  # noqa: PLC0415

    kernels: defaultdict[int, list[str]] = defaultdict(list)
    for endpoint in endpoints:
        if not endpoint.links:
            kernels[endpoint.flow].append(endpoint.device)
    forwarded = [kernels[endpoints[i].flow] for i in pairs]
    groups = joined_groups((gpus[0], gpu) for gpus in forwarded for gpu in gpus[1:])
    return {gpu: 2 * (len(group) - 1) for group in groups for gpu in group}
