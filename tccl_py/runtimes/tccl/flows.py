"""Flows as the transfers of the TCCL fork, which have a type and two indices each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tccl_py.errors import InputError
from tccl_py.runtimes.tccl.database import TransferType, TypedTransfer
from tccl_py.topology.machine import Machine
from tccl_py.transfers.hops import Hop
from tccl_py.transfers.transfer import Flow, Place, Transfer

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

    >>> from tccl_py.transfers.transfer import parse_flow
    >>> [str(one) for one in typed_transfers(parse_flow("G0->G0->C1->G4->G4"), {1: 1})]
    ['GPU_WRITE_CPUMEM_KERNEL 0 to 1', 'GPU_READ_CPUMEM_KERNEL 1 to 4']

    Args:
        flow: between memories of GPUs and of the host.
        numa: numbers of NUMA nodes, by our index.

    Raises:
        InputError: a NIC moves it, or it goes to another host.
    """
    return tuple(_typed(flow, one, numa) for one in flow.transfers)


def ring_transfers(hops: Iterable[Hop], numa: Mapping[int, int]) -> tuple[TypedTransfer, ...]:
    """The transfers of several hops, one after the other."""
    return tuple(one for hop in hops for one in typed_transfers(hop.flow, numa))


def _typed(flow: Flow, transfer: Transfer, numa: Mapping[int, int]) -> TypedTransfer:
    source, destination = transfer.source, transfer.destination
    ends = f"{source.kind}{destination.kind}"
    wanted = _TYPES.get((transfer.operation, ends, transfer.uses_copy_engine))
    if wanted is None or source.host or destination.host:
        raise InputError(
            f"flow {str(flow)[:60]!r}",
            "is none that the TCCL fork has a name for",
            "GPUs of one node write or read GPU memory, write host memory, or read it",
        )
    return TypedTransfer(wanted, _number(source, numa), _number(destination, numa))


def _number(place: Place, numa: Mapping[int, int]) -> int:
    return numa[place.index] if place.kind == "C" else place.index
