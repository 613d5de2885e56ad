"""Hops, spaces of hops for a search, and rings of hops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tccl_py.errors import SearchError
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import Flow, TransferSet, receiving_nic, sending_nic, transfer_set


class Hop(msgspec.Struct, frozen=True, order=True):
    """GPU `source` to the next GPU `target`, by one mechanism."""

    source: int
    target: int
    flow: Flow


class HopSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The hops a runtime, `name`, allows between ordered pairs of GPUs; pairs may have no hop."""

    name: str
    gpus: tuple[int, ...]
    hops: Mapping[tuple[int, int], tuple[Hop, ...]]

    def between(self, source: int, target: int) -> tuple[Hop, ...]:
        """Return the hops from `source` to `target`."""
        return self.hops.get((source, target), ())

    def __iter__(self) -> Iterator[Hop]:
        for pair in sorted(self.hops):
            yield from self.hops[pair]


class Ring(msgspec.Struct, frozen=True, order=True):
    """A closed sequence of hops over all GPUs, beginning at the lowest index.

    >>> from tccl_py.model.transfer import direct_write
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
        return transfer_set(hop.flow for own in self.rings for hop in own.hops)

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
    return RingSet(tuple(sorted(rings, key=lambda known: (known.gpus, str(known.hops)))))


def ring_like(space: HopSpace, known: Ring | Sequence[int]) -> Ring:
    """Return the ring over the same GPUs and NICs, each hop by the space's mechanism.

    A bounce keeps its NUMA node, if the space has that. Of an order of GPUs each hop is by the
    space's first mechanism. Raises SearchError: the space has no such hop.
    """
    order = known.gpus if isinstance(known, Ring) else known
    before = known.hops if isinstance(known, Ring) else [None] * len(order)
    hops = []
    for source, target, hop in zip(order, (*order[1:], order[0]), before, strict=True):
        choices = space.between(source, target)
        if hop is not None:
            choices = tuple(one for one in choices if nics_of(one) == nics_of(hop))
            same = tuple(one for one in choices if one.flow.through == hop.flow.through)
            choices = same or choices
        if not choices:
            raise SearchError(f"{space.name} has no hop from GPU {source} to GPU {target}")
        hops.append(choices[0])
    return ring(hops)


def nics_of(hop: Hop) -> tuple[int | None, int | None]:
    """Return the NICs by which a hop leaves and enters a node; None within a node."""
    return sending_nic(hop.flow), receiving_nic(hop.flow)
