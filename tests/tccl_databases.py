"""Databases of the TCCL fork for tests: what its file says, and a small one by hand."""

import itertools

import msgspec

from tccl_py.model.rings import Hop, HopSpace, bounce, direct_read, direct_write
from tccl_py.model.transfer import Fifo

CODES = ("GPU_GPU_INTER", "GPU_CPU_INTER", "CPU_GPU_INTER", "CPU_CPU_INTER")


class TypedTransfer(msgspec.Struct, frozen=True, order=True):
    """A transfer inside a node; indices are of a GPU or, in host memory, of a NUMA node.

    `type` is as `GPU_WRITE_CPUMEM_KERNEL`: READ or WRITE, of GPUMEM or CPUMEM, by a KERNEL or a
    copy engine (MEMCPY).
    """

    type: str
    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.type} {self.source} to {self.destination}"


class Crossing(TypedTransfer, frozen=True, order=True):
    """A transfer to the next node, as `GPU_CPU_INTER` from GPU memory to host memory there."""


class GpuRing(msgspec.Struct, frozen=True, kw_only=True):
    """The ring over the GPUs of `mask` inside one node; transfers in ring order, GB/s."""

    mask: int
    gbps: float
    transfers: tuple[TypedTransfer, ...]


class NodeChain(msgspec.Struct, frozen=True, kw_only=True):
    """A chain through a node from the crossing `head` to the crossing `tail`, GB/s."""

    head: Crossing
    tail: Crossing
    gbps: float
    transfers: tuple[TypedTransfer, ...]


class NodeChains(msgspec.Struct, frozen=True, kw_only=True):
    """Chains over the GPUs of `mask`, one for each pair of head and tail."""

    mask: int
    chains: tuple[NodeChain, ...]


class Database(msgspec.Struct, frozen=True, kw_only=True):
    """All content of the fork's file; indices in crossings have `num_bits` bits."""

    num_gpus: int
    num_numa: int
    num_bits: int
    intra: tuple[GpuRing, ...] = ()
    inter: tuple[NodeChains, ...] = ()


def gpus_of(mask):
    """The GPUs of a bit mask, ascending."""
    return tuple(gpu for gpu in range(mask.bit_length()) if mask >> gpu & 1)


def leaves_gpu(crossing):
    return crossing.type.startswith("GPU_")


def lands_in_gpu(crossing):
    return crossing.type.endswith("_GPU_INTER")


def encoded(crossing, bits):
    """The fork's number of a crossing, with `bits` bits per index: 29 for GPU_CPU 3 to 1 by 2."""
    return CODES.index(crossing.type) | crossing.source << 2 | crossing.destination << (2 + bits)


def move(name, source, destination):
    """`move("write gpu", 0, 1)`, `move("read cpu", 0, 1)`; MEMCPY with `copy` before it."""
    *copy, verb, memory = name.split()
    kind = "MEMCPY" if copy else "KERNEL"
    return TypedTransfer(f"GPU_{verb.upper()}_{memory.upper()}MEM_{kind}", source, destination)


def small_database():
    """Two GPUs, two NUMA nodes: a ring, a chain over one GPU and one over both."""
    landed = Crossing("GPU_CPU_INTER", 0, 1)
    ring = (move("write cpu", 0, 1), move("read cpu", 1, 1), move("read gpu", 1, 0))
    both = (move("read cpu", 1, 1), move("copy write gpu", 1, 0))
    alone = (move("read cpu", 1, 0),)
    return Database(
        num_gpus=2,
        num_numa=2,
        num_bits=1,
        intra=(GpuRing(mask=3, gbps=12.5, transfers=ring),),
        inter=(
            NodeChains(
                mask=1, chains=(NodeChain(head=landed, tail=landed, gbps=3.0, transfers=alone),)
            ),
            NodeChains(
                mask=3, chains=(NodeChain(head=landed, tail=landed, gbps=2.0, transfers=both),)
            ),
        ),
    )


def free_hop_space(machine, knowledge, gpus, fifo_bytes=4 << 20):
    """All mechanisms between the GPUs, as the fork may use them."""
    how = {"blocks": 8, "fifo": Fifo(bytes=fifo_bytes)}

    def flows(source, target):
        if knowledge.can_access(machine, source, target):
            yield direct_write(source, target, **how)
        if knowledge.can_access(machine, target, source):
            yield direct_read(source, target, **how)
        for node in machine.numa_nodes:
            yield bounce(source, target, node.index, **how)

    order = tuple(sorted(gpus))
    hops = {
        pair: tuple(Hop(*pair, flow) for flow in flows(*pair))
        for pair in itertools.permutations(order, 2)
    }
    return HopSpace(name="tccl", gpus=order, hops=hops)
