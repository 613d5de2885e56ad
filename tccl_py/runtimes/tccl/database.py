"""The database that the TCCL fork's runtime loads: a ring and chains for every set of GPUs.

The file behind TCCL_XML_FILE as structs. A set of GPUs is a bit mask: bit i is the GPU with NVML
index i. What the fork demands of them is in `checks`; the text is `tccl_py.emitters.tccl_xml`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

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
