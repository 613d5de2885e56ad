"""Hops, spaces of hops for a search, rings of hops, and the flows that hops are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypedDict

import msgspec

from tccl_py.errors import SearchError
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import (
    Fifo,
    Flow,
    Place,
    Transfer,
    TransferSet,
    link_transfers,
    transfer_set,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Hop(msgspec.Struct, frozen=True, order=True):
    """GPU `source` to the next GPU `target`, by one mechanism."""

    source: int
    target: int
    flow: Flow


Pair = tuple[int, int]


class PairHops(Mapping[Pair, tuple[Hop, ...]]):
    """The hops of ordered pairs of GPUs, each built when it is first asked for."""

    def __init__(self, pairs: Iterable[Pair], build: Callable[[Pair], tuple[Hop, ...]]) -> None:
        self._built: dict[Pair, tuple[Hop, ...] | None] = dict.fromkeys(pairs)
        self._build = build

    def __getitem__(self, pair: Pair) -> tuple[Hop, ...]:
        hops = self._built[pair]
        if hops is None:
            hops = self._built[pair] = self._build(pair)
        return hops

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._built)

    def __len__(self) -> int:
        return len(self._built)


class HopSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The hops a runtime, `name`, allows between ordered pairs of GPUs; pairs may have no hop."""

    name: str
    gpus: tuple[int, ...]
    hops: Mapping[Pair, tuple[Hop, ...]]

    def between(self, source: int, target: int) -> tuple[Hop, ...]:
        """Return the hops from `source` to `target`."""
        return self.hops.get((source, target), ())

    def __iter__(self) -> Iterator[Hop]:
        for pair in sorted(self.hops):
            yield from self.hops[pair]

    def only(self, fits: Callable[[Hop], bool]) -> HopSpace:
        """Return the space of the hops that fit."""
        hops = PairHops(self.hops, lambda pair: tuple(filter(fits, self.hops[pair])))
        return msgspec.structs.replace(self, hops=hops)


class Ring(msgspec.Struct, frozen=True, order=True):
    """A closed sequence of hops over all GPUs, beginning at the lowest index.

    >>> ring([Hop(1, 0, direct_write(1, 0)), Hop(0, 1, direct_write(0, 1))]).gpus
    (0, 1)
    """

    hops: tuple[Hop, ...]

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPU indices in ring order."""
        return tuple(hop.source for hop in self.hops)


class RingSet(msgspec.Struct, frozen=True, order=True):
    """Rings that run together, each with an equal share of the data."""

    rings: tuple[Ring, ...]

    @property
    def flows(self) -> TransferSet:
        """Every flow of every ring, all at the same time."""
        return transfer_set(hop.flow for ring in self.rings for hop in ring.hops)

    def rate(self, measurement: Measurement) -> float:
        """Return the bandwidth of all rings together, GB/s; the slowest flow limits each ring."""
        return len(self.rings) * measurement.rate_gbps


def ring(hops: Sequence[Hop]) -> Ring:
    """Return the ring of these hops, beginning at the lowest GPU index, or raise a SearchError."""
    sources = [hop.source for hop in hops]
    targets = [hop.target for hop in hops]
    if len(set(sources)) != len(sources) or targets != sources[1:] + sources[:1]:
        raise SearchError(f"hops {sources} -> {targets} do not form one ring")
    start = sources.index(min(sources))
    return Ring((*hops[start:], *hops[:start]))


def ring_set(rings: Sequence[Ring]) -> RingSet:
    """Return the set of these rings, in canonical order."""
    return RingSet(tuple(sorted(rings, key=lambda ring: (ring.gpus, ring.hops))))


def neighbours(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return each place of a ring with the next one.

    >>> [*neighbours((0, 2, 1))]
    [(0, 2), (2, 1), (1, 0)]
    """
    return pairwise((*order, order[0]))


def ring_like(space: HopSpace, like: Ring | Sequence[int]) -> Ring:
    """Return the ring over the same GPUs and NICs, each hop by the space's mechanism.

    A hop keeps its transfers, or a bounce its NUMA node, if the space has that. Of an order of
    GPUs each hop is by the space's first mechanism. Raises SearchError: the space has no such hop.
    """
    order = like.gpus if isinstance(like, Ring) else like
    before = like.hops if isinstance(like, Ring) else [None] * len(order)
    hops = []
    for (source, target), hop in zip(neighbours(order), before, strict=True):
        choices = space.between(source, target)
        if hop is not None:
            flow, nics = hop.flow, nics_of(hop)
            choices = tuple(choice for choice in choices if nics_of(choice) == nics)
            near = tuple(choice for choice in choices if choice.flow.through == flow.through)
            alike_flows = tuple(c for c in near if c.flow.transfers == flow.transfers)
            choices = alike_flows or near or choices
        if not choices:
            raise SearchError(f"{space.name} has no hop from GPU {source} to GPU {target}")
        hops.append(choices[0])
    return ring(hops)


