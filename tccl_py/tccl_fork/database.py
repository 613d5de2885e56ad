"""The database that the TCCL fork's runtime loads: a ring and chains for every set of GPUs.

The file behind TCCL_XML_FILE as structs. A set of GPUs is a bit mask: bit i is the GPU with NVML
index i. What the fork demands of them is in `checks`; the text is `tccl_py.tccl_fork.xml`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.errors import InputError, SearchError
from tccl_py.model.machine import Machine
from tccl_py.model.rings import Hop
from tccl_py.model.transfer import Flow, Place, Transfer

TransferType = Literal[
    "GPU_WRITE_GPUMEM_KERNEL",
    "GPU_READ_GPUMEM_KERNEL",
    "GPU_WRITE_CPUMEM_KERNEL",
    "GPU_READ_CPUMEM_KERNEL",
    "GPU_WRITE_GPUMEM_MEMCPY",
    "GPU_READ_GPUMEM_MEMCPY",
    "GPU_WRITE_CPUMEM_MEMCPY",
    "GPU_READ_CPUMEM_MEMCPY",
]
"""Who moves bytes into whose memory; `KERNEL` by its SMs, `MEMCPY` by its copy engine."""
CrossingType = Literal["GPU_GPU_INTER", "GPU_CPU_INTER", "CPU_GPU_INTER", "CPU_CPU_INTER"]
"""Memory that a crossing between nodes leaves, and memory that it lands in."""

CROSSING_CODES: dict[CrossingType, int] = {
    "GPU_GPU_INTER": 0,
    "GPU_CPU_INTER": 1,
    "CPU_GPU_INTER": 2,
    "CPU_CPU_INTER": 3,
}


class TypedTransfer(msgspec.Struct, frozen=True, order=True):
    """Bytes moving inside a node; indices are a GPU's or, of CPUMEM's far end, a NUMA node's."""

    type: TransferType
    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.type} {self.source} to {self.destination}"


class Crossing(msgspec.Struct, frozen=True, order=True):
    """Bytes moving to the next node: `source` on the sending one, `destination` on the other."""

    type: CrossingType
    source: int
    destination: int

    @property
    def leaves_gpu(self) -> bool:
        """Whether the NIC takes the bytes out of a GPU's memory, not the host's."""
        return self.type.startswith("GPU_")

    @property
    def lands_in_gpu(self) -> bool:
        """Whether the NIC puts the bytes into a GPU's memory, not the host's."""
        return self.type.endswith("_GPU_INTER")

    def encoded(self, bits: int) -> int:
        """The number by which the fork knows it, where indices have `bits` bits.

        >>> Crossing("GPU_CPU_INTER", 3, 1).encoded(2)
        29
        """
        return CROSSING_CODES[self.type] | self.source << 2 | self.destination << (2 + bits)

    def __str__(self) -> str:
        return f"{self.type} {self.source} to {self.destination}"


class GpuRing(msgspec.Struct, frozen=True, kw_only=True):
    """The ring over the GPUs of `mask` where they are one node; transfers in ring order, GB/s."""

    mask: int
    gbps: float
    transfers: tuple[TypedTransfer, ...]


class NodeChain(msgspec.Struct, frozen=True, kw_only=True):
    """The way through a node from the crossing `head` to the crossing `tail`, GB/s."""

    head: Crossing
    tail: Crossing
    gbps: float
    transfers: tuple[TypedTransfer, ...]


class NodeChains(msgspec.Struct, frozen=True, kw_only=True):
    """Chains over the GPUs of `mask`, one for each pair of head and tail."""

    mask: int
    chains: tuple[NodeChain, ...]


