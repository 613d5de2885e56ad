"""What the TCCL fork's runtime demands of a database, beyond what it complains about itself.

It checks little: a transfer too many overwrites its memory, a second ring of a set replaces the
first, and a chain that does not lead on stops the job with "Cannot determine unique transports".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from tccl_py.errors import InputError
from tccl_py.tccl_fork.database import (
    Crossing,
    Database,
    GpuRing,
    NodeChain,
    TypedTransfer,
    gpus_of,
)

MAX_GBPS = 1e6
TABLE_CELLS = 2**31
"""The fork counts its table's cells, 2^GPUs x 2^(2 (2 + 2 bits)), in 32 bits with a sign."""


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
            where = f"chain of gpus={part.mask} from {chain.head}, leaving by {chain.tail}"
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
    if table_cells(database.num_gpus, database.num_bits) >= TABLE_CELLS:
        return Fault(
            f"makes a table for {database.num_gpus} GPUs and indices of {database.num_bits} bits",
            "the fork counts its cells in 32 bits: 10 GPUs with 4 bits, 16 with 2",
        )
    return None


def table_cells(num_gpus: int, num_bits: int) -> int:
    """Cells of the table that the fork makes in every process: set x head x tail.

    >>> table_cells(4, 2), table_cells(8, 3)
    (65536, 16777216)
    """
    return int(2**num_gpus * 2 ** (2 * (2 + 2 * num_bits)))


def table_bytes(num_gpus: int, num_bits: int) -> int:
    """Memory that the table takes in every process of a job: cells and their transfers, bytes."""
    # A cell is a struct of 24 bytes and 2 x GPUs transfers of 12 that malloc adds 8 to.
    transfers = -(-(2 * num_gpus * 12 + 8) // 16) * 16
    return table_cells(num_gpus, num_bits) * (24 + transfers)


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
    start = _Memory(head.lands_in_gpu, head.destination)
    end = _Memory(tail.leaves_gpu, tail.source)
    entered = (head.destination,) if head.lands_in_gpu else ()
    return _way_fault(mask, chain.transfers, start, end, entered=entered)


def _crossing_faults(database: Database, head: Crossing, tail: Crossing) -> Iterator[Fault]:
    for name, one in (("head", head), ("tail", tail)):
        ends = (one.leaves_gpu, one.source), (one.lands_in_gpu, one.destination)
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
