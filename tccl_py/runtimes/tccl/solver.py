"""What the TCCL fork's runtime does with a database: the ring it makes of a job's GPUs.

It joins the nodes of a job in the order of their ranks. With h and t for encoded crossings,
`best[n][h][t] = max over x of min(best[n-1][h][x], chains_n[x][t])`; the ring is the best
`best[N][x][x]`. Of equal ones it takes the crossing with the lowest number.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.errors import SearchError
from tccl_py.runtimes.tccl.database import (
    Crossing,
    Database,
    GpuRing,
    NodeChain,
    TypedTransfer,
    gpus_of,
)

Floats = npt.NDArray[np.float64]


class NodePart(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part of the ring; the only node of a job has neither head nor tail."""

    mask: int
    transfers: tuple[TypedTransfer, ...]
    head: Crossing | None = None
    tail: Crossing | None = None

    @property
    def gpus(self) -> tuple[int, ...]:
        """The node's GPUs in ring order; of a job's only node from where its ring begins."""
        lands = [one.destination for one in self.transfers if "WRITE_CPUMEM" not in one.type]
        if self.head is None:
            # A ring comes back to where it began.
            return (*lands[-1:], *lands[:-1])
        return (self.head.destination, *lands) if self.head.lands_in_gpu else tuple(lands)


class FoundRing(msgspec.Struct, frozen=True, kw_only=True):
    """The ring that the runtime sets up, in node order; `gbps` is what the database promises."""

    gbps: float
    nodes: tuple[NodePart, ...]


def found_ring(database: Database, masks: Sequence[int]) -> FoundRing:
    """The ring that the runtime makes of nodes whose GPUs are `masks`, in this order.

    Raises:
        SearchError: it would stop the job: one GPU in all, a set that the database has no ring or
            no chain for, or chains that do not meet.
    """
    if sum(len(gpus_of(mask)) for mask in masks) < 2:
        raise SearchError("TCCL does not handle single GPU communicators")
    if len(masks) == 1:
        return _inside_a_node(database, masks[0])
    return _over_nodes(database, masks)


def _inside_a_node(database: Database, mask: int) -> FoundRing:
    ring: GpuRing | None = next((one for one in database.intra if one.mask == mask), None)
    if ring is None:
        # The runtime looks at no transfers then, and finds no transport for any GPU.
        raise SearchError(f"No ring found over GPUs {_listed(mask)}: the database has none")
    return FoundRing(gbps=ring.gbps, nodes=(NodePart(mask=mask, transfers=ring.transfers),))


def _over_nodes(database: Database, masks: Sequence[int]) -> FoundRing:
    tables = _Tables(database)
    for mask in masks:
        if not tables.chains(mask):
            raise _no_ring(masks, f"there is no chain over GPUs {_listed(mask)}")
    best = tables.rates(masks[0])
    came_from: list[npt.NDArray[np.intp]] = []
    for mask in masks[1:]:
        # Crossings ascend by their numbers, and argmax takes the first of equal ones.
        through = np.minimum(best[:, :, None], tables.rates(mask)[None, :, :])
        came_from.append(through.argmax(axis=1))
        best = through.max(axis=1)
    closed = best.diagonal()
    last = int(closed.argmax())
    if closed[last] <= 0:
        raise _no_ring(masks, "no chains meet")
    tail, parts = last, []
    for turn in range(len(masks) - 1, -1, -1):
        head = int(came_from[turn - 1][last, tail]) if turn else last
        chain = tables.chains(masks[turn])[tables.crossings[head], tables.crossings[tail]]
        parts.append(
            NodePart(mask=masks[turn], head=chain.head, tail=chain.tail, transfers=chain.transfers)
        )
        tail = head
    return FoundRing(gbps=float(closed[last]), nodes=tuple(reversed(parts)))


def _no_ring(masks: Sequence[int], why: str) -> SearchError:
    return SearchError(f"No ring found over {len(masks)} nodes: {why}")


class _Tables:
    """Rates by head and tail, over the crossings that occur; the rest is 0 in the fork's tables."""

    def __init__(self, database: Database) -> None:
        self._chains = {
            part.mask: {(chain.head, chain.tail): chain for chain in part.chains}
            for part in database.inter
        }
        used = {end for chains in self._chains.values() for pair in chains for end in pair}
        self.crossings = sorted(used, key=lambda one: one.encoded(database.num_bits))
        self._at = {one: at for at, one in enumerate(self.crossings)}

    def chains(self, mask: int) -> dict[tuple[Crossing, Crossing], NodeChain]:
        """The chains of a set of GPUs, by head and tail."""
        return self._chains.get(mask, {})

    def rates(self, mask: int) -> Floats:
        """GB/s of the best chain of a set by head and tail, 0 where there is none."""
        table = np.zeros((len(self.crossings),) * 2)
        for (head, tail), chain in self.chains(mask).items():
            table[self._at[head], self._at[tail]] = chain.gbps
        return table


def _listed(mask: int) -> str:
    return ", ".join(map(str, gpus_of(mask)))
