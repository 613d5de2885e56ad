"""The fork's runtime for tests: its reader, its demands of a database, and the rings it makes.

The runtime checks little itself: a transfer too many overwrites its memory, a second ring of a set
replaces the first, and a chain that does not lead on stops the job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.errors import InputError, SearchError
from tests.tccl_databases import (
    Crossing,
    Database,
    GpuRing,
    NodeChain,
    NodeChains,
    TypedTransfer,
    encoded,
    gpus_of,
    lands_in_gpu,
    leaves_gpu,
)

MAX_GBPS = 1e6


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with a part, as a clause that begins with a verb, and what would be right."""

    what: str
    right: str


class _Memory(msgspec.Struct, frozen=True):
    """Where the bytes are: in a GPU's memory or a NUMA node's."""

    is_gpu: bool
    index: int

    def __str__(self) -> str:
        return f"GPU {self.index}" if self.is_gpu else f"NUMA node {self.index}"


def check_database(database: Database) -> Database:
    """Return `database` if the fork can load it and use every ring and chain in it.

    Raises:
        InputError: what it could not; the set of GPUs, and head and tail, are named.
    """
    _refuse("metadata", metadata_fault(database))
    seen = Counter(("ring", ring.mask) for ring in database.intra)
    seen += Counter(("chains", part.mask) for part in database.inter)
    for (kind, mask), count in seen.items():
        if count > 1:
            _refuse(f"{kind} of gpus={mask}", Fault("are there twice", "one of each set"))
    for ring in database.intra:
        _refuse(f"ring of gpus={ring.mask}", ring_fault(database, ring))
    for part in database.inter:
        _refuse(f"chains of gpus={part.mask}", mask_fault(database, part.mask, least=1))
        ends = Counter((chain.head, chain.tail) for chain in part.chains)
        for chain in part.chains:
            ends_text = f"from {_text(chain.head)}, leaving by {_text(chain.tail)}"
            where = f"chain of gpus={part.mask} {ends_text}"
            if ends[chain.head, chain.tail] > 1:
                _refuse(where, Fault("is there twice", "one for each head and tail"))
            _refuse(where, chain_fault(database, part.mask, chain))
    return database


def _refuse(where: str, fault: Fault | None) -> None:
    if fault is not None:
        raise InputError(f"TCCL database, {where}", fault.what, fault.right)


def metadata_fault(database: Database) -> Fault | None:
    """What is wrong with the counts, or None."""
    counts = (database.num_gpus, database.num_numa, database.num_bits)
    if min(counts) < 1:
        return Fault(
            f"has num_gpus, num_numa and num_bits_idx of {counts}", "each of them is 1 or more"
        )
    # Set x head x tail.
    if database.num_gpus + 4 + 4 * database.num_bits >= 31:
        return Fault(
            f"makes a table for {database.num_gpus} GPUs and indices of {database.num_bits} bits",
            "the fork counts its cells in 32 bits: 10 GPUs with 4 bits, 16 with 2",
        )
    return None


def mask_fault(database: Database, mask: int, *, least: int) -> Fault | None:
    """What is wrong with a set of GPUs, or None."""
    if not 0 < mask < 2**database.num_gpus:
        return Fault(
            f"has gpus={mask}", f"1 to {2**database.num_gpus - 1}, for {database.num_gpus} GPUs"
        )
    if len(gpus_of(mask)) < least:
        return Fault(f"has gpus={mask}, one GPU", "a ring joins two or more")
    return None


def ring_fault(database: Database, ring: GpuRing) -> Fault | None:
    """What is wrong with a ring, or None."""
    fault = mask_fault(database, ring.mask, least=2)
    fault = fault or _common_fault(database, ring.gbps, ring.transfers)
    if fault is not None:
        return fault
    first = ring.transfers[0]
    start = _Memory(_takes_from_gpu(first), first.source)
    return _way_fault(ring.mask, ring.transfers, start, start)


def chain_fault(database: Database, mask: int, chain: NodeChain) -> Fault | None:
    """What is wrong with a chain of the set `mask`, or None."""
    head, tail = chain.head, chain.tail
    fault = next(_crossing_faults(database, head, tail), None)
    fault = fault or _common_fault(database, chain.gbps, chain.transfers)
    if fault is not None:
        return fault
    start = _Memory(lands_in_gpu(head), head.destination)
    end = _Memory(leaves_gpu(tail), tail.source)
    entered = (head.destination,) if lands_in_gpu(head) else ()
    return _way_fault(mask, chain.transfers, start, end, entered=entered)


def _text(crossing: Crossing) -> str:
    return f"{crossing.type} {crossing.source} to {crossing.destination}"


def _crossing_faults(database: Database, head: Crossing, tail: Crossing) -> Iterator[Fault]:
    for name, one in (("head", head), ("tail", tail)):
        ends = (leaves_gpu(one), one.source), (lands_in_gpu(one), one.destination)
        for (is_gpu, index), end in zip(ends, ("src", "dst"), strict=True):
            count = database.num_gpus if is_gpu else database.num_numa
            most = min(count, 2**database.num_bits)
            if not 0 <= index < most:
                kind = "GPU" if is_gpu else "NUMA node"
                yield Fault(f"has {name}_{end}_idx={index}", f"a {kind} is 0 to {most - 1} here")


