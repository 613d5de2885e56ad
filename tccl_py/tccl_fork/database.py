"""Database of the TCCL fork's runtime: a ring and chains for every set of GPUs, and its XML file.

The fork (NCCL 2.18) reads the file behind TCCL_XML_FILE. A set of GPUs is a bit mask; bit i is the
GPU with NVML index i. The fork checks little of its file; tests hold databases to its demands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.machine import Machine
from tccl_py.model.rings import Hop
from tccl_py.model.transfer import Flow, Transfer

TABLE_CELLS = 2**31  # The fork counts its table's cells in 32 bits with a sign
_TYPES: dict[tuple[str, str], str] = {
    ("write", "GG"): "GPU_WRITE_GPUMEM",
    ("read", "GG"): "GPU_READ_GPUMEM",
    ("write", "GC"): "GPU_WRITE_CPUMEM",
    ("read", "CG"): "GPU_READ_CPUMEM",
}


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


def mask_of(gpus: Iterable[int]) -> int:
    """Return the bit mask of a set of GPUs."""
    return sum(1 << gpu for gpu in set(gpus))


def index_bits(num_gpus: int, num_numa: int) -> int:
    """Return the bits of an index in a crossing, at least 1."""
    return max(1, (max(num_gpus, num_numa) - 1).bit_length())


def table_cells(num_gpus: int, num_bits: int) -> int:
    """Return the cells of the table that the fork makes in every process: set x head x tail."""
    return int(2**num_gpus * 2 ** (2 * (2 + 2 * num_bits)))


def table_bytes(num_gpus: int, num_bits: int) -> int:
    """Return the memory of the table in every process of a job: cells and their transfers."""
    # A cell is a struct of 24 bytes and 2 x GPUs transfers of 12 bytes; malloc adds 8.
    transfers = -(-(2 * num_gpus * 12 + 8) // 16) * 16
    return table_cells(num_gpus, num_bits) * (24 + transfers)


def numa_ids(machine: Machine) -> dict[int, int]:
    """Return the system's number of each NUMA node, for the kernel; indices where it has none."""
    ids = {node.index: node.numa_id for node in machine.numa_nodes}
    known = min(ids.values()) >= 0 and len(set(ids.values())) == len(ids)
    return ids if known else {index: index for index in ids}


def typed_transfers(flow: Flow, numa: Mapping[int, int]) -> tuple[TypedTransfer, ...]:
    """Return the transfers of one flow inside a node; a bounce is two.

    >>> from tccl_py.model.transfer import parse_flow
    >>> [str(one) for one in typed_transfers(parse_flow("G0->G0->C1->G4->G4"), {1: 1})]
    ['GPU_WRITE_CPUMEM_KERNEL 0 to 1', 'GPU_READ_CPUMEM_KERNEL 1 to 4']
    """
    return tuple(typed_transfer(transfer, numa) for transfer in flow.transfers)


def ring_transfers(hops: Iterable[Hop], numa: Mapping[int, int]) -> tuple[TypedTransfer, ...]:
    """Return the transfers of several hops, in order."""
    return tuple(moved for hop in hops for moved in typed_transfers(hop.flow, numa))


def typed_transfer(transfer: Transfer, numa: Mapping[int, int]) -> TypedTransfer:
    """Return the fork's name of one transfer; arguments and errors as `typed_transfers`."""
    source, destination = transfer.source, transfer.destination
    name = _TYPES.get((transfer.operation, f"{source.kind}{destination.kind}"))
    if name is None or source.host or destination.host:
        right = "GPUs of one node write or read GPU memory, write host memory, or read it"
        what = "is none that the TCCL fork has a name for"
        raise InputError(f"transfer {str(transfer)[:60]!r}", what, right)
    executor = "MEMCPY" if transfer.uses_copy_engine else "KERNEL"
    ends = [numa[end.index] if end.kind == "C" else end.index for end in (source, destination)]
    return TypedTransfer(f"{name}_{executor}", *ends)


def tccl_xml(database: Database, *, notes: Sequence[str] = ()) -> str:
    """Return the text of a database's file; `notes` stand in comments on top."""
    sizes = (database.num_gpus, database.num_numa, database.num_bits)
    lines = ["<root>", *(f"  <!-- {_comment(note)} -->" for note in notes)]
    lines.append('  <metadata num_gpus="{}" num_numa="{}" num_bits_idx="{}"/>'.format(*sizes))
    rings = [(ring.mask, (ring,)) for ring in database.intra]
    lines += ["  <intra>", *_subsets(rings), "  </intra>", "  <inter>"]
    lines += [*_subsets((part.mask, part.chains) for part in database.inter), "  </inter>"]
    return "\n".join([*lines, "</root>\n"])


def _subsets(parts: Iterable[tuple[int, Sequence[GpuRing | NodeChain]]]) -> Iterator[str]:
    for mask, ways in parts:
        yield f'    <subset gpus="{mask}">'
        for way in ways:
            ends = {"head_": way.head, "tail_": way.tail} if isinstance(way, NodeChain) else {}
            texts = (f" {_moved(end, name)}" for name, end in ends.items())
            # repr is the shortest text that is read as the same number.
            yield f'      <transfers gbps="{way.gbps!r}"{"".join(texts)}>'
            yield from (f"        <transfer {_moved(moved)}/>" for moved in way.transfers)
            yield "      </transfers>"
        yield "    </subset>"


def _moved(moved: TypedTransfer | Crossing, name: str = "") -> str:
    values = {"type": moved.type, "src_idx": moved.source, "dst_idx": moved.destination}
    return " ".join(f'{name}{key}="{value}"' for key, value in values.items())


def _comment(note: str) -> str:
    """Return a note as one line of a comment: two hyphens would end it for the fork's parser."""
    text = " ".join(escape(note).split())
    while "--" in text:
        text = text.replace("--", "- -")
    return "".join(part if part.isprintable() else "?" for part in text).rstrip("-")