class Database(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the fork's runtime reads; indices in crossings have `num_bits` bits."""

    num_gpus: int
    num_numa: int
    num_bits: int
    intra: tuple[GpuRing, ...] = ()
    inter: tuple[NodeChains, ...] = ()


def mask_of(gpus: Iterable[int]) -> int:
    """The bit mask of a set of GPUs.

    >>> mask_of((0, 2, 5))
    37
    """
    mask = 0
    for gpu in gpus:
        mask |= 1 << gpu
    return mask


def gpus_of(mask: int) -> tuple[int, ...]:
    """The GPUs of a bit mask, ascending.

    >>> gpus_of(37)
    (0, 2, 5)
    """
    return tuple(gpu for gpu in range(mask.bit_length()) if mask >> gpu & 1)


def index_bits(num_gpus: int, num_numa: int) -> int:
    """Bits of an index in a crossing: ceil(log2(max(num_gpus, num_numa))), at least 1.

    >>> index_bits(4, 2), index_bits(1, 1), index_bits(5, 8)
    (2, 1, 3)
    """
    return max(1, (max(num_gpus, num_numa) - 1).bit_length())


def crossing(*, leaves_gpu: bool, source: int, lands_in_gpu: bool, destination: int) -> Crossing:
    """The crossing from one memory to another."""
    types: dict[tuple[bool, bool], CrossingType] = {
        (True, True): "GPU_GPU_INTER",
        (True, False): "GPU_CPU_INTER",
        (False, True): "CPU_GPU_INTER",
        (False, False): "CPU_CPU_INTER",
    }
    return Crossing(types[leaves_gpu, lands_in_gpu], source, destination)


# Flows as the transfers of the TCCL fork, which have a type and two indices each.


_TYPES: dict[tuple[str, str, bool], TransferType] = {
    ("write", "GG", False): "GPU_WRITE_GPUMEM_KERNEL",
    ("read", "GG", False): "GPU_READ_GPUMEM_KERNEL",
    ("write", "GC", False): "GPU_WRITE_CPUMEM_KERNEL",
    ("read", "CG", False): "GPU_READ_CPUMEM_KERNEL",
    ("write", "GG", True): "GPU_WRITE_GPUMEM_MEMCPY",
    ("read", "GG", True): "GPU_READ_GPUMEM_MEMCPY",
    ("write", "GC", True): "GPU_WRITE_CPUMEM_MEMCPY",
    ("read", "CG", True): "GPU_READ_CPUMEM_MEMCPY",
}


def numa_ids(machine: Machine) -> dict[int, int]:
    """What the system calls each NUMA node, by our index: the fork hands it to the kernel.

    Our indices stand where the system has no number for each, as in virtual machines.
    """
    ids = {node.index: node.numa_id for node in machine.numa_nodes}
    told = min(ids.values()) >= 0 and len(set(ids.values())) == len(ids)
    return ids if told else {index: index for index in ids}


def typed_transfers(flow: Flow, numa: Mapping[int, int]) -> tuple[TypedTransfer, ...]:
    """The transfers of one flow inside a node; a bounce is two.

    >>> from tccl_py.model.transfer import parse_flow
    >>> [str(one) for one in typed_transfers(parse_flow("G0->G0->C1->G4->G4"), {1: 1})]
    ['GPU_WRITE_CPUMEM_KERNEL 0 to 1', 'GPU_READ_CPUMEM_KERNEL 1 to 4']

    Args:
        flow: between memories of GPUs and of the host.
        numa: numbers of NUMA nodes, by our index.

    Raises:
        InputError: a NIC moves it, or it goes to another host.
    """
    return tuple(typed_transfer(one, numa) for one in flow.transfers)


def ring_transfers(hops: Iterable[Hop], numa: Mapping[int, int]) -> tuple[TypedTransfer, ...]:
    """The transfers of several hops, one after the other."""
    return tuple(one for hop in hops for one in typed_transfers(hop.flow, numa))


def typed_transfer(transfer: Transfer, numa: Mapping[int, int]) -> TypedTransfer:
    """Return the fork's name of one transfer; arguments and errors as `typed_transfers`."""
    source, destination = transfer.source, transfer.destination
    ends = f"{source.kind}{destination.kind}"
    wanted = _TYPES.get((transfer.operation, ends, transfer.uses_copy_engine))
    if wanted is None or source.host or destination.host:
        raise InputError(
            f"transfer {str(transfer)[:60]!r}",
            "is none that the TCCL fork has a name for",
            "GPUs of one node write or read GPU memory, write host memory, or read it",
        )
    return TypedTransfer(wanted, _number(source, numa), _number(destination, numa))


def _number(place: Place, numa: Mapping[int, int]) -> int:
    return numa[place.index] if place.kind == "C" else place.index


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