def _common_fault(
    database: Database, gbps: float, transfers: Sequence[TypedTransfer]
) -> Fault | None:
    # The comparison is written so that NaN fails it.
    if not 0 < gbps <= MAX_GBPS or not math.isfinite(gbps):
        return Fault(f"has gbps={gbps:g}", "GB/s above 0: the fork takes 0 for a missing one")
    if not transfers:
        return Fault("has no transfer", "the fork sets up a GPU by the transfers that name it")
    if len(transfers) > 2 * database.num_gpus:
        return Fault(
            f"has {len(transfers)} transfers", f"at most {2 * database.num_gpus}, 2 x num_gpus"
        )
    for number, one in enumerate(transfers, start=1):
        if one.type == "GPU_READ_GPUMEM_MEMCPY":
            return Fault(
                f"has transfer {number} of {one.type}, which the fork reads and then does "
                "not set up",
                "GPU_READ_GPUMEM_KERNEL, or GPU_WRITE_GPUMEM_MEMCPY",
            )
        for index, is_gpu in ((one.source, _takes_from_gpu(one)), (one.destination, _to_gpu(one))):
            most = database.num_gpus if is_gpu else database.num_numa
            if not 0 <= index < most:
                kind = "GPU" if is_gpu else "NUMA node"
                return Fault(f"has {kind} {index} in transfer {number}", f"0 to {most - 1}")
    return None


def _takes_from_gpu(transfer: TypedTransfer) -> bool:
    return not transfer.type.startswith("GPU_READ_CPUMEM")


def _to_gpu(transfer: TypedTransfer) -> bool:
    return not transfer.type.startswith("GPU_WRITE_CPUMEM")


def _way_fault(
    mask: int,
    transfers: Sequence[TypedTransfer],
    start: _Memory,
    end: _Memory,
    *,
    entered: Sequence[int] = (),
) -> Fault | None:
    """Follows the bytes from `start` to `end`; the GPUs `entered` and those on the way are all."""
    at, visited = start, list(entered)
    for number, one in enumerate(transfers, start=1):
        if _Memory(_takes_from_gpu(one), one.source) != at:
            return Fault(
                f"has transfer {number} ({one}) where the bytes are in {at}",
                "each transfer takes them from where they were put",
            )
        at = _Memory(_to_gpu(one), one.destination)
        visited += [at.index] if at.is_gpu else []
    if at != end:
        return Fault(f"ends in {at}", f"it ends in {end}")
    if sorted(visited) != list(gpus_of(mask)):
        return Fault(
            f"comes to GPUs {_listed(visited)}",
            f"to each of {_listed(gpus_of(mask))} once: every GPU has one way in and one out",
        )
    return None


def _listed(gpus: Sequence[int]) -> str:
    return ", ".join(map(str, gpus)) or "none"


"""All chains over the subsets of 5 GPUs are 200,000 elements."""


def read_tccl_xml(path: Path) -> Database:
    """Read and check a database file."""
    return parse_tccl_xml(path.read_text())


def parse_tccl_xml(text: str, *, where: str = "text") -> Database:
    """Read and check the text of a database."""
    root = ElementTree.fromstring(text)
    counts = {name: int(value) for name, value in root.find("metadata").attrib.items()}
    intra, inter = root.find("intra"), root.find("inter")
    database = Database(
        num_gpus=counts["num_gpus"],
        num_numa=counts["num_numa"],
        num_bits=counts["num_bits_idx"],
        intra=tuple(
            GpuRing(mask=int(part.get("gpus")), gbps=float(one.get("gbps")), transfers=_moves(one))
            for part in intra
            for one in part
        ),
        inter=tuple(
            NodeChains(
                mask=int(part.get("gpus")),
                chains=tuple(
                    NodeChain(
                        head=_crossing(one, "head"),
                        tail=_crossing(one, "tail"),
                        gbps=float(one.get("gbps")),
                        transfers=_moves(one),
                    )
                    for one in part
                ),
            )
            for part in inter
        ),
    )
    return check_database(database)


def _moves(element: ElementTree.Element) -> tuple[TypedTransfer, ...]:
    return tuple(
        TypedTransfer(one.get("type"), int(one.get("src_idx")), int(one.get("dst_idx")))
        for one in element
    )


def _crossing(element: ElementTree.Element, name: str) -> Crossing:
    ends = (int(element.get(f"{name}_{end}_idx")) for end in ("src", "dst"))
    return Crossing(element.get(f"{name}_type"), *ends)


# What the TCCL fork's runtime does with a database: the ring it makes of a job's GPUs.


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
        return (self.head.destination, *lands) if lands_in_gpu(self.head) else tuple(lands)


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
        raise SearchError(f"No ring found over GPUs {_listed_mask(mask)}: the database has none")
    return FoundRing(gbps=ring.gbps, nodes=(NodePart(mask=mask, transfers=ring.transfers),))


def _over_nodes(database: Database, masks: Sequence[int]) -> FoundRing:
    tables = _Tables(database)
    for mask in masks:
        if not tables.chains(mask):
            raise _no_ring(masks, f"there is no chain over GPUs {_listed_mask(mask)}")
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
        self.crossings = sorted(used, key=lambda one: encoded(one, database.num_bits))
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


def _listed_mask(mask: int) -> str:
    return ", ".join(map(str, gpus_of(mask)))
