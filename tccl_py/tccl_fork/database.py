"""Database of the TCCL fork's runtime, made from a plan: rings and chains for sets of GPUs.

The fork (NCCL 2.18) reads the file behind TCCL_XML_FILE. A set of GPUs is a bit mask; bit i is the
GPU with NVML index i. The fork checks little of its file; tests hold databases to its demands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

import msgspec
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.machine import Machine, Nic
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.rings import Hop
from tccl_py.model.transfer import Place, Transfer, leaving, transfer_set
from tccl_py.plan.plan import Plan
from tccl_py.plan.tables import HostTable
from tccl_py.search.problem import Reporter
from tccl_py.tccl_fork.kept import kept_chains
from tccl_py.tccl_fork.search import (
    ALL_SETS_UP_TO,
    MOST_CHANNELS,
    DatabaseSearch,
    DatabaseTask,
    Export,
    Found,
    check_plan_for_fork,
    plan_channels,
    task_of,
    throughs,
)

MOST_MEMORY, MUCH_MEMORY = 1 << 34, 1 << 30  # Of the table of chains: useless, noted
_PROVEN = 1.01
_NAMED = 3  # Sets of GPUs without a ring or chain that are named
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


def typed_transfers(
    transfers: Iterable[Transfer], numa: Mapping[int, int]
) -> tuple[TypedTransfer, ...]:
    """Return the fork's names of transfers inside a node, in order.

    >>> from tccl_py.model.transfer import parse_flow
    >>> moved = parse_flow("G0->G0->C1->G4->G4").transfers
    >>> [str(one) for one in typed_transfers(moved, {1: 1})]
    ['GPU_WRITE_CPUMEM_KERNEL 0 to 1', 'GPU_READ_CPUMEM_KERNEL 1 to 4']
    """
    return tuple(_typed(transfer, numa) for transfer in transfers)


def _typed(transfer: Transfer, numa: Mapping[int, int]) -> TypedTransfer:
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


# From a plan to its database, and notes on what the file lacks.


class MadeDatabase(msgspec.Struct, frozen=True, kw_only=True):
    """A database, and notes on what it lacks of the plan or of the best possible."""

    database: Database
    notes: tuple[str, ...]
    sets_measured: int


def make_database(
    plan: Plan,
    source: BandwidthSource,
    *,
    export: Export | None = None,
    reporter: Reporter | None = None,
    tables: Sequence[HostTable] = (),
) -> MadeDatabase:
    """Search rings and chains for every set of a plan's GPUs, each hop by its fastest mechanism.

    Tables of a measured cluster give chains alone, and nothing is searched. InputError: hosts of
    several classes, unknown GPUs or NIC, indices too large for the fork, or no chain in tables.
    """
    export = export or Export()
    check_plan_for_fork(plan)
    task = task_of(plan, source, export, reporter)
    wanted = export.nic
    if tables:
        kept = kept_chains(tables, nic=wanted, wanted=export.subsets)
        wanted, task = kept.nic, replace(task, blocks=kept.blocks, fifo_bytes=kept.fifo_bytes)
    nic, count = _nic(task.machine, wanted), max(task.gpus) + 1
    numa = numa_ids(task.machine)
    bits = index_bits(count, max(numa.values()) + 1)
    # 1. Search rings, and chains where the network can be measured.
    search = DatabaseSearch(task)
    if not tables:
        search.find_rings()
    no_chains = _no_chains(task, nic, table_bytes(count, bits), known=bool(tables))
    if tables and not no_chains:
        search.chains, search.missing_chains = kept.chains, kept.missing
    elif nic is not None and not no_chains:
        search.find_chains(nic)
    elif table_bytes(count, bits) > MUCH_MEMORY:
        # No crossing is encoded then: indices of one bit keep the fork's table small.
        bits = 1
    # 2. Write both in the fork's terms.
    intra = [
        GpuRing(
            mask=mask_of(gpus),
            gbps=_gbps(found.rate_gbps),
            transfers=typed_transfers(_moves(found.ring.hops), numa),
        )
        for gpus, found in search.rings.items()
    ]
    database = Database(
        num_gpus=count,
        num_numa=max(numa.values()) + 1,
        num_bits=bits,
        intra=tuple(sorted(intra, key=lambda entry: entry.mask)),
        inter=tuple(sorted(_inter(search, numa), key=lambda entry: entry.mask)),
    )
    memory = table_bytes(count, bits)
    notes = tuple(
        _notes(plan, task, search, nic=nic, no_chains=no_chains, memory=memory, kept=bool(tables))
    )
    return MadeDatabase(database=database, notes=notes, sets_measured=task.source.sets_measured)


def _nic(machine: Machine, wanted: int | None) -> Nic | None:
    if wanted is not None:
        found = {nic.index: nic for nic in machine.nics}
        if wanted not in found:
            right = f"it has {', '.join(map(str, found)) or 'none'}"
            raise InputError(f"NIC {wanted}", f"is not in machine {machine.name}", right)
        return found[wanted]
    return max(machine.nics, key=lambda nic: (nic.speed_mbps, nic.gdr, -nic.index), default=None)


def _no_chains(task: DatabaseTask, nic: Nic | None, memory: int, *, known: bool) -> str:
    """Return why there are no chains; `known` chains need no measurement."""
    if nic is None:
        return f"{task.machine.name} has no NIC"
    if memory > MOST_MEMORY:
        return f"for GPU indices up to {max(task.gpus)} the fork's table of chains is too large"
    if known:
        return ""
    first = task.gpus[0]
    through = throughs(task, nic, first)[0]
    way_out = leaving(first, nic.index, through=through, blocks=task.blocks)
    try:
        task.source.measure([transfer_set([way_out])])
    except MeasurementError as error:
        return f"flows over the network cannot be measured here ({error})"
    return ""


def _inter(search: DatabaseSearch, numa: Mapping[int, int]) -> Iterator[NodeChains]:
    """Yield every chain with each landing on other nodes, which are as those here."""
    ends = [found.landings for found in search.chains.values()]
    entries, exits = sorted({into for into, _ in ends}), sorted({out for _, out in ends})
    for gpus, found in search.chains.items():
        lands, leaves = found.landings
        chains = [
            NodeChain(
                head=_crossing(before, lands, numa),
                tail=_crossing(leaves, behind, numa),
                gbps=_gbps(found.rate_gbps),
                transfers=_chain_transfers(found, numa),
            )
            for before in exits
            for behind in entries
        ]
        yield NodeChains(mask=mask_of(gpus), chains=tuple(chains))


def _gbps(rate: float) -> float:
    return float(f"{rate:.6g}")


def _crossing(leaves: Place, lands: Place, numa: Mapping[int, int]) -> Crossing:
    places = (leaves, lands)
    numbers = (numa[place.index] if place.kind == "C" else place.index for place in places)
    kinds = ("CPU" if place.kind == "C" else "GPU" for place in places)
    return Crossing(f"{'_'.join(kinds)}_INTER", *numbers)


def _chain_transfers(found: Found, numa: Mapping[int, int]) -> tuple[TypedTransfer, ...]:
    first, *hops, last = found.ring.hops
    into, out = first.flow.transfers[1:], last.flow.transfers[:-1]
    return typed_transfers((*into, *_moves(hops), *out), numa)


def _moves(hops: Iterable[Hop]) -> Iterator[Transfer]:
    return (transfer for hop in hops for transfer in hop.flow.transfers)


def _notes(
    plan: Plan,
    task: DatabaseTask,
    search: DatabaseSearch,
    *,
    nic: Nic | None,
    no_chains: str,
    memory: int,
    kept: bool,
) -> Iterator[str]:
    """Yield notes for the user and the file's readers, most important first."""
    done = plan.provenance.partition(" ")[0].removesuffix(",")
    yield (
        f"rates {plan.provenance}, {task.source.sets_measured} sets {done} for this file; "
        f"run it with NCCL_ALGO=TCCL,RING NCCL_MIN_NCHANNELS={task.blocks} "
        f"NCCL_MAX_NCHANNELS={task.blocks} NCCL_BUFFSIZE={task.fifo_bytes}"
    )
    whole = search.rings.get(task.gpus)
    if whole is not None and (plan.ring_count > 1 or task.blocks < plan_channels(plan)):
        yield (
            f"the plan's {plan.rate_gbps:.2f} GB/s are those of {plan.ring_count} rings and "
            f"{plan_channels(plan)} channels; the fork has one ring and room for {MOST_CHANNELS} "
            f"channels: the ring here has {whole.rate_gbps:.2f}"
        )
    total = 2 ** len(task.gpus) - len(task.gpus) - 1
    left_out = total - len(search.rings) - len(search.missing_rings)
    if kept:
        yield (
            "chains are those of the plan's tables, by NCCL's mechanisms; there are no rings "
            "inside a node, and a job of one node fails: export the plan of one host for it"
        )
    elif left_out:
        few = len(task.gpus) <= ALL_SETS_UP_TO
        why = "as requested" if few else f"above {ALL_SETS_UP_TO} GPUs only requested sets are in"
        yield (
            f"{left_out} of the {total} sets of GPUs that jobs can have are left out, "
            f"{why}: a job over such a set fails"
        )
    if no_chains:
        yield f"{no_chains}: there are no chains, and a job of several nodes fails"
    elif nic is not None and len(task.machine.nics) > 1:
        yield f"the fork's database knows one NIC a node: run it with NCCL_IB_HCA={nic.name}"
    for kind, missing in (("ring", search.missing_rings), ("chain", search.missing_chains)):
        for gpus, why in list(missing.items())[:_NAMED]:
            yield f"no {kind} over GPUs {', '.join(map(str, gpus))}, and a job fails there: {why}"
        if len(missing) > _NAMED:
            yield f"no {kind} over {len(missing) - _NAMED} more sets of GPUs"
    for kind, all_ in (("rings", search.rings), ("chains", search.chains)):
        if not kept:
            yield from _unproven(kind, list(all_.values()))
    if memory > MUCH_MEMORY:
        yield (
            f"the fork's runtime takes {memory / 2**30:.1f} GiB in every process for its table "
            "of chains"
        )


def _unproven(kind: str, found: Sequence[Found]) -> Iterator[str]:
    shares = [one.rate_gbps / one.bound_gbps for one in found if one.bound_gbps is not None]
    low = [share for share in shares if share * _PROVEN * (1 + 1e-9) < 1]
    if low:
        yield (
            f"{len(low)} of {len(found)} {kind} are not proven best; each has at least "
            f"{100 * min(low):.0f} % of the bound"
        )
    if len(shares) < len(found):
        yield (
            f"{len(found) - len(shares)} of {len(found)} {kind} have no bound: the sets that may "
            "be measured were used up"
        )