def nics_of(hop: Hop) -> tuple[int | None, int | None]:
    """Return the NICs by which a hop leaves and enters a node; None within a node."""
    return sending_nic(hop.flow), receiving_nic(hop.flow)


# Flows by the numbers of devices.
class Options(TypedDict, total=False):
    """Options of a flow; of a direct flow `fifo` counts only where blocks are given."""

    blocks: int | None
    fifo: Fifo | None


def _flow(*places: Place, **options: Unpack[Options]) -> Flow:
    return Flow(link_transfers(places), **options)


def direct_write(source: int, target: int, **options: Unpack[Options]) -> Flow:
    """Return GPU `source` writing to GPU `target`."""
    writer = Place("G", source)
    return _flow(writer, writer, Place("G", target), **options)


def direct_read(source: int, target: int, **options: Unpack[Options]) -> Flow:
    """Return GPU `target` reading from GPU `source`."""
    reader = Place("G", target)
    return _flow(Place("G", source), reader, reader, **options)


def bounce(source: int, target: int, numa: int, **options: Unpack[Options]) -> Flow:
    """Return the bounce from GPU `source` to `target` through host memory of NUMA node `numa`."""
    writer, reader = Place("G", source), Place("G", target)
    return _flow(writer, writer, Place("C", numa), reader, reader, **options)


def leaving(
    gpu: int,
    nic: int,
    *,
    through: int | None = None,
    relay: int | None = None,
    **options: Unpack[Options],
) -> Flow:
    """Return GPU `gpu` sending by NIC `nic`, through NUMA node `through` or GPU `relay` if given.

    >>> str(leaving(3, 0)), str(leaving(3, 0, through=1)), str(leaving(3, 0, relay=2))
    ('G3->N0->N0', 'G3->G3->C1->N0->N0', 'G3->G3->G2->N0->N0')
    """
    place, port = Place("G", gpu), Place("N", nic)
    if through is None and relay is None:
        return _flow(place, port, port, **options)
    halfway = Place("C", through) if through is not None else Place("G", relay or 0)
    return _flow(place, place, halfway, port, port, **options)


def entering(nic: int, gpu: int, *, through: int | None = None, **options: Unpack[Options]) -> Flow:
    """Return GPU `gpu` receiving by NIC `nic`, through memory of NUMA node `through` if given.

    >>> str(entering(0, 3)), str(entering(0, 3, through=1))
    ('N0->N0->G3', 'N0->N0->C1->G3->G3')
    """
    place, port = Place("G", gpu), Place("N", nic)
    if through is None:
        return _flow(port, port, place, **options)
    return _flow(port, port, Place("C", through), place, place, **options)


def join_flows(out: Flow, into: Flow, *, sender: str, receiver: str) -> Flow:
    """Return the flow over the network that is `out` on host `sender`, `into` on `receiver`.

    >>> str(join_flows(leaving(3, 0), entering(1, 0), sender="h0", receiver="h1"))
    'h0.G3->h0.N0->h1.N1->h1.N1->h1.G0'
    """
    arrived = on_host(into, receiver)
    *before, last = on_host(out, sender).transfers
    over = Transfer(last.source, last.executor, arrived.source)
    return Flow((*before, over, *arrived.transfers), out.blocks, out.fifo)


def on_host(flow: Flow, host: str) -> Flow:
    """Return the flow with all its places on `host`."""
    return elsewhere(flow, lambda place: Place(place.kind, place.index, host))


def elsewhere(flow: Flow, moved: Callable[[Place], Place]) -> Flow:
    """Return the flow with `moved(place)` in each place's stead."""
    ends = ((part.source, part.executor, part.destination) for part in flow.transfers)
    transfers = tuple(Transfer(*map(moved, places)) for places in ends)
    return Flow(transfers, flow.blocks, flow.fifo, flow.buffer)


def sending_nic(flow: Flow) -> int | None:
    """Return the NIC by which a flow leaves a node, or None."""
    return _nic_that(flow, "read")


def receiving_nic(flow: Flow) -> int | None:
    """Return the NIC by which a flow enters a node, or None."""
    return _nic_that(flow, "write")


@functools.lru_cache(maxsize=4096)  # a search asks for the same few hops again and again
def _nic_that(flow: Flow, operation: str) -> int | None:
    moves = (t for t in flow.transfers if t.executor.kind == "N" and t.operation == operation)
    return next((transfer.executor.index for transfer in moves), None)
